//! The relay's guarantees with topics of Kafka at the other end: a broker that KAFKA_BOOTSTRAP_SERVERS
//! names, or librdkafka's mock of one.

use std::time::SystemTime;

use crate::support::{Cluster, Ledger, Load, Record, SOON, Topic, World};

fn ledger(records: &[Record]) -> Ledger {
    let mut ledger = Ledger::default();
    for record in records {
        ledger.take(&record.arrival());
    }
    ledger
}

fn of(records: &[Record], id: i64) -> &Record {
    records.iter().find(|record| record.id() == id).unwrap()
}

/// Kafka's `Utils.murmur2`, written from its Java source.
fn murmur2(data: &[u8]) -> u32 {
    const M: u32 = 0x5bd1_e995;
    let mut h = 0x9747_b28c ^ u32::try_from(data.len()).unwrap();
    let mut fours = data.chunks_exact(4);
    for four in &mut fours {
        let mut k = u32::from_le_bytes(four.try_into().unwrap()).wrapping_mul(M);
        k ^= k >> 24;
        h = h.wrapping_mul(M) ^ k.wrapping_mul(M);
    }
    let rest = fours.remainder();
    if !rest.is_empty() {
        for (place, byte) in rest.iter().enumerate() {
            h ^= u32::from(*byte) << (8 * place);
        }
        h = h.wrapping_mul(M);
    }
    h = (h ^ (h >> 13)).wrapping_mul(M);
    h ^ (h >> 15)
}

/// Where Java's default puts this key.
fn javas_partition(key: &[u8], partitions: u32) -> i32 {
    i32::try_from((murmur2(key) & 0x7fff_ffff) % partitions).unwrap()
}

