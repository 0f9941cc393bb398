//! `bellwire intake`: webhooks that failed; list, show, replay and discard them.

use std::io::IsTerminal as _;

use clap::{Args, Subcommand};
use serde::Serialize;

use super::{FAILED, Failure, age, open_store, print_json, replica_name};
use crate::alert::Alerter;
use crate::config::Config;
use crate::event::OneLine;
use crate::intake::Intake;
use crate::intake::dead::LetterFilter;
use crate::intake::http::execution_id;
use crate::intake::replay::{DEFAULT_LIMIT, MOST, Order, Report};

/// Dead letters shown or discarded by one command, unless asked for otherwise.
const LISTED: u32 = 100;
/// At most.
const MOST_LISTED: u32 = 10_000;
/// How long the end of the command waits for alerts.
const FLUSH_ALERTS: std::time::Duration = std::time::Duration::from_secs(5);

/// Webhooks that failed: list, show, replay and discard them.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Have dead letters handled again, by today's schema and routes; only says which unless --apply is given
    Replay(ReplayArguments),
    /// Look at dead letters, or give up on them
    #[command(subcommand)]
    Dead(Dead),
}

#[derive(Debug, Subcommand)]
enum Dead {
    /// Dead letters, the oldest first
    List(ListArguments),
    /// One event in full, with its body
    Show(ShowArguments),
    /// Give up on dead letters for good
    Discard(DiscardArguments),
}

