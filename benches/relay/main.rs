//! What the relay costs, as ratios of two things measured in turns in the same run.
//!
//! Absolute figures say more about the machine than about the relay; each figure here is set against
//! something the same servers did a moment before or after. Nothing is asserted: the table shows the
//! targets beside the figures, and `target/bench/report.json` holds everything for a comparison.
//!
//! Run it by `make bench`, which starts the private servers; `BENCH_ARGS=--help` shows the options.

mod claim;
mod drain;
mod latency;
mod report;
mod world;

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use report::Report;

/// Measures throughput, latency and the cost of claims.
#[derive(Clone, Debug, Parser)]
pub(crate) struct Options {
    /// What to measure
    #[arg(long, value_delimiter = ',', default_values = ["drain", "latency", "claim"])]
    parts: Vec<Part>,
    /// Turns; each figure is the median of its ratios
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Events of a drain
    #[arg(long, default_value_t = 50_000)]
    rows: u32,
    /// Waiting rows of the larger outbox of the claims
    #[arg(long, default_value_t = 1_000_000)]
    waiting: u32,
    /// Bytes of a body
    #[arg(long, default_value_t = 90)]
    payload_bytes: usize,
    /// `relay.partitions`
    #[arg(long, default_value_t = bellwire::config::DEFAULT_PARTITIONS)]
    partitions: usize,
    /// `relay.window`
    #[arg(long, default_value_t = bellwire::config::DEFAULT_WINDOW)]
    window: usize,
    /// `relay.batch_size`
    #[arg(long, default_value_t = bellwire::config::DEFAULT_BATCH_SIZE)]
    batch: usize,
    /// Another build of the binary, to be drained by in turns with this one
    #[arg(long, value_name = "BINARY")]
    against: Option<PathBuf>,
    /// Cargo passes it to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    Drain,
    Latency,
    Claim,
}

#[tokio::main]
async fn main() {
    let options = Options::parse();
    let mut report = Report::new(&options);
    for part in &options.parts {
        match part {
            Part::Drain => drain::measure(&options, &mut report).await,
            Part::Latency => latency::measure(&options, &mut report).await,
            Part::Claim => claim::measure(&options, &mut report).await,
        }
    }
    report.print();
    let path = report.write();
    println!("\nwritten to {}", path.display());
}
