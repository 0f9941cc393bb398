//! The most memory that a relay takes: with a large backlog before it, and with large payloads in hand.

use crate::broker::Queue;
use crate::options::{Options, Sink};
use crate::process::Relay;
use crate::report::{Report, Target};
use crate::world::{Events, World};

/// Of the large backlog; what comes after them is the same again.
const DRAINED: u32 = 50_000;
const QUICK_DRAINED: u32 = 2_000;
const LARGE_ROWS: u32 = 50;
const LARGE_BYTES: usize = 20_000_000;
const QUICK_LARGE_BYTES: usize = 1_000_000;

pub(crate) async fn measure(options: &Options, report: &mut Report) {
    let world = World::new("memory").await;
    println!("memory: a backlog of {} events", options.waiting);
    world.load(options.waiting, options.payload_bytes).await;
    world.sql("ANALYZE outbox").await;
    let drained = options.sized(DRAINED, QUICK_DRAINED);
    let sql = format!(
        "SELECT count(*) >= {drained} FROM (SELECT FROM outbox WHERE status = 'published' LIMIT {drained}) p"
    );
    let peak = peak_memory_until(&world, options, &sql).await;
    report.absolute("rss_mb", "MB", Target::AtMost(64.0), vec![peak]);

    let bytes = options.sized(LARGE_BYTES, QUICK_LARGE_BYTES);
    println!("memory: {LARGE_ROWS} events of {bytes} bytes");
    let large = Events {
        aggregates: LARGE_ROWS,
        ..Events::plain(LARGE_ROWS, bytes)
    };
    world.refill(&[large]).await;
    let sql = "SELECT NOT EXISTS (SELECT FROM outbox WHERE status <> 'published')";
    let peak = peak_memory_until(&world, options, sql).await;
    report.absolute(
        "large_payload_rss_mb",
        "MB",
        Target::AtMost(256.0),
        vec![peak],
    );
    world.clean().await;
}

/// Of a relay that drains into a classic queue, from its start until this boolean query is true.
async fn peak_memory_until(world: &World, options: &Options, sql: &str) -> f64 {
    world.fresh_queue(Queue::Classic).await;
    let relay = Relay::of(world, options, Sink::Classic).start();
    world.until(sql).await;
    let peak = relay.peak_memory_mb();
    relay.stop().await;
    peak
}
