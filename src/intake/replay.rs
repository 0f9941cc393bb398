//! Replay: dead letters once more, by today's schema and routes, from the bytes that were stored.
//!
//! # Invariants
//! - What a replay takes in hand no other one takes: it is claimed in one statement, and looked at again
//!   under the lock of its event. A claim that is ten minutes old is worth nothing.
//! - Each event is a transaction of its own, like its first delivery: one that fails does not hold up
//!   the others, and one failure more is counted.
//! - A dry run changes nothing.
//! - Events that a version without that transaction left behind in mid-work are taken up, too.

use std::sync::Arc;
use std::time::Duration;

use futures_util::join;
use serde::Serialize;
use tokio::time::timeout;
use tokio_postgres::types::ToSql;

use super::http::execution_id;
use super::report::Reports;
use super::route::Event;
use super::source::{Failure, Source};
use super::store::{IntakeStore, Outcome, storable};
use super::work::Progress;
use crate::store::StoreError;

/// Events of one replay, unless asked for otherwise.
pub const DEFAULT_LIMIT: u32 = 50;
/// Events of one replay, at most.
pub const MOST: u32 = 500;

/// What to replay.
#[derive(Clone, Debug)]
pub struct Order {
    /// Only say what would be replayed.
    pub dry_run: bool,
    /// Parked ones, too.
    pub include_parked: bool,
    /// Events, at most; the oldest first.
    pub limit: u32,
    /// These ids only.
    pub event_ids: Option<Vec<String>>,
    /// Of this class of reason only; `stranded` for those without a dead letter.
    pub reason: Option<String>,
    /// Only those that were left behind in mid-work.
    pub stranded_only: bool,
}

impl Default for Order {
    fn default() -> Self {
        Self {
            dry_run: true,
            include_parked: false,
            limit: DEFAULT_LIMIT,
            event_ids: None,
            reason: None,
            stranded_only: false,
        }
    }
}

/// One event of a replay.
#[derive(Clone, Debug, Serialize)]
pub struct Replayed {
    /// Whose event it is.
    pub source: String,
    /// `webhook-id`.
    pub event_id: String,
    /// Its type by today's routes.
    pub event_type: String,
    /// Its status in the table.
    pub status: String,
    /// Class and reason of its last failure; empty if it went well.
    pub last_error: String,
    /// When it came.
    pub received_at: String,
    /// When its handler had done its work.
    pub processed_at: Option<String>,
    /// Failures so far.
    pub attempts: i32,
    /// Status of its dead letter, or `stranded`.
    pub dlq_status: String,
    /// Of a dry run: why it would fail again, as far as that can be told without running its handler.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub would_fail: Option<String>,
}

/// What a replay did, or would do.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// `replayed`, or `replay_dry_run`.
    pub outcome: &'static str,
    /// Events that it took in hand, or would take.
    pub candidates: usize,
    /// Each of them, oldest first, as it was committed.
    pub events: Vec<Replayed>,
    /// What it was done under.
    pub execution_id: String,
    /// Why it ended before its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// What a replay works with.
pub struct Replay<'a> {
    /// Where events are.
    pub store: &'a IntakeStore,
    /// Whose events.
    pub sources: &'a [Arc<Source>],
    /// Who is told of those that are parked.
    pub reports: Option<&'a Reports>,
    /// For each event.
    pub deadline: Duration,
}

