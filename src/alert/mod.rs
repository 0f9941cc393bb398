//! Alerts: tell people that an event is dead, the outbox lags, or the relay cannot publish.
//!
//! ```text
//!   send ──▶ mailbox of slack   ──▶ courier ──POST──▶ Slack
//!       └──▶ mailbox of webhook ──▶ courier ──POST──▶ any receiver of JSON
//! ```
//!
//! # Invariants
//! - [`Alerter::send`] neither waits nor fails: alerts go out beside the work, never in its way.
//! - The endpoints do not know of each other: one that hangs does not hold up the other.
//! - To one endpoint alerts go one at a time, in the order in which they were raised.
//! - Dead letters that wait one behind the other go out as one message. So a burst fills no queue.
//! - An alert that was not delivered is counted and logged, whatever the reason.
//! - The URLs are secrets: they are in no log line and no text. Payloads are not known here.
//!
//! An alert may come twice: a receiver that answers too late is asked again. The JSON object has an
//! `alert_id` to tell by.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use crate::config::AlertsConfig;
use crate::store::Lag;

mod text;
mod body;
mod mailbox;
mod courier;

use courier::{Endpoint, Kind};
use text::Origin;

/// What people are told.
#[derive(Clone, Debug)]
pub enum Alert {
    /// An event was given up.
    DeadLettered(DeadLetter),
    /// The oldest event waits longer than it should.
    LagBegan {
        /// As it was found.
        lag: Lag,
        /// `lag.alert`.
        threshold: Duration,
    },
    /// No event waits too long any more.
    LagEnded {
        /// As it was found.
        lag: Lag,
        /// `lag.alert`.
        threshold: Duration,
    },
    /// Publishing stopped.
    BreakerOpened {
        /// What takes no events, for example "RabbitMQ at mq.example:5672".
        subject: String,
        /// Why, as the breaker has it.
        reason: String,
        /// Claimed events that went back unpublished, if that is known.
        handed_back: Option<u64>,
    },
    /// Publishing goes on.
    BreakerClosed {
        /// As in the alert that it answers.
        subject: String,
        /// How long it was open, if that is known.
        after: Option<Duration>,
    },
    /// This relay cannot reach its database.
    DatabaseLost {
        /// Why.
        reason: String,
    },
    /// It can again.
    DatabaseBack {
        /// How long it could not.
        after: Duration,
    },
    /// This relay ends because of an error.
    RelayFailed {
        /// Why.
        reason: String,
    },
    /// Webhooks that could not be taken as they should.
    Intake(IntakeTrouble),
}

/// What is wrong at the intake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Trouble {
    /// Somebody sends what is refused: a forger, or a sender that is configured wrongly.
    Rejected,
    /// An event failed too often.
    Parked,
    /// A request took longer than `intake.deadline`.
    Deadline,
    /// The database takes no events.
    Failed,
}

/// Trouble at the intake: the last one of its kind, and how many there were since the last alert.
#[derive(Clone, Debug, Serialize)]
pub struct IntakeTrouble {
    /// What kind.
    #[serde(skip)]
    pub trouble: Trouble,
    /// Name of the source.
    pub source: String,
    /// `webhook-id` of the last one, if it was verified.
    pub event_id: Option<String>,
    /// Why.
    pub reason: String,
    /// Failures after which an event is parked.
    #[serde(skip)]
    pub max_attempts: i32,
    /// So many since the last alert of this kind and source.
    pub count: u64,
}

impl Alert {
    /// Names the variant, in logs and in the JSON object.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::DeadLettered(_) => "dead_lettered",
            Self::LagBegan { .. } => "lag_began",
            Self::LagEnded { .. } => "lag_ended",
            Self::BreakerOpened { .. } => "breaker_opened",
            Self::BreakerClosed { .. } => "breaker_closed",
            Self::DatabaseLost { .. } => "database_lost",
            Self::DatabaseBack { .. } => "database_back",
            Self::RelayFailed { .. } => "relay_failed",
            Self::Intake(trouble) => match trouble.trouble {
                Trouble::Rejected => "intake_rejected",
                Trouble::Parked => "intake_parked",
                Trouble::Deadline => "intake_deadline",
                Trouble::Failed => "intake_failed",
            },
        }
    }
}

/// An event that was given up.
#[derive(Clone, Debug, Serialize)]
pub struct DeadLetter {
    /// Outbox id.
    pub id: i64,
    /// Its aggregate type.
    pub aggregate_type: String,
    /// Its aggregate id.
    pub aggregate_id: String,
    /// Its event type.
    pub event_type: String,
    /// Failed attempts.
    pub attempts: i32,
    /// As in the row: class and reason.
    pub last_error: String,
    /// Class of the cause, of [`crate::relay::failure::Cause::class`].
    pub cause: &'static str,
    /// Size of the payload, if it was read.
    pub payload_bytes: Option<u64>,
    /// Later events of its aggregate that wait behind it, if they were counted.
    pub held_back: Option<i64>,
    /// Counting stopped at `held_back`: there may be more.
    pub held_back_capped: bool,
    /// Does it hold back the later events of its aggregate?
    pub holds: bool,
    /// Where a copy was sent.
    pub copied_to: Option<String>,
    /// The table as SQL names it, for the statements in the text.
    #[serde(skip)]
    pub table: String,
}

/// Why an endpoint could not be set up.
#[derive(Debug, thiserror::Error)]
#[error(
    "{key}: cannot set up HTTPS: {reason}; are the system's root certificates installed \
     (ca-certificates)?"
)]
pub struct AlertError {
    key: &'static str,
    reason: String,
}

/// Takes alerts, and sends them when it can. Cheap to clone.
///
/// What waits when the last clone is dropped is not sent: [`Self::flush`] first.
#[derive(Clone)]
pub struct Alerter {
    endpoints: Arc<[Endpoint]>,
}

impl Alerter {
    /// Starts a task for each endpoint that is configured; without any, alerts go nowhere. `table`
    /// and `replica` are what the texts say of where they come from.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn start(config: &AlertsConfig, replica: &str, table: &str) -> Self {
        let origin = Arc::new(Origin {
            replica: replica.to_owned(),
            table: table.to_owned(),
            link: config.link.clone(),
        });
        let endpoints = Kind::configured(config).filter_map(|(kind, url)| {
            Endpoint::start(kind, url, config, origin.clone())
                // A relay that carries events without alerts is better than none.
                .inspect_err(|error| tracing::error!(%error, "alerts cannot be sent"))
                .ok()
        });
        Self {
            endpoints: endpoints.collect(),
        }
    }

    /// Raises an alert.
    pub fn send(&self, alert: Alert) {
        for endpoint in self.endpoints.iter() {
            endpoint.send(alert.clone());
        }
    }

    /// Waits until everything was delivered or given up, for so long at most: before the process
    /// ends. From then on tries come every second. What is left is logged.
    pub async fn flush(&self, within: Duration) {
        let flushes = self.endpoints.iter().map(|endpoint| endpoint.flush(within));
        futures_util::future::join_all(flushes).await;
    }
}

/// Names of the endpoints that are configured, each one set up as a relay would. Sends nothing.
///
/// # Errors
/// When one of them cannot be set up.
pub fn endpoints(config: &AlertsConfig) -> Result<Vec<&'static str>, AlertError> {
    Kind::configured(config)
        .map(|(kind, _)| kind.client(config).map(|_| kind.label()))
        .collect()
}
