//! The doorbell: when this relay looks by itself, so that writers need not ring, and what it owes
//! before it may sleep. The protocol and why nothing is missed by it is written in [`super`].
//!
//! A plain value: no I/O, no clock of its own, no actix.
//!
//! Invariants:
//! - While writers may have been kept from ringing, there is a next look, and it is soon.
//! - It sleeps only after a look that saw all rows of all writers that may not have rung.

use std::time::{Duration, Instant};

/// For how long a push keeps writers from ringing. Whatever happens to us, they ring again after it.
pub const AWAKE: Duration = Duration::from_secs(1);
/// How long after a push the next one follows. On an overloaded machine a claim before it may take a third of a second,
/// and the push itself as long: that is when writers can least bear to ring.
const PUSH_PACE: Duration = Duration::from_millis(250);
/// So many events in a [`WINDOW`] make it worth to spare writers the ring: at fewer, being rung is
/// cheaper for all, and sooner.
const BUSY_ROWS: usize = 50;
const WINDOW: Duration = Duration::from_millis(50);
/// At this rate, a tenth of the former, the ring may already be what holds the writers up: then it shows in
/// how many of them are under way at the same time.
const CROWD_ROWS: usize = BUSY_ROWS / 10;
/// So many writers at the same time wait for each other's rings.
const CROWD: usize = 4;
/// Between looks while we are busy and there was nothing more, up to [`PACE_RATE`] events a second. The more there
/// are beyond that, the longer we wait: looks cost the database about as much as the rows that they find, and at
/// such rates it has to serve many writers.
const PACE: Duration = Duration::from_millis(5);
const PACE_RATE: f64 = 500.0;
const LONGEST_PACE: Duration = Duration::from_millis(40);
/// Between looks while a peer keeps writers from ringing.
const PEER_PACE: Duration = Duration::from_millis(25);
/// Between looks whether writers have ended: first and longest.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What to do now that all that can be seen was claimed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Walk all buckets again.
    Look,
    /// Have writers ring again if `ours` (it was us who kept them from it), then list those that may
    /// not have rung. Answered by [`Doorbell::listed`].
    List {
        /// We kept them from ringing.
        ours: bool,
    },
    /// Which of these have not ended yet? Answered by [`Doorbell::checked`].
    Check(Vec<String>),
    /// How many writers are under way? Answered by [`Doorbell::counted`].
    Count,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// Whoever commits has rung, or will.
    Asleep,
    /// Writers may be kept from ringing, as far as known until this moment.
    Awake { until: Instant },
    /// They ring again; these were under way and may not have rung.
    Listed {
        writers: Vec<String>,
        check_at: Instant,
        pause: Duration,
    },
}

/// See the module's head.
#[derive(Debug)]
pub struct Doorbell {
    phase: Phase,
    /// When we last kept writers from ringing, while we do.
    pushed_at: Option<Instant>,
    look_at: Instant,
    pace: Duration,
    window: Instant,
    found: usize,
    busy: bool,
    /// There may be a crowd of writers.
    count_due: bool,
    /// There was one a moment ago: events may come more slowly than a thousand a second.
    crowd: bool,
}

impl Doorbell {
    /// Of a session that has just begun: nobody knows what came before it.
    pub fn new(now: Instant) -> Self {
        Self {
            phase: Phase::Awake { until: now },
            pushed_at: None,
            look_at: now,
            pace: PACE,
            window: now,
            found: 0,
            busy: false,
            count_due: false,
            crowd: false,
        }
    }

