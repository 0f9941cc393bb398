//! What to measure, and how much of it.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use crate::broker::Queue;

/// Measures throughput, latency, what writers pay, and what claims, idling and large backlogs cost.
#[derive(Clone, Debug, Parser)]
pub(crate) struct Options {
    /// What to measure; all of it unless given
    #[arg(long, value_delimiter = ',')]
    parts: Vec<Part>,
    /// A smoke run: all parts at tiny sizes, one round each, in about a minute; the figures mean nothing
    #[arg(long)]
    pub(crate) quick: bool,
    /// Turns; each figure is the median of its ratios
    #[arg(long, default_value_t = 3, default_value_if("quick", "true", "1"),
          value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Events of a drain, ten of each aggregate
    #[arg(long, default_value_t = 100_000, default_value_if("quick", "true", "5000"),
          value_parser = clap::value_parser!(u32).range(100..))]
    pub(crate) rows: u32,
    /// Waiting rows of the largest outbox of claims and memory; the other large ones follow from it
    #[arg(long, default_value_t = 2_000_000, default_value_if("quick", "true", "40000"),
          value_parser = clap::value_parser!(u32).range(10_000..))]
    pub(crate) waiting: u32,
    /// Bytes of a body
    #[arg(long, default_value_t = 90)]
    pub(crate) payload_bytes: usize,
    /// `relay.partitions`
    #[arg(long, default_value_t = bellwire::config::DEFAULT_PARTITIONS)]
    pub(crate) partitions: usize,
    /// `relay.window`
    #[arg(long, default_value_t = bellwire::config::DEFAULT_WINDOW)]
    pub(crate) window: usize,
    /// `relay.batch_size`
    #[arg(long, default_value_t = bellwire::config::DEFAULT_BATCH_SIZE)]
    pub(crate) batch: usize,
    /// Relays that share a drain
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) replicas: u32,
    /// Where drains go; drain_vs_limit needs the null sink beside a broker's, and Kafka a broker
    #[arg(long, value_delimiter = ',', default_values = ["classic", "quorum", "jetstream", "null"])]
    pub(crate) sink: Vec<Sink>,
    /// Another build of the binary, to be drained by in turns with this one
    #[arg(long, value_name = "BINARY")]
    pub(crate) against: Option<PathBuf>,
    /// Cargo passes it to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

impl Options {
    /// In the order in which they are measured.
    pub(crate) fn parts(&self) -> &[Part] {
        if self.parts.is_empty() {
            Part::value_variants()
        } else {
            &self.parts
        }
    }

    /// The same with so many partitions.
    pub(crate) fn with_partitions(&self, partitions: usize) -> Self {
        Self {
            partitions,
            ..self.clone()
        }
    }

    /// A size that has no option of its own.
    pub(crate) fn sized<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Messages without a confirm, of a relay with these settings and of the bare clients beside it, at most.
    pub(crate) fn unconfirmed(&self) -> usize {
        self.partitions * self.window
    }

    /// What a relay with these settings has in hand, at most.
    pub(crate) fn most_in_hand(&self) -> usize {
        self.unconfirmed() * 2
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// Drain against the broker's, the database's and their common limit
    Drain,
    /// The same by the number of partitions
    Partitions,
    /// From commit to consumer
    Latency,
    /// What the trigger costs concurrent writers
    Writers,
    /// What a claim costs, whatever waits beside it
    Claim,
    /// What a relay does that has nothing to do
    Idle,
    /// The most memory a relay takes
    Memory,
    /// How long others wait beside a hot aggregate
    Hot,
    /// Webhooks through HTTP against the bare transaction
    Intake,
}

/// Where a drain goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum Sink {
    /// A durable classic queue
    Classic,
    /// A quorum queue
    Quorum,
    /// A stream of NATS JetStream, on file storage
    Jetstream,
    /// A topic of Kafka (KAFKA_BOOTSTRAP_SERVERS)
    Kafka,
    /// Nowhere: relay.sink = "null"
    Null,
}

impl Sink {
    /// The queue behind the exchange, if there is one.
    pub(crate) fn queue(self) -> Option<Queue> {
        match self {
            Self::Classic => Some(Queue::Classic),
            Self::Quorum => Some(Queue::Quorum),
            Self::Jetstream | Self::Kafka | Self::Null => None,
        }
    }

    /// As `relay.sink` has it.
    pub(crate) fn setting(self) -> &'static str {
        match self {
            Self::Classic | Self::Quorum => "rabbitmq",
            Self::Jetstream => "jetstream",
            Self::Kafka => "kafka",
            Self::Null => "null",
        }
    }

    /// In the names of figures.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Classic => "classic",
            Self::Quorum => "quorum",
            Self::Jetstream => "jetstream",
            Self::Kafka => "kafka",
            Self::Null => "null",
        }
    }
}
