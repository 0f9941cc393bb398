//! Load: what to publish of claimed rows, after the claim's commit, in bounded pieces.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::{ClaimedRow, Store, StoreError};
use crate::event::OutboxEvent;

impl Store {
    /// Reads the events of these rows, which must ascend by id, in their order. Rows that vanished
    /// meanwhile are left out.
    ///
    /// # Errors
    /// When the database does not answer, or one of the rows cannot be sent as text
    /// ([`StoreError::is_about_data`]).
    pub async fn load(&self, rows: &[ClaimedRow]) -> Result<Vec<OutboxEvent>, StoreError> {
        debug_assert!(rows.is_sorted_by_key(|row| row.id));
        let ids: Vec<i64> = rows.iter().map(|row| row.id.0).collect();
        let loaded = self.query(&self.queries.load, &[&ids]).await?;
        let now = Instant::now();
        // The server answers in no particular order.
        let loaded: HashMap<i64, _> = loaded.iter().map(|row| (row.get(0), row)).collect();
        let mut events = Vec::with_capacity(rows.len());
        for claimed in rows {
            let Some(row) = loaded.get(&claimed.id.0) else {
                continue;
            };
            let created_at: Option<f64> = row.get(7);
            let age: Option<f64> = row.get(8);
            events.push(OutboxEvent {
                id: claimed.id,
                key: claimed.key.clone(),
                bucket: claimed.bucket,
                event_type: row.get::<_, &str>(1).into(),
                payload: Bytes::from(row.get::<_, String>(2)),
                headers: row.get(3),
                correlation_id: row.get(4),
                event_id: row.get(5),
                attempts: row.get(6),
                replayed: row.get(9),
                created_at: created_at
                    .filter(|seconds| *seconds >= 0.0)
                    .map(whole_seconds),
                age: age.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
                loaded: now,
            });
        }
        Ok(events)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "not negative, and a PostgreSQL timestamp's seconds fit a u64 many times over"
)]
fn whole_seconds(seconds: f64) -> u64 {
    seconds as u64
}
