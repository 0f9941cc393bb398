//! What it costs to claim a batch, whatever else waits, over the same where little waits.
//!
//! A batch is `relay.batch_size` rows that can go. Where others wait beside them that cannot, it may take
//! several claims to find so many; what one claim takes is told beside, by the name `….one_claim`.

use std::time::{Duration, Instant};

use bellwire::event::BUCKETS;
use bellwire::relay::rounds::Rounds;
use bellwire::store::{Session, Store};

use crate::options::Options;
use crate::report::{Report, Target, quantile};
use crate::world::{Events, World};

/// Of the sessions here: no part runs longer without a heartbeat.
pub(crate) const LEASE: Duration = Duration::from_secs(300);
/// The least that waits, and in all cases what can go.
const SMALL: u32 = 10_000;
/// In each turn at least.
const CLAIMS: usize = 20;
/// Not measured: caches and plans get warm.
const WARM_UP: usize = 5;
/// Enough of them to compare, in each turn.
const BATCHES: usize = 4;
/// Ends a turn that does not find as many.
const LONGEST_TURN: Duration = Duration::from_secs(2);

pub(crate) async fn measure(options: &Options, report: &mut Report) {
    println!(
        "claim: {} rounds of {CLAIMS} claims for each case",
        options.rounds
    );
    let mut bench = Bench {
        small: outbox("claim_small").await,
        large: outbox("claim_large").await,
        options,
        report,
    };
    bench.small.load(SMALL, options.payload_bytes).await;
    let sql = "SELECT current_setting('shared_buffers')";
    let buffers = bench.small.db.query_one(sql, &[]).await.expect("a setting");
    bench
        .report
        .fact("shared_buffers", buffers.get::<_, String>(0));
    bench.backlog().await;
    bench.one_aggregate().await;
    bench.dead_heads().await;
    bench.due_tomorrow().await;
    bench.churn().await;
    bench.small.clean().await;
    bench.large.clean().await;
}

async fn outbox(part: &str) -> World {
    let world = World::new(part).await;
    // Statistics come when this bench says so, and so does the vacuum.
    world
        .sql("ALTER TABLE outbox SET (autovacuum_enabled = off)")
        .await;
    world
}

struct Bench<'a> {
    small: World,
    /// Filled anew for most cases.
    large: World,
    options: &'a Options,
    report: &'a mut Report,
}

