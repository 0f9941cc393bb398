//! Configuration: every option, its default with the reason, and its check.
//!
//! One TOML file, then the environment over it: `DATABASE_URL` and `AMQP_URL` as everybody knows
//! them, everything else as `BELLWIRE_<SECTION>__<KEY>` (two underscores between section and
//! key). Unknown keys are refused, so that a typing error cannot silently mean a default.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use serde::Deserialize;

use crate::event::BUCKETS;

/// File read when no other is named and it exists.
pub const DEFAULT_FILE: &str = "bellwire.toml";

/// A topic exchange: consumers bind to `order.*` or `*.OrderPlaced` on it.
pub const DEFAULT_EXCHANGE: &str = "domain-events";
/// Enough to keep two cores busy; aggregates, not partitions, bound what goes in parallel.
pub const DEFAULT_PARTITIONS: usize = 8;
/// Confirms outstanding per partition: with 8 partitions 512 in all, where a classic queue's
/// throughput stops growing.
pub const DEFAULT_WINDOW: usize = 64;
/// Rows per claim: the cost of a claim is spread over them.
pub const DEFAULT_BATCH_SIZE: usize = 500;
/// Bounds how long rows of a frozen replica wait. Renewed at half.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(30);
/// The backstop when a notification is lost; 12 statements a minute when idle.
pub const DEFAULT_TICK: Duration = Duration::from_secs(5);
/// Below the 30 seconds that Kubernetes allows by default. Docker's default of 10 has to be raised.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(20);
/// With the backoff below the tries span seven and a half minutes: time to add a binding that was
/// forgotten, and somebody is told within the hour.
pub const DEFAULT_MAX_ATTEMPTS: u32 = 5;
/// Time for a hand to mend what one try met; doubles on each later one, up to an hour.
pub const DEFAULT_BACKOFF: Duration = Duration::from_secs(30);
/// One or two may be an accident; three in a row point at the broker rather than at the events.
pub const DEFAULT_STOP_AFTER_FAILURES: u32 = 3;
/// Well below the lease, so that a re-send still happens under the same claim.
pub const DEFAULT_CONFIRM_TIMEOUT: Duration = Duration::from_secs(10);
/// A broker on the same network answers in milliseconds; a wrong address should show soon.
pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Far above the latency of a healthy relay, and still soon for whoever is on call.
pub const DEFAULT_LAG_ALERT: Duration = Duration::from_secs(5 * 60);
/// Loopback: the port tells and takes more than strangers should have.
pub const DEFAULT_ADMIN_LISTEN: &str = "127.0.0.1:9464";

/// Longest name of schema or table: PostgreSQL's 63 bytes, less our longest suffix.
const MAX_NAME_BYTES: usize = 40;

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
    fn key(key: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Key {
            key: key.into(),
            reason: reason.into(),
        }
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
    /// How they are carried.
    pub relay: RelayConfig,
    /// What happens to events that fail.
    pub retry: RetryConfig,
    /// When the outbox counts as lagging.
    pub lag: LagConfig,
    /// The admin port.
    pub admin: AdminConfig,
    /// What is written to standard error.
    pub log: LogConfig,
}

/// `[database]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DatabaseConfig {
    /// `postgres://user:password@host:port/database?sslmode=require`; `DATABASE_URL`.
    pub url: Option<Secret>,
    /// Schema of the outbox table.
    pub schema: String,
    /// Name of the outbox table; everything else is named after it.
    pub table: String,
}

impl Default for DatabaseConfig {
    fn default() -> Self {
        Self {
            url: None,
            schema: "public".into(),
            table: "outbox".into(),
        }
    }
}

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

/// `[rabbitmq]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RabbitmqConfig {
    /// `amqp://user:password@host:5672/vhost` or `amqps://…`; `AMQP_URL`.
    pub url: Option<Secret>,
    /// Exchange to publish to, with the routing key `<aggregate_type>.<event_type>`.
    pub exchange: String,
    /// `app_id` of every message: names the installation.
    pub source: String,
    /// Which column becomes the message id.
    pub message_id: MessageId,
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
            exchange: DEFAULT_EXCHANGE.into(),
            source: "bellwire".into(),
            message_id: MessageId::default(),
            confirm_timeout: DEFAULT_CONFIRM_TIMEOUT,
            connect_timeout: DEFAULT_CONNECT_TIMEOUT,
        }
    }
}

/// `[relay]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RelayConfig {
    /// Name of this replica in `outbox_replica`, `claimed_by` and logs; the host name by default.
    pub name: Option<String>,
    /// Publishers; an aggregate always goes through the same one.
    pub partitions: usize,
    /// Confirms outstanding per partition.
    pub window: usize,
    /// Rows per claim, at most.
    pub batch_size: usize,
    /// How long a claim token lives without being renewed.
    #[serde(with = "humantime_serde")]
    pub lease: Duration,
    /// The timed look when nothing rings.
    #[serde(with = "humantime_serde")]
    pub tick: Duration,
    /// How long a stop may take.
    #[serde(with = "humantime_serde")]
    pub grace: Duration,
}

