//! The admin port and the one-shot commands tell how it stands, for machines and people.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::support::{Proxy, Relay, SOON, World, amqp_url, database_url};

pub const ANY_PORT: (&str, &str) = ("admin.listen", "127.0.0.1:0");

/// For the dead letter operations.
pub const TOKEN: (&str, &str) = ("admin.token", "t0ken-of-sixteen-letters");

/// Of a relay that was started with [`ANY_PORT`].
pub async fn address(relay: &Relay) -> String {
    relay.until_logged("admin port open", SOON).await;
    let log = relay.log();
    let line = log
        .lines()
        .find(|line| line.contains("admin port open"))
        .unwrap();
    let (_, rest) = line
        .split_once("127.0.0.1:")
        .unwrap_or_else(|| panic!("{line}"));
    let port: String = rest.chars().take_while(char::is_ascii_digit).collect();
    format!("127.0.0.1:{port}")
}

/// Status code and body.
pub async fn get(address: &str, path: &str) -> (u16, String) {
    request(address, "GET", path, &[], "").await
}

/// An order for dead events, with [`TOKEN`].
pub async fn order(address: &str, path: &str, body: &str) -> (u16, String) {
    let bearer = format!("Authorization: Bearer {}", TOKEN.1);
    request(address, "POST", path, &[&bearer], body).await
}

/// Status code and body, with these header lines.
pub async fn request(
    address: &str,
    method: &str,
    path: &str,
    headers: &[&str],
    body: &str,
) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let headers: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\
         Content-Length: {length}\r\n{headers}\r\n{body}"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let code = head.split_whitespace().nth(1).unwrap().parse().unwrap();
    (code, body.to_owned())
}

