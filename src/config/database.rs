//! `[database]`: Where the outbox is.

use std::str::FromStr;

use serde::Deserialize;

use super::{ConfigError, Secret};

/// Longest name of schema or table: PostgreSQL's 63 bytes, less our longest suffix.
const MAX_NAME_BYTES: usize = 40;

/// What stands between the relay and PostgreSQL.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub enum PoolerSetting {
    /// Found out at the start.
    #[default]
    Auto,
    /// Nothing, or a pooler in session mode.
    None,
    /// A pooler that gives each transaction whichever server session is free.
    Transaction,
}

impl TryFrom<String> for PoolerSetting {
    type Error = String;

    fn try_from(value: String) -> Result<Self, String> {
        match value.as_str() {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            "transaction" => Ok(Self::Transaction),
            _ => Err(format!(
                "must be `auto`, `none` or `transaction`, is `{value}`"
            )),
        }
    }
}

/// `[database]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DatabaseConfig {
    /// `postgres://user:password@host:port/database?sslmode=require`; `DATABASE_URL`.
    pub url: Option<Secret>,
    /// Is there a connection pooler in transaction mode?
    pub pooler: PoolerSetting,
    /// A direct connection for LISTEN alone, where `url` leads to a pooler in transaction mode.
    pub listen_url: Option<Secret>,
    /// Schema of the outbox table.
    pub schema: String,
    /// Name of the outbox table; everything else is named after it.
    pub table: String,
}

impl Default for DatabaseConfig {
    fn default() -> Self {
        Self {
            url: None,
            pooler: PoolerSetting::default(),
            listen_url: None,
            schema: "public".into(),
            table: "outbox".into(),
        }
    }
}

impl DatabaseConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if let Some(url) = &self.url {
            check_database_url("database.url", "DATABASE_URL", url)?;
        }
        if let Some(url) = &self.listen_url {
            let variable = "BELLWIRE_DATABASE__LISTEN_URL";
            check_database_url("database.listen_url", variable, url)?;
        }
        check_name("database.schema", &self.schema)?;
        check_name("database.table", &self.table)
    }
}

fn check_database_url(key: &str, variable: &str, url: &Secret) -> Result<(), ConfigError> {
    // The driver does not know libpq's verifying modes; see `store::connect`.
    let known = url
        .expose()
        .replace("sslmode=verify-full", "sslmode=require")
        .replace("sslmode=verify-ca", "sslmode=require");
    let parsed = tokio_postgres::Config::from_str(&known).map_err(|_| {
        ConfigError::key(
            key,
            format!(
                "no PostgreSQL connection string; give one like \
                 postgres://user:password@host:5432/database ({variable}), with special \
                 characters of the password percent-encoded"
            ),
        )
    })?;
    if parsed.get_hosts().is_empty() {
        return Err(ConfigError::key(
            key,
            format!(
                "names no host; give one like postgres://user:password@host:5432/database ({variable})"
            ),
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
