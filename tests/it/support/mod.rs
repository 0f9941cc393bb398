//! A world of its own for each test: schema, exchange, queue; relays as real processes.

use std::time::{Duration, Instant};

use bellwire::config::DatabaseConfig;
use bellwire::store::Store;
use futures_util::StreamExt as _;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicQosOptions, ExchangeDeclareOptions,
    ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, Consumer, ExchangeKind};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

mod kafka;
mod fake_nats;
pub mod intake;
mod ledger;
mod load;
mod management;
mod nats;
mod proxy;
mod receiver;
mod relay;
mod roles;
mod services;
mod tls;

pub use fake_nats::FakeNats;
pub use kafka::{Cluster, Record, Topic};
pub use ledger::Ledger;
pub use load::Load;
pub use management::Management;
pub use nats::{Kept, Stream, nats_url};
pub use proxy::Proxy;
pub use receiver::{Receiver, Reply};
pub use relay::{Relay, Run, UNSET};
pub use services::Services;
pub use tls::TlsServers;

/// Longer than anything here takes on a slow machine; shorter than the runner's own limit.
pub const SOON: Duration = Duration::from_secs(30);

pub fn database_url() -> String {
    std::env::var("DATABASE_URL").expect("DATABASE_URL is not set: run the tests by `make test`")
}

pub fn amqp_url() -> String {
    std::env::var("AMQP_URL").expect("AMQP_URL is not set: run the tests by `make test`")
}

/// One message as a consumer got it.
#[derive(Clone, Debug)]
pub struct Arrival {
    pub id: i64,
    pub aggregate: (String, String),
    pub body: Vec<u8>,
    pub exchange: String,
    pub routing_key: String,
    pub properties: BasicProperties,
    pub at: Instant,
}

impl Arrival {
    /// As one of the relay's messages, whose id is the outbox id.
    pub fn of(delivery: lapin::message::Delivery) -> Self {
        let properties = delivery.properties;
        let mut arrival = Self {
            id: properties
                .message_id()
                .as_ref()
                .unwrap()
                .as_str()
                .parse()
                .unwrap(),
            aggregate: Default::default(),
            body: delivery.data,
            exchange: delivery.exchange.as_str().to_owned(),
            routing_key: delivery.routing_key.as_str().to_owned(),
            properties,
            at: Instant::now(),
        };
        arrival.aggregate = (
            arrival.text_header("aggregate_type"),
            arrival.text_header("aggregate_id"),
        );
        arrival
    }

    pub fn header(&self, name: &str) -> Option<AMQPValue> {
        self.properties
            .headers()
            .as_ref()?
            .inner()
            .get(name)
            .cloned()
    }

    pub fn text_header(&self, name: &str) -> String {
        match self.header(name) {
            Some(AMQPValue::LongString(text)) => {
                String::from_utf8(text.as_bytes().to_vec()).unwrap()
            }
            other => panic!("header {name} is {other:?}"),
        }
    }
}

/// A schema, an exchange and a queue that nobody else uses.
pub struct World {
    pub schema: String,
    pub exchange: String,
    pub queue: String,
    pub db: Client,
    pub store: Store,
    pub channel: Channel,
    connection: Connection,
    consumer: Option<Consumer>,
}

impl World {
    /// A migrated outbox, and a durable topic exchange with one durable queue bound by `#`.
    pub async fn new() -> Self {
        let world = Self::unbound().await;
        world.store.migrate().await.unwrap();
        world.declare().await;
        world
    }

    /// Names and connections only: no table, no exchange.
    pub async fn unbound() -> Self {
        let name = format!("t_{:016x}", rand::random::<u64>());
        let config = DatabaseConfig {
            url: Some(database_url().as_str().into()),
            schema: name.clone(),
            table: "outbox".into(),
            ..DatabaseConfig::default()
        };
        let store = Store::new(&config, "bellwire test").unwrap();
        let connection = connect_amqp(&amqp_url()).await;
        let channel = connection.create_channel().await.unwrap();
        let (db, driver) = tokio_postgres::connect(&database_url(), tokio_postgres::NoTls)
            .await
            .unwrap();
        tokio::spawn(driver);
        db.batch_execute(&format!(
            "CREATE SCHEMA {name}; SET search_path = {name}, public"
        ))
        .await
        .unwrap();
        Self {
            exchange: name.clone(),
            queue: name.clone(),
            schema: name,
            db,
            store,
            channel,
            connection,
            consumer: None,
        }
    }

