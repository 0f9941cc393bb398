//! Lag: how much waits, since when, and for what; who holds what.

use std::time::Duration;

use serde::Serialize;

use super::{Store, StoreError, TOKEN_LOCK_CLASS};

/// Counts stop here: status is never a scan of the backlog.
pub(super) const MOST_COUNTED: i32 = 10_000;

/// The state of the outbox.
#[derive(Clone, Debug, Serialize)]
pub struct Lag {
    /// Unpublished events, at most [`Lag::counted_to`].
    pub pending: i64,
    /// Dead events, at most [`Lag::counted_to`].
    pub dead: i64,
    /// Where counting stopped: a count of this number means "or more".
    pub counted_to: i64,
    /// The unpublished event that has been due for longest.
    pub oldest: Option<OldestEvent>,
    /// Does the database say that the outbox lags? Changed by whoever tells the people.
    #[serde(skip)]
    pub was_lagging: bool,
    /// Subjects of alerts that are raised.
    #[serde(skip)]
    pub raised: Vec<String>,
}

impl Lag {
    /// For how long the oldest event has been due; zero when none is.
    pub fn age(&self) -> Duration {
        let seconds = self.oldest.as_ref().and_then(|oldest| oldest.age_seconds);
        Duration::try_from_secs_f64(seconds.unwrap_or(0.0)).unwrap_or_default()
    }

    /// The answer to `lag.sql`.
    pub(super) fn read(rows: &[tokio_postgres::Row]) -> Result<Self, StoreError> {
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
            age_seconds: row
                .get::<_, Option<f64>>("age_seconds")
                .map(|seconds| seconds.max(0.0)),
            behind_dead: row.get("behind_dead"),
            waits_for: waits_for(row),
        });
        Ok(Self {
            pending: row.get("pending"),
            dead: row.get("dead"),
            counted_to: i64::from(MOST_COUNTED),
            oldest,
            was_lagging: row.get::<_, Option<bool>>("was_lagging").unwrap_or(false),
            raised: row.get("raised"),
        })
    }
}

/// The unpublished event that has been due for longest, and what it waits for.
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
    /// Seconds since it was due; zero while it is not, none for an infinite timestamp.
    pub age_seconds: Option<f64>,
    /// The dead event that holds it back, if one does.
    pub behind_dead: Option<i64>,
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
        Lag::read(&rows)
    }

    /// The outbox began or ceased to lag. True for the one caller who changed that, and who tells the
    /// people.
    ///
    /// # Errors
    /// When the database does not answer or refuses.
    pub async fn lag_changed(&self, lagging: bool) -> Result<bool, StoreError> {
        let rows = self.query(&self.queries.lag_change, &[&lagging]).await?;
        Ok(!rows.is_empty())
    }

    /// Raises an alert. True for the one caller who did, and who tells the people.
    ///
    /// # Errors
    /// When the database does not answer or refuses.
    pub async fn raise(&self, subject: &str, replica: &str) -> Result<bool, StoreError> {
        let rows = self
            .query(&self.queries.alert_raise, &[&subject, &replica])
            .await?;
        Ok(!rows.is_empty())
    }

    /// Clears an alert, unless a replica still cannot publish. Answers the one caller who did how
    /// long it had stood.
    ///
    /// # Errors
    /// When the database does not answer or refuses.
    pub async fn clear(&self, subject: &str) -> Result<Option<Duration>, StoreError> {
        let rows = self.query(&self.queries.alert_clear, &[&subject]).await?;
        Ok(rows
            .first()
            .map(|row| Duration::try_from_secs_f64(row.get(0)).unwrap_or_default()))
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
    let failed_before: Option<&str> = row.get("last_error");
    if due_in > 0.0 {
        let wait =
            humantime::format_duration(Duration::from_secs(due_in.ceil().clamp(1.0, 1e12) as u64));
        return match (attempts, failed_before) {
            (1.., _) => format!("it failed {attempts} time(s) and is tried again in {wait}"),
            (_, Some(_)) => format!("it waits for its destination and is tried again in {wait}"),
            (_, None) => format!("it is scheduled, due in {wait}"),
        };
    }
    let (live, ready): (i32, i32) = (row.get("live"), row.get("ready"));
    if live == 0 {
        return "no relay is running".to_owned();
    }
    if ready == 0 {
        return "no relay can publish at present: `bellwire check` and the relays' logs say why"
            .to_owned();
    }
    match (attempts, failed_before) {
        (1.., _) => format!("it failed {attempts} time(s) and is due again"),
        (_, Some(_)) => "it waited for its destination and is due again".to_owned(),
        (_, None) => "it has not been tried yet: the relay is not keeping up".to_owned(),
    }
}
