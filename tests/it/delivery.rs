//! What is committed arrives, once marked, with its bytes unchanged; what is not never does.

use std::time::Duration;

use crate::support::{Ledger, SOON, World};

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
