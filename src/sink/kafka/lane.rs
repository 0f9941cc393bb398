//! One lane: hands deliveries to the sink's producer and settles them by their reports.
//!
//! Invariants:
//! - Every delivery taken from the lane is in exactly one place: held back, to be sent again, in flight,
//!   overdue, or settled.
//! - Each record has a number of its own, so that a report cannot be taken for another record's.
//! - After a confirm that should have come and did not, the producer is given up before anything is sent
//!   again. So it is when a lane is dropped with records in flight.
//! - A record that shared a batch with others is not judged by what is said of the batch: it is sent
//!   again by a producer whose batches have one record each.
//! - When librdkafka's queue is full the lane waits with the delivery in hand and sends no other before
//!   it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::OptionFuture;
use tokio::sync::mpsc;
use tokio::time::{sleep, sleep_until};

use super::connection::Connector;
use super::link::{Link, Refusal, Report, Ticket};
use super::message::Composer;
use super::settings::Batching;
use super::topic;
use super::verdict::{Verdict, larger_than_ours, verdict};
use crate::event::EventId;
use crate::relay::failure::Cause;
use crate::sink::denials::Denials;
use crate::sink::{Delivery, Lane, Settlement, SinkError};
use rdkafka::error::RDKafkaErrorCode;

/// Reports heard, and deliveries sent, before the other has its turn and settlements leave.
const TURN: usize = 256;
/// For the look at a topic when no confirm came.
const LOOK_PATIENCE: Duration = Duration::from_millis(500);
/// librdkafka says itself that the time is up, within a second. This is for when it says nothing.
const SLACK: Duration = Duration::from_secs(3);
/// Until a full queue is tried again, when no report comes sooner.
const FULL_PAUSE: Duration = Duration::from_millis(20);

/// What the lane needs of its sink.
pub(super) struct Parts<'a> {
    pub(super) many: &'a Connector,
    pub(super) alone: &'a Connector,
    pub(super) composer: &'a Composer,
    pub(super) denials: &'a Denials,
    pub(super) confirm_timeout: Duration,
    pub(super) max_message_bytes: u64,
}

/// A record without a report.
struct Sent {
    delivery: Delivery,
    batching: Batching,
    link: Arc<Link>,
    at: Instant,
}

/// A lane at work.
pub(super) struct Run<'a> {
    parts: Parts<'a>,
    many: Option<Arc<Link>>,
    alone: Option<Arc<Link>>,
    reports: mpsc::UnboundedReceiver<Report>,
    /// For the tickets. Held here too, so that the channel stays open.
    reporter: mpsc::UnboundedSender<Report>,
    in_flight: BTreeMap<u64, Sent>,
    next: u64,
    /// The queue was full.
    held: Option<(Delivery, Batching)>,
    /// To be sent in batches of their own.
    again: VecDeque<Delivery>,
    overdue: Vec<Sent>,
    settlements: Vec<Settlement>,
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        if self.in_flight.is_empty() {
            return;
        }
        for link in [&self.many, &self.alone].into_iter().flatten() {
            link.kill(SinkError::new(
                Cause::Unreachable,
                "a lane ended with records that were not confirmed",
            ));
        }
    }
}

impl<'a> Run<'a> {
    pub(super) fn new(parts: Parts<'a>) -> Self {
        let (reporter, reports) = mpsc::unbounded_channel();
        Self {
            parts,
            many: None,
            alone: None,
            reports,
            reporter,
            in_flight: BTreeMap::new(),
            next: 0,
            held: None,
            again: VecDeque::new(),
            overdue: Vec::new(),
            settlements: Vec::new(),
        }
    }

