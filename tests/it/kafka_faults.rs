//! What the brokers do wrong, done by librdkafka's mock of a cluster: nothing is lost, nothing is out of
//! order, and nobody is charged for what is not its fault.
//!
//! The mock keeps no account of an idempotent producer's sequence: where a broker would refuse the requests
//! that follow a refused one, it takes them, and librdkafka then has reason to think that it has all. So one
//! request is in flight at a time wherever requests are refused.

use std::time::Duration;

use rdkafka::types::RDKafkaRespErr::{
    RD_KAFKA_RESP_ERR_INVALID_RECORD as INVALID_RECORD,
    RD_KAFKA_RESP_ERR_KAFKA_STORAGE_ERROR as STORAGE_ERROR,
    RD_KAFKA_RESP_ERR_LEADER_NOT_AVAILABLE as LEADER_NOT_AVAILABLE,
    RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE as TOO_LARGE,
    RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS as NOT_ENOUGH_REPLICAS,
    RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS_AFTER_APPEND as NOT_ENOUGH_AFTER_APPEND,
    RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION as NOT_LEADER,
    RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER as OUT_OF_ORDER,
    RD_KAFKA_RESP_ERR_REQUEST_TIMED_OUT as REQUEST_TIMED_OUT,
    RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED as FORBIDDEN,
    RD_KAFKA_RESP_ERR_UNKNOWN_PRODUCER_ID as UNKNOWN_PRODUCER,
    RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART as UNKNOWN_TOPIC,
};
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

use tempfile::NamedTempFile;

use crate::support::{Cluster, Ledger, Load, Relay, SOON, Topic, World};

const PRODUCE: RDKafkaApiKey = RDKafkaApiKey::Produce;

/// A configuration file with these properties of librdkafka.
fn properties(lines: &[&str]) -> (NamedTempFile, String) {
    let file = NamedTempFile::new().unwrap();
    let text = format!("[kafka.properties]\n{}\n", lines.join("\n"));
    std::fs::write(file.path(), text).unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    (file, path)
}

