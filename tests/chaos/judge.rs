//! Decides, at the end, what of the guarantees held: pure, fed with arrivals, faults and the final table.
//!
//! - Lost: committed, not discarded, and never arrived; or told as committed and gone from the table.
//! - Order: per aggregate, after dropping repeats, by id. Of a discarded event nobody can say whether it
//!   left, nor is its place promised: it is left out.
//! - Altered: a repeat whose body, routing key or properties differ from the first copy's (but for the attempt and the
//!   sender), or a body that is not `payload::text`.
//! - Foreign repeats: no fault that may cause one befell either sender of the two copies, or the servers of
//!   all, from shortly before the first copy's arrival to the second's. Copies which the broker itself
//!   delivered again, since the consumer's acknowledgement was lost, are no relay's repeats.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use crate::support::{Arrival, Ledger};

/// How long after its end a fault may still make a relay repeat itself: the lease, within which what was in hand is
/// dropped or taken over.
pub const AFTERMATH: Duration = Duration::from_secs(5);

/// One delivery.
pub struct Seen {
    pub arrival: Arrival,
    /// The relay that sent it, by its place.
    pub sender: usize,
    /// Of everything that must be the same in a repeat.
    pub fingerprint: u64,
    pub redelivered: bool,
}

/// When something was wrong.
#[derive(Clone, Debug)]
pub struct Window {
    pub what: String,
    /// None: all of them.
    pub relay: Option<usize>,
    pub repeats: bool,
    pub from: Instant,
    /// None: not over.
    pub until: Option<Instant>,
}

impl Window {
    /// May it be why these relays sent an event twice, from the one arrival to the other?
    fn explains(&self, senders: [usize; 2], first: Instant, second: Instant) -> bool {
        self.repeats
            && self.relay.is_none_or(|relay| senders.contains(&relay))
            && self.from <= second
            && self.until.is_none_or(|until| until + AFTERMATH >= first)
    }
}

/// An event at the end.
pub struct Row {
    pub status: String,
    pub payload: String,
}

/// Ids, for those who look for the cause.
#[derive(Debug, Default)]
pub struct Verdict {
    pub lost: Vec<i64>,
    pub order: Vec<(i64, i64)>,
    pub altered: Vec<i64>,
    pub never_committed: Vec<i64>,
    pub foreign: Vec<String>,
    pub stranded: Vec<i64>,
    pub repeats: usize,
    pub redelivered: usize,
}

impl Verdict {
    pub fn is_clean(&self) -> bool {
        self.lost.is_empty()
            && self.order.is_empty()
            && self.altered.is_empty()
            && self.never_committed.is_empty()
            && self.foreign.is_empty()
            && self.stranded.is_empty()
    }
}

/// `told` are the ids of which a writer heard that their transaction has committed.
pub fn judge(
    seen: &[Seen],
    windows: &[Window],
    table: &HashMap<i64, Row>,
    told: &HashSet<i64>,
) -> Verdict {
    let mut verdict = Verdict::default();
    let mut ledger = Ledger::default();
    let mut first: HashMap<i64, &Seen> = HashMap::new();
    for next in seen {
        let id = next.arrival.id;
        let status = table.get(&id).map(|row| row.status.as_str());
        if status != Some("discarded") {
            ledger.take(&next.arrival);
        }
        let Some(earlier) = first.get(&id) else {
            if table
                .get(&id)
                .is_some_and(|row| row.payload.as_bytes() != next.arrival.body)
            {
                verdict.altered.push(id);
            }
            first.insert(id, next);
            continue;
        };
        if earlier.fingerprint != next.fingerprint {
            verdict.altered.push(id);
        }
        if next.redelivered {
            verdict.redelivered += 1;
            continue;
        }
        verdict.repeats += 1;
        let (from, until) = (earlier.arrival.at, next.arrival.at);
        let senders = [earlier.sender, next.sender];
        let explained = windows
            .iter()
            .any(|window| window.explains(senders, from, until));
        if !explained {
            let apart = until.duration_since(from);
            verdict
                .foreign
                .push(format!("{id} by relays {senders:?}, {apart:?} apart"));
        }
    }
    let owed: Vec<i64> = table
        .iter()
        .filter(|(_, row)| row.status == "published")
        .map(|(id, _)| *id)
        .collect();
    verdict.lost = ledger.difference(&owed).0;
    verdict
        .lost
        .extend(told.iter().filter(|id| !table.contains_key(id)));
    verdict.never_committed = first
        .keys()
        .filter(|id| !table.contains_key(id) && !told.contains(id))
        .copied()
        .collect();
    verdict.stranded = table
        .iter()
        .filter(|(_, row)| row.status == "pending" || row.status == "dead")
        .map(|(id, _)| *id)
        .collect();
    verdict.order = ledger.order_violations;
    verdict
}

