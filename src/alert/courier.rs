//! Brings the alerts of one endpoint there, however often it takes.

use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use backoff::backoff::Backoff as _;
use bytes::Bytes;
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use reqwest::redirect::Policy;
use reqwest::{Client, Response, StatusCode};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::mailbox::{Mailbox, Notice};
use super::text::Origin;
use super::{Alert, AlertError, body};
use crate::config::{AlertsConfig, Secret};
use crate::metrics;
use crate::relay::breaker::pauses;

/// First pause: most failures are a hiccup.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause: the news comes within a minute of the receiver's return.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// The longest that a receiver may put us off; Slack asks for seconds.
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(600);
/// Longest answer that is taken for the name of an error.
const MAX_WORD_BYTES: usize = 64;

/// What an endpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Slack,
    Webhook,
}

impl Kind {
    /// Those that have a URL, with it.
    pub(super) fn configured(config: &AlertsConfig) -> impl Iterator<Item = (Self, &Secret)> {
        [
            (Self::Slack, config.slack_url.as_ref()),
            (Self::Webhook, config.webhook_url.as_ref()),
        ]
        .into_iter()
        .filter_map(|(kind, url)| Some((kind, url?)))
    }

    /// In logs and as the metrics' label.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Slack => "slack",
            Self::Webhook => "webhook",
        }
    }

    fn key(self) -> &'static str {
        match self {
            Self::Slack => "alerts.slack_url",
            Self::Webhook => "alerts.webhook_url",
        }
    }

    /// Sets up HTTP, and HTTPS with the system's root certificates.
    pub(super) fn client(self, config: &AlertsConfig) -> Result<Client, AlertError> {
        // An error means that there is one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Client::builder()
            .timeout(config.timeout)
            // Neither the token nor an alert is for whomever the receiver names.
            .redirect(Policy::none())
            // Alerts are rare: a kept connection would be a dead one.
            .pool_max_idle_per_host(0)
            .user_agent(concat!("bellwire/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| AlertError {
                key: self.key(),
                reason: chain(error),
            })
    }
}

/// One endpoint; its task ends with it.
pub(super) struct Endpoint {
    kind: Kind,
    mailbox: Arc<Mailbox>,
    closing: watch::Sender<bool>,
    task: AbortHandle,
}

impl Endpoint {
    /// # Panics
    /// Outside of a tokio runtime.
    pub(super) fn start(
        kind: Kind,
        url: &Secret,
        config: &AlertsConfig,
        origin: Arc<Origin>,
    ) -> Result<Self, AlertError> {
        let mailbox = Arc::new(Mailbox::default());
        let (closing, closes) = watch::channel(false);
        let courier = Courier {
            kind,
            client: kind.client(config)?,
            url: url.clone(),
            token: config
                .webhook_token
                .clone()
                .filter(|_| kind == Kind::Webhook),
            give_up_after: config.give_up_after,
            origin,
            mailbox: mailbox.clone(),
            closes,
        };
        // So that both series are there before the first alert.
        count(metrics::ALERTS_SENT, kind, 0);
        count(metrics::ALERTS_FAILED, kind, 0);
        let task = tokio::spawn(courier.run()).abort_handle();
        Ok(Self {
            kind,
            mailbox,
            closing,
            task,
        })
    }

    pub(super) fn send(&self, alert: Alert) {
        if let Some(fallen) = self.mailbox.push(alert) {
            lost(self.kind, &fallen, "too many wait for this endpoint");
        }
    }

