//! A wrong configuration, or an outbox of another shape, is one clear line and a non-zero exit; no
//! output ever shows a secret.

use std::path::PathBuf;

use bellwire::config::{AlsoConfig, Config, RouteConfig, SinkSetting};
use bellwire::sink::open;

use crate::support::{Relay, Run, SOON, World, amqp_url, database_url};

/// Raw and percent-encoded forms of one password begin alike.
const SECRET: &str = "S3cr";
const MISCONFIGURED: Option<i32> = Some(2);
const FAILED: Option<i32> = Some(1);

async fn bellwire(settings: &[(&str, &str)], arguments: &[&str]) -> Run {
    let run = Relay::start(&[], settings, arguments).finished(SOON).await;
    assert!(
        !run.stdout.contains(SECRET) && !run.stderr.contains(SECRET),
        "{}\n{}",
        run.stdout,
        run.stderr
    );
    run
}

/// With this file, and no URL in the environment that would win over it.
async fn without_urls(path: &str) -> Run {
    let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_bellwire"))
        .args(["--config", path, "run"])
        .env_remove("DATABASE_URL")
        .env_remove("AMQP_URL")
        .env_remove("NATS_URL")
        .output()
        .await
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let run = Run {
        status: output.status,
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    };
    assert!(!run.stderr.contains(SECRET), "{}", run.stderr);
    run
}

