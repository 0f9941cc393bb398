//! `[jetstream]`: Where events go when `relay.sink` is `jetstream`.

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use url::Url;

use super::{ConfigError, HOUR, MILLISECOND, Secret, within};
use crate::tls::{self, Tls};

/// What the subjects of events begin with: consumers filter on `events.order.*`.
pub const DEFAULT_PREFIX: &str = "events";
/// Well below the lease, so that a re-send still happens under the same claim.
pub const DEFAULT_ACK_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest `source`: with an event's UUID it is the whole message id.
const LONGEST_SOURCE: usize = 100;
/// The longest `prefix`: leaves most of a subject to the event's types.
const LONGEST_PREFIX: usize = 100;

/// `[jetstream]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct JetstreamConfig {
    /// `nats://user:password@host:4222` or `tls://…`, several separated by commas; `NATS_URL`.
    pub url: Option<Secret>,
    /// A file that holds the URL; `NATS_URL_FILE`.
    pub url_file: Option<PathBuf>,
    /// A credentials file (JWT and seed), as `nsc` writes it.
    pub credentials_file: Option<PathBuf>,
    /// A file that holds the seed of a user's nkey.
    pub nkey_file: Option<PathBuf>,
    /// PEM file with the CA that the server's certificate is verified by; the system's roots else.
    pub ca_file: Option<PathBuf>,
    /// PEM file with our own certificate, for servers that ask for one.
    pub cert_file: Option<PathBuf>,
    /// PEM file with its key.
    pub key_file: Option<PathBuf>,
    /// The stream that keeps the events. It must exist.
    pub stream: Option<String>,
    /// What subjects begin with: `<prefix>.<aggregate_type>.<event_type>`.
    pub prefix: String,
    /// Names the installation in `Nats-Msg-Id`: a stream drops repeats by it, whatever their subject.
    pub source: String,
    /// Make every message a CloudEvent in binary mode, too: its attributes as headers `ce_*`, with `source`
    /// as theirs.
    pub cloudevents: bool,
    /// An acknowledgement that takes longer counts as lost with its connection. Must be below
    /// `relay.lease`.
    #[serde(with = "humantime_serde")]
    pub ack_timeout: Duration,
    /// For the connection and its handshake.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
}

impl Default for JetstreamConfig {
    fn default() -> Self {
        Self {
            url: None,
            url_file: None,
            credentials_file: None,
            nkey_file: None,
            ca_file: None,
            cert_file: None,
            key_file: None,
            stream: None,
            prefix: DEFAULT_PREFIX.into(),
            source: "bellwire".into(),
            cloudevents: false,
            ack_timeout: DEFAULT_ACK_TIMEOUT,
            connect_timeout: super::DEFAULT_CONNECT_TIMEOUT,
        }
    }
}

impl JetstreamConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if self.url.is_some() {
            self.servers()?;
            if let Some(tls) = self.tls()? {
                tls.client_config()?;
            }
        }
        if self.credentials_file.is_some() && self.nkey_file.is_some() {
            return Err(ConfigError::key(
                "jetstream.nkey_file",
                "jetstream.credentials_file is given too: leave one out",
            ));
        }
        if let Some(stream) = &self.stream {
            check_name("jetstream.stream", stream, 255, "./\\")?;
        }
        for token in self.prefix.split('.') {
            check_name("jetstream.prefix", token, LONGEST_PREFIX, "")?;
        }
        check_name("jetstream.prefix", &self.prefix, LONGEST_PREFIX, "")?;
        if self.source.is_empty()
            || self.source.len() > LONGEST_SOURCE
            || !self.source.chars().all(|letter| letter.is_ascii_graphic())
        {
            return Err(ConfigError::key(
                "jetstream.source",
                format!(
                    "must have 1 to {LONGEST_SOURCE} printable ASCII characters without spaces: it \
                     begins every Nats-Msg-Id"
                ),
            ));
        }
        within("jetstream.ack_timeout", self.ack_timeout, MILLISECOND, HOUR)?;
        within(
            "jetstream.connect_timeout",
            self.connect_timeout,
            MILLISECOND,
            HOUR,
        )
    }

    /// The stream's name, without which nothing can be checked.
    pub(super) fn required_stream(&self) -> Result<&str, ConfigError> {
        self.stream.as_deref().ok_or_else(|| {
            ConfigError::key(
                "jetstream.stream",
                "is not set: events that go to JetStream need the name of the stream that keeps them, here or \
                 as their route's destination",
            )
        })
    }

    /// The servers that the URL names, in the order to try them; empty without a URL.
    ///
    /// # Errors
    /// It is none; the value is not shown.
    pub(crate) fn servers(&self) -> Result<Vec<Url>, ConfigError> {
        let Some(url) = &self.url else {
            return Ok(Vec::new());
        };
        let server = |text: &str| {
            Url::parse(text.trim()).ok().filter(|url| {
                matches!(url.scheme(), "nats" | "tls")
                    && url.host_str().is_some_and(|host| !host.is_empty())
                    && url.query().is_none()
                    && url.fragment().is_none()
                    && matches!(url.path(), "" | "/")
            })
        };
        let servers: Option<Vec<_>> = url.expose().split(',').map(server).collect();
        servers.ok_or_else(|| {
            ConfigError::key(
                "jetstream.url",
                "no NATS URL; give one like nats://user:password@host:4222 (NATS_URL), or several \
                 separated by commas, with special characters of user and password percent-encoded",
            )
        })
    }

    /// What connections need if they are encrypted; None if they are not. Opens no file.
    ///
    /// # Errors
    /// Names the file that does not go with the rest.
    pub(crate) fn tls(&self) -> Result<Option<Tls>, ConfigError> {
        let asked_for = self.servers()?.iter().any(|url| url.scheme() == "tls");
        let why = "is given, but jetstream.url asks for no TLS: make it tls://…";
        Ok(Tls::if_asked_for(asked_for, self.files(), why)?)
    }

    fn files(&self) -> tls::Files<'_> {
        [
            ("jetstream.ca_file", self.ca_file.as_deref()),
            ("jetstream.cert_file", self.cert_file.as_deref()),
            ("jetstream.key_file", self.key_file.as_deref()),
        ]
    }
}

