//! A transaction on a connection of its own, and a handler in its savepoint.
//!
//! What belongs together is sent in one go: a handler is one round trip, however many statements it has.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

use deadpool_postgres::{Object, Pool};
use futures_util::future::{MaybeDone, maybe_done, poll_fn};
use futures_util::join;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, Row};

use super::route::{Event, Order, Route};
use super::source::Failure;
use crate::config::ConfigError;
use crate::store::runner::{Prepared, Runner};
use crate::store::{Connector, StoreError};

/// Of a row that a handler returns: with anything but NULL in it the handler has failed, for the reason
/// that it says.
pub const FAILURE_COLUMN: &str = "failure";
/// How far a transaction has come, for whoever may have to give it up.
#[derive(Debug, Default)]
pub struct Progress {
    pub(super) committing: Cell<bool>,
}

impl Progress {
    /// Was the commit sent? From then on nobody knows until it is answered.
    pub fn is_committing(&self) -> bool {
        self.committing.get()
    }
}

/// A prepared step and its values.
pub(super) type ReadySteps = Vec<(Prepared, Vec<Option<String>>)>;

/// A transaction on a connection of its own. Closes the connection when it is dropped before its end.
pub(super) struct Work<'a> {
    connector: &'a Connector,
    runner: Runner,
    client: Option<Object>,
}

impl<'a> Work<'a> {
    /// A transaction that is still to begin.
    pub(super) async fn new(connector: &'a Connector, pool: &Pool) -> Result<Self, StoreError> {
        // Settings are the connector's own already.
        let runner = connector.runner("").await?;
        let client = pool.get().await?;
        Ok(Self {
            connector,
            runner,
            client: Some(client),
        })
    }

    /// Runs one statement by itself.
    pub(super) async fn alone(
        self,
        statement: &Prepared,
        values: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, StoreError> {
        let rows = self.runner.query(self.client(), statement, values).await?;
        self.done();
        Ok(rows)
    }
}

impl Work<'_> {
    pub(super) fn client(&self) -> &Client {
        self.client.as_ref().expect("taken only at the end")
    }

    fn object(&self) -> &Object {
        self.client.as_ref().expect("taken only at the end")
    }

    /// Gives the connection back: no transaction is open.
    fn done(mut self) {
        self.client = None;
    }

    pub(super) async fn begin(&self) -> Result<(), StoreError> {
        let begun = self.client().batch_execute(self.runner.begin()).await;
        begun.map_err(StoreError::from)
    }

    pub(super) async fn roll_back(self) -> Result<(), StoreError> {
        self.client().batch_execute("ROLLBACK").await?;
        self.done();
        Ok(())
    }

    /// As a session of ours has it prepared, or as text for a pooler.
    pub(super) async fn prepare(&self, sql: &str) -> Result<Prepared, StoreError> {
        if !self.runner.has_session() {
            return Ok(Prepared::Text(sql.into()));
        }
        let statement = self.object().prepare_cached(sql).await?;
        Ok(Prepared::Named(statement))
    }

    /// A user's statement: it may not be told otherwise what its values are.
    async fn prepare_texts(&self, sql: &str, count: usize) -> Result<Prepared, StoreError> {
        if !self.runner.has_session() {
            return Ok(Prepared::Text(sql.into()));
        }
        let types = vec![Type::TEXT; count];
        let statement = self.object().prepare_typed_cached(sql, &types).await?;
        Ok(Prepared::Named(statement))
    }

