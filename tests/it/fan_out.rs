//! Several sinks in one process: routes choose among them, and an event of several places is published once it is in
//! all of them. Trouble of one sink holds up its own events, charges nobody, and ends by itself.

use std::time::{Duration, Instant};

use rand::RngExt as _;
use serde_json::json;

use crate::jetstream::assert_each_once_in_order;
use crate::support::{Ledger, Proxy, Relay, SOON, Stream, World, amqp_url, nats_url};

/// Longer than a relay takes to publish something when it may.
const A_WHILE: Duration = Duration::from_secs(1);

const ORDERS_TO_BOTH: &str = r#"
[[routes]]
aggregate_type = "order"

[[routes.also]]
sink = "jetstream"

[[routes]]
aggregate_type = "invoice"
sink = "jetstream"
"#;

/// A queue of RabbitMQ and a stream of JetStream, each behind a proxy.
struct Two {
    world: World,
    stream: Stream,
    rabbitmq: Proxy,
    jetstream: Proxy,
}

impl Two {
    /// None, said loudly, without a NATS server.
    async fn new() -> Option<Self> {
        let stream = Stream::new(json!({})).await?;
        Some(Self {
            world: World::new().await,
            stream,
            rabbitmq: Proxy::new(&amqp_url()).await,
            jetstream: Proxy::new(&nats_url()?).await,
        })
    }

    /// A process of the binary with these routes.
    fn start(&self, routes: &str, settings: &[(&str, &str)], command: &str) -> Relay {
        let file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
        std::fs::write(file.path(), routes).unwrap();
        // It stays behind for as long as the process may read it.
        let (_, path) = file.keep().unwrap();
        let amqp = self.rabbitmq.through(&amqp_url());
        let nats = self.jetstream.through(&nats_url().unwrap());
        let own = [
            ("AMQP_URL", amqp.as_str()),
            ("NATS_URL", &nats),
            ("jetstream.stream", &self.stream.name),
            ("jetstream.prefix", &self.stream.name),
            ("jetstream.ack_timeout", "3s"),
            ("relay.tick", "500ms"),
            ("retry.max_attempts", "2"),
            ("retry.backoff", "50ms"),
        ];
        let arguments = ["--config", path.to_str().unwrap(), command];
        let settings = [&own[..], settings].concat();
        Relay::start(&self.world.environment(), &settings, &arguments)
    }

    fn network(&self, of_jetstream: bool) -> &Proxy {
        if of_jetstream {
            &self.jetstream
        } else {
            &self.rabbitmq
        }
    }

    /// Both places have it.
    async fn insert_order_and_see_it(&mut self) -> i64 {
        let id = self.world.insert(("order", "1"), "Placed", "{}").await;
        assert_eq!(self.world.next_arrival(SOON).await.unwrap().id, id);
        assert_eq!(self.stream.messages(1, SOON).await[0].id(), id);
        id
    }

    /// The stream has nothing that was not read yet.
    async fn nothing_kept(&mut self) -> bool {
        self.stream.next().await.is_none()
    }

    async fn assert_nobody_charged(&self) {
        let charged: i64 = self
            .world
            .one("SELECT count(*) FROM outbox WHERE attempts > 0 OR status <> 'published'")
            .await;
        assert_eq!(charged, 0, "{}", self.world.table_state().await);
    }

    async fn ids_of(&self, aggregate_type: &str) -> Vec<i64> {
        self.world
            .one(&format!(
                "SELECT array_agg(id ORDER BY id) FROM outbox WHERE aggregate_type = '{aggregate_type}'"
            ))
            .await
    }

