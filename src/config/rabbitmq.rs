//! `[rabbitmq]`: Where events go.

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use url::Url;

use super::{ConfigError, HOUR, MILLISECOND, Secret, within};
use crate::tls::{self, Tls};

/// A topic exchange: consumers bind to `order.*` or `*.OrderPlaced` on it.
pub const DEFAULT_EXCHANGE: &str = "domain-events";
/// Well below the lease, so that a re-send still happens under the same claim.
pub const DEFAULT_CONFIRM_TIMEOUT: Duration = Duration::from_secs(10);
/// A broker on the same network answers in milliseconds; a wrong address should show soon.
pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Which column becomes the AMQP message id.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub enum MessageId {
    /// The outbox id.
    #[default]
    Id,
    /// The row's UUID.
    EventId,
}

impl TryFrom<String> for MessageId {
    type Error = String;

    fn try_from(value: String) -> Result<Self, String> {
        match value.as_str() {
            "id" => Ok(Self::Id),
            "event_id" => Ok(Self::EventId),
            _ => Err(format!("must be `id` or `event_id`, is `{value}`")),
        }
    }
}

/// What other clients read from the URL's query about TLS. Ignored, it would be less security than
/// was asked for; certificate and name are always verified.
const NOT_IN_THE_URL: &[(&str, &str)] = &[
    ("cacertfile", "give rabbitmq.ca_file instead"),
    ("certfile", "give rabbitmq.cert_file instead"),
    ("keyfile", "give rabbitmq.key_file instead"),
    ("password", "give a key that is not encrypted"),
    ("depth", "leave it out"),
    (
        "verify",
        "leave it out: the server's certificate is always verified",
    ),
    (
        "fail_if_no_peer_cert",
        "leave it out: the server's certificate is always verified",
    ),
    (
        "server_name_indication",
        "use the name in the server's certificate as the URL's host",
    ),
];

/// `[rabbitmq]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RabbitmqConfig {
    /// `amqp://user:password@host:5672/vhost` or `amqps://…`; `AMQP_URL`.
    pub url: Option<Secret>,
    /// A file that holds the URL; `AMQP_URL_FILE`.
    pub url_file: Option<PathBuf>,
    /// PEM file with the CA that the server's certificate is verified by; the system's roots else.
    pub ca_file: Option<PathBuf>,
    /// PEM file with our own certificate, for servers that ask for one.
    pub cert_file: Option<PathBuf>,
    /// PEM file with its key.
    pub key_file: Option<PathBuf>,
    /// The management API, for example `http://localhost:15672`: asked before anything is claimed
    /// whether the exchange leads anywhere. User and password are those of `url` unless it has its own.
    pub management_url: Option<Secret>,
    /// Exchange to publish to, with the routing key `<aggregate_type>.<event_type>`.
    pub exchange: String,
    /// What type it must be of; unset: any. Needs `management_url`.
    pub exchange_type: Option<String>,
    /// `app_id` of every message: names the installation.
    pub source: String,
    /// Which column becomes the message id.
    pub message_id: MessageId,
    /// Make every message a CloudEvent in binary mode, too: its attributes as headers `ce_*`, with `source`
    /// as theirs.
    pub cloudevents: bool,
    /// A confirm that takes longer counts as lost with its channel. Must be below `relay.lease`.
    #[serde(with = "humantime_serde")]
    pub confirm_timeout: Duration,
    /// For the TCP connection and the AMQP handshake.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
}

impl Default for RabbitmqConfig {
    fn default() -> Self {
        Self {
            url: None,
            url_file: None,
            ca_file: None,
            cert_file: None,
            key_file: None,
            management_url: None,
            exchange: DEFAULT_EXCHANGE.into(),
            exchange_type: None,
            source: "bellwire".into(),
            message_id: MessageId::default(),
            cloudevents: false,
            confirm_timeout: DEFAULT_CONFIRM_TIMEOUT,
            connect_timeout: DEFAULT_CONNECT_TIMEOUT,
        }
    }
}

impl RabbitmqConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if let Some(url) = &self.management_url {
            check_management_url(url)?;
        }
        if let Some(url) = &self.url {
            check_url(url)?;
            if let Some(tls) = self.tls()?.or(self.management_tls()?) {
                tls.client_config()?;
            }
        }
        if self.exchange_type.is_some() && self.management_url.is_none() {
            return Err(ConfigError::key(
                "rabbitmq.exchange_type",
                "only the management API tells an exchange's type: set rabbitmq.management_url too",
            ));
        }
        let named = [
            ("rabbitmq.exchange", Some(&self.exchange)),
            ("rabbitmq.exchange_type", self.exchange_type.as_ref()),
            ("rabbitmq.source", Some(&self.source)),
        ];
        for (key, value) in named {
            let Some(value) = value else { continue };
            if value.is_empty() || value.len() > 255 {
                return Err(ConfigError::key(
                    key,
                    format!("AMQP takes 1 to 255 bytes, `{value}` has {}", value.len()),
                ));
            }
        }
        within(
            "rabbitmq.confirm_timeout",
            self.confirm_timeout,
            MILLISECOND,
            HOUR,
        )?;
        within(
            "rabbitmq.connect_timeout",
            self.connect_timeout,
            MILLISECOND,
            HOUR,
        )
    }

    /// What connections need if they are encrypted; None if they are not. Opens no file.
    ///
    /// # Errors
    /// Names the file that does not go with the rest.
    pub(crate) fn tls(&self) -> Result<Option<Tls>, ConfigError> {
        let url = self.url.as_ref().map(|url| Url::parse(url.expose()));
        let asked_for = matches!(url, Some(Ok(url)) if url.scheme() == "amqps");
        if !asked_for && self.management_is_encrypted() {
            return Ok(None);
        }
        let why = "is given, but rabbitmq.url asks for no TLS: make it amqps://…";
        Ok(Tls::if_asked_for(asked_for, self.files(), why)?)
    }

    /// The same of requests to the management API.
    ///
    /// # Errors
    /// Names the file that does not go with the rest.
    pub(crate) fn management_tls(&self) -> Result<Option<Tls>, ConfigError> {
        let tls = self
            .management_is_encrypted()
            .then(|| Tls::by_files(self.files()));
        Ok(tls.transpose()?)
    }

    fn management_is_encrypted(&self) -> bool {
        let url = self.management_url.as_ref().map(|url| url.expose());
        url.and_then(|url| Url::parse(url).ok())
            .is_some_and(|url| url.scheme() == "https")
    }

    fn files(&self) -> tls::Files<'_> {
        [
            ("rabbitmq.ca_file", self.ca_file.as_deref()),
            ("rabbitmq.cert_file", self.cert_file.as_deref()),
            ("rabbitmq.key_file", self.key_file.as_deref()),
        ]
    }
}

