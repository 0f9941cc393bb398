//! `migrate` makes the outbox or adopts the application's own, at any time, without making writers wait.

use std::time::{Duration, Instant};

use crate::support::{Ledger, Load, Relay, SOON, World};

/// Our lock_timeout, and some for a slow machine.
const WRITERS_WAIT: Duration = Duration::from_millis(1500);

/// An outbox that an application made for a relay of its own, with the base columns and indexes.
const BASE_OUTBOX: &str = "
CREATE TABLE IF NOT EXISTS outbox (
  id              BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  aggregate_type  TEXT NOT NULL,
  aggregate_id    TEXT NOT NULL,
  event_type      TEXT NOT NULL,
  payload         JSONB NOT NULL,
  created_at      TIMESTAMPTZ NOT NULL DEFAULT now(),
  status          TEXT NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'published', 'dead', 'discarded')),
  attempts        INT NOT NULL DEFAULT 0,
  next_attempt_at TIMESTAMPTZ NOT NULL DEFAULT now(),
  claimed_by      TEXT,
  claimed_until   TIMESTAMPTZ,
  published_at    TIMESTAMPTZ,
  last_error      TEXT,
  failed_in       TEXT
);
CREATE INDEX IF NOT EXISTS outbox_unpublished ON outbox (aggregate_type, aggregate_id, id) WHERE status IN ('pending', 'dead');
CREATE INDEX IF NOT EXISTS outbox_pending ON outbox (id) WHERE status = 'pending';
CREATE INDEX IF NOT EXISTS outbox_published ON outbox (published_at) WHERE status = 'published';
CREATE TABLE IF NOT EXISTS outbox_relay_state (
  id         INT PRIMARY KEY CHECK (id = 1),
  lagging    BOOLEAN NOT NULL DEFAULT false,
  changed_at TIMESTAMPTZ NOT NULL DEFAULT now()
);
INSERT INTO outbox_relay_state (id) VALUES (1) ON CONFLICT (id) DO NOTHING;
";

impl World {
    /// A migration under way.
    fn migration(&self) -> Relay {
        Relay::start(&self.environment(), &[], &["migrate"])
    }

    async fn migrate(&self) -> String {
        let run = self.command(&[], &["migrate"]).await;
        assert_eq!(run.status.code(), Some(0), "{}\n{}", run.stdout, run.stderr);
        run.stdout
    }

    /// Each object of the schema, as it was made: one made anew has another oid.
    async fn objects(&self) -> String {
        self.one(&format!(
            "SELECT string_agg(line, E'\\n' ORDER BY line) FROM (
                 SELECT format('%s %s %s', relname, oid, relfilenode) AS line FROM pg_class
                 WHERE relnamespace = '{0}'::regnamespace
                 UNION ALL SELECT format('%s %s', proname, oid) FROM pg_proc WHERE pronamespace = '{0}'::regnamespace
                 UNION ALL SELECT format('%s %s', tgname, t.oid) FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid
                 WHERE relnamespace = '{0}'::regnamespace) o",
            self.schema
        ))
        .await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_migration_changes_nothing() {
    let world = World::unbound().await;
    world.sql(&format!("DROP SCHEMA {}", world.schema)).await;
    let said = world.migrate().await;
    assert!(said.contains("schema version 6 now (was 0)"), "{said}");
    let objects = world.objects().await;
    let said = world.migrate().await;
    assert!(said.contains("up to date (schema version 6)"), "{said}");
    assert_eq!(world.objects().await, objects);
    world.store.check_shape().await.unwrap();
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_migrations_at_once_make_one_outbox() {
    let world = World::unbound().await;
    let runs: Vec<_> = (0..5).map(|_| world.migration().finished(SOON)).collect();
    let runs = futures_util::future::join_all(runs).await;
    for run in &runs {
        assert_eq!(run.status.code(), Some(0), "{}\n{}", run.stdout, run.stderr);
    }
    assert_eq!(
        runs.iter()
            .filter(|run| run.stdout.contains("(was 0)"))
            .count(),
        1
    );
    assert_eq!(
        world
            .one::<i32>("SELECT max(version) FROM outbox_migrations")
            .await,
        6
    );
    assert_eq!(
        world.one::<i64>("SELECT count(*) FROM outbox_bucket").await,
        64
    );
    world.store.check_shape().await.unwrap();
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_migration_is_completed_by_the_next() {
    let world = World::unbound().await;
    world.migrate().await;
    world
        .sql("DROP INDEX outbox_claim; DROP INDEX outbox_due")
        .await;
    // What an interrupted CREATE INDEX CONCURRENTLY leaves behind.
    world
        .sql("CREATE INDEX outbox_due ON outbox (next_attempt_at)")
        .await;
    let invalid =
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'outbox_due'::regclass";
    world.sql(invalid).await;
    let said = world.migrate().await;
    assert!(
        said.contains("indexes built: outbox_claim, outbox_due"),
        "{said}"
    );
    world.store.check_shape().await.unwrap();
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_applications_own_outbox_is_adopted_under_load() {
    let mut world = World::unbound().await;
    world.declare().await;
    world.sql(BASE_OUTBOX).await;
    world
        .sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, status, published_at)
             SELECT 'old', (n % 100)::text, 'Published', '{}', 'published', now() FROM generate_series(1, 20000) n;
             INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
             SELECT 'old', (n % 100)::text, 'Pending', '{}' FROM generate_series(1, 1000) n;
             INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, status, attempts, last_error)
             VALUES ('stuck', '1', 'Dead', '{}', 'dead', 5, 'for a reason');
             INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('stuck', '1', 'Held', '{}');
             INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, status)
             VALUES ('old', '1', 'Discarded', '{}', 'discarded')",
        )
        .await;
    let rewritten: u32 = world
        .one("SELECT relfilenode FROM pg_class WHERE oid = 'outbox'::regclass")
        .await;
    let load = Load::start(&world);
    load.more(50).await;
    let said = world.migrate().await;
    assert!(said.contains("event ids given to"), "{said}");
    load.more(50).await;
    let slowest = load.stop().await;
    assert!(slowest < WRITERS_WAIT, "an INSERT waited {slowest:?}");
    let filenode: u32 = world
        .one("SELECT relfilenode FROM pg_class WHERE oid = 'outbox'::regclass")
        .await;
    assert_eq!(filenode, rewritten, "the table was rewritten");
    let without: i64 = world
        .one("SELECT count(*) FROM outbox WHERE event_id IS NULL AND status IN ('pending', 'dead')")
        .await;
    assert_eq!(without, 0);

