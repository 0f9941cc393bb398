//! What is committed arrives, once marked, with its bytes unchanged; what is not never does.

use std::time::Duration;

use crate::support::{Ledger, SOON, UNSET, World};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolled_back_inserts_are_never_seen_and_gaps_are_not_waited_for() {
    let mut world = World::new().await;
    let _relay = world.ready_relay(&[]).await;
    world
        .sql(
            "BEGIN;
             INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'Kept', '{}');
             SAVEPOINT s;
             INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'Undone', '{}');
             ROLLBACK TO s;
             INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'Kept', '{}');
             COMMIT",
        )
        .await;
    for _ in 0..100 {
        world
            .sql(
                "BEGIN;
                 INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'Undone', '{}');
                 ROLLBACK",
            )
            .await;
    }
    world.insert(("order", "1"), "Kept", "{}").await;
    let arrivals = world.arrivals(3, Duration::from_secs(5)).await;
    assert!(
        arrivals
            .iter()
            .all(|arrival| arrival.routing_key == "order.Kept")
    );
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    world.until_published(SOON).await;
    world.clean().await;
}

/// `run --once`, for cron.
async fn one_pass(world: &World, settings: &[(&str, &str)], code: i32) -> (String, String) {
    let run = world.command(settings, &["run", "--once"]).await;
    assert_eq!(
        run.status.code(),
        Some(code),
        "{}\n{}",
        run.stdout,
        run.stderr
    );
    (run.stdout, run.stderr)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_pass_carries_what_is_due_and_waits_for_nothing_else() {
    let mut world = World::new().await;
    let (said, _) = one_pass(&world, &[], 0).await;
    assert_eq!(
        said,
        "published 0, failed 0, dead-lettered 0, handed back 0"
    );
    for number in 0..200 {
        world
            .insert(("order", &(number % 7).to_string()), "Placed", "{}")
            .await;
    }
    let committed = world.committed().await;
    world
        .sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, next_attempt_at)
             VALUES ('order', 'later', 'Placed', '{}', now() + interval '1 hour')",
        )
        .await;
    let (said, _) = one_pass(&world, &[], 0).await;
    assert_eq!(
        said,
        "published 200, failed 0, dead-lettered 0, handed back 0"
    );
    Ledger::of(&world.arrivals(200, SOON).await).assert_sound(&committed);
    let left: i64 =
        world.one("SELECT count(*) FROM outbox WHERE status = 'pending' AND claimed_by IS NULL AND attempts = 0").await;
    assert_eq!(left, 1);
    assert_eq!(
        world
            .one::<i64>("SELECT count(*) FROM outbox_replica")
            .await,
        0,
        "it left nothing behind"
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_pass_says_that_events_failed() {
    let world = World::new().await;
    world.unbind("#").await;
    world.bind("order.*").await;
    world.insert(("invoice", "1"), "Sent", "{}").await;
    world.insert(("invoice", "1"), "Paid", "{}").await;
    world.insert(("order", "1"), "Placed", "{}").await;
    let (said, _) = one_pass(&world, &[("retry.backoff", "1h")], 3).await;
    assert!(
        said.starts_with("published 1, failed 1, dead-lettered 0"),
        "{said}"
    );
    assert_eq!(
        world.one::<i64>("SELECT sum(attempts) FROM outbox").await,
        1
    );
    world.sql("UPDATE outbox SET next_attempt_at = now()").await;
    let (said, _) = one_pass(&world, &[("retry.max_attempts", "2")], 3).await;
    assert!(
        said.starts_with("published 0, failed 0, dead-lettered 1"),
        "{said}"
    );
    let (said, _) = one_pass(&world, &[], 0).await;
    assert!(
        said.starts_with("published 0, failed 0, dead-lettered 0"),
        "{said}"
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_pass_claims_nothing_without_its_exchange_or_broker() {
    let world = World::unbound().await;
    world.store.migrate().await.unwrap();
    world.insert(("order", "1"), "Placed", "{}").await;
    let (said, log) = one_pass(&world, &[], 1).await;
    assert_eq!(said, "");
    let last = log.lines().last().unwrap();
    let message = format!(
        "bellwire: Exchange '{}' does not exist in vhost '/': declare it and bind the consumer queues. Nothing was claimed.",
        world.exchange
    );
    assert_eq!(last, message);
    let (_, log) = one_pass(
        &world,
        &[("AMQP_URL", "amqp://guest:guest@127.0.0.1:1/%2f")],
        1,
    )
    .await;
    assert!(
        log.lines()
            .last()
            .unwrap()
            .ends_with("Nothing was claimed."),
        "{log}"
    );
    let untouched: bool = world
        .one("SELECT status = 'pending' AND attempts = 0 AND claimed_by IS NULL FROM outbox")
        .await;
    assert!(untouched);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_null_sink_delivers_nothing_needs_no_broker_and_says_so() {
    let mut world = World::new().await;
    let null = [("relay.sink", "null"), ("AMQP_URL", UNSET)];
    world.fill("order", 100, 10).await;
    let (said, logged) = one_pass(&world, &null, 0).await;
    assert!(said.starts_with("published 1000,"), "{said}");
    assert!(
        logged.contains("WARN") && logged.contains("events go nowhere"),
        "{logged}"
    );
    world.until_published(SOON).await;
    let delivered = world.insert(("order", "1"), "Placed", "{}").await;
    one_pass(&world, &[], 0).await;
    assert_eq!(world.arrivals(1, SOON).await[0].id, delivered);

    let checked = world.command(&null, &["check"]).await;
    assert_eq!(checked.status.code(), Some(0), "{}", checked.stdout);
    assert!(
        checked.stdout.contains("relay.sink") && checked.stdout.contains("go nowhere"),
        "{}",
        checked.stdout
    );
    let checked = world.command(&[], &["check"]).await;
    assert!(!checked.stdout.contains("nowhere"), "{}", checked.stdout);
    world.clean().await;
}
