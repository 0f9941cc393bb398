//! Sources: what the configuration says of each sender, read and compiled.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::pointer::Pointer;
use super::route::{Event, Route};
use super::schema::Schema;
use super::signature::{Keys, Rejection, Verified};
use crate::config::{ConfigError, IntakeConfig, SourceConfig};

/// Letters of an event type that are kept; a longer one is nobody's name for anything.
const LONGEST_TYPE: usize = 200;

/// A sender.
#[derive(Debug)]
pub struct Source {
    /// In the path and in the tables.
    pub name: Arc<str>,
    /// What its calls are signed with.
    pub keys: Keys,
    /// How far a timestamp may be from our clock.
    pub tolerance: Duration,
    /// Of a body.
    pub max_body_bytes: u64,
    /// How long its ids are remembered.
    pub dedupe_window: Duration,
    /// Failures after which an event is parked.
    pub max_attempts: i32,
    event_type_at: Pointer,
    schema: Option<Schema>,
    routes: Vec<Route>,
}

/// Why an event goes to the dead letters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Its body does not fulfil the schema.
    SchemaInvalid(String),
    /// No route is for its type.
    UnknownType(String),
    /// Its handler refused it.
    Processing(String),
}

impl Failure {
    /// A fixed set.
    pub fn class(&self) -> &'static str {
        match self {
            Self::SchemaInvalid(_) => "schema_invalid",
            Self::UnknownType(_) => "unknown_type",
            Self::Processing(_) => "processing_failed",
        }
    }

    /// Class and reason, as it is stored. What PostgreSQL cannot store is replaced.
    pub fn text(&self) -> String {
        let reason = match self {
            Self::SchemaInvalid(errors) => errors.clone(),
            Self::UnknownType(event_type) => format!("no handler for {event_type}"),
            Self::Processing(reason) => reason.clone(),
        };
        format!("{} - {reason}", self.class()).replace('\0', "\u{fffd}")
    }
}

/// All sources of a configuration.
///
/// # Errors
/// Names the option that is wrong.
pub fn sources(config: &IntakeConfig) -> Result<Vec<Arc<Source>>, ConfigError> {
    config
        .source
        .iter()
        .map(|source| Source::new(config, source).map(Arc::new))
        .collect()
}

/// The keys of a source.
///
/// # Errors
/// Names the place of the secret that is wrong, and never shows it.
pub fn keys(config: &IntakeConfig, source: &SourceConfig) -> Result<Keys, ConfigError> {
    let mut keys = Keys::default();
    for (key, secret) in config.secrets_of(source)? {
        keys.add(secret.expose())
            .map_err(|reason| ConfigError::Key { key, reason })?;
    }
    if keys.is_empty() {
        let name = &source.name;
        let variable = crate::config::key_of(name).to_uppercase();
        return Err(ConfigError::Key {
            key: format!("intake.source.{name}.secrets"),
            reason: format!(
                "there is no secret: give one here, in secret_files, as BELLWIRE_INTAKE__SECRETS__{variable} \
                 or BELLWIRE_INTAKE__SECRETS__{variable}_FILE"
            ),
        });
    }
    Ok(keys)
}

impl Source {
    fn new(all: &IntakeConfig, config: &SourceConfig) -> Result<Self, ConfigError> {
        let at = format!("intake.source.{}", config.name);
        let event_type_at =
            Pointer::parse(&config.event_type_at).map_err(|reason| ConfigError::Key {
                key: format!("{at}.event_type_at"),
                reason,
            })?;
        let schema = match config.schema_text()? {
            None => None,
            Some((text, key)) => Some(Schema::compile(&text).map_err(|error| {
                let reason = error.to_string();
                ConfigError::Key { key, reason }
            })?),
        };
        let routes = config
            .route
            .iter()
            .enumerate()
            .map(|(number, route)| Route::new(route, &format!("{at}.route[{number}]")))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            name: config.name.as_str().into(),
            keys: keys(all, config)?,
            tolerance: config.tolerance,
            max_body_bytes: config.max_body_bytes,
            dedupe_window: config.dedupe_window,
            max_attempts: i32::try_from(config.max_attempts).unwrap_or(i32::MAX),
            event_type_at,
            schema,
            routes,
        })
    }

    /// Reads a verified body: what is stored and handled from here on is a JSON object.
    ///
    /// # Errors
    /// [`Rejection::NotUtf8Json`] or [`Rejection::NotJsonObject`].
    pub fn read(&self, verified: &Verified, execution_id: &str) -> Result<Read, Rejection> {
        let text = std::str::from_utf8(verified.body())
            .map_err(|error| Rejection::NotUtf8Json(error.to_string()))?;
        let document: Value = serde_json::from_str(text)
            .map_err(|error| Rejection::NotUtf8Json(error.to_string()))?;
        if !document.is_object() {
            return Err(Rejection::NotJsonObject);
        }
        Ok(Read {
            event: Event::new(
                &self.name,
                verified,
                self.event_type(text),
                text,
                execution_id,
            ),
            document,
        })
    }

    /// The same of bytes that were stored.
    ///
    /// # Errors
    /// When they are no JSON object: nobody but a hand in the table can have done that.
    pub fn read_stored(&self, id: &str, bytes: &[u8], execution_id: &str) -> Result<Read, Failure> {
        let invalid =
            |reason: String| Failure::SchemaInvalid(format!("#: invalid JSON ({reason})"));
        let text = std::str::from_utf8(bytes).map_err(|error| invalid(error.to_string()))?;
        let document: Value =
            serde_json::from_str(text).map_err(|error| invalid(error.to_string()))?;
        Ok(Read {
            event: Event {
                source: self.name.to_string(),
                id: id.to_owned(),
                event_type: self.event_type(text),
                text: text.to_owned(),
                execution_id: execution_id.to_owned(),
            },
            document,
        })
    }

    fn event_type(&self, text: &str) -> String {
        let found = self.event_type_at.text(text).unwrap_or_default();
        found.chars().take(LONGEST_TYPE).collect()
    }

    /// Today's schema and routes: what is to be done with it?
    ///
    /// # Errors
    /// Why nothing can be.
    pub fn judge(&self, read: &Read) -> Result<&Route, Failure> {
        if let Some(schema) = &self.schema {
            schema
                .validate(&read.document)
                .map_err(Failure::SchemaInvalid)?;
        }
        let event_type = &read.event.event_type;
        self.routes
            .iter()
            .find(|route| route.matches(event_type))
            .ok_or_else(|| Failure::UnknownType(event_type.clone()))
    }

    /// All its routes, to prepare their statements.
    pub fn routes(&self) -> &[Route] {
        &self.routes
    }
}

/// An event and its parsed body.
#[derive(Clone, Debug)]
pub struct Read {
    /// What goes on.
    pub event: Event,
    document: Value,
}
