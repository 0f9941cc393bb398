//! What the trigger costs concurrent writers: their commits a second with it, over those without.
//!
//! The same relay drains in all arms, and looks by itself as often: without the trigger nothing rings.

use crate::broker::Queue;
use crate::options::{Options, Sink};
use crate::process::Relay;
use crate::report::{Report, Target};
use crate::world::World;

use load::Load;

pub(crate) mod load;

const WRITERS: [u32; 2] = [16, 64];
/// Of the relay: the shortest that it takes.
const TICK: &str = "100ms";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arm {
    /// As `bellwire migrate` leaves it.
    Trigger,
    NoTrigger,
    /// What the trigger would cost if it rang each time.
    PlainNotify,
}

pub(crate) async fn measure(options: &Options, report: &mut Report) {
    let world = World::new("writers").await;
    let load = Load::new(&world, options);
    println!(
        "writers: {} rounds of {WRITERS:?} writers by {}",
        options.rounds,
        load.driver()
    );
    report.fact("writers_by", load.driver());
    create_plain_trigger(&world).await;
    for writers in WRITERS {
        let mut turns = Vec::new();
        for round in 0..options.rounds {
            turns.push(in_turns(round, writers, &world, &load, options).await);
        }
        let pairs = |arm: usize| turns.iter().map(|turn| (turn[arm], turn[1])).collect();
        for (figure, target, arm) in [
            ("writers_vs_no_trigger", Target::AtLeast(0.85), 0),
            ("plain_notify_vs_no_trigger", Target::None, 2),
        ] {
            let name = format!("{figure}.{writers}");
            report.ratio(name, "commits/s", target, pairs(arm));
        }
    }
    world.clean().await;
}

/// Commits a second with the trigger, without it, and with a plain one.
async fn in_turns(
    round: u32,
    writers: u32,
    world: &World,
    load: &Load,
    options: &Options,
) -> [f64; 3] {
    let mut order = [
        (0, Arm::Trigger),
        (1, Arm::NoTrigger),
        (2, Arm::PlainNotify),
    ];
    if round % 2 == 1 {
        order.reverse();
    }
    let mut rates = [0.0; 3];
    for (place, arm) in order {
        rates[place] = commits_a_second(arm, writers, world, load, options).await;
        println!(
            "  {writers} writers, {arm:?}: {:.0} commits/s",
            rates[place]
        );
    }
    rates
}

async fn commits_a_second(
    arm: Arm,
    writers: u32,
    world: &World,
    load: &Load,
    options: &Options,
) -> f64 {
    // Each arm begins with an empty table and an empty queue.
    world.sql("TRUNCATE outbox").await;
    world.fresh_queue(Queue::Classic).await;
    let relay = Relay::of(world, options, Sink::Classic)
        .set("BELLWIRE_RELAY__TICK", TICK)
        .start();
    relay.until_ready(world).await;
    let state = |on: bool| if on { "ENABLE" } else { "DISABLE" };
    world
        .sql(&format!(
            "ALTER TABLE outbox {} TRIGGER outbox_ring_insert, {} TRIGGER plain_notify",
            state(arm == Arm::Trigger),
            state(arm == Arm::PlainNotify)
        ))
        .await;
    let rate = load.commits_a_second(writers).await;
    relay.stop().await;
    // A relay that starts would complain of it.
    world
        .sql("ALTER TABLE outbox ENABLE TRIGGER outbox_ring_insert")
        .await;
    rate
}

/// One that always rings.
async fn create_plain_trigger(world: &World) {
    let channel = world.store.names().channel();
    world
        .sql(&format!(
            "CREATE FUNCTION plain_notify() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN PERFORM pg_notify('{channel}', ''); RETURN NULL; END $$;
             CREATE TRIGGER plain_notify AFTER INSERT ON outbox
             FOR EACH STATEMENT EXECUTE FUNCTION plain_notify();
             ALTER TABLE outbox DISABLE TRIGGER plain_notify"
        ))
        .await;
}
