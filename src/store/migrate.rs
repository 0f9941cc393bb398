//! Migrate: create the outbox, or adopt one that the application made with the base columns.
//!
//! Numbered migrations run in transactions with a short lock_timeout and are tried again, so that
//! the application's INSERTs never queue behind us for more than a second. What cannot run in a
//! transaction, or must not hold one for long, comes after them and is idempotent: filling event
//! ids in pieces, and building indexes CONCURRENTLY.

use std::error::Error as _;
use std::time::Duration;

use refinery::{Migration, Runner};
use tokio_postgres::Client;

use super::connect::in_time;
use super::shape::{Found, check_adoptable};
use super::{MIGRATE_LOCK_CLASS, Pooling, Store, StoreError};

/// The numbered migrations. Never edited once released.
const MIGRATIONS: &[(&str, &str)] = &[
    (
        "V1__outbox",
        include_str!("../../sql/migrations/0001_outbox.sql"),
    ),
    (
        "V2__alert",
        include_str!("../../sql/migrations/0002_alert.sql"),
    ),
    (
        "V3__doorbell",
        include_str!("../../sql/migrations/0003_doorbell.sql"),
    ),
    (
        "V4__parked",
        include_str!("../../sql/migrations/0004_parked.sql"),
    ),
    (
        "V5__ring",
        include_str!("../../sql/migrations/0005_ring.sql"),
    ),
    (
        "V6__publish",
        include_str!("../../sql/migrations/0006_publish.sql"),
    ),
    (
        "V7__intake",
        include_str!("../../sql/migrations/0007_intake.sql"),
    ),
];

/// Name (after the table's) and text of each index.
pub(super) const INDEXES: &[(&str, &str)] = &[
    (
        "walked",
        include_str!("../../sql/indexes/outbox_walked.sql"),
    ),
    ("aside", include_str!("../../sql/indexes/outbox_aside.sql")),
    (
        "parked",
        include_str!("../../sql/indexes/outbox_parked.sql"),
    ),
    (
        "postponed",
        include_str!("../../sql/indexes/outbox_postponed.sql"),
    ),
    (
        "claimed",
        include_str!("../../sql/indexes/outbox_claimed.sql"),
    ),
    (
        "holding",
        include_str!("../../sql/indexes/outbox_holding.sql"),
    ),
    ("due", include_str!("../../sql/indexes/outbox_due.sql")),
    ("tried", include_str!("../../sql/indexes/outbox_tried.sql")),
    ("dead", include_str!("../../sql/indexes/outbox_dead.sql")),
    (
        "published",
        include_str!("../../sql/indexes/outbox_published.sql"),
    ),
];

/// Indexes of older versions that nothing uses any more.
const OBSOLETE_INDEXES: &[&str] = &["oldest", "waiting", "claim"];

/// An INSERT that queues behind our DDL waits no longer than this.
const DDL_LOCK_TIMEOUT: &str = "SET lock_timeout = '900ms'; SET statement_timeout = 0";
/// Building an index waits for old transactions, which blocks nobody, for as long as it takes.
const INDEX_TIMEOUTS: &str = "SET lock_timeout = 0; SET statement_timeout = 0";
/// Between tries for a lock.
const LOCK_PAUSE: Duration = Duration::from_secs(1);
/// With the pause, about two minutes.
const LOCK_TRIES: u32 = 60;
/// Rows looked at per piece of the backfill.
const BACKFILL_ROWS: i32 = 5_000;

/// What a migration did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migrated {
    /// Schema version before.
    pub from: i32,
    /// Schema version now.
    pub to: i32,
    /// Indexes built.
    pub indexes: Vec<String>,
    /// Rows of an adopted table that got an event id.
    pub event_ids: i64,
    /// What became of the insert trigger: `created` or `dropped`; none: it is as it was.
    pub trigger: Option<&'static str>,
    /// What became of the limit of payloads: `set` or `lifted`; none: it is as it was.
    pub limit: Option<&'static str>,
}

/// What a migration is asked to do beside the numbered steps.
#[derive(Clone, Copy, Debug)]
pub struct MigrateOptions {
    /// Shall there be the insert trigger, which relays are woken by?
    pub trigger: bool,
    /// A limit of payloads, in bytes of `payload::text`, or none at all; outer none: as it is.
    pub max_payload_bytes: Option<Option<u32>>,
}

impl Default for MigrateOptions {
    fn default() -> Self {
        Self {
            trigger: true,
            max_payload_bytes: None,
        }
    }
}

/// The schema version that this program works with: the number of the last migration.
pub fn schema_version() -> i32 {
    let (name, _) = MIGRATIONS.last().expect("there are migrations");
    let number = name.trim_start_matches('V').split("__").next();
    number
        .and_then(|number| number.parse().ok())
        .expect("a migration's name begins with its number")
}

