//! The relay's guarantees with a stream of NATS JetStream at the other end.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures_util::StreamExt as _;
use serde_json::json;

use crate::support::{Kept, Load, Proxy, Relay, SOON, Stream, World, nats_url};

/// Fails and dies soon.
const IMPATIENT: [(&str, &str); 3] = [
    ("retry.max_attempts", "2"),
    ("retry.backoff", "1s"),
    ("relay.tick", "500ms"),
];

/// Each event once, and those of an aggregate in the order of their ids.
pub fn assert_each_once_in_order(kept: &[Kept], ids: &[i64]) {
    let mut last: HashMap<&str, i64> = HashMap::new();
    for message in kept {
        let aggregate = message.header("aggregate_id").unwrap();
        let before = last.insert(aggregate, message.id());
        assert!(before < Some(message.id()), "{before:?} {message:?}");
    }
    let mut arrived: Vec<_> = kept.iter().map(Kept::id).collect();
    arrived.sort_unstable();
    assert_eq!(arrived, ids);
    let message_ids: HashSet<_> = kept.iter().map(|kept| kept.header("Nats-Msg-Id")).collect();
    assert_eq!(message_ids.len(), kept.len());
}

async fn clean(world: World, stream: Stream) {
    stream.delete().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_are_kept_once_in_order_and_byte_for_byte() {
    let Some(mut stream) = Stream::new(json!({})).await else {
        return;
    };
    let world = World::outbox().await;
    let _relay = world.relay(&world.to_stream(&stream));
    world.fill("order", 20, 20).await;
    let null = world.insert(("order", "null"), "Placed", "null").await;
    let big = world
        .insert(
            ("order", "a\r\nb"),
            "Placed",
            r#"{"n": 1e400, "é": [1.50]}"#,
        )
        .await;
    let text: String = world
        .one(&format!(
            "SELECT payload::text FROM outbox WHERE id = {big}"
        ))
        .await;
    world.until_published(SOON).await;
    let kept = stream.messages(402, SOON).await;
    assert_each_once_in_order(&kept, &world.committed().await);
    let of = |id| kept.iter().find(|message| message.id() == id).unwrap();
    assert_eq!(of(null).body, b"null");
    assert_eq!(of(big).body, text.as_bytes());
    assert_eq!(of(big).header("aggregate_id"), Some("a%0D%0Ab"));
    assert_eq!(of(big).header("attempt"), Some("1"));
    assert_eq!(of(big).subject, format!("{}.order.Placed", stream.name));
    assert_eq!(of(1).subject, format!("{}.order.Happened", stream.name));
    clean(world, stream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_outboxes_with_equal_ids_lose_nothing_in_one_stream() {
    let Some(mut stream) = Stream::new(json!({})).await else {
        return;
    };
    let (one, other) = (World::outbox().await, World::outbox().await);
    for world in [&one, &other] {
        world.fill("order", 5, 4).await;
        // Restored from one backup, say: the UUIDs are the same too.
        world.insert_as(7, ("order", "twin")).await;
    }
    let to_stream = one.to_stream(&stream);
    let relays = [(&one, "one"), (&other, "other")].map(|(world, source)| {
        world.relay(&[&to_stream[..], &[("jetstream.source", source)]].concat())
    });
    one.until_published(SOON).await;
    other.until_published(SOON).await;
    let kept = stream.messages(21, SOON).await;
    for source in ["one", "other"] {
        let of_source: Vec<_> = kept
            .iter()
            .filter(|message| message.header("source") == Some(source))
            .cloned()
            .collect();
        assert_each_once_in_order(&of_source, &one.committed().await);
    }
    drop(relays);
    // With one source for both, it is at least said.
    let relay = other.relay(
        &[
            &other.to_stream(&stream)[..],
            &[("jetstream.source", "one")],
        ]
        .concat(),
    );
    other
        .sql(
            "UPDATE outbox SET status = 'pending', published_at = NULL WHERE aggregate_id = 'twin'",
        )
        .await;
    relay.until_logged("had events already", SOON).await;
    other.until_published(SOON).await;
    other.clean().await;
    clean(one, stream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_stream_is_waited_for_and_kills_nothing() {
    let full = json!({ "max_msgs": 3, "discard": "new" });
    let Some(mut stream) = Stream::new(full).await else {
        return;
    };
    let world = World::outbox().await;
    let _relay = world.relay(&[&world.to_stream(&stream)[..], &IMPATIENT].concat());
    world.fill("order", 1, 6).await;
    let refused = "SELECT EXISTS (SELECT FROM outbox WHERE id = 4 AND attempts >= 1
                   AND last_error LIKE 'nacked: %maximum messages exceeded%')";
    world.until(refused, SOON).await;
    // More often than any other failure would be forgiven.
    let often = "SELECT attempts >= 3 FROM outbox WHERE id = 4";
    world.until(often, SOON).await;
    assert_eq!(
        (world.count("published").await, stream.count().await),
        (3, 3)
    );
    let mut kept = stream.messages(3, SOON).await;
    stream.purge().await;
    world.until_published(SOON).await;
    assert_eq!(world.count("dead").await, 0);
    kept.extend(stream.messages(3, SOON).await);
    assert_each_once_in_order(&kept, &[1, 2, 3, 4, 5, 6]);
    clean(world, stream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_stream_is_waited_for_and_costs_no_attempt() {
    let Some(mut stream) = Stream::absent().await else {
        return;
    };
    let world = World::outbox().await;
    let relay = world.relay(&world.to_stream(&stream));
    world.fill("order", 4, 5).await;
    relay.until_logged("does not exist", SOON).await;
    assert_eq!(world.count("published").await, 0);
    stream.create(json!({})).await;
    world.until_published(SOON).await;
    // And one that goes away at work.
    let mut kept = stream.messages(20, SOON).await;
    let told = relay.logged("does not exist");
    stream.delete().await;
    world.fill("order", 4, 5).await;
    while relay.logged("does not exist") == told {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let attempts: i64 = world.one("SELECT sum(attempts) FROM outbox").await;
    assert_eq!((attempts, world.count("dead").await), (0, 0));
    stream.create(json!({})).await;
    stream.restart();
    world.until_published(SOON).await;
    kept.extend(stream.messages(20, SOON).await);
    assert_each_once_in_order(&kept, &world.committed().await);
    clean(world, stream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subject_of_another_stream_is_never_success() {
    let Some(stream) = Stream::new(json!({})).await else {
        return;
    };
    let Some(mut other) = Stream::absent().await else {
        return;
    };
    let world = World::outbox().await;
    let relay = world.relay(&[&world.to_stream(&stream)[..], &IMPATIENT].concat());
    let (ours, theirs) = (
        format!("{}.invoice.>", stream.name),
        format!("{}.order.>", stream.name),
    );
    stream.update(json!({ "subjects": [ours] })).await;
    other.create(json!({ "subjects": [theirs] })).await;
    world.insert(("order", "1"), "Placed", "{}").await;
    world.insert(("invoice", "1"), "Sent", "{}").await;
    let dead = "SELECT EXISTS (SELECT FROM outbox WHERE status = 'dead' AND attempts = 2
                AND last_error LIKE 'unroutable: %belongs to another stream%')";
    world.until(dead, SOON).await;
    world.until_published(SOON).await;
    assert!(other.next().await.is_none());
    assert_eq!(
        (world.count("published").await, stream.count().await),
        (1, 1)
    );
    drop(relay);
    other.delete().await;
    clean(world, stream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_else_answers_on_a_subject_is_not_taken_for_the_stream() {
    let Some(stream) = Stream::new(json!({})).await else {
        return;
    };
    let world = World::outbox().await;
    let subject = format!("{}.order.>", stream.name);
    let mut requests = stream.client.subscribe(subject).await.unwrap();
    let client = stream.client.clone();
    tokio::spawn(async move {
        while let Some(request) = requests.next().await {
            for answer in ["+OK", "{}", r#"{"stream":"OTHER","seq":1}"#] {
                let reply = request.reply.clone().unwrap();
                client.publish(reply, answer.into()).await.unwrap();
            }
        }
    });
    stream.client.flush().await.unwrap();
    let settings = [
        &world.to_stream(&stream)[..],
        &IMPATIENT,
        &[("jetstream.ack_timeout", "1s")],
    ]
    .concat();
    let relay = world.relay(&settings);
    // The stream's own word counts, whoever speaks before it.
    world.insert(("order", "1"), "Placed", "{}").await;
    world.until_published(SOON).await;
    assert_eq!(stream.count().await, 1);
    // Without one there is no success, and the others are not held up.
    let ours = format!("{}.invoice.>", stream.name);
    stream.update(json!({ "subjects": [ours] })).await;
    world.insert(("order", "2"), "Placed", "{}").await;
    world.insert(("invoice", "1"), "Sent", "{}").await;
    let dead = "SELECT EXISTS (SELECT FROM outbox WHERE status = 'dead' AND attempts = 2
                AND last_error LIKE 'unroutable: no stream covers the subject%')";
    world.until(dead, SOON).await;
    world.until_published(SOON).await;
    assert_eq!(world.count("published").await, 2);
    assert_eq!(relay.logged("no acknowledgement"), 0);
    clean(world, stream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_without_a_subject_die_alone_and_reach_no_other() {
    let Some(mut stream) = Stream::new(json!({})).await else {
        return;
    };
    let world = World::outbox().await;
    let relay = world.relay(&world.to_stream(&stream));
    let odd = [
        "a b",
        "a.b",
        "*",
        ">",
        "x>",
        "a\tb",
        "a\r\nPUB x 0",
        "",
        &"x".repeat(300),
    ];
    for (number, odd) in odd.iter().enumerate() {
        let aggregate = format!("odd-{number}");
        world.insert(("order", &aggregate), odd, "{}").await;
        world.insert((odd, &aggregate), "Placed", "{}").await;
        world.fill("order", 3, 1).await;
    }
    world.until_published(SOON).await;
    let dead: i64 = world
        .one("SELECT count(*) FROM outbox WHERE status = 'dead' AND attempts = 1 AND last_error LIKE 'illegal_name: %'")
        .await;
    assert_eq!(dead, 2 * odd.len() as i64);
    let good = 3 * odd.len();
    assert_eq!(stream.messages(good, SOON).await.len(), good);
    assert_eq!(stream.count().await, good as u64);
    assert_eq!(relay.logged("lost"), 0, "{}", relay.log());
    clean(world, stream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_over_the_limits_dies_alone_and_at_once() {
    let Some(mut stream) = Stream::new(json!({ "max_msg_size": 900_000 })).await else {
        return;
    };
    let world = World::outbox().await;
    let relay = world.relay(&world.to_stream(&stream));
    let limit = 1_048_576;
    for (number, size) in [limit - 60, limit, 2 * limit, 950_000]
        .into_iter()
        .enumerate()
    {
        let payload = format!("\"{}\"", "x".repeat(size - 2));
        let aggregate = format!("large-{number}");
        world
            .insert(("order", &aggregate), "Placed", &payload)
            .await;
        world.fill("order", 5, 2).await;
    }
    world.until_published(SOON).await;
    let dead: Vec<_> = world
        .db
        .query(
            "SELECT last_error FROM outbox WHERE status = 'dead' AND attempts = 1 ORDER BY id",
            &[],
        )
        .await
        .unwrap();
    let reasons: Vec<String> = dead.iter().map(|row| row.get(0)).collect();
    assert_eq!(reasons.len(), 4, "{reasons:?}");
    for (reason, who) in reasons
        .iter()
        .zip(["max_payload", "max_payload", "max_payload", "10054"])
    {
        assert!(
            reason.starts_with("too_large: ") && reason.contains(who),
            "{reason}"
        );
    }
    assert_eq!(stream.messages(40, SOON).await.len(), 40);
    assert_eq!(relay.logged("lost"), 0, "{}", relay.log());
    clean(world, stream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_killed_relay_had_published_and_not_marked_is_kept_once() {
    let Some(mut stream) = Stream::new(json!({})).await else {
        return;
    };
    let (world, url) = (World::outbox().await, nats_url().unwrap());
    let network = Proxy::new(&url).await;
    let through = network.through(&url);
    let patient = [
        ("NATS_URL", through.as_str()),
        ("jetstream.ack_timeout", "4s"),
    ];
    let mut relay = world
        .ready_relay(&[&world.to_stream(&stream)[..], &patient].concat())
        .await;
    world.insert(("warm", "1"), "Warm", "{}").await;
    world.until_published(SOON).await;
    network.mute(true);
    world.fill("order", 20, 3).await;
    // One of each aggregate is there, and no acknowledgement comes.
    let mut kept = stream.messages(21, SOON).await;
    relay.kill().await;
    assert_eq!(world.count("published").await, 1);
    let relay = world.relay(&world.to_stream(&stream));
    world.until_published(SOON).await;
    relay.until_logged("had events already", SOON).await;
    kept.extend(stream.messages(40, SOON).await);
    assert_each_once_in_order(&kept, &world.committed().await);
    clean(world, stream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sealed_stream_takes_nothing_and_costs_no_attempt() {
    let Some(stream) = Stream::new(json!({})).await else {
        return;
    };
    let world = World::outbox().await;
    let relay = world.ready_relay(&world.to_stream(&stream)).await;
    world.insert(("order", "1"), "Placed", "{}").await;
    world.until_published(SOON).await;
    stream.update(json!({ "sealed": true })).await;
    world.insert(("order", "1"), "Placed", "{}").await;
    relay.until_logged("sealed", SOON).await;
    let attempts: i64 = world.one("SELECT sum(attempts) FROM outbox").await;
    assert_eq!((attempts, world.count("pending").await), (0, 1));
    assert_eq!(stream.count().await, 1);
    clean(world, stream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_stop_at_work_nothing_is_missing_and_nothing_was_sent_twice() {
    let Some(mut stream) = Stream::new(json!({})).await else {
        return;
    };
    let world = World::outbox().await;
    let load = Load::start(&world);
    for _ in 0..3 {
        let mut relay = world.ready_relay(&world.to_stream(&stream)).await;
        load.more(100).await;
        assert!(relay.terminate(SOON).await.success(), "{}", relay.log());
        assert_eq!(relay.logged("had events already"), 0, "{}", relay.log());
    }
    load.stop().await;
    let _relay = world.relay(&world.to_stream(&stream));
    world.until_published(SOON).await;
    let committed = world.committed().await;
    let kept = stream.messages(committed.len(), SOON).await;
    assert_each_once_in_order(&kept, &committed);
    clean(world, stream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_tells_which_streams_cannot_be_relied_on() {
    for (settings, ok, words) in [
        (json!({}), true, vec![".>", "duplicate window 2m"]),
        (
            json!({ "duplicate_window": 1_000_000_000 }),
            true,
            vec![
                "WARNING",
                "after 1s",
                "relay.lease (5s)",
                "pause (5s)",
                "after 10s",
            ],
        ),
        (json!({ "no_ack": true }), false, vec!["no_ack"]),
        (
            json!({ "subjects": ["elsewhere.t.>"] }),
            false,
            vec!["jetstream.prefix"],
        ),
    ] {
        let Some(stream) = Stream::new(settings).await else {
            return;
        };
        let world = World::outbox().await;
        let run = world
            .command(&world.to_stream(&stream), &["check", "--json"])
            .await;
        assert_eq!(run.status.success(), ok, "{}", run.stdout);
        for word in words {
            assert!(run.stdout.contains(word), "`{word}`: {}", run.stdout);
        }
        clean(world, stream).await;
    }
    let Some(stream) = Stream::absent().await else {
        return;
    };
    let world = World::outbox().await;
    let run = world
        .command(&world.to_stream(&stream), &["check", "--json"])
        .await;
    assert!(
        !run.status.success() && run.stdout.contains("does not exist"),
        "{}",
        run.stdout
    );
    let nowhere = [("NATS_URL", "nats://u:S3cr%40t@127.0.0.1:1")];
    let settings = [&world.to_stream(&stream)[..], &nowhere].concat();
    let run = world.command(&settings, &["check"]).await;
    assert!(
        !run.status.success() && run.stdout.contains("127.0.0.1:1"),
        "{}",
        run.stdout
    );
    assert!(!run.stdout.contains("S3cr") && !run.stderr.contains("S3cr"));
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routes_name_streams_and_subjects_and_copies_of_dead_events_go_to_another() {
    let Some(mut stream) = Stream::new(json!({})).await else {
        return;
    };
    let Some(mut dead) = Stream::new(json!({})).await else {
        return;
    };
    let (name, dead_name) = (stream.name.clone(), dead.name.clone());
    let file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    let routes = format!(
        "[[routes]]\naggregate_type = \"invoice\"\nrouting_key = \"{name}.v2.{{event_type}}\"\n\
         on_dead = \"skip\"\npublish_to = \"{dead_name}\"\n"
    );
    std::fs::write(file.path(), routes).unwrap();
    let world = World::outbox().await;
    let path = file.path().to_str().unwrap();
    let _relay = Relay::start(
        &world.environment(),
        &world.to_stream(&stream),
        &["--config", path, "run"],
    );
    world.insert(("invoice", "1"), "a.b", "{}").await;
    world.insert(("invoice", "1"), "Sent", "{}").await;
    world.until_published(SOON).await;
    let copy = dead.messages(1, SOON).await.remove(0);
    assert_eq!(copy.subject, format!("{dead_name}.dead"));
    assert_eq!(copy.header("dead_cause"), Some("illegal_name"));
    assert_eq!(copy.header("event_type"), Some("a.b"));
    let kept = stream.messages(1, SOON).await.remove(0);
    assert_eq!(kept.subject, format!("{name}.v2.Sent"));
    // Mended and replayed, it comes late and says so, under a message id of its own.
    world
        .sql("UPDATE outbox SET event_type = 'Mended' WHERE status = 'dead'")
        .await;
    let run = world.command(&[], &["dead", "replay", "--id", "1"]).await;
    assert!(run.status.success(), "{}", run.stderr);
    let late = stream.messages(1, SOON).await.remove(0);
    assert_eq!((late.id(), late.header("replayed")), (1, Some("true")));
    assert!(late.header("Nats-Msg-Id").unwrap().ends_with(":replayed"));
    dead.delete().await;
    clean(world, stream).await;
}
