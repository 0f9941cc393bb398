//! `[intake]`: signed webhooks into PostgreSQL.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::environment::content;
use super::{
    ConfigError, DAY, HOUR, Listen, MILLISECOND, SECOND, Secret, at_least_one, at_most, within,
};

/// An hour's clock skew is somebody's mistake; five minutes are the Standard Webhooks' own figure.
pub const DEFAULT_TOLERANCE: Duration = Duration::from_secs(300);
/// Four times what the large senders send at most.
pub const DEFAULT_MAX_BODY_BYTES: u64 = 262_144;
/// As long as Stripe tries again. Others go on for a little longer: see the README.
pub const DEFAULT_DEDUPE_WINDOW: Duration = Duration::from_secs(3 * 86_400);
/// The first delivery and two replays: what fails then fails for a reason of its own.
pub const DEFAULT_INTAKE_MAX_ATTEMPTS: u32 = 3;
/// Transactions at a time. Few are enough: each takes milliseconds.
pub const DEFAULT_CONCURRENCY: u32 = 5;
/// Verified requests that wait for their turn; with five at work the last of them waits for a second.
pub const DEFAULT_QUEUE: u32 = 500;
/// Senders give up after 15 to 30 seconds, and so does whoever sends a byte a second.
pub const DEFAULT_READ_TIMEOUT: Duration = Duration::from_secs(10);
/// From the first byte to the answer.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(60);
/// Where the type of an event is found in the Standard Webhooks' recommended form.
pub const DEFAULT_EVENT_TYPE_AT: &str = "/type";

/// Below this, clocks that are merely a little off would refuse everything.
const SHORTEST_TOLERANCE: Duration = Duration::from_secs(30);
const SMALLEST_BODY: u64 = 1024;
/// A webhook is a notice, not a file; all of it is in memory at once.
const LARGEST_BODY: u64 = 64 * 1024 * 1024;
const MOST_ATTEMPTS: u64 = 20;
const LONGEST_SOURCE: usize = 40;

/// `[intake]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IntakeConfig {
    /// Address that senders post to; `off` for no intake.
    pub listen: Listen,
    /// PEM file with our certificate: without it the intake speaks plain HTTP, for a proxy. Read again when it changes.
    pub cert_file: Option<PathBuf>,
    /// PEM file with its key. Read again when it changes.
    pub key_file: Option<PathBuf>,
    /// Transactions at a time.
    pub concurrency: u32,
    /// Verified requests that wait for one, at most; further ones are told to come later.
    pub queue: u32,
    /// A request whose body takes longer to arrive is cut.
    #[serde(with = "humantime_serde")]
    pub read_timeout: Duration,
    /// From the first byte of a request to its answer; nothing half done remains after it.
    #[serde(with = "humantime_serde")]
    pub deadline: Duration,
    /// Secrets by source, for those that the environment gives.
    pub secrets: BTreeMap<String, Secret>,
    /// Who sends.
    pub source: Vec<SourceConfig>,
}

impl Default for IntakeConfig {
    fn default() -> Self {
        Self {
            listen: Listen(None),
            cert_file: None,
            key_file: None,
            concurrency: DEFAULT_CONCURRENCY,
            queue: DEFAULT_QUEUE,
            read_timeout: DEFAULT_READ_TIMEOUT,
            deadline: DEFAULT_DEADLINE,
            secrets: BTreeMap::new(),
            source: Vec::new(),
        }
    }
}

/// One sender: `POST /webhooks/<name>`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SourceConfig {
    /// In the path, in tables, metrics and logs.
    pub name: String,
    /// What bodies are signed with; several while one replaces another.
    pub secrets: Vec<Secret>,
    /// Files that hold secrets, one a line.
    pub secret_files: Vec<PathBuf>,
    /// How far `webhook-timestamp` may be from our clock.
    #[serde(with = "humantime_serde")]
    pub tolerance: Duration,
    /// A larger body is refused.
    pub max_body_bytes: u64,
    /// How long an id is remembered.
    #[serde(with = "humantime_serde")]
    pub dedupe_window: Duration,
    /// An event that failed so often, first delivery and replays, is parked.
    pub max_attempts: u32,
    /// JSON pointer to the type of an event.
    pub event_type_at: String,
    /// JSON Schema of the body, as text.
    pub schema: Option<String>,
    /// A file that holds it.
    pub schema_file: Option<PathBuf>,
    /// What is done with events: the first that matches decides.
    pub route: Vec<IntakeRouteConfig>,
}

