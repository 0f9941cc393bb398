//! Whatever happens to the events of a few aggregates, in whichever order: what may go has gone in the end, in order,
//! without the help of a tick.

use std::time::{Duration, Instant};

use rand::RngExt as _;
use tokio_postgres::Client;

use crate::support::{Arrival, Ledger, SOON, World};

/// Of what is done to the outbox.
const SPAN: Duration = Duration::from_secs(8);
/// Of each writer, so that ids are committed in their order.
const AGGREGATES: i32 = 2;
const WRITERS: i32 = 3;

/// One thing that an application or an operator does.
async fn act(db: &Client, writer: i32) {
    let (kind, own, any, wait) = {
        let mut random = rand::rng();
        (
            random.random_range(0..20),
            writer * AGGREGATES + random.random_range(0..AGGREGATES),
            random.random_range(0..AGGREGATES * WRITERS),
            random.random_range(0..3_000),
        )
    };
    let insert = |event_type: &str, count: i32, after_ms: i32| {
        format!(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, next_attempt_at)
             SELECT 'order', '{own}', '{event_type}', '{{}}', now() + interval '{after_ms} milliseconds'
             FROM generate_series(1, {count})"
        )
    };
    let one = |condition: &str| {
        format!(
            "id = (SELECT id FROM outbox WHERE aggregate_id = '{any}' AND {condition} ORDER BY id LIMIT 1)"
        )
    };
    let dead = one("status = 'dead' AND holds IS NOT FALSE");
    let passed = one("status = 'dead' AND holds IS FALSE");
    let ahead = one("status = 'pending' AND claimed_by IS NULL AND next_attempt_at > now()");
    let first = one("status = 'pending' AND claimed_by IS NULL");
    let sql = match kind {
        0..=6 => insert("Good", 1 + wait % 12, 0),
        7 => insert("Bad", 1, 0),
        8 => insert("Good", 1, wait),
        // Long enough for others to be parked behind it.
        9 => insert("Good", 1, 20_000),
        10 => format!(
            "UPDATE outbox SET next_attempt_at = now() WHERE {ahead} AND status = 'pending' AND claimed_by IS NULL"
        ),
        11 => format!(
            "UPDATE outbox SET next_attempt_at = now() + interval '20 seconds' WHERE {first} AND status = 'pending' AND claimed_by IS NULL"
        ),
        12 => format!(
            "UPDATE outbox SET status = 'discarded' WHERE {ahead} AND status = 'pending' AND claimed_by IS NULL"
        ),
        13 => format!(
            "DELETE FROM outbox WHERE {ahead} AND status = 'pending' AND claimed_by IS NULL"
        ),
        14 => format!(
            "UPDATE outbox SET status = 'pending', attempts = 0, next_attempt_at = now(), event_type = 'Good' WHERE {dead} AND status = 'dead'"
        ),
        15 => format!(
            "UPDATE outbox SET status = 'pending', attempts = 0, next_attempt_at = now() WHERE {dead} AND status = 'dead'"
        ),
        16 => format!("UPDATE outbox SET status = 'discarded' WHERE {dead} AND status = 'dead'"),
        17 => format!("DELETE FROM outbox WHERE {dead} AND status = 'dead'"),
        18 => format!(
            "UPDATE outbox SET holds = false WHERE {dead} AND status = 'dead'; DELETE FROM outbox WHERE {passed}"
        ),
        // Somebody looks at it and takes his time.
        _ => format!(
            "BEGIN; SELECT FROM outbox WHERE {first} FOR UPDATE; SELECT pg_sleep({}); COMMIT",
            f64::from(wait) / 6_000.0
        ),
    };
    db.batch_execute(&sql)
        .await
        .unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

/// Nothing dead and nothing ahead is left, by plain SQL.
async fn settle(world: &World) {
    let began = Instant::now();
    loop {
        world
            .sql(
                "UPDATE outbox SET status = 'discarded' WHERE status = 'dead';
                 UPDATE outbox SET next_attempt_at = now() WHERE status = 'pending' AND claimed_by IS NULL AND next_attempt_at > now()",
            )
            .await;
        let left: i64 = world
            .one("SELECT count(*) FROM outbox WHERE status IN ('pending', 'dead')")
            .await;
        if left == 0 {
            return;
        }
        // Shorter than the minute after which a lap of the sweep would find what was forgotten.
        if began.elapsed() > SOON {
            let rows: String = world
                .one(
                    "SELECT string_agg(format('%s %s %s parked=%s claimed=%s due=%s', id, aggregate_id, status, parked,
                                              claimed_by, next_attempt_at - now()), E'\\n' ORDER BY aggregate_id, id)
                     FROM outbox WHERE status IN ('pending', 'dead')",
                )
                .await;
            panic!("left behind:\n{rows}");
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_happens_to_events_all_that_may_go_have_gone_in_order() {
    let mut world = World::new().await;
    world.unbind("#").await;
    world.bind("*.Good").await;
    let ordering = ["visible", "strict"][rand::rng().random_range(0..2)];
    let settings = [
        ("relay.ordering", ordering),
        ("relay.tick", "1h"),
        ("relay.lease", "30s"),
        ("retry.max_attempts", "2"),
        ("retry.backoff", "300ms"),
    ];
    let mut relays = [
        world.ready_relay(&settings).await,
        world.ready_relay(&settings).await,
    ];
    world.until_shares(&[32, 32], SOON).await;
    let mut actors = Vec::new();
    for writer in 0..WRITERS {
        let db = world.client().await;
        actors.push(tokio::spawn(async move {
            let (began, mut actions) = (Instant::now(), 0);
            while began.elapsed() < SPAN {
                act(&db, writer).await;
                actions += 1;
                let pause = rand::rng().random_range(0..40);
                tokio::time::sleep(Duration::from_millis(pause)).await;
            }
            actions
        }));
    }
    let mut arrivals: Vec<Arrival> = Vec::new();
    if rand::rng().random_range(0..2) == 0 {
        let half = Instant::now() + SPAN / 2;
        while Instant::now() < half {
            arrivals.extend(world.next_arrival(Duration::from_millis(50)).await);
        }
        relays[0].kill().await;
        relays[0] = world.relay(&settings);
    }
    for actor in actors {
        while !actor.is_finished() {
            arrivals.extend(world.next_arrival(Duration::from_millis(50)).await);
        }
        assert!(actor.await.unwrap() > 50, "too little happened");
    }
    settle(&world).await;
    arrivals.extend(world.rest(Duration::from_millis(500)).await);
    let published: Vec<i64> = world
        .one("SELECT array_agg(id ORDER BY id) FROM outbox WHERE status = 'published'")
        .await;
    // Of one that was deleted or discarded while it was on its way nobody can say whether it left.
    let known: std::collections::HashSet<i64> = published.iter().copied().collect();
    arrivals.retain(|arrival| known.contains(&arrival.id));
    Ledger::of(&arrivals).assert_sound(&published);
    let parked: i64 = world
        .one("SELECT count(*) FROM outbox WHERE parked IS NOT NULL")
        .await;
    assert!(parked > 0, "nothing was ever parked or put back");
    drop(relays);
    world.clean().await;
}
