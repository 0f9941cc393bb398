//! Secrets come from files as well as from variables, and are in no output, whatever fails.

use std::path::Path;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use crate::admin::{ANY_PORT, address, get};
use crate::support::{
    Ledger, Relay, Run, SOON, Services, TlsServers, UNSET, World, amqp_url, database_url,
};

/// Of a password that tries every special character of a URL; raw and encoded forms begin alike.
const MARK: &str = "S3cr3tM4rk";
const PASSWORD: &str = "S3cr3tM4rk@:/?#%&=+ 'ä\"\\";
type Settings<'a> = &'a [(&'a str, &'a str)];

const MISCONFIGURED: Option<i32> = Some(2);
const FAILED: Option<i32> = Some(1);

pub fn with_user(url: &str, user: &str, password: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap();
    let place = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
    let password = utf8_percent_encode(password, NON_ALPHANUMERIC);
    format!("{scheme}://{user}:{password}@{place}")
}

#[track_caller]
fn assert_hidden(run: &Run) {
    for text in [&run.stdout, &run.stderr] {
        assert!(!text.contains(MARK), "{text}");
    }
}

fn file(directory: &Path, name: &str, content: &str) -> String {
    let path = directory.join(name);
    std::fs::write(&path, content).unwrap();
    path.to_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_takes_every_option_from_a_file_too() {
    let mut world = World::new().await;
    let directory = tempfile::tempdir().unwrap();
    let file = |name, content: &str| file(directory.path(), name, content);
    let database = file("database", &format!("{}\n", database_url()));
    let amqp = file("amqp", &format!("{}\r\n", amqp_url()));
    let batch = file("batch", "7");
    world.fill("order", 5, 4).await;
    let by_variables = [
        ("DATABASE_URL", UNSET),
        ("AMQP_URL", UNSET),
        ("DATABASE_URL_FILE", &database),
        ("AMQP_URL_FILE", &amqp),
        ("relay.batch_size_file", &batch),
    ];
    let relay = world.relay(&by_variables);
    let arrivals = world.arrivals(20, SOON).await;
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    drop(relay);

    let toml = file(
        "bellwire.toml",
        &format!("[database]\nurl_file = '{database}'\n[rabbitmq]\nurl_file = '{amqp}'\n"),
    );
    let by_toml = [
        ("DATABASE_URL", UNSET),
        ("AMQP_URL", UNSET),
        ("BELLWIRE_CONFIG", &toml),
    ];
    let run = world.command(&by_toml, &["check"]).await;
    assert_eq!(run.status.code(), Some(0), "{}\n{}", run.stdout, run.stderr);
    // The environment wins over the file, and over what that names.
    let over_it = [
        ("BELLWIRE_CONFIG", toml.as_str()),
        ("AMQP_URL", "amqp://127.0.0.1:1"),
    ];
    let run = world.command(&over_it, &["check"]).await;
    assert!(
        run.stdout
            .contains("FAIL rabbitmq       cannot connect to RabbitMQ at 127.0.0.1:1"),
        "{}\n{}",
        run.stdout,
        run.stderr
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_cannot_be_used_is_named_and_not_shown() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name, content: &str| file(directory.path(), name, content);
    let secret = file("secret", MARK);
    let empty = file("empty", "\n");
    let missing = directory.path().join("missing");
    let missing = missing.to_str().unwrap();
    let toml = file(
        "bellwire.toml",
        &format!("[database]\nurl = '{MARK}'\nurl_file = '{secret}'\n"),
    );
    // The settings, and the words that are said.
    let cases: &[(Settings<'_>, &[&str])] = &[
        (
            &[("DATABASE_URL", UNSET), ("DATABASE_URL_FILE", &secret)],
            &["database.url", "DATABASE_URL_FILE"],
        ),
        (
            &[("AMQP_URL", UNSET), ("AMQP_URL_FILE", &secret)],
            &["rabbitmq.url", "AMQP_URL_FILE"],
        ),
        (
            &[("DATABASE_URL", UNSET), ("DATABASE_URL_FILE", &empty)],
            &["DATABASE_URL_FILE", &empty, "is empty"],
        ),
        (
            &[("AMQP_URL", UNSET), ("AMQP_URL_FILE", missing)],
            &["AMQP_URL_FILE", missing, "No such file"],
        ),
        (
            &[("DATABASE_URL", MARK), ("DATABASE_URL_FILE", &secret)],
            &["DATABASE_URL_FILE: DATABASE_URL is given too"],
        ),
        (
            &[
                ("rabbitmq.url", MARK),
                ("rabbitmq.url_file", secret.as_str()),
            ],
            &["BELLWIRE_RABBITMQ__URL_FILE: BELLWIRE_RABBITMQ__URL is given too"],
        ),
        (
            &[("DATABASE_URL", UNSET), ("BELLWIRE_CONFIG", &toml)],
            &["database.url_file: database.url is given too"],
        ),
        (
            &[("relay.batch_size_file", &secret)],
            &["relay.batch_size", "BELLWIRE_RELAY__BATCH_SIZE_FILE"],
        ),
        (
            &[("rabbitmq.message_id_file", &secret)],
            &["rabbitmq.message_id", "BELLWIRE_RABBITMQ__MESSAGE_ID_FILE"],
        ),
        (
            &[("relay.no_such_file", &secret)],
            &["relay.no_such", "unknown field"],
        ),
    ];
    for (settings, words) in cases {
        let run = Relay::start(&[], settings, &["run"]).finished(SOON).await;
        assert_eq!(
            run.status.code(),
            MISCONFIGURED,
            "{}\n{}",
            run.stdout,
            run.stderr
        );
        assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
        for word in *words {
            assert!(run.stderr.contains(word), "`{word}`: {}", run.stderr);
        }
        assert_hidden(&run);
    }
}

/// A role of this world's name that must know this password, over TLS.
pub async fn role_with_password(world: &World, servers: &TlsServers, password: &str) -> String {
    let name = &world.schema;
    set_password(
        world,
        "CREATE",
        "SUPERUSER LOGIN IN ROLE bellwire_password",
        password,
    )
    .await;
    with_user(&servers.postgres, name, password) + "?sslmode=require"
}

pub async fn set_password(world: &World, verb: &str, options: &str, password: &str) {
    let name = &world.schema;
    let password = password.replace('\'', "''");
    world
        .sql(&format!(
            "{verb} ROLE {name} {options} PASSWORD '{password}'"
        ))
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_database_password_is_said_and_shown_by_no_command() {
    let Some(servers) = TlsServers::ours() else {
        return;
    };
    let mut world = World::new().await;
    let right = role_with_password(&world, &servers, PASSWORD).await;
    let wrong = with_user(&servers.postgres, &world.schema, &format!("{MARK}@ no"));
    world.fill("order", 5, 4).await;
    for parameters in ["?sslmode=require", "?sslmode=prefer", "?sslmode=allow", ""] {
        let url = format!("{wrong}{parameters}");
        for arguments in [
            ["run"].as_slice(),
            &["run", "--once"],
            &["check"],
            &["status"],
        ] {
            let settings = [("DATABASE_URL", url.as_str()), ("log.level", "trace")];
            let run = world.command(&settings, arguments).await;
            assert_eq!(run.status.code(), FAILED, "{}\n{}", run.stdout, run.stderr);
            let text = format!("{}\n{}", run.stdout, run.stderr);
            assert!(text.contains("password authentication failed"), "{text}");
            assert_hidden(&run);
        }
    }

    // Changed under a running relay: it goes on trying, and delivers once it is right again.
    let settings = [
        ("DATABASE_URL", right.as_str()),
        ("log.level", "trace"),
        ANY_PORT,
    ];
    let relay = world.ready_relay(&settings).await;
    let admin = address(&relay).await;
    let arrivals = world.arrivals(20, SOON).await;
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    set_password(&world, "ALTER", "", "another").await;
    let cut = format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{}'",
        world.schema
    );
    world.sql(&cut).await;
    relay
        .until_logged("password authentication failed", SOON)
        .await;
    for path in ["/metrics", "/status", "/readyz"] {
        let (_, body) = get(&admin, path).await;
        assert!(!body.contains(MARK), "{path}: {body}");
    }
    world.fill("invoice", 5, 4).await;
    set_password(&world, "ALTER", "", PASSWORD).await;
    let later = world.arrivals(20, SOON).await;
    let ledger = Ledger::of(&[arrivals, later].concat());
    ledger.assert_sound(&world.committed().await);
    assert!(!relay.log().contains(MARK), "{}", relay.log());
    drop(relay);
    world.sql(&cut).await;
    world.sql(&format!("DROP ROLE {}", world.schema)).await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_broker_password_is_said_and_shown_nowhere() {
    let Some(services) = Services::ours() else {
        return;
    };
    let mut world = World::new().await;
    let user = world.exchange.clone();
    let control =
        async |arguments: &[&str]| services.rabbitmqctl(&[&["-q"], arguments].concat()).await;
    control(&["add_user", &user, "another"]).await;
    control(&["set_permissions", &user, ".*", ".*", ".*"]).await;
    world.fill("order", 5, 4).await;
    let url = with_user(&amqp_url(), &user, PASSWORD);
    let settings = [("AMQP_URL", url.as_str()), ("log.level", "trace"), ANY_PORT];
    for arguments in [["check"].as_slice(), &["run", "--once"], &["status"]] {
        let run = world.command(&settings, arguments).await;
        let refused = run.stdout.contains("rejected the user name or password")
            || run.stderr.contains("rejected the user name or password");
        // `status` asks the database only.
        assert_eq!(
            refused,
            arguments != ["status"],
            "{}\n{}",
            run.stdout,
            run.stderr
        );
        assert_hidden(&run);
    }
    let relay = world.relay(&settings);
    let admin = address(&relay).await;
    relay
        .until_logged("rejected the user name or password", SOON)
        .await;
    for path in ["/metrics", "/status", "/readyz"] {
        let (_, body) = get(&admin, path).await;
        assert!(!body.contains(MARK), "{path}: {body}");
    }
    let told: bool = world
        .one(&format!(
            "SELECT EXISTS (SELECT FROM outbox WHERE attempts > 0 OR last_error LIKE '%{MARK}%')"
        ))
        .await;
    assert!(!told, "{}", world.table_state().await);
    control(&["change_password", &user, PASSWORD]).await;
    let arrivals = world.arrivals(20, SOON).await;
    Ledger::of(&arrivals).assert_sound(&world.committed().await);
    assert!(!relay.log().contains(MARK), "{}", relay.log());
    drop(relay);
    control(&["delete_user", &user]).await;
    world.clean().await;
}
