//! `bellwire dead`: list, show, replay and discard events that were given up.

use std::io::IsTerminal as _;
use std::time::Duration;

use anyhow::anyhow;
use clap::{Args, Subcommand};
use serde::Serialize;

use super::{FAILED, Failure, open_store, print_json};
use crate::config::Config;
use crate::event::OneLine;
use crate::store::{Change, DeadEvent, DeadFilter, EventDetails, MOST_HELD_BACK, Store};

/// Events listed unless asked for otherwise.
const LISTED: u32 = 50;
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
        println!(
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
    println!(
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
    println!("event          {}", event.id);
    println!("status         {}", event.status);
    println!("aggregate type {}", OneLine(&event.aggregate_type));
    println!("aggregate id   {}", OneLine(&event.aggregate_id));
    println!("event type     {}", OneLine(&event.event_type));
    println!(
        "written        {} ({} ago)",
        event.created_at,
        super::age(event.age_seconds)
    );
    if let Some(published_at) = &event.published_at {
        println!("published      {published_at}");
    }
    println!("attempts       {}", event.attempts);
    if let Some(error) = &event.last_error {
        println!("last error     {}", OneLine(error));
    }
    for (name, value) in [
        ("correlation id", &event.correlation_id),
        ("event id      ", &event.event_id),
        ("headers       ", &event.headers),
    ] {
        if let Some(value) = value {
            println!("{name} {}", OneLine(value));
        }
    }
    if event.status == "dead" {
        let or_more = if event.held_back >= i64::from(MOST_HELD_BACK) {
            " or more"
        } else {
            ""
        };
        if event.holds {
            println!(
                "holds back     {}{or_more} later event(s) of its aggregate",
                event.held_back
            );
        } else {
            println!("holds back     nothing");
        }
    }
    let shown: String = event.payload.chars().take(SHOWN_PAYLOAD).collect();
    println!("payload        {} bytes", event.payload_bytes);
    println!("{}", OneLine(&shown));
    if shown.len() < event.payload.len() {
        println!("... (all of it with --json)");
    }
}

async fn change(store: &Store, order: &Order, change: Change) -> Result<u8, Failure> {
    #[derive(Serialize)]
    struct Changed {
        dry_run: bool,
        matched: i64,
        changed: u64,
    }
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
    let matched = store.dead_count(&filter).await?;
    let will = u64::try_from(matched)
        .unwrap_or(0)
        .min(order.limit.unwrap_or(u64::MAX));
    let changed = if order.dry_run {
        0
    } else {
        let progress = std::io::stderr().is_terminal();
        let step = |done: u64| {
            if progress {
                eprint!("\r{done} of {will}");
            }
        };
        let changed = store
            .dead_change_all(change, &filter, order.limit, step)
            .await?;
        if progress && changed > 0 {
            eprintln!();
        }
        changed
    };
    let nothing = if order.dry_run {
        will == 0
    } else {
        changed == 0
    };
    if order.json {
        let dry_run = order.dry_run;
        print_json(&Changed {
            dry_run,
            matched,
            changed,
        })?;
    } else {
        let done = match change {
            Change::Replay => "replayed",
            Change::Discard => "discarded",
        };
        if order.dry_run {
            println!("{will} of {matched} dead event(s) would be {done}");
        } else {
            println!("{done} {changed} of {matched} dead event(s)");
        }
    }
    if !order.dry_run && changed < will {
        eprintln!(
            "bellwire: {} of them are locked or were changed by somebody else meanwhile",
            will - changed
        );
    }
    if nothing {
        explain_nothing(store, &order.which.ids).await?;
        return Ok(FAILED);
    }
    Ok(0)
}

/// Why nothing matched, for events that were named.
async fn explain_nothing(store: &Store, ids: &[i64]) -> Result<(), Failure> {
    eprintln!("bellwire: no dead event matches");
    for id in ids.iter().take(10) {
        match store.event(*id).await? {
            None => eprintln!("bellwire: there is no event {id}"),
            Some(event) => {
                eprintln!(
                    "bellwire: event {id} is {}, not dead: left as it is",
                    event.status
                );
            }
        }
    }
    Ok(())
}

fn misused(reason: &str) -> Failure {
    Failure::Misused(reason.to_owned())
}
