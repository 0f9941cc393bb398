//! Where the demo plays: a schema, and an exchange and a queue, or a stream, or topics, of its own, removed afterwards.
//!
//! All have one random name, and nothing without that name is ever touched.

use std::cell::Cell;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use lapin::options::{
    ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions,
    QueueDeleteOptions,
};
use lapin::types::FieldTable;
use lapin::{Connection, ExchangeKind};
use tokio::sync::mpsc::UnboundedSender;
use tracing::instrument::WithSubscriber as _;
use tracing::subscriber::NoSubscriber;

use super::watch::News;
use super::{DemoSink, read, stream, topics};
use crate::cli::{Failure, open_store};
use crate::config::{Config, LogFormat, MessageId, SinkSetting};
use crate::sink::{jetstream, rabbitmq};
use crate::store::{Store, StoreError};

/// For each conversation with the broker; it takes milliseconds.
const BROKER_PATIENCE: Duration = Duration::from_secs(10);
/// The backend of a killed relay may hold its locks a moment longer.
const DROP_SCHEMA: &str =
    "SET lock_timeout = '10s'; SET statement_timeout = '30s'; DROP SCHEMA IF EXISTS";

/// Reads what arrives, until it is dropped.
pub(super) enum Reader {
    Queue(read::Reader),
    Stream(stream::Reader),
    Topics(topics::Reader),
}

impl Reader {
    pub(super) async fn run(self, tell: UnboundedSender<News>) -> anyhow::Result<()> {
        match self {
            Self::Queue(reader) => reader.run(tell).await,
            Self::Stream(reader) => reader.run(tell).await,
            Self::Topics(reader) => reader.run(tell).await,
        }
    }
}

/// The demo's own corner of the user's servers.
pub(super) struct Stage {
    name: String,
    /// The user's, but for the names, and for what the checker relies on.
    config: Config,
    store: Store,
    /// Nothing is looked for, and reported as left behind, that was never asked to be made.
    in_database: Cell<bool>,
    in_broker: Cell<bool>,
}

impl Stage {
    /// Chooses names; touches nothing yet.
    pub(super) fn new(mut config: Config, sink: Option<DemoSink>) -> Result<Self, Failure> {
        let name = format!("bellwire_demo_{:08x}", rand::random::<u32>());
        config.database.schema.clone_from(&name);
        config.database.table = "outbox".into();
        config.rabbitmq.exchange.clone_from(&name);
        // The consumer tells events apart, and their order, by the outbox id.
        config.rabbitmq.message_id = MessageId::Id;
        config.jetstream.stream = Some(name.clone());
        config.jetstream.prefix.clone_from(&name);
        config.kafka.prefix.clone_from(&name);
        config.log.format = LogFormat::Text;
        let (set, url, variable) = match (sink, config.relay.sink) {
            (Some(DemoSink::Jetstream), _) | (None, SinkSetting::Jetstream) => {
                config.relay.sink = SinkSetting::Jetstream;
                (config.jetstream.url.is_some(), "jetstream.url", "NATS_URL")
            }
            (Some(DemoSink::Kafka), _) | (None, SinkSetting::Kafka) => {
                config.relay.sink = SinkSetting::Kafka;
                let set = config.kafka.bootstrap_servers.is_some();
                (set, "kafka.bootstrap_servers", "KAFKA_BOOTSTRAP_SERVERS")
            }
            // The demo counts what arrives: nowhere is no place for it.
            _ => {
                config.relay.sink = SinkSetting::Rabbitmq;
                (config.rabbitmq.url.is_some(), "rabbitmq.url", "AMQP_URL")
            }
        };
        if !set {
            return Err(anyhow!(
                "{url} is not set: give it in the configuration file or as {variable}"
            )
            .into());
        }
        let store = open_store(&config, "demo")?;
        Ok(Self {
            name,
            config,
            store,
            in_database: Cell::new(false),
            in_broker: Cell::new(false),
        })
    }

