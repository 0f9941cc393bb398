//! Claim: take the unbroken prefix of some aggregates of our buckets.
//!
//! One short READ COMMITTED transaction of separate statements, each with a snapshot of its own,
//! sent in one go: nobody freezes between them and keeps locks for longer than the server allows.

use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::connect::in_time;
use super::{Session, StoreError};
use crate::event::{AggregateKey, EventId};

/// Rows that a claim parks, at most: it takes a few milliseconds more for them.
const MOST_PARKED: i32 = 256;
/// Of one aggregate: of one with many it saves no more than one visit, which is not worth many writes at once.
const MOST_PARKED_OF_ONE: i32 = 32;
/// Nothing is parked behind a row that is due sooner: it would have to be put back in a moment.
const LATE: Duration = Duration::from_secs(10);

/// What to claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimRequest {
    /// Buckets to walk.
    pub buckets: Vec<i32>,
    /// For each bucket the aggregate's hash to start from.
    pub starts: Vec<i64>,
    /// Aggregates to visit per bucket.
    pub visits: i32,
    /// Rows per aggregate at most.
    pub rows_per_aggregate: i32,
    /// Rows at most.
    pub limit: i32,
    /// Rows at most for each partition, by number.
    pub rooms: Vec<i32>,
    /// Greatest id that may be taken.
    pub horizon: i64,
}

/// A row that is ours now.
#[derive(Clone, Debug)]
pub struct ClaimedRow {
    /// Its id.
    pub id: EventId,
    /// Its bucket.
    pub bucket: u8,
    /// Its aggregate.
    pub key: AggregateKey,
    /// Size of the payload as stored, perhaps compressed.
    pub stored_bytes: usize,
}

/// How far a bucket was walked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visit {
    /// The bucket.
    pub bucket: u8,
    /// Hash of the last aggregate visited.
    pub last: i64,
    /// Aggregates visited; as many as asked for means that there may be more.
    pub visited: i32,
}

/// What a claim found.
#[derive(Clone, Debug, Default)]
pub struct ClaimAnswer {
    /// Rows that are ours now, ascending by id.
    pub rows: Vec<ClaimedRow>,
    /// Buckets in which anything pending was met.
    pub visits: Vec<Visit>,
    /// Per bucket the hash of the first aggregate that a limit left something of.
    pub cuts: Vec<(u8, i64)>,
    /// An aggregate has rows in hand, or more rows than were asked for: look again after a mark.
    pub more_after_mark: bool,
    /// A limit cut the claim short.
    pub cut: bool,
    /// Somebody holds a row locked: look again after a while.
    pub locked: bool,
    /// Ids beyond the horizon were met: look again when it is wider.
    pub beyond: bool,
    /// Buckets in which a row could not be put into the walk, since somebody holds it locked: to be swept
    /// after a while.
    pub stuck: Vec<u8>,
    /// When the next row falls due that was met or waits for its time in these buckets; zero: one is to be
    /// promoted.
    pub due_in: Option<Duration>,
    /// Buckets that carry our token, as the claim saw them.
    pub owned: Vec<u8>,
}

impl Session {
    /// Claims rows under this session's token.
    ///
    /// # Errors
    /// [`StoreError::TokenLost`] when the lease is over on our side: nothing was sent.
    pub async fn claim(&self, request: &ClaimRequest) -> Result<ClaimAnswer, StoreError> {
        if !self.token.holds() {
            return Err(StoreError::TokenLost("its lease is over"));
        }
        let partitions = i32::try_from(request.rooms.len()).unwrap_or(i32::MAX);
        let number = self.token.number();
        let values: [&(dyn ToSql + Sync); 14] = [
            &number,
            &self.token.name(),
            &self.lease.as_secs_f64(),
            &request.buckets,
            &request.starts,
            &request.visits,
            &request.rows_per_aggregate,
            &request.limit,
            &partitions,
            &request.rooms,
            &request.horizon,
            &MOST_PARKED,
            &MOST_PARKED_OF_ONE,
            &LATE.as_secs_f64(),
        ];
        let whose: [&(dyn ToSql + Sync); 1] = [&number];
        let claim = self.statements.claim.borrow().clone();
        #[cfg(feature = "failpoints")]
        crate::failpoint::reached("claim:before", []);
        let answer = in_time(async {
            // Polled in this order, so sent in this order; answers come back in it, too. After a
            // failed statement COMMIT rolls back.
            let (begun, buckets, rows, committed) = futures_util::join!(
                self.client.batch_execute(self.runner.begin()),
                self.statements.claim_buckets.query(&self.client, &whose),
                claim.query(&self.client, &values),
                self.client.batch_execute("COMMIT"),
            );
            begun?;
            let buckets = buckets?;
            let rows = rows?;
            committed?;
            Ok(read_answer(&buckets, &rows))
        })
        .await
        .inspect_err(|error| self.pooler.learn(error))?;
        #[cfg(feature = "failpoints")]
        if !answer.rows.is_empty() {
            crate::failpoint::reached("claim:after", answer.rows.iter().map(|row| row.id.0));
        }
        Ok(answer)
    }
}

pub(super) fn bucket_of(row: &Row, column: usize) -> u8 {
    u8::try_from(row.get::<_, i32>(column))
        .expect("a CHECK and the bucket function keep buckets in 0..64")
}

fn read_answer(buckets: &[Row], rows: &[Row]) -> ClaimAnswer {
    let mut answer = ClaimAnswer {
        owned: buckets.iter().map(|row| bucket_of(row, 0)).collect(),
        ..ClaimAnswer::default()
    };
    for row in rows {
        match row.get::<_, &str>(0) {
            "row" => answer.rows.push(ClaimedRow {
                id: EventId(row.get(1)),
                bucket: bucket_of(row, 2),
                key: AggregateKey::new(row.get(3), row.get(4)),
                stored_bytes: usize::try_from(row.get::<_, i32>(5)).unwrap_or(0),
            }),
            "cut" => answer.cuts.push((bucket_of(row, 2), row.get(1))),
            "stuck" => answer.stuck.push(bucket_of(row, 2)),
            "due" => {
                answer.due_in = Some(Duration::from_millis(
                    row.get::<_, i64>(1).max(0).unsigned_abs(),
                ))
            }
            "visit" => answer.visits.push(Visit {
                bucket: bucket_of(row, 2),
                last: row.get(1),
                visited: row.get(5),
            }),
            _ => {
                let rest: i32 = row.get(5);
                answer.more_after_mark = rest & 1 != 0;
                answer.cut = rest & 2 != 0;
                answer.locked = rest & 4 != 0;
                answer.beyond = rest & 8 != 0;
            }
        }
    }
    answer.rows.sort_unstable_by_key(|row| row.id);
    answer
}
