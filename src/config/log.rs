//! `[log]`: What is written to standard error.

use serde::Deserialize;

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

/// At which level ordinary outcomes of events are logged. Failures always are.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub enum OutcomeLevel {
    /// Not at all.
    Off,
    /// At debug: a line for each event is much at thousands a second.
    #[default]
    Debug,
    /// At info.
    Info,
}

impl TryFrom<String> for OutcomeLevel {
    type Error = String;

    fn try_from(value: String) -> Result<Self, String> {
        match value.as_str() {
            "off" => Ok(Self::Off),
            "debug" => Ok(Self::Debug),
            "info" => Ok(Self::Info),
            _ => Err(format!("must be `off`, `debug` or `info`, is `{value}`")),
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
    /// Level of the line for each event that was published or handed back.
    pub outcomes: OutcomeLevel,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self {
            level: "info".into(),
            format: LogFormat::Text,
            outcomes: OutcomeLevel::default(),
        }
    }
}
