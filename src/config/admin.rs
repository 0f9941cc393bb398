//! `[admin]`: the admin port.

use std::net::SocketAddr;

use serde::Deserialize;

use super::{ConfigError, Secret};

/// Loopback: the port tells and takes more than strangers should have.
pub const DEFAULT_ADMIN_LISTEN: &str = "127.0.0.1:9464";

/// Shorter ones could be guessed.
const SHORTEST_SECRET: usize = 16;

/// `[admin]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdminConfig {
    /// Address of `/metrics`, `/healthz`, `/readyz`, `/status`, `/tail`, `/wake` and `/dead`; `off` for
    /// none.
    pub listen: Listen,
    /// Bearer token of the dead letter operations; without one they are refused.
    pub token: Option<Secret>,
    /// Key of `POST /wake`; without one it is refused.
    pub wake_key: Option<Secret>,
}

impl AdminConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        for (key, secret) in [
            ("admin.token", &self.token),
            ("admin.wake_key", &self.wake_key),
        ] {
            if secret
                .as_ref()
                .is_some_and(|secret| secret.expose().len() < SHORTEST_SECRET)
            {
                return Err(ConfigError::Key {
                    key: key.into(),
                    reason: format!("must have at least {SHORTEST_SECRET} characters"),
                });
            }
        }
        Ok(())
    }
}

impl Default for AdminConfig {
    fn default() -> Self {
        Self {
            listen: Listen(DEFAULT_ADMIN_LISTEN.parse().ok()),
            token: None,
            wake_key: None,
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
