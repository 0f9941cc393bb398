//! Through a connection pooler in transaction mode nothing of a session can be relied on, and all is
//! delivered all the same.

use std::time::{Duration, Instant};

use bellwire::config::DatabaseConfig;
use bellwire::store::{Pooling, Store};
use futures_util::future::join_all;
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

use crate::admin::{ANY_PORT, address, get, until_ready};
use crate::support::{Ledger, Proxy, Relay, SOON, World, amqp_url, database_url};

const NO_NOTIFICATIONS: &str = "notifications do not arrive through a connection pooler";
/// Of the pooler: so many server sessions.
const POOL_SIZE: usize = 2;

/// None, said loudly, without a pooler.
pub fn pooler_url() -> Option<String> {
    let url = std::env::var("BELLWIRE_TEST_PGBOUNCER_URL").ok();
    if url.is_none() {
        eprintln!("SKIPPED: BELLWIRE_TEST_PGBOUNCER_URL is not set, see scripts/services");
    }
    url
}

/// A warning or an error, other than that notifications do not arrive.
fn complaints(relay: &Relay) -> Vec<String> {
    let log = relay.log();
    log.lines()
        .filter(|line| {
            line.contains("WARN") || line.contains("ERROR") || line.contains("statement failed")
        })
        .filter(|line| !line.contains(NO_NOTIFICATIONS))
        .map(str::to_owned)
        .collect()
}

/// What the server itself logged of this relay's statements, where its log can be read.
fn refused_statements(relay: &Relay) -> Vec<String> {
    let directory = std::env::var("BELLWIRE_TEST_SERVICES_DIR").unwrap_or_default();
    let log = std::fs::read(format!("{directory}/postgres/postgres.log")).unwrap_or_default();
    String::from_utf8_lossy(&log)
        .lines()
        .filter(|line| line.contains(&relay.name) && line.contains("ERROR:"))
        .map(str::to_owned)
        .collect()
}

async fn simple(client: &Client, sql: &str) -> String {
    let answer = client.simple_query(sql).await.unwrap();
    let value = answer.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    value.unwrap_or_default().to_owned()
}

