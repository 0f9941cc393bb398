//! NATS servers with users, limits and certificates: what they refuse is said, with the remedy, and
//! costs no event an attempt that is not to blame.

use std::path::Path;
use std::time::Duration;

use nkeys::KeyPair;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use crate::support::{SOON, Stream, TlsServers, World, nats_url};

const PASSWORD: &str = "S3cr@t";

/// A NATS server of the test's own.
struct Server {
    directory: tempfile::TempDir,
    port: u16,
    child: Child,
}

impl Server {
    /// None, said loudly, where there is none to start.
    fn start(settings: &str) -> Option<Self> {
        // Tests on servers from outside may be on a machine without one.
        nats_url()?;
        let directory = tempfile::tempdir().unwrap();
        let free = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        configure(directory.path(), port, settings);
        let Ok(child) = spawn(directory.path()) else {
            eprintln!("SKIPPED: nats-server is not installed");
            return None;
        };
        Some(Self {
            directory,
            port,
            child,
        })
    }

    async fn restart(&mut self, settings: &str) {
        self.child.kill().await.unwrap();
        configure(self.directory.path(), self.port, settings);
        self.child = spawn(self.directory.path()).unwrap();
    }

    /// Has it read its settings anew.
    fn reload(&self, settings: &str) {
        configure(self.directory.path(), self.port, settings);
        let pid = i32::try_from(self.child.id().unwrap()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), Signal::HUP).unwrap();
    }

    fn url(&self, user: &str, password: &str) -> String {
        let password = password.replace('@', "%40");
        format!("nats://{user}:{password}@localhost:{}", self.port)
    }

    /// A stream, by a user who may do everything.
    async fn stream(&self, options: async_nats::ConnectOptions) -> Stream {
        let options = options
            .user_and_password("admin".into(), PASSWORD.into())
            .retry_on_initial_connect();
        let address = format!("localhost:{}", self.port);
        let stream = Stream::of(options.connect(address).await.unwrap());
        stream.client.flush().await.unwrap();
        stream.create(json!({})).await;
        stream
    }
}

fn configure(directory: &Path, port: u16, settings: &str) {
    let text = format!(
        "listen: \"127.0.0.1:{port}\"\njetstream {{ store_dir: \"{}\", max_memory_store: 16MB, \
         max_file_store: 256MB }}\n{settings}\n",
        directory.join("store").display()
    );
    std::fs::write(directory.join("nats.conf"), text).unwrap();
}

