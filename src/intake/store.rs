//! All SQL of the intake: one statement a file, typed rows out.
//!
//! # Invariants
//! - **One transaction an event**, from the look for repeats to the handler, the dead letter and the
//!   audit. What is answered is what was committed. A crash at any point leaves nothing.
//! - The key `(source, event_id)` decides who was first, also among processes: a second one waits for
//!   the first and then finds its row.
//! - A handler runs in a savepoint. What it refuses (a rule of the database, a row it does not find) is
//!   the event's failure, stored as data. What would go well another time (a deadlock, a lost
//!   connection, a full disk) is nobody's: the transaction ends without a trace, and the sender tries
//!   again.
//! - Constraints that are deferred to the commit are checked within the savepoint, so that no commit
//!   fails because of what the event holds.
//! - A session whose transaction did not end, for whatever reason, is closed and never used again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::Pool;
use futures_util::join;
use ring::digest;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::route::{Event, Route, Step};
use super::source::{Failure, Source};
use super::work::{Progress, Work, check_prepared};
use crate::config::DatabaseConfig;
use crate::store::{Connector, Names, StoreError, open_pool};

/// What two events did to each other may not happen a second time.
const TRIES: u32 = 3;
/// Letters of an error that are kept.
const LONGEST_ERROR: usize = 2_000;

macro_rules! queries {
    ($($name:ident),+ $(,)?) => {
        /// The intake's statements of `sql/queries`, with names filled in.
        #[derive(Debug)]
        pub(super) struct Queries { $(pub(super) $name: String),+ }

        impl Queries {
            fn new(names: &Names) -> Self {
                Self { $($name: names.render(include_str!(concat!(
                    "../../sql/queries/intake_", stringify!($name), ".sql"
                )))),+ }
            }
        }
    };
}

queries! {
    audit, counts, dead_count, dead_discard, dead_list, dead_show, emit, fail, known, prune, prune_audit,
    replay_claim, replay_list, replay_open, replay_release, report, resolve, take,
}

/// What became of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Its handler did its work.
    Processed,
    /// It failed, and can be replayed.
    DeadLettered,
    /// It failed too often.
    Parked,
    /// It had come before.
    Duplicate,
    /// Another body had come under its id.
    Conflict,
}

impl Outcome {
    /// As the answer, the audit and the metrics have it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Processed => "processed",
            Self::DeadLettered => "dead_lettered",
            Self::Parked => "parked",
            Self::Duplicate => "duplicate",
            Self::Conflict => "id_conflict",
        }
    }
}

/// What is committed of an event.
#[derive(Clone, Debug)]
pub struct Taken {
    /// What became of it now.
    pub outcome: Outcome,
    /// Its status in the table.
    pub stored_status: String,
    /// Failures so far.
    pub attempts: i32,
    /// Why it failed; empty otherwise.
    pub detail: String,
    /// The request that stored it.
    pub first_execution_id: String,
}

/// Why nothing can be said of an event but that it should come again.
#[derive(Debug, thiserror::Error)]
pub enum TakeError {
    /// Nothing of it was stored.
    #[error("nothing was stored: {0}")]
    Nothing(#[source] StoreError),
    /// The connection was lost while it was committed.
    #[error("the outcome of the commit is unknown: {0}")]
    Unknown(#[source] StoreError),
}

/// The intake's side of the database. Cheap to clone.
#[derive(Clone)]
pub struct IntakeStore {
    pub(super) queries: Arc<Queries>,
    connector: Connector,
    pool: Pool,
}

impl IntakeStore {
    /// Prepares to talk to the database; connects to nothing yet. `size` connections at most, whose
    /// statements may take as long as `deadline`.
    ///
    /// # Errors
    /// When there is no URL or it is none.
    pub fn new(
        config: &DatabaseConfig,
        application_name: &str,
        size: usize,
        deadline: Duration,
    ) -> Result<Self, StoreError> {
        let names = Names::new(&config.schema, &config.table);
        let session_sql = include_str!("../../sql/intake_session.sql")
            .replace("{{deadline_ms}}", &deadline.as_millis().to_string());
        let (connector, pool) = open_pool(config, application_name, &session_sql, size)?;
        Ok(Self {
            queries: Arc::new(Queries::new(&names)),
            connector,
            pool,
        })
    }

    /// Takes an event: see the module's head. `verdict` is what today's schema and routes say of it.
    ///
    /// # Errors
    /// When it should come again.
    pub async fn take(
        &self,
        source: &Source,
        event: &Event,
        verdict: Result<&Route, Failure>,
        progress: &Progress,
    ) -> Result<Taken, TakeError> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            let error = match self.attempt(source, event, &verdict, progress).await {
                Ok(Some(taken)) => return Ok(taken),
                // Its row was there and is gone again.
                Ok(None) => StoreError::Unavailable("the event was forgotten meanwhile".into()),
                Err(error) => error,
            };
            if error.ends_connection() {
                // Its neighbours are as old, or lead to the same server.
                self.pool.retain(|_, _| false);
                if progress.is_committing() {
                    return Err(TakeError::Unknown(error));
                }
            }
            progress.committing.set(false);
            if attempt >= TRIES || error.is_timeout() {
                return Err(TakeError::Nothing(error));
            }
            tracing::debug!(%error, attempt, "the event's transaction is tried again");
        }
    }

