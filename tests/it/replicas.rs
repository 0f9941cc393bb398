//! Replicas share the work fairly, whoever comes and goes; operators and odd roles do not upset them.

use std::time::{Duration, Instant};

use futures_util::future::join_all;

use crate::admin::{address, get};
use crate::support::{Arrival, Ledger, Load, Proxy, Relay, SOON, World, amqp_url};

const IN_HAND: &str = "status = 'pending' AND claimed_by IS NOT NULL";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shares_are_fair_whoever_joins_or_leaves() {
    let mut world = World::new().await;
    let settings = [("relay.lease", "30s")];
    let load = Load::start(&world);
    let first = world.ready_relay(&settings).await;
    world.until_shares(&[64], SOON).await;
    let second = world.ready_relay(&settings).await;
    world.until_shares(&[32, 32], SOON).await;
    let mut third = world.ready_relay(&settings).await;
    world.until_shares(&[20, 22, 22], SOON).await;
    load.more(100).await;
    let status = third.terminate(SOON).await;
    assert!(status.success(), "{status}\n{}", third.log());
    world.until_shares(&[32, 32], SOON).await;
    load.more(100).await;
    load.stop().await;
    world.until_published(SOON).await;
    let committed = world.committed().await;
    let ledger = Ledger::of(&world.arrivals(committed.len(), SOON).await);
    ledger.assert_sound(&committed);
    assert_eq!(ledger.repeats, 0);
    drop((first, second));
    world.clean().await;
}

