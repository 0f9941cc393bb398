//! Under strict order ids of an aggregate leave in their order, however its writers overlap; it costs
//! the writers nothing, and one that stays open is named.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support::{Ledger, SOON, World};

const STRICT: (&str, &str) = ("relay.ordering", "strict");
const NO_TICK: (&str, &str) = ("relay.tick", "1h");
const AT_ONCE: Duration = Duration::from_secs(3);

/// Writers that overlap on few aggregates all the time, and commit or roll back when they please.
async fn hammer(world: &World, writers: u32, for_how_long: Duration) {
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = Vec::new();
    for _ in 0..writers {
        let (client, stop) = (world.client().await, stop.clone());
        tasks.push(tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                client
                    .batch_execute(
                        "BEGIN; INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
                         SELECT 'order', (random() * 3)::int::text, 'Placed', '{}'
                         FROM generate_series(1, 1 + (random() * 2)::int)",
                    )
                    .await
                    .unwrap();
                let pause = Duration::from_millis(u64::from(rand::random::<u32>() % 40));
                tokio::time::sleep(pause).await;
                let end = if rand::random::<u32>().is_multiple_of(10) {
                    "ROLLBACK"
                } else {
                    "COMMIT"
                };
                client.batch_execute(end).await.unwrap();
            }
        }));
    }
    tokio::time::sleep(for_how_long).await;
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_of_an_aggregate_leave_in_their_order_however_its_writers_overlap() {
    let mut world = World::new().await;
    let mut relays = Vec::new();
    for _ in 0..2 {
        relays.push(world.ready_relay(&[STRICT, NO_TICK]).await);
    }
    hammer(&world, 16, Duration::from_secs(3)).await;
    world.until_published(SOON).await;
    let committed = world.committed().await;
    let arrivals = world.arrivals(committed.len(), SOON).await;
    Ledger::of(&arrivals).assert_sound(&committed);
    drop(relays);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_waits_for_an_older_writer_and_for_no_younger_one() {
    let mut world = World::new().await;
    let _relay = world.ready_relay(&[STRICT, NO_TICK]).await;
    let insert = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
                  VALUES ('order', '1', 'Placed', '{}')";
    let (older, younger) = (world.client().await, world.client().await);
    older
        .batch_execute(&format!("BEGIN; {insert}"))
        .await
        .unwrap();
    let second = world.insert(("order", "1"), "Placed", "{}").await;
    let elsewhere = world.insert(("order", "2"), "Placed", "{}").await;
    // Both were asked for by then, also by a relay that has just begun on a slow machine.
    tokio::time::sleep(Duration::from_secs(2)).await;
    younger
        .batch_execute(&format!("BEGIN; {insert}"))
        .await
        .unwrap();
    assert!(
        world
            .next_arrival(Duration::from_millis(700))
            .await
            .is_none(),
        "one with a lower id can still appear"
    );
    let run = world.command(&[STRICT], &["status"]).await;
    let pid: i32 = older
        .query_one("SELECT pg_backend_pid()", &[])
        .await
        .unwrap()
        .get(0);
    assert!(run.stdout.contains(&format!("pid {pid}")), "{}", run.stdout);
    older.batch_execute("COMMIT").await.unwrap();
    let ids: Vec<_> = world
        .arrivals(3, AT_ONCE)
        .await
        .iter()
        .map(|arrival| arrival.id)
        .collect();
    assert_eq!(ids.len(), 3);
    assert!(ids.contains(&elsewhere));
    let of_one: Vec<_> = ids.into_iter().filter(|id| *id != elsewhere).collect();
    assert_eq!(of_one, [1, second], "the younger writer is not waited for");
    younger.batch_execute("ROLLBACK").await.unwrap();
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_that_do_not_tell_who_was_first_are_refused() {
    let world = World::new().await;
    world.sql("ALTER TABLE outbox ALTER id SET CACHE 20").await;
    let run = world.command(&[STRICT], &["run", "--once"]).await;
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    assert!(
        run.stderr.contains("CACHE 20") && run.stderr.contains("relay.ordering"),
        "{}",
        run.stderr
    );
    let run = world.command(&[], &["run", "--once"]).await;
    assert_eq!(run.status.code(), Some(0), "{}", run.stderr);
    assert!(run.stderr.contains("draw ids ahead"), "{}", run.stderr);
    world.clean().await;
}
