//! Upkeep: what is done now and then, by every process that has an intake.
//!
//! Nothing of it is needed for a webhook to be taken, so a failure waits for the next turn.

use std::sync::Arc;
use std::time::Duration;

use super::Intake;
use super::dead::STATUSES;
use super::replay::Order;
use crate::metrics;

/// Gauges are as old as this, and what was left behind in mid-work waits so much longer than it has to.
const EVERY: Duration = Duration::from_secs(60);
/// Rows of each source deleted in one statement; goes on at once while there are more.
const PRUNED_AT_ONCE: i32 = 5_000;

/// Goes on until it is dropped.
pub(super) async fn run(intake: Arc<Intake>) {
    loop {
        intake.reports.tell_due();
        if let Err(error) = Box::pin(turn(&intake)).await {
            tracing::debug!(%error, "the intake's upkeep failed");
        }
        tokio::time::sleep(EVERY).await;
    }
}

async fn turn(intake: &Intake) -> Result<(), crate::store::StoreError> {
    count(intake).await?;
    let stranded = Order {
        dry_run: false,
        stranded_only: true,
        ..Order::default()
    };
    let report = intake.replay().run(&stranded, |_, _| {}).await?;
    if report.candidates > 0 {
        tracing::info!(
            events = report.candidates,
            "events that were left behind in mid-work were taken up"
        );
    }
    loop {
        let pruned = intake.store.prune(&intake.sources, PRUNED_AT_ONCE).await?;
        ::metrics::counter!(metrics::INTAKE_PRUNED).increment(pruned as u64);
        if pruned < PRUNED_AT_ONCE as usize {
            return Ok(());
        }
    }
}

async fn count(intake: &Intake) -> Result<(), crate::store::StoreError> {
    let counts = intake.store.counts().await?;
    for source in &intake.sources {
        for status in STATUSES {
            let key = (source.name.to_string(), status.to_owned());
            let count = counts.get(&key).copied().unwrap_or(0);
            #[expect(clippy::cast_precision_loss, reason = "a gauge")]
            ::metrics::gauge!(metrics::INTAKE_DEAD_LETTERS, "source" => key.0, "status" => status)
                .set(count as f64);
        }
    }
    Ok(())
}
