//! `bellwire dead`: list, show, replay and discard events that were given up.

use std::io::IsTerminal as _;
use std::time::Duration;

use anyhow::anyhow;
use clap::{Args, Subcommand};
use serde::Serialize;

use super::{FAILED, Failure, open_store, print_json};
use crate::config::Config;
use crate::event::OneLine;
use crate::store::{
    Change, DeadEvent, DeadFilter, DeadReport, EventDetails, MOST_HELD_BACK, NotDead, Store,
};

/// Events listed unless asked for otherwise.
const LISTED: u32 = 50;
/// Named events that are not dead, told one by one.
const SHOWN_NOT_DEAD: usize = 10;
/// Characters of a payload shown to people; `--json` has all of it.
const SHOWN_PAYLOAD: usize = 2_000;

/// Events that were given up.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List dead events, the oldest first
    List(List),
    /// Show one event with its payload, and how many it holds back
    Show(Show),
    /// Have dead events tried again, with all their attempts
    Replay(Order),
    /// Give up on dead events for good, which frees those that they hold back
    Discard(Order),
}

/// Which dead events. Every condition that is given must hold.
#[derive(Args, Debug)]
struct Which {
    /// These outbox ids (several by commas, or given several times)
    #[arg(
        long = "id",
        value_name = "ID",
        value_delimiter = ',',
        allow_hyphen_values = true
    )]
    ids: Vec<i64>,
    /// This aggregate type, exactly
    #[arg(long, value_name = "TYPE", allow_hyphen_values = true)]
    aggregate_type: Option<String>,
    /// This aggregate id, exactly
    #[arg(long, value_name = "ID", allow_hyphen_values = true)]
    aggregate_id: Option<String>,
    /// This event type, exactly
    #[arg(long, value_name = "TYPE", allow_hyphen_values = true)]
    event_type: Option<String>,
    /// This class of reason, as the last error begins with it, for example `unroutable`
    #[arg(long, value_name = "CLASS")]
    reason: Option<String>,
    /// Written at least so long ago, for example `2h`
    #[arg(long, value_name = "AGE", value_parser = humantime::parse_duration)]
    older_than: Option<Duration>,
    /// Written at most so long ago
    #[arg(long, value_name = "AGE", value_parser = humantime::parse_duration)]
    newer_than: Option<Duration>,
}

impl Which {
    fn filter(&self) -> DeadFilter {
        DeadFilter {
            ids: (!self.ids.is_empty()).then(|| self.ids.clone()),
            aggregate_type: self.aggregate_type.clone(),
            aggregate_id: self.aggregate_id.clone(),
            event_type: self.event_type.clone(),
            reason: self.reason.clone(),
            older_than: self.older_than,
            newer_than: self.newer_than,
        }
    }
}

