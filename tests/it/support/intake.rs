//! A process with an intake, and senders that sign what they post.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use bellwire::intake::signature::Keys;
use reqwest::Client;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{Relay, SOON, World, database_url};

/// Of every source here.
pub const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// A file of `examples/orders`.
pub fn example(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("examples/orders")
        .join(name)
}

/// The example's configuration, on any port, with its files wherever the process runs.
pub fn orders() -> String {
    let text = std::fs::read_to_string(example("bellwire.toml")).unwrap();
    let here = format!("{}/", example("").display()).replace("//", "/");
    text.replace("examples/orders/", &here)
        .replace("127.0.0.1:8080", "127.0.0.1:0")
}

/// Seconds since 1970.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap().as_secs()
}

pub fn signed(id: &str, timestamp: u64, body: &[u8]) -> String {
    let mut keys = Keys::default();
    keys.add(SECRET).unwrap();
    keys.sign(id, &timestamp.to_string(), body).unwrap()
}

/// The body of an event of the example.
pub fn order_event(kind: &str, order: &str, amount: i64) -> String {
    let more = match kind {
        "created" => format!(
            r#","customer_email":"ada@example.com","amount_cents":{amount},"currency":"EUR""#
        ),
        "paid" => format!(r#","amount_cents":{amount},"currency":"EUR""#),
        _ => String::new(),
    };
    format!(
        r#"{{"type":"order.{kind}","timestamp":"2026-01-31T10:00:00Z","data":{{"order_id":"{order}"{more}}}}}"#
    )
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    pub code: u16,
    pub body: Value,
    pub retry_after: Option<String>,
}

impl Answer {
    pub fn outcome(&self) -> &str {
        self.body["outcome"].as_str().unwrap_or_default()
    }

    pub fn assert(&self, code: u16, outcome: &str) {
        assert_eq!((self.code, self.outcome()), (code, outcome), "{self:?}");
    }
}

/// Posts to one process.
#[derive(Clone)]
pub struct Sender {
    pub address: String,
    pub source: String,
    client: Client,
}

impl Sender {
    pub fn new(address: &str, source: &str) -> Self {
        // Whoever comes first installs it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Self {
            address: address.to_owned(),
            source: source.to_owned(),
            client: Client::builder()
                .no_proxy()
                .timeout(Duration::from_secs(90))
                .build()
                .unwrap(),
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}/webhooks/{}", self.address, self.source)
    }

    /// As a sender does. An error is a connection that was lost or refused.
    pub async fn try_post(&self, id: &str, body: &[u8]) -> Result<Answer, reqwest::Error> {
        let at = now();
        self.post_with(id, at, &signed(id, at, body), body).await
    }

    pub async fn post(&self, id: &str, body: &str) -> Answer {
        self.try_post(id, body.as_bytes()).await.unwrap()
    }

    pub async fn post_with(
        &self,
        id: &str,
        timestamp: u64,
        signature: &str,
        body: &[u8],
    ) -> Result<Answer, reqwest::Error> {
        let response = self
            .client
            .post(self.url())
            .header("webhook-id", id)
            .header("webhook-timestamp", timestamp)
            .header("webhook-signature", signature)
            .body(body.to_vec())
            .send()
            .await?;
        let code = response.status().as_u16();
        let retry_after = response
            .headers()
            .get("retry-after")
            .map(|value| value.to_str().unwrap().to_owned());
        let text = response.text().await?;
        let body = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{code}: {text}"));
        Ok(Answer {
            code,
            body,
            retry_after,
        })
    }

    /// The lines of a head that is rightly signed, without a length.
    pub fn head(&self, id: &str, body: &[u8], more: &str) -> String {
        let at = now();
        format!(
            "POST /webhooks/{} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nwebhook-id: {id}\r\n\
             webhook-timestamp: {at}\r\nwebhook-signature: {}\r\n{more}\r\n",
            self.source,
            self.address,
            signed(id, at, body)
        )
    }

    /// Sends these bytes and reads the answer to its end: status code and all of it.
    pub async fn raw(&self, bytes: &[u8]) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).await.unwrap();
        // Refused in mid-sending, the rest cannot be written; the answer is there all the same.
        stream.write_all(bytes).await.ok();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.ok();
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let code = answer
            .split_whitespace()
            .nth(1)
            .and_then(|code| code.parse().ok())
            .unwrap_or(0);
        (code, answer)
    }
}

impl World {
    /// The environment of a process with an intake, in which users' tables are found in the world's schema.
    pub fn intake_environment(&self) -> Vec<(String, String)> {
        let mut environment = self.environment();
        let url = database_url();
        let sign = if url.contains('?') { '&' } else { '?' };
        environment.push((
            "DATABASE_URL".into(),
            format!(
                "{url}{sign}options=-csearch_path%3D{}%2Cpublic",
                self.schema
            ),
        ));
        for source in ["ORDERS", "PLAIN"] {
            environment.push((format!("BELLWIRE_INTAKE__SECRETS__{source}"), SECRET.into()));
        }
        environment
    }

    /// A command with this configuration, which is not waited for. Sources are `orders`, or `plain`.
    pub fn with_config(
        &self,
        config: &str,
        settings: &[(&str, &str)],
        arguments: &[&str],
    ) -> Relay {
        let directory = std::env::temp_dir().join(format!("bellwire-{}", self.schema));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join(format!("{:08x}.toml", rand::random::<u32>()));
        std::fs::write(&path, config).unwrap();
        let named: Vec<&str> = ["--config", path.to_str().unwrap()]
            .into_iter()
            .chain(arguments.iter().copied())
            .collect();
        let mut environment = self.intake_environment();
        environment.retain(|(key, _)| {
            let source = key.strip_prefix("BELLWIRE_INTAKE__SECRETS__");
            source.is_none_or(|source| {
                config.contains(&format!("name = \"{}\"", source.to_lowercase()))
            })
        });
        Relay::start(&environment, settings, &named)
    }

    /// The tables of the example.
    pub async fn orders_tables(&self) {
        let text = std::fs::read_to_string(example("schema.sql")).unwrap();
        self.sql(&text).await;
    }

    /// An intake of the example, without a relay.
    pub async fn orders_intake(&self, settings: &[(&str, &str)]) -> (Relay, Sender) {
        self.orders_tables().await;
        self.intake(&orders(), "orders", settings).await
    }

    /// An intake without a relay, that takes requests.
    pub async fn intake(
        &self,
        config: &str,
        source: &str,
        settings: &[(&str, &str)],
    ) -> (Relay, Sender) {
        let alone = [("relay.enabled", "false")];
        let settings: Vec<_> = alone.iter().chain(settings).copied().collect();
        let relay = self.with_config(config, &settings, &["run"]);
        let address = intake_address(&relay).await;
        (relay, Sender::new(&address, source))
    }
}

/// Of a process that was started on any port.
pub async fn intake_address(relay: &Relay) -> String {
    relay.until_logged("intake port open", SOON).await;
    let log = relay.log();
    let line = log
        .lines()
        .find(|line| line.contains("intake port open"))
        .unwrap();
    let (_, rest) = line.split_once("127.0.0.1:").unwrap();
    let port: String = rest.chars().take_while(char::is_ascii_digit).collect();
    format!("127.0.0.1:{port}")
}
