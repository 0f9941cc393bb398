//! Replay uses today's schema and yesterday's bytes; each event once, oldest first, and a dry run changes
//! nothing.

use serde_json::Value;

use crate::intake::effects;
use crate::support::intake::{order_event, orders};
use crate::support::{Relay, Run, SOON, World};

impl World {
    async fn intake_command(&self, config: &str, arguments: &[&str]) -> Run {
        let named: Vec<&str> = ["intake"].iter().chain(arguments).copied().collect();
        self.with_config(config, &[], &named).finished(SOON).await
    }

    async fn replayed(&self, config: &str, arguments: &[&str]) -> (Option<i32>, Value) {
        let named: Vec<&str> = ["replay", "--json"]
            .iter()
            .chain(arguments)
            .copied()
            .collect();
        let run = self.intake_command(config, &named).await;
        let report = serde_json::from_str(&run.stdout)
            .unwrap_or_else(|_| panic!("{}\n{}", run.stdout, run.stderr));
        (run.status.code(), report)
    }

    /// Everything of the intake's, and of its users'.
    async fn dump(&self) -> String {
        self.one(
            "SELECT concat((SELECT string_agg(e::text, ';' ORDER BY e::text) FROM outbox_webhook_events e), '|',
                           (SELECT string_agg(d::text, ';' ORDER BY d::text) FROM outbox_dead_letter d), '|',
                           (SELECT string_agg(a::text, ';' ORDER BY a::text) FROM outbox_intake_audit a), '|',
                           (SELECT string_agg(o::text, ';' ORDER BY o::text) FROM orders o))",
        )
        .await
    }
}