    /// Declares exchange, queue and binding (again).
    pub async fn declare(&self) {
        self.declare_exchange().await;
        let durable = QueueDeclareOptions {
            durable: true,
            ..Default::default()
        };
        self.channel
            .queue_declare(self.queue.as_str().into(), durable, FieldTable::default())
            .await
            .unwrap();
        self.bind("#").await;
    }

    pub async fn declare_exchange(&self) {
        let durable = ExchangeDeclareOptions {
            durable: true,
            ..Default::default()
        };
        self.channel
            .exchange_declare(
                self.exchange.as_str().into(),
                ExchangeKind::Topic,
                durable,
                FieldTable::default(),
            )
            .await
            .unwrap();
    }

    pub async fn bind(&self, pattern: &str) {
        self.channel
            .queue_bind(
                self.queue.as_str().into(),
                self.exchange.as_str().into(),
                pattern.into(),
                QueueBindOptions::default(),
                FieldTable::default(),
            )
            .await
            .unwrap();
    }

    pub async fn unbind(&self, pattern: &str) {
        self.channel
            .queue_unbind(
                self.queue.as_str().into(),
                self.exchange.as_str().into(),
                pattern.into(),
                FieldTable::default(),
            )
            .await
            .unwrap();
    }

    /// New connections to broker and database, after one of them was restarted.
    pub async fn reconnect(&mut self) {
        self.consumer = None;
        self.connection = connect_amqp(&amqp_url()).await;
        self.channel = self.connection.create_channel().await.unwrap();
        let (db, driver) = tokio_postgres::connect(&database_url(), tokio_postgres::NoTls)
            .await
            .unwrap();
        tokio::spawn(driver);
        db.batch_execute(&format!("SET search_path = {}, public", self.schema))
            .await
            .unwrap();
        self.db = db;
    }

    /// A client of its own with the schema in its search path, for an application's or operator's session.
    pub async fn client(&self) -> Client {
        let (client, driver) = tokio_postgres::connect(&database_url(), tokio_postgres::NoTls)
            .await
            .unwrap();
        tokio::spawn(driver);
        client
            .batch_execute(&format!("SET search_path = {}, public", self.schema))
            .await
            .unwrap();
        client
    }

    /// The environment of a relay of this world, without admin port, with a short tick and lease.
    pub fn environment(&self) -> Vec<(String, String)> {
        [
            ("DATABASE_URL", database_url()),
            ("AMQP_URL", amqp_url()),
            ("BELLWIRE_DATABASE__SCHEMA", self.schema.clone()),
            ("BELLWIRE_RABBITMQ__EXCHANGE", self.exchange.clone()),
            ("BELLWIRE_ADMIN__LISTEN", "off".to_owned()),
            ("BELLWIRE_LOG__LEVEL", "bellwire=debug,info".to_owned()),
        ]
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect()
    }

    /// Starts a relay process with these settings over the usual ones (`relay.lease` = "5s"), and
    /// returns at once.
    pub fn relay(&self, settings: &[(&str, &str)]) -> Relay {
        Relay::start(&self.environment(), settings, &["run"])
    }

    /// Starts a relay process and waits until it owns buckets and can publish.
    pub async fn ready_relay(&self, settings: &[(&str, &str)]) -> Relay {
        let relay = self.relay(settings);
        self.until_owned(&relay).await;
        relay
    }

    /// Waits until this relay owns buckets and can publish.
    pub async fn until_owned(&self, relay: &Relay) {
        let owns = format!(
            "SELECT EXISTS (SELECT FROM outbox_replica r JOIN outbox_bucket b USING (token) \
             WHERE r.ready AND r.name LIKE '{}#%')",
            relay.name
        );
        self.until(&owns, SOON).await;
    }

