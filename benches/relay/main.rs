//! What the relay costs, as ratios of two things measured in turns in the same run.
//!
//! Absolute figures say more about the machine than about the relay; each figure here is set against
//! something the same servers did a moment before or after, but for those that are absolute by their
//! nature: what an idle relay does, and the memory it takes. Nothing is asserted: the table shows the
//! targets beside the figures, and `target/bench/report.json` holds everything for a comparison.
//!
//! Run it by `make bench`, which starts the private servers; `BENCH_ARGS=--help` shows the options.

mod broker;
mod claim;
mod drain;
mod hot;
mod idle;
mod intake;
mod kafka;
mod latency;
mod memory;
mod nats;
mod options;
mod partitions;
mod process;
mod proxy;
mod report;
mod sql_loop;
mod world;
mod writers;

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser as _;
use futures_util::FutureExt as _;

use options::{Options, Part};
use report::Report;

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    let mut report = Report::new(&options);
    let began = Instant::now();
    let mut failed = Vec::new();
    for part in options.parts() {
        let part_began = Instant::now();
        // What the other parts found is still worth its time.
        let measured = AssertUnwindSafe(measure(*part, &options, &mut report)).catch_unwind();
        if measured.await.is_err() {
            println!("FAILED: {part:?}, for the reason above");
            failed.push(format!("{part:?}"));
        }
        println!("  ({:.0} s)", part_began.elapsed().as_secs_f64());
    }
    report.fact("seconds", began.elapsed().as_secs());
    report.fact("failed_parts", failed.clone());
    report.print();
    let path = report.write();
    println!("\nwritten to {}", path.display());
    if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn measure<'a>(
    part: Part,
    options: &'a Options,
    report: &'a mut Report,
) -> Pin<Box<dyn Future<Output = ()> + 'a>> {
    match part {
        Part::Drain => Box::pin(drain::measure(options, report)),
        Part::Partitions => Box::pin(partitions::measure(options, report)),
        Part::Latency => Box::pin(latency::measure(options, report)),
        Part::Writers => Box::pin(writers::measure(options, report)),
        Part::Claim => Box::pin(claim::measure(options, report)),
        Part::Idle => Box::pin(idle::measure(options, report)),
        Part::Memory => Box::pin(memory::measure(options, report)),
        Part::Hot => Box::pin(hot::measure(options, report)),
        Part::Intake => Box::pin(intake::measure(options, report)),
    }
}