/// Waits until `/readyz` answers this code, and this reason among the others.
pub async fn until_ready(address: &str, code: u16, reason: &str, within: Duration) {
    let began = Instant::now();
    loop {
        let (now, body) = get(address, "/readyz").await;
        let answer: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(answer["ready"], now == 200);
        if now == code
            && (reason.is_empty()
                || answer["reasons"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .any(|word| word == reason))
        {
            return;
        }
        assert!(
            began.elapsed() < within,
            "not within {within:?}: {code} {reason}: {now} {body}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_falls_with_the_broker_and_comes_back() {
    let world = World::new().await;
    let proxy = Proxy::new(&amqp_url()).await;
    let relay = world.relay(&[ANY_PORT, ("AMQP_URL", &proxy.through(&amqp_url()))]);
    let address = address(&relay).await;
    until_ready(&address, 200, "", SOON).await;
    for _ in 0..2 {
        proxy.refuse(true);
        proxy.cut();
        until_ready(&address, 503, "broker", SOON).await;
        // Liveness does not fall: a restart would not bring the broker back.
        assert_eq!(get(&address, "/healthz").await, (200, "ok\n".to_owned()));
        let (code, body) = get(&address, "/status").await;
        assert_eq!(code, 200);
        let status: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_ne!(status["relay"]["breaker"], "closed");
        assert!(
            status["relay"]["breaker_reason"]
                .as_str()
                .unwrap()
                .contains("RabbitMQ"),
            "{body}"
        );
        proxy.refuse(false);
        until_ready(&address, 200, "", SOON).await;
    }
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_falls_with_the_database_and_comes_back() {
    let world = World::new().await;
    let proxy = Proxy::new(&database_url()).await;
    let relay = world.relay(&[ANY_PORT, ("DATABASE_URL", &proxy.through(&database_url()))]);
    let address = address(&relay).await;
    until_ready(&address, 200, "", SOON).await;
    proxy.refuse(true);
    proxy.cut();
    until_ready(&address, 503, "database", SOON).await;
    assert_eq!(get(&address, "/healthz").await.0, 200);
    // The claimer may have noticed before the listener.
    let began = Instant::now();
    loop {
        let (code, body) = get(&address, "/status").await;
        assert_eq!(code, 200);
        let status: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(status["lag"], serde_json::Value::Null);
        if status["relay"]["listener_trouble"].is_string() {
            break;
        }
        assert!(began.elapsed() < SOON, "{body}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    proxy.refuse(false);
    until_ready(&address, 200, "", SOON).await;
    world.clean().await;
}

/// Names of the samples of a Prometheus text, each checked for its form.
fn samples(text: &str) -> Vec<(String, Vec<(String, String)>)> {
    let is_name = |name: &str| {
        !name.is_empty()
            && !name.starts_with(|first: char| first.is_ascii_digit())
            && name
                .chars()
                .all(|letter| letter.is_ascii_alphanumeric() || letter == '_' || letter == ':')
    };
    assert!(text.ends_with('\n'));
    let mut samples = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        if let Some(comment) = line.strip_prefix("# ") {
            let words: Vec<_> = comment.splitn(3, ' ').collect();
            assert!(
                ["HELP", "TYPE"].contains(&words[0]) && is_name(words[1]),
                "{line}"
            );
            continue;
        }
        let (series, value) = line.rsplit_once(' ').unwrap();
        assert!(
            value.parse::<f64>().is_ok() || ["+Inf", "-Inf", "NaN"].contains(&value),
            "{line}"
        );
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        assert!(is_name(name), "{line}");
        let labels = labels.strip_suffix('}').unwrap_or_else(|| panic!("{line}"));
        let labels = labels.split(',').filter(|label| !label.is_empty());
        let labels = labels.map(|label| {
            let (name, value) = label.split_once('=').unwrap();
            let value = value
                .strip_prefix('"')
                .and_then(|value| value.strip_suffix('"'));
            let value = value.filter(|value| !value.contains(['"', '\\']));
            assert!(is_name(name), "{line}");
            (
                name.to_owned(),
                value.unwrap_or_else(|| panic!("{line}")).to_owned(),
            )
        });
        samples.push((name.to_owned(), labels.collect()));
    }
    samples
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_are_prometheus_text_and_do_not_grow_with_ids() {
    let world = World::new().await;
    world.unbind("#").await;
    world.bind("order.*").await;
    let relay = world.relay(&[ANY_PORT, ("retry.max_attempts", "1")]);
    let address = address(&relay).await;
    let insert = |from: u32, to: u32| {
        format!(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
             SELECT t, E'marker \"\\\\\\n' || n, 'Placed', '{{}}'
             FROM generate_series({from}, {to}) n, unnest(ARRAY['order', 'marker-type']) t"
        )
    };
    let mut sizes = Vec::new();
    for (from, to) in [(1, 10), (11, 300)] {
        world.sql(&insert(from, to)).await;
        world.until_published(SOON).await;
        let (code, text) = get(&address, "/metrics").await;
        assert_eq!(code, 200);
        assert!(!text.contains("marker"), "{text}");
        let samples = samples(&text);
        for (name, labels) in &samples {
            assert!(name.starts_with("bellwire_"), "{name}");
            for (label, value) in labels {
                assert!(
                    ["cause", "le"].contains(&label.as_str()),
                    "{name} {label}={value}"
                );
            }
        }
        sizes.push(samples.len());
        let dead = format!("bellwire_dead_lettered_total{{cause=\"unroutable\"}} {to}\n");
        assert!(text.contains(&dead), "{text}");
        let published = text
            .lines()
            .find(|line| line.starts_with("bellwire_published_total"))
            .unwrap();
        assert!(published.ends_with(&format!(" {to}")), "{published}");
    }
    assert_eq!(sizes[0], sizes[1], "it grows with the aggregates");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_says_what_waits_and_for_what() {
    let world = World::new().await;
    world.unbind("#").await;
    let mut relay = world.ready_relay(&[("retry.max_attempts", "1")]).await;
    world.insert(("invoice", "a\nb"), "Sent", "{}").await;
    world
        .until(
            "SELECT count(*) = 1 FROM outbox WHERE status = 'dead'",
            SOON,
        )
        .await;
    world.insert(("invoice", "a\nb"), "Paid", "{}").await;
    let settings = [("lag.alert", "1ms")];
    let run = world.command(&settings, &["status", "--json"]).await;
    assert_eq!(run.status.code(), Some(0), "{}", run.stderr);
    let status: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(
        (&status["pending"], &status["dead"], &status["lagging"]),
        (&1.into(), &1.into(), &true.into())
    );
    assert_eq!(status["oldest"]["id"], 2);
    assert_eq!(status["oldest"]["aggregate_id"], "a\nb");
    assert!(
        status["oldest"]["waits_for"]
            .as_str()
            .unwrap()
            .contains("behind dead-lettered event 1")
    );
    assert_eq!(status["replicas"].as_array().unwrap().len(), 1);
    assert_eq!(status["replicas"][0]["buckets"], 64);
    assert_eq!(status["replicas"][0]["ready"], true);

    let run = world.command(&settings, &["status"]).await;
    assert!(
        run.stdout.contains("LAGGING, 1 pending, 1 dead-lettered"),
        "{}",
        run.stdout
    );
    assert!(run.stdout.contains("invoice a\\nb, Paid"), "{}", run.stdout);
    assert!(run.stdout.contains("delivering"), "{}", run.stdout);
    relay.terminate(SOON).await;
    let run = world.command(&settings, &["status"]).await;
    assert!(run.stdout.contains("no relay is running"), "{}", run.stdout);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_relay_on_the_same_admin_port_is_refused_and_harms_nothing() {
    let mut world = World::new().await;
    let first = world.relay(&[ANY_PORT]);
    let address = address(&first).await;
    until_ready(&address, 200, "", SOON).await;
    let second = world
        .relay(&[("admin.listen", &address)])
        .finished(SOON)
        .await;
    assert_eq!(second.status.code(), Some(1), "{}", second.stderr);
    let last = second.stderr.lines().last().unwrap();
    assert!(
        last.starts_with("bellwire: admin.listen: cannot listen on") && last.contains(&address),
        "{last}"
    );
    assert!(last.contains("`off`"), "{last}");
    world.insert(("order", "1"), "Placed", "{}").await;
    assert!(world.next_arrival(SOON).await.is_some());
    until_ready(&address, 200, "", SOON).await;
    world.clean().await;
}

const WAKE_KEY: (&str, &str) = ("admin.wake_key", "k3y-of-sixteen-letters");

/// Parts of the token, the wake key and the passwords: no answer has any of them.
fn assert_tells_no_secret(answer: &str) {
    for secret in [
        TOKEN.1,
        WAKE_KEY.1,
        "t0ken",
        "k3y",
        &database_url(),
        &amqp_url(),
    ] {
        assert!(!answer.contains(secret), "{answer}");
    }
}

/// Three dead events, one pending that the first of them holds back, one published.
async fn three_dead(world: &World) {
    world
        .sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, status, attempts, last_error)
             VALUES ('order', '1', 'Placed', '{}', 'dead', 5, 'unroutable: no queue'),
                    ('order', '2', 'Placed', '{}', 'dead', 0, 'too_large: 1 GB'),
                    ('invoice', '1', 'Sent', '{}', 'dead', 5, 'unroutable: no queue'),
                    ('order', '1', 'Paid', '{}', 'pending', 0, NULL),
                    ('order', '3', 'Paid', '{}', 'published', 0, NULL)",
        )
        .await;
}

/// But for what a relay notes of where it looks.
const WHOLE: &str =
    "SELECT string_agg((to_jsonb(o) - 'parked')::text, E'\\n' ORDER BY id) FROM outbox o";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_letters_over_http_are_what_the_commands_make_of_them() {
    let world = World::new().await;
    world.unbind("#").await;
    three_dead(&world).await;
    let relay = world.relay(&[ANY_PORT, TOKEN, ("relay.tick", "10m")]);
    let address = address(&relay).await;
    until_ready(&address, 200, "", SOON).await;
    let json = |body: &str| -> serde_json::Value {
        assert_tells_no_secret(body);
        serde_json::from_str(body).unwrap_or_else(|_| panic!("{body}"))
    };
    let bearer = format!("authorization: bearer {}", TOKEN.1);
    let look = async |path: &str| request(&address, "GET", path, &[&bearer], "").await;

    let (code, body) = look("/dead?reason=unroutable&limit=1").await;
    let listed = json(&body);
    assert_eq!((code, &listed["matched"]), (200, &2.into()));
    assert_eq!(listed["events"].as_array().unwrap().len(), 1);
    assert_eq!(listed["events"][0]["id"], 1);
    let (_, body) = look("/dead?after=1&older_than=0s&newer_than=1h").await;
    assert_eq!(json(&body)["events"][0]["id"], 2);
    let (code, body) = look("/dead/1").await;
    assert_eq!((code, &json(&body)["held_back"]), (200, &1.into()));
    assert_eq!(look("/dead/99").await.0, 404);

    let before: String = world.one(WHOLE).await;
    let (code, body) = order(
        &address,
        "/dead/discard",
        r#"{"all": true, "dry_run": true, "limit": 2}"#,
    )
    .await;
    let report = json(&body);
    assert_eq!((code, &report["would_change"]), (200, &2.into()));
    assert_eq!(
        (&report["matched"], &report["changed"]),
        (&3.into(), &0.into())
    );
    for matches_none in [
        r#"{"ids": []}"#,
        r#"{"ids": [4, 5, 99, -1]}"#,
        r#"{"aggregate_id": "1 OR 1=1"}"#,
        r#"{"aggregate_type": "order", "event_type": "Sent"}"#,
        r#"{"older_than": "90000years"}"#,
    ] {
        let (code, body) = order(&address, "/dead/replay", matches_none).await;
        let report = json(&body);
        assert_eq!(
            (code, &report["changed"]),
            (200, &0.into()),
            "{matches_none}"
        );
    }
    assert_eq!(world.one::<String>(WHOLE).await, before);

    let (_, body) = order(&address, "/dead/discard", r#"{"ids": [2, 5, 99]}"#).await;
    let report = json(&body);
    assert_eq!(report["changed"], 1);
    let not_dead =
        serde_json::json!([{"id": 5, "status": "published"}, {"id": 99, "status": null}]);
    assert_eq!(report["not_dead"], not_dead);
    let (_, body) = order(&address, "/dead/replay", r#"{"all": true, "limit": 1}"#).await;
    assert_eq!(json(&body)["changed"], 1);
    world
        .until(
            "SELECT attempts = 1 AND last_error LIKE 'unroutable%' FROM outbox WHERE id = 1",
            SOON,
        )
        .await;
    let rest = "SELECT array_agg(status ORDER BY id) = '{pending,discarded,dead,pending,published}' FROM outbox";
    assert!(
        world.one::<bool>(rest).await,
        "{}",
        world.one::<String>(WHOLE).await
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_right_token_nothing_is_shown_or_changed() {
    let world = World::new().await;
    three_dead(&world).await;
    let before: String = world.one(WHOLE).await;
    // Paused by their broker: whatever is changed is changed by a request.
    let nowhere = ("AMQP_URL", "amqp://guest:guest@127.0.0.1:1/%2f");
    let closed = world.relay(&[ANY_PORT, nowhere]);
    let open = world.relay(&[ANY_PORT, TOKEN, WAKE_KEY, nowhere]);
    let right = format!("Authorization: Bearer {}", TOKEN.1);
    let of_the_other = format!("Authorization: Bearer {}", WAKE_KEY.1);
    let basic = format!("Authorization: Basic {}", TOKEN.1);
    let bare = format!("Authorization: {}", TOKEN.1);
    let longer = format!("{right}x");
    let operations = [
        ("GET", "/dead"),
        ("GET", "/dead/1"),
        ("POST", "/dead/replay"),
        ("POST", "/dead/discard"),
    ];
    for (relay, expected) in [(&closed, 403), (&open, 401)] {
        let address = address(relay).await;
        for (method, path) in operations {
            for headers in [
                [].as_slice(),
                &["Authorization: Bearer wrong-token-of-sixteen"],
                &["Authorization: Bearer "],
                &[&of_the_other],
                &[&basic],
                &[&bare],
                &[&longer],
            ] {
                // Neither good orders nor garbage: who may not order is told nothing else.
                for body in [r#"{"all": true}"#, "garbage"] {
                    let (code, body) = request(&address, method, path, headers, body).await;
                    assert_eq!(code, expected, "{method} {path} {headers:?}: {body}");
                    assert_tells_no_secret(&body);
                }
            }
        }
    }
    let (code, body) = request(&address(&closed).await, "GET", "/dead", &[&right], "").await;
    assert_eq!(code, 403);
    assert!(body.contains("admin.token is not configured"), "{body}");
    assert_eq!(world.one::<String>(WHOLE).await, before);
    for relay in [&open, &closed] {
        assert_tells_no_secret(&relay.log());
        for path in ["/status", "/readyz", "/metrics"] {
            assert_tells_no_secret(&get(&address(relay).await, path).await.1);
        }
    }
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_request_is_refused_and_says_why() {
    let world = World::new().await;
    three_dead(&world).await;
    let before: String = world.one(WHOLE).await;
    let nowhere = ("AMQP_URL", "amqp://guest:guest@127.0.0.1:1/%2f");
    let relay = world.relay(&[ANY_PORT, TOKEN, nowhere]);
    let address = address(&relay).await;
    let long = format!(r#"{{"ids": [{}1]}}"#, "1,".repeat(200_000));
    for path in ["/dead/replay", "/dead/discard"] {
        for (body, said) in [
            ("", "JSON object"),
            ("garbage", "JSON object"),
            ("[]", "no condition is given"),
            ("{}", "no condition is given"),
            (r#"{"dry_run": true}"#, "no condition is given"),
            (r#"{"ids": null, "all": false}"#, "no condition is given"),
            (r#"{"all": true, "reason": "unroutable"}"#, "contradicts"),
            (r#"{"all": true, "ids": []}"#, "contradicts"),
            (r#"{"id": 1}"#, "unknown field `id`"),
            (r#"{"ids": ["1 OR 1=1"]}"#, "invalid type"),
            (r#"{"ids": [9223372036854775808]}"#, "invalid"),
            (r#"{"ids": [1], "limit": 0}"#, "between 1 and 10000"),
            (r#"{"ids": [1], "limit": -1}"#, "invalid value"),
            (r#"{"ids": [1], "limit": 10001}"#, "between 1 and 10000"),
            (r#"{"older_than": "soon"}"#, "expected a duration"),
            (&long, "larger"),
        ] {
            let (code, answer) = order(&address, path, body).await;
            let shown = &body[..body.len().min(60)];
            assert_eq!(code, 400, "{shown}: {answer}");
            assert!(answer.contains(said), "{shown}: {answer}");
        }
        let bearer = format!("Authorization: Bearer {}", TOKEN.1);
        let (code, _) = request(&address, "GET", path, &[&bearer], "").await;
        assert!([404, 405].contains(&code), "GET {path}: {code}");
        // As curl --data sends it.
        let form = "Content-Type: application/x-www-form-urlencoded";
        let (code, answer) = request(
            &address,
            "POST",
            path,
            &[&bearer, form],
            r#"{"ids": [1], "dry_run": true}"#,
        )
        .await;
        assert_eq!(code, 200, "{answer}");
    }
    let bearer = format!("Authorization: Bearer {}", TOKEN.1);
    for (path, code) in [
        ("/dead?agregate_id=1", 400),
        ("/dead?limit=many", 400),
        ("/dead?limit=10001", 400),
        ("/dead/1%20OR%201=1", 404),
        ("/dead/9223372036854775808", 404),
        ("/tail?outcome=fialed", 400),
        ("/tail?outcomes=failed", 400),
    ] {
        let (got, answer) = request(&address, "GET", path, &[&bearer], "").await;
        assert_eq!(got, code, "{path}: {answer}");
    }
    assert_eq!(world.one::<String>(WHOLE).await, before);
    world.clean().await;
}

/// Longer than a relay watches its peers after a wake-up.
const LOOKS_AFTER_WAKE: Duration = Duration::from_secs(4);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_has_the_key_wakes_all_relays_and_nobody_else_does() {
    let mut world = World::new().await;
    let settings = [ANY_PORT, WAKE_KEY, TOKEN, ("relay.tick", "10m")];
    let first = world.ready_relay(&settings).await;
    let second = world.ready_relay(&settings).await;
    world.until_shares(&[32, 32], SOON).await;
    world.sql("SET bellwire.ring = off").await;
    let (address, other) = (address(&first).await, address(&second).await);
    let right = format!("Authorization: Bearer {}", WAKE_KEY.1);
    let by_path = format!("/wake/{}", WAKE_KEY.1);

    // Over many aggregates, so that both relays own some. What the change of shares left to do is over
    // once they stay where they are for longer than a relay pauses between looks at open writers.
    world.fill("order", 20, 1).await;
    while !world.rest(Duration::from_secs(3)).await.is_empty() {
        // Perhaps one of them alone has looked. After a wake-up they look again for a while.
        request(&address, "POST", "/wake", &[&right], "").await;
        world.until_published(SOON).await;
        tokio::time::sleep(LOOKS_AFTER_WAKE).await;
        world.fill("order", 20, 1).await;
    }
    let of_the_other = format!("Authorization: Bearer {}", TOKEN.1);
    for headers in [
        [].as_slice(),
        &["Authorization: Bearer wrong"],
        &[&of_the_other],
    ] {
        let (code, body) = request(&address, "POST", "/wake", headers, "").await;
        assert_eq!(code, 401, "{body}");
        assert_tells_no_secret(&body);
    }
    for path in ["/wake/wrong", "/wake/", "/wake/%20"] {
        let (code, body) = request(&address, "POST", path, &[], "").await;
        assert!([401, 404].contains(&code), "{path}: {code} {body}");
    }
    for path in ["/wake", &by_path] {
        let (code, _) = request(&address, "GET", path, &[&right], "").await;
        assert!([404, 405].contains(&code), "GET {path}: {code}");
    }
    assert!(
        world.rest(Duration::from_millis(500)).await.is_empty(),
        "nobody rang"
    );

    for (at, path, headers) in [
        (&address, "/wake", [right.as_str()].as_slice()),
        (&other, by_path.as_str(), &[]),
    ] {
        let (code, body) = request(at, "POST", path, headers, "").await;
        assert_eq!((code, body.as_str()), (202, "awake\n"));
        assert_eq!(world.arrivals(20, Duration::from_secs(2)).await.len(), 20);
        world.until_published(SOON).await;
        world.fill("order", 20, 1).await;
    }
    for relay in [&first, &second] {
        assert_tells_no_secret(&relay.log());
    }

    let closed = world.relay(&[ANY_PORT]);
    let (code, body) = request(
        &self::address(&closed).await,
        "POST",
        &by_path,
        &[&right],
        "",
    )
    .await;
    assert_eq!(code, 403);
    assert!(body.contains("admin.wake_key is not configured"), "{body}");
    world.clean().await;
}