    /// The statements of a handler, for this event. The inner error is the event's own failure.
    pub(super) async fn prepare_steps(
        &self,
        route: &Route,
        event: &Event,
        emit: &str,
    ) -> Result<Result<ReadySteps, String>, StoreError> {
        let mut ready = Vec::with_capacity(route.steps.len());
        for step in &route.steps {
            let order = match step.order(event) {
                Ok(order) => order,
                Err(reason) => return Ok(Err(reason)),
            };
            let (sql, values) = match order {
                Order::Sql(sql, values) => (sql, values),
                Order::Emit(fields) => {
                    let mut values: Vec<_> = fields.into_iter().map(Some).collect();
                    values.push(Some(event.id.clone()));
                    (emit, values)
                }
            };
            match self.prepare_texts(sql, values.len()).await {
                Ok(statement) => ready.push((statement, values)),
                // A table that was dropped since the start: the event is kept, and can be replayed.
                Err(StoreError::Refused { code, message }) if !StoreError::passes(&code) => {
                    return Ok(Err(raised(event, &message)));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Ok(ready))
    }

    /// Runs a handler in a savepoint, in one round trip. The inner error is the event's own failure,
    /// and leaves no trace of the handler.
    pub(super) async fn handle(
        &self,
        steps: &ReadySteps,
        event: &Event,
    ) -> Result<Result<(), Failure>, StoreError> {
        let client = self.client();
        let parameters: Vec<Vec<&(dyn ToSql + Sync)>> = steps
            .iter()
            .map(|(_, values)| values.iter().map(|value| value as _).collect())
            .collect();
        let queries = steps
            .iter()
            .zip(&parameters)
            .map(|((statement, _), values)| statement.query(client, values))
            .collect();
        let (saved, answers, constraints) = join!(
            client.batch_execute("SAVEPOINT handler"),
            in_order(queries),
            client.batch_execute("SET CONSTRAINTS ALL IMMEDIATE"),
        );
        saved?;
        let mut failure = None;
        for answer in answers {
            failure = match answer {
                Ok(rows) => told_by(&rows),
                Err(error) => Some(refused(event, error)?),
            };
            if failure.is_some() {
                break;
            }
        }
        if failure.is_none()
            && let Err(error) = constraints
        {
            failure = Some(refused(event, error)?);
        }
        let Some(reason) = failure else {
            return Ok(Ok(()));
        };
        client
            .batch_execute("ROLLBACK TO SAVEPOINT handler")
            .await?;
        Ok(Err(Failure::Processing(reason)))
    }

    /// The last statement and the commit, in one round trip. Nothing is committed unless the statement
    /// went well.
    pub(super) async fn commit(
        self,
        last: &Prepared,
        values: &[&(dyn ToSql + Sync)],
        progress: &Progress,
    ) -> Result<Vec<Row>, StoreError> {
        progress.committing.set(true);
        let client = self.client();
        // After an error COMMIT rolls back, and says so without one.
        let (answer, committed) = join!(last.query(client, values), client.batch_execute("COMMIT"));
        let rows = match answer.map_err(StoreError::from) {
            Ok(rows) => rows,
            Err(error) => {
                if !error.ends_connection() {
                    progress.committing.set(false);
                }
                return Err(error);
            }
        };
        committed?;
        self.done();
        Ok(rows)
    }
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        if let Some(client) = self.client.take() {
            // In mid-transaction, or perhaps: neither the server nor anybody else should go on with it.
            self.connector.cancel(&client);
            drop(Object::take(client));
        }
    }
}

fn raised(event: &Event, message: &str) -> String {
    format!("the {} handler raised: {message}", event.event_type)
}

/// The event's own failure, unless it would go well another time.
fn refused(event: &Event, error: Error) -> Result<String, StoreError> {
    match StoreError::from(error) {
        StoreError::Refused { code, message } if !StoreError::passes(&code) => {
            Ok(raised(event, &message))
        }
        passing => Err(passing),
    }
}

/// What a handler itself says of its failure.
fn told_by(rows: &[Row]) -> Option<String> {
    let column = rows
        .first()?
        .columns()
        .iter()
        .position(|column| column.name() == FAILURE_COLUMN)?;
    // A column of another type was refused at the start.
    rows.iter()
        .find_map(|row| row.try_get::<_, Option<String>>(column).ok().flatten())
}

/// All of them at once, sent in this order: each sends when it is first polled.
async fn in_order<F: Future>(futures: Vec<F>) -> Vec<F::Output> {
    let mut waiting: Vec<Pin<Box<MaybeDone<F>>>> = futures
        .into_iter()
        .map(|future| Box::pin(maybe_done(future)))
        .collect();
    poll_fn(|context| {
        let mut ready = true;
        for future in &mut waiting {
            ready &= future.as_mut().poll(context).is_ready();
        }
        if ready {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
    waiting
        .iter_mut()
        .filter_map(|future| future.as_mut().take_output())
        .collect()
}

/// What a statement of a route must be.
///
/// # Errors
/// [`StoreError::Shape`] says what is wrong with it.
pub(super) fn check_prepared(
    place: &str,
    prepared: Result<tokio_postgres::Statement, Error>,
) -> Result<(), StoreError> {
    let wrong = |reason: String| {
        StoreError::Shape(
            ConfigError::Key {
                key: place.to_owned(),
                reason,
            }
            .to_string(),
        )
    };
    let statement = match prepared.map_err(StoreError::from) {
        Ok(statement) => statement,
        Err(StoreError::Refused { code, message }) if !StoreError::passes(&code) => {
            let hint = if code == "42804" || code == "42883" {
                " (parameters are text: cast them, as in :amount::bigint)"
            } else {
                ""
            };
            return Err(wrong(format!("the database refuses it: {message}{hint}")));
        }
        Err(error) => return Err(error),
    };
    let failure = statement
        .columns()
        .iter()
        .find(|column| column.name() == FAILURE_COLUMN);
    match failure {
        Some(column) if *column.type_() != Type::TEXT => Err(wrong(format!(
            "its column `{FAILURE_COLUMN}` is {}, and must be text",
            column.type_()
        ))),
        _ => Ok(()),
    }
}