#[test]
fn the_tests_murmur2_gives_the_values_of_kafkas_own_tests() {
    // org.apache.kafka.common.utils.UtilsTest.testMurmur2
    for (text, hash) in [
        ("21", -973_932_308),
        ("foobar", -790_332_482),
        ("a-little-bit-long-string", -985_981_536),
        ("a-little-bit-longer-string", -1_486_304_829),
        (
            "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8",
            -58_897_971,
        ),
        ("abc", 479_470_107),
    ] {
        assert_eq!(murmur2(text.as_bytes()).cast_signed(), hash, "{text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_keys_are_where_javas_default_partitioner_puts_them() {
    let cluster = Cluster::new();
    let mut topic = cluster.create("order", 12).await;
    let world = World::outbox().await;
    world
        .sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
             SELECT 'order', CASE n % 5 WHEN 0 THEN 'ORD-' || n WHEN 1 THEN 'ключ ' || n WHEN 2 THEN n || '-ü€'
                                        WHEN 3 THEN repeat('😀', n % 7) || n ELSE md5(n::text) END, 'Placed', '{}'
             FROM generate_series(1, 999) n",
        )
        .await;
    world.insert(("order", ""), "Placed", "{}").await;
    let _relay = cluster.relay(&world, &[]);
    world.until_published(SOON).await;
    let records = topic.records(1000, SOON).await;
    for record in &records {
        let key = record.key.as_deref().unwrap_or_default();
        let id = record.header("aggregate_id").unwrap();
        assert_eq!(key, id.as_bytes());
        assert_eq!(record.partition, javas_partition(key, 12), "{id}");
    }
    ledger(&records).assert_sound(&world.committed().await);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_are_there_once_in_order_and_byte_for_byte_in_the_topics_of_their_types() {
    let cluster = Cluster::new();
    let mut orders = cluster.create("order", 3).await;
    let mut invoices = cluster.create("invoice", 1).await;
    let world = World::outbox().await;
    world.fill("order", 20, 20).await;
    world.fill("invoice", 3, 4).await;
    let mut odd = Vec::new();
    for payload in [
        "null",
        "\"\"",
        "{}",
        "[]",
        "0",
        r#"{"n": 1e400, "é": [1.50]}"#,
    ] {
        odd.push(world.insert(("order", "odd"), "Placed", payload).await);
    }
    world
        .sql(&format!(
            "UPDATE outbox SET correlation_id = 'c-1', created_at = 'epoch'::timestamptz + interval '1 day',
                 headers = '{{\"traceparent\": \"00-ab\", \"n\": null}}' WHERE id = {}",
            odd[0]
        ))
        .await;
    let _relay = cluster.relay(&world, &[]);
    world.until_published(SOON).await;
    let mut records = orders.records(406, SOON).await;
    for id in &odd {
        let text: String = world
            .one(&format!("SELECT payload::text FROM outbox WHERE id = {id}"))
            .await;
        // Never a record without a value, which would delete the key.
        assert_eq!(of(&records, *id).value.as_deref(), Some(text.as_bytes()));
    }
    let first = of(&records, odd[0]);
    for (name, value) in [
        ("event_type", "Placed"),
        ("aggregate_type", "order"),
        ("aggregate_id", "odd"),
        ("correlation_id", "c-1"),
        ("traceparent", "00-ab"),
        ("created_at", "86400"),
        ("attempt", "1"),
    ] {
        assert_eq!(first.header(name), Some(value), "{name}");
    }
    assert!(first.headers.contains(&("n".to_owned(), None)));
    let uuid: String = world
        .one(&format!(
            "SELECT event_id::text FROM outbox WHERE id = {}",
            odd[0]
        ))
        .await;
    assert_eq!(first.header("event_id"), Some(uuid.as_str()));
    // Retention goes by the record's time, so that is when it was sent.
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis();
    let sent = u128::try_from(first.timestamp_ms.unwrap()).unwrap();
    assert!(now.abs_diff(sent) < 60_000, "{sent}");
    let others = invoices.records(12, SOON).await;
    assert!(
        others
            .iter()
            .all(|record| record.topic == cluster.topic_of("invoice"))
    );
    records.extend(others);
    let ledger = ledger(&records);
    ledger.assert_sound(&world.committed().await);
    assert_eq!(ledger.repeats, 0);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_is_missing_is_waited_for_at_no_cost_and_holds_up_no_other() {
    let cluster = Cluster::new();
    let mut orders = cluster.create("order", 1).await;
    let world = World::outbox().await;
    world.fill("later", 3, 2).await;
    world.fill("order", 5, 2).await;
    let relay = cluster.relay(&world, &[]);
    orders.records(10, SOON).await;
    let waits =
        "SELECT count(*) = 6 FROM outbox WHERE aggregate_type = 'later' AND status = 'pending'
                 AND attempts = 0";
    world.until(waits, SOON).await;
    relay.until_logged("does not exist: create it", SOON).await;
    let mut later = cluster.create("later", 1).await;
    world.until_published(SOON).await;
    let records = later.records(6, SOON).await;
    assert_eq!(ledger(&records).order_violations, []);
    let charged: i64 = world
        .one("SELECT count(*) FROM outbox WHERE attempts > 0")
        .await;
    assert_eq!(charged, 0);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_type_that_makes_no_topic_dies_with_a_reason_and_hurts_no_other() {
    let cluster = Cluster::new();
    let mut orders = cluster.create("order", 1).await;
    let world = World::outbox().await;
    let long = "a".repeat(260);
    for odd in ["order line", "a/b", "ü", &long] {
        world.insert((odd, "1"), "Placed", "{}").await;
    }
    let _relay = cluster.relay(&world, &[]);
    let dead = "SELECT count(*) = 4 FROM outbox WHERE status = 'dead' AND attempts = 1
                AND last_error LIKE 'illegal_name: topic %'";
    world.until(dead, SOON).await;
    world.fill("order", 10, 10).await;
    orders.records(100, SOON).await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_and_everything_else_survive_kills_under_load() {
    let cluster = Cluster::new();
    let mut topic = cluster.create("load", 4).await;
    let world = World::outbox().await;
    let load = Load::start(&world);
    for _ in 0..3 {
        let mut relay = cluster.relay(&world, &[]);
        world.until_owned(&relay).await;
        let before = world.count("published").await;
        let more =
            format!("SELECT count(*) > {before} + 50 FROM outbox WHERE status = 'published'");
        world.until(&more, SOON).await;
        relay.kill().await;
    }
    load.stop().await;
    let _relay = cluster.relay(&world, &[]);
    world.until_published(SOON).await;
    let committed = world.committed().await;
    let records = topic.records(committed.len(), SOON).await;
    ledger(&records).assert_sound(&committed);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_an_orderly_stop_under_load_nothing_is_repeated() {
    let cluster = Cluster::new();
    let mut topic = cluster.create("load", 4).await;
    let world = World::outbox().await;
    let load = Load::start(&world);
    for _ in 0..2 {
        let mut relay = cluster.relay(&world, &[]);
        world.until_owned(&relay).await;
        let before = world.count("published").await;
        let more =
            format!("SELECT count(*) > {before} + 50 FROM outbox WHERE status = 'published'");
        world.until(&more, SOON).await;
        assert!(relay.terminate(SOON).await.success(), "{}", relay.log());
    }
    load.stop().await;
    let _relay = cluster.relay(&world, &[]);
    world.until_published(SOON).await;
    let committed = world.committed().await;
    let records = topic.records(committed.len(), SOON).await;
    let ledger = ledger(&records);
    ledger.assert_sound(&committed);
    assert_eq!(ledger.repeats, 0);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routes_lead_to_topics_and_keys_and_dead_events_to_one_of_their_own() {
    let cluster = Cluster::new();
    let mut all: Topic = cluster.create("all", 1).await;
    let mut dead: Topic = cluster.create("dead", 1).await;
    let world = World::outbox().await;
    let file = tempfile::NamedTempFile::new().unwrap();
    let routes = format!(
        "[[routes]]\naggregate_type = \"or*\"\ndestination = \"{all}\"\n\
         routing_key = \"{{aggregate_type}}/{{aggregate_id}}\"\npublish_to = \"{dead}\"\n",
        all = all.name,
        dead = dead.name
    );
    std::fs::write(file.path(), routes).unwrap();
    let good = world.insert(("order", "7"), "Placed", "{}").await;
    let bad = world.insert(("order", "8"), "Placed", "{}").await;
    world
        .sql(&format!(
            "UPDATE outbox SET headers = '[1]' WHERE id = {bad}"
        ))
        .await;
    let path = file.path().to_str().unwrap().to_owned();
    let _relay = cluster.relay(&world, &[("BELLWIRE_CONFIG", &path)]);
    let kept = all.records(1, SOON).await;
    assert_eq!(of(&kept, good).key.as_deref(), Some(&b"order/7"[..]));
    let copies = dead.records(1, SOON).await;
    assert_eq!(of(&copies, bad).header("dead_cause"), Some("undecodable"));
    assert_eq!(of(&copies, bad).key.as_deref(), Some(&b"8"[..]));
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_says_what_is_there_and_what_is_not_and_no_password() {
    let cluster = Cluster::new();
    let _topic = cluster.create("order", 2).await;
    let world = World::outbox().await;
    let run = world.command(&cluster.settings(), &["check"]).await;
    assert!(run.status.success(), "{}{}", run.stdout, run.stderr);
    assert!(run.stdout.contains("ok   kafka"), "{}", run.stdout);
    let nobody = [
        ("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1"),
        ("kafka.sasl_mechanism", "PLAIN"),
        ("kafka.username", "u"),
        ("kafka.password", "S3cret"),
        ("kafka.connect_timeout", "3s"),
    ];
    let settings = [&cluster.settings()[..], &nobody].concat();
    let run = world.command(&settings, &["check"]).await;
    assert_eq!(run.status.code(), Some(1));
    assert!(run.stdout.contains("FAIL kafka"), "{}", run.stdout);
    assert!(run.stdout.contains("Connection refused"), "{}", run.stdout);
    let said = format!("{}{}", run.stdout, run.stderr);
    assert!(!said.contains("S3cret"), "{said}");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_above_the_limit_dies_alone() {
    let cluster = Cluster::new();
    let mut topic = cluster.create("order", 1).await;
    let world = World::outbox().await;
    let mut ids = Vec::new();
    for (aggregate, size) in [("1", 9_000), ("2", 300), ("3", 20_000), ("4", 300)] {
        let payload = format!("\"{}\"", "x".repeat(size));
        ids.push(world.insert(("order", aggregate), "Placed", &payload).await);
    }
    let settings = [
        ("kafka.max_message_bytes", "10000"),
        ("kafka.linger", "500ms"),
    ];
    let _relay = cluster.relay(&world, &settings);
    let records = topic.records(3, SOON).await;
    assert!(records.iter().all(|record| record.id() != ids[2]));
    let dead = format!(
        "SELECT status = 'dead' AND last_error LIKE 'too_large: %kafka.max_message_bytes%'
         FROM outbox WHERE id = {}",
        ids[2]
    );
    world.until(&dead, SOON).await;
    let charged: i64 = world
        .one("SELECT count(*) FROM outbox WHERE attempts > 0 AND status <> 'dead'")
        .await;
    assert_eq!(charged, 0);
    world.clean().await;
}
