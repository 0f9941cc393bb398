//! `bellwire check`: the guard, on demand. A line for each thing a relay needs, and what to do.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::{FAILED, Failure, open_sink, open_store, print_json, to_nowhere};
use crate::alert::Alerter;
use crate::config::{AlertsConfig, Config, SinkInUse, SinkSetting, WakeSetting};
use crate::intake::Intake;
use crate::relay::listener::POOLED;
use crate::store::{Pooling, Store, StoreError};

/// A notification to oneself takes a round trip.
const HEARD_WITHIN: Duration = Duration::from_secs(3);

/// Look whether everything is there that a relay needs.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Line {
    check: &'static str,
    ok: bool,
    detail: String,
}

pub(super) async fn run(config: &Config, arguments: &Arguments) -> Result<u8, Failure> {
    let lines = checks(config).await?;
    let ok = lines.iter().all(|line| line.ok);
    if arguments.json {
        #[derive(Serialize)]
        struct Report<'a> {
            ok: bool,
            checks: &'a [Line],
        }
        let report = Report { ok, checks: &lines };
        print_json(&report)?;
    } else {
        for line in &lines {
            println!(
                "{} {:<14} {}",
                if line.ok { "ok  " } else { "FAIL" },
                line.check,
                line.detail
            );
        }
    }
    Ok(if ok { 0 } else { FAILED })
}

async fn checks(config: &Config) -> Result<Vec<Line>, Failure> {
    let store = open_store(config, "check")?;
    let mut lines = Vec::new();
    let mut line = |check, answer: Result<String, String>| {
        let ok = answer.is_ok();
        let detail = answer.unwrap_or_else(|problem| problem);
        lines.push(Line { check, ok, detail });
        ok
    };
    let connected = database(&store).await.map_err(|error| error.to_string());
    if line("database", connected) {
        let table = store.names().display();
        let shape = store.check_shape().await.map_err(|error| error.to_string());
        line(
            "outbox",
            shape.map(|silent| {
                let right = format!("{table} has the shape and version this relay works with");
                silent.iter().fold(right, |text, trigger| {
                    format!("{text}; trigger {} is {}", trigger.name, trigger.state)
                })
            }),
        );
        let heard = match config.relay.wake {
            WakeSetting::Notify => hears(&store).await,
            WakeSetting::Poll => Ok("poll-only, as relay.wake says".to_owned()),
        };
        line("notifications", heard);
    }
    if config.relay.enabled {
        sinks(config, &mut line).await?;
    }
    if config.intake.is_on() {
        line("intake", intake(config).await);
    }
    match crate::alert::endpoints(&config.alerts) {
        Ok(endpoints) if endpoints.is_empty() => {}
        Ok(endpoints) => {
            let answer = format!("would go to {}; none was sent now", endpoints.join(" and "));
            line("alerts", Ok(answer));
        }
        Err(error) => {
            line("alerts", Err(error.to_string()));
        }
    }
    Ok(lines)
}

/// A line for each sink in use, and one for each of its destinations that is known beforehand.
async fn sinks(
    config: &Config,
    line: &mut impl FnMut(&'static str, Result<String, String>) -> bool,
) -> Result<(), Failure> {
    let used = config.sinks_in_use();
    let (primary, letters) = config.router()?.destinations();
    let sink = open_sink(config)?;
    for SinkInUse { sink: setting, .. } in &used.sinks {
        let name = setting.name();
        let kind = match setting {
            SinkSetting::Null => {
                line("sink", Ok(to_nowhere(&used)));
                continue;
            }
            SinkSetting::Rabbitmq => "exchange",
            SinkSetting::Jetstream => "stream",
            SinkSetting::Kafka => "topic",
        };
        let probed = if used.several {
            sink.probe_destination(name).await.map(drop)
        } else {
            sink.probe().await
        };
        let probed = probed.map_err(|error| error.message);
        if !line(name, probed.map(|()| "connected".to_owned())) {
            continue;
        }
        let of_sink = |destination: &&Arc<str>| {
            let sink = destination.split_once(':').map(|(sink, _)| sink);
            !used.several || sink == Some(name)
        };
        for name in primary.iter().chain(&letters).filter(of_sink) {
            let probed = sink.probe_destination(name).await;
            let found = probed
                .map(|found| format!("'{name}' exists ({found})"))
                .map_err(|error| error.message);
            line(kind, found);
        }
    }
    sink.close().await;
    Ok(())
}

/// Are secrets, schemas and statements what an intake needs?
async fn intake(config: &Config) -> Result<String, String> {
    let alerter = Alerter::start(&AlertsConfig::default(), "check", "");
    let intake = Intake::new(config, "check", alerter).map_err(|error| error.to_string())?;
    intake.check().await.map_err(|error| error.to_string())?;
    let names: Vec<_> = intake
        .sources()
        .iter()
        .map(|source| format!("'{}'", source.name))
        .collect();
    Ok(format!("would take webhooks of {}", names.join(", ")))
}

async fn database(store: &Store) -> Result<String, StoreError> {
    let version = store.server_version().await?;
    Ok(match store.connector().pooling().await? {
        Pooling::Session => format!("PostgreSQL {version}"),
        Pooling::Transaction => {
            format!("PostgreSQL {version}, through a connection pooler in transaction mode")
        }
    })
}

/// Does a notification arrive on a session that listens?
async fn hears(store: &Store) -> Result<String, String> {
    let connector = store.listen_connector().await;
    let Some(connector) = connector.map_err(|error| error.to_string())? else {
        return Ok(format!("poll-only: {POOLED}"));
    };
    let (client, mut notifications) = connector
        .open(|_| {})
        .await
        .map_err(|error| error.to_string())?;
    let channel = store.names().channel();
    let word = format!("prove:{:016x}", rand::random::<u64>());
    let told = async {
        client
            .batch_execute(&format!("LISTEN \"{}\"", channel.replace('"', "\"\"")))
            .await?;
        client
            .execute("SELECT pg_notify($1, $2)", &[&channel, &word])
            .await
    };
    told.await
        .map_err(|error| StoreError::from(error).to_string())?;
    let heard = async {
        while let Some(ring) = notifications.recv().await {
            if ring.payload() == word {
                return true;
            }
        }
        false
    };
    if tokio::time::timeout(HEARD_WITHIN, heard)
        .await
        .unwrap_or(false)
    {
        Ok(format!("arrive on channel {channel}"))
    } else {
        Err("do not arrive: does database.listen_url, or database.url without it, lead to a connection \
             pooler in transaction mode? Set database.listen_url to a direct connection; until then \
             events wait for the tick"
            .to_owned())
    }
}
