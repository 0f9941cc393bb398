//! The relays: processes of this very program, as a user would run them.

use std::fs::{File, OpenOptions};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use tokio::process::{Child, Command};

use super::stage::Stage;
use crate::config::{Config, KafkaConfig, MessageId, SinkSetting};
use crate::event::BUCKETS;
use crate::store::{ReplicaStatus, Store};

/// They connect to two servers and share the buckets out.
const UP_WITHIN: Duration = Duration::from_secs(30);
/// Between looks at the replicas.
const LOOK_PAUSE: Duration = Duration::from_millis(20);
/// Shown of a relay's log when something went wrong.
const LAST_LINES: usize = 10;

struct Relay {
    name: String,
    // Killed with SIGKILL when dropped: nothing is left running, whatever happens to the demo.
    process: Child,
    log: PathBuf,
}

/// All relays that were started.
pub(super) struct Relays<'a> {
    stage: &'a Stage,
    running: Vec<Relay>,
    /// Of those killed on purpose, and of all others once stopped.
    logs: Vec<PathBuf>,
    started: u8,
    keep_logs: bool,
}

impl<'a> Relays<'a> {
    pub(super) fn new(stage: &'a Stage) -> Self {
        Self {
            stage,
            running: Vec::new(),
            logs: Vec::new(),
            started: 0,
            keep_logs: false,
        }
    }

    /// Starts one more.
    pub(super) fn start(&mut self) -> anyhow::Result<()> {
        let name = format!("relay-{}", char::from(b'a' + self.started % 26));
        self.started += 1;
        let log = self.stage.log_path(&name);
        let stderr = create_new(&log).with_context(|| format!("cannot write {}", log.display()))?;
        self.logs.push(log.clone());
        let process = command(self.stage.config(), &name, stderr)?
            .spawn()
            .context("cannot start a relay")?;
        self.running.push(Relay { name, process, log });
        Ok(())
    }

    /// Waits until every one can publish and has its share of the buckets.
    pub(super) async fn up(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + UP_WITHIN;
        loop {
            self.check_alive()?;
            let replicas = self.stage.store().replicas().await?;
            let names: Vec<&str> = self
                .running
                .iter()
                .map(|relay| relay.name.as_str())
                .collect();
            if all_delivering(&replicas, &names) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("the relays were not up within {UP_WITHIN:?}");
            }
            tokio::time::sleep(LOOK_PAUSE).await;
        }
    }

    /// A relay that ended by itself is a failure of the demo.
    pub(super) fn check_alive(&mut self) -> anyhow::Result<()> {
        for relay in &mut self.running {
            if let Some(status) = relay
                .process
                .try_wait()
                .context("cannot look after a relay")?
            {
                bail!("{} ended by itself: {status}", relay.name);
            }
        }
        Ok(())
    }

    /// Kills the first with SIGKILL. Answers its name.
    pub(super) async fn kill_one(&mut self) -> anyhow::Result<String> {
        let mut relay = self.running.remove(0);
        // SIGKILL to it alone; waits until it is gone.
        relay
            .process
            .kill()
            .await
            .with_context(|| format!("cannot kill {}", relay.name))?;
        Ok(relay.name)
    }

    /// The end of each log, for a report of trouble. The files stay then.
    pub(super) fn last_lines(&mut self) -> Vec<String> {
        self.keep_logs = true;
        let mut lines = Vec::new();
        for relay in &self.running {
            lines.push(format!(
                "{} (whole log: {}):",
                relay.name,
                relay.log.display()
            ));
            let text = std::fs::read_to_string(&relay.log).unwrap_or_default();
            let all: Vec<&str> = text.lines().collect();
            let rest = all.len().saturating_sub(LAST_LINES);
            lines.extend(all.iter().skip(rest).map(|line| format!("  {line}")));
        }
        lines
    }
}

impl Drop for Relays<'_> {
    fn drop(&mut self) {
        if !self.keep_logs {
            for log in &self.logs {
                // In the temporary directory: left behind, it would not hurt.
                let _ = std::fs::remove_file(log);
            }
        }
    }
}

fn all_delivering(replicas: &[ReplicaStatus], names: &[&str]) -> bool {
    let delivering = |name: &&str| {
        replicas
            .iter()
            .any(|replica| is_of(replica, name) && replica.ready && replica.buckets > 0)
    };
    names.iter().all(delivering) && buckets(replicas) == i32::from(BUCKETS)
}

fn buckets(replicas: &[ReplicaStatus]) -> i32 {
    replicas.iter().map(|replica| replica.buckets).sum()
}

/// A replica's name in the database is the relay's with the number of its token.
fn is_of(replica: &ReplicaStatus, relay: &str) -> bool {
    replica
        .name
        .strip_prefix(relay)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('#'))
}

/// Waits until the dead relay is forgotten and others own every bucket. None if they never do.
pub(super) async fn taken_over(
    store: &Store,
    dead: &str,
    killed: Instant,
    patience: Duration,
) -> Option<Duration> {
    while killed.elapsed() < patience {
        // An error here says nothing: the writers and the consumer will notice a lost server.
        if let Ok(replicas) = store.replicas().await
            && !replicas.iter().any(|replica| is_of(replica, dead))
            && buckets(&replicas) == i32::from(BUCKETS)
        {
            return Some(killed.elapsed());
        }
        tokio::time::sleep(LOOK_PAUSE).await;
    }
    None
}

