//! The consumer of the durable queue: it takes everything, in arrival order, and comes back after every outage.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt as _;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::{BasicProperties, Connection, Consumer};
use tokio::time::timeout;

use crate::judge::Seen;
use crate::stage::open_channel;
use crate::support::Arrival;

/// Unacknowledged, at most.
const PREFETCH: u16 = 500;
const RECONNECT_PAUSE: Duration = Duration::from_millis(100);
/// Without a delivery for so long it begins anew: a connection whose broker was killed may not have noticed.
const SILENCE: Duration = Duration::from_secs(5);
/// A broker that is just starting takes connections before it answers on them.
const PATIENCE: Duration = Duration::from_secs(10);

/// Until its task is ended.
pub async fn read(queue: String, seen: Arc<Mutex<Vec<Seen>>>) {
    loop {
        // Whatever the reason, the queue is still there, and so is what was not acknowledged.
        if let Ok(Ok((_connection, mut consumer))) = timeout(PATIENCE, begin(&queue)).await {
            let _ = consume(&mut consumer, &seen).await;
        }
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}

async fn begin(queue: &str) -> Result<(Connection, Consumer), lapin::Error> {
    let (connection, channel) = open_channel().await?;
    channel
        .basic_qos(PREFETCH, BasicQosOptions::default())
        .await?;
    let consumer = channel
        .basic_consume(
            queue.into(),
            "".into(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        )
        .await?;
    Ok((connection, consumer))
}

async fn consume(consumer: &mut Consumer, seen: &Mutex<Vec<Seen>>) -> Result<(), lapin::Error> {
    while let Ok(Some(delivery)) = timeout(SILENCE, consumer.next()).await {
        let delivery = delivery?;
        let acker = delivery.acker.clone();
        seen.lock().unwrap().push(take(delivery));
        if let Ok(acked) = timeout(SILENCE, acker.ack(BasicAckOptions::default())).await {
            acked?;
        } else {
            break;
        }
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
