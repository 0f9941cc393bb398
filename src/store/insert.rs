//! Insert: what runs on the application's own connections, within its own transactions.
//!
//! Nothing is prepared by name and nothing of the session is relied on, so a connection pooler in
//! transaction mode is as good as a direct connection; each statement is one round trip.

use std::time::{Duration, SystemTime};

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Error, GenericClient};

use super::lag::MOST_COUNTED;
use super::shape::{Found, SHAPE, check_all_columns, check_set_up};
use super::{LONGEST_AGE, Lag, Names, PRUNE_LOCK_CLASS, Pruned, StoreError, schema_version};

/// The rows to insert, a list for each column.
#[derive(Debug, Default)]
pub(crate) struct Rows<'a> {
    pub(crate) aggregate_type: Vec<&'a str>,
    pub(crate) aggregate_id: Vec<&'a str>,
    pub(crate) event_type: Vec<&'a str>,
    /// JSON text.
    pub(crate) payload: Vec<&'a str>,
    /// JSON text.
    pub(crate) headers: Vec<Option<String>>,
    pub(crate) correlation_id: Vec<Option<&'a str>>,
    pub(crate) event_id: Vec<Option<&'a str>>,
    pub(crate) due_at: Vec<Option<SystemTime>>,
    /// Seconds from now, by the database's clock.
    pub(crate) due_in: Vec<Option<f64>>,
}

/// The statements for one outbox.
#[derive(Clone, Debug)]
pub(crate) struct Writer {
    names: Names,
    publish: String,
    /// None where the id may not be read.
    publish_many: Option<String>,
    lag: String,
    prune: String,
}

impl Writer {
    /// Looks whether the outbox is there, of this schema version or a later one, and has the columns.
    ///
    /// A later version is fine for who only writes: migrations take nothing from writers, and
    /// applications are not deployed at the same time as relays.
    pub(crate) async fn find<C>(client: &C, names: Names) -> Result<Self, StoreError>
    where
        C: GenericClient + Sync,
    {
        let table = names.display();
        let of_names: [(&(dyn ToSql + Sync), Type); 2] =
            [(&names.schema, Type::TEXT), (&names.table, Type::TEXT)];
        let found = Found::read(&client.query_typed(SHAPE, &of_names).await?);
        check_set_up(&found, &names)?;
        let sql = names.render(include_str!("../../sql/queries/schema_version.sql"));
        let rows = client.query_typed(&sql, &[]).await?;
        let version: i32 = rows.first().map_or(0, |row| row.get(0));
        if version < schema_version() {
            super::migrate::check_version(version, &table)?;
        }
        check_all_columns(&found, &table)?;
        let payload_type = found.columns.get("payload").map_or("jsonb", String::as_str);
        let sql = names.render(include_str!("../../sql/queries/may_read_id.sql"));
        let rows = client.query_typed(&sql, &[]).await?;
        let may_read_id = rows.first().is_some_and(|row| row.get(0));
        let of_type = |sql: &str| names.render(&sql.replace("{{payload_type}}", payload_type));
        Ok(Self {
            publish: of_type(include_str!("../../sql/queries/publish.sql")),
            publish_many: may_read_id
                .then(|| of_type(include_str!("../../sql/queries/publish_many.sql"))),
            lag: names.render(include_str!("../../sql/queries/lag.sql")),
            prune: names.render(include_str!("../../sql/queries/prune.sql")),
            names,
        })
    }

    pub(crate) fn names(&self) -> &Names {
        &self.names
    }

    /// Writes the rows in their order; answers their ids in it.
    pub(crate) async fn insert<C>(
        &self,
        client: &C,
        rows: &Rows<'_>,
        max_payload_bytes: Option<i32>,
    ) -> Result<Vec<i64>, Error>
    where
        C: GenericClient + Sync,
    {
        let values: [(&(dyn ToSql + Sync), Type); 10] = [
            (&rows.aggregate_type, Type::TEXT_ARRAY),
            (&rows.aggregate_id, Type::TEXT_ARRAY),
            (&rows.event_type, Type::TEXT_ARRAY),
            (&rows.payload, Type::TEXT_ARRAY),
            (&rows.headers, Type::TEXT_ARRAY),
            (&rows.correlation_id, Type::TEXT_ARRAY),
            (&rows.event_id, Type::TEXT_ARRAY),
            (&rows.due_at, Type::TIMESTAMPTZ_ARRAY),
            (&rows.due_in, Type::FLOAT8_ARRAY),
            (&max_payload_bytes, Type::INT4),
        ];
        // The function alone knows of a limit.
        let many = rows.payload.len() > 1 && max_payload_bytes.is_none();
        let rows = match &self.publish_many {
            Some(publish_many) if many => client.query_typed(publish_many, &values[..9]).await?,
            _ => client.query_typed(&self.publish, &values).await?,
        };
        Ok(rows.iter().map(|row| row.get("id")).collect())
    }

    /// How much waits, since when, and for what.
    pub(crate) async fn lag<C>(&self, client: &C) -> Result<Lag, StoreError>
    where
        C: GenericClient + Sync,
    {
        let values: [(&(dyn ToSql + Sync), Type); 1] = [(&MOST_COUNTED, Type::INT4)];
        Lag::read(&client.query_typed(&self.lag, &values).await?)
    }

    /// Deletes up to `most` events that were published longer than `keep` ago.
    pub(crate) async fn prune<C>(
        &self,
        client: &C,
        keep: Duration,
        most: i32,
    ) -> Result<Pruned, StoreError>
    where
        C: GenericClient + Sync,
    {
        let keep = keep.min(LONGEST_AGE).as_secs_f64();
        let table = self.names.qualified("");
        let values: [(&(dyn ToSql + Sync), Type); 4] = [
            (&PRUNE_LOCK_CLASS, Type::INT4),
            (&keep, Type::FLOAT8),
            (&most, Type::INT4),
            (&table, Type::TEXT),
        ];
        Ok(Pruned::read(
            &client.query_typed(&self.prune, &values).await?,
        ))
    }
}
