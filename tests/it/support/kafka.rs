//! Topics of their own for each test: on the broker that KAFKA_BOOTSTRAP_SERVERS names, or else on
//! librdkafka's mock of a cluster within the test's own process.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::message::{Headers as _, Message as _};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::{Arrival, Relay, World};

/// The mock of a cluster, which can be told what to do wrong.
pub type Mock = MockCluster<'static, DefaultProducerContext>;

/// How long one look for records may block the test's thread.
const LOOK: Duration = Duration::from_millis(100);

/// A broker that nobody else uses, or topics of our own on one.
pub struct Cluster {
    pub servers: String,
    /// None: a real one.
    pub mock: Option<Mock>,
    /// Topics begin with it.
    pub prefix: String,
}

impl Cluster {
    /// The one that the environment names, or a mock.
    pub fn new() -> Self {
        match std::env::var("KAFKA_BOOTSTRAP_SERVERS") {
            Ok(servers) if !servers.is_empty() => Self::at(servers, None),
            _ => Self::mock(1),
        }
    }

    /// A mock of so many brokers, whatever the environment names.
    pub fn mock(brokers: i32) -> Self {
        let mock = MockCluster::new(brokers).unwrap();
        Self::at(mock.bootstrap_servers(), Some(mock))
    }

    fn at(servers: String, mock: Option<Mock>) -> Self {
        Self {
            servers,
            mock,
            prefix: format!("t-{:016x}", rand::random::<u64>()),
        }
    }

    /// The mock, where it is one for sure.
    pub fn faults(&self) -> &Mock {
        self.mock.as_ref().expect("made by Cluster::mock")
    }

    pub fn topic_of(&self, aggregate_type: &str) -> String {
        format!("{}.{aggregate_type}", self.prefix)
    }

    /// Makes the topic of this aggregate type.
    pub async fn create(&self, aggregate_type: &str, partitions: i32) -> Topic {
        let name = self.topic_of(aggregate_type);
        if let Some(mock) = &self.mock {
            mock.create_topic(&name, partitions, 1).unwrap();
        } else {
            let admin: AdminClient<DefaultClientContext> = self.client().create().unwrap();
            let topic = NewTopic::new(&name, partitions, TopicReplication::Fixed(1));
            let made = admin.create_topics([&topic], &AdminOptions::new()).await;
            for topic in made.unwrap() {
                topic.unwrap();
            }
        }
        self.topic(aggregate_type, partitions)
    }

    /// A reader of this aggregate type's topic, which is there or will be.
    pub fn topic(&self, aggregate_type: &str, partitions: i32) -> Topic {
        let name = self.topic_of(aggregate_type);
        let consumer: BaseConsumer = self
            .client()
            .set("group.id", &name)
            .set("enable.auto.commit", "false")
            .set("auto.offset.reset", "earliest")
            .set("fetch.wait.max.ms", "50")
            .create()
            .unwrap();
        let mut assigned = TopicPartitionList::new();
        for partition in 0..partitions {
            assigned
                .add_partition_offset(&name, partition, Offset::Beginning)
                .unwrap();
        }
        consumer.assign(&assigned).unwrap();
        Topic { name, consumer }
    }

    fn client(&self) -> ClientConfig {
        let mut client = ClientConfig::new();
        client
            .set("bootstrap.servers", &self.servers)
            .set("topic.metadata.refresh.interval.ms", "500")
            .set("allow.auto.create.topics", "false");
        client
    }

    /// What a relay needs to publish to it.
    pub fn settings(&self) -> Vec<(&'static str, &str)> {
        vec![
            ("relay.sink", "kafka"),
            ("KAFKA_BOOTSTRAP_SERVERS", &self.servers),
            ("kafka.prefix", &self.prefix),
            ("kafka.confirm_timeout", "3s"),
            ("relay.tick", "500ms"),
        ]
    }

    pub fn relay(&self, world: &World, settings: &[(&str, &str)]) -> Relay {
        world.relay(&[&self.settings()[..], settings].concat())
    }
}

/// One record as the topic has it.
#[derive(Clone, Debug)]
pub struct Record {
    pub topic: String,
    pub partition: i32,
    pub key: Option<Vec<u8>>,
    /// None: what a compacted topic takes for a deletion.
    pub value: Option<Vec<u8>>,
    pub headers: Vec<(String, Option<Vec<u8>>)>,
    pub timestamp_ms: Option<i64>,
}

impl Record {
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut found = self.headers.iter().filter(|(known, _)| known == name);
        let (_, value) = found.next()?;
        assert!(found.next().is_none(), "{name} is there twice");
        Some(std::str::from_utf8(value.as_ref()?).unwrap())
    }

    /// The outbox id.
    pub fn id(&self) -> i64 {
        self.header("event_sequence").unwrap().parse().unwrap()
    }

    /// For the ledger.
    pub fn arrival(&self) -> Arrival {
        let header = |name| self.header(name).unwrap().to_owned();
        Arrival {
            id: self.id(),
            aggregate: (header("aggregate_type"), header("aggregate_id")),
            body: self.value.clone().unwrap(),
            exchange: self.topic.clone(),
            routing_key: String::new(),
            properties: lapin::BasicProperties::default(),
            at: Instant::now(),
        }
    }
}

/// A topic, read from its beginning.
pub struct Topic {
    pub name: String,
    consumer: BaseConsumer,
}

impl Topic {
    /// The next record, if there is one soon.
    pub fn next(&mut self) -> Option<Record> {
        let polled = tokio::task::block_in_place(|| self.consumer.poll(LOOK))?;
        let message = match polled {
            Ok(message) => message,
            // It is not there yet, or its broker is not.
            Err(KafkaError::MessageConsumption(_)) => return None,
            Err(error) => panic!("{error}"),
        };
        let headers = message
            .headers()
            .into_iter()
            .flat_map(|headers| headers.iter());
        Some(Record {
            topic: message.topic().to_owned(),
            partition: message.partition(),
            key: message.key().map(<[u8]>::to_vec),
            value: message.payload().map(<[u8]>::to_vec),
            headers: headers
                .map(|header| (header.key.to_owned(), header.value.map(<[u8]>::to_vec)))
                .collect(),
            timestamp_ms: message.timestamp().to_millis(),
        })
    }

    /// How many records the broker says it has, repeats included.
    fn held(&self) -> i64 {
        let partitions = self.consumer.assignment().unwrap();
        let ends = partitions.elements().into_iter().map(|partition| {
            let ends = self
                .consumer
                .fetch_watermarks(&self.name, partition.partition(), LOOK * 50);
            ends.map_or(0, |(low, high)| high - low)
        });
        ends.sum()
    }

    /// Reads records until `count` different ids are there, and all that follow at once.
    pub async fn records(&mut self, count: usize, within: Duration) -> Vec<Record> {
        let began = Instant::now();
        let mut records: Vec<Record> = Vec::new();
        let mut ids = HashSet::new();
        loop {
            match self.next() {
                Some(record) => {
                    ids.insert(record.id());
                    records.push(record);
                }
                None if ids.len() >= count => return records,
                None => {
                    assert!(
                        began.elapsed() < within,
                        "{} of {count} arrived within {within:?}; there are {}",
                        ids.len(),
                        self.held()
                    );
                    tokio::task::yield_now().await;
                }
            }
        }
    }
}
