//! Configuration: every option, its default with the reason, and its check.
//!
//! One TOML file, then the environment over it: `DATABASE_URL`, `AMQP_URL`, `NATS_URL` and
//! `KAFKA_BOOTSTRAP_SERVERS` as everybody knows them, everything else as `BELLWIRE_<SECTION>__<KEY>` (two underscores between section and
//! key); with `_FILE` after it, the name of a file that holds the value. Unknown keys are refused, so that a typing error cannot silently mean a default.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use subtle::ConstantTimeEq as _;

use crate::route::{Router, Unless};

use self::environment::{Environment, url_of};
use crate::tls::TlsError;

mod admin;
mod alerts;
mod database;
mod environment;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod intake;
mod jetstream;
mod kafka;
mod lag;
mod log;
mod postgres_url;
mod prune;
mod rabbitmq;
mod relay;
mod retry;
mod routes;

pub use admin::*;
pub use alerts::*;
pub use database::*;
pub use intake::*;
pub use jetstream::*;
pub use kafka::{Compression, KafkaConfig, SaslMechanism};
pub use lag::*;
pub use log::*;
pub use prune::*;
pub use rabbitmq::*;
pub use relay::*;
pub use retry::*;
pub use routes::*;

pub(crate) use postgres_url::SslMode;

/// File read when no other is named and it exists.
pub const DEFAULT_FILE: &str = "bellwire.toml";

/// Options whose values are never shown, not even when they are refused.
const SECRETS: &[&str] = &[
    "database.url",
    "database.listen_url",
    "rabbitmq.url",
    "rabbitmq.management_url",
    "jetstream.url",
    "kafka.password",
    "alerts.slack_url",
    "alerts.webhook_url",
    "alerts.webhook_token",
    "admin.token",
    "admin.wake_key",
];

/// Why a configuration was refused. Names the key and the remedy; never shows a secret.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file named on the command line is not there or cannot be read.
    #[error("cannot read the configuration file {path}: {reason}")]
    File {
        /// As given.
        path: PathBuf,
        /// Of the operating system or the TOML parser.
        reason: String,
    },
    /// A key is unknown or its value has the wrong form.
    #[error("{key}: {reason}")]
    Key {
        /// For example `relay.batch_size`.
        key: String,
        /// What is wrong and what would be right.
        reason: String,
    },
}

impl ConfigError {
    pub(crate) fn key(key: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Key {
            key: key.into(),
            reason: reason.into(),
        }
    }
}

impl From<TlsError> for ConfigError {
    fn from(error: TlsError) -> Self {
        Self::key(error.option, error.reason)
    }
}

/// A value that is never printed.
#[derive(Clone, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// The value itself, for the one call that needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Is it this? Of two texts of the same length the answer takes the same time, whatever differs.
    pub fn is(&self, given: &str) -> bool {
        self.0.as_bytes().ct_eq(given.as_bytes()).into()
    }
}

