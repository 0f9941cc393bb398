//! Is the database lost for long enough to tell the people?
//!
//! A plain value: no I/O, no clock of its own. Invariant: people are told once that it is lost, and once that it is
//! back, if they were told of the loss.

use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Well,
    /// It did not answer since then.
    Away(Instant),
    /// And the people know.
    Told(Instant),
}

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct DatabaseWatch(State);

impl DatabaseWatch {
    /// It did not answer. True: it has not for as long as `after`, and the people are to be told.
    pub(super) fn failed(&mut self, now: Instant, after: Duration) -> bool {
        let since = match self.0 {
            State::Well => now,
            State::Away(since) => since,
            State::Told(_) => return false,
        };
        let tell = now.saturating_duration_since(since) >= after;
        self.0 = if tell {
            State::Told(since)
        } else {
            State::Away(since)
        };
        tell
    }

    /// It answered. How long it had not, if the people were told of that.
    pub(super) fn answered(&mut self, now: Instant) -> Option<Duration> {
        match std::mem::take(&mut self.0) {
            State::Told(since) => Some(now.saturating_duration_since(since)),
            State::Well | State::Away(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_loss_that_stays_is_told_once_and_so_is_its_end() {
        let (mut watch, now) = (DatabaseWatch::default(), Instant::now());
        assert_eq!(watch.answered(now), None);
        assert!(!watch.failed(now, 10 * SECOND));
        assert!(!watch.failed(now + 9 * SECOND, 10 * SECOND));
        assert!(watch.failed(now + 10 * SECOND, 10 * SECOND));
        assert!(!watch.failed(now + 20 * SECOND, 10 * SECOND));
        assert_eq!(watch.answered(now + 30 * SECOND), Some(30 * SECOND));
        assert_eq!(watch.answered(now + 31 * SECOND), None);
    }

    #[test]
    fn a_database_that_merely_restarts_is_no_news() {
        let (mut watch, now) = (DatabaseWatch::default(), Instant::now());
        assert!(!watch.failed(now, 10 * SECOND));
        assert_eq!(watch.answered(now + SECOND), None);
        assert!(!watch.failed(now + 11 * SECOND, 10 * SECOND), "a new one");
    }
}
