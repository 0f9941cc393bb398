//! Dead: list, show, replay and discard events that were given up.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio_postgres::types::ToSql;

use super::{LONGEST_AGE, Store, StoreError};
use crate::alert::DeadLetter;

/// Later events held back are counted up to here.
pub const MOST_HELD_BACK: i32 = 10_000;

/// Events that were named and are not dead are told one by one up to here.
pub const MOST_NAMED: i32 = 100;

/// Events changed in one transaction: short, and a replay of many rings often enough.
const CHANGED_AT_ONCE: u32 = 1_000;

/// What an operator does with a dead event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is tried again, with all its attempts.
    Replay,
    /// It is given up for good.
    Discard,
}

/// Which dead events. All conditions must hold; none given means all.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct DeadFilter {
    /// These ids.
    pub ids: Option<Vec<i64>>,
    /// This aggregate type, exactly.
    pub aggregate_type: Option<String>,
    /// This aggregate id, exactly.
    pub aggregate_id: Option<String>,
    /// This event type, exactly.
    pub event_type: Option<String>,
    /// This class of reason, as `last_error` begins with it.
    pub reason: Option<String>,
    /// Written at least so long ago.
    #[serde(with = "humantime_serde")]
    pub older_than: Option<Duration>,
    /// Written at most so long ago.
    #[serde(with = "humantime_serde")]
    pub newer_than: Option<Duration>,
}

impl DeadFilter {
    /// Does it mean every dead event?
    pub fn is_empty(&self) -> bool {
        self.ids.is_none()
            && self.aggregate_type.is_none()
            && self.aggregate_id.is_none()
            && self.event_type.is_none()
            && self.reason.is_none()
            && self.older_than.is_none()
            && self.newer_than.is_none()
    }
}

/// What became of an order to replay or discard.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DeadReport {
    /// Nothing was changed: it was only asked what would be.
    pub dry_run: bool,
    /// Dead events that fulfilled the conditions before the change, whatever the limit.
    pub matched: i64,
    /// Of a dry run: so many would be changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub would_change: Option<u64>,
    /// So many were changed.
    pub changed: u64,
    /// So many were passed over: locked, or changed by somebody else meanwhile.
    pub passed_over: u64,
    /// Those that were named by id and are not dead.
    pub not_dead: Vec<NotDead>,
}

/// An event that was named, but is not dead.
#[derive(Clone, Debug, Serialize)]
pub struct NotDead {
    /// Outbox id.
    pub id: i64,
    /// Its status; none if there is no such event.
    pub status: Option<String>,
}

/// A dead event, in brief.
#[derive(Clone, Debug, Serialize)]
pub struct DeadEvent {
    /// Outbox id.
    pub id: i64,
    /// Its aggregate type.
    pub aggregate_type: String,
    /// Its aggregate id.
    pub aggregate_id: String,
    /// Its event type.
    pub event_type: String,
    /// Failed attempts.
    pub attempts: i32,
    /// Class and reason.
    pub last_error: Option<String>,
    /// Does it hold back the later events of its aggregate?
    pub holds: bool,
    /// Seconds since it was written; none for an infinite `created_at`.
    pub age_seconds: Option<f64>,
}

/// An event in full, dead or not.
#[derive(Clone, Debug, Serialize)]
pub struct EventDetails {
    /// Outbox id.
    pub id: i64,
    /// Its aggregate type.
    pub aggregate_type: String,
    /// Its aggregate id.
    pub aggregate_id: String,
    /// Its event type.
    pub event_type: String,
    /// `pending`, `published`, `dead` or `discarded`.
    pub status: String,
    /// Failed attempts.
    pub attempts: i32,
    /// Class and reason.
    pub last_error: Option<String>,
    /// Claim under which it failed last.
    pub failed_in: Option<String>,
    /// Of a pending one: not before this time.
    pub next_attempt_at: String,
    /// Claim that has it in hand, or had it last.
    pub claimed_by: Option<String>,
    /// Of a dead one: does it hold back the later events of its aggregate?
    pub holds: bool,
    /// When it was written.
    pub created_at: String,
    /// When it was published.
    pub published_at: Option<String>,
    /// Seconds since it was written; none for an infinite `created_at`.
    pub age_seconds: Option<f64>,
    /// Its correlation id.
    pub correlation_id: Option<String>,
    /// Its UUID.
    pub event_id: Option<String>,
    /// Its own headers, as JSON text.
    pub headers: Option<String>,
    /// Bytes of the payload.
    pub payload_bytes: i64,
    /// The payload, as it is or would be sent.
    pub payload: String,
    /// Later events of its aggregate that wait, at most [`MOST_HELD_BACK`].
    pub held_back: i64,
}

