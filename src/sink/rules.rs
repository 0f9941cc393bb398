//! What the sink of a configuration can carry, asked before an event is written. Pure: no I/O.
//!
//! The same code that composes a message for the broker says it, with the relay's routes: what passes
//! here is found neither `illegal_name` nor `undecodable` by a relay of the same configuration.

use std::fmt;
use std::sync::Arc;

#[cfg(feature = "jetstream")]
use super::jetstream;
#[cfg(feature = "kafka")]
use super::kafka;
#[cfg(feature = "rabbitmq")]
use super::rabbitmq;
use super::{Delivery, SinkError};
use crate::config::{Config, ConfigError, SinkInUse, SinkSetting};
use crate::event::{ClaimToken, OutboxEvent};
use crate::route::Router;

/// Says of one message why the transport cannot carry it.
pub(super) type Check = Box<dyn Fn(&Delivery) -> Result<(), SinkError> + Send + Sync>;

/// The rules of a relay's sinks and routes, for names and headers of events.
pub struct SinkRules {
    router: Router,
    token: Arc<ClaimToken>,
    /// By the sink's name, which an event has only where there are several.
    checks: Vec<(&'static str, Check)>,
}

impl fmt::Debug for SinkRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SinkRules")
            .field("router", &self.router)
            .finish_non_exhaustive()
    }
}

impl SinkRules {
    /// The rules of a relay with this configuration. No URL is needed: nothing is connected to.
    ///
    /// # Errors
    /// Names the key that is wrong.
    pub fn of(config: &Config) -> Result<Self, ConfigError> {
        let mut checks = Vec::new();
        for used in &config.sinks_in_use().sinks {
            checks.push((used.sink.name(), check(config, used)?));
        }
        Ok(Self {
            router: config.router()?,
            token: Arc::new(ClaimToken::new(0, String::new())),
            checks,
        })
    }

    /// Could a relay carry this event? Its size is not looked at: that is the broker's to say.
    ///
    /// # Errors
    /// What the relay would give it up for.
    pub fn check(&self, event: OutboxEvent) -> Result<(), SinkError> {
        let delivery = self.router.deliver(event, &self.token);
        for address in delivery.addresses() {
            let sink = address.sink.as_deref();
            let of_place = |(name, _): &&(&str, Check)| sink.is_none_or(|sink| sink == *name);
            let (_, check) = self.checks.iter().find(of_place).expect("it is in use");
            check(&delivery.copy_for(address))?;
        }
        Ok(())
    }
}

#[cfg_attr(
    not(any(feature = "rabbitmq", feature = "jetstream", feature = "kafka")),
    expect(unused_variables, reason = "the null sink has no section")
)]
fn check(config: &Config, used: &SinkInUse) -> Result<Check, ConfigError> {
    Ok(match used.sink {
        #[cfg(feature = "rabbitmq")]
        SinkSetting::Rabbitmq => rabbitmq::check(&config.rabbitmq)?,
        #[cfg(feature = "jetstream")]
        SinkSetting::Jetstream => jetstream::check(&config.jetstream),
        #[cfg(feature = "kafka")]
        SinkSetting::Kafka => kafka::check(&config.kafka),
        SinkSetting::Null => Box::new(|_| Ok(())),
        #[cfg(not(all(feature = "rabbitmq", feature = "jetstream", feature = "kafka")))]
        _ => {
            return Err(ConfigError::Key {
                key: used.key.clone(),
                reason: super::left_out(used),
            });
        }
    })
}

#[cfg(test)]
#[cfg(all(feature = "rabbitmq", feature = "jetstream", feature = "kafka"))]
mod tests {
    use super::*;
    use crate::config::{AlsoConfig, JetstreamConfig, RouteConfig};

    fn refused(config: &Config, aggregate_type: &str, headers: Option<&str>) -> Option<String> {
        let rules = SinkRules::of(config).unwrap();
        let event = OutboxEvent {
            event_id: Some("00000000-0000-4000-8000-000000000000".into()),
            headers: headers.map(Into::into),
            ..OutboxEvent::sample(1, (aggregate_type, "7"), "Placed")
        };
        rules.check(event).err().map(|error| error.message)
    }

    #[test]
    fn each_sink_has_its_own_rules_and_needs_no_url_for_them() {
        let mut config = Config::default();
        assert_eq!(refused(&config, "a.b c", None), None);
        let long = refused(&config, &"x".repeat(300), None).unwrap();
        assert!(long.contains("routing key"), "{long}");
        assert!(refused(&config, "order", Some(r#"{"CC": "x"}"#)).is_some());
        config.jetstream = JetstreamConfig {
            stream: Some("EVENTS".into()),
            ..JetstreamConfig::default()
        };
        config.relay.sink = SinkSetting::Jetstream;
        let dotted = refused(&config, "a.b", None).unwrap();
        assert!(dotted.starts_with("aggregate_type"), "{dotted}");
        assert!(refused(&config, "order", Some(r#"{"Nats-Msg-Id": "x"}"#)).is_some());
        assert_eq!(refused(&config, "order", Some(r#"{"CC": "x"}"#)), None);
        config.relay.sink = SinkSetting::Kafka;
        assert_eq!(refused(&config, "a.b", None), None);
        let spaced = refused(&config, "a b", None).unwrap();
        assert!(spaced.starts_with("topic 'events.a b'"), "{spaced}");
        config.relay.sink = SinkSetting::Null;
        assert_eq!(refused(&config, "a.b", None), None);
    }

    #[test]
    fn each_place_of_an_event_has_the_rules_of_its_own_sink() {
        let mut config = Config::default();
        config.jetstream.stream = Some("EVENTS".into());
        config.routes.push(RouteConfig {
            aggregate_type: "a*".into(),
            also: vec![AlsoConfig {
                sink: Some(SinkSetting::Jetstream),
                routing_key: Some("shop.{aggregate_type}".into()),
                ..AlsoConfig::default()
            }],
            ..RouteConfig::default()
        });
        assert_eq!(refused(&config, "abc", None), None);
        assert!(refused(&config, "abc", Some(r#"{"CC": "x"}"#)).is_some());
        assert!(refused(&config, "abc", Some(r#"{"Nats-Msg-Id": "x"}"#)).is_some());
        let dotted = refused(&config, "a.b", None).unwrap();
        assert!(dotted.starts_with("aggregate_type"), "{dotted}");
        assert_eq!(refused(&config, "b.c", None), None, "RabbitMQ alone");
    }
}
