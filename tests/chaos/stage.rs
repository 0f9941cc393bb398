//! Does what the schedule says to relays, servers and the network between them, and undoes it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lapin::options::{ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ConnectionProperties, ExchangeKind};
use tokio::sync::Mutex;
use tokio_postgres::{Client, NoTls};

use crate::book::Book;
use crate::clock::JUMP;
use crate::relays::Place;
use crate::schedule::{Fault, Kind, Target};
use crate::support::{Services, amqp_url, database_url};

/// What the queue takes from the exchange.
pub const BINDINGS: [&str; 2] = ["*.Good", LATE];
const LATE: &str = "*.Late";
/// Between tries of what a fault elsewhere may be in the way of.
const PAUSE: Duration = Duration::from_millis(100);
/// Between looks whether a killed relay was taken over: the error of that time.
const LOOK_PAUSE: Duration = Duration::from_millis(10);
/// A relay that is not taken over within this is told as a failure.
const TAKEOVER_PATIENCE: Duration = Duration::from_secs(60);
/// Twice the grace time, and what a busy machine adds.
const STOP_PATIENCE: Duration = Duration::from_secs(20);
const NORMAL_WATERMARK: &str = "0.4";
const POLICY: &str = "chaos-full";
pub const ENDLESS: u32 = 1_000_000_000;
const READ_ONLY: &str = "ALTER SYSTEM SET default_transaction_read_only = on";
const READ_WRITE: &str = "ALTER SYSTEM RESET default_transaction_read_only";
const RELOAD: &str = "SELECT pg_reload_conf()";

/// A session of its own, past the proxies, that sees the outbox.
pub async fn connect(schema: &str) -> Result<Client, tokio_postgres::Error> {
    let (client, driver) = tokio_postgres::connect(&database_url(), NoTls).await?;
    tokio::spawn(driver);
    client
        .batch_execute(&format!("SET search_path = {schema}, public"))
        .await?;
    Ok(client)
}