impl Default for RelayConfig {
    fn default() -> Self {
        Self {
            name: None,
            partitions: DEFAULT_PARTITIONS,
            window: DEFAULT_WINDOW,
            batch_size: DEFAULT_BATCH_SIZE,
            lease: DEFAULT_LEASE,
            tick: DEFAULT_TICK,
            grace: DEFAULT_GRACE,
        }
    }
}

/// `[retry]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RetryConfig {
    /// Failed attempts before an event is dead-lettered.
    pub max_attempts: u32,
    /// Wait after the first failed attempt; doubles on each later one, up to an hour.
    #[serde(with = "humantime_serde")]
    pub backoff: Duration,
    /// Failures in a row that point at the broker before the relay stops asking for a while.
    pub stop_after_failures: u32,
}

impl Default for RetryConfig {
    fn default() -> Self {
        Self {
            max_attempts: DEFAULT_MAX_ATTEMPTS,
            backoff: DEFAULT_BACKOFF,
            stop_after_failures: DEFAULT_STOP_AFTER_FAILURES,
        }
    }
}

/// `[lag]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LagConfig {
    /// `status` calls the outbox lagging when its oldest due event is older than this.
    #[serde(with = "humantime_serde")]
    pub alert: Duration,
}

impl Default for LagConfig {
    fn default() -> Self {
        Self {
            alert: DEFAULT_LAG_ALERT,
        }
    }
}

/// `[admin]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdminConfig {
    /// Address of `/metrics`, `/healthz`, `/readyz` and `/status`; `off` for none.
    pub listen: Listen,
}

impl Default for AdminConfig {
    fn default() -> Self {
        Self {
            listen: Listen(DEFAULT_ADMIN_LISTEN.parse().ok()),
        }
    }
}

/// A socket address, or none for `off`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub struct Listen(pub Option<SocketAddr>);

impl TryFrom<String> for Listen {
    type Error = String;

    fn try_from(value: String) -> Result<Self, String> {
        if value == "off" {
            return Ok(Self(None));
        }
        value
            .parse()
            .map(|address| Self(Some(address)))
            .map_err(|_| {
                format!(
                    "`{value}` is no socket address; give one like {DEFAULT_ADMIN_LISTEN}, or `off`"
                )
            })
    }
}

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

impl TryFrom<String> for LogFormat {
    type Error = String;

    fn try_from(value: String) -> Result<Self, String> {
        match value.as_str() {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(format!("must be `text` or `json`, is `{value}`")),
        }
    }
}

/// `[log]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// A level, or directives as in `bellwire=debug,info`.
    pub level: String,
    /// `text` or `json`.
    pub format: LogFormat,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self {
            level: "info".into(),
            format: LogFormat::Text,
        }
    }
}

impl Config {
    /// Reads the file (the given one must exist; the default one may) and the environment.
    ///
    /// # Errors
    /// Names the file or the key, and what would be right.
    pub fn load(file: Option<&Path>) -> Result<Self, ConfigError> {
        let mut builder = config::Config::builder();
        let path = file.unwrap_or(Path::new(DEFAULT_FILE));
        if file.is_some() || path.exists() {
            let text = std::fs::read_to_string(path).map_err(|error| ConfigError::File {
                path: path.to_owned(),
                reason: error.to_string(),
            })?;
            builder = builder.add_source(config::File::from_str(&text, config::FileFormat::Toml));
        }
        for (variable, key) in [
            ("DATABASE_URL", "database.url"),
            ("AMQP_URL", "rabbitmq.url"),
        ] {
            if let Ok(value) = std::env::var(variable) {
                builder = builder
                    .set_override(key, value)
                    .map_err(|error| ConfigError::key(key, error.to_string()))?;
            }
        }
        let environment = config::Environment::with_prefix("BELLWIRE")
            .prefix_separator("_")
            .separator("__")
            .ignore_empty(true)
            .source(Some(own_variables()));
        let merged =
            builder
                .add_source(environment)
                .build()
                .map_err(|error| ConfigError::File {
                    path: path.to_owned(),
                    reason: reason_without_line(&error.to_string()),
                })?;
        let loaded: Self = serde_path_to_error::deserialize(merged).map_err(|error| {
            let key = error.path().to_string();
            let reason = match key.as_str() {
                // The value may be a URL with its password.
                "database" | "rabbitmq" => format!("is a section: write its options below [{key}]"),
                "database.url" | "rabbitmq.url" => "must be a string".to_owned(),
                _ => reason(error.inner()),
            };
            ConfigError::key(key, reason)
        })?;
        loaded.validate()?;
        Ok(loaded)
    }

