//! Where the demo plays: a schema, an exchange and a queue of its own, removed afterwards.
//!
//! All three have one random name, and nothing without that name is ever touched.

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
use tracing::instrument::WithSubscriber as _;
use tracing::subscriber::NoSubscriber;

use super::read::Reader;
use crate::cli::{Failure, open_store};
use crate::config::{Config, LogFormat, MessageId};
use crate::sink::rabbitmq;
use crate::store::{Store, StoreError};

/// For each conversation with the broker; it takes milliseconds.
const BROKER_PATIENCE: Duration = Duration::from_secs(10);
/// The backend of a killed relay may hold its locks a moment longer.
const DROP_SCHEMA: &str =
    "SET lock_timeout = '10s'; SET statement_timeout = '30s'; DROP SCHEMA IF EXISTS";

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
    pub(super) fn new(mut config: Config) -> Result<Self, Failure> {
        let name = format!("bellwire_demo_{:08x}", rand::random::<u32>());
        config.database.schema.clone_from(&name);
        config.database.table = "outbox".into();
        config.rabbitmq.exchange.clone_from(&name);
        // The consumer tells events apart, and their order, by the outbox id.
        config.rabbitmq.message_id = MessageId::Id;
        config.log.format = LogFormat::Text;
        if config.rabbitmq.url.is_none() {
            return Err(anyhow!(
                "rabbitmq.url is not set: give it in the configuration file or as AMQP_URL"
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

    /// Of the schema, the exchange and the queue.
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
        Ok(self.in_time(self.set_up_broker()).await?)
    }

    async fn set_up_broker(&self) -> lapin::Result<Reader> {
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
        Reader::start(connection, &self.name).await
    }

    /// Removes everything, as far as possible; one line for each thing that stays behind.
    pub(super) async fn remove(&self) -> Vec<String> {
        let mut left = Vec::new();
        if self.in_broker.get()
            && let Err(error) = self.in_time(self.remove_from_broker()).await
        {
            left.push(format!(
                "exchange and queue {} may be left behind: {error:#}",
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

    async fn remove_from_broker(&self) -> lapin::Result<()> {
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

    async fn in_time<T>(&self, talk: impl Future<Output = lapin::Result<T>>) -> anyhow::Result<T> {
        let answer = tokio::time::timeout(BROKER_PATIENCE, talk).await;
        answer
            .context("RabbitMQ does not answer")?
            .context("RabbitMQ")
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
