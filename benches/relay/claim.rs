//! What a claim costs before a large backlog, over the same before a small one.

use std::time::{Duration, Instant};

use bellwire::event::BUCKETS;
use bellwire::relay::rounds::Rounds;
use bellwire::store::{Session, Store};

use crate::Options;
use crate::report::{Figure, Report, Target, quantile};
use crate::world::World;

/// Of the sessions here: no part runs longer without a heartbeat.
pub(crate) const LEASE: Duration = Duration::from_secs(300);
const SMALL: u32 = 10_000;
/// Both outboxes have this many events of each aggregate.
const ROWS_PER_AGGREGATE: u32 = 10;
/// Full claims per turn.
const CLAIMS: usize = 30;
/// Not measured: caches and plans get warm.
const WARM_UP: usize = 5;
/// Claims per turn at most, also those that end a round and are not full.
const MOST_CLAIMS: usize = 10 * CLAIMS;
const TARGET: Target = Target::AtMost(2.0);

pub(crate) async fn measure(options: &Options, report: &mut Report) {
    println!(
        "claim: {} rounds of {CLAIMS} claims, statistics missing, then fresh",
        options.rounds
    );
    let small = Outbox::new("claim_small", SMALL).await;
    let large = Outbox::new("claim_large", options.waiting).await;
    let shared_buffers = small
        .world
        .db
        .query_one("SHOW shared_buffers", &[])
        .await
        .expect("SHOW");
    report.fact("shared_buffers", shared_buffers.get::<_, String>(0));
    for (statistics, prepare) in [
        ("no_statistics", None),
        ("fresh", Some("VACUUM ANALYZE outbox")),
    ] {
        let mut turns = Vec::new();
        for _ in 0..options.rounds {
            for outbox in [&small, &large] {
                if let Some(sql) = prepare {
                    outbox.world.sql(sql).await;
                }
            }
            let before_small = small.claim(options).await;
            turns.push((large.claim(options).await, before_small));
        }
        report.add(Figure {
            name: format!("claim_flatness.{}_rows.{statistics}", options.waiting),
            unit: "ms",
            target: TARGET,
            turns,
        });
    }
    small.world.clean().await;
    large.world.clean().await;
}

struct Outbox {
    world: World,
}

impl Outbox {
    async fn new(part: &str, rows: u32) -> Self {
        let world = World::new(part).await;
        // Statistics come when this bench says so.
        world
            .sql("ALTER TABLE outbox SET (autovacuum_enabled = off)")
            .await;
        world.load(rows, rows / ROWS_PER_AGGREGATE, 90).await;
        Self { world }
    }

    /// Median of full claims, in milliseconds. What was claimed is released each time, so every
    /// claim meets the same backlog; the walk goes on from where the one before ended.
    async fn claim(&self, options: &Options) -> f64 {
        let store = &self.world.store;
        let (session, owned) = owning_session(store).await;
        let most_in_hand = options.partitions * options.window * 2;
        let mut rounds = Rounds::new(options.partitions, options.batch, most_in_hand);
        rounds.set_owned(&owned);
        let mut took = Vec::new();
        let mut claims = 0;
        while took.len() < WARM_UP + CLAIMS && claims < MOST_CLAIMS {
            claims += 1;
            let (rows, ms) = claim_and_release(store, &session, &mut rounds).await;
            if rows == options.batch {
                took.push(ms);
            }
        }
        session.leave().await.expect("the session ends");
        assert!(took.len() > WARM_UP, "no claim was full");
        quantile(&took[WARM_UP..], 0.5)
    }
}

async fn claim_and_release(store: &Store, session: &Session, rounds: &mut Rounds) -> (usize, f64) {
    rounds.wake();
    let request = rounds.next_claim().expect("a round is due");
    let began = Instant::now();
    let answer = session.claim(&request).await.expect("the claim");
    let ms = began.elapsed().as_secs_f64() * 1_000.0;
    rounds.claimed(&request, &answer);
    let ids: Vec<i64> = answer.rows.iter().map(|row| row.id.0).collect();
    store
        .release(&ids, session.token().name())
        .await
        .expect("the release");
    let buckets: Vec<u8> = answer.rows.iter().map(|row| row.bucket).collect();
    rounds.returned(&buckets);
    (ids.len(), ms)
}

/// A session that owns all buckets, as a relay alone has it.
pub(crate) async fn owning_session(store: &Store) -> (Session, Vec<u8>) {
    let opened = Session::open(store, "bench", LEASE, |_, _| {}).await;
    let session = opened.expect("a session");
    session.tend(true).await.expect("the heartbeat");
    let owned = session
        .acquire(usize::from(BUCKETS))
        .await
        .expect("the buckets");
    assert_eq!(owned.len(), usize::from(BUCKETS), "all buckets are free");
    (session, owned)
}
