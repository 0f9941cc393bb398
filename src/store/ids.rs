//! Ids: where they are drawn from, and who may still write some that are older than those seen.

use serde::Serialize;

use super::{Store, StoreError};

/// The sequence that ids are drawn from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdSequence {
    /// Its name, as SQL takes it.
    pub name: String,
    /// How many a session draws ahead. Above 1 the ids of different sessions say nothing of who was
    /// first.
    pub cache: i64,
}

/// The transaction that has been under way for longest of those that may still write events.
#[derive(Clone, Debug, Serialize)]
pub struct OldestWriter {
    /// Its backend; none for a prepared transaction.
    pub pid: Option<i32>,
    /// Seconds since it began, if our role may see that.
    pub age_seconds: Option<f64>,
}

impl Store {
    /// The sequence of the column `id`; none if it has no sequence of its own.
    ///
    /// # Errors
    /// When the database does not answer or refuses.
    pub async fn id_sequence(&self) -> Result<Option<IdSequence>, StoreError> {
        let rows = self.query(&self.queries.id_sequence, &[]).await?;
        Ok(rows.first().map(|row| IdSequence {
            name: row.get("name"),
            cache: row.get("cache"),
        }))
    }

    /// Refuses strict order where ids do not tell who was first.
    ///
    /// # Errors
    /// [`StoreError::Shape`] says why, and what to do.
    pub async fn check_strict(&self) -> Result<(), StoreError> {
        let table = self.names.display();
        match self.id_sequence().await? {
            None => Err(StoreError::Shape(format!(
                "relay.ordering = \"strict\" needs ids that are drawn from a sequence, column id of \
                 table {table} has none: make it an identity column, or set relay.ordering = \"visible\""
            ))),
            Some(IdSequence { name, cache }) if cache > 1 => Err(StoreError::Shape(format!(
                "relay.ordering = \"strict\" needs ids in the order in which they were drawn, and \
                 sequence {name} has CACHE {cache}: ALTER SEQUENCE {name} CACHE 1, or set \
                 relay.ordering = \"visible\""
            ))),
            Some(_) => Ok(()),
        }
    }

    /// Who holds back newer ids under strict order, if anybody does.
    ///
    /// # Errors
    /// When the database does not answer or refuses.
    pub async fn oldest_writer(&self) -> Result<Option<OldestWriter>, StoreError> {
        let rows = self.query(&self.queries.oldest_writer, &[]).await?;
        Ok(rows.first().map(|row| OldestWriter {
            pid: row.get("pid"),
            age_seconds: row.get("age_seconds"),
        }))
    }
}
