//! Routes send events where they say; a destination in trouble holds up nothing but its own events.

use std::time::{Duration, Instant};

use lapin::options::{ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{ExchangeKind, options::QueuePurgeOptions};

use crate::support::{Ledger, Relay, SOON, World};

/// "In seconds", on a slow machine.
const SECONDS: Duration = Duration::from_secs(15);
/// Longer than a message takes that is sent at all.
const SILENCE: Duration = Duration::from_secs(1);

/// A relay's configuration file; `BILLING` and `DEAD` stand for exchanges of the world's own.
struct Routes(tempfile::NamedTempFile);

impl Routes {
    fn new(world: &World, text: &str) -> Self {
        let file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
        let text = text
            .replace("BILLING", &world.other("billing"))
            .replace("DEAD", &world.other("dead"));
        std::fs::write(file.path(), text).unwrap();
        Self(file)
    }

    fn relay(&self, world: &World, settings: &[(&str, &str)]) -> Relay {
        let path = self.0.path().to_str().unwrap();
        Relay::start(&world.environment(), settings, &["--config", path, "run"])
    }
}

impl World {
    /// Name of another exchange of this world.
    fn other(&self, what: &str) -> String {
        format!("{}_{what}", self.exchange)
    }

    /// Declares it, bound to the world's queue by a key.
    async fn declare_other(&self, what: &str, key: &str) {
        let name = self.other(what);
        let options = ExchangeDeclareOptions {
            durable: true,
            ..Default::default()
        };
        self.channel
            .exchange_declare(
                name.as_str().into(),
                ExchangeKind::Topic,
                options,
                FieldTable::default(),
            )
            .await
            .unwrap();
        self.bind_other(what, key).await;
    }

    async fn bind_other(&self, what: &str, key: &str) {
        self.channel
            .queue_bind(
                self.queue.as_str().into(),
                self.other(what).as_str().into(),
                key.into(),
                QueueBindOptions::default(),
                FieldTable::default(),
            )
            .await
            .unwrap();
    }

    async fn delete_other(&self, what: &str) {
        self.channel
            .exchange_delete(
                self.other(what).as_str().into(),
                ExchangeDeleteOptions::default(),
            )
            .await
            .unwrap();
    }

    async fn status_of(&self, id: i64) -> String {
        self.one(&format!(
            "SELECT format('%s %s %s', status, attempts, last_error) FROM outbox WHERE id = {id}"
        ))
        .await
    }
}

const BILLING: &str = r#"
[[routes]]
aggregate_type = "invoice"
destination = "BILLING"
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_go_where_their_route_says() {
    let mut world = World::new().await;
    world.declare_other("billing", "#").await;
    let routes = Routes::new(
        &world,
        r#"
[[routes]]
aggregate_type = "invoice"
event_type = "Re*"
destination = "BILLING"
routing_key = "v1.{aggregate_id}.{event_type}"

[[routes]]
aggregate_type = "billing"
destination = "{aggregate_id}"
"#,
    );
    let relay = routes.relay(&world, &[]);
    let destination = world.other("billing");
    for (aggregate_type, aggregate_id, event_type, exchange, key) in [
        ("invoice", "7", "Reminded", &destination, "v1.7.Reminded"),
        (
            "invoice",
            "7",
            "Sent",
            &world.exchange.clone(),
            "invoice.Sent",
        ),
        (
            "billing",
            &destination.clone(),
            "Made",
            &destination,
            "billing.Made",
        ),
    ] {
        let id = world
            .insert((aggregate_type, aggregate_id), event_type, "{}")
            .await;
        let arrival = world.next_arrival(SOON).await.expect(key);
        assert_eq!((arrival.id, arrival.routing_key.as_str()), (id, key));
        assert_eq!(&arrival.exchange, exchange);
    }
    drop(relay);
    world.delete_other("billing").await;
    world.clean().await;
}

const BILLING_TOO: &str = r#"
[[routes]]
aggregate_type = "invoice"

[[routes.also]]
destination = "BILLING"
routing_key = "copy.{event_type}"
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_of_two_exchanges_is_sent_to_neither_while_one_is_missing() {
    let mut world = World::new().await;
    let routes = Routes::new(&world, BILLING_TOO);
    let relay = routes.relay(&world, &[]);
    let id = world.insert(("invoice", "7"), "Sent", "{}").await;
    let other = world.insert(("order", "7"), "Placed", "{}").await;
    assert_eq!(world.next_arrival(SOON).await.unwrap().id, other);
    let waits = format!(
        "SELECT coalesce(last_error, '') LIKE 'destination_missing: rabbitmq:{}: %' FROM outbox WHERE id = {id}",
        world.other("billing")
    );
    world.until(&waits, SOON).await;
    world
        .sql("UPDATE outbox SET next_attempt_at = now() WHERE status = 'pending'")
        .await;
    assert!(
        world.next_arrival(SILENCE).await.is_none(),
        "{}",
        relay.log()
    );
    world.declare_other("billing", "#").await;
    let mut arrivals = vec![
        world.next_arrival(SOON).await.unwrap(),
        world.next_arrival(SOON).await.unwrap(),
    ];
    arrivals.extend(world.rest(Duration::from_millis(200)).await);
    let places: Vec<_> = arrivals
        .iter()
        .map(|arrival| (arrival.id, &*arrival.exchange, &*arrival.routing_key))
        .collect();
    let billing = world.other("billing");
    let own = world.exchange.clone();
    assert_eq!(
        places,
        [
            (id, own.as_str(), "invoice.Sent"),
            (id, billing.as_str(), "copy.Sent")
        ]
    );
    world.until_published(SOON).await;
    assert!(world.status_of(id).await.starts_with("published 0 "));
    drop(relay);
    world.delete_other("billing").await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_destination_holds_up_no_other_and_costs_nothing() {
    let mut world = World::new().await;
    let routes = Routes::new(&world, BILLING);
    let relay = routes.relay(
        &world,
        &[("retry.max_attempts", "2"), ("retry.backoff", "50ms")],
    );
    let mut good = Vec::new();
    for number in 0..40 {
        let aggregate = (number % 8).to_string();
        world.insert(("invoice", &aggregate), "Sent", "{}").await;
        good.push(world.insert(("order", &aggregate), "Placed", "{}").await);
    }
    let arrivals = world.arrivals(good.len(), SECONDS).await;
    Ledger::of(&arrivals).assert_sound(&good);
    world
        .until(
            "SELECT bool_or(last_error LIKE 'destination_missing: Exchange %') FROM outbox",
            SOON,
        )
        .await;
    let said: String = world
        .one("SELECT min(last_error) FROM outbox WHERE last_error IS NOT NULL")
        .await;
    assert!(
        said.contains(&world.other("billing")) && said.contains("vhost '/'"),
        "{said}"
    );
    let run = world.command(&[], &["status"]).await;
    assert!(
        run.stdout.contains("waits for its destination") || run.stdout.contains("is in hand"),
        "{}",
        run.stdout
    );
    // New ones for the sound destination leave at once all the while.
    for _ in 0..10 {
        let began = Instant::now();
        let id = world.insert(("order", "x"), "Placed", "{}").await;
        assert_eq!(world.next_arrival(SECONDS).await.unwrap().id, id);
        assert!(began.elapsed() < Duration::from_secs(2), "{}", relay.log());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    world.declare_other("billing", "#").await;
    world.until_published(SECONDS).await;
    let invoices: Vec<i64> = world
        .one("SELECT array_agg(id ORDER BY id) FROM outbox WHERE aggregate_type = 'invoice'")
        .await;
    let arrivals = world.arrivals(invoices.len(), SOON).await;
    Ledger::of(&arrivals).assert_sound(&invoices);
    let charged: i64 = world
        .one("SELECT count(*) FROM outbox WHERE attempts > 0 OR status <> 'published'")
        .await;
    assert_eq!(charged, 0, "{}", world.table_state().await);
    // Again, while it is used.
    world.delete_other("billing").await;
    world.insert(("invoice", "9"), "Sent", "{}").await;
    relay
        .until_logged("breaker open, nothing is sent to it", SOON)
        .await;
    world.declare_other("billing", "#").await;
    world.until_published(SECONDS).await;
    drop(relay);
    world.delete_other("billing").await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_events_for_a_missing_destination_make_no_tight_loop() {
    let mut world = World::new().await;
    let routes = Routes::new(&world, BILLING);
    world.fill("invoice", 2_000, 2).await;
    let relay = routes.relay(&world, &[]);
    world
        .until(
            "SELECT count(*) >= 2000 FROM outbox WHERE last_error LIKE 'destination_missing%'",
            SOON,
        )
        .await;
    // By a trigger: the server's own counts come up to ten seconds late.
    world
        .sql(
            "CREATE TABLE writes (rows BIGINT);
             CREATE FUNCTION count_writes() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS
             $$ BEGIN INSERT INTO writes SELECT count(*) FROM changed; RETURN NULL; END $$;
             CREATE TRIGGER count_writes AFTER UPDATE ON outbox REFERENCING NEW TABLE AS changed
             FOR EACH STATEMENT EXECUTE FUNCTION count_writes()",
        )
        .await;
    let writes = "SELECT coalesce(sum(rows), 0)::bigint FROM writes";
    let id = world.insert(("order", "1"), "Placed", "{}").await;
    assert_eq!(world.next_arrival(SECONDS).await.unwrap().id, id);
    let published = "SELECT count(*) = 1 FROM outbox WHERE status = 'published'";
    world.until(published, SECONDS).await;
    let before: i64 = world.one(writes).await;
    tokio::time::sleep(Duration::from_millis(3_500)).await;
    let written = world.one::<i64>(writes).await - before;
    // A wait is of two seconds or more, so that in less than four an aggregate's turn comes twice at most. Each time its two
    // rows are written as they are claimed and as they go back, and one once more, as it is set aside.
    assert!(
        written <= 20_000,
        "{written} rows written in 3.5 s\n{}",
        relay.log()
    );
    drop(relay);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_is_waited_for_however_long_and_kills_nothing() {
    let mut world = World::unbound().await;
    world.store.migrate().await.unwrap();
    world.declare_exchange().await;
    let mut full = FieldTable::default();
    full.insert("x-max-length".into(), AMQPValue::LongInt(3));
    full.insert(
        "x-overflow".into(),
        AMQPValue::LongString("reject-publish".into()),
    );
    world
        .channel
        .queue_declare(
            world.queue.as_str().into(),
            lapin::options::QueueDeclareOptions {
                durable: true,
                ..Default::default()
            },
            full,
        )
        .await
        .unwrap();
    world.bind("#").await;
    let settings = [("retry.max_attempts", "2"), ("retry.backoff", "50ms")];
    let relay = world.ready_relay(&settings).await;
    world.fill("order", 3, 4).await;
    // Longer than the whole backoff of an event that may die.
    world
        .until("SELECT max(attempts) >= 4 FROM outbox", SOON)
        .await;
    assert_eq!(
        world.count("dead").await,
        0,
        "{}",
        world.table_state().await
    );
    let error: String = world
        .one("SELECT min(last_error) FROM outbox WHERE attempts > 0")
        .await;
    assert!(error.starts_with("nacked: "), "{error}");
    let mut arrivals = Vec::new();
    while arrivals.len() < 12 {
        arrivals.extend(world.next_arrival(SOON).await);
    }
    world.until_published(SOON).await;
    arrivals.extend(world.rest(Duration::from_millis(200)).await);
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    drop(relay);
    world.clean().await;
}

const COPIED: &str = r#"
[[routes]]
aggregate_type = "invoice"
publish_to = "DEAD"
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_event_is_copied_to_where_its_route_wants_it_before_it_is_dead() {
    let mut world = World::new().await;
    world.unbind("#").await;
    let routes = Routes::new(&world, COPIED);
    let settings = [("retry.max_attempts", "2"), ("retry.backoff", "50ms")];
    let relay = routes.relay(&world, &settings);
    let body = "{\"total\": 10.00}";
    let id = world.insert(("invoice", "7"), "Sent", body).await;
    let later = world.insert(("invoice", "7"), "Paid", "{}").await;
    // Its copy cannot be had yet: it waits, and is not dead.
    world
        .until(
            &format!(
                "SELECT coalesce(last_error, '') LIKE 'destination_missing:%_dead%' FROM outbox WHERE id = {id}"
            ),
            SOON,
        )
        .await;
    assert_eq!(world.count("dead").await, 0);
    world.declare_other("dead", "#").await;
    let copy = world.next_arrival(SECONDS).await.expect("the copy");
    assert_eq!(copy.id, id);
    assert_eq!(copy.exchange, world.other("dead"));
    assert_eq!(copy.body, body.as_bytes());
    assert_eq!(copy.text_header("dead_cause"), "unroutable");
    assert!(copy.text_header("dead_error").contains("NO_ROUTE"));
    world
        .until(
            "SELECT count(*) = 1 FROM outbox WHERE status = 'dead'",
            SOON,
        )
        .await;
    let status = world.status_of(id).await;
    assert!(status.starts_with("dead 2 unroutable: "), "{status}");
    assert_eq!(world.status_of(later).await, "pending 0 ");
    assert!(
        world
            .next_arrival(Duration::from_millis(200))
            .await
            .is_none()
    );
    drop(relay);
    world.delete_other("dead").await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_whose_copy_nobody_takes_is_dead_all_the_same_and_says_so() {
    let world = World::new().await;
    world.unbind("#").await;
    world.declare_other("dead", "nothing.like.it").await;
    let routes = Routes::new(&world, COPIED);
    let relay = routes.relay(&world, &[("retry.max_attempts", "1")]);
    let id = world.insert(("invoice", "7"), "Sent", "{}").await;
    world
        .until(
            "SELECT count(*) = 1 FROM outbox WHERE status = 'dead'",
            SOON,
        )
        .await;
    let status = world.status_of(id).await;
    assert!(
        status.starts_with("dead 1 unroutable: ") && status.contains("(no copy could be sent: "),
        "{status}"
    );
    drop(relay);
    world.delete_other("dead").await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_skip_the_aggregate_goes_on_past_a_dead_event() {
    let mut world = World::new().await;
    world.unbind("#").await;
    world.bind("*.Good").await;
    let routes = Routes::new(&world, "[[routes]]\non_dead = \"skip\"\n");
    let relay = routes.relay(
        &world,
        &[
            ("retry.max_attempts", "2"),
            ("retry.backoff", "50ms"),
            ("relay.tick", "10m"),
        ],
    );
    let bad = world.insert(("order", "1"), "Bad", "{}").await;
    let first = world.insert(("order", "1"), "Good", "{}").await;
    let second = world.insert(("order", "1"), "Good", "{}").await;
    let ids: Vec<_> = world
        .arrivals(2, SECONDS)
        .await
        .iter()
        .map(|arrival| arrival.id)
        .collect();
    assert_eq!(ids, [first, second]);
    let status = world.status_of(bad).await;
    assert!(status.starts_with("dead 2 unroutable"), "{status}");
    // A replay comes late, and says so.
    world.bind("#").await;
    world
        .sql("UPDATE outbox SET status = 'pending', attempts = 0, next_attempt_at = now() WHERE status = 'dead'")
        .await;
    let late = world.next_arrival(SECONDS).await.unwrap();
    assert_eq!(late.id, bad);
    assert_eq!(late.header("replayed"), Some(AMQPValue::Boolean(true)));
    drop(relay);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_and_backoff_at_their_greatest_overflow_nothing() {
    let mut world = World::new().await;
    world.unbind("#").await;
    let id = world.insert(("order", "1"), "Placed", "{}").await;
    let other = world.insert(("order", "2"), "Placed", "{}").await;
    world
        .sql("UPDATE outbox SET attempts = CASE id WHEN 1 THEN 2147483646 ELSE 40 END")
        .await;
    let settings = [("retry.max_attempts", "1000000"), ("retry.backoff", "1h")];
    let relay = world.ready_relay(&settings).await;
    world
        .until(
            "SELECT count(*) = 2 FROM outbox WHERE last_error IS NOT NULL AND claimed_by IS NULL",
            SOON,
        )
        .await;
    let status = world.status_of(id).await;
    assert!(status.starts_with("dead 2147483647 unroutable"), "{status}");
    let within_the_hour: bool = world
        .one(&format!(
            "SELECT attempts = 41 AND next_attempt_at BETWEEN now() + interval '50 minutes' AND now() + interval '1 hour'
             FROM outbox WHERE id = {other}"
        ))
        .await;
    assert!(within_the_hour, "{}", world.table_state().await);
    // Once more, past the end.
    world.bind("#").await;
    world
        .sql("UPDATE outbox SET status = 'pending', next_attempt_at = now()")
        .await;
    let arrivals = world.arrivals(2, SOON).await;
    for arrival in arrivals.iter().filter(|arrival| arrival.id == id) {
        assert_eq!(
            arrival.header("attempt"),
            Some(AMQPValue::LongInt(i32::MAX))
        );
    }
    world
        .channel
        .queue_purge(world.queue.as_str().into(), QueuePurgeOptions::default())
        .await
        .unwrap();
    drop(relay);
    world.clean().await;
}
