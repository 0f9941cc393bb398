//! Kafka's side of the demo: a topic for each aggregate type, and a consumer that reads all of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{BorrowedMessage, Headers as _, Message as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use super::payload::{ROLLED_BACK, aggregate_types};
use super::tally::Arrival;
use super::watch::News;
use crate::config::KafkaConfig;
use crate::event::AggregateKey;
use crate::sink::kafka;

/// Of each topic: more than one, so that keys have something to decide.
const PARTITIONS: i32 = 3;
/// How late the consumer may notice that it is not wanted any more.
const LOOK: Duration = Duration::from_millis(100);

type Admin = AdminClient<DefaultClientContext>;

fn admin(config: &KafkaConfig) -> anyhow::Result<Admin> {
    let client = kafka::client(config).map_err(|error| anyhow!("{}", error.message))?;
    client.create().context("Kafka")
}

fn topics(prefix: &str) -> Vec<String> {
    aggregate_types()
        .map(|aggregate_type| format!("{prefix}.{aggregate_type}"))
        .collect()
}

/// Makes the topics, and starts to read them.
pub(super) async fn set_up(config: &KafkaConfig) -> anyhow::Result<Reader> {
    let names = topics(&config.prefix);
    let wanted: Vec<_> = names
        .iter()
        // As many replicas as the brokers are set to make.
        .map(|name| NewTopic::new(name, PARTITIONS, TopicReplication::Fixed(-1)))
        .collect();
    let made = admin(config)?.create_topics(&wanted, &AdminOptions::new());
    for topic in made.await.context("Kafka does not answer")? {
        topic.map_err(|(name, code)| anyhow!("Kafka refuses to make topic {name}: {code}"))?;
    }
    Reader::start(config, &names)
}

/// Removes the topics.
pub(super) async fn remove(config: &KafkaConfig) -> anyhow::Result<()> {
    let names = topics(&config.prefix);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let removed = admin(config)?
        .delete_topics(&names, &AdminOptions::new())
        .await;
    for topic in removed.context("Kafka does not answer")? {
        topic.map_err(|(name, code)| anyhow!("Kafka refuses to remove topic {name}: {code}"))?;
    }
    Ok(())
}

/// Reads until it is dropped.
pub(super) struct Reader {
    consumer: BaseConsumer,
}

impl Reader {
    fn start(config: &KafkaConfig, names: &[String]) -> anyhow::Result<Self> {
        let mut client = kafka::client(config).map_err(|error| anyhow!("{}", error.message))?;
        client
            // It commits nothing, but there is no consumer without a group.
            .set("group.id", &config.prefix)
            .set("enable.auto.commit", "false")
            .set("auto.offset.reset", "earliest");
        let consumer: BaseConsumer = client.create().context("Kafka")?;
        let mut all = TopicPartitionList::new();
        for name in names {
            for partition in 0..PARTITIONS {
                all.add_partition_offset(name, partition, Offset::Beginning)
                    .context("Kafka")?;
            }
        }
        consumer.assign(&all).context("Kafka")?;
        Ok(Self { consumer })
    }

    pub(super) async fn run(self, tell: UnboundedSender<News>) -> anyhow::Result<()> {
        let (answer, ended) = oneshot::channel();
        let wanted = Arc::new(AtomicBool::new(true));
        let _unwanted = Unwanted(wanted.clone());
        let consumer = self.consumer;
        // Its call blocks.
        thread::Builder::new()
            .name("kafka-demo".into())
            .spawn(move || {
                let read = read(&consumer, &wanted, &tell);
                // Whoever waited may have left.
                let _ = answer.send(read);
            })
            .context("cannot start a thread")?;
        ended.await.context("the consumer ended")?
    }
}

/// Ends the consumer when dropped.
struct Unwanted(Arc<AtomicBool>);

impl Drop for Unwanted {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

fn read(
    consumer: &BaseConsumer,
    wanted: &AtomicBool,
    tell: &UnboundedSender<News>,
) -> anyhow::Result<()> {
    while wanted.load(Ordering::Relaxed) {
        let Some(polled) = consumer.poll(LOOK) else {
            continue;
        };
        let at = Instant::now();
        let message = polled.context("the consumer lost Kafka")?;
        if tell.send(News::Arrived(arrival(&message, at)?)).is_err() {
            break;
        }
    }
    Ok(())
}

fn arrival(message: &BorrowedMessage<'_>, at: Instant) -> anyhow::Result<Arrival> {
    let header = |name: &str| {
        let mut headers = message.headers().into_iter().flat_map(|all| all.iter());
        let value = headers.find(|header| header.key == name)?.value?;
        Some(String::from_utf8_lossy(value).into_owned())
    };
    let needed =
        |name: &str| header(name).ok_or_else(|| anyhow!("a record came without the header {name}"));
    let id = needed("event_sequence")?;
    let body = message.payload().unwrap_or_default();
    Ok(Arrival {
        id: id
            .parse()
            .map_err(|_| anyhow!("a record came whose event_sequence `{id}` is no outbox id"))?,
        key: AggregateKey::new(&needed("aggregate_type")?, &needed("aggregate_id")?),
        rolled_back: String::from_utf8_lossy(body).contains(ROLLED_BACK),
        at,
    })
}