fn spawn(directory: &Path) -> std::io::Result<Child> {
    Command::new("nats-server")
        .arg("-c")
        .arg(directory.join("nats.conf"))
        .env("PATH", "/usr/local/bin:/usr/bin:/usr/sbin:/usr/local/sbin")
        .stdin(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .kill_on_drop(true)
        .spawn()
}

/// A user who may do everything, and one who may publish to these subjects.
fn users(allowed: &str) -> String {
    format!(
        r#"authorization {{ users: [
            {{ user: admin, password: "{PASSWORD}" }}
            {{ user: relay, password: "{PASSWORD}", permissions: {{
                publish: ["$JS.API.INFO", "$JS.API.STREAM.INFO.*", "{allowed}"], subscribe: "_INBOX.>" }} }}
        ] }}"#
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subject_without_permission_waits_and_costs_no_attempt() {
    let Some(server) = Server::start(&users("*.invoice.>")) else {
        return;
    };
    let mut stream = server.stream(async_nats::ConnectOptions::new()).await;
    let world = World::outbox().await;
    let url = server.url("relay", PASSWORD);
    let settings = [&world.to_stream(&stream)[..], &[("NATS_URL", &url)]].concat();
    let relay = world.relay(&settings);
    world.insert(("invoice", "1"), "Sent", "{}").await;
    world.until_published(SOON).await;
    world.insert(("order", "1"), "Placed", "{}").await;
    relay
        .until_logged("no permission to publish to", SOON)
        .await;
    // It is not asked over and over.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(relay.logged("breaker open, nothing is sent to it"), 1);
    let attempts: i64 = world.one("SELECT sum(attempts) FROM outbox").await;
    assert_eq!((attempts, world.count("dead").await), (0, 0));
    server.reload(&users("*.*.>"));
    world.until_published(SOON).await;
    assert_eq!(stream.messages(2, SOON).await.len(), 2);
    assert!(!relay.log().contains("S3cr"), "{}", relay.log());
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_that_became_smaller_is_heeded_after_the_restart() {
    let everything = users(">");
    let Some(mut server) = Server::start(&everything) else {
        return;
    };
    let stream = server.stream(async_nats::ConnectOptions::new()).await;
    let world = World::outbox().await;
    let url = server.url("relay", PASSWORD);
    let settings = [&world.to_stream(&stream)[..], &[("NATS_URL", &url)]].concat();
    let relay = world.relay(&settings);
    let large = format!("\"{}\"", "x".repeat(50_000));
    world.insert(("order", "1"), "Placed", &large).await;
    world.until_published(SOON).await;
    server
        .restart(&format!("max_payload: 20000\n{everything}"))
        .await;
    relay.until_logged("breaker open", SOON).await;
    world.insert(("order", "2"), "Placed", &large).await;
    world.fill("invoice", 5, 2).await;
    world.until_published(SOON).await;
    assert_eq!(
        (world.count("dead").await, world.count("published").await),
        (1, 11)
    );
    let error: String = world
        .one("SELECT last_error FROM outbox WHERE status = 'dead'")
        .await;
    assert!(
        error.starts_with("too_large: ") && error.contains("20000"),
        "{error}"
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_nkey_stands_for_user_and_password() {
    let pair = KeyPair::new_user();
    let users = format!(
        r#"authorization {{ users: [
            {{ user: admin, password: "{PASSWORD}" }}
            {{ nkey: {} }}
        ] }}"#,
        pair.public_key()
    );
    let Some(server) = Server::start(&users) else {
        return;
    };
    let stream = server.stream(async_nats::ConnectOptions::new()).await;
    let world = World::outbox().await;
    let file = server.directory.path().join("seed");
    std::fs::write(&file, format!("{}\n", pair.seed().unwrap())).unwrap();
    let url = format!("nats://localhost:{}", server.port);
    let without = [&world.to_stream(&stream)[..], &[("NATS_URL", &url)]].concat();
    let nkey = [("jetstream.nkey_file", file.to_str().unwrap())];
    for (settings, ok) in [
        (without.clone(), false),
        ([&without[..], &nkey].concat(), true),
    ] {
        let run = world.command(&settings, &["check"]).await;
        assert_eq!(run.status.success(), ok, "{}", run.stdout);
        assert!(!run.stdout.contains(&pair.seed().unwrap()));
    }
    let absent = [&without[..], &[("jetstream.nkey_file", "/no/such/seed")]].concat();
    let run = world.command(&absent, &["check"]).await;
    assert!(
        run.stdout.contains("jetstream.nkey_file: /no/such/seed"),
        "{}",
        run.stdout
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_we_are_and_who_the_server_is_are_verified() {
    let Some(files) = TlsServers::ours() else {
        return;
    };
    let tls = format!(
        "tls {{ cert_file: \"{}\", key_file: \"{}\", ca_file: \"{}\", verify: true }}",
        files.file("server.crt"),
        files.file("server.key"),
        files.file("ca.crt")
    );
    let Some(server) = Server::start(&format!("{}\n{tls}", users(">"))) else {
        return;
    };
    let options = async_nats::ConnectOptions::new()
        .add_root_certificates(files.file("ca.crt").into())
        .add_client_certificate(
            files.file("client.crt").into(),
            files.file("client.key").into(),
        );
    let mut stream = server.stream(options).await;
    let world = World::outbox().await;
    let to_stream = world.to_stream(&stream);
    let url = server.url("relay", PASSWORD).replace("nats://", "tls://");
    let (ca, certificate, key) = (
        files.file("ca.crt"),
        files.file("client.crt"),
        files.file("client.key"),
    );
    let identity = [
        ("jetstream.cert_file", certificate.as_str()),
        ("jetstream.key_file", &key),
    ];
    let trusted = [("NATS_URL", url.as_str()), ("jetstream.ca_file", &ca)];
    let good = [&to_stream[..], &trusted, &identity].concat();
    let other_ca = files.file("other-ca.crt");
    let wrong = server
        .url("relay", "S3crWrong")
        .replace("nats://", "tls://");
    for (changed, words) in [
        (
            ("jetstream.ca_file", other_ca.as_str()),
            "jetstream.ca_file",
        ),
        (
            ("NATS_URL", wrong.as_str()),
            "user and password in jetstream.url",
        ),
    ] {
        let run = world
            .command(&[&good[..], &[changed]].concat(), &["check"])
            .await;
        assert!(
            !run.status.success() && run.stdout.contains(words),
            "{}",
            run.stdout
        );
        assert!(!run.stdout.contains("S3cr") && !run.stderr.contains("S3cr"));
    }
    let run = world
        .command(&[&to_stream[..], &trusted].concat(), &["check"])
        .await;
    assert!(
        !run.status.success(),
        "without a certificate: {}",
        run.stdout
    );
    let _relay = world.relay(&good);
    world.fill("order", 5, 2).await;
    world.until_published(SOON).await;
    assert_eq!(stream.messages(10, SOON).await.len(), 10);
    world.clean().await;
}

/// Base64 with the alphabet for URLs, unpadded, as JWT has it.
fn base64_url(bytes: &[u8]) -> String {
    const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let bits = three
            .iter()
            .fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte));
        let bits = bits << (8 * (3 - three.len()));
        for place in 0..=three.len() {
            let six = (bits >> (18 - 6 * place)) & 63;
            text.push(char::from(ALPHABET[six as usize]));
        }
    }
    text
}

