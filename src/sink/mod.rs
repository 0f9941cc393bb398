//! Where events go. [`Sink`] is the contract that every broker's file implements.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::{mpsc, watch};

use self::several::SeveralSinks;

use crate::config::{Config, SinkInUse, SinkSetting};
use crate::event::{ClaimToken, EventId, OutboxEvent};
use crate::relay::failure::Cause;
use crate::route::{Address, Route};

#[cfg(any(feature = "rabbitmq", feature = "jetstream", feature = "kafka"))]
mod board;
#[cfg(any(feature = "rabbitmq", feature = "jetstream", feature = "kafka"))]
mod cloudevents;
#[cfg(any(feature = "jetstream", feature = "kafka"))]
mod denials;
#[cfg(feature = "jetstream")]
pub mod jetstream;
#[cfg(feature = "kafka")]
pub mod kafka;
pub mod null;
#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;
mod rules;
pub mod several;
#[cfg(any(feature = "rabbitmq", feature = "jetstream", feature = "kafka"))]
mod shared;

pub use rules::SinkRules;

/// An event on its way to a broker, with the right to send it.
#[derive(Clone, Debug)]
pub struct Delivery {
    /// What to send.
    pub event: Arc<OutboxEvent>,
    /// The claim it was taken under.
    pub token: Arc<ClaimToken>,
    /// Where to.
    pub address: Address,
    /// Where else: it is confirmed once it is in all of these places.
    pub also: Vec<Address>,
    /// What its route says of failures.
    pub route: Arc<Route>,
    /// It is a copy of an event that is being given up, with the reason: goes to where dead letters go.
    pub letter: Option<Arc<SinkError>>,
}

impl Delivery {
    /// Is it a copy of an event that is being given up?
    pub fn is_letter(&self) -> bool {
        self.letter.is_some()
    }

    /// All places that it goes to.
    pub fn addresses(&self) -> impl Iterator<Item = &Address> {
        std::iter::once(&self.address).chain(&self.also)
    }

    /// What the sink of one of its places is given, where there are several.
    fn copy_for(&self, address: &Address) -> Self {
        Self {
            address: Address {
                destination: address.name().into(),
                sink: None,
                ..address.clone()
            },
            also: Vec::new(),
            ..self.clone()
        }
    }
}

/// What became of one [`Delivery`].
#[derive(Debug)]
pub struct Settlement {
    /// The event.
    pub id: EventId,
    /// `Ok` only for the broker's durable confirm of exactly this event.
    pub result: Result<(), SinkError>,
}

/// Why a broker does not have an event, or may not have it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct SinkError {
    /// What the failure policy decides on.
    pub cause: Cause,
    /// For people: names the object and the broker's reason. Never a password, URL or payload.
    pub message: String,
    /// Perhaps the broker has it all the same: it was sent, and nothing certain came back.
    pub maybe_sent: bool,
    /// Which destination it speaks of, or which sink as a whole; none: of that where the event was going,
    /// the only one.
    pub destination: Option<Arc<str>>,
}

impl SinkError {
    /// An error of this cause.
    pub fn new(cause: Cause, message: impl Into<String>) -> Self {
        Self {
            cause,
            message: message.into(),
            maybe_sent: false,
            destination: None,
        }
    }

    /// The same of an event that was sent and whose fate is unknown.
    #[must_use]
    pub fn after_sending(self) -> Self {
        Self {
            maybe_sent: true,
            ..self
        }
    }
}

/// One partition's way to the broker: deliveries in, settlements out.
pub struct Lane {
    /// Number of the partition, from 0.
    pub partition: usize,
    /// The publisher never has more than this many deliveries unsettled.
    pub window: usize,
    /// Deliveries in the order to send them. Closed when the publisher is done.
    pub deliveries: mpsc::Receiver<Delivery>,
    /// Settlements in the order they became known, in batches as they came.
    pub settled: mpsc::UnboundedSender<Vec<Settlement>>,
}

/// What the transport says of itself, apart from any event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Not tried yet.
    #[default]
    Unknown,
    /// Connected.
    Up,
    /// Connected, but the broker asks to wait, with its reason. Nothing may be sent.
    Blocked(String),
    /// Not connected, with the reason.
    Down(String),
}

