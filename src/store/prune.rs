//! Prune: delete published events whose time is over, a step at a time.

use std::time::Duration;

use super::{LONGEST_AGE, PRUNE_LOCK_CLASS, Store, StoreError};

/// What a step of pruning did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pruned {
    /// So many events are gone; fewer than asked for means that there are no more.
    Rows(u64),
    /// Another replica is at it.
    Elsewhere,
}

impl Pruned {
    /// The answer to `prune.sql`.
    pub(super) fn read(rows: &[tokio_postgres::Row]) -> Self {
        match rows.first() {
            Some(row) if row.get("mine") => {
                Self::Rows(u64::try_from(row.get::<_, i64>("gone")).unwrap_or(0))
            }
            _ => Self::Elsewhere,
        }
    }
}

impl Store {
    /// Deletes up to `most` events that were published longer than `keep` ago.
    ///
    /// # Errors
    /// When the database does not answer or refuses; a step that takes too long is rolled back
    /// ([`StoreError::is_timeout`]): try a smaller one.
    pub async fn prune(&self, keep: Duration, most: u32) -> Result<Pruned, StoreError> {
        let most = i32::try_from(most).unwrap_or(i32::MAX);
        let keep = keep.min(LONGEST_AGE).as_secs_f64();
        let rows = self
            .query(
                &self.queries.prune,
                &[&PRUNE_LOCK_CLASS, &keep, &most, &self.names.qualified("")],
            )
            .await?;
        Ok(Pruned::read(&rows))
    }

    /// How many events were published longer than `keep` ago; counting stops at `most`.
    ///
    /// # Errors
    /// When the database does not answer or refuses.
    pub async fn prunable(&self, keep: Duration, most: i32) -> Result<i64, StoreError> {
        let keep = keep.min(LONGEST_AGE).as_secs_f64();
        let rows = self
            .query(&self.queries.prune_count, &[&keep, &most])
            .await?;
        Ok(rows.first().map_or(0, |row| row.get(0)))
    }
}