/// Asks every server session of the pooler at once.
async fn in_each_session(url: &str, sql: &str) -> Vec<String> {
    let mut clients = Vec::new();
    for _ in 0..POOL_SIZE {
        let (client, driver) = tokio_postgres::connect(url, NoTls).await.unwrap();
        tokio::spawn(driver);
        client.batch_execute("BEGIN").await.unwrap();
        clients.push(client);
    }
    let mut answers = Vec::new();
    for client in &clients {
        answers.push(simple(client, sql).await);
        client.batch_execute("ROLLBACK").await.unwrap();
    }
    answers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_relays_through_a_pooler_carry_everything_in_order_and_without_an_error() {
    let Some(url) = pooler_url() else {
        return;
    };
    let mut world = World::new().await;
    let pooled = [("DATABASE_URL", url.as_str()), ("relay.tick", "1s")];
    let mut relays = Vec::new();
    for _ in 0..2 {
        relays.push(world.ready_relay(&pooled).await);
    }
    world.until_shares(&[32, 32], SOON).await;
    assert!(
        world
            .one::<bool>("SELECT bool_and(session_pid = 0) FROM outbox_replica")
            .await,
        "not taken for a pooler"
    );
    for _ in 0..4 {
        world.fill("order", 50, 10).await;
    }
    let arrivals = world.arrivals(2000, SOON * 2).await;
    let ledger = Ledger::of(&arrivals);
    ledger.assert_sound(&world.committed().await);
    assert_eq!(ledger.repeats, 0);
    world.until_published(SOON).await;
    let carriers: i64 = world
        .one("SELECT count(DISTINCT claimed_by) FROM outbox")
        .await;
    assert_eq!(carriers, 2, "one of them carried nothing");

    // Nothing of ours is left in the sessions that serve others.
    let left = "SELECT current_setting('enable_seqscan') || current_setting('synchronous_commit')
                    || (SELECT count(*) FROM pg_prepared_statements)
                    || (SELECT count(*) FROM pg_listening_channels())
                    || (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())";
    for answer in in_each_session(&url, left).await {
        assert_eq!(answer, "onon000");
    }
    for relay in &mut relays {
        relay.terminate(SOON).await;
        assert_eq!(relay.logged(NO_NOTIFICATIONS), 1, "{}", relay.log());
        assert_eq!(complaints(relay), [""; 0]);
        assert_eq!(refused_statements(relay), [""; 0]);
    }
    assert_eq!(
        world
            .one::<i64>("SELECT count(*) FROM outbox_replica")
            .await,
        0,
        "a clean stop leaves nothing"
    );
    world.clean().await;
}

/// Kills a relay behind the pooler with rows in its hand; a survivor at `url` gets them.
async fn killed_behind_the_pooler(pooler: &str, survivor_url: &str) {
    let mut world = World::new().await;
    let broker = Proxy::new(&amqp_url()).await;
    let muted = broker.through(&amqp_url());
    let settings = [
        ("DATABASE_URL", pooler),
        ("AMQP_URL", &muted),
        ("relay.partitions", "1"),
    ];
    let mut victim = world.ready_relay(&settings).await;
    world.warm().await;
    broker.mute(true);
    world.fill("order", 20, 2).await;
    let has = format!("claimed_by LIKE '{}#%'", victim.name);
    let in_hand = format!("SELECT count(*) = 40 FROM outbox WHERE {has} AND status = 'pending'");
    world.until(&in_hand, SOON).await;
    let survivor = world.relay(&[("DATABASE_URL", survivor_url)]);
    survivor.until_logged("session open", SOON).await;
    victim.kill().await;
    let died = Instant::now();
    let lease = "SELECT extract(epoch FROM max(lease_until) - clock_timestamp())::float8
                 FROM outbox_replica WHERE session_pid = 0 AND name LIKE ";
    let lease: f64 = world.one(&format!("{lease} '{}#%'", victim.name)).await;
    let freed = format!("SELECT NOT EXISTS (SELECT FROM outbox WHERE {has})");
    world.until(&freed, SOON).await;
    // It lives by its lease alone: nobody may take it for dead before. 50 ms for the looking.
    let took = died.elapsed() + Duration::from_millis(50);
    assert!(took.as_secs_f64() >= lease, "after {took:?} of {lease} s");
    world.until_published(SOON).await;
    let arrivals = world.arrivals(40, SOON).await;
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    let attempts: i64 = world.one("SELECT sum(attempts) FROM outbox").await;
    assert_eq!(attempts, 0);
    drop(survivor);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_killed_behind_the_pooler_is_taken_over_when_its_lease_is_over() {
    if let Some(url) = pooler_url() {
        killed_behind_the_pooler(&url, &url).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_with_a_session_takes_over_one_without() {
    if let Some(url) = pooler_url() {
        killed_behind_the_pooler(&url, &database_url()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_direct_connection_for_the_listener_wakes_at_once() {
    let Some(url) = pooler_url() else {
        return;
    };
    let mut world = World::new().await;
    let direct = database_url();
    let settings = [
        ("DATABASE_URL", url.as_str()),
        ("database.listen_url", direct.as_str()),
        ("relay.tick", "10m"),
        ("relay.lease", "60s"),
        ANY_PORT,
    ];
    let relay = world.ready_relay(&settings).await;
    relay.until_logged("listening", SOON).await;
    for _ in 0..5 {
        world.insert(("order", "1"), "Placed", "{}").await;
        world.arrivals(1, Duration::from_secs(2)).await;
        world.until_published(SOON).await;
    }
    let (_, body) = get(&address(&relay).await, "/status").await;
    let status: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status["relay"]["wake"], "notify", "{body}");
    assert!(status["relay"]["listener_trouble"].is_null(), "{body}");
    assert_eq!(relay.logged(NO_NOTIFICATIONS), 0);
    assert_eq!(complaints(&relay), [""; 0]);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_without_notifications_says_so_and_is_ready() {
    let Some(url) = pooler_url() else {
        return;
    };
    let world = World::new().await;
    let relay = world.relay(&[("DATABASE_URL", &url), ANY_PORT]);
    relay.until_logged(NO_NOTIFICATIONS, SOON).await;
    let address = address(&relay).await;
    until_ready(&address, 200, "", SOON).await;
    let (_, body) = get(&address, "/status").await;
    let status: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status["relay"]["wake"], "poll-only", "{body}");
    let trouble = status["relay"]["listener_trouble"].as_str().unwrap();
    assert!(trouble.contains("database.listen_url"), "{trouble}");
    assert_eq!(status["replicas"][0]["connected"], true, "{body}");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_commands_name_the_pooler_and_what_to_do_about_it() {
    let Some(url) = pooler_url() else {
        return;
    };
    let world = World::new().await;
    let pooled = [("DATABASE_URL", url.as_str())];
    let run = world.command(&pooled, &["check"]).await;
    assert_eq!(run.status.code(), Some(0), "{}\n{}", run.stdout, run.stderr);
    let line = |start: &str| {
        let found = run.stdout.lines().find(|line| line.contains(start));
        found.unwrap_or_else(|| panic!("{}", run.stdout)).to_owned()
    };
    assert!(line(" database ").contains("connection pooler in transaction mode"));
    assert!(line(" notifications ").contains("database.listen_url"));

    let run = world.command(&pooled, &["status"]).await;
    assert!(run.stdout.contains(", poll-only\n"), "{}", run.stdout);

    let run = world.command(&pooled, &["migrate"]).await;
    assert_eq!(run.status.code(), Some(2));
    assert!(run.stderr.contains("DATABASE_URL"), "{}", run.stderr);

    let options = format!("{url}?options=-c%20geqo%3Doff");
    let run = world.command(&[("DATABASE_URL", &options)], &["run"]).await;
    assert_eq!(run.status.code(), Some(2));
    assert!(
        run.stderr.contains("ignore_startup_parameters"),
        "{}",
        run.stderr
    );
    world.clean().await;
}

async fn pooling(url: &str) -> Pooling {
    let config = DatabaseConfig {
        url: Some(url.into()),
        ..DatabaseConfig::default()
    };
    let store = Store::new(&config, "bellwire test").unwrap();
    store.connector().pooling().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_is_found_by_each_of_many_and_never_where_there_is_none() {
    let Some(url) = pooler_url() else {
        return;
    };
    for _ in 0..3 {
        // All at once: each is in the others' way.
        let through = join_all((0..10).map(|_| pooling(&url))).await;
        assert_eq!(through, [Pooling::Transaction; 10]);
        let direct = database_url();
        let directly = join_all((0..10).map(|_| pooling(&direct))).await;
        assert_eq!(directly, [Pooling::Session; 10]);
    }
}