impl Replay<'_> {
    /// Carries out an order. `step` is told after each event how many are done, and of how many.
    ///
    /// # Errors
    /// When nothing could be taken in hand. What goes wrong later is in the report.
    pub async fn run(
        &self,
        order: &Order,
        mut step: impl FnMut(usize, usize),
    ) -> Result<Report, StoreError> {
        let execution_id = execution_id();
        if order.dry_run {
            let events = self.list(order).await?;
            return Ok(Report {
                outcome: "replay_dry_run",
                candidates: events.len(),
                events,
                execution_id,
                error: None,
            });
        }
        let events = self.take_in_hand(order, &execution_id).await?;
        let mut error = None;
        for (done, (source, id)) in events.iter().enumerate() {
            // Box: a transaction's future is large.
            let one = Box::pin(self.one(source, id, &execution_id));
            match timeout(self.deadline, one).await {
                Ok(Ok(())) => step(done + 1, events.len()),
                Ok(Err(failed)) if !failed.ends_connection() => {
                    tracing::warn!(source, event_id = id, error = %failed, "not replayed");
                    error = Some(format!("event {id} of {source}: {failed}"));
                }
                Ok(Err(failed)) => {
                    error = Some(format!("event {id} of {source}: {failed}"));
                    break;
                }
                Err(_) => error = Some(format!("event {id} of {source}: not done in time")),
            }
        }
        if error.is_some() {
            self.release(&execution_id).await;
        }
        let (events, report) = (events.len(), self.report(&events).await?);
        Ok(Report {
            outcome: "replayed",
            candidates: events,
            events: report,
            execution_id,
            error,
        })
    }

    fn names(&self) -> Vec<String> {
        let names = self.sources.iter().map(|source| source.name.to_string());
        names.collect()
    }

    async fn candidates(
        &self,
        order: &Order,
        limit: i32,
        stranded_only: bool,
    ) -> Result<Vec<Replayed>, StoreError> {
        let names = self.names();
        let values: [&(dyn ToSql + Sync); 6] = [
            &names,
            &order.include_parked,
            &limit,
            &order.event_ids,
            &order.reason,
            &stranded_only,
        ];
        let query = &self.store.queries.replay_list;
        let rows = self.store.query(query, &values).await?;
        Ok(rows
            .iter()
            .map(|row| Replayed {
                source: row.get("source"),
                event_id: row.get("event_id"),
                event_type: row.get("event_type"),
                status: String::new(),
                last_error: row.get("last_error"),
                received_at: row.get("received_at"),
                processed_at: None,
                attempts: row.get("attempts"),
                dlq_status: row.get("dlq_status"),
                would_fail: None,
            })
            .collect())
    }

    /// Of a dry run.
    async fn list(&self, order: &Order) -> Result<Vec<Replayed>, StoreError> {
        let limit = i32::try_from(order.limit).unwrap_or(i32::MAX);
        let mut events = self.candidates(order, limit, order.stranded_only).await?;
        for event in &mut events {
            let Some(stored) = self.store.event(&event.source, &event.event_id).await? else {
                continue;
            };
            event.status = stored.status;
            let Some(source) = self.source(&event.source) else {
                continue;
            };
            let bytes = stored.payload.as_bytes();
            let read = source.read_stored(&event.event_id, bytes, "");
            let verdict = read.and_then(|read| source.judge(&read).map(drop));
            event.would_fail = verdict.err().map(|failure| failure.text());
        }
        Ok(events)
    }

    fn source(&self, name: &str) -> Option<&Arc<Source>> {
        self.sources.iter().find(|source| *source.name == *name)
    }

    /// Claims dead letters, and adds stranded events, up to the limit.
    async fn take_in_hand(
        &self,
        order: &Order,
        execution_id: &str,
    ) -> Result<Vec<(String, String)>, StoreError> {
        let limit = i32::try_from(order.limit).unwrap_or(i32::MAX);
        let mut claimed: Vec<(f64, String, String)> = Vec::new();
        if !order.stranded_only {
            let names = self.names();
            let values: [&(dyn ToSql + Sync); 6] = [
                &names,
                &order.include_parked,
                &limit,
                &order.event_ids,
                &order.reason,
                &execution_id,
            ];
            let query = &self.store.queries.replay_claim;
            let rows = self.store.query(query, &values).await?;
            claimed.extend(
                rows.iter()
                    .map(|row| (row.get("age"), row.get("source"), row.get("event_id"))),
            );
            claimed.sort_by(|one, other| {
                one.0
                    .total_cmp(&other.0)
                    .then_with(|| (&one.1, &one.2).cmp(&(&other.1, &other.2)))
            });
        }
        let mut events: Vec<_> = claimed
            .into_iter()
            .map(|(_, source, id)| (source, id))
            .collect();
        let left = limit - i32::try_from(events.len()).unwrap_or(limit);
        if left > 0 {
            let stranded = self.candidates(order, left, true).await?;
            events.extend(
                stranded
                    .into_iter()
                    .map(|event| (event.source, event.event_id)),
            );
        }
        Ok(events)
    }

    /// One event, in one transaction. One that somebody else has in hand is passed over.
    async fn one(&self, name: &str, id: &str, execution_id: &str) -> Result<(), StoreError> {
        let store = self.store;
        let (Some(source), Some(stored)) = (self.source(name), store.event(name, id).await?) else {
            return Ok(());
        };
        // The bytes never change: they may be read before the lock.
        let read = source.read_stored(id, stored.payload.as_bytes(), execution_id);
        let nothing_read = Event {
            source: name.to_owned(),
            id: id.to_owned(),
            event_type: stored.event_type,
            text: String::new(),
            execution_id: execution_id.to_owned(),
        };
        let (event, verdict) = match &read {
            Ok(read) => (&read.event, source.judge(read)),
            Err(failure) => (&nothing_read, Err(failure.clone())),
        };
        let work = store.begin_work().await?;
        let open = work.prepare(&store.queries.replay_open).await?;
        let resolve = work.prepare(&store.queries.resolve).await?;
        let ready = match verdict {
            Ok(route) => work
                .prepare_steps(route, event, &store.queries.emit)
                .await?
                .map_err(Failure::Processing),
            Err(failure) => Err(failure),
        };
        let values: [&(dyn ToSql + Sync); 3] = [&name, &id, &execution_id];
        let (begun, ours) = join!(work.begin(), open.query(work.client(), &values));
        begun?;
        if ours?.is_empty() {
            return work.roll_back().await;
        }
        let failed = match ready {
            Ok(steps) => work.handle(&steps, event).await?,
            Err(failure) => Err(failure),
        };
        let progress = Progress::default();
        let Err(failure) = failed else {
            let event_type = storable(&event.event_type);
            let values: [&(dyn ToSql + Sync); 4] = [&name, &id, &event_type, &execution_id];
            return work.commit(&resolve, &values, &progress).await.map(drop);
        };
        let rows = store
            .fail(work, source, event, &failure, "replay", &progress)
            .await?;
        let parked = rows
            .first()
            .is_some_and(|row| row.get::<_, &str>("status") == "parked");
        if let Some(reports) = self.reports {
            let outcome = if parked {
                Outcome::Parked
            } else {
                Outcome::DeadLettered
            };
            reports.settled(source, outcome, id, &failure.text());
        }
        Ok(())
    }

    async fn release(&self, execution_id: &str) {
        let query = &self.store.queries.replay_release;
        if let Err(error) = self.store.query(query, &[&execution_id]).await {
            tracing::warn!(%error, "events of a replay are in hand for ten minutes more");
        }
    }

    /// As it was committed.
    async fn report(&self, events: &[(String, String)]) -> Result<Vec<Replayed>, StoreError> {
        let (sources, ids): (Vec<&str>, Vec<&str>) = events
            .iter()
            .map(|(source, id)| (source.as_str(), id.as_str()))
            .unzip();
        let values: [&(dyn ToSql + Sync); 2] = [&sources, &ids];
        let rows = self
            .store
            .query(&self.store.queries.report, &values)
            .await?;
        Ok(rows
            .iter()
            .map(|row| Replayed {
                source: row.get("source"),
                event_id: row.get("event_id"),
                event_type: row.get("event_type"),
                status: row.get("status"),
                last_error: row.get("last_error"),
                received_at: row.get("received_at"),
                processed_at: row.get("processed_at"),
                attempts: row.get("attempts"),
                dlq_status: row.get("dlq_status"),
                would_fail: None,
            })
            .collect())
    }
}
