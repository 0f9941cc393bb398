//! The consumer: reads the queue with acknowledgements, on a connection of its own.

use std::time::Instant;

use anyhow::{Context as _, anyhow, bail};
use futures_util::StreamExt as _;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, Consumer};
use tokio::sync::mpsc::UnboundedSender;

use super::payload::ROLLED_BACK;
use super::tally::Arrival;
use super::watch::News;
use crate::event::AggregateKey;

/// Deliveries the broker sends ahead of acknowledgements.
const PREFETCH: u16 = 500;
/// Acknowledged at once. Well below the prefetch, so that the broker never waits for us.
const ACK_EVERY: u64 = 100;

/// Reads until it is dropped.
pub(super) struct Reader {
    // Dropping it would close the channel under the consumer.
    _connection: Connection,
    consumer: Consumer,
}

impl Reader {
    pub(super) async fn start(connection: Connection, queue: &str) -> lapin::Result<Self> {
        let channel = connection.create_channel().await?;
        channel
            .basic_qos(PREFETCH, BasicQosOptions::default())
            .await?;
        let consumer = channel
            .basic_consume(
                queue.into(),
                "bellwire-demo".into(),
                BasicConsumeOptions::default(),
                FieldTable::default(),
            )
            .await?;
        Ok(Self {
            _connection: connection,
            consumer,
        })
    }

    pub(super) async fn run(mut self, tell: UnboundedSender<News>) -> anyhow::Result<()> {
        let mut unacknowledged = 0;
        while let Some(delivery) = self.consumer.next().await {
            let at = Instant::now();
            let delivery = delivery.context("the consumer lost RabbitMQ")?;
            if tell.send(News::Arrived(arrival(&delivery, at)?)).is_err() {
                return Ok(());
            }
            unacknowledged += 1;
            // The last few stay unacknowledged: they go with the queue.
            if unacknowledged >= ACK_EVERY {
                let up_to_here = BasicAckOptions { multiple: true };
                delivery
                    .ack(up_to_here)
                    .await
                    .context("the consumer cannot acknowledge")?;
                unacknowledged = 0;
            }
        }
        bail!("RabbitMQ ended the consumer")
    }
}

fn arrival(delivery: &Delivery, at: Instant) -> anyhow::Result<Arrival> {
    let properties = &delivery.properties;
    let message_id = properties
        .message_id()
        .as_ref()
        .map_or("", |id| id.as_str());
    let id = message_id
        .parse()
        .map_err(|_| anyhow!("a message came whose id `{message_id}` is no outbox id"))?;
    let header = |name: &str| {
        let headers = properties.headers().as_ref().map(FieldTable::inner);
        match headers.and_then(|headers| headers.get(name)) {
            Some(AMQPValue::LongString(text)) => {
                Ok(String::from_utf8_lossy(text.as_bytes()).into_owned())
            }
            _ => Err(anyhow!("message {id} came without the header {name}")),
        }
    };
    Ok(Arrival {
        id,
        key: AggregateKey::new(&header("aggregate_type")?, &header("aggregate_id")?),
        rolled_back: String::from_utf8_lossy(&delivery.data).contains(ROLLED_BACK),
        at,
    })
}

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;

    use super::*;

    fn delivery(id: &str, body: &str) -> Delivery {
        let mut headers = FieldTable::default();
        headers.insert(
            "aggregate_type".into(),
            AMQPValue::LongString("order".into()),
        );
        headers.insert("aggregate_id".into(), AMQPValue::LongString("ORD-1".into()));
        let mut delivery = Delivery::mock(1, "e".into(), "k".into(), false, body.into());
        delivery.properties = BasicProperties::default()
            .with_message_id(id.into())
            .with_headers(headers);
        delivery
    }

    #[test]
    fn a_message_of_the_relay_is_understood() {
        let read = arrival(&delivery("42", "{\"rolled_back\": true}"), Instant::now()).unwrap();
        assert_eq!(
            (read.id, read.key),
            (42, AggregateKey::new("order", "ORD-1"))
        );
        assert!(read.rolled_back);
        assert!(
            !arrival(&delivery("42", "{}"), Instant::now())
                .unwrap()
                .rolled_back
        );
    }

    #[test]
    fn a_foreign_message_is_an_error_and_no_panic() {
        assert!(arrival(&delivery("", "{}"), Instant::now()).is_err());
        let mut bare = delivery("42", "{}");
        bare.properties = BasicProperties::default().with_message_id("42".into());
        assert!(
            arrival(&bare, Instant::now())
                .unwrap_err()
                .to_string()
                .contains("aggregate_type")
        );
    }
}
