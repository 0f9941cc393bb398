//! RabbitMQ sink: publisher confirms, mandatory, persistent.
//!
//! One connection, one channel in confirm mode for each lane. Only an acknowledgement of a message
//! that was not returned is success; since lapin hands returns to the wrong confirms when
//! publishes are pipelined, `verdicts` decides that.
//!
//! Invariants, and where they are kept:
//! - exactly one settlement per delivery: `lane`;
//! - no success without certainty: `verdicts`, which relies on the passes of `in_flight`;
//! - nothing illegal is sent: `message`;
//! - only the broker's own reason accuses an event: `fault`;
//! - one connection attempt at a time: `connection`; none that cannot be ended: `link`;
//! - trouble of the management API stops nothing that was delivering: `guard`.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lapin::options::ExchangeDeclareOptions;
use lapin::types::{FieldTable, ShortString};
use lapin::uri::AMQPUri;
use lapin::{Channel, Connection, ConnectionProperties, ExchangeKind};
use tokio::sync::watch;
use tokio::time::timeout;

use self::connection::Connector;
use self::fault::{Place, Unconfirmed};
use self::guard::Guard;
use self::link::Link;
use self::management::Management;
use self::message::Composer;
use crate::config::{ConfigError, RabbitmqConfig};
use crate::relay::failure::Cause;
use crate::sink::rules::Check;
use crate::sink::{Lane, Sink, SinkError, Transport};

mod channel;
mod connection;
mod fault;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod guard;
mod in_flight;
mod lane;
mod link;
mod management;
mod message;
mod verdicts;

/// What AMQP can carry.
///
/// # Errors
/// The configured source is too long.
pub(super) fn check(config: &RabbitmqConfig) -> Result<Check, ConfigError> {
    let composer = Composer::new(config)
        .map_err(|error| ConfigError::key("rabbitmq.source", error.message))?;
    Ok(Box::new(move |delivery| {
        composer.compose(delivery).map(drop)
    }))
}

/// Carries events to a RabbitMQ exchange.
pub struct RabbitmqSink {
    connector: Connector,
    composer: Composer,
    /// None without a management API.
    guard: Option<Guard>,
    confirm_timeout: Duration,
    connect_timeout: Duration,
}

impl RabbitmqSink {
    /// A sink that connects when it is first needed. Does no I/O. Best called on the runtime that
    /// lives longest: the connection's tasks run there.
    ///
    /// # Errors
    /// The configuration has no usable URL, or a name that AMQP cannot carry.
    pub fn new(config: RabbitmqConfig) -> Result<Arc<Self>, SinkError> {
        let url = config.url.as_ref().map(|url| url.expose());
        let uri = url.and_then(parse).ok_or_else(|| {
            SinkError::new(
                Cause::Unreachable,
                "rabbitmq.url is not set or no AMQP URL (AMQP_URL)",
            )
        })?;
        let wrong = |error: ConfigError| SinkError::new(Cause::Unreachable, error.to_string());
        let tls = config.tls().map_err(wrong)?;
        let management = Management::new(&config, &uri).map_err(wrong)?;
        let place = Place {
            address: format!("{}:{}", uri.authority.host, uri.authority.port),
            encrypted: tls.is_some(),
            vhost: uri.vhost.clone(),
        };
        Ok(Arc::new(Self {
            composer: Composer::new(&config)?,
            guard: management.map(Guard::new),
            connector: Connector::new(uri, tls, place, &config),
            confirm_timeout: config.confirm_timeout,
            connect_timeout: config.connect_timeout,
        }))
    }

