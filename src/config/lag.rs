//! `[lag]`: When the outbox counts as lagging.

use std::time::Duration;

use serde::Deserialize;

use super::{ConfigError, DAY, MILLISECOND, within};

/// Far above the latency of a healthy relay, and still soon for whoever is on call.
pub const DEFAULT_LAG_ALERT: Duration = Duration::from_secs(5 * 60);

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

impl LagConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        within("lag.alert", self.alert, MILLISECOND, 365 * DAY)
    }
}