    async fn attempt(
        &self,
        source: &Source,
        event: &Event,
        verdict: &Result<&Route, Failure>,
        progress: &Progress,
    ) -> Result<Option<Taken>, StoreError> {
        let work = self.begin_work().await?;
        let take = work.prepare(&self.queries.take).await?;
        let steps = match verdict {
            Ok(route) => Some(work.prepare_steps(route, event, &self.queries.emit).await?),
            Err(_) => None,
        };
        let hash = digest::digest(&digest::SHA256, event.text.as_bytes());
        let status = if verdict.is_ok() {
            "processed"
        } else {
            "failed"
        };
        let event_type = storable(&event.event_type);
        let (body, hash) = (event.text.as_bytes(), hash.as_ref());
        let values: [&(dyn ToSql + Sync); 7] = [
            &event.source,
            &event.id,
            &event_type,
            &body,
            &hash,
            &status,
            &event.execution_id,
        ];
        let (begun, taken) = join!(work.begin(), take.query(work.client(), &values));
        begun?;
        let Some(row) = taken?.into_iter().next() else {
            return self.repeated(work, event, hash, progress).await;
        };
        let first_execution_id: String = row.get("execution_id");
        let failure = match (verdict, steps) {
            (Ok(_), Some(Ok(steps))) => work.handle(&steps, event).await?.err(),
            (_, Some(Err(reason))) => Some(Failure::Processing(reason)),
            (Err(failure), _) => Some(failure.clone()),
            (Ok(_), None) => None,
        };
        let (status, attempts, detail) = match failure {
            None => {
                self.settle(work, event, Outcome::Processed, progress)
                    .await?;
                ("processed".to_owned(), 0, String::new())
            }
            Some(failure) => {
                let rows = self
                    .fail(work, source, event, &failure, "intake", progress)
                    .await?;
                let row = rows.first().ok_or_else(nothing_there)?;
                (
                    row.get("status"),
                    row.get("attempts"),
                    short(&failure.text()),
                )
            }
        };
        Ok(Some(Taken {
            outcome: outcome_of(&status),
            stored_status: status,
            attempts,
            detail,
            first_execution_id,
        }))
    }

    /// The id is known: a repeat, or another body. None if its row has just gone.
    async fn repeated(
        &self,
        work: Work<'_>,
        event: &Event,
        hash: &[u8],
        progress: &Progress,
    ) -> Result<Option<Taken>, StoreError> {
        let known = work.prepare(&self.queries.known).await?;
        let values: [&(dyn ToSql + Sync); 3] = [&event.source, &event.id, &hash];
        let rows = known.query(work.client(), &values).await?;
        let Some(row) = rows.first() else {
            return Ok(None);
        };
        let outcome = if row.get("same") {
            Outcome::Duplicate
        } else {
            Outcome::Conflict
        };
        let taken = Taken {
            outcome,
            stored_status: row.get("status"),
            attempts: row.get("attempts"),
            detail: row.get("last_error"),
            first_execution_id: row.get("execution_id"),
        };
        self.settle(work, event, outcome, progress).await?;
        Ok(Some(taken))
    }