    /// A passive declaration: asks, and creates nothing.
    async fn find_exchange(
        &self,
        link: &Link,
        channel: &Channel,
        exchange: &str,
    ) -> Result<(), SinkError> {
        let name = ShortString::try_new(exchange.to_owned()).map_err(|_| {
            SinkError::new(
                Cause::IllegalName,
                format!("exchange name '{exchange}' has over 255 bytes"),
            )
        })?;
        let declare = channel.exchange_declare(
            name,
            // Not looked at in a passive declaration.
            ExchangeKind::Topic,
            ExchangeDeclareOptions {
                passive: true,
                ..ExchangeDeclareOptions::default()
            },
            FieldTable::default(),
        );
        let place = &self.connector.place;
        match timeout(self.connect_timeout, declare).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => {
                let nobody = Unconfirmed {
                    on_channel: 0,
                    on_connection: 0,
                };
                Err(place.closed(link.why().unwrap_or(&error), exchange, nobody))
            }
            Err(_) if link.is_blocked() => Err(link.blocked_error()),
            Err(_) => {
                let error = place.connection_lost("no answer to exchange.declare");
                link.kill(&error.message);
                Err(error)
            }
        }
    }
}

#[async_trait]
impl Sink for RabbitmqSink {
    fn name(&self) -> &'static str {
        "rabbitmq"
    }

    async fn probe(&self) -> Result<(), SinkError> {
        let link = self.connector.link().await?;
        if link.is_blocked() {
            return Err(link.blocked_error());
        }
        let channel = link.open_channel().await?;
        link.try_canary(&channel).await?;
        link.close_channel(&channel).await;
        Ok(())
    }

    /// On a channel of its own, since a missing exchange closes it. AMQP comes first: whether an
    /// exchange exists is its word.
    async fn probe_destination(&self, destination: &str) -> Result<String, SinkError> {
        let link = self.connector.link().await?;
        if link.is_blocked() {
            return Err(link.blocked_error());
        }
        let channel = link.open_channel().await?;
        self.find_exchange(&link, &channel, destination).await?;
        link.close_channel(&channel).await;
        match &self.guard {
            Some(guard) => guard.ask(destination).await,
            None => Ok("bindings not checked: set rabbitmq.management_url".to_owned()),
        }
    }

    async fn run_lane(&self, lane: Lane) {
        let parts = lane::Parts {
            connector: &self.connector,
            composer: &self.composer,
            guard: self.guard.as_ref(),
            confirm_timeout: self.confirm_timeout,
        };
        lane::Run::new(parts).serve(lane).await;
    }

    fn transport(&self) -> watch::Receiver<Transport> {
        self.connector.transport()
    }

    async fn close(&self) {
        self.connector.close().await;
    }
}

/// A connection for other purposes than publishing, as the configuration has it.
#[cfg_attr(
    not(all(feature = "rabbitmq", feature = "jetstream", feature = "kafka")),
    expect(
        dead_code,
        reason = "the demo needs all sinks, and only the demo needs this"
    )
)]
pub(crate) async fn connect(config: &RabbitmqConfig, name: &str) -> lapin::Result<Connection> {
    let other = |text: String| lapin::Error::from(std::io::Error::other(text));
    let url = config.url.as_ref().map_or("", |url| url.expose());
    let uri = parse(url).ok_or_else(|| other("no AMQP URL".into()))?;
    let tls = config.tls().map_err(|error| other(error.to_string()))?;
    let properties = ConnectionProperties::default().with_connection_name(name.into());
    connection::handshake(
        uri,
        tls,
        properties,
        link::Socket::default(),
        config.connect_timeout,
    )
    .await
}

/// An AMQP URL, read in full: lapin's own parser takes an IPv6 host for none at all, and goes to
/// localhost.
fn parse(url: &str) -> Option<AMQPUri> {
    let mut uri = AMQPUri::from_str(url).ok()?;
    let parsed = url::Url::parse(url).ok()?;
    if let Some(url::Host::Ipv6(host)) = parsed.host() {
        uri.authority.host = host.to_string();
    }
    Some(uri)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_taken_from_the_url() {
        let host = |url| parse(url).unwrap().authority.host;
        assert_eq!(host("amqp://u:p@[::1]:5673/shop"), "::1");
        assert_eq!(host("amqp://u:p@10.0.0.7/shop"), "10.0.0.7");
        assert_eq!(host("amqps://u:p@mq.example/shop"), "mq.example");
    }

    #[test]
    fn a_sink_without_a_url_is_refused_without_io() {
        let error = RabbitmqSink::new(RabbitmqConfig::default()).err().unwrap();
        assert!(error.message.contains("AMQP_URL"));
    }
}
