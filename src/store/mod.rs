//! All SQL of the outbox: one statement a file, one function each, typed rows out.
//!
//! # Invariants
//!
//! **Ownership.** Who may claim is decided by the database alone:
//! - `outbox_bucket` is the authority. A replica claims only rows of buckets that carry its token,
//!   and only in a transaction that holds those bucket rows `FOR SHARE`.
//! - A bucket carries only tokens that have a row in `outbox_replica` (foreign key), and that row is
//!   the token's one lease. A lease that is over is never revived, only replaced by a new token.
//! - A token is dead when its lease is over by the database's clock or its session's advisory lock
//!   is gone. Through a pooler in transaction mode no session can hold that lock (`session_pid` is 0
//!   then): such a token is dead by its lease alone. Taking it over is one transaction: end the lease for good, free the buckets (which
//!   waits for a claim that still runs in the dead client's backend and bars a later one), release
//!   the rows. So after it nothing can be claimed under that token any more.
//! - The holder's own view is the stricter one (see [`crate::event::ClaimToken`]): it stops sending
//!   before the database lets anybody else begin.
//!
//! **Claim.** Of each aggregate only the unbroken prefix in id order is taken: it ends before the
//! first row that is not due, locked by anybody, or behind a dead event that holds. Nothing is
//! claimed of an aggregate that has a row in hand.
//!
//! **Aside.** A claim walks the aggregates that have a row *in the walk*. Pending, unclaimed rows are of two
//! classes, by `parked` and the function `outbox_walked`: those in the walk, and those *aside*. Aside are
//! - *postponed* rows (`parked` is NULL): they wait for their `next_attempt_at`, which was later than their
//!   writing from the start or became so by a failed attempt. Once due they are *promoted* (false: in the walk).
//! - *parked* rows (true): when they were met, a dead row or one that was not due for long stood before them and
//!   held their aggregate.
//!
//! An aggregate that is visited is read from both classes in one order of ids, so where a row stands says nothing
//! about when it may go: only whether its aggregate is found. The invariant: *an aggregate that has pending rows,
//! none of them in hand, and whose first row may go, has a row in the walk, or a postponed row that is due, or a
//! sweep of its bucket is owed.* It holds, because:
//! - Whoever writes an event writes it into the walk, or postponed.
//! - Only the bucket's owner parks, in the claim's transaction, which holds the bucket; and only rows behind a dead row
//!   that holds, or behind a first row that is not due and is, or becomes, postponed.
//! - A claim that takes a part of an aggregate puts the first row it leaves into the walk if it stood aside
//!   (or has it wait for its time). That covers every cut: a limit, no room, a row locked or changed
//!   meanwhile, an id too great. Behind a dead row it stays parked. If that row is locked, a sweep is owed after a
//!   while. A claim that takes nothing of an aggregate leaves the row by which it was found.
//! - A row in hand is of the walk again when it is handed back, by whomever; a failed one is postponed.
//! - Postponed rows that are due are told of by every claim in their buckets, and a timer is set for the next. A
//!   promotion that finds some locked is repeated.
//! - What held an aggregate ceases to by a statement of somebody's: a dead row is replayed, discarded, deleted, or holds
//!   no longer; one that is not due is discarded, deleted, published by hand, or is to go sooner. Each of these rings
//!   with its bucket's number, and the *sweep* of that bucket puts the first parked row of every aggregate that
//!   nothing holds back into the walk. The owner parks and sweeps one after the other on one session: a sweep
//!   that starts after the ring sees what a claim parked that did not see the statement yet.
//! - A ring may be lost: to a connection (so a listener that begins to listen asks for all buckets), to a relay that
//!   dies or gives the bucket away (so a bucket is swept when it becomes ours), or because there is none (so all
//!   buckets are swept with every tick while we do not hear). A lap a minute is the backstop for the rest.
//!
//! **Mark.** Every write to a claimed row names its id, its claim and its status. It waits for no
//! row lock. Rows that it did not reach are either locked (tried again) or no longer ours (counted).
//!
//! No transaction is ever open while anybody waits for a broker.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{
    Hook, HookError, Manager, ManagerConfig, Object, Pool, RecyclingMethod, Runtime,
};
use tokio_postgres::Client;

use runner::{Prepared, Runner};

use crate::config::{DatabaseConfig, PoolerSetting, Secret};

mod aside;
mod claim;
mod connect;
mod dead;
mod error;
mod ids;
mod insert;
mod lag;
mod load;
mod mark;
mod migrate;
mod ownership;
mod pooler;
mod prune;
pub(crate) mod runner;
mod shape;

