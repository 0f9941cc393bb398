//! `bellwire prune`: delete published events whose time is over, now.

use std::io::IsTerminal as _;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::{FAILED, Failure, open_store, print_json};
use crate::config::{Config, ConfigError};
use crate::store::{Pruned, Store};

/// Between tries while another replica is at it.
const ELSEWHERE_PAUSE: Duration = Duration::from_millis(500);
/// Tries in a row while another replica is at it.
const ELSEWHERE_TRIES: u32 = 20;
/// A step that takes too long is halved, down to this.
const SMALLEST_STEP: u32 = 100;
/// A dry run counts up to here.
const MOST_COUNTED: i32 = 1_000_000;

/// Delete published events.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Published at least so long ago; `prune.keep` unless given
    #[arg(long, value_name = "AGE", value_parser = humantime::parse_duration)]
    older_than: Option<Duration>,
    /// Only say how many it would be
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    dry_run: bool,
    pruned: u64,
    /// Of a dry run.
    #[serde(skip_serializing_if = "Option::is_none")]
    matched: Option<i64>,
}

pub(super) async fn run(config: &Config, arguments: &Arguments) -> Result<u8, Failure> {
    let keep = arguments
        .older_than
        .or(config.prune.keep.0)
        .ok_or_else(|| ConfigError::Key {
            key: "prune.keep".into(),
            reason: "is `forever`: say which events by --older-than".into(),
        })?;
    let store = open_store(config, "prune")?;
    store.check_shape().await?;
    if arguments.dry_run {
        let matched = store.prunable(keep, MOST_COUNTED).await?;
        let report = Report {
            dry_run: true,
            pruned: 0,
            matched: Some(matched),
        };
        if arguments.json {
            print_json(&report)?;
        } else if matched >= i64::from(MOST_COUNTED) {
            say!("{matched} or more published event(s) would be deleted");
        } else {
            say!("{matched} published event(s) would be deleted");
        }
        return Ok(0);
    }
    let (pruned, ended) = prune(&store, keep, config.prune.step).await;
    let report = Report {
        dry_run: false,
        pruned,
        matched: None,
    };
    if arguments.json {
        print_json(&report)?;
    } else {
        say!("deleted {pruned} published event(s)");
    }
    match ended? {
        End::Done => Ok(0),
        End::Elsewhere => {
            eprintln!(
                "bellwire: not all of them: somebody else was pruning all the while, try again later"
            );
            Ok(FAILED)
        }
    }
}

enum End {
    /// Nothing is left to prune.
    Done,
    /// Somebody else was at it, again and again.
    Elsewhere,
}

/// Step by step to the end. Answers how many are gone, also when it could not go on.
async fn prune(store: &Store, keep: Duration, step: u32) -> (u64, Result<End, Failure>) {
    let progress = std::io::stderr().is_terminal();
    let (mut step, mut pruned, mut refused, mut said) = (step, 0, 0, false);
    let end = loop {
        match store.prune(keep, step).await {
            Ok(Pruned::Rows(rows)) => {
                refused = 0;
                pruned += rows;
                if progress && rows > 0 {
                    eprint!("\r{pruned}");
                }
                if rows < u64::from(step) {
                    break Ok(End::Done);
                }
            }
            Ok(Pruned::Elsewhere) if refused < ELSEWHERE_TRIES => {
                if !std::mem::replace(&mut said, true) {
                    eprintln!("bellwire: somebody else is pruning this outbox, waiting for a turn");
                }
                refused += 1;
                tokio::time::sleep(ELSEWHERE_PAUSE).await;
            }
            Ok(Pruned::Elsewhere) => break Ok(End::Elsewhere),
            Err(error) if error.is_timeout() && step > SMALLEST_STEP => {
                step = (step / 2).max(SMALLEST_STEP);
            }
            Err(error) => break Err(error.into()),
        }
    };
    if progress && pruned > 0 {
        eprintln!();
    }
    (pruned, end)
}
