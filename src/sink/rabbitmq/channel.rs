//! A channel in confirm mode, with the book of the messages sent on it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use lapin::options::BasicPublishOptions;
use lapin::{Channel, Confirmation};
use tokio::time::Instant;

use super::fault::tells_why;
use super::in_flight::{InFlight, Pending, Ticket};
use super::link::Link;
use super::message::Message;
use super::verdicts::{Return, Verdict, Verdicts};
use crate::event::{EventId, OneLine};

/// How long the end of a channel may take to reach its pending confirms, before the connection is
/// ended for it.
const WIND_UP_PATIENCE: Duration = Duration::from_secs(1);

type Outcome = lapin::Result<Confirmation>;

/// An event that was sent, and the exchange it was sent to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Whose {
    pub(super) id: EventId,
    pub(super) exchange: Arc<str>,
}

/// A message in flight.
pub(super) struct Sent {
    pub(super) whose: Whose,
    pub(super) message_id: Arc<str>,
    pub(super) at: Instant,
}

/// A channel with the book of its messages.
pub(super) struct Open {
    pub(super) link: Arc<Link>,
    pub(super) channel: Arc<Channel>,
    pub(super) in_flight: InFlight<Sent, Outcome>,
    pub(super) verdicts: Verdicts<Whose>,
    /// Whose confirm was rejected.
    pub(super) failed: Vec<Sent>,
    /// The first error that tells why, else the first.
    pub(super) fault: Option<lapin::Error>,
    /// Found unusable; the errors that tell why are on their way.
    pub(super) broken: bool,
    /// In the order of sending, so with the first deadline in front.
    deadlines: VecDeque<(Instant, Ticket)>,
}

impl Open {
    pub(super) fn new(link: Arc<Link>, channel: Channel) -> Self {
        Self {
            link,
            channel: Arc::new(channel),
            in_flight: InFlight::new(),
            verdicts: Verdicts::new(),
            failed: Vec::new(),
            fault: None,
            broken: false,
            deadlines: VecDeque::new(),
        }
    }

    /// Sends a message. The channel must be usable; whatever comes of it is observed later.
    pub(super) fn start(&mut self, sent: Sent, message: Message, body: Bytes) {
        let at = sent.at;
        self.verdicts.sent(sent.message_id.clone());
        self.link.sent();
        let pending = publish(self.channel.clone(), message, body);
        let ticket = self.in_flight.start(sent, pending);
        self.deadlines.push_back((at, ticket));
    }

    pub(super) fn is_usable(&self) -> bool {
        self.fault.is_none() && self.link.is_up() && self.channel.status().connected()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.verdicts.is_idle() && self.failed.is_empty()
    }

    fn note(&mut self, error: lapin::Error) {
        let better = match &self.fault {
            None => true,
            Some(known) => !tells_why(known) && tells_why(&error),
        };
        if better {
            self.fault = Some(error);
        }
    }

    pub(super) fn observe(&mut self) {
        let mut errors = Vec::new();
        let Self {
            in_flight,
            verdicts,
            failed,
            link,
            ..
        } = self;
        in_flight.pass(|sent, outcome| match outcome {
            Ok(confirmation) => {
                link.settled(1);
                let ack = confirmation.is_ack();
                let carried = confirmation.take_message().map(|message| Return {
                    message_id: message.properties.message_id().clone().map(String::from),
                    reason: format!(
                        "{} {}: no queue is bound to exchange '{}' for routing key '{}'",
                        message.reply_code,
                        message.reply_text,
                        message.exchange,
                        // A row's: one record must stay one line.
                        OneLine(message.routing_key.as_str())
                    ),
                });
                verdicts.confirmed(sent.whose, sent.message_id, ack, carried);
            }
            Err(error) => {
                failed.push(sent);
                errors.push(error);
            }
        });
        for error in errors {
            self.note(error);
        }
    }

    /// When the oldest message in flight was sent.
    pub(super) fn first_sent(&mut self) -> Option<Instant> {
        while let Some((at, ticket)) = self.deadlines.front() {
            if self.in_flight.get(*ticket).is_some() {
                return Some(*at);
            }
            self.deadlines.pop_front();
        }
        None
    }

    /// Observes until nothing is in flight, or patience ends: then false.
    pub(super) async fn drain(&mut self, verdicts: &mut Vec<(Whose, Verdict)>) -> bool {
        let deadline = Instant::now() + WIND_UP_PATIENCE;
        loop {
            self.observe();
            self.verdicts.end_pass(verdicts);
            if self.in_flight.is_empty() {
                return true;
            }
            let woken = self.in_flight.woken();
            if tokio::time::timeout_at(deadline, woken).await.is_err() {
                return false;
            }
        }
    }
}

/// Hands the message to lapin when first polled, and ends with its confirm.
fn publish(channel: Arc<Channel>, message: Message, payload: Bytes) -> Pending<Outcome> {
    let options = BasicPublishOptions {
        mandatory: true,
        immediate: false,
    };
    Box::pin(async move {
        let confirm = channel
            .basic_publish(
                message.exchange,
                message.routing_key,
                options,
                &payload,
                message.properties,
            )
            .await?;
        drop(payload);
        confirm.await
    })
}
