//! A schema, an exchange and a queue that nobody else uses, and a relay process on them.

use std::path::Path;
use std::pin::Pin;
use std::process::Stdio;
use std::time::{Duration, Instant};

use bellwire::config::DatabaseConfig;
use bellwire::store::Store;
use lapin::options::{
    BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions, ExchangeDeleteOptions,
    QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{
    BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, ExchangeKind,
};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio_postgres::Client;

use crate::Options;

/// Longer than a drain takes on a slow machine.
const PATIENCE: Duration = Duration::from_secs(180);
/// Between looks at the outbox while a relay drains it: few enough not to be felt.
const LOOK_PAUSE: Duration = Duration::from_millis(100);
/// The binary that Cargo built for this bench.
pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_bellwire");

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run this by `make bench`"))
}

/// See the module's head.
pub(crate) struct World {
    pub(crate) name: String,
    pub(crate) store: Store,
    pub(crate) db: Client,
    pub(crate) channel: Channel,
    connection: Connection,
}

impl World {
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
        let connection = connect_amqp().await;
        let channel = connection.create_channel().await.expect("a channel");
        let world = Self {
            db: Self::client_of(&name).await,
            name,
            store,
            channel,
            connection,
        };
        world.declare_exchange().await;
        world.fresh_queue().await;
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

    /// A new, empty, durable classic queue that gets everything of the exchange.
    pub(crate) async fn fresh_queue(&self) {
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
            .queue_declare(name(), durable, FieldTable::default());
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

    /// Empties the outbox and fills it with events, without waking anybody.
    pub(crate) async fn load(&self, rows: u32, aggregates: u32, payload_bytes: usize) {
        self.sql("TRUNCATE outbox RESTART IDENTITY").await;
        let (event_type, body) = (EVENT_TYPE, body(payload_bytes));
        self.sql(&format!(
            "SET bellwire.ring = off;
             INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
             SELECT '{AGGREGATE_TYPE}', 'aggregate-' || n % {aggregates}, '{event_type}', '{body}'
             FROM generate_series(1, {rows}) n;
             RESET bellwire.ring"
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

    /// A connection and channel of its own in confirm mode.
    pub(crate) async fn publisher(&self) -> RawPublisher {
        let connection = connect_amqp().await;
        let channel = connection.create_channel().await.expect("a channel");
        let confirms = channel.confirm_select(ConfirmSelectOptions::default());
        confirms.await.expect("confirm mode");
        RawPublisher {
            exchange: self.name.as_str().into(),
            channel,
            connection,
        }
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

async fn connect_amqp() -> Connection {
    let url = variable("AMQP_URL");
    let connected = Connection::connect(&url, ConnectionProperties::default());
    connected.await.expect("the broker answers")
}

/// Aggregate type of all events here.
pub(crate) const AGGREGATE_TYPE: &str = "order";
/// Event type of all events here.
pub(crate) const EVENT_TYPE: &str = "OrderPlaced";

/// A JSON object of about this many bytes.
pub(crate) fn body(bytes: usize) -> String {
    let frame = r#"{"text": ""}"#.len();
    format!(
        r#"{{"text": "{}"}}"#,
        "x".repeat(bytes.saturating_sub(frame))
    )
}

/// Ends with the confirm of one message.
pub(crate) type Confirm = Pin<Box<dyn Future<Output = lapin::Result<Confirmation>> + Send>>;

/// The client library alone, publishing what the relay would publish.
pub(crate) struct RawPublisher {
    exchange: ShortString,
    channel: Channel,
    connection: Connection,
}

impl RawPublisher {
    /// Hands one message to the client, the same as the relay's for event `id`; answers what ends
    /// with its confirm.
    pub(crate) async fn publish(&self, id: u32, aggregates: u32, body: &[u8]) -> Confirm {
        let mandatory = BasicPublishOptions {
            mandatory: true,
            immediate: false,
        };
        let key = format!("{AGGREGATE_TYPE}.{EVENT_TYPE}").into();
        let properties = properties(id, aggregates);
        let exchange = self.exchange.clone();
        let sent = self
            .channel
            .basic_publish(exchange, key, mandatory, body, properties);
        Box::pin(sent.await.expect("the channel takes it"))
    }

    pub(crate) async fn close(self) {
        let _ = self.connection.close(200, "done".into()).await;
    }
}

fn properties(id: u32, aggregates: u32) -> BasicProperties {
    let text = |text: String| AMQPValue::LongString(text.into());
    let mut headers = FieldTable::default();
    headers.insert("aggregate_type".into(), text(AGGREGATE_TYPE.into()));
    headers.insert(
        "aggregate_id".into(),
        text(format!("aggregate-{}", id % aggregates)),
    );
    headers.insert("attempt".into(), AMQPValue::LongInt(1));
    BasicProperties::default()
        .with_content_type("application/json".into())
        .with_headers(headers)
        .with_delivery_mode(2)
        .with_message_id(id.to_string().into())
        .with_type(EVENT_TYPE.into())
        .with_app_id("bellwire".into())
        .with_timestamp(1_700_000_000)
}

/// A relay as users run it. Killed when dropped.
pub(crate) struct Relay {
    child: Child,
}

impl Relay {
    /// Starts the process; it carries what is in the world's outbox.
    pub(crate) fn start(world: &World, binary: &Path, options: &Options) -> Self {
        let settings = [
            ("DATABASE__SCHEMA", world.name.clone()),
            ("RABBITMQ__EXCHANGE", world.name.clone()),
            ("RELAY__PARTITIONS", options.partitions.to_string()),
            ("RELAY__WINDOW", options.window.to_string()),
            ("RELAY__BATCH_SIZE", options.batch.to_string()),
            ("ADMIN__LISTEN", "off".to_owned()),
            ("LOG__LEVEL", "warn".to_owned()),
        ];
        let foreign = std::env::vars_os().filter(|(name, _)| {
            // Somebody's own options would make the figures theirs.
            !name.to_string_lossy().starts_with("BELLWIRE_")
        });
        let child = Command::new(binary)
            .arg("run")
            .env_clear()
            .envs(foreign)
            .envs(settings.map(|(name, value)| (format!("BELLWIRE_{name}"), value)))
            .current_dir(std::env::temp_dir())
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("the binary starts");
        Self { child }
    }

    /// Waits until it owns all buckets and can publish.
    pub(crate) async fn until_ready(&self, world: &World) {
        let owns_all =
            "SELECT count(*) = 64 FROM outbox_bucket JOIN outbox_replica USING (token) WHERE ready";
        world.until(owns_all).await;
    }

    /// Asks for the orderly end and waits for it.
    pub(crate) async fn stop(mut self) {
        let pid = self
            .child
            .id()
            .and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        kill_process(pid.expect("it runs"), Signal::TERM).expect("it can be signalled");
        self.child.wait().await.expect("it ends");
    }
}
