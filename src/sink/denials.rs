//! Destinations that have refused an event, or seem to be missing, remembered for a while.
//!
//! Nobody can be asked for permissions: only an event that is sent shows that they are missing.
//! Without a memory a destination that is sound otherwise would be asked, found well, sent the same
//! event and closed again, many times a second.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::SinkError;
use crate::relay::failure::Cause;

/// After this one event may try again.
const REMEMBERED: Duration = Duration::from_secs(10);

/// By destination: the last refusal.
#[derive(Debug, Default)]
pub(super) struct Denials(Mutex<HashMap<Arc<str>, (Instant, SinkError)>>);

impl Denials {
    /// The broker has refused something for this destination.
    pub(super) fn remember(&self, destination: &Arc<str>, message: String) -> SinkError {
        let error = SinkError::new(Cause::Forbidden, message);
        let known = (Instant::now(), error.clone());
        self.lock().insert(destination.clone(), known);
        error
    }

    /// Nobody takes it, and whether that is for want of the destination cannot be told: it may not be
    /// looked at, and has acknowledged nothing lately.
    #[cfg(feature = "jetstream")]
    pub(super) fn remember_doubt(&self, destination: &Arc<str>, error: &SinkError) {
        let known = (Instant::now(), error.clone());
        self.lock().insert(destination.clone(), known);
    }

    /// The refusal that is not yet forgotten.
    pub(super) fn of(&self, destination: &str) -> Option<SinkError> {
        let mut known = self.lock();
        let (at, error) = known.get(destination)?;
        if at.elapsed() < REMEMBERED {
            return Some(error.clone());
        }
        known.remove(destination);
        None
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Arc<str>, (Instant, SinkError)>> {
        // Nothing can panic while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