impl From<&str> for Secret {
    fn from(value: &str) -> Self {
        Self(value.to_owned())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// The whole configuration.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[derive(Default)]
pub struct Config {
    /// Where the outbox is.
    pub database: DatabaseConfig,
    /// Where events go.
    pub rabbitmq: RabbitmqConfig,
    /// Where they go instead, when `relay.sink` says so.
    pub jetstream: JetstreamConfig,
    /// Or here.
    pub kafka: KafkaConfig,
    /// How they are carried.
    pub relay: RelayConfig,
    /// What happens to events that fail.
    pub retry: RetryConfig,
    /// Which events go where.
    pub routes: Vec<RouteConfig>,
    /// When the outbox counts as lagging.
    pub lag: LagConfig,
    /// When published events are deleted.
    pub prune: PruneConfig,

    /// Who is told of trouble.
    pub alerts: AlertsConfig,
    /// The admin port.
    pub admin: AdminConfig,
    /// Webhooks into the database.
    pub intake: IntakeConfig,
    /// What is written to standard error.
    pub log: LogConfig,
}

impl Config {
    /// Reads the file (the given one must exist; the default one may) and the environment.
    ///
    /// # Errors
    /// Names the file or the key, and what would be right.
    pub fn load(file: Option<&Path>) -> Result<Self, ConfigError> {
        let path = file.unwrap_or(Path::new(DEFAULT_FILE));
        let text = if file.is_some() || path.exists() {
            let text = std::fs::read_to_string(path).map_err(|error| ConfigError::File {
                path: path.to_owned(),
                reason: error.to_string(),
            })?;
            Some(text)
        } else {
            None
        };
        let environment = Environment::read(std::env::vars_os())?;
        Self::read(path, text.as_deref(), &environment)
    }

    /// What the file (if there is one) and the environment say.
    fn read(
        path: &Path,
        text: Option<&str>,
        environment: &Environment,
    ) -> Result<Self, ConfigError> {
        let mut builder = config::Config::builder();
        if let Some(text) = text {
            builder = builder.add_source(config::File::from_str(text, config::FileFormat::Toml));
        }
        for (key, value) in &environment.well_known {
            builder = builder
                .set_override(key, value.as_str())
                .map_err(|error| ConfigError::key(*key, error.to_string()))?;
        }
        let variables = config::Environment::with_prefix("BELLWIRE")
            .prefix_separator("_")
            .separator("__")
            .ignore_empty(true)
            .source(Some(environment.variables.clone()));
        let merged = builder
            .add_source(variables)
            .build()
            .map_err(|error| ConfigError::File {
                path: path.to_owned(),
                reason: reason_without_line(&error.to_string()),
            })?;
        let mut loaded: Self = serde_path_to_error::deserialize(merged).map_err(|error| {
            let key = error.path().to_string();
            let reason = match key.as_str() {
                // The value may be a URL with its password.
                "database" | "rabbitmq" | "jetstream" | "kafka" | "alerts" | "admin" | "intake"
                | "intake.secrets" => {
                    format!("is a section: write its options below [{key}]")
                }
                secret if SECRETS.contains(&secret) => "must be a string".to_owned(),
                secret if holds_a_secret(secret) => "must be a string".to_owned(),
                _ => reason(error.inner()),
            };
            environment.hide(ConfigError::key(key, reason))
        })?;
        loaded.read_secrets(environment)?;
        loaded.validate().map_err(|error| environment.hide(error))?;
        Ok(loaded)
    }

    /// The name of this replica: configured, or the host's with the process id.
    pub fn replica_name(&self) -> String {
        self.relay.name.clone().unwrap_or_else(|| {
            let host = hostname::get()
                .ok()
                .and_then(|name| name.into_string().ok());
            format!(
                "{}-{}",
                host.as_deref().unwrap_or("relay"),
                std::process::id()
            )
        })
    }

    /// Which events go where.
    ///
    /// # Errors
    /// Names the route's key that is wrong.
    pub fn router(&self) -> Result<Router, ConfigError> {
        Router::of(&self.routes, self.relay.sink, |sink| {
            Ok(match sink {
                SinkSetting::Rabbitmq | SinkSetting::Null => Unless::Named(&self.rabbitmq.exchange),
                SinkSetting::Jetstream => Unless::Named(self.jetstream.required_stream()?),
                SinkSetting::Kafka => Unless::ByAggregateType(&self.kafka.prefix),
            })
        })
    }

    /// The sinks that events can get to.
    pub fn sinks_in_use(&self) -> SinksInUse {
        SinksInUse::of(&self.routes, self.relay.sink)
    }

    /// Reads the secrets that the file only names the files of. One from the environment wins.
    fn read_secrets(&mut self, environment: &Environment) -> Result<(), ConfigError> {
        let Self {
            database,
            rabbitmq,
            jetstream,
            kafka,
            ..
        } = self;
        for (option, url, file) in [
            ("database.url", &mut database.url, &mut database.url_file),
            ("rabbitmq.url", &mut rabbitmq.url, &mut rabbitmq.url_file),
            ("jetstream.url", &mut jetstream.url, &mut jetstream.url_file),
            (
                "kafka.password",
                &mut kafka.password,
                &mut kafka.password_file,
            ),
        ] {
            if environment.gives(option) {
                *file = None;
            }
            *url = url_of(option, url.take(), file.as_deref())?;
        }
        Ok(())
    }

    /// Checks what a type cannot say. Called by [`Self::load`].
    ///
    /// # Errors
    /// Names the first key that is wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.database.validate()?;
        self.rabbitmq.validate()?;
        self.jetstream.validate()?;
        self.kafka.validate()?;
        self.relay.validate()?;
        self.retry.validate()?;
        self.lag.validate()?;
        self.admin.validate()?;
        self.prune.validate()?;
        self.router()?;

        self.alerts.validate()?;
        self.intake.validate()?;
        for used in self.sinks_in_use().sinks {
            let (key, timeout) = match used.sink {
                SinkSetting::Rabbitmq | SinkSetting::Null => {
                    ("rabbitmq.confirm_timeout", self.rabbitmq.confirm_timeout)
                }
                SinkSetting::Jetstream => ("jetstream.ack_timeout", self.jetstream.ack_timeout),
                SinkSetting::Kafka => ("kafka.confirm_timeout", self.kafka.confirm_timeout),
            };
            if timeout >= self.relay.lease {
                return Err(ConfigError::key(
                    key,
                    format!(
                        "{} must be shorter than relay.lease ({})",
                        humantime::format_duration(timeout),
                        humantime::format_duration(self.relay.lease)
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// One of a source's, wherever it was given.
fn holds_a_secret(key: &str) -> bool {
    key.starts_with("intake.") && key.contains("secrets") && !key.ends_with("secrets")
}

/// The parser shows the line that it stumbled over, which may hold a secret: only where and why.
fn reason_without_line(text: &str) -> String {
    let lines: Vec<_> = text.lines().filter(|line| !line.is_empty()).collect();
    match lines.as_slice() {
        [at, _, .., why] => format!("{at}: {why}"),
        _ => lines.join(": "),
    }
}

/// Without where it came from: the key is named already.
fn reason(error: &config::ConfigError) -> String {
    match error {
        config::ConfigError::At { error, .. } => reason(error),
        other => other.to_string(),
    }
}

fn at_least_one(key: &str, value: u64) -> Result<(), ConfigError> {
    if value == 0 {
        return Err(ConfigError::key(key, "must be at least 1, is 0"));
    }
    Ok(())
}

fn at_most(key: &str, value: u64, most: u64) -> Result<(), ConfigError> {
    if value > most {
        return Err(ConfigError::key(
            key,
            format!("must be at most {most}, is {value}"),
        ));
    }
    Ok(())
}

fn within(key: &str, value: Duration, least: Duration, most: Duration) -> Result<(), ConfigError> {
    if value < least || value > most {
        return Err(ConfigError::key(
            key,
            format!(
                "must be between {} and {}, is {}",
                humantime::format_duration(least),
                humantime::format_duration(most),
                humantime::format_duration(value)
            ),
        ));
    }
    Ok(())
}

const DAY: Duration = Duration::from_secs(86_400);
const HOUR: Duration = Duration::from_secs(3_600);
const SECOND: Duration = Duration::from_secs(1);
const MILLISECOND: Duration = Duration::from_millis(1);
