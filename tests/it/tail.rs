//! Whoever watches sees what becomes of each event, and is never in the way; so does whoever reads the log.

use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::admin::{ANY_PORT, address};
use crate::support::{Proxy, Relay, SOON, World, amqp_url};

/// What a relay does with these routes: orders go to the usual exchange, whatever else to a missing one.
const ROUTES: &str = "[[routes]]\naggregate_type = \"order\"\n\
                      [[routes]]\ndestination = \"no-such-exchange\"\n";

/// Starts `bellwire tail` of this relay, and waits until it watches.
async fn tail(world: &World, relays: &[&str], arguments: &[&str]) -> Relay {
    let urls: Vec<String> = relays
        .iter()
        .map(|place| format!("http://{place}"))
        .collect();
    let mut all = vec!["tail"];
    for url in &urls {
        all.extend(["--url", url]);
    }
    all.extend(arguments);
    let tail = Relay::start(&world.environment(), &[], &all);
    for place in relays {
        tail.until_logged(&format!("watching {place}"), SOON).await;
    }
    tail
}

/// Id and outcome of each line of `tail --json`.
fn outcomes(lines: &[String]) -> Vec<(i64, String)> {
    let lines = lines.iter().map(|line| {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
        let outcome = line["outcome"].as_str().unwrap().to_owned();
        (line["id"].as_i64().unwrap(), outcome)
    });
    lines.collect()
}

