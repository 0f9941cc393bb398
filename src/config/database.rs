//! `[database]`: Where the outbox is.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Deserialize;

use super::postgres_url::{PostgresUrl, SslMode};
use super::{ConfigError, Secret};
use crate::tls::{self, PemFile, Tls, Verify};

/// Longest name of schema or table: PostgreSQL's 63 bytes, less our longest suffix.
const MAX_NAME_BYTES: usize = 40;
/// `sslrootcert` for the system's roots, as in libpq.
const SYSTEM_ROOTS: &str = "system";

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
    /// A file that holds the URL; `DATABASE_URL_FILE`.
    pub url_file: Option<PathBuf>,
    /// PEM file with the CA that the server's certificate is verified by; libpq's `sslrootcert`.
    pub ca_file: Option<PathBuf>,
    /// PEM file with our own certificate, for servers that ask for one; libpq's `sslcert`.
    pub cert_file: Option<PathBuf>,
    /// PEM file with its key; libpq's `sslkey`.
    pub key_file: Option<PathBuf>,
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
            url_file: None,
            ca_file: None,
            cert_file: None,
            key_file: None,
            schema: "public".into(),
            table: "outbox".into(),
        }
    }
}

/// How to connect, as the URL and the files say.
pub(crate) struct DatabaseTarget {
    /// Without a mode of TLS: that is ours to set.
    pub(crate) driver: tokio_postgres::Config,
    pub(crate) mode: SslMode,
    pub(crate) tls: Tls,
}

impl DatabaseConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if let Some(url) = &self.url {
            let target = self.target("database.url", "DATABASE_URL", url)?;
            target.tls.client_config()?;
        }
        if let Some(url) = &self.listen_url {
            let variable = "BELLWIRE_DATABASE__LISTEN_URL";
            let target = self.target("database.listen_url", variable, url)?;
            target.tls.client_config()?;
        }
        check_name("database.schema", &self.schema)?;
        check_name("database.table", &self.table)
    }

    /// Reads a URL, of the option `key`, which the environment has as `variable`; opens no file.
    ///
    /// # Errors
    /// Names the option, or the parameter of the URL, that is wrong.
    pub(crate) fn target(
        &self,
        key: &'static str,
        variable: &str,
        url: &Secret,
    ) -> Result<DatabaseTarget, ConfigError> {
        let url =
            PostgresUrl::parse(url.expose()).map_err(|reason| ConfigError::key(key, reason))?;
        let driver = parse_driver(key, variable, &url.driver)?;
        let ca = either(
            ("database.ca_file", self.ca_file.as_deref()),
            ("database.url: sslrootcert", url.root_certificate.as_deref()),
        )?;
        let certificate = either(
            ("database.cert_file", self.cert_file.as_deref()),
            ("database.url: sslcert", url.certificate.as_deref()),
        )?;
        let key = either(
            ("database.key_file", self.key_file.as_deref()),
            ("database.url: sslkey", url.key.as_deref()),
        )?;
        let mode = match (url.mode, &ca.1) {
            (Some(mode), _) => mode,
            // Whoever names a CA means it: libpq's default might go on without TLS.
            (None, Some(_)) => SslMode::VerifyFull,
            (None, None) => SslMode::Prefer,
        };
        let mut tls = Tls {
            verify: Verify::Nothing,
            ca_option: "database.ca_file",
            ca: None,
            identity: None,
        };
        if mode != SslMode::Disable {
            tls.identity = tls::identity(
                (certificate.0, certificate.1.as_deref()),
                (key.0, key.1.as_deref()),
            )?;
            verify_by(&mut tls, mode, ca)?;
        }
        Ok(DatabaseTarget { driver, mode, tls })
    }
}

