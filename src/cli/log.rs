//! Log lines to standard error.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

use crate::config::{ConfigError, LogConfig, LogFormat};

/// Targets of our crates' that print bodies or secrets at some level, whatever is asked for.
const SILENCED: &[&str] = &[
    "lapin::returned_messages=off",
    // Frames, of which one holds the password and others hold bodies.
    "lapin::channels=off",
    "lapin::frames=off",
    "lapin::internal_rpc=off",
    "lapin::io_loop=off",
    // The same of NATS: what it connects with.
    "async_nats::connection=off",
];
/// Crates whose own reports repeat ours; `log.level` may ask for them again.
const QUIETENED: &[&str] = &[
    "lapin=off",
    "async_nats=off",
    // Warns of each dead connection that it replaces.
    "deadpool=off",
    "actix_server=warn",
    "tokio_postgres=warn",
    "refinery_core=warn",
];

/// Installs the process's log.
pub(super) fn install(config: &LogConfig) -> Result<(), ConfigError> {
    let directives = QUIETENED
        .iter()
        .copied()
        .chain([config.level.as_str()])
        .chain(SILENCED.iter().copied())
        .collect::<Vec<_>>()
        .join(",");
    let filter = EnvFilter::builder().parse(&directives).map_err(|_| ConfigError::Key {
        key: "log.level".into(),
        reason: format!("`{}` is no level or list of directives; give one like `info` or `bellwire=debug,info`", config.level),
    })?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    // A second installation (in tests of this crate) keeps the first.
    let _ = match config.format {
        LogFormat::Text => log.try_init(),
        LogFormat::Json => log.json().flatten_event(true).try_init(),
    };
    Ok(())
}