    async fn clean(self) {
        self.stream.delete().await;
        self.world.clean().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routes_choose_among_sinks() {
    let Some(mut two) = Two::new().await else {
        return;
    };
    let relay = two.start(ORDERS_TO_BOTH, &[], "run");
    let invoice = two.world.insert(("invoice", "7"), "Sent", "{}").await;
    let order = two.world.insert(("order", "7"), "Placed", "{}").await;
    let parcel = two.world.insert(("parcel", "7"), "Packed", "{}").await;
    let mut arrived: Vec<i64> = Vec::new();
    arrived.extend(two.world.arrivals(2, SOON).await.iter().map(|one| one.id));
    arrived.sort_unstable();
    assert_eq!(arrived, [order, parcel], "{}", relay.log());
    let mut kept: Vec<i64> = Vec::new();
    kept.extend(
        two.stream
            .messages(2, SOON)
            .await
            .iter()
            .map(|one| one.id()),
    );
    kept.sort_unstable();
    assert_eq!(kept, [invoice, order]);
    two.world.until_published(SOON).await;
    assert!(two.nothing_kept().await);
    drop(relay);
    two.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_of_two_places_is_published_only_once_both_have_confirmed_it() {
    let Some(mut two) = Two::new().await else {
        return;
    };
    let relay = two.start(ORDERS_TO_BOTH, &[("relay.partitions", "1")], "run");
    // The way to each place is open before its answers are held back.
    two.insert_order_and_see_it().await;
    two.world.until_published(SOON).await;
    for jetstream_is_silent in [true, false] {
        let network = two.network(jetstream_is_silent);
        network.mute(true);
        let id = two.insert_order_and_see_it().await;
        tokio::time::sleep(A_WHILE).await;
        let status: String = two
            .world
            .one(&format!("SELECT status FROM outbox WHERE id = {id}"))
            .await;
        assert_eq!(status, "pending", "{}", relay.log());
        two.network(jetstream_is_silent).mute(false);
        two.world.until_published(SOON).await;
    }
    two.assert_nobody_charged().await;
    assert!(two.nothing_kept().await);
    drop(relay);
    two.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_of_one_sink_holds_up_and_charges_no_event_of_the_other() {
    for jetstream_is_away in [true, false] {
        let Some(mut two) = Two::new().await else {
            return;
        };
        let relay = two.start(ORDERS_TO_BOTH, &[], "run");
        for aggregate_type in ["order", "invoice", "parcel"] {
            two.world.fill(aggregate_type, 10, 5).await;
        }
        two.world.until_published(SOON).await;
        let network = two.network(jetstream_is_away);
        network.refuse(true);
        network.cut();
        relay
            .until_logged("breaker open, nothing is sent to it", SOON)
            .await;
        let (flows, stands) = if jetstream_is_away {
            ("parcel", "invoice")
        } else {
            ("invoice", "parcel")
        };
        for aggregate_type in ["order", stands, flows] {
            two.world.fill(aggregate_type, 10, 5).await;
        }
        let sink = if jetstream_is_away {
            "jetstream"
        } else {
            "rabbitmq"
        };
        let all_that_can = format!(
            "SELECT count(*) FILTER (WHERE aggregate_type = '{flows}' AND status = 'published') = 100
                    AND count(*) FILTER (WHERE last_error LIKE 'sink_down: {sink}: %') >= 20 FROM outbox"
        );
        two.world.until(&all_that_can, SOON).await;
        let before = Instant::now();
        two.world.insert((flows, "1"), "Late", "{}").await;
        let late = "SELECT status = 'published' FROM outbox WHERE event_type = 'Late'";
        two.world.until(late, SOON).await;
        assert!(before.elapsed() < Duration::from_secs(2), "{}", relay.log());
        assert_eq!(two.world.count("pending").await, 100);
        // While a place of theirs is away nothing of them is sent to the other.
        let orders = two.ids_of("order").await;
        let mut arrivals = two.world.rest(Duration::from_millis(200)).await;
        let mut kept = two.stream.messages(0, SOON).await;
        for late in &orders[50..] {
            assert!(arrivals.iter().all(|arrival| arrival.id != *late));
            assert!(kept.iter().all(|message| message.id() != *late));
        }
        two.network(jetstream_is_away).refuse(false);
        two.world.until_published(SOON).await;
        two.assert_nobody_charged().await;
        arrivals.extend(two.world.rest(Duration::from_millis(200)).await);
        let to_rabbitmq = [orders.clone(), two.ids_of("parcel").await].concat();
        let ledger = Ledger::of(&arrivals);
        ledger.assert_sound(&to_rabbitmq);
        assert_eq!(ledger.repeats, 0);
        kept.extend(two.stream.messages(0, SOON).await);
        let (of_orders, others): (Vec<_>, Vec<_>) = kept
            .into_iter()
            .partition(|message| message.header("aggregate_type") == Some("order"));
        assert_each_once_in_order(&of_orders, &orders);
        assert_each_once_in_order(&others, &two.ids_of("invoice").await);
        drop(relay);
        two.clean().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sink_that_is_away_at_the_start_is_waited_for_while_the_other_delivers() {
    let Some(mut two) = Two::new().await else {
        return;
    };
    two.jetstream.refuse(true);
    let relay = two.start(ORDERS_TO_BOTH, &[], "run");
    let order = two.world.insert(("order", "1"), "Placed", "{}").await;
    let parcel = two.world.insert(("parcel", "1"), "Packed", "{}").await;
    assert_eq!(two.world.next_arrival(SOON).await.unwrap().id, parcel);
    let waits = format!(
        "SELECT coalesce(last_error, '') LIKE 'sink_down: jetstream: cannot connect%' FROM outbox WHERE id = {order}"
    );
    two.world.until(&waits, SOON).await;
    let checked = two.start(ORDERS_TO_BOTH, &[], "check").finished(SOON).await;
    assert_eq!(checked.status.code(), Some(1), "{}", checked.stdout);
    for line in ["ok   rabbitmq", "FAIL jetstream"] {
        assert!(checked.stdout.contains(line), "{}", checked.stdout);
    }
    two.jetstream.refuse(false);
    assert_eq!(two.world.next_arrival(SOON).await.unwrap().id, order);
    assert_eq!(two.stream.messages(1, SOON).await[0].id(), order);
    two.world.until_published(SOON).await;
    two.assert_nobody_charged().await;
    let checked = two.start(ORDERS_TO_BOTH, &[], "check").finished(SOON).await;
    assert!(checked.status.success(), "{}", checked.stdout);
    for (kind, name) in [
        (
            "exchange",
            format!("'rabbitmq:{}' exists", two.world.exchange),
        ),
        ("stream", format!("'jetstream:{}' exists", two.stream.name)),
    ] {
        let mut lines = checked.stdout.lines();
        assert!(
            lines.any(|line| line.contains(kind) && line.contains(&name)),
            "{}",
            checked.stdout
        );
    }
    drop(relay);
    two.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_one_place_can_never_take_is_dead_and_names_the_place() {
    let Some(mut two) = Two::new().await else {
        return;
    };
    two.stream.update(json!({ "max_msg_size": 2_000 })).await;
    let relay = two.start(ORDERS_TO_BOTH, &[], "run");
    let body = json!({ "text": "x".repeat(3_000) }).to_string();
    let id = two.world.insert(("order", "7"), "Placed", &body).await;
    let held = two.world.insert(("order", "7"), "Paid", "{}").await;
    let dead = "SELECT EXISTS (SELECT FROM outbox WHERE status = 'dead')";
    two.world.until(dead, SOON).await;
    let error: String = two
        .world
        .one(&format!("SELECT last_error FROM outbox WHERE id = {id}"))
        .await;
    let place = format!("too_large: jetstream:{}: ", two.stream.name);
    assert!(error.starts_with(&place), "{error}");
    // The other place has it, once: it was not sent there again and again.
    assert_eq!(two.world.next_arrival(SOON).await.unwrap().id, id);
    assert!(two.world.next_arrival(A_WHILE).await.is_none());
    assert!(two.nothing_kept().await);
    // A replay goes to all of its places.
    two.stream.update(json!({ "max_msg_size": -1 })).await;
    two.world
        .sql("UPDATE outbox SET status = 'pending', attempts = 0, next_attempt_at = now() WHERE status = 'dead'")
        .await;
    let again: Vec<i64> = two
        .world
        .arrivals(2, SOON)
        .await
        .iter()
        .map(|one| one.id)
        .collect();
    assert_eq!(again, [id, held], "{}", relay.log());
    let kept: Vec<i64> = two
        .stream
        .messages(2, SOON)
        .await
        .iter()
        .map(|one| one.id())
        .collect();
    assert_eq!(kept, [id, held]);
    two.world.until_published(SOON).await;
    drop(relay);
    two.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_killed_in_mid_fan_out_loses_nothing_at_either_place() {
    let Some(mut two) = Two::new().await else {
        return;
    };
    for network in [&two.rabbitmq, &two.jetstream] {
        network.delay(Duration::from_millis(2));
    }
    let mut in_hand_at_death: i64 = 0;
    let mut arrivals = Vec::new();
    for _ in 0..15 {
        let mut relay = two.start(ORDERS_TO_BOTH, &[("relay.lease", "60s")], "run");
        two.world.fill("order", 4, 25).await;
        arrivals.push(two.world.next_arrival(SOON).await.unwrap());
        let moment = rand::rng().random_range(0..50);
        tokio::time::sleep(Duration::from_millis(moment)).await;
        relay.kill().await;
        in_hand_at_death += two
            .world
            .one::<i64>(
                "SELECT count(*) FROM outbox WHERE status = 'pending' AND claimed_by IS NOT NULL",
            )
            .await;
        arrivals.extend(two.world.rest(Duration::from_millis(20)).await);
    }
    assert!(in_hand_at_death > 0, "no relay was killed at work");
    let relay = two.start(ORDERS_TO_BOTH, &[], "run");
    two.world.until_published(SOON).await;
    arrivals.extend(two.world.rest(Duration::from_millis(500)).await);
    let orders = two.ids_of("order").await;
    Ledger::of(&arrivals).assert_sound(&orders);
    let kept = two.stream.messages(0, SOON).await;
    assert_each_once_in_order(&kept, &orders);
    two.assert_nobody_charged().await;
    drop(relay);
    two.clean().await;
}