pub use aside::{Promoted, SweepAnswer, SweepRequest};
pub use claim::{ClaimAnswer, ClaimRequest, ClaimedRow, Visit};
pub use connect::{Connector, Notifications};
pub use dead::{
    Change, DeadEvent, DeadFilter, DeadReport, EventDetails, MOST_HELD_BACK, MOST_NAMED, NotDead,
};
pub use error::StoreError;
pub use ids::{IdSequence, OldestWriter};
pub(crate) use insert::{Rows, Writer};
pub use lag::{Lag, OldestEvent, ReplicaStatus};
pub use mark::{Failed, Failure};
pub use migrate::{MigrateOptions, Migrated, schema_version};
pub use ownership::{Drawn, Quiet, Session, Takeover, Tended};
pub use pooler::Pooling;
pub use prune::Pruned;
pub use shape::SilentTrigger;

/// First number of all our two-number advisory locks on tokens ("bwir"). The second is the token.
const TOKEN_LOCK_CLASS: i32 = 0x6277_6972;
/// First number of the advisory lock that keeps migrations apart ("bwmi"). The second is a hash of
/// the table's name, since the table may not exist yet.
const MIGRATE_LOCK_CLASS: i32 = 0x6277_6d69;

/// First number of the advisory lock that keeps prunings apart ("bwpr"). The second is the table's oid.
const PRUNE_LOCK_CLASS: i32 = 0x6277_7072;

/// A statement that takes longer is in trouble: claims and marks take milliseconds.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);
/// A thousand years: the database refuses times before its calendar, and longer ages mean the same.
const LONGEST_AGE: Duration = Duration::from_secs(1000 * 365 * 86_400);
/// Marks, loads and the lag look run beside each other, no more.
const POOL_SIZE: usize = 4;

/// The names of the outbox's objects, quoted, and the SQL texts with them filled in.
#[derive(Clone, Debug)]
pub struct Names {
    schema: String,
    table: String,
    channel: String,
}

fn quote_identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn quote_literal(text: &str) -> String {
    // Standard-conforming strings: only the quote itself needs doubling; a backslash is plain.
    format!("'{}'", text.replace('\'', "''"))
}

impl Names {
    /// Longest channel name PostgreSQL takes.
    const MAX_CHANNEL_BYTES: usize = 63;

    /// Names for the table `schema.table`.
    pub fn new(schema: &str, table: &str) -> Self {
        let mut channel = format!("bellwire:{schema}.{table}");
        if channel.len() > Self::MAX_CHANNEL_BYTES {
            // FNV-1a: any fixed hash will do, so long as every version computes the same one.
            let hash = channel
                .bytes()
                .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                    (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
                });
            channel = format!("bellwire:{hash:016x}");
        }
        Self {
            schema: schema.into(),
            table: table.into(),
            channel,
        }
    }

    /// The NOTIFY channel, unquoted.
    pub fn channel(&self) -> &str {
        &self.channel
    }

    /// `schema.table` for messages.
    pub fn display(&self) -> String {
        format!("{}.{}", self.schema, self.table)
    }

    /// `"schema"."table<suffix>"`
    pub fn qualified(&self, suffix: &str) -> String {
        format!(
            "{}.{}",
            quote_identifier(&self.schema),
            quote_identifier(&format!("{}{suffix}", self.table))
        )
    }

    /// Fills `{{outbox…}}` (qualified), `{{name:outbox…}}` (unqualified), `{{schema}}`,
    /// `{{channel}}` (a literal), `{{dead_filter}}` (the condition that several texts share) into a
    /// SQL text of ours.
    ///
    /// # Panics
    /// On an unknown placeholder: the texts are compiled in, so a test of each finds it.
    #[expect(
        clippy::string_slice,
        clippy::unreachable,
        reason = "the texts are compiled in"
    )]
    pub fn render(&self, text: &str) -> String {
        let mut rendered = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(start) = rest.find("{{") {
            let (before, after) = rest.split_at(start);
            let end = after
                .find("}}")
                .expect("a placeholder of a compiled-in SQL text is closed");
            rendered.push_str(before);
            let placeholder = &after[2..end];
            if let Some(suffix) = placeholder.strip_prefix("name:outbox") {
                rendered.push_str(&quote_identifier(&format!("{}{suffix}", self.table)));
            } else if let Some(suffix) = placeholder.strip_prefix("outbox") {
                rendered.push_str(&self.qualified(suffix));
            } else if placeholder == "schema" {
                rendered.push_str(&quote_identifier(&self.schema));
            } else if placeholder == "dead_filter" {
                rendered.push_str(include_str!("../../sql/queries/dead_filter.sql").trim());
            } else if placeholder == "channel" {
                rendered.push_str(&quote_literal(&self.channel));
            } else if placeholder == "statement_timeout_ms" {
                let _ = write!(rendered, "{}", STATEMENT_TIMEOUT.as_millis());
            } else {
                unreachable!("unknown placeholder {placeholder} in a compiled-in SQL text");
            }
            rest = &after[end + 2..];
        }
        rendered.push_str(rest);
        rendered
    }
}