fn pair(id: i64, outcome: &str) -> (i64, String) {
    (id, outcome.to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_sees_what_becomes_of_each_event() {
    let world = World::new().await;
    world.unbind("#").await;
    world.bind("order.Good").await;
    let file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    std::fs::write(file.path(), ROUTES).unwrap();
    let settings = [
        ANY_PORT,
        ("retry.max_attempts", "2"),
        ("retry.backoff", "100ms"),
        ("relay.partitions", "1"),
    ];
    let path = file.path().to_str().unwrap();
    let relay = Relay::start(&world.environment(), &settings, &["--config", path, "run"]);
    world.until_owned(&relay).await;
    let place = address(&relay).await;
    let all = tail(&world, &[&place], &["--json"]).await;
    let text = tail(&world, &[&place], &["--aggregate-id", "a\nb"]).await;
    let failures = tail(
        &world,
        &[&place],
        &[
            "--json",
            "--outcome",
            "failed,dead-lettered",
            "--outcome",
            "waits",
        ],
    )
    .await;
    let good = tail(
        &world,
        &[&place],
        &[
            "--json",
            "--event-type",
            "Good",
            "--aggregate-type",
            "order",
        ],
    )
    .await;

    world
        .sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES
             ('order', '1', 'Good', '{}'),
             ('order', E'a\\nb', 'Bad', '{}'), ('order', E'a\\nb', 'Good', '{}'),
             ('invoice', '1', 'Good', '{}')",
        )
        .await;
    world
        .until(
            "SELECT EXISTS (SELECT FROM outbox WHERE status = 'dead')",
            SOON,
        )
        .await;
    let wanted = [
        pair(1, "published"),
        pair(2, "failed"),
        pair(3, "behind"),
        pair(2, "dead-lettered"),
        pair(4, "waits"),
    ];
    // Behind again or not, depending on when it was claimed.
    let mut count = wanted.len();
    let lines = loop {
        let lines = all.until_printed(count, SOON).await;
        let seen = outcomes(&lines);
        if wanted.iter().all(|outcome| seen.contains(outcome)) {
            break lines;
        }
        count = lines.len() + 1;
    };
    let dead = lines
        .iter()
        .find(|line| line.contains("dead-lettered"))
        .unwrap();
    let dead: Value = serde_json::from_str(dead).unwrap();
    assert_eq!(dead["aggregate_id"], "a\nb");
    assert_eq!(
        (&dead["attempts"], &dead["result"]),
        (&2.into(), &"dead-lettered".into())
    );
    assert!(
        dead["error"].as_str().unwrap().starts_with("unroutable: "),
        "{dead}"
    );
    assert!(dead["at"].as_str().unwrap().ends_with('Z'), "{dead}");

    // Failed, behind, behind again or not, dead: one line each, whatever the aggregate is called.
    let lines = text.until_printed(3, SOON).await;
    for line in &lines {
        assert!(line.contains(" order a\\nb, "), "{lines:#?}");
    }
    assert!(
        lines
            .iter()
            .any(|line| line.contains(" 2 order a\\nb, Bad: failed attempt 1: unroutable: ")),
        "{lines:#?}"
    );
    let behind = " 3 order a\\nb, Good: waiting for an older event of the same aggregate";
    assert!(
        lines.iter().any(|line| line.ends_with(behind)),
        "{lines:#?}"
    );

    let seen = outcomes(&failures.until_printed(3, SOON).await);
    let wanted = [
        pair(2, "failed"),
        pair(2, "dead-lettered"),
        pair(4, "waits"),
    ];
    assert!(seen.iter().all(|line| wanted.contains(line)), "{seen:?}");
    for line in wanted {
        assert!(seen.contains(&line), "{seen:?}");
    }
    let seen = outcomes(&good.printed());
    assert!(seen.iter().all(|(id, _)| [1, 3].contains(id)), "{seen:?}");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_sees_what_was_not_sent_and_what_was_not_confirmed() {
    let mut world = World::new().await;
    let proxy = Proxy::new(&amqp_url()).await;
    let settings = [
        ANY_PORT,
        ("AMQP_URL", &proxy.through(&amqp_url())),
        ("relay.partitions", "1"),
        ("relay.window", "1"),
    ];
    let relay = world.ready_relay(&settings).await;
    let place = address(&relay).await;
    let first = world.warm().await + 1;
    let tail = tail(&world, &[&place], &["--json"]).await;
    proxy.mute(true);
    world.fill("order", 2, 1).await;
    world
        .until(
            "SELECT count(*) = 2 FROM outbox WHERE claimed_by IS NOT NULL",
            SOON,
        )
        .await;
    // One is out, the other one waits for the window.
    let arrived = world.next_arrival(SOON).await.unwrap().id;
    proxy.refuse(true);
    proxy.cut();
    let seen = outcomes(&tail.until_printed(2, SOON).await);
    let other = first + (first + 1) - arrived;
    assert!(seen.contains(&pair(arrived, "unconfirmed")), "{seen:?}");
    assert!(seen.contains(&pair(other, "breaker-open")), "{seen:?}");
    proxy.mute(false);
    proxy.refuse(false);
    let seen = outcomes(&tail.until_printed(4, SOON).await);
    for id in [first, first + 1] {
        assert!(seen.contains(&pair(id, "published")), "{seen:?}");
    }
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_relays_are_watched_and_one_that_went_away_again_when_it_is_back() {
    let world = World::new().await;
    let first = world.ready_relay(&[ANY_PORT]).await;
    let mut second = world.ready_relay(&[ANY_PORT]).await;
    let (place, other) = (address(&first).await, address(&second).await);
    world.until_shares(&[32, 32], SOON).await;
    let tail = tail(&world, &[&place, &other], &[]).await;
    world.fill("order", 40, 1).await;
    let lines = tail.until_printed(40, SOON).await;
    for place in [&place, &other] {
        assert!(
            lines
                .iter()
                .any(|line| line.starts_with(&format!("{place} "))),
            "{lines:#?}"
        );
    }
    for times in 1..=2 {
        second.terminate(SOON).await;
        second = world.ready_relay(&[("admin.listen", &other)]).await;
        let again = async {
            while tail.logged(&format!("watching {other}")) <= times {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(SOON, again)
            .await
            .expect("watched again");
        // However it saw the end, it says so each time.
        let ends = tail.log();
        let ends = ends
            .lines()
            .filter(|line| line.contains(&other) && line.contains("trying again"));
        assert!(ends.count() >= times, "{}", tail.log());
    }
    world.until_shares(&[32, 32], SOON).await;
    world.fill("order", 40, 1).await;
    let lines = tail.until_printed(80, SOON).await;
    assert!(
        lines[40..]
            .iter()
            .any(|line| line.starts_with(&format!("{other} "))),
        "{lines:#?}"
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_that_does_not_read_delays_nothing_and_is_told_what_it_missed() {
    let mut world = World::new().await;
    let relay = world.ready_relay(&[ANY_PORT]).await;
    let place = address(&relay).await;
    let mut deaf = TcpStream::connect(&place).await.unwrap();
    let request = format!("GET /tail HTTP/1.1\r\nHost: {place}\r\n\r\n");
    deaf.write_all(request.as_bytes()).await.unwrap();
    // Watches from here on.
    let mut head = [0; 15];
    deaf.read_exact(&mut head).await.unwrap();
    assert_eq!(&head, b"HTTP/1.1 200 OK");
    // Far more than sockets and buffers hold.
    world
        .sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
             SELECT 'order', repeat('x', 1000) || n % 500, 'Placed', '{}' FROM generate_series(1, 15000) n",
        )
        .await;
    world.until_published(SOON).await;
    assert!(world.next_arrival(SOON).await.is_some());
    world.insert(("order", "last"), "Placed", "{}").await;
    world.until_published(Duration::from_secs(2)).await;
    let mut text = Vec::new();
    let read = async {
        let mut piece = vec![0; 1 << 16];
        loop {
            let read = deaf.read(&mut piece).await.unwrap();
            assert!(read > 0, "it was left out rather than told");
            text.extend_from_slice(&piece[..read]);
            let end = &text[text.len().saturating_sub(read + 8)..];
            if end.windows(8).any(|eight| eight == b"\"last\",\"") {
                return;
            }
        }
    };
    tokio::time::timeout(SOON, read).await.unwrap();
    let text = String::from_utf8_lossy(&text);
    assert!(
        text.contains("{\"missed\":"),
        "nothing was missed in {} bytes",
        text.len()
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_of_what_never_happens_is_kept_in_touch_while_other_things_do() {
    let world = World::new().await;
    let relay = world.ready_relay(&[ANY_PORT]).await;
    let place = address(&relay).await;
    let mut watcher = TcpStream::connect(&place).await.unwrap();
    let request = format!("GET /tail?outcome=dead-lettered HTTP/1.1\r\nHost: {place}\r\n\r\n");
    watcher.write_all(request.as_bytes()).await.unwrap();
    let load = crate::support::Load::start(&world);
    let read = async {
        let mut text = String::new();
        // The head, and an empty line as a chunk of its own.
        while !text.ends_with("\r\n\r\n1\r\n\n\r\n") {
            let mut piece = [0; 1024];
            let read = watcher.read(&mut piece).await.unwrap();
            assert!(read > 0, "{text}");
            text.push_str(std::str::from_utf8(&piece[..read]).unwrap());
        }
    };
    tokio::time::timeout(Duration::from_secs(15), read)
        .await
        .expect("in touch");
    load.stop().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_watch_is_refused_at_once() {
    let world = World::new().await;
    for (arguments, said) in [
        (["tail", "--outcome", "fialed"].as_slice(), "dead-lettered"),
        (
            &["tail", "--url", "localhost:9464"],
            "http://127.0.0.1:9464",
        ),
        (
            &["tail", "--url", "https://relay:9464"],
            "http://127.0.0.1:9464",
        ),
        (&["tail", "--url", ""], "http://127.0.0.1:9464"),
        (&["tail"], "admin.listen"),
    ] {
        let run = world.command(&[], arguments).await;
        assert_eq!(run.status.code(), Some(2), "{arguments:?}: {}", run.stderr);
        assert!(run.stderr.contains(said), "{arguments:?}: {}", run.stderr);
    }
    // A relay that is not there yet is waited for.
    let tail = Relay::start(
        &world.environment(),
        &[],
        &["tail", "--url", "http://127.0.0.1:1"],
    );
    tail.until_logged("127.0.0.1:1: cannot connect, trying again", SOON)
        .await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_leaves_ends_the_command_without_a_word() {
    let world = World::new().await;
    let relay = world.ready_relay(&[ANY_PORT]).await;
    let url = format!("http://{}", address(&relay).await);
    let mut tail = tokio::process::Command::new(env!("CARGO_BIN_EXE_bellwire"))
        .args(["tail", "--url", &url])
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    drop(tail.stdout.take());
    let ended = async {
        let waited = tail.wait_with_output();
        tokio::pin!(waited);
        loop {
            world.insert(("order", "1"), "Placed", "{}").await;
            let pause = Duration::from_millis(50);
            if let Ok(output) = tokio::time::timeout(pause, &mut waited).await {
                return output.unwrap();
            }
        }
    };
    let output = tokio::time::timeout(SOON, ended).await.expect("it ended");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!said.contains("panicked"), "{said}");
    assert_eq!(output.status.code(), Some(1), "{said}");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outcomes_are_logged_in_the_same_words_at_the_level_that_was_asked_for() {
    for (level, published) in [
        ("off", None),
        ("debug", Some("DEBUG")),
        ("info", Some(" INFO")),
    ] {
        let world = World::new().await;
        world.unbind("#").await;
        world.bind("order.Good").await;
        let settings = [
            ("log.outcomes", level),
            ("retry.max_attempts", "2"),
            ("retry.backoff", "100ms"),
        ];
        let relay = world.ready_relay(&settings).await;
        world.insert(("order", "1"), "Good", "{}").await;
        world
            .sql(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES
                 ('order', E'a\\nb', 'Bad', '{}'), ('order', E'a\\nb', 'Good', '{}')",
            )
            .await;
        let has = async |words: &str| relay.until_logged(words, SOON).await;
        let aggregate =
            "id=2 aggregate_type=order aggregate_id=a\\nb event_type=Bad error=unroutable: ";
        has(&format!(
            " WARN bellwire::outcome: failed attempt 1 {aggregate}"
        ))
        .await;
        has(&format!(
            "ERROR bellwire::outcome: dead-lettered {aggregate}"
        ))
        .await;
        if let Some(level) = published {
            let good = "id=1 aggregate_type=order aggregate_id=1 event_type=Good";
            has(&format!("{level} bellwire::outcome: published {good}")).await;
            let behind = "waiting for an older event of the same aggregate id=3";
            has(&format!("{level} bellwire::outcome: {behind}")).await;
        } else {
            world
                .until("SELECT status = 'published' FROM outbox WHERE id = 1", SOON)
                .await;
            assert_eq!(relay.logged("bellwire::outcome: published"), 0);
            assert_eq!(relay.logged("bellwire::outcome: waiting"), 0);
        }
        world.clean().await;
    }
}
