//! A broker in trouble costs no event an attempt; an event in trouble costs no other event anything.

use std::time::{Duration, Instant};

use lapin::ExchangeKind;
use lapin::options::{ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions};
use lapin::types::{AMQPValue, FieldTable};

use crate::support::{Ledger, Load, Proxy, SOON, Services, World, amqp_url};

/// "In seconds", on a slow machine.
const SECONDS: Duration = Duration::from_secs(15);

impl World {
    pub async fn assert_nobody_was_charged(&self) {
        assert_eq!(
            self.one::<i64>("SELECT count(*) FROM outbox WHERE attempts > 0")
                .await,
            0,
            "attempts were counted"
        );
        assert_eq!(self.count("dead").await, 0);
    }

    /// Everything written arrived in order, once marked, uncharged.
    pub async fn assert_delivered(&mut self) {
        self.until_published(SECONDS).await;
        let committed = self.committed().await;
        let arrivals = self.arrivals(committed.len(), SOON).await;
        Ledger::of(&arrivals).assert_sound(&committed);
        self.assert_nobody_was_charged().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_started_before_the_broker_delivers_once_it_is_there() {
    let mut world = World::new().await;
    let proxy = Proxy::new(&amqp_url()).await;
    proxy.refuse(true);
    for number in 0..20 {
        world
            .insert(("order", &(number % 5).to_string()), "Placed", "{}")
            .await;
    }
    let relay = world.relay(&[("AMQP_URL", &proxy.through(&amqp_url()))]);
    relay
        .until_logged("not ready to publish, nothing is claimed", SOON)
        .await;
    assert_eq!(
        world
            .one::<i64>("SELECT count(*) FROM outbox WHERE claimed_by IS NOT NULL")
            .await,
        0
    );
    proxy.refuse(false);
    world.assert_delivered().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_cut_again_and_again_costs_nothing() {
    let mut world = World::new().await;
    let proxy = Proxy::new(&amqp_url()).await;
    let _relay = world
        .ready_relay(&[("AMQP_URL", &proxy.through(&amqp_url()))])
        .await;
    let load = Load::start(&world);
    for _ in 0..6 {
        load.more(60).await;
        proxy.cut();
    }
    load.more(20).await;
    load.stop().await;
    world.assert_delivered().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_closed_by_the_broker_costs_nothing() {
    let Some(services) = Services::ours() else {
        return;
    };
    let mut world = World::new().await;
    // The source is part of the connection's name.
    let relay = world
        .ready_relay(&[("rabbitmq.source", &world.exchange)])
        .await;
    let load = Load::start(&world);
    let close = format!(
        "[begin rabbit_networking:close_connection(Pid, \"closed by a test\"), closed end || \
         [{{pid, Pid}}, {{client_properties, Properties}}] <- \
         rabbit_networking:connection_info_all([pid, client_properties]), \
         is_list(Properties), {{<<\"connection_name\">>, _, Name}} <- Properties, Name =:= <<\"bellwire {}\">>].",
        world.exchange
    );
    for _ in 0..2 {
        let closed = services.rabbitmqctl(&["eval", &close]).await;
        assert!(
            closed.contains("closed"),
            "no such connection: {closed}\n{}",
            relay.log()
        );
        load.more(50).await;
    }
    load.stop().await;
    world.assert_delivered().await;
    relay.until_logged("closed by a test", SOON).await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_exchange_is_named_and_nothing_is_claimed() {
    let mut world = World::unbound().await;
    world.store.migrate().await.unwrap();
    for number in 0..20 {
        world
            .insert(("order", &(number % 5).to_string()), "Placed", "{}")
            .await;
    }
    let relay = world.relay(&[]);
    let message = format!("Exchange '{}' does not exist in vhost '/'", world.exchange);
    relay.until_logged(&message, SOON).await;
    assert_eq!(
        world
            .one::<i64>("SELECT count(*) FROM outbox WHERE claimed_by IS NOT NULL")
            .await,
        0
    );
    // Routes from its first moment on: were it bound only after its declaration, events could be
    // unroutable in between.
    world.declare_catch_all().await;
    world.declare_exchange_caught().await;
    world.assert_delivered().await;
    world.clean_catch_all().await;
    world.clean().await;
}

impl World {
    fn catch_all(&self) -> String {
        format!("{}_all", self.exchange)
    }

    /// A fanout exchange to our queue, to be the alternate of another.
    pub async fn declare_catch_all(&self) {
        let durable = ExchangeDeclareOptions {
            durable: true,
            ..Default::default()
        };
        let name = self.catch_all();
        self.channel
            .exchange_declare(
                name.as_str().into(),
                ExchangeKind::Fanout,
                durable,
                FieldTable::default(),
            )
            .await
            .unwrap();
        let queue = lapin::options::QueueDeclareOptions {
            durable: true,
            ..Default::default()
        };
        self.channel
            .queue_declare(self.queue.as_str().into(), queue, FieldTable::default())
            .await
            .unwrap();
        self.channel
            .queue_bind(
                self.queue.as_str().into(),
                name.as_str().into(),
                "".into(),
                QueueBindOptions::default(),
                FieldTable::default(),
            )
            .await
            .unwrap();
    }

    /// The world's exchange, with that alternate and no binding.
    async fn declare_exchange_caught(&self) {
        let durable = ExchangeDeclareOptions {
            durable: true,
            ..Default::default()
        };
        self.declare_caught(ExchangeKind::Topic, durable).await;
    }

    /// The same, declared otherwise.
    pub async fn declare_caught(&self, kind: ExchangeKind, options: ExchangeDeclareOptions) {
        let mut arguments = FieldTable::default();
        arguments.insert(
            "alternate-exchange".into(),
            AMQPValue::LongString(self.catch_all().into()),
        );
        self.channel
            .exchange_declare(self.exchange.as_str().into(), kind, options, arguments)
            .await
            .unwrap();
    }

    pub async fn clean_catch_all(&self) {
        self.channel
            .exchange_delete(
                self.catch_all().as_str().into(),
                ExchangeDeleteOptions::default(),
            )
            .await
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unroutable_events_die_after_their_attempts_and_hold_their_own_aggregate_only() {
    let mut world = World::new().await;
    world.unbind("#").await;
    world.bind("order.*").await;
    let settings = [
        ("retry.backoff", "100ms"),
        ("retry.max_attempts", "3"),
        ("retry.stop_after_failures", "3"),
    ];
    // The bad ones first, in as many aggregates as open the breaker: they must not.
    let mut bad = Vec::new();
    for aggregate in ["a", "b", "c"] {
        bad.push(world.insert(("invoice", aggregate), "Sent", "{}").await);
    }
    for _ in 0..2 {
        world.insert(("invoice", "a"), "Paid", "{}").await;
    }
    let mut good = Vec::new();
    for number in 0..100 {
        good.push(
            world
                .insert(("order", &(number % 10).to_string()), "Placed", "{}")
                .await,
        );
    }
    let relay = world.ready_relay(&settings).await;
    let arrivals = world.arrivals(good.len(), SECONDS).await;
    Ledger::of(&arrivals).assert_sound(&good);
    world
        .until(
            "SELECT count(*) = 3 FROM outbox WHERE status = 'dead'",
            SOON,
        )
        .await;
    for id in &bad {
        let as_it_should: bool = world
            .one(&format!("SELECT status = 'dead' AND attempts = 3 AND holds IS NOT FALSE FROM outbox WHERE id = {id}"))
            .await;
        assert!(as_it_should, "{}", world.table_state().await);
        let error: String = world
            .one(&format!("SELECT last_error FROM outbox WHERE id = {id}"))
            .await;
        assert!(
            error.starts_with("unroutable: 312 NO_ROUTE") && error.contains("'invoice.Sent'"),
            "{error}"
        );
        assert_eq!(
            relay.logged(&format!(" id={id} ")),
            3,
            "two failed attempts and the dead letter\n{}",
            relay.log()
        );
    }
    let held: i64 = world
        .one("SELECT count(*) FROM outbox WHERE event_type = 'Paid' AND status = 'pending' AND attempts = 0")
        .await;
    assert_eq!(held, 2, "{}", world.table_state().await);
    assert_eq!(relay.logged("breaker open, nothing"), 0, "{}", relay.log());
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_event_is_tried_once_per_backoff() {
    let mut world = World::new().await;
    world.unbind("#").await;
    world.bind("order.*").await;
    let relay = world
        .ready_relay(&[("retry.backoff", "30s"), ("relay.tick", "100ms")])
        .await;
    let bad = world.insert(("invoice", "1"), "Sent", "{}").await;
    relay.until_logged("failed attempt 1", SOON).await;
    // Wake-ups, claims and ticks go on all the time.
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(1) {
        world.insert(("invoice", "1"), "Sent", "{}").await;
        world.insert(("order", "1"), "Placed", "{}").await;
        world.next_arrival(SOON).await.unwrap();
    }
    assert_eq!(relay.logged("failed attempt"), 1, "{}", relay.log());
    let attempts: i64 = world.one("SELECT sum(attempts) FROM outbox").await;
    assert_eq!(attempts, 1);
    let waits: bool = world
        .one(&format!(
            "SELECT next_attempt_at - clock_timestamp() BETWEEN interval '15 s' AND interval '30 s' FROM outbox WHERE id = {bad}"
        ))
        .await;
    assert!(waits);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_is_away_makes_no_tight_loop() {
    let mut world = World::new().await;
    let mut relay = world.ready_relay(&[("relay.tick", "100ms")]).await;
    world.insert(("order", "1"), "Placed", "{}").await;
    world.arrivals(1, SOON).await;
    world.until_published(SOON).await;
    let before = relay.log().lines().count();
    world.sql("ALTER TABLE outbox RENAME TO elsewhere").await;
    relay.until_logged("claim token void", SOON).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let lines = relay.log().lines().count() - before;
    assert!(lines < 60, "{lines} lines\n{}", relay.log());
    assert!(relay.is_running());
    world.sql("ALTER TABLE elsewhere RENAME TO outbox").await;
    world.insert(("order", "1"), "Placed", "{}").await;
    world.arrivals(1, SECONDS).await;
    world.assert_nobody_was_charged().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exchange_that_takes_nothing_makes_no_tight_loop() {
    let mut world = World::unbound().await;
    world.store.migrate().await.unwrap();
    world.declare_catch_all().await;
    // It exists, so a probe finds it; whatever is published to it is refused.
    let internal = ExchangeDeclareOptions {
        durable: true,
        internal: true,
        ..Default::default()
    };
    world
        .channel
        .exchange_declare(
            world.exchange.as_str().into(),
            ExchangeKind::Topic,
            internal,
            FieldTable::default(),
        )
        .await
        .unwrap();
    for number in 0..20 {
        world
            .insert(("order", &(number % 5).to_string()), "Placed", "{}")
            .await;
    }
    let relay = world.relay(&[]);
    relay.until_logged("breaker open", SOON).await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    let opened = relay.logged("breaker open, nothing");
    assert!(
        opened < 10,
        "the breaker opened {opened} times in 4 s\n{}",
        relay.log()
    );
    world.assert_nobody_was_charged().await;
    world
        .channel
        .exchange_delete(
            world.exchange.as_str().into(),
            ExchangeDeleteOptions::default(),
        )
        .await
        .unwrap();
    world.declare_exchange_caught().await;
    world.assert_delivered().await;
    world.clean_catch_all().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_needs_no_more_than_to_write_to_its_exchange() {
    let Some(services) = Services::ours() else {
        return;
    };
    let mut world = World::new().await;
    let user = world.exchange.clone();
    let exchange_only = format!("^{}$", world.exchange);
    services
        .rabbitmqctl(&["-q", "add_user", &user, "secret"])
        .await;
    services
        .rabbitmqctl(&["-q", "set_permissions", &user, "^$", &exchange_only, "^$"])
        .await;
    let mut url = url::Url::parse(&amqp_url()).unwrap();
    url.set_username(&user).unwrap();
    url.set_password(Some("secret")).unwrap();
    world.insert(("order", "1"), "Placed", "{}").await;
    let relay = world.relay(&[("AMQP_URL", url.as_str())]);
    let arrivals = world.arrivals(1, SOON).await;
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    world.until_published(SOON).await;
    assert_eq!(relay.logged("breaker open, nothing"), 0, "{}", relay.log());
    drop(relay);
    services.rabbitmqctl(&["-q", "delete_user", &user]).await;
    world.clean().await;
}