/// A name that NATS takes as one token, or several where dots are allowed.
fn check_name(key: &str, name: &str, longest: usize, besides: &str) -> Result<(), ConfigError> {
    let odd = |letter: char| {
        letter.is_whitespace()
            || letter.is_control()
            || matches!(letter, '*' | '>')
            || besides.contains(letter)
    };
    if name.is_empty() || name.len() > longest || name.contains(odd) {
        let dots = if besides.is_empty() {
            ""
        } else {
            ", dots or slashes"
        };
        return Err(ConfigError::key(
            key,
            format!(
                "`{name}` is no name that NATS takes: 1 to {longest} bytes (between dots too) \
                 without spaces, control characters, `*`, `>`{dots}"
            ),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut JetstreamConfig)) -> Option<String> {
        let mut config = JetstreamConfig {
            url: Some("nats://h".into()),
            stream: Some("EVENTS".into()),
            ..JetstreamConfig::default()
        };
        change(&mut config);
        config.validate().err().map(|error| error.to_string())
    }

    #[test]
    fn a_url_is_one_or_more_servers_and_is_never_shown() {
        for url in ["nats://h:4222", "tls://u:p@h,tls://h2:4223", "nats://[::1]"] {
            assert_eq!(
                refused(|config| config.url = Some(url.into())),
                None,
                "{url}"
            );
        }
        for url in [
            "",
            "h:4222",
            "http://u:S3cr@h",
            "nats://u:S3cr@h,",
            "nats://u:S3cr@h/x",
            "nats://u:S3cr@h?x=1",
        ] {
            let error = refused(|config| config.url = Some(url.into())).unwrap();
            assert!(error.starts_with("jetstream.url: "), "{error}");
            assert!(!error.contains("S3cr"), "{error}");
        }
    }

    #[test]
    fn names_that_nats_cannot_carry_are_refused() {
        for stream in ["", "a.b", "a b", "a*", ">"] {
            let error = refused(|config| config.stream = Some(stream.into())).unwrap();
            assert!(error.starts_with("jetstream.stream: "), "{error}");
        }
        for prefix in ["", "a..b", ".a", "a.*", "a b"] {
            let error = refused(|config| config.prefix = prefix.into()).unwrap();
            assert!(error.starts_with("jetstream.prefix: "), "{error}");
        }
        assert_eq!(refused(|config| config.prefix = "shop.v1".into()), None);
        for source in ["", "my shop", "ä"] {
            let error = refused(|config| config.source = source.into()).unwrap();
            assert!(error.starts_with("jetstream.source: "), "{error}");
        }
    }

    #[test]
    fn less_security_than_asked_for_is_refused() {
        let error = refused(|config| config.ca_file = Some("ca.pem".into())).unwrap();
        assert!(error.starts_with("jetstream.ca_file: "), "{error}");
        let both = |config: &mut JetstreamConfig| {
            config.nkey_file = Some("a".into());
            config.credentials_file = Some("b".into());
        };
        assert!(refused(both).unwrap().starts_with("jetstream.nkey_file: "));
    }
}