/// Exactly one line on standard error, nothing on standard output.
fn assert_one_line(run: &Run, code: Option<i32>, words: &[&str]) {
    assert_eq!(run.status.code(), code, "{}\n{}", run.stdout, run.stderr);
    assert_eq!(
        run.stderr.lines().count(),
        1,
        "one line is wanted:\n{}",
        run.stderr
    );
    for word in words {
        assert!(
            run.stderr.contains(word),
            "`{word}` is missing: {}",
            run.stderr
        );
    }
    assert_eq!(run.stdout, "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_option_is_named() {
    let cases: &[(&str, &str, &[&str])] = &[
        ("relay.batchsize", "5", &["relay.batchsize", "batch_size"]),
        ("rely.batch_size", "5", &["rely", "relay"]),
        ("relay.batch_size", "0", &["relay.batch_size", "at least 1"]),
        ("relay.batch_size", "many", &["relay.batch_size", "many"]),
        ("relay.batch_size", "-1", &["relay.batch_size"]),
        (
            "relay.partitions",
            "65",
            &["relay.partitions", "at most 64"],
        ),
        ("relay.tick", "soon", &["relay.tick"]),
        ("relay.tick", "1ms", &["relay.tick", "between"]),
        (
            "relay.lease",
            "1s",
            &["rabbitmq.confirm_timeout", "shorter than relay.lease"],
        ),
        ("relay.name", "a\nb", &["relay.name"]),
        ("relay.sink", "kinesis", &["relay.sink", "jetstream"]),
        (
            "relay.sink",
            "jetstream",
            &["jetstream.stream", "is not set"],
        ),
        ("jetstream.stream", "a.b", &["jetstream.stream", "dots"]),
        ("jetstream.prefix", "a..b", &["jetstream.prefix"]),
        (
            "retry.max_attempts",
            "0",
            &["retry.max_attempts", "at least 1"],
        ),
        ("retry.backoff", "2h", &["retry.backoff", "between"]),
        (
            "rabbitmq.message_id",
            "uuid",
            &["rabbitmq.message_id", "event_id"],
        ),
        (
            "rabbitmq.exchange",
            &"x".repeat(256),
            &["rabbitmq.exchange", "255 bytes"],
        ),
        ("admin.listen", "9464", &["admin.listen", "127.0.0.1:9464"]),
        ("alerts.timeout", "1ms", &["alerts.timeout", "between"]),
        ("alerts.give_up_after", "2d", &["alerts.give_up_after"]),
        ("alerts.breaker_after", "2d", &["alerts.breaker_after"]),
        ("alerts.link", "dashboard", &["alerts.link", "https://"]),
        ("alerts.slack", "x", &["alerts.slack", "slack_url"]),
        ("log.format", "xml", &["log.format", "json"]),
        ("log.level", "[[", &["log.level"]),
        (
            "database.table",
            &"x".repeat(60),
            &["database.table", "40 bytes"],
        ),
    ];
    for (key, value, words) in cases {
        let run = bellwire(&[(key, value)], &["run"]).await;
        assert_one_line(&run, MISCONFIGURED, words);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_url_is_named_and_not_shown() {
    let cases = [
        ("DATABASE_URL", "mysql://u:S3cr@t@host/db", "database.url"),
        (
            "DATABASE_URL",
            "postgres://u:S3cr@t@host:port/db",
            "database.url",
        ),
        ("DATABASE_URL", "S3cret", "database.url"),
        ("DATABASE_URL", "", "database.url"),
        ("AMQP_URL", "http://u:S3cr%40t@host", "rabbitmq.url"),
        ("AMQP_URL", "amqp://u:S3cr%40t@host:port", "rabbitmq.url"),
        ("AMQP_URL", "S3cret", "rabbitmq.url"),
        ("AMQP_URL", "", "rabbitmq.url"),
        ("NATS_URL", "http://u:S3cr%40t@host", "jetstream.url"),
        ("NATS_URL", "S3cret", "jetstream.url"),
    ];
    for (variable, url, key) in cases {
        for command in ["run", "check"] {
            let run = bellwire(&[(variable, url)], &[command]).await;
            assert_one_line(&run, MISCONFIGURED, &[key, variable]);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_receiver_of_alerts_is_named_and_not_shown() {
    let url = ("alerts.webhook_url", "https://alerts.example/S3cr");
    let cases: &[(&[(&str, &str)], &str)] = &[
        (&[("alerts.slack_url", "S3cret")], "alerts.slack_url"),
        (
            &[("alerts.slack_url", "ftp://host/S3cret")],
            "alerts.slack_url",
        ),
        (
            &[("alerts.slack_url", "https:///S3 cret")],
            "alerts.slack_url",
        ),
        (
            &[("alerts.webhook_url", "file:///S3cret")],
            "alerts.webhook_url",
        ),
        (
            &[("alerts.webhook_token", "S3cret")],
            "alerts.webhook_token",
        ),
        (
            &[url, ("alerts.webhook_token", "S3cr et")],
            "alerts.webhook_token",
        ),
        (
            &[
                ("alerts.webhook_url", "https://u:S3cr@alerts.example/"),
                ("alerts.webhook_token", "S3cret"),
            ],
            "alerts.webhook_token",
        ),
    ];
    for (settings, key) in cases {
        for command in ["run", "check"] {
            let run = bellwire(settings, &[command]).await;
            assert_one_line(&run, MISCONFIGURED, &[key]);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_file_is_named_and_its_secrets_are_not_shown() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("my.toml");
    let path = file.to_str().unwrap();
    assert_one_line(
        &bellwire(&[], &["--config", path, "run"]).await,
        MISCONFIGURED,
        &[path],
    );
    let cases: &[(&str, &[&str])] = &[
        (
            "[database]\nurl = \"postgres://u:S3cr@t@h/d\" oops\n",
            &["my.toml", "line 2"],
        ),
        (
            "[database]\nurl = postgres://u:S3cr@t@h/d\n",
            &["my.toml", "line 2"],
        ),
        ("[database]\nurl = S3cret\n", &["my.toml", "line 2"]),
        ("[database]\nurl: \"S3cret\"\n", &["my.toml", "line 2"]),
        ("[relay]\nbatch_size = [\"S3cr\"]\n", &["relay.batch_size"]),
        (
            "[database]\nurl = \"postgres://u:S3cr@t@h/d\n",
            &["my.toml"],
        ),
        (
            "[database]\nurls = \"postgres://u:S3cr@t@h/d\"\n",
            &["database.urls"],
        ),
        (
            "[databases]\nurl = \"postgres://u:S3cr@t@h/d\"\n",
            &["databases"],
        ),
        (
            "[database]\nurl = [\"postgres://u:S3cr@t@h/d\"]\n",
            &["database.url"],
        ),
        (
            "database = \"postgres://u:S3cr@t@h/d\"\n",
            &["database", "[database]"],
        ),
        (
            "[alerts]\nslack_url = [\"https://h/S3cr\"]\n",
            &["alerts.slack_url"],
        ),
        (
            "[alerts]\nwebhook_token = [\"S3cr\"]\n",
            &["alerts.webhook_token"],
        ),
        ("alerts = \"https://h/S3cr\"\n", &["alerts", "[alerts]"]),
        (
            "[database]\nurl = \"S3cr\"\nurl = \"S3cr\"\n",
            &["my.toml", "line 3"],
        ),
    ];
    for (text, words) in cases {
        std::fs::write(&file, text).unwrap();
        assert_one_line(&without_urls(path).await, MISCONFIGURED, words);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_place_of_a_route_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("my.toml");
    let cases: &[(&str, &[&str])] = &[
        (
            "[[routes]]\nsink = \"kinesis\"\n",
            &["routes[0].sink", "jetstream"],
        ),
        (
            "[[routes]]\n[[routes.also]]\ndestination = \"a\"\n[[routes.also]]\nsink = \"sqs\"\n",
            &["routes[0].also[1].sink", "must be"],
        ),
        (
            "[[routes]]\n[[routes.also]]\npublish_to = \"dead\"\n",
            &["routes[0].also[0].publish_to", "unknown"],
        ),
        (
            "[[routes]]\n[[routes.also]]\ndestination = \"{tenant}\"\n",
            &["routes[0].also[0].destination", "{tenant}"],
        ),
        (
            "[[routes]]\n[[routes.also]]\n",
            &["routes[0].also[0]", "already"],
        ),
        (
            "[[routes]]\naggregate_type = \"a\"\nsink = \"jetstream\"\n",
            &["jetstream.stream", "is not set"],
        ),
        (
            "[kafka]\nconfirm_timeout = \"40s\"\n[[routes]]\n[[routes.also]]\nsink = \"kafka\"\n",
            &["kafka.confirm_timeout", "shorter than relay.lease"],
        ),
    ];
    for (text, words) in cases {
        std::fs::write(&file, text).unwrap();
        let path = file.to_str().unwrap();
        assert_one_line(&without_urls(path).await, MISCONFIGURED, words);
    }
}

#[test]
fn every_sink_in_use_needs_its_url() {
    let mut config = Config::default();
    config.rabbitmq.url = Some("amqp://localhost".into());
    assert!(open(&config).is_ok());
    let mut route = RouteConfig::default();
    let also = |sink| AlsoConfig {
        sink: Some(sink),
        destination: Some("events".into()),
        ..AlsoConfig::default()
    };
    for (sink, key) in [
        (SinkSetting::Jetstream, "jetstream.url"),
        (SinkSetting::Kafka, "kafka.bootstrap_servers"),
    ] {
        route.also = vec![also(sink)];
        config.routes = vec![route.clone()];
        let error = open(&config).err().unwrap();
        assert!(error.message.starts_with(key), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn help_shows_every_command_and_no_secret() {
    let settings = [
        ("DATABASE_URL", "postgres://u:S3cr%40t@localhost/d"),
        ("AMQP_URL", "amqp://u:S3cr%40t@localhost"),
        ("BELLWIRE_CONFIG", "S3cret.toml"),
    ];
    let run = bellwire(&settings[..2], &["--help"]).await;
    assert_eq!(run.status.code(), Some(0));
    for command in ["run", "migrate", "check", "status", "demo"] {
        assert!(
            run.stdout.contains(&format!("\n  {command} ")),
            "{}",
            run.stdout
        );
        let run = bellwire(&settings[..2], &[command, "--help"]).await;
        assert_eq!(run.status.code(), Some(0));
        assert!(
            run.stdout.contains(&format!("Usage: bellwire {command}")),
            "{}",
            run.stdout
        );
        assert_eq!(run.stderr, "");
    }
    let run = bellwire(&[], &["runn"]).await;
    assert_eq!(run.status.code(), MISCONFIGURED);
    assert!(run.stderr.contains("run"), "{}", run.stderr);
}

/// Refuses connections: nothing listens on a port that was just free.
fn closed_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_tells_what_is_missing_line_by_line() {
    let world = World::new().await;
    let run = world.command(&[], &["check"]).await;
    assert_eq!(run.status.code(), Some(0), "{}\n{}", run.stdout, run.stderr);
    assert_eq!(
        run.stdout
            .lines()
            .filter(|line| line.starts_with("ok "))
            .count(),
        5,
        "{}",
        run.stdout
    );

    let nowhere = format!("postgres://u:S3cr%40t@127.0.0.1:{}/d", closed_port());
    let run = bellwire(
        &[
            ("DATABASE_URL", &nowhere),
            ("rabbitmq.exchange", &world.exchange),
        ],
        &["check"],
    )
    .await;
    assert_eq!(run.status.code(), FAILED, "{}\n{}", run.stdout, run.stderr);
    let lines: Vec<_> = run.stdout.lines().collect();
    assert!(
        lines[0].starts_with("FAIL database ") && lines[0].contains("refused"),
        "{}",
        run.stdout
    );
    assert!(lines[1].starts_with("ok   rabbitmq "), "{}", run.stdout);

    let nowhere = format!("amqp://u:S3cr%40t@127.0.0.1:{}/", closed_port());
    let run = world
        .command(&[("AMQP_URL", &nowhere)], &["check", "--json"])
        .await;
    assert_eq!(run.status.code(), FAILED);
    let report: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(report["ok"], false);
    let checks = report["checks"].as_array().unwrap();
    let failed: Vec<_> = checks.iter().filter(|check| check["ok"] == false).collect();
    assert_eq!(failed.len(), 1, "{}", run.stdout);
    assert_eq!(failed[0]["check"], "rabbitmq");
    assert!(failed[0]["detail"].as_str().unwrap().contains("127.0.0.1"));
    assert!(!run.stdout.contains(SECRET) && !run.stderr.contains(SECRET));

    world.sql("DROP INDEX outbox_walked").await;
    let run = world.command(&[], &["check"]).await;
    assert_eq!(run.status.code(), FAILED);
    assert!(
        run.stdout.contains("FAIL outbox ") && run.stdout.contains("outbox_walked"),
        "{}",
        run.stdout
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_passwords_and_payloads_are_in_no_output() {
    let world = World::new().await;
    let marker = "PAYLOADMARKER";
    world
        .insert(
            ("order", "1"),
            "Placed",
            &format!("{{\"secret\": \"{marker}\"}}"),
        )
        .await;
    let wrong = |url: &str| {
        let mut url = url::Url::parse(url).unwrap();
        url.set_password(Some("S3cr@t")).unwrap();
        url.to_string()
    };
    let loud = ("log.level", "trace");
    let amqp = wrong(&amqp_url());
    for settings in [
        vec![("AMQP_URL", amqp.as_str())],
        vec![("AMQP_URL", amqp.as_str()), loud],
    ] {
        for arguments in [
            ["run", "--once"].as_slice(),
            &["check"],
            &["check", "--json"],
        ] {
            let run = world.command(&settings, arguments).await;
            assert_eq!(run.status.code(), FAILED, "{}\n{}", run.stdout, run.stderr);
            let output = format!("{}\n{}", run.stdout, run.stderr);
            assert!(
                output.contains("rejected the user name or password"),
                "{output}"
            );
            assert!(!output.contains(SECRET), "{output}");
            assert!(!output.contains(marker), "{output}");
        }
    }

    // An unroutable event and a delivered one, everything logged.
    world.unbind("#").await;
    world.bind("order.*").await;
    world
        .insert(
            ("invoice", "1"),
            "Sent",
            &format!("{{\"secret\": \"{marker}\"}}"),
        )
        .await;
    let mut relay = world.ready_relay(&[loud]).await;
    relay.until_logged("failed attempt 1", SOON).await;
    world
        .until(
            "SELECT count(*) = 1 FROM outbox WHERE status = 'published'",
            SOON,
        )
        .await;
    relay.terminate(SOON).await;
    assert!(!relay.log().contains(marker));
    let password = url::Url::parse(&amqp_url())
        .unwrap()
        .password()
        .map(str::to_owned);
    if let Some(password) = password.filter(|password| password != "guest") {
        assert!(!relay.log().contains(&password));
    }
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_database_or_role_is_one_line() {
    let world = World::new().await;
    let mut url = url::Url::parse(&database_url()).unwrap();
    url.set_username("no_such_role").unwrap();
    url.set_password(Some("S3cr@t")).unwrap();
    let run = bellwire(&[("DATABASE_URL", url.as_str())], &["run"]).await;
    assert_one_line(&run, FAILED, &["no_such_role"]);
    let mut url = url::Url::parse(&database_url()).unwrap();
    url.set_path("no_such_database");
    let run = bellwire(&[("DATABASE_URL", url.as_str())], &["run"]).await;
    assert_one_line(&run, FAILED, &["no_such_database"]);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outbox_of_another_shape_is_refused_at_the_start() {
    // What was done to it, and the words that name the object and the remedy.
    let cases: &[(&str, &[&str])] = &[
        (
            "DROP TABLE outbox",
            &[
                ".outbox does not exist",
                "bellwire migrate",
                "database.table",
            ],
        ),
        (
            "ALTER TABLE outbox ALTER payload TYPE text",
            &["column payload", "text", "jsonb"],
        ),
        (
            "ALTER TABLE outbox ALTER id TYPE integer",
            &["column id", "integer", "bigint"],
        ),
        (
            "ALTER TABLE outbox ALTER published_at TYPE timestamp",
            &["column published_at", "with time zone"],
        ),
        (
            "ALTER TABLE outbox DROP headers",
            &["no column headers", "jsonb"],
        ),
        (
            "ALTER TABLE outbox RENAME TO o; CREATE VIEW outbox AS SELECT * FROM o",
            &["a view", "ordinary table", "database.table"],
        ),
        (
            "DROP TABLE outbox; CREATE TABLE outbox (id bigint) PARTITION BY RANGE (id)",
            &["partitioned", "ordinary table", "database.table"],
        ),
        (
            "DROP INDEX outbox_holding",
            &["index outbox_holding", "bellwire migrate"],
        ),
        (
            "DELETE FROM outbox_migrations",
            &["schema version 0", "bellwire migrate"],
        ),
        (
            "INSERT INTO outbox_migrations SELECT max(version) + 1, 'x', max(applied_on), max(checksum) FROM outbox_migrations",
            &["schema version 8", "newer bellwire"],
        ),
        (
            "DROP TABLE outbox_migrations",
            &["not set up by Bellwire", "bellwire migrate"],
        ),
        ("DROP TABLE outbox_relay_state", &["outbox_relay_state"]),
        ("DROP TABLE outbox_bucket", &["outbox_bucket"]),
    ];
    for (spoil, words) in cases {
        let world = World::new().await;
        world.sql(spoil).await;
        // At the start and before the first claim, so `run` never gets far.
        let run = world.command(&[], &["run"]).await;
        assert_one_line(&run, MISCONFIGURED, words);
        world.clean().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_cannot_be_adopted_is_refused_untouched() {
    let cases: &[(&str, &[&str])] = &[
        (
            "CREATE VIEW outbox AS SELECT 1 AS id",
            &["a view", "ordinary table"],
        ),
        (
            "CREATE TABLE outbox (id bigint, payload text)",
            &["outbox", "no column aggregate_type"],
        ),
        (
            "CREATE TABLE outbox (id uuid, aggregate_type text, aggregate_id text, event_type text, payload jsonb)",
            &["column id", "uuid", "bigint"],
        ),
    ];
    for (make, words) in cases {
        let world = World::unbound().await;
        world.sql(make).await;
        let run = world.command(&[], &["migrate"]).await;
        assert_one_line(&run, MISCONFIGURED, words);
        let sql = format!(
            "SELECT count(*) FROM pg_class WHERE relnamespace = '{}'::regnamespace AND relname LIKE 'outbox_%'",
            world.schema
        );
        assert_eq!(world.one::<i64>(&sql).await, 0);
        world.clean().await;
    }
}

#[test]
fn the_example_shows_every_option_at_its_default() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("docker/bellwire.toml");
    let mut example = Config::load(Some(&path)).unwrap();
    let defaults = Config::default();
    // The environment of the tests has the URLs.
    example.database.url = None;
    example.rabbitmq.url = None;
    example.jetstream.url = None;
    example.kafka.bootstrap_servers = None;
    assert_eq!(format!("{example:#?}"), format!("{defaults:#?}"));

    let text = std::fs::read_to_string(&path).unwrap();
    let mut section = "";
    let shown = format!("{defaults:#?}");
    let mut options = 0;
    for line in shown.lines() {
        let indent = line.len() - line.trim_start().len();
        let Some((name, _)) = line.trim().split_once(':') else {
            continue;
        };
        match indent {
            4 => section = name,
            8 => {
                let (_, of_section) = text.split_once(&format!("\n[{section}]\n")).unwrap();
                let of_section = of_section.split("\n[").next().unwrap();
                let has = of_section.lines().any(|line| {
                    line.trim_start_matches(['#', ' '])
                        .split_once(" =")
                        .is_some_and(|(key, _)| key == name)
                });
                assert!(has, "[{section}] {name} is not in the example");
                options += 1;
            }
            _ => {}
        }
    }
    assert!(options > 20, "{options}");
}