impl Default for SourceConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            secrets: Vec::new(),
            secret_files: Vec::new(),
            tolerance: DEFAULT_TOLERANCE,
            max_body_bytes: DEFAULT_MAX_BODY_BYTES,
            dedupe_window: DEFAULT_DEDUPE_WINDOW,
            max_attempts: DEFAULT_INTAKE_MAX_ATTEMPTS,
            event_type_at: DEFAULT_EVENT_TYPE_AT.into(),
            schema: None,
            schema_file: None,
            route: Vec::new(),
        }
    }
}

/// What is done with the events of a type.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IntakeRouteConfig {
    /// Which event types; `*` stands for any run of characters.
    pub event_type: String,
    /// Statements, separated by semicolons.
    pub sql: Option<String>,
    /// A file that holds them.
    pub sql_file: Option<PathBuf>,
    /// Named parameters of the statements: JSON pointers into the body.
    pub parameters: BTreeMap<String, String>,
    /// Writes an event to the outbox.
    pub outbox: Option<EmitConfig>,
}

impl Default for IntakeRouteConfig {
    fn default() -> Self {
        Self {
            event_type: "*".into(),
            sql: None,
            sql_file: None,
            parameters: BTreeMap::new(),
            outbox: None,
        }
    }
}

/// The event that a route writes to the outbox.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmitConfig {
    /// The type itself, or a JSON pointer to it.
    pub aggregate_type: String,
    /// JSON pointer to the id.
    pub aggregate_id: String,
    /// Template: `{event_type}`, `{event_id}`, `{source}` and `{/json/pointer}` are filled in.
    #[serde(default = "same_type")]
    pub event_type: String,
    /// JSON pointer to what is sent; the whole body unless given.
    #[serde(default)]
    pub payload: String,
}

fn same_type() -> String {
    "{event_type}".into()
}

impl IntakeConfig {
    /// Is there an intake?
    pub fn is_on(&self) -> bool {
        self.listen.0.is_some()
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        at_least_one("intake.concurrency", u64::from(self.concurrency))?;
        at_most("intake.concurrency", u64::from(self.concurrency), 1000)?;
        at_most("intake.queue", u64::from(self.queue), 1_000_000)?;
        within(
            "intake.read_timeout",
            self.read_timeout,
            100 * MILLISECOND,
            HOUR,
        )?;
        within("intake.deadline", self.deadline, 100 * MILLISECOND, HOUR)?;
        if self.read_timeout >= self.deadline {
            return Err(ConfigError::key(
                "intake.read_timeout",
                format!(
                    "{} must be shorter than intake.deadline ({})",
                    humantime::format_duration(self.read_timeout),
                    humantime::format_duration(self.deadline)
                ),
            ));
        }
        if self.is_on() && self.source.is_empty() {
            return Err(ConfigError::key(
                "intake.source",
                "nobody may send: add a section [[intake.source]], or set intake.listen to `off`",
            ));
        }
        if self.cert_file.is_some() != self.key_file.is_some() {
            return Err(ConfigError::key(
                "intake.cert_file",
                "intake.cert_file and intake.key_file go together",
            ));
        }
        self.check_names()?;
        for (number, source) in self.source.iter().enumerate() {
            source.validate(&format!("intake.source[{number}]"))?;
        }
        Ok(())
    }

