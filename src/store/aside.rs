//! Rows set aside, and how they come back into the walk: promoted when their time has come, freed by a sweep
//! when nothing holds them any more. Why nothing is forgotten aside is written in [`super`].

use std::time::Duration;

use tokio_postgres::types::ToSql;

use super::claim::bucket_of;
use super::ownership::one;
use super::{Session, StoreError, Visit};

/// Rows of one bucket that are promoted in one statement: a thousand of all buckets take some ten milliseconds.
const MOST_PROMOTED: i32 = 16;

/// What a promotion did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promoted {
    /// Rows put into the walk.
    pub rows: usize,
    /// More are due: too many for one step, or locked by somebody.
    pub more: bool,
    /// When the next one falls due that is not yet.
    pub due_in: Option<Duration>,
}

/// Where to look for parked rows that nothing holds any more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SweepRequest {
    /// Buckets to look through.
    pub buckets: Vec<i32>,
    /// For each bucket the aggregate's hash to start from.
    pub starts: Vec<i64>,
    /// Aggregates to visit per bucket.
    pub visits: i32,
}

/// What a sweep found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SweepAnswer {
    /// Buckets in which anything parked was met.
    pub visits: Vec<Visit>,
    /// Buckets in which somebody holds a row locked that is to be freed: look again after a while.
    pub missed: Vec<u8>,
    /// Aggregates that are in the walk again, or wait for their time.
    pub freed: usize,
}

impl Session {
    /// Puts rows of our buckets whose time has come into the walk.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn promote(&self) -> Result<Promoted, StoreError> {
        let values: [&(dyn ToSql + Sync); 2] = [&self.token.number(), &MOST_PROMOTED];
        let row = one(self.query(&self.statements.promote, &values).await?)?;
        let ms: Option<i64> = row.get("due_ms");
        Ok(Promoted {
            rows: usize::try_from(row.get::<_, i64>("promoted")).unwrap_or(0),
            more: row.get("more"),
            due_in: ms.map(|ms| Duration::from_millis(ms.max(0).unsigned_abs())),
        })
    }

    /// Looks through some aggregates of our buckets for parked rows that nothing holds any more.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn sweep(&self, request: &SweepRequest) -> Result<SweepAnswer, StoreError> {
        let values: [&(dyn ToSql + Sync); 4] = [
            &self.token.number(),
            &request.buckets,
            &request.starts,
            &request.visits,
        ];
        let mut answer = SweepAnswer::default();
        for row in self.query(&self.statements.sweep, &values).await? {
            let number: i64 = row.get("number");
            match row.get::<_, &str>("kind") {
                "visit" => answer.visits.push(Visit {
                    bucket: bucket_of(&row, 1),
                    last: row.get("hash"),
                    visited: i32::try_from(number).unwrap_or(i32::MAX),
                }),
                "missed" => answer.missed.push(bucket_of(&row, 1)),
                _ => answer.freed = usize::try_from(number).unwrap_or(0),
            }
        }
        Ok(answer)
    }
}