/// The value is not shown: it may hold a password.
fn check_management_url(url: &Secret) -> Result<(), ConfigError> {
    let text = url.expose();
    let fits = Url::parse(text).is_ok_and(|url| {
        matches!(url.scheme(), "http" | "https")
            && url.host_str().is_some()
            && url.query().is_none()
            && url.fragment().is_none()
    });
    if fits && !text.contains(|letter: char| letter.is_control() || letter.is_whitespace()) {
        return Ok(());
    }
    Err(ConfigError::key(
        "rabbitmq.management_url",
        "no address of a management API; give one like http://localhost:15672 or \
         https://user:password@host:15671, with special characters of user and password \
         percent-encoded",
    ))
}

fn check_url(url: &Secret) -> Result<(), ConfigError> {
    let parsed = Url::parse(url.expose())
        .ok()
        .filter(|url| matches!(url.scheme(), "amqp" | "amqps") && url.host_str().is_some());
    let Some(parsed) = parsed.filter(|_| is_known(url.expose())) else {
        return Err(ConfigError::key(
            "rabbitmq.url",
            "no AMQP URL; give one like amqp://user:password@host:5672/%2f (AMQP_URL), \
             with special characters of user, password and vhost percent-encoded",
        ));
    };
    for (parameter, instead) in NOT_IN_THE_URL {
        if parsed.query_pairs().any(|(key, _)| key == *parameter) {
            return Err(ConfigError::key(
                "rabbitmq.url",
                format!("its parameter {parameter} is not supported: {instead}"),
            ));
        }
    }
    Ok(())
}

/// Does the client take this URL?
#[cfg(feature = "rabbitmq")]
fn is_known(url: &str) -> bool {
    url.parse::<lapin::uri::AMQPUri>().is_ok()
}

/// There is no client to ask.
#[cfg(not(feature = "rabbitmq"))]
fn is_known(_: &str) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(url: &str, ca_file: Option<&str>) -> Option<String> {
        let config = RabbitmqConfig {
            url: Some(url.into()),
            ca_file: ca_file.map(Into::into),
            ..RabbitmqConfig::default()
        };
        config.validate().err().map(|error| error.to_string())
    }

    #[test]
    fn less_security_than_asked_for_is_refused() {
        for (url, word) in [
            ("amqps://u:S3cr@h/%2f?verify=verify_none", "always verified"),
            ("amqps://u:S3cr@h/%2f?cacertfile=/S3cr", "rabbitmq.ca_file"),
            ("amqps://u:S3cr@h?server_name_indication=x", "host"),
        ] {
            let error = refused(url, None).unwrap();
            assert!(
                error.starts_with("rabbitmq.url: ") && error.contains(word),
                "{error}"
            );
            assert!(!error.contains("S3cr"), "{error}");
        }
        let error = refused("amqp://h", Some("ca.pem")).unwrap();
        assert!(
            error.starts_with("rabbitmq.ca_file: ") && error.contains("amqps://"),
            "{error}"
        );
        assert_eq!(refused("amqp://h?heartbeat=5", None), None);
    }

    #[test]
    fn a_wrong_management_url_is_named_and_not_shown() {
        for url in [
            "amqp://u:S3cr@h",
            "http://",
            "u:S3cr@h:15672",
            "http://u:S3cr@h/?x",
            "http://u:S3 cr@h/",
            "",
        ] {
            let config = RabbitmqConfig {
                management_url: Some(url.into()),
                ..RabbitmqConfig::default()
            };
            let error = config.validate().unwrap_err().to_string();
            assert!(error.starts_with("rabbitmq.management_url: "), "{error}");
            assert!(!error.contains("S3"), "{error}");
        }
    }

    #[test]
    fn a_type_that_nobody_would_look_up_is_refused() {
        let mut config = RabbitmqConfig {
            exchange_type: Some("topic".into()),
            ..RabbitmqConfig::default()
        };
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains("rabbitmq.management_url"), "{error}");
        config.management_url = Some("http://localhost:15672".into());
        config.validate().unwrap();
        config.exchange_type = Some(String::new());
        let error = config.validate().unwrap_err().to_string();
        assert!(error.starts_with("rabbitmq.exchange_type: "), "{error}");
    }

    #[test]
    fn the_ca_serves_the_management_api_too() {
        let config = RabbitmqConfig {
            url: Some("amqp://h".into()),
            management_url: Some("https://h:15671".into()),
            ca_file: Some("ca.pem".into()),
            ..RabbitmqConfig::default()
        };
        assert!(config.tls().unwrap().is_none());
        assert!(config.management_tls().unwrap().unwrap().ca.is_some());
    }
}
