//! NATS servers with users, limits and certificates: what they refuse is said, with the remedy, and
//! costs no event an attempt that is not to blame.

use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
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
    let pair = nkeys::KeyPair::new_user();
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
