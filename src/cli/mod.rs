//! The command line: one file for each subcommand.
//!
//! Exit codes, the same for all: 0 done; 1 it failed, or `demo` found a guarantee broken; 2 the
//! command line or the configuration is wrong; 3 `run --once` made its pass, but events failed and
//! will be tried again or were dead-lettered.

use std::fmt::Arguments;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, Subcommand};
use serde::Serialize;

use crate::config::{Config, ConfigError, SinkSetting, SinksInUse};
use crate::intake::IntakeError;
use crate::sink::{self, Sink};
use crate::store::{Store, StoreError};

/// A line on standard output.
macro_rules! say {
    ($($line:tt)+) => { super::write_line(format_args!($($line)+)) };
}

mod check;
mod dead;
#[cfg(all(feature = "rabbitmq", feature = "jetstream", feature = "kafka"))]
mod demo;
mod intake;
mod log;
mod migrate;
mod prune;
mod run;
mod sign;
mod status;
mod tail;

/// It failed.
pub const FAILED: u8 = 1;
/// The command line or the configuration is wrong.
pub const MISCONFIGURED: u8 = 2;
/// One pass was made, and events failed in it.
pub const EVENTS_FAILED: u8 = 3;

/// Carries a PostgreSQL transactional outbox to RabbitMQ, NATS JetStream or Kafka, in order and without loss, and
/// takes signed webhooks into PostgreSQL, each exactly once.
#[derive(Debug, Parser)]
#[command(name = "bellwire", version, about, long_about = None, after_help = AFTER_HELP)]
pub struct Cli {
    /// Configuration file; `bellwire.toml` in the working directory is read if it exists
    #[arg(
        long,
        short,
        global = true,
        env = "BELLWIRE_CONFIG",
        value_name = "FILE"
    )]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Environment: DATABASE_URL and AMQP_URL (or NATS_URL, or KAFKA_BOOTSTRAP_SERVERS); any other option as
BELLWIRE_<SECTION>__<KEY>, for example BELLWIRE_RELAY__BATCH_SIZE=100. The environment wins over the file. With _FILE after its name, as
in DATABASE_URL_FILE=/run/secrets/url, a variable names a file that holds the value.

Exit codes: 0 done; 1 failed; 2 wrong command line or configuration; 3 `run --once` made its pass,
but events failed in it.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Carry events, and take webhooks, until told to stop
    Run(run::Arguments),
    /// Create the outbox, or adopt and update an existing one
    Migrate(migrate::Arguments),
    /// Look whether everything is there that a relay needs, and say what to do about what is not
    Check(check::Arguments),
    /// Show what waits, since when and for what, and who carries it
    Status(status::Arguments),
    /// List, show, replay and discard events that were given up
    Dead(dead::Arguments),
    /// Delete published events whose time is over
    Prune(prune::Arguments),
    /// Webhooks that failed: list, show, replay and discard them
    Intake(intake::Arguments),
    /// Sign a webhook as a sender would, and send it if asked to
    Sign(sign::Arguments),
    /// Watch what becomes of each event, as it happens
    Tail(tail::Arguments),
    /// Write events, kill a relay midway, and count what arrives
    #[cfg(all(feature = "rabbitmq", feature = "jetstream", feature = "kafka"))]
    Demo(demo::Arguments),
}

/// Why a command failed: decides the exit code.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The command line contradicts itself.
    #[error("{0}")]
    Misused(String),
    #[error(transparent)]
    Other(#[from] anyhow::Error),
}

impl From<IntakeError> for Failure {
    fn from(error: IntakeError) -> Self {
        match error {
            IntakeError::Config(error) => error.into(),
            IntakeError::Store(error) => error.into(),
            error @ IntakeError::Listen { .. } => Self::Other(error.into()),
        }
    }
}

impl Failure {
    /// In one line, with its causes.
    fn text(&self) -> String {
        match self {
            Self::Other(error) => format!("{error:#}"),
            other => other.to_string(),
        }
    }

    fn exit_code(&self) -> u8 {
        match self {
            Self::Config(_)
            | Self::Misused(_)
            | Self::Store(StoreError::NoUrl | StoreError::Shape(_)) => MISCONFIGURED,
            Self::Store(_) | Self::Other(_) => FAILED,
        }
    }
}

/// Runs the command; answers the process's exit code. One line on standard error says what went
/// wrong.
pub fn main(cli: Cli) -> ExitCode {
    // Whatever speaks TLS takes it from here. An error means that there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let outcome = actix_rt::System::new().block_on(dispatch(cli));
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            eprintln!("bellwire: {}", failure.text());
            ExitCode::from(failure.exit_code())
        }
    }
}

async fn dispatch(cli: Cli) -> Result<u8, Failure> {
    let config = Config::load(cli.config.as_deref())?;
    log::install(&config.log)?;
    match cli.command {
        Command::Run(arguments) => Box::pin(run::run(config, arguments)).await,
        Command::Migrate(arguments) => migrate::run(&config, &arguments).await,
        Command::Check(arguments) => check::run(&config, &arguments).await,
        Command::Status(arguments) => status::run(&config, &arguments).await,
        Command::Dead(arguments) => dead::run(&config, &arguments).await,
        Command::Prune(arguments) => prune::run(&config, &arguments).await,
        Command::Intake(arguments) => Box::pin(intake::run(&config, &arguments)).await,
        Command::Sign(arguments) => sign::run(&config, &arguments).await,
        Command::Tail(arguments) => tail::run(&config, &arguments).await,
        #[cfg(all(feature = "rabbitmq", feature = "jetstream", feature = "kafka"))]
        Command::Demo(arguments) => Box::pin(demo::run(config, arguments)).await,
    }
}

/// The name of this replica: configured, or the host's.
fn replica_name(config: &Config) -> String {
    config.replica_name()
}

fn open_store(config: &Config, command: &str) -> Result<Store, StoreError> {
    Store::new(&config.database, &format!("bellwire {command}"))
}

/// What a null sink means to somebody who did not mean it.
fn to_nowhere(used: &SinksInUse) -> String {
    let mut sinks = used.sinks.iter();
    let null = sinks.find(|used| used.sink == SinkSetting::Null);
    let key = null.map_or("relay.sink", |null| null.key.as_str());
    format!(
        "{key} is \"null\": events go nowhere and are marked as published. This is for benches and trials; set it \
         to \"rabbitmq\" to deliver them"
    )
}

fn open_sink(config: &Config) -> Result<Arc<dyn Sink>, Failure> {
    sink::open(config).map_err(|error| anyhow::anyhow!("{}", error.message).into())
}

fn print_json(report: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(report).map_err(anyhow::Error::from)?;
    write_line(format_args!("{text}"));
    Ok(())
}

/// Whoever read standard output and left, such as `head`, wants no more: that ends the command without
/// a word.
fn write_line(line: Arguments<'_>) {
    if writeln!(std::io::stdout(), "{line}").is_err() {
        std::process::exit(FAILED.into());
    }
}

/// An age for people, in whole seconds.
fn age(seconds: Option<f64>) -> String {
    seconds.map_or_else(
        || "an unknown time".to_owned(),
        |seconds| {
            let rounded = Duration::try_from_secs_f64(seconds.max(0.0))
                .unwrap_or_default()
                .as_secs();
            humantime::format_duration(Duration::from_secs(rounded)).to_string()
        },
    )
}
