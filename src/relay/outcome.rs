//! What became of each event, told as it happens: one structured log line each, and a stream for
//! whoever watches (`bellwire tail`).

use std::sync::Arc;
use std::time::SystemTime;

use serde::Serialize;
use tokio::sync::broadcast;

use crate::config::OutcomeLevel;
use crate::event::{AggregateKey, EventId, OneLine};

/// Outcomes kept for a watcher that reads slowly; then it misses some, and is told so.
const WATCH_BUFFER: usize = 4096;

/// The words of [`Result::word`], all of them.
pub const WORDS: [&str; 10] = [
    "published",
    "published-late",
    "failed",
    "dead-lettered",
    "waits",
    "behind",
    "breaker-open",
    "unconfirmed",
    "stopping",
    "lease-lost",
];

/// Which event.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Its outbox id.
    pub id: EventId,
    /// Its aggregate.
    pub key: AggregateKey,
    /// Its type; none if it was never read.
    pub event_type: Option<Arc<str>>,
}

/// What became of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Result {
    /// Confirmed and marked.
    Published,
    /// Confirmed, but no longer ours to mark.
    PublishedLate,
    /// An attempt failed; the event is tried again.
    Failed {
        /// Failed attempts by now.
        attempts: i32,
        /// Class and reason.
        error: String,
    },
    /// Given up.
    DeadLettered {
        /// Failed attempts.
        attempts: i32,
        /// Class and reason.
        error: String,
    },
    /// Its destination takes nothing at present; no attempt was counted.
    Waits {
        /// Class and reason.
        error: String,
    },
    /// An older event of its aggregate failed.
    Behind,
    /// Handed back unsent: nothing can be sent at present.
    BreakerOpen,
    /// Handed back: the connection was lost or the confirm did not come in time.
    Unconfirmed {
        /// What happened.
        error: String,
    },
    /// Handed back unsent: the relay stops.
    Stopping,
    /// The claim was lost before anything was done.
    LeaseLost,
}

impl Result {
    /// In words; what `/tail` and the log say.
    pub fn words(&self) -> String {
        match self {
            Self::Published => "published".into(),
            Self::PublishedLate => {
                "published, but the lease had expired: a duplicate is possible".into()
            }
            Self::Failed { attempts, .. } => format!("failed attempt {attempts}"),
            Self::DeadLettered { .. } => "dead-lettered".into(),
            Self::Waits { .. } => "not sent, waiting for its destination".into(),
            Self::Behind => "waiting for an older event of the same aggregate".into(),
            Self::BreakerOpen => "not sent, breaker open".into(),
            Self::Unconfirmed { .. } => {
                "not confirmed, handed back: a duplicate is possible".into()
            }
            Self::Stopping => "not sent, the relay is stopping".into(),
            Self::LeaseLost => "skipped: the lease was lost".into(),
        }
    }

    /// One word for filters, of [`WORDS`].
    pub fn word(&self) -> &'static str {
        match self {
            Self::Published => "published",
            Self::PublishedLate => "published-late",
            Self::Failed { .. } => "failed",
            Self::DeadLettered { .. } => "dead-lettered",
            Self::Waits { .. } => "waits",
            Self::Behind => "behind",
            Self::BreakerOpen => "breaker-open",
            Self::Unconfirmed { .. } => "unconfirmed",
            Self::Stopping => "stopping",
            Self::LeaseLost => "lease-lost",
        }
    }

    fn error(&self) -> Option<&str> {
        match self {
            Self::Failed { error, .. }
            | Self::DeadLettered { error, .. }
            | Self::Waits { error }
            | Self::Unconfirmed { error } => Some(error),
            _ => None,
        }
    }
}

