//! `bellwire demo`: write events, kill a relay midway, and count what arrives.
//!
//! Everything is real: the servers, the relays (processes of this program), the transactions, the
//! SIGKILL, the consumer. Writers ([`write`]) and the consumer ([`read`]) tell one loop ([`Watch`])
//! what happened and when; the loop keeps the [`tally`], kills the relay when it is time, and knows
//! when nothing more is to come. Whatever ends the demo, dropping its future ends the processes and
//! tasks, and [`stage`] then removes what was made in the servers.

use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use clap::Args;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinSet;

use super::{FAILED, Failure};
use crate::config::Config;
use relays::Relays;
use report::{Findings, Kill, Progress};
use stage::Stage;
use tally::{Arrival, Tally};

mod payload;
mod read;
mod relays;
mod report;
mod stage;
mod tally;
mod write;

/// Without any commit or arrival for so long, what is missing counts as lost. Twice the lease if
/// that is longer: rows of a frozen relay wait for it.
const PATIENCE: Duration = Duration::from_secs(60);
/// Nothing arrives for so long: then no repeat is on its way either.
const QUIET: Duration = Duration::from_millis(500);
/// Between looks at the relays and redraws.
const TICK: Duration = Duration::from_millis(100);

/// Write events, kill a relay midway, and count what arrives.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Events to commit
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    events: u32,
    /// Aggregates they belong to
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    aggregates: u32,
    /// Connections that write at the same time
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    writers: u32,
    /// Relay processes; a single one is started again after the kill
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
    relays: u8,
    /// Kill no relay
    #[arg(long)]
    no_kill: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What the loop is told.
enum News {
    Committed { ids: Vec<i64>, at: Instant },
    RolledBack(usize),
    Arrived(Arrival),
    TakenOver(Option<Duration>),
}

pub(super) async fn run(config: Config, arguments: Arguments) -> Result<u8, Failure> {
    let mut stop = Stop::new().context("cannot handle signals")?;
    let stage = Stage::new(config)?;
    let progress = Progress::new(&arguments);
    let outcome = tokio::select! {
        biased;
        () = stop.asked() => Err(anyhow!("interrupted").into()),
        outcome = perform(&stage, &arguments, &progress) => outcome,
    };
    progress.clear();
    let left = tokio::select! {
        left = stage.remove() => left,
        () = stop.asked() => vec![format!("told to stop twice: {} may be left behind", stage.config().database.schema)],
    };
    for line in left {
        eprintln!("bellwire: {line}");
    }
    let findings = outcome?;
    if arguments.json {
        println!("{}", report::json(&findings.verdict).map_err(anyhow::Error::from)?);
    } else {
        println!("{}", report::table(&findings, &arguments));
    }
    Ok(if findings.verdict.is_clean() { 0 } else { FAILED })
}

async fn perform(stage: &Stage, arguments: &Arguments, progress: &Progress) -> Result<Findings, Failure> {
    progress.step(format!("schema, exchange and queue {}", stage.config().database.schema));
    let reader = stage.set_up().await?;
    let mut relays = Relays::new(stage);
    let (tell, news) = unbounded_channel();
    // Aborted when dropped.
    let mut tasks = JoinSet::new();
    tasks.spawn(reader.run(tell.clone()));
    let played = async {
        for _ in 0..arguments.relays {
            relays.start()?;
        }
        relays.up().await?;
        progress.step(format!("{} relay(s) up, writing", arguments.relays));
        for writer in write::share(arguments.events, arguments.aggregates, arguments.writers) {
            tasks.spawn(writer.run(stage.store().clone(), tell.clone()));
        }
        let mut watch = Watch::new(stage, arguments, progress, &mut relays, tasks, news);
        watch.until_delivered(&tell).await?;
        watch.until_quiet().await?;
        Ok(watch.findings)
    };
    let findings: anyhow::Result<Findings> = Box::pin(played).await;
    let in_order = findings.as_ref().is_ok_and(|findings| findings.verdict.is_clean() && findings.unmarked == 0);
    if !in_order {
        progress.clear();
        show_trouble(stage, &mut relays).await;
    }
    Ok(findings?)
}
