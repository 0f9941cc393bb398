//! Hours of bad luck in minutes: relays, servers and network fail by a seeded schedule while applications write and
//! operators intervene; then it is judged what of the guarantees held.
//!
//! Run it by `make chaos` (`CHAOS_ARGS="--minutes 15 --seed 1 --relays 3"`). One JSON object is printed on standard output,
//! the faults as they happen on standard error, and what the relays said is kept in `target/chaos/`. Exit code 1: a
//! guarantee was broken.
//!
//! Without `run` as the first argument nothing happens, so that test runners find no test in it.
//!
//! - The [`schedule`] is a function of the seed; what the processes make of it is not.
//! - Writers, operators and the consumer reach the servers past the proxies: what is cut is the relays' alone.
//! - Nothing is decided while it runs: the [`judge`] sees all arrivals, all faults and the final table.

#![allow(
    clippy::unwrap_used,
    missing_docs,
    unreachable_pub,
    dead_code,
    unused_imports,
    reason = "a test, which uses a part of the support that all tests share"
)]

mod book;
mod clock;
mod judge;
mod operate;
mod read;
mod relays;
mod schedule;
mod stage;
mod write;
#[path = "../it/support/mod.rs"]
mod support;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use clap::Parser;
use futures_util::future::join_all;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

use book::{Book, Takeover};
use judge::{Row, Seen, Verdict, judge, percentile};
use operate::Operator;
use relays::Place;
use schedule::Schedule;
use stage::{BINDINGS, ENDLESS, Servers, Stage, connect};
use support::World;
use write::Writer;

const WRITERS: u32 = 4;
/// Nothing moves for so long once faults and writers have stopped: what is left is stranded. Longer than the
/// longest backoff that a rejected event can have by then.
const PATIENCE: Duration = Duration::from_secs(90);
/// Nothing arrives for so long: no repeat is on its way.
const QUIET: Duration = Duration::from_secs(3);
/// A timer that is later than this says that the machine was stalled, and with it the relays.
const STALL: Duration = Duration::from_millis(1_500);
const BEAT: Duration = Duration::from_millis(100);

/// Let relays, servers and network fail, and judge what arrives.
#[derive(Parser)]
struct Arguments {
    /// Of faults; the draining at the end comes on top
    #[arg(long, default_value_t = 15.0)]
    minutes: f64,
    /// Of the schedule; random unless given
    #[arg(long)]
    seed: Option<u64>,
    /// Processes
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=16))]
    relays: u8,
    /// Kill one relay after the other while all else is well: how long takeovers take
    #[arg(long)]
    only_kills: bool,
}