    fn check_names(&self) -> Result<(), ConfigError> {
        let mut names = BTreeSet::new();
        for (number, source) in self.source.iter().enumerate() {
            let wrong = |reason: String| {
                Err(ConfigError::key(
                    format!("intake.source[{number}].name"),
                    reason,
                ))
            };
            let name = &source.name;
            let right = (1..=LONGEST_SOURCE).contains(&name.len())
                && name
                    .bytes()
                    .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-'))
                && !name.ends_with("_file");
            if !right {
                return wrong(format!(
                    "`{name}` is none: give 1 to {LONGEST_SOURCE} lower-case letters, digits, `-` \
                     and `_`, not ending in `_file`"
                ));
            }
            // As the environment spells them, which has no hyphen.
            if !names.insert(key_of(name)) {
                return wrong(format!("`{name}` is taken by another source"));
            }
        }
        match self.secrets.keys().find(|key| !names.contains(*key)) {
            None => Ok(()),
            Some(stranger) => Err(ConfigError::key(
                format!("intake.secrets.{stranger}"),
                "there is no [[intake.source]] of this name (with `_` for each `-`)",
            )),
        }
    }

    /// The secrets of a source as they were given, from all places, each with the place's name.
    ///
    /// # Errors
    /// Names the file that cannot be read.
    pub fn secrets_of(&self, source: &SourceConfig) -> Result<Vec<(String, Secret)>, ConfigError> {
        let name = &source.name;
        let mut found: Vec<_> = source
            .secrets
            .iter()
            .enumerate()
            .map(|(number, secret)| {
                (
                    format!("intake.source.{name}.secrets[{number}]"),
                    secret.clone(),
                )
            })
            .collect();
        for path in &source.secret_files {
            let option = format!("intake.source.{name}.secret_files");
            let text = content(&option, path.as_os_str())?;
            found.push((
                format!("{option} ({})", path.display()),
                text.as_str().into(),
            ));
        }
        let key = key_of(name);
        if let Some(secret) = self.secrets.get(&key) {
            found.push((format!("intake.secrets.{key}"), secret.clone()));
        }
        Ok(found)
    }
}

/// `shop_orders` for `shop-orders`.
pub(crate) fn key_of(source: &str) -> String {
    source.replace('-', "_")
}

impl SourceConfig {
    fn validate(&self, at: &str) -> Result<(), ConfigError> {
        let key = |option: &str| format!("{at}.{option}");
        within(
            &key("tolerance"),
            self.tolerance,
            SHORTEST_TOLERANCE,
            30 * DAY,
        )?;
        if !(SMALLEST_BODY..=LARGEST_BODY).contains(&self.max_body_bytes) {
            return Err(ConfigError::key(
                key("max_body_bytes"),
                format!(
                    "must be between {SMALLEST_BODY} and {LARGEST_BODY}, is {}",
                    self.max_body_bytes
                ),
            ));
        }
        at_least_one(&key("max_attempts"), u64::from(self.max_attempts))?;
        at_most(
            &key("max_attempts"),
            u64::from(self.max_attempts),
            MOST_ATTEMPTS,
        )?;
        within(
            &key("dedupe_window"),
            self.dedupe_window,
            SECOND,
            3650 * DAY,
        )?;
        // A call that was recorded is good for the tolerance before and after its timestamp.
        if self.dedupe_window < 2 * self.tolerance {
            return Err(ConfigError::key(
                key("dedupe_window"),
                format!(
                    "must be at least twice the tolerance ({}), is {}: a call that somebody recorded \
                     could be repeated after its id was forgotten",
                    humantime::format_duration(self.tolerance),
                    humantime::format_duration(self.dedupe_window)
                ),
            ));
        }
        if self.schema.is_some() && self.schema_file.is_some() {
            return Err(ConfigError::key(
                key("schema_file"),
                "schema is given too: leave one out",
            ));
        }
        for (number, route) in self.route.iter().enumerate() {
            route.validate(&format!("{at}.route[{number}]"))?;
        }
        Ok(())
    }

    /// The schema's text, and where it is from.
    ///
    /// # Errors
    /// Names the file that cannot be read.
    pub fn schema_text(&self) -> Result<Option<(String, String)>, ConfigError> {
        let name = &self.name;
        text_of(
            (
                &format!("intake.source.{name}.schema"),
                self.schema.as_deref(),
            ),
            (
                &format!("intake.source.{name}.schema_file"),
                self.schema_file.as_deref(),
            ),
        )
    }
}

