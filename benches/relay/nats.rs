//! JetStream by the bare client: a stream, and the rate at which it acknowledges.

use std::time::{Duration, Instant};

use async_nats::{Client, HeaderMap, Request, Subscriber};
use futures_util::StreamExt as _;
use serde_json::{Value, json};

use crate::options::Options;
use crate::world::{AGGREGATE_TYPE, EVENT_TYPE, ROWS_PER_AGGREGATE, World, body, variable};

/// For each question to the API.
const PATIENCE: Duration = Duration::from_secs(20);

/// A stream on file storage that nobody else uses, and takes everything below its name.
pub(crate) struct Stream {
    name: String,
    client: Client,
}

impl Stream {
    /// A new, empty one.
    pub(crate) async fn fresh(name: &str) -> Self {
        let client = async_nats::connect(variable("NATS_URL")).await;
        let stream = Self {
            name: name.to_owned(),
            client: client.expect("NATS answers"),
        };
        // There may be none yet.
        stream.api("DELETE", json!({})).await;
        let config = json!({
            "name": name, "subjects": [format!("{name}.>")], "storage": "file", "retention": "limits",
            "discard": "old", "num_replicas": 1, "max_consumers": -1, "max_msgs": -1, "max_bytes": -1,
            "max_msg_size": -1, "max_age": 0,
        });
        let created = stream.api("CREATE", config).await;
        assert!(created.get("error").is_none(), "a stream: {created}");
        stream
    }

    async fn api(&self, call: &str, body: Value) -> Value {
        let request = Request::new()
            .payload(body.to_string().into())
            .timeout(Some(PATIENCE));
        let subject = format!("$JS.API.STREAM.{call}.{}", self.name);
        let answer = self.client.send_request(subject, request).await;
        let answer = answer.expect("JetStream answers");
        serde_json::from_slice(&answer.payload).expect("its answers are JSON")
    }

    /// Removes it; answers how many messages it had kept.
    pub(crate) async fn remove(self) -> u64 {
        let info = self.api("INFO", json!({})).await;
        self.api("DELETE", json!({})).await;
        info["state"]["messages"].as_u64().expect("a count")
    }
}

/// Messages a second of a bare client on one connection, the same as the relay's, every acknowledgement
/// awaited.
pub(crate) async fn ceiling(world: &World, rows: u32, options: &Options) -> f64 {
    let stream = Stream::fresh(&world.name).await;
    let client = async_nats::connect(variable("NATS_URL")).await;
    let client = client.expect("NATS answers");
    let inbox = client.new_inbox();
    let replies = client.subscribe(format!("{inbox}.*")).await;
    let mut replies = replies.expect("an inbox");
    let body = bytes::Bytes::from(body(options.payload_bytes));
    let subject = format!("{}.{AGGREGATE_TYPE}.{EVENT_TYPE}", world.name);
    let aggregates = rows / ROWS_PER_AGGREGATE;
    let began = Instant::now();
    let mut unacknowledged = 0;
    for id in 1..=rows {
        if unacknowledged == options.unconfirmed() {
            acknowledged(&mut replies).await;
            unacknowledged -= 1;
        }
        let headers = headers(&world.name, id, aggregates);
        let reply = format!("{inbox}.{id}");
        let sent = client
            .publish_with_reply_and_headers(subject.clone(), reply, headers, body.clone())
            .await;
        sent.expect("the client takes it");
        unacknowledged += 1;
    }
    for _ in 0..unacknowledged {
        acknowledged(&mut replies).await;
    }
    let took = began.elapsed();
    let kept = stream.remove().await;
    assert_eq!(kept, u64::from(rows), "the stream has all of them");
    f64::from(rows) / took.as_secs_f64()
}

async fn acknowledged(replies: &mut Subscriber) {
    let reply = replies.next().await.expect("NATS answers");
    let kept = reply.payload.starts_with(br#"{"stream":"#);
    assert!(kept, "the stream took no message: {:?}", reply.payload);
}

fn headers(stream: &str, id: u32, aggregates: u32) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert("Nats-Expected-Stream", stream);
    headers.insert(
        "Nats-Msg-Id",
        format!("bellwire:00000000-0000-4000-8000-{id:012x}"),
    );
    headers.insert("aggregate_id", format!("aggregate-{}", id % aggregates));
    headers.insert("aggregate_type", AGGREGATE_TYPE);
    headers.insert("attempt", "1");
    headers.insert("content_type", "application/json");
    headers.insert("created_at", "1700000000");
    headers.insert("event_sequence", id.to_string());
    headers.insert("event_type", EVENT_TYPE);
    headers.insert("source", "bellwire");
    headers
}
