//! `bellwire sign`: what a sender does, from the shell, to try an endpoint.

use std::io::Read as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, anyhow};
use clap::Args;

use super::{FAILED, Failure};
use crate::config::Config;
use crate::intake::signature::{ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER};
use crate::intake::source::keys;

/// Whoever answers later would be cut off by real senders as well.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(90);

/// Sign a webhook as a sender would, and send it if asked to.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Whose secret: name of an `[[intake.source]]`; may be left out where there is one only
    #[arg(long, value_name = "NAME")]
    source: Option<String>,
    /// The body; `-`, or nothing, for standard input
    #[arg(long, value_name = "FILE")]
    body: Option<PathBuf>,
    /// `webhook-id`; a new one unless given
    #[arg(long)]
    id: Option<String>,
    /// `webhook-timestamp`, in seconds since 1970; now unless given
    #[arg(long, value_name = "SECONDS")]
    timestamp: Option<u64>,
    /// Post it to this address and show the answer, instead of showing the headers
    #[arg(long, value_name = "URL")]
    send: Option<String>,
}

pub(super) async fn run(config: &Config, arguments: &Arguments) -> Result<u8, Failure> {
    let source = match (&arguments.source, config.intake.source.as_slice()) {
        (None, [only]) => only,
        (None, _) => {
            return Err(Failure::Misused(
                "--source: say which [[intake.source]], there is not exactly one".into(),
            ));
        }
        (Some(name), sources) => sources
            .iter()
            .find(|source| source.name == *name)
            .ok_or_else(|| Failure::Misused(format!("--source: there is no source `{name}`")))?,
    };
    let keys = keys(&config.intake, source)?;
    let body = read_body(arguments.body.as_ref())?;
    let id = arguments
        .id
        .clone()
        .unwrap_or_else(|| format!("msg_{:032x}", rand::random::<u128>()));
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let timestamp = arguments
        .timestamp
        .unwrap_or_else(|| now.unwrap_or_default().as_secs())
        .to_string();
    let signature = keys
        .sign(&id, &timestamp, &body)
        .ok_or_else(|| anyhow!("the source has no secret"))?;
    let headers = [
        (ID_HEADER, id),
        (TIMESTAMP_HEADER, timestamp),
        (SIGNATURE_HEADER, signature),
    ];
    let Some(url) = &arguments.send else {
        for (name, value) in &headers {
            say!("{name}: {value}");
        }
        return Ok(0);
    };
    send(url, &headers, body).await
}

fn read_body(file: Option<&PathBuf>) -> Result<Vec<u8>, Failure> {
    let file = file.filter(|path| path.as_os_str() != "-");
    let body = match file {
        Some(path) => {
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
        }
        None => {
            let mut body = Vec::new();
            std::io::stdin()
                .read_to_end(&mut body)
                .context("cannot read standard input")
                .map(|_| body)
        }
    };
    Ok(body?)
}

/// Shows status and body. Exit code 0 only for 2xx.
async fn send(url: &str, headers: &[(&str, String)], body: Vec<u8>) -> Result<u8, Failure> {
    let client = reqwest::Client::builder()
        .timeout(ANSWER_TIMEOUT)
        .redirect(reqwest::redirect::Policy::none())
        .build()
        .context("cannot set up HTTP")?;
    let mut request = client
        .post(url)
        .header("content-type", "application/json")
        .body(body);
    for (name, value) in headers {
        request = request.header(*name, value);
    }
    let response = request
        .send()
        .await
        .map_err(|error| anyhow::Error::from(error).context("not sent"))?;
    let status = response.status();
    let text = response.text().await.context("the answer broke off")?;
    eprintln!("{status}");
    say!("{text}");
    Ok(if status.is_success() { 0 } else { FAILED })
}