impl Store {
    /// Dead events of this kind with ids above `after`, the oldest first.
    ///
    /// # Errors
    /// When the database does not answer or refuses.
    pub async fn dead_list(
        &self,
        filter: &DeadFilter,
        after: i64,
        most: u32,
    ) -> Result<Vec<DeadEvent>, StoreError> {
        let rows = self
            .filtered(&self.queries.dead_list, true, filter, after, Some(most))
            .await?;
        Ok(rows
            .iter()
            .map(|row| DeadEvent {
                id: row.get("id"),
                aggregate_type: row.get("aggregate_type"),
                aggregate_id: row.get("aggregate_id"),
                event_type: row.get("event_type"),
                attempts: row.get("attempts"),
                last_error: row.get("last_error"),
                holds: row.get("holds"),
                age_seconds: row.get("age_seconds"),
            })
            .collect())
    }

    /// How many dead events of this kind there are.
    ///
    /// # Errors
    /// When the database does not answer or refuses.
    pub async fn dead_count(&self, filter: &DeadFilter) -> Result<i64, StoreError> {
        let rows = self
            .filtered(&self.queries.dead_count, true, filter, i64::MIN, None)
            .await?;
        Ok(rows.first().map_or(0, |row| row.get(0)))
    }

    /// Replays or discards up to `most` dead events of this kind with ids above `after`, the oldest
    /// first, and answers which. A row that somebody holds locked, for example another replay, is
    /// passed over. An event that is not dead is never touched.
    ///
    /// # Errors
    /// When the database does not answer or refuses: nothing is changed.
    pub async fn dead_change(
        &self,
        change: Change,
        filter: &DeadFilter,
        after: i64,
        most: u32,
    ) -> Result<Vec<i64>, StoreError> {
        let sql = match change {
            Change::Replay => &self.queries.dead_replay,
            Change::Discard => &self.queries.dead_discard,
        };
        let rows = self.filtered(sql, false, filter, after, Some(most)).await?;
        let mut ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        ids.sort_unstable();
        Ok(ids)
    }

    /// The same for up to `limit` events (all, if none), in steps of their own transactions; `done` is
    /// told after each how many it were so far, and of how many. A dry run changes nothing.
    ///
    /// A step chooses its events first, so that it is known how many were passed over.
    ///
    /// # Errors
    /// When the database does not answer or refuses: what was done so far stays done. Of a step whose
    /// connection was lost nobody knows, and it is not tried again: it would take others, beyond the limit.
    pub async fn dead_order(
        &self,
        change: Change,
        filter: &DeadFilter,
        limit: Option<u64>,
        dry_run: bool,
        mut done: impl FnMut(u64, u64),
    ) -> Result<DeadReport, StoreError> {
        let matched = self.dead_count(filter).await?;
        let will = u64::try_from(matched)
            .unwrap_or(0)
            .min(limit.unwrap_or(u64::MAX));
        let mut report = DeadReport {
            dry_run,
            matched,
            would_change: dry_run.then_some(will),
            // Asked for before the change: afterwards those that were replayed are not dead either.
            not_dead: self
                .not_dead(filter.ids.as_deref().unwrap_or_default())
                .await?,
            ..DeadReport::default()
        };
        if dry_run {
            return Ok(report);
        }
        let mut after = i64::MIN;
        loop {
            let left = limit.map_or(u64::MAX, |limit| limit.saturating_sub(report.changed));
            let step = u32::try_from(left).unwrap_or(u32::MAX).min(CHANGED_AT_ONCE);
            if step == 0 {
                return Ok(report);
            }
            let chosen = self.dead_list(filter, after, step).await?;
            let Some(last) = chosen.last() else {
                return Ok(report);
            };
            let of_these = DeadFilter {
                ids: Some(chosen.iter().map(|event| event.id).collect()),
                ..filter.clone()
            };
            let ids = self.dead_change(change, &of_these, after, step).await?;
            after = last.id;
            report.changed += ids.len() as u64;
            report.passed_over += (chosen.len() - ids.len().min(chosen.len())) as u64;
            done(report.changed, will);
        }
    }

