//! Outboxes of other layouts are taken into service with what is pending in them, and the application goes
//! on as before.

use crate::support::{Cluster, Ledger, SOON, World};

const OUTBOX_EVENTS: &str = include_str!("../../sql/adopt/outbox_events.sql");
const OUTBOX_ROUTER: &str = include_str!("../../sql/adopt/outbox_router.sql");

async fn adopt(world: &World, script: &str) -> Result<(), tokio_postgres::Error> {
    let script = script.replace("public.", &format!("{}.", world.schema));
    let adopted = world.db.batch_execute(&script).await;
    if adopted.is_err() {
        world.sql("ROLLBACK").await;
    }
    adopted
}

/// As its own documentation creates it, filled like one in use: 3 aggregates take turns.
async fn outbox_events(world: &World) {
    world
        .sql(
            "CREATE TABLE outbox_events (
                 id UUID PRIMARY KEY DEFAULT gen_random_uuid(),
                 event_sequence BIGINT GENERATED ALWAYS AS IDENTITY,
                 aggregate_type VARCHAR(64) NOT NULL,
                 aggregate_id VARCHAR(128) NOT NULL,
                 event_type VARCHAR(128) NOT NULL,
                 payload JSONB NOT NULL,
                 correlation_id VARCHAR(128),
                 status VARCHAR(20) NOT NULL DEFAULT 'PENDING',
                 claim_owner VARCHAR(64),
                 retry_count INT NOT NULL DEFAULT 0,
                 created_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
                 updated_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
                 claimed_at TIMESTAMPTZ,
                 dispatched_at TIMESTAMPTZ
             );
             INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, correlation_id)
             SELECT 'order', (n % 3)::text, 'Happened', jsonb_build_object('n', n), 'c-' || n
             FROM generate_series(1, 60) n;
             UPDATE outbox_events SET status = 'DISPATCHED', dispatched_at = now() WHERE event_sequence <= 30;
             UPDATE outbox_events SET status = 'CLAIMED', claim_owner = 'execution-7', claimed_at = now()
             WHERE event_sequence BETWEEN 31 AND 39;
             UPDATE outbox_events SET status = 'POISON', retry_count = 3 WHERE event_sequence = 40",
        )
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pending_rows_of_an_outbox_events_table_go_out_in_order_and_new_ones_after_them() {
    let cluster = Cluster::new();
    let mut topic = cluster.create("order", 2).await;
    let world = World::outbox().await;
    outbox_events(&world).await;
    let uuids: Vec<String> = world
        .one("SELECT array_agg(id::text ORDER BY event_sequence) FROM outbox_events")
        .await;
    adopt(&world, OUTBOX_EVENTS).await.unwrap();
    // The application has noticed nothing.
    let sequence: i64 = world
        .one(
            "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, correlation_id)
             VALUES ('order', '1', 'Happened', '{\"n\": 61}', 'c-61') RETURNING event_sequence",
        )
        .await;
    assert_eq!(sequence, 61);
    let _relay = cluster.relay(&world, &[]);
    world.until_published(SOON).await;
    let records = topic.records(30, SOON).await;
    let mut ledger = Ledger::default();
    for record in &records {
        ledger.take(&record.arrival());
        let n = record.id();
        let value = String::from_utf8(record.value.clone().unwrap()).unwrap();
        assert_eq!(value, format!("{{\"n\": {n}}}"));
        assert_eq!(
            record.header("correlation_id"),
            Some(format!("c-{n}").as_str())
        );
        if let Some(uuid) = uuids.get(usize::try_from(n).unwrap() - 1) {
            assert_eq!(record.header("event_id"), Some(uuid.as_str()));
        }
    }
    let wanted: Vec<i64> = (31..=61).filter(|n| *n != 40).collect();
    ledger.assert_sound(&wanted);
    let states: String = world
        .one("SELECT string_agg(DISTINCT status, ',' ORDER BY status) FROM outbox_events")
        .await;
    assert_eq!(states, "DISPATCHED,POISON");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_adoption_happens_as_a_whole_or_not_at_all() {
    let world = World::outbox().await;
    outbox_events(&world).await;
    world.insert(("order", "1"), "Placed", "{}").await;
    let refused = adopt(&world, OUTBOX_EVENTS).await.unwrap_err();
    let refused = refused.as_db_error().unwrap().message().to_owned();
    assert!(refused.contains("has events already"), "{refused}");
    assert_eq!(world.count("pending").await, 1);
    let kind: String = world
        .one("SELECT relkind::text FROM pg_class WHERE oid = 'outbox_events'::regclass")
        .await;
    assert_eq!(kind, "r");
    world.sql("DELETE FROM outbox").await;
    // A writer that has not ended holds it up, and its event is not lost.
    let writer = world.client().await;
    writer
        .batch_execute(
            "BEGIN; INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
             VALUES ('order', '1', 'Late', '{}')",
        )
        .await
        .unwrap();
    let (adopted, ()) = tokio::join!(adopt(&world, OUTBOX_EVENTS), async {
        let waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted
                     AND relation = (SELECT oid FROM pg_class WHERE relname = 'outbox_events'
                                     AND relnamespace = $1::text::regnamespace))";
        let looker = world.client().await;
        while !looker
            .query_one(waits, &[&world.schema])
            .await
            .unwrap()
            .get::<_, bool>(0)
        {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        writer.batch_execute("COMMIT").await.unwrap();
    });
    adopted.unwrap();
    let late: i64 = world
        .one("SELECT count(*) FROM outbox WHERE event_type = 'Late'")
        .await;
    assert_eq!(late, 1);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_an_outbox_routers_table_go_out_in_order_and_deletions_take_nothing_away() {
    let cluster = Cluster::new();
    let mut topic = cluster.create("order", 2).await;
    let world = World::outbox().await;
    world
        .sql(
            "CREATE TABLE outboxevent (
                 id UUID NOT NULL PRIMARY KEY, aggregatetype VARCHAR(255) NOT NULL,
                 aggregateid VARCHAR(255) NOT NULL, type VARCHAR(255) NOT NULL, payload JSONB
             );
             INSERT INTO outboxevent SELECT gen_random_uuid(), 'order', (n % 3)::text, 'Happened',
                 jsonb_build_object('n', n) FROM generate_series(1, 30) n;
             INSERT INTO outboxevent VALUES (gen_random_uuid(), 'order', '1', 'Gone', NULL)",
        )
        .await;
    adopt(&world, OUTBOX_ROUTER).await.unwrap();
    world
        .sql(
            "BEGIN;
             INSERT INTO outboxevent VALUES ('00000000-0000-4000-8000-000000000032', 'order', '1', 'Happened', '{\"n\": 32}');
             DELETE FROM outboxevent WHERE id = '00000000-0000-4000-8000-000000000032';
             COMMIT",
        )
        .await;
    let _relay = cluster.relay(&world, &[]);
    world.until_published(SOON).await;
    let records = topic.records(32, SOON).await;
    let mut last = std::collections::HashMap::new();
    for record in &records {
        let value = String::from_utf8(record.value.clone().unwrap()).unwrap();
        let n: i64 = match value.as_str() {
            "null" => 31,
            value => value
                .trim_start_matches("{\"n\": ")
                .trim_end_matches('}')
                .parse()
                .unwrap(),
        };
        let before = last.insert(record.key.clone(), n);
        assert!(before < Some(n), "{before:?} {n}");
    }
    assert_eq!(records.len(), 32);
    world.clean().await;
}
