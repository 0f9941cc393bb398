//! Streams that have refused a subject of theirs, or seem to be missing, remembered for a while.
//!
//! Permissions are of subjects, and nobody can be asked for them: only an event that is sent shows
//! that they are there. Without a memory a stream that is sound otherwise would be asked, found well,
//! sent the same event and closed again, many times a second.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::relay::failure::Cause;
use crate::sink::SinkError;

/// After this one event may try again.
const REMEMBERED: Duration = Duration::from_secs(10);

/// By stream: the last refusal.
#[derive(Debug, Default)]
pub(super) struct Denials(Mutex<HashMap<Arc<str>, (Instant, SinkError)>>);

impl Denials {
    /// The server has refused this subject.
    pub(super) fn remember(&self, stream: &Arc<str>, subject: &str) -> SinkError {
        let error = SinkError::new(
            Cause::Forbidden,
            format!("no permission to publish to '{subject}' (stream '{stream}'): grant it"),
        );
        let known = (Instant::now(), error.clone());
        self.lock().insert(stream.clone(), known);
        error
    }

    /// Nobody listens on this subject, and whether that is for want of the stream cannot be told: it may
    /// not be looked at, and has acknowledged nothing lately.
    pub(super) fn remember_doubt(&self, stream: &Arc<str>, error: &SinkError) {
        let known = (Instant::now(), error.clone());
        self.lock().insert(stream.clone(), known);
    }

    /// The refusal that is not yet forgotten.
    pub(super) fn of(&self, stream: &str) -> Option<SinkError> {
        let mut known = self.lock();
        let (at, error) = known.get(stream)?;
        if at.elapsed() < REMEMBERED {
            return Some(error.clone());
        }
        known.remove(stream);
        None
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Arc<str>, (Instant, SinkError)>> {
        // Nothing can panic while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