fn main() -> ExitCode {
    let mut arguments: Vec<_> = std::env::args().collect();
    if arguments.get(1).is_none_or(|first| first != "run") {
        return ExitCode::SUCCESS;
    }
    arguments.remove(1);
    let arguments = Arguments::parse_from(arguments);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let sound = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).unwrap();
        // However it ends, what is dropped ends the relays and sets the servers back to normal.
        tokio::select! {
            sound = perform(arguments) => sound,
            _ = tokio::signal::ctrl_c() => false,
            _ = terminate.recv() => false,
        }
    });
    if sound {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Everything that goes on beside the faults.
struct Scene {
    world: World,
    stage: Arc<Stage>,
    seen: Arc<Mutex<Vec<Seen>>>,
    told: Arc<Mutex<HashSet<i64>>>,
    stop: Arc<AtomicBool>,
    settling: Arc<AtomicBool>,
    writers: JoinSet<()>,
    // Ends them when dropped.
    others: JoinSet<()>,
}

async fn perform(arguments: Arguments) -> bool {
    let Some(servers) = Servers::ours() else {
        return false;
    };
    let seed = arguments
        .seed
        .unwrap_or_else(|| rand::random::<u32>().into());
    let strict = !seed.is_multiple_of(2);
    let ordering = if strict { "strict" } else { "visible" };
    eprintln!("chaos: seed {seed}, ordering {ordering}");
    let relays = usize::from(arguments.relays);
    let mut scene = set_up(servers, relays, ordering).await;
    scene.write(strict);
    let length = Duration::from_secs_f64(arguments.minutes * 60.0);
    let schedule = if arguments.only_kills {
        Schedule::of_kills(seed, relays)
    } else {
        Schedule::new(seed, relays)
    };
    let (rounds, faults) = scene.play(schedule, length).await;
    scene.drain().await;
    let table = scene.table().await;
    let seen = std::mem::take(&mut *scene.seen.lock().unwrap());
    let told = std::mem::take(&mut *scene.told.lock().unwrap());
    let windows = scene.stage.book.windows.lock().unwrap().clone();
    let verdict = judge(&seen, &windows, &table, &told);
    let stalls = windows
        .iter()
        .filter(|window| window.what == "Stall")
        .count();
    let book = &scene.stage.book;
    let mut report = report(&verdict, book);
    report["seed"] = seed.into();
    report["ordering"] = ordering.into();
    report["minutes"] = arguments.minutes.into();
    report["rounds"] = rounds.into();
    report["faults"] = json!(faults);
    report["committed"] = table.len().into();
    report["stalls"] = stalls.into();
    println!("{report}");
    let sound = verdict.is_clean() && book.failures.lock().unwrap().is_empty();
    if !sound {
        eprintln!("chaos: {verdict:#?}\n{:#?}\n{windows:#?}", book.failures);
        eprintln!("{}", scene.world.table_state().await);
    }
    for place in &scene.stage.places {
        place.lock().await.keep_log();
    }
    scene.end(sound).await;
    sound
}

fn report(verdict: &Verdict, book: &Book) -> serde_json::Value {
    let takeovers = book.takeovers.lock().unwrap();
    let times = |disturbed| -> Vec<Duration> {
        let of = |takeover: &&Takeover| takeover.disturbed == disturbed;
        takeovers.iter().filter(of).map(|one| one.took).collect()
    };
    let (alone, disturbed) = (times(false), times(true));
    let ms = |values: &[Duration], percent| {
        percentile(values, percent).map(|time| u64::try_from(time.as_millis()).unwrap())
    };
    json!({
        "lost": verdict.lost.len(),
        "order_violations": verdict.order.len(),
        "foreign_repeats": verdict.foreign.len(),
        "stranded_at_end": verdict.stranded.len(),
        "altered": verdict.altered.len(),
        "never_committed": verdict.never_committed.len(),
        "relay_failures": book.failures.lock().unwrap().len(),
        "repeats": verdict.repeats,
        "redelivered_by_broker": verdict.redelivered,
        "takeovers": alone.len(),
        "p50_takeover_ms": ms(&alone, 50),
        "max_takeover_ms": ms(&alone, 100),
        "p99_takeover_ms": ms(&alone, 99),
        "disturbed_takeovers": disturbed.len(),
        "max_disturbed_takeover_ms": ms(&disturbed, 100),
    })
}

/// Relays that own buckets, and a consumer.
async fn set_up(servers: Servers, relays: usize, ordering: &str) -> Scene {
    let logs = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("../chaos");
    let _ = std::fs::remove_dir_all(&logs);
    std::fs::create_dir_all(&logs).unwrap();
    let world = World::new().await;
    for pattern in BINDINGS {
        world.bind(pattern).await;
    }
    world.unbind("#").await;
    let mut places = Vec::new();
    for number in 0..relays {
        places.push(Place::new(&world, number, ordering, &logs).await);
    }
    for place in &places {
        world.until_owned(&place.relay).await;
        place.clock.check(&place.relay.log());
    }
    let stage = Arc::new(Stage {
        schema: world.schema.clone(),
        name: world.queue.clone(),
        servers,
        places: places.into_iter().map(tokio::sync::Mutex::new).collect(),
        book: Book::default(),
    });
    stage.hold_at_most(ENDLESS).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let settling = Arc::new(AtomicBool::new(false));
    let mut others = JoinSet::new();
    others.spawn(read::read(world.queue.clone(), seen.clone()));
    let operator = Operator {
        stage: stage.clone(),
        environment: world.environment(),
        settling: settling.clone(),
    };
    others.spawn(operator.run());
    others.spawn(watch(stage.clone()));
    others.spawn(notice_stalls(stage.clone()));
    Scene {
        world,
        stage,
        seen,
        told: Arc::default(),
        stop: Arc::default(),
        settling,
        writers: JoinSet::new(),
        others,
    }
}

async fn watch(stage: Arc<Stage>) {
    loop {
        stage.tend().await;
    }
}

async fn notice_stalls(stage: Arc<Stage>) {
    loop {
        let slept = Instant::now();
        tokio::time::sleep(BEAT).await;
        if slept.elapsed() > STALL {
            stage.book.stall(slept);
        }
    }
}

impl Scene {
    fn write(&mut self, shared: bool) {
        for number in 0..WRITERS {
            let writer = Writer {
                schema: self.world.schema.clone(),
                number,
                shared,
                stop: self.stop.clone(),
                told: self.told.clone(),
            };
            self.writers.spawn(writer.run());
        }
    }

    /// Answers how many rounds, and how many faults of each kind.
    async fn play(&self, schedule: Schedule, length: Duration) -> (usize, BTreeMap<String, usize>) {
        let began = Instant::now();
        let mut rounds = 0;
        let mut faults = BTreeMap::new();
        for round in schedule {
            if began.elapsed() >= length {
                break;
            }
            rounds += 1;
            let at = began.elapsed().as_secs();
            let (told, arrived) = (
                self.told.lock().unwrap().len(),
                self.seen.lock().unwrap().len(),
            );
            eprintln!("chaos: {at} s, {told} told, {arrived} arrived; round {rounds}: {round:?}");
            for fault in &round.faults {
                *faults.entry(format!("{:?}", fault.kind)).or_insert(0) += 1;
            }
            let inflicted = round
                .faults
                .into_iter()
                .map(|fault| tokio::spawn(self.stage.clone().inflict(fault)));
            for done in join_all(inflicted).await {
                done.unwrap();
            }
            tokio::time::sleep(round.calm).await;
        }
        (rounds, faults)
    }

    /// Until nothing is pending, dead or on its way, or nothing moves any more.
    async fn drain(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.settling.store(true, Ordering::Relaxed);
        while let Some(writer) = self.writers.join_next().await {
            writer.unwrap();
        }
        let client = connect(&self.stage.schema).await.unwrap();
        // A dead one that is replayed only to die again is no progress.
        let sql = "SELECT count(*) FROM outbox WHERE status IN ('pending', 'dead')";
        let mut last = (i64::MAX, 0);
        let mut moved = Instant::now();
        loop {
            let row = client.query_one(sql, &[]).await.unwrap();
            let now = (row.get(0), self.seen.lock().unwrap().len());
            if now != last {
                (last, moved) = (now, Instant::now());
            }
            let done = now.0 == 0;
            if moved.elapsed() > if done { QUIET } else { PATIENCE } {
                return;
            }
            tokio::time::sleep(BEAT).await;
        }
    }

    async fn table(&self) -> HashMap<i64, Row> {
        let client = connect(&self.stage.schema).await.unwrap();
        let sql = "SELECT id, status, payload::text FROM outbox";
        let rows = client.query(sql, &[]).await.unwrap();
        let row = |row: &tokio_postgres::Row| {
            let (status, payload) = (row.get(1), row.get(2));
            (row.get(0), Row { status, payload })
        };
        rows.iter().map(row).collect()
    }

    /// What a broken guarantee left in the servers helps to find out why.
    async fn end(mut self, clean: bool) {
        self.others.shutdown().await;
        if clean {
            for place in &self.stage.places {
                place.lock().await.relay.kill().await;
            }
            self.world.reconnect().await;
            self.world.clean().await;
        }
    }
}