    /// Those of these events that are not dead, at most [`MOST_NAMED`] of them: never touched by replay
    /// and discard.
    ///
    /// # Errors
    /// When the database does not answer or refuses.
    pub async fn not_dead(&self, ids: &[i64]) -> Result<Vec<NotDead>, StoreError> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let rows = self
            .query(&self.queries.dead_not, &[&ids, &MOST_NAMED])
            .await?;
        Ok(rows
            .iter()
            .map(|row| NotDead {
                id: row.get("id"),
                status: row.get("status"),
            })
            .collect())
    }

    /// All that is known of one event.
    ///
    /// # Errors
    /// When the database does not answer or refuses.
    pub async fn event(&self, id: i64) -> Result<Option<EventDetails>, StoreError> {
        let rows = self
            .query(&self.queries.dead_show, &[&id, &MOST_HELD_BACK])
            .await?;
        Ok(rows.first().map(|row| EventDetails {
            id: row.get("id"),
            aggregate_type: row.get("aggregate_type"),
            aggregate_id: row.get("aggregate_id"),
            event_type: row.get("event_type"),
            status: row.get("status"),
            attempts: row.get("attempts"),
            last_error: row.get("last_error"),
            failed_in: row.get("failed_in"),
            next_attempt_at: row.get("next_attempt_at"),
            claimed_by: row.get("claimed_by"),
            holds: row.get("holds"),
            created_at: row.get("created_at"),
            published_at: row.get("published_at"),
            age_seconds: row.get("age_seconds"),
            correlation_id: row.get("correlation_id"),
            event_id: row.get("event_id"),
            headers: row.get("headers"),
            payload_bytes: i64::from(row.get::<_, i32>("payload_bytes")),
            payload: row.get("payload"),
            held_back: row.get("held_back"),
        }))
    }

    /// What an alert says of a dead event; none if it is not dead any more.
    ///
    /// # Errors
    /// When the database does not answer or refuses.
    pub async fn dead_letter(&self, id: i64) -> Result<Option<DeadLetter>, StoreError> {
        let rows = self
            .query(&self.queries.dead_letter, &[&id, &MOST_HELD_BACK])
            .await?;
        Ok(rows.first().map(|row| {
            let held_back: i64 = row.get("held_back");
            DeadLetter {
                id,
                aggregate_type: row.get("aggregate_type"),
                aggregate_id: row.get("aggregate_id"),
                event_type: row.get("event_type"),
                attempts: row.get("attempts"),
                last_error: row
                    .get::<_, Option<String>>("last_error")
                    .unwrap_or_default(),
                cause: "",
                payload_bytes: u64::try_from(row.get::<_, i64>("payload_bytes")).ok(),
                held_back: Some(held_back),
                held_back_capped: held_back >= i64::from(MOST_HELD_BACK),
                holds: row.get("holds"),
                copied_to: None,
                table: self.names.display(),
            }
        }))
    }

    /// Runs a statement that has the condition of `dead_filter.sql`. `repeats`: may it run twice?
    async fn filtered(
        &self,
        sql: &str,
        repeats: bool,
        filter: &DeadFilter,
        after: i64,
        most: Option<u32>,
    ) -> Result<Vec<tokio_postgres::Row>, StoreError> {
        let seconds = |age: Duration| age.min(LONGEST_AGE).as_secs_f64();
        let (older, newer) = (
            filter.older_than.map(seconds),
            filter.newer_than.map(seconds),
        );
        let most = most.map(|most| i32::try_from(most).unwrap_or(i32::MAX));
        let mut parameters: Vec<&(dyn ToSql + Sync)> = vec![
            &filter.ids,
            &filter.aggregate_type,
            &filter.aggregate_id,
            &filter.event_type,
            &filter.reason,
            &older,
            &newer,
            &after,
        ];
        if let Some(most) = &most {
            parameters.push(most);
        }
        if repeats {
            self.query(sql, &parameters).await
        } else {
            self.query_once(sql, &parameters).await
        }
    }
}