macro_rules! queries {
    ($($name:ident),+ $(,)?) => {
        /// The statements of `sql/queries`, with names filled in.
        #[derive(Debug)]
        struct Queries { $($name: String),+ }

        impl Queries {
            fn new(names: &Names) -> Self {
                Self { $($name: names.render(include_str!(concat!(
                    "../../sql/queries/", stringify!($name), ".sql"
                )))),+ }
            }
        }
    };
}

queries! {
    alert_clear, alert_raise, awake, bucket_acquire, bucket_give_up, claim, claim_buckets, dead_count,
    dead_discard, dead_letter, dead_list, dead_not, dead_replay, dead_show, go_quiet, id_sequence, lag, lag_change, load, mark_failed,
    mark_published, mark_waiting, oldest_writer, promote, prune, prune_count, release, release_strays, replica_leave, replica_register, replica_tend, replica_token, replicas, ring, schema_version,
    stay_awake, still_claimed, sweep, takeover_begin, takeover_buckets, takeover_end, takeover_rows, writers,
}

/// A pool of sessions with these settings.
fn pool(connector: &Connector, session_sql: &str, size: usize) -> Result<Pool, StoreError> {
    let manager = Manager::from_connect(
        connector.config().clone(),
        connector.clone(),
        ManagerConfig {
            // A closed connection is noticed; a dead one fails its statement, which is tried again on
            // a fresh one. A test query per use would double them all.
            recycling_method: RecyclingMethod::Fast,
        },
    );
    let session_sql: Arc<str> = session_sql.into();
    let pooler = connector.pooler().clone();
    Pool::builder(manager)
        .max_size(size)
        .runtime(Runtime::Tokio1)
        .wait_timeout(Some(STATEMENT_TIMEOUT))
        .create_timeout(Some(STATEMENT_TIMEOUT))
        .post_create(Hook::async_fn(move |client, _| {
            let session_sql = session_sql.clone();
            let keeps_session = pooler.known() != Some(Pooling::Transaction);
            Box::pin(async move {
                if !keeps_session {
                    return Ok(());
                }
                client
                    .batch_execute(&session_sql)
                    .await
                    .map_err(HookError::Backend)
            })
        }))
        .build()
        .map_err(|error| StoreError::Unavailable(error.to_string()))
}

/// A connector and a pool whose sessions have settings of their own: for the intake.
pub(crate) fn open_pool(
    config: &DatabaseConfig,
    application_name: &str,
    session_sql: &str,
    size: usize,
) -> Result<(Connector, Pool), StoreError> {
    let url = config.url.as_ref().ok_or(StoreError::NoUrl)?;
    let target = config
        .target("database.url", "DATABASE_URL", url)
        .map_err(|error| StoreError::Shape(error.to_string()))?;
    let connector = Connector::new(target, application_name, session_sql, config.pooler);
    let pool = pool(&connector, session_sql, size)?;
    Ok((connector, pool))
}

/// The outbox in its database. Cheap to clone.
#[derive(Clone)]
pub struct Store {
    names: Arc<Names>,
    queries: Arc<Queries>,
    connector: Connector,
    /// For LISTEN, where it has a connection of its own.
    listen: Option<Connector>,
    pool: Pool,
}

impl Store {
    /// Prepares to talk to the outbox; connects to nothing yet.
    ///
    /// # Errors
    /// When there is no URL or it is none.
    pub fn new(config: &DatabaseConfig, application_name: &str) -> Result<Self, StoreError> {
        let url: &Secret = config.url.as_ref().ok_or(StoreError::NoUrl)?;
        let names = Arc::new(Names::new(&config.schema, &config.table));
        let session_sql = names.render(include_str!("../../sql/session.sql"));
        let connect = |key, variable, url: &Secret, pooler| {
            let target = config.target(key, variable, url);
            target
                .map(|target| Connector::new(target, application_name, &session_sql, pooler))
                .map_err(|error| StoreError::Shape(error.to_string()))
        };
        let connector = connect("database.url", "DATABASE_URL", url, config.pooler)?;
        let listen = config
            .listen_url
            .as_ref()
            .map(|url| {
                let variable = "BELLWIRE_DATABASE__LISTEN_URL";
                connect("database.listen_url", variable, url, PoolerSetting::None)
            })
            .transpose()?;
        let pool = pool(&connector, &session_sql, POOL_SIZE)?;
        Ok(Self {
            queries: Arc::new(Queries::new(&names)),
            names,
            connector,
            listen,
            pool,
        })
    }

