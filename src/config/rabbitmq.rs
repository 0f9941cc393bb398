//! `[rabbitmq]`: Where events go.

use std::str::FromStr;
use std::time::Duration;

use serde::Deserialize;

use super::{ConfigError, HOUR, MILLISECOND, Secret, within};

/// A topic exchange: consumers bind to `order.*` or `*.OrderPlaced` on it.
pub const DEFAULT_EXCHANGE: &str = "domain-events";
/// Well below the lease, so that a re-send still happens under the same claim.
pub const DEFAULT_CONFIRM_TIMEOUT: Duration = Duration::from_secs(10);
/// A broker on the same network answers in milliseconds; a wrong address should show soon.
pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Which column becomes the AMQP message id.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub enum MessageId {
    /// The outbox id.
    #[default]
    Id,
    /// The row's UUID.
    EventId,
}

impl TryFrom<String> for MessageId {
    type Error = String;

    fn try_from(value: String) -> Result<Self, String> {
        match value.as_str() {
            "id" => Ok(Self::Id),
            "event_id" => Ok(Self::EventId),
            _ => Err(format!("must be `id` or `event_id`, is `{value}`")),
        }
    }
}

/// `[rabbitmq]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RabbitmqConfig {
    /// `amqp://user:password@host:5672/vhost` or `amqps://…`; `AMQP_URL`.
    pub url: Option<Secret>,
    /// Exchange to publish to, with the routing key `<aggregate_type>.<event_type>`.
    pub exchange: String,
    /// `app_id` of every message: names the installation.
    pub source: String,
    /// Which column becomes the message id.
    pub message_id: MessageId,
    /// A confirm that takes longer counts as lost with its channel. Must be below `relay.lease`.
    #[serde(with = "humantime_serde")]
    pub confirm_timeout: Duration,
    /// For the TCP connection and the AMQP handshake.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
}

impl Default for RabbitmqConfig {
    fn default() -> Self {
        Self {
            url: None,
            exchange: DEFAULT_EXCHANGE.into(),
            source: "bellwire".into(),
            message_id: MessageId::default(),
            confirm_timeout: DEFAULT_CONFIRM_TIMEOUT,
            connect_timeout: DEFAULT_CONNECT_TIMEOUT,
        }
    }
}

impl RabbitmqConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if let Some(url) = &self.url {
            let parsed = url::Url::parse(url.expose()).ok();
            let right = parsed.as_ref().is_some_and(|url| {
                matches!(url.scheme(), "amqp" | "amqps") && url.host_str().is_some()
            });
            if !right || lapin::uri::AMQPUri::from_str(url.expose()).is_err() {
                return Err(ConfigError::key(
                    "rabbitmq.url",
                    "no AMQP URL; give one like amqp://user:password@host:5672/%2f (AMQP_URL), \
                     with special characters of user, password and vhost percent-encoded",
                ));
            }
        }
        for (key, value) in [
            ("rabbitmq.exchange", &self.exchange),
            ("rabbitmq.source", &self.source),
        ] {
            if value.is_empty() || value.len() > 255 {
                return Err(ConfigError::key(
                    key,
                    format!("AMQP takes 1 to 255 bytes, `{value}` has {}", value.len()),
                ));
            }
        }
        within(
            "rabbitmq.confirm_timeout",
            self.confirm_timeout,
            MILLISECOND,
            HOUR,
        )?;
        within(
            "rabbitmq.connect_timeout",
            self.connect_timeout,
            MILLISECOND,
            HOUR,
        )
    }
}
