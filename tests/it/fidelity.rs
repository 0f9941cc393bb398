//! The body is `payload::text` to the byte; properties and headers say what the row says; one odd row
//! stops nothing but its own aggregate.

use std::collections::HashMap;
use std::time::Duration;

use bellwire::event::{AggregateKey, EventId};
use bellwire::store::ClaimedRow;
use lapin::types::AMQPValue;

use crate::support::{Arrival, Ledger, Relay, SOON, World};

impl World {
    /// Every arrival by its id.
    async fn arrived(&mut self, count: usize, within: Duration) -> HashMap<i64, Arrival> {
        self.arrivals(count, within)
            .await
            .into_iter()
            .map(|arrival| (arrival.id, arrival))
            .collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_body_is_the_payload_to_the_byte() {
    let mut world = World::new().await;
    let nested = format!("{}0{}", "[".repeat(1000), "]".repeat(1000));
    let nested_objects = format!("{}1{}", "{\"a\":".repeat(1000), "}".repeat(1000));
    let nines = format!("{{\"a\":{}}}", "9".repeat(401));
    let long = format!("\"{}\"", "é".repeat(100_000));
    let payloads = [
        r#"{"a":10.00,"b":1.10,"c":18446744073709551616,"d":0.1000,"g":-0,"f":1E2}"#,
        r#"{"e":123456789012345678901234567890.123456789}"#,
        "123456789012345678901234567890",
        r#"{"a":1e400}"#,
        r#"{"a":1e-400}"#,
        &nines,
        &nested,
        &nested_objects,
        "null",
        "true",
        "0",
        "\"\"",
        "{}",
        "[]",
        r#"{"":""}"#,
        r#"{"a":{},"b":[],"c":"","d":null}"#,
        r#""\ud83d\ude00 \u2028 \u2029 \u00e9 \"\\\/ \b\f\n\r\t \u0001""#,
        r#""\\u0000""#,
        r#"{"z": 1, "a": 2,   "z": 3}"#,
        "\"👩‍👩‍👧‍👦 مرحبا שלום \u{202e}abc\"",
        &long,
    ];
    for (number, payload) in payloads.iter().enumerate() {
        world
            .insert(("order", &number.to_string()), "Placed", payload)
            .await;
    }
    let _relay = world.ready_relay(&[]).await;
    let arrived = world.arrived(payloads.len(), SOON).await;
    for row in world
        .db
        .query("SELECT id, payload::text FROM outbox", &[])
        .await
        .unwrap()
    {
        let (id, payload): (i64, String) = (row.get(0), row.get(1));
        assert!(
            arrived[&id].body == payload.as_bytes(),
            "{id}: {:.200}",
            String::from_utf8_lossy(&arrived[&id].body)
        );
    }
    let money = arrived.values().min_by_key(|arrival| arrival.id).unwrap();
    assert!(String::from_utf8_lossy(&money.body).contains(r#""a": 10.00, "b": 1.10"#));
    world.until_published(SOON).await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_json_column_keeps_its_spelling_and_odd_escapes() {
    let mut world = World::unbound().await;
    world.sql(&BASE_TABLE.replace("JSONB", "JSON")).await;
    let run = world.command(&[], &["migrate"]).await;
    assert_eq!(run.status.code(), Some(0), "{}", run.stderr);
    world.declare().await;
    let payloads = [
        r#"{"b": 1.10,  "a":"\u00e9", "z":1E2, "b": 2}"#,
        r#"{"nul":"\u0000"}"#,
        r#"{"lone":"\ud800"}"#,
        " [ 1 ]\n",
    ];
    for payload in payloads {
        world
            .db
            .execute(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
                 VALUES ('order', '1', 'Placed', $1::text::json)",
                &[&payload],
            )
            .await
            .unwrap();
    }
    let _relay = world.ready_relay(&[]).await;
    let arrivals = world.arrivals(payloads.len(), SOON).await;
    for (arrival, payload) in arrivals.iter().zip(payloads) {
        assert_eq!(String::from_utf8_lossy(&arrival.body), payload);
    }
    world.clean().await;
}

/// An application's own outbox with the base columns, without indexes.
const BASE_TABLE: &str = "CREATE TABLE outbox (
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
)";

fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(value.into())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn properties_and_headers_say_what_the_row_says() {
    let mut world = World::new().await;
    world
        .sql(
            r#"INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at, attempts,
                                   correlation_id, headers)
               VALUES ('order', 'ORD-10492', 'OrderPlaced', '{"n": 1}', '2024-02-29 12:34:56.789Z', 2, 'corr "1"',
                       '{"tenant": "t1", "n": 7, "big": 123456789012345678901234567890, "rate": 1.50, "yes": true,
                         "none": null, "list": [1, 2.0], "map": {"a": 1.10}, "": "empty name", "empty": "",
                         "attempt": 99, "aggregate_id": "forged", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}')"#,
        )
        .await;
    world
        .sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '2', 'OrderPlaced', '{}')",
        )
        .await;
    let _relay = world.ready_relay(&[("rabbitmq.source", "shop")]).await;
    let arrived = world.arrived(2, SOON).await;
    let arrival = &arrived[&1];
    assert_eq!(arrival.routing_key, "order.OrderPlaced");
    let properties = &arrival.properties;
    assert_eq!(properties.message_id().as_ref().unwrap().as_str(), "1");
    assert_eq!(properties.app_id().as_ref().unwrap().as_str(), "shop");
    assert_eq!(properties.kind().as_ref().unwrap().as_str(), "OrderPlaced");
    assert_eq!(*properties.timestamp(), Some(1_709_210_096));
    assert_eq!(
        properties.content_type().as_ref().unwrap().as_str(),
        "application/json"
    );
    assert_eq!(*properties.delivery_mode(), Some(2));
    let wanted = [
        ("aggregate_type", text("order")),
        ("aggregate_id", text("ORD-10492")),
        ("attempt", AMQPValue::LongInt(3)),
        ("correlation_id", text("corr \"1\"")),
        ("tenant", text("t1")),
        ("n", AMQPValue::LongLongInt(7)),
        ("big", text("123456789012345678901234567890")),
        ("rate", text("1.50")),
        ("yes", AMQPValue::Boolean(true)),
        ("none", AMQPValue::Void),
        ("list", text("[1, 2.0]")),
        ("map", text("{\"a\": 1.10}")),
        ("", text("empty name")),
        ("empty", text("")),
        (
            "traceparent",
            text("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ),
    ];
    let headers = properties.headers().as_ref().unwrap().inner();
    for (name, value) in &wanted {
        assert_eq!(headers.get(*name), Some(value), "header {name}");
    }
    assert_eq!(headers.len(), wanted.len(), "{headers:?}");

    let plain = arrived[&2].properties.headers().as_ref().unwrap().inner();
    let names: Vec<_> = plain.keys().map(|name| name.as_str()).collect();
    assert_eq!(names, ["aggregate_id", "aggregate_type", "attempt"]);
    assert_eq!(plain.get("attempt"), Some(&AMQPValue::LongInt(1)));
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_message_id_may_be_the_uuid() {
    let mut world = World::new().await;
    let id: String = world
        .one(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'Placed', '{}')
             RETURNING event_id::text",
        )
        .await;
    let _relay = world
        .ready_relay(&[("rabbitmq.message_id", "event_id")])
        .await;
    assert_eq!(world.next_message_id(SOON).await.unwrap(), id);
    world.clean().await;
}

/// Names that went wrong somewhere.
const NAUGHTY: &[&str] = &[
    "",
    " ",
    "undefined",
    "null",
    "-1",
    "--all",
    "%s%n",
    "x'; DROP TABLE outbox;--",
    "\"quoted\"",
    "back\\slash",
    "a\r\nX-Evil: 1",
    "tab\tand\u{1}control",
    "مرحبا",
    "\u{202e}RTL",
    "👩‍👩‍👧‍👦",
    "田中さん",
    "Ω≈ç√∫˜µ≤≥÷",
    "\u{feff}bom",
    "<script>alert(1)</script>",
    "{{7*7}}",
    "*.#",
    "a.b",
    "É",
    "e\u{301}",
    "$1",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_name_arrives_as_it_was_written() {
    let mut world = World::new().await;
    let relay = world.ready_relay(&[]).await;
    let long = "x".repeat(10_000);
    let emoji = "😀".repeat(4_000);
    let mut wanted = HashMap::new();
    for name in NAUGHTY
        .iter()
        .copied()
        .chain([long.as_str(), emoji.as_str()])
    {
        for event in ["First", "Second"] {
            let id = world.insert(("order", name), event, "{}").await;
            wanted.insert(id, ("order".to_owned(), name.to_owned(), event.to_owned()));
        }
        if name.len() < 200 {
            let id = world.insert((name, "1"), name, "{}").await;
            wanted.insert(id, (name.to_owned(), "1".to_owned(), name.to_owned()));
        }
    }
    let arrivals = world.arrivals(wanted.len(), SOON).await;
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    for arrival in &arrivals {
        let (aggregate_type, aggregate_id, event_type) = &wanted[&arrival.id];
        assert_eq!(
            (&arrival.aggregate.0, &arrival.aggregate.1),
            (aggregate_type, aggregate_id)
        );
        assert_eq!(
            &arrival.routing_key,
            &format!("{aggregate_type}.{event_type}")
        );
        assert_eq!(
            arrival
                .properties
                .kind()
                .as_ref()
                .map_or("", |kind| kind.as_str()),
            event_type
        );
    }
    assert_eq!(relay.logged("an actor died"), 0);
    world.clean().await;
}

/// A log record is one line that begins with its time, whatever a row's names are.
fn assert_one_line_a_record(relay: &Relay) {
    for line in relay.log().lines() {
        assert!(
            line.starts_with("20") && line.as_bytes().get(4) == Some(&b'-'),
            "no record begins so: {line}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_odd_row_dies_alone_and_says_why() {
    let mut world = World::new().await;
    let relay = world
        .ready_relay(&[("retry.max_attempts", "2"), ("retry.backoff", "100ms")])
        .await;
    let insert = |columns: &str, values: &str| {
        format!("INSERT INTO outbox (payload, {columns}) VALUES ('{{}}', {values}) RETURNING id")
    };
    let names = "aggregate_type, aggregate_id, event_type";
    // The row, and what it dies of; none: it is simply delivered, or never due.
    let long = "repeat('a', 300)";
    let dead = [
        (
            insert(names, &format!("'order', 'odd-1', {long}")),
            "illegal_name",
            "event_type",
        ),
        (
            insert(names, &format!("{long}, 'odd-2', 'Placed'")),
            "illegal_name",
            "routing key",
        ),
        (
            insert(names, "repeat('é', 128), 'odd-3', 'Placed'"),
            "illegal_name",
            "263 bytes",
        ),
        (
            insert(
                &format!("{names}, headers"),
                "'order', 'odd-4', 'Placed', '[1]'",
            ),
            "undecodable",
            "headers",
        ),
        (
            insert(
                &format!("{names}, headers"),
                "'order', 'odd-5', 'Placed', '\"x\"'",
            ),
            "undecodable",
            "headers",
        ),
        (
            insert(
                &format!("{names}, headers"),
                &format!("'order', 'odd-6', 'Placed', jsonb_build_object({long}, 1)"),
            ),
            "illegal_name",
            "header name",
        ),
        (
            insert(
                &format!("{names}, headers"),
                "'order', 'odd-7', 'Placed', '{\"CC\": [\"x\"]}'",
            ),
            "illegal_name",
            "CC",
        ),
        (
            insert(names, "'order', 'odd-8\n' || repeat('x', 150000), 'Placed'"),
            "too_large",
            "frame_max",
        ),
        (
            insert(names, "E'ord\\ner', E'odd-9\\r\\n20', repeat('b', 300)"),
            "illegal_name",
            "event_type",
        ),
    ];
    let delivered = [
        insert(names, "'order', 'odd-20', E'\\x01'"),
        insert(names, "'', '', ''"),
        insert(
            &format!("{names}, created_at"),
            "'order', 'odd-21', 'Placed', 'infinity'",
        ),
        insert(
            &format!("{names}, created_at"),
            "'order', 'odd-22', 'Placed', '-infinity'",
        ),
        insert(
            &format!("{names}, created_at"),
            "'order', 'odd-23', 'Placed', '4713-01-01 BC'",
        ),
        insert(
            &format!("{names}, created_at"),
            "'order', 'odd-24', 'Placed', '294276-01-01'",
        ),
        insert(
            &format!("{names}, next_attempt_at"),
            "'order', 'odd-25', 'Placed', '-infinity'",
        ),
        insert(
            &format!("{names}, attempts"),
            "'order', 'odd-26', 'Placed', 2147483647",
        ),
        insert(
            &format!("{names}, attempts"),
            "'order', 'odd-27', 'Placed', -5",
        ),
        insert(
            &format!("{names}, headers"),
            "'order', 'odd-28', 'Placed', 'null'::jsonb",
        ),
        insert(
            &format!("{names}, correlation_id"),
            "'order', 'odd-29', 'Placed', repeat('c', 1000)",
        ),
        insert(
            &format!("{names}, event_id"),
            "'order', 'odd-30', 'Placed', NULL",
        ),
    ];
    let never_due = [insert(
        &format!("{names}, next_attempt_at"),
        "'order', 'odd-40', 'Placed', 'infinity'",
    )];

    let mut good = Vec::new();
    // In every bucket: 400 aggregates leave none of 64 out.
    let mut some_good = async |world: &World, event: &str| {
        let sql = format!(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
             SELECT 'good', n::text, '{event}', '{{}}' FROM generate_series(1, 400) n RETURNING id"
        );
        good.extend(
            world
                .db
                .query(&sql, &[])
                .await
                .unwrap()
                .iter()
                .map(|row| row.get::<_, i64>(0)),
        );
    };
    some_good(&world, "Before").await;
    let mut dying = Vec::new();
    for (sql, class, words) in &dead {
        dying.push((world.one::<i64>(sql).await, *class, *words));
    }
    let mut odd_but_fine = Vec::new();
    for sql in &delivered {
        odd_but_fine.push(world.one::<i64>(sql).await);
    }
    for sql in &never_due {
        world.one::<i64>(sql).await;
    }
    some_good(&world, "After").await;

    world
        .until(
            "SELECT count(*) = 1 AND bool_and(next_attempt_at = 'infinity') FROM outbox WHERE status = 'pending'",
            SOON,
        )
        .await;
    let ids: std::collections::HashSet<_> = world
        .rest(Duration::from_millis(500))
        .await
        .iter()
        .map(|arrival| arrival.id)
        .collect();
    for id in good.iter().chain(&odd_but_fine) {
        assert!(
            ids.contains(id),
            "{id} did not arrive: {}",
            world.table_state().await
        );
    }
    for (id, class, words) in dying {
        let state: String = world
            .one(&format!(
                "SELECT concat(status, ' ', attempts, ' ', last_error) FROM outbox WHERE id = {id}"
            ))
            .await;
        assert!(
            state.starts_with(&format!("dead 1 {class}: ")) && state.contains(words),
            "{id}: {state}"
        );
        assert!(!ids.contains(&id));
    }
    assert_eq!(relay.logged("an actor died"), 0, "{}", relay.log());
    assert_eq!(relay.logged("claim token void"), 0, "{}", relay.log());
    assert_one_line_a_record(&relay);
    let last = world.insert(("good", "1"), "Last", "{}").await;
    assert_eq!(world.next_arrival(SOON).await.unwrap().id, last);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_record_is_one_line_whatever_a_row_is_called() {
    let world = World::new().await;
    world.unbind("#").await;
    let relay = world
        .ready_relay(&[("retry.max_attempts", "2"), ("retry.backoff", "10ms")])
        .await;
    world
        .insert(("inv\noice", "a\r\nb"), "Se\n\u{1b}[31mnt", "{}")
        .await;
    world
        .until("SELECT bool_and(status = 'dead') FROM outbox", SOON)
        .await;
    relay
        .until_logged("id=1 aggregate_type=inv\\noice aggregate_id=a\\r\\nb", SOON)
        .await;
    assert_one_line_a_record(&relay);
    assert!(!relay.log().contains('\u{1b}'), "{}", relay.log());
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_vanished_after_its_claim_is_left_out() {
    let world = World::new().await;
    let mut rows = Vec::new();
    for number in 0..10 {
        let id = world
            .insert(
                ("order", &number.to_string()),
                "Placed",
                &number.to_string(),
            )
            .await;
        rows.push(ClaimedRow {
            id: EventId(id),
            bucket: 0,
            key: AggregateKey::new("order", &number.to_string()),
            stored_bytes: 1,
        });
    }
    world
        .sql("DELETE FROM outbox WHERE aggregate_id = '4'")
        .await;
    // The server answers in the order of the table, where this one is last now.
    world
        .sql("UPDATE outbox SET attempts = 0 WHERE aggregate_id = '2'")
        .await;
    let wanted: Vec<_> = rows
        .iter()
        .map(|row| row.id)
        .filter(|id| *id != EventId(5))
        .collect();
    let loaded = world.store.load(&rows).await.unwrap();
    assert_eq!(
        loaded.iter().map(|event| event.id).collect::<Vec<_>>(),
        wanted
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_thousand_rows_of_one_statement_arrive_in_order() {
    let mut world = World::new().await;
    let _relay = world.ready_relay(&[]).await;
    world
        .sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
             SELECT 'order', (n % 2000)::text, 'Placed', jsonb_build_object('n', n) FROM generate_series(1, 20000) n",
        )
        .await;
    let arrivals = world.arrivals(20_000, Duration::from_secs(60)).await;
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    world.until_published(SOON).await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_payloads_of_a_megabyte_arrive_whole() {
    let mut world = World::new().await;
    let _relay = world
        .ready_relay(&[("rabbitmq.confirm_timeout", "4s")])
        .await;
    world
        .sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
             SELECT 'large', (n % 7)::text, 'Placed', jsonb_build_object('n', n, 'fill', repeat(n::text || ' ', 1000000 / (length(n::text) + 1)))
             FROM generate_series(1, 50) n",
        )
        .await;
    let arrivals = world.arrivals(50, Duration::from_secs(60)).await;
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    for row in world
        .db
        .query("SELECT id, md5(payload::text) FROM outbox", &[])
        .await
        .unwrap()
    {
        let (id, wanted): (i64, String) = (row.get(0), row.get(1));
        let arrival = arrivals.iter().find(|arrival| arrival.id == id).unwrap();
        assert!(arrival.body.len() > 900_000);
        let body = std::str::from_utf8(&arrival.body).unwrap();
        let got: String = world
            .db
            .query_one("SELECT md5($1)", &[&body])
            .await
            .unwrap()
            .get(0);
        assert_eq!(got, wanted);
    }
    assert_eq!(
        world
            .one::<i64>("SELECT count(*) FROM outbox WHERE attempts > 0")
            .await,
        0
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_aggregate_id_of_any_length_can_be_written_and_arrives() {
    let mut world = World::new().await;
    let _relay = world.ready_relay(&[]).await;
    // Incompressible, so longer than any text that a B-tree could hold.
    world
        .sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
             SELECT 'long', string_agg(md5(g::text), ''), 'Made', '{}'
             FROM generate_series(1, 300) g, generate_series(1, 3) row GROUP BY row",
        )
        .await;
    let arrivals = world.arrivals(3, SOON).await;
    let id: String = world.one("SELECT min(aggregate_id) FROM outbox").await;
    assert_eq!(id.len(), 9600);
    assert!(arrivals.iter().all(|arrival| arrival.aggregate.1 == id));
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    world.until_published(SOON).await;
    world.clean().await;
}
