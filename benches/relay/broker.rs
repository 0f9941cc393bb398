//! The broker by the bare client: queues, and the rate at which it confirms.

use std::collections::VecDeque;
use std::pin::Pin;
use std::time::Instant;

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};

use crate::options::Options;
use crate::world::{AGGREGATE_TYPE, EVENT_TYPE, ROWS_PER_AGGREGATE, World, body, variable};

/// Kinds of durable queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    Classic,
    Quorum,
}

impl Queue {
    pub(crate) fn arguments(self) -> FieldTable {
        let kind = match self {
            Self::Classic => "classic",
            Self::Quorum => "quorum",
        };
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), AMQPValue::LongString(kind.into()));
        arguments
    }
}

pub(crate) async fn connect() -> Connection {
    let url = variable("AMQP_URL");
    let connected = Connection::connect(&url, ConnectionProperties::default());
    connected.await.expect("the broker answers")
}

/// Messages a second of a bare client on one connection, the same as the relay's and as many unconfirmed, every confirm
/// awaited.
pub(crate) async fn ceiling(world: &World, queue: Queue, rows: u32, options: &Options) -> f64 {
    world.fresh_queue(queue).await;
    let publisher = RawPublisher::new(world).await;
    let body = body(options.payload_bytes);
    let aggregates = rows / ROWS_PER_AGGREGATE;
    let unconfirmed = options.unconfirmed();
    let mut window = VecDeque::with_capacity(unconfirmed);
    let began = Instant::now();
    for id in 1..=rows {
        if window.len() == unconfirmed {
            confirmed(window.pop_front()).await;
        }
        window.push_back(publisher.publish(id, aggregates, body.as_bytes()).await);
    }
    while !window.is_empty() {
        confirmed(window.pop_front()).await;
    }
    let took = began.elapsed();
    publisher.close().await;
    world.complete(rows, "the bare client").await;
    f64::from(rows) / took.as_secs_f64()
}

async fn confirmed(oldest: Option<Confirm>) {
    let confirm = oldest.expect("the window is not empty").await;
    let confirm = confirm.expect("the broker answers");
    assert!(
        matches!(confirm, Confirmation::Ack(None)),
        "the broker took no message: {confirm:?}"
    );
}

/// Ends with the confirm of one message.
pub(crate) type Confirm = Pin<Box<dyn Future<Output = lapin::Result<Confirmation>> + Send>>;

/// The client library alone, publishing what the relay would publish.
pub(crate) struct RawPublisher {
    exchange: ShortString,
    channel: Channel,
    connection: Connection,
}

impl RawPublisher {
    /// A connection and channel of its own in confirm mode.
    pub(crate) async fn new(world: &World) -> Self {
        let connection = connect().await;
        let channel = connection.create_channel().await.expect("a channel");
        let confirms = channel.confirm_select(ConfirmSelectOptions::default());
        confirms.await.expect("confirm mode");
        Self {
            exchange: world.name.as_str().into(),
            channel,
            connection,
        }
    }

    /// Hands one message to the client, the same as the relay's for event `id`; answers what ends
    /// with its confirm.
    pub(crate) async fn publish(&self, id: u32, aggregates: u32, body: &[u8]) -> Confirm {
        let mandatory = BasicPublishOptions {
            mandatory: true,
            immediate: false,
        };
        let key = format!("{AGGREGATE_TYPE}.{EVENT_TYPE}").into();
        let properties = properties(id, aggregates);
        let exchange = self.exchange.clone();
        let sent = self
            .channel
            .basic_publish(exchange, key, mandatory, body, properties);
        Box::pin(sent.await.expect("the channel takes it"))
    }

    pub(crate) async fn close(self) {
        let _ = self.connection.close(200, "done".into()).await;
    }
}

fn properties(id: u32, aggregates: u32) -> BasicProperties {
    let text = |text: String| AMQPValue::LongString(text.into());
    let mut headers = FieldTable::default();
    headers.insert("aggregate_type".into(), text(AGGREGATE_TYPE.into()));
    headers.insert(
        "aggregate_id".into(),
        text(format!("aggregate-{}", id % aggregates)),
    );
    headers.insert("attempt".into(), AMQPValue::LongInt(1));
    BasicProperties::default()
        .with_content_type("application/json".into())
        .with_headers(headers)
        .with_delivery_mode(2)
        .with_message_id(id.to_string().into())
        .with_type(EVENT_TYPE.into())
        .with_app_id("bellwire".into())
        .with_timestamp(1_700_000_000)
}
