//! Lag: how much waits, since when, and for what; who holds what.

use std::time::Duration;

use serde::Serialize;

use super::{Store, StoreError, TOKEN_LOCK_CLASS};

/// Counts stop here: status is never a scan of the backlog.
const MOST_COUNTED: i32 = 10_000;

/// The state of the outbox.
#[derive(Clone, Debug, Serialize)]
pub struct Lag {
    /// Unpublished events, at most [`Lag::counted_to`].
    pub pending: i64,
    /// Dead events that hold back their aggregate, at most [`Lag::counted_to`].
    pub dead: i64,
    /// Where counting stopped: a count of this number means "or more".
    pub counted_to: i64,
    /// The oldest unpublished event.
    pub oldest: Option<OldestEvent>,
}

/// The oldest unpublished event, and what it waits for.
#[derive(Clone, Debug, Serialize)]
pub struct OldestEvent {
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
    /// Why the last one failed.
    pub last_error: Option<String>,
    /// Seconds since it was written; none for an infinite `created_at`.
    pub age_seconds: Option<f64>,
    /// One sentence: what it waits for.
    pub waits_for: String,
}

/// One replica, as the database knows it.
#[derive(Clone, Debug, Serialize)]
pub struct ReplicaStatus {
    /// Its token.
    pub token: i32,
    /// Its name, as in `claimed_by`.
    pub name: String,
    /// Can it publish?
    pub ready: bool,
    /// Does its session still hold the token's lock?
    pub connected: bool,
    /// Seconds since it registered.
    pub up_seconds: f64,
    /// Seconds left of its lease; not positive when it is over.
    pub lease_seconds: f64,
    /// Buckets it owns, of 64.
    pub buckets: i32,
}

impl Store {
    /// How much waits, since when, and for what.
    ///
    /// # Errors
    /// When the database does not answer or refuses.
    pub async fn lag(&self) -> Result<Lag, StoreError> {
        let rows = self.query(&self.queries.lag, &[&MOST_COUNTED]).await?;
        let row = rows
            .first()
            .ok_or_else(|| StoreError::Unavailable("the lag query answered no row".into()))?;
        let oldest = row.get::<_, Option<i64>>("id").map(|id| OldestEvent {
            id,
            aggregate_type: row.get("aggregate_type"),
            aggregate_id: row.get("aggregate_id"),
            event_type: row.get("event_type"),
            attempts: row.get("attempts"),
            last_error: row.get("last_error"),
            age_seconds: row.get("age_seconds"),
            waits_for: waits_for(row),
        });
        Ok(Lag {
            pending: row.get("pending"),
            dead: row.get("dead"),
            counted_to: i64::from(MOST_COUNTED),
            oldest,
        })
    }

    /// Who holds what.
    ///
    /// # Errors
    /// When the database does not answer or refuses.
    pub async fn replicas(&self) -> Result<Vec<ReplicaStatus>, StoreError> {
        let rows = self
            .query(&self.queries.replicas, &[&TOKEN_LOCK_CLASS])
            .await?;
        Ok(rows
            .iter()
            .map(|row| ReplicaStatus {
                token: row.get("token"),
                name: row.get("name"),
                ready: row.get("ready"),
                connected: row.get("connected"),
                up_seconds: row.get("up_seconds"),
                lease_seconds: row.get("lease_seconds"),
                buckets: row.get("buckets"),
            })
            .collect())
    }
}

fn waits_for(row: &tokio_postgres::Row) -> String {
    if let Some(dead) = row.get::<_, Option<i64>>("behind_dead") {
        return format!("it is held behind dead-lettered event {dead}: replay or discard that one");
    }
    if let Some(replica) = row.get::<_, Option<&str>>("claimed_by") {
        return format!("it is in hand of {replica}");
    }
    let due_in: f64 = row.get("due_in_seconds");
    let attempts: i32 = row.get("attempts");
    if due_in.is_infinite() {
        return "its next_attempt_at is infinite: it is never due".to_owned();
    }
    if due_in > 0.0 {
        let wait =
            humantime::format_duration(Duration::from_secs(due_in.ceil().clamp(1.0, 1e12) as u64));
        return if attempts > 0 {
            format!("it failed {attempts} time(s) and is tried again in {wait}")
        } else {
            format!("it is scheduled, due in {wait}")
        };
    }
    if attempts > 0 {
        format!("it failed {attempts} time(s) and is due again")
    } else {
        "it has not been tried yet: the relay is not keeping up or not running".to_owned()
    }
}
