//! `[kafka]`: Where events go when `relay.sink` is `kafka`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use super::{ConfigError, HOUR, MILLISECOND, SECOND, Secret, at_most, within};
use crate::tls::{self, Tls};

/// What the names of topics begin with: `<prefix>.<aggregate_type>`.
const DEFAULT_PREFIX: &str = "events";
/// Well below the lease, so that a re-send still happens under the same claim.
const DEFAULT_CONFIRM_TIMEOUT: Duration = Duration::from_secs(10);
/// What gathers meanwhile travels together; a single event is late by no more.
const DEFAULT_LINGER: Duration = Duration::from_millis(1);
/// What brokers take unless told otherwise, less what a batch adds around a record.
const DEFAULT_MAX_MESSAGE_BYTES: u64 = 1_000_000;
/// The longest that librdkafka can be told.
const MOST_MESSAGE_BYTES: u64 = 1_000_000_000;
/// Below it librdkafka would hardly get one request through.
const SHORTEST_CONFIRM_TIMEOUT: Duration = SECOND;
/// The longest `prefix`: leaves most of a topic's 249 letters to the aggregate type.
const LONGEST_PREFIX: usize = 100;
/// The longest `source`: it is a header of every record.
const LONGEST_SOURCE: usize = 100;
/// Properties that options of ours set, or that a promise rests on.
const NOT_PROPERTIES: &[&str] = &[
    "acks",
    "allow.auto.create.topics",
    "batch.num.messages",
    "bootstrap.servers",
    "client.id",
    "compression.codec",
    "compression.type",
    "delivery.report.only.error",
    "delivery.timeout.ms",
    "enable.gapless.guarantee",
    "enable.idempotence",
    "enable.sasl.oauthbearer.unsecure.jwt",
    "enable.ssl.certificate.verification",
    "linger.ms",
    "message.max.bytes",
    "message.send.max.retries",
    "message.timeout.ms",
    "metadata.broker.list",
    "partitioner",
    "queue.buffering.max.ms",
    "queuing.strategy",
    "request.required.acks",
    "request.timeout.ms",
    "retries",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.password",
    "sasl.username",
    "security.protocol",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.key.location",
    "topic.metadata.propagation.max.ms",
    "transactional.id",
];

/// How we say who we are.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub enum SaslMechanism {
    /// The password itself: only over TLS is it safe.
    Plain,
    /// A proof of knowing it, with SHA-256.
    ScramSha256,
    /// A proof of knowing it, with SHA-512.
    ScramSha512,
}

impl SaslMechanism {
    /// As the protocol spells it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "PLAIN",
            Self::ScramSha256 => "SCRAM-SHA-256",
            Self::ScramSha512 => "SCRAM-SHA-512",
        }
    }
}

impl TryFrom<String> for SaslMechanism {
    type Error = String;

    fn try_from(value: String) -> Result<Self, String> {
        [Self::Plain, Self::ScramSha256, Self::ScramSha512]
            .into_iter()
            .find(|known| known.name().eq_ignore_ascii_case(&value))
            .ok_or_else(|| {
                format!("must be `PLAIN`, `SCRAM-SHA-256` or `SCRAM-SHA-512`, is `{value}`")
            })
    }
}

/// How batches are compressed. What consumers see is the same.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub enum Compression {
    /// Not at all: the processor is left to the events.
    #[default]
    None,
    /// By LZ4.
    Lz4,
    /// By Snappy.
    Snappy,
}

impl Compression {
    /// As librdkafka spells it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Lz4 => "lz4",
            Self::Snappy => "snappy",
        }
    }
}

impl TryFrom<String> for Compression {
    type Error = String;

    fn try_from(value: String) -> Result<Self, String> {
        [Self::None, Self::Lz4, Self::Snappy]
            .into_iter()
            .find(|known| known.name() == value)
            .ok_or_else(|| format!("must be `none`, `lz4` or `snappy`, is `{value}`"))
    }
}

/// `[kafka]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KafkaConfig {
    /// `host:9092`, several separated by commas; `KAFKA_BOOTSTRAP_SERVERS`.
    pub bootstrap_servers: Option<String>,
    /// Encrypt the connections, and verify the brokers' certificates and names.
    pub tls: bool,
    /// PEM file with the CA that they are verified by; the system's roots else.
    pub ca_file: Option<PathBuf>,
    /// PEM file with our own certificate, for brokers that ask for one.
    pub cert_file: Option<PathBuf>,
    /// PEM file with its key.
    pub key_file: Option<PathBuf>,
    /// How we say who we are; unset: not by SASL.
    pub sasl_mechanism: Option<SaslMechanism>,
    /// For SASL.
    pub username: Option<String>,
    /// For SASL.
    pub password: Option<Secret>,
    /// A file that holds the password.
    pub password_file: Option<PathBuf>,
    /// What names of topics begin with: `<prefix>.<aggregate_type>`.
    pub prefix: String,
    /// Names the installation, in a header of every record and as the client id.
    pub source: String,
    /// Make every message a CloudEvent in binary mode, too: its attributes as headers `ce_*`, with `source`
    /// as theirs.
    pub cloudevents: bool,
    /// May an event make its topic, where the brokers allow that? Else it waits until the topic is
    /// there.
    pub auto_create_topics: bool,
    /// How batches are compressed.
    pub compression: Compression,
    /// How long an event may wait for others to travel with.
    #[serde(with = "humantime_serde")]
    pub linger: Duration,
    /// The largest record that is sent, with key and headers. An event above it is given up at once.
    pub max_message_bytes: u64,
    /// A confirm that takes longer counts as lost with its producer. Must be below `relay.lease`.
    #[serde(with = "humantime_serde")]
    pub confirm_timeout: Duration,
    /// For the connection and the first answer.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
    /// Further properties of librdkafka, by their own names. Those that a promise rests on are refused.
    pub properties: BTreeMap<String, Secret>,
}

