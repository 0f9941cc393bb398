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
    let (code, body) = get(&address, "/status").await;
    assert_eq!(code, 200);
    let status: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status["lag"], serde_json::Value::Null);
    assert!(status["relay"]["listener_trouble"].is_string(), "{body}");
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
