//! The intake's port: limits to the byte, slow and many senders, TLS, and what is told of it.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::admin::{ANY_PORT, TOKEN, address, get, order, request};
use crate::intake::{effects, plain};
use crate::support::intake::{SECRET, Sender, now, order_event, orders, signed};
use crate::support::{Receiver, Relay, SOON, TlsServers, World};

const LIMIT: usize = 262_144;

/// A JSON object of exactly so many bytes.
fn sized(bytes: usize) -> String {
    let frame = r#"{"type":"a","pad":""}"#.len();
    format!(r#"{{"type":"a","pad":"{}"}}"#, "x".repeat(bytes - frame))
}

fn chunked(body: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for chunk in body.as_bytes().chunks(10_000) {
        bytes.extend(format!("{:x}\r\n", chunk.len()).into_bytes());
        bytes.extend(chunk);
        bytes.extend(b"\r\n");
    }
    bytes.extend(b"0\r\n\r\n");
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_limit_of_a_body_is_exact_with_a_length_and_in_chunks() {
    let world = World::new().await;
    effects(&world).await;
    let (_relay, sender) = world.intake(&plain(), "plain", &[]).await;
    for (bytes, code) in [(LIMIT, 200), (LIMIT + 1, 413)] {
        let body = sized(bytes);
        assert_eq!(body.len(), bytes);
        let id = format!("length_{bytes}");
        let head = sender.head(
            &id,
            body.as_bytes(),
            &format!("Content-Length: {bytes}\r\n"),
        );
        let (answered, text) = sender
            .raw(&[head.as_bytes(), body.as_bytes()].concat())
            .await;
        assert_eq!(answered, code, "{text:.300}");
        let id = format!("chunks_{bytes}");
        let head = sender.head(&id, body.as_bytes(), "Transfer-Encoding: chunked\r\n");
        let (answered, text) = sender
            .raw(&[head.as_bytes(), &chunked(&body)].concat())
            .await;
        assert_eq!(answered, code, "{text:.300}");
        if code == 413 {
            assert!(
                text.contains("body_too_large: more than 262144 bytes"),
                "{text:.500}"
            );
        }
    }
    assert_eq!(world.one::<i64>("SELECT count(*) FROM effects").await, 2);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_sender_did_wrong_has_a_code_that_no_retry_follows() {
    let world = World::new().await;
    effects(&world).await;
    let (_relay, sender) = world.intake(&plain(), "plain", &[]).await;
    let body = r#"{"type":"a"}"#;
    let length = format!("Content-Length: {}\r\n", body.len());
    let send = |id: &str, more: &str| {
        let head = sender.head(id, body.as_bytes(), &format!("{length}{more}"));
        let sender = sender.clone();
        async move { sender.raw(format!("{head}{body}").as_bytes()).await }
    };
    for (more, code, word) in [
        ("Content-Type: text/plain\r\n", 200, "processed"),
        ("Content-Encoding: identity\r\n", 200, "processed"),
        ("Content-Encoding: gzip\r\n", 415, "unsupported_encoding"),
        ("webhook-id: other\r\n", 400, "missing_headers"),
        ("webhook-timestamp: 1\r\n", 400, "missing_headers"),
        ("webhook-signature: v1,AAAA\r\n", 200, "processed"),
    ] {
        let (answered, text) = send(&format!("w{}", more.len()), more).await;
        assert_eq!(answered, code, "{more}: {text}");
        assert!(text.contains(word), "{more}: {text}");
    }
    // Waits to be told to go on, as curl does with large bodies.
    let head = sender.head(
        "expects",
        body.as_bytes(),
        &format!("{length}Expect: 100-continue\r\n"),
    );
    let mut stream = TcpStream::connect(&sender.address).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut told = [0; 25];
    stream.read_exact(&mut told).await.unwrap();
    assert!(told.starts_with(b"HTTP/1.1 100 Continue"));
    stream.write_all(body.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    // Neither the right place nor the right method.
    for (method, path, code) in [
        ("GET", "/webhooks/plain", 405),
        ("PUT", "/webhooks/plain", 405),
        ("POST", "/webhooks/other", 404),
        ("POST", "/webhooks/", 404),
        ("GET", "/", 404),
        ("GET", "/metrics", 404),
        ("GET", "/openapi.json", 404),
    ] {
        let (answered, text) = request(&sender.address, method, path, &[], "").await;
        assert_eq!(answered, code, "{method} {path}: {text}");
    }
    // Headers, clock and signature.
    let at = now();
    let good = signed("s1", at, body.as_bytes());
    for (id, timestamp, signature, code, word) in [
        (
            "s1",
            at - 301,
            signed("s1", at - 301, body.as_bytes()),
            401,
            "stale_timestamp",
        ),
        (
            "s1",
            at + 330,
            signed("s1", at + 330, body.as_bytes()),
            401,
            "stale_timestamp",
        ),
        ("s2", at, good.clone(), 401, "bad_signature"),
        ("s1", at, "v1,".into(), 401, "bad_signature"),
        ("s1", at, String::new(), 400, "missing_headers"),
        ("", at, good.clone(), 400, "missing_headers"),
    ] {
        let answer = sender
            .post_with(id, timestamp, &signature, body.as_bytes())
            .await
            .unwrap();
        answer.assert(code, "rejected");
        let reason = answer.body["reason"].as_str().unwrap();
        assert!(reason.starts_with(word), "{reason}");
        assert_eq!(answer.retry_after, None);
    }
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_sender_is_cut_and_one_that_sends_too_little_is_not_waited_for() {
    let world = World::new().await;
    effects(&world).await;
    let settings = [("intake.read_timeout", "1s")];
    let (_relay, sender) = world.intake(&plain(), "plain", &settings).await;
    let body = sized(1000);
    let head = sender.head("slow", body.as_bytes(), "Content-Length: 1000\r\n");
    let mut stream = TcpStream::connect(&sender.address).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    let began = Instant::now();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert!(began.elapsed() < Duration::from_secs(5));
    assert_eq!(world.one::<i64>("SELECT count(*) FROM effects").await, 0);
    // Less than was announced, and the end.
    let mut stream = TcpStream::connect(&sender.address).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&body.as_bytes()[..500]).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).await.ok();
    assert_eq!(world.one::<i64>("SELECT count(*) FROM effects").await, 0);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_finds_the_queue_full_is_told_when_to_come_again() {
    let world = World::new().await;
    effects(&world).await;
    let settings = [("intake.concurrency", "2"), ("intake.queue", "3")];
    let (_relay, sender) = world.intake(&plain(), "plain", &settings).await;
    let posts = (0..40).map(|number| {
        let sender = sender.clone();
        async move {
            sender
                .post(&format!("q{number}"), r#"{"type":"a","pause":1}"#)
                .await
        }
    });
    let answers = futures_util::future::join_all(posts).await;
    let (taken, refused): (Vec<_>, Vec<_>) = answers.iter().partition(|answer| answer.code == 200);
    assert!(taken.len() >= 5 && !refused.is_empty(), "{}", taken.len());
    for answer in &refused {
        answer.assert(503, "error");
        assert_eq!(answer.retry_after.as_deref(), Some("5"));
    }
    let effects: i64 = world.one("SELECT count(*) FROM effects").await;
    assert_eq!(effects, i64::try_from(taken.len()).unwrap());
    world.clean().await;
}

fn resident_kb(log: &crate::support::Relay) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", log.id())).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS"))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_slow_senders_take_little_memory_and_hold_up_nobody() {
    let world = World::new().await;
    effects(&world).await;
    let (relay, sender) = world.intake(&plain(), "plain", &[]).await;
    sender.post("first", "{}").await.assert(200, "processed");
    let before = resident_kb(&relay);
    let body = sized(200_000);
    let head = sender.head("slow", body.as_bytes(), "Content-Length: 200000\r\n");
    let mut streams = Vec::new();
    for _ in 0..1000 {
        let mut stream = TcpStream::connect(&sender.address).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        streams.push(stream);
    }
    for byte in 0..3 {
        for stream in &mut streams {
            stream.write_all(&body.as_bytes()[byte..=byte]).await.ok();
        }
        let began = Instant::now();
        sender
            .post(&format!("between_{byte}"), "{}")
            .await
            .assert(200, "processed");
        assert!(began.elapsed() < Duration::from_secs(2));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let grown = resident_kb(&relay).saturating_sub(before);
    assert!(grown < 64 * 1024, "{grown} kB more");
    // Each is cut in the end.
    let mut answer = String::new();
    let mut last = streams.pop().unwrap();
    last.read_to_string(&mut answer).await.ok();
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    world.clean().await;
}

/// The intake of a relay that speaks TLS, and a client that trusts the test servers' CA.
struct Encrypted {
    relay: Relay,
    sender: Sender,
    url: String,
    ca: reqwest::Certificate,
}

impl Encrypted {
    async fn start(world: &World, servers: &TlsServers, certificate: &str, key: &str) -> Self {
        effects(world).await;
        let settings = [("intake.cert_file", certificate), ("intake.key_file", key)];
        let (relay, sender) = world.intake(&plain(), "plain", &settings).await;
        let port = sender.address.rsplit(':').next().unwrap();
        let ca = std::fs::read(servers.file("ca.crt")).unwrap();
        Self {
            url: format!("https://127.0.0.1:{port}/webhooks/plain"),
            relay,
            sender,
            ca: reqwest::Certificate::from_pem(&ca).unwrap(),
        }
    }

    /// Over a connection of its own.
    async fn post(&self, id: &str) -> reqwest::Result<reqwest::StatusCode> {
        let client = reqwest::Client::builder()
            .no_proxy()
            .tls_certs_only([self.ca.clone()])
            .build()
            .unwrap();
        let at = now();
        let request = client
            .post(&self.url)
            .header("webhook-id", id)
            .header("webhook-timestamp", at)
            .header("webhook-signature", signed(id, at, b"{}"))
            .body("{}");
        Ok(request.send().await?.status())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_port_speaks_tls_where_it_has_a_certificate() {
    let Some(servers) = TlsServers::ours() else {
        return;
    };
    let world = World::new().await;
    // The servers' own certificate will do: it is for localhost and 127.0.0.1.
    let (certificate, key) = (servers.file("server.crt"), servers.file("server.key"));
    let intake = Encrypted::start(&world, &servers, &certificate, &key).await;
    assert_eq!(intake.post("t1").await.unwrap(), 200);
    assert!(intake.sender.try_post("t2", b"{}").await.is_err());
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewed_certificate_is_shown_without_a_restart_and_a_broken_one_never() {
    let Some(servers) = TlsServers::ours() else {
        return;
    };
    let world = World::new().await;
    let directory = tempfile::tempdir().unwrap();
    let ours = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (certificate, key) = (ours("tls.crt"), ours("tls.key"));
    let write = |from: &str, to: &str| {
        std::fs::copy(servers.file(from), to).unwrap();
    };
    write("server.crt", &certificate);
    write("server.key", &key);
    let intake = Encrypted::start(&world, &servers, &certificate, &key).await;
    assert_eq!(intake.post("t1").await.unwrap(), 200);
    let until_told = async |what: &str| {
        let began = Instant::now();
        let mut number = 0;
        // Only who calls finds out.
        while intake.relay.logged(what) == 0 {
            assert!(began.elapsed() < SOON, "{}", intake.relay.log());
            number += 1;
            let _ = intake.post(&format!("{what}-{number}")).await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };

    // One file after the other: between the two nothing fits, and nobody notices.
    write("client.crt", &certificate);
    until_told("the one at hand serves on").await;
    assert!(intake.relay.log().contains("does not fit the certificate"));
    assert_eq!(intake.post("t2").await.unwrap(), 200);
    write("client.key", &key);
    until_told("the certificate was renewed").await;
    // It is for no name of this machine.
    assert!(intake.post("t3").await.unwrap_err().is_connect());

    std::fs::remove_file(&key).unwrap();
    std::fs::write(&certificate, "no certificate").unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(intake.post("t4").await.unwrap_err().is_connect());
    write("server.crt", &certificate);
    write("server.key", &key);
    let began = Instant::now();
    while intake.post("t5").await.is_err() {
        assert!(began.elapsed() < SOON, "{}", intake.relay.log());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // Told for each change, not for each caller.
    assert!(intake.relay.logged("the one at hand serves on") <= 6);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_description_of_the_ports_names_what_is_there_and_nothing_else() {
    let world = World::new().await;
    world.orders_tables().await;
    let settings = [ANY_PORT, TOKEN, ("relay.enabled", "false")];
    let relay = world.with_config(&orders(), &settings, &["run"]);
    let admin = address(&relay).await;
    let door = crate::support::intake::intake_address(&relay).await;
    let (code, text) = get(&admin, "/openapi.json").await;
    assert_eq!(code, 200);
    let document: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(document["openapi"], "3.1.0");
    let mut described = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            described.push(format!("{method} {path}"));
            let at = if path.starts_with("/webhooks") {
                &door
            } else {
                &admin
            };
            if path == "/tail" {
                continue;
            }
            let real = path
                .replace("{source}", "orders")
                .replace("{event_id}", "x")
                .replace("{id}", "1")
                .replace("{key}", "k");
            let bearer = format!("Authorization: Bearer {}", TOKEN.1);
            let (code, answer) = request(at, &method.to_uppercase(), &real, &[&bearer], "{}").await;
            let codes = operation["responses"].as_object().unwrap();
            assert!(
                codes.contains_key(&code.to_string()),
                "{method} {path}: {code} {answer}"
            );
            assert!(
                code != 405 && (code != 404 || codes.contains_key("404")),
                "{method} {path}"
            );
        }
    }
    // And every route of the source has its description.
    let source = include_str!("../../src/admin/mod.rs");
    let mut routed: Vec<_> = source
        .lines()
        .filter_map(|line| line.trim().strip_prefix(".route(\""))
        .map(|rest| {
            let (path, rest) = rest.split_once('"').unwrap();
            let method = if rest.contains("get()") {
                "get"
            } else {
                "post"
            };
            format!("{method} {path}")
        })
        .chain(["post /webhooks/{source}".to_owned()])
        .collect();
    routed.sort();
    described.sort();
    assert_eq!(described, routed);
    // The fields of an answer are the documented ones.
    let fields = |name: &str| -> Vec<String> {
        let properties = &document["components"]["schemas"][name]["properties"];
        properties.as_object().unwrap().keys().cloned().collect()
    };
    let sender = crate::support::intake::Sender::new(&door, "orders");
    let keys = |value: &serde_json::Value| -> Vec<String> {
        value.as_object().unwrap().keys().cloned().collect()
    };
    let mut taken = keys(
        &sender
            .post("a1", &order_event("created", "ord_100", 5))
            .await
            .body,
    );
    let mut accepted = fields("Accepted");
    taken.sort();
    accepted.sort();
    assert_eq!(taken, accepted);
    let mut refused = keys(&sender.post("a1", "{}").await.body);
    let mut documented = fields("Refused");
    refused.sort();
    documented.sort();
    assert_eq!(refused, documented);
    drop(relay);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_counted_by_outcome_and_the_dead_letters_shown() {
    let world = World::new().await;
    world.orders_tables().await;
    let settings = [ANY_PORT, TOKEN, ("relay.enabled", "false")];
    let relay = world.with_config(&orders(), &settings, &["run"]);
    let admin = address(&relay).await;
    let door = crate::support::intake::intake_address(&relay).await;
    let sender = crate::support::intake::Sender::new(&door, "orders");
    sender
        .post("m1", &order_event("created", "ord_100", 5))
        .await
        .assert(200, "processed");
    sender
        .post("m1", &order_event("created", "ord_100", 5))
        .await
        .assert(200, "duplicate");
    sender
        .post("m2", &order_event("paid", "ord_200", 5))
        .await
        .assert(200, "dead_lettered");
    sender
        .post_with("m3", now(), "v1,AAAA", b"{}")
        .await
        .unwrap()
        .assert(401, "rejected");
    let (_, text) = get(&admin, "/metrics").await;
    for outcome in ["processed", "duplicate", "dead_lettered", "bad_signature"] {
        let line = format!("outcome=\"{outcome}\"}} 1");
        assert!(
            text.lines().any(|found| found
                .starts_with("bellwire_intake_requests_total{source=\"orders\"")
                && found.ends_with(&line)),
            "{outcome}: {text}"
        );
    }
    assert!(text.contains("bellwire_intake_seconds_count"), "{text}");
    assert_eq!(get(&admin, "/readyz").await.0, 200);
    assert_eq!(get(&admin, "/healthz").await.0, 200);
    // The same dead letters over HTTP, behind the token.
    assert_eq!(get(&admin, "/intake/dead").await.0, 401);
    let bearer = format!("Authorization: Bearer {}", TOKEN.1);
    let (code, text) = request(
        &admin,
        "GET",
        "/intake/dead?reason=processing_failed",
        &[&bearer],
        "",
    )
    .await;
    let listed: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, &listed["matched"]), (200, &1.into()));
    assert_eq!(listed["events"][0]["event_id"], "m2");
    let (code, text) = request(&admin, "GET", "/intake/dead/orders/m2", &[&bearer], "").await;
    assert_eq!(code, 200, "{text}");
    assert!(text.contains("ord_200"), "{text}");
    let (code, text) = order(&admin, "/intake/replay", "{}").await;
    let dry: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (code, dry["outcome"].as_str()),
        (200, Some("replay_dry_run"))
    );
    assert_eq!(dry["candidates"], 1);
    sender
        .post("m4", &order_event("created", "ord_200", 5))
        .await
        .assert(200, "processed");
    let (_, text) = order(&admin, "/intake/replay", r#"{"dry_run":false}"#).await;
    let done: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(done["outcome"], "replayed");
    assert_eq!(done["events"][0]["status"], "processed", "{text}");
    for limit in ["0", "501", "-1"] {
        let (code, _) = order(&admin, "/intake/replay", &format!(r#"{{"limit":{limit}}}"#)).await;
        assert_eq!(code, 400, "{limit}");
    }
    assert_eq!(order(&admin, "/intake/dead/discard", "{}").await.0, 400);
    sender
        .post("m5", &order_event("paid", "ord_300", 5))
        .await
        .assert(200, "dead_lettered");
    let (code, text) = order(&admin, "/intake/dead/discard", r#"{"event_ids":["m5"]}"#).await;
    assert_eq!(
        (code, text.contains("\"changed\":1")),
        (200, true),
        "{text}"
    );
    drop(relay);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn people_are_told_of_rejected_parked_and_overdue_webhooks_once_in_a_while() {
    let world = World::new().await;
    effects(&world).await;
    let receiver = Receiver::new([]).await;
    let url = receiver.url("/alerts");
    let config = plain().replace("name = \"plain\"", "name = \"plain\"\nmax_attempts = 1");
    let settings = [
        ("alerts.webhook_url", url.as_str()),
        ("intake.deadline", "1s"),
        ("intake.read_timeout", "500ms"),
    ];
    let (_relay, sender) = world.intake(&config, "plain", &settings).await;
    for number in 0..20 {
        let id = format!("r{number}");
        let answer = sender
            .post_with(&id, now(), "v1,AAAA", b"{}")
            .await
            .unwrap();
        answer.assert(401, "rejected");
    }
    sender
        .post("p1", r#"{"refuse":"no"}"#)
        .await
        .assert(200, "parked");
    sender
        .post("d1", r#"{"pause":5}"#)
        .await
        .assert(503, "error");
    receiver.until_requests(3, SOON).await;
    let mut told: Vec<_> = receiver
        .taken()
        .iter()
        .map(|alert| {
            let text = alert["text"].as_str().unwrap();
            assert!(!text.contains(SECRET), "{text}");
            assert_eq!(alert["source"], "plain");
            alert["kind"].as_str().unwrap().to_owned()
        })
        .collect();
    told.sort();
    assert_eq!(
        told,
        ["intake_deadline", "intake_parked", "intake_rejected"]
    );
    world.clean().await;
}