impl Default for KafkaConfig {
    fn default() -> Self {
        Self {
            bootstrap_servers: None,
            tls: false,
            ca_file: None,
            cert_file: None,
            key_file: None,
            sasl_mechanism: None,
            username: None,
            password: None,
            password_file: None,
            prefix: DEFAULT_PREFIX.into(),
            source: "bellwire".into(),
            cloudevents: false,
            auto_create_topics: false,
            compression: Compression::default(),
            linger: DEFAULT_LINGER,
            max_message_bytes: DEFAULT_MAX_MESSAGE_BYTES,
            confirm_timeout: DEFAULT_CONFIRM_TIMEOUT,
            connect_timeout: super::DEFAULT_CONNECT_TIMEOUT,
            properties: BTreeMap::new(),
        }
    }
}

impl KafkaConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if self.bootstrap_servers.is_some() {
            self.servers()?;
        }
        if let Some(tls) = self.tls()? {
            tls.client_config()?;
        }
        self.check_sasl()?;
        let letter = |letter: char| letter.is_ascii_alphanumeric() || ".-_".contains(letter);
        if self.prefix.is_empty()
            || self.prefix.len() > LONGEST_PREFIX
            || !self.prefix.chars().all(letter)
        {
            return Err(ConfigError::key(
                "kafka.prefix",
                format!(
                    "`{}` cannot begin the name of a topic: 1 to {LONGEST_PREFIX} ASCII letters, \
                     digits, dots, dashes and underscores",
                    self.prefix
                ),
            ));
        }
        if self.source.is_empty()
            || self.source.len() > LONGEST_SOURCE
            || !self.source.chars().all(letter)
        {
            return Err(ConfigError::key(
                "kafka.source",
                format!(
                    "must have 1 to {LONGEST_SOURCE} ASCII letters, digits, dots, dashes and \
                     underscores: it is the client id too"
                ),
            ));
        }
        within("kafka.linger", self.linger, Duration::ZERO, 10 * SECOND)?;
        super::at_least_one("kafka.max_message_bytes", self.max_message_bytes)?;
        at_most(
            "kafka.max_message_bytes",
            self.max_message_bytes,
            MOST_MESSAGE_BYTES,
        )?;
        within(
            "kafka.confirm_timeout",
            self.confirm_timeout,
            SHORTEST_CONFIRM_TIMEOUT,
            HOUR,
        )?;
        if self.linger >= self.confirm_timeout {
            return Err(ConfigError::key(
                "kafka.linger",
                "must be shorter than kafka.confirm_timeout",
            ));
        }
        let connect = self.connect_timeout;
        within("kafka.connect_timeout", connect, MILLISECOND, HOUR)?;
        self.check_properties()
    }

    fn check_sasl(&self) -> Result<(), ConfigError> {
        let given = [
            ("kafka.username", self.username.is_some()),
            ("kafka.password", self.password.is_some()),
        ];
        for (key, is_given) in given {
            let reason = match (self.sasl_mechanism, is_given) {
                (None, true) => "is given, but kafka.sasl_mechanism says nothing of SASL: set it",
                (Some(_), false) => "is not set, and kafka.sasl_mechanism needs it",
                _ => continue,
            };
            return Err(ConfigError::key(key, reason));
        }
        Ok(())
    }

    fn check_properties(&self) -> Result<(), ConfigError> {
        for name in self.properties.keys() {
            let key = format!("kafka.properties.\"{}\"", crate::event::OneLine(name));
            if NOT_PROPERTIES.contains(&name.as_str()) {
                return Err(ConfigError::key(
                    key,
                    "is set by an option of [kafka], or a promise rests on its value: leave it out",
                ));
            }
        }
        Ok(())
    }

    /// The brokers to begin with, as librdkafka takes them.
    ///
    /// # Errors
    /// There are none, or one is not `host:port`.
    pub(crate) fn servers(&self) -> Result<String, ConfigError> {
        let given = self.bootstrap_servers.as_deref().ok_or_else(|| {
            ConfigError::key(
                "kafka.bootstrap_servers",
                "is not set (KAFKA_BOOTSTRAP_SERVERS)",
            )
        })?;
        let server = |text: &str| {
            let (host, port) = text.trim().rsplit_once(':')?;
            let plain = |letter: char| letter.is_ascii_alphanumeric() || "-._:[]%".contains(letter);
            let sound = !host.is_empty() && host.chars().all(plain);
            let port: u16 = port.parse().ok().filter(|port| *port > 0)?;
            sound.then(|| format!("{host}:{port}"))
        };
        let servers: Option<Vec<_>> = given.split(',').map(server).collect();
        let servers = servers.ok_or_else(|| {
            // Somebody may have written a password into it.
            ConfigError::key(
                "kafka.bootstrap_servers",
                "must be brokers like host:9092, several separated by commas, without a scheme; user \
                 and password are kafka.username and kafka.password",
            )
        })?;
        Ok(servers.join(","))
    }

    /// What connections need if they are encrypted; None if they are not. Opens no file.
    ///
    /// # Errors
    /// Names the file that does not go with the rest.
    pub(crate) fn tls(&self) -> Result<Option<Tls>, ConfigError> {
        let why = "is given, but kafka.tls is not on: set kafka.tls = true";
        Ok(Tls::if_asked_for(self.tls, self.files(), why)?)
    }

    fn files(&self) -> tls::Files<'_> {
        [
            ("kafka.ca_file", self.ca_file.as_deref()),
            ("kafka.cert_file", self.cert_file.as_deref()),
            ("kafka.key_file", self.key_file.as_deref()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut KafkaConfig)) -> Option<String> {
        let mut config = KafkaConfig {
            bootstrap_servers: Some("h:9092".into()),
            ..KafkaConfig::default()
        };
        change(&mut config);
        config.validate().err().map(|error| error.to_string())
    }

    #[test]
    fn servers_are_hosts_with_ports_and_what_may_be_a_password_is_not_shown() {
        for servers in ["h:9092", "a.b:1, c-d:65535", "[::1]:9092"] {
            let change = |config: &mut KafkaConfig| config.bootstrap_servers = Some(servers.into());
            assert_eq!(refused(change), None, "{servers}");
        }
        for servers in [
            "",
            "h",
            ":9092",
            "h:0",
            "h:9092,",
            "h:99999",
            "u:S3cr@h:9092",
            "kafka://h:9092",
        ] {
            let change = |config: &mut KafkaConfig| config.bootstrap_servers = Some(servers.into());
            let error = refused(change).unwrap();
            assert!(error.starts_with("kafka.bootstrap_servers: "), "{error}");
            assert!(!error.contains("S3cr"), "{error}");
        }
    }

    #[test]
    fn sasl_is_asked_for_in_full_or_not_at_all() {
        let full = |config: &mut KafkaConfig| {
            config.sasl_mechanism = Some(SaslMechanism::ScramSha512);
            config.username = Some("u".into());
            config.password = Some("S3cr".into());
        };
        assert_eq!(refused(full), None);
        let lone = |config: &mut KafkaConfig| config.password = Some("S3cr".into());
        let error = refused(lone).unwrap();
        assert!(error.starts_with("kafka.password: "), "{error}");
        assert!(!error.contains("S3cr"), "{error}");
        let without = |config: &mut KafkaConfig| {
            config.sasl_mechanism = Some(SaslMechanism::Plain);
            config.username = Some("u".into());
        };
        assert!(refused(without).unwrap().starts_with("kafka.password: "));
        assert!(SaslMechanism::try_from("scram-sha-256".to_owned()).is_ok());
        assert!(SaslMechanism::try_from("GSSAPI".to_owned()).is_err());
    }

    #[test]
    fn less_security_than_asked_for_is_refused() {
        let error = refused(|config| config.ca_file = Some("ca.pem".into())).unwrap();
        assert!(error.starts_with("kafka.ca_file: "), "{error}");
    }

    #[test]
    fn what_the_promises_rest_on_cannot_be_set_beside_them() {
        for name in [
            "acks",
            "enable.idempotence",
            "partitioner",
            "transactional.id",
        ] {
            let change = |config: &mut KafkaConfig| {
                config.properties.insert(name.into(), "S3cr".into());
            };
            let error = refused(change).unwrap();
            assert!(error.contains(name) && !error.contains("S3cr"), "{error}");
        }
        let change = |config: &mut KafkaConfig| {
            let name = "queue.buffering.max.kbytes".to_owned();
            config.properties.insert(name, "1024".into());
        };
        assert_eq!(refused(change), None);
    }

    #[test]
    fn prefixes_that_begin_no_topic_are_refused() {
        for prefix in ["", "a b", "ü", "a/b", "{x}"] {
            let error = refused(|config| config.prefix = prefix.into()).unwrap();
            assert!(error.starts_with("kafka.prefix: "), "{error}");
        }
    }
}
