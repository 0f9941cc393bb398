//! Dead events are listed, replayed and discarded exactly as asked: no other is touched, none is changed
//! twice, and a relay carries on with them at once.

use std::time::Duration;

use serde_json::Value;
use tokio_postgres::types::ToSql;

use crate::admin::{ANY_PORT, TOKEN, address, order};
use crate::support::{Proxy, Relay, Run, SOON, World, database_url};

const DONE: Option<i32> = Some(0);
const FAILED: Option<i32> = Some(1);
const MISUSED: Option<i32> = Some(2);

impl World {
    /// Writes one event as if it had been given up.
    async fn given_up(&self, aggregate: (&str, &str), event_type: &str) -> i64 {
        let sql = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, status, attempts, last_error)
                   VALUES ($1, $2, $3, '{}', 'dead', 5, 'unroutable: no queue is bound') RETURNING id";
        let values: [&(dyn ToSql + Sync); 3] = [&aggregate.0, &aggregate.1, &event_type];
        self.db.query_one(sql, &values).await.unwrap().get(0)
    }

    /// So many events of as many aggregates, all given up.
    async fn many_given_up(&self, count: i32) {
        let sql = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, status, attempts, last_error)
                   SELECT 'order', n::text, 'Placed', '{}', 'dead', 5, 'unroutable: no queue is bound'
                   FROM generate_series(1, $1::int) n";
        self.db.execute(sql, &[&count]).await.unwrap();
    }

    /// The whole table, for a comparison.
    async fn whole_table(&self) -> String {
        self.one("SELECT coalesce(string_agg((to_jsonb(o) - 'parked')::text, E'\\n' ORDER BY id), '') FROM outbox o")
            .await
    }

    async fn ids(&self, condition: &str) -> Vec<i64> {
        self.one(&format!(
            "SELECT coalesce(array_agg(id ORDER BY id), '{{}}') FROM outbox WHERE {condition}"
        ))
        .await
    }

    async fn dead(&self, arguments: &[&str]) -> Run {
        self.command(&[], &[["dead"].as_slice(), arguments].concat())
            .await
    }

    /// Keeps each change of a status, by whom, and how long its statement had run by then.
    async fn audit(&self) {
        self.sql(
            "CREATE TABLE audit (id BIGINT, backend INT, took INTERVAL);
             CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 INSERT INTO audit VALUES (NEW.id, pg_backend_pid(), clock_timestamp() - statement_timestamp());
                 RETURN NULL;
             END $$;
             CREATE TRIGGER audit AFTER UPDATE OF status ON outbox FOR EACH ROW EXECUTE FUNCTION audit()",
        )
        .await;
        // The commands know the schema by their configuration only.
        let schema = &self.schema;
        self.sql(&format!(
            "ALTER FUNCTION audit() SET search_path = {schema}"
        ))
        .await;
    }
}

fn json(run: &Run) -> Value {
    serde_json::from_str(&run.stdout).unwrap_or_else(|_| panic!("{}\n{}", run.stdout, run.stderr))
}

fn listed(run: &Run) -> Vec<i64> {
    let events = json(run)["events"].as_array().unwrap().clone();
    events
        .iter()
        .map(|event| event["id"].as_i64().unwrap())
        .collect()
}

#[track_caller]
fn assert_code(run: &Run, code: Option<i32>) {
    assert_eq!(run.status.code(), code, "{}\n{}", run.stdout, run.stderr);
}

