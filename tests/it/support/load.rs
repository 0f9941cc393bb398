//! An application that keeps writing events while something happens to the relay or the servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tokio_postgres::NoTls;

use super::{World, database_url};

/// Aggregates that it writes to.
const AGGREGATES: usize = 20;
/// Between two inserts: a few hundred a second.
const PAUSE: Duration = Duration::from_millis(3);

/// Writes one event after another until stopped; connects anew when the database went away.
pub struct Load {
    stop: Arc<AtomicBool>,
    written: Arc<AtomicUsize>,
    task: JoinHandle<Duration>,
}

impl Load {
    pub fn start(world: &World) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let written = Arc::new(AtomicUsize::new(0));
        let insert = format!(
            "INSERT INTO {} (aggregate_type, aggregate_id, event_type, payload)
             VALUES ('load', $1, 'Written', jsonb_build_object('n', $2::bigint))",
            world.store.names().qualified("")
        );
        let task = tokio::spawn(write(insert, stop.clone(), written.clone()));
        Self {
            stop,
            written,
            task,
        }
    }

    /// Waits until so many more were committed.
    pub async fn more(&self, events: usize) {
        let until = self.written.load(Ordering::Relaxed) + events;
        while self.written.load(Ordering::Relaxed) < until {
            assert!(!self.task.is_finished());
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Answers how long the slowest commit took.
    pub async fn stop(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap()
    }
}

async fn write(insert: String, stop: Arc<AtomicBool>, written: Arc<AtomicUsize>) -> Duration {
    let mut slowest = Duration::ZERO;
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        let Ok((client, driver)) = tokio_postgres::connect(&database_url(), NoTls).await else {
            tokio::time::sleep(PAUSE * 10).await;
            continue;
        };
        tokio::spawn(driver);
        while !stop.load(Ordering::Relaxed) {
            number += 1;
            let aggregate = (number % AGGREGATES).to_string();
            let number = i64::try_from(number).unwrap();
            let began = Instant::now();
            match client.execute(&insert, &[&aggregate, &number]).await {
                Ok(_) => {
                    written.fetch_add(1, Ordering::Relaxed);
                    slowest = slowest.max(began.elapsed());
                }
                Err(error) if error.as_db_error().is_none() || client.is_closed() => break,
                // A server that is being stopped says so before it closes the connection.
                Err(error)
                    if error
                        .code()
                        .is_some_and(|code| code.code().starts_with("57P")) =>
                {
                    break;
                }
                Err(error) => panic!("the application's INSERT failed: {error:?}"),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
    slowest
}