    /// Serves the lane until its deliveries are closed and everything is settled.
    pub(super) async fn serve(mut self, mut lane: Lane) {
        let mut more = true;
        while more || !self.is_idle() {
            self.turn(&mut lane, &mut more).await;
            self.look_closer().await;
            if !self.settlements.is_empty() {
                // A publisher that is gone wants no settlements.
                let _ = lane.settled.send(std::mem::take(&mut self.settlements));
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.held.is_none() && self.again.is_empty()
    }

    /// May a delivery be taken from the lane?
    fn is_free(&self) -> bool {
        self.held.is_none() && self.again.is_empty()
    }

    /// Waits until something happens, then does all that can be done at once.
    async fn turn(&mut self, lane: &mut Lane, more: &mut bool) {
        let deadline = self.deadline();
        let overdue = OptionFuture::from(deadline.map(|at| sleep_until(at.into())));
        let (many, alone) = (self.end_of(&self.many), self.end_of(&self.alone));
        let waits = !self.is_free();
        tokio::select! {
            biased;
            report = self.reports.recv() => self.reported(report),
            Some(()) = many => {}
            Some(()) = alone => {}
            Some(()) = overdue => {}
            () = sleep(FULL_PAUSE), if waits => {}
            delivery = lane.deliveries.recv(), if *more && !waits => match delivery {
                Some(delivery) => self.deliver(delivery, Batching::Many).await,
                None => *more = false,
            },
        }
        for _ in 0..TURN {
            let Ok(report) = self.reports.try_recv() else {
                break;
            };
            self.reported(Some(report));
        }
        self.take_silent();
        self.send_again().await;
        for _ in 0..TURN {
            if !self.is_free() {
                break;
            }
            let Ok(delivery) = lane.deliveries.try_recv() else {
                break;
            };
            self.deliver(delivery, Batching::Many).await;
        }
    }

    /// Resolves when a link that is up ends.
    fn end_of(&self, link: &Option<Arc<Link>>) -> OptionFuture<impl Future<Output = ()> + use<>> {
        let up = link.as_ref().filter(|link| link.is_up());
        let ended = up.map(|link| link.ended());
        OptionFuture::from(ended.map(|mut ended| async move {
            // An error says that the link is gone.
            let _ = ended.wait_for(Option::is_some).await;
        }))
    }

    /// When a record's silence means something.
    fn patience(&self, sent: &Sent) -> Instant {
        let overdue = sent.at + self.parts.confirm_timeout + SLACK;
        sent.link
            .silent_from()
            .map_or(overdue, |silent| silent.min(overdue))
    }

    fn deadline(&self) -> Option<Instant> {
        let up = |link: &Option<Arc<Link>>| link.as_ref().is_none_or(|link| link.is_up());
        if up(&self.many) && up(&self.alone) {
            let oldest = self.in_flight.values().next();
            return oldest.map(|sent| self.patience(sent));
        }
        self.in_flight
            .values()
            .map(|sent| self.patience(sent))
            .min()
    }

    fn reported(&mut self, report: Option<Report>) {
        let Some(Report { number, result }) = report else {
            return;
        };
        let Some(sent) = self.in_flight.remove(&number) else {
            return;
        };
        let id = sent.delivery.event.id;
        match result {
            Ok(()) => self.settle(id, Ok(())),
            Err(code) => self.failed(sent, code),
        }
    }

    fn failed(&mut self, sent: Sent, code: RDKafkaErrorCode) {
        let topic = &sent.delivery.address.destination;
        let id = sent.delivery.event.id;
        match verdict(code, topic, sent.batching) {
            Verdict::Refused(error) => self.settle(id, Err(error)),
            Verdict::Denied => {
                let error = self.parts.denials.remember(topic, topic::forbidden(topic));
                self.settle(id, Err(error));
            }
            Verdict::Shared => self.again.push_back(sent.delivery),
            Verdict::Overdue => self.overdue.push(sent),
            Verdict::Broken => {
                sent.link.kill_fatal(&code.to_string());
                self.settle(id, Err(sent.link.lost_error().after_sending()));
            }
            Verdict::Lost if sent.link.is_up() => {
                let reason = format!("the connection to Kafka was lost: {code}");
                let error = SinkError::new(Cause::Unreachable, reason);
                self.settle(id, Err(error.after_sending()));
            }
            Verdict::Lost => self.settle(id, Err(sent.link.lost_error().after_sending())),
        }
    }

    /// Records of which no report came.
    fn take_silent(&mut self) {
        if self.deadline().is_none_or(|at| Instant::now() < at) {
            return;
        }
        let now = Instant::now();
        let late: Vec<u64> = self
            .in_flight
            .iter()
            .filter(|(_, sent)| self.patience(sent) <= now)
            .map(|(number, _)| *number)
            .collect();
        for sent in late
            .iter()
            .filter_map(|number| self.in_flight.remove(number))
        {
            if sent.link.is_up() {
                self.overdue.push(sent);
            } else {
                let error = sent.link.lost_error().after_sending();
                self.settlements.push(Settlement {
                    id: sent.delivery.event.id,
                    result: Err(error),
                });
            }
        }
    }

    /// What waits for room, and what is to be alone, in this order.
    async fn send_again(&mut self) {
        if let Some((delivery, batching)) = self.held.take() {
            self.deliver(delivery, batching).await;
        }
        while self.held.is_none()
            && let Some(delivery) = self.again.pop_front()
        {
            self.deliver(delivery, Batching::Alone).await;
        }
    }

    /// Sends one, or settles it unsent.
    async fn deliver(&mut self, delivery: Delivery, batching: Batching) {
        let id = delivery.event.id;
        if let Err(error) = self.send(delivery, batching).await {
            self.settle(id, Err(error));
        }
    }

    async fn send(&mut self, delivery: Delivery, batching: Batching) -> Result<(), SinkError> {
        let message = self.parts.composer.compose(&delivery)?;
        let link = self.link(batching).await?;
        if !delivery.token.holds() {
            return Err(SinkError::new(Cause::Void, "the claim is void: not sent"));
        }
        let topic = delivery.address.destination.clone();
        let number = self.next;
        let ticket = Ticket {
            number,
            reports: self.reporter.clone(),
        };
        match link.send(&topic, message, &delivery.event.payload, ticket) {
            Ok(()) => {
                self.next += 1;
                let at = Instant::now();
                let sent = Sent {
                    delivery,
                    batching,
                    link,
                    at,
                };
                self.in_flight.insert(number, sent);
                Ok(())
            }
            Err(Refusal::Full) => {
                self.held = Some((delivery, batching));
                Ok(())
            }
            Err(Refusal::Over) => Err(link.lost_error()),
            Err(Refusal::Code(RDKafkaErrorCode::MessageSizeTooLarge)) => {
                Err(larger_than_ours(&topic, self.parts.max_message_bytes))
            }
            // What is refused here is refused by itself.
            Err(Refusal::Code(code)) => Err(self.refused(&link, &topic, code)),
        }
    }

    fn refused(&self, link: &Arc<Link>, topic: &Arc<str>, code: RDKafkaErrorCode) -> SinkError {
        match verdict(code, topic, Batching::Alone) {
            Verdict::Refused(error) => error,
            Verdict::Denied => self.parts.denials.remember(topic, topic::forbidden(topic)),
            Verdict::Broken => {
                link.kill_fatal(&code.to_string());
                link.lost_error()
            }
            Verdict::Shared | Verdict::Overdue | Verdict::Lost => SinkError::new(
                Cause::Unreachable,
                format!("the Kafka producer says: {code}"),
            ),
        }
    }

    async fn link(&mut self, batching: Batching) -> Result<Arc<Link>, SinkError> {
        let (known, connector) = match batching {
            Batching::Many => (&mut self.many, self.parts.many),
            Batching::Alone => (&mut self.alone, self.parts.alone),
        };
        if let Some(link) = known
            && link.is_up()
        {
            return Ok(link.clone());
        }
        let link = connector.link().await?;
        *known = Some(link.clone());
        Ok(link)
    }

    /// Finds out why no confirm came for these.
    async fn look_closer(&mut self) {
        while let Some(sent) = self.overdue.pop() {
            let topic = sent.delivery.address.destination.clone();
            let link = sent.link.clone();
            let mut same = vec![sent];
            same.extend(
                self.overdue
                    .extract_if(.., |sent| sent.delivery.address.destination == topic),
            );
            match explained(&link, &topic).await {
                Some(error) => {
                    for sent in same {
                        let error = error.clone().after_sending();
                        self.settle(sent.delivery.event.id, Err(error));
                    }
                }
                None => self.give_up(same),
            }
        }
    }

    /// Nothing explains the silence: whether the brokers have these nobody knows. The rest of what is
    /// out gets its reports from the producer's end.
    fn give_up(&mut self, silent: Vec<Sent>) {
        let error = SinkError::new(
            Cause::ConfirmTimeout,
            format!(
                "no confirm from Kafka within {:?}",
                self.parts.confirm_timeout
            ),
        );
        for sent in silent {
            sent.link.kill(error.clone());
            self.settle(sent.delivery.event.id, Err(error.clone().after_sending()));
        }
    }

    fn settle(&mut self, id: EventId, result: Result<(), SinkError>) {
        self.settlements.push(Settlement { id, result });
    }
}

/// Is it the topic that kept its records from being confirmed?
async fn explained(link: &Link, topic: &str) -> Option<SinkError> {
    match topic::look(link, topic, LOOK_PATIENCE).await {
        Ok(found) if found.leaderless > 0 => Some(topic::leaderless(topic)),
        Ok(_) => None,
        Err(error) if error.cause == Cause::Unreachable || error.cause == Cause::ConfirmTimeout => {
            None
        }
        Err(error) => Some(error),
    }
}
