//! What is wrong with an intake stops the start, by the name of the option and without its secret.

use bellwire::intake::source::sources;

use crate::support::intake::{SECRET, example, now, order_event, orders};
use crate::support::{Run, SOON, UNSET, World};

const MISCONFIGURED: Option<i32> = Some(2);

fn config(more: &str) -> String {
    format!("[intake]\nlisten = \"127.0.0.1:0\"\n[[intake.source]]\nname = \"plain\"\n{more}")
}

async fn refused(world: &World, config: &str, settings: &[(&str, &str)], words: &[&str]) {
    let run: Run = world
        .with_config(config, settings, &["run"])
        .finished(SOON)
        .await;
    assert_eq!(run.status.code(), MISCONFIGURED, "{config}\n{}", run.stderr);
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
    for word in words {
        assert!(
            run.stderr.contains(word),
            "`{word}` is missing: {}",
            run.stderr
        );
    }
    assert!(!run.stderr.contains("S3cr"), "{}", run.stderr);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_option_is_named() {
    let world = World::new().await;
    let variable = "BELLWIRE_INTAKE__SECRETS__PLAIN";
    for (more, settings, words) in [
        (
            "",
            &[(variable, UNSET)][..],
            &["intake.source.plain.secrets", variable][..],
        ),
        (
            "",
            &[(variable, "S3cret")],
            &["intake.secrets.plain", "less than 16"],
        ),
        (
            "",
            &[(variable, "whsec_S3cr!tS3cr!tS3cr!t")],
            &["intake.secrets.plain", "no base64"],
        ),
        (
            "secrets = [\"v1,S3cret\"]",
            &[],
            &["intake.source.plain.secrets[0]", "comma"],
        ),
        (
            "secret_files = [\"/no/such\"]",
            &[],
            &["secret_files", "/no/such"],
        ),
        (
            "tolerance = \"29s\"",
            &[],
            &["intake.source[0].tolerance", "between"],
        ),
        ("max_body_bytes = 1023", &[], &["max_body_bytes", "1024"]),
        ("max_attempts = 21", &[], &["max_attempts", "at most 20"]),
        ("dedupe_window = \"9m\"", &[], &["dedupe_window", "twice"]),
        (
            "schema = '{\"type\":\"object\",\"requird\":[]}'",
            &[],
            &["plain.schema", "#/requird"],
        ),
        (
            "schema = '{\"type\":\"array\"}'",
            &[],
            &["top-level type is"],
        ),
        (
            "schema_file = \"/no/such\"",
            &[],
            &["schema_file", "/no/such"],
        ),
        (
            "[[intake.source.route]]\nevent_type = \"a\"",
            &[],
            &["route[0]", "does nothing"],
        ),
        (
            "[[intake.source.route]]\nsql = \"COMMIT\"",
            &[],
            &["route[0].sql", "statement 1"],
        ),
        (
            "[[intake.source.route]]\nsql = \"SELECT :x\"",
            &[],
            &["route[0].sql", ":x"],
        ),
        (
            "[[intake.source.route]]\nsql = \"SELECT :x\"\nparameters = { x = \"x\" }",
            &[],
            &["parameters.x", "pointer"],
        ),
        (
            "[[intake.source.route]]\nsql = \"SELECT * FROM nowhere\"",
            &[],
            &["route[0]", "statement 1", "nowhere"],
        ),
        (
            "[[intake.source.route]]\nsql = \"SELECT 1 + :event_id\"",
            &[],
            &["route[0]", "cast"],
        ),
        (
            "[[intake.source.route]]\nsql = \"SELECT 1 AS failure\"",
            &[],
            &["failure", "must be text"],
        ),
        (
            "[[intake.source.route]]\noutbox = { aggregate_type = \"a\" }",
            &[],
            &["aggregate_id"],
        ),
        (
            "",
            &[("intake.concurrency", "0")],
            &["intake.concurrency", "at least 1"],
        ),
        (
            "",
            &[("intake.deadline", "5s")],
            &["intake.read_timeout", "shorter"],
        ),
        (
            "",
            &[("intake.cert_file", "/no/such")],
            &["intake.cert_file", "together"],
        ),
        ("", &[("intake.lisen", "x")], &["intake.lisen", "listen"]),
        ("", &[("intake.listen", "8080")], &["intake.listen"]),
    ] {
        refused(&world, &config(more), settings, words).await;
    }
    refused(
        &world,
        "[intake]\nlisten = \"127.0.0.1:0\"",
        &[],
        &["intake.source"],
    )
    .await;
    refused(
        &world,
        "",
        &[("relay.enabled", "false")],
        &["nothing to do"],
    )
    .await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_that_is_taken_stops_the_start() {
    let world = World::new().await;
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let run = world
        .with_config(&config(""), &[("intake.listen", &address)], &["run"])
        .finished(SOON)
        .await;
    assert_eq!(run.status.code(), Some(1));
    assert!(
        run.stderr.contains("intake.listen: cannot listen on"),
        "{}",
        run.stderr
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn secrets_come_from_files_too_and_are_replaced_without_a_gap() {
    let world = World::new().await;
    world.orders_tables().await;
    let file = std::env::temp_dir().join(format!("{}-secret", world.schema));
    std::fs::write(
        &file,
        format!("whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD\n{SECRET}\n"),
    )
    .unwrap();
    let settings = [
        ("BELLWIRE_INTAKE__SECRETS__ORDERS", UNSET),
        (
            "BELLWIRE_INTAKE__SECRETS__ORDERS_FILE",
            file.to_str().unwrap(),
        ),
    ];
    let (relay, sender) = world.intake(&orders(), "orders", &settings).await;
    sender
        .post("m1", &order_event("created", "ord_100", 5))
        .await
        .assert(200, "processed");
    assert!(!relay.log().contains("whsec"));
    std::fs::remove_file(file).unwrap();
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_door_stays_open_when_the_other_is_shut() {
    let world = World::new().await;
    world.orders_tables().await;
    // No broker: the relay waits, the intake works.
    let away = [("AMQP_URL", "amqp://127.0.0.1:1/%2f")];
    let relay = world.with_config(&orders(), &away, &["run"]);
    let address = crate::support::intake::intake_address(&relay).await;
    let sender = crate::support::intake::Sender::new(&address, "orders");
    sender
        .post("m1", &order_event("created", "ord_100", 5))
        .await
        .assert(200, "processed");
    drop(relay);
    // Bodies that nobody could want, and the relay carries on.
    let mut world = world;
    let relay = world.with_config(&orders(), &[], &["run"]);
    let address = crate::support::intake::intake_address(&relay).await;
    let sender = crate::support::intake::Sender::new(&address, "orders");
    for _ in 0..50 {
        sender.raw(b"\x00\xffGET / HTTP/9\r\n\r\n").await;
    }
    assert_eq!(
        world.next_arrival(SOON).await.unwrap().routing_key,
        "order.OrderCreated"
    );
    drop(relay);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sign_makes_what_the_intake_takes() {
    let world = World::new().await;
    let (_relay, sender) = world.orders_intake(&[]).await;
    let body = example("created.json");
    let body = body.to_str().unwrap();
    let url = sender.url();
    let run = |arguments: &[&str]| {
        let named: Vec<&str> = ["sign", "--body", body]
            .iter()
            .chain(arguments)
            .copied()
            .collect();
        world.with_config(&orders(), &[], &named).finished(SOON)
    };
    let sent = run(&["--id", "cli_1", "--send", &url]).await;
    assert_eq!(
        sent.status.code(),
        Some(0),
        "{}\n{}",
        sent.stdout,
        sent.stderr
    );
    let answer: serde_json::Value = serde_json::from_str(&sent.stdout).unwrap();
    assert_eq!(
        (&answer["outcome"], &answer["event_id"]),
        (&"processed".into(), &"cli_1".into())
    );
    let at = now().to_string();
    let shown = run(&["--source", "orders", "--id", "cli_2", "--timestamp", &at]).await;
    let signature = shown
        .stdout
        .lines()
        .find_map(|line| line.strip_prefix("webhook-signature: "))
        .unwrap();
    let bytes = std::fs::read(body).unwrap();
    let answer = sender
        .post_with("cli_2", at.parse().unwrap(), signature, &bytes)
        .await
        .unwrap();
    answer.assert(200, "processed");
    let stale = run(&["--timestamp", "1", "--send", &url]).await;
    assert_eq!(stale.status.code(), Some(1));
    assert_eq!(
        run(&["--source", "other"]).await.status.code(),
        MISCONFIGURED
    );
    world.clean().await;
}

#[test]
fn the_example_is_read_as_it_is() {
    let mut config: bellwire::config::Config = ::config::Config::builder()
        .add_source(::config::File::from_str(
            &orders(),
            ::config::FileFormat::Toml,
        ))
        .build()
        .unwrap()
        .try_deserialize()
        .unwrap();
    config.intake.secrets.insert("orders".into(), SECRET.into());
    config.validate().unwrap();
    let sources = sources(&config.intake).unwrap();
    assert_eq!(sources.len(), 1);
    assert_eq!(sources[0].routes().len(), 3);
}
