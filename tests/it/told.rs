//! People are told of trouble by the fleet as one: once when it begins, once when it ends, with what they
//! need to act; and never at the cost of delivery.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Proxy, Receiver, Relay, Reply, SOON, World, amqp_url, database_url};

/// Of the log, for relays that are meant to stay quiet: several checks of lag, and so of standing alerts.
const SEVERAL_CHECKS: Duration = Duration::from_secs(4);

/// Bodies of this kind that were taken.
fn told(receiver: &Receiver, kind: &str) -> Vec<Value> {
    let taken = receiver.taken().into_iter();
    taken.filter(|body| body["kind"] == kind).collect()
}

async fn until_told(receiver: &Receiver, kind: &str, within: Duration) -> Value {
    let began = Instant::now();
    loop {
        if let Some(body) = told(receiver, kind).pop() {
            return body;
        }
        assert!(
            began.elapsed() < within,
            "no {kind} within {within:?}: {:#?}",
            receiver.requests()
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn kinds(receiver: &Receiver) -> Vec<String> {
    let taken = receiver.taken().into_iter();
    let mut kinds: Vec<String> = taken
        .map(|body| body["kind"].as_str().unwrap().to_owned())
        .collect();
    kinds.sort();
    kinds
}

#[track_caller]
fn assert_says(body: &Value, words: &[&str]) {
    let text = body["text"].as_str().unwrap();
    for word in words {
        assert!(text.contains(word), "`{word}` is missing: {text}");
    }
}

/// Settings of a fleet that tells of lag after two seconds, and of breakers not at all.
fn of_lag<'a>(hook: &'a str, amqp: &'a str) -> [(&'a str, &'a str); 4] {
    [
        ("alerts.webhook_url", hook),
        ("AMQP_URL", amqp),
        ("lag.alert", "2s"),
        ("alerts.breaker_after", "1h"),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fleet_tells_of_lag_once_when_it_begins_and_once_when_it_ends() {
    let world = World::new().await;
    let receiver = Receiver::new([]).await;
    let proxy = Proxy::new(&amqp_url()).await;
    let (hook, amqp) = (receiver.url("/hook"), proxy.through(&amqp_url()));
    let mut fleet = Vec::new();
    for _ in 0..3 {
        fleet.push(world.ready_relay(&of_lag(&hook, &amqp)).await);
    }
    for _ in 0..2 {
        proxy.refuse(true);
        proxy.cut();
        world
            .until("SELECT NOT bool_or(ready) FROM outbox_replica", SOON)
            .await;
        let id = world.insert(("order", "a\nb"), "Placed", "{}").await;
        world.fill("invoice", 2, 1).await;
        let began = until_told(&receiver, "lag_began", SOON).await;
        assert_says(
            &began,
            &[
                &format!("Outbox lagging: event {id} (order a\\nb, Placed) has waited "),
                "(threshold 2 s); 3 pending, 0 dead-lettered",
                "No relay can publish at present",
            ],
        );
        assert_eq!(began["lag"]["oldest"]["id"], id);
        assert_eq!(began["threshold_seconds"], 2.0);
        tokio::time::sleep(SEVERAL_CHECKS).await;
        assert_eq!(kinds(&receiver), ["lag_began"]);
        proxy.refuse(false);
        let ended = until_told(&receiver, "lag_ended", SOON).await;
        assert_says(
            &ended,
            &[
                "no event waits longer than 2 s",
                "0 pending, 0 dead-lettered",
            ],
        );
        tokio::time::sleep(SEVERAL_CHECKS / 2).await;
        assert_eq!(kinds(&receiver), ["lag_began", "lag_ended"]);
        receiver.forget();
    }
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lag_is_told_by_a_relay_that_never_could_publish() {
    let world = World::new().await;
    let receiver = Receiver::new([]).await;
    let hook = receiver.url("/hook");
    world.fill("order", 1, 1).await;
    let nowhere = "amqp://guest:guest@127.0.0.1:1/%2f";
    let _relay = world.relay(&of_lag(&hook, nowhere));
    let began = until_told(&receiver, "lag_began", SOON).await;
    assert_says(
        &began,
        &["No relay can publish at present", "bellwire check"],
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lag_behind_a_dead_event_names_it() {
    let world = World::new().await;
    let receiver = Receiver::new([]).await;
    let hook = receiver.url("/hook");
    world.unbind("#").await;
    let amqp = amqp_url();
    let settings = [
        of_lag(&hook, &amqp).as_slice(),
        &[("retry.max_attempts", "1")],
    ]
    .concat();
    let _relay = world.ready_relay(&settings).await;
    let dead = world.insert(("order", "1"), "Placed", "{}").await;
    world
        .until(
            "SELECT EXISTS (SELECT FROM outbox WHERE status = 'dead')",
            SOON,
        )
        .await;
    let held = world.insert(("order", "1"), "Paid", "{}").await;
    let began = until_told(&receiver, "lag_began", SOON).await;
    let named = format!("held behind dead-lettered event {dead}: replay or discard that one");
    assert_says(
        &began,
        &[
            &format!("event {held} "),
            &named,
            "1 pending, 1 dead-lettered",
        ],
    );
    world.bind("#").await;
    world.command(&[], &["dead", "discard", "--all"]).await;
    until_told(&receiver, "lag_ended", SOON).await;
    assert_eq!(
        kinds(&receiver),
        ["dead_lettered", "lag_began", "lag_ended"]
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_letter_is_told_with_all_that_is_needed_to_act() {
    let world = World::new().await;
    world.unbind("#").await;
    let receiver = Receiver::new([]).await;
    let hook = receiver.url("/hook");
    let settings = [
        ("alerts.webhook_url", hook.as_str()),
        ("retry.max_attempts", "2"),
        ("retry.backoff", "500ms"),
    ];
    let _relay = world.ready_relay(&settings).await;
    let payload = r#"{"secret": "marker"}"#;
    let id = world.insert(("order", "ORD-1"), "Placed", payload).await;
    for _ in 0..2 {
        world.insert(("order", "ORD-1"), "Paid", "{}").await;
    }
    world.insert(("order", "ORD-2"), "Paid", "{}").await;
    world
        .until(
            "SELECT count(*) = 2 FROM outbox WHERE status = 'dead'",
            SOON,
        )
        .await;
    let first = |receiver: &Receiver| {
        let bodies = told(receiver, "dead_lettered").into_iter();
        let all = bodies.flat_map(|body| {
            let events = body["events"].as_array().unwrap().clone();
            events.into_iter().map(move |event| (body.clone(), event))
        });
        let mut of_id = all.filter(|(_, event)| event["id"] == id);
        of_id.next()
    };
    let began = Instant::now();
    let (body, event) = loop {
        if let Some(found) = first(&receiver) {
            break found;
        }
        assert!(began.elapsed() < SOON, "{:#?}", receiver.requests());
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert_eq!(
        (&event["attempts"], &event["held_back"]),
        (&2.into(), &2.into())
    );
    assert_eq!(
        (&event["payload_bytes"], &event["holds"]),
        (&20.into(), &true.into())
    );
    assert_eq!(event["cause"], "unroutable");
    assert!(
        event["last_error"]
            .as_str()
            .unwrap()
            .starts_with("unroutable: ")
    );
    assert_says(
        &body,
        &[
            &format!("Outbox event {id} (order ORD-1, Placed) was dead-lettered after 2 attempts."),
            "Last error: unroutable: ",
            "Payload size: 20 bytes",
            "bellwire dead replay --id",
            "bellwire dead discard --id",
            &format!("UPDATE {}.outbox SET status = 'pending'", world.schema),
        ],
    );
    assert!(!body.to_string().contains("marker"), "{body}");
    world.clean().await;
}

/// Of a breaker that is told of after a second.
fn of_breaker<'a>(hook: &'a str, amqp: &'a str) -> [(&'a str, &'a str); 4] {
    [
        ("alerts.webhook_url", hook),
        ("AMQP_URL", amqp),
        // For the checks of standing alerts.
        ("lag.alert", "2s"),
        ("alerts.breaker_after", "1s"),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fleet_tells_of_a_broker_that_stays_away_once_and_of_one_that_blinks_not_at_all() {
    let world = World::new().await;
    let receiver = Receiver::new([]).await;
    let proxy = Proxy::new(&amqp_url()).await;
    let (hook, amqp) = (receiver.url("/hook"), proxy.through(&amqp_url()));
    let patient = [
        of_breaker(&hook, &amqp).as_slice(),
        &[("alerts.breaker_after", "4s")],
    ]
    .concat();
    let mut fleet = Vec::new();
    for _ in 0..3 {
        fleet.push(world.ready_relay(&patient).await);
    }
    proxy.cut();
    for relay in &fleet {
        let again = async {
            while relay.logged("breaker closed, delivering") < 2 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(SOON, again)
            .await
            .expect("delivering again");
    }
    // Longer than what would have been told of.
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(kinds(&receiver), [""; 0]);

    proxy.refuse(true);
    proxy.cut();
    let opened = until_told(&receiver, "breaker_opened", SOON).await;
    assert_says(
        &opened,
        &[
            "stopped publishing to the broker (rabbitmq): ",
            "goes on by itself",
        ],
    );
    tokio::time::sleep(SEVERAL_CHECKS).await;
    assert_eq!(kinds(&receiver), ["breaker_opened"]);
    proxy.refuse(false);
    let closed = until_told(&receiver, "breaker_closed", SOON).await;
    assert_says(
        &closed,
        &["publishes to the broker (rabbitmq) again, after "],
    );
    assert!(closed["after_seconds"].as_f64().unwrap() > 3.0, "{closed}");
    tokio::time::sleep(SEVERAL_CHECKS).await;
    assert_eq!(kinds(&receiver), ["breaker_closed", "breaker_opened"]);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_relay_tells_of_a_database_that_stays_away_once_and_when_it_is_back() {
    let world = World::new().await;
    let receiver = Receiver::new([]).await;
    let proxy = Proxy::new(&database_url()).await;
    let (hook, amqp, database) = (
        receiver.url("/hook"),
        amqp_url(),
        proxy.through(&database_url()),
    );
    let settings = [
        of_breaker(&hook, &amqp).as_slice(),
        &[("DATABASE_URL", database.as_str())],
    ]
    .concat();
    let _relay = world.ready_relay(&settings).await;
    proxy.refuse(true);
    proxy.cut();
    let lost = until_told(&receiver, "database_lost", SOON).await;
    assert_says(&lost, &["cannot reach its database: ", "goes on by itself"]);
    tokio::time::sleep(SEVERAL_CHECKS).await;
    assert_eq!(kinds(&receiver), ["database_lost"]);
    world.insert(("order", "1"), "Placed", "{}").await;
    proxy.refuse(false);
    let back = until_told(&receiver, "database_back", SOON).await;
    assert!(back["after_seconds"].as_f64().unwrap() > 1.0, "{back}");
    world
        .until("SELECT bool_and(status = 'published') FROM outbox", SOON)
        .await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_alert_of_a_relay_that_was_killed_is_cleared_by_the_others() {
    let world = World::new().await;
    let receiver = Receiver::new([]).await;
    let proxy = Proxy::new(&amqp_url()).await;
    let (hook, broken, sound) = (
        receiver.url("/hook"),
        proxy.through(&amqp_url()),
        amqp_url(),
    );
    let mut lost = world.ready_relay(&of_breaker(&hook, &broken)).await;
    let _other = world.ready_relay(&of_breaker(&hook, &sound)).await;
    proxy.refuse(true);
    proxy.cut();
    until_told(&receiver, "breaker_opened", SOON).await;
    tokio::time::sleep(SEVERAL_CHECKS).await;
    assert_eq!(
        kinds(&receiver),
        ["breaker_opened"],
        "one of them still cannot publish"
    );
    lost.kill().await;
    until_told(&receiver, "breaker_closed", SOON).await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_during_an_outage_is_not_the_end_of_it() {
    let world = World::new().await;
    let receiver = Receiver::new([]).await;
    let proxy = Proxy::new(&amqp_url()).await;
    let (hook, amqp) = (receiver.url("/hook"), proxy.through(&amqp_url()));
    let mut relay = world.ready_relay(&of_breaker(&hook, &amqp)).await;
    proxy.refuse(true);
    proxy.cut();
    until_told(&receiver, "breaker_opened", SOON).await;
    for silent in [false, true] {
        // Refused at once, and accepted without a word: then it does not know for some seconds.
        proxy.mute(silent);
        proxy.refuse(!silent);
        relay.terminate(SOON).await;
        relay = world.relay(&of_breaker(&hook, &amqp));
        relay.until_logged("not ready to publish", SOON).await;
        tokio::time::sleep(SEVERAL_CHECKS / 2).await;
    }
    assert_eq!(kinds(&receiver), ["breaker_opened"]);
    proxy.mute(false);
    until_told(&receiver, "breaker_closed", SOON).await;
    assert_eq!(kinds(&receiver), ["breaker_closed", "breaker_opened"]);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_destination_that_only_one_relay_uses_is_well_again_only_when_it_is() {
    let world = World::new().await;
    let missing = format!("{}-missing", world.exchange);
    let file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    let routes = "[[routes]]\naggregate_type = \"lost\"\ndestination = \"{aggregate_id}\"\n";
    std::fs::write(file.path(), routes).unwrap();
    let path = file.path().to_str().unwrap();
    let receiver = Receiver::new([]).await;
    let (hook, amqp) = (receiver.url("/hook"), amqp_url());
    let mut fleet = Vec::new();
    for _ in 0..3 {
        let settings = of_breaker(&hook, &amqp);
        let relay = Relay::start(&world.environment(), &settings, &["--config", path, "run"]);
        world.until_owned(&relay).await;
        fleet.push(relay);
    }
    world.insert(("lost", &missing), "Placed", "{}").await;
    let opened = until_told(&receiver, "breaker_opened", SOON).await;
    assert_says(&opened, &[&format!("destination '{missing}'")]);
    tokio::time::sleep(SEVERAL_CHECKS).await;
    assert_eq!(
        told(&receiver, "breaker_closed").len(),
        0,
        "the others have no events for it"
    );
    let kind = lapin::ExchangeKind::Topic;
    let durable = lapin::options::ExchangeDeclareOptions {
        durable: true,
        ..Default::default()
    };
    world
        .channel
        .exchange_declare(
            missing.as_str().into(),
            kind,
            durable,
            lapin::types::FieldTable::default(),
        )
        .await
        .unwrap();
    until_told(&receiver, "breaker_closed", SOON).await;
    assert_eq!(told(&receiver, "breaker_opened").len(), 1);
    let gone = lapin::options::ExchangeDeleteOptions::default();
    world
        .channel
        .exchange_delete(missing.as_str().into(), gone)
        .await
        .unwrap();
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_fails_says_so() {
    let world = World::unbound().await;
    let receiver = Receiver::new([]).await;
    let hook = receiver.url("/hook");
    let settings = [("alerts.webhook_url", hook.as_str())];
    // No table.
    for (arguments, code) in [(["run"].as_slice(), 2), (&["run", "--once"], 2)] {
        let run = world.command(&settings, arguments).await;
        assert_eq!(run.status.code(), Some(code), "{}", run.stderr);
        let failed = told(&receiver, "relay_failed").pop().expect("told");
        assert_says(&failed, &["Outbox relay failed: ", "bellwire migrate"]);
        receiver.forget();
    }
    // No exchange.
    world.store.migrate().await.unwrap();
    world.insert(("order", "1"), "Placed", "{}").await;
    let run = world.command(&settings, &["run", "--once"]).await;
    assert_eq!(run.status.code(), Some(1), "{}", run.stderr);
    let failed = told(&receiver, "relay_failed").pop().expect("told");
    assert_says(
        &failed,
        &[
            "Outbox relay failed: ",
            &world.exchange,
            "Nothing was claimed",
        ],
    );
    assert_eq!(kinds(&receiver), ["relay_failed"]);
    receiver.forget();
    // No database.
    let nowhere = ("DATABASE_URL", "postgres://nobody:S3cr3t@127.0.0.1:1/none");
    let run = world
        .command(&[settings[0], nowhere], &["run", "--once"])
        .await;
    assert_eq!(run.status.code(), Some(1), "{}", run.stderr);
    let failed = told(&receiver, "relay_failed").pop().expect("told");
    assert_says(&failed, &["database unavailable"]);
    assert!(!failed.to_string().contains("S3cr3t"), "{failed}");
    // Told to stop: that is no failure.
    receiver.forget();
    world.declare().await;
    let mut relay = world.ready_relay(&settings).await;
    assert!(relay.terminate(SOON).await.success());
    assert_eq!(kinds(&receiver), [""; 0]);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_pass_tells_of_its_dead_letters_before_it_ends() {
    let world = World::new().await;
    world.unbind("#").await;
    let receiver = Receiver::new([]).await;
    let hook = receiver.url("/hook");
    let settings = [
        ("alerts.webhook_url", hook.as_str()),
        ("retry.max_attempts", "1"),
    ];
    // One behind each of them.
    world.fill("order", 8, 2).await;
    let run = world.command(&settings, &["run", "--once"]).await;
    assert_eq!(run.status.code(), Some(3), "{}", run.stderr);
    let (mut named, mut more) = (Vec::new(), 0);
    for body in told(&receiver, "dead_lettered") {
        more += body["more"].as_u64().unwrap();
        for event in body["events"].as_array().unwrap() {
            assert_eq!(event["held_back"], 1, "{event}");
            named.push(event["id"].as_i64().unwrap());
        }
    }
    named.sort_unstable();
    named.dedup();
    assert_eq!(named.len() as u64 + more, 8, "{:#?}", receiver.requests());
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slack_in_trouble_delays_no_event_and_hears_of_each_change_once() {
    let mut world = World::new().await;
    world.unbind("#").await;
    world.bind("order.Good").await;
    let late = Reply::Refused(
        "429 Too Many Requests",
        "Retry-After: 2\r\n",
        "rate_limited",
    );
    let failed = Reply::Refused("500 Internal Server Error", "", "oh no");
    let receiver = Receiver::new([Reply::Hang, late, failed]).await;
    let hook = receiver.url("/services/T1/S3cr3t");
    let settings = [
        ("alerts.slack_url", hook.as_str()),
        ("alerts.timeout", "2s"),
        ("retry.max_attempts", "1"),
    ];
    let relay = world.ready_relay(&settings).await;
    world.insert(("order", "bad"), "Bad", "{}").await;
    receiver.until_requests(1, SOON).await;
    for tries in 1..4 {
        // While it hangs, asks to wait, and fails.
        receiver.until_requests(tries, SOON).await;
        for _ in 0..20 {
            let id = world.insert(("order", "good"), "Good", "{}").await;
            let arrival = world.next_arrival(Duration::from_secs(1)).await;
            assert_eq!(arrival.expect("at once").id, id);
        }
    }
    receiver.until_requests(4, SOON).await;
    world.insert(("order", "worse"), "Bad", "{}").await;
    receiver.until_requests(5, SOON).await;
    let taken = receiver.taken();
    assert_eq!(taken.len(), 2);
    assert!(
        taken[0]["text"]
            .as_str()
            .unwrap()
            .contains("(order bad, Bad)"),
        "{taken:#?}"
    );
    assert!(
        taken[1]["text"]
            .as_str()
            .unwrap()
            .contains("(order worse, Bad)"),
        "{taken:#?}"
    );
    assert_eq!(relay.logged("S3cr3t"), 0);
    world.clean().await;
}
