//! An outage is not poison: however long it lasts, no event is charged, none dies, and all leave in
//! order afterwards without a hand's help.

use std::time::Duration;

use crate::support::{Ledger, Proxy, SOON, World, amqp_url};

/// "In seconds", on a slow machine.
const SECONDS: Duration = Duration::from_secs(15);
/// The whole backoff of an event that may die: 100, 200, 400 and 800 ms.
const IMPATIENT: [(&str, &str); 3] = [
    ("retry.max_attempts", "5"),
    ("retry.backoff", "100ms"),
    ("retry.stop_after_failures", "3"),
];
/// Four times as long.
const OUTAGE: Duration = Duration::from_secs(6);

impl World {
    async fn assert_uncharged(&self) {
        let charged: i64 = self
            .one(
                "SELECT count(*) FROM outbox WHERE attempts > 0 OR status IN ('dead', 'discarded')",
            )
            .await;
        assert_eq!(charged, 0, "{}", self.table_state().await);
    }

    async fn assert_all_in_order(&mut self) {
        let committed = self.committed().await;
        let arrivals = self.arrivals(committed.len(), SECONDS).await;
        Ledger::of(&arrivals).assert_sound(&committed);
        self.until_published(SOON).await;
        self.assert_uncharged().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_is_away_for_long_costs_no_event_an_attempt() {
    let mut world = World::new().await;
    let proxy = Proxy::new(&amqp_url()).await;
    let through = proxy.through(&amqp_url());
    let mut settings = IMPATIENT.to_vec();
    settings.push(("AMQP_URL", &through));
    let relay = world.ready_relay(&settings).await;
    world.fill("order", 50, 2).await;
    proxy.refuse(true);
    proxy.cut();
    relay
        .until_logged("breaker open, nothing is sent", SOON)
        .await;
    world.fill("order", 50, 2).await;
    tokio::time::sleep(OUTAGE).await;
    world.assert_uncharged().await;
    let in_hand: i64 = world
        .one("SELECT count(*) FROM outbox WHERE status = 'pending' AND claimed_by IS NOT NULL")
        .await;
    assert_eq!(in_hand, 0, "nothing is claimed meanwhile");
    proxy.refuse(false);
    world.assert_all_in_order().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_swallows_everything_costs_no_event_an_attempt() {
    let mut world = World::new().await;
    let proxy = Proxy::new(&amqp_url()).await;
    let through = proxy.through(&amqp_url());
    let mut settings = IMPATIENT.to_vec();
    settings.push(("AMQP_URL", &through));
    settings.push(("rabbitmq.confirm_timeout", "1s"));
    let _relay = world.ready_relay(&settings).await;
    world.warm().await;
    proxy.mute(true);
    world.fill("order", 50, 4).await;
    tokio::time::sleep(OUTAGE).await;
    world.assert_uncharged().await;
    proxy.mute(false);
    world.assert_all_in_order().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_whose_name_does_not_resolve_costs_no_event_an_attempt() {
    let mut world = World::new().await;
    world.fill("order", 50, 4).await;
    let mut settings = IMPATIENT.to_vec();
    settings.push(("AMQP_URL", "amqp://u:p@no-such-host.invalid:5672/%2f"));
    let mut lost = world.relay(&settings);
    lost.until_logged("not ready to publish, nothing is claimed", SOON)
        .await;
    tokio::time::sleep(OUTAGE / 2).await;
    assert!(lost.logged("no-such-host.invalid") > 0, "{}", lost.log());
    world.assert_uncharged().await;
    // One that finds the broker takes all the work, while the other still lives.
    let _found = world.ready_relay(&IMPATIENT).await;
    world.assert_all_in_order().await;
    assert!(lost.is_running());
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_thousand_events_behind_a_dead_one_are_freed_by_its_discard_in_order() {
    let mut world = World::new().await;
    let dead = world.insert(("stuck", "1"), "Happened", "{}").await;
    world
        .sql("UPDATE outbox SET status = 'dead', attempts = 5, last_error = 'unroutable: nobody'")
        .await;
    world.fill("stuck", 1, 20_000).await;
    let _relay = world.ready_relay(&[("relay.batch_size", "50")]).await;
    let free = world.insert(("free", "1"), "Happened", "{}").await;
    assert_eq!(world.next_arrival(SECONDS).await.unwrap().id, free);
    let run = world.command(&[("lag.alert", "1ms")], &["status"]).await;
    let said = format!("held behind dead-lettered event {dead}: replay or discard that one");
    assert!(run.stdout.contains(&said), "{}", run.stdout);
    let run = world
        .command(&[], &["dead", "discard", "--id", &dead.to_string()])
        .await;
    assert_eq!(run.status.code(), Some(0), "{}", run.stderr);
    for id in dead + 1..=dead + 200 {
        assert_eq!(world.next_arrival(SOON).await.unwrap().id, id);
    }
    world.clean().await;
}
