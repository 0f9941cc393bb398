//! NATS JetStream sink: each event is published with a reply inbox, and is there once the expected
//! stream has acknowledged it.
//!
//! The destination of an address is the stream, its key the subject: streams can be missing, full or
//! forbidden, and have breakers; subjects are as many as event types.
//!
//! Invariants, and where they are kept:
//! - exactly one settlement per delivery: `lane`;
//! - no success without an acknowledgement that names the expected stream: `verdict`;
//! - nothing illegal is sent, and nothing to another subject: `message`, `subject`;
//! - nothing buffered outlives its connection: `link`;
//! - one connection attempt at a time, and only to where JetStream answers: `connection`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use self::alive::Alive;
use self::connection::Connector;
use self::message::Composer;
use self::stream::{Seen, Settings};
use crate::config::{Config, ConfigError, JetstreamConfig, SinkSetting};
use crate::relay::breaker::LONGEST_PAUSE;
use crate::relay::failure::Cause;
use crate::sink::denials::Denials;
use crate::sink::rules::Check;
use crate::sink::{Lane, Sink, SinkError, Transport};

mod alive;
mod connection;
mod doubt;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod lane;
mod link;
mod message;
mod stream;
mod subject;
mod verdict;

/// A plain client by this configuration, for what is not the relay's own: it reconnects by itself.
///
/// # Errors
/// No server takes us, or the configuration names none.
pub async fn connect(config: &JetstreamConfig) -> Result<async_nats::Client, SinkError> {
    let wrong = |error: ConfigError| SinkError::new(Cause::Unreachable, error.to_string());
    let servers = config.servers().map_err(wrong)?;
    let tls = config.tls().map_err(wrong)?;
    Connector::new(servers, tls, config.clone())
        .plain_client()
        .await
}

/// What NATS can carry.
pub(super) fn check(config: &JetstreamConfig) -> Check {
    let composer = Composer::new(config);
    Box::new(move |delivery| composer.compose(delivery).map(drop))
}

/// Carries events to a stream of NATS JetStream.
pub struct JetstreamSink {
    connector: Connector,
    composer: Composer,
    denials: Denials,
    alive: Alive,
    /// Subjects of events, unless routes give others.
    subjects: Option<String>,
    lease: Duration,
    warned: AtomicBool,
    ack_timeout: Duration,
    connect_timeout: Duration,
}

impl JetstreamSink {
    /// A sink that connects when it is first needed. Does no I/O.
    ///
    /// # Errors
    /// The configuration has no usable URL, or no stream.
    pub fn new(config: &Config) -> Result<Arc<Self>, SinkError> {
        let wrong = |error: ConfigError| SinkError::new(Cause::Unreachable, error.to_string());
        let router = config.router().map_err(wrong)?;
        let lease = config.relay.lease;
        let config = config.jetstream.clone();
        let servers = config.servers().map_err(wrong)?;
        if servers.is_empty() {
            return Err(SinkError::new(
                Cause::Unreachable,
                "jetstream.url is not set (NATS_URL)",
            ));
        }
        let tls = config.tls().map_err(wrong)?;
        Ok(Arc::new(Self {
            composer: Composer::new(&config),
            denials: Denials::default(),
            alive: Alive::default(),
            subjects: (!router.has_keys(SinkSetting::Jetstream))
                .then(|| format!("{}.>", config.prefix)),
            lease,
            warned: AtomicBool::new(false),
            ack_timeout: config.ack_timeout,
            connect_timeout: config.connect_timeout,
            connector: Connector::new(servers, tls, config),
        }))
    }

    /// A repeat that comes later than the stream remembers is kept as a second message. An event that
    /// the stream has may be sent again once the lease of a relay that froze is over, and the broker
    /// answers: then a breaker asks after its longest pause.
    fn short_window(&self, stream: &str, settings: &Settings) -> Option<String> {
        let window = settings.duplicate_window();
        let needed = self.lease + LONGEST_PAUSE;
        (window < needed).then(|| {
            format!(
                "stream '{stream}' forgets message ids after {}, but an event may be sent again after \
                 {}, relay.lease ({}) and a breaker's longest pause ({}): set its duplicate window to \
                 that, or repeats after a crash are kept twice",
                humantime::format_duration(window),
                humantime::format_duration(needed),
                humantime::format_duration(self.lease),
                humantime::format_duration(LONGEST_PAUSE),
            )
        })
    }

    /// Does it take anything that we would send there, events or copies of dead ones?
    fn check_subjects(&self, stream: &str, settings: &Settings) -> Result<(), SinkError> {
        let Some(subjects) = &self.subjects else {
            return Ok(());
        };
        let letters = format!("{stream}.>");
        if settings.takes(subjects) || settings.takes(&letters) {
            return Ok(());
        }
        Err(SinkError::new(
            Cause::DestinationMissing,
            format!(
                "stream '{stream}' takes {}, and nothing below '{subjects}': add that to its subjects, \
                 or set jetstream.prefix",
                settings.shown()
            ),
        ))
    }
}

#[async_trait]
impl Sink for JetstreamSink {
    fn name(&self) -> &'static str {
        "jetstream"
    }

    async fn probe(&self) -> Result<(), SinkError> {
        let link = self.connector.link().await?;
        self.connector.find_jetstream(&link).await
    }

    async fn probe_destination(&self, destination: &str) -> Result<String, SinkError> {
        subject::check_stream(destination)?;
        if let Some(error) = self.denials.of(destination) {
            return Err(error);
        }
        let link = self.connector.link().await?;
        let settings = match stream::look(&link, destination, self.connect_timeout).await? {
            Seen::Stream(settings) => settings,
            Seen::Missing => return Err(stream::missing(destination)),
            Seen::Denied => {
                return Ok(format!(
                    "not looked at: no permission for $JS.API.STREAM.INFO.{destination}"
                ));
            }
        };
        if let Some(obstacle) = settings.obstacle(destination) {
            return Err(obstacle);
        }
        self.check_subjects(destination, &settings)?;
        let window = humantime::format_duration(settings.duplicate_window());
        let found = format!("takes {}, duplicate window {window}", settings.shown());
        let Some(warning) = self.short_window(destination, &settings) else {
            return Ok(found);
        };
        if !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!("{warning}");
        }
        Ok(format!("{found}; WARNING: {warning}"))
    }

    async fn run_lane(&self, lane: Lane) {
        let parts = lane::Parts {
            connector: &self.connector,
            composer: &self.composer,
            denials: &self.denials,
            alive: &self.alive,
            ack_timeout: self.ack_timeout,
        };
        lane::Run::new(parts).serve(lane).await;
    }

    fn transport(&self) -> watch::Receiver<Transport> {
        self.connector.transport()
    }

    async fn close(&self) {
        self.connector.close().await;
    }
}
