//! What is committed leaves at once, whatever happened to the session that listens. The tick is ten
//! minutes here: only a wake-up or a timer can have carried what arrives.

use std::time::{Duration, Instant};

use bellwire::store::Notifications;
use tokio_postgres::Client;

use crate::admin::{ANY_PORT, address, get};
use crate::support::{Ledger, Proxy, Relay, SOON, World, database_url, insert};

const NO_TICK: (&str, &str) = ("relay.tick", "10m");
/// "Within a second", on a slow machine.
const AT_ONCE: Duration = Duration::from_secs(2);

/// The backend of this relay's listener, once it has done LISTEN.
async fn listener(db: &Client, relay: &Relay) -> i32 {
    // What it did last: LISTEN, or the proof that it hears.
    let sql = "SELECT pid FROM pg_stat_activity
               WHERE application_name = $1 AND (query LIKE 'LISTEN %' OR query = 'SELECT pg_notify($1, $2)')";
    let name = format!("bellwire run {}", relay.name);
    for _ in 0..500 {
        if let Some(row) = db.query_opt(sql, &[&name]).await.unwrap() {
            return row.get(0);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("no listener\n{}", relay.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_committed_while_the_listener_reconnects_leaves_at_once() {
    let mut world = World::new().await;
    let relay = world.ready_relay(&[NO_TICK]).await;
    for round in 0..8 {
        let pid = listener(&world.db, &relay).await;
        let ended = world
            .db
            .query_one("SELECT pg_terminate_backend($1)", &[&pid])
            .await
            .unwrap();
        assert!(ended.get::<_, bool>(0));
        // Round by round deeper into the reconnection.
        for _ in 0..=round {
            world.insert(("order", "1"), "Placed", "{}").await;
        }
        let committed = Instant::now();
        let arrivals = world.arrivals(round + 1, SOON).await;
        assert_eq!(arrivals.len(), round + 1);
        for arrival in arrivals {
            let took = arrival.at.saturating_duration_since(committed);
            assert!(took < AT_ONCE, "it took {took:?}");
        }
    }
    relay.until_logged("not listening", SOON).await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_committed_before_the_first_listen_leaves_at_once() {
    let mut world = World::new().await;
    let mut all = Vec::new();
    for round in 0..3 {
        let mut relay = world.relay(&[NO_TICK]);
        let ready = format!(
            "SELECT EXISTS (SELECT FROM outbox_replica WHERE ready AND name LIKE '{}#%')",
            relay.name
        );
        let mut inserted = 0;
        while !world.one::<bool>(&ready).await {
            world.insert(("order", "1"), "Placed", "{}").await;
            inserted += 1;
            assert!(relay.is_running(), "{}", relay.log());
        }
        assert!(
            inserted > 0,
            "round {round}: ready before anything was inserted"
        );
        all.extend(world.arrivals(inserted, AT_ONCE).await);
        relay.terminate(SOON).await;
    }
    Ledger::of(&all).assert_sound(&world.committed().await);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sessions_of_the_pool_may_die_unnoticed() {
    let mut world = World::new().await;
    let relay = world.ready_relay(&[NO_TICK]).await;
    for _ in 0..3 {
        let name = format!("bellwire run {}", relay.name);
        let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1";
        let ended: i64 = world.db.query_one(sql, &[&name]).await.unwrap().get(0);
        assert!(ended > 0);
        world.insert(("order", "1"), "Placed", "{}").await;
        world.arrivals(1, Duration::from_secs(4)).await;
        world.until_published(SOON).await;
        listener(&world.db, &relay).await;
    }
    assert_eq!(
        world
            .one::<i64>("SELECT count(*) FROM outbox WHERE attempts > 0")
            .await,
        0
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_that_died_overnight_delays_nothing() {
    let mut world = World::new().await;
    let relay = world.ready_relay(&[NO_TICK]).await;
    world.fill("order", 10, 1).await;
    world.arrivals(10, SOON).await;
    world.until_published(SOON).await;
    let before = relay.logged("WARN");
    // Known by what they did last: payloads are read and marks are made on pooled sessions only.
    let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
               WHERE application_name = $1 AND state = 'idle'
                 AND (query LIKE '%-- What to publish%' OR query LIKE '%-- Record confirmed%')";
    let name = format!("bellwire run {}", relay.name);
    let ended: i64 = world.db.query_one(sql, &[&name]).await.unwrap().get(0);
    assert!(ended > 0, "no pooled session was found");
    world.fill("order", 10, 1).await;
    world.arrivals(10, AT_ONCE).await;
    world.until_published(SOON).await;
    let warnings = relay.logged("WARN") - before;
    assert!(warnings <= 1, "{}", relay.log());
    let attempts: i64 = world.one("SELECT sum(attempts) FROM outbox").await;
    assert_eq!(attempts, 0);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn polling_needs_neither_a_session_that_listens_nor_the_trigger() {
    let mut world = World::new().await;
    let migrated = world.command(&[], &["migrate", "--no-trigger"]).await;
    assert!(
        migrated.stdout.contains("insert trigger dropped"),
        "{}",
        migrated.stdout
    );
    let triggers = "SELECT count(*) FROM pg_trigger WHERE tgrelid = 'outbox'::regclass";
    assert_eq!(world.one::<i64>(triggers).await, 2, "but for the freed");
    let poll = [
        ("relay.wake", "poll"),
        ("relay.tick", "1s"),
        ("relay.lease", "60s"),
        ANY_PORT,
    ];
    let relay = world.ready_relay(&poll).await;
    for _ in 0..3 {
        world.insert(("order", "1"), "Placed", "{}").await;
        world.arrivals(1, Duration::from_secs(1) + AT_ONCE).await;
        world.until_published(SOON).await;
    }
    let listening = format!(
        "SELECT count(*) FROM pg_stat_activity
         WHERE application_name = 'bellwire run {}' AND (query LIKE 'LISTEN%' OR query LIKE '%pg_notify($1, $2)')",
        relay.name
    );
    assert_eq!(world.one::<i64>(&listening).await, 0);
    let (_, body) = get(&address(&relay).await, "/status").await;
    let status: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status["relay"]["wake"], "poll-only", "{body}");
    assert!(status["relay"]["listener_trouble"].is_null(), "{body}");
    assert_eq!(relay.logged("WARN"), 0, "{}", relay.log());
    let run = world.command(&poll[..1], &["check"]).await;
    assert!(run.stdout.contains("poll-only"), "{}", run.stdout);

    let migrated = world.command(&[], &["migrate"]).await;
    assert!(
        migrated.stdout.contains("insert trigger created"),
        "{}",
        migrated.stdout
    );
    assert_eq!(world.one::<i64>(triggers).await, 3);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listener_whose_connection_swallows_everything_is_replaced() {
    let mut world = World::new().await;
    let proxy = Proxy::new(&database_url()).await;
    let listen_url = proxy.through(&database_url());
    let settings = [
        ("database.listen_url", listen_url.as_str()),
        ("relay.tick", "1s"),
        ANY_PORT,
    ];
    let relay = world.ready_relay(&settings).await;
    relay.until_logged(" listening", SOON).await;
    let first = listener(&world.db, &relay).await;
    proxy.mute(true);
    // The tick does not depend on it.
    world.insert(("order", "1"), "Placed", "{}").await;
    world.arrivals(1, Duration::from_secs(1) + AT_ONCE).await;
    // A quiet minute, and the proof that then fails.
    relay
        .until_logged("not listening", Duration::from_secs(75))
        .await;
    let (_, body) = get(&address(&relay).await, "/status").await;
    let status: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert!(status["relay"]["listener_trouble"].is_string(), "{body}");
    proxy.mute(false);
    let began = Instant::now();
    while relay.logged(" listening channel") < 2 {
        assert!(began.elapsed() < SOON, "{}", relay.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_ne!(listener(&world.db, &relay).await, first);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backoff_that_falls_due_needs_no_wake_up() {
    let mut world = World::new().await;
    world.unbind("#").await;
    let _relay = world.ready_relay(&[NO_TICK, ("retry.backoff", "1s")]).await;
    let first = world.insert(("invoice", "1"), "Sent", "{}").await;
    let second = world.insert(("invoice", "1"), "Paid", "{}").await;
    world
        .until(
            "SELECT EXISTS (SELECT FROM outbox WHERE attempts = 1 AND claimed_by IS NULL)",
            SOON,
        )
        .await;
    world.bind("#").await;
    let arrivals = world.arrivals(2, Duration::from_secs(1) + AT_ONCE).await;
    assert_eq!(
        arrivals
            .iter()
            .map(|arrival| arrival.id)
            .collect::<Vec<_>>(),
        [first, second]
    );
    world.until_published(SOON).await;
    let early: bool = world
        .one("SELECT bool_or(published_at < next_attempt_at) FROM outbox")
        .await;
    assert!(!early, "before it was due");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scheduled_event_leaves_when_it_is_due() {
    let mut world = World::new().await;
    let _relay = world.ready_relay(&[NO_TICK]).await;
    world
        .sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, next_attempt_at)
             VALUES ('order', '1', 'Reminded', '{}', now() + interval '1500 ms')",
        )
        .await;
    world
        .arrivals(1, Duration::from_millis(1500) + AT_ONCE)
        .await;
    world.until_published(SOON).await;
    assert!(
        world
            .one::<bool>("SELECT published_at >= next_attempt_at FROM outbox")
            .await,
        "before it was due"
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operators_plain_sql_wakes_the_relay() {
    let mut world = World::new().await;
    world.unbind("#").await;
    let settings = [
        NO_TICK,
        ("retry.max_attempts", "1"),
        ("retry.backoff", "0s"),
    ];
    let _relay = world.ready_relay(&settings).await;
    let mut ids = Vec::new();
    for aggregate in ["replayed", "discarded"] {
        for event in ["First", "Second"] {
            ids.push(world.insert(("invoice", aggregate), event, "{}").await);
        }
    }
    world
        .until(
            "SELECT count(*) = 2 FROM outbox WHERE status = 'dead'",
            SOON,
        )
        .await;
    world.bind("#").await;
    assert!(
        world
            .next_arrival(Duration::from_millis(300))
            .await
            .is_none(),
        "dead events hold their aggregates"
    );

    world.sql("UPDATE outbox SET status = 'pending' WHERE status = 'dead' AND aggregate_id = 'replayed'").await;
    let replayed = world.arrivals(2, AT_ONCE).await;
    assert_eq!(
        replayed
            .iter()
            .map(|arrival| arrival.id)
            .collect::<Vec<_>>(),
        ids[..2]
    );

    world
        .sql("UPDATE outbox SET status = 'discarded' WHERE status = 'dead'")
        .await;
    let freed = world.arrivals(1, AT_ONCE).await;
    assert_eq!(
        freed.iter().map(|arrival| arrival.id).collect::<Vec<_>>(),
        ids[3..]
    );
    world.until_published(SOON).await;
    assert_eq!(world.count("discarded").await, 1);
    world.clean().await;
}

/// A session that hears what writers ring.
async fn hear(world: &World) -> (Client, Notifications) {
    let (client, notifications) = world.store.connector().open(|_| {}).await.unwrap();
    client
        .batch_execute(&format!("LISTEN \"{}\"", world.store.names().channel()))
        .await
        .unwrap();
    (client, notifications)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_that_may_not_ring_is_carried_by_the_tick() {
    let mut world = World::new().await;
    let (listening, mut notifications) = hear(&world).await;
    let quiet = world.client().await;
    quiet
        .batch_execute("SET bellwire.ring = off")
        .await
        .unwrap();
    insert(&quiet, ("order", "1"), "Placed", "{}").await;
    let channel = world.store.names().channel().to_owned();
    listening
        .execute("SELECT pg_notify($1, 'after')", &[&channel])
        .await
        .unwrap();
    assert_eq!(
        notifications.recv().await.unwrap().payload(),
        "after",
        "the silenced trigger rang"
    );
    world.insert(("order", "1"), "Placed", "{}").await;
    assert_eq!(
        notifications.recv().await.unwrap().payload(),
        "",
        "the trigger did not ring"
    );

    let _relay = world.ready_relay(&[("relay.tick", "1s")]).await;
    world.arrivals(2, SOON).await;
    insert(&quiet, ("order", "1"), "Placed", "{}").await;
    world.arrivals(1, Duration::from_secs(1) + AT_ONCE).await;
    world.clean().await;
}
