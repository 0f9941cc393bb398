//! One lane: sends deliveries on the sink's connection and settles them by their acknowledgements.
//!
//! Invariants:
//! - Every delivery taken from the lane is in exactly one place: in flight, in doubt, or settled.
//! - Replies come to an inbox of the lane's own, each message with a number of its own in it, so a
//!   reply cannot be taken for another message's.
//! - After an acknowledgement that should have come and did not, the connection is given up before
//!   anything is sent again: a late copy cannot overtake. So it is when a lane is dropped with
//!   messages in flight. Only where the stream has replied to a later message of the connection it is
//!   kept: a stream takes what comes over one connection in order, so no copy is on its way any more.
//! - A message that no stream takes is in doubt until the stream was looked at: whether the stream is
//!   missing (all its events wait) or the subject is wrong (this event is charged).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use async_nats::{Message, Subscriber};
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::sync::{broadcast, watch};
use tokio::time::{Instant, sleep_until};

use super::alive::Alive;
use super::connection::Connector;
use super::doubt::{Doubt, explained};
use super::link::Link;
use super::message::Composer;
use super::stream::{self, Seen};
use super::verdict::{Verdict, verdict};
use crate::event::EventId;
use crate::metrics;
use crate::relay::failure::Cause;
use crate::sink::denials::Denials;
use crate::sink::{Delivery, Lane, Settlement, SinkError};

/// Replies heard, and deliveries sent, before the other has its turn and settlements leave.
const TURN: usize = 128;
/// For the look at a stream when an acknowledgement is in doubt.
const LOOK_PATIENCE: Duration = Duration::from_secs(1);

/// What the lane needs of its sink.
pub(super) struct Parts<'a> {
    pub(super) connector: &'a Connector,
    pub(super) composer: &'a Composer,
    pub(super) denials: &'a Denials,
    pub(super) alive: &'a Alive,
    pub(super) ack_timeout: Duration,
}

/// A message without an acknowledgement.
struct Sent {
    id: EventId,
    /// The link's count before it was handed over, and after.
    begun: u64,
    handed_over: u64,
    stream: Arc<str>,
    subject: String,
    at: Instant,
    /// Nobody has tried to send it before, as far as the row tells.
    first: bool,
}

/// What the lane has on one connection.
struct Open {
    link: Arc<Link>,
    inbox: String,
    replies: Subscriber,
    ended: watch::Receiver<Option<Arc<str>>>,
    denials: broadcast::Receiver<Arc<str>>,
    in_flight: BTreeMap<u64, Sent>,
    next: u64,
}

impl Drop for Open {
    fn drop(&mut self) {
        if !self.in_flight.is_empty() {
            self.link
                .kill("a lane ended with messages that were not acknowledged");
        }
    }
}

enum Heard {
    Reply(Message),
    Denied(Arc<str>),
    Lost,
}

impl Open {
    async fn new(link: Arc<Link>) -> Result<Self, SinkError> {
        let (inbox, replies) = link.inbox().await?;
        Ok(Self {
            ended: link.ended(),
            denials: link.denials(),
            link,
            inbox,
            replies,
            in_flight: BTreeMap::new(),
            next: 0,
        })
    }

    async fn hear(&mut self) -> Heard {
        tokio::select! {
            biased;
            reply = self.replies.next() => reply.map_or(Heard::Lost, Heard::Reply),
            denied = self.denials.recv() => match denied {
                Ok(subject) => Heard::Denied(subject),
                // Some were missed: theirs run into the timeout.
                Err(_) => Heard::Denied("".into()),
            },
            _ = self.ended.wait_for(Option::is_some) => Heard::Lost,
        }
    }

    /// The message that this reply is about.
    fn about(&mut self, reply: &Message) -> Option<(u64, &Sent)> {
        let number = reply.subject.strip_prefix(self.inbox.as_str())?;
        let number = number.strip_prefix('.')?.parse().ok()?;
        Some((number, self.in_flight.get(&number)?))
    }
}

/// A lane at work.
pub(super) struct Run<'a> {
    parts: Parts<'a>,
    open: Option<Open>,
    doubts: Vec<(Sent, Doubt)>,
    settlements: Vec<Settlement>,
    /// Streams that have replied since that was last noted, and to the last message of them.
    replied: HashMap<Arc<str>, u64>,
    /// Sent for the first time, and there already.
    duplicates: Vec<EventId>,
}

impl<'a> Run<'a> {
    pub(super) fn new(parts: Parts<'a>) -> Self {
        Self {
            parts,
            open: None,
            doubts: Vec::new(),
            settlements: Vec::new(),
            replied: HashMap::new(),
            duplicates: Vec::new(),
        }
    }