/// Never follows a link that somebody put there.
fn create_new(path: &PathBuf) -> std::io::Result<File> {
    OpenOptions::new().write(true).create_new(true).open(path)
}

/// `bellwire run`, with everything that we work with given by the environment: the child then works
/// with the same, whatever configuration file it finds.
///
/// It stays in our process group: Ctrl-C and a closed terminal reach it too, should we not live to
/// end it.
fn command(config: &Config, name: &str, stderr: File) -> anyhow::Result<Command> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut command = Command::new(program);
    for (variable, _) in std::env::vars_os() {
        if variable.to_string_lossy().starts_with("BELLWIRE_") {
            command.env_remove(variable);
        }
    }
    // What they hold is given by value.
    command
        .env_remove("DATABASE_URL_FILE")
        .env_remove("AMQP_URL_FILE")
        .env_remove("NATS_URL_FILE")
        .env_remove("KAFKA_BOOTSTRAP_SERVERS_FILE");
    command
        .arg("run")
        .envs(environment(config, name))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr)
        .kill_on_drop(true);
    Ok(command)
}

fn environment(config: &Config, name: &str) -> Vec<(&'static str, String)> {
    let Config {
        database,
        rabbitmq,
        jetstream,
        kafka,
        relay,
        retry,
        log,
        ..
    } = config;
    let duration = |duration| humantime::format_duration(duration).to_string();
    let message_id = match rabbitmq.message_id {
        MessageId::Id => "id",
        MessageId::EventId => "event_id",
    };
    let sink = match relay.sink {
        SinkSetting::Jetstream => "jetstream",
        SinkSetting::Kafka => "kafka",
        SinkSetting::Rabbitmq | SinkSetting::Null => "rabbitmq",
    };
    let mut environment = vec![
        // Whatever a configuration file says: the demo counts what arrives there.
        ("BELLWIRE_RELAY__SINK", sink.to_owned()),
        ("BELLWIRE_JETSTREAM__PREFIX", jetstream.prefix.clone()),
        ("BELLWIRE_JETSTREAM__SOURCE", jetstream.source.clone()),
        (
            "BELLWIRE_JETSTREAM__ACK_TIMEOUT",
            duration(jetstream.ack_timeout),
        ),
        (
            "BELLWIRE_JETSTREAM__CONNECT_TIMEOUT",
            duration(jetstream.connect_timeout),
        ),
        ("BELLWIRE_DATABASE__SCHEMA", database.schema.clone()),
        ("BELLWIRE_DATABASE__TABLE", database.table.clone()),
        ("BELLWIRE_RABBITMQ__EXCHANGE", rabbitmq.exchange.clone()),
        ("BELLWIRE_RABBITMQ__SOURCE", rabbitmq.source.clone()),
        ("BELLWIRE_RABBITMQ__MESSAGE_ID", message_id.to_owned()),
        (
            "BELLWIRE_RABBITMQ__CONFIRM_TIMEOUT",
            duration(rabbitmq.confirm_timeout),
        ),
        (
            "BELLWIRE_RABBITMQ__CONNECT_TIMEOUT",
            duration(rabbitmq.connect_timeout),
        ),
        ("BELLWIRE_RELAY__NAME", name.to_owned()),
        ("BELLWIRE_RELAY__PARTITIONS", relay.partitions.to_string()),
        ("BELLWIRE_RELAY__WINDOW", relay.window.to_string()),
        ("BELLWIRE_RELAY__BATCH_SIZE", relay.batch_size.to_string()),
        ("BELLWIRE_RELAY__LEASE", duration(relay.lease)),
        ("BELLWIRE_RELAY__TICK", duration(relay.tick)),
        ("BELLWIRE_RELAY__GRACE", duration(relay.grace)),
        (
            "BELLWIRE_RETRY__MAX_ATTEMPTS",
            retry.max_attempts.to_string(),
        ),
        ("BELLWIRE_RETRY__BACKOFF", duration(retry.backoff)),
        (
            "BELLWIRE_RETRY__STOP_AFTER_FAILURES",
            retry.stop_after_failures.to_string(),
        ),
        // Two relays cannot open the same port.
        ("BELLWIRE_ADMIN__LISTEN", "off".to_owned()),
        ("BELLWIRE_LOG__LEVEL", log.level.clone()),
        ("BELLWIRE_LOG__FORMAT", "text".to_owned()),
    ];
    for (variable, url) in [
        ("DATABASE_URL", &database.url),
        ("AMQP_URL", &rabbitmq.url),
        ("NATS_URL", &jetstream.url),
    ] {
        if let Some(url) = url {
            environment.push((variable, url.expose().to_owned()));
        }
    }
    if let Some(stream) = &jetstream.stream {
        environment.push(("BELLWIRE_JETSTREAM__STREAM", stream.clone()));
    }
    environment.extend(of_kafka(kafka));
    for (variable, file) in [
        ("BELLWIRE_DATABASE__CA_FILE", &database.ca_file),
        ("BELLWIRE_DATABASE__CERT_FILE", &database.cert_file),
        ("BELLWIRE_DATABASE__KEY_FILE", &database.key_file),
        ("BELLWIRE_RABBITMQ__CA_FILE", &rabbitmq.ca_file),
        ("BELLWIRE_RABBITMQ__CERT_FILE", &rabbitmq.cert_file),
        ("BELLWIRE_RABBITMQ__KEY_FILE", &rabbitmq.key_file),
        (
            "BELLWIRE_JETSTREAM__CREDENTIALS_FILE",
            &jetstream.credentials_file,
        ),
        ("BELLWIRE_JETSTREAM__NKEY_FILE", &jetstream.nkey_file),
        ("BELLWIRE_JETSTREAM__CA_FILE", &jetstream.ca_file),
        ("BELLWIRE_JETSTREAM__CERT_FILE", &jetstream.cert_file),
        ("BELLWIRE_JETSTREAM__KEY_FILE", &jetstream.key_file),
        ("BELLWIRE_KAFKA__CA_FILE", &kafka.ca_file),
        ("BELLWIRE_KAFKA__CERT_FILE", &kafka.cert_file),
        ("BELLWIRE_KAFKA__KEY_FILE", &kafka.key_file),
    ] {
        if let Some(file) = file {
            // It came from text, so it is text.
            environment.push((variable, file.to_string_lossy().into_owned()));
        }
    }
    environment
}

