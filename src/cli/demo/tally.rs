//! The checker: fed with what was committed and what arrived, it answers which guarantee held.
//!
//! Pure: no I/O, no clock of its own. Commits and arrivals may come in any order, since an event can
//! reach the consumer before its writer hears that the COMMIT succeeded.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use crate::event::AggregateKey;

/// One delivery, as the consumer saw it.
#[derive(Clone, Debug)]
pub(super) struct Arrival {
    /// The message id: the outbox id.
    pub(super) id: i64,
    /// From the headers.
    pub(super) key: AggregateKey,
    /// Does the body say that its transaction was rolled back?
    pub(super) rolled_back: bool,
    pub(super) at: Instant,
}

/// Everything seen so far.
#[derive(Debug, Default)]
pub(super) struct Tally {
    committed: HashMap<i64, Instant>,
    arrived: HashMap<i64, Instant>,
    /// Ids whose body carried the mark of a rolled back transaction.
    marked: HashSet<i64>,
    highest: HashMap<AggregateKey, i64>,
    last_arrival: Option<Instant>,
    delivered: u64,
    repeats: u64,
    order_violations: u64,
}

/// The judgement.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Verdict {
    pub(super) committed: u64,
    /// Committed events that arrived at least once.
    pub(super) delivered: u64,
    /// Committed events that did not arrive.
    pub(super) lost: u64,
    /// Deliveries of a message id seen before.
    pub(super) repeats: u64,
    /// Events that arrived, for the first time, after a later one of their aggregate.
    pub(super) order_violations: u64,
    /// Events that arrived although they were never committed.
    pub(super) rolled_back_seen: u64,
    /// From COMMIT's answer to the first arrival: the 50th and 99th percentile.
    pub(super) latency: Option<(Duration, Duration)>,
    /// From the first commit to the last first arrival.
    pub(super) took: Duration,
}

impl Verdict {
    pub(super) fn is_clean(&self) -> bool {
        self.lost == 0 && self.order_violations == 0 && self.rolled_back_seen == 0
    }

    pub(super) fn events_per_second(&self) -> f64 {
        // A single event can arrive before its commit is known: no time at all would be infinite speed.
        self.committed as f64 / self.took.max(Duration::from_millis(1)).as_secs_f64()
    }
}

impl Tally {
    pub(super) fn committed(&mut self, ids: &[i64], at: Instant) {
        for &id in ids {
            self.committed.insert(id, at);
            self.delivered += u64::from(self.arrived.contains_key(&id));
        }
    }

    pub(super) fn arrived(&mut self, arrival: Arrival) {
        if arrival.rolled_back {
            self.marked.insert(arrival.id);
        }
        if self.arrived.contains_key(&arrival.id) {
            // A consumer drops it by its id, so its place in the order does not matter.
            self.repeats += 1;
            return;
        }
        self.arrived.insert(arrival.id, arrival.at);
        self.last_arrival = Some(arrival.at);
        self.delivered += u64::from(self.committed.contains_key(&arrival.id));
        let highest = self.highest.entry(arrival.key).or_insert(arrival.id);
        if arrival.id < *highest {
            self.order_violations += 1;
        } else {
            *highest = arrival.id;
        }
    }

    pub(super) fn committed_count(&self) -> u64 {
        self.committed.len() as u64
    }

    /// Committed events that have arrived.
    pub(super) fn delivered_count(&self) -> u64 {
        self.delivered
    }

    pub(super) fn repeats(&self) -> u64 {
        self.repeats
    }

    /// The judgement, once nothing more is to come.
    pub(super) fn verdict(&self) -> Verdict {
        let seen = |id: &&i64| !self.committed.contains_key(id) || self.marked.contains(id);
        let first_commit = self.committed.values().min();
        Verdict {
            committed: self.committed_count(),
            delivered: self.delivered,
            lost: self.committed_count() - self.delivered,
            repeats: self.repeats,
            order_violations: self.order_violations,
            rolled_back_seen: self.arrived.keys().filter(seen).count() as u64,
            latency: self.latency(),
            took: first_commit
                .zip(self.last_arrival)
                .map_or(Duration::ZERO, |(first, last)| {
                    last.saturating_duration_since(*first)
                }),
        }
    }

    fn latency(&self) -> Option<(Duration, Duration)> {
        let waits = self.committed.iter().filter_map(|(id, committed)| {
            let arrived = self.arrived.get(id)?;
            Some(arrived.saturating_duration_since(*committed))
        });
        let mut waits: Vec<Duration> = waits.collect();
        waits.sort_unstable();
        Some((percentile(&waits, 50)?, percentile(&waits, 99)?))
    }
}

