//! `[admin]`: The admin port.

use std::net::SocketAddr;

use serde::Deserialize;

/// Loopback: the port tells and takes more than strangers should have.
pub const DEFAULT_ADMIN_LISTEN: &str = "127.0.0.1:9464";

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
