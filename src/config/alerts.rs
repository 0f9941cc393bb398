//! `[alerts]`: Who is told of trouble.

use std::time::Duration;

use serde::Deserialize;

use super::{ConfigError, DAY, HOUR, MILLISECOND, Secret, within};

/// Slack answers within a second; whoever needs longer is in trouble and is asked again.
pub const DEFAULT_ALERTS_TIMEOUT: Duration = Duration::from_secs(10);
/// Outlasts a deployment or an incident of the receiver; older news would only confuse.
pub const DEFAULT_GIVE_UP_AFTER: Duration = HOUR;
/// A broker that merely restarts is no news.
pub const DEFAULT_BREAKER_AFTER: Duration = Duration::from_secs(10);
/// A link has to leave room for the text that it follows.
const MAX_LINK_BYTES: usize = 500;

/// `[alerts]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AlertsConfig {
    /// Slack incoming webhook; the URL itself is the secret.
    pub slack_url: Option<Secret>,
    /// Takes each alert as a JSON object by POST.
    pub webhook_url: Option<Secret>,
    /// Sent to `webhook_url` as `Authorization: Bearer …`.
    pub webhook_token: Option<Secret>,
    /// For each request.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
    /// An alert that could not be delivered for so long is dropped.
    #[serde(with = "humantime_serde")]
    pub give_up_after: Duration,
    /// A breaker that closes again within this is no news.
    #[serde(with = "humantime_serde")]
    pub breaker_after: Duration,
    /// Put at the end of every text: a dashboard, or what to do.
    pub link: Option<String>,
}

impl Default for AlertsConfig {
    fn default() -> Self {
        Self {
            slack_url: None,
            webhook_url: None,
            webhook_token: None,
            timeout: DEFAULT_ALERTS_TIMEOUT,
            give_up_after: DEFAULT_GIVE_UP_AFTER,
            breaker_after: DEFAULT_BREAKER_AFTER,
            link: None,
        }
    }
}

impl AlertsConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if let Some(url) = &self.slack_url {
            http_url("alerts.slack_url", url.expose(), "hooks.slack.com/services")?;
        }
        if let Some(url) = &self.webhook_url {
            http_url(
                "alerts.webhook_url",
                url.expose(),
                "alerts.example/bellwire",
            )?;
        }
        self.check_token()?;
        if let Some(link) = &self.link {
            http_url("alerts.link", link, "grafana.example/d/bellwire")?;
            if link.len() > MAX_LINK_BYTES {
                let reason = format!("must have at most {MAX_LINK_BYTES} bytes");
                return Err(ConfigError::key("alerts.link", reason));
            }
        }
        within(
            "alerts.breaker_after",
            self.breaker_after,
            Duration::ZERO,
            DAY,
        )?;
        within("alerts.timeout", self.timeout, 100 * MILLISECOND, HOUR)?;
        within(
            "alerts.give_up_after",
            self.give_up_after,
            Duration::ZERO,
            DAY,
        )
    }

    fn check_token(&self) -> Result<(), ConfigError> {
        let Some(token) = &self.webhook_token else {
            return Ok(());
        };
        let wrong = |reason| Err(ConfigError::key("alerts.webhook_token", reason));
        let Some(url) = &self.webhook_url else {
            return wrong("there is no alerts.webhook_url to send it to");
        };
        if token.expose().is_empty() || !token.expose().bytes().all(|byte| byte.is_ascii_graphic())
        {
            return wrong("must be visible ASCII characters, without spaces");
        }
        // Both would be an Authorization header.
        let named = url::Url::parse(url.expose())
            .is_ok_and(|url| !url.username().is_empty() || url.password().is_some());
        if named {
            return wrong("alerts.webhook_url names a user already; give one of the two");
        }
        Ok(())
    }
}

/// The value is not shown: of Slack's URL every part of the path is secret.
fn http_url(key: &str, value: &str, example: &str) -> Result<(), ConfigError> {
    let right = url::Url::parse(value)
        .is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.host_str().is_some());
    if right && !value.contains(|letter: char| letter.is_control() || letter.is_whitespace()) {
        return Ok(());
    }
    let reason = format!("no HTTP address; give one like https://{example}");
    Err(ConfigError::key(key, reason))
}
