//! How long others wait beside an aggregate with more events than can be delivered in time.

use std::time::Duration;

use crate::broker::Queue;
use crate::options::{Options, Sink};
use crate::process::Relay;
use crate::proxy::Proxy;
use crate::report::{Report, Target};
use crate::world::{Events, World, variable};

const HOT_ROWS: u32 = 50_000;
const QUICK_HOT_ROWS: u32 = 2_000;
/// One event of each.
const OTHERS: u32 = 500;
/// What the broker says comes later by this.
const DELAY: Duration = Duration::from_millis(20);

pub(crate) async fn measure(options: &Options, report: &mut Report) {
    let rows = options.sized(HOT_ROWS, QUICK_HOT_ROWS);
    println!(
        "hot: {} rounds of {OTHERS} others beside {rows} events of one aggregate, confirmed after {DELAY:?}",
        options.rounds
    );
    let world = World::new("hot").await;
    let proxy = Proxy::new(&variable("AMQP_URL"), DELAY).await;
    let mut turns = Vec::new();
    for _ in 0..options.rounds {
        turns.push(round(&world, &proxy, rows, options).await);
    }
    world.clean().await;
    report.absolute(
        "hot_aggregate_others_p99_ms",
        "ms from insert to mark",
        Target::AtMost(2_000.0),
        turns,
    );
}

/// 99th percentile of the others, in milliseconds by the database's clock.
async fn round(world: &World, proxy: &Proxy, rows: u32, options: &Options) -> f64 {
    world.fresh_queue(Queue::Classic).await;
    let hot = Events {
        aggregates: 1,
        named: "hot-",
        ..Events::plain(rows, options.payload_bytes)
    };
    world.refill(&[hot]).await;
    let relay = Relay::of(world, options, Sink::Classic)
        .set("AMQP_URL", proxy.url().as_str())
        .start();
    world
        .until("SELECT EXISTS (SELECT FROM outbox WHERE status = 'published')")
        .await;
    // By ordinary writers, who ring.
    world
        .sql(&format!(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
             SELECT 'other', n::text, 'Happened', '{{}}' FROM generate_series(1, {OTHERS}) n"
        ))
        .await;
    world
        .until(
            "SELECT NOT EXISTS (SELECT FROM outbox WHERE aggregate_type = 'other' AND status <> 'published')",
        )
        .await;
    relay.stop().await;
    let sql = "SELECT 1000 * percentile_cont(0.99) WITHIN GROUP (ORDER BY extract(epoch FROM published_at - created_at)::float8)
               FROM outbox WHERE aggregate_type = 'other'";
    world.number(sql).await
}
