//! Events of one aggregate leave in id order, whoever carries them; aggregates do not wait for each
//! other.

use std::time::Duration;

use crate::support::{Ledger, Proxy, SOON, World, amqp_url};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_aggregate_is_never_split_between_relays_that_start_together() {
    let mut world = World::new().await;
    let broker = Proxy::new(&amqp_url()).await;
    let url = broker.through(&amqp_url());
    let settings = [
        ("AMQP_URL", url.as_str()),
        ("relay.batch_size", "10"),
        ("relay.lease", "30s"),
    ];
    broker.delay(Duration::from_millis(10));
    let mut relays = Vec::new();
    let mut arrivals = Vec::new();
    // Each wave comes while rows of the one before are in hand. Most buckets have some, so that those
    // which change hands in the middle do, too.
    for wave in 0..4 {
        world.fill("hot", 1, 100).await;
        world.fill("calm", 60, 8).await;
        if wave % 2 == 0 {
            relays.extend([world.relay(&settings), world.relay(&settings)]);
            let owners = relays.len();
            world
                .until_shares(&vec![64 / i64::try_from(owners).unwrap(); owners], SOON)
                .await;
        } else {
            for _ in 0..600 {
                arrivals.push(world.next_arrival(SOON).await.unwrap());
            }
        }
    }
    arrivals.extend(world.arrivals(2320 - arrivals.len(), SOON * 2).await);
    let ledger = Ledger::of(&arrivals);
    ledger.assert_sound(&world.committed().await);
    assert_eq!(ledger.repeats, 0);
    world.until_published(SOON).await;
    drop(relays);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_holds_between_relays_with_different_partition_counts() {
    let mut world = World::new().await;
    let relays = [
        world.relay(&[("relay.partitions", "8"), ("relay.lease", "30s")]),
        world.relay(&[("relay.partitions", "16"), ("relay.lease", "30s")]),
    ];
    world.fill("order", 20, 250).await;
    let arrivals = world.arrivals(5000, SOON * 2).await;
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    drop(relays);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_newer_event_never_passes_an_older_one_in_backoff() {
    let mut world = World::new().await;
    world.unbind("#").await;
    world.bind("*.Routed").await;
    let first = world.insert(("order", "X"), "Lost", "{}").await;
    let second = world.insert(("order", "X"), "Routed", "{}").await;
    let third = world.insert(("order", "X"), "Routed", "{}").await;
    let other = world.insert(("order", "Y"), "Routed", "{}").await;
    let relay = world
        .ready_relay(&[("retry.backoff", "100ms"), ("retry.max_attempts", "20")])
        .await;
    assert_eq!(world.next_arrival(SOON).await.unwrap().id, other);
    let twice = format!("SELECT attempts >= 2 FROM outbox WHERE id = {first}");
    world.until(&twice, SOON).await;
    assert!(
        world
            .next_arrival(Duration::from_millis(100))
            .await
            .is_none(),
        "overtaken"
    );
    world.bind("*.Lost").await;
    let ids: Vec<i64> = world
        .arrivals(3, SOON)
        .await
        .iter()
        .map(|arrival| arrival.id)
        .collect();
    assert_eq!(ids, [first, second, third]);
    world.until_published(SOON).await;
    let attempts: i64 = world
        .one(&format!(
            "SELECT sum(attempts) FROM outbox WHERE id <> {first}"
        ))
        .await;
    assert_eq!(attempts, 0, "of those that only waited");
    drop(relay);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_behind_a_dead_event_hold_up_nobody_else() {
    let mut world = World::new().await;
    let dead = world.insert(("stuck", "1"), "Happened", "{}").await;
    world.sql("UPDATE outbox SET status = 'dead'").await;
    world.fill("stuck", 1, 5000).await;
    let relay = world.ready_relay(&[("relay.batch_size", "50")]).await;
    let free = world.insert(("free", "1"), "Happened", "{}").await;
    let arrival = world.next_arrival(Duration::from_secs(2)).await;
    assert_eq!(arrival.expect("within 2 s").id, free);
    assert!(
        world
            .next_arrival(Duration::from_millis(300))
            .await
            .is_none(),
        "passed a dead one"
    );
    // Plain SQL of an operator is enough to go on.
    world
        .sql("UPDATE outbox SET status = 'discarded' WHERE status = 'dead'")
        .await;
    for id in dead + 1..=dead + 20 {
        assert_eq!(world.next_arrival(SOON).await.unwrap().id, id);
    }
    drop(relay);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_id_under_another_type_is_another_aggregate() {
    let mut world = World::new().await;
    for (aggregate_type, aggregate_id) in [("order", "1"), ("a", "b.c")] {
        world
            .insert((aggregate_type, aggregate_id), "Head", "{}")
            .await;
    }
    world.sql("UPDATE outbox SET status = 'dead'").await;
    let locked = world.insert(("cart", "1"), "Head", "{}").await;
    for aggregate in [("order", "1"), ("a", "b.c"), ("cart", "1")] {
        world.insert(aggregate, "Behind", "{}").await;
    }
    for aggregate in [("invoice", "1"), ("a.b", "c"), ("basket", "1")] {
        world.insert(aggregate, "Free", "{}").await;
        world.insert(aggregate, "Free", "{}").await;
    }
    let operator = world.client().await;
    let lock = format!("BEGIN; SELECT FROM outbox WHERE id = {locked} FOR UPDATE");
    operator.batch_execute(&lock).await.unwrap();
    let relay = world.ready_relay(&[]).await;
    let mut arrivals = world.arrivals(6, SOON).await;
    assert!(
        arrivals
            .iter()
            .all(|arrival| arrival.routing_key.ends_with(".Free"))
    );
    operator.batch_execute("COMMIT").await.unwrap();
    world
        .sql("UPDATE outbox SET status = 'discarded' WHERE status = 'dead'")
        .await;
    arrivals.extend(world.arrivals(4, SOON).await);
    world.until_published(SOON).await;
    world
        .sql("DELETE FROM outbox WHERE status = 'discarded'")
        .await;
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    drop(relay);
    world.clean().await;
}
