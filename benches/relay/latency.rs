//! How soon an event is with a consumer after its commit, over the least that its steps take alone.
//!
//! The floor is the sum of three round trips, each measured alone at the same rate, and each at the
//! same percentile: NOTIFY, the claim of one row, publish to consumer.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use bellwire::relay::rounds::Rounds;
use bellwire::store::{Session, Store};
use futures_util::StreamExt as _;
use lapin::Consumer;
use lapin::options::BasicConsumeOptions;
use lapin::types::FieldTable;
use tokio::sync::mpsc;
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Statement};

use crate::broker::RawPublisher;
use crate::claim::{LEASE, owning_session};
use crate::options::{Options, Sink};
use crate::process::Relay;
use crate::report::{Report, Target, quantile};
use crate::world::{AGGREGATE_TYPE, EVENT_TYPE, World, body};

/// 200 events a second.
const PACE: Duration = Duration::from_millis(5);
/// Ten seconds of them.
const EVENTS: u32 = 2_000;
const QUICK_EVENTS: u32 = 100;
/// Of each step of the floor.
const SAMPLES: u32 = 400;
const QUICK_SAMPLES: u32 = 50;
/// Not measured: caches and plans get warm.
const WARM_UP: u32 = 50;
const AGGREGATES: u32 = 1_000;
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) async fn measure(options: &Options, report: &mut Report) {
    println!(
        "latency: {} rounds of {} events at 200 a second",
        options.rounds,
        options.sized(EVENTS, QUICK_EVENTS)
    );
    let world = World::new("latency").await;
    let writer = Writer::new(&world, options).await;
    let mut consumer = consume(&world).await;
    let mut turns: HashMap<&str, Vec<(f64, f64)>> = HashMap::new();
    for round in 0..options.rounds {
        // Each goes first in every other round.
        let relay_first = round % 2 == 1;
        let mut relayed = Vec::new();
        if relay_first {
            relayed = relay(&world, &writer, &mut consumer, options).await;
        }
        let floor = [
            notify(&world, &writer, options).await,
            claim(&world, &writer, options).await,
            publish(&world, &mut consumer, options).await,
        ];
        if !relay_first {
            relayed = relay(&world, &writer, &mut consumer, options).await;
        }
        show(&relayed, &floor);
        for (name, part) in [("p50", 0.5), ("p99", 0.99)] {
            let floor = floor.iter().map(|step| quantile(step, part)).sum();
            turns
                .entry(name)
                .or_default()
                .push((quantile(&relayed, part), floor));
        }
    }
    drop(consumer);
    world.clean().await;
    for (name, target) in [("p50", 1.5), ("p99", 3.0)] {
        report.ratio(
            format!("latency_{name}_vs_floor"),
            "ms",
            Target::AtMost(target),
            turns.remove(name).unwrap_or_default(),
        );
    }
}

fn show(relayed: &[f64], [notify, claim, publish]: &[Vec<f64>; 3]) {
    let both =
        |values: &[f64]| format!("{:.2}/{:.2}", quantile(values, 0.5), quantile(values, 0.99));
    println!(
        "  p50/p99 ms: commit to consumer {}; alone: notify {}, claim {}, publish to consumer {}",
        both(relayed),
        both(notify),
        both(claim),
        both(publish)
    );
}

fn pace() -> Interval {
    let mut pace = interval(PACE);
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    pace
}

/// Milliseconds from one moment to another; none before it.
fn ms(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64() * 1_000.0
}

/// An application that commits one event at a time.
struct Writer {
    db: Client,
    insert: Statement,
    body: String,
}

impl Writer {
    async fn new(world: &World, options: &Options) -> Self {
        let db = world.client().await;
        let insert = db
            .prepare(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
                 VALUES ($1, $2, $3, $4::text::jsonb) RETURNING id",
            )
            .await
            .expect("the insert");
        Self {
            db,
            insert,
            body: body(options.payload_bytes),
        }
    }

    /// Answers the event's id and when its commit was known.
    async fn write(&self, number: u32) -> (i64, Instant) {
        let aggregate = format!("aggregate-{}", number % AGGREGATES);
        let parameters: [&(dyn ToSql + Sync); 4] =
            [&AGGREGATE_TYPE, &aggregate, &EVENT_TYPE, &self.body];
        let inserted = self.db.query_one(&self.insert, &parameters).await;
        let committed = Instant::now();
        (inserted.expect("the insert").get(0), committed)
    }
}

async fn consume(world: &World) -> Consumer {
    let no_ack = BasicConsumeOptions {
        no_ack: true,
        ..Default::default()
    };
    let name = world.name.as_str().into();
    let consumer = world
        .channel
        .basic_consume(name, "".into(), no_ack, FieldTable::default());
    consumer.await.expect("a consumer")
}

