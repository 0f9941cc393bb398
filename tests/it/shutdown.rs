//! A relay that is told to stop finishes what it sent, hands back the rest and leaves nothing behind.

use std::collections::HashSet;
use std::time::Duration;

use crate::support::{Arrival, Ledger, Load, Proxy, Relay, SOON, World, amqp_url};

/// The grace time (5 s in each test) and a second to exit.
const EXIT: Duration = Duration::from_secs(6);

/// Leases, buckets and rows are free.
async fn assert_nothing_left(world: &World) {
    let left: String = world
        .one(
            "SELECT format('replicas %s, buckets %s, rows %s',
                    (SELECT count(*) FROM outbox_replica),
                    (SELECT count(*) FROM outbox_bucket WHERE token IS NOT NULL),
                    (SELECT count(*) FROM outbox WHERE status = 'pending' AND claimed_by IS NOT NULL))",
        )
        .await;
    assert_eq!(left, "replicas 0, buckets 0, rows 0");
}

/// A new relay delivers the rest; answers everything that arrived.
async fn rest_is_delivered(world: &mut World) -> Vec<Arrival> {
    let mut next = world.ready_relay(&[]).await;
    world.until_published(SOON).await;
    let committed = world.committed().await;
    let arrivals = world.arrivals(committed.len(), SOON).await;
    Ledger::of(&arrivals).assert_sound(&committed);
    next.kill().await;
    arrivals
}

fn repeated(arrivals: &[Arrival]) -> Vec<i64> {
    let mut seen = HashSet::new();
    arrivals
        .iter()
        .map(|arrival| arrival.id)
        .filter(|id| !seen.insert(*id))
        .collect()
}

/// Those of which the log does not say that they may come twice.
fn unnamed(relay: &Relay, ids: &[i64]) -> Vec<i64> {
    let log = relay.log();
    let named: HashSet<&str> = log
        .lines()
        .filter(|line| line.contains("a duplicate is possible"))
        .flat_map(|line| line.split(|letter: char| !letter.is_ascii_alphanumeric()))
        .collect();
    ids.iter()
        .copied()
        .filter(|id| !named.contains(id.to_string().as_str()))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_under_load_repeats_nothing_and_leaves_nothing_behind() {
    let mut world = World::new().await;
    let load = Load::start(&world);
    for _ in 0..3 {
        let mut relay = world
            .ready_relay(&[("relay.lease", "60s"), ("relay.grace", "5s")])
            .await;
        load.more(100).await;
        let status = relay.terminate(EXIT).await;
        assert!(status.success(), "{status}\n{}", relay.log());
        assert_nothing_left(&world).await;
    }
    load.stop().await;
    let arrivals = rest_is_delivered(&mut world).await;
    assert_eq!(repeated(&arrivals), [0i64; 0]);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_with_the_broker_gone_names_what_may_come_twice() {
    let mut world = World::new().await;
    let broker = Proxy::new(&amqp_url()).await;
    let url = broker.through(&amqp_url());
    let mut relay = world
        .ready_relay(&[
            ("AMQP_URL", &url),
            ("relay.lease", "60s"),
            ("relay.grace", "5s"),
            ("log.level", "info"),
        ])
        .await;
    let load = Load::start(&world);
    load.more(50).await;
    broker.mute(true);
    load.more(50).await;
    broker.cut();
    broker.refuse(true);
    let status = relay.terminate(EXIT).await;
    assert!(status.success(), "{status}\n{}", relay.log());
    assert_nothing_left(&world).await;
    load.stop().await;
    let repeated = repeated(&rest_is_delivered(&mut world).await);
    assert!(!repeated.is_empty(), "nothing was outstanding");
    assert_eq!(
        unnamed(&relay, &repeated),
        [0i64; 0],
        "of {repeated:?}\n{}",
        relay.log()
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_with_confirms_outstanding_ends_in_time_and_names_them() {
    let mut world = World::new().await;
    let broker = Proxy::new(&amqp_url()).await;
    let url = broker.through(&amqp_url());
    let mut relay = world
        .ready_relay(&[
            ("AMQP_URL", &url),
            ("relay.lease", "60s"),
            ("relay.grace", "5s"),
            ("rabbitmq.confirm_timeout", "50s"),
            ("relay.partitions", "1"),
            ("log.level", "info"),
        ])
        .await;
    world.warm().await;
    broker.mute(true);
    world.fill("order", 10, 5).await;
    let in_socket: Vec<i64> = world
        .arrivals(10, SOON)
        .await
        .iter()
        .map(|arrival| arrival.id)
        .collect();
    let status = relay.terminate(EXIT).await;
    assert!(status.success(), "{status}\n{}", relay.log());
    assert_nothing_left(&world).await;
    assert_eq!(unnamed(&relay, &in_socket), [0i64; 0], "{}", relay.log());
    broker.mute(false);
    let again = rest_is_delivered(&mut world).await;
    assert_eq!(again.len(), 50, "each once, those in the socket once more");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_relay_hands_its_rows_on_at_once_however_long_its_lease() {
    let mut world = World::new().await;
    let broker = Proxy::new(&amqp_url()).await;
    let url = broker.through(&amqp_url());
    let mut relay = world
        .ready_relay(&[
            ("AMQP_URL", &url),
            ("relay.lease", "300s"),
            ("relay.grace", "5s"),
        ])
        .await;
    broker.delay(Duration::from_millis(300));
    world.fill("order", 30, 10).await;
    let in_hand =
        "SELECT count(*) >= 50 FROM outbox WHERE status = 'pending' AND claimed_by IS NOT NULL";
    world.until(in_hand, SOON).await;
    let status = relay.terminate(EXIT).await;
    assert!(status.success(), "{status}\n{}", relay.log());
    let left = world.count("pending").await;
    assert!(left > 0, "it was to be stopped before it was done");
    let next = world.relay(&[("relay.lease", "300s"), ("relay.tick", "10m")]);
    world.until_published(Duration::from_secs(10)).await;
    let arrivals = world.arrivals(300, SOON).await;
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    assert_eq!(repeated(&arrivals), [0i64; 0]);
    drop(next);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_signal_ends_a_stop_at_once() {
    let mut world = World::new().await;
    let broker = Proxy::new(&amqp_url()).await;
    let url = broker.through(&amqp_url());
    let mut relay = world
        .ready_relay(&[
            ("AMQP_URL", &url),
            ("relay.lease", "60s"),
            ("relay.grace", "50s"),
            ("rabbitmq.confirm_timeout", "50s"),
            ("relay.partitions", "1"),
        ])
        .await;
    world.warm().await;
    broker.mute(true);
    world.fill("order", 1, 5).await;
    let in_hand =
        "SELECT EXISTS (SELECT FROM outbox WHERE status = 'pending' AND claimed_by IS NOT NULL)";
    world.until(in_hand, SOON).await;
    relay.signal(rustix::process::Signal::TERM);
    relay.until_logged("stopping", SOON).await;
    let status = relay.terminate(Duration::from_secs(5)).await;
    assert_eq!(status.code(), Some(1), "{}", relay.log());
    world.clean().await;
}
