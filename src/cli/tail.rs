//! `bellwire tail`: watch what becomes of each event, as it happens.

use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use serde::Deserialize;
use url::Url;

use super::Failure;
use crate::config::{Config, ConfigError};
use crate::event::OneLine;
use crate::relay::outcome::WORDS;

/// Before a relay that is gone is asked again.
const AGAIN: Duration = Duration::from_secs(1);
/// A relay on the same network answers in milliseconds.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Relays send an empty line more often than this.
const SILENCE: Duration = Duration::from_secs(30);

/// Watch outcomes.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Admin port of a relay, as http://host:port (give each one of several); `admin.listen` unless
    /// given
    #[arg(long, value_name = "URL", value_parser = admin_url)]
    url: Vec<Url>,
    /// Only this aggregate type
    #[arg(long, value_name = "TYPE", allow_hyphen_values = true)]
    aggregate_type: Option<String>,
    /// Only this aggregate id
    #[arg(long, value_name = "ID", allow_hyphen_values = true)]
    aggregate_id: Option<String>,
    /// Only this event type
    #[arg(long, value_name = "TYPE", allow_hyphen_values = true)]
    event_type: Option<String>,
    /// Only these outcomes (several by commas, or given several times)
    #[arg(long, value_name = "OUTCOME", value_delimiter = ',', value_parser = WORDS)]
    outcome: Vec<String>,
    /// Print a JSON object a line
    #[arg(long)]
    json: bool,
}

fn admin_url(text: &str) -> Result<Url, String> {
    Url::parse(text)
        .ok()
        .filter(|url| url.scheme() == "http" && url.host_str().is_some())
        .ok_or_else(|| "give the address of an admin port, like http://127.0.0.1:9464".to_owned())
}

/// What a relay sends.
#[derive(Deserialize)]
struct Line {
    at: String,
    id: i64,
    aggregate_type: String,
    aggregate_id: String,
    event_type: Option<String>,
    result: String,
    error: Option<String>,
}

#[derive(Deserialize)]
struct Missed {
    missed: u64,
}

pub(super) async fn run(config: &Config, arguments: &Arguments) -> Result<u8, Failure> {
    let urls = if arguments.url.is_empty() {
        let listen = config.admin.listen.0.ok_or_else(|| ConfigError::Key {
            key: "admin.listen".into(),
            reason: "is off: name a relay's admin port by --url http://host:port".into(),
        })?;
        vec![Url::parse(&format!("http://{listen}")).context("admin.listen")?]
    } else {
        arguments.url.clone()
    };
    let client = reqwest::Client::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(SILENCE)
        .no_proxy()
        .build()
        .context("cannot set up an HTTP client")?;
    let several = urls.len() > 1;
    let mut watched: FuturesUnordered<_> = urls
        .into_iter()
        .map(|url| watch(&client, url, arguments, several))
        .collect();
    while watched.next().await.is_some() {}
    Ok(0)
}

/// Watches one relay for ever, also after it was gone.
async fn watch(client: &reqwest::Client, mut url: Url, arguments: &Arguments, several: bool) {
    let place = format!(
        "{}:{}",
        url.host_str().unwrap_or_default(),
        url.port_or_known_default().unwrap_or_default()
    );
    url.set_path("/tail");
    let outcome = (!arguments.outcome.is_empty()).then(|| arguments.outcome.join(","));
    for (name, value) in [
        ("aggregate_type", &arguments.aggregate_type),
        ("aggregate_id", &arguments.aggregate_id),
        ("event_type", &arguments.event_type),
        ("outcome", &outcome),
    ] {
        if let Some(value) = value {
            url.query_pairs_mut().append_pair(name, value);
        }
    }
    let from = if several {
        format!("{place} ")
    } else {
        String::new()
    };
    // A relay that stays away is told of once, one that comes and goes each time.
    let mut said = None;
    loop {
        let begun = || {
            eprintln!("bellwire: watching {place}");
            said = None;
        };
        let shown = |line: &str| print(line, &from, arguments.json);
        let end = follow(client, &url, shown, begun).await;
        if said.as_ref() != Some(&end) {
            eprintln!("bellwire: {place}: {end}, trying again");
            said = Some(end);
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Reads lines until the relay is gone; answers why.
async fn follow(
    client: &reqwest::Client,
    url: &Url,
    mut print: impl FnMut(&str),
    begun: impl FnOnce(),
) -> String {
    let mut answer = match client.get(url.clone()).send().await {
        Ok(answer) if answer.status().is_success() => answer,
        Ok(answer) => return format!("the relay answers {}", answer.status()),
        Err(error) => return reason(&error),
    };
    begun();
    let mut text = Vec::new();
    loop {
        match answer.chunk().await {
            Ok(Some(piece)) => text.extend_from_slice(&piece),
            Ok(None) => return "the relay has ended".into(),
            Err(error) => return reason(&error),
        }
        while let Some(end) = text.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = text.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            if !line.trim().is_empty() {
                print(line.trim());
            }
        }
    }
}

fn reason(error: &reqwest::Error) -> String {
    if error.is_connect() {
        "cannot connect".into()
    } else if error.is_timeout() {
        "no answer in time".into()
    } else {
        "the connection was lost".into()
    }
}

fn print(line: &str, from: &str, json: bool) {
    if json {
        say!("{line}");
        return;
    }
    if let Ok(Missed { missed }) = serde_json::from_str(line) {
        say!("{from}({missed} outcomes were missed: they came faster than they could be shown)");
        return;
    }
    let Ok(line) = serde_json::from_str::<Line>(line) else {
        return;
    };
    let event_type = line.event_type.as_deref().unwrap_or("?");
    let error = line
        .error
        .map(|error| format!(": {}", OneLine(&error)))
        .unwrap_or_default();
    say!(
        "{from}{} {} {} {}, {}: {}{error}",
        OneLine(&line.at),
        line.id,
        OneLine(&line.aggregate_type),
        OneLine(&line.aggregate_id),
        OneLine(event_type),
        line.result
    );
}
