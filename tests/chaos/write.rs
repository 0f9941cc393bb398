//! Applications: transactions with savepoints, roll-backs and slow commits, on few and on many aggregates.
//!
//! With `ordering = "visible"` each writer has aggregates of its own, since ids and commits of writers that overlap
//! on one follow no common order; with `"strict"` all write to all.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::RngExt as _;
use tokio_postgres::{Client, Error};

use crate::stage::connect;

/// Aggregates of a writer on few, and of one on many.
const FEW: u32 = 3;
const MANY: u32 = 300;
/// Share of events that are returned while nothing is bound for them.
const LATE: f64 = 0.02;
/// Share of events, on many aggregates, that no broker can take.
const NEVER: f64 = 0.003;
/// Of transactions.
const ROLLED_BACK: f64 = 0.1;
const SAVEPOINT_ROLLED_BACK: f64 = 0.1;
const SLOW_COMMIT: f64 = 0.05;
/// Longer than an AMQP routing key can be.
const TOO_LONG: usize = 300;
/// After any error: the application connects anew.
const RECONNECT_PAUSE: Duration = Duration::from_millis(200);

pub struct Writer {
    pub schema: String,
    pub number: u32,
    pub shared: bool,
    pub stop: Arc<AtomicBool>,
    /// Ids of which it has heard that they are committed.
    pub told: Arc<Mutex<HashSet<i64>>>,
}

impl Writer {
    pub async fn run(self) {
        while !self.stop.load(Ordering::Relaxed) {
            if let Ok(client) = connect(&self.schema).await {
                while !self.stop.load(Ordering::Relaxed) && self.transact(&client).await.is_ok() {}
            }
            tokio::time::sleep(RECONNECT_PAUSE).await;
        }
    }

    async fn transact(&self, client: &Client) -> Result<(), Error> {
        let pause = rand::rng().random_range(5..60);
        tokio::time::sleep(Duration::from_millis(pause)).await;
        client.batch_execute("BEGIN").await?;
        let mut ids = self.insert(client).await?;
        if rand::rng().random_bool(SAVEPOINT_ROLLED_BACK) {
            client.batch_execute("SAVEPOINT attempt").await?;
            self.insert(client).await?;
            client.batch_execute("ROLLBACK TO attempt").await?;
        }
        ids.extend(self.insert(client).await?);
        let wait = if rand::rng().random_bool(SLOW_COMMIT) {
            500
        } else {
            10
        };
        let wait = rand::rng().random_range(0..wait);
        tokio::time::sleep(Duration::from_millis(wait)).await;
        if rand::rng().random_bool(ROLLED_BACK) {
            return client.batch_execute("ROLLBACK").await;
        }
        client.batch_execute("COMMIT").await?;
        self.told.lock().unwrap().extend(ids);
        Ok(())
    }

    async fn insert(&self, client: &Client) -> Result<Vec<i64>, Error> {
        let (aggregate_type, aggregate_id, event_type, count) = self.event();
        let rows = client
            .query(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, headers)
                 SELECT $1, $2, $3, jsonb_build_object('n', n, 'text', 'é\u{2028}', 'large', 1e300),
                        jsonb_build_object('number', n::text)
                 FROM generate_series(1, $4::int) n RETURNING id",
                &[&aggregate_type, &aggregate_id, &event_type, &count],
            )
            .await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    fn event(&self) -> (&'static str, String, String, i32) {
        let mut random = rand::rng();
        let few = self.number.is_multiple_of(2);
        let (name, aggregates) = if few { ("few", FEW) } else { ("many", MANY) };
        let first = if self.shared {
            0
        } else {
            self.number * aggregates
        };
        let aggregate = first + random.random_range(0..aggregates);
        let event_type = if random.random_bool(LATE) {
            "Late".to_owned()
        } else if !few && random.random_bool(NEVER) {
            "x".repeat(TOO_LONG)
        } else {
            "Good".to_owned()
        };
        let count = random.random_range(1..=3);
        (name, aggregate.to_string(), event_type, count)
    }
}
