//! `[relay]`: How events are carried.

use std::time::Duration;

use serde::Deserialize;

use super::{ConfigError, DAY, MILLISECOND, SECOND, at_least_one, at_most, within};
use crate::event::BUCKETS;

/// Two cores drain a tenth more into JetStream with them than with 8, since claims, sends and marks overlap more, and about
/// as much into RabbitMQ. Aggregates, not partitions, bound what goes in parallel.
pub const DEFAULT_PARTITIONS: usize = 16;
/// Confirms outstanding per partition: a classic queue's throughput stops growing at 512 in all.
pub const DEFAULT_WINDOW: usize = 64;
/// Rows per claim: the cost of a claim is spread over them.
pub const DEFAULT_BATCH_SIZE: usize = 500;
/// Bounds how long rows of a frozen replica wait. Renewed at half.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(30);
/// The backstop when a notification is lost; 12 statements a minute when idle.
pub const DEFAULT_TICK: Duration = Duration::from_secs(5);
/// Below the 30 seconds that Kubernetes allows by default. Docker's default of 10 has to be raised.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(20);

/// What wakes the relay.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub enum WakeSetting {
    /// Notifications, and the tick for those that are lost.
    #[default]
    Notify,
    /// The tick alone: no session listens, and the insert trigger can be left out.
    Poll,
}

impl TryFrom<String> for WakeSetting {
    type Error = String;

    fn try_from(value: String) -> Result<Self, String> {
        match value.as_str() {
            "notify" => Ok(Self::Notify),
            "poll" => Ok(Self::Poll),
            _ => Err(format!("must be `notify` or `poll`, is `{value}`")),
        }
    }
}

/// Where events go.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub enum SinkSetting {
    /// An exchange of RabbitMQ: `[rabbitmq]`.
    #[default]
    Rabbitmq,
    /// A stream of NATS JetStream: `[jetstream]`.
    Jetstream,
    /// Topics of Kafka: `[kafka]`.
    Kafka,
    /// Nowhere: every event counts as delivered. For benches and trials.
    Null,
}

impl SinkSetting {
    /// As it is written in a configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rabbitmq => "rabbitmq",
            Self::Jetstream => "jetstream",
            Self::Kafka => "kafka",
            Self::Null => "null",
        }
    }
}

impl TryFrom<String> for SinkSetting {
    type Error = String;

    fn try_from(value: String) -> Result<Self, String> {
        match value.as_str() {
            "rabbitmq" => Ok(Self::Rabbitmq),
            "jetstream" => Ok(Self::Jetstream),
            "kafka" => Ok(Self::Kafka),
            "null" => Ok(Self::Null),
            _ => Err(format!(
                "must be `rabbitmq`, `jetstream`, `kafka` or `null`, is `{value}`"
            )),
        }
    }
}

/// What "in order" means for writers that overlap on one aggregate.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub enum Ordering {
    /// By id among the events that can be seen: one that is committed late comes late.
    #[default]
    Visible,
    /// By id: an event waits until none with a lower id can still appear.
    Strict,
}

impl TryFrom<String> for Ordering {
    type Error = String;

    fn try_from(value: String) -> Result<Self, String> {
        match value.as_str() {
            "visible" => Ok(Self::Visible),
            "strict" => Ok(Self::Strict),
            _ => Err(format!("must be `visible` or `strict`, is `{value}`")),
        }
    }
}

/// `[relay]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RelayConfig {
    /// Is there a relay? A process may have an intake alone.
    pub enabled: bool,
    /// Name of this replica in `outbox_replica`, `claimed_by` and logs; the host name by default.
    pub name: Option<String>,
    /// Where events go, unless their route says otherwise.
    pub sink: SinkSetting,
    /// Publishers; an aggregate always goes through the same one.
    pub partitions: usize,
    /// Confirms outstanding per partition.
    pub window: usize,
    /// Rows per claim, at most.
    pub batch_size: usize,
    /// How long a claim token lives without being renewed.
    #[serde(with = "humantime_serde")]
    pub lease: Duration,
    /// What wakes the relay.
    pub wake: WakeSetting,
    /// The timed look when nothing rings.
    #[serde(with = "humantime_serde")]
    pub tick: Duration,
    /// What "in order" means for writers that overlap on one aggregate.
    pub ordering: Ordering,
    /// How long a stop may take.
    #[serde(with = "humantime_serde")]
    pub grace: Duration,
}

impl Default for RelayConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            name: None,
            sink: SinkSetting::default(),
            partitions: DEFAULT_PARTITIONS,
            window: DEFAULT_WINDOW,
            batch_size: DEFAULT_BATCH_SIZE,
            lease: DEFAULT_LEASE,
            wake: WakeSetting::default(),
            tick: DEFAULT_TICK,
            ordering: Ordering::default(),
            grace: DEFAULT_GRACE,
        }
    }
}

impl RelayConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if let Some(name) = &self.name
            && (name.is_empty() || name.len() > 100 || name.contains(char::is_control))
        {
            return Err(ConfigError::key(
                "relay.name",
                "must have 1 to 100 bytes and no control characters",
            ));
        }
        at_least_one("relay.partitions", self.partitions as u64)?;
        at_most(
            "relay.partitions",
            self.partitions as u64,
            u64::from(BUCKETS),
        )?;
        at_least_one("relay.window", self.window as u64)?;
        at_most("relay.window", self.window as u64, 10_000)?;
        at_least_one("relay.batch_size", self.batch_size as u64)?;
        at_most("relay.batch_size", self.batch_size as u64, 10_000)?;
        within("relay.lease", self.lease, SECOND, DAY)?;
        within("relay.tick", self.tick, 100 * MILLISECOND, DAY)?;
        within("relay.grace", self.grace, Duration::ZERO, DAY)
    }
}