/// What is verified, and by which roots.
fn verify_by(
    tls: &mut Tls,
    mode: SslMode,
    (option, ca): (&'static str, Option<PathBuf>),
) -> Result<(), ConfigError> {
    let system = ca.as_deref() == Some(Path::new(SYSTEM_ROOTS));
    if system && mode != SslMode::VerifyFull {
        // As in libpq: by those roots anybody can have a certificate for some name.
        return Err(ConfigError::key(
            option,
            "`system` goes with sslmode=verify-full only",
        ));
    }
    tls.verify = match mode {
        SslMode::VerifyFull => Verify::ChainAndName,
        SslMode::VerifyCa => Verify::Chain,
        // As in libpq: a CA that is named is asked.
        _ if ca.is_some() => Verify::Chain,
        _ => Verify::Nothing,
    };
    tls.ca = ca.filter(|_| !system).map(|path| PemFile { option, path });
    Ok(())
}

/// The option or the parameter of the URL; both would be a riddle. Without either: the option's name.
fn either(
    (option, path): (&'static str, Option<&Path>),
    (parameter, value): (&'static str, Option<&str>),
) -> Result<(&'static str, Option<PathBuf>), ConfigError> {
    match (path, value) {
        (Some(_), Some(_)) => Err(ConfigError::key(
            option,
            format!("{parameter} is given too: leave one out"),
        )),
        (None, Some(value)) => Ok((parameter, Some(value.into()))),
        (path, None) => Ok((option, path.map(Path::to_owned))),
    }
}

fn parse_driver(
    key: &str,
    variable: &str,
    text: &str,
) -> Result<tokio_postgres::Config, ConfigError> {
    let parsed = tokio_postgres::Config::from_str(text).map_err(|_| {
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
    Ok(parsed)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn target(parameters: &str) -> DatabaseTarget {
        let url = Secret::from(format!("postgres://u@h/d?{parameters}").as_str());
        DatabaseConfig::default()
            .target("database.url", "DATABASE_URL", &url)
            .unwrap()
    }

    #[test]
    fn the_modes_verify_what_they_verify_in_libpq() {
        for (parameters, verify) in [
            ("", Verify::Nothing),
            ("sslmode=allow", Verify::Nothing),
            ("sslmode=prefer", Verify::Nothing),
            ("sslmode=require", Verify::Nothing),
            ("sslmode=verify-ca", Verify::Chain),
            ("sslmode=verify-full", Verify::ChainAndName),
            ("sslmode=disable&sslrootcert=ca.pem", Verify::Nothing),
            ("sslmode=prefer&sslrootcert=ca.pem", Verify::Chain),
            ("sslmode=require&sslrootcert=ca.pem", Verify::Chain),
            ("sslmode=verify-ca&sslrootcert=ca.pem", Verify::Chain),
            (
                "sslmode=verify-full&sslrootcert=ca.pem",
                Verify::ChainAndName,
            ),
            (
                "sslmode=verify-full&sslrootcert=system",
                Verify::ChainAndName,
            ),
        ] {
            assert_eq!(target(parameters).tls.verify, verify, "{parameters}");
        }
    }

    #[test]
    fn a_ca_without_a_mode_is_verified_by_in_full() {
        let target = target("sslrootcert=ca.pem");
        assert_eq!(target.mode, SslMode::VerifyFull);
        assert_eq!(target.tls.verify, Verify::ChainAndName);
        let config = DatabaseConfig {
            ca_file: Some("ca.pem".into()),
            ..DatabaseConfig::default()
        };
        let target = config
            .target("database.url", "DATABASE_URL", &"postgres://u@h/d".into())
            .unwrap();
        assert_eq!(target.mode, SslMode::VerifyFull);
    }

    #[test]
    fn contradictions_are_refused_by_name() {
        let config = DatabaseConfig {
            ca_file: Some("ca.pem".into()),
            ..DatabaseConfig::default()
        };
        let refused = |parameters: &str| {
            let url = Secret::from(format!("postgres://u@h/d?{parameters}").as_str());
            config
                .target("database.url", "DATABASE_URL", &url)
                .err()
                .unwrap()
                .to_string()
        };
        assert!(
            refused("sslrootcert=x").starts_with("database.ca_file: database.url: sslrootcert")
        );
        assert!(refused("sslcert=x").starts_with("database.url: sslcert: is given without"));
        assert!(refused("sslkey=x").contains("database.cert_file"));
        let weak = DatabaseConfig::default().target(
            "database.url",
            "DATABASE_URL",
            &"postgres://u@h/d?sslmode=require&sslrootcert=system".into(),
        );
        assert!(weak.err().unwrap().to_string().contains("verify-full"));
    }
}