/// By nearest rank, of a sorted list.
fn percentile(sorted: &[Duration], percent: usize) -> Option<Duration> {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Scene {
        tally: Tally,
        start: Instant,
    }

    impl Scene {
        fn new() -> Self {
            Self {
                tally: Tally::default(),
                start: Instant::now(),
            }
        }

        fn at(&self, ms: u64) -> Instant {
            self.start + Duration::from_millis(ms)
        }

        fn commit(&mut self, ids: &[i64], ms: u64) {
            let at = self.at(ms);
            self.tally.committed(ids, at);
        }

        fn arrive(&mut self, id: i64, aggregate: (&str, &str), ms: u64) {
            let at = self.at(ms);
            let key = AggregateKey::new(aggregate.0, aggregate.1);
            self.tally.arrived(Arrival {
                id,
                key,
                rolled_back: false,
                at,
            });
        }
    }

    const A: (&str, &str) = ("order", "1");
    const B: (&str, &str) = ("order", "2");

    #[test]
    fn everything_once_and_in_order_is_clean() {
        let mut scene = Scene::new();
        scene.commit(&[1, 2], 0);
        scene.arrive(2, B, 5);
        scene.arrive(1, A, 10);
        let verdict = scene.tally.verdict();
        assert!(
            verdict.is_clean(),
            "no order between aggregates: {verdict:?}"
        );
        assert_eq!(
            (verdict.committed, verdict.delivered, verdict.lost),
            (2, 2, 0)
        );
        assert_eq!(verdict.took, Duration::from_millis(10));
        assert_eq!(verdict.events_per_second(), 200.0);
    }

    #[test]
    fn what_does_not_arrive_is_lost() {
        let mut scene = Scene::new();
        scene.commit(&[1, 2, 3], 0);
        scene.arrive(2, A, 1);
        let verdict = scene.tally.verdict();
        assert_eq!((verdict.delivered, verdict.lost), (1, 2));
        assert!(!verdict.is_clean());
    }

    #[test]
    fn nothing_delivered_has_no_latency() {
        let mut scene = Scene::new();
        scene.commit(&[1], 0);
        let verdict = scene.tally.verdict();
        assert_eq!(
            (verdict.lost, verdict.latency, verdict.took),
            (1, None, Duration::ZERO)
        );
    }

    #[test]
    fn a_later_event_that_comes_first_is_a_violation_within_its_aggregate() {
        let mut scene = Scene::new();
        scene.commit(&[1, 2, 3], 0);
        scene.arrive(2, A, 1);
        scene.arrive(3, A, 2);
        scene.arrive(1, A, 3);
        let verdict = scene.tally.verdict();
        assert_eq!((verdict.order_violations, verdict.lost), (1, 0));
        assert!(!verdict.is_clean());
    }

    #[test]
    fn aggregates_are_pairs() {
        let mut scene = Scene::new();
        scene.commit(&[1, 2], 0);
        scene.arrive(2, ("a", "b.c"), 1);
        scene.arrive(1, ("a.b", "c"), 2);
        assert!(scene.tally.verdict().is_clean());
    }

    #[test]
    fn repeats_are_counted_and_change_nothing_else() {
        let mut scene = Scene::new();
        scene.commit(&[1, 2], 0);
        for (ms, id) in [(1, 1), (2, 2), (30, 1), (40, 2)] {
            scene.arrive(id, A, ms);
        }
        let verdict = scene.tally.verdict();
        assert!(verdict.is_clean());
        assert_eq!((verdict.repeats, verdict.delivered), (2, 2));
        assert_eq!(verdict.took, Duration::from_millis(2));
    }

    #[test]
    fn an_event_that_was_never_committed_is_seen_once_however_often_it_arrives() {
        let mut scene = Scene::new();
        scene.commit(&[1], 0);
        scene.arrive(1, A, 1);
        scene.arrive(9, B, 2);
        scene.arrive(9, B, 3);
        let verdict = scene.tally.verdict();
        assert_eq!(
            (verdict.rolled_back_seen, verdict.delivered, verdict.lost),
            (1, 1, 0)
        );
        assert!(!verdict.is_clean());
    }

    #[test]
    fn the_mark_in_the_body_counts_too() {
        let mut scene = Scene::new();
        scene.commit(&[1], 0);
        let at = scene.at(1);
        scene.tally.arrived(Arrival {
            id: 1,
            key: AggregateKey::new("a", "1"),
            rolled_back: true,
            at,
        });
        assert_eq!(scene.tally.verdict().rolled_back_seen, 1);
    }

    #[test]
    fn an_arrival_before_its_commit_is_known_counts_and_took_no_time() {
        let mut scene = Scene::new();
        scene.arrive(1, A, 3);
        assert_eq!(scene.tally.delivered_count(), 0);
        scene.commit(&[1], 5);
        assert_eq!(scene.tally.delivered_count(), 1);
        let verdict = scene.tally.verdict();
        assert!(verdict.is_clean());
        assert_eq!(verdict.latency, Some((Duration::ZERO, Duration::ZERO)));
        assert!(verdict.events_per_second().is_finite());
    }

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let waits: Vec<_> = (1..=200).map(Duration::from_millis).collect();
        assert_eq!(percentile(&waits, 50), Some(Duration::from_millis(100)));
        assert_eq!(percentile(&waits, 99), Some(Duration::from_millis(198)));
        assert_eq!(percentile(&waits[..1], 99), Some(Duration::from_millis(1)));
        assert_eq!(percentile(&[], 99), None);
    }
}