/// So many live, every bucket has an owner, and nobody has more than a fair share.
async fn until_shared_by(world: &World, replicas: usize) {
    let sql = format!(
        "SELECT count(*) = {replicas} AND sum(owned) = 64 AND max(owned) <= ceil(64.0 / {replicas})
         FROM (SELECT count(bucket) AS owned
               FROM outbox_replica LEFT JOIN outbox_bucket USING (token) GROUP BY token) s"
    );
    world.until(&sql, SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_join_and_leave_under_load_and_shares_are_fair_each_time() {
    let mut world = World::new().await;
    // Longer than the test: what a killed one had is not waited for.
    let settings = [("relay.lease", "60s"), ("relay.partitions", "4")];
    let load = Load::start(&world);
    let mut relays = Vec::new();
    for replicas in 1..=8 {
        relays.push(world.relay(&settings));
        until_shared_by(&world, replicas).await;
        load.more(20).await;
    }
    while let Some(mut relay) = relays.pop() {
        if relays.is_empty() {
            relays.push(relay);
            break;
        }
        if relays.len().is_multiple_of(2) {
            relay.kill().await;
        } else {
            let status = relay.terminate(SOON).await;
            assert!(status.success(), "{status}\n{}", relay.log());
        }
        until_shared_by(&world, relays.len()).await;
        load.more(20).await;
    }
    load.stop().await;
    world.until_published(SOON).await;
    let committed = world.committed().await;
    let ledger = Ledger::of(&world.arrivals(committed.len(), SOON).await);
    ledger.assert_sound(&committed);
    drop(relays);
    world.clean().await;
}

/// Claims that each has made so far.
async fn claims(admins: &[String]) -> Vec<u64> {
    let count = async |admin: &String| {
        let (_, text) = get(admin, "/metrics").await;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("bellwire_claim_seconds_count "));
        line.map_or(0, |count| count.parse().unwrap())
    };
    join_all(admins.iter().map(count)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_event_makes_no_herd_of_the_replicas_that_sleep() {
    let world = World::new().await;
    let settings = [("admin.listen", "127.0.0.1:0"), ("relay.tick", "10m")];
    let mut relays = Vec::new();
    let mut admins = Vec::new();
    for _ in 0..4 {
        let relay = world.ready_relay(&settings).await;
        admins.push(address(&relay).await);
        relays.push(relay);
    }
    until_shared_by(&world, 4).await;
    // Until all sleep.
    let mut before = claims(&admins).await;
    loop {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let now = claims(&admins).await;
        if now == before {
            break;
        }
        before = now;
    }
    world.insert(("order", "1"), "Placed", "{}").await;
    world.until_published(SOON).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let after = claims(&admins).await;
    let made: Vec<u64> = after
        .iter()
        .zip(&before)
        .map(|(now, then)| now - then)
        .collect();
    // One look for the ring, and what the owner's waking and going to sleep are answered by.
    assert!(made.iter().all(|made| (1..=4).contains(made)), "{made:?}");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_locked_by_an_operator_holds_its_aggregate_only_and_only_while_locked() {
    let mut world = World::new().await;
    world.fill("order", 10, 3).await;
    let operator = world.client().await;
    let lock = "BEGIN; SELECT FROM outbox WHERE id = 1 FOR UPDATE";
    operator.batch_execute(lock).await.unwrap();
    let relay = world.ready_relay(&[]).await;
    let mut arrivals = world.arrivals(27, SOON).await;
    assert!(arrivals.iter().all(|arrival| arrival.aggregate.1 != "1"));
    operator.batch_execute("ROLLBACK").await.unwrap();
    let released = Instant::now();
    arrivals.extend(world.arrivals(3, Duration::from_secs(3)).await);
    assert!(released.elapsed() < Duration::from_secs(5));
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    drop(relay);
    world.clean().await;
}

/// A relay with 20 rows of 10 aggregates in hand, sent and unconfirmed since the broker is mute. Of
/// the first, whose id is answered, an operator's open transaction holds the lock.
async fn a_row_in_hand_and_locked(
    world: &mut World,
    broker: &Proxy,
) -> (Relay, i64, tokio_postgres::Client) {
    let relay = world
        .ready_relay(&[
            ("AMQP_URL", &broker.through(&amqp_url())),
            ("relay.lease", "60s"),
            ("rabbitmq.confirm_timeout", "50s"),
            ("relay.partitions", "1"),
        ])
        .await;
    let first = world.warm().await + 1;
    broker.mute(true);
    world.fill("order", 10, 2).await;
    let in_hand = format!("SELECT count(*) >= 10 FROM outbox WHERE {IN_HAND}");
    world.until(&in_hand, SOON).await;
    let operator = world.client().await;
    let lock = format!("BEGIN; SELECT FROM outbox WHERE id = {first} FOR UPDATE");
    operator.batch_execute(&lock).await.unwrap();
    (relay, first, operator)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_locked_in_hand_delays_its_own_mark_only() {
    let mut world = World::new().await;
    let broker = Proxy::new(&amqp_url()).await;
    let (relay, locked, operator) = a_row_in_hand_and_locked(&mut world, &broker).await;
    broker.mute(false);
    let others = "SELECT bool_and(status = 'published') FROM outbox WHERE aggregate_id <> '1'";
    world.until(others, SOON).await;
    let status: String = world
        .one(&format!("SELECT status FROM outbox WHERE id = {locked}"))
        .await;
    assert_eq!(status, "pending");
    operator.batch_execute("ROLLBACK").await.unwrap();
    world.until_published(Duration::from_secs(5)).await;
    let ledger = Ledger::of(&world.arrivals(20, SOON).await);
    ledger.assert_sound(&world.committed().await);
    assert_eq!(ledger.repeats, 0);
    drop(relay);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_row_of_a_lost_session_holds_up_no_other_aggregate() {
    let mut world = World::new().await;
    let broker = Proxy::new(&amqp_url()).await;
    let (relay, _, operator) = a_row_in_hand_and_locked(&mut world, &broker).await;
    world
        .sql("SELECT pg_terminate_backend(session_pid) FROM outbox_replica")
        .await;
    relay.until_logged("claim token void", SOON).await;
    broker.mute(false);
    world.fill("fresh", 20, 1).await;
    let fresh = "SELECT bool_and(status = 'published') FROM outbox WHERE aggregate_type = 'fresh'";
    world.until(fresh, Duration::from_secs(10)).await;
    operator.batch_execute("ROLLBACK").await.unwrap();
    world.until_published(SOON).await;
    let ledger = Ledger::of(&world.arrivals(40, SOON).await);
    ledger.assert_sound(&world.committed().await);
    drop(relay);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_discarded_while_it_is_claimed_stays_discarded_and_strands_nothing() {
    let mut world = World::new().await;
    world.fill("order", 1, 4).await;
    let operator = world.client().await;
    // The claim meets the head while the operator's transaction is open.
    let discard = "BEGIN; UPDATE outbox SET status = 'discarded' WHERE id = 1";
    operator.batch_execute(discard).await.unwrap();
    let relay = world.ready_relay(&[]).await;
    let free = world.insert(("free", "1"), "Happened", "{}").await;
    assert_eq!(world.next_arrival(SOON).await.unwrap().id, free);
    operator.batch_execute("COMMIT").await.unwrap();
    let ids = |arrivals: &[Arrival]| {
        arrivals
            .iter()
            .map(|arrival| arrival.id)
            .collect::<Vec<_>>()
    };
    assert_eq!(ids(&world.arrivals(3, SOON).await), [2, 3, 4]);
    world.until_published(SOON).await;
    assert_eq!(world.count("discarded").await, 1);
    drop(relay);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_discarded_in_hand_stays_discarded_and_strands_nothing() {
    let mut world = World::new().await;
    let broker = Proxy::new(&amqp_url()).await;
    let url = broker.through(&amqp_url());
    let relay = world
        .ready_relay(&[
            ("AMQP_URL", &url),
            ("relay.lease", "60s"),
            ("rabbitmq.confirm_timeout", "50s"),
            ("relay.partitions", "1"),
        ])
        .await;
    let before = world.warm().await;
    broker.mute(true);
    world.fill("order", 1, 4).await;
    let mut arrivals = world.arrivals(1, SOON).await;
    // One in the socket, one waiting behind it.
    world
        .until(&format!("SELECT bool_and({IN_HAND}) FROM outbox"), SOON)
        .await;
    world
        .sql(&format!(
            "UPDATE outbox SET status = 'discarded' WHERE id IN ({before} + 1, {before} + 3)"
        ))
        .await;
    broker.mute(false);
    world.until_published(SOON).await;
    world.insert(("order", "1"), "Happened", "{}").await;
    while arrivals.last().unwrap().id != before + 5 {
        arrivals.push(world.next_arrival(SOON).await.unwrap());
    }
    world.until_published(SOON).await;
    // An event that was in hand when it was discarded may still arrive, in its place.
    let kept: Vec<i64> = arrivals
        .iter()
        .map(|arrival| arrival.id)
        .filter(|id| *id != before + 3)
        .collect();
    assert_eq!(kept, [1, 2, 4, 5].map(|nth| before + nth));
    let ascending = arrivals.is_sorted_by_key(|arrival| arrival.id);
    assert!(ascending);
    assert_eq!(world.count("discarded").await, 2);
    drop(relay);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_transaction_is_open_while_a_confirm_is_awaited() {
    let mut world = World::new().await;
    let broker = Proxy::new(&amqp_url()).await;
    let url = broker.through(&amqp_url());
    let relay = world
        .ready_relay(&[
            ("AMQP_URL", &url),
            ("relay.lease", "60s"),
            ("rabbitmq.confirm_timeout", "50s"),
            ("relay.partitions", "1"),
        ])
        .await;
    world.warm().await;
    broker.mute(true);
    world.fill("order", 10, 3).await;
    world
        .until(&format!("SELECT bool_and({IN_HAND}) FROM outbox"), SOON)
        .await;
    let quiet = format!(
        "SELECT count(*) > 0 AND bool_and(state = 'idle') FROM pg_stat_activity
         WHERE application_name LIKE '%{}'",
        relay.name
    );
    world.until(&quiet, SOON).await;
    // Nor is any row locked.
    world.sql("SELECT FROM outbox FOR UPDATE NOWAIT").await;
    drop(relay);
    world.clean().await;
}

async fn isolation_does_not_matter(level: &str) {
    let mut world = World::new().await;
    let default = format!("default_transaction_isolation = '{level}'");
    let url = world.login("relay", &[&default]).await;
    let settings = [("DATABASE_URL", url.as_str()), ("relay.lease", "30s")];
    let relays = [world.relay(&settings), world.relay(&settings)];
    world.fill("order", 50, 20).await;
    let arrivals = world.arrivals(1000, SOON).await;
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    world.until_published(SOON).await;
    let attempts: i64 = world.one("SELECT sum(attempts) FROM outbox").await;
    assert_eq!(attempts, 0);
    for mut relay in relays {
        relay.kill().await;
        assert_eq!(relay.logged("could not serialize"), 0, "{}", relay.log());
    }
    world.drop_roles().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_with_repeatable_read_costs_no_attempts() {
    isolation_does_not_matter("repeatable read").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_with_serializable_costs_no_attempts() {
    isolation_does_not_matter("serializable").await;
}

/// Planner settings under which a LIMIT in a sub-select is not obeyed.
const NESTED_LOOPS: &[&str] = &[
    "enable_hashjoin = off",
    "enable_mergejoin = off",
    "enable_hashagg = off",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn never_more_is_claimed_at_once_than_the_batch_size_whatever_the_plan() {
    let mut world = World::new().await;
    let broker = Proxy::new(&amqp_url()).await;
    let amqp = broker.through(&amqp_url());
    let url = world.login("relay", NESTED_LOOPS).await;
    let mut relay = world
        .ready_relay(&[
            ("DATABASE_URL", &url),
            ("AMQP_URL", &amqp),
            ("relay.batch_size", "5"),
            ("relay.partitions", "1"),
            ("relay.lease", "60s"),
            ("rabbitmq.confirm_timeout", "50s"),
        ])
        .await;
    world.warm().await;
    broker.mute(true);
    world.fill("order", 100, 1).await;
    world
        .until(&format!("SELECT bool_and({IN_HAND}) FROM outbox"), SOON)
        .await;
    // Rows of one claim carry the same moment.
    let most: i64 = world
        .one(
            "SELECT max(claim.rows) FROM (SELECT count(*) AS rows FROM outbox
                                          GROUP BY claimed_until) claim",
        )
        .await;
    assert!(most <= 5, "{most}");
    relay.kill().await;
    world.drop_roles().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn never_more_is_in_hand_than_there_are_credits_whatever_the_plan() {
    let mut world = World::new().await;
    let broker = Proxy::new(&amqp_url()).await;
    let amqp = broker.through(&amqp_url());
    let url = world.login("relay", NESTED_LOOPS).await;
    let mut relay = world
        .ready_relay(&[
            ("DATABASE_URL", &url),
            ("AMQP_URL", &amqp),
            ("relay.batch_size", "5"),
            ("relay.partitions", "1"),
            ("relay.window", "1"),
            ("relay.lease", "60s"),
            ("rabbitmq.confirm_timeout", "50s"),
        ])
        .await;
    broker.delay(Duration::from_millis(2));
    world.fill("order", 50, 2).await;
    // Twice the window.
    let most = format!("SELECT count(*) FROM outbox WHERE {IN_HAND}");
    let mut arrivals = Vec::new();
    while arrivals.len() < 100 {
        arrivals.push(world.next_arrival(SOON).await.unwrap());
        let in_hand: i64 = world.one(&most).await;
        assert!(in_hand <= 2, "{in_hand}");
    }
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    relay.kill().await;
    world.drop_roles().await;
    world.clean().await;
}
