//! Kafka by the bare client: a topic, and the rate at which an idempotent producer has its reports.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::{ClientContext, DefaultClientContext};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{DeliveryResult, Header, OwnedHeaders};
use rdkafka::producer::{BaseRecord, ProducerContext, ThreadedProducer};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::options::Options;
use crate::world::{AGGREGATE_TYPE, EVENT_TYPE, ROWS_PER_AGGREGATE, World, body, variable};

/// Of the topic.
const PARTITIONS: i32 = 6;
/// Nothing more comes after so long.
const QUIET: Duration = Duration::from_secs(5);
/// For one look for records.
const LOOK_PAUSE: Duration = Duration::from_millis(100);
/// For each question to the broker.
const PATIENCE: Duration = Duration::from_secs(20);

/// A topic that nobody else uses.
pub(crate) struct Topic {
    name: String,
}

fn client() -> ClientConfig {
    let mut client = ClientConfig::new();
    client.set("bootstrap.servers", variable("KAFKA_BOOTSTRAP_SERVERS"));
    client
}

fn admin() -> AdminClient<DefaultClientContext> {
    client().create().expect("a client of Kafka")
}

impl Topic {
    /// A new, empty one; events of the bench go there by this prefix.
    pub(crate) async fn fresh(prefix: &str) -> Self {
        let name = format!("{prefix}.{AGGREGATE_TYPE}");
        let topic = NewTopic::new(&name, PARTITIONS, TopicReplication::Fixed(1));
        let made = admin().create_topics([&topic], &AdminOptions::new()).await;
        for topic in made.expect("Kafka answers") {
            topic.expect("a topic");
        }
        Self { name }
    }

    /// Removes it; answers how many records could be read, of those wanted.
    pub(crate) async fn remove(self, wanted: u32) -> u64 {
        let name = self.name.clone();
        let counted = tokio::task::spawn_blocking(move || count(&name, wanted));
        let counted = counted.await.expect("it was counted");
        let removed = admin()
            .delete_topics(&[&self.name], &AdminOptions::new())
            .await;
        removed.expect("Kafka answers");
        counted
    }
}

/// How many records can be read: what a broker says of a topic's ends is not that.
fn count(topic: &str, wanted: u32) -> u64 {
    let consumer: BaseConsumer = client()
        .set("group.id", topic)
        .set("enable.auto.commit", "false")
        .create()
        .expect("a client of Kafka");
    let mut all = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        all.add_partition_offset(topic, partition, Offset::Beginning)
            .expect("a partition");
    }
    consumer.assign(&all).expect("it can be read");
    let (mut counted, mut last) = (0, Instant::now());
    while counted < u64::from(wanted) && last.elapsed() < QUIET {
        if let Some(Ok(_)) = consumer.poll(LOOK_PAUSE) {
            counted += 1;
            last = Instant::now();
        }
    }
    counted
}

struct Reports(Sender<bool>);

impl ClientContext for Reports {}

impl ProducerContext for Reports {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        // The bench has ended by a panic if nobody listens.
        let _ = self.0.send(result.is_ok());
    }
}

/// Records a second of a bare producer, as the relay's is set up, every report awaited.
pub(crate) async fn ceiling(prefix: &str, rows: u32, options: &Options) -> f64 {
    let topic = Topic::fresh(prefix).await;
    let name = topic.name.clone();
    let body = body(options.payload_bytes);
    let unconfirmed = options.unconfirmed();
    let took = tokio::task::spawn_blocking(move || produce(&name, &body, rows, unconfirmed)).await;
    let took = took.expect("it was produced");
    let kept = topic.remove(rows).await;
    assert_eq!(kept, u64::from(rows), "the topic has all of them");
    f64::from(rows) / took.as_secs_f64()
}

fn produce(topic: &str, body: &str, rows: u32, unconfirmed: usize) -> Duration {
    let (reports, reported) = channel();
    let producer: ThreadedProducer<Reports> = client()
        .set("acks", "all")
        .set("enable.idempotence", "true")
        .set("partitioner", "murmur2_random")
        .set("linger.ms", "1")
        .create_with_context(Reports(reports))
        .expect("a producer");
    let aggregates = rows / ROWS_PER_AGGREGATE;
    let began = Instant::now();
    let mut unreported = 0;
    for id in 1..=rows {
        if unreported == unconfirmed {
            await_report(&reported);
            unreported -= 1;
        }
        let key = format!("aggregate-{}", id % aggregates);
        let record = BaseRecord::to(topic)
            .payload(body)
            .headers(headers(id, &key))
            .key(&key);
        producer
            .send(record)
            .map_err(|(error, _)| error)
            .expect("the client takes it");
        unreported += 1;
    }
    for _ in 0..unreported {
        await_report(&reported);
    }
    began.elapsed()
}

fn await_report(reported: &Receiver<bool>) {
    let taken = reported.recv_timeout(PATIENCE).expect("a report");
    assert!(taken, "the broker took no record");
}

fn headers(id: u32, aggregate_id: &str) -> OwnedHeaders {
    let mut headers = OwnedHeaders::new_with_capacity(9);
    for (key, value) in [
        ("aggregate_id", aggregate_id),
        ("aggregate_type", AGGREGATE_TYPE),
        ("attempt", "1"),
        ("content_type", "application/json"),
        ("created_at", "1700000000"),
        ("event_id", &format!("00000000-0000-4000-8000-{id:012x}")),
        ("event_sequence", &id.to_string()),
        ("event_type", EVENT_TYPE),
        ("source", "bellwire"),
    ] {
        let value = Some(value);
        headers = headers.insert(Header { key, value });
    }
    headers
}

/// A prefix of topics that were never there: brokers take their time to forget a name.
pub(crate) fn prefix(world: &World) -> String {
    format!("{}-{:08x}", world.name, rand::random::<u32>())
}