/// The message id of the next message, and when it came.
async fn arrival(consumer: &mut Consumer) -> (i64, Instant) {
    let next = timeout(PATIENCE, consumer.next())
        .await
        .expect("a message comes in time");
    let at = Instant::now();
    let delivery = next
        .expect("the consumer lives")
        .expect("the channel lives");
    let id = delivery
        .properties
        .message_id()
        .as_ref()
        .and_then(|id| id.as_str().parse().ok());
    (id.expect("the message id is the event's"), at)
}

/// From commit to consumer through a running relay.
async fn relay(
    world: &World,
    writer: &Writer,
    consumer: &mut Consumer,
    options: &Options,
) -> Vec<f64> {
    world.sql("TRUNCATE outbox").await;
    let relay = Relay::of(world, options, Sink::Classic).start();
    relay.until_ready(world).await;
    let all = WARM_UP + options.sized(EVENTS, QUICK_EVENTS);
    let writing = async {
        let mut pace = pace();
        let mut committed = HashMap::new();
        for number in 0..all {
            pace.tick().await;
            let (id, at) = writer.write(number).await;
            committed.insert(id, (number, at));
        }
        committed
    };
    let reading = async {
        let mut arrived = HashMap::new();
        while arrived.len() < all as usize {
            let (id, at) = arrival(consumer).await;
            arrived.entry(id).or_insert(at);
        }
        arrived
    };
    let (committed, arrived) = futures_util::join!(writing, reading);
    relay.stop().await;
    committed
        .iter()
        .filter(|(_, (number, _))| *number >= WARM_UP)
        .filter_map(|(id, (_, at))| Some(ms(*at, *arrived.get(id)?)))
        .collect()
}

fn samples(options: &Options) -> u32 {
    options.sized(SAMPLES, QUICK_SAMPLES)
}

/// From commit to the notification on another connection.
async fn notify(world: &World, writer: &Writer, options: &Options) -> Vec<f64> {
    world.until_rung_for().await;
    let (listener, mut heard) = world
        .store
        .connector()
        .open(drop)
        .await
        .expect("a listening connection");
    let listen = format!("LISTEN \"{}\"", world.store.names().channel());
    listener.batch_execute(&listen).await.expect("LISTEN");
    let (tell, mut times) = mpsc::unbounded_channel();
    let listening = tokio::spawn(async move {
        while heard.recv().await.is_some() {
            let _ = tell.send(Instant::now());
        }
    });
    let mut pace = pace();
    let mut took = Vec::new();
    for number in 0..WARM_UP + samples(options) {
        pace.tick().await;
        let (_, committed) = writer.write(number).await;
        let heard = timeout(PATIENCE, times.recv())
            .await
            .expect("a notification comes in time");
        if number >= WARM_UP {
            took.push(ms(committed, heard.expect("the listener lives")));
        }
    }
    listening.abort();
    took
}

/// The claim of one row where nothing else is.
async fn claim(world: &World, writer: &Writer, options: &Options) -> Vec<f64> {
    world.sql("TRUNCATE outbox").await;
    let (session, owned) = owning_session(&world.store).await;
    let mut rounds = Rounds::new(options.partitions, options.batch, options.most_in_hand());
    rounds.set_owned(&owned);
    let mut pace = pace();
    let mut took = Vec::new();
    let renewed_every = LEASE / 4;
    let mut renewed = Instant::now();
    for number in 0..WARM_UP + samples(options) {
        pace.tick().await;
        if renewed.elapsed() > renewed_every {
            renewed = Instant::now();
            session.tend(false).await.expect("the lease is renewed");
        }
        writer.write(number).await;
        let sample = claim_one(&world.store, &session, &mut rounds).await;
        if number >= WARM_UP {
            took.push(sample);
        }
    }
    session.leave().await.expect("the session ends");
    took
}

async fn claim_one(store: &Store, session: &Session, rounds: &mut Rounds) -> f64 {
    rounds.wake();
    let request = rounds.next_claim().expect("a round is due");
    let began = Instant::now();
    let answer = session.claim(&request).await.expect("the claim");
    let took = ms(began, Instant::now());
    rounds.claimed(&request, &answer);
    let ids: Vec<i64> = answer.rows.iter().map(|row| row.id.0).collect();
    let marked = store.mark_published(&ids, session.token().name()).await;
    assert_eq!(
        marked.expect("the mark").len(),
        1,
        "one row was claimed and marked"
    );
    let buckets: Vec<u8> = answer.rows.iter().map(|row| row.bucket).collect();
    rounds.returned(&buckets);
    took
}

/// From a bare client to a consumer.
async fn publish(world: &World, consumer: &mut Consumer, options: &Options) -> Vec<f64> {
    let publisher = RawPublisher::new(world).await;
    let body = body(options.payload_bytes);
    let mut pace = pace();
    let mut took = Vec::new();
    for number in 0..WARM_UP + samples(options) {
        pace.tick().await;
        let began = Instant::now();
        let confirm = publisher.publish(number, AGGREGATES, body.as_bytes()).await;
        let (_, arrived) = arrival(consumer).await;
        confirm.await.expect("the broker confirms");
        if number >= WARM_UP {
            took.push(ms(began, arrived));
        }
    }
    publisher.close().await;
    took
}
