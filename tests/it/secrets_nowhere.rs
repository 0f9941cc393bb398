//! Every secret of a configuration is told apart by a mark of its own, everything that can fail does, and none is in
//! any output at the most talkative level: logs, commands, the admin port, alerts, tables.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::future::join_all;
use nkeys::KeyPair;
use tokio_postgres::types::Type;

use crate::admin::{address, get, request};
use crate::secrets::{role_with_password, set_password, with_user};
use crate::support::intake::{Sender, intake_address, now};
use crate::support::{
    Management, Receiver, Relay, Reply, SOON, TlsServers, UNSET, World, amqp_url, database_url,
    nats_url,
};

/// Crates that are quiet unless asked for by name, too.
const TALKATIVE: (&str, &str) = (
    "log.level",
    "trace,lapin=trace,async_nats=trace,deadpool=trace,actix_server=trace,tokio_postgres=trace,\
     refinery_core=trace",
);
/// Behind the mark in a password: whatever a URL encodes.
const SPECIAL: &str = "@:/?#%&=+ 'ä\"\\";
const FAILED: Reply = Reply::Refused("500 Internal Server Error", "", "oh no");

/// As they may be given. Letters and digits alone, so that encoding for a URL changes nothing.
const DATABASE: &str = "M4rkDatabase7d1f";
const LISTEN: &str = "M4rkListen90aa";
const BROKER: &str = "M4rkBroker5c3e";
const MANAGEMENT: &str = "M4rkManagement11b2";
const NATS: &str = "M4rkNats66e0";
const KAFKA: &str = "M4rkKafka2d2d";
const SLACK: &str = "M4rkSlack8f00";
const WEBHOOK: &str = "M4rkWebhook31c7";
const TOKEN: &str = "M4rkWebhookToken77ab";
const ADMIN: &str = "M4rkAdminToken4e4e";
const WAKE: &str = "M4rkWakeKey0b0b0b";
const INTAKE: &str = "M4rkIntakeSecret9c9c9c";
const MARKS: [&str; 12] = [
    DATABASE, LISTEN, BROKER, MANAGEMENT, NATS, KAFKA, SLACK, WEBHOOK, TOKEN, ADMIN, WAKE, INTAKE,
];

/// All that was said, and where.
#[derive(Default)]
struct Said(Vec<(String, String)>);

impl Said {
    fn add(&mut self, place: impl Into<String>, text: impl Into<String>) {
        self.0.push((place.into(), text.into()));
    }

    async fn ask(&mut self, admin: &str, method: &str, path: &str, headers: &[&str]) {
        let (code, body) = request(admin, method, path, headers, "").await;
        self.add(format!("{method} of the admin port: {code}"), body);
    }

    /// Every table of the world's schema, row by row.
    async fn tables(&mut self, world: &World) {
        let named =
            "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables WHERE schemaname = $1";
        let named = world.db.prepare_typed(named, &[Type::TEXT]).await.unwrap();
        for row in world.db.query(&named, &[&world.schema]).await.unwrap() {
            let table: String = row.get(0);
            let rows = format!("SELECT coalesce(string_agg(t::text, E'\\n'), '') FROM {table} t");
            let text: String = world.db.query_one(&rows, &[]).await.unwrap().get(0);
            self.add(table, text);
        }
    }

    #[track_caller]
    fn assert_hides_all(&self) {
        self.assert_hides(&MARKS);
    }

    #[track_caller]
    fn assert_hides(&self, marks: &[&str]) {
        for mark in marks {
            for (place, text) in &self.0 {
                if let Some(line) = text.lines().find(|line| shows(line, mark)) {
                    panic!("{place} shows {mark}: {line}");
                }
            }
        }
    }
}

/// As it is, in hexadecimal, or within anything in base64.
fn shows(text: &str, mark: &str) -> bool {
    let hex: String = mark.bytes().map(|byte| format!("{byte:02x}")).collect();
    // Its first letters may share a letter of base64 with what stands before it, and its last with what follows.
    let encoded = (0..3).map(|before| {
        let text = STANDARD.encode(format!("{}{mark}", "x".repeat(before)));
        let text = text.trim_end_matches('=').to_owned();
        text[2 * before..text.len() - 2].to_owned()
    });
    let lists = format!("{:?}", mark.as_bytes());
    let lists = lists.trim_matches(['[', ']']).to_owned();
    let mut forms = encoded.chain([mark.to_owned(), hex, lists]);
    forms.any(|form| text.contains(&form))
}