    /// The names of the outbox's objects.
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// For connections of one's own, outside the pool.
    pub fn connector(&self) -> &Connector {
        &self.connector
    }

    /// For LISTEN; none where notifications cannot arrive: through a pooler in transaction mode.
    ///
    /// # Errors
    /// When the server cannot be reached, which is asked at the first call.
    pub async fn listen_connector(&self) -> Result<Option<&Connector>, StoreError> {
        if self.listen.is_some() {
            return Ok(self.listen.as_ref());
        }
        let keeps_session = self.connector.pooling().await? == Pooling::Session;
        Ok(keeps_session.then_some(&self.connector))
    }

    /// Runs one statement on a pooled connection, bounded in time. A connection that turns out to be
    /// dead is replaced at once, so the statement must be one that may run twice: all that name the
    /// state they start from are.
    async fn query(
        &self,
        sql: &str,
        parameters: &[&(dyn tokio_postgres::types::ToSql + Sync)],
    ) -> Result<Vec<tokio_postgres::Row>, StoreError> {
        let runner = self.connector.runner("").await?;
        let client = self.pool.get().await?;
        match self.run(&runner, client, sql, parameters).await {
            Err(error) if error.is_of_pooler() || error.ends_connection() => {
                tracing::debug!(%error, "a pooled connection is of no more use");
                // Its neighbours are as old, or lead to the same server.
                self.pool.retain(|_, _| false);
                if matches!(error, StoreError::TimedOut) {
                    return Err(error);
                }
                let runner = self.connector.runner("").await?;
                let client = self.pool.get().await?;
                self.run(&runner, client, sql, parameters).await
            }
            answer => answer,
        }
    }

    /// As [`Self::query`], for a statement that must not run twice: when its connection is lost, nobody
    /// knows whether it ran.
    async fn query_once(
        &self,
        sql: &str,
        parameters: &[&(dyn tokio_postgres::types::ToSql + Sync)],
    ) -> Result<Vec<tokio_postgres::Row>, StoreError> {
        let runner = self.connector.runner("").await?;
        let client = self.pool.get().await?;
        self.run(&runner, client, sql, parameters).await
    }

    async fn run(
        &self,
        runner: &Runner,
        client: Object,
        sql: &str,
        parameters: &runner::Values<'_>,
    ) -> Result<Vec<tokio_postgres::Row>, StoreError> {
        let rows = connect::in_time(async {
            let statement = if runner.has_session() {
                Prepared::Named(client.prepare_cached(sql).await?)
            } else {
                Prepared::Text(sql.into())
            };
            runner.query(&client, &statement, parameters).await
        })
        .await;
        if let Err(error) = &rows {
            self.connector.pooler().learn(error);
            if error.is_of_pooler() || error.ends_connection() {
                // Nobody else may be given this connection; after a timeout its answer may still come.
                drop(Object::take(client));
            }
        }
        rows
    }

    /// Wakes every relay of this outbox.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn ring(&self) -> Result<(), StoreError> {
        self.query(&self.queries.ring, &[&""]).await.map(drop)
    }

    /// The server's version.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn server_version(&self) -> Result<String, StoreError> {
        let rows = self
            .query("SELECT current_setting('server_version')", &[])
            .await?;
        Ok(rows.first().map(|row| row.get(0)).unwrap_or_default())
    }

    /// A client of its own, for tests, demo and benches; set up like all others.
    ///
    /// # Errors
    /// When the database cannot be reached.
    pub async fn connect(&self) -> Result<Client, StoreError> {
        self.connector.connect().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_and_every_statement_renders() {
        let names = Names::new("my \"schema\"", "Out'box");
        assert_eq!(
            names.qualified("_bucket"),
            r#""my ""schema"""."Out'box_bucket""#
        );
        let queries = format!("{:?}", Queries::new(&names));
        assert!(!queries.contains("{{"));
    }

    #[test]
    fn the_channel_name_fits_whatever_the_table_is_called() {
        let long = "s".repeat(40);
        assert!(Names::new(&long, &long).channel().len() <= Names::MAX_CHANNEL_BYTES);
        assert_ne!(
            Names::new(&long, &"t".repeat(40)).channel(),
            Names::new(&long, &"u".repeat(40)).channel()
        );
        assert_eq!(
            Names::new("public", "outbox").channel(),
            "bellwire:public.outbox"
        );
    }

    #[test]
    fn a_literal_cannot_be_left() {
        assert_eq!(quote_literal("a'b\\"), "'a''b\\'");
    }
}
