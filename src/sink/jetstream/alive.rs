//! Which streams have acknowledged something lately: all that is known of one that may not be looked at.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A stream that acknowledged something so recently is taken to be there still. Short, because while a
/// deleted one is believed in, its events are charged an attempt; longer than a breaker keeps what is
/// due away from it, so that an event no stream covers meets others on their way.
const LATELY: Duration = Duration::from_secs(10);

/// By stream: the last acknowledgement.
#[derive(Debug, Default)]
pub(super) struct Alive(Mutex<HashMap<Arc<str>, Instant>>);

impl Alive {
    /// It has acknowledged something now.
    pub(super) fn heard(&self, stream: &Arc<str>) {
        let mut heard = self.lock();
        match heard.get_mut(stream) {
            Some(at) => *at = Instant::now(),
            None => drop(heard.insert(stream.clone(), Instant::now())),
        }
    }

    /// Has it acknowledged anything lately?
    pub(super) fn lately(&self, stream: &str) -> bool {
        self.lock()
            .get(stream)
            .is_some_and(|at| at.elapsed() < LATELY)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Arc<str>, Instant>> {
        // Nothing can panic while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
