//! Nothing is claimed before the exchange is there, takes messages and leads somewhere; and what
//! becomes of it later costs no event an attempt.

use std::time::Duration;

use lapin::ExchangeKind;
use lapin::options::{ExchangeBindOptions, ExchangeDeclareOptions, ExchangeDeleteOptions};
use lapin::types::FieldTable;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::support::{Load, Management, Proxy, Relay, Run, SOON, TlsServers, World};

const FAILED: Option<i32> = Some(1);
const HELD_BACK: &str = "not ready to publish, nothing is claimed";
const OF_NO_HELP: &str = "the management API is of no help";
const DURABLE: ExchangeDeclareOptions = ExchangeDeclareOptions {
    passive: false,
    durable: true,
    auto_delete: false,
    internal: false,
    nowait: false,
};
const INTERNAL: ExchangeDeclareOptions = ExchangeDeclareOptions {
    internal: true,
    ..DURABLE
};
const TRANSIENT: ExchangeDeclareOptions = ExchangeDeclareOptions {
    durable: false,
    ..DURABLE
};

impl World {
    /// An outbox with twenty events and a record of every claim; an exchange that nothing is bound to.
    async fn guarded() -> Self {
        let world = Self::new().await;
        world.unbind("#").await;
        let claims = format!("{}.claims", world.schema);
        world
            .sql(&format!(
                "CREATE TABLE {claims} (id bigint);
                 CREATE FUNCTION claimed() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN INSERT INTO {claims} VALUES (NEW.id); RETURN NULL; END $$;
                 CREATE TRIGGER claimed AFTER UPDATE OF claimed_by ON outbox FOR EACH ROW
                 WHEN (NEW.claimed_by IS NOT NULL) EXECUTE FUNCTION claimed();"
            ))
            .await;
        world.fill("order", 5, 4).await;
        world
    }

    async fn assert_nothing_claimed(&self) {
        assert_eq!(self.one::<i64>("SELECT count(*) FROM claims").await, 0);
    }

    async fn delete_exchange(&self) {
        let name = self.exchange.as_str().into();
        let deleted = self
            .channel
            .exchange_delete(name, ExchangeDeleteOptions::default());
        deleted.await.unwrap();
    }

    /// The exchange, declared anew and bound to nothing.
    async fn declare_as(&self, kind: ExchangeKind, options: ExchangeDeclareOptions) {
        self.delete_exchange().await;
        let name = self.exchange.as_str().into();
        let declared = self
            .channel
            .exchange_declare(name, kind, options, FieldTable::default());
        declared.await.unwrap();
    }

    /// `run --once` and `check` refuse with these words, and nothing is claimed.
    async fn assert_refused(&self, settings: &[(&str, &str)], words: &str) {
        let run = self.command(settings, &["run", "--once"]).await;
        assert_eq!(run.status.code(), FAILED, "{}\n{}", run.stdout, run.stderr);
        let last = run.stderr.lines().last().unwrap_or_default();
        assert!(
            last.starts_with("bellwire: ")
                && last.contains(words)
                && last.ends_with(". Nothing was claimed."),
            "`{words}` is missing: {last}"
        );
        assert!(!last.contains(".. "), "{last}");
        let line = self.checked_exchange(settings).await;
        assert!(
            line.starts_with("FAIL exchange ") && line.contains(words),
            "{line}"
        );
        self.assert_nothing_claimed().await;
    }

    /// What `check` says of the exchange.
    async fn checked_exchange(&self, settings: &[(&str, &str)]) -> String {
        let run = self.command(settings, &["check"]).await;
        let line = run
            .stdout
            .lines()
            .find(|line| line[5..].starts_with("exchange "));
        line.unwrap_or_else(|| panic!("{}\n{}", run.stdout, run.stderr))
            .to_owned()
    }