#[test]
fn a_mark_is_recognised_in_whatever_form_it_is_shown() {
    let basic = STANDARD.encode(format!("user:{BROKER}{SPECIAL}"));
    let url = with_user("amqp://h", "u", &format!("{BROKER}{SPECIAL}"));
    for text in [
        BROKER.to_owned(),
        url,
        basic,
        STANDARD.encode(format!("\0u\0{BROKER}")),
        STANDARD.encode(BROKER),
        format!("{:?}", format!("\0guest\0{BROKER}").as_bytes()),
    ] {
        assert!(shows(&format!("before {text} after"), BROKER), "{text}");
        assert!(!shows(&text, DATABASE), "{text}");
    }
}

/// Secrets of everything that the tests do not use beside; given in a file.
fn toml(slack: &str, webhook: &str, more: &str) -> String {
    format!(
        "[admin]\nlisten = '127.0.0.1:0'\ntoken = '{ADMIN}'\nwake_key = '{WAKE}'\n\
         [alerts]\nslack_url = '{slack}'\nwebhook_url = '{webhook}'\nwebhook_token = '{TOKEN}'\n\
         breaker_after = '0s'\ntimeout = '1s'\n\
         [retry]\nmax_attempts = 1\n{more}"
    )
}

const SOURCES: &str = "[intake]\nlisten = '127.0.0.1:0'\n[[intake.source]]\nname = 'plain'\n\
     [[intake.source.route]]\nevent_type = 'fine'\nsql = 'SELECT 1'\n\
     [[intake.source.route]]\nevent_type = 'odd'\nsql = 'SELECT 1 / (:id::text = :source)::int'\n";

fn intake_secret() -> String {
    format!("whsec_{}", STANDARD.encode(INTAKE))
}