    /// Runs a command of the binary to its end.
    pub async fn command(&self, settings: &[(&str, &str)], arguments: &[&str]) -> Run {
        Relay::start(&self.environment(), settings, arguments)
            .finished(SOON)
            .await
    }

    pub async fn insert(&self, aggregate: (&str, &str), event_type: &str, payload: &str) -> i64 {
        insert(&self.db, aggregate, event_type, payload).await
    }

    /// Inserts `rows` events for each of `aggregates` aggregates named 1, 2, …, taking turns.
    pub async fn fill(&self, aggregate_type: &str, aggregates: i32, rows: i32) {
        let sql = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
             SELECT $1, a::text, 'Happened', jsonb_build_object('n', n)
             FROM generate_series(1, $3::int) n, generate_series(1, $2::int) a ORDER BY n, a";
        let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 3] =
            [&aggregate_type, &aggregates, &rows];
        self.db.execute(sql, &parameters).await.unwrap();
    }

    /// One event there and back: the only lane of a relay with one partition has its channel then, and
    /// what follows is sent at once even when the broker's answers are held back. The row is removed;
    /// ids go on above the one returned.
    pub async fn warm(&mut self) -> i64 {
        let id = self.insert(("warm", "1"), "Warm", "{}").await;
        assert_eq!(self.next_arrival(SOON).await.unwrap().id, id);
        self.until_published(SOON).await;
        self.sql("DELETE FROM outbox").await;
        id
    }

    /// Waits until the live replicas own so many buckets each, in ascending order.
    pub async fn until_shares(&self, shares: &[i64], within: Duration) {
        let sql = format!(
            "SELECT coalesce(array_agg(s.buckets ORDER BY s.buckets), '{{}}') = ARRAY{shares:?}::bigint[]
             FROM (SELECT count(b.bucket) AS buckets
                   FROM outbox_replica r LEFT JOIN outbox_bucket b USING (token)
                   GROUP BY r.token) s"
        );
        self.until(&sql, within).await;
    }

    pub async fn sql(&self, sql: &str) {
        self.db
            .batch_execute(sql)
            .await
            .unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }

    pub async fn one<T: for<'a> tokio_postgres::types::FromSql<'a>>(&self, sql: &str) -> T {
        self.db
            .query_one(sql, &[])
            .await
            .unwrap_or_else(|error| panic!("{sql}: {error:?}"))
            .get(0)
    }

    /// How many rows have this status.
    pub async fn count(&self, status: &str) -> i64 {
        self.one(&format!(
            "SELECT count(*) FROM outbox WHERE status = '{status}'"
        ))
        .await
    }

    /// Waits until a boolean query is true.
    pub async fn until(&self, sql: &str, within: Duration) {
        let began = Instant::now();
        while !self.one::<bool>(sql).await {
            assert!(
                began.elapsed() < within,
                "not within {within:?}: {sql}\n{}",
                self.table_state().await
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until nothing is pending.
    pub async fn until_published(&self, within: Duration) {
        self.until(
            "SELECT NOT EXISTS (SELECT FROM outbox WHERE status = 'pending')",
            within,
        )
        .await;
    }

    /// For the message of a failed test.
    pub async fn table_state(&self) -> String {
        let sql = "SELECT coalesce(string_agg(line, E'\\n'), '(empty)') FROM (
                       SELECT format('%s %s attempts=%s: %s rows, ids %s..%s, %s', status, claimed_by, attempts,
                                     count(*), min(id), max(id), min(last_error)) AS line
                       FROM outbox GROUP BY status, claimed_by, attempts
                       UNION ALL
                       SELECT format('replica %s ready=%s lease=%s buckets=%s', name, ready,
                                     CASE WHEN isfinite(lease_until) THEN (lease_until - now())::text END,
                                     (SELECT count(*) FROM outbox_bucket b WHERE b.token = r.token))
                       FROM outbox_replica r) lines";
        match self.db.query_one(sql, &[]).await {
            Ok(row) => row.get(0),
            Err(error) => error.to_string(),
        }
    }

    async fn consumer(&mut self) -> &mut Consumer {
        if self.consumer.is_none() {
            self.channel
                .basic_qos(1000, BasicQosOptions::default())
                .await
                .unwrap();
            let consumer = self
                .channel
                .basic_consume(
                    self.queue.as_str().into(),
                    "".into(),
                    BasicConsumeOptions::default(),
                    FieldTable::default(),
                )
                .await
                .unwrap();
            self.consumer = Some(consumer);
        }
        self.consumer.as_mut().unwrap()
    }

    /// The next message, if one comes in time. Acknowledged.
    pub async fn next_arrival(&mut self, within: Duration) -> Option<Arrival> {
        let next = self.consumer().await.next();
        let delivery = tokio::time::timeout(within, next).await.ok()??.unwrap();
        delivery.ack(BasicAckOptions::default()).await.unwrap();
        Some(Arrival::of(delivery))
    }

    /// The message id of the next message, whatever kind of id it is.
    pub async fn next_message_id(&mut self, within: Duration) -> Option<String> {
        let next = self.consumer().await.next();
        let delivery = tokio::time::timeout(within, next).await.ok()??.unwrap();
        delivery.ack(BasicAckOptions::default()).await.unwrap();
        delivery
            .properties
            .message_id()
            .as_ref()
            .map(|id| id.as_str().to_owned())
    }

    /// Reads messages in arrival order until `count` different ids came, then whatever else comes
    /// within `quiet`.
    pub async fn arrivals(&mut self, count: usize, within: Duration) -> Vec<Arrival> {
        let began = Instant::now();
        let mut arrivals: Vec<Arrival> = Vec::new();
        let mut ids = std::collections::HashSet::new();
        while ids.len() < count {
            let left = within.saturating_sub(began.elapsed());
            let Some(arrival) = self.next_arrival(left).await else {
                panic!(
                    "{} of {count} arrived within {within:?}\n{}",
                    ids.len(),
                    self.table_state().await
                );
            };
            ids.insert(arrival.id);
            arrivals.push(arrival);
        }
        arrivals.extend(self.rest(Duration::from_millis(200)).await);
        arrivals
    }

    /// Whatever still comes until nothing came for `quiet`.
    pub async fn rest(&mut self, quiet: Duration) -> Vec<Arrival> {
        let mut arrivals = Vec::new();
        while let Some(arrival) = self.next_arrival(quiet).await {
            arrivals.push(arrival);
        }
        arrivals
    }

    /// Every id ever committed to the outbox.
    pub async fn committed(&self) -> Vec<i64> {
        let rows = self
            .db
            .query("SELECT id FROM outbox ORDER BY id", &[])
            .await
            .unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    /// Removes everything. Not called by a test that failed: what is left helps to find out why.
    pub async fn clean(self) {
        // A relay that still runs, or a session of one just killed, takes its locks in another order.
        while let Err(error) = self
            .db
            .batch_execute(&format!("DROP SCHEMA {} CASCADE", self.schema))
            .await
        {
            assert_eq!(
                error.code(),
                Some(&SqlState::T_R_DEADLOCK_DETECTED),
                "{error:?}"
            );
        }
        self.channel
            .queue_delete(self.queue.as_str().into(), QueueDeleteOptions::default())
            .await
            .ok();
        self.channel
            .exchange_delete(
                self.exchange.as_str().into(),
                ExchangeDeleteOptions::default(),
            )
            .await
            .ok();
        self.connection.close(200, "done".into()).await.ok();
    }
}

async fn connect_amqp(url: &str) -> Connection {
    Connection::connect(url, ConnectionProperties::default())
        .await
        .unwrap()
}

pub async fn insert(db: &Client, aggregate: (&str, &str), event_type: &str, payload: &str) -> i64 {
    db.query_one(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
         VALUES ($1, $2, $3, $4::text::jsonb) RETURNING id",
        &[&aggregate.0, &aggregate.1, &event_type, &payload],
    )
    .await
    .unwrap()
    .get(0)
}