    let _relay = world.ready_relay(&[]).await;
    world
        .until(
            "SELECT count(*) = 1 FROM outbox WHERE status = 'pending'",
            SOON,
        )
        .await;
    let sent = "SELECT id FROM outbox WHERE event_type IN ('Pending', 'Written') ORDER BY id";
    let wanted: Vec<i64> = world
        .db
        .query(sent, &[])
        .await
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    let arrivals = world.arrivals(wanted.len(), SOON).await;
    Ledger::of(&arrivals).assert_sound(&wanted);
    let kept: String = world
        .one("SELECT string_agg(event_type || ' ' || status || ' ' || attempts, ', ' ORDER BY id) FROM outbox WHERE aggregate_type = 'stuck'")
        .await;
    assert_eq!(kept, "Dead dead 5, Held pending 0");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_a_former_relay_died_with_are_delivered() {
    let mut world = World::unbound().await;
    world.declare().await;
    world.sql(BASE_OUTBOX).await;
    world
        .sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, claimed_by, claimed_until)
             VALUES ('order', '1', 'Placed', '{}', 'run-of-another-relay', now() - interval '1 minute'),
                    ('order', '2', 'Placed', '{}', 'run-of-another-relay', now() + interval '2 seconds'),
                    ('order', '1', 'Paid', '{}', NULL, NULL)",
        )
        .await;
    world.migrate().await;
    let _relay = world.ready_relay(&[("relay.tick", "1s")]).await;
    let arrivals = world.arrivals(3, Duration::from_secs(10)).await;
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_transaction_holds_up_the_migration_and_no_writer() {
    let world = World::unbound().await;
    world.sql(BASE_OUTBOX).await;
    let reader = world.client().await;
    reader
        .batch_execute("BEGIN; SELECT count(*) FROM outbox")
        .await
        .unwrap();
    let load = Load::start(&world);
    load.more(20).await;
    let migration = world.migration();
    let began = Instant::now();
    while migration.logged("table is locked by a long transaction") < 3 {
        assert!(began.elapsed() < SOON, "{}", migration.log());
        load.more(10).await;
    }
    reader.batch_execute("COMMIT").await.unwrap();
    let run = migration.finished(SOON).await;
    assert_eq!(run.status.code(), Some(0), "{}\n{}", run.stdout, run.stderr);

    // Building an index waits for transactions, too; that holds up nobody.
    world.sql("DROP INDEX outbox_claim").await;
    reader
        .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox")
        .await
        .unwrap();
    let migration = world.migration();
    migration.until_logged("building index", SOON).await;
    let builds = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE query LIKE '%CREATE INDEX CONCURRENTLY%outbox_claim%'
                                   AND wait_event_type = 'Lock' AND application_name = 'bellwire migrate')";
    world.until(builds, SOON).await;
    load.more(100).await;
    reader.batch_execute("COMMIT").await.unwrap();
    let run = migration.finished(SOON).await;
    assert_eq!(run.status.code(), Some(0), "{}\n{}", run.stdout, run.stderr);
    let slowest = load.stop().await;
    assert!(slowest < WRITERS_WAIT, "an INSERT waited {slowest:?}");
    world.store.check_shape().await.unwrap();
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_that_need_quotes_are_quoted_everywhere() {
    let mut world = World::new().await;
    let schema = format!("Odd \"{}\"", &world.schema);
    let quoted = format!("\"{}\"", schema.replace('"', "\"\""));
    let settings = [
        ("database.schema", schema.as_str()),
        ("database.table", "out-box"),
        ("relay.tick", "10m"),
    ];
    let run = world.command(&settings, &["migrate"]).await;
    assert_eq!(run.status.code(), Some(0), "{}\n{}", run.stdout, run.stderr);
    let relay = world.relay(&settings);
    relay.until_logged("breaker closed", SOON).await;
    world
        .until(
            &format!("SELECT EXISTS (SELECT FROM {quoted}.\"out-box_replica\" WHERE ready)"),
            SOON,
        )
        .await;
    let insert = format!(
        "INSERT INTO {quoted}.\"out-box\" (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'Placed', '{{}}')"
    );
    for _ in 0..3 {
        world.sql(&insert).await;
        world.arrivals(1, Duration::from_secs(2)).await;
    }
    world
        .until(
            &format!("SELECT bool_and(status = 'published') FROM {quoted}.\"out-box\""),
            SOON,
        )
        .await;
    for arguments in [["check"].as_slice(), &["status"], &["run", "--once"]] {
        let run = world.command(&settings, arguments).await;
        assert_eq!(run.status.code(), Some(0), "{}\n{}", run.stdout, run.stderr);
    }
    world.sql(&format!("DROP SCHEMA {quoted} CASCADE")).await;
    world.clean().await;
}
