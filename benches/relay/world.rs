//! A schema, an exchange and a queue that nobody else uses.

use std::time::{Duration, Instant};

use bellwire::config::DatabaseConfig;
use bellwire::store::Store;
use lapin::options::{
    ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions,
    QueueDeleteOptions,
};
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, Connection, ExchangeKind};
use tokio_postgres::Client;

use crate::broker::{self, Queue};

/// Longer than anything that is waited for takes on a slow machine.
const PATIENCE: Duration = Duration::from_secs(180);
/// Between looks at the outbox while a relay works on it: few enough not to be felt.
const LOOK_PAUSE: Duration = Duration::from_millis(100);
/// A quorum queue counts with a delay.
const COUNTED_WITHIN: Duration = Duration::from_secs(5);

/// Aggregate type of all events here.
pub(crate) const AGGREGATE_TYPE: &str = "order";
/// Event type of all events here.
pub(crate) const EVENT_TYPE: &str = "OrderPlaced";
/// Of a backlog, unless it is about something else.
pub(crate) const ROWS_PER_AGGREGATE: u32 = 10;

pub(crate) fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run this by `make bench`"))
}

/// A JSON object of about this many bytes.
pub(crate) fn body(bytes: usize) -> String {
    let frame = r#"{"text": ""}"#.len();
    format!(
        r#"{{"text": "{}"}}"#,
        "x".repeat(bytes.saturating_sub(frame))
    )
}

/// Events to write in one statement.
#[derive(Clone, Copy)]
pub(crate) struct Events<'a> {
    pub(crate) rows: u32,
    /// They take turns.
    pub(crate) aggregates: u32,
    /// Their ids begin so.
    pub(crate) named: &'a str,
    pub(crate) payload_bytes: usize,
    /// Further columns, and the expressions for them.
    pub(crate) more: &'a [(&'a str, &'a str)],
}

impl Events<'_> {
    /// As [`World::load`] writes them.
    pub(crate) fn plain(rows: u32, payload_bytes: usize) -> Self {
        Self {
            rows,
            aggregates: (rows / ROWS_PER_AGGREGATE).max(1),
            named: "aggregate-",
            payload_bytes,
            more: &[],
        }
    }

    fn insert(&self) -> String {
        let (columns, values): (Vec<_>, Vec<_>) = self
            .more
            .iter()
            .map(|(column, value)| (format!(", {column}"), format!(", {value}")))
            .unzip();
        // The default of event_id, a random UUID, would take a third of the time.
        format!(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, event_id{})
             SELECT '{AGGREGATE_TYPE}', '{}' || n % {}, '{EVENT_TYPE}', '{}',
                    ('00000000-0000-4000-8000-' || lpad(to_hex(n), 12, '0'))::uuid{}
             FROM generate_series(1, {}) n",
            columns.concat(),
            self.named,
            self.aggregates,
            body(self.payload_bytes),
            values.concat(),
            self.rows
        )
    }
}

/// See the module's head.
pub(crate) struct World {
    pub(crate) name: String,
    pub(crate) store: Store,
    pub(crate) db: Client,
    pub(crate) channel: Channel,
    connection: Connection,
    /// What makes the outbox's indexes but that of its key, and their names.
    indexes: Vec<(String, String)>,
}

impl World {
    /// With a classic queue.
    pub(crate) async fn new(part: &str) -> Self {
        let name = format!("bench_{part}_{}", std::process::id());
        let config = DatabaseConfig {
            url: Some(variable("DATABASE_URL").as_str().into()),
            schema: name.clone(),
            table: "outbox".into(),
            ..DatabaseConfig::default()
        };
        let store = Store::new(&config, "bellwire bench").expect("DATABASE_URL is a URL");
        store.migrate().await.expect("the outbox can be created");
        let connection = broker::connect().await;
        let channel = connection.create_channel().await.expect("a channel");
        let db = Self::client_of(&name).await;
        let sql = "SELECT indexname::text, indexdef FROM pg_indexes
                   WHERE schemaname = $1 AND tablename = 'outbox' AND indexname <> 'outbox_pkey'";
        let indexes = db.query(sql, &[&name]).await.expect("the indexes");
        let world = Self {
            indexes: indexes.iter().map(|row| (row.get(0), row.get(1))).collect(),
            db,
            name,
            store,
            channel,
            connection,
        };
        world.declare_exchange().await;
        world.fresh_queue(Queue::Classic).await;
        world
    }

    /// A client as an application has one: the server's defaults, the schema in its search path.
    pub(crate) async fn client(&self) -> Client {
        Self::client_of(&self.name).await
    }

    async fn client_of(schema: &str) -> Client {
        let (client, driver) =
            tokio_postgres::connect(&variable("DATABASE_URL"), tokio_postgres::NoTls)
                .await
                .expect("the database answers");
        tokio::spawn(driver);
        let set = format!("SET search_path = {schema}, public");
        client.batch_execute(&set).await.expect("the search path");
        client
    }

