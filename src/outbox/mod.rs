//! The library's face: publish events from Rust within your own transaction, look after the outbox,
//! and run the relay in your own process.
//!
//! [`Outbox`] writes events on a connection of *yours*, in a transaction of *yours*: the event is
//! committed with the state that it tells of, or disappears with it. A relay, the program `bellwire
//! run` or an [`OutboxRelay`] in your process, carries what was committed to the broker.
//!
//! ```no_run
//! use bellwire::config::Config;
//! use bellwire::outbox::{NewEvent, Outbox, OutboxSettings};
//!
//! # async fn example(mut client: tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error>> {
//! // Once, at the start: a table of another shape is found here, not at the first order.
//! let outbox = Outbox::open(&client, OutboxSettings::default()).await?;
//!
//! let transaction = client.transaction().await?;
//! transaction
//!     .execute("UPDATE orders SET state = 'placed' WHERE id = $1", &[&"ORD-10492"])
//!     .await?;
//! let event = NewEvent::raw("order", "ORD-10492", "OrderPlaced", r#"{"total": 149.50}"#)
//!     .header("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
//! let id = outbox.publish(&transaction, &event).await?;
//! transaction.commit().await?;
//! println!("event {id} leaves now");
//! # Ok(())
//! # }
//! ```
//!
//! # A transaction is asked for
//!
//! [`Outbox::publish`] takes what is a transaction by its type: [`tokio_postgres::Transaction`] or
//! [`deadpool_postgres::Transaction`]. A client is not accepted, since an event that is written by itself
//! is the mistake that an outbox is there to prevent. Who begins transactions by SQL says so with
//! [`Begun`].
//!
//! # Against a real database
//!
//! This example is run with the tests, where `DATABASE_URL` names a server:
//!
//! ```
//! use bellwire::config::DatabaseConfig;
//! use bellwire::outbox::{NewEvent, Outbox, OutboxSettings};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let Ok(url) = std::env::var("DATABASE_URL") else { return Ok(()) };
//! # let schema = format!("doc_{}", std::process::id());
//! # let (mut client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
//! # tokio::spawn(connection);
//! # let database = DatabaseConfig {
//! #     url: Some(url.as_str().into()),
//! #     schema: schema.clone(),
//! #     ..DatabaseConfig::default()
//! # };
//! // As `bellwire migrate` does it; nothing else here ever changes the schema.
//! Outbox::migrate(&database).await?;
//! let settings = OutboxSettings { schema: schema.clone(), ..OutboxSettings::default() };
//! let outbox = Outbox::open(&client, settings).await?;
//!
//! let transaction = client.transaction().await?;
//! let event = NewEvent::raw("order", "1", "OrderPlaced", r#"{"total": 1e400}"#);
//! outbox.publish(&transaction, &event).await?;
//! transaction.rollback().await?;
//! assert_eq!(outbox.lag(&client).await?.pending, 0);
//!
//! let transaction = client.transaction().await?;
//! outbox.publish(&transaction, &event).await?;
//! transaction.commit().await?;
//! assert_eq!(outbox.lag(&client).await?.pending, 1);
//! # client.batch_execute(&format!("DROP SCHEMA {schema} CASCADE")).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Invariants
//! - Nothing is committed, rolled back or begun on a connection that was handed in.
//! - The text of a payload goes to the server as it was given: no JSON value is made of it here.
//! - What can be refused without the database is refused before anything is sent, so that the
//!   transaction stays usable. An error of the database has aborted it, as ever in PostgreSQL.
//! - The schema is changed by [`Outbox::migrate`] alone.

use std::sync::Arc;
use std::time::Duration;

use crate::config::{Config, DEFAULT_KEEP, DEFAULT_STEP, DatabaseConfig};
use crate::store::{Names, Pruned, Store, Writer};

mod client;
mod error;
mod event;
mod relay;

pub use client::{AnyClient, AnyTransaction, Begun};
pub use error::OutboxError;
pub use event::NewEvent;
pub use relay::{OutboxRelay, RunningRelay};

