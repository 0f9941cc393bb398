//! Operators: they replay what was returned, give up on what no broker can take, and discard events that are not
//! even dead.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rand::RngExt as _;

use crate::stage::{Stage, connect};
use crate::support::Relay;

/// Longer than a command takes while a server comes back.
const PATIENCE: Duration = Duration::from_secs(20);

pub struct Operator {
    pub stage: Arc<Stage>,
    pub environment: Vec<(String, String)>,
    /// Pending events are let alone from now on.
    pub settling: Arc<AtomicBool>,
}

impl Operator {
    /// Until its task is ended.
    pub async fn run(self) {
        loop {
            let (pause, action) = {
                let mut random = rand::rng();
                (random.random_range(500..2_000), random.random_range(0..3))
            };
            tokio::time::sleep(Duration::from_millis(pause)).await;
            match action {
                // Only what can be delivered once a binding is back.
                0 => {
                    self.command(&["dead", "replay", "--event-type", "Late"])
                        .await
                }
                1 => {
                    self.command(&["dead", "discard", "--reason", "illegal_name"])
                        .await
                }
                _ if self.settling.load(Ordering::Relaxed) => {}
                _ => self.discard_pending().await,
            }
        }
    }

    /// It may fail, as the database may be away: there is a next time.
    async fn command(&self, arguments: &[&str]) {
        let command = Relay::start(&self.environment, &[], arguments);
        let finished = command.finished(PATIENCE * 2);
        let _ = tokio::time::timeout(PATIENCE, finished).await;
    }

    async fn discard_pending(&self) {
        let sql = "UPDATE outbox SET status = 'discarded'
                   WHERE status = 'pending'
                     AND id = (SELECT id FROM outbox WHERE status = 'pending' ORDER BY random() LIMIT 1)";
        if let Ok(client) = connect(&self.stage.schema).await {
            let _ = client.batch_execute(sql).await;
        }
    }
}
