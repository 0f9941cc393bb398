//! The consumer of the durable queue: it takes everything, in arrival order, and comes back after every outage.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt as _;
use lapin::BasicProperties;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::{FieldTable, ShortString};

use crate::judge::Seen;
use crate::stage::open_channel;
use crate::support::Arrival;

/// Unacknowledged, at most.
const PREFETCH: u16 = 500;
const RECONNECT_PAUSE: Duration = Duration::from_millis(100);

/// Until its task is ended.
pub async fn read(queue: String, seen: Arc<Mutex<Vec<Seen>>>) {
    loop {
        // Whatever the reason, the queue is still there, and so is what was not acknowledged.
        let _ = consume(&queue, &seen).await;
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}

async fn consume(queue: &str, seen: &Mutex<Vec<Seen>>) -> Result<(), lapin::Error> {
    let (_connection, channel) = open_channel().await?;
    channel
        .basic_qos(PREFETCH, BasicQosOptions::default())
        .await?;
    let mut consumer = channel
        .basic_consume(
            queue.into(),
            "".into(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        )
        .await?;
    while let Some(delivery) = consumer.next().await {
        let delivery = delivery?;
        let acker = delivery.acker.clone();
        seen.lock().unwrap().push(take(delivery));
        acker.ack(BasicAckOptions::default()).await?;
    }
    Ok(())
}

fn take(delivery: Delivery) -> Seen {
    let redelivered = delivery.redelivered;
    let mut arrival = Arrival::of(delivery);
    let properties = std::mem::take(&mut arrival.properties);
    let sender = properties.app_id().as_ref().map(ShortString::as_str);
    let sender = sender.unwrap().parse().unwrap();
    let fingerprint = fingerprint(&arrival, properties);
    Seen {
        arrival,
        sender,
        fingerprint,
        redelivered,
    }
}

/// Of all that a repeat has in common with the first: not the attempt; nor the sender's name, which only here is not
/// the same for all relays.
fn fingerprint(arrival: &Arrival, properties: BasicProperties) -> u64 {
    let mut headers = properties
        .headers()
        .clone()
        .unwrap_or_default()
        .inner()
        .clone();
    assert!(
        headers.remove("attempt").is_some(),
        "no attempt in {headers:?}"
    );
    let properties = properties
        .with_app_id("".into())
        .with_headers(headers.into());
    let mut hasher = DefaultHasher::new();
    (&arrival.body, &arrival.exchange, &arrival.routing_key).hash(&mut hasher);
    format!("{properties:?}").hash(&mut hasher);
    hasher.finish()
}