/// A claim of NATS about `subject`, signed by `issuer`.
fn claim(issuer: &KeyPair, subject: &KeyPair, name: &str, nats: Value) -> String {
    let header = base64_url(br#"{"typ":"JWT","alg":"ed25519-nkey"}"#);
    let body = json!({
        "jti": format!("{:032X}", rand::random::<u128>()), "iat": 1_700_000_000,
        "iss": issuer.public_key(), "name": name, "sub": subject.public_key(), "nats": nats,
    });
    let signed = format!("{header}.{}", base64_url(body.to_string().as_bytes()));
    let signature = issuer.sign(signed.as_bytes()).unwrap();
    format!("{signed}.{}", base64_url(&signature))
}

fn account(operator: &KeyPair, account: &KeyPair, name: &str, stores: i64) -> String {
    let limits = json!({
        "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true, "conn": -1,
        "leaf": -1, "mem_storage": stores, "disk_storage": stores, "streams": stores, "consumer": stores,
    });
    let nats = json!({ "limits": limits, "type": "account", "version": 2 });
    claim(operator, account, name, nats)
}

fn credentials(account: &KeyPair, user: &KeyPair, permissions: Value) -> String {
    let mut nats = json!({ "subs": -1, "data": -1, "payload": -1, "type": "user", "version": 2 });
    for (key, value) in permissions.as_object().unwrap() {
        nats[key] = value.clone();
    }
    format!(
        "-----BEGIN NATS USER JWT-----\n{}\n------END NATS USER JWT------\n\n\
         -----BEGIN USER NKEY SEED-----\n{}\n------END USER NKEY SEED------\n",
        claim(account, user, "relay", nats),
        user.seed().unwrap()
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_credentials_file_stands_for_user_and_password() {
    let (operator, system, shop) = (
        KeyPair::new_operator(),
        KeyPair::new_account(),
        KeyPair::new_account(),
    );
    let nats = json!({ "type": "operator", "version": 2 });
    let settings = format!(
        "operator: {}\nsystem_account: {}\nresolver: MEMORY\nresolver_preload: {{ {}: {}, {}: {} }}",
        claim(&operator, &operator, "o", nats),
        system.public_key(),
        system.public_key(),
        account(&operator, &system, "SYS", 0),
        shop.public_key(),
        account(&operator, &shop, "shop", -1),
    );
    let Some(server) = Server::start(&settings) else {
        return;
    };
    let admin = credentials(&shop, &KeyPair::new_user(), json!({}));
    let options = async_nats::ConnectOptions::with_credentials(&admin)
        .unwrap()
        .retry_on_initial_connect();
    let address = format!("localhost:{}", server.port);
    let mut stream = Stream::of(options.connect(address).await.unwrap());
    stream.client.flush().await.unwrap();
    stream.create(json!({})).await;

    let user = KeyPair::new_user();
    let subjects = format!("{}.>", stream.name);
    let permissions = json!({
        "pub": { "allow": ["$JS.API.INFO", "$JS.API.STREAM.INFO.*", subjects] },
        "sub": { "allow": ["_INBOX.>"] },
    });
    let good = credentials(&shop, &user, permissions);
    let unknown = credentials(&KeyPair::new_account(), &user, json!({}));
    let world = World::outbox().await;
    let url = format!("nats://localhost:{}", server.port);
    let without = [&world.to_stream(&stream)[..], &[("NATS_URL", &url)]].concat();
    let file = server.directory.path().join("relay.creds");
    let path = file.to_str().unwrap();
    let with = [&without[..], &[("jetstream.credentials_file", path)]].concat();
    for (text, words) in [
        (unknown.as_str(), "jetstream.credentials_file"),
        ("no credentials", "holds no NATS credentials"),
    ] {
        std::fs::write(&file, text).unwrap();
        let run = world.command(&with, &["check"]).await;
        assert!(
            !run.status.success() && run.stdout.contains(words),
            "{}",
            run.stdout
        );
        assert!(!run.stdout.contains(&user.seed().unwrap()));
    }
    std::fs::write(&file, &good).unwrap();
    assert!(!world.command(&without, &["check"]).await.status.success());
    let relay = world.relay(&with);
    world.fill("order", 5, 2).await;
    world.until_published(SOON).await;
    assert_eq!(stream.messages(10, SOON).await.len(), 10);
    assert!(!relay.log().contains(&user.seed().unwrap()));
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_may_not_be_looked_at_and_is_missing_kills_nothing() {
    let blind = users("*.order.>\", \"*.invoice.>").replace("\"$JS.API.STREAM.INFO.*\", ", "");
    let Some(server) = Server::start(&blind) else {
        return;
    };
    let mut stream = server.stream(async_nats::ConnectOptions::new()).await;
    let only = format!("{}.order.>", stream.name);
    stream.update(json!({ "subjects": [only] })).await;
    let world = World::outbox().await;
    let url = server.url("relay", PASSWORD);
    let settings = [
        &world.to_stream(&stream)[..],
        &[
            ("NATS_URL", url.as_str()),
            ("retry.max_attempts", "1"),
            ("retry.backoff", "1s"),
            ("relay.tick", "500ms"),
        ],
    ]
    .concat();
    let relay = world.relay(&settings);
    // Nothing has been acknowledged yet: it may be for want of the stream.
    world.insert(("invoice", "1"), "Sent", "{}").await;
    relay
        .until_logged("which of them cannot be told without permission", SOON)
        .await;
    assert_eq!(
        world.one::<i64>("SELECT sum(attempts) FROM outbox").await,
        0
    );
    // Others show that the stream is there: now it is the subject's fault, and nobody else waits for it.
    let began = std::time::Instant::now();
    while world.count("dead").await == 0 {
        assert!(began.elapsed() < 2 * SOON, "{}", world.table_state().await);
        world.insert(("order", "1"), "Placed", "{}").await;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    world.until_published(SOON).await;
    let error: String = world
        .one("SELECT last_error FROM outbox WHERE status = 'dead'")
        .await;
    assert!(error.starts_with("unroutable: no stream covers"), "{error}");
    // And a stream that went away a while ago charges nobody.
    stream.delete().await;
    tokio::time::sleep(Duration::from_secs(11)).await;
    world.insert(("order", "2"), "Placed", "{}").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let row: String = world
        .one("SELECT format('%s %s', status, attempts) FROM outbox ORDER BY id DESC LIMIT 1")
        .await;
    assert_eq!(row, "pending 0");
    stream.restart();
    stream.create(json!({})).await;
    world.until_published(2 * SOON).await;
    assert_eq!(stream.messages(1, SOON).await.len(), 1);
    world.clean().await;
}