    pub(super) async fn flush(&self, within: Duration) {
        self.closing.send_replace(true);
        let emptied = tokio::time::timeout(within, self.mailbox.empty()).await;
        if emptied.is_err() {
            tracing::error!(
                endpoint = self.kind.label(),
                messages = self.mailbox.left(),
                "alerts not delivered in time"
            );
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn count(name: &'static str, kind: Kind, alerts: u64) {
    ::metrics::counter!(name, "endpoint" => kind.label()).increment(alerts);
}

fn lost(kind: Kind, notice: &Notice, reason: &str) {
    count(metrics::ALERTS_FAILED, kind, notice.count());
    tracing::error!(
        endpoint = kind.label(),
        kind = notice.kind(),
        alerts = notice.count(),
        reason,
        "alert not delivered"
    );
}

/// What became of one request.
enum Answer {
    /// Delivered.
    Taken,
    /// The same request would be refused again.
    Refused(String),
    /// It may go better later; `after` is what the receiver asked for.
    Later {
        reason: String,
        after: Option<Duration>,
    },
}

/// The task of one endpoint.
struct Courier {
    kind: Kind,
    client: Client,
    url: Secret,
    token: Option<Secret>,
    give_up_after: Duration,
    origin: Arc<Origin>,
    mailbox: Arc<Mailbox>,
    closes: watch::Receiver<bool>,
}

impl Courier {
    async fn run(self) {
        loop {
            let notice = self.mailbox.next().await;
            match self.deliver(&notice).await {
                Ok(()) => count(metrics::ALERTS_SENT, self.kind, notice.count()),
                Err(reason) => lost(self.kind, &notice, &reason),
            }
            self.mailbox.done();
        }
    }

    /// Tries at least once, however old the notice is; an error is the end of it.
    async fn deliver(&self, notice: &Notice) -> Result<(), String> {
        let body = match self.kind {
            Kind::Slack => body::slack(notice, &self.origin),
            Kind::Webhook => body::webhook(notice, &self.origin),
        };
        let body = Bytes::from(body);
        let mut pauses = pauses(FIRST_PAUSE, LONGEST_PAUSE);
        for attempt in 1_u32.. {
            let (reason, after) = match self.attempt(&body).await {
                Answer::Taken => return Ok(()),
                Answer::Refused(reason) => return Err(reason),
                Answer::Later { reason, after } => (reason, after),
            };
            let pause = pauses.next_backoff().unwrap_or(LONGEST_PAUSE);
            let wait = after.map_or(pause, |after| pause.max(after.min(LONGEST_RETRY_AFTER)));
            if notice.raised.elapsed() + wait > self.give_up_after {
                return Err(reason);
            }
            let endpoint = self.kind.label();
            if attempt == 1 {
                tracing::warn!(endpoint, reason, "alert is tried again");
            } else {
                tracing::debug!(endpoint, attempt, reason, ?wait, "alert is tried again");
            }
            self.rest(wait, after.is_some()).await;
        }
        Err("tried without end".to_owned())
    }

    /// Shorter when the process is about to end, unless the receiver asked for the wait.
    async fn rest(&self, wait: Duration, asked_for: bool) {
        let mut closes = self.closes.clone();
        let last_tries = async {
            // An error would mean that the endpoint is gone, and this task with it.
            if asked_for || closes.wait_for(|closing| *closing).await.is_err() {
                std::future::pending::<()>().await;
            }
            tokio::time::sleep(FIRST_PAUSE).await;
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = last_tries => {}
        }
    }

    async fn attempt(&self, body: &Bytes) -> Answer {
        let mut request = self
            .client
            .post(self.url.expose())
            .header(CONTENT_TYPE, "application/json")
            .body(body.clone());
        if let Some(token) = &self.token {
            request = request.bearer_auth(token.expose());
        }
        match request.send().await {
            Ok(response) => judge(response).await,
            Err(error) => Answer::Later {
                reason: chain(error),
                after: None,
            },
        }
    }
}

async fn judge(response: Response) -> Answer {
    let status = response.status();
    if status.is_success() {
        return Answer::Taken;
    }
    if status.is_redirection() {
        return Answer::Refused(format!(
            "{status}: redirects are not followed, give the final address"
        ));
    }
    let after = retry_after(&response);
    let mut reason = status.to_string();
    if let Some(word) = word(response).await {
        reason = format!("{reason} ({word})");
    }
    let passing = [
        StatusCode::REQUEST_TIMEOUT,
        StatusCode::TOO_MANY_REQUESTS,
        StatusCode::TOO_EARLY,
    ];
    if status.is_server_error() || passing.contains(&status) {
        Answer::Later { reason, after }
    } else {
        Answer::Refused(reason)
    }
}

/// The form in seconds only: who gives a date is asked again at our own pace.
fn retry_after(response: &Response) -> Option<Duration> {
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?;
    seconds.trim().parse().ok().map(Duration::from_secs)
}

/// Slack names its errors (`no_service`, `channel_is_archived`). Nothing else of an answer is shown:
/// it may repeat what was sent to it.
async fn word(mut response: Response) -> Option<String> {
    let chunk = response.chunk().await.ok()??;
    let is_word = chunk.len() <= MAX_WORD_BYTES
        && chunk
            .iter()
            .all(|byte| byte.is_ascii_lowercase() || *byte == b'_');
    let word = is_word.then(|| String::from_utf8_lossy(&chunk).into_owned());
    word.filter(|word| !word.is_empty())
}

/// The error with its causes, without the URL.
fn chain(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