/// One line of `bellwire tail`.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// When it was told, by this host's clock.
    pub at: String,
    /// Outbox id.
    pub id: i64,
    /// Its aggregate type.
    pub aggregate_type: String,
    /// Its aggregate id.
    pub aggregate_id: String,
    /// Its event type, if it was read.
    pub event_type: Option<String>,
    /// One word of [`WORDS`].
    pub outcome: &'static str,
    /// In words.
    pub result: String,
    /// Failed attempts, where one was recorded.
    pub attempts: Option<i32>,
    /// Why, where something went wrong.
    pub error: Option<String>,
}

/// Where outcomes are told. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Outcomes {
    level: OutcomeLevel,
    watchers: broadcast::Sender<Arc<Line>>,
}

impl Outcomes {
    /// Ordinary outcomes are logged at this level; failures always are.
    pub fn new(level: OutcomeLevel) -> Self {
        Self {
            level,
            watchers: broadcast::channel(WATCH_BUFFER).0,
        }
    }

    /// From now on.
    pub fn watch(&self) -> broadcast::Receiver<Arc<Line>> {
        self.watchers.subscribe()
    }

    /// Tells what became of an event.
    pub fn tell(&self, subject: &Subject, result: &Result) {
        self.log(subject, result);
        if self.watchers.receiver_count() == 0 {
            return;
        }
        let attempts = match result {
            Result::Failed { attempts, .. } | Result::DeadLettered { attempts, .. } => {
                Some(*attempts)
            }
            _ => None,
        };
        let line = Line {
            at: humantime::format_rfc3339_millis(SystemTime::now()).to_string(),
            id: subject.id.0,
            aggregate_type: subject.key.aggregate_type.to_string(),
            aggregate_id: subject.key.aggregate_id.to_string(),
            event_type: subject.event_type.as_deref().map(str::to_owned),
            outcome: result.word(),
            result: result.words(),
            attempts,
            error: result.error().map(str::to_owned),
        };
        // An error means that the last watcher has just left.
        let _ = self.watchers.send(Arc::new(line));
    }

    fn log(&self, subject: &Subject, result: &Result) {
        /// One place for the fields; the level has to be a constant.
        macro_rules! line {
            ($level:expr) => {
                tracing::event!(
                    target: "bellwire::outcome",
                    $level,
                    id = subject.id.0,
                    aggregate_type = %OneLine(&subject.key.aggregate_type),
                    aggregate_id = %OneLine(&subject.key.aggregate_id),
                    event_type = subject
                        .event_type
                        .as_deref()
                        .map(|name| tracing::field::display(OneLine(name))),
                    // A single record stays a single line, whatever a broker says.
                    error = result.error().map(|error| tracing::field::display(OneLine(error))),
                    "{}",
                    result.words()
                )
            };
        }
        match result {
            Result::DeadLettered { .. } => line!(tracing::Level::ERROR),
            Result::Failed { .. } | Result::PublishedLate | Result::Unconfirmed { .. } => {
                line!(tracing::Level::WARN);
            }
            _ => match self.level {
                OutcomeLevel::Off => {}
                OutcomeLevel::Debug => line!(tracing::Level::DEBUG),
                OutcomeLevel::Info => line!(tracing::Level::INFO),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject() -> Subject {
        Subject {
            id: EventId(42),
            key: AggregateKey::new("order", "ORD-1"),
            event_type: Some("Placed".into()),
        }
    }

    #[test]
    fn a_watcher_sees_what_is_told_from_then_on() {
        let outcomes = Outcomes::new(OutcomeLevel::Off);
        outcomes.tell(&subject(), &Result::Published);
        let mut watch = outcomes.watch();
        let failed = Result::Failed {
            attempts: 2,
            error: "unroutable: nothing is bound".into(),
        };
        outcomes.tell(&subject(), &failed);
        let line = watch.try_recv().unwrap();
        let json = serde_json::to_value(&*line).unwrap();
        assert_eq!(json["outcome"], "failed");
        assert_eq!(json["result"], "failed attempt 2");
        assert_eq!(json["error"], "unroutable: nothing is bound");
        assert!(watch.try_recv().is_err());
    }
}