impl Bench<'_> {
    /// Many rows, all of which can go.
    async fn backlog(&mut self) {
        let Options {
            waiting,
            payload_bytes,
            ..
        } = *self.options;
        self.large.load(waiting, payload_bytes).await;
        self.turns("no_statistics", 2.0, None).await;
        self.large.sql("VACUUM ANALYZE outbox").await;
        self.turns(&format!("{waiting}_rows"), 2.0, VACUUM).await;
    }

    /// Many rows of one aggregate, first to be claimed like any other and then behind a dead event.
    async fn one_aggregate(&mut self) {
        let rows = self.options.waiting / 2;
        let hot = Events {
            aggregates: 1,
            named: "hot-",
            ..self.events(rows)
        };
        self.refill(&[hot]).await;
        self.turns("one_aggregate", 2.0, VACUUM).await;
        self.large
            .sql(
                "UPDATE outbox SET status = 'dead', holds = true
                 WHERE id = (SELECT min(id) FROM outbox WHERE aggregate_id = 'hot-0')",
            )
            .await;
        self.turns("dead_row", 2.0, VACUUM).await;
    }

    /// Many aggregates that are held back by a dead event each.
    async fn dead_heads(&mut self) {
        let aggregates = self.options.waiting / 40;
        let behind = Events {
            aggregates,
            named: "held-",
            ..self.events(aggregates)
        };
        let heads = Events {
            more: &[("status", "'dead'"), ("holds", "true")],
            ..behind
        };
        self.refill(&[heads, behind]).await;
        self.first_lap("dead_heads").await;
        self.turns("dead_heads", 3.0, VACUUM).await;
    }

    async fn due_tomorrow(&mut self) {
        let later = Events {
            named: "later-",
            more: &[("next_attempt_at", "now() + interval '1 day'")],
            ..self.events(self.options.waiting / 2)
        };
        self.refill(&[later]).await;
        self.first_lap("due_tomorrow").await;
        self.turns("due_tomorrow", 2.0, VACUUM).await;
    }

    /// Many rows came and went while an old transaction kept their remains from being removed.
    async fn churn(&mut self) {
        self.refill(&[]).await;
        let reader = self.large.client().await;
        let pin = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM outbox_relay_state";
        reader.batch_execute(pin).await.expect("a snapshot");
        let churned = Events {
            named: "churned-",
            ..self.events(self.options.waiting / 20 * 3)
        };
        self.large.add(churned).await;
        for change in [
            "UPDATE outbox SET claimed_by = 'churn', claimed_until = now() WHERE aggregate_id LIKE 'churned-%'",
            "UPDATE outbox SET status = 'published', published_at = now(), claimed_until = NULL WHERE claimed_by = 'churn'",
        ] {
            self.large.sql(change).await;
        }
        self.turns("pinned_snapshot", 10.0, VACUUM).await;
        reader.batch_execute("COMMIT").await.expect("its end");
        self.turns("snapshot_ended", 2.0, VACUUM).await;
    }

    fn events<'a>(&self, rows: u32) -> Events<'a> {
        Events::plain(rows, self.options.payload_bytes)
    }

    /// What can go, and these beside it, with fresh statistics.
    async fn refill(&self, more: &[Events<'_>]) {
        let mut events = vec![self.events(SMALL)];
        events.extend(more);
        self.large.refill(&events).await;
        self.large.sql("VACUUM ANALYZE outbox").await;
    }

    /// Has what cannot go set aside. What all the claims took that it needed, those that could go among it, is a
    /// figure: it is paid once.
    async fn first_lap(&mut self, case: &str) {
        let (session, owned) = owning_session(&self.large.store).await;
        let options = self.options;
        let mut rounds = Rounds::new(options.partitions, options.batch, options.most_in_hand());
        rounds.set_owned(&owned);
        let mut took = 0.0;
        while self.large.number(IN_THE_WAY).await > 0.0 {
            for _ in 0..CLAIMS {
                took += claim_and_release(&self.large.store, &session, &mut rounds)
                    .await
                    .1;
            }
        }
        session.leave().await.expect("the session ends");
        let name = format!("claim_flatness.{case}.first_lap");
        self.report.absolute(name, "ms", Target::None, vec![took]);
        // Of the rows as they were before.
        self.large.sql("VACUUM ANALYZE outbox").await;
    }

    /// Adds the figures of one case.
    async fn turns(&mut self, case: &str, at_most: f64, upkeep: Option<&str>) {
        let (mut batches, mut claims) = (Vec::new(), Vec::new());
        for _ in 0..self.options.rounds {
            // The claims of the turns before have left their remains.
            self.small.sql("VACUUM ANALYZE outbox").await;
            if let Some(sql) = upkeep {
                self.large.sql(sql).await;
            }
            let small = cost(&self.small.store, self.options).await;
            let large = cost(&self.large.store, self.options).await;
            batches.push((large.batch, small.batch));
            claims.push((large.claim, small.claim));
        }
        let name = format!("claim_flatness.{case}");
        self.report
            .ratio(&name, "ms", Target::AtMost(at_most), batches);
        self.report
            .ratio(name + ".one_claim", "ms", Target::None, claims);
    }
}

/// Rows in the walk that cannot go: those of plain events are called `aggregate-`.
const IN_THE_WAY: &str = "SELECT count(*)::float8 FROM outbox
     WHERE status = 'pending' AND claimed_by IS NULL AND aggregate_id NOT LIKE 'aggregate-%'
       AND outbox_walked(parked, next_attempt_at, created_at)";

/// What autovacuum does by itself where it is on.
const VACUUM: Option<&str> = Some("VACUUM outbox");

/// In milliseconds.
struct Cost {
    /// To claim as many rows as one claim may take.
    batch: f64,
    /// Of one claim, at the median, whatever it found.
    claim: f64,
}

/// What was claimed is released each time, so every claim meets the same backlog; the walk goes on from
/// where the one before ended.
async fn cost(store: &Store, options: &Options) -> Cost {
    let (session, owned) = owning_session(store).await;
    let mut rounds = Rounds::new(options.partitions, options.batch, options.most_in_hand());
    rounds.set_owned(&owned);
    for _ in 0..WARM_UP {
        claim_and_release(store, &session, &mut rounds).await;
    }
    let began = Instant::now();
    let (mut took, mut rows) = (Vec::new(), 0);
    while took.len() < CLAIMS || rows < BATCHES * options.batch {
        if began.elapsed() > LONGEST_TURN {
            break;
        }
        let (claimed, ms) = claim_and_release(store, &session, &mut rounds).await;
        took.push(ms);
        rows += claimed;
    }
    session.leave().await.expect("the session ends");
    #[expect(clippy::cast_precision_loss, reason = "a few thousand")]
    let batches = rows as f64 / options.batch as f64;
    Cost {
        batch: took.iter().sum::<f64>() / batches,
        claim: quantile(&took, 0.5),
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