    /// The audit's row, and the commit.
    async fn settle(
        &self,
        work: Work<'_>,
        event: &Event,
        outcome: Outcome,
        progress: &Progress,
    ) -> Result<(), StoreError> {
        let audit = work.prepare(&self.queries.audit).await?;
        let (mode, outcome) = ("intake", outcome.word());
        let values: [&(dyn ToSql + Sync); 5] = [
            &event.execution_id,
            &mode,
            &outcome,
            &event.source,
            &event.id,
        ];
        work.commit(&audit, &values, progress).await.map(drop)
    }

    /// The dead letter, and the commit.
    pub(super) async fn fail(
        &self,
        work: Work<'_>,
        source: &Source,
        event: &Event,
        failure: &Failure,
        mode: &str,
        progress: &Progress,
    ) -> Result<Vec<Row>, StoreError> {
        let fail = work.prepare(&self.queries.fail).await?;
        let event_type = storable(&event.event_type);
        let (class, text) = (failure.class(), short(&failure.text()));
        let values: [&(dyn ToSql + Sync); 8] = [
            &event.source,
            &event.id,
            &event_type,
            &class,
            &text,
            &source.max_attempts,
            &event.execution_id,
            &mode,
        ];
        work.commit(&fail, &values, progress).await
    }

    /// Prepares every statement of these sources, so that a table that is not there, a column of
    /// another type or a missing right stops the start.
    ///
    /// # Errors
    /// [`StoreError::Shape`] names the route and what the database says of it.
    pub async fn check(&self, sources: &[Arc<Source>]) -> Result<(), StoreError> {
        let work = self.begin_work().await?;
        work.begin().await?;
        for source in sources {
            for (number, route) in source.routes().iter().enumerate() {
                let place = format!("intake.source.{}.route[{number}]", source.name);
                let statements = route.steps.iter().filter_map(|step| match step {
                    Step::Sql(statement) => Some(statement),
                    Step::Emit(_) => None,
                });
                for (count, statement) in statements.enumerate() {
                    let place = format!("{place}: statement {}", count + 1);
                    let types = vec![Type::TEXT; statement.parameters.len()];
                    let prepared = work.client().prepare_typed(&statement.sql, &types).await;
                    check_prepared(&place, prepared)?;
                }
            }
        }
        work.roll_back().await
    }

    /// A transaction that is still to begin.
    pub(super) async fn begin_work(&self) -> Result<Work<'_>, StoreError> {
        Work::new(&self.connector, &self.pool).await
    }

    /// Runs one statement by itself.
    pub(super) async fn query(
        &self,
        sql: &str,
        values: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, StoreError> {
        let work = self.begin_work().await?;
        let statement = work.prepare(sql).await?;
        work.alone(&statement, values).await
    }

    /// Dead letters by source and status.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn counts(&self) -> Result<BTreeMap<(String, String), i64>, StoreError> {
        let rows = self.query(&self.queries.counts, &[]).await?;
        Ok(rows
            .iter()
            .map(|row| ((row.get(0), row.get(1)), row.get(2)))
            .collect())
    }

    /// Forgets events whose time is over, so many of each source at most; answers how many.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn prune(&self, sources: &[Arc<Source>], most: i32) -> Result<usize, StoreError> {
        let names: Vec<String> = sources
            .iter()
            .map(|source| source.name.to_string())
            .collect();
        let windows: Vec<f64> = sources
            .iter()
            .map(|source| source.dedupe_window.as_secs_f64())
            .collect();
        let Some(longest) = windows.iter().copied().reduce(f64::max) else {
            return Ok(0);
        };
        let values: [&(dyn ToSql + Sync); 3] = [&names, &windows, &most];
        let pruned = self.query(&self.queries.prune, &values).await?.len();
        let values: [&(dyn ToSql + Sync); 2] = [&longest, &most];
        self.query(&self.queries.prune_audit, &values).await?;
        Ok(pruned)
    }
}

fn outcome_of(status: &str) -> Outcome {
    match status {
        "processed" => Outcome::Processed,
        "parked" => Outcome::Parked,
        _ => Outcome::DeadLettered,
    }
}

fn nothing_there() -> StoreError {
    StoreError::Unavailable("the event's row is gone".into())
}

/// PostgreSQL has no text with a NUL in it.
pub(super) fn storable(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

fn short(text: &str) -> String {
    text.chars().take(LONGEST_ERROR).collect()
}
