//! What a sink says of its transport, when one connection follows another.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::{SinkError, Transport};

/// What [`Transport`] watchers see. Only the latest link may speak, and a link that is down has
/// said its last word: the first reason is the one that helps.
#[derive(Debug, Default)]
pub(super) struct Board {
    pub(super) state: watch::Sender<Transport>,
    speaker: Mutex<Speaker>,
}

#[derive(Debug, Default)]
struct Speaker {
    link: u64,
    down: bool,
}

impl Board {
    fn speaker(&self) -> MutexGuard<'_, Speaker> {
        // Nothing can panic while the lock is held.
        self.speaker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn next_link(&self) -> u64 {
        let mut speaker = self.speaker();
        speaker.link += 1;
        speaker.down = false;
        speaker.link
    }

    /// It could not be made.
    pub(super) fn set_down(&self, link: u64, why: &SinkError) {
        self.set(link, Transport::Down(why.message.clone()));
    }

    pub(super) fn set(&self, link: u64, state: Transport) {
        let mut speaker = self.speaker();
        if speaker.link == link && !speaker.down {
            speaker.down = matches!(state, Transport::Down(_));
            self.state.send_if_modified(|old| {
                let changed = *old != state;
                *old = state;
                changed
            });
        }
    }
}