fn latest_version() -> i32 {
    schema_version()
}

pub(super) fn check_version(version: i32, table: &str) -> Result<(), StoreError> {
    let latest = latest_version();
    if version < latest {
        return Err(StoreError::Shape(format!(
            "table {table} has schema version {version}, this version of bellwire needs {latest}: run \
             `bellwire migrate`"
        )));
    }
    if version > latest {
        return Err(StoreError::Shape(format!(
            "table {table} has schema version {version}, this version of bellwire knows {latest}: \
             run a newer bellwire"
        )));
    }
    Ok(())
}

impl Store {
    /// Brings the outbox to the current schema version. Safe to run at any time, also by several at
    /// once and under load.
    ///
    /// # Errors
    /// When the table cannot be adopted, a lock is not to be had, or the database refuses.
    pub async fn migrate(&self) -> Result<Migrated, StoreError> {
        self.migrate_with(MigrateOptions::default()).await
    }

    /// As [`Self::migrate`], with options.
    ///
    /// # Errors
    /// As [`Self::migrate`].
    pub async fn migrate_with(&self, options: MigrateOptions) -> Result<Migrated, StoreError> {
        if self.connector.pooling().await? == Pooling::Transaction {
            return Err(StoreError::Shape(
                "database.url leads to a connection pooler in transaction mode, where a migration \
                 cannot be kept apart from another: give it a direct connection in DATABASE_URL"
                    .into(),
            ));
        }
        let mut client = self.connector.connect().await?;
        client.batch_execute(DDL_LOCK_TIMEOUT).await?;
        self.lock_migrations(&client).await?;
        let found = self.look(&client).await?;
        let table = self.names.display();
        check_adoptable(&found, &table)?;
        let has_history = self.has_history(&client).await?;
        let from = if has_history {
            in_time(client.query_one(&self.queries.schema_version, &[]))
                .await?
                .get(0)
        } else {
            0
        };
        if from > latest_version() {
            check_version(from, &table)?;
        }
        if from < latest_version() {
            self.run_numbered(&mut client).await?;
        }
        let mut event_ids = 0;
        if found.table.is_some() && from == 0 {
            event_ids = self.backfill_event_ids(&client).await?;
        }
        let found = self.look(&client).await?;
        let trigger = self.set_trigger(&client, &found, options.trigger).await?;
        let limit = match options.max_payload_bytes {
            Some(most) => self.set_limit(&client, most).await?,
            None => None,
        };
        client.batch_execute(INDEX_TIMEOUTS).await?;
        let indexes = self.build_indexes(&client, &found).await?;
        Ok(Migrated {
            from,
            to: latest_version(),
            indexes,
            event_ids,
            trigger,
            limit,
        })
    }

