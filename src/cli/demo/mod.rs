//! `bellwire demo`: write events, kill a relay midway, and count what arrives.
//!
//! Everything is real: the servers, the relays (processes of this program), the transactions, the
//! SIGKILL, the consumer. Writers ([`write`]) and the consumer ([`read`]) tell one loop ([`watch`])
//! what happened and when; the loop keeps the [`tally`], kills the relay when it is time, and knows
//! when nothing more is to come. Whatever ends the demo, dropping its future ends the processes and
//! tasks, and [`stage`] then removes what was made in the servers.

use anyhow::{Context as _, anyhow};
use clap::{Args, ValueEnum};
use tokio::signal::unix::{Signal, SignalKind, signal};

use self::relays::Relays;
use self::report::{Findings, Progress};
use self::stage::Stage;
use self::watch::Watch;
use super::{FAILED, Failure};
use crate::config::Config;

mod payload;
mod read;
mod relays;
mod report;
mod stage;
mod stream;
mod tally;
mod topics;
mod watch;
mod write;

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
    /// Where the events go; as `relay.sink` says unless given
    #[arg(long, value_enum)]
    sink: Option<DemoSink>,
    /// Kill no relay
    #[arg(long)]
    no_kill: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A broker that the demo can read from.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum DemoSink {
    /// An exchange and a queue of RabbitMQ
    Rabbitmq,
    /// A stream of NATS JetStream
    Jetstream,
    /// Topics of Kafka
    Kafka,
}

pub(super) async fn run(config: Config, arguments: Arguments) -> Result<u8, Failure> {
    let mut stop = Stop::new().context("cannot handle signals")?;
    let stage = Stage::new(config, arguments.sink)?;
    let progress = Progress::new(&arguments);
    let outcome = tokio::select! {
        biased;
        () = stop.asked() => Err(anyhow!("interrupted").into()),
        outcome = perform(&stage, &arguments, &progress) => outcome,
    };
    progress.clear();
    let left = tokio::select! {
        left = stage.remove() => left,
        () = stop.asked() => vec![format!("told to stop twice: {} may be left behind", stage.name())],
    };
    for line in left {
        eprintln!("bellwire: {line}");
    }
    let findings = outcome?;
    if arguments.json {
        println!(
            "{}",
            report::json(&findings.verdict).map_err(anyhow::Error::from)?
        );
    } else {
        println!("{}", report::table(&findings, &arguments));
    }
    Ok(if findings.verdict.is_clean() {
        0
    } else {
        FAILED
    })
}

async fn perform(
    stage: &Stage,
    arguments: &Arguments,
    progress: &Progress,
) -> Result<Findings, Failure> {
    progress.step(format!("schema, {} {}", stage.place(), stage.name()));
    let reader = stage.set_up().await?;
    let mut relays = Relays::new(stage);
    let watch = Watch::new(stage, arguments, progress, reader);
    let played = Box::pin(play(watch, &mut relays, arguments, progress)).await;
    let fine = played
        .as_ref()
        .is_ok_and(|findings| findings.verdict.is_clean() && findings.unmarked == 0);
    if !fine {
        progress.clear();
        show_trouble(stage, &mut relays).await;
    }
    Ok(played?)
}

async fn play(
    mut watch: Watch<'_>,
    relays: &mut Relays<'_>,
    arguments: &Arguments,
    progress: &Progress,
) -> anyhow::Result<Findings> {
    for _ in 0..arguments.relays {
        relays.start()?;
    }
    relays.up().await?;
    progress.step(format!("{} relay(s) up, writing", arguments.relays));
    watch.write();
    watch.until_delivered(relays).await?;
    let unmarked = watch.until_quiet().await?;
    Ok(watch.findings(unmarked))
}

/// What helps to find out why, before it is removed.
async fn show_trouble(stage: &Stage, relays: &mut Relays<'_>) {
    let rows = stage
        .rows()
        .await
        .unwrap_or_else(|error| vec![error.to_string()]);
    for line in rows.into_iter().chain(relays.last_lines()) {
        eprintln!("bellwire: {line}");
    }
}

/// Every way to be told to stop: all end in the removal of what was made.
struct Stop {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Stop {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn asked(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}
