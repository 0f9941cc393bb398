//! No statement of ours ever scans the outbox, whatever the statistics say: its cost would grow with
//! the backlog. Told by PostgreSQL's own count of scans, so no statement is forgotten.

use std::time::{Duration, Instant};

use crate::support::{SOON, World};

impl World {
    /// Sequential scans of the outbox so far.
    async fn scans(&self) -> i64 {
        self.one("SELECT pg_stat_get_numscans('outbox'::regclass)")
            .await
    }

    /// Waits until the scan that we make on purpose is counted: then all earlier ones are.
    async fn counted(&self, expected_at_least: i64) -> i64 {
        let began = Instant::now();
        loop {
            let scans = self.scans().await;
            if scans >= expected_at_least {
                return scans;
            }
            assert!(began.elapsed() < SOON, "the server counts no scans");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

/// Everything that a relay and an operator do, without a look at the outbox by the test itself.
async fn assert_no_scan(statistics: &str) {
    let mut world = World::new().await;
    world
        .sql("ALTER TABLE outbox SET (autovacuum_enabled = off); SET enable_seqscan = off")
        .await;
    world.sql("ANALYZE outbox").await;
    world.fill("order", 1_000, 20).await;
    world
        .sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, status, last_error)
             SELECT 'order', 'dead-' || n, 'Placed', '{}', 'dead', 'unroutable: x' FROM generate_series(1, 500) n",
        )
        .await;
    // To be parked behind those, promoted, and left aside.
    world
        .sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
             SELECT 'order', 'dead-' || n, 'Placed', '{}' FROM generate_series(1, 500) n;
             INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, next_attempt_at)
             SELECT 'order', 'later-' || n, 'Placed', '{}', now() + n % 2 * interval '1 day' + interval '3 seconds'
             FROM generate_series(1, 500) n",
        )
        .await;
    if statistics == "fresh" {
        world.sql("VACUUM ANALYZE outbox").await;
    }
    world.unbind("#").await;
    world.bind("order.*").await;
    let settings = [
        ("lag.alert", "2s"),
        ("prune.every", "1s"),
        ("prune.keep", "2s"),
        ("retry.backoff", "200ms"),
        ("retry.max_attempts", "2"),
        ("relay.ordering", "strict"),
    ];
    let before = world.scans().await;
    let relay = world.ready_relay(&settings).await;
    world.insert(("invoice", "1"), "Sent", "{}").await;
    for _ in 0..20_000 {
        world.next_arrival(SOON).await.expect("all arrive");
    }
    for arguments in [
        ["status"].as_slice(),
        &["check"],
        &["dead", "list"],
        &["dead", "show", "--id", "20001"],
        &["dead", "replay", "--id", "20001"],
        &["dead", "replay", "--reason", "unroutable", "--limit", "10"],
        &["dead", "discard", "--aggregate-id", "dead-7"],
        &["prune", "--older-than", "1h"],
        &["run", "--once"],
    ] {
        let run = world.command(&[], arguments).await;
        assert!(
            matches!(run.status.code(), Some(0 | 1 | 3)),
            "{arguments:?}: {}",
            run.stderr
        );
    }
    relay.until_logged("dead-lettered", SOON).await;
    // A session tells its counts once a second at most, or when it has idled for ten; but all of them at its end.
    let sessions = format!(
        "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'bellwire run {}')",
        relay.name
    );
    assert!(
        !world.one::<bool>(&sessions).await,
        "the relay's sessions have another name"
    );
    drop(relay);
    world.until(&sessions, SOON).await;
    // One that counts: until PostgreSQL 15 a process of its own counted, a moment late.
    let own = "SET enable_indexscan = off; SET enable_indexonlyscan = off; SET enable_bitmapscan = off;
               SET enable_seqscan = on; SELECT count(*) FROM outbox; SELECT pg_sleep(1.1); SELECT 1";
    world.sql(own).await;
    let scans = world.counted(before + 1).await;
    assert_eq!(scans - before, 1, "statements of ours scan the outbox");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_statement_scans_the_outbox_with_stale_statistics() {
    assert_no_scan("stale").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_statement_scans_the_outbox_with_fresh_statistics() {
    assert_no_scan("fresh").await;
}