/// Calls that are refused, and one that fails.
async fn webhooks(relay: &Relay, said: &mut Said) {
    let sender = Sender::new(&intake_address(relay).await, "plain");
    let mut keys = bellwire::intake::signature::Keys::default();
    keys.add(&intake_secret()).unwrap();
    let at = now();
    for (id, kind, right) in [
        ("a", "fine", true),
        ("b", "odd", true),
        ("c", "stranger", true),
        ("d", "fine", false),
    ] {
        let body = format!("{{\"type\":\"{kind}\"}}");
        let mut signature = keys.sign(id, &at.to_string(), body.as_bytes()).unwrap();
        if !right {
            signature = format!("v1,{}", STANDARD.encode([7; 32]));
        }
        let answer = sender.post_with(id, at, &signature, body.as_bytes()).await;
        let answer = answer.unwrap();
        assert_eq!(answer.code == 401, !right, "{answer:?}");
        said.add("answer of the intake", answer.body.to_string());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_secret_of_a_relay_is_said_though_all_that_can_fail_does() {
    let (Some(servers), Some(management)) = (TlsServers::ours(), Management::ours()) else {
        return;
    };
    let world = World::new().await;
    let mut said = Said::default();
    let password = |mark: &str| format!("{mark}{SPECIAL}");
    let database = role_with_password(&world, &servers, &password(DATABASE)).await;
    let user = world.exchange.as_str();
    management.user(user, &password(BROKER), "management").await;
    let amqp = with_user(&amqp_url(), user, &password(BROKER));
    let asked = with_user(&management.url, user, &password(BROKER));
    let (slack, webhook) = (
        Receiver::new(std::iter::repeat_n(FAILED, 1_000)).await,
        Receiver::new([FAILED, Reply::Close, Reply::Hang]).await,
    );
    let text = toml(
        &slack.url(&format!("/services/T1/B1/{SLACK}")),
        &webhook.url(&format!("/hook?key={WEBHOOK}")),
        SOURCES,
    );
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (config, amqp_file) = (file("bellwire.toml", &text), file("amqp", &amqp));
    let intake_file = file("intake", &intake_secret());
    let kafka = password(KAFKA);
    let nats = with_user("nats://127.0.0.1:1", "u", &password(NATS));
    let settings = [
        TALKATIVE,
        ("BELLWIRE_CONFIG", config.as_str()),
        ("DATABASE_URL", &database),
        ("AMQP_URL", UNSET),
        ("AMQP_URL_FILE", &amqp_file),
        ("rabbitmq.management_url", &asked),
        ("NATS_URL", &nats),
        ("kafka.sasl_mechanism", "PLAIN"),
        ("kafka.username", "u"),
        ("kafka.password", &kafka),
        ("BELLWIRE_INTAKE__SECRETS__PLAIN_FILE", &intake_file),
        ("BELLWIRE_ADMIN__LISTEN", "127.0.0.1:0"),
        ("relay.tick", "500ms"),
    ];
    let mut relay = world.ready_relay(&settings).await;
    let admin = address(&relay).await;

    // The destination takes nothing, so the event dies: told by alerts, which nobody takes either.
    world.unbind("#").await;
    world.insert(("order", "1"), "Placed", "{}").await;
    slack.until_requests(2, SOON).await;
    webhook.until_requests(3, SOON).await;
    webhooks(&relay, &mut said).await;
    let (right, wrong) = (
        format!("Authorization: Bearer {ADMIN}"),
        "Authorization: Bearer x",
    );
    for (method, path) in [
        ("GET", "/metrics"),
        ("GET", "/status"),
        ("GET", "/readyz"),
        ("GET", "/dead"),
        ("GET", "/dead/1"),
        ("GET", "/intake/dead"),
        ("POST", "/dead/replay"),
        ("POST", &format!("/wake/{WAKE}")),
        ("POST", "/wake/another-of-16-letters"),
    ] {
        said.ask(&admin, method, path, &[&right]).await;
        said.ask(&admin, method, path, &[wrong]).await;
    }
    for arguments in [
        ["check"].as_slice(),
        &["status", "--json"],
        &["dead", "list"],
        &["intake", "dead"],
        &["run", "--once"],
    ] {
        let run = world.command(&settings, arguments).await;
        said.add(format!("{arguments:?}"), run.stdout);
        said.add(format!("the log of {arguments:?}"), run.stderr);
    }

    // Both servers refuse the password from here on.
    // Whose user is gone loses its connections, too.
    management.delete(&["users", user]).await;
    let cut = format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{}'",
        world.schema
    );
    set_password(&world, "ALTER", "", "another").await;
    world.sql(&cut).await;
    relay
        .until_logged("password authentication failed", SOON)
        .await;
    let rejected = "rejected the user name or password";
    relay.until_logged(rejected, SOON).await;
    for path in ["/metrics", "/status", "/readyz"] {
        let (_, body) = get(&admin, path).await;
        said.add(path, body);
    }
    for receiver in [&slack, &webhook] {
        for request in receiver.requests() {
            said.add("alert", request.body.to_string());
        }
    }
    relay.terminate(SOON).await;
    said.add("the relay's log", relay.log());
    said.add("what the relay printed", relay.printed().join("\n"));
    said.tables(&world).await;
    assert!(relay.log().contains(" TRACE "), "the most talkative level");
    said.assert_hides_all();

    world.sql(&cut).await;
    world.sql(&format!("DROP ROLE {}", world.schema)).await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_secret_is_said_of_a_server_that_is_away_or_another_or_not_trusted() {
    let Some(servers) = TlsServers::ours() else {
        return;
    };
    let world = World::new().await;
    world.fill("order", 2, 2).await;
    let password = |mark: &str| format!("{mark}{SPECIAL}");
    // By name: the settings that differ.
    let nowhere = |scheme: &str, mark: &str| {
        with_user(&format!("{scheme}://127.0.0.1:1"), "u", &password(mark))
    };
    // Another protocol is spoken there.
    let postgres = database_url();
    let (_, place) = postgres.split_once("://").unwrap();
    let place = place.rsplit_once('@').map_or(place, |(_, place)| place);
    let place = place.split(['/', '?']).next().unwrap();
    let strange =
        |scheme: &str, mark: &str| with_user(&format!("{scheme}://{place}"), "u", &password(mark));
    let untrusted = servers.file("other-ca.crt");
    let trusted = with_user(&servers.postgres, "u", &password(DATABASE));
    let mut cases: Vec<Vec<(&str, String)>> = vec![
        vec![(
            "DATABASE_URL",
            format!("{}/d", nowhere("postgres", DATABASE)),
        )],
        vec![
            ("DATABASE_URL", format!("{trusted}?sslmode=verify-full")),
            ("database.ca_file", untrusted.clone()),
        ],
        vec![(
            "database.listen_url",
            format!("{}/d", nowhere("postgres", LISTEN)),
        )],
        vec![("AMQP_URL", nowhere("amqp", BROKER))],
        vec![("AMQP_URL", nowhere("amqps", BROKER))],
        vec![("AMQP_URL", strange("amqp", BROKER))],
        vec![(
            "AMQP_URL",
            with_user(&amqp_url(), "stranger", &password(BROKER)),
        )],
        vec![
            (
                "AMQP_URL",
                with_user(&servers.amqps, "u", &password(BROKER)),
            ),
            ("rabbitmq.ca_file", untrusted.clone()),
        ],
        vec![("rabbitmq.management_url", nowhere("http", MANAGEMENT))],
        vec![("rabbitmq.management_url", strange("http", MANAGEMENT))],
        vec![
            ("rabbitmq.management_url", strange("https", MANAGEMENT)),
            ("rabbitmq.ca_file", untrusted),
        ],
    ];
    for url in [
        nowhere("nats", NATS),
        nowhere("tls", NATS),
        strange("nats", NATS),
    ]
    .into_iter()
    .chain(nats_url().map(|url| with_user(&url, "u", &password(NATS))))
    {
        let to_stream = [("relay.sink", "jetstream"), ("jetstream.stream", "NONE")];
        let mut case = vec![
            ("NATS_URL", url),
            ("jetstream.connect_timeout", "1s".to_owned()),
        ];
        case.extend(to_stream.map(|(key, value)| (key, value.to_owned())));
        cases.push(case);
    }
    let pair = KeyPair::new_user();
    let seed = pair.seed().unwrap();
    let token = format!("header.{TOKEN}.signature");
    let credentials = format!(
        "-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n\
         -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    );
    let directory = tempfile::tempdir().unwrap();
    for (number, (key, content)) in [
        ("jetstream.nkey_file", seed.clone()),
        ("jetstream.nkey_file", format!("{seed}x")),
        ("jetstream.nkey_file", format!("{seed} {seed}")),
        ("jetstream.nkey_file", credentials.clone()),
        ("jetstream.credentials_file", credentials.clone()),
        (
            "jetstream.credentials_file",
            credentials.replace("JWT", "Jwt"),
        ),
        (
            "jetstream.credentials_file",
            credentials.replace(&seed, &format!("{seed}x")),
        ),
        ("jetstream.credentials_file", seed.clone()),
    ]
    .into_iter()
    .enumerate()
    {
        let path = directory.path().join(number.to_string());
        std::fs::write(&path, content).unwrap();
        let place = place.to_owned();
        for url in nats_url().into_iter().chain([format!("nats://{place}")]) {
            cases.push(vec![
                (key, path.to_str().unwrap().to_owned()),
                ("relay.sink", "jetstream".to_owned()),
                ("jetstream.stream", "NONE".to_owned()),
                ("jetstream.connect_timeout", "1s".to_owned()),
                ("NATS_URL", url),
            ]);
        }
    }
    for (servers, tls) in [
        ("127.0.0.1:1", "false"),
        ("127.0.0.1:1", "true"),
        (place, "false"),
        (place, "true"),
    ] {
        cases.push(vec![
            ("relay.sink", "kafka".to_owned()),
            ("KAFKA_BOOTSTRAP_SERVERS", servers.to_owned()),
            ("kafka.tls", tls.to_owned()),
            ("kafka.sasl_mechanism", "PLAIN".to_owned()),
            ("kafka.username", "u".to_owned()),
            ("kafka.password", password(KAFKA)),
            ("kafka.connect_timeout", "1s".to_owned()),
        ]);
    }
    let runs = cases.iter().flat_map(|case| {
        [["check"].as_slice(), &["run", "--once"], &["status"]].map(|arguments| {
            let settings = case.iter();
            let settings: Vec<_> = settings
                .map(|(key, value)| (*key, value.as_str()))
                .collect();
            let world = &world;
            async move {
                let run = world
                    .command(&[&[TALKATIVE], &settings[..]].concat(), arguments)
                    .await;
                (format!("{arguments:?} with {}", case[0].0), run)
            }
        })
    });
    let runs: Vec<_> = runs.collect();
    let mut said = Said::default();
    let mut failed = 0;
    let mut runs = runs.into_iter().peekable();
    while runs.peek().is_some() {
        // Each is a process, and the machine may be small.
        for (place, run) in join_all(runs.by_ref().take(4)).await {
            failed += usize::from(!run.status.success());
            said.add(place.clone(), run.stdout);
            said.add(place, run.stderr);
        }
    }
    drop(runs);
    said.tables(&world).await;
    said.assert_hides_all();
    said.assert_hides(&[&seed]);
    assert!(
        failed >= 2 * cases.len() - 4,
        "{failed} of {} failed",
        3 * cases.len()
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_secret_is_said_of_a_configuration_that_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("bellwire.toml");
    let path = path.to_str().unwrap();
    let mut said = Said::default();
    // What is wrong in a file, in every way; and by a variable.
    let odd_forms = |key: &str, mark: &str| {
        let (section, option) = key.split_once('.').unwrap();
        [
            format!("[{section}]\n{option} = '{mark}\n"),
            format!("[{section}]\n{option} = {mark}\n"),
            format!("[{section}]\n{option} = ['{mark}']\n"),
            format!("[{section}]\n{option} = {{ x = '{mark}' }}\n"),
            format!("[{section}]\n{option} = '{mark} é://\\n'\n{option} = '{mark}'\n"),
            format!("{section} = '{mark}'\n"),
            format!("[{section}]\n{option} = '{mark} no://url'\n"),
        ]
    };
    let mut refused = 0;
    for (key, mark) in [
        ("database.url", DATABASE),
        ("database.listen_url", LISTEN),
        ("rabbitmq.url", BROKER),
        ("rabbitmq.management_url", MANAGEMENT),
        ("jetstream.url", NATS),
        ("kafka.password", KAFKA),
        ("alerts.slack_url", SLACK),
        ("alerts.webhook_url", WEBHOOK),
        ("alerts.webhook_token", TOKEN),
        ("admin.token", ADMIN),
        ("admin.wake_key", WAKE),
        ("intake.secrets", INTAKE),
    ] {
        for text in odd_forms(key, mark) {
            std::fs::write(path, &text).unwrap();
            let settings = [
                TALKATIVE,
                ("BELLWIRE_CONFIG", path),
                ("DATABASE_URL", UNSET),
            ];
            let run = Relay::start(&[], &settings, &["check"])
                .finished(SOON)
                .await;
            refused += usize::from(run.status.code() == Some(2));
            said.add(
                format!("check of {text}").replace(mark, "…"),
                run.stdout + &run.stderr,
            );
        }
        let odd = format!("{mark} é://");
        let settings = [TALKATIVE, (key, odd.as_str()), ("DATABASE_URL", UNSET)];
        let run = Relay::start(&[], &settings, &["check"])
            .finished(SOON)
            .await;
        said.add(format!("check with {key}"), run.stdout + &run.stderr);
    }
    for secret in [
        INTAKE[..9].to_owned(),
        format!("whsk_{INTAKE}"),
        format!("whsec_{INTAKE}!"),
    ] {
        let text = format!("{SOURCES}[intake.secrets]\nplain = '{secret}'\n");
        std::fs::write(path, text).unwrap();
        let run = Relay::start(&[], &[TALKATIVE, ("BELLWIRE_CONFIG", path)], &["run"]);
        let run = run.finished(Duration::from_secs(20)).await;
        assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
        said.add("run with a bad secret", run.stdout + &run.stderr);
    }
    assert!(refused >= 60, "only {refused} were refused");
    said.assert_hides_all();
}