    /// Bound at last: the relay that was held back delivers by itself.
    async fn assert_delivers_once_bound(&mut self, relay: &Relay) {
        self.assert_nothing_claimed().await;
        self.bind("#").await;
        self.assert_delivered().await;
        assert_eq!(relay.logged("failed attempt"), 0, "{}", relay.log());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exchange_that_nothing_is_bound_to_holds_delivery_back_until_a_queue_is() {
    let Some(management) = Management::ours() else {
        return;
    };
    let mut world = World::guarded().await;
    // Every character that means something in a URL.
    world.delete_exchange().await;
    world.exchange = format!("{}/a b?c#d%2fü&+", world.schema);
    world.declare_exchange().await;
    let settings = [("rabbitmq.management_url", management.url.as_str())];
    let words = format!(
        "Exchange '{}' has no bound queue and no alternate-exchange: every message would be returned \
         as unroutable. Bind a queue first.",
        world.exchange
    );
    world.assert_refused(&settings, &words).await;
    let relay = world.relay(&settings);
    relay.until_logged(&words, SOON).await;
    relay.until_logged(HELD_BACK, SOON).await;
    world.assert_delivers_once_bound(&relay).await;
    let line = world.checked_exchange(&settings).await;
    let found = format!("'{}' exists (type topic, 1 binding)", world.exchange);
    assert!(line.starts_with("ok ") && line.ends_with(&found), "{line}");
    drop(relay);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_binding_to_another_exchange_counts_as_bound() {
    let Some(management) = Management::ours() else {
        return;
    };
    let mut world = World::guarded().await;
    world.declare_catch_all().await;
    let settings = [("rabbitmq.management_url", management.url.as_str())];
    let relay = world.relay(&settings);
    relay.until_logged(HELD_BACK, SOON).await;
    let catch_all = format!("{}_all", world.exchange);
    let bound = world.channel.exchange_bind(
        catch_all.as_str().into(),
        world.exchange.as_str().into(),
        "#".into(),
        ExchangeBindOptions::default(),
        FieldTable::default(),
    );
    bound.await.unwrap();
    world.assert_delivered().await;
    drop(relay);
    world.clean_catch_all().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_alternate_exchange_counts_as_bound_by_argument_and_by_policy() {
    let Some(management) = Management::ours() else {
        return;
    };
    let mut world = World::guarded().await;
    world.declare_catch_all().await;
    let settings = [("rabbitmq.management_url", management.url.as_str())];
    let relay = world.relay(&settings);
    relay.until_logged("Bind a queue first", SOON).await;

    let name = world.exchange.clone();
    let policy = ["policies", "/", name.as_str()];
    let catch_all = format!("{name}_all");
    let caught = json!({ "pattern": format!("^{name}$"), "apply-to": "exchanges",
                         "definition": { "alternate-exchange": catch_all } });
    management.put(&policy, caught).await;
    world.assert_delivered().await;
    drop(relay);
    let found = format!("exists (type topic, no binding, alternate-exchange '{catch_all}')");
    let line = world.checked_exchange(&settings).await;
    assert!(line.starts_with("ok ") && line.ends_with(&found), "{line}");

    // Policies are not for everyone to read.
    management.user(&name, "secret", "management").await;
    let url = management.url_of(&name, "secret");
    let line = world
        .checked_exchange(&[("rabbitmq.management_url", &url)])
        .await;
    for word in [
        "FAIL ",
        "bind a queue",
        "tag policymaker",
        &format!("policy '{name}'"),
    ] {
        assert!(line.contains(word), "`{word}` is missing: {line}");
    }
    management.user(&name, "secret", "policymaker").await;
    let line = world
        .checked_exchange(&[("rabbitmq.management_url", &url)])
        .await;
    assert!(line.starts_with("ok "), "{line}");
    management.delete(&["users", &name]).await;

    // A policy about something else.
    let other = json!({ "pattern": format!("^{name}$"), "apply-to": "all",
                        "definition": { "max-length": 1000000 } });
    management.put(&policy, other).await;
    let line = world.checked_exchange(&settings).await;
    assert!(
        line.starts_with("FAIL ") && line.ends_with("Bind a queue first."),
        "{line}"
    );
    management.delete(&policy).await;

    world.delete_exchange().await;
    world.declare_caught(ExchangeKind::Topic, DURABLE).await;
    let line = world.checked_exchange(&settings).await;
    assert!(line.starts_with("ok ") && line.ends_with(&found), "{line}");
    world.clean_catch_all().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_internal_exchange_or_one_of_another_type_is_told_before_anything_is_claimed() {
    let Some(management) = Management::ours() else {
        return;
    };
    let mut world = World::guarded().await;
    let settings = [
        ("rabbitmq.management_url", management.url.as_str()),
        ("rabbitmq.exchange_type", "topic"),
    ];
    let called = format!("Exchange '{}' in vhost '/' is ", world.exchange);
    world.declare_as(ExchangeKind::Topic, INTERNAL).await;
    let internal = format!("{called}internal: RabbitMQ refuses whatever is published to it.");
    world.assert_refused(&settings, &internal).await;
    let relay = world.relay(&settings);
    relay.until_logged(&internal, SOON).await;
    world.declare_as(ExchangeKind::Fanout, DURABLE).await;
    let fanout = format!(
        "{called}of type 'fanout', and rabbitmq.exchange_type wants 'topic': delete it and declare it \
         as 'topic', or set rabbitmq.exchange_type to 'fanout'."
    );
    relay.until_logged(&fanout, SOON).await;
    world.assert_refused(&settings, &fanout).await;
    world.declare_as(ExchangeKind::Topic, DURABLE).await;
    relay.until_logged("Bind a queue first", SOON).await;
    world.assert_delivers_once_bound(&relay).await;
    drop(relay);
    world.clean().await;
}

/// Answers each connection with this, or never.
async fn impostor(answer: Option<&'static str>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = vec![0; 4096];
                while stream.read(&mut request).await.is_ok_and(|read| read > 0) {
                    let Some(answer) = answer else { continue };
                    stream.write_all(answer.as_bytes()).await.ok();
                    return;
                }
            });
        }
    });
    format!("http://127.0.0.1:{port}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_management_api_in_trouble_at_the_start_is_told_with_the_option_that_mends_it() {
    let world = World::guarded().await;
    world.bind("#").await;
    let name = &world.exchange;
    let other = impostor(Some("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")).await;
    let closed = impostor(None).await;
    let closed = closed.replace("http://127.0.0.1", "http://127.0.0.2");
    let failing = impostor(Some(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n",
    ))
    .await;
    let redirect = impostor(Some(
        "HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
    ))
    .await;
    let page = impostor(Some(
        "HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n<html></html>",
    ))
    .await;
    let list = impostor(Some("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]")).await;
    let mute = impostor(None).await;
    let missing = format!(
        "Exchange '{name}' does not exist in vhost '/': declare it and bind the consumer queues."
    );
    let returned =
        |code| format!("RabbitMQ management API returned HTTP {code} for exchange '{name}'.");
    let cases = [
        (other.as_str(), missing.as_str()),
        (&other, "rabbitmq.management_url"),
        (&closed, "refused"),
        (&closed, "Mend rabbitmq.management_url"),
        (&failing, &returned(503)),
        (&redirect, &returned(302)),
        (&page, "is no RabbitMQ management API"),
        (&list, "is no RabbitMQ management API"),
        (&mute, "no answer within 1s"),
    ];
    for (url, words) in cases {
        let settings = [
            ("rabbitmq.management_url", url),
            ("rabbitmq.connect_timeout", "1s"),
        ];
        world.assert_refused(&settings, words).await;
    }
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_management_password_is_said_and_never_shown() {
    let Some(management) = Management::ours() else {
        return;
    };
    let world = World::guarded().await;
    let password = "S3cr3t@:/?#%M4rk";
    let name = world.exchange.clone();
    let url = management.url_of("guest", password);
    let rejected = "RabbitMQ rejected the management user or password (HTTP 401). Mend them in \
                    rabbitmq.management_url";
    let hidden = |run: &Run| {
        // The beginning of `guest:S3cr3t` as the header has it.
        let header = "Z3Vlc3Q6UzNjcjN0";
        for text in [&run.stdout, &run.stderr] {
            assert!(!text.contains("S3cr3t") && !text.contains("M4rk"), "{text}");
            assert!(!text.contains(header), "{text}");
        }
    };
    let settings = [("rabbitmq.management_url", url.as_str())];
    world.assert_refused(&settings, rejected).await;
    let loud = [settings[0], ("log.level", "trace")];
    for arguments in [
        ["run", "--once"].as_slice(),
        &["check"],
        &["check", "--json"],
    ] {
        let run = world.command(&loud, arguments).await;
        assert_eq!(run.status.code(), FAILED);
        assert!(format!("{}{}", run.stdout, run.stderr).contains(rejected));
        hidden(&run);
    }
    let error: Option<String> = world.one("SELECT max(last_error) FROM outbox").await;
    assert_eq!(error, None);
    // Not even when it is no URL, or one that leads nowhere.
    for url in [
        format!("http//guest:{password}@host"),
        management
            .url_of("guest", password)
            .replace("127.0.0.1", "127.0.0.2"),
    ] {
        let run = world
            .command(&[("rabbitmq.management_url", &url)], &["run", "--once"])
            .await;
        assert!(
            run.stderr.contains("rabbitmq.management_url"),
            "{}",
            run.stderr
        );
        hidden(&run);
    }

    // One of its own, with every character that means something in a URL; and AMQP's, without the tag.
    management.user(&name, password, "management").await;
    world.bind("#").await;
    let url = management.url_of(&name, password);
    let line = world
        .checked_exchange(&[("rabbitmq.management_url", &url)])
        .await;
    assert!(line.starts_with("ok "), "{line}");
    let mut amqp = url::Url::parse(&crate::support::amqp_url()).unwrap();
    amqp.set_username(&name).unwrap();
    amqp.set_password(Some(password)).unwrap();
    let borrowed = [
        ("AMQP_URL", amqp.as_str()),
        ("rabbitmq.management_url", &management.url),
    ];
    let line = world.checked_exchange(&borrowed).await;
    assert!(line.starts_with("ok "), "{line}");
    management.user(&name, password, "").await;
    let line = world.checked_exchange(&borrowed).await;
    for word in ["FAIL ", "(HTTP 401)", "rabbitmq.url", "the tag management"] {
        assert!(line.contains(word), "`{word}` is missing: {line}");
    }
    management.delete(&["users", &name]).await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_management_api_may_go_away_once_something_was_delivered_but_not_before() {
    let Some(management) = Management::ours() else {
        return;
    };
    let mut world = World::guarded().await;
    world.declare_catch_all().await;
    world.delete_exchange().await;
    world.declare_caught(ExchangeKind::Topic, DURABLE).await;
    let proxy = Proxy::new(&management.url).await;
    let settings = [
        ("rabbitmq.management_url", proxy.through(&management.url)),
        ("rabbitmq.connect_timeout", "2s".to_owned()),
    ];
    let settings: Vec<_> = settings
        .iter()
        .map(|(key, value)| (*key, value.as_str()))
        .collect();
    proxy.refuse(true);
    let relay = world.relay(&settings);
    relay
        .until_logged("cannot ask the RabbitMQ management API", SOON)
        .await;
    relay.until_logged(HELD_BACK, SOON).await;
    world.assert_nothing_claimed().await;
    proxy.refuse(false);
    world.until_published(SOON).await;

    let missing = format!("Exchange '{}' does not exist in vhost '/'", world.exchange);
    let load = Load::start(&world);
    for (times, hang) in [(1, false), (2, true)] {
        proxy.refuse(!hang);
        proxy.mute(hang);
        let before = relay.logged(&missing);
        world.delete_exchange().await;
        until_logged_times(&relay, &missing, before + 1).await;
        load.more(50).await;
        world.declare_caught(ExchangeKind::Topic, DURABLE).await;
        until_logged_times(&relay, OF_NO_HELP, times).await;
        load.more(50).await;
    }
    proxy.mute(false);
    let before = relay.logged(&missing);
    world.delete_exchange().await;
    until_logged_times(&relay, &missing, before + 1).await;
    world.declare_caught(ExchangeKind::Topic, DURABLE).await;
    relay
        .until_logged("the management API answers again", SOON)
        .await;
    load.stop().await;
    world.assert_delivered().await;
    assert_eq!(
        relay.logged(OF_NO_HELP),
        2,
        "once for each change\n{}",
        relay.log()
    );
    drop(relay);
    world.clean_catch_all().await;
    world.clean().await;
}

async fn until_logged_times(relay: &Relay, text: &str, times: usize) {
    let began = std::time::Instant::now();
    while relay.logged(text) < times {
        assert!(
            began.elapsed() < SOON,
            "not {times} times: {text}\n{}",
            relay.log()
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Under load the exchange is deleted, declared in every other way, and at last as it was.
async fn exchange_declared_otherwise(management: Option<&Management>) {
    let mut world = World::new().await;
    world.declare_catch_all().await;
    let settings: Vec<_> = management.map_or_else(Vec::new, |management| {
        vec![
            ("rabbitmq.management_url", management.url.as_str()),
            ("rabbitmq.exchange_type", "topic"),
        ]
    });
    let relay = world.ready_relay(&settings).await;
    let load = Load::start(&world);
    load.more(50).await;
    let called = format!("Exchange '{}' ", world.exchange);
    let missing = format!("{called}does not exist in vhost '/'");
    let published = "SELECT count(*) FROM outbox WHERE status = 'published'";
    let deleted = async || {
        let before = relay.logged(&missing);
        world.delete_exchange().await;
        until_logged_times(&relay, &missing, before + 1).await;
        let idle = "SELECT NOT EXISTS (SELECT FROM outbox WHERE claimed_by IS NOT NULL AND status = 'pending')";
        world.until(idle, SOON).await;
        let before: i64 = world.one(published).await;
        load.more(50).await;
        let later: i64 = world.one(published).await;
        assert_eq!(before, later, "there is no exchange: who declared one?");
    };
    let delivers = async || {
        let before: i64 = world.one(published).await;
        let more = format!("SELECT ({published}) > {before} + 50");
        world.until(&more, SOON).await;
    };
    deleted().await;
    world.declare_caught(ExchangeKind::Fanout, DURABLE).await;
    if management.is_some() {
        let wrong = format!("{called}in vhost '/' is of type 'fanout'");
        relay.until_logged(&wrong, SOON).await;
    } else {
        delivers().await;
    }
    load.more(50).await;
    deleted().await;
    world.declare_caught(ExchangeKind::Topic, INTERNAL).await;
    let internal = match management {
        Some(_) => format!("{called}in vhost '/' is internal"),
        None => format!(
            "publishing to exchange '{}' in vhost '/' refused: ACCESS_REFUSED - cannot publish to internal",
            world.exchange
        ),
    };
    relay.until_logged(&internal, SOON).await;
    load.more(50).await;
    deleted().await;
    world.declare_caught(ExchangeKind::Topic, TRANSIENT).await;
    delivers().await;
    deleted().await;
    world.declare_caught(ExchangeKind::Topic, DURABLE).await;
    load.more(50).await;
    load.stop().await;
    world.assert_delivered().await;
    assert_eq!(relay.logged("failed attempt"), 0, "{}", relay.log());
    drop(relay);
    world.clean_catch_all().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exchange_declared_otherwise_under_load_costs_nothing() {
    exchange_declared_otherwise(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exchange_declared_otherwise_under_load_costs_nothing_with_the_guard_either() {
    if let Some(management) = Management::ours() {
        exchange_declared_otherwise(Some(&management)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_management_api_is_asked_by_tls_with_the_same_ca() {
    let (Some(servers), Ok(url)) = (
        TlsServers::ours(),
        std::env::var("BELLWIRE_TEST_MANAGEMENT_TLS_URL"),
    ) else {
        eprintln!("SKIPPED: no management API by TLS; `make stop test`");
        return;
    };
    let world = World::new().await;
    let (ca, other_ca) = (servers.file("ca.crt"), servers.file("other-ca.crt"));
    let by = |ca| {
        [
            ("rabbitmq.management_url", url.as_str()),
            ("rabbitmq.ca_file", ca),
        ]
    };
    let line = world.checked_exchange(&by(&ca)).await;
    assert!(
        line.starts_with("ok ") && line.ends_with("1 binding)"),
        "{line}"
    );
    for settings in [by(&other_ca).as_slice(), &by(&ca)[..1]] {
        let line = world.checked_exchange(settings).await;
        for word in [
            "FAIL ",
            "management API at localhost:",
            "TLS: ",
            "rabbitmq.ca_file",
        ] {
            assert!(line.contains(word), "`{word}` is missing: {line}");
        }
    }
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_has_a_line_for_each_exchange_that_events_or_dead_letters_go_to() {
    let Some(management) = Management::ours() else {
        return;
    };
    let world = World::new().await;
    let file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    let letters = format!("{}_dead", world.exchange);
    let routes = format!(
        "[[routes]]\naggregate_type = 'invoice'\npublish_to = '{letters}'\n\
         [[routes]]\naggregate_type = 'fan'\ndestination = 'amq.fanout'\n"
    );
    std::fs::write(file.path(), routes).unwrap();
    let config = ("BELLWIRE_CONFIG", file.path().to_str().unwrap());
    let lines = async |settings: &[(&str, &str)]| {
        let run = world.command(settings, &["check"]).await;
        assert_eq!(run.status.code(), FAILED, "{}\n{}", run.stdout, run.stderr);
        let lines = run
            .stdout
            .lines()
            .filter(|line| line[5..].starts_with("exchange "));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let missing = format!("Exchange '{letters}' does not exist in vhost '/': declare it and bind");
    let found = |lines: &[String], words: &[&str]| {
        let fits = |line: &&String| words.iter().all(|word| line.contains(word));
        assert_eq!(
            lines.iter().filter(fits).count(),
            1,
            "{words:?}\n{lines:#?}"
        );
    };
    let name = format!("'{}'", world.exchange);
    let unchecked = "exists (bindings not checked: set rabbitmq.management_url)";
    let plain = lines(&[config]).await;
    assert_eq!(plain.len(), 3, "{plain:#?}");
    found(&plain, &["ok ", &name, unchecked]);
    found(&plain, &["ok ", "'amq.fanout'", unchecked]);
    found(&plain, &["FAIL ", &missing]);
    let url = ("rabbitmq.management_url", management.url.as_str());
    // The type is asked of the configured exchange alone.
    let guarded = lines(&[config, url, ("rabbitmq.exchange_type", "topic")]).await;
    assert_eq!(guarded.len(), 3, "{guarded:#?}");
    found(&guarded, &["ok ", &name, "(type topic, 1 binding)"]);
    found(&guarded, &["FAIL ", "'amq.fanout' has no bound queue"]);
    found(&guarded, &["FAIL ", &missing]);
    world.clean().await;
}
