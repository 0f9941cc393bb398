//! TLS to both servers: what was asked to be verified is verified, and what fails is said with the
//! option that mends it. Nothing is lost meanwhile.

use std::path::Path;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::support::{Ledger, Proxy, Run, SOON, TlsServers, World, amqp_url};

type Setting<'a> = (&'a str, &'a str);

impl World {
    /// `check` with these settings over the usual ones: the lines about database and RabbitMQ.
    async fn checked(&self, settings: &[Setting<'_>]) -> (String, String) {
        let run = self.command(settings, &["check"]).await;
        let line = |of: &str| {
            let found = run.stdout.lines().find(|line| line[5..].starts_with(of));
            found
                .unwrap_or_else(|| panic!("{}\n{}", run.stdout, run.stderr))
                .to_owned()
        };
        (line("database"), line("rabbitmq"))
    }

    /// Everything written has arrived, and no outage was taken for a failure.
    async fn assert_all_arrived(&mut self) {
        let committed = self.committed().await;
        let arrivals = self.arrivals(committed.len(), SOON).await;
        Ledger::of(&arrivals).assert_sound(&committed);
        self.until_published(SOON).await;
        let charged: i64 = self
            .one("SELECT count(*) FROM outbox WHERE attempts > 0")
            .await;
        assert_eq!(charged, 0);
    }
}

fn borrowed<'a>(settings: &'a [(&'static str, String)]) -> Vec<Setting<'a>> {
    settings
        .iter()
        .map(|(key, value)| (*key, value.as_str()))
        .collect()
}

#[track_caller]
fn assert_says(line: &str, words: &[&str]) {
    for word in words {
        assert!(line.contains(word), "`{word}` is missing: {line}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_arrive_with_both_connections_encrypted() {
    let Some(servers) = TlsServers::ours() else {
        return;
    };
    let mut world = World::new().await;
    let settings = servers.settings();
    let relay = world.ready_relay(&borrowed(&settings)).await;
    world.fill("order", 10, 20).await;
    world.assert_all_arrived().await;
    let (sessions, encrypted): (i64, i64) = {
        let row = world
            .db
            .query_one(
                "SELECT count(*), count(*) FILTER (WHERE s.ssl AND s.client_dn = '/CN=bellwire_certificate')
                 FROM pg_stat_activity a JOIN pg_stat_ssl s USING (pid)
                 WHERE a.application_name = 'bellwire run ' || $1",
                &[&relay.name],
            )
            .await
            .unwrap();
        (row.get(0), row.get(1))
    };
    assert!(sessions >= 2, "{sessions}");
    assert_eq!(encrypted, sessions);
    drop(relay);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_parameters_of_the_database_url_mean_what_they_mean_to_libpq() {
    let Some(servers) = TlsServers::ours() else {
        return;
    };
    let world = World::new().await;
    let (ca, other_ca) = (servers.file("ca.crt"), servers.file("other-ca.crt"));
    let ours = format!(
        "sslcert={}&sslkey={}",
        servers.file("client.crt"),
        servers.file("client.key")
    );
    let refused_identity = format!(
        "sslcert={}&sslkey={}",
        servers.file("other-client.crt"),
        servers.file("other-client.key")
    );
    let by_certificate = servers.postgres_by_certificate.as_str();
    let anybody = servers.postgres.as_str();
    let misnamed = anybody.replace("@localhost", "@wrong.example");
    let misnamed = format!("{misnamed}?hostaddr=127.0.0.1&");
    let plain = |url: &str| format!("{url}?");
    // Who takes us, the parameters, and what `check` says.
    let cases: &[(String, String, &str)] = &[
        (
            plain(by_certificate),
            format!("{ours}&sslmode=verify-full&sslrootcert={ca}"),
            "ok ",
        ),
        (
            plain(by_certificate),
            format!("{ours}&sslmode=require"),
            "ok ",
        ),
        (plain(by_certificate), ours.clone(), "ok "),
        (
            plain(by_certificate),
            format!("{ours}&sslmode=allow"),
            "ok ",
        ),
        (
            plain(by_certificate),
            format!("{ours}&sslmode=disable"),
            "sslmode=require",
        ),
        (
            plain(by_certificate),
            "sslmode=require".into(),
            "database.cert_file",
        ),
        (
            plain(by_certificate),
            format!("{refused_identity}&sslmode=require"),
            "database.cert_file",
        ),
        // What `prefer` gives up for a connection, and `require` does not.
        (
            plain(anybody),
            format!("{refused_identity}&sslmode=prefer"),
            "ok ",
        ),
        (
            plain(anybody),
            format!("{refused_identity}&sslmode=require"),
            "database.cert_file",
        ),
        (
            plain(anybody),
            format!("sslmode=require&sslrootcert={other_ca}"),
            "database.ca_file",
        ),
        (plain(anybody), "sslmode=require".into(), "ok "),
        (
            plain(anybody),
            format!("sslmode=verify-ca&sslrootcert={other_ca}"),
            "database.ca_file",
        ),
        // The system's roots, which the loop below sets.
        (plain(anybody), "sslmode=verify-ca".into(), "ok "),
        (
            plain(anybody),
            "sslmode=verify-full&sslrootcert=system".into(),
            "ok ",
        ),
        (
            misnamed.clone(),
            format!("sslmode=verify-full&sslrootcert={ca}"),
            "for localhost, 127.0.0.1, not for wrong.example",
        ),
        (
            misnamed.clone(),
            format!("sslrootcert={ca}"),
            "sslmode=verify-ca",
        ),
        (
            misnamed.clone(),
            format!("sslmode=verify-ca&sslrootcert={ca}"),
            "ok ",
        ),
        (
            misnamed.clone(),
            format!("sslmode=require&sslrootcert={ca}"),
            "ok ",
        ),
    ];
    for (url, parameters, says) in cases {
        let url = format!("{url}{parameters}");
        let run = world
            .command(
                &[("DATABASE_URL", &url), ("SSL_CERT_FILE", &ca)],
                &["check"],
            )
            .await;
        let text = format!("{}{}", run.stdout, run.stderr);
        let line = text.lines().next().unwrap_or_default();
        assert!(line.contains(says), "{url}\n{says}\n{text}");
    }
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_brokers_certificate_is_verified_and_ours_is_shown() {
    let Some(servers) = TlsServers::ours() else {
        return;
    };
    let world = World::new().await;
    let misnamed = Proxy::at("127.0.0.2", &servers.amqps).await;
    let misnamed = misnamed.through(&servers.amqps);
    let no_tls_there = amqp_url().replace("amqp://", "amqps://");
    let tls_there = servers.amqps.replace("amqps://", "amqp://");
    let (ca, other_ca, other_cert, other_key) = (
        servers.file("ca.crt"),
        servers.file("other-ca.crt"),
        servers.file("other-client.crt"),
        servers.file("other-client.key"),
    );
    // What is set otherwise, and what `check` says then.
    let cases: &[(&[Setting<'_>], &[&str])] = &[
        (&[], &["ok "]),
        (
            &[("rabbitmq.ca_file", &other_ca)],
            &["signed by no CA that is trusted here", "rabbitmq.ca_file"],
        ),
        // By the system's roots.
        (
            &[("rabbitmq.ca_file", ""), ("SSL_CERT_FILE", &other_ca)],
            &["signed by no CA that is trusted here", "rabbitmq.ca_file"],
        ),
        (
            &[("rabbitmq.ca_file", ""), ("SSL_CERT_FILE", &ca)],
            &["ok "],
        ),
        (
            &[("AMQP_URL", &misnamed)],
            &[
                "for localhost, 127.0.0.1, not for 127.0.0.2",
                "rabbitmq.url",
            ],
        ),
        (
            &[("rabbitmq.cert_file", ""), ("rabbitmq.key_file", "")],
            // Its alert may be lost to a reset of the connection.
            &["FAIL", "client certificate", "rabbitmq.cert_file"],
        ),
        (
            &[
                ("rabbitmq.cert_file", &other_cert),
                ("rabbitmq.key_file", &other_key),
            ],
            &["FAIL", "client certificate", "rabbitmq.cert_file"],
        ),
        (
            &[("AMQP_URL", &no_tls_there)],
            &["does not speak TLS", "rabbitmq.url"],
        ),
        (
            &[
                ("AMQP_URL", &tls_there),
                ("rabbitmq.ca_file", ""),
                ("rabbitmq.cert_file", ""),
                ("rabbitmq.key_file", ""),
            ],
            &["FAIL", "amqps://"],
        ),
    ];
    let right = servers.settings();
    for (wrong, words) in cases {
        let mut settings = borrowed(&right);
        settings.extend_from_slice(wrong);
        let (_, line) = world.checked(&settings).await;
        assert_says(&line, words);
    }
    world.clean().await;
}

/// Readers see the old content or the new.
fn replace(file: &Path, with: &str) {
    let new = file.with_extension("new");
    std::fs::copy(with, &new).unwrap();
    std::fs::rename(new, file).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_with_a_wrong_ca_goes_on_trying_and_delivers_once_the_file_is_mended() {
    let Some(servers) = TlsServers::ours() else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ca.crt");
    for section in ["database", "rabbitmq"] {
        let mut world = World::new().await;
        world.fill("order", 5, 4).await;
        replace(&file, &servers.file("other-ca.crt"));
        let mut settings = servers.settings();
        let option = format!("{section}.ca_file");
        settings.retain(|(key, _)| **key != option);
        let mut settings = borrowed(&settings);
        settings.push((&option, file.to_str().unwrap()));
        let mut relay = world.relay(&settings);
        relay
            .until_logged("signed by no CA that is trusted here", SOON)
            .await;
        assert_eq!(relay.logged(&option), relay.logged("signed by no CA"));
        assert!(relay.is_running());
        assert_eq!(world.count("published").await, 0);
        replace(&file, &servers.file("ca.crt"));
        world.assert_all_arrived().await;
        drop(relay);
        world.clean().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_goes_missing_later_is_said_and_ends_nothing() {
    let Some(servers) = TlsServers::ours() else {
        return;
    };
    let mut world = World::new().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ca.crt");
    replace(&file, &servers.file("ca.crt"));
    let settings = servers.settings();
    let mut settings = borrowed(&settings);
    settings.push(("database.ca_file", file.to_str().unwrap()));
    let relay = world.ready_relay(&settings).await;
    std::fs::remove_file(&file).unwrap();
    world
        .sql(&format!(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE application_name = 'bellwire run {}'",
            relay.name
        ))
        .await;
    world.fill("order", 5, 4).await;
    relay
        .until_logged(&format!("database.ca_file: {}", file.display()), SOON)
        .await;
    assert_eq!(world.count("published").await, 0);
    replace(&file, &servers.file("ca.crt"));
    world.assert_all_arrived().await;
    drop(relay);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_without_the_certificate_that_the_broker_demands_loses_nothing() {
    let Some(servers) = TlsServers::ours() else {
        return;
    };
    let mut world = World::new().await;
    world.fill("order", 5, 4).await;
    let ca = servers.file("ca.crt");
    let without = [
        ("AMQP_URL", servers.amqps.as_str()),
        ("rabbitmq.ca_file", &ca),
    ];
    let mut relay = world.relay(&without);
    relay.until_logged("rabbitmq.cert_file", SOON).await;
    assert!(relay.is_running());
    relay.terminate(SOON).await;
    let settings = servers.settings();
    let _relay = world.relay(&borrowed(&settings));
    world.assert_all_arrived().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_without_tls_gets_no_password_where_tls_is_demanded() {
    let world = World::new().await;
    for (parameters, words) in [
        (
            "sslmode=require",
            ["does not support TLS", "sslmode=prefer"],
        ),
        (
            "sslmode=verify-full",
            ["does not support TLS", "ssl at the server"],
        ),
    ] {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = server.local_addr().unwrap().port();
        let heard = tokio::spawn(async move {
            let (mut client, _) = server.accept().await.unwrap();
            let mut request = [0; 8];
            client.read_exact(&mut request).await.unwrap();
            client.write_all(b"N").await.unwrap();
            let mut more = Vec::new();
            client.read_to_end(&mut more).await.ok();
            more
        });
        let url = format!("postgres://u:S3cret@127.0.0.1:{port}/d?{parameters}");
        let (line, _) = world.checked(&[("DATABASE_URL", &url)]).await;
        assert_says(&line, &words);
        assert_eq!(heard.await.unwrap(), b"", "said after the refusal");
    }
    world.clean().await;
}

/// One line, exit code 2, and nothing of what key files hold.
fn assert_refused(run: &Run, words: &[&str], key_files: &[&str]) {
    assert_eq!(run.status.code(), Some(2), "{}\n{}", run.stdout, run.stderr);
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
    assert_says(&run.stderr, words);
    for file in key_files {
        let text = std::fs::read_to_string(file).unwrap();
        for line in text.lines().filter(|line| !line.starts_with('-')) {
            assert!(!run.stderr.contains(line), "{}", run.stderr);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_cannot_be_used_stop_the_start_by_name() {
    let Some(servers) = TlsServers::ours() else {
        return;
    };
    let world = World::new().await;
    let directory = tempfile::tempdir().unwrap();
    let written = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (certificate, key) = (servers.file("client.crt"), servers.file("client.key"));
    let key_text = std::fs::read_to_string(&key).unwrap();
    let missing = directory
        .path()
        .join("missing")
        .to_str()
        .unwrap()
        .to_owned();
    let damaged = written("damaged.key", &key_text.replace("-----END", "----END"));
    let garbled = written("garbled.key", &key_text.replace("\nM", "\n!S3cret"));
    let encrypted = written(
        "encrypted.key",
        &key_text.replace("PRIVATE", "ENCRYPTED PRIVATE"),
    );
    let no_der = written(
        "ca.crt",
        "-----BEGIN CERTIFICATE-----\nUzNjcmV0\n-----END CERTIFICATE-----\n",
    );
    let other_key = servers.file("other-client.key");
    let cases: &[(&str, &str, &[&str])] = &[
        (
            "ca_file",
            &missing,
            &["ca_file", &missing, "cannot be read", "No such file"],
        ),
        (
            "ca_file",
            &key,
            &["ca_file", &key, "no certificate in PEM form"],
        ),
        (
            "ca_file",
            &no_der,
            &["ca_file", &no_der, "no usable CA certificate at place 1"],
        ),
        (
            "cert_file",
            &missing,
            &["cert_file", &missing, "cannot be read"],
        ),
        (
            "cert_file",
            &key,
            &["cert_file", &key, "no certificate in PEM form"],
        ),
        (
            "key_file",
            &missing,
            &["key_file", &missing, "cannot be read"],
        ),
        (
            "key_file",
            &certificate,
            &["key_file", &certificate, "no private key in PEM form"],
        ),
        ("key_file", &damaged, &["key_file", &damaged, "damaged"]),
        ("key_file", &garbled, &["key_file", &garbled, "damaged"]),
        (
            "key_file",
            &encrypted,
            &["key_file", &encrypted, "passphrase"],
        ),
        (
            "key_file",
            &other_key,
            &["key_file", &other_key, "does not fit", &certificate],
        ),
        ("key_file", "", &["cert_file", "without", "key_file"]),
        ("cert_file", "", &["key_file", "without", "cert_file"]),
    ];
    let right = servers.settings();
    for section in ["database", "rabbitmq"] {
        for (option, file, words) in cases {
            let option = format!("{section}.{option}");
            let mut settings = borrowed(&right);
            settings.push((&option, file));
            let run = world.command(&settings, &["run"]).await;
            assert_refused(&run, words, &[&key, &other_key, &garbled]);
            assert_says(&run.stderr, &[&format!("bellwire: {section}.")]);
        }
    }
    let url = format!(
        "{}?sslmode=require&sslcert={certificate}&sslkey={other_key}",
        servers.postgres
    );
    let run = world.command(&[("DATABASE_URL", &url)], &["run"]).await;
    assert_refused(
        &run,
        &["database.url: sslkey", &other_key, "does not fit"],
        &[&other_key],
    );
    world.clean().await;
}