fn one_in_flight() -> (NamedTempFile, String) {
    properties(&[r#""max.in.flight.requests.per.connection" = "1""#])
}

async fn assert_sound(world: &World, topic: &mut Topic) {
    world.until_published(SOON).await;
    let committed = world.committed().await;
    let mut ledger = Ledger::default();
    for record in topic.records(committed.len(), SOON).await {
        ledger.take(&record.arrival());
    }
    ledger.assert_sound(&committed);
    assert_eq!(world.count("published").await as usize, committed.len());
}

async fn charged(world: &World) -> i64 {
    world
        .one("SELECT count(*) FROM outbox WHERE attempts > 0 OR status = 'dead'")
        .await
}

/// A relay under load, with this wrong at the brokers again and again.
async fn order_holds_through(errors: &[RDKafkaRespErr]) -> (World, Relay) {
    let cluster = Cluster::mock(3);
    let mut topic = cluster.create("load", 4).await;
    let world = World::outbox().await;
    let (_file, path) = one_in_flight();
    let relay = cluster.relay(&world, &[("BELLWIRE_CONFIG", &path)]);
    world.until_owned(&relay).await;
    let load = Load::start(&world);
    for _ in 0..5 {
        load.more(40).await;
        cluster.faults().request_errors(PRODUCE, errors);
    }
    load.more(40).await;
    load.stop().await;
    assert_sound(&world, &mut topic).await;
    (world, relay)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_holds_through_leaders_that_move_at_no_cost() {
    let (world, _relay) =
        order_holds_through(&[NOT_LEADER, LEADER_NOT_AVAILABLE, NOT_LEADER]).await;
    assert_eq!(charged(&world).await, 0);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_holds_through_requests_that_time_out_at_no_cost() {
    let (world, _relay) = order_holds_through(&[REQUEST_TIMED_OUT, REQUEST_TIMED_OUT]).await;
    assert_eq!(charged(&world).await, 0);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_holds_through_replicas_that_are_out_of_step_for_a_moment_at_no_cost() {
    let errors = [NOT_ENOUGH_REPLICAS, NOT_ENOUGH_AFTER_APPEND, STORAGE_ERROR];
    let (world, _relay) = order_holds_through(&errors).await;
    assert_eq!(charged(&world).await, 0);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_producer_whose_sequence_is_lost_is_replaced_and_order_holds_at_no_cost() {
    let (world, relay) = order_holds_through(&[OUT_OF_ORDER]).await;
    assert_eq!(charged(&world).await, 0);
    assert!(relay.logged("a new one is made") > 0, "{}", relay.log());
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_holds_through_producers_that_brokers_forget_at_no_cost() {
    let (world, _relay) = order_holds_through(&[UNKNOWN_PRODUCER]).await;
    assert_eq!(charged(&world).await, 0);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_holds_through_brokers_that_go_and_come_at_no_cost() {
    let cluster = Cluster::mock(3);
    cluster.create("load", 4).await;
    let world = World::outbox().await;
    let (_file, path) = one_in_flight();
    let relay = cluster.relay(&world, &[("BELLWIRE_CONFIG", &path)]);
    world.until_owned(&relay).await;
    let load = Load::start(&world);
    for broker in 1..=3 {
        load.more(30).await;
        cluster.faults().broker_down(broker).unwrap();
        load.more(100).await;
        cluster.faults().broker_up(broker).unwrap();
    }
    // That no connection is left, or that a confirm does not come, whichever is noticed first.
    let noticed = "breaker open, nothing is sent";
    let before = relay.logged(noticed);
    for broker in 1..=3 {
        cluster.faults().broker_down(broker).unwrap();
    }
    let again = async {
        while relay.logged(noticed) == before {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, again)
        .await
        .expect("the breaker opens");
    load.more(30).await;
    for broker in 1..=3 {
        cluster.faults().broker_up(broker).unwrap();
    }
    load.stop().await;
    // One that has seen nothing of it: what is to be tested is what the brokers have.
    assert_sound(&world, &mut cluster.topic("load", 4)).await;
    assert_eq!(charged(&world).await, 0);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_without_a_leader_is_waited_for_at_no_cost_and_holds_up_no_other_topic() {
    let cluster = Cluster::mock(1);
    let mut headless = cluster.create("headless", 1).await;
    let mut order = cluster.create("order", 1).await;
    let leader = |broker| {
        let topic = cluster.topic_of("headless");
        cluster
            .faults()
            .partition_leader(&topic, 0, broker)
            .unwrap();
    };
    leader(None);
    let world = World::outbox().await;
    let _relay = cluster.relay(&world, &[]);
    world.fill("headless", 3, 3).await;
    world.fill("order", 5, 5).await;
    order.records(25, SOON).await;
    let waits = "SELECT EXISTS (SELECT FROM outbox WHERE last_error LIKE '%has no leader%')";
    world.until(waits, SOON).await;
    world.fill("order", 5, 5).await;
    order.records(25, SOON).await;
    leader(Some(1));
    world.until_published(SOON).await;
    headless.records(9, SOON).await;
    assert_eq!(charged(&world).await, 0);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_is_forbidden_is_waited_for_at_no_cost_and_holds_up_no_other() {
    let cluster = Cluster::mock(1);
    let mut secret = cluster.create("secret", 1).await;
    let mut order = cluster.create("order", 1).await;
    let name = cluster.topic_of("secret");
    cluster.faults().topic_error(&name, FORBIDDEN).unwrap();
    let world = World::outbox().await;
    let relay = cluster.relay(&world, &[]);
    world.fill("secret", 3, 3).await;
    world.fill("order", 5, 5).await;
    order.records(25, SOON).await;
    relay
        .until_logged("no permission to write to topic", SOON)
        .await;
    let waiting: i64 = world
        .one("SELECT count(*) FROM outbox WHERE aggregate_type = 'secret' AND status = 'pending'")
        .await;
    assert_eq!(waiting, 9);
    let no_error = RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR;
    cluster.faults().topic_error(&name, no_error).unwrap();
    world.until_published(SOON).await;
    secret.records(9, SOON).await;
    assert_eq!(charged(&world).await, 0);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_permission_that_only_writing_shows_is_not_asked_for_again_and_again() {
    let cluster = Cluster::mock(1);
    let mut topic = cluster.create("order", 1).await;
    let world = World::outbox().await;
    let relay = cluster.relay(&world, &[]);
    world.until_owned(&relay).await;
    cluster.faults().request_errors(PRODUCE, &[FORBIDDEN]);
    world.fill("order", 1, 3).await;
    relay
        .until_logged("no permission to write to topic", SOON)
        .await;
    assert_sound(&world, &mut topic).await;
    assert_eq!(charged(&world).await, 0);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_goes_and_comes_is_waited_for_at_no_cost() {
    let (world, _relay) = order_holds_through(&[UNKNOWN_TOPIC, UNKNOWN_TOPIC]).await;
    assert_eq!(charged(&world).await, 0);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_batch_that_is_refused_only_the_guilty_are_charged() {
    for (error, class) in [(TOO_LARGE, "too_large"), (INVALID_RECORD, "rejected")] {
        let cluster = Cluster::mock(1);
        let mut topic = cluster.create("order", 1).await;
        let world = World::outbox().await;
        world.fill("order", 20, 1).await;
        // The batch; then, each by itself, the first of them.
        cluster.faults().request_errors(PRODUCE, &[error, error]);
        let settings = [
            ("kafka.linger", "500ms"),
            ("retry.max_attempts", "1"),
            ("relay.partitions", "1"),
        ];
        let relay = cluster.relay(&world, &settings);
        let published = "SELECT count(*) = 19 FROM outbox WHERE status = 'published'";
        world.until(published, SOON).await;
        assert_eq!(topic.records(19, SOON).await.len(), 19);
        let dead = format!(
            "SELECT count(*) = 1 FROM outbox WHERE status = 'dead' AND last_error LIKE '{class}: %'"
        );
        world.until(&dead, SOON).await;
        assert_eq!(charged(&world).await, 1, "{}", relay.log());
        world.clean().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_that_stay_out_of_step_are_counted_and_kill_nothing() {
    let cluster = Cluster::mock(1);
    let mut topic = cluster.create("order", 1).await;
    let world = World::outbox().await;
    cluster
        .faults()
        .request_errors(PRODUCE, &[NOT_ENOUGH_REPLICAS; 200]);
    let settings = [("retry.max_attempts", "1"), ("retry.backoff", "1s")];
    let _relay = cluster.relay(&world, &settings);
    world.fill("order", 1, 2).await;
    let refused =
        "SELECT EXISTS (SELECT FROM outbox WHERE id = 1 AND attempts >= 2 AND status = 'pending'
                   AND last_error LIKE 'nacked: %')";
    world.until(refused, SOON).await;
    cluster.faults().clear_request_errors(PRODUCE);
    assert_sound(&world, &mut topic).await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_is_waited_for_in_order() {
    let cluster = Cluster::mock(1);
    let mut topic = cluster.create("order", 2).await;
    let world = World::outbox().await;
    let (_file, path) = properties(&[
        r#""queue.buffering.max.messages" = "5""#,
        r#""max.in.flight.requests.per.connection" = "1""#,
    ]);
    world.fill("order", 50, 10).await;
    cluster
        .faults()
        .request_errors(PRODUCE, &[NOT_LEADER, NOT_LEADER]);
    let _relay = cluster.relay(&world, &[("BELLWIRE_CONFIG", &path)]);
    assert_sound(&world, &mut topic).await;
    assert_eq!(charged(&world).await, 0);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_with_the_brokers_down_ends_in_time_and_marks_nothing() {
    let cluster = Cluster::mock(1);
    let mut topic = cluster.create("order", 1).await;
    let world = World::outbox().await;
    let mut relay = cluster.relay(&world, &[("relay.grace", "2s")]);
    world.until_owned(&relay).await;
    cluster.faults().broker_down(1).unwrap();
    world.fill("order", 10, 2).await;
    assert!(relay.terminate(SOON).await.success(), "{}", relay.log());
    assert_eq!(world.count("pending").await, 20);
    cluster.faults().broker_up(1).unwrap();
    let _relay = cluster.relay(&world, &[]);
    assert_sound(&world, &mut topic).await;
    assert_eq!(charged(&world).await, 0);
    world.clean().await;
}
