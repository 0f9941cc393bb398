//! Tests that stop, kill or reconfigure the servers that all others use. They run alone (see
//! `.config/nextest.toml`), and leave both servers running.

use std::ops::Deref;
use std::time::Duration;

use crate::admin::{ANY_PORT, address, get, until_ready};
use crate::jetstream::assert_each_once_in_order;
use crate::pooler::pooler_url;
use crate::support::{Ledger, Load, SOON, Services, Stream, World, nats_url};

/// From the server's return to the last delivery.
const SECONDS: Duration = Duration::from_secs(20);

/// The servers; running and set back to normal before and after each test, also a failed one.
struct Shared(Services);

impl Deref for Shared {
    type Target = Services;

    fn deref(&self) -> &Services {
        &self.0
    }
}

impl Shared {
    fn ours() -> Option<Self> {
        let shared = Self(Services::ours()?);
        shared.start();
        Some(shared)
    }

    fn start(&self) {
        for server in ["postgres", "rabbitmq"] {
            self.run_blocking(&["start", server]);
        }
        if std::env::var_os("BELLWIRE_TEST_PGBOUNCER_URL").is_some() {
            self.run_blocking(&["start", "pgbouncer"]);
        }
        // Not when it is somebody else's.
        if nats_url().is_some() {
            self.run_blocking(&["start", "nats"]);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.start();
        if std::thread::panicking() {
            // What a failed test may have left behind.
            self.rabbitmqctl_blocking(&["set_vm_memory_high_watermark", "0.4"]);
            self.rabbitmqctl_blocking(&["eval", &max_message_size(DEFAULT_MAX_MESSAGE_SIZE)]);
            self.run_blocking(&["psql", "-c", READ_WRITE, "-c", RELOAD]);
        }
    }
}

impl World {
    /// Everything written arrived in order, once marked, uncharged.
    async fn assert_all_delivered(&mut self) {
        self.until_published(SECONDS).await;
        let committed = self.committed().await;
        let arrivals = self.arrivals(committed.len(), SOON).await;
        Ledger::of(&arrivals).assert_sound(&committed);
        assert_eq!(
            self.one::<i64>("SELECT count(*) FROM outbox WHERE attempts > 0")
                .await,
            0,
            "attempts were counted"
        );
    }
}

async fn broker_away(how: &str) {
    let Some(servers) = Shared::ours() else {
        return;
    };
    let mut world = World::new().await;
    let relay = world.ready_relay(&[]).await;
    let load = Load::start(&world);
    load.more(50).await;
    servers.run(&[how, "rabbitmq"]).await;
    load.more(50).await;
    relay.until_logged("breaker open", SOON).await;
    servers.run(&["start", "rabbitmq"]).await;
    load.more(50).await;
    load.stop().await;
    world.reconnect().await;
    world.assert_all_delivered().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_stopped_and_started_again_costs_nothing() {
    broker_away("stop").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_killed_and_started_again_costs_nothing() {
    broker_away("kill").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_jetstream_server_killed_and_started_again_costs_nothing() {
    let Some(servers) = Shared::ours() else {
        return;
    };
    let Some(mut stream) = Stream::new(serde_json::json!({})).await else {
        return;
    };
    let world = World::outbox().await;
    let relay = world.ready_relay(&world.to_stream(&stream)).await;
    let load = Load::start(&world);
    for (round, how) in ["kill", "stop"].into_iter().enumerate() {
        load.more(100).await;
        servers.run(&[how, "nats"]).await;
        load.more(50).await;
        relay.until_logged("breaker open", SOON).await;
        servers.run(&["start", "nats"]).await;
        while relay.logged("breaker closed") < round + 2 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        load.more(50).await;
    }
    load.stop().await;
    world.until_published(SECONDS).await;
    let committed = world.committed().await;
    let kept = stream.messages(committed.len(), SOON).await;
    assert_each_once_in_order(&kept, &committed);
    let attempts: i64 = world.one("SELECT sum(attempts) FROM outbox").await;
    assert_eq!(attempts, 0, "attempts were counted");
    stream.delete().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_killed_and_started_again_costs_nothing() {
    let Some(servers) = Shared::ours() else {
        return;
    };
    let mut world = World::new().await;
    let relay = world.ready_relay(&[]).await;
    let load = Load::start(&world);
    load.more(100).await;
    servers.run(&["kill", "postgres"]).await;
    relay.until_logged("claim token void", SOON).await;
    servers.run(&["start", "postgres"]).await;
    load.more(50).await;
    load.stop().await;
    world.reconnect().await;
    world.assert_all_delivered().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_or_the_server_behind_it_killed_and_started_again_costs_nothing() {
    let (Some(servers), Some(url)) = (Shared::ours(), pooler_url()) else {
        return;
    };
    let mut world = World::new().await;
    let settings = [("DATABASE_URL", url.as_str()), ("relay.tick", "1s")];
    let relay = world.ready_relay(&settings).await;
    for server in ["pgbouncer", "postgres"] {
        let load = Load::start(&world);
        load.more(100).await;
        servers.run(&["kill", server]).await;
        servers.run(&["start", server]).await;
        load.more(50).await;
        load.stop().await;
        world.reconnect().await;
        assert!(relay.logged("claim token void") > 0, "{}", relay.log());
        // The pooler waits for 15 seconds before it asks a server again that refused it.
        world.until_published(SECONDS * 2).await;
    }
    world.assert_all_delivered().await;
    world.clean().await;
}

const READ_ONLY: &str = "ALTER SYSTEM SET default_transaction_read_only = on";
const READ_WRITE: &str = "ALTER SYSTEM RESET default_transaction_read_only";
const RELOAD: &str = "SELECT pg_reload_conf()";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_takes_no_writes_for_a_while_costs_nothing() {
    if Shared::ours().is_none() {
        return;
    }
    let mut world = World::new().await;
    let relay = world.relay(&[ANY_PORT]);
    let address = address(&relay).await;
    until_ready(&address, 200, "", SOON).await;
    // The application's session may still write: rows wait, and more are coming.
    world.sql("SET default_transaction_read_only = off").await;
    world.fill("order", 20, 5).await;
    world.sql(READ_ONLY).await;
    world.sql(RELOAD).await;
    until_ready(&address, 503, "database", SOON).await;
    for _ in 0..5 {
        world.fill("order", 20, 5).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let (code, _) = get(&address, "/readyz").await;
    assert_eq!(code, 503, "{}", relay.log());
    world.sql(READ_WRITE).await;
    world.sql(RELOAD).await;
    until_ready(&address, 200, "", SECONDS).await;
    world.until_published(SECONDS).await;
    let committed = world.committed().await;
    let arrivals = world.arrivals(committed.len(), SOON).await;
    let ledger = Ledger::of(&arrivals);
    ledger.assert_sound(&committed);
    // Of what was published when the marks began to fail, at most once more.
    let in_hand = 100;
    assert!(ledger.repeats <= in_hand, "{} repeats", ledger.repeats);
    let attempts: i64 = world.one("SELECT sum(attempts) FROM outbox").await;
    assert_eq!(attempts, 0, "attempts were counted");
    let duplicates = relay.logged("a duplicate is possible");
    let warnings = relay.logged("WARN") - duplicates;
    assert!(warnings <= 6, "{warnings} warnings\n{}", relay.log());
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_stopped_while_nothing_is_to_be_done_is_found_again() {
    let Some(servers) = Shared::ours() else {
        return;
    };
    let mut world = World::new().await;
    let relay = world.ready_relay(&[("relay.tick", "10m")]).await;
    servers.run(&["stop", "postgres"]).await;
    relay.until_logged("claim token void", SOON).await;
    servers.run(&["start", "postgres"]).await;
    world.reconnect().await;
    world.insert(("order", "1"), "Placed", "{}").await;
    world.assert_all_delivered().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_asks_to_wait_gets_nothing_and_costs_nothing() {
    let Some(servers) = Shared::ours() else {
        return;
    };
    let mut world = World::new().await;
    let relay = world.ready_relay(&[]).await;
    world.insert(("order", "1"), "Placed", "{}").await;
    world.until_published(SOON).await;
    servers
        .rabbitmqctl(&["set_vm_memory_high_watermark", "0.00001"])
        .await;
    for number in 0..20 {
        world
            .insert(("order", &(number % 5).to_string()), "Placed", "{}")
            .await;
    }
    relay.until_logged("the broker asks to wait", SOON).await;
    // Longer than the lease and the confirm timeout of these tests.
    tokio::time::sleep(Duration::from_secs(7)).await;
    assert_eq!(
        world
            .one::<i64>("SELECT count(*) FROM outbox WHERE attempts > 0")
            .await,
        0,
        "attempts were counted"
    );
    servers
        .rabbitmqctl(&["set_vm_memory_high_watermark", "0.4"])
        .await;
    world.assert_all_delivered().await;
    world.clean().await;
}

/// RabbitMQ 3.10's.
const DEFAULT_MAX_MESSAGE_SIZE: usize = 134_217_728;

fn max_message_size(bytes: usize) -> String {
    // The second is where it is looked up when a message comes.
    format!(
        "application:set_env(rabbit, max_message_size, {bytes}), persistent_term:put(max_message_size, {bytes})."
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_oversize_event_dies_alone() {
    let Some(servers) = Shared::ours() else {
        return;
    };
    let mut world = World::new().await;
    servers
        .rabbitmqctl(&["eval", &max_message_size(1_048_576)])
        .await;
    let mut good = Vec::new();
    let mut bad = Vec::new();
    let large = format!("\"{}\"", "x".repeat(2 << 20));
    for round in 0..10 {
        for number in 0..20 {
            good.push(
                world
                    .insert(("order", &number.to_string()), "Placed", "{}")
                    .await,
            );
        }
        bad.push(
            world
                .insert(("large", &round.to_string()), "Placed", &large)
                .await,
        );
    }
    // All in one partition: they share a channel.
    let _relay = world.ready_relay(&[("relay.partitions", "1")]).await;
    world.until_published(SECONDS).await;
    servers
        .rabbitmqctl(&["eval", &max_message_size(DEFAULT_MAX_MESSAGE_SIZE)])
        .await;
    let arrivals = world.arrivals(good.len(), SOON).await;
    Ledger::of(&arrivals).assert_sound(&good);
    for id in bad {
        let error: String = world
            .one(&format!(
                "SELECT status || attempts || ' ' || last_error FROM outbox WHERE id = {id}"
            ))
            .await;
        assert!(error.starts_with("dead1 too_large: "), "{error}");
    }
    assert_eq!(
        world
            .one::<i64>("SELECT sum(attempts) FROM outbox WHERE aggregate_type = 'order'")
            .await,
        0
    );
    world.clean().await;
}
