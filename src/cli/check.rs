//! `bellwire check`: the guard, on demand. A line for each thing a relay needs, and what to do.

use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::{FAILED, Failure, open_sink, open_store, print_json};
use crate::config::Config;
use crate::store::Store;

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
    let connected = match store.connect().await {
        Ok(client) => match client
            .query_one("SELECT current_setting('server_version')", &[])
            .await
        {
            Ok(row) => Ok(format!("PostgreSQL {}", row.get::<_, &str>(0))),
            Err(error) => Err(crate::store::StoreError::from(error).to_string()),
        },
        Err(error) => Err(error.to_string()),
    };
    if line("database", connected) {
        let table = store.names().display();
        let shape = store.check_shape().await.map_err(|error| error.to_string());
        line(
            "outbox",
            shape.map(|()| format!("{table} has the shape and version this relay works with")),
        );
        line("notifications", hears(&store).await);
    }
    let sink = open_sink(config)?;
    let probed = sink.probe().await.map_err(|error| error.message);
    if line("rabbitmq", probed.map(|()| "connected".to_owned())) {
        let (primary, letters) = config.router()?.destinations();
        for name in primary.iter().chain(&letters) {
            let probed = sink.probe_destination(name).await;
            let found = probed
                .map(|()| format!("'{name}' exists"))
                .map_err(|error| error.message);
            line("exchange", found);
        }
    }
    sink.close().await;
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

/// Does a notification arrive on a session that listens? Not through a pooler in transaction mode.
async fn hears(store: &Store) -> Result<String, String> {
    let (client, mut notifications) = store
        .connector()
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
        .map_err(|error| crate::store::StoreError::from(error).to_string())?;
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
        Err("do not arrive: is there a connection pooler in transaction mode? Give the relay a direct \
             connection; until then events wait for the tick"
            .to_owned())
    }
}
