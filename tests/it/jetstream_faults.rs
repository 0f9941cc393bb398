//! JetStream in trouble: outages lose and charge nothing, poison holds up nobody but whom it may, and
//! what is wrong with one message stays with it.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use crate::jetstream::assert_each_once_in_order;
use crate::support::{FakeNats, Proxy, Relay, SOON, Stream, World, nats_url};

/// The whole backoff of an event that may die: 100, 200, 400 and 800 ms.
const IMPATIENT: [(&str, &str); 4] = [
    ("retry.max_attempts", "5"),
    ("retry.backoff", "100ms"),
    ("retry.stop_after_failures", "3"),
    ("relay.tick", "500ms"),
];
/// Four times as long: what ten minutes are to the defaults.
const OUTAGE: Duration = Duration::from_secs(6);

async fn clean(world: World, stream: Stream) {
    stream.delete().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transport_that_is_away_for_long_loses_nothing_and_charges_nobody() {
    let Some(mut stream) = Stream::new(json!({})).await else {
        return;
    };
    let (world, url) = (World::outbox().await, nats_url().unwrap());
    let network = Proxy::new(&url).await;
    let through = network.through(&url);
    let settings = [
        &world.to_stream(&stream)[..],
        &IMPATIENT,
        &[
            ("NATS_URL", through.as_str()),
            ("jetstream.ack_timeout", "1s"),
        ],
    ]
    .concat();
    let relay = world.ready_relay(&settings).await;
    world.fill("order", 50, 2).await;
    network.refuse(true);
    network.cut();
    relay
        .until_logged("breaker open, nothing is sent", SOON)
        .await;
    // The application goes on; first nobody answers at all, then nothing but silence.
    world.fill("order", 50, 2).await;
    tokio::time::sleep(OUTAGE).await;
    network.mute(true);
    network.refuse(false);
    world.fill("order", 50, 2).await;
    tokio::time::sleep(OUTAGE / 2).await;
    let charged =
        "SELECT count(*) FROM outbox WHERE attempts > 0 OR status IN ('dead', 'discarded')";
    assert_eq!(
        world.one::<i64>(charged).await,
        0,
        "{}",
        world.table_state().await
    );
    network.mute(false);
    world.until_published(SOON).await;
    assert_eq!(world.one::<i64>(charged).await, 0);
    let committed = world.committed().await;
    assert_eq!(committed.len(), 300);
    let kept = stream.messages(300, SOON).await;
    assert_each_once_in_order(&kept, &committed);
    clean(world, stream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn poison_does_not_sit_at_the_head_for_ever() {
    let Some(mut stream) = Stream::new(json!({ "max_msg_size": 2_000 })).await else {
        return;
    };
    let Some(mut letters) = Stream::new(json!({})).await else {
        return;
    };
    let file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    let routes = format!(
        "[[routes]]\naggregate_type = \"skipping\"\non_dead = \"skip\"\npublish_to = \"{}\"\n",
        letters.name
    );
    std::fs::write(file.path(), routes).unwrap();
    let world = World::outbox().await;
    let large = format!("\"{}\"", "x".repeat(5_000));
    for aggregate in ["skipping", "holding"] {
        for (payload, headers) in [(large.as_str(), "{}"), ("{}", "[]"), ("{}", "{}")] {
            let sql =
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, headers)
                       VALUES ($1, '1', 'Happened', $2::text::jsonb, $3::text::jsonb)";
            world
                .db
                .execute(sql, &[&aggregate, &payload, &headers])
                .await
                .unwrap();
        }
        world.insert((aggregate, "2"), "Happened", "{}").await;
    }
    let arguments = ["--config", file.path().to_str().unwrap(), "run"];
    let relay = Relay::start(&world.environment(), &world.to_stream(&stream), &arguments);
    // What skips has buried both and gone on; what holds waits for an operator, and holds up its own
    // aggregate only.
    let wanted = "skipping/1 dead 1 too_large, skipping/1 dead 1 undecodable, skipping/1 published 0 , skipping/2 published 0 , \
                  holding/1 dead 1 too_large, holding/1 pending 0 , holding/1 pending 0 , holding/2 published 0 ";
    let found = format!(
        "SELECT string_agg(format('%s/%s %s %s %s', aggregate_type, aggregate_id, status, attempts,
                                  split_part(last_error, ':', 1)), ', ' ORDER BY id) = '{wanted}' FROM outbox"
    );
    world.until(&found, SOON).await;
    let kept = stream.messages(3, SOON).await;
    assert_eq!(stream.count().await, 3, "{kept:?}");
    let copies = letters.messages(2, SOON).await;
    let causes: Vec<_> = copies
        .iter()
        .map(|copy| copy.header("dead_cause").unwrap())
        .collect();
    assert_eq!(causes, ["too_large", "undecodable"]);
    assert_eq!(relay.logged("lost"), 0, "{}", relay.log());
    letters.delete().await;
    clean(world, stream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_subject_is_waited_for_and_holds_up_no_other() {
    let full = json!({
        "max_msgs_per_subject": 1, "discard": "new", "discard_new_per_subject": true,
    });
    let Some(mut stream) = Stream::new(full).await else {
        return;
    };
    let world = World::outbox().await;
    let settings = [
        ("retry.max_attempts", "2"),
        ("retry.backoff", "1s"),
        ("relay.tick", "500ms"),
    ];
    let _relay = world.relay(&[&world.to_stream(&stream)[..], &settings].concat());
    for event_type in ["Placed", "Placed", "Paid", "Sent"] {
        world.insert(("order", event_type), event_type, "{}").await;
    }
    let refused = "SELECT EXISTS (SELECT FROM outbox WHERE attempts >= 3
                   AND last_error LIKE 'nacked: %maximum messages per subject exceeded%')";
    world.until(refused, SOON).await;
    assert_eq!(
        (world.count("published").await, world.count("dead").await),
        (3, 0)
    );
    let mut kept = stream.messages(3, SOON).await;
    stream.purge().await;
    world.until_published(SOON).await;
    kept.extend(stream.messages(1, SOON).await);
    assert_eq!(kept.len(), 4);
    clean(world, stream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_event_that_is_never_acknowledged_takes_no_other_with_it() {
    let server = FakeNats::silent_about(|id| id == 7).await;
    let world = World::outbox().await;
    world.fill("order", 50, 4).await;
    let settings = [
        ("relay.sink", "jetstream"),
        ("jetstream.stream", "EVENTS"),
        ("jetstream.ack_timeout", "1s"),
        ("NATS_URL", &server.url),
    ];
    let relay = world.relay(&settings);
    // Three later ones of the same aggregate are held back with it.
    let all_others = "SELECT count(*) = 196 FROM outbox WHERE status = 'published'";
    world.until(all_others, SOON).await;
    relay
        .until_logged("while it acknowledges others", SOON)
        .await;
    let attempts: i64 = world.one("SELECT sum(attempts) FROM outbox").await;
    assert_eq!(attempts, 0);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(3) {
        world.insert(("invoice", "1"), "Sent", "{}").await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(server.connections(), 1, "{}", relay.log());
    assert_eq!(
        relay.logged("breaker open, nothing is sent"),
        0,
        "{}",
        relay.log()
    );
    relay.signal(Signal::KILL);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_event_that_is_not_acknowledged_costs_the_connection() {
    // No later one says that it cannot be on its way any more.
    let server = FakeNats::silent_about(|id| id == 3).await;
    let world = World::outbox().await;
    let settings = [
        ("relay.sink", "jetstream"),
        ("jetstream.stream", "EVENTS"),
        ("jetstream.ack_timeout", "1s"),
        ("NATS_URL", &server.url),
    ];
    let relay = world.ready_relay(&settings).await;
    world.fill("order", 3, 1).await;
    world
        .until(
            "SELECT count(*) = 2 FROM outbox WHERE status = 'published'",
            SOON,
        )
        .await;
    let began = Instant::now();
    while server.connections() < 2 {
        assert!(began.elapsed() < SOON, "{}", relay.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(relay);
    world.clean().await;
}
