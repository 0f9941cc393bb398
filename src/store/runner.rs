//! How statements run: prepared and one by one in a session of our own, or, through a pooler in
//! transaction mode, unnamed and each within a transaction that brings our settings along.
//!
//! Either way a statement is one round trip: what belongs to it is sent in one go.

use std::sync::Arc;

use bytes::BytesMut;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, Row, Statement};

const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

/// The types of the values that our statements take; a value of ours fits exactly one.
const TYPES: &[Type] = &[
    Type::INT8,
    Type::INT8_ARRAY,
    Type::TEXT,
    Type::INT4,
    Type::INT4_ARRAY,
    Type::FLOAT8,
    Type::BOOL,
    Type::TEXT_ARRAY,
    Type::TIMESTAMPTZ,
    Type::BYTEA,
];

/// The values of a statement.
pub(crate) type Values<'a> = [&'a (dyn ToSql + Sync)];

/// A statement as a connection takes it.
#[derive(Clone)]
pub(crate) enum Prepared {
    /// By its name in the session.
    Named(Statement),
    /// As text, each time.
    Text(Arc<str>),
}

/// See the module's head.
#[derive(Clone)]
pub(crate) enum Runner {
    /// In sessions of our own, which have our settings.
    Direct,
    /// In whichever session the pooler has: `begin` opens a transaction with our settings.
    Pooled { begin: Arc<str> },
}

impl Runner {
    /// For a pooler in transaction mode. `settings` are statements `SET …`, one a line.
    pub(crate) fn pooled(settings: &str) -> Self {
        Self::Pooled {
            begin: format!("{BEGIN}; {}", local(settings)).into(),
        }
    }

    /// Does a connection keep its server session?
    pub(crate) fn has_session(&self) -> bool {
        matches!(self, Self::Direct)
    }

    /// Begins a transaction of several statements.
    pub(crate) fn begin(&self) -> &str {
        match self {
            Self::Direct => BEGIN,
            Self::Pooled { begin } => begin,
        }
    }

    pub(crate) async fn prepare(&self, client: &Client, sql: &str) -> Result<Prepared, Error> {
        match self {
            Self::Direct => client.prepare(sql).await.map(Prepared::Named),
            Self::Pooled { .. } => Ok(Prepared::Text(sql.into())),
        }
    }

    /// Runs a statement by itself.
    pub(crate) async fn query(
        &self,
        client: &Client,
        statement: &Prepared,
        values: &Values<'_>,
    ) -> Result<Vec<Row>, Error> {
        self.alone(client, statement.query(client, values)).await
    }

    /// As [`Self::query`], for a statement that answers no rows; the number of those it changed.
    pub(crate) async fn execute(
        &self,
        client: &Client,
        statement: &Prepared,
        values: &Values<'_>,
    ) -> Result<u64, Error> {
        self.alone(client, statement.execute(client, values)).await
    }

    async fn alone<T>(
        &self,
        client: &Client,
        statement: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let Self::Pooled { begin } = self else {
            return statement.await;
        };
        // Polled in this order, so sent in this order; answers come back in it, too. After a failed
        // statement COMMIT rolls back.
        let (begun, answer, committed) = futures_util::join!(
            client.batch_execute(begin),
            statement,
            client.batch_execute("COMMIT"),
        );
        begun?;
        let answer = answer?;
        committed?;
        Ok(answer)
    }
}

impl Prepared {
    /// Runs it within the transaction that the client is in.
    pub(crate) async fn query(
        &self,
        client: &Client,
        values: &Values<'_>,
    ) -> Result<Vec<Row>, Error> {
        match self {
            Self::Named(statement) => client.query(statement, values).await,
            Self::Text(sql) => client.query_typed(sql, &typed(values)).await,
        }
    }

    /// As [`Self::query`]; the number of rows it changed.
    pub(crate) async fn execute(&self, client: &Client, values: &Values<'_>) -> Result<u64, Error> {
        match self {
            Self::Named(statement) => client.execute(statement, values).await,
            Self::Text(sql) => client.execute_typed(sql, &typed(values)).await,
        }
    }
}

/// The settings for one transaction: the session that serves it is given back as it was.
fn local(settings: &str) -> String {
    let lines: Vec<_> = settings
        .lines()
        .filter(|line| line.starts_with("SET "))
        .map(|line| line.replacen("SET ", "SET LOCAL ", 1))
        .collect();
    lines.join(" ")
}

/// A statement that is not prepared first has to be told the types of its values. The values know:
/// each refuses all types but its own.
fn typed<'a>(values: &Values<'a>) -> Vec<(&'a (dyn ToSql + Sync), Type)> {
    let mut scratch = BytesMut::new();
    values
        .iter()
        .map(|value| {
            let fits = TYPES.iter().find(|kind| {
                scratch.clear();
                value.to_sql_checked(kind, &mut scratch).is_ok()
            });
            // A value of another type is refused when it is sent, with an error that says so.
            (*value, fits.cloned().unwrap_or(Type::UNKNOWN))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_of_a_session_has_its_form_for_a_transaction() {
        let settings = include_str!("../../sql/session.sql");
        let local = local(settings);
        assert!(!local.contains("--"));
        assert_eq!(
            local.matches("SET LOCAL ").count(),
            settings.matches("\nSET ").count()
        );
        assert_eq!(
            local.matches("SET ").count(),
            local.matches("SET LOCAL ").count()
        );
        assert_eq!(
            local.matches(';').count(),
            local.matches("SET LOCAL ").count()
        );
    }

    #[test]
    fn each_kind_of_value_names_its_own_type() {
        let none: Option<i32> = None;
        let values: &Values<'_> = &[
            &1_i64,
            &vec![1_i64],
            &"a",
            &1_i32,
            &vec![1_i32],
            &1.0_f64,
            &true,
            &none,
            &String::new(),
            &[1_i64].as_slice(),
            &["a"].as_slice(),
            &[1_u8].as_slice(),
        ];
        let kinds: Vec<_> = typed(values).into_iter().map(|(_, kind)| kind).collect();
        assert_eq!(
            kinds,
            [
                Type::INT8,
                Type::INT8_ARRAY,
                Type::TEXT,
                Type::INT4,
                Type::INT4_ARRAY,
                Type::FLOAT8,
                Type::BOOL,
                Type::INT4,
                Type::TEXT,
                Type::INT8_ARRAY,
                Type::TEXT_ARRAY,
                Type::BYTEA,
            ]
        );
    }
}