#[doc(no_inline)]
pub use crate::event::EventId;
#[doc(no_inline)]
pub use crate::relay::supervisor::{Ending, View};
#[doc(no_inline)]
pub use crate::sink::SinkRules;
#[doc(no_inline)]
pub use crate::store::{Lag, Migrated};

/// Events of one statement of [`Outbox::publish_many`]: bounds its memory, and is long past where more
/// would make it faster.
const EVENTS_PER_STATEMENT: usize = 1_000;

/// Which outbox, and what is refused beyond what no relay could carry.
#[derive(Clone, Debug)]
pub struct OutboxSettings {
    /// Schema of the outbox table.
    pub schema: String,
    /// Name of the outbox table.
    pub table: String,
    /// The most bytes of a message's body (`payload::text`); a larger event fails in
    /// [`Outbox::publish`] rather than in the relay. None: as many as PostgreSQL takes.
    pub max_payload_bytes: Option<u32>,
    /// What the relay's sink and routes can carry: other events fail in [`Outbox::publish`], too.
    /// None: whatever some relay could carry is taken.
    pub rules: Option<Arc<SinkRules>>,
    /// How long published events are kept by [`Outbox::prune`].
    pub keep: Duration,
    /// Events that one statement of [`Outbox::prune`] deletes, at most.
    pub prune_step: u32,
}

impl Default for OutboxSettings {
    fn default() -> Self {
        let database = DatabaseConfig::default();
        Self {
            schema: database.schema,
            table: database.table,
            max_payload_bytes: None,
            rules: None,
            keep: DEFAULT_KEEP,
            prune_step: DEFAULT_STEP,
        }
    }
}

impl OutboxSettings {
    /// The settings that go with a relay of this configuration: its outbox, its times, and its sink's
    /// and routes' rules for names and headers.
    ///
    /// # Errors
    /// The configuration is no relay's; names the key.
    pub fn of(config: &Config) -> Result<Self, OutboxError> {
        Ok(Self {
            schema: config.database.schema.clone(),
            table: config.database.table.clone(),
            max_payload_bytes: None,
            rules: Some(Arc::new(SinkRules::of(config)?)),
            keep: config.prune.keep.0.unwrap_or(Duration::MAX),
            prune_step: config.prune.step,
        })
    }
}

/// An outbox, for whoever writes events or looks after them. Holds no connection; cheap to clone.
#[derive(Clone, Debug)]
pub struct Outbox(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    writer: Writer,
    settings: OutboxSettings,
}

impl Outbox {
    /// Finds the outbox in the database of this client, and looks whether it is one that this version
    /// can write to. Changes nothing.
    ///
    /// The role needs `SELECT` on `outbox_migrations`. A *newer* schema is accepted: migrations take
    /// nothing from those who write, and applications are deployed at other times than relays.
    ///
    /// # Errors
    /// The table is missing, of another shape, or of an older schema version: the text says what
    /// differs and what to run. Or the database refuses.
    pub async fn open<C: AnyClient>(
        client: &C,
        settings: OutboxSettings,
    ) -> Result<Self, OutboxError> {
        let names = Names::new(&settings.schema, &settings.table);
        let writer = Writer::find(client.driver(), names).await?;
        Ok(Self(Arc::new(Inner { writer, settings })))
    }

    /// Creates the outbox, or adopts or updates an existing one, as `bellwire migrate` does: on
    /// connections of its own, safe at any time. The role must own the table.
    ///
    /// # Errors
    /// The table cannot be adopted, a lock is not to be had, or the database refuses.
    pub async fn migrate(database: &DatabaseConfig) -> Result<Migrated, OutboxError> {
        Ok(Store::new(database, "bellwire library")?.migrate().await?)
    }