fn ids(report: &Value) -> Vec<&str> {
    let events = report["events"].as_array().unwrap();
    events
        .iter()
        .map(|event| event["event_id"].as_str().unwrap())
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_dead_letters_are_replayed_in_order_once_their_cause_is_mended() {
    let world = World::new().await;
    let (_relay, sender) = world.orders_intake(&[]).await;
    // By a schema that is too narrow.
    for number in 0..10 {
        sender
            .post(
                &format!("m{number}"),
                &order_event("paid", &format!("ord_10{number}"), 5),
            )
            .await
            .assert(200, "dead_lettered");
        // One failed_at each, in this order.
        world.sql("SELECT pg_sleep(0.002)").await;
    }
    for number in 0..10 {
        sender
            .post(
                &format!("c{number}"),
                &order_event("created", &format!("ord_10{number}"), 5),
            )
            .await
            .assert(200, "processed");
    }
    let before = world.dump().await;
    let (code, report) = world.replayed(&orders(), &["--limit", "3"]).await;
    assert_eq!(
        (code, &report["outcome"]),
        (Some(0), &"replay_dry_run".into())
    );
    assert_eq!(ids(&report), ["m0", "m1", "m2"]);
    assert_eq!(world.dump().await, before);
    let (code, report) = world
        .replayed(&orders(), &["--apply", "--limit", "3"])
        .await;
    assert_eq!((code, &report["outcome"]), (Some(0), &"replayed".into()));
    assert_eq!(ids(&report), ["m0", "m1", "m2"]);
    // Two at once share the rest, and no event is in both.
    let arguments = ["intake", "replay", "--json", "--apply"];
    let (one, other) = tokio::join!(
        world.with_config(&orders(), &[], &arguments).finished(SOON),
        world.with_config(&orders(), &[], &arguments).finished(SOON),
    );
    let reports: Vec<Value> = [&one, &other]
        .map(|run| serde_json::from_str(&run.stdout).unwrap())
        .into();
    let mut both: Vec<_> = reports.iter().flat_map(ids).collect();
    both.sort_unstable();
    assert_eq!(both, ["m3", "m4", "m5", "m6", "m7", "m8", "m9"]);
    let paid: i64 = world
        .one("SELECT count(*) FROM orders WHERE status = 'paid'")
        .await;
    assert_eq!(paid, 10);
    let states: String = world
        .one("SELECT string_agg(DISTINCT format('%s %s', status, attempts), ', ') FROM outbox_dead_letter")
        .await;
    assert_eq!(states, "resolved 1");
    // Nothing is left, and the sender's own retry is a repeat.
    let (_, report) = world
        .replayed(&orders(), &["--apply", "--include-parked"])
        .await;
    assert_eq!(report["candidates"], 0);
    let answer = sender.post("m0", &order_event("paid", "ord_100", 5)).await;
    answer.assert(200, "duplicate");
    assert_eq!(answer.body["stored_status"], "processed");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_fails_again_is_parked_and_replayed_only_if_asked_for() {
    let world = World::new().await;
    let (_relay, sender) = world.orders_intake(&[]).await;
    sender
        .post("m1", &order_event("paid", "ord_100", 5))
        .await
        .assert(200, "dead_lettered");
    for (attempts, status) in [(2, "dead_lettered"), (3, "parked")] {
        let (code, report) = world.replayed(&orders(), &["--apply"]).await;
        assert_eq!(code, Some(1));
        let event = &report["events"][0];
        assert_eq!(
            (&event["attempts"], &event["status"]),
            (&attempts.into(), &status.into())
        );
    }
    let (_, report) = world.replayed(&orders(), &["--apply"]).await;
    assert_eq!(report["candidates"], 0);
    let again = sender.post("m1", &order_event("paid", "ord_100", 5)).await;
    again.assert(200, "duplicate");
    assert_eq!(
        (&again.body["stored_status"], &again.body["attempts"]),
        (&"parked".into(), &3.into())
    );
    sender
        .post("m2", &order_event("created", "ord_100", 5))
        .await
        .assert(200, "processed");
    let (code, report) = world
        .replayed(&orders(), &["--apply", "--include-parked"])
        .await;
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(report["events"][0]["dlq_status"], "resolved");
    assert_eq!(
        world.one::<String>("SELECT status FROM orders").await,
        "paid"
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_reads_todays_schema_and_the_bytes_that_were_stored() {
    let world = World::new().await;
    world.sql("CREATE TABLE seen (x TEXT)").await;
    let config = |schema: &str| {
        format!(
            r#"
[intake]
listen = "127.0.0.1:0"
[[intake.source]]
name = "plain"
schema = '{schema}'
[[intake.source.route]]
sql = "INSERT INTO seen VALUES (:x)"
parameters = {{ x = "/x" }}
"#
        )
    };
    let narrow = config(r#"{"type":"object","properties":{"x":{"type":"integer"}}}"#);
    let wide = config(r#"{"type":"object"}"#);
    let (_relay, sender) = world.intake(&narrow, "plain", &[]).await;
    sender
        .post("m1", r#"{"x": "a" }"#)
        .await
        .assert(200, "dead_lettered");
    let (_, report) = world.replayed(&narrow, &[]).await;
    let would = report["events"][0]["would_fail"].as_str().unwrap();
    assert!(would.starts_with("schema_invalid - #/x"), "{would}");
    let (_, report) = world.replayed(&wide, &[]).await;
    assert!(report["events"][0].get("would_fail").is_none(), "{report}");
    let (code, _) = world.replayed(&wide, &["--apply"]).await;
    assert_eq!(code, Some(0));
    assert_eq!(world.one::<String>("SELECT x FROM seen").await, "a");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_older_version_left_behind_is_taken_up() {
    let world = World::new().await;
    effects(&world).await;
    let left = |id: &str, status: &str, age: &str| {
        format!(
            "INSERT INTO outbox_webhook_events (source, event_id, payload, payload_sha256, status, received_at)
             VALUES ('plain', '{id}', '{{}}', sha256('{{}}'), '{status}', now() - interval '{age}')"
        )
    };
    for (id, status, age) in [
        ("old_received", "received", "11 minutes"),
        ("old_failed", "failed", "11 minutes"),
        ("retried", "received", "6 minutes"),
        ("young", "received", "1 minute"),
    ] {
        world.sql(&left(id, status, age)).await;
    }
    // Without anybody's doing.
    let (_relay, sender) = world.intake(&crate::intake::plain(), "plain", &[]).await;
    world
        .until(
            "SELECT count(*) = 2 FROM outbox_webhook_events WHERE event_id LIKE 'old%' AND status = 'processed'",
            SOON,
        )
        .await;
    // By the sender's retry after five minutes, and not before.
    sender.post("retried", "{}").await.assert(200, "processed");
    let young = sender.post("young", "{}").await;
    young.assert(200, "duplicate");
    assert_eq!(young.body["stored_status"], "received");
    sender.post("retried", "{}").await.assert(200, "duplicate");
    let effects: String = world
        .one("SELECT string_agg(event_id, ' ' ORDER BY event_id) FROM effects")
        .await;
    assert_eq!(effects, "old_failed old_received retried");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_that_died_gives_its_events_back_after_ten_minutes() {
    let world = World::new().await;
    let (_relay, sender) = world.orders_intake(&[]).await;
    sender
        .post("m1", &order_event("paid", "ord_100", 5))
        .await
        .assert(200, "dead_lettered");
    let claim = |age: &str| {
        format!(
            "UPDATE outbox_dead_letter SET claimed_by = 'dead', claimed_at = now() - interval '{age}'"
        )
    };
    world.sql(&claim("9 minutes")).await;
    let (_, report) = world.replayed(&orders(), &["--apply"]).await;
    assert_eq!(report["candidates"], 0);
    world.sql(&claim("11 minutes")).await;
    let (_, report) = world.replayed(&orders(), &["--apply"]).await;
    assert_eq!(ids(&report), ["m1"]);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_letters_are_listed_shown_and_given_up_from_the_shell() {
    let world = World::new().await;
    let (_relay, sender) = world.orders_intake(&[]).await;
    sender
        .post("m1", &order_event("paid", "ord_100", 5))
        .await
        .assert(200, "dead_lettered");
    sender
        .post("m2", &order_event("created", "x", 5))
        .await
        .assert(200, "dead_lettered");
    let run = |arguments: &'static [&'static str]| {
        let (world, config) = (&world, orders());
        async move { world.intake_command(&config, arguments).await }
    };
    let list = run(&["dead", "list", "--reason", "schema_invalid"]).await;
    assert!(
        list.stdout.contains("m2") && !list.stdout.contains("m1"),
        "{}",
        list.stdout
    );
    assert!(
        list.stdout.ends_with("1 of 1 dead letter(s)"),
        "{}",
        list.stdout
    );
    let show = run(&["dead", "show", "--id", "m1"]).await;
    assert!(
        show.stdout.contains(&order_event("paid", "ord_100", 5)),
        "{}",
        show.stdout
    );
    assert_eq!(
        run(&["dead", "show", "--id", "none"]).await.status.code(),
        Some(1)
    );
    assert_eq!(run(&["dead", "discard"]).await.status.code(), Some(2));
    let dry = run(&["dead", "discard", "--id", "m1", "--dry-run"]).await;
    assert!(dry.stdout.contains("1 of 1"), "{}", dry.stdout);
    let done = run(&["dead", "discard", "--id", "m1"]).await;
    assert_eq!(done.status.code(), Some(0), "{}", done.stderr);
    assert_eq!(
        run(&["dead", "discard", "--id", "m1"]).await.status.code(),
        Some(1)
    );
    let (_, report) = world
        .replayed(&orders(), &["--apply", "--include-parked", "--id", "m1"])
        .await;
    assert_eq!(report["candidates"], 0);
    // It is still known.
    let again = sender.post("m1", &order_event("paid", "ord_100", 5)).await;
    again.assert(200, "duplicate");
    assert_eq!(again.body["stored_status"], "discarded");
    for limit in ["0", "501", "-1"] {
        let refused = world
            .intake_command(&orders(), &["replay", &format!("--limit={limit}")])
            .await;
        assert_eq!(refused.status.code(), Some(2), "{limit}");
    }
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_are_forgotten_after_their_time_but_never_open_dead_letters() {
    let world = World::new().await;
    effects(&world).await;
    let left = |id: &str, status: &str, days: u32| {
        format!(
            "INSERT INTO outbox_webhook_events (source, event_id, payload, payload_sha256, status, received_at)
             VALUES ('plain', '{id}', '{{}}', sha256('{{}}'), '{status}', now() - interval '{days} days')"
        )
    };
    for (id, status, days) in [
        ("done", "processed", 4),
        ("recent", "processed", 2),
        ("dead", "dead_lettered", 40),
        ("parked", "parked", 40),
        ("given_up", "discarded", 40),
    ] {
        world.sql(&left(id, status, days)).await;
    }
    world
        .sql(
            "INSERT INTO outbox_dead_letter (source, event_id, reason_class, last_error, attempts, status, first_failed_at, last_failed_at)
             SELECT 'plain', event_id, 'x', 'x', 1, CASE event_id WHEN 'done' THEN 'resolved' WHEN 'parked' THEN 'parked' ELSE 'retryable' END, now(), now()
             FROM outbox_webhook_events WHERE event_id IN ('done', 'dead', 'parked');
             INSERT INTO outbox_intake_audit (execution_id, mode, outcome, source, event_id, finished_at)
             SELECT 'e', 'intake', 'processed', 'plain', 'done', now() - interval '4 days'",
        )
        .await;
    let (_relay, _sender): (Relay, _) = world.intake(&crate::intake::plain(), "plain", &[]).await;
    world
        .until("SELECT NOT EXISTS (SELECT FROM outbox_intake_audit)", SOON)
        .await;
    let kept: String = world
        .one("SELECT string_agg(event_id, ' ' ORDER BY event_id) FROM outbox_webhook_events")
        .await;
    assert_eq!(kept, "dead parked recent");
    let letters: i64 = world.one("SELECT count(*) FROM outbox_dead_letter").await;
    assert_eq!(letters, 2);
    world.clean().await;
}
