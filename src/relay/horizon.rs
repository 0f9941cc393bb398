//! Strict order: up to which id events may be taken, so that none with a lower id can still appear.
//!
//! A plain value: no I/O, no clock of its own, no actix.
//!
//! Whoever writes events holds a lock on the outbox before it draws an id, and until its rows can be
//! seen. So, of an id drawn last and a list of the lock's holders made after that was read: once all of
//! the list have ended, every event up to that id can be seen or never will. Writers that came
//! later draw greater ids; they make nobody wait for them.

use std::time::{Duration, Instant};

/// Between looks whether writers have ended: first and longest.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// Horizons that are waited for at the same time.
const MOST_PENDING: usize = 32;

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Read the id drawn last, then list the writers. Answered by [`Horizon::listed`].
    List,
    /// Which of these have not ended yet? Answered by [`Horizon::checked`].
    Check(Vec<String>),
}

/// A horizon that is reached once its writers have ended.
#[derive(Debug)]
struct Pending {
    id: i64,
    writers: Vec<String>,
}

/// See the module's head.
#[derive(Debug)]
pub struct Horizon {
    reached: i64,
    /// In ascending order: an event waits for no writer that came after it was asked for.
    pending: Vec<Pending>,
    check_at: Instant,
    pause: Duration,
    wanted: bool,
    /// The list is being made.
    listing: bool,
}

impl Horizon {
    /// Nothing may be taken yet.
    pub fn new(now: Instant) -> Self {
        Self {
            reached: i64::MIN,
            pending: Vec::new(),
            check_at: now,
            pause: FIRST_PAUSE,
            wanted: true,
            listing: false,
        }
    }

    /// Up to which id events may be taken.
    pub fn reached(&self) -> i64 {
        self.reached
    }

    /// There may be events beyond it.
    pub fn want(&mut self) {
        self.wanted = true;
    }

    /// Is all reached that was asked for?
    pub fn is_settled(&self) -> bool {
        !self.wanted && !self.listing && self.pending.is_empty()
    }

    fn may_list(&self) -> bool {
        self.wanted && self.pending.len() < MOST_PENDING
    }

    /// The next thing to do, if it is time.
    pub fn step(&mut self, now: Instant) -> Option<Step> {
        if self.may_list() {
            // What is asked for from now on may not be in it.
            self.wanted = false;
            self.listing = true;
            return Some(Step::List);
        }
        if self.pending.is_empty() || self.check_at > now {
            return None;
        }
        let mut writers: Vec<_> = self
            .pending
            .iter()
            .flat_map(|pending| pending.writers.iter().cloned())
            .collect();
        writers.sort_unstable();
        writers.dedup();
        Some(Step::Check(writers))
    }

    /// The list could not be made.
    pub fn not_listed(&mut self) {
        self.listing = false;
        self.wanted = true;
    }

    /// This id was drawn last, and these were under way a moment after. True: the horizon is wider.
    pub fn listed(&mut self, id: i64, writers: Vec<String>, now: Instant) -> bool {
        self.listing = false;
        if writers.is_empty() {
            self.pending.clear();
            return self.reach(id);
        }
        match self.pending.last_mut() {
            // All who could draw up to the one can draw up to the other.
            Some(last) if last.writers == writers => last.id = last.id.max(id),
            Some(last) if last.id >= id => {}
            _ => {
                self.pending.push(Pending { id, writers });
                self.pause = FIRST_PAUSE;
                self.check_at = now + FIRST_PAUSE;
            }
        }
        false
    }

    /// Of the writers asked for these have not ended. True: the horizon is wider.
    pub fn checked(&mut self, open: &[String], now: Instant) -> bool {
        let mut widest = None;
        self.pending.retain_mut(|pending| {
            pending.writers.retain(|writer| open.contains(writer));
            if pending.writers.is_empty() {
                widest = widest.max(Some(pending.id));
            }
            !pending.writers.is_empty()
        });
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        self.check_at = now + self.pause;
        widest.is_some_and(|id| self.reach(id))
    }

    fn reach(&mut self, id: i64) -> bool {
        let wider = id > self.reached;
        // Never back: a sequence that was set back draws ids that are old by our order.
        self.reached = self.reached.max(id);
        self.pause = FIRST_PAUSE;
        wider
    }

    /// When there is something to do next, unless something else happens.
    pub fn next_at(&self) -> Option<Instant> {
        (!self.pending.is_empty()).then_some(self.check_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn nothing_is_taken_before_all_writers_of_the_list_have_ended() {
        let mut now = Instant::now();
        let mut horizon = Horizon::new(now);
        assert_eq!(horizon.reached(), i64::MIN);
        assert_eq!(horizon.step(now), Some(Step::List));
        horizon.not_listed();
        assert_eq!(horizon.step(now), Some(Step::List));
        assert!(!horizon.listed(7, names(&["1/1", "2/1"]), now));
        for open in [["2/1"], ["2/1"]] {
            now = horizon.next_at().expect("a check is due");
            assert!(matches!(horizon.step(now), Some(Step::Check(_))));
            assert!(!horizon.checked(&names(&open), now));
            assert_eq!(horizon.reached(), i64::MIN);
        }
        now = horizon.next_at().expect("a check is due");
        assert!(horizon.checked(&[], now));
        assert_eq!(horizon.reached(), 7);
        assert!(horizon.is_settled());
        assert_eq!(horizon.step(now), None);
    }

    #[test]
    fn an_event_waits_for_no_writer_that_came_after_it_was_asked_for() {
        let mut now = Instant::now();
        let mut horizon = Horizon::new(now);
        assert_eq!(horizon.step(now), Some(Step::List));
        horizon.want();
        assert!(!horizon.listed(7, names(&["1/1"]), now));
        assert_eq!(
            horizon.step(now),
            Some(Step::List),
            "what was asked for meanwhile"
        );
        assert!(!horizon.listed(8, names(&["1/1"]), now));
        horizon.want();
        assert_eq!(horizon.step(now), Some(Step::List));
        assert!(!horizon.listed(9, names(&["1/1", "2/1"]), now));
        now = horizon.next_at().expect("a check is due");
        assert_eq!(horizon.step(now), Some(Step::Check(names(&["1/1", "2/1"]))));
        assert!(horizon.checked(&names(&["2/1"]), now));
        assert_eq!(horizon.reached(), 8);
        now = horizon.next_at().expect("a check is due");
        assert!(horizon.checked(&[], now));
        assert_eq!(horizon.reached(), 9);
    }

    #[test]
    fn what_is_waited_for_at_the_same_time_is_bounded_and_nothing_is_forgotten() {
        let now = Instant::now();
        let mut horizon = Horizon::new(now);
        for number in 0..100 {
            horizon.want();
            if horizon.step(now) == Some(Step::List) {
                horizon.listed(number, names(&[&format!("1/{number}")]), now);
            }
        }
        assert!(!horizon.is_settled());
        assert!(horizon.pending.len() <= MOST_PENDING);
        let later = horizon.next_at().expect("a check is due");
        assert!(horizon.checked(&[], later));
        assert_eq!(horizon.step(later), Some(Step::List), "still wanted");
    }
}
