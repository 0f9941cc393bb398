//! Dead letters of the intake: list, show, discard.

use serde::Serialize;
use tokio_postgres::types::ToSql;

use super::store::IntakeStore;
use crate::store::StoreError;

/// Statuses of dead letters that somebody still has to deal with.
pub const OPEN: [&str; 2] = ["retryable", "parked"];
/// All of them.
pub const STATUSES: [&str; 4] = ["retryable", "parked", "resolved", "discarded"];

/// Which dead letters. All conditions must hold.
#[derive(Clone, Debug, Default)]
pub struct LetterFilter {
    /// Of this source.
    pub source: Option<String>,
    /// These ids.
    pub event_ids: Option<Vec<String>>,
    /// This class of reason.
    pub reason: Option<String>,
    /// This event type.
    pub event_type: Option<String>,
    /// These statuses; the open ones unless given.
    pub statuses: Option<Vec<String>>,
}

impl LetterFilter {
    /// Does it mean every open dead letter?
    pub fn is_empty(&self) -> bool {
        self.source.is_none()
            && self.event_ids.is_none()
            && self.reason.is_none()
            && self.event_type.is_none()
            && self.statuses.is_none()
    }

    fn statuses(&self) -> Vec<String> {
        self.statuses
            .clone()
            .unwrap_or_else(|| OPEN.map(str::to_owned).to_vec())
    }
}

/// A dead letter, in brief.
#[derive(Clone, Debug, Serialize)]
pub struct Letter {
    /// Whose event it is.
    pub source: String,
    /// `webhook-id`.
    pub event_id: String,
    /// Its type; empty where the body has none.
    pub event_type: String,
    /// `retryable`, `parked`, `resolved` or `discarded`.
    pub status: String,
    /// `schema_invalid`, `unknown_type` or `processing_failed`.
    pub reason_class: String,
    /// Class and reason.
    pub last_error: String,
    /// Failures so far.
    pub attempts: i32,
    /// When it failed first.
    pub first_failed_at: String,
    /// When it failed last.
    pub last_failed_at: String,
    /// Seconds since it failed first.
    pub age_seconds: f64,
}

/// An event in full, dead or not.
#[derive(Clone, Debug, Serialize)]
pub struct StoredEvent {
    /// Whose event it is.
    pub source: String,
    /// `webhook-id`.
    pub event_id: String,
    /// Its type; empty where the body has none.
    pub event_type: String,
    /// `processed`, `dead_lettered`, `parked`, `discarded`; of older versions `received` and `failed`.
    pub status: String,
    /// Class and reason of the last failure.
    pub last_error: Option<String>,
    /// Failures so far.
    pub attempts: i32,
    /// Class of the last failure.
    pub reason_class: Option<String>,
    /// Status of its dead letter.
    pub dlq_status: Option<String>,
    /// When it came.
    pub received_at: String,
    /// When its handler had done its work.
    pub processed_at: Option<String>,
    /// When it failed first.
    pub first_failed_at: Option<String>,
    /// When it failed last.
    pub last_failed_at: Option<String>,
    /// When it was replayed well, or discarded.
    pub resolved_at: Option<String>,
    /// The request that stored it.
    pub execution_id: Option<String>,
    /// The request or replay that was last at it.
    pub last_execution_id: Option<String>,
    /// Of the bytes, in hex.
    pub payload_sha256: String,
    /// Bytes of the body.
    pub payload_bytes: i64,
    /// The body.
    pub payload: String,
}

impl IntakeStore {
    /// Dead letters of this kind, the oldest first.
    ///
    /// # Errors
    /// When the database does not answer or refuses.
    pub async fn letters(
        &self,
        filter: &LetterFilter,
        most: u32,
    ) -> Result<Vec<Letter>, StoreError> {
        let most = i32::try_from(most).unwrap_or(i32::MAX);
        let statuses = filter.statuses();
        let values: [&(dyn ToSql + Sync); 6] = [
            &filter.source,
            &filter.event_ids,
            &filter.reason,
            &filter.event_type,
            &statuses,
            &most,
        ];
        let rows = self.query(&self.queries.dead_list, &values).await?;
        Ok(rows
            .iter()
            .map(|row| Letter {
                source: row.get("source"),
                event_id: row.get("event_id"),
                event_type: row.get("event_type"),
                status: row.get("status"),
                reason_class: row.get("reason_class"),
                last_error: row.get("last_error"),
                attempts: row.get("attempts"),
                first_failed_at: row.get("first_failed_at"),
                last_failed_at: row.get("last_failed_at"),
                age_seconds: row.get("age_seconds"),
            })
            .collect())
    }

    /// How many dead letters of this kind there are.
    ///
    /// # Errors
    /// When the database does not answer or refuses.
    pub async fn letter_count(&self, filter: &LetterFilter) -> Result<i64, StoreError> {
        let statuses = filter.statuses();
        let values: [&(dyn ToSql + Sync); 5] = [
            &filter.source,
            &filter.event_ids,
            &filter.reason,
            &filter.event_type,
            &statuses,
        ];
        let rows = self.query(&self.queries.dead_count, &values).await?;
        Ok(rows.first().map_or(0, |row| row.get(0)))
    }

    /// Gives up on open dead letters of this kind, the oldest first; answers source and id of each. Those
    /// that a replay has in hand are passed over.
    ///
    /// # Errors
    /// When the database does not answer or refuses: nothing is changed.
    pub async fn discard(
        &self,
        filter: &LetterFilter,
        most: u32,
        execution_id: &str,
    ) -> Result<Vec<(String, String)>, StoreError> {
        let most = i32::try_from(most).unwrap_or(i32::MAX);
        let statuses = filter.statuses();
        let values: [&(dyn ToSql + Sync); 7] = [
            &filter.source,
            &filter.event_ids,
            &filter.reason,
            &filter.event_type,
            &statuses,
            &most,
            &execution_id,
        ];
        let rows = self.query(&self.queries.dead_discard, &values).await?;
        Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
    }

    /// All that is known of one event, dead or not.
    ///
    /// # Errors
    /// When the database does not answer or refuses.
    pub async fn event(
        &self,
        source: &str,
        event_id: &str,
    ) -> Result<Option<StoredEvent>, StoreError> {
        let values: [&(dyn ToSql + Sync); 2] = [&source, &event_id];
        let rows = self.query(&self.queries.dead_show, &values).await?;
        Ok(rows.first().map(|row| StoredEvent {
            source: row.get("source"),
            event_id: row.get("event_id"),
            event_type: row.get("event_type"),
            status: row.get("status"),
            last_error: row.get("last_error"),
            attempts: row.get("attempts"),
            reason_class: row.get("reason_class"),
            dlq_status: row.get("dlq_status"),
            received_at: row.get("received_at"),
            processed_at: row.get("processed_at"),
            first_failed_at: row.get("first_failed_at"),
            last_failed_at: row.get("last_failed_at"),
            resolved_at: row.get("resolved_at"),
            execution_id: row.get("execution_id"),
            last_execution_id: row.get("last_execution_id"),
            payload_sha256: row.get("payload_sha256"),
            payload_bytes: row.get("payload_bytes"),
            payload: String::from_utf8_lossy(row.get("payload")).into_owned(),
        }))
    }
}