    /// A claim found so many rows; `cut`: it could have had more.
    pub fn claimed(&mut self, rows: usize, cut: bool, now: Instant) {
        self.found += rows;
        let over = now.saturating_duration_since(self.window);
        if cut || self.found >= BUSY_ROWS {
            self.busy = true;
        }
        if over >= WINDOW {
            // By the rate, so that a slow machine is as busy as a fast one.
            let windows = over.as_secs_f64() / WINDOW.as_secs_f64();
            let rate = self.found as f64 / over.as_secs_f64();
            self.pace = PACE.mul_f64((rate / PACE_RATE).max(1.0)).min(LONGEST_PACE);
            let enough = if self.crowd {
                CROWD_ROWS
            } else {
                BUSY_ROWS / 2
            };
            let few = (self.found as f64) < windows * enough as f64;
            self.busy &= cut || rows >= BUSY_ROWS || !few;
            self.crowd &= self.busy;
            self.count_due = !self.busy && self.found as f64 >= windows * CROWD_ROWS as f64;
            self.window = now;
            self.found = 0;
        }
    }

    /// So many writers are under way at the same time.
    pub fn counted(&mut self, writers: usize) {
        self.crowd = writers >= CROWD;
        self.busy |= self.crowd;
    }

    /// Is it time to keep writers from ringing (any longer)? Answered by [`Self::pushed`].
    pub fn push_due(&self, now: Instant) -> bool {
        self.busy
            && self
                .pushed_at
                .is_none_or(|at| now.saturating_duration_since(at) >= PUSH_PACE)
    }

    /// Writers are kept from ringing since a moment before `now`.
    pub fn pushed(&mut self, now: Instant) {
        self.pushed_at = Some(now);
        self.phase = Phase::Awake { until: now + AWAKE };
        self.look_at = now + self.pace;
    }

    /// Somebody keeps writers from ringing for so long.
    pub fn kept_awake(&mut self, wait: Duration, now: Instant) {
        let until = now + wait;
        match &mut self.phase {
            Phase::Awake { until: known } => *known = until.max(*known),
            Phase::Asleep | Phase::Listed { .. } => {
                self.phase = Phase::Awake { until };
                self.look_at = now;
            }
        }
    }

    /// We cannot deliver any more: if it is us who keep writers from ringing, they have to ring for
    /// our peers. True: have them do so.
    pub fn stop_pushing(&mut self) -> bool {
        self.busy = false;
        self.crowd = false;
        self.count_due = false;
        self.pushed_at.take().is_some()
    }

    /// The next thing to do once all that can be seen was claimed.
    pub fn step(&mut self, now: Instant) -> Option<Step> {
        if std::mem::take(&mut self.count_due) {
            return Some(Step::Count);
        }
        match &mut self.phase {
            Phase::Asleep => None,
            Phase::Awake { until } => {
                let ours = self.pushed_at.is_some();
                if (ours && !self.busy) || (!ours && *until <= now) {
                    self.pushed_at = None;
                    return Some(Step::List { ours });
                }
                if self.look_at > now {
                    return None;
                }
                self.look_at = now + if ours { self.pace } else { PEER_PACE };
                Some(Step::Look)
            }
            Phase::Listed { writers, .. } if writers.is_empty() => {
                self.phase = Phase::Asleep;
                None
            }
            Phase::Listed {
                writers, check_at, ..
            } => (*check_at <= now).then(|| Step::Check(writers.clone())),
        }
    }

    /// Writers ring again unless `kept` says for how much longer a peer keeps them from it; those
    /// listed were under way a moment after. All buckets are to be walked now.
    pub fn listed(&mut self, kept: Option<Duration>, writers: Vec<String>, now: Instant) {
        self.phase = match kept {
            Some(wait) => Phase::Awake { until: now + wait },
            None => Phase::Listed {
                writers,
                check_at: now + FIRST_PAUSE,
                pause: FIRST_PAUSE,
            },
        };
        self.look_at = now + PEER_PACE;
    }

    /// Of the writers asked for these have not ended. True: all buckets are to be walked, since some
    /// have.
    pub fn checked(&mut self, open: Vec<String>, now: Instant) -> bool {
        let Phase::Listed {
            writers,
            check_at,
            pause,
        } = &mut self.phase
        else {
            return false;
        };
        let some_ended = open.len() < writers.len();
        *writers = open;
        *pause = (*pause * 2).min(LONGEST_PAUSE);
        *check_at = now + *pause;
        some_ended
    }