    pub(crate) async fn sql(&self, sql: &str) {
        let done = self.db.batch_execute(sql).await;
        done.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }

    /// One number.
    pub(crate) async fn number(&self, sql: &str) -> f64 {
        let row = self.db.query_one(sql, &[]).await;
        row.unwrap_or_else(|error| panic!("{sql}: {error:?}"))
            .get(0)
    }

    async fn declare_exchange(&self) {
        let durable = ExchangeDeclareOptions {
            durable: true,
            ..Default::default()
        };
        let (name, kind) = (self.name.as_str().into(), ExchangeKind::Topic);
        let declared = self
            .channel
            .exchange_declare(name, kind, durable, FieldTable::default());
        declared.await.expect("an exchange");
    }

    /// A new, empty, durable queue that gets everything of the exchange.
    pub(crate) async fn fresh_queue(&self, queue: Queue) {
        let name = || ShortString::from(self.name.as_str());
        let deleted = self
            .channel
            .queue_delete(name(), QueueDeleteOptions::default());
        deleted.await.expect("the old queue goes");
        let durable = QueueDeclareOptions {
            durable: true,
            ..Default::default()
        };
        let declared = self
            .channel
            .queue_declare(name(), durable, queue.arguments());
        declared.await.expect("a queue");
        let options = QueueBindOptions::default();
        let bound =
            self.channel
                .queue_bind(name(), name(), "#".into(), options, FieldTable::default());
        bound.await.expect("a binding");
    }

    /// Messages that wait in the queue.
    pub(crate) async fn queued(&self) -> u32 {
        let passive = QueueDeclareOptions {
            passive: true,
            ..Default::default()
        };
        let asked =
            self.channel
                .queue_declare(self.name.as_str().into(), passive, FieldTable::default());
        asked.await.expect("the queue is there").message_count()
    }

    /// A figure is worth nothing if messages were lost or sent twice for it.
    pub(crate) async fn complete(&self, rows: u32, who: &str) {
        let began = Instant::now();
        let mut queued = self.queued().await;
        while queued < rows && began.elapsed() < COUNTED_WITHIN {
            tokio::time::sleep(LOOK_PAUSE).await;
            queued = self.queued().await;
        }
        if queued != rows {
            println!("NOTE: {who} left {queued} messages of {rows} in the queue");
        }
    }

    /// Empties the outbox and fills it with plain events.
    pub(crate) async fn load(&self, rows: u32, payload_bytes: usize) {
        self.refill(&[Events::plain(rows, payload_bytes)]).await;
    }

    /// Empties the outbox and fills it with these events, waking nobody. No relay may run.
    ///
    /// The indexes are built afterwards: with them in place, millions of rows would take minutes.
    pub(crate) async fn refill(&self, events: &[Events<'_>]) {
        let begun = "TRUNCATE outbox RESTART IDENTITY; SET maintenance_work_mem = '256MB'";
        self.sql(begun).await;
        for (index, _) in &self.indexes {
            self.sql(&format!("DROP INDEX {index}")).await;
        }
        for events in events {
            self.add(*events).await;
        }
        for (_, create) in &self.indexes {
            self.sql(create).await;
        }
    }

    /// Writes these events, too, waking nobody.
    pub(crate) async fn add(&self, events: Events<'_>) {
        let insert = events.insert();
        self.sql(&format!(
            "SET bellwire.ring = off; {insert}; RESET bellwire.ring"
        ))
        .await;
    }

    /// Waits until this boolean query is true.
    pub(crate) async fn until(&self, sql: &str) {
        let began = Instant::now();
        loop {
            let row = self.db.query_one(sql, &[]).await;
            if row
                .unwrap_or_else(|error| panic!("{sql}: {error:?}"))
                .get(0)
            {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "not within {PATIENCE:?}: {sql}");
            tokio::time::sleep(LOOK_PAUSE).await;
        }
    }

    /// Waits until nothing is left to publish.
    pub(crate) async fn until_published(&self) {
        self.until(
            "SELECT NOT EXISTS (SELECT FROM outbox WHERE coalesce(status = 'pending' AND claimed_by IS NULL, false))
                AND NOT EXISTS (SELECT FROM outbox WHERE status = 'pending' AND claimed_by IS NOT NULL)",
        )
        .await;
    }

    /// Waits until no relay keeps writers from ringing.
    pub(crate) async fn until_rung_for(&self) {
        self.until(
            "SELECT last_value < extract(epoch FROM clock_timestamp()) * 1000 FROM outbox_awake_until",
        )
        .await;
    }

    pub(crate) async fn clean(self) {
        let drop_schema = format!("DROP SCHEMA {} CASCADE", self.name);
        self.sql(&drop_schema).await;
        let name = || ShortString::from(self.name.as_str());
        // What is left behind here is nobody's harm.
        let _ = self
            .channel
            .queue_delete(name(), QueueDeleteOptions::default())
            .await;
        let _ = self
            .channel
            .exchange_delete(name(), ExchangeDeleteOptions::default())
            .await;
        let _ = self.connection.close(200, "done".into()).await;
    }
}
