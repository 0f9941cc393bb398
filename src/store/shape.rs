//! Is the outbox what this version works with? Asked before the first claim, so that a table of
//! another shape is one clear message and not a loop of errors.

use std::collections::BTreeMap;

use tokio_postgres::types::ToSql;

use super::migrate::INDEXES;
use super::{Names, Store, StoreError};

/// Columns and the types that will do. Lengths do not matter.
const COLUMNS: &[(&str, &[&str])] = &[
    ("id", &["bigint"]),
    ("aggregate_type", &["text", "character varying"]),
    ("aggregate_id", &["text", "character varying"]),
    ("event_type", &["text", "character varying"]),
    ("payload", &["jsonb", "json"]),
    ("created_at", &["timestamp with time zone"]),
    ("status", &["text", "character varying"]),
    ("attempts", &["integer"]),
    ("next_attempt_at", &["timestamp with time zone"]),
    ("claimed_by", &["text", "character varying"]),
    ("claimed_until", &["timestamp with time zone"]),
    ("published_at", &["timestamp with time zone"]),
    ("last_error", &["text", "character varying"]),
    ("failed_in", &["text", "character varying"]),
    ("event_id", &["uuid"]),
    ("correlation_id", &["text", "character varying"]),
    ("headers", &["jsonb"]),
    ("holds", &["boolean"]),
    ("parked", &["boolean"]),
];

/// Columns that a table of the base shape must have before it can be adopted.
const ADDED_COLUMNS: &[&str] = &["event_id", "correlation_id", "headers", "holds", "parked"];

pub(super) const SHAPE: &str = include_str!("../../sql/queries/shape.sql");

/// A trigger that does not ring: events wait for the tick.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SilentTrigger {
    /// Its name.
    pub name: String,
    /// `missing` or `disabled`.
    pub state: &'static str,
}

const SIDE_OBJECTS: &[&str] = &[
    "_alert",
    "_awake_until",
    "_bucket",
    "_dead_letter",
    "_intake_audit",
    "_replica",
    "_relay_state",
    "_token",
    "_webhook_events",
];

/// What was found in the database, by kind.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) table: Option<String>,
    pub(super) columns: BTreeMap<String, String>,
    pub(super) indexes: BTreeMap<String, String>,
    pub(super) triggers: BTreeMap<String, String>,
    side: BTreeMap<String, String>,
}

impl Found {
    pub(super) fn read(rows: &[tokio_postgres::Row]) -> Self {
        let mut found = Self::default();
        for row in rows {
            let (name, detail): (String, String) = (row.get(1), row.get(2));
            match row.get::<_, &str>(0) {
                "table" => found.table = Some(detail),
                "column" => drop(found.columns.insert(name, detail)),
                "index" => drop(found.indexes.insert(name, detail)),
                "trigger" => drop(found.triggers.insert(name, detail)),
                _ => drop(found.side.insert(name, detail)),
            }
        }
        found
    }
}

impl Store {
    pub(super) async fn look(&self, client: &tokio_postgres::Client) -> Result<Found, StoreError> {
        let rows =
            super::connect::in_time(client.query(SHAPE, &[&self.names.schema, &self.names.table]))
                .await?;
        Ok(Found::read(&rows))
    }

    /// Refuses an outbox that is missing, of another shape, or of another schema version. Answers which
    /// triggers do not ring.
    ///
    /// # Errors
    /// [`StoreError::Shape`] says what differs and what to run.
    pub async fn check_shape(&self) -> Result<Vec<SilentTrigger>, StoreError> {
        let names: [&(dyn ToSql + Sync); 2] = [&self.names.schema, &self.names.table];
        let found = Found::read(&self.query(SHAPE, &names).await?);
        let table = self.names.display();
        check_set_up(&found, &self.names)?;
        let version = self.query(&self.queries.schema_version, &[]).await?;
        let version = version.first().map_or(0, |row| row.get(0));
        super::migrate::check_version(version, &table)?;
        check_all_columns(&found, &table)?;
        for suffix in SIDE_OBJECTS {
            let name = format!("{}{suffix}", self.names.table);
            if !found.side.contains_key(&name) {
                return Err(StoreError::Shape(format!(
                    "{}.{name} does not exist although {table} is set up: restore it from a dump, or \
                     drop {table}_migrations and run `bellwire migrate`",
                    self.names.schema
                )));
            }
        }
        for (suffix, _) in INDEXES {
            let name = format!("{}_{suffix}", self.names.table);
            if found.indexes.get(&name).map(String::as_str) != Some("valid") {
                return Err(StoreError::Shape(format!(
                    "index {name} of table {table} is missing or invalid: run `bellwire migrate`"
                )));
            }
        }
        Ok(self.silent_triggers(&found))
    }

    fn silent_triggers(&self, found: &Found) -> Vec<SilentTrigger> {
        let mut silent = Vec::new();
        for suffix in ["ring_insert", "ring_revive", "ring_delete"] {
            let name = format!("{}_{suffix}", self.names.table);
            let state = match found.triggers.get(&name).map(String::as_str) {
                Some("enabled") => continue,
                Some(_) => "disabled",
                None => "missing",
            };
            silent.push(SilentTrigger { name, state });
        }
        silent
    }
}

/// Is there a table, and has a migration been at it?
pub(super) fn check_set_up(found: &Found, names: &Names) -> Result<(), StoreError> {
    let table = names.display();
    check_table(found, &table)?;
    if found
        .side
        .contains_key(&format!("{}_migrations", names.table))
    {
        return Ok(());
    }
    Err(StoreError::Shape(format!(
        "table {table} was not set up by Bellwire yet: run `bellwire migrate`"
    )))
}

/// Has it all columns, of types that will do?
pub(super) fn check_all_columns(found: &Found, table: &str) -> Result<(), StoreError> {
    check_columns(found, table, COLUMNS.iter())
}

fn check_table(found: &Found, table: &str) -> Result<(), StoreError> {
    match found.table.as_deref() {
        Some("r") => Ok(()),
        None => Err(StoreError::Shape(format!(
            "table {table} does not exist: run `bellwire migrate` to create it, or set \
             database.schema and database.table"
        ))),
        Some(kind) => Err(StoreError::Shape(format!(
            "{table} is {}, an ordinary table is needed: point database.table at one",
            match kind {
                "p" => "a partitioned table",
                "v" => "a view",
                "m" => "a materialized view",
                "f" => "a foreign table",
                _ => "no table",
            }
        ))),
    }
}

fn check_columns<'a>(
    found: &Found,
    table: &str,
    wanted: impl Iterator<Item = &'a (&'static str, &'static [&'static str])>,
) -> Result<(), StoreError> {
    for (column, types) in wanted {
        match found.columns.get(*column) {
            None => {
                return Err(StoreError::Shape(format!(
                    "table {table} has no column {column}: add it as {}",
                    types.first().unwrap_or(&"text")
                )));
            }
            Some(found) if !types.contains(&found.as_str()) => {
                return Err(StoreError::Shape(format!(
                    "column {column} of table {table} is {found}, {} is needed: change the column, or \
                     point database.table at another table",
                    types.join(" or ")
                )));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// Can this table be set up or adopted by the migrations? An absent one can.
pub(super) fn check_adoptable(found: &Found, table: &str) -> Result<(), StoreError> {
    if found.table.is_none() {
        return Ok(());
    }
    check_table(found, table)?;
    check_columns(
        found,
        table,
        COLUMNS.iter().filter(|(column, _)| {
            !ADDED_COLUMNS.contains(column) || found.columns.contains_key(*column)
        }),
    )
}