/// By nearest rank; None of nothing.
pub fn percentile(values: &[Duration], percent: usize) -> Option<Duration> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Story {
        began: Instant,
        seen: Vec<Seen>,
        windows: Vec<Window>,
        table: HashMap<i64, Row>,
        told: HashSet<i64>,
    }

    impl Story {
        /// Events 1, 2 and 3 of one aggregate, published by relay 0.
        fn plain() -> Self {
            let mut story = Self {
                began: Instant::now(),
                seen: Vec::new(),
                windows: Vec::new(),
                table: HashMap::new(),
                told: HashSet::new(),
            };
            for id in 1..=3 {
                story.told.insert(id);
                story.status(id, "published");
            }
            story
        }

        fn status(&mut self, id: i64, status: &str) {
            let row = Row {
                status: status.to_owned(),
                payload: format!("{{\"n\": {id}}}"),
            };
            self.table.insert(id, row);
        }

        fn arrive(&mut self, id: i64, sender: usize, seconds: u64) -> &mut Seen {
            self.seen.push(Seen {
                arrival: Arrival {
                    id,
                    aggregate: ("a".to_owned(), "1".to_owned()),
                    body: format!("{{\"n\": {id}}}").into_bytes(),
                    exchange: String::new(),
                    routing_key: String::new(),
                    properties: Default::default(),
                    at: self.began + Duration::from_secs(seconds),
                },
                sender,
                fingerprint: id.unsigned_abs(),
                redelivered: false,
            });
            self.seen.last_mut().unwrap()
        }

        fn fault(&mut self, relay: Option<usize>, repeats: bool, from: u64, until: u64) {
            self.windows.push(Window {
                what: "fault".to_owned(),
                relay,
                repeats,
                from: self.began + Duration::from_secs(from),
                until: Some(self.began + Duration::from_secs(until)),
            });
        }

        fn judge(&self) -> Verdict {
            judge(&self.seen, &self.windows, &self.table, &self.told)
        }
    }

    fn arrived() -> Story {
        let mut story = Story::plain();
        for id in 1..=3 {
            story.arrive(id, 0, 20);
        }
        story
    }

    #[test]
    fn what_arrived_in_order_is_clean() {
        assert!(arrived().judge().is_clean());
    }

    #[test]
    fn what_did_not_arrive_is_lost_unless_it_was_discarded() {
        let mut story = Story::plain();
        story.arrive(1, 0, 1);
        story.arrive(3, 0, 1);
        assert_eq!(story.judge().lost, [2]);
        story.status(2, "discarded");
        assert!(story.judge().is_clean());
        story.table.remove(&2);
        assert_eq!(story.judge().lost, [2], "told as committed, and gone");
    }

    #[test]
    fn a_swap_is_an_order_violation() {
        let mut story = Story::plain();
        for id in [2, 1, 3] {
            story.arrive(id, 0, 1);
        }
        assert_eq!(story.judge().order, [(2, 1)]);
    }

    #[test]
    fn what_was_rolled_back_and_arrived_is_found() {
        let mut story = arrived();
        story.arrive(4, 0, 30);
        assert_eq!(story.judge().never_committed, [4]);
    }

    #[test]
    fn a_changed_body_or_a_changed_repeat_is_found() {
        let mut story = arrived();
        story.arrive(3, 0, 20).fingerprint = 99;
        story.fault(None, true, 19, 21);
        assert_eq!(story.judge().altered, [3]);
        let mut story = arrived();
        story.seen[1].arrival.body = b"{}".to_vec();
        assert_eq!(story.judge().altered, [2]);
    }

    #[test]
    fn what_is_left_is_stranded() {
        for status in ["pending", "dead"] {
            let mut story = arrived();
            story.status(3, status);
            assert_eq!(story.judge().stranded, [3]);
        }
    }

    #[test]
    fn a_repeat_is_foreign_unless_a_fault_of_its_senders_or_of_all_is_near() {
        let repeated = |relay, repeats, from, until| {
            let mut story = arrived();
            story.arrive(3, 1, 25);
            story.fault(relay, repeats, from, until);
            story.judge().foreign.len()
        };
        assert_eq!(repeated(Some(0), true, 19, 21), 0);
        assert_eq!(repeated(Some(1), true, 24, 40), 0);
        assert_eq!(repeated(None, true, 10, 16), 0);
        assert_eq!(repeated(Some(2), true, 19, 21), 1, "another relay's");
        assert_eq!(
            repeated(None, false, 19, 21),
            1,
            "of a kind that repeats nothing"
        );
        assert_eq!(repeated(None, true, 10, 14), 1, "long over");
        assert_eq!(repeated(None, true, 26, 30), 1, "later");
    }

    #[test]
    fn what_the_broker_delivers_again_is_no_repeat_of_a_relay() {
        let mut story = arrived();
        story.arrive(3, 0, 25).redelivered = true;
        let verdict = story.judge();
        assert!(verdict.is_clean());
        assert_eq!((verdict.repeats, verdict.redelivered), (0, 1));
    }
}