#[derive(Args, Debug)]
struct List {
    #[command(flatten)]
    which: Which,
    /// Events shown, at most
    #[arg(long, default_value_t = LISTED)]
    limit: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct Show {
    /// Its outbox id
    #[arg(long, value_name = "ID", allow_hyphen_values = true)]
    id: i64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct Order {
    #[command(flatten)]
    which: Which,
    /// Every dead event; needed when no condition is given
    #[arg(long)]
    all: bool,
    /// Only say how many it would be
    #[arg(long)]
    dry_run: bool,
    /// So many at most, the oldest first
    #[arg(long, value_name = "EVENTS", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(config: &Config, arguments: &Arguments) -> Result<u8, Failure> {
    let store = open_store(config, "dead")?;
    store.check_shape().await?;
    match &arguments.command {
        Command::List(list_of) => list(&store, list_of).await,
        Command::Show(one) => show(&store, one).await,
        Command::Replay(order) => change(&store, order, Change::Replay).await,
        Command::Discard(order) => change(&store, order, Change::Discard).await,
    }
}

async fn list(store: &Store, list: &List) -> Result<u8, Failure> {
    #[derive(Serialize)]
    struct Listed {
        matched: i64,
        events: Vec<DeadEvent>,
    }
    let filter = list.which.filter();
    let listed = Listed {
        matched: store.dead_count(&filter).await?,
        events: store.dead_list(&filter, i64::MIN, list.limit).await?,
    };
    if list.json {
        print_json(&listed)?;
        return Ok(0);
    }
    for event in &listed.events {
        let holds = if event.holds { ", holds" } else { "" };
        say!(
            "{} {} {}, {}{holds}, {} attempt(s), written {} ago: {}",
            event.id,
            OneLine(&event.aggregate_type),
            OneLine(&event.aggregate_id),
            OneLine(&event.event_type),
            event.attempts,
            super::age(event.age_seconds),
            OneLine(event.last_error.as_deref().unwrap_or("")),
        );
    }
    say!(
        "{} of {} dead event(s)",
        listed.events.len(),
        listed.matched
    );
    Ok(0)
}

async fn show(store: &Store, one: &Show) -> Result<u8, Failure> {
    let Some(event) = store.event(one.id).await? else {
        return Err(anyhow!(
            "there is no event {} in {}",
            one.id,
            store.names().display()
        )
        .into());
    };
    if one.json {
        print_json(&event)?;
    } else {
        print(&event);
    }
    Ok(0)
}

fn print(event: &EventDetails) {
    say!("event          {}", event.id);
    say!("status         {}", event.status);
    say!("aggregate type {}", OneLine(&event.aggregate_type));
    say!("aggregate id   {}", OneLine(&event.aggregate_id));
    say!("event type     {}", OneLine(&event.event_type));
    say!(
        "written        {} ({} ago)",
        event.created_at,
        super::age(event.age_seconds)
    );
    if let Some(published_at) = &event.published_at {
        say!("published      {published_at}");
    }
    say!("attempts       {}", event.attempts);
    if let Some(error) = &event.last_error {
        say!("last error     {}", OneLine(error));
    }
    if event.status == "pending" {
        say!("due            {}", event.next_attempt_at);
    }
    if let Some(claim) = &event.claimed_by {
        say!("claimed by     {}", OneLine(claim));
    }
    for (name, value) in [
        ("correlation id", &event.correlation_id),
        ("event id      ", &event.event_id),
        ("headers       ", &event.headers),
    ] {
        if let Some(value) = value {
            say!("{name} {}", OneLine(value));
        }
    }
    if event.status == "dead" {
        let or_more = if event.held_back >= i64::from(MOST_HELD_BACK) {
            " or more"
        } else {
            ""
        };
        if event.holds {
            say!(
                "holds back     {}{or_more} later event(s) of its aggregate",
                event.held_back
            );
        } else {
            say!("holds back     nothing");
        }
    }
    let shown: String = event.payload.chars().take(SHOWN_PAYLOAD).collect();
    say!("payload        {} bytes", event.payload_bytes);
    say!("{}", OneLine(&shown));
    if shown.len() < event.payload.len() {
        say!("... (all of it with --json)");
    }
}

async fn change(store: &Store, order: &Order, change: Change) -> Result<u8, Failure> {
    let filter = order.which.filter();
    match (filter.is_empty(), order.all) {
        (true, false) => {
            return Err(misused(
                "no condition is given: say which, or --all for every dead event",
            ));
        }
        (false, true) => return Err(misused("--all contradicts the conditions beside it")),
        _ => {}
    }
    let report = carry_out(store, order, change, &filter).await?;
    if order.json {
        print_json(&report)?;
    } else {
        let done = match change {
            Change::Replay => "replayed",
            Change::Discard => "discarded",
        };
        let matched = report.matched;
        match report.would_change {
            Some(will) => say!("{will} of {matched} dead event(s) would be {done}"),
            None => say!("{done} {} of {matched} dead event(s)", report.changed),
        }
    }
    explain(&report, &order.which.ids);
    let effective = report.would_change.unwrap_or(report.changed);
    Ok(if effective == 0 { FAILED } else { 0 })
}

async fn carry_out(
    store: &Store,
    order: &Order,
    change: Change,
    filter: &DeadFilter,
) -> Result<DeadReport, Failure> {
    let progress = std::io::stderr().is_terminal();
    let mut begun = false;
    let step = |done: u64, will: u64| {
        begun = true;
        if progress {
            eprint!("\r{done} of {will}");
        }
    };
    let report = store
        .dead_order(change, filter, order.limit, order.dry_run, step)
        .await;
    if progress && begun {
        eprintln!();
    }
    let report = report.map_err(|error| {
        anyhow!(
            "{error}; what was done before that stays done, `bellwire dead list` shows what is left"
        )
    })?;
    Ok(report)
}

/// Says why events were left as they are.
fn explain(report: &DeadReport, named: &[i64]) {
    if report.passed_over > 0 {
        eprintln!(
            "bellwire: {} dead event(s) left as they are: locked, or changed by somebody else meanwhile",
            report.passed_over
        );
    }
    if report.matched == 0 {
        eprintln!("bellwire: no dead event matches");
    }
    for NotDead { id, status } in report.not_dead.iter().take(SHOWN_NOT_DEAD) {
        match status {
            None => eprintln!("bellwire: there is no event {id}"),
            Some(status) => {
                eprintln!("bellwire: event {id} is {status}, not dead: left as it is");
            }
        }
    }
    if report.not_dead.len() > SHOWN_NOT_DEAD {
        eprintln!("bellwire: and others that are not dead either");
    }
    if report.matched == 0 && report.not_dead.len() < named.len().min(SHOWN_NOT_DEAD) {
        eprintln!("bellwire: dead ones that were named do not fulfil the other conditions");
    }
}

fn misused(reason: &str) -> Failure {
    Failure::Misused(reason.to_owned())
}