    /// What there is of its name in the broker, for people.
    pub(super) fn place(&self) -> &'static str {
        match self.config.relay.sink {
            SinkSetting::Jetstream => "stream",
            SinkSetting::Kafka => "topics",
            SinkSetting::Rabbitmq | SinkSetting::Null => "exchange and queue",
        }
    }

    /// Of everything that is made.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn config(&self) -> &Config {
        &self.config
    }

    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    /// Where the standard error of a relay goes.
    pub(super) fn log_path(&self, relay: &str) -> PathBuf {
        std::env::temp_dir().join(format!("{}-{relay}.log", self.name))
    }

    /// Makes everything, and starts to read the queue.
    pub(super) async fn set_up(&self) -> Result<Reader, Failure> {
        let client = self.store.connect().await?;
        self.in_database.set(true);
        let created = client
            .batch_execute(&format!("CREATE SCHEMA {}", self.name))
            .await;
        created.map_err(StoreError::from)?;
        // Its log lines would run through the progress.
        self.store
            .migrate()
            .with_subscriber(NoSubscriber::default())
            .await?;
        Ok(match self.config.relay.sink {
            SinkSetting::Jetstream => {
                let set_up = async {
                    let client = jetstream::connect(&self.config.jetstream).await?;
                    self.in_broker.set(true);
                    stream::set_up(client, &self.name).await
                };
                Reader::Stream(self.in_time(set_up).await?)
            }
            SinkSetting::Kafka => {
                self.in_broker.set(true);
                Reader::Topics(self.in_time(topics::set_up(&self.config.kafka)).await?)
            }
            SinkSetting::Rabbitmq | SinkSetting::Null => {
                let set_up = async { self.set_up_broker().await.context("RabbitMQ") };
                Reader::Queue(self.in_time(set_up).await?)
            }
        })
    }

    async fn set_up_broker(&self) -> lapin::Result<read::Reader> {
        let connection = self.connect_broker().await?;
        self.in_broker.set(true);
        let channel = connection.create_channel().await?;
        let durable = ExchangeDeclareOptions {
            durable: true,
            ..ExchangeDeclareOptions::default()
        };
        let name = || self.name.as_str().into();
        channel
            .exchange_declare(name(), ExchangeKind::Topic, durable, FieldTable::default())
            .await?;
        let durable = QueueDeclareOptions {
            durable: true,
            ..QueueDeclareOptions::default()
        };
        channel
            .queue_declare(name(), durable, FieldTable::default())
            .await?;
        let bind = QueueBindOptions::default();
        channel
            .queue_bind(name(), name(), "#".into(), bind, FieldTable::default())
            .await?;
        read::Reader::start(connection, &self.name).await
    }

    /// Removes everything, as far as possible; one line for each thing that stays behind.
    pub(super) async fn remove(&self) -> Vec<String> {
        let mut left = Vec::new();
        if self.in_broker.get()
            && let Err(error) = self.in_time(self.remove_from_broker()).await
        {
            left.push(format!(
                "{} {} may be left behind: {error:#}",
                self.place(),
                self.name
            ));
        }
        if self.in_database.get()
            && let Err(error) = self.remove_schema().await
        {
            left.push(format!("schema {} may be left behind: {error}", self.name));
        }
        left
    }

    async fn remove_from_broker(&self) -> anyhow::Result<()> {
        match self.config.relay.sink {
            SinkSetting::Jetstream => stream::remove(&self.config.jetstream, &self.name).await,
            SinkSetting::Kafka => topics::remove(&self.config.kafka).await,
            SinkSetting::Rabbitmq | SinkSetting::Null => {
                self.remove_queue().await.context("RabbitMQ")
            }
        }
    }

    async fn remove_queue(&self) -> lapin::Result<()> {
        // A connection of its own: the consumer's may be what failed.
        let connection = self.connect_broker().await?;
        let channel = connection.create_channel().await?;
        let name = || self.name.as_str().into();
        channel
            .queue_delete(name(), QueueDeleteOptions::default())
            .await?;
        channel
            .exchange_delete(name(), ExchangeDeleteOptions::default())
            .await?;
        connection.close(200, "OK".into()).await
    }

    async fn remove_schema(&self) -> Result<(), StoreError> {
        let client = self.store.connect().await?;
        client
            .batch_execute(&format!("{DROP_SCHEMA} {} CASCADE", self.name))
            .await?;
        Ok(())
    }

    async fn connect_broker(&self) -> lapin::Result<Connection> {
        rabbitmq::connect(&self.config.rabbitmq, "bellwire demo").await
    }

    async fn in_time<T>(&self, talk: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
        let answer = tokio::time::timeout(BROKER_PATIENCE, talk).await;
        answer.context("the broker does not answer")?
    }

    /// How many rows are in which state, and in whose hand: for a report of trouble.
    pub(super) async fn rows(&self) -> Result<Vec<String>, StoreError> {
        let client = self.store.connect().await?;
        let sql = format!(
            "SELECT format('%s, claimed by %s: %s', status, coalesce(claimed_by, 'nobody'), count(*)) \
             FROM {} GROUP BY status, claimed_by ORDER BY 1",
            self.store.names().qualified("")
        );
        let rows = client.query(&sql, &[]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }
}