/// A channel of its own, past the proxies. It ends with its connection.
pub async fn open_channel() -> Result<(Connection, Channel), lapin::Error> {
    let connection = Connection::connect(&amqp_url(), ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    Ok((connection, channel))
}

/// The servers; running and set back to normal at the end, whatever it is.
pub struct Servers(Services);

impl Servers {
    pub fn ours() -> Option<Self> {
        Services::ours().map(Self)
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        for server in ["postgres", "rabbitmq"] {
            self.0.run_blocking(&["start", server]);
        }
        self.0
            .rabbitmqctl_blocking(&["set_vm_memory_high_watermark", NORMAL_WATERMARK]);
        self.0.rabbitmqctl_blocking(&["clear_policy", POLICY]);
        let writable = ["psql", "-qc", READ_WRITE, "-qc", RELOAD];
        self.0.run_blocking(&writable);
    }
}

pub struct Stage {
    pub schema: String,
    /// Of the exchange and of the queue.
    pub name: String,
    pub servers: Servers,
    pub places: Vec<Mutex<Place>>,
    pub book: Book,
}

impl Stage {
    /// From its beginning until it is undone.
    pub async fn inflict(self: Arc<Self>, fault: Fault) {
        tokio::time::sleep(fault.after).await;
        match fault.target {
            Target::Relay(relay) => {
                let mut place = self.places[relay].lock().await;
                self.hurt(&mut place, &fault).await;
            }
            Target::Postgres => self.hurt_postgres(&fault).await,
            Target::Broker => self.hurt_broker(&fault).await,
        }
    }

    async fn hurt(self: &Arc<Self>, place: &mut Place, fault: &Fault) {
        let hold = || tokio::time::sleep(fault.hold);
        if fault.kind == Kind::KillRelay {
            return self.kill(place, fault).await;
        }
        let window = self.book.begin(fault);
        match fault.kind {
            Kind::FreezeRelay => {
                place.relay.freeze();
                hold().await;
                place.relay.thaw();
            }
            Kind::TerminateRelay => self.terminate(place).await,
            Kind::ClockAhead | Kind::ClockBehind => {
                let ahead = fault.kind == Kind::ClockAhead;
                place.clock.jump(if ahead { JUMP } else { -JUMP });
                hold().await;
                place.clock.jump(0);
            }
            Kind::CutDatabase | Kind::CutBroker => {
                let proxy = if fault.kind == Kind::CutBroker {
                    &place.broker
                } else {
                    &place.database
                };
                proxy.refuse(true);
                proxy.cut();
                hold().await;
                proxy.refuse(false);
            }
            Kind::DelayDatabase | Kind::DelayBroker => {
                let proxy = if fault.kind == Kind::DelayBroker {
                    &place.broker
                } else {
                    &place.database
                };
                proxy.delay(fault.hold / 10);
                hold().await;
                proxy.delay(Duration::ZERO);
            }
            Kind::MuteDatabase => {
                place.database.mute(true);
                hold().await;
                place.database.mute(false);
            }
            Kind::DeafenDatabase => {
                place.database.deafen(true);
                hold().await;
                place.database.deafen(false);
            }
            Kind::MuteBroker => {
                place.broker.mute(true);
                hold().await;
                place.broker.mute(false);
            }
            Kind::DeafenBroker => {
                place.broker.deafen(true);
                hold().await;
                place.broker.deafen(false);
            }
            other => unreachable!("{other:?} is not done to a relay"),
        }
        self.book.end(window);
    }

    async fn kill(self: &Arc<Self>, place: &mut Place, fault: &Fault) {
        let tokens = self.tokens(&place.relay.name).await;
        let window = self.book.begin(fault);
        let killed = Instant::now();
        place.relay.kill().await;
        // A relay that had no bucket, or of which nobody can tell, has nothing to be taken over.
        if let Some(token) = tokens {
            tokio::spawn(self.clone().watch_takeover(token, window, killed));
        }
        tokio::time::sleep(fault.hold).await;
        place.restart();
        self.book.end(window);
    }

    async fn terminate(&self, place: &mut Place) {
        place.relay.signal(rustix::process::Signal::TERM);
        let ended = place.relay.exited(STOP_PATIENCE * 2);
        match tokio::time::timeout(STOP_PATIENCE, ended).await {
            Ok(status) if status.success() => {}
            Ok(status) => self.fail(place, &format!("ended with {status} when told to stop")),
            Err(_) => {
                self.fail(
                    place,
                    &format!("was still running {STOP_PATIENCE:?} after SIGTERM"),
                );
                place.relay.kill().await;
            }
        }
        place.restart();
    }

    fn fail(&self, place: &Place, what: &str) {
        let relay = &place.relay;
        self.book
            .fail(format!("relay {} ({}) {what}", place.number, relay.name));
    }

    /// Relays that ended though nobody told them to; started again, as a service manager would.
    pub async fn tend(&self) {
        for place in &self.places {
            // While it is held something is being done to it.
            let Ok(mut place) = place.try_lock() else {
                continue;
            };
            if !place.relay.is_running() {
                self.fail(&place, "ended by itself");
                place.restart();
            }
        }
        tokio::time::sleep(PAUSE).await;
    }

    /// The token of this relay, if it owns any bucket and the database can say so.
    async fn tokens(&self, relay: &str) -> Option<i32> {
        let client = connect(&self.schema).await.ok()?;
        let sql = "SELECT r.token FROM outbox_replica r JOIN outbox_bucket b USING (token)
                   WHERE r.name LIKE $1 || '#%' LIMIT 1";
        let row = client.query_opt(sql, &[&relay]).await.ok()??;
        Some(row.get(0))
    }

    async fn watch_takeover(self: Arc<Self>, token: i32, window: usize, killed: Instant) {
        let sql = "SELECT NOT EXISTS (SELECT FROM outbox_replica WHERE token = $1)
                      AND NOT EXISTS (SELECT FROM outbox_bucket WHERE token IS NULL)";
        while killed.elapsed() < TAKEOVER_PATIENCE {
            if let Ok(client) = connect(&self.schema).await {
                while let Ok(row) = client.query_one(sql, &[&token]).await {
                    if row.get(0) {
                        return self.book.taken_over(window, killed);
                    }
                    if killed.elapsed() > TAKEOVER_PATIENCE {
                        break;
                    }
                    tokio::time::sleep(LOOK_PAUSE).await;
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
        self.book.fail(format!(
            "token {token} was not taken over in {TAKEOVER_PATIENCE:?}"
        ));
    }

    /// A session that may write also while others may not.
    async fn operator(&self) -> Client {
        loop {
            if let Ok(client) = connect(&self.schema).await {
                let writable = "SET default_transaction_read_only = off";
                if client.batch_execute(writable).await.is_ok() {
                    return client;
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn hurt_postgres(&self, fault: &Fault) {
        let servers = &self.servers.0;
        let operator = self.operator().await;
        let window = self.book.begin(fault);
        match fault.kind {
            Kind::RestartPostgres => servers.run(&["restart", "postgres"]).await,
            Kind::KillPostgres => {
                servers.run(&["kill", "postgres"]).await;
                tokio::time::sleep(fault.hold / 4).await;
                servers.run(&["start", "postgres"]).await;
            }
            Kind::TerminateBackends => {
                let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                           WHERE datname = current_database() AND application_name LIKE '%run r%'";
                let row = operator.query_one(sql, &[]).await.unwrap();
                assert!(row.get::<_, i64>(0) > 0, "no backend of a relay was found");
            }
            Kind::ReadOnly => {
                operator.batch_execute(READ_ONLY).await.unwrap();
                operator.batch_execute(RELOAD).await.unwrap();
                tokio::time::sleep(fault.hold).await;
                operator.batch_execute(READ_WRITE).await.unwrap();
                operator.batch_execute(RELOAD).await.unwrap();
            }
            other => unreachable!("{other:?} is not done to PostgreSQL"),
        }
        self.book.end(window);
    }

    async fn hurt_broker(&self, fault: &Fault) {
        let servers = &self.servers.0;
        let hold = || tokio::time::sleep(fault.hold);
        let window = self.book.begin(fault);
        match fault.kind {
            Kind::RestartBroker => servers.run(&["restart", "rabbitmq"]).await,
            Kind::KillBroker => {
                servers.run(&["kill", "rabbitmq"]).await;
                tokio::time::sleep(fault.hold / 4).await;
                servers.run(&["start", "rabbitmq"]).await;
                // What was declared or set in the seconds before may be gone: RabbitMQ's database writes its log late.
                self.hold_at_most(ENDLESS).await;
                let (_connection, channel) = open_channel().await.unwrap();
                self.declare(&channel).await;
            }
            Kind::MemoryAlarm => {
                let watermark = |share| ["set_vm_memory_high_watermark", share];
                servers.rabbitmqctl(&watermark("0.00001")).await;
                hold().await;
                servers.rabbitmqctl(&watermark(NORMAL_WATERMARK)).await;
            }
            Kind::FullQueue => {
                self.hold_at_most(0).await;
                hold().await;
                self.hold_at_most(ENDLESS).await;
            }
            Kind::DeleteExchange => {
                let (_connection, channel) = open_channel().await.unwrap();
                let exchange = self.name.as_str();
                channel
                    .exchange_delete(exchange.into(), ExchangeDeleteOptions::default())
                    .await
                    .unwrap();
                hold().await;
                self.declare(&channel).await;
            }
            Kind::Unbind => {
                let (_connection, channel) = open_channel().await.unwrap();
                self.unbind(&channel, LATE).await;
                hold().await;
                self.bind(&channel, LATE).await;
            }
            other => unreachable!("{other:?} is not done to the broker"),
        }
        self.book.end(window);
    }

    /// The queue rejects what is beyond. It does so from the beginning on: RabbitMQ drops what a queue holds when it is
    /// given a limit and this rule at once, after it has confirmed it.
    pub async fn hold_at_most(&self, messages: u32) {
        let pattern = format!("^{}$", self.name);
        let rule = format!(r#"{{"max-length": {messages}, "overflow": "reject-publish"}}"#);
        let set = [
            "set_policy",
            POLICY,
            &pattern,
            &rule,
            "--apply-to",
            "queues",
        ];
        self.servers.0.rabbitmqctl(&set).await;
    }

    async fn declare(&self, channel: &Channel) {
        let durable = ExchangeDeclareOptions {
            durable: true,
            ..Default::default()
        };
        let exchange = self.name.as_str();
        channel
            .exchange_declare(
                exchange.into(),
                ExchangeKind::Topic,
                durable,
                FieldTable::default(),
            )
            .await
            .unwrap();
        for pattern in BINDINGS {
            self.bind(channel, pattern).await;
        }
    }

    async fn bind(&self, channel: &Channel, pattern: &str) {
        let name = self.name.as_str();
        channel
            .queue_bind(
                name.into(),
                name.into(),
                pattern.into(),
                QueueBindOptions::default(),
                FieldTable::default(),
            )
            .await
            .unwrap();
    }

    async fn unbind(&self, channel: &Channel, pattern: &str) {
        let name = self.name.as_str();
        channel
            .queue_unbind(
                name.into(),
                name.into(),
                pattern.into(),
                FieldTable::default(),
            )
            .await
            .unwrap();
    }
}