impl IntakeRouteConfig {
    fn validate(&self, at: &str) -> Result<(), ConfigError> {
        let given = [
            self.sql.is_some(),
            self.sql_file.is_some(),
            self.outbox.is_some(),
        ];
        if self.sql.is_some() && self.sql_file.is_some() {
            return Err(ConfigError::key(
                format!("{at}.sql_file"),
                "sql is given too: leave one out",
            ));
        }
        if given.iter().all(|given| !given) {
            return Err(ConfigError::key(
                at,
                "does nothing: give sql, sql_file or outbox",
            ));
        }
        Ok(())
    }

    /// The statements' text, and where it is from.
    ///
    /// # Errors
    /// Names the file that cannot be read.
    pub fn sql_text(&self, at: &str) -> Result<Option<(String, String)>, ConfigError> {
        text_of(
            (&format!("{at}.sql"), self.sql.as_deref()),
            (&format!("{at}.sql_file"), self.sql_file.as_deref()),
        )
    }
}

fn text_of(
    (option, text): (&str, Option<&str>),
    (file_option, path): (&str, Option<&Path>),
) -> Result<Option<(String, String)>, ConfigError> {
    match (text, path) {
        (Some(text), _) => Ok(Some((text.to_owned(), option.to_owned()))),
        (None, Some(path)) => {
            let text = content(file_option, path.as_os_str())?;
            Ok(Some((text, format!("{file_option} ({})", path.display()))))
        }
        (None, None) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Result<IntakeConfig, String> {
        let config: IntakeConfig = config::Config::builder()
            .add_source(config::File::from_str(text, config::FileFormat::Toml))
            .build()
            .and_then(config::Config::try_deserialize)
            .map_err(|error| error.to_string())?;
        config.validate().map_err(|error| error.to_string())?;
        Ok(config)
    }

    fn source(options: &str) -> Result<IntakeConfig, String> {
        config(&format!("[[source]]\nname = \"orders\"\n{options}"))
    }

    #[test]
    fn the_ranges_hold_at_both_ends() {
        for (options, right) in [
            ("", true),
            ("tolerance = \"30s\"", true),
            ("tolerance = \"29s\"", false),
            ("max_body_bytes = 1024", true),
            ("max_body_bytes = 1023", false),
            ("max_attempts = 1", true),
            ("max_attempts = 20", true),
            ("max_attempts = 0", false),
            ("max_attempts = 21", false),
            ("tolerance = \"1h\"\ndedupe_window = \"2h\"", true),
            ("tolerance = \"1h\"\ndedupe_window = \"1h 59m\"", false),
            ("dedupe_windows = \"4days\"", false),
            ("schema = \"{}\"\nschema_file = \"a\"", false),
            ("[[source.route]]\nevent_type = \"a\"", false),
            ("[[source.route]]\nsql = \"SELECT 1\"", true),
        ] {
            assert_eq!(source(options).is_ok(), right, "{options}");
        }
    }

    #[test]
    fn sources_have_names_of_their_own_that_the_environment_can_spell() {
        for (name, right) in [("a", true), ("shop-1_b", true), ("", false), ("A", false)] {
            let text = format!("[[source]]\nname = \"{name}\"");
            assert_eq!(config(&text).is_ok(), right, "{name}");
        }
        assert!(config("[[source]]\nname = \"a\"\n[[source]]\nname = \"a\"").is_err());
        assert!(config("[[source]]\nname = \"a-b\"\n[[source]]\nname = \"a_b\"").is_err());
        assert!(config("[[source]]\nname = \"a_file\"").is_err());
        let error = config("[secrets]\nother = \"x\"").unwrap_err();
        assert!(error.contains("intake.secrets.other"), "{error}");
    }

    #[test]
    fn an_intake_without_senders_is_refused() {
        assert!(config("listen = \"127.0.0.1:8080\"").is_err());
        assert!(!config("").unwrap().is_on());
    }
}
