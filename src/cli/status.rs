//! `bellwire status`: what waits, since when and for what, and who carries it.

use clap::Args;
use serde::Serialize;

use super::{Failure, age, open_store, print_json};
use crate::config::{Config, Ordering, WakeSetting};
use crate::event::OneLine;
use crate::store::{Lag, OldestWriter, ReplicaStatus};

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
    /// Under strict order: who may still write events older than those seen, and so holds back all
    /// newer ones.
    oldest_writer: Option<OldestWriter>,
    replicas: Vec<ReplicaStatus>,
}

pub(super) async fn run(config: &Config, arguments: &Arguments) -> Result<u8, Failure> {
    let store = open_store(config, "status")?;
    store.check_shape().await?;
    let lag = store.lag().await?;
    let report = Report {
        lagging: lag.age() >= config.lag.alert,
        lag,
        oldest_writer: match config.relay.ordering {
            Ordering::Strict => store.oldest_writer().await?,
            Ordering::Visible => None,
        },
        poll_only: config.relay.wake == WakeSetting::Poll
            || store.listen_connector().await?.is_none(),
        replicas: store.replicas().await?,
    };
    if arguments.json {
        print_json(&report)?;
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
    say!(
        "{table}: {state}, {} pending, {} dead-lettered{polls}",
        count(report.lag.pending),
        count(report.lag.dead)
    );
    if let Some(oldest) = &report.lag.oldest {
        say!(
            "oldest event {} ({} {}, {}) has waited {}: {}",
            oldest.id,
            OneLine(&oldest.aggregate_type),
            OneLine(&oldest.aggregate_id),
            OneLine(&oldest.event_type),
            age(oldest.age_seconds),
            oldest.waits_for
        );
        if let Some(error) = &oldest.last_error {
            say!("  last error: {}", OneLine(error));
        }
    }
    if let Some(writer) = &report.oldest_writer {
        let who = writer.pid.map_or_else(
            || "a prepared transaction".to_owned(),
            |pid| format!("pid {pid}"),
        );
        println!(
            "the oldest open writer is {who}, open for {}: under strict order no newer event leaves before it \
             has ended",
            age(writer.age_seconds)
        );
    }
    if report.replicas.is_empty() {
        say!("no relay is running");
        return;
    }
    say!(
        "{:<40} {:>7} {:>10} {:>8}  state",
        "replica",
        "buckets",
        "up",
        "lease"
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
        say!(
            "{:<40} {:>7} {:>10} {:>8}  {state}",
            replica.name,
            replica.buckets,
            age(Some(replica.up_seconds)),
            age(Some(replica.lease_seconds)),
        );
    }
}
