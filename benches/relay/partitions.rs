//! A drain into a classic queue by the number of partitions, over the broker's ceiling.

use std::path::Path;

use crate::broker::{Queue, ceiling};
use crate::drain::drain;
use crate::options::{Options, Sink};
use crate::process::BINARY;
use crate::report::{Report, Target};
use crate::world::World;

const PARTITIONS: [usize; 5] = [1, 2, 4, 8, 16];
/// Of the rounds of other parts: here it is enough to see a trend.
const MOST_ROUNDS: u32 = 2;
/// A drain has so much less than elsewhere, for the same reason.
const FEWER_ROWS: u32 = 10;

pub(crate) async fn measure(options: &Options, report: &mut Report) {
    let rows = options.rows / FEWER_ROWS;
    let rounds = options.rounds.min(MOST_ROUNDS);
    println!("partitions: {rounds} rounds of {rows} events for each of {PARTITIONS:?}");
    let world = World::new("partitions").await;
    let mut turns = vec![Vec::new(); PARTITIONS.len()];
    for _ in 0..rounds {
        let ceiling = ceiling(&world, Queue::Classic, rows, options).await;
        for (partitions, turns) in PARTITIONS.into_iter().zip(&mut turns) {
            let options = options.with_partitions(partitions);
            let drained = drain(Path::new(BINARY), &world, Sink::Classic, rows, &options).await;
            turns.push((drained, ceiling));
        }
    }
    world.clean().await;
    for (partitions, turns) in PARTITIONS.into_iter().zip(turns) {
        let name = format!("drain_vs_ceiling.classic.partitions_{partitions}");
        report.ratio(name, "events/s", Target::None, turns);
    }
}