/// The sink of a configuration, or all of them as one. Does no I/O. Best called on the runtime that lives longest: a
/// sink's connection may have tasks there.
///
/// # Errors
/// A sink has no usable URL, or something else that it cannot do without.
pub fn open(config: &Config) -> Result<Arc<dyn Sink>, SinkError> {
    let used = config.sinks_in_use();
    let mut opened = Vec::with_capacity(used.sinks.len());
    for sink in &used.sinks {
        opened.push((sink.sink.name().into(), open_one(config, sink)?));
    }
    match opened.pop() {
        Some((_, only)) if !used.several => Ok(only),
        last => {
            opened.extend(last);
            Ok(Arc::new(SeveralSinks::new(opened)))
        }
    }
}

#[cfg_attr(
    not(any(feature = "rabbitmq", feature = "jetstream", feature = "kafka")),
    expect(unused_variables, reason = "the null sink has no section")
)]
fn open_one(config: &Config, used: &SinkInUse) -> Result<Arc<dyn Sink>, SinkError> {
    Ok(match used.sink {
        #[cfg(feature = "rabbitmq")]
        SinkSetting::Rabbitmq => rabbitmq::RabbitmqSink::new(config.rabbitmq.clone())?,
        #[cfg(feature = "jetstream")]
        SinkSetting::Jetstream => jetstream::JetstreamSink::new(config)?,
        #[cfg(feature = "kafka")]
        SinkSetting::Kafka => kafka::KafkaSink::new(config)?,
        SinkSetting::Null => Arc::new(null::NullSink::new()),
        #[cfg(not(all(feature = "rabbitmq", feature = "jetstream", feature = "kafka")))]
        _ => return Err(SinkError::new(Cause::Unreachable, left_out(used))),
    })
}

#[cfg(not(all(feature = "rabbitmq", feature = "jetstream", feature = "kafka")))]
fn left_out(used: &SinkInUse) -> String {
    let (key, name) = (&used.key, used.sink.name());
    format!(
        "{key} is \"{name}\", which was left out of this program when it was built: take one that was \
         built with --features {name}"
    )
}

/// A transport that confirms durably.
///
/// Contract, checked for every sink by one conformance suite:
/// - **Exactly one settlement per delivery**, whatever happens to connection or channel; a lane
///   that ends early loses none silently, since the publisher counts what is still out.
/// - **Order:** deliveries reach the broker in the order they were received. The publisher has at
///   most one delivery of an aggregate unsettled, so a sink may pipeline freely.
/// - **`Ok` means durable** at the broker and routed to at least one place that keeps it. Whatever
///   is less certain is an error.
/// - **Right to send:** `token.holds()` is asked immediately before the event is handed to the
///   transport; if it does not hold, the delivery settles as [`Cause::Void`], unsent.
/// - **Timeout:** a confirm that does not come in time settles as [`Cause::ConfirmTimeout`], and the
///   channel it was awaited on is closed before anything is sent again, so that a late copy
///   cannot overtake.
/// - **Blocked or down:** a delivery that cannot be sent now settles at once as
///   [`Cause::Blocked`] or [`Cause::Unreachable`], unsent; a sink does not queue through an outage.
/// - **Cancellation:** dropping the future of `run_lane` drops the channel; unsettled deliveries
///   are unknown to the sink from then on.
/// - Payload bytes pass through untouched. Errors carry no secret and no payload.
#[async_trait]
pub trait Sink: Send + Sync + 'static {
    /// Name for metrics and logs, for example `rabbitmq`.
    fn name(&self) -> &'static str;

    /// Connects if needed and asks whether the broker takes events at all: the relay's guard at
    /// start and the half-open breaker's question.
    async fn probe(&self) -> Result<(), SinkError>;

    /// Asks whether this destination takes events: that it exists, and that what is sent there
    /// goes somewhere, as far as the broker tells. The question of the destination's own breaker.
    /// Answers what was found, for people.
    async fn probe_destination(&self, destination: &str) -> Result<String, SinkError>;

    /// Serves one partition until its deliveries are closed and everything sent is settled.
    async fn run_lane(&self, lane: Lane);

    /// What the transport says of itself, for health and backpressure.
    fn transport(&self) -> watch::Receiver<Transport>;

    /// The sinks within it, where it is several: each one's name, which is a destination to probe as well and
    /// has a breaker of its own, and what its transport says. Asked on a runtime, as [`Self::transport`] is.
    fn parts(&self) -> Vec<(Arc<str>, watch::Receiver<Transport>)> {
        Vec::new()
    }

    /// Closes connections. Called once, after every lane has ended.
    async fn close(&self);
}
