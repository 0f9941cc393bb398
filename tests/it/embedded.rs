//! The relay in the application's own process.

use std::time::{Duration, Instant};

use bellwire::config::{Config, Listen};
use bellwire::outbox::{OutboxError, OutboxRelay};

use crate::support::{Proxy, SOON, World, amqp_url, database_url};

impl World {
    fn config(&self) -> Config {
        let mut config = Config::default();
        config.database.url = Some(database_url().as_str().into());
        config.database.schema.clone_from(&self.schema);
        config.rabbitmq.url = Some(amqp_url().as_str().into());
        config.rabbitmq.exchange.clone_from(&self.exchange);
        config.relay.lease = Duration::from_secs(5);
        config.rabbitmq.confirm_timeout = Duration::from_secs(3);
        config.admin.listen = Listen(None);
        config
    }

    fn embedded(&self) -> OutboxRelay {
        OutboxRelay::new(self.config()).unwrap()
    }

    async fn until_nobody_relays(&self) {
        self.until("SELECT NOT EXISTS (SELECT FROM outbox_replica)", SOON)
            .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_embedded_relay_carries_events_and_stops_in_order() {
    let mut world = World::new().await;
    let relay = world.embedded().start().unwrap();
    world.fill("order", 20, 10).await;
    let arrivals = world.arrivals(200, SOON).await;
    assert_eq!(arrivals.len(), 200);
    world.until_published(SOON).await;
    let view = relay.view().await.unwrap();
    assert!(view.ready && view.published == 200, "{view:?}");
    // Bound to a ring, not to the tick: it hears of each event.
    world.insert(("order", "1"), "Placed", "{}").await;
    world.arrivals(1, SOON).await;
    // Stopped at work, it finishes what is in flight, and leaves nothing claimed.
    world.fill("order", 20, 100).await;
    let ending = relay.stop().await.unwrap();
    assert!(ending.unconfirmed.is_empty(), "{ending:?}");
    let claimed: i64 = world
        .one("SELECT count(*) FROM outbox WHERE status = 'pending' AND claimed_by IS NOT NULL")
        .await;
    let published: i64 = world.count("published").await;
    assert_eq!((claimed, ending.published as i64), (0, published));
    let replicas: i64 = world.one("SELECT count(*) FROM outbox_replica").await;
    assert_eq!(replicas, 0);
    // And another goes on from there: nothing twice, nothing missing.
    let relay = world.embedded().start().unwrap();
    world.until_published(SOON).await;
    let rest = world.arrivals(2_000, SOON).await;
    assert_eq!(rest.len(), 2_000);
    relay.stop().await.unwrap();
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pass_answers_how_many_were_delivered() {
    let mut world = World::new().await;
    let relay = world.embedded();
    assert_eq!(relay.deliver().await.unwrap(), 0);
    world.fill("order", 7, 30).await;
    let mut delivered = 0;
    while delivered < 210 {
        let more = relay.deliver().await.unwrap();
        assert!(more > 0, "{}", world.table_state().await);
        delivered += more;
    }
    assert_eq!(delivered, 210);
    assert_eq!(relay.deliver().await.unwrap(), 0);
    assert_eq!(world.arrivals(210, SOON).await.len(), 210);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pass_without_a_broker_raises_and_neither_marks_nor_charges() {
    let mut world = World::new().await;
    let network = Proxy::new(&amqp_url()).await;
    let mut config = world.config();
    config.rabbitmq.url = Some(network.through(&amqp_url()).as_str().into());
    let relay = OutboxRelay::new(config).unwrap();
    world.fill("order", 5, 5).await;
    network.refuse(true);
    for _ in 0..3 {
        let error = relay.deliver().await.unwrap_err();
        assert!(matches!(error, OutboxError::Relay(_)), "{error:?}");
    }
    let touched: i64 = world
        .one("SELECT count(*) FROM outbox WHERE attempts > 0 OR status <> 'pending' OR claimed_by IS NOT NULL")
        .await;
    assert_eq!(touched, 0, "{}", world.table_state().await);
    network.refuse(false);
    assert_eq!(relay.deliver().await.unwrap(), 25);
    assert_eq!(world.arrivals(25, SOON).await.len(), 25);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outbox_of_another_shape_ends_it_with_the_reason() {
    let world = World::unbound().await;
    let mut relay = world.embedded().start().unwrap();
    let error = relay.ended().await.unwrap_err().to_string();
    assert!(error.contains("run `bellwire migrate`"), "{error}");
    assert!(relay.ended().await.is_err() && relay.view().await.is_none());
    let error = world.embedded().deliver().await.unwrap_err().to_string();
    assert!(error.contains("run `bellwire migrate`"), "{error}");
    let mut config = world.config();
    config.relay.partitions = 0;
    let error = OutboxRelay::new(config).unwrap_err().to_string();
    assert!(error.starts_with("relay.partitions"), "{error}");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_whose_handle_is_dropped_stops_in_order() {
    let mut world = World::new().await;
    let relay = world.embedded().start().unwrap();
    world.insert(("order", "1"), "Placed", "{}").await;
    world.arrivals(1, SOON).await;
    drop(relay);
    world.until_nobody_relays().await;
    assert_eq!(world.count("published").await, 1);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_waits_for_its_database_can_be_stopped() {
    let world = World::new().await;
    let network = Proxy::new(&database_url()).await;
    let mut config = world.config();
    config.database.url = Some(network.through(&database_url()).as_str().into());
    network.refuse(true);
    let relay = OutboxRelay::new(config).unwrap().start().unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let began = Instant::now();
    let ending = relay.stop().await.unwrap();
    assert!(began.elapsed() < SOON && ending.published == 0);
    world.clean().await;
}

/// Whatever runtime calls it, and also where that one is itself an actor system.
#[actix_rt::test]
async fn it_runs_beside_an_actor_system_of_the_application() {
    let mut world = World::new().await;
    let relay = world.embedded().start().unwrap();
    world.fill("order", 5, 5).await;
    world.arrivals(25, SOON).await;
    relay.wake();
    world.until_published(SOON).await;
    assert_eq!(relay.stop().await.unwrap().published, 25);
    world.clean().await;
}
