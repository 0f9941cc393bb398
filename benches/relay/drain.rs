//! How fast a backlog leaves, over how fast this broker confirms the same messages from a bare client.

use std::collections::VecDeque;
use std::path::Path;
use std::time::Instant;

use lapin::Confirmation;

use crate::Options;
use crate::report::{Figure, Report, Target};
use crate::world::{BINARY, Confirm, Relay, World, body};

/// Ten events of each in the usual drain.
const AGGREGATES: u32 = 5_000;
/// Where a classic queue's throughput stops growing.
const WINDOW: usize = 500;
const TARGET: Target = Target::AtLeast(0.5);

pub(crate) async fn measure(options: &Options, report: &mut Report) {
    println!(
        "drain: {} rounds of {} events",
        options.rounds, options.rows
    );
    let world = World::new("drain").await;
    let mut against_ceiling = Vec::new();
    let mut against_other = Vec::new();
    for round in 0..options.rounds {
        // Each goes first in every other round.
        let ceiling_first = round % 2 == 0;
        let before = if ceiling_first {
            Some(ceiling(&world, options).await)
        } else {
            None
        };
        let drained = drain(&world, Path::new(BINARY), options).await;
        if let Some(other) = &options.against {
            against_other.push((drained, drain(&world, other, options).await));
        }
        let ceiling = match before {
            Some(ceiling) => ceiling,
            None => ceiling(&world, options).await,
        };
        against_ceiling.push((drained, ceiling));
    }
    world.clean().await;
    report.add(Figure {
        name: "drain_vs_ceiling.classic".into(),
        unit: "events/s",
        target: TARGET,
        turns: against_ceiling,
    });
    if !against_other.is_empty() {
        report.add(Figure {
            name: "drain_vs_other_build".into(),
            unit: "events/s",
            target: Target::None,
            turns: against_other,
        });
    }
}

/// Events a second of a bare client on one connection, every confirm awaited.
async fn ceiling(world: &World, options: &Options) -> f64 {
    world.fresh_queue().await;
    let publisher = world.publisher().await;
    let body = body(options.payload_bytes);
    let mut window = VecDeque::with_capacity(WINDOW);
    let began = Instant::now();
    for id in 1..=options.rows {
        if window.len() == WINDOW {
            confirmed(window.pop_front()).await;
        }
        window.push_back(publisher.publish(id, AGGREGATES, body.as_bytes()).await);
    }
    while !window.is_empty() {
        confirmed(window.pop_front()).await;
    }
    let took = began.elapsed();
    publisher.close().await;
    complete(world, options, "the bare client").await;
    f64::from(options.rows) / took.as_secs_f64()
}

async fn confirmed(oldest: Option<Confirm>) {
    let confirm = oldest.expect("the window is not empty").await;
    let confirm = confirm.expect("the broker answers");
    assert!(
        matches!(confirm, Confirmation::Ack(None)),
        "the broker took no message: {confirm:?}"
    );
}

/// Events a second of a relay process, from its first mark to its last by the database's clock.
async fn drain(world: &World, binary: &Path, options: &Options) -> f64 {
    world.fresh_queue().await;
    world
        .load(options.rows, AGGREGATES, options.payload_bytes)
        .await;
    let relay = Relay::start(world, binary, options);
    world
        .until("SELECT NOT EXISTS (SELECT FROM outbox WHERE coalesce(status = 'pending', false))")
        .await;
    let sql =
        "SELECT extract(epoch FROM max(published_at) - min(published_at))::float8 FROM outbox";
    let seconds: f64 = world
        .db
        .query_one(sql, &[])
        .await
        .expect("the marks")
        .get(0);
    relay.stop().await;
    complete(world, options, "the relay").await;
    f64::from(options.rows) / seconds
}

/// A figure is worth nothing if messages were lost or sent twice for it.
async fn complete(world: &World, options: &Options, who: &str) {
    let queued = world.queued().await;
    if queued != options.rows {
        println!(
            "NOTE: {who} left {queued} messages of {} in the queue",
            options.rows
        );
    }
}
