//! The library: events are written within the application's own transaction, by Rust or by SQL, and
//! what is wrong with them is said there.

use std::time::{Duration, SystemTime};

use bellwire::config::{Config, DatabaseConfig, JetstreamConfig, SinkSetting};
use bellwire::outbox::{AnyTransaction, Begun, NewEvent, Outbox, OutboxError, OutboxSettings};
use bellwire::sink::SinkRules;
use deadpool_postgres::{Manager, Pool};
use tokio_postgres::NoTls;

use crate::support::{SOON, World, database_url};

impl World {
    fn outbox_settings(&self) -> OutboxSettings {
        OutboxSettings {
            schema: self.schema.clone(),
            ..OutboxSettings::default()
        }
    }

    async fn open_outbox(&self) -> Outbox {
        Outbox::open(&self.db, self.outbox_settings())
            .await
            .unwrap()
    }

    async fn why_not_opened(&self) -> String {
        let opened = Outbox::open(&self.db, self.outbox_settings()).await;
        opened.unwrap_err().to_string()
    }
}

fn event(aggregate_id: &str) -> NewEvent {
    NewEvent::raw("order", aggregate_id, "Placed", r#"{"n": 1}"#)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_is_there_exactly_if_its_transaction_committed() {
    let mut world = World::new().await;
    let outbox = world.open_outbox().await;
    let mut client = world.client().await;
    let _relay = world.ready_relay(&[]).await;
    world.sql("CREATE TABLE state (id text PRIMARY KEY)").await;
    let add = "INSERT INTO state VALUES ($1)";

    let undone = client.transaction().await.unwrap();
    undone.execute(add, &[&"rolled back"]).await.unwrap();
    outbox
        .publish(&undone, &event("rolled back"))
        .await
        .unwrap();
    undone.rollback().await.unwrap();

    let dropped = client.transaction().await.unwrap();
    outbox.publish(&dropped, &event("dropped")).await.unwrap();
    drop(dropped);

    let mut done = client.transaction().await.unwrap();
    done.execute(add, &[&"committed"]).await.unwrap();
    let first = outbox.publish(&done, &event("committed")).await.unwrap();
    let savepoint = done.transaction().await.unwrap();
    outbox
        .publish(&savepoint, &event("savepoint"))
        .await
        .unwrap();
    savepoint.rollback().await.unwrap();
    let savepoint = done.transaction().await.unwrap();
    let second = outbox
        .publish(&savepoint, &event("committed"))
        .await
        .unwrap();
    savepoint.commit().await.unwrap();
    // Until then nobody has it.
    assert!(
        world
            .next_arrival(Duration::from_millis(300))
            .await
            .is_none()
    );
    done.commit().await.unwrap();

    let arrivals = world.arrivals(2, SOON).await;
    let ids: Vec<_> = arrivals.iter().map(|arrival| arrival.id).collect();
    assert_eq!(ids, [first.0, second.0]);
    let states: String = world.one("SELECT string_agg(id, ',') FROM state").await;
    assert_eq!(states, "committed");
    assert_eq!(world.committed().await, ids);
    world.clean().await;
}

async fn publish_by<T: AnyTransaction>(outbox: &Outbox, transaction: &T) -> i64 {
    outbox.publish(transaction, &event("1")).await.unwrap().0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_of_every_kind_will_do() {
    let world = World::new().await;
    let mut client = world.client().await;
    let manager = Manager::new(database_url().parse().unwrap(), NoTls);
    let pool = Pool::builder(manager).build().unwrap();
    let mut pooled = pool.get().await.unwrap();
    let outbox = Outbox::open(&pooled, world.outbox_settings())
        .await
        .unwrap();

    let mut transaction = client.transaction().await.unwrap();
    Outbox::open(&transaction, world.outbox_settings())
        .await
        .unwrap();
    let mut ids = vec![publish_by(&outbox, &transaction).await];
    let savepoint = transaction.savepoint("s").await.unwrap();
    ids.push(publish_by(&outbox, &savepoint).await);
    savepoint.commit().await.unwrap();
    transaction.commit().await.unwrap();

    let mut transaction = pooled.transaction().await.unwrap();
    ids.push(publish_by(&outbox, &transaction).await);
    let savepoint = transaction.savepoint("s").await.unwrap();
    ids.push(publish_by(&outbox, &savepoint).await);
    savepoint.commit().await.unwrap();
    transaction.commit().await.unwrap();

    client.batch_execute("BEGIN").await.unwrap();
    ids.push(publish_by(&outbox, &Begun(&client)).await);
    client.batch_execute("COMMIT").await.unwrap();
    pooled.batch_execute("BEGIN").await.unwrap();
    ids.push(publish_by(&outbox, &Begun(&pooled)).await);
    pooled.batch_execute("COMMIT").await.unwrap();

    assert_eq!(world.committed().await, ids);
    assert_eq!(outbox.lag(&pooled).await.unwrap().pending, 6);
    // The futures go where the application's do.
    let published = tokio::spawn(async move {
        let transaction = client.transaction().await.unwrap();
        outbox
            .publish_many(&transaction, &[event("2")])
            .await
            .unwrap();
        transaction.commit().await.unwrap();
    });
    published.await.unwrap();
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_payload_arrives_as_its_column_keeps_it_and_all_else_as_it_was_given() {
    let deep = format!("{}{}", "[".repeat(300), "]".repeat(300));
    let odd = [
        r#"{"a": 1e400, "money": 149.50, "é": "\u2028\"", "n": 123456789012345678901234567890}"#,
        &deep,
        "null",
    ];
    for column in ["jsonb", "json"] {
        let mut world = World::new().await;
        if column == "json" {
            world
                .sql("ALTER TABLE outbox ALTER COLUMN payload TYPE json")
                .await;
            // The function has the column's type.
            world
                .sql(
                    "DROP FUNCTION outbox_publish; DELETE FROM outbox_migrations WHERE version = 5",
                )
                .await;
            world.store.migrate().await.unwrap();
        }
        let outbox = world.open_outbox().await;
        let mut events: Vec<_> = odd
            .iter()
            .map(|payload| NewEvent::raw("order", "1", "Placed", *payload))
            .collect();
        let spaced = " {\"a\" :1,  \"a\": 2}\n";
        events.push(
            NewEvent::raw("it's \"odd\"\r\n", "ключ", "Placed", spaced)
                .header("traceparent", "00-ab")
                .header("it's", "a \"b\" \u{1F600}")
                .correlation_id("c-1")
                .event_id("0190b5a0-0000-7000-8000-000000000001"),
        );
        let mut client = world.client().await;
        let transaction = client.transaction().await.unwrap();
        outbox.publish_many(&transaction, &events).await.unwrap();
        transaction.commit().await.unwrap();
        let _relay = world.ready_relay(&[("rabbitmq.message_id", "id")]).await;
        let mut arrivals = world.arrivals(4, SOON).await;
        arrivals.sort_by_key(|arrival| arrival.id);
        for (arrival, payload) in arrivals.iter().zip(odd) {
            let kept: String = world
                .one(&format!(
                    "SELECT payload::text FROM outbox WHERE id = {}",
                    arrival.id
                ))
                .await;
            assert_eq!(String::from_utf8_lossy(&arrival.body), kept);
            if column == "json" {
                assert_eq!(kept, payload);
            }
        }
        let last = arrivals.last().unwrap();
        let body = if column == "json" {
            spaced
        } else {
            r#"{"a": 2}"#
        };
        assert_eq!(String::from_utf8_lossy(&last.body), body);
        assert_eq!(last.aggregate, ("it's \"odd\"\r\n".into(), "ключ".into()));
        assert_eq!(last.text_header("traceparent"), "00-ab");
        assert_eq!(last.text_header("it's"), "a \"b\" \u{1F600}");
        assert_eq!(last.text_header("correlation_id"), "c-1");
        let event_id: String = world
            .one(&format!(
                "SELECT event_id::text FROM outbox WHERE id = {}",
                last.id
            ))
            .await;
        assert_eq!(event_id, "0190b5a0-0000-7000-8000-000000000001");
        world.clean().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_events_get_ids_in_their_order() {
    for max_payload_bytes in [None, Some(1_000)] {
        let world = World::new().await;
        let settings = OutboxSettings {
            max_payload_bytes,
            ..world.outbox_settings()
        };
        let outbox = Outbox::open(&world.db, settings).await.unwrap();
        let events: Vec<_> = (0..2_500)
            .map(|n| NewEvent::raw("order", (n % 7).to_string(), "Placed", n.to_string()))
            .collect();
        let mut client = world.client().await;
        let transaction = client.transaction().await.unwrap();
        let ids = outbox.publish_many(&transaction, &events).await.unwrap();
        transaction.commit().await.unwrap();
        assert!(ids.is_sorted() && ids.len() == 2_500);
        let rows = world
            .db
            .query("SELECT id, payload::text FROM outbox ORDER BY id", &[])
            .await
            .unwrap();
        for ((row, id), n) in rows.iter().zip(&ids).zip(0..) {
            let (of, payload): (i64, String) = (row.get(0), row.get(1));
            assert_eq!((of, payload), (id.0, n.to_string()));
        }
        let transaction = client.transaction().await.unwrap();
        let none = outbox.publish_many(&transaction, &[]).await.unwrap();
        assert!(none.is_empty());
        drop(transaction);
        world.clean().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_can_be_refused_beforehand_leaves_the_transaction_usable() {
    let world = World::new().await;
    let outbox = world.open_outbox().await;
    let mut client = world.client().await;
    let transaction = client.transaction().await.unwrap();
    let wrong = NewEvent::raw("order", "1", "Placed", "{oops");
    for events in [vec![wrong.clone()], vec![event("1"), wrong]] {
        let refused = outbox
            .publish_many(&transaction, &events)
            .await
            .unwrap_err();
        assert!(matches!(refused, OutboxError::Event(_)), "{refused}");
    }
    outbox.publish(&transaction, &event("1")).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(world.count("pending").await, 1);
    // What only the database finds has aborted it, and shows nothing of the payload.
    let transaction = client.transaction().await.unwrap();
    let nul = NewEvent::raw("order", "1", "Placed", r#"{"S3cr": "\u0000"}"#);
    let refused = outbox.publish(&transaction, &nul).await.unwrap_err();
    assert!(matches!(refused, OutboxError::Event(_)), "{refused:?}");
    assert!(refused.to_string().starts_with("payload: ") && !refused.to_string().contains("S3cr"));
    transaction.commit().await.unwrap();
    assert_eq!(world.count("pending").await, 1);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_refuses_what_it_cannot_write_to_and_changes_nothing() {
    let world = World::unbound().await;
    let error = world.why_not_opened().await;
    assert!(
        error.contains("does not exist: run `bellwire migrate`"),
        "{error}"
    );
    let tables = format!(
        "SELECT count(*) FROM pg_class WHERE relnamespace = '{}'::regnamespace",
        world.schema
    );
    assert_eq!(world.one::<i64>(&tables).await, 0);
    world.store.migrate().await.unwrap();
    world.open_outbox().await;

    world
        .sql("CREATE TABLE was AS SELECT * FROM outbox_migrations")
        .await;
    world
        .sql("DELETE FROM outbox_migrations WHERE version > 3")
        .await;
    let error = world.why_not_opened().await;
    assert!(
        error.contains("schema version 3, this version of bellwire needs")
            && error.contains("run `bellwire migrate`"),
        "{error}"
    );
    world
        .sql("INSERT INTO outbox_migrations SELECT * FROM was WHERE version > 3")
        .await;
    // A newer one takes nothing from writers; a relay still refuses it.
    world.sql("INSERT INTO outbox_migrations (version, name, applied_on, checksum) SELECT 999, 'later', applied_on, checksum FROM was LIMIT 1").await;
    world.open_outbox().await;
    assert!(world.store.check_shape().await.is_err());

    world
        .sql("ALTER TABLE outbox RENAME COLUMN headers TO hdrs")
        .await;
    let error = world.why_not_opened().await;
    assert!(error.contains("has no column headers"), "{error}");
    world
        .sql("ALTER TABLE outbox RENAME COLUMN hdrs TO headers")
        .await;
    world.sql("DROP TABLE outbox_migrations").await;
    let error = world.why_not_opened().await;
    assert!(
        error.contains("was not set up by Bellwire yet: run `bellwire migrate`"),
        "{error}"
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_right_to_insert_is_enough_to_publish() {
    let world = World::new().await;
    let url = world.login("writer", &[]).await;
    let (mut writer, driver) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    tokio::spawn(driver);
    let outbox = Outbox::open(&writer, world.outbox_settings())
        .await
        .unwrap();
    let transaction = writer.transaction().await.unwrap();
    let one = outbox.publish(&transaction, &event("1")).await.unwrap();
    let two = outbox
        .publish_many(&transaction, &[event("1"), event("2")])
        .await
        .unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(world.committed().await, [one.0, two[0].0, two[1].0]);
    let by_sql = format!(
        "SELECT {}.outbox_publish('order', '1', 'Placed', '{{}}')",
        world.schema
    );
    let id: i64 = writer.query_one(&by_sql, &[]).await.unwrap().get(0);
    assert_eq!(world.committed().await.last(), Some(&id));
    assert!(outbox.lag(&writer).await.is_err() && outbox.prune(&writer).await.is_err());
    // Without it, the right is named.
    world
        .sql(&format!(
            "REVOKE INSERT ON outbox FROM {}_writer",
            world.schema
        ))
        .await;
    let transaction = writer.transaction().await.unwrap();
    let refused = outbox
        .publish(&transaction, &event("1"))
        .await
        .unwrap_err()
        .to_string();
    assert!(refused.contains("GRANT INSERT"), "{refused}");
    drop(transaction);
    drop(writer);
    world.drop_roles().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sql_function_names_the_argument_that_is_wrong() {
    let world = World::new().await;
    let good =
        "aggregate_type => 'order', aggregate_id => '1', event_type => 'Placed', payload => '{}'";
    let long = "repeat('x', 5000)";
    for (changed, words) in [
        ("aggregate_type => ''", "aggregate_type is empty"),
        ("aggregate_type => NULL", "aggregate_type is empty"),
        (
            "aggregate_type => repeat('x', 256)",
            "aggregate_type has 256 bytes",
        ),
        ("aggregate_id => ''", "aggregate_id is empty"),
        (
            &format!("aggregate_id => {long}"),
            "aggregate_id has 5000 bytes",
        ),
        ("event_type => ''", "event_type is empty"),
        ("event_type => repeat('ü', 128)", "event_type has 256 bytes"),
        ("payload => NULL", "payload is NULL"),
        (
            &format!("correlation_id => {long}"),
            "correlation_id has 5000 bytes",
        ),
        ("headers => '[]'", "headers is a JSON array"),
        ("headers => 'null'", "headers is a JSON null"),
        ("headers => '{\"n\": 1}'", "headers has a number under n"),
        ("headers => '{\"\": \"x\"}'", "headers has an empty name"),
        (
            "headers => jsonb_build_object(repeat('x', 256), 'x')",
            "headers has a name of 256 bytes",
        ),
        (
            "headers => jsonb_build_object('a', repeat('x', 70000))",
            "headers has 70",
        ),
        ("due_at => 'infinity'", "due_at is infinite"),
        ("max_payload_bytes => 0", "max_payload_bytes is less"),
        (
            "max_payload_bytes => 1",
            "payload has 2 bytes, at most 1 are taken",
        ),
    ] {
        let name = changed.split(" =>").next().unwrap();
        let kept: Vec<_> = good
            .split(", ")
            .filter(|argument| !argument.starts_with(&format!("{name} ")))
            .chain([changed])
            .collect();
        let call = format!("SELECT outbox_publish({})", kept.join(", "));
        let error = world.db.query(&call, &[]).await.unwrap_err();
        let error = error.as_db_error().unwrap();
        assert!(
            error.message().contains(words),
            "{changed}: {}",
            error.message()
        );
        let code = if words.starts_with("payload has") {
            "54000"
        } else {
            "22023"
        };
        assert_eq!(error.code().code(), code);
    }
    assert_eq!(world.count("pending").await, 0);
    let full = "SELECT outbox_publish('order', '1', 'Placed', '{\"a\":  1}', '{\"h\": \"x\"}', 'c',
                '0190b5a0-0000-7000-8000-000000000001', now() + interval '1 hour', 100)";
    let id: i64 = world.one(full).await;
    let row: String = world
        .one("SELECT format('%s %s %s %s %s %s %s %s %s', id, aggregate_type, aggregate_id, event_type, payload, headers,
                            correlation_id, event_id, round(extract(epoch FROM next_attempt_at - created_at))) FROM outbox")
        .await;
    assert_eq!(
        row,
        format!(
            "{id} order 1 Placed {{\"a\": 1}} {{\"h\": \"x\"}} c 0190b5a0-0000-7000-8000-000000000001 3600"
        )
    );
    // As a driver sends it: everything with a type of its own.
    let id: i64 = world
        .db
        .query_one(
            "SELECT outbox_publish($1, $2, $3, $4::text::jsonb)",
            &[&"order", &"2", &"Placed", &"1e400"],
        )
        .await
        .unwrap()
        .get(0);
    assert_eq!(world.committed().await.last(), Some(&id));
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_oversized_event_fails_in_the_writers_face_if_they_wish() {
    let mut world = World::new().await;
    let settings = OutboxSettings {
        max_payload_bytes: Some(1_000),
        ..world.outbox_settings()
    };
    let limited = Outbox::open(&world.db, settings).await.unwrap();
    let free = world.open_outbox().await;
    // What counts is the body that consumers get: a space more for each comma and colon here.
    let body = |numbers: usize| format!("[{}]", vec!["1"; numbers].join(","));
    let of = |numbers| NewEvent::raw("order", "1", "Placed", body(numbers));
    let mut client = world.client().await;
    let transaction = client.transaction().await.unwrap();
    limited.publish(&transaction, &of(333)).await.unwrap();
    free.publish(&transaction, &of(334)).await.unwrap();
    transaction.commit().await.unwrap();
    let transaction = client.transaction().await.unwrap();
    let refused = limited.publish(&transaction, &of(334)).await.unwrap_err();
    assert!(matches!(refused, OutboxError::TooLarge(_)), "{refused:?}");
    assert_eq!(
        refused.to_string(),
        "payload has 1002 bytes, at most 1000 are taken"
    );
    transaction.rollback().await.unwrap();

    // For every writer, by the table itself.
    for (limit, said) in [("1000", "set"), ("1000", ""), ("999", "set")] {
        let run = world
            .command(&[], &["migrate", "--max-payload-bytes", limit])
            .await;
        assert_eq!(run.status.code(), Some(0), "{}", run.stderr);
        assert_eq!(
            run.stdout.contains("limit of payloads"),
            !said.is_empty(),
            "{}",
            run.stdout
        );
    }
    let insert = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
                  SELECT 'order', '1', 'Placed', to_jsonb(repeat('x', $1 - 2))";
    world.db.execute(insert, &[&999_i32]).await.unwrap();
    let error = world.db.execute(insert, &[&1_000_i32]).await.unwrap_err();
    let error = error.as_db_error().unwrap();
    assert_eq!(
        error.message(),
        "payload has 1000 bytes, at most 999 are taken"
    );
    let transaction = client.transaction().await.unwrap();
    let refused = free.publish(&transaction, &of(334)).await.unwrap_err();
    assert!(matches!(refused, OutboxError::TooLarge(_)), "{refused:?}");
    transaction.rollback().await.unwrap();
    // Larger ones of before are still carried: the limit is for inserts only.
    let _relay = world.ready_relay(&[]).await;
    world.arrivals(3, SOON).await;
    world.until_published(SOON).await;
    // A migration without the option leaves it, `off` lifts it.
    let run = world.command(&[], &["migrate"]).await;
    assert!(run.stdout.contains("up to date"), "{}", run.stdout);
    world.db.execute(insert, &[&1_000_i32]).await.unwrap_err();
    let run = world
        .command(&[], &["migrate", "--max-payload-bytes", "off"])
        .await;
    assert!(
        run.stdout.contains("limit of payloads lifted"),
        "{}",
        run.stdout
    );
    world.db.execute(insert, &[&1_000_i32]).await.unwrap();
    world.arrivals(1, SOON).await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_relays_sink_cannot_carry_fails_in_the_writers_face_if_they_wish() {
    let world = World::new().await;
    let mut config = Config {
        jetstream: JetstreamConfig {
            stream: Some("EVENTS".into()),
            ..JetstreamConfig::default()
        },
        ..Config::default()
    };
    config.relay.sink = SinkSetting::Jetstream;
    config.database.schema.clone_from(&world.schema);
    let outbox = Outbox::open(&world.db, OutboxSettings::of(&config).unwrap())
        .await
        .unwrap();
    let mut client = world.client().await;
    let transaction = client.transaction().await.unwrap();
    for (wrong, words) in [
        (
            NewEvent::raw("order", "1", "order.placed", "{}"),
            "event_type 'order.placed' has a dot",
        ),
        (
            NewEvent::raw("an order", "1", "Placed", "{}"),
            "aggregate_type 'an order'",
        ),
        (event("1").header("Nats-Rollup", "all"), "Nats-Rollup"),
    ] {
        let refused = outbox
            .publish(&transaction, &wrong)
            .await
            .unwrap_err()
            .to_string();
        assert!(
            refused.starts_with("illegal_name: ") && refused.contains(words),
            "{refused}"
        );
    }
    outbox.publish(&transaction, &event("1")).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(world.count("pending").await, 1);
    let anything = SinkRules::of(&Config::default()).unwrap();
    assert!(format!("{anything:?}").contains("SinkRules"));
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scheduled_events_leave_when_due_and_hold_back_the_later_ones() {
    let mut world = World::new().await;
    let outbox = world.open_outbox().await;
    let _relay = world.ready_relay(&[("relay.tick", "500ms")]).await;
    let mut client = world.client().await;
    let transaction = client.transaction().await.unwrap();
    let soon = SystemTime::now() + Duration::from_millis(700);
    let events = [
        event("1").due_in(Duration::from_secs(4)),
        event("1"),
        event("2").due_at(soon),
        event("3").due_at(SystemTime::UNIX_EPOCH),
    ];
    let ids = outbox.publish_many(&transaction, &events).await.unwrap();
    transaction.commit().await.unwrap();
    let arrivals = world.arrivals(4, SOON).await;
    let came: Vec<_> = arrivals.iter().map(|arrival| arrival.id).collect();
    assert_eq!(came, [ids[3].0, ids[2].0, ids[0].0, ids[1].0]);
    let early: bool = world
        .one("SELECT bool_or(published_at < next_attempt_at) FROM outbox WHERE event_type = 'Placed'")
        .await;
    assert!(!early);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prune_never_touches_what_was_not_published() {
    let world = World::new().await;
    let settings = OutboxSettings {
        keep: Duration::from_secs(3_600),
        prune_step: 7,
        ..world.outbox_settings()
    };
    let outbox = Outbox::open(&world.db, settings).await.unwrap();
    world.fill("order", 10, 10).await;
    world
        .sql(
            "UPDATE outbox SET created_at = now() - interval '1 year', next_attempt_at = now() - interval '1 year';
             UPDATE outbox SET status = 'published', published_at = now() - interval '2 hours' WHERE id <= 50;
             UPDATE outbox SET status = 'published', published_at = now() WHERE id BETWEEN 51 AND 60;
             UPDATE outbox SET status = 'dead', published_at = NULL WHERE id BETWEEN 61 AND 70;
             UPDATE outbox SET status = 'discarded' WHERE id BETWEEN 71 AND 80",
        )
        .await;
    let lag = outbox.lag(&world.db).await.unwrap();
    assert_eq!((lag.pending, lag.dead), (20, 10));
    assert!(lag.age() > Duration::from_secs(300 * 86_400), "{lag:?}");
    assert_eq!(outbox.prune(&world.db).await.unwrap(), 50);
    assert_eq!(outbox.prune(&world.db).await.unwrap(), 0);
    let left = [
        ("published", 10),
        ("dead", 10),
        ("discarded", 10),
        ("pending", 20),
    ];
    for (status, count) in left {
        assert_eq!(world.count(status).await, count, "{status}");
    }
    // While somebody else is at it nothing is done twice.
    let other = world.client().await;
    other
        .batch_execute(
            "BEGIN; SELECT pg_advisory_xact_lock(x'62777072'::int, 'outbox'::regclass::oid::int)",
        )
        .await
        .unwrap();
    world.sql("UPDATE outbox SET published_at = now() - interval '2 hours' WHERE status = 'published'").await;
    assert_eq!(outbox.prune(&world.db).await.unwrap(), 0);
    other.batch_execute("COMMIT").await.unwrap();
    assert_eq!(outbox.prune(&world.db).await.unwrap(), 10);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn migrate_makes_the_outbox_only_when_it_is_asked_to() {
    let world = World::unbound().await;
    let database = DatabaseConfig {
        url: Some(database_url().as_str().into()),
        schema: world.schema.clone(),
        ..DatabaseConfig::default()
    };
    let migrated = Outbox::migrate(&database).await.unwrap();
    assert_eq!(
        (migrated.from, migrated.to),
        (0, bellwire::store::schema_version())
    );
    world.open_outbox().await;
    world.store.check_shape().await.unwrap();
    world.clean().await;
}
