//! `[retry]`: What happens to events that fail.

use std::time::Duration;

use serde::Deserialize;

use super::{ConfigError, HOUR, at_least_one, at_most, within};

/// With the backoff below the tries span seven and a half minutes: time to add a binding that was
/// forgotten, and somebody is told within the hour.
pub const DEFAULT_MAX_ATTEMPTS: u32 = 5;
/// Time for a hand to mend what one try met; doubles on each later one, up to an hour.
pub const DEFAULT_BACKOFF: Duration = Duration::from_secs(30);
/// One or two may be an accident; three in a row point at the broker rather than at the events.
pub const DEFAULT_STOP_AFTER_FAILURES: u32 = 3;

/// `[retry]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RetryConfig {
    /// Failed attempts before an event is dead-lettered.
    pub max_attempts: u32,
    /// Wait after the first failed attempt; doubles on each later one, up to an hour.
    #[serde(with = "humantime_serde")]
    pub backoff: Duration,
    /// Failures in a row that point at the broker before the relay stops asking for a while.
    pub stop_after_failures: u32,
}

impl Default for RetryConfig {
    fn default() -> Self {
        Self {
            max_attempts: DEFAULT_MAX_ATTEMPTS,
            backoff: DEFAULT_BACKOFF,
            stop_after_failures: DEFAULT_STOP_AFTER_FAILURES,
        }
    }
}

impl RetryConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        at_least_one("retry.max_attempts", u64::from(self.max_attempts))?;
        at_most(
            "retry.max_attempts",
            u64::from(self.max_attempts),
            1_000_000,
        )?;
        at_least_one(
            "retry.stop_after_failures",
            u64::from(self.stop_after_failures),
        )?;
        within("retry.backoff", self.backoff, Duration::ZERO, HOUR)
    }
}
