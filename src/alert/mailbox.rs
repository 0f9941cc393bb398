//! What waits for one endpoint: bounded, in order, dead letters gathered.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use tokio::sync::Notify;

use super::Alert;

/// Notices that wait. Dead letters are gathered and everything else is rare, so an endpoint that
/// takes nothing has been away for long when this is reached.
const CAPACITY: usize = 100;
/// Dead letters of one notice that are told in full.
const IN_FULL: usize = 5;

/// What goes out as one message: one alert, or several dead letters.
#[derive(Clone, Debug)]
pub(super) struct Notice {
    /// When it was raised, for the receiver.
    pub(super) at: SystemTime,
    /// The same, for giving up.
    pub(super) raised: Instant,
    /// Told in full; never empty, and several only of dead letters.
    pub(super) alerts: Vec<Alert>,
    /// Dead letters that are only counted.
    pub(super) more: u64,
}

impl Notice {
    pub(super) fn new(alert: Alert) -> Self {
        Self {
            at: SystemTime::now(),
            raised: Instant::now(),
            alerts: vec![alert],
            more: 0,
        }
    }

    pub(super) fn kind(&self) -> &'static str {
        self.alerts.first().map_or("none", Alert::kind)
    }

    /// How many alerts it stands for.
    pub(super) fn count(&self) -> u64 {
        self.alerts.len() as u64 + self.more
    }

    /// Both are of dead letters.
    fn gathers(&self, alert: &Alert) -> bool {
        matches!(
            (self.alerts.last(), alert),
            (Some(Alert::DeadLettered(_)), Alert::DeadLettered(_))
        )
    }

    fn gather(&mut self, alert: Alert) {
        if self.alerts.len() < IN_FULL {
            self.alerts.push(alert);
        } else {
            self.more += 1;
        }
    }
}

#[derive(Debug, Default)]
struct Waiting {
    notices: VecDeque<Notice>,
    /// The courier has one in hand.
    busy: bool,
}

impl Waiting {
    /// Answers the notice that fell out.
    fn push(&mut self, alert: Alert) -> Option<Notice> {
        if let Some(last) = self.notices.back_mut()
            && last.gathers(&alert)
        {
            last.gather(alert);
            return None;
        }
        // The oldest goes: what stands now matters more than what was.
        let fallen = (self.notices.len() >= CAPACITY)
            .then(|| self.notices.pop_front())
            .flatten();
        self.notices.push_back(Notice::new(alert));
        fallen
    }

    fn left(&self) -> usize {
        self.notices.len() + usize::from(self.busy)
    }
}

/// Between those who raise alerts and the courier of one endpoint.
#[derive(Debug, Default)]
pub(super) struct Mailbox {
    waiting: Mutex<Waiting>,
    arrived: Notify,
    emptied: Notify,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // Nothing in here can be left half done.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers the notice that fell out.
    pub(super) fn push(&self, alert: Alert) -> Option<Notice> {
        let fallen = self.lock().push(alert);
        self.arrived.notify_one();
        fallen
    }

    /// The next notice, in hand until [`Self::done`].
    pub(super) async fn next(&self) -> Notice {
        loop {
            {
                let mut waiting = self.lock();
                if let Some(notice) = waiting.notices.pop_front() {
                    waiting.busy = true;
                    return notice;
                }
            }
            self.arrived.notified().await;
        }
    }

    /// The one in hand was delivered or given up.
    pub(super) fn done(&self) {
        self.lock().busy = false;
        self.emptied.notify_waiters();
    }

    /// Notices that wait or are in hand.
    pub(super) fn left(&self) -> usize {
        self.lock().left()
    }

    /// Waits until there are none.
    pub(super) async fn empty(&self) {
        loop {
            let emptied = self.emptied.notified();
            tokio::pin!(emptied);
            // Before the look, so that nothing is missed between them.
            emptied.as_mut().enable();
            if self.left() == 0 {
                return;
            }
            emptied.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::text::tests::dead_letter;
    use super::*;

    fn failed(reason: usize) -> Alert {
        Alert::RelayFailed {
            reason: reason.to_string(),
        }
    }

    fn reason(notice: &Notice) -> &str {
        match &notice.alerts[0] {
            Alert::RelayFailed { reason } => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn dead_letters_one_behind_the_other_become_one_notice_and_pass_nothing() {
        let mut waiting = Waiting::default();
        waiting.push(Alert::DeadLettered(dead_letter(1)));
        waiting.push(failed(0));
        for id in 2..=9 {
            waiting.push(Alert::DeadLettered(dead_letter(id)));
        }
        waiting.push(failed(1));
        let shape: Vec<_> = waiting
            .notices
            .iter()
            .map(|notice| (notice.kind(), notice.alerts.len(), notice.more))
            .collect();
        assert_eq!(
            shape,
            [
                ("dead_lettered", 1, 0),
                ("relay_failed", 1, 0),
                ("dead_lettered", 5, 3),
                ("relay_failed", 1, 0)
            ]
        );
        assert_eq!(waiting.notices[2].count(), 8);
    }

    #[test]
    fn a_burst_of_dead_letters_takes_one_place() {
        let mut waiting = Waiting::default();
        for id in 0..100_000 {
            assert!(waiting.push(Alert::DeadLettered(dead_letter(id))).is_none());
        }
        assert_eq!(waiting.left(), 1);
        assert_eq!(waiting.notices[0].count(), 100_000);
    }

    #[test]
    fn the_oldest_falls_out_of_a_full_mailbox() {
        let mut waiting = Waiting::default();
        for number in 0..CAPACITY {
            assert!(waiting.push(failed(number)).is_none());
        }
        let fallen = waiting.push(failed(CAPACITY)).unwrap();
        assert_eq!(reason(&fallen), "0");
        assert_eq!(waiting.left(), CAPACITY);
        assert_eq!(reason(&waiting.notices[0]), "1");
        assert_eq!(
            reason(waiting.notices.back().unwrap()),
            CAPACITY.to_string()
        );
    }
}
