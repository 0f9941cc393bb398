//! What operators write, fed with any bytes.

use std::ffi::OsString;
use std::path::Path;

use super::environment::Environment;
use super::{Config, ConfigError, DatabaseConfig};
use crate::fuzz::texts;

/// In seeds, wherever a secret stands: no reason shows it.
const MARK: &str = "S3cr3tM4rk";

fn check(read: Result<Config, ConfigError>) {
    match read {
        Ok(config) => {
            config.router().expect("it was validated");
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// A configuration file.
pub(crate) fn file(bytes: &[u8]) {
    let Some([text]) = texts(bytes) else {
        return;
    };
    check(Config::read(
        Path::new("bellwire.toml"),
        Some(text),
        &Environment::default(),
    ));
}

/// Variables, one a line.
pub(crate) fn environment(bytes: &[u8]) {
    let Some([text]) = texts(bytes) else {
        return;
    };
    let variables = text.lines().filter_map(|line| line.split_once('='));
    // Which files there are is another matter.
    let variables = variables.filter(|(_, value)| !value.starts_with('/'));
    let variables = variables.map(|(name, value)| (OsString::from(name), OsString::from(value)));
    if let Ok(environment) = Environment::read(variables) {
        check(Config::read(Path::new("bellwire.toml"), None, &environment));
    }
}

/// A connection string.
pub(crate) fn postgres_url(bytes: &[u8]) {
    let Some([text]) = texts(bytes) else {
        return;
    };
    let config = DatabaseConfig::default();
    if let Err(error) = config.target("database.url", "DATABASE_URL", &text.into()) {
        assert!(!error.to_string().contains(MARK), "{error}");
    }
}
