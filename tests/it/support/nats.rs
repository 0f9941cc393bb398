//! A stream of its own for each test, seen through JetStream's API.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use async_nats::{Client, Request};
use serde_json::{Value, json};

use super::{World, insert};

/// None, said loudly, without a NATS server.
pub fn nats_url() -> Option<String> {
    let url = std::env::var("NATS_URL").ok().filter(|url| !url.is_empty());
    if url.is_none() {
        eprintln!(
            "SKIPPED: no NATS server; set NATS_URL, or `scripts/services up` without --no-nats"
        );
    }
    url
}

/// One message as the stream has it.
#[derive(Clone, Debug)]
pub struct Kept {
    pub sequence: u64,
    pub subject: String,
    pub body: Vec<u8>,
    /// As they are on the wire.
    pub headers: Vec<(String, String)>,
}

impl Kept {
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut found = self.headers.iter().filter(|(known, _)| known == name);
        let (_, value) = found.next()?;
        assert!(found.next().is_none(), "{name} is there twice");
        Some(value)
    }

    /// The outbox id.
    pub fn id(&self) -> i64 {
        self.header("event_sequence").unwrap().parse().unwrap()
    }
}

/// A stream that nobody else uses.
pub struct Stream {
    pub name: String,
    pub client: Client,
    /// Of the last message that was read.
    read: u64,
}

impl Stream {
    /// One that takes everything below its name, and more as `settings` say.
    pub async fn new(settings: Value) -> Option<Self> {
        let stream = Self::absent().await?;
        stream.create(settings).await;
        Some(stream)
    }

    /// Only its name, and a client.
    pub async fn absent() -> Option<Self> {
        Some(Self::of(async_nats::connect(nats_url()?).await.unwrap()))
    }

    /// A name for one on this client's server.
    pub fn of(client: Client) -> Self {
        Self {
            name: format!("t_{:016x}", rand::random::<u64>()),
            client,
            read: 0,
        }
    }

    pub async fn create(&self, settings: Value) {
        let mut config = json!({
            "name": self.name, "subjects": [format!("{}.>", self.name)], "storage": "file",
            "retention": "limits", "discard": "old", "num_replicas": 1, "max_consumers": -1,
            "max_msgs": -1, "max_bytes": -1, "max_msg_size": -1, "max_age": 0,
        });
        for (key, value) in settings.as_object().unwrap() {
            config[key] = value.clone();
        }
        let name = config["name"].as_str().unwrap().to_owned();
        self.api(&format!("STREAM.CREATE.{name}"), config).await;
    }

    /// Changes some settings.
    pub async fn update(&self, settings: Value) {
        let mut config = self.info().await["config"].clone();
        for (key, value) in settings.as_object().unwrap() {
            config[key] = value.clone();
        }
        self.api(&format!("STREAM.UPDATE.{}", self.name), config)
            .await;
    }

    /// Created anew: its messages are counted from the first again.
    pub fn restart(&mut self) {
        self.read = 0;
    }

    pub async fn info(&self) -> Value {
        self.api(&format!("STREAM.INFO.{}", self.name), json!({}))
            .await
    }

    pub async fn count(&self) -> u64 {
        self.info().await["state"]["messages"].as_u64().unwrap()
    }

    pub async fn purge(&self) {
        self.api(&format!("STREAM.PURGE.{}", self.name), json!({}))
            .await;
    }

    pub async fn delete(&self) {
        self.api(&format!("STREAM.DELETE.{}", self.name), json!({}))
            .await;
    }

    async fn api(&self, call: &str, body: Value) -> Value {
        let answer = self.call(call, body).await;
        assert!(answer.get("error").is_none(), "{call}: {answer}");
        answer
    }

    async fn call(&self, call: &str, body: Value) -> Value {
        let request = Request::new()
            .payload(body.to_string().into())
            .timeout(Some(Duration::from_secs(20)));
        let answer = self
            .client
            .send_request(format!("$JS.API.{call}"), request)
            .await
            .unwrap_or_else(|error| panic!("{call}: {error}"));
        serde_json::from_slice(&answer.payload).unwrap()
    }

    /// The next message that was not read yet, if there is one.
    pub async fn next(&mut self) -> Option<Kept> {
        let body = json!({ "seq": self.read + 1 });
        let answer = self
            .call(&format!("STREAM.MSG.GET.{}", self.name), body)
            .await;
        let message = answer.get("message")?;
        let kept = kept(message);
        self.read = kept.sequence;
        Some(kept)
    }

    /// Reads messages until `count` different ids are there, and all that came until then.
    pub async fn messages(&mut self, count: usize, within: Duration) -> Vec<Kept> {
        let began = Instant::now();
        let mut messages = Vec::new();
        let mut ids = HashSet::new();
        loop {
            match self.next().await {
                Some(message) => {
                    ids.insert(message.id());
                    messages.push(message);
                }
                None if ids.len() >= count => return messages,
                None => {
                    assert!(
                        began.elapsed() < within,
                        "{} of {count} arrived within {within:?}",
                        ids.len()
                    );
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }
}

fn kept(message: &Value) -> Kept {
    let text = |name: &str| decoded(message[name].as_str().unwrap_or_default());
    let headers = String::from_utf8(text("hdrs")).unwrap();
    let headers = headers
        .split("\r\n")
        .skip(1)
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    Kept {
        sequence: message["seq"].as_u64().unwrap(),
        subject: message["subject"].as_str().unwrap().to_owned(),
        body: text("data"),
        headers,
    }
}

/// Base64.
fn decoded(text: &str) -> Vec<u8> {
    let value = |letter: u8| -> Option<u32> {
        let place = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
            .iter()
            .position(|known| *known == letter)?;
        u32::try_from(place).ok()
    };
    let mut bytes = Vec::new();
    for four in text.as_bytes().chunks(4) {
        let known: Vec<u32> = four.iter().filter_map(|letter| value(*letter)).collect();
        let bits = known.iter().fold(0, |bits, six| bits << 6 | six) << (6 * (4 - known.len()));
        bytes.extend_from_slice(&bits.to_be_bytes()[1..known.len()]);
    }
    bytes
}

impl World {
    /// An outbox without anything on RabbitMQ.
    pub async fn outbox() -> Self {
        let world = Self::unbound().await;
        world.store.migrate().await.unwrap();
        world
    }

    /// What a relay needs to publish to this stream, under subjects that begin with its name.
    pub fn to_stream<'a>(&self, stream: &'a Stream) -> Vec<(&'static str, &'a str)> {
        vec![
            ("relay.sink", "jetstream"),
            ("jetstream.stream", &stream.name),
            ("jetstream.prefix", &stream.name),
            ("jetstream.ack_timeout", "3s"),
        ]
    }

    /// Inserts an event with the UUID that it shall have.
    pub async fn insert_as(&self, uuid: u64, aggregate: (&str, &str)) -> i64 {
        let id = insert(&self.db, aggregate, "Placed", "{}").await;
        self.sql(&format!(
            "UPDATE outbox SET event_id = '00000000-0000-4000-8000-{uuid:012x}' WHERE id = {id}"
        ))
        .await;
        id
    }
}