#[derive(Args, Debug)]
struct ReplayArguments {
    /// Do it; without this nothing is changed
    #[arg(long, alias = "no-dry-run", conflicts_with = "dry_run")]
    apply: bool,
    /// Only say what would be replayed, which is the default
    #[arg(long)]
    dry_run: bool,
    /// Parked events, too: after their cause was mended
    #[arg(long)]
    include_parked: bool,
    /// Events, at most, the oldest first
    #[arg(long, default_value_t = DEFAULT_LIMIT, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST)))]
    limit: u32,
    /// Of this source only
    #[arg(long, value_name = "NAME")]
    source: Option<String>,
    /// These events only
    #[arg(long = "id", value_name = "WEBHOOK-ID")]
    ids: Vec<String>,
    /// Of this class of reason only, for example `schema_invalid`
    #[arg(long, value_name = "CLASS")]
    reason: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct Which {
    /// Of this source only
    #[arg(long, value_name = "NAME")]
    source: Option<String>,
    /// These events only
    #[arg(long = "id", value_name = "WEBHOOK-ID")]
    ids: Vec<String>,
    /// Of this class of reason only: `schema_invalid`, `unknown_type` or `processing_failed`
    #[arg(long, value_name = "CLASS")]
    reason: Option<String>,
    /// Of this event type only
    #[arg(long, value_name = "TYPE")]
    event_type: Option<String>,
}

impl Which {
    fn filter(&self) -> LetterFilter {
        LetterFilter {
            source: self.source.clone(),
            event_ids: (!self.ids.is_empty()).then(|| self.ids.clone()),
            reason: self.reason.clone(),
            event_type: self.event_type.clone(),
            statuses: None,
        }
    }
}

#[derive(Args, Debug)]
struct ListArguments {
    #[command(flatten)]
    which: Which,
    /// With these statuses: `retryable`, `parked`, `resolved`, `discarded`; the first two unless given
    #[arg(long, value_delimiter = ',', value_parser = ["retryable", "parked", "resolved", "discarded"])]
    status: Vec<String>,
    /// Dead letters, at most
    #[arg(long, default_value_t = LISTED, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_LISTED)))]
    limit: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct ShowArguments {
    /// Its source; may be left out where there is one only
    #[arg(long, value_name = "NAME")]
    source: Option<String>,
    /// Its `webhook-id`
    #[arg(long, value_name = "WEBHOOK-ID")]
    id: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct DiscardArguments {
    #[command(flatten)]
    which: Which,
    /// Every open dead letter: needed where no condition is given
    #[arg(long)]
    all: bool,
    /// Only say how many it would be
    #[arg(long)]
    dry_run: bool,
    /// Dead letters, at most
    #[arg(long, default_value_t = MOST_LISTED, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_LISTED)))]
    limit: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(config: &Config, arguments: &Arguments) -> Result<u8, Failure> {
    open_store(config, "intake")?.check_shape().await?;
    match &arguments.command {
        Command::Replay(order) => replay(config, order).await,
        Command::Dead(Dead::List(order)) => list(config, order).await,
        Command::Dead(Dead::Show(order)) => show(config, order).await,
        Command::Dead(Dead::Discard(order)) => discard(config, order).await,
    }
}

fn open(config: &Config) -> Result<(Intake, Alerter), Failure> {
    let replica = replica_name(config);
    let table = format!("{}.{}", config.database.schema, config.database.table);
    let alerter = Alerter::start(&config.alerts, &replica, &table);
    Ok((Intake::new(config, &replica, alerter.clone())?, alerter))
}

async fn replay(config: &Config, arguments: &ReplayArguments) -> Result<u8, Failure> {
    let mut config = config.clone();
    if let Some(name) = &arguments.source {
        config.intake.source.retain(|source| source.name == *name);
    }
    if config.intake.source.is_empty() {
        return Err(Failure::Misused(match &arguments.source {
            Some(name) => format!("--source: there is no [[intake.source]] `{name}`"),
            None => "there is no [[intake.source]], so nothing says how events are handled".into(),
        }));
    }
    let (intake, alerter) = open(&config)?;
    let order = Order {
        dry_run: !arguments.apply,
        include_parked: arguments.include_parked,
        limit: arguments.limit,
        event_ids: (!arguments.ids.is_empty()).then(|| arguments.ids.clone()),
        reason: arguments.reason.clone(),
        stranded_only: false,
    };
    let progress = std::io::stderr().is_terminal();
    let step = |done: usize, of: usize| {
        if progress {
            eprint!("\r{done} of {of}{}", if done == of { "\n" } else { "" });
        }
    };
    let report = intake.replay().run(&order, step).await?;
    alerter.flush(FLUSH_ALERTS).await;
    if arguments.json {
        print_json(&report)?;
    } else {
        print_report(&report, arguments.apply);
    }
    if let Some(error) = &report.error {
        eprintln!("bellwire: {error}; what was done before that stays done");
    }
    let failed = report
        .events
        .iter()
        .any(|event| arguments.apply && event.status != "processed");
    Ok(if failed || report.error.is_some() {
        FAILED
    } else {
        0
    })
}

fn print_report(report: &Report, applied: bool) {
    for event in &report.events {
        let reason = event.would_fail.as_ref().unwrap_or(&event.last_error);
        let (state, reason) = if applied {
            (event.status.as_str(), reason.as_str())
        } else if event.would_fail.is_some() {
            ("would fail again", reason.as_str())
        } else {
            ("would be tried", event.last_error.as_str())
        };
        say!(
            "{} {} ({}), {} attempt(s): {state}{}{}",
            event.source,
            OneLine(&event.event_id),
            OneLine(&event.event_type),
            event.attempts,
            if reason.is_empty() { "" } else { ", " },
            OneLine(reason)
        );
    }
    if applied {
        let well = report
            .events
            .iter()
            .filter(|event| event.status == "processed")
            .count();
        say!("replayed {} event(s), {well} well", report.candidates);
    } else {
        say!(
            "{} event(s) would be replayed; nothing was changed, --apply does it",
            report.candidates
        );
    }
}

async fn list(config: &Config, arguments: &ListArguments) -> Result<u8, Failure> {
    let (intake, _) = open(config)?;
    let mut filter = arguments.which.filter();
    filter.statuses = (!arguments.status.is_empty()).then(|| arguments.status.clone());
    let matched = intake.store().letter_count(&filter).await?;
    let letters = intake.store().letters(&filter, arguments.limit).await?;
    if arguments.json {
        #[derive(Serialize)]
        struct Listed<T> {
            matched: i64,
            events: Vec<T>,
        }
        print_json(&Listed {
            matched,
            events: letters,
        })?;
        return Ok(0);
    }
    for letter in &letters {
        say!(
            "{} {} ({}), {} after {} attempt(s), {} old: {}",
            letter.source,
            OneLine(&letter.event_id),
            OneLine(&letter.event_type),
            letter.status,
            letter.attempts,
            age(Some(letter.age_seconds)),
            OneLine(&letter.last_error)
        );
    }
    say!("{} of {matched} dead letter(s)", letters.len());
    Ok(0)
}

async fn show(config: &Config, arguments: &ShowArguments) -> Result<u8, Failure> {
    let (intake, _) = open(config)?;
    let source = match (&arguments.source, intake.sources()) {
        (Some(name), _) => name.clone(),
        (None, [only]) => only.name.to_string(),
        (None, _) => {
            return Err(Failure::Misused(
                "--source: say which [[intake.source]], there is not exactly one".into(),
            ));
        }
    };
    let Some(event) = intake.store().event(&source, &arguments.id).await? else {
        eprintln!(
            "bellwire: there is no event {} of {source}",
            OneLine(&arguments.id)
        );
        return Ok(FAILED);
    };
    if arguments.json {
        print_json(&event)?;
        return Ok(0);
    }
    say!(
        "{} {} ({}): {}",
        event.source,
        OneLine(&event.event_id),
        OneLine(&event.event_type),
        event.status
    );
    let optional = [
        ("received", Some(&event.received_at)),
        ("processed", event.processed_at.as_ref()),
        ("first failed", event.first_failed_at.as_ref()),
        ("last failed", event.last_failed_at.as_ref()),
        ("resolved", event.resolved_at.as_ref()),
        ("last error", event.last_error.as_ref()),
        ("dead letter", event.dlq_status.as_ref()),
        ("sha256", Some(&event.payload_sha256)),
    ];
    for (name, value) in optional {
        if let Some(value) = value {
            say!("{name}: {}", OneLine(value));
        }
    }
    say!("attempts: {}", event.attempts);
    say!("body ({} bytes):", event.payload_bytes);
    say!("{}", event.payload);
    Ok(0)
}

async fn discard(config: &Config, arguments: &DiscardArguments) -> Result<u8, Failure> {
    let filter = arguments.which.filter();
    if filter.is_empty() != arguments.all {
        return Err(Failure::Misused(if arguments.all {
            "--all contradicts the conditions beside it".into()
        } else {
            "no condition is given: say which, or --all for every open dead letter".into()
        }));
    }
    let (intake, _) = open(config)?;
    let matched = intake.store().letter_count(&filter).await?;
    let discarded = if arguments.dry_run {
        Vec::new()
    } else {
        let execution_id = execution_id();
        intake
            .store()
            .discard(&filter, arguments.limit, &execution_id)
            .await?
    };
    let will = matched.min(i64::from(arguments.limit));
    if arguments.json {
        #[derive(Serialize)]
        struct Discarded {
            dry_run: bool,
            matched: i64,
            would_change: Option<i64>,
            changed: usize,
        }
        print_json(&Discarded {
            dry_run: arguments.dry_run,
            matched,
            would_change: arguments.dry_run.then_some(will),
            changed: discarded.len(),
        })?;
    } else if arguments.dry_run {
        say!("{will} of {matched} dead letter(s) would be discarded");
    } else {
        say!("discarded {} of {matched} dead letter(s)", discarded.len());
    }
    let effective = if arguments.dry_run {
        will
    } else {
        i64::try_from(discarded.len()).unwrap_or(i64::MAX)
    };
    Ok(if effective == 0 { FAILED } else { 0 })
}