/// All but the properties of librdkafka, whose names are none of variables, and the files.
fn of_kafka(kafka: &KafkaConfig) -> Vec<(&'static str, String)> {
    let duration = |duration| humantime::format_duration(duration).to_string();
    let mut environment = vec![
        ("BELLWIRE_KAFKA__TLS", kafka.tls.to_string()),
        ("BELLWIRE_KAFKA__PREFIX", kafka.prefix.clone()),
        ("BELLWIRE_KAFKA__SOURCE", kafka.source.clone()),
        ("BELLWIRE_KAFKA__LINGER", duration(kafka.linger)),
        (
            "BELLWIRE_KAFKA__COMPRESSION",
            kafka.compression.name().to_owned(),
        ),
        (
            "BELLWIRE_KAFKA__MAX_MESSAGE_BYTES",
            kafka.max_message_bytes.to_string(),
        ),
        (
            "BELLWIRE_KAFKA__CONFIRM_TIMEOUT",
            duration(kafka.confirm_timeout),
        ),
        (
            "BELLWIRE_KAFKA__CONNECT_TIMEOUT",
            duration(kafka.connect_timeout),
        ),
    ];
    let password = kafka.password.as_ref();
    for (variable, value) in [
        ("KAFKA_BOOTSTRAP_SERVERS", kafka.bootstrap_servers.clone()),
        (
            "BELLWIRE_KAFKA__SASL_MECHANISM",
            kafka.sasl_mechanism.map(|one| one.name().to_owned()),
        ),
        ("BELLWIRE_KAFKA__USERNAME", kafka.username.clone()),
        (
            "BELLWIRE_KAFKA__PASSWORD",
            password.map(|secret| secret.expose().to_owned()),
        ),
    ] {
        if let Some(value) = value {
            environment.push((variable, value));
        }
    }
    environment
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replica(name: &str, ready: bool, buckets: i32) -> ReplicaStatus {
        ReplicaStatus {
            token: 1,
            name: name.into(),
            ready,
            connected: true,
            up_seconds: 1.0,
            lease_seconds: 30.0,
            buckets,
        }
    }

    #[test]
    fn up_means_all_ready_with_all_buckets_shared_out() {
        let names = ["relay-a", "relay-b"];
        let up = |a, b| all_delivering(&[a, b], &names);
        assert!(up(
            replica("relay-a#1", true, 32),
            replica("relay-b#2", true, 32)
        ));
        assert!(!up(
            replica("relay-a#1", true, 32),
            replica("relay-b#2", false, 32)
        ));
        assert!(!up(
            replica("relay-a#1", true, 64),
            replica("relay-b#2", true, 0)
        ));
        assert!(!up(
            replica("relay-a#1", true, 32),
            replica("relay-b#2", true, 31)
        ));
    }

    #[test]
    fn the_whole_environment_of_a_relay_is_a_valid_configuration() {
        let mut builder = config::Config::builder();
        for (variable, value) in environment(&Config::default(), "relay-a") {
            if let Some(key) = variable.strip_prefix("BELLWIRE_") {
                builder = builder
                    .set_override(key.to_lowercase().replace("__", "."), value)
                    .unwrap();
            }
        }
        let read: Config = builder.build().unwrap().try_deserialize().unwrap();
        read.validate().unwrap();
        assert_eq!(read.relay.name.as_deref(), Some("relay-a"));
        assert_eq!(read.relay.lease, Config::default().relay.lease);
        assert_eq!(read.admin.listen.0, None);
    }
}
