//! Reports: what people and metrics are told of requests. Of those that were refused anybody can make
//! as many as they like, so they are counted, and told of now and then.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::source::Source;
use super::store::Outcome;
use crate::alert::{Alert, Alerter, IntakeTrouble, Trouble};
use crate::metrics;

/// Between two alerts of one kind about one source.
pub const QUIET_TIME: Duration = Duration::from_secs(600);

/// Label of requests to no source.
const NO_SOURCE: &str = "";

/// One kind of trouble of one source.
#[derive(Debug, Default)]
struct Calm {
    told: Option<Instant>,
    since: u64,
    last: Option<IntakeTrouble>,
}

impl Calm {
    fn is_quiet(&self, now: Instant) -> bool {
        self.told
            .is_some_and(|told| now.duration_since(told) < QUIET_TIME)
    }

    /// One more; answers what to tell, if it is time.
    fn one_more(&mut self, trouble: IntakeTrouble, now: Instant) -> Option<IntakeTrouble> {
        self.since += 1;
        self.last = Some(trouble);
        self.due(now)
    }

    /// What has come since the last time, if it is time.
    fn due(&mut self, now: Instant) -> Option<IntakeTrouble> {
        if self.is_quiet(now) {
            return None;
        }
        let mut trouble = self.last.take()?;
        trouble.count = std::mem::take(&mut self.since);
        self.told = Some(now);
        Some(trouble)
    }
}

/// See the module's head.
pub struct Reports {
    alerter: Alerter,
    calm: Mutex<HashMap<(Arc<str>, &'static str), Calm>>,
}

impl Reports {
    /// Alerts go out through this.
    pub fn new(alerter: Alerter) -> Self {
        Self {
            alerter,
            calm: Mutex::default(),
        }
    }

    /// A request was answered. `word` is of a fixed set.
    pub fn answered(&self, source: Option<&Source>, word: &'static str, took: Duration) {
        let source = source.map_or_else(|| NO_SOURCE.to_owned(), |source| source.name.to_string());
        ::metrics::counter!(metrics::INTAKE_REQUESTS, "source" => source, "outcome" => word)
            .increment(1);
        ::metrics::histogram!(metrics::INTAKE_SECONDS).record(took.as_secs_f64());
    }

    /// A request was refused for what its sender did. `class` is of a fixed set.
    pub fn rejected(&self, source: &Source, class: &'static str, reason: &str) {
        tracing::debug!(source = &*source.name, class, "webhook rejected");
        self.tell(source, class, Trouble::Rejected, None, reason);
    }

    /// A request was not done with in time.
    pub fn overdue(&self, source: &Source, event_id: &str, deadline: Duration) {
        let deadline = humantime::format_duration(deadline).to_string();
        tracing::error!(
            source = &*source.name,
            event_id,
            deadline,
            "deadline exceeded"
        );
        let reason = format!("not done within {deadline}");
        self.tell(
            source,
            "deadline",
            Trouble::Deadline,
            Some(event_id),
            &reason,
        );
    }

    /// The database could not take an event.
    pub fn failed(&self, source: &Source, event_id: &str, reason: &str) {
        tracing::warn!(
            source = &*source.name,
            event_id,
            reason,
            "webhook could not be stored"
        );
        self.tell(source, "failed", Trouble::Failed, Some(event_id), reason);
    }

    /// An event has its end for now.
    pub fn settled(&self, source: &Source, outcome: Outcome, event_id: &str, detail: &str) {
        match outcome {
            Outcome::Parked => {
                tracing::warn!(source = &*source.name, event_id, detail, "event parked");
                self.tell(source, "parked", Trouble::Parked, Some(event_id), detail);
            }
            Outcome::Conflict => {
                let reason = format!("id_conflict: event {event_id} came again with another body");
                self.rejected(source, "id_conflict", &reason);
            }
            Outcome::DeadLettered => {
                tracing::info!(
                    source = &*source.name,
                    event_id,
                    detail,
                    "event dead-lettered"
                );
            }
            Outcome::Processed | Outcome::Duplicate => {}
        }
    }

    /// Tells of what was kept back, once its quiet time is over.
    pub fn tell_due(&self) {
        let now = Instant::now();
        let due: Vec<_> = self
            .lock()
            .values_mut()
            .filter_map(|calm| calm.due(now))
            .collect();
        due.into_iter().for_each(|trouble| self.send(trouble));
    }

    fn tell(
        &self,
        source: &Source,
        kind: &'static str,
        trouble: Trouble,
        event_id: Option<&str>,
        reason: &str,
    ) {
        let trouble = IntakeTrouble {
            trouble,
            source: source.name.to_string(),
            event_id: event_id.map(str::to_owned),
            reason: reason.to_owned(),
            max_attempts: source.max_attempts,
            count: 0,
        };
        let due = self
            .lock()
            .entry((source.name.clone(), kind))
            .or_default()
            .one_more(trouble, Instant::now());
        if let Some(trouble) = due {
            self.send(trouble);
        }
    }

    fn send(&self, trouble: IntakeTrouble) {
        if trouble.trouble == Trouble::Rejected {
            tracing::warn!(
                source = trouble.source,
                count = trouble.count,
                reason = trouble.reason,
                "webhooks rejected; of further ones of this kind a line in ten minutes"
            );
        }
        self.alerter.send(Alert::Intake(trouble));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(Arc<str>, &'static str), Calm>> {
        // Nothing in here can be left half done.
        self.calm.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trouble() -> IntakeTrouble {
        IntakeTrouble {
            trouble: Trouble::Rejected,
            source: "orders".into(),
            event_id: None,
            reason: "bad_signature".into(),
            max_attempts: 3,
            count: 0,
        }
    }

    #[test]
    fn many_of_a_kind_are_told_of_at_once_and_then_as_a_number() {
        let mut calm = Calm::default();
        let start = Instant::now();
        let count = |told: Option<IntakeTrouble>| told.map(|trouble| trouble.count);
        assert_eq!(count(calm.due(start)), None);
        assert_eq!(count(calm.one_more(trouble(), start)), Some(1));
        for _ in 0..5 {
            let told = calm.one_more(trouble(), start + QUIET_TIME / 2);
            assert_eq!(count(told), None);
        }
        // Nobody has to come after the quiet time for the rest to be told.
        assert_eq!(count(calm.due(start + QUIET_TIME)), Some(5));
        assert_eq!(count(calm.due(start + 2 * QUIET_TIME)), None);
        assert_eq!(
            count(calm.one_more(trouble(), start + 2 * QUIET_TIME)),
            Some(1)
        );
    }
}
