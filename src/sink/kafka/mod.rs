//! Kafka sink: an idempotent producer, each record confirmed by all in-sync replicas.
//!
//! The destination of an address is the topic, its key the record's key: topics can be missing or
//! forbidden, and have breakers. Which partition a key goes to is decided as Java's default does, so
//! that an aggregate is where other producers and consumers of the topic look for it.
//!
//! Invariants, and where they are kept:
//! - exactly one settlement per delivery: `lane`;
//! - no success without a delivery report, which librdkafka gives once all in-sync replicas have the
//!   record: `settings`, `link`;
//! - nothing illegal is sent, and no record without a value: `message`, `topic`;
//! - nothing queued outlives its link, and a producer in a fatal state is replaced: `link`;
//! - what is said of a batch is not said of a record: `verdict`, `lane`;
//! - one attempt to connect at a time: `connection`.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use self::connection::Connector;
use self::message::Composer;
use self::settings::Batching;
use crate::config::{Config, ConfigError, KafkaConfig};
use crate::relay::failure::Cause;
use crate::sink::denials::Denials;
use crate::sink::rules::Check;
use crate::sink::{Lane, Sink, SinkError, Transport};

mod connection;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod lane;
mod link;
mod message;
mod settings;
mod topic;
mod verdict;

/// Carries events to topics of Kafka.
pub struct KafkaSink {
    many: Connector,
    /// For records that were refused together with others.
    alone: Connector,
    composer: Composer,
    denials: Denials,
    config: KafkaConfig,
}

impl KafkaSink {
    /// A sink that connects when it is first needed. Does no I/O but reading certificates.
    ///
    /// # Errors
    /// The configuration names no brokers, or a file that cannot be used.
    pub fn new(config: &Config) -> Result<Arc<Self>, SinkError> {
        let wrong = |error: ConfigError| SinkError::new(Cause::Unreachable, error.to_string());
        let config = config.kafka.clone();
        for batching in [Batching::Many, Batching::Alone] {
            settings::producer(&config, batching).map_err(wrong)?;
        }
        Ok(Arc::new(Self {
            many: Connector::new(config.clone(), Batching::Many),
            alone: Connector::new(config.clone(), Batching::Alone),
            composer: Composer::new(&config),
            denials: Denials::default(),
            config,
        }))
    }

    fn patience(&self) -> Duration {
        self.config.connect_timeout
    }
}

/// The options of another client of the same brokers.
#[cfg_attr(
    not(all(feature = "rabbitmq", feature = "jetstream", feature = "kafka")),
    expect(
        dead_code,
        reason = "the demo needs all sinks, and only the demo needs this"
    )
)]
pub(crate) fn client(config: &KafkaConfig) -> Result<rdkafka::ClientConfig, SinkError> {
    settings::client(config).map_err(|error| SinkError::new(Cause::Unreachable, error.to_string()))
}

/// What can be composed into a record, by these settings.
pub(super) fn check(config: &KafkaConfig) -> Check {
    let composer = Composer::new(config);
    Box::new(move |delivery| composer.compose(delivery).map(drop))
}

#[async_trait]
impl Sink for KafkaSink {
    fn name(&self) -> &'static str {
        "kafka"
    }

    async fn probe(&self) -> Result<(), SinkError> {
        let link = self.many.link().await?;
        let answer = link.is_alive(self.patience()).await;
        if let Err(error) = &answer {
            // Whatever it is, a new one may do better.
            link.kill(error.clone());
        }
        answer
    }

    async fn probe_destination(&self, destination: &str) -> Result<String, SinkError> {
        topic::check_name(destination)?;
        if let Some(error) = self.denials.of(destination) {
            return Err(error);
        }
        let link = self.many.link().await?;
        let found = topic::look(&link, destination, self.patience()).await?;
        let partitions = match found.partitions {
            1 => "1 partition".to_owned(),
            many => format!("{many} partitions"),
        };
        Ok(match found.leaderless {
            0 => partitions,
            some => format!("{partitions}; WARNING: {some} of them without a leader"),
        })
    }

    async fn run_lane(&self, lane: Lane) {
        let parts = lane::Parts {
            many: &self.many,
            alone: &self.alone,
            composer: &self.composer,
            denials: &self.denials,
            confirm_timeout: self.config.confirm_timeout,
            max_message_bytes: self.config.max_message_bytes,
        };
        lane::Run::new(parts).serve(lane).await;
    }

    fn transport(&self) -> watch::Receiver<Transport> {
        self.many.transport()
    }

    async fn close(&self) {
        self.many.close().await;
        self.alone.close().await;
    }
}