    /// Checks what a type cannot say. Called by [`Self::load`].
    ///
    /// # Errors
    /// Names the first key that is wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if let Some(url) = &self.database.url {
            check_database_url(url)?;
        }
        check_name("database.schema", &self.database.schema)?;
        check_name("database.table", &self.database.table)?;
        self.rabbitmq.validate()?;
        self.relay.validate()?;
        self.retry.validate()?;
        if self.rabbitmq.confirm_timeout >= self.relay.lease {
            return Err(ConfigError::key(
                "rabbitmq.confirm_timeout",
                format!(
                    "{} must be shorter than relay.lease ({})",
                    humantime::format_duration(self.rabbitmq.confirm_timeout),
                    humantime::format_duration(self.relay.lease)
                ),
            ));
        }
        Ok(())
    }
}

/// The `BELLWIRE_…` variables that are options; the rest belong to the command line or to tests.
fn own_variables() -> config::Map<String, String> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| name.starts_with("BELLWIRE_") && name.contains("__"))
        .collect()
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

fn check_database_url(url: &Secret) -> Result<(), ConfigError> {
    // The driver does not know libpq's verifying modes; see `store::connect`.
    let known = url
        .expose()
        .replace("sslmode=verify-full", "sslmode=require")
        .replace("sslmode=verify-ca", "sslmode=require");
    let parsed = tokio_postgres::Config::from_str(&known).map_err(|_| {
        ConfigError::key(
            "database.url",
            "no PostgreSQL connection string; give one like \
             postgres://user:password@host:5432/database (DATABASE_URL), with special \
             characters of the password percent-encoded",
        )
    })?;
    if parsed.get_hosts().is_empty() {
        return Err(ConfigError::key(
            "database.url",
            "names no host; give one like postgres://user:password@host:5432/database (DATABASE_URL)",
        ));
    }
    Ok(())
}

fn check_name(key: &str, name: &str) -> Result<(), ConfigError> {
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.contains('\0') {
        return Err(ConfigError::key(
            key,
            format!(
                "a name of 1 to {MAX_NAME_BYTES} bytes is needed, `{name}` has {}",
                name.len()
            ),
        ));
    }
    Ok(())
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

impl RabbitmqConfig {
    fn validate(&self) -> Result<(), ConfigError> {
        if let Some(url) = &self.url {
            let parsed = url::Url::parse(url.expose()).ok();
            let right = parsed.as_ref().is_some_and(|url| {
                matches!(url.scheme(), "amqp" | "amqps") && url.host_str().is_some()
            });
            if !right || lapin::uri::AMQPUri::from_str(url.expose()).is_err() {
                return Err(ConfigError::key(
                    "rabbitmq.url",
                    "no AMQP URL; give one like amqp://user:password@host:5672/%2f (AMQP_URL), \
                     with special characters of user, password and vhost percent-encoded",
                ));
            }
        }
        for (key, value) in [
            ("rabbitmq.exchange", &self.exchange),
            ("rabbitmq.source", &self.source),
        ] {
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
}

impl RelayConfig {
    fn validate(&self) -> Result<(), ConfigError> {
        if let Some(name) = &self.name
            && (name.is_empty() || name.len() > 100 || name.contains(char::is_control))
        {
            return Err(ConfigError::key(
                "relay.name",
                "must have 1 to 100 bytes and no control characters",
            ));
        }
        at_least_one("relay.partitions", self.partitions as u64)?;
        at_most(
            "relay.partitions",
            self.partitions as u64,
            u64::from(BUCKETS),
        )?;
        at_least_one("relay.window", self.window as u64)?;
        at_most("relay.window", self.window as u64, 10_000)?;
        at_least_one("relay.batch_size", self.batch_size as u64)?;
        at_most("relay.batch_size", self.batch_size as u64, 10_000)?;
        within("relay.lease", self.lease, SECOND, DAY)?;
        within("relay.tick", self.tick, 100 * MILLISECOND, DAY)?;
        within("relay.grace", self.grace, Duration::ZERO, DAY)
    }
}

impl RetryConfig {
    fn validate(&self) -> Result<(), ConfigError> {
        at_least_one("retry.max_attempts", u64::from(self.max_attempts))?;
        at_most(
            "retry.max_attempts",
            u64::from(self.max_attempts),
            1_000_000,
        )?;
        at_least_one(
            "retry.stop_after_failures",
            u64::from(self.stop_after_failures),
        )?;
        within("retry.backoff", self.backoff, Duration::ZERO, HOUR)
    }
}
