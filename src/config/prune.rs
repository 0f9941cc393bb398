//! `[prune]`: when published events are deleted.

use std::time::Duration;

use serde::Deserialize;

use super::{ConfigError, DAY, SECOND, at_least_one, at_most, within};

/// Long enough to look into what happened last week; the table stays small.
pub const DEFAULT_KEEP: Duration = Duration::from_secs(7 * 86_400);
/// A step that takes a fraction of a second even on a slow disk.
pub const DEFAULT_STEP: u32 = 10_000;
/// As often as the lag check of old: what has accumulated since is a step or two.
pub const DEFAULT_PRUNE_EVERY: Duration = Duration::from_secs(5 * 60);

/// How long published events are kept; none for ever.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub struct Keep(pub Option<Duration>);

impl TryFrom<String> for Keep {
    type Error = String;

    fn try_from(value: String) -> Result<Self, String> {
        if value == "forever" {
            return Ok(Self(None));
        }
        humantime::parse_duration(&value)
            .map(|keep| Self(Some(keep)))
            .map_err(|error| {
                format!("`{value}` is no duration ({error}); give one like 7days, or `forever`")
            })
    }
}

/// `[prune]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PruneConfig {
    /// How long published events are kept, or `forever`.
    pub keep: Keep,
    /// Rows deleted in one statement, at most.
    pub step: u32,
    /// How often a relay looks for events to delete.
    #[serde(with = "humantime_serde")]
    pub every: Duration,
}

impl Default for PruneConfig {
    fn default() -> Self {
        Self {
            keep: Keep(Some(DEFAULT_KEEP)),
            step: DEFAULT_STEP,
            every: DEFAULT_PRUNE_EVERY,
        }
    }
}

impl PruneConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        at_least_one("prune.step", u64::from(self.step))?;
        at_most("prune.step", u64::from(self.step), 100_000)?;
        within("prune.every", self.every, SECOND, 30 * DAY)
    }
}
