//! `bellwire status`: what waits, since when and for what, and who carries it.

use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::{Failure, open_store};
use crate::config::{Config, WakeSetting};
use crate::store::{Lag, ReplicaStatus};

/// Show what waits and who carries it.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    lagging: bool,
    /// Nothing wakes the relays but the tick.
    poll_only: bool,
    #[serde(flatten)]
    lag: Lag,
    replicas: Vec<ReplicaStatus>,
}

pub(super) async fn run(config: &Config, arguments: &Arguments) -> Result<u8, Failure> {
    let store = open_store(config, "status")?;
    store.check_shape().await?;
    let lag = store.lag().await?;
    let age = lag
        .oldest
        .as_ref()
        .and_then(|oldest| oldest.age_seconds)
        .unwrap_or(0.0);
    let report = Report {
        lagging: age >= config.lag.alert.as_secs_f64(),
        lag,
        poll_only: config.relay.wake == WakeSetting::Poll
            || store.listen_connector().await?.is_none(),
        replicas: store.replicas().await?,
    };
    if arguments.json {
        println!(
            "{}",
            serde_json::to_string(&report).map_err(anyhow::Error::from)?
        );
    } else {
        print(&store.names().display(), &report);
    }
    Ok(0)
}

fn print(table: &str, report: &Report) {
    let count = |number: i64| {
        if number >= report.lag.counted_to {
            format!("{number} or more")
        } else {
            number.to_string()
        }
    };
    let state = if report.lagging { "LAGGING" } else { "ok" };
    let polls = if report.poll_only { ", poll-only" } else { "" };
    println!(
        "{table}: {state}, {} pending, {} dead-lettered{polls}",
        count(report.lag.pending),
        count(report.lag.dead)
    );
    if let Some(oldest) = &report.lag.oldest {
        println!(
            "oldest event {} ({} {}, {}) has waited {}: {}",
            oldest.id,
            oldest.aggregate_type.escape_debug(),
            oldest.aggregate_id.escape_debug(),
            oldest.event_type.escape_debug(),
            oldest
                .age_seconds
                .map_or("an unknown time".to_owned(), seconds),
            oldest.waits_for
        );
        if let Some(error) = &oldest.last_error {
            println!("  last error: {}", error.escape_debug());
        }
    }
    if report.replicas.is_empty() {
        println!("no relay is running");
        return;
    }
    println!(
        "{:<40} {:>7} {:>10} {:>8}  state",
        "replica", "buckets", "up", "lease"
    );
    for replica in &report.replicas {
        let state = match (
            replica.connected && replica.lease_seconds > 0.0,
            replica.ready,
        ) {
            (true, true) => "delivering",
            (true, false) => "connected, cannot publish",
            (false, _) => "gone, to be taken over",
        };
        println!(
            "{:<40} {:>7} {:>10} {:>8}  {state}",
            replica.name,
            replica.buckets,
            seconds(replica.up_seconds),
            seconds(replica.lease_seconds.max(0.0)),
        );
    }
}

fn seconds(seconds: f64) -> String {
    let rounded = Duration::try_from_secs_f64(seconds.max(0.0))
        .unwrap_or_default()
        .as_secs();
    humantime::format_duration(Duration::from_secs(rounded)).to_string()
}