    /// Serves the lane until its deliveries are closed and everything is settled.
    pub(super) async fn serve(mut self, mut lane: Lane) {
        let mut more = true;
        while more
            || self
                .open
                .as_ref()
                .is_some_and(|open| !open.in_flight.is_empty())
        {
            self.turn(&mut lane, &mut more).await;
            self.note_replies();
            self.look_closer().await;
            self.report_duplicates();
            if !self.settlements.is_empty() {
                // A publisher that is gone wants no settlements.
                let _ = lane.settled.send(std::mem::take(&mut self.settlements));
            }
        }
    }

    /// Before the link changes, too: counts of one say nothing on another.
    fn note_replies(&mut self) {
        for (stream, last) in self.replied.drain() {
            self.parts.alive.heard(&stream);
            if let Some(open) = &self.open {
                open.link.replied(stream, last);
            }
        }
    }

    /// Waits until something happens, then does all that can be done at once.
    async fn turn(&mut self, lane: &mut Lane, more: &mut bool) {
        let open = self.open.as_mut();
        let oldest = open
            .as_ref()
            .and_then(|open| open.in_flight.values().next());
        let deadline = oldest.map(|sent| sent.at + self.parts.ack_timeout);
        let hear = async {
            match open {
                Some(open) => open.hear().await,
                None => std::future::pending().await,
            }
        };
        let overdue = async {
            match deadline {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            heard = hear => self.heard(heard),
            delivery = lane.deliveries.recv(), if *more => match delivery {
                Some(delivery) => self.deliver(delivery).await,
                None => *more = false,
            },
            () = overdue => {}
        }
        for _ in 0..TURN {
            let heard = self
                .open
                .as_mut()
                .and_then(|open| open.hear().now_or_never());
            let Some(heard) = heard else { break };
            self.heard(heard);
        }
        self.take_overdue();
        for _ in 0..TURN {
            let Ok(delivery) = lane.deliveries.try_recv() else {
                break;
            };
            self.deliver(delivery).await;
        }
    }

    fn heard(&mut self, heard: Heard) {
        match heard {
            Heard::Reply(reply) => self.acknowledged(&reply),
            Heard::Denied(subject) => self.denied(&subject),
            Heard::Lost => self.lost(),
        }
    }

    fn acknowledged(&mut self, reply: &Message) {
        let Some(open) = &mut self.open else { return };
        let Some((number, sent)) = open.about(reply) else {
            return;
        };
        let verdict = verdict(reply, &sent.stream);
        if matches!(verdict, Verdict::Stray) {
            tracing::warn!(
                subject = sent.subject,
                "somebody else than the expected stream replied to an event"
            );
            return;
        }
        let Some(sent) = open.in_flight.remove(&number) else {
            return;
        };
        if matches!(verdict, Verdict::Kept { .. } | Verdict::Refused(_)) {
            let last = self.replied.entry(sent.stream.clone()).or_default();
            *last = sent.begun.max(*last);
        }
        match verdict {
            Verdict::Kept { duplicate } => {
                if duplicate && sent.first {
                    self.duplicates.push(sent.id);
                }
                self.settle(sent.id, Ok(()));
            }
            Verdict::Refused(error) => self.settle(sent.id, Err(error)),
            Verdict::Nobody => self.doubts.push((sent, Doubt::Nobody)),
            Verdict::Elsewhere => self.doubts.push((sent, Doubt::Elsewhere)),
            Verdict::Stray => {}
        }
    }

    /// The server says nothing more of a message that it refused so.
    fn denied(&mut self, subject: &str) {
        let Some(open) = &mut self.open else { return };
        let refused = open
            .in_flight
            .extract_if(.., |_, sent| sent.subject == subject);
        let refused: Vec<_> = refused.map(|(_, sent)| sent).collect();
        for sent in refused {
            let message = format!(
                "no permission to publish to '{subject}' (stream '{}'): grant it",
                sent.stream
            );
            let error = self.parts.denials.remember(&sent.stream, message);
            self.settle(sent.id, Err(error));
        }
    }

    /// Takes leave of a connection that is over.
    fn lost(&mut self) {
        self.note_replies();
        let Some(mut open) = self.open.take() else {
            return;
        };
        let error = open.link.lost_error().after_sending();
        for sent in std::mem::take(&mut open.in_flight).into_values() {
            self.settle(sent.id, Err(error.clone()));
        }
    }

    fn take_overdue(&mut self) {
        let Some(open) = &mut self.open else { return };
        let now = Instant::now();
        // In the order they were sent.
        while let Some(entry) = open.in_flight.first_entry()
            && entry.get().at + self.parts.ack_timeout <= now
        {
            self.doubts.push((entry.remove(), Doubt::Overdue));
        }
    }

    /// Sends one, or settles it unsent.
    async fn deliver(&mut self, delivery: Delivery) {
        let id = delivery.event.id;
        if let Err(error) = self.send(delivery).await {
            self.settle(id, Err(error));
        }
    }

    async fn send(&mut self, delivery: Delivery) -> Result<(), SinkError> {
        let message = self.parts.composer.compose(&delivery)?;
        let Delivery {
            event,
            token,
            address,
            ..
        } = delivery;
        if self.open.as_ref().is_some_and(|open| !open.link.is_up()) {
            self.lost();
        }
        if self.open.is_none() {
            let link = self.parts.connector.link().await?;
            self.open = Some(Open::new(link).await?);
        }
        let open = self.open.as_mut().expect("it was opened above");
        message.fits(event.payload.len(), open.link.max_payload())?;
        if !token.holds() {
            return Err(SinkError::new(Cause::Void, "the claim is void: not sent"));
        }
        // What the client took now it would keep through the outage.
        if !open.link.is_up() {
            return Err(open.link.lost_error());
        }
        let number = open.next;
        open.next += 1;
        let sent = Sent {
            id: event.id,
            begun: open.link.count(),
            handed_over: u64::MAX,
            stream: address.destination,
            subject: message.subject.clone(),
            at: Instant::now(),
            first: event.attempt() == 1,
        };
        let reply = format!("{}.{number}", open.inbox);
        open.in_flight.insert(number, sent);
        let published = open.link.publish(
            message.subject,
            reply,
            message.headers,
            event.payload.clone(),
            self.parts.ack_timeout,
        );
        if let Err(error) = published.await {
            open.in_flight.remove(&number);
            return Err(error.after_sending());
        }
        if let Some(sent) = open.in_flight.get_mut(&number) {
            sent.handed_over = open.link.count();
        }
        Ok(())
    }

    /// Finds out why no stream has acknowledged these.
    async fn look_closer(&mut self) {
        while let Some((sent, doubt)) = self.doubts.pop() {
            let stream = sent.stream.clone();
            let mut same = vec![(sent, doubt)];
            same.extend(
                self.doubts
                    .extract_if(.., |(sent, _)| sent.stream == stream),
            );
            let seen = match &self.open {
                Some(open) => stream::look(&open.link, &stream, LOOK_PATIENCE).await,
                None => Err(SinkError::new(
                    Cause::Unreachable,
                    "the connection to NATS was lost",
                )),
            };
            let acknowledges = self.parts.alive.lately(&stream);
            let mut silent = Vec::new();
            for (sent, doubt) in same {
                let about = (&*sent.stream, &*sent.subject);
                let behind = self
                    .open
                    .as_ref()
                    .is_some_and(|open| open.link.is_behind(&sent.stream, sent.handed_over));
                match explained(about, doubt, seen.as_ref(), acknowledges) {
                    Some(error) => {
                        if matches!(seen, Ok(Seen::Denied))
                            && error.cause == Cause::DestinationMissing
                        {
                            self.parts.denials.remember_doubt(&stream, &error);
                        }
                        self.settle(sent.id, Err(error));
                    }
                    None if behind => {
                        let error = self.unanswered(&sent);
                        self.settle(sent.id, Err(error));
                    }
                    None => silent.push(sent),
                }
            }
            if !silent.is_empty() {
                self.give_up(silent);
            }
        }
    }

    /// The stream answers others, and has not said what became of this one.
    fn unanswered(&self, sent: &Sent) -> SinkError {
        SinkError::new(
            Cause::ConfirmTimeout,
            format!(
                "no acknowledgement from stream '{}' within {:?}, while it acknowledges others",
                sent.stream, self.parts.ack_timeout
            ),
        )
        .after_sending()
    }

    /// The stream is there and has not acknowledged these: whether it has them nobody knows.
    fn give_up(&mut self, silent: Vec<Sent>) {
        let mut silent = silent;
        let place = self.open.as_ref().map(|open| open.link.place());
        let reason = format!(
            "no acknowledgement from JetStream{} within {:?}",
            place
                .map(|place| format!(" at {place}"))
                .unwrap_or_default(),
            self.parts.ack_timeout
        );
        self.note_replies();
        if let Some(mut open) = self.open.take() {
            open.link.kill(&reason);
            silent.extend(std::mem::take(&mut open.in_flight).into_values());
        }
        let error = SinkError::new(Cause::ConfirmTimeout, reason).after_sending();
        for sent in silent {
            self.settle(sent.id, Err(error.clone()));
        }
    }

    fn settle(&mut self, id: EventId, result: Result<(), SinkError>) {
        self.settlements.push(Settlement { id, result });
    }

    /// After a crash between acknowledgement and mark that is as it should be. Otherwise an event of
    /// another outbox has this one's message id, and this one was dropped.
    fn report_duplicates(&mut self) {
        let duplicates = std::mem::take(&mut self.duplicates);
        let Some(first) = duplicates.first() else {
            return;
        };
        let count = duplicates.len();
        ::metrics::counter!(metrics::DUPLICATES).increment(count as u64);
        tracing::warn!(
            event.id = first.0,
            count,
            "the stream had events already that were sent for the first time: after a crash that is \
             as it should be; otherwise two outboxes share jetstream.source and event ids"
        );
    }
}