    /// Creates or drops the insert trigger. One that is disabled stays so: somebody meant it.
    async fn set_trigger(
        &self,
        client: &Client,
        found: &Found,
        wanted: bool,
    ) -> Result<Option<&'static str>, StoreError> {
        let name = format!("{}_ring_insert", self.names.table);
        let (done, sql) = match (found.triggers.contains_key(&name), wanted) {
            (false, true) => (
                "created",
                include_str!("../../sql/queries/trigger_create.sql"),
            ),
            (true, false) => (
                "dropped",
                include_str!("../../sql/queries/trigger_drop.sql"),
            ),
            _ => return Ok(None),
        };
        let sql = self.names.render(sql);
        self.change(client, &sql).await?;
        Ok(Some(done))
    }

    /// Sets or lifts the limit of payloads.
    async fn set_limit(
        &self,
        client: &Client,
        most: Option<u32>,
    ) -> Result<Option<&'static str>, StoreError> {
        let name = format!("{}_limit_payload", self.names.table);
        let show = self
            .names
            .render(include_str!("../../sql/queries/limit_show.sql"));
        let found = in_time(client.query_opt(&show, &[&name])).await?;
        let found = found.and_then(|row| row.get::<_, Option<i64>>("most"));
        if found == most.map(i64::from) {
            return Ok(None);
        }
        let (done, sql) = match most {
            Some(most) => (
                "set",
                include_str!("../../sql/queries/limit_create.sql")
                    .replace("{{most}}", &most.to_string()),
            ),
            None => (
                "lifted",
                include_str!("../../sql/queries/limit_drop.sql").to_owned(),
            ),
        };
        self.change(client, &self.names.render(&sql)).await?;
        Ok(Some(done))
    }

    /// Runs a change of the table that needs its lock, again and again while it is locked.
    async fn change(&self, client: &Client, sql: &str) -> Result<(), StoreError> {
        for attempt in 1.. {
            match in_time(client.batch_execute(sql)).await {
                Err(error) if error.is_lock_timeout() && attempt < LOCK_TRIES => {
                    wait_for_lock(attempt).await;
                }
                answer => return answer,
            }
        }
        Ok(())
    }

    /// Keeps migrations apart. Asks again and again: a session that waits for a lock would hold
    /// back vacuum in the whole database.
    async fn lock_migrations(&self, client: &Client) -> Result<(), StoreError> {
        for _ in 0..LOCK_TRIES * 5 {
            let row = in_time(client.query_one(
                "SELECT pg_try_advisory_lock($1, hashtext($2))",
                &[&MIGRATE_LOCK_CLASS, &self.names.display()],
            ))
            .await?;
            if row.get(0) {
                return Ok(());
            }
            tokio::time::sleep(LOCK_PAUSE / 5).await;
        }
        Err(StoreError::Unavailable(
            "another migration of this table has been running for a minute: try again later".into(),
        ))
    }

    async fn has_history(&self, client: &Client) -> Result<bool, StoreError> {
        let row = in_time(client.query_one(
            "SELECT to_regclass($1) IS NOT NULL",
            &[&self.names.qualified("_migrations")],
        ))
        .await?;
        Ok(row.get(0))
    }

    async fn run_numbered(&self, client: &mut Client) -> Result<(), StoreError> {
        client
            .batch_execute(&format!(
                "CREATE SCHEMA IF NOT EXISTS {}",
                super::quote_identifier(&self.names.schema)
            ))
            .await?;
        for attempt in 1.. {
            match self.runner()?.run_async(client).await {
                Ok(_) => return Ok(()),
                Err(error) => {
                    let error = store_error(&error);
                    if !error.is_lock_timeout() || attempt >= LOCK_TRIES {
                        return Err(error);
                    }
                    wait_for_lock(attempt).await;
                }
            }
        }
        Ok(())
    }

    fn runner(&self) -> Result<Runner, StoreError> {
        let migrations = MIGRATIONS
            .iter()
            .map(|(name, sql)| Migration::unapplied(name, &self.names.render(sql)))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| store_error(&error))?;
        let mut runner = Runner::new(&migrations);
        runner.set_migration_table_name(self.names.qualified("_migrations"));
        Ok(runner)
    }

    async fn backfill_event_ids(&self, client: &Client) -> Result<i64, StoreError> {
        let sql = self
            .names
            .render(include_str!("../../sql/queries/backfill_event_id.sql"));
        let (mut after, mut filled) = (i64::MIN, 0);
        loop {
            let row = client.query_one(&sql, &[&after, &BACKFILL_ROWS]).await?;
            let Some(last) = row.get::<_, Option<i64>>("last") else {
                return Ok(filled);
            };
            filled += row.get::<_, i64>("filled");
            after = last;
        }
    }

    async fn drop_index(&self, client: &Client, suffix: &str) -> Result<(), StoreError> {
        let index = self.names.qualified(&format!("_{suffix}"));
        client
            .batch_execute(&format!("DROP INDEX CONCURRENTLY IF EXISTS {index}"))
            .await?;
        Ok(())
    }

    async fn build_indexes(
        &self,
        client: &Client,
        found: &Found,
    ) -> Result<Vec<String>, StoreError> {
        let mut built = Vec::new();
        for (suffix, sql) in INDEXES {
            let name = format!("{}_{suffix}", self.names.table);
            match found.indexes.get(&name).map(String::as_str) {
                Some("valid") => continue,
                Some(_) => {
                    // A concurrent build that was interrupted leaves an invalid index behind.
                    self.drop_index(client, suffix).await?;
                }
                None => {}
            }
            tracing::info!(index = name, "building index");
            client.batch_execute(&self.names.render(sql)).await?;
            built.push(name);
        }
        for suffix in OBSOLETE_INDEXES {
            let name = format!("{}_{suffix}", self.names.table);
            if found.indexes.contains_key(&name) {
                self.drop_index(client, suffix).await?;
            }
        }
        Ok(built)
    }
}

async fn wait_for_lock(attempt: u32) {
    tracing::info!(
        attempt,
        "table is locked by a long transaction, trying again"
    );
    tokio::time::sleep(LOCK_PAUSE).await;
}

/// The database's own error out of refinery's wrapping.
fn store_error(error: &refinery::Error) -> StoreError {
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(refused) = cause
            .downcast_ref::<tokio_postgres::Error>()
            .and_then(|error| error.as_db_error())
        {
            return StoreError::Refused {
                code: refused.code().code().to_owned(),
                message: refused.message().to_owned(),
            };
        }
        source = cause.source();
    }
    StoreError::Unavailable(error.to_string())
}