    /// When there is something to do next, unless something else happens.
    pub fn next_at(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Asleep => None,
            Phase::Awake { until } if self.pushed_at.is_none() => Some(self.look_at.min(*until)),
            Phase::Awake { .. } => Some(self.look_at),
            Phase::Listed { check_at, .. } => Some(*check_at),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// It has paid everything owed at the beginning.
    fn asleep(now: Instant) -> Doorbell {
        let mut doorbell = Doorbell::new(now);
        assert_eq!(doorbell.step(now), Some(Step::List { ours: false }));
        doorbell.listed(None, Vec::new(), now);
        assert_eq!(doorbell.step(now), None);
        assert_eq!(doorbell.next_at(), None);
        doorbell
    }

    #[test]
    fn a_new_session_owes_a_look_for_whoever_did_not_ring() {
        let now = Instant::now();
        let mut doorbell = Doorbell::new(now);
        assert_eq!(doorbell.step(now), Some(Step::List { ours: false }));
        doorbell.listed(None, vec!["3/7".into()], now);
        assert_eq!(doorbell.step(now), None);
        let later = doorbell.next_at().expect("a check is due");
        assert_eq!(doorbell.step(later), Some(Step::Check(vec!["3/7".into()])));
        assert!(!doorbell.checked(vec!["3/7".into()], later), "not ended");
        let later = doorbell.next_at().expect("another check is due");
        assert_eq!(doorbell.step(later), Some(Step::Check(vec!["3/7".into()])));
        assert!(doorbell.checked(Vec::new(), later), "it is looked for");
        assert_eq!(doorbell.step(later), None);
        assert_eq!(doorbell.next_at(), None, "asleep");
    }

    #[test]
    fn few_events_are_rung_for() {
        let now = Instant::now();
        let mut doorbell = asleep(now);
        for number in 0..200 {
            doorbell.claimed(1, false, now + 5 * MS * number);
            assert!(!doorbell.push_due(now + 5 * MS * number));
        }
    }

    #[test]
    fn a_crowd_of_writers_is_spared_the_ring_at_a_tenth_of_the_rate() {
        let now = Instant::now();
        for (writers, spared) in [(CROWD - 1, false), (CROWD, true)] {
            let mut doorbell = asleep(now);
            let mut last = now;
            for number in 0..30 {
                last = now + 5 * MS * number;
                doorbell.claimed(1, false, last);
            }
            assert!(!doorbell.push_due(last));
            assert_eq!(doorbell.step(last), Some(Step::Count));
            assert_eq!(doorbell.step(last), None);
            doorbell.counted(writers);
            assert_eq!(doorbell.push_due(last), spared);
        }
    }

    #[test]
    fn many_events_keep_writers_from_ringing_until_there_are_few() {
        let mut now = Instant::now();
        let mut doorbell = asleep(now);
        for _ in 0..200 {
            doorbell.claimed(20, false, now);
            if doorbell.push_due(now) {
                doorbell.pushed(now);
            }
            now += 5 * MS;
        }
        assert!(!doorbell.push_due(now), "pushed a moment ago");
        now = doorbell.next_at().expect("a look is due").max(now);
        assert_eq!(doorbell.step(now), Some(Step::Look));
        assert_eq!(doorbell.step(now), None, "one look at a time");
        let next = doorbell.next_at().expect("another");
        assert!(next >= now + PACE && next <= now + LONGEST_PACE);
        // Looks that find nothing.
        doorbell.claimed(0, false, now);
        now += WINDOW * 3;
        doorbell.claimed(0, false, now);
        assert_eq!(doorbell.step(now), Some(Step::List { ours: true }));
        doorbell.listed(None, Vec::new(), now);
        assert_eq!(doorbell.step(now), None);
        assert_eq!(doorbell.next_at(), None);
    }

    #[test]
    fn the_more_events_there_are_the_longer_it_waits_between_looks() {
        for (rows, pace) in [(5, 2 * PACE), (10, 4 * PACE), (500, LONGEST_PACE)] {
            let mut now = Instant::now();
            let mut doorbell = asleep(now);
            for _ in 0..40 {
                doorbell.claimed(rows, false, now);
                if doorbell.push_due(now) {
                    doorbell.pushed(now);
                }
                now += 5 * MS;
            }
            now = doorbell.next_at().expect("a look is due").max(now);
            assert_eq!(doorbell.step(now), Some(Step::Look));
            let wait = doorbell.next_at().expect("another") - now;
            assert!(wait >= pace && wait < pace + 2 * MS, "{rows}: {wait:?}");
        }
    }

    #[test]
    fn a_push_is_renewed_in_time_also_by_an_overloaded_database() {
        for takes in [3 * MS, 350 * MS] {
            let mut now = Instant::now();
            let mut doorbell = asleep(now);
            let mut pushed_at: Option<Instant> = None;
            for _ in 0..1000 {
                doorbell.claimed(500, true, now);
                if doorbell.push_due(now) {
                    now += takes;
                    assert!(pushed_at.is_none_or(|at| now - at < AWAKE));
                    doorbell.pushed(now);
                    pushed_at = Some(now);
                }
                now += takes;
            }
            assert!(pushed_at.is_some_and(|at| now - at < AWAKE));
        }
    }

    #[test]
    fn while_a_peer_keeps_writers_from_ringing_we_look_by_ourselves() {
        let mut now = Instant::now();
        let mut doorbell = asleep(now);
        doorbell.kept_awake(AWAKE, now);
        let mut looks = 0;
        let end = now + AWAKE;
        while now < end {
            looks += u32::from(doorbell.step(now) == Some(Step::Look));
            now = doorbell.next_at().expect("a look is due").max(now + MS);
        }
        assert!(looks >= 10, "{looks}");
        assert_eq!(doorbell.step(now), Some(Step::List { ours: false }));
        doorbell.listed(Some(AWAKE), Vec::new(), now);
        assert!(doorbell.next_at().is_some(), "the peer goes on");
        now += AWAKE;
        assert_eq!(doorbell.step(now), Some(Step::List { ours: false }));
        doorbell.listed(None, vec!["1/1".into()], now);
        // Rung by a peer that begins again, before the writers had ended.
        doorbell.kept_awake(AWAKE, now);
        assert_eq!(doorbell.step(now), Some(Step::Look));
        now += AWAKE;
        assert_eq!(doorbell.step(now), Some(Step::List { ours: false }));
    }

    #[test]
    fn who_cannot_deliver_lets_writers_ring_for_its_peers() {
        let now = Instant::now();
        let mut doorbell = asleep(now);
        assert!(!doorbell.stop_pushing());
        doorbell.claimed(500, true, now);
        assert!(doorbell.push_due(now));
        doorbell.pushed(now);
        assert!(doorbell.stop_pushing());
        assert!(!doorbell.push_due(now));
        // What it owes it pays when it can.
        assert_eq!(doorbell.step(now + AWAKE), Some(Step::List { ours: false }));
    }

    #[test]
    fn a_writer_that_takes_an_hour_costs_a_check_a_second() {
        let mut now = Instant::now();
        let mut doorbell = asleep(now);
        doorbell.kept_awake(Duration::ZERO, now);
        assert_eq!(doorbell.step(now), Some(Step::List { ours: false }));
        doorbell.listed(None, vec!["1/1".into()], now);
        let (end, mut checks) = (now + Duration::from_secs(60), 0);
        while now < end {
            now = doorbell.next_at().expect("a check is due");
            assert!(matches!(doorbell.step(now), Some(Step::Check(_))));
            doorbell.checked(vec!["1/1".into()], now);
            checks += 1;
        }
        assert!(checks < 75, "{checks}");
    }
}