    /// Writes an event within this transaction; answers its outbox id, which is its message id on
    /// RabbitMQ unless configured otherwise.
    ///
    /// Once the transaction has committed the event leaves, at least once, after those of its aggregate
    /// with lower ids. If it is rolled back, also to a savepoint, there never was an event. One round
    /// trip. `INSERT` on the table is all the right that it needs.
    ///
    /// # Errors
    /// [`OutboxError::Event`]: a part of the event is wrong, nothing was sent, and the transaction can
    /// go on. All others come from the database and have aborted the transaction.
    pub async fn publish<T: AnyTransaction>(
        &self,
        transaction: &T,
        event: &NewEvent,
    ) -> Result<EventId, OutboxError> {
        let ids = self.write(transaction, std::slice::from_ref(event)).await?;
        ids.first()
            .copied()
            .ok_or(OutboxError::NoAnswer("no id came back"))
    }

    /// Writes these events within this transaction, in their order; answers their ids in that order.
    ///
    /// A statement for each thousand: far fewer round trips than [`Self::publish`] for each. It costs the
    /// database least where the role may also `SELECT` the column `id`, and no
    /// [`max_payload_bytes`](OutboxSettings::max_payload_bytes) is set; otherwise each event is an insert of its own
    /// within the statement.
    ///
    /// # Errors
    /// As of [`Self::publish`]. All events are looked at before the first is sent.
    pub async fn publish_many<T: AnyTransaction>(
        &self,
        transaction: &T,
        events: &[NewEvent],
    ) -> Result<Vec<EventId>, OutboxError> {
        self.write(transaction, events).await
    }

    async fn write<T: AnyTransaction>(
        &self,
        transaction: &T,
        events: &[NewEvent],
    ) -> Result<Vec<EventId>, OutboxError> {
        let Inner { writer, settings } = &*self.0;
        for event in events {
            event.check()?;
            if let Some(rules) = &settings.rules {
                rules
                    .check(event.as_claimed())
                    .map_err(OutboxError::of_sink)?;
            }
        }
        let most = settings
            .max_payload_bytes
            .map(|most| i32::try_from(most).unwrap_or(i32::MAX));
        let mut ids = Vec::with_capacity(events.len());
        for some in events.chunks(EVENTS_PER_STATEMENT) {
            let rows = event::rows(some);
            let written = writer
                .insert(transaction.driver_within(), &rows, most)
                .await;
            let written = written.map_err(|error| OutboxError::of_insert(error, writer.names()))?;
            ids.extend(written.into_iter().map(EventId));
        }
        Ok(ids)
    }

    /// How much waits, since when, and for what: `pending`, and [`Lag::age`] of the oldest, are what to
    /// alert on. Never a scan of the backlog: counting stops at [`Lag::counted_to`].
    ///
    /// Needs the rights of the role `bellwire_operator` or `bellwire_relay` (`sql/roles.sql`).
    ///
    /// # Errors
    /// The database does not answer or refuses.
    pub async fn lag<C: AnyClient>(&self, client: &C) -> Result<Lag, OutboxError> {
        Ok(self.0.writer.lag(client.driver()).await?)
    }

    /// Deletes events that were published longer than [`OutboxSettings::keep`] ago, a step at a time;
    /// answers how many. Pending, dead and discarded events are never touched.
    ///
    /// A relay does this by itself (`prune.keep`); call it where none does, and with a client rather
    /// than within a transaction, so that each step is one of its own. Ends early while somebody else
    /// is at it. Needs `SELECT`, `UPDATE` and `DELETE` on the table.
    ///
    /// # Errors
    /// The database does not answer or refuses.
    pub async fn prune<C: AnyClient>(&self, client: &C) -> Result<u64, OutboxError> {
        let Inner { writer, settings } = &*self.0;
        let step = i32::try_from(settings.prune_step.max(1)).unwrap_or(i32::MAX);
        let mut pruned = 0;
        loop {
            match writer.prune(client.driver(), settings.keep, step).await? {
                Pruned::Elsewhere => return Ok(pruned),
                Pruned::Rows(rows) => {
                    pruned += rows;
                    if rows < u64::from(settings.prune_step.max(1)) {
                        return Ok(pruned);
                    }
                }
            }
        }
    }
}