/// Events of two types, two aggregates, two event types, two reasons and two ages, dead and not.
async fn mixed(world: &World) {
    world
        .sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, status, attempts, last_error, created_at)
             SELECT t, a, e, '{}', s, 5, r || ': because', now() - age
             FROM unnest(ARRAY['order', 'invoice']) t, unnest(ARRAY['1', '2']) a, unnest(ARRAY['Placed', 'Paid']) e,
                  unnest(ARRAY['dead', 'pending', 'published', 'discarded']) s,
                  unnest(ARRAY['unroutable', 'too_large']) r,
                  unnest(ARRAY[interval '3 hours', interval '0']) age",
        )
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_conditions_that_are_given_must_hold_and_a_dry_run_changes_nothing() {
    let world = World::new().await;
    mixed(&world).await;
    let some: Vec<i64> = world.ids("id % 3 = 0").await;
    let names: Vec<String> = some.iter().map(i64::to_string).collect();
    let (by_commas, in_sql) = (names.join(","), format!("id IN ({})", names.join(", ")));
    let conditions: &[(&[&str], &str)] = &[
        (&["--id", &by_commas], &in_sql),
        (&["--aggregate-type", "order"], "aggregate_type = 'order'"),
        (&["--aggregate-id", "2"], "aggregate_id = '2'"),
        (&["--event-type", "Paid"], "event_type = 'Paid'"),
        (&["--reason", "too_large"], "last_error LIKE 'too_large:%'"),
        (
            &["--older-than", "2h"],
            "created_at < now() - interval '2 hours'",
        ),
        (
            &["--newer-than", "2h"],
            "created_at > now() - interval '2 hours'",
        ),
    ];
    let before = world.whole_table().await;
    // Each by itself, each with the next one, and all but one of the two ages together.
    let mut sets: Vec<Vec<usize>> = (0..conditions.len())
        .flat_map(|one| [vec![one], vec![one, (one + 1) % conditions.len()]])
        .collect();
    sets.push((0..6).collect());
    for set in sets {
        let arguments: Vec<&str> = set
            .iter()
            .flat_map(|one| conditions[*one].0)
            .copied()
            .collect();
        let condition: Vec<&str> = set.iter().map(|one| conditions[*one].1).collect();
        let expected = world
            .ids(&format!("status = 'dead' AND {}", condition.join(" AND ")))
            .await;
        let run = world
            .dead(&[&["list", "--json"], arguments.as_slice()].concat())
            .await;
        assert_code(&run, DONE);
        assert_eq!(listed(&run), expected, "{arguments:?}");
        assert_eq!(json(&run)["matched"], expected.len(), "{arguments:?}");
        let run = world
            .dead(&[&["replay", "--dry-run", "--json"], arguments.as_slice()].concat())
            .await;
        assert_code(&run, if expected.is_empty() { FAILED } else { DONE });
        let report = json(&run);
        assert_eq!(report["dry_run"], true);
        assert_eq!(report["would_change"], expected.len(), "{arguments:?}");
        assert_eq!(report["changed"], 0);
    }
    let run = world
        .dead(&["discard", "--all", "--dry-run", "--limit", "3"])
        .await;
    assert_eq!(run.stdout, "3 of 32 dead event(s) would be discarded");
    assert_eq!(world.whole_table().await, before);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_takes_the_oldest() {
    let world = World::new().await;
    world.many_given_up(6).await;
    let run = world.dead(&["list", "--json", "--limit", "2"]).await;
    assert_eq!(
        (listed(&run), &json(&run)["matched"]),
        (vec![1, 2], &6.into())
    );
    let run = world
        .dead(&["discard", "--all", "--limit", "2", "--json"])
        .await;
    assert_code(&run, DONE);
    let report = json(&run);
    assert_eq!(
        (&report["matched"], &report["changed"]),
        (&6.into(), &2.into())
    );
    assert_eq!(world.ids("status = 'discarded'").await, [1, 2]);
    let run = world
        .dead(&["replay", "--aggregate-type", "order", "--limit", "3"])
        .await;
    assert_eq!(run.stdout, "replayed 3 of 4 dead event(s)");
    assert_eq!(world.ids("status = 'pending'").await, [3, 4, 5]);
    assert_code(
        &world.dead(&["replay", "--all", "--limit", "0"]).await,
        MISUSED,
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_values_match_exactly_or_are_refused() {
    let world = World::new().await;
    world.given_up(("order", "1"), "Placed").await;
    let before = world.whole_table().await;
    for command in ["replay", "discard"] {
        for (id, code) in [
            ("0", FAILED),
            ("-1", FAILED),
            ("99", FAILED),
            ("9223372036854775807", FAILED),
            ("9223372036854775808", MISUSED),
            ("1 OR 1=1", MISUSED),
            ("", MISUSED),
            ("1,", MISUSED),
            ("1.0", MISUSED),
        ] {
            let run = world.dead(&[command, "--id", id]).await;
            assert_code(&run, code);
            let said = if code == FAILED {
                format!("there is no event {id}")
            } else {
                "--id".to_owned()
            };
            assert!(run.stderr.contains(&said), "{id}: {}", run.stderr);
        }
        for other in ["", "%", "order ", "ORDER", "order' OR '1'='1"] {
            let run = world.dead(&[command, "--aggregate-type", other]).await;
            assert_code(&run, FAILED);
            assert!(
                run.stderr.contains("no dead event matches"),
                "{}",
                run.stderr
            );
        }
        for age in ["-1h", "soon", ""] {
            assert_code(&world.dead(&[command, "--older-than", age]).await, MISUSED);
        }
        // Longer than the calendar.
        let run = world.dead(&[command, "--older-than", "90000years"]).await;
        assert_code(&run, FAILED);
        assert!(
            run.stderr.contains("no dead event matches"),
            "{}",
            run.stderr
        );
    }
    assert_eq!(world.whole_table().await, before);

    for odd in [
        "--all",
        "-1",
        "it's \"1\"",
        "a\nb",
        "1 OR 1=1",
        "",
        "\\",
        "é\u{202e}",
    ] {
        let id = world.given_up(("--all", odd), "--json").await;
        let only = [
            "replay",
            "--aggregate-type",
            "--all",
            "--aggregate-id",
            odd,
            "--event-type",
            "--json",
        ];
        let run = world.dead(&only).await;
        assert_code(&run, DONE);
        assert_eq!(run.stdout, "replayed 1 of 1 dead event(s)", "{odd:?}");
        assert_eq!(world.ids("status = 'pending'").await, [id], "{odd:?}");
        world
            .sql("DELETE FROM outbox WHERE status = 'pending'")
            .await;
        let id = world.given_up(("order", odd), "Placed").await;
        let run = world.dead(&["list", "--aggregate-id", odd]).await;
        assert_eq!(
            run.stdout.lines().count(),
            2,
            "one line an event: {}",
            run.stdout
        );
        let run = world
            .dead(&["show", "--id", &id.to_string(), "--json"])
            .await;
        assert_eq!(json(&run)["aggregate_id"], odd);
    }
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_order_without_a_condition_never_means_all_unless_it_says_so() {
    let world = World::new().await;
    world.many_given_up(3).await;
    let before = world.whole_table().await;
    for command in ["replay", "discard"] {
        let run = world.dead(&[command]).await;
        assert_code(&run, MISUSED);
        assert!(
            run.stderr.contains("--all for every dead event"),
            "{}",
            run.stderr
        );
        assert_code(&world.dead(&[command, "--limit", "1"]).await, MISUSED);
        assert_code(&world.dead(&[command, "--dry-run"]).await, MISUSED);
        for condition in [
            ["--id", "1"],
            ["--aggregate-id", "1"],
            ["--older-than", "0s"],
            ["--reason", ""],
        ] {
            let run = world.dead(&[[command, "--all"], condition].concat()).await;
            assert_code(&run, MISUSED);
            assert!(run.stderr.contains("--all contradicts"), "{}", run.stderr);
        }
    }
    assert_eq!(world.whole_table().await, before);
    let run = world.dead(&["replay", "--all"]).await;
    assert_code(&run, DONE);
    assert_eq!(run.stdout, "replayed 3 of 3 dead event(s)");
    assert_eq!(world.count("pending").await, 3);
    // Nothing is left that could be.
    let run = world.dead(&["replay", "--all"]).await;
    assert_code(&run, FAILED);
    assert!(
        run.stderr.contains("no dead event matches"),
        "{}",
        run.stderr
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_dead_events_are_touched_and_of_others_it_is_said_what_they_are() {
    let world = World::new().await;
    mixed(&world).await;
    let others = "SELECT string_agg((to_jsonb(o) - 'parked')::text, E'\\n' ORDER BY id) FROM outbox o WHERE id IN
                  (SELECT id FROM others)";
    world
        .sql("CREATE TABLE others AS SELECT id FROM outbox WHERE status <> 'dead'")
        .await;
    let before: String = world.one(others).await;
    let id = async |status: &str| world.ids(&format!("status = '{status}'")).await[0];
    let (dead, pending, published, discarded) = (
        id("dead").await,
        id("pending").await,
        id("published").await,
        id("discarded").await,
    );
    let ids = format!("{pending},{published},{discarded},99999");
    for command in ["replay", "discard"] {
        let run = world.dead(&[command, "--id", &ids]).await;
        assert_code(&run, FAILED);
        for said in [
            "no dead event matches".to_owned(),
            format!("event {pending} is pending, not dead: left as it is"),
            format!("event {published} is published, not dead: left as it is"),
            format!("event {discarded} is discarded, not dead: left as it is"),
            "there is no event 99999".to_owned(),
        ] {
            assert!(run.stderr.contains(&said), "{said}: {}", run.stderr);
        }
    }
    // One that is dead, but not for this reason, is not said to be anything else.
    let run = world
        .dead(&["replay", "--id", &dead.to_string(), "--reason", "nacked"])
        .await;
    assert_code(&run, FAILED);
    assert!(
        run.stderr.contains("do not fulfil the other conditions"),
        "{}",
        run.stderr
    );
    assert!(!run.stderr.contains("not dead"), "{}", run.stderr);
    // Named beside a dead one: that one is replayed, and the others are told of all the same.
    let run = world
        .dead(&["replay", "--json", "--id", &dead.to_string(), "--id", &ids])
        .await;
    assert_code(&run, DONE);
    let report = json(&run);
    assert_eq!(
        (&report["changed"], &report["matched"]),
        (&1.into(), &1.into())
    );
    let not_dead = report["not_dead"].as_array().unwrap();
    assert_eq!(not_dead.len(), 4, "{report}");
    assert_eq!(
        not_dead[3],
        serde_json::json!({"id": 99999, "status": null})
    );
    assert!(
        run.stderr
            .contains(&format!("event {published} is published")),
        "{}",
        run.stderr
    );
    // Every dead one there is, and still none of the others.
    assert_code(&world.dead(&["discard", "--all"]).await, DONE);
    assert_eq!(world.one::<String>(others).await, before);
    assert_eq!(world.count("dead").await, 0);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replays_at_once_together_replay_each_event_once_in_short_steps() {
    let world = World::new().await;
    world.many_given_up(5_000).await;
    world.audit().await;
    let arguments = ["dead", "replay", "--all", "--json"];
    let replays: Vec<Relay> = (0..3)
        .map(|_| Relay::start(&world.environment(), &[], &arguments))
        .collect();
    let mut changed = 0;
    for replay in replays {
        let run = replay.finished(SOON).await;
        // One that was late to all of them has replayed none, and says so.
        let report = json(&run);
        let its = report["changed"].as_i64().unwrap();
        assert_code(&run, if its == 0 { FAILED } else { DONE });
        changed += its;
    }
    assert_eq!(changed, 5_000);
    assert_eq!(world.count("pending").await, 5_000);
    let (times, ids) = (
        world.one::<i64>("SELECT count(*) FROM audit").await,
        world
            .one::<i64>("SELECT count(DISTINCT id) FROM audit")
            .await,
    );
    assert_eq!((times, ids), (5_000, 5_000));
    assert!(
        world
            .one::<i64>("SELECT count(DISTINCT xmin::text) FROM outbox")
            .await
            >= 5
    );
    let longest: f64 = world
        .one("SELECT extract(epoch FROM max(took))::float8 FROM audit")
        .await;
    assert!(longest < 1.0, "a statement took {longest} s");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_somebody_holds_locked_is_passed_over_and_said() {
    let world = World::new().await;
    world.many_given_up(4).await;
    let operator = world.client().await;
    operator
        .batch_execute("BEGIN; SELECT FROM outbox WHERE id = 2 FOR UPDATE")
        .await
        .unwrap();
    let run = world.dead(&["replay", "--all", "--limit", "3"]).await;
    assert_code(&run, DONE);
    assert_eq!(run.stdout, "replayed 3 of 4 dead event(s)");
    assert!(
        run.stderr
            .contains("1 dead event(s) left as they are: locked"),
        "{}",
        run.stderr
    );
    assert_eq!(world.ids("status = 'pending'").await, [1, 3, 4]);
    // Nothing but locked ones: that is not the same as nothing that matches.
    let run = world.dead(&["discard", "--id", "2", "--json"]).await;
    assert_code(&run, FAILED);
    let report = json(&run);
    assert_eq!(
        (&report["matched"], &report["passed_over"]),
        (&1.into(), &1.into())
    );
    assert!(
        !run.stderr.contains("no dead event matches"),
        "{}",
        run.stderr
    );
    operator.batch_execute("ROLLBACK").await.unwrap();
    assert_code(&world.dead(&["discard", "--id", "2"]).await, DONE);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_whose_answer_is_lost_does_not_go_beyond_the_limit() {
    let world = World::new().await;
    world.many_given_up(5).await;
    world
        .sql(
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN PERFORM pg_sleep(1); RETURN NULL; END $$;
             CREATE TRIGGER slow AFTER UPDATE ON outbox FOR EACH STATEMENT EXECUTE FUNCTION slow()",
        )
        .await;
    let proxy = Proxy::new(&database_url()).await;
    let through = proxy.through(&database_url());
    let arguments = ["dead", "replay", "--all", "--limit", "2"];
    let replay = Relay::start(
        &world.environment(),
        &[("DATABASE_URL", &through)],
        &arguments,
    );
    let at_work = format!(
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND query LIKE '%{}%')",
        world.schema
    );
    world.until(&at_work, SOON).await;
    proxy.mute(true);
    world
        .until(
            "SELECT count(*) = 2 FROM outbox WHERE status = 'pending'",
            SOON,
        )
        .await;
    proxy.cut();
    proxy.mute(false);
    let run = replay.finished(SOON).await;
    assert_code(&run, FAILED);
    assert!(
        run.stderr.contains("what was done before that stays done"),
        "{}",
        run.stderr
    );
    assert_eq!(world.ids("status = 'pending'").await, [1, 2]);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn show_says_all_of_an_event() {
    let world = World::new().await;
    let id = world.given_up(("order", "a\nb"), "Placed").await;
    world
        .sql(
            "UPDATE outbox SET payload = '{\"text\": \"marker\"}', headers = '{\"tenant\": \"x\"}'",
        )
        .await;
    world.insert(("order", "a\nb"), "Paid", "{}").await;
    world.insert(("order", "other"), "Paid", "{}").await;
    let id = id.to_string();
    let run = world.dead(&["show", "--id", &id]).await;
    assert_code(&run, DONE);
    for said in [
        "status         dead",
        "aggregate id   a\\nb",
        "attempts       5",
        "last error     unroutable: no queue is bound",
        "holds back     1 later event(s) of its aggregate",
        "payload        18 bytes",
        "{\"text\": \"marker\"}",
        "{\"tenant\": \"x\"}",
    ] {
        assert!(run.stdout.contains(said), "{said}: {}", run.stdout);
    }
    let event = json(&world.dead(&["show", "--id", &id, "--json"]).await);
    assert_eq!(event["aggregate_id"], "a\nb");
    assert_eq!(event["payload"], "{\"text\": \"marker\"}");
    assert_eq!(
        (&event["held_back"], &event["holds"]),
        (&1.into(), &true.into())
    );
    let run = world.dead(&["show", "--id", "77"]).await;
    assert_code(&run, FAILED);
    assert!(
        run.stderr.contains("there is no event 77 in "),
        "{}",
        run.stderr
    );
    world.clean().await;
}

/// Nothing is routable, each event has one attempt, and the tick is far away.
async fn hopeless_relay(world: &World) -> Relay {
    world.unbind("#").await;
    let settings = [
        ANY_PORT,
        TOKEN,
        ("retry.max_attempts", "1"),
        ("relay.tick", "10m"),
    ];
    world.ready_relay(&settings).await
}

async fn until_dead(world: &World, count: i64) {
    let dead = format!("SELECT count(*) = {count} FROM outbox WHERE status = 'dead'");
    world.until(&dead, SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_leaves_within_a_second_however_it_is_ordered() {
    let mut world = World::new().await;
    let relay = hopeless_relay(&world).await;
    let address = address(&relay).await;
    for way in ["command", "http", "sql"] {
        world.unbind("#").await;
        let id = world.insert(("order", "1"), "Placed", "{}").await;
        until_dead(&world, 1).await;
        world.bind("#").await;
        match way {
            "command" => assert_code(
                &world.dead(&["replay", "--id", &id.to_string()]).await,
                DONE,
            ),
            "http" => {
                let body = format!("{{\"ids\": [{id}]}}");
                assert_eq!(order(&address, "/dead/replay", &body).await.0, 200);
            }
            _ => {
                let update =
                    "UPDATE outbox SET status = 'pending', attempts = 0, next_attempt_at = now()";
                world.sql(&format!("{update} WHERE id = {id}")).await;
            }
        }
        let arrival = world.next_arrival(Duration::from_secs(1)).await;
        assert_eq!(arrival.map(|arrival| arrival.id), Some(id), "{way}");
        world.until_published(SOON).await;
        assert_eq!(
            world
                .one::<i32>(&format!("SELECT attempts FROM outbox WHERE id = {id}"))
                .await,
            0
        );
    }
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_sends_what_was_held_back_in_order_and_a_discard_frees_it() {
    let mut world = World::new().await;
    let _relay = hopeless_relay(&world).await;
    for aggregate in ["replayed", "discarded"] {
        world.insert(("order", aggregate), "First", "{}").await;
    }
    until_dead(&world, 2).await;
    for event_type in ["Second", "Third"] {
        for aggregate in ["replayed", "discarded"] {
            world.insert(("order", aggregate), event_type, "{}").await;
        }
    }
    world.bind("#").await;
    assert!(
        world.rest(Duration::from_millis(500)).await.is_empty(),
        "held back"
    );
    assert_code(
        &world.dead(&["replay", "--aggregate-id", "replayed"]).await,
        DONE,
    );
    let ids = |arrivals: Vec<crate::support::Arrival>| -> Vec<i64> {
        arrivals.iter().map(|arrival| arrival.id).collect()
    };
    assert_eq!(ids(world.arrivals(3, SOON).await), [1, 3, 5]);
    assert_code(
        &world
            .dead(&["discard", "--aggregate-id", "discarded"])
            .await,
        DONE,
    );
    assert_eq!(ids(world.arrivals(2, SOON).await), [4, 6]);
    // It does not come back, whoever asks for it.
    assert_code(&world.dead(&["replay", "--id", "2"]).await, FAILED);
    assert_code(&world.dead(&["replay", "--all"]).await, FAILED);
    world.until_published(SOON).await;
    assert_eq!(world.ids("status = 'discarded'").await, [2]);
    assert!(world.rest(Duration::from_millis(500)).await.is_empty());
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_skip_later_events_go_on_and_a_replay_comes_late_and_says_so() {
    let mut world = World::new().await;
    world.unbind("#").await;
    world.bind("order.Good").await;
    let file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    let routes = "[[routes]]\naggregate_type = \"order\"\non_dead = \"skip\"\n";
    std::fs::write(file.path(), routes).unwrap();
    let path = file.path().to_str().unwrap();
    let settings = [("retry.max_attempts", "1"), ("relay.tick", "10m")];
    let relay = Relay::start(&world.environment(), &settings, &["--config", path, "run"]);
    world.until_owned(&relay).await;
    let bad = world.insert(("order", "1"), "Bad", "{}").await;
    let good = world.insert(("order", "1"), "Good", "{}").await;
    let arrival = world.next_arrival(SOON).await.unwrap();
    assert_eq!(arrival.id, good);
    assert!(arrival.header("replayed").is_none());
    until_dead(&world, 1).await;
    let event = json(
        &world
            .dead(&["show", "--json", "--id", &bad.to_string()])
            .await,
    );
    assert_eq!(event["holds"], false);
    world.bind("order.Bad").await;
    assert_code(
        &world.dead(&["replay", "--id", &bad.to_string()]).await,
        DONE,
    );
    let arrival = world.next_arrival(Duration::from_secs(1)).await.unwrap();
    assert_eq!(arrival.id, bad);
    let replayed = arrival.header("replayed");
    assert!(
        matches!(replayed, Some(lapin::types::AMQPValue::Boolean(true))),
        "{replayed:?}"
    );
    world.until_published(SOON).await;
    world.clean().await;
}
