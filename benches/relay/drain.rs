//! How fast a backlog leaves, over how fast this broker and this database do their parts of it alone.
//!
//! Where broker, database and relay share the same processors and keep them busy, a drain takes as long as both
//! parts one after the other, 1 / (1 / ceiling + 1 / null) events a second: the ceiling is the rate at which
//! the broker confirms (the stream acknowledges) the same messages from a bare client, null the rate at which the relay drains into
//! nowhere. It can be faster as far as the parts wait (for a disk) rather than compute.

use std::collections::HashMap;
use std::path::Path;

use crate::broker::ceiling;
use crate::kafka;
use crate::nats;
use crate::options::{Options, Sink};
use crate::process::{BINARY, Relay};
use crate::report::{Report, Target};
use crate::sql_loop;
use crate::world::World;

/// What a drain into a queue is set against has so much less to do: it is as fast all along, and the whole
/// has to end some time.
const FEWER_ROWS: u32 = 2;

/// What is measured once in each round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Ceiling(Sink),
    Drain(Sink),
    /// The relay of another build, into a classic queue.
    Other,
    /// Claims and marks without a relay.
    Sql,
}

pub(crate) async fn measure(options: &Options, report: &mut Report) {
    println!(
        "drain: {} rounds of {} events",
        options.rounds, options.rows
    );
    let steps = steps(options);
    let world = World::new("drain").await;
    let mut rounds = Vec::new();
    for round in 0..options.rounds {
        let mut order = steps.clone();
        // Each of two goes first in every other round.
        if round % 2 == 1 {
            order.reverse();
        }
        let mut rates = HashMap::new();
        for step in order {
            let rate = take(step, &world, options).await;
            println!("  {step:?}: {rate:.0} events/s");
            rates.insert(step, rate);
        }
        rounds.push(rates);
    }
    world.clean().await;
    add_figures(options, &rounds, report);
}

fn steps(options: &Options) -> Vec<Step> {
    let mut steps = Vec::new();
    for sink in &options.sink {
        match sink {
            Sink::Classic | Sink::Quorum | Sink::Jetstream | Sink::Kafka => {
                steps.extend([Step::Ceiling(*sink), Step::Drain(*sink)]);
            }
            Sink::Null => steps.extend([Step::Drain(*sink), Step::Sql]),
        }
        if *sink == Sink::Classic && options.against.is_some() {
            steps.push(Step::Other);
        }
    }
    steps
}

async fn take(step: Step, world: &World, options: &Options) -> f64 {
    let rows = options.rows;
    let fewer = rows / FEWER_ROWS;
    match step {
        Step::Ceiling(Sink::Jetstream) => nats::ceiling(world, fewer, options).await,
        Step::Ceiling(Sink::Kafka) => kafka::ceiling(&kafka::prefix(world), fewer, options).await,
        Step::Ceiling(sink) => {
            let queue = sink.queue().expect("a ceiling is that of a queue");
            ceiling(world, queue, fewer, options).await
        }
        Step::Drain(Sink::Null) => {
            drain(Path::new(BINARY), world, Sink::Null, fewer, options).await
        }
        Step::Drain(sink) => drain(Path::new(BINARY), world, sink, rows, options).await,
        Step::Other => {
            let binary = options.against.as_deref().expect("there is another build");
            drain(binary, world, Sink::Classic, rows, options).await
        }
        Step::Sql => sql_loop::drain(world, fewer, options).await,
    }
}

fn add_figures(options: &Options, rounds: &[HashMap<Step, f64>], report: &mut Report) {
    let unit = "events/s";
    let pairs = |measured: Step, reference: &dyn Fn(&HashMap<Step, f64>) -> f64| {
        let pair = |rates: &HashMap<Step, f64>| (rates[&measured], reference(rates));
        rounds.iter().map(pair).collect::<Vec<_>>()
    };
    let has = |sink| options.sink.contains(&sink);
    for (sink, of_limit, target) in [
        (Sink::Classic, 0.9, Target::AtLeast(0.75)),
        (Sink::Quorum, 0.9, Target::None),
        (Sink::Jetstream, 0.8, Target::None),
        (Sink::Kafka, 0.8, Target::None),
    ] {
        if !has(sink) {
            continue;
        }
        let (label, drained) = (sink.label(), Step::Drain(sink));
        let ceiling = |rates: &HashMap<Step, f64>| rates[&Step::Ceiling(sink)];
        let limit = |rates: &HashMap<_, _>| {
            1.0 / (1.0 / ceiling(rates) + 1.0 / rates[&Step::Drain(Sink::Null)])
        };
        if has(Sink::Null) {
            let name = format!("drain_vs_limit.{label}");
            report.ratio(
                name,
                unit,
                Target::AtLeast(of_limit),
                pairs(drained, &limit),
            );
        }
        let name = format!("drain_vs_ceiling.{label}");
        report.ratio(name, unit, target, pairs(drained, &ceiling));
    }
    if has(Sink::Null) {
        let turns = pairs(Step::Drain(Sink::Null), &|rates| rates[&Step::Sql]);
        report.ratio("null_vs_sql", unit, Target::AtLeast(0.8), turns);
    }
    if options.against.is_some() && has(Sink::Classic) {
        let turns = pairs(Step::Drain(Sink::Classic), &|rates| rates[&Step::Other]);
        report.ratio("drain_vs_other_build", unit, Target::None, turns);
    }
}

/// Events a second of relay processes that find this many waiting.
pub(crate) async fn drain(
    binary: &Path,
    world: &World,
    sink: Sink,
    rows: u32,
    options: &Options,
) -> f64 {
    if let Some(queue) = sink.queue() {
        world.fresh_queue(queue).await;
    }
    let stream = match sink {
        Sink::Jetstream => Some(nats::Stream::fresh(&world.name).await),
        _ => None,
    };
    let prefix = kafka::prefix(world);
    let topic = match sink {
        Sink::Kafka => Some(kafka::Topic::fresh(&prefix).await),
        _ => None,
    };
    world.load(rows, options.payload_bytes).await;
    let relays: Vec<Relay> = (0..options.replicas)
        .map(|_| {
            let relay = Relay::of_binary(binary, world, options, sink);
            match sink {
                Sink::Kafka => relay.set("BELLWIRE_KAFKA__PREFIX", &prefix).start(),
                _ => relay.start(),
            }
        })
        .collect();
    world.until_published().await;
    for relay in relays {
        relay.stop().await;
    }
    if sink.queue().is_some() {
        world.complete(rows, "the relay").await;
    }
    if let Some(stream) = stream {
        let kept = stream.remove().await;
        if kept != u64::from(rows) {
            println!("NOTE: the relay left {kept} messages of {rows} in the stream");
        }
    }
    if let Some(topic) = topic {
        let kept = topic.remove(rows).await;
        if kept != u64::from(rows) {
            println!("NOTE: the relay left {kept} records of {rows} in the topic");
        }
    }
    events_a_second(world, rows).await
}

/// From the first mark to the last by the database's clock.
pub(crate) async fn events_a_second(world: &World, rows: u32) -> f64 {
    let sql =
        "SELECT extract(epoch FROM max(published_at) - min(published_at))::float8 FROM outbox";
    f64::from(rows) / world.number(sql).await
}
