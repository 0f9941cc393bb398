//! The application's side: concurrent transactions that insert events by plain SQL.
//!
//! **Each writer has aggregates of its own.** An application that cares for the order of an
//! aggregate's events lets one transaction at a time touch the aggregate, usually by locking its
//! row; otherwise the ids are drawn in one order and committed in the other, and nobody could say
//! which of the two is right. Disjoint sets are the same without the locks.

use std::ops::Range;
use std::time::Instant;

use anyhow::Context as _;
use tokio::sync::mpsc::UnboundedSender;
use tokio_postgres::{Statement, Transaction};

use super::payload::{NewEvent, event};
use super::watch::News;
use crate::store::{Store, StoreError};

/// Events of a transaction, at most.
const MOST_EVENTS: u32 = 5;
/// Share of transactions that are rolled back whole.
const ROLLED_BACK: f64 = 0.05;
/// Share of transactions of which a savepoint is rolled back, and the rest committed.
const SAVEPOINT_ROLLED_BACK: f64 = 0.05;

/// One writer: its aggregates, and how many events it has to commit.
pub(super) struct Writer {
    aggregates: Range<u32>,
    quota: u32,
    /// Aggregates are first taken in turn, so that none is left out.
    turn: u32,
}

/// Splits the work. Never more writers than aggregates, since each needs one of its own.
pub(super) fn share(events: u32, aggregates: u32, writers: u32) -> Vec<Writer> {
    let writers = writers.min(aggregates);
    let cut = |whole: u32, part: u32| {
        let cut = u64::from(whole) * u64::from(part) / u64::from(writers);
        u32::try_from(cut).expect("a part is not larger than the whole")
    };
    (0..writers)
        .map(|writer| Writer {
            aggregates: cut(aggregates, writer)..cut(aggregates, writer + 1),
            quota: cut(events, writer + 1) - cut(events, writer),
            turn: 0,
        })
        .collect()
}

impl Writer {
    /// Commits exactly its quota. An event counts only once COMMIT has succeeded.
    pub(super) async fn run(
        mut self,
        store: Store,
        tell: UnboundedSender<News>,
    ) -> anyhow::Result<()> {
        let mut client = store.connect().await.context("a writer cannot connect")?;
        let sql = format!(
            "INSERT INTO {} (aggregate_type, aggregate_id, event_type, payload) \
             SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]::jsonb[]) RETURNING id",
            store.names().qualified("")
        );
        let insert = client.prepare(&sql).await.map_err(StoreError::from)?;
        while self.quota > 0 {
            let transaction = client.transaction().await.map_err(StoreError::from)?;
            let news = self
                .write(transaction, &insert)
                .await
                .map_err(StoreError::from)
                .context("a writer failed")?;
            // Nobody listens any more: the demo is over.
            if news.into_iter().any(|news| tell.send(news).is_err()) {
                break;
            }
        }
        Ok(())
    }

    /// One transaction.
    async fn write(
        &mut self,
        mut transaction: Transaction<'_>,
        insert: &Statement,
    ) -> Result<Vec<News>, tokio_postgres::Error> {
        let count = rand::random_range(1..=MOST_EVENTS).min(self.quota);
        if rand::random_bool(ROLLED_BACK) {
            let ids = insert_events(&transaction, insert, &self.events(count, true)).await?;
            transaction.rollback().await?;
            return Ok(vec![News::RolledBack(ids.len())]);
        }
        let mut news = Vec::new();
        // Some before and some after the savepoint, as an application's statements come.
        let before = rand::random_range(0..=count);
        let mut ids = insert_events(&transaction, insert, &self.events(before, false)).await?;
        if rand::random_bool(SAVEPOINT_ROLLED_BACK) {
            let savepoint = transaction.savepoint("attempt").await?;
            let undone = insert_events(&savepoint, insert, &self.events(count, true)).await?;
            savepoint.rollback().await?;
            news.push(News::RolledBack(undone.len()));
        }
        ids.extend(insert_events(&transaction, insert, &self.events(count - before, false)).await?);
        transaction.commit().await?;
        let at = Instant::now();
        self.quota -= count;
        news.push(News::Committed { ids, at });
        Ok(news)
    }

    fn events(&mut self, count: u32, rolled_back: bool) -> Vec<NewEvent> {
        (0..count)
            .map(|_| event(self.aggregate(rolled_back), rolled_back))
            .collect()
    }

    fn aggregate(&mut self, rolled_back: bool) -> u32 {
        let next = self.aggregates.start + self.turn;
        if rolled_back || next >= self.aggregates.end {
            return rand::random_range(self.aggregates.clone());
        }
        self.turn += 1;
        next
    }
}

async fn insert_events(
    transaction: &Transaction<'_>,
    insert: &Statement,
    events: &[NewEvent],
) -> Result<Vec<i64>, tokio_postgres::Error> {
    if events.is_empty() {
        return Ok(Vec::new());
    }
    let column = |of: fn(&NewEvent) -> &str| events.iter().map(of).collect::<Vec<_>>();
    let rows = transaction
        .query(
            insert,
            &[
                &column(|event| event.aggregate_type),
                &column(|event| &event.aggregate_id),
                &column(|event| event.event_type),
                &column(|event| &event.payload),
            ],
        )
        .await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shares_are_disjoint_and_complete() {
        for (events, aggregates, writers) in
            [(10_000, 1_000, 8), (7, 3, 5), (1, 1, 1), (5, 1_000, 8)]
        {
            let shares = share(events, aggregates, writers);
            assert_eq!(
                shares.iter().map(|writer| writer.quota).sum::<u32>(),
                events
            );
            assert_eq!(shares.first().unwrap().aggregates.start, 0);
            assert_eq!(shares.last().unwrap().aggregates.end, aggregates);
            assert!(
                shares
                    .windows(2)
                    .all(|pair| pair[0].aggregates.end == pair[1].aggregates.start)
            );
            assert!(shares.iter().all(|writer| !writer.aggregates.is_empty()));
        }
    }
}
