//! A signed webhook is a committed effect or a dead letter: never both, never twice, never lost.

use std::time::Duration;

use crate::support::intake::{Sender, now, order_event, orders, signed};
use crate::support::{Proxy, SOON, World, database_url};

const CREATED: &str = "created";

/// A source without a schema whose one route counts, in the table `effects`, each event once.
const PLAIN: &str = r#"
[intake]
listen = "127.0.0.1:0"
[[intake.source]]
name = "plain"
[[intake.source.route]]
event_type = "*"
sql = """
INSERT INTO effects (event_id) VALUES (:event_id);
SELECT pg_sleep(coalesce(:pause, '0')::float8);
SELECT :refuse AS failure
"""
[intake.source.route.parameters]
pause = "/pause"
refuse = "/refuse"
"#;

/// What [`PLAIN`] writes to.
pub async fn effects(world: &World) {
    world
        .sql("CREATE TABLE effects (event_id TEXT, at TIMESTAMPTZ DEFAULT clock_timestamp())")
        .await;
}

pub fn plain() -> String {
    PLAIN.to_owned()
}

async fn stored(world: &World, id: &str) -> (String, Vec<u8>, Vec<u8>) {
    let row = world
        .db
        .query_one(
            "SELECT status, payload, payload_sha256 FROM outbox_webhook_events WHERE event_id = $1",
            &[&id],
        )
        .await
        .unwrap();
    (row.get(0), row.get(1), row.get(2))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_order_is_created_paid_and_cancelled_and_each_answer_says_what_was_committed() {
    let world = World::new().await;
    let (_relay, sender) = world.orders_intake(&[]).await;
    let body = order_event(CREATED, "ord_1001", 500);
    let answer = sender.post("msg_1", &body).await;
    answer.assert(200, "processed");
    assert_eq!(answer.body["stored_status"], "processed");
    assert_eq!(answer.body["event_type"], "order.created");
    assert_eq!(answer.body["event_id"], "msg_1");
    assert_eq!(answer.body["attempts"], 0);
    assert_eq!(answer.body["detail"], "");
    let execution = answer.body["execution_id"].clone();
    assert_eq!(answer.body["first_execution_id"], execution);
    sender
        .post("msg_2", &order_event("paid", "ord_1001", 500))
        .await
        .assert(200, "processed");
    sender
        .post("msg_3", &order_event("cancelled", "ord_1001", 0))
        .await
        .assert(200, "processed");
    let state: String = world
        .one("SELECT format('%s %s %s %s', status, paid_cents, refund_due_cents, last_event_id) FROM orders")
        .await;
    assert_eq!(state, "cancelled 500 500 msg_3");
    // A repeat is answered from what is stored.
    let answer = sender.post("msg_1", &body).await;
    answer.assert(200, "duplicate");
    assert_eq!(answer.body["stored_status"], "processed");
    assert_eq!(answer.body["first_execution_id"], execution);
    assert_ne!(answer.body["execution_id"], execution);
    let audit: String = world
        .one("SELECT string_agg(outcome, ' ' ORDER BY id) FROM outbox_intake_audit")
        .await;
    assert_eq!(audit, "processed processed processed duplicate");
    // Each of them left for the outbox in the same transaction.
    assert_eq!(world.count("pending").await, 3);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_fails_is_a_dead_letter_with_its_reason_and_leaves_no_effect() {
    let world = World::new().await;
    let (_relay, sender) = world.orders_intake(&[]).await;
    let early = sender
        .post("early", &order_event("paid", "ord_7777", 5))
        .await;
    early.assert(200, "dead_lettered");
    assert_eq!(early.body["attempts"], 1);
    assert_eq!(
        early.body["detail"],
        "processing_failed - order ord_7777 not found (paid arrived before created)"
    );
    sender
        .post("made", &order_event(CREATED, "ord_1001", 500))
        .await
        .assert(200, "processed");
    let wrong = sender
        .post("wrong", &order_event("paid", "ord_1001", 499))
        .await;
    wrong.assert(200, "dead_lettered");
    let detail = wrong.body["detail"].as_str().unwrap();
    assert!(
        detail.contains("payment does not match the order total"),
        "{detail}"
    );
    assert_eq!(
        world.one::<String>("SELECT status FROM orders").await,
        "created"
    );
    let invalid = sender
        .post("invalid", &order_event(CREATED, "no-order", -1))
        .await;
    invalid.assert(200, "dead_lettered");
    let detail = invalid.body["detail"].as_str().unwrap();
    assert!(detail.starts_with("schema_invalid - #/data/"), "{detail}");
    let unknown = sender
        .post("unknown", &order_event("refunded", "ord_1001", 1))
        .await;
    unknown.assert(200, "dead_lettered");
    assert_eq!(
        unknown.body["detail"],
        "unknown_type - no handler for order.refunded"
    );
    // The repeat of a dead letter is one, and is not tried again.
    let again = sender
        .post("wrong", &order_event("paid", "ord_1001", 499))
        .await;
    again.assert(200, "duplicate");
    assert_eq!(again.body["stored_status"], "dead_lettered");
    let letters: String = world
        .one(
            "SELECT string_agg(format('%s %s %s %s', event_id, reason_class, attempts, status), ', ' ORDER BY event_id)
             FROM outbox_dead_letter",
        )
        .await;
    assert_eq!(
        letters,
        "early processing_failed 1 retryable, invalid schema_invalid 1 retryable, \
         unknown unknown_type 1 retryable, wrong processing_failed 1 retryable"
    );
    assert_eq!(world.count("pending").await, 1);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_webhook_reaches_the_broker_through_the_outbox() {
    let mut world = World::new().await;
    world.orders_tables().await;
    let relay = world.with_config(&orders(), &[], &["run"]);
    let address = crate::support::intake::intake_address(&relay).await;
    let sender = Sender::new(&address, "orders");
    let body = r#"{"type":"order.created","timestamp":"2026-01-31T10:00:00Z","data":{"order_id":"ord_1001","customer_email":"a@b","amount_cents":500,"currency":"EUR"}}"#;
    sender.post("msg_1", body).await.assert(200, "processed");
    let arrival = world.next_arrival(SOON).await.unwrap();
    assert_eq!(arrival.routing_key, "order.OrderCreated");
    assert_eq!(arrival.aggregate, ("order".into(), "ord_1001".into()));
    let sent: serde_json::Value = serde_json::from_slice(&arrival.body).unwrap();
    assert_eq!(sent["amount_cents"], 500);
    assert_eq!(arrival.text_header("correlation_id"), "msg_1");
    // A dead letter sends nothing.
    sender
        .post("msg_2", &order_event("paid", "ord_9999", 5))
        .await
        .assert(200, "dead_lettered");
    assert!(world.rest(Duration::from_millis(300)).await.is_empty());
    drop(relay);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_body_under_a_known_id_is_a_conflict_and_is_not_stored() {
    let world = World::new().await;
    let (_relay, sender) = world.orders_intake(&[]).await;
    let body = order_event(CREATED, "ord_1001", 500);
    sender.post("msg_1", &body).await.assert(200, "processed");
    let other = order_event(CREATED, "ord_1002", 900);
    let answer = sender.post("msg_1", &other).await;
    answer.assert(409, "id_conflict");
    let text = answer.body.to_string();
    assert!(
        !text.contains("ord_1001") && !text.contains("ord_1002"),
        "{text}"
    );
    // By the raw bytes: white space makes another body.
    sender
        .post("msg_1", &body.replace(',', ", "))
        .await
        .assert(409, "id_conflict");
    sender.post("msg_1", &body).await.assert(200, "duplicate");
    assert_eq!(world.one::<i64>("SELECT count(*) FROM orders").await, 1);
    let (status, payload, _) = stored(&world, "msg_1").await;
    assert_eq!((status.as_str(), payload), ("processed", body.into_bytes()));
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_posts_of_one_id_to_two_processes_are_one_effect() {
    let world = World::new().await;
    effects(&world).await;
    let config = plain();
    let (_one, first) = world.intake(&config, "plain", &[]).await;
    let (_other, second) = world.intake(&config, "plain", &[]).await;
    for (id, bodies) in [("same", 1), ("two", 2)] {
        let posts = (0..64).map(|number| {
            let sender = if number % 2 == 0 { &first } else { &second };
            let body = format!(r#"{{"type":"a","n":{},"pause":0.1}}"#, number / 2 % bodies);
            async move { sender.post(id, &body).await }
        });
        let answers = futures_util::future::join_all(posts).await;
        let count = |outcome: &str| {
            answers
                .iter()
                .filter(|answer| answer.outcome() == outcome)
                .count()
        };
        assert_eq!(count("processed"), 1, "{answers:?}");
        assert_eq!(count("duplicate") + count("id_conflict"), 63, "{answers:?}");
        assert_eq!(count("id_conflict"), if bodies == 1 { 0 } else { 32 });
    }
    assert_eq!(world.one::<i64>("SELECT count(*) FROM effects").await, 2);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_effect_happens_once_though_the_process_is_killed_again_and_again() {
    let world = World::new().await;
    effects(&world).await;
    let config = plain();
    let (mut relay, mut sender) = world.intake(&config, "plain", &[]).await;
    let body = |number: u32| format!(r#"{{"type":"a","n":{number},"pause":0.01}}"#);
    let total = 200;
    let mut killed = 0;
    let mut answered = 0;
    for batch in 0..10 {
        let posts = (0..20).map(|number| {
            let number = batch * 20 + number;
            let (sender, body) = (sender.clone(), body(number));
            tokio::spawn(async move {
                sender
                    .try_post(&format!("k_{number}"), body.as_bytes())
                    .await
            })
        });
        let posts: Vec<_> = posts.collect();
        let pause = rand::random::<u64>() % 80;
        tokio::time::sleep(Duration::from_millis(pause)).await;
        relay.kill().await;
        killed += 1;
        for post in posts {
            if let Ok(answer) = post.await.unwrap() {
                assert!(answer.code == 200 || answer.code == 503, "{answer:?}");
                answered += usize::from(answer.code == 200);
            }
        }
        (relay, sender) = world.intake(&config, "plain", &[]).await;
    }
    let before: i64 = world.one("SELECT count(*) FROM effects").await;
    assert!(before >= i64::try_from(answered).unwrap());
    for round in 0..3 {
        for number in 0..total {
            let answer = sender.post(&format!("k_{number}"), &body(number)).await;
            assert_eq!(answer.code, 200, "{answer:?}");
            if round > 0 {
                assert_eq!(answer.outcome(), "duplicate");
            }
        }
    }
    let counts: String = world
        .one("SELECT format('%s %s', count(*), count(DISTINCT event_id)) FROM effects")
        .await;
    assert_eq!(counts, "200 200", "after {killed} kills");
    let statuses: String = world
        .one("SELECT string_agg(DISTINCT status, ' ') FROM outbox_webhook_events")
        .await;
    assert_eq!(statuses, "processed");
    drop(relay);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_bytes_are_kept_as_they_were_signed_and_numbers_as_they_were_written() {
    let world = World::new().await;
    world
        .sql("CREATE TABLE sums (amount NUMERIC, label TEXT)")
        .await;
    let config = r#"
[intake]
listen = "127.0.0.1:0"
[[intake.source]]
name = "plain"
[[intake.source.route]]
sql = "INSERT INTO sums VALUES (:amount::numeric, :label)"
outbox = { aggregate_type = "/kind", aggregate_id = "/id", event_type = "{event_type}.{/label}" }
[intake.source.route.parameters]
amount = "/amount"
label = "/label"
"#;
    let (_relay, sender) = world.intake(config, "plain", &[]).await;
    let body = "{\r\n \"type\": \"t\", \"kind\":\"k\", \"id\": 7, \"label\":\"z\\u00e9\",  \"amount\": 123456789012345678901234567890.10 }\n";
    sender.post("msg_1", body).await.assert(200, "processed");
    let (_, payload, hash) = stored(&world, "msg_1").await;
    assert_eq!(payload, body.as_bytes());
    let right: bool = world
        .one("SELECT payload_sha256 = sha256(payload) FROM outbox_webhook_events")
        .await;
    assert!(right, "{hash:?}");
    let sum: String = world.one("SELECT amount::text || label FROM sums").await;
    assert_eq!(sum, "123456789012345678901234567890.10zé");
    let event: String = world
        .one("SELECT format('%s %s %s %s', aggregate_type, aggregate_id, event_type, payload ->> 'amount') FROM outbox")
        .await;
    assert_eq!(event, "k 7 t.zé 123456789012345678901234567890.10");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hard_bodies_end_in_the_table_or_in_a_refusal_and_never_in_endless_retries() {
    let world = World::new().await;
    world.sql("CREATE TABLE bodies (body JSONB)").await;
    let config = r#"
[intake]
listen = "127.0.0.1:0"
[[intake.source]]
name = "plain"
[[intake.source.route]]
sql = "INSERT INTO bodies VALUES (:payload)"
"#;
    let (_relay, sender) = world.intake(config, "plain", &[]).await;
    let deep = |levels: usize| format!(r#"{{"a":{}{}}}"#, "[".repeat(levels), "]".repeat(levels));
    let bodies: Vec<(Vec<u8>, u16, &str)> = vec![
        (br#"{"type":"a\u0000b"}"#.to_vec(), 200, "dead_lettered"),
        (br#"{"x":"a\u0000b"}"#.to_vec(), 200, "dead_lettered"),
        (br#"{"\u0000":1}"#.to_vec(), 200, "dead_lettered"),
        (br#"{"type":"a","type":"b"}"#.to_vec(), 200, "processed"),
        (deep(100).into_bytes(), 200, "processed"),
        (deep(200).into_bytes(), 400, "rejected"),
        (deep(100_000).into_bytes(), 400, "rejected"),
        (br#"{"a":1e400}"#.to_vec(), 400, "rejected"),
        (br#"{"a":"\ud800"}"#.to_vec(), 400, "rejected"),
        (b"\xef\xbb\xbf{}".to_vec(), 400, "rejected"),
        (b"{} x".to_vec(), 400, "rejected"),
        (br#"{"a":NaN}"#.to_vec(), 400, "rejected"),
        (b"{\"a\":\"\xff\"}".to_vec(), 400, "rejected"),
        (b"{\"a\":\"\xed\xa0\x80\"}".to_vec(), 400, "rejected"),
        (b"[]".to_vec(), 400, "rejected"),
        (b"null".to_vec(), 400, "rejected"),
        (b"".to_vec(), 400, "rejected"),
        (b"{}".to_vec(), 200, "processed"),
    ];
    for (number, (body, code, outcome)) in bodies.iter().enumerate() {
        let id = format!("hard_{number}");
        let answer = sender.try_post(&id, body).await.unwrap();
        assert_eq!(
            (answer.code, answer.outcome()),
            (*code, *outcome),
            "{number} {}: {answer:?}",
            String::from_utf8_lossy(&body[..body.len().min(40)])
        );
        // Told the same, and stored only once, however often it comes.
        let again = sender.try_post(&id, body).await.unwrap();
        let expected = if *code == 200 {
            "duplicate"
        } else {
            "rejected"
        };
        again.assert(*code, expected);
    }
    let stored: i64 = world
        .one("SELECT count(*) FROM outbox_webhook_events")
        .await;
    let taken = bodies.iter().filter(|(_, code, _)| *code == 200).count();
    assert_eq!(stored, i64::try_from(taken).unwrap());
    // The validator, the router and PostgreSQL see the same one of two.
    let second: String = world
        .one("SELECT event_type FROM outbox_webhook_events WHERE event_id = 'hard_3'")
        .await;
    assert_eq!(second, "b");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_half_done_after_the_deadline_and_the_retry_is_processed() {
    let world = World::new().await;
    effects(&world).await;
    let (relay, sender) = world
        .intake(
            &plain(),
            "plain",
            &[("intake.deadline", "2s"), ("intake.read_timeout", "1s")],
        )
        .await;
    let slow = sender.post("slow", r#"{"type":"a","pause":60}"#).await;
    slow.assert(503, "error");
    assert_eq!(slow.retry_after.as_deref(), Some("5"));
    assert_eq!(relay.logged("deadline exceeded"), 1);
    // The server was told to stop, too.
    world
        .until(
            "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE query LIKE '%pg_sleep(coalesce%' AND state = 'active'
                                AND pid <> pg_backend_pid())",
            SOON,
        )
        .await;
    assert_eq!(world.one::<i64>("SELECT count(*) FROM effects").await, 0);
    assert_eq!(
        world
            .one::<i64>("SELECT count(*) FROM outbox_webhook_events")
            .await,
        0
    );
    world
        .sql("CREATE FUNCTION pg_temp.nothing() RETURNS int LANGUAGE sql AS 'SELECT 1'")
        .await;
    sender
        .post("slow", r#"{"type":"a","pause":0}"#)
        .await
        .assert(200, "processed");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_that_hangs_up_stops_nothing_halfway() {
    let world = World::new().await;
    effects(&world).await;
    let (_relay, sender) = world.intake(&plain(), "plain", &[]).await;
    let body = r#"{"type":"a","pause":1}"#;
    let gone = tokio::time::timeout(Duration::from_millis(300), sender.post("gone", body)).await;
    assert!(gone.is_err());
    world.until("SELECT count(*) = 1 FROM effects", SOON).await;
    sender.post("gone", body).await.assert(200, "duplicate");
    assert_eq!(world.one::<i64>("SELECT count(*) FROM effects").await, 1);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_is_away_is_a_503_and_what_comes_again_is_processed() {
    let world = World::new().await;
    effects(&world).await;
    let proxy = Proxy::new(&database_url()).await;
    let through = proxy.through(&database_url());
    let sign = if through.contains('?') { '&' } else { '?' };
    let url = format!("{through}{sign}options=-csearch_path%3D{}", world.schema);
    let (_relay, sender) = world
        .intake(&plain(), "plain", &[("DATABASE_URL", &url)])
        .await;
    sender.post("before", "{}").await.assert(200, "processed");
    proxy.refuse(true);
    proxy.cut();
    let answer = sender.post("meanwhile", "{}").await;
    answer.assert(503, "error");
    assert_eq!(answer.retry_after.as_deref(), Some("5"));
    assert!(!answer.body.to_string().contains("127.0.0.1"), "{answer:?}");
    proxy.refuse(false);
    sender
        .post("meanwhile", "{}")
        .await
        .assert(200, "processed");
    sender.post("before", "{}").await.assert(200, "duplicate");
    // Connections that died unnoticed cost no sender a retry.
    proxy.cut();
    sender.post("after", "{}").await.assert(200, "processed");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadlock_or_a_lock_is_nobodys_failure_and_a_deferred_constraint_is_the_events() {
    let world = World::new().await;
    world
        .sql(
            "CREATE TABLE parent (id TEXT PRIMARY KEY);
             CREATE TABLE child (id TEXT REFERENCES parent DEFERRABLE INITIALLY DEFERRED);
             CREATE TABLE counter (n INT); INSERT INTO counter VALUES (0)",
        )
        .await;
    let config = r#"
[intake]
listen = "127.0.0.1:0"
[[intake.source]]
name = "plain"
[[intake.source.route]]
event_type = "child"
sql = "INSERT INTO child VALUES (:event_id)"
[[intake.source.route]]
event_type = "count"
sql = "UPDATE counter SET n = n + 1"
"#;
    let settings = [("intake.deadline", "3s"), ("intake.read_timeout", "1s")];
    let (_relay, sender) = world.intake(config, "plain", &settings).await;
    let child = sender.post("c1", r#"{"type":"child"}"#).await;
    child.assert(200, "dead_lettered");
    let detail = child.body["detail"].as_str().unwrap();
    assert!(detail.contains("foreign key"), "{detail}");
    let mut other = world.client().await;
    let holding = other.transaction().await.unwrap();
    holding
        .batch_execute("UPDATE counter SET n = 10")
        .await
        .unwrap();
    let blocked = sender.post("n1", r#"{"type":"count"}"#).await;
    blocked.assert(503, "error");
    holding.commit().await.unwrap();
    sender
        .post("n1", r#"{"type":"count"}"#)
        .await
        .assert(200, "processed");
    assert_eq!(world.one::<i32>("SELECT n FROM counter").await, 11);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clean_stop_finishes_what_is_under_way() {
    let world = World::new().await;
    effects(&world).await;
    let (mut relay, sender) = world.intake(&plain(), "plain", &[]).await;
    let body = r#"{"type":"a","pause":1}"#;
    let under_way = {
        let sender = sender.clone();
        tokio::spawn(async move { sender.post("last", body).await })
    };
    world
        .until(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE query LIKE '%pg_sleep(coalesce%' AND state = 'active'
                            AND pid <> pg_backend_pid())",
            SOON,
        )
        .await;
    let status = relay.terminate(SOON).await;
    assert!(status.success(), "{}", relay.log());
    under_way.await.unwrap().assert(200, "processed");
    assert_eq!(world.one::<i64>("SELECT count(*) FROM effects").await, 1);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unsigned_call_leaves_nothing_and_learns_nothing() {
    let world = World::new().await;
    effects(&world).await;
    let (_relay, sender) = world.intake(&plain(), "plain", &[]).await;
    let body = r#"{"type":"a"}"#;
    sender.post("known", body).await.assert(200, "processed");
    let mut seen = Vec::new();
    for id in ["known", "not_known"] {
        let forged = signed(id, now(), b"another body");
        let answer = sender
            .post_with(id, now(), &forged, body.as_bytes())
            .await
            .unwrap();
        answer.assert(401, "rejected");
        seen.push(answer.body["reason"].clone());
    }
    assert_eq!(seen[0], seen[1]);
    let counts: String = world
        .one(
            "SELECT format('%s %s', (SELECT count(*) FROM outbox_webhook_events), (SELECT count(*) FROM outbox_intake_audit))",
        )
        .await;
    assert_eq!(counts, "1 1");
    // The true event of that id is taken all the same.
    sender
        .post("not_known", body)
        .await
        .assert(200, "processed");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_in_transaction_mode_changes_nothing() {
    let Some(url) = crate::pooler::pooler_url() else {
        return;
    };
    let world = World::new().await;
    effects(&world).await;
    let config = plain().replace("INTO effects", &format!("INTO {}.effects", world.schema));
    let settings = [
        ("DATABASE_URL", url.as_str()),
        ("intake.deadline", "2s"),
        ("intake.read_timeout", "1s"),
    ];
    let (_relay, sender) = world.intake(&config, "plain", &settings).await;
    let posts = (0..40).map(|number| {
        let sender = sender.clone();
        async move { sender.post(&format!("p{}", number % 20), "{}").await }
    });
    let answers = futures_util::future::join_all(posts).await;
    let count = |outcome: &str| {
        let of = answers.iter().filter(|answer| answer.outcome() == outcome);
        of.count()
    };
    assert_eq!(
        (count("processed"), count("duplicate")),
        (20, 20),
        "{answers:?}"
    );
    sender
        .post("refused", r#"{"refuse":"no"}"#)
        .await
        .assert(200, "dead_lettered");
    sender
        .post("slow", r#"{"pause":60}"#)
        .await
        .assert(503, "error");
    sender.post("slow", "{}").await.assert(200, "processed");
    world.clean().await;
}
