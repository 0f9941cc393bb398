//! JetStream's side of the demo: a stream of its own, and a consumer that reads it with
//! acknowledgements, on a connection of its own.

use std::time::Instant;

use anyhow::{Context as _, anyhow, bail};
use async_nats::{Client, HeaderMap, Message, Subscriber};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedSender;

use super::payload::ROLLED_BACK;
use super::tally::Arrival;
use super::watch::News;
use crate::config::JetstreamConfig;
use crate::event::AggregateKey;
use crate::sink::jetstream;

/// Messages the server sends ahead of acknowledgements.
const AHEAD: u64 = 500;
/// Acknowledged at once. Well below that, so that the server never waits for us.
const ACK_EVERY: u64 = 100;

/// Makes the stream, and starts to read it.
pub(super) async fn set_up(client: Client, name: &str) -> anyhow::Result<Reader> {
    let stream = json!({
        "name": name, "subjects": [format!("{name}.>")], "storage": "file", "retention": "limits",
        "discard": "old", "num_replicas": 1, "max_consumers": -1, "max_msgs": -1, "max_bytes": -1,
        "max_msg_size": -1, "max_age": 0,
    });
    ask(&client, &format!("STREAM.CREATE.{name}"), &stream).await?;
    Reader::start(client, name).await
}

/// Removes the stream with its consumer.
pub(super) async fn remove(config: &JetstreamConfig, name: &str) -> anyhow::Result<()> {
    // A connection of its own: the consumer's may be what failed.
    let client = jetstream::connect(config).await?;
    ask(&client, &format!("STREAM.DELETE.{name}"), &json!({})).await
}

async fn ask(client: &Client, call: &str, body: &Value) -> anyhow::Result<()> {
    let subject = format!("$JS.API.{call}");
    let answer = client.request(subject, body.to_string().into()).await;
    let answer = answer.context("JetStream does not answer")?;
    let answer: Value = serde_json::from_slice(&answer.payload).context("JetStream")?;
    match answer.get("error") {
        None => Ok(()),
        Some(error) => Err(anyhow!("JetStream refuses {call}: {error}")),
    }
}

/// Reads until it is dropped.
pub(super) struct Reader {
    client: Client,
    messages: Subscriber,
}

impl Reader {
    async fn start(client: Client, name: &str) -> anyhow::Result<Self> {
        let inbox = client.new_inbox();
        let messages = client
            .subscribe(inbox.clone())
            .await
            .context("the consumer cannot subscribe")?;
        let consumer = json!({
            "stream_name": name,
            "config": {
                "deliver_subject": inbox, "deliver_policy": "all", "ack_policy": "all",
                "max_ack_pending": AHEAD, "replay_policy": "instant",
            },
        });
        ask(&client, &format!("CONSUMER.CREATE.{name}"), &consumer).await?;
        Ok(Self { client, messages })
    }

    pub(super) async fn run(mut self, tell: UnboundedSender<News>) -> anyhow::Result<()> {
        let mut unacknowledged = 0;
        while let Some(message) = self.messages.next().await {
            let at = Instant::now();
            // Without headers it is the server that asks whether we are still there.
            let Some(headers) = &message.headers else {
                continue;
            };
            let arrived = News::Arrived(arrival(headers, &message, at)?);
            if tell.send(arrived).is_err() {
                return Ok(());
            }
            unacknowledged += 1;
            // The last few stay unacknowledged: they go with the stream.
            if unacknowledged >= ACK_EVERY
                && let Some(reply) = message.reply
            {
                // All up to this one.
                let acknowledged = self.client.publish(reply, "+ACK".into()).await;
                acknowledged.context("the consumer cannot acknowledge")?;
                unacknowledged = 0;
            }
        }
        bail!("NATS ended the consumer")
    }
}

fn arrival(headers: &HeaderMap, message: &Message, at: Instant) -> anyhow::Result<Arrival> {
    let header = |name: &str| {
        let value = headers.get(name).map(ToString::to_string);
        value.ok_or_else(|| anyhow!("a message came without the header {name}"))
    };
    let id = header("event_sequence")?;
    Ok(Arrival {
        id: id
            .parse()
            .map_err(|_| anyhow!("a message came whose event_sequence `{id}` is no outbox id"))?,
        // The demo's own ids have nothing in them that would be encoded.
        key: AggregateKey::new(&header("aggregate_type")?, &header("aggregate_id")?),
        rolled_back: String::from_utf8_lossy(&message.payload).contains(ROLLED_BACK),
        at,
    })
}
