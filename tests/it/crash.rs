//! Nothing is lost by killing or freezing a relay, whatever it was at, and nobody waits long for it.

use std::time::{Duration, Instant};

use rand::RngExt as _;

use crate::support::{Arrival, Ledger, Proxy, Relay, SOON, World, amqp_url, database_url};

const IN_HAND: &str = "status = 'pending' AND claimed_by IS NOT NULL";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_by_killing_a_relay_at_any_moment() {
    let mut world = World::new().await;
    let broker = Proxy::new(&amqp_url()).await;
    broker.delay(Duration::from_millis(2));
    let url = broker.through(&amqp_url());
    let mut arrivals = Vec::new();
    let mut in_hand_at_death: i64 = 0;
    for _ in 0..50 {
        arrivals.extend(world.rest(Duration::from_millis(1)).await);
        let published = world.count("published").await;
        let mut relay = world.relay(&[("AMQP_URL", &url), ("relay.lease", "60s")]);
        world.fill("order", 4, 5).await;
        let steps = rand::rng().random_range(1..=10);
        match rand::rng().random_range(0..4) {
            0 => {}
            1 => {
                let begun = format!(
                    "SELECT EXISTS (SELECT FROM outbox WHERE {IN_HAND})
                            OR NOT EXISTS (SELECT FROM outbox WHERE status = 'pending')"
                );
                world.until(&begun, SOON).await;
            }
            2 => {
                for _ in 0..steps {
                    arrivals.push(world.next_arrival(SOON).await.unwrap());
                }
            }
            _ => {
                let marked = format!(
                    "SELECT count(*) >= {published} + {steps} FROM outbox WHERE status = 'published'"
                );
                world.until(&marked, SOON).await;
            }
        }
        let moment = rand::rng().random_range(0..50);
        tokio::time::sleep(Duration::from_millis(moment)).await;
        relay.kill().await;
        in_hand_at_death += world
            .one::<i64>(&format!("SELECT count(*) FROM outbox WHERE {IN_HAND}"))
            .await;
    }
    let relay = world.ready_relay(&[]).await;
    world.until_published(SOON).await;
    arrivals.extend(world.rest(Duration::from_millis(500)).await);
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    assert!(in_hand_at_death > 0, "no relay was killed at work");
    let attempts: i64 = world.one("SELECT sum(attempts) FROM outbox").await;
    assert_eq!(attempts, 0, "a death is no failed attempt");
    drop(relay);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_a_killed_relay_are_claimable_within_a_second() {
    let mut world = World::new().await;
    let broker = Proxy::new(&amqp_url()).await;
    let url = broker.through(&amqp_url());
    // Neither lease nor tick nor confirm timeout can be what frees the rows.
    let patient = [
        ("relay.lease", "60s"),
        ("relay.tick", "10m"),
        ("rabbitmq.confirm_timeout", "50s"),
        ("relay.partitions", "1"),
    ];
    let mut victim = world
        .ready_relay(&[&patient[..], &[("AMQP_URL", &url)]].concat())
        .await;
    world.warm().await;
    let survivor = world.ready_relay(&patient).await;
    world.until_shares(&[32, 32], SOON).await;
    broker.mute(true);
    world.fill("order", 100, 2).await;
    let has = format!("claimed_by LIKE '{}#%'", victim.name);
    // What the survivor owns is published, what the victim owns is in its hand.
    let settled = format!(
        "SELECT bool_and(coalesce({has}, false)) AND count(*) > 20
         FROM outbox WHERE status = 'pending'"
    );
    world.until(&settled, SOON).await;
    victim.kill().await;
    let freed = format!("SELECT NOT EXISTS (SELECT FROM outbox WHERE {IN_HAND} AND {has})");
    // 50 ms for the looking.
    world.until(&freed, Duration::from_millis(1050)).await;
    world.until_published(SOON).await;
    let arrivals = world.arrivals(200, SOON).await;
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    drop(survivor);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_frozen_past_its_lease_sends_and_marks_nothing_more() {
    let mut world = World::new().await;
    let broker = Proxy::new(&amqp_url()).await;
    let url = broker.through(&amqp_url());
    let frozen = world
        .ready_relay(&[
            ("AMQP_URL", &url),
            ("relay.lease", "4s"),
            ("rabbitmq.confirm_timeout", "3s"),
            ("relay.partitions", "1"),
        ])
        .await;
    world.warm().await;
    broker.mute(true);
    world.fill("order", 5, 8).await;
    // One of each aggregate is handed to the socket, the rest waits in the relay.
    let mut arrivals = world.arrivals(5, SOON).await;
    frozen.freeze();
    assert_eq!(arrivals.len(), 5);
    broker.mute(false);
    let survivor = world.relay(&[]);
    world.until_published(SOON).await;
    arrivals.extend(world.arrivals(40, SOON).await);
    frozen.thaw();
    frozen.until_logged("claim token void", SOON).await;
    world.until_owned(&frozen).await;
    world.fill("invoice", 10, 2).await;
    world.until_published(SOON).await;
    arrivals.extend(world.arrivals(20, SOON).await);
    let ledger = Ledger::of(&arrivals);
    ledger.assert_sound(&world.committed().await);
    assert_eq!(ledger.repeats, 5, "exactly what was in the socket");
    let others: i64 = world
        .one(&format!(
            "SELECT count(*) FROM outbox WHERE aggregate_type = 'order' AND claimed_by NOT LIKE '{}#%'",
            survivor.name
        ))
        .await;
    assert_eq!(others, 0, "marked by the relay that had lost them");
    drop((frozen, survivor));
    world.clean().await;
}

/// A relay whose claim has taken rows and is not committed, and the proxy that holds the COMMIT.
async fn stopped_in_its_claim(world: &World) -> (Relay, Proxy) {
    world.fill("order", 8, 5).await;
    let database = Proxy::new(&database_url()).await;
    database.hold_commits(true);
    let relay = world.relay(&[
        ("DATABASE_URL", &database.through(&database_url())),
        ("relay.lease", "60s"),
        ("relay.tick", "10m"),
    ]);
    // A session is idle for a moment before each statement of the transaction, too.
    let claiming = format!(
        "SELECT EXISTS (SELECT FROM pg_stat_activity
                        WHERE state = 'idle in transaction' AND application_name LIKE '%{}'
                          AND query LIKE '-- Second statement of the claim%')",
        relay.name
    );
    world.until(&claiming, SOON).await;
    let lockable: i64 = world
        .one("SELECT count(*) FROM (SELECT FROM outbox FOR KEY SHARE SKIP LOCKED) lockable")
        .await;
    assert!(lockable < 40, "the claim has taken nothing");
    (relay, database)
}

async fn all_is_delivered(mut world: World, within: Duration) {
    let began = Instant::now();
    let survivor = world.relay(&[("relay.lease", "60s"), ("relay.tick", "10m")]);
    world.until_published(within).await;
    let arrivals: Vec<Arrival> = world.arrivals(40, SOON).await;
    let ledger = Ledger::of(&arrivals);
    ledger.assert_sound(&world.committed().await);
    assert_eq!(ledger.repeats, 0, "{:?}", began.elapsed());
    drop(survivor);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_killed_inside_its_claim_stops_nobody() {
    let world = World::new().await;
    let (mut relay, database) = stopped_in_its_claim(&world).await;
    relay.kill().await;
    // What the kernel does with its sockets.
    database.cut();
    all_is_delivered(world, Duration::from_secs(8)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_frozen_inside_its_claim_stops_nobody() {
    let world = World::new().await;
    let (relay, _database) = stopped_in_its_claim(&world).await;
    relay.freeze();
    // Far below the lease: the server ends the transaction, and with it the session and the token.
    all_is_delivered(world, Duration::from_secs(15)).await;
    drop(relay);
}
