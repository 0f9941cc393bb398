//! Lag is what people take it for: how long the oldest event has been due, and what it waits for; and the
//! question costs little, however many wait.

use std::time::{Duration, Instant};

use bellwire::store::{Names, OldestEvent};

use crate::support::World;

impl World {
    async fn oldest(&self) -> OldestEvent {
        let lag = self.store.lag().await.unwrap();
        lag.oldest.expect("something waits")
    }

    /// The oldest event is this one, and late since this time, exactly.
    async fn assert_late(&self, aggregate_id: &str, since: &str) -> OldestEvent {
        let late = format!(
            "SELECT extract(epoch FROM clock_timestamp() - {since})::float8 FROM outbox
             WHERE aggregate_id = '{aggregate_id}'"
        );
        let before: f64 = self.one(&late).await;
        let oldest = self.oldest().await;
        let after: f64 = self.one(&late).await;
        assert_eq!(oldest.aggregate_id, aggregate_id);
        let age = oldest.age_seconds.unwrap();
        assert!(
            (before..=after).contains(&age),
            "{before} <= {age} <= {after}: {oldest:?}"
        );
        oldest
    }

    /// The plan that our sessions have for the lag query.
    async fn lag_plan(&self) -> String {
        let sql =
            Names::new(&self.schema, "outbox").render(include_str!("../../sql/queries/lag.sql"));
        let session = self.store.connect().await.unwrap();
        session
            .batch_execute(&format!("PREPARE lag (int) AS {sql}"))
            .await
            .unwrap();
        let plan = session
            .simple_query("EXPLAIN EXECUTE lag (10000)")
            .await
            .unwrap();
        let lines = plan.iter().filter_map(|message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0),
            _ => None,
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}

const INSERT: &str = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at, next_attempt_at)";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scheduled_event_is_late_from_when_it_is_due() {
    let world = World::new().await;
    assert!(world.store.lag().await.unwrap().oldest.is_none());
    world
        .sql(&format!(
            "{INSERT} VALUES ('order', '1', 'Later', '{{}}', now() - interval '2 days', now() + interval '1 hour')"
        ))
        .await;
    let oldest = world.oldest().await;
    assert_eq!(oldest.age_seconds, Some(0.0), "not due yet");
    assert!(
        oldest.waits_for.contains("it is scheduled, due in 1h"),
        "{oldest:?}"
    );
    assert_eq!(world.store.lag().await.unwrap().age(), Duration::ZERO);

    // Due for a while, whenever it was written.
    world
        .sql("UPDATE outbox SET next_attempt_at = now() - interval '20 s'")
        .await;
    world.assert_late("1", "next_attempt_at").await;
    // The one that has been due for longest counts, not the one with the lowest id, nor the one written first.
    world
        .sql(&format!(
            "{INSERT} VALUES ('order', '2', 'Now', '{{}}', now() - interval '40 s', now() - interval '40 s'),
                             ('order', '3', 'Never', '{{}}', '-infinity', 'infinity')"
        ))
        .await;
    world.assert_late("2", "next_attempt_at").await;
    // What was tried is late since it was written: a backoff hides nothing.
    world
        .sql(
            "UPDATE outbox SET attempts = 2, last_error = 'unroutable: x', next_attempt_at = now() + interval '1 hour'
             WHERE id = 2",
        )
        .await;
    let oldest = world.assert_late("2", "created_at").await;
    assert!(oldest.waits_for.contains("failed 2 time(s)"), "{oldest:?}");
    world
        .sql("UPDATE outbox SET next_attempt_at = 'infinity'")
        .await;
    assert!(world.oldest().await.waits_for.contains("never due"));
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replayed_event_is_late_from_its_replay() {
    let world = World::new().await;
    world
        .sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at, status, attempts, last_error)
             VALUES ('order', '1', 'Placed', '{}', now() - interval '1 day', 'dead', 5, 'unroutable: x')",
        )
        .await;
    let run = world.command(&[], &["dead", "replay", "--all"]).await;
    assert_eq!(run.status.code(), Some(0), "{}", run.stderr);
    world.assert_late("1", "next_attempt_at").await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_scheduled_events_neither_hide_an_old_one_nor_make_the_question_dear() {
    let world = World::new().await;
    // Statistics of an empty table, until it says otherwise.
    world
        .sql("ALTER TABLE outbox SET (autovacuum_enabled = off); ANALYZE outbox")
        .await;
    world
        .sql(&format!(
            "{INSERT} SELECT 'order', n::text, 'Tomorrow', '{{}}', now() - interval '1 day', now() + interval '1 day'
             FROM generate_series(1, 100000) n;
             {INSERT} VALUES ('order', 'old', 'Placed', '{{}}', now() - interval '1 hour', now() - interval '1 hour');
             {INSERT} SELECT 'order', n::text, 'Tomorrow', '{{}}', now() - interval '1 day', now() + interval '1 day'
             FROM generate_series(1, 100000) n"
        ))
        .await;
    for statistics in ["stale", "fresh"] {
        let plan = world.lag_plan().await;
        for index in ["outbox_due", "outbox_tried", "outbox_claimed"] {
            assert!(plan.contains(index), "{statistics}: {plan}");
        }
        assert!(
            !plan.contains("Seq Scan on outbox "),
            "{statistics}: {plan}"
        );
        // Sorted are the few in hand, and one of each kind.
        assert_eq!(plan.matches("Sort  (").count(), 2, "{statistics}: {plan}");
        world.store.lag().await.unwrap();
        let began = Instant::now();
        let lag = world.store.lag().await.unwrap();
        let took = began.elapsed();
        assert!(
            took < Duration::from_millis(500),
            "{statistics}: {took:?}\n{plan}"
        );
        assert_eq!((lag.pending, lag.counted_to), (10_000, 10_000));
        world.assert_late("old", "created_at").await;
        world.sql("ANALYZE outbox").await;
    }
    world.clean().await;
}
