//! PUBLISH: one partition, in order.
//!
//! # Role
//! Feeds its lane of the sink with what may go next and tells the marker what came of it. Which may
//! go is decided by [`super::partition`], what a failure means by [`super::failure`]. An event that
//! is being given up, and whose route wants a copy, is sent as a copy before it is marked dead.
//! # Receives
//! [`Publish`] and [`Voided`] from the claimer; [`Destination`], [`GiveBack`], [`Drain`], [`Kill`]
//! from the supervisor; settlements from the lane.
//! # Sends
//! `Confirmed`, `Failed`, `Waiting`, `HandBack`, `Dropped` to the marker; `Trouble`, `Flowing` and `Exited` to
//! the supervisor.
//! # Invariants
//! At most one unconfirmed event per aggregate. Every delivery taken in is told to the marker
//! exactly once. Nothing is sent under a void token (the lane asks right before each send), nor to
//! a destination whose breaker is open, nor anything of an event any of whose destinations has one, so that the
//! outage of one place makes few repeats at the others. No event is dead before its copy was confirmed, or cannot be.
//! # On failure
//! A lane that ends settles what it had out as lost with the connection; a new one is started.
//! # On shutdown
//! [`Drain`] hands back what was not sent and answers when all that was sent is settled. [`Kill`]
//! gives up waiting and answers what was still unconfirmed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::prelude::*;
use tokio::sync::{mpsc, oneshot};

use super::failure::{Blame, Cause, Outcome, decide};
use super::marker::{Confirmed, Dropped, Failed, HandBack, Held, Marker, Waiting};
use super::outcome;
use super::partition::PartitionQueue;
use super::supervisor::{Child, Exited, Flowing, Stop, Trouble};
use crate::event::EventId;
use crate::metrics;
use crate::sink::{Delivery, Lane, Settlement, Sink, SinkError};

/// Before a lane that ended is started again.
const LANE_PAUSE: Duration = Duration::from_millis(200);
/// An event whose destination takes nothing waits for half of the time that this has lasted, so that
/// many of them cost little and recovery is soon all the same; between these bounds.
const SHORTEST_WAIT: Duration = Duration::from_secs(2);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Events to publish; of one aggregate in id order.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Publish {
    /// All of this publisher's partition.
    pub deliveries: Vec<Delivery>,
}

/// A token became void: drop what was claimed under it.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Voided;

/// A destination's breaker has opened or closed.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct Destination {
    /// Its name.
    pub name: Arc<str>,
    /// Why nothing may be sent to it, and since when; none: it takes events.
    pub down: Option<(SinkError, Instant)>,
}

/// The breaker opened: hand back what was not sent.
#[derive(Message)]
#[rtype(result = "()")]
pub struct GiveBack;

/// Hand back what was not sent; answered when everything sent is settled.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Drain;

/// Wait no longer: answers ids and aggregates of the events still unconfirmed, which are handed back.
#[derive(Message)]
#[rtype(result = "Vec<String>")]
pub struct Kill;

/// See the module's head.
pub struct Publisher {
    settings: Settings,
    sink: Arc<dyn Sink>,
    marker: Addr<Marker>,
    trouble: Recipient<Trouble>,
    flowing: Recipient<Flowing>,
    exited: Recipient<Exited>,
    queue: PartitionQueue,
    /// Destinations whose breaker is open.
    down: HashMap<Arc<str>, (SinkError, Instant)>,
    /// To be told to the marker at the end of the present message.
    waiting: Vec<(Arc<str>, Waiting)>,
    lane: Option<mpsc::Sender<Delivery>>,
    drained: Option<oneshot::Sender<()>>,
    draining: bool,
    stopping: bool,
}

/// Settings of a publisher.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Its number.
    pub partition: usize,
    /// See `relay.window`.
    pub window: usize,
    /// See `retry.max_attempts`.
    pub max_attempts: u32,
    /// All events go to one destination: while that takes none nothing is claimed, so no event needs
    /// to wait by itself.
    pub sole_destination: bool,
}

/// Whom a publisher talks to.
#[derive(Clone)]
pub struct Links {
    /// The marker.
    pub marker: Addr<Marker>,
    /// The supervisor's breaker.
    pub trouble: Recipient<Trouble>,
    /// The supervisor's breaker.
    pub flowing: Recipient<Flowing>,
    /// The supervisor, for the end.
    pub exited: Recipient<Exited>,
}

impl Publisher {
    /// The publisher of one partition.
    pub fn new(settings: Settings, sink: Arc<dyn Sink>, links: Links) -> Self {
        Self {
            settings,
            sink,
            marker: links.marker,
            trouble: links.trouble,
            flowing: links.flowing,
            exited: links.exited,
            queue: PartitionQueue::new(settings.window),
            down: HashMap::new(),
            waiting: Vec::new(),
            lane: None,
            drained: None,
            draining: false,
            stopping: false,
        }
    }

    fn start_lane(&mut self, context: &mut Context<Self>) {
        let (lane, deliveries) = mpsc::channel(self.settings.window);
        let (settled, mut settlements) = mpsc::unbounded_channel();
        self.lane = Some(lane);
        let lane = Lane {
            partition: self.settings.partition,
            window: self.settings.window,
            deliveries,
            settled,
        };
        let sink = self.sink.clone();
        // A task of its own: a panic in it ends the lane and not this actor.
        actix_rt::spawn(async move { sink.run_lane(lane).await });
        context.add_stream(futures_util::stream::poll_fn(move |task| {
            settlements.poll_recv(task)
        }));
    }

    /// Sends what may go.
    fn pump(&mut self) {
        while let Some(lane) = &self.lane {
            let Some(delivery) = self.queue.next_to_send() else {
                break;
            };
            let id = delivery.event.id;
            if let Some((error, wait)) = self.obstacle(&delivery) {
                self.wait(id, error, wait);
                continue;
            }
            // The lane's queue is as long as the window, so only a lane that ended refuses.
            if lane.try_send(delivery).is_err() {
                self.lane = None;
                self.failed(
                    id,
                    SinkError::new(Cause::Unreachable, "the lane to the broker ended"),
                );
            }
        }
        for (_, waiting) in std::mem::take(&mut self.waiting) {
            self.tell(waiting);
        }
        if self.queue.in_flight_len() == 0
            && self.queue.waiting_len() == 0
            && let Some(drained) = self.drained.take()
        {
            let _ = drained.send(());
        }
    }

    /// Why nothing may be sent of it, and how long it waits.
    fn obstacle(&self, delivery: &Delivery) -> Option<(SinkError, Duration)> {
        if self.down.is_empty() {
            return None;
        }
        let name = names(delivery).find(|name| self.down.contains_key(*name))?;
        let (error, since) = self.down.get(name)?;
        let error = SinkError {
            destination: Some(name.clone()),
            ..error.clone()
        };
        Some((error, wait_after(since.elapsed())))
    }

    fn failed(&mut self, id: EventId, error: SinkError) {
        let Some(delivery) = self.queue.in_flight_of(id) else {
            return;
        };
        let (outcome, blame) = decide(error.cause);
        if blame != Blame::Event {
            self.trouble
                .try_send(Trouble {
                    blame,
                    destination: blamed(delivery, &error),
                    error: error.clone(),
                })
                .ok();
        }
        if let Some(reason) = delivery.letter.clone() {
            self.letter_failed(id, outcome, error, &reason);
            return;
        }
        match outcome {
            Outcome::Drop => self.drop_void(id),
            Outcome::Isolate => self.queue.suspected(id),
            Outcome::HandBack => self.hand_back(id, &error),
            Outcome::Wait => self.wait(id, error, SHORTEST_WAIT),
            Outcome::Retry => self.charge(id, error, Outcome::Retry),
            Outcome::RetryOrDead | Outcome::Dead => {
                let last = u32::try_from(delivery.event.attempt())
                    .is_ok_and(|attempt| attempt >= self.settings.max_attempts);
                if outcome == Outcome::RetryOrDead && !last {
                    self.charge(id, error, outcome);
                } else {
                    self.give_up(id, error);
                }
            }
        }
    }

    /// The event is dead, once its copy is where its route wants it.
    fn give_up(&mut self, id: EventId, error: SinkError) {
        let Some(delivery) = self.queue.in_flight_of(id) else {
            return;
        };
        match delivery.route.letter_address(&delivery.event) {
            None => self.charge(id, error, Outcome::Dead),
            Some(address) => {
                let copy = Delivery {
                    address,
                    also: Vec::new(),
                    letter: Some(Arc::new(error)),
                    ..delivery.clone()
                };
                self.queue.again(copy);
            }
        }
    }

    /// The copy of an event that is being given up for `reason` was not taken.
    fn letter_failed(
        &mut self,
        id: EventId,
        outcome: Outcome,
        error: SinkError,
        reason: &SinkError,
    ) {
        match outcome {
            Outcome::Drop => self.drop_void(id),
            Outcome::Isolate => self.queue.suspected(id),
            Outcome::HandBack => self.hand_back(id, &error),
            // The event itself is not to blame: it dies when its copy can be had.
            Outcome::Wait | Outcome::Retry => self.wait(id, error, SHORTEST_WAIT),
            Outcome::RetryOrDead | Outcome::Dead => {
                let mut reason = reason.clone();
                reason.message = format!("{} (no copy could be sent: {error})", reason.message);
                self.charge(id, reason, Outcome::Dead);
            }
        }
    }

    fn drop_void(&mut self, id: EventId) {
        if let Some(delivery) = self.queue.dropped(id) {
            self.tell(Dropped {
                held: vec![Held::of(&delivery)],
            });
        }
    }

    fn hand_back(&mut self, id: EventId, error: &SinkError) {
        let Some((delivery, later)) = self.queue.failed(id) else {
            return;
        };
        let why = if error.maybe_sent {
            outcome::Result::Unconfirmed {
                error: error.message.clone(),
            }
        } else {
            outcome::Result::BreakerOpen
        };
        self.tell(HandBack {
            held: vec![Held::of(&delivery)],
            why,
        });
        self.tell_not_sent(&later);
    }

    /// The destination takes nothing at present.
    fn wait(&mut self, id: EventId, error: SinkError, wait: Duration) {
        let Some(delivery) = self.queue.in_flight_of(id) else {
            return;
        };
        if self.settings.sole_destination && !delivery.is_letter() {
            self.hand_back(id, &error);
            return;
        }
        let Some((delivery, later)) = self.queue.failed(id) else {
            return;
        };
        let destination = blamed(&delivery, &error);
        let waiting = match self
            .waiting
            .iter_mut()
            .find(|(name, _)| *name == destination)
        {
            Some((_, waiting)) => waiting,
            None => {
                let waiting = Waiting {
                    heads: Vec::new(),
                    later: Vec::new(),
                    error,
                    wait,
                };
                self.waiting.push((destination, waiting));
                &mut self.waiting.last_mut().expect("it was pushed above").1
            }
        };
        waiting.heads.push(Held::of(&delivery));
        waiting.later.extend(later.iter().map(Held::of));
    }

    /// Has it recorded: an attempt, or a death.
    fn charge(&mut self, id: EventId, error: SinkError, outcome: Outcome) {
        let Some((delivery, later)) = self.queue.failed(id) else {
            return;
        };
        self.tell(Failed {
            held: Held::of(&delivery),
            error,
            outcome,
            holds: delivery.route.holds(),
            copied_to: None,
            later: later.iter().map(Held::of).collect(),
        });
    }

    /// The copy of an event that is given up was confirmed.
    fn letter_confirmed(&mut self, id: EventId) {
        let Some((delivery, later)) = self.queue.failed(id) else {
            return;
        };
        let Some(reason) = &delivery.letter else {
            return;
        };
        self.tell(Failed {
            held: Held::of(&delivery),
            error: SinkError::clone(reason),
            outcome: Outcome::Dead,
            holds: delivery.route.holds(),
            copied_to: Some(delivery.address.destination.clone()),
            later: later.iter().map(Held::of).collect(),
        });
    }

    fn give_back(&mut self) {
        let given = self.queue.give_back();
        self.tell_not_sent(&given);
    }

    fn tell_not_sent(&self, unsent: &[Delivery]) {
        if unsent.is_empty() {
            return;
        }
        let why = if self.draining || self.stopping {
            outcome::Result::Stopping
        } else {
            outcome::Result::BreakerOpen
        };
        self.tell(HandBack {
            held: unsent.iter().map(Held::of).collect(),
            why,
        });
    }

    fn tell<M>(&self, message: M)
    where
        M: Message<Result = ()> + Send + 'static,
        Marker: Handler<M>,
    {
        // Refused only by a marker that is gone, which takes the whole generation, this actor too,
        // with it.
        self.marker.try_send(message).ok();
    }
}

/// What a breaker of its own stands for: the destinations it goes to and, where there are several, their sinks.
fn names(delivery: &Delivery) -> impl Iterator<Item = &Arc<str>> {
    delivery
        .addresses()
        .flat_map(|address| address.sink.iter().chain([&address.destination]))
}

/// Which of them an error speaks of.
fn blamed(delivery: &Delivery, error: &SinkError) -> Arc<str> {
    let own = &delivery.address.destination;
    error.destination.as_ref().unwrap_or(own).clone()
}

/// How long an event waits whose destination has taken nothing for so long.
fn wait_after(down: Duration) -> Duration {
    (down / 2).clamp(SHORTEST_WAIT, LONGEST_WAIT)
}

impl Actor for Publisher {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        // Without a bound of its own: credits are the bound, and a refused message would be a lost row.
        context.set_mailbox_capacity(0);
        self.start_lane(context);
    }

    fn stopped(&mut self, _: &mut Self::Context) {
        Exited::report(
            &self.exited,
            Child::Publisher(self.settings.partition),
            self.stopping,
        );
    }
}

impl StreamHandler<Vec<Settlement>> for Publisher {
    fn handle(&mut self, settlements: Vec<Settlement>, _: &mut Self::Context) {
        let mut confirmed = Vec::with_capacity(settlements.len());
        let mut flowing = Vec::new();
        for settlement in settlements {
            match settlement.result {
                Ok(()) => {
                    let delivery = self.queue.in_flight_of(settlement.id);
                    for name in delivery.into_iter().flat_map(names) {
                        if !flowing.contains(name) {
                            flowing.push(name.clone());
                        }
                    }
                    if delivery.is_some_and(Delivery::is_letter) {
                        self.letter_confirmed(settlement.id);
                    } else if let Some(delivery) = self.queue.confirmed(settlement.id) {
                        if let Some(age) = delivery.event.age {
                            ::metrics::histogram!(metrics::CREATED_TO_CONFIRM_SECONDS)
                                .record(age + delivery.event.loaded.elapsed());
                        }
                        confirmed.push(Held::of(&delivery));
                    }
                }
                Err(error) => self.failed(settlement.id, error),
            }
        }
        if !confirmed.is_empty() {
            #[cfg(feature = "failpoints")]
            let ids: Vec<i64> = confirmed.iter().map(|held| held.subject.id.0).collect();
            #[cfg(feature = "failpoints")]
            crate::failpoint::reached("confirm:before", ids.iter().copied());
            self.tell(Confirmed { held: confirmed });
            #[cfg(feature = "failpoints")]
            crate::failpoint::reached("confirm:after", ids);
        }
        if !flowing.is_empty() {
            let destinations = flowing;
            self.flowing.try_send(Flowing { destinations }).ok();
        }
        if self.draining {
            self.give_back();
        }
        self.pump();
    }

    /// The lane has ended, and everything it settled has been handled.
    fn finished(&mut self, context: &mut Self::Context) {
        self.lane = None;
        let lost: Vec<_> = self
            .queue
            .in_flight()
            .map(|delivery| delivery.event.id)
            .collect();
        for id in lost {
            self.failed(
                id,
                SinkError::new(Cause::Unreachable, "the lane to the broker ended").after_sending(),
            );
        }
        if !self.stopping && !self.draining {
            tracing::warn!(
                partition = self.settings.partition,
                "the lane to the broker ended, starting another"
            );
            context.run_later(LANE_PAUSE, |actor, context| {
                actor.start_lane(context);
                actor.pump();
            });
        }
        self.pump();
    }
}

impl Handler<Publish> for Publisher {
    type Result = ();

    fn handle(&mut self, publish: Publish, _: &mut Self::Context) {
        for delivery in publish.deliveries {
            self.queue.push(delivery);
        }
        if self.draining {
            self.give_back();
        }
        self.pump();
    }
}

impl Handler<Voided> for Publisher {
    type Result = ();

    fn handle(&mut self, _: Voided, _: &mut Self::Context) {
        let held: Vec<Held> = self.queue.drop_void().iter().map(Held::of).collect();
        if !held.is_empty() {
            self.tell(Dropped { held });
        }
        self.pump();
    }
}

impl Handler<Destination> for Publisher {
    type Result = ();

    fn handle(&mut self, destination: Destination, _: &mut Self::Context) {
        match destination.down {
            Some(down) => drop(self.down.insert(destination.name, down)),
            None => drop(self.down.remove(&destination.name)),
        }
        self.pump();
    }
}

impl Handler<GiveBack> for Publisher {
    type Result = ();

    fn handle(&mut self, _: GiveBack, _: &mut Self::Context) {
        self.give_back();
        self.pump();
    }
}

impl Handler<Drain> for Publisher {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, _: Drain, _: &mut Self::Context) -> Self::Result {
        let (answer, done) = oneshot::channel();
        self.draining = true;
        self.drained = Some(answer);
        self.give_back();
        self.pump();
        Box::pin(async { drop(done.await) })
    }
}

impl Handler<Kill> for Publisher {
    type Result = Vec<String>;

    fn handle(&mut self, _: Kill, context: &mut Self::Context) -> Vec<String> {
        self.stopping = true;
        self.give_back();
        let out: Vec<Delivery> = self.queue.in_flight().cloned().collect();
        if !out.is_empty() {
            self.tell(HandBack {
                held: out.iter().map(Held::of).collect(),
                why: outcome::Result::Unconfirmed {
                    error: "the relay stopped before its confirm came".into(),
                },
            });
        }
        context.stop();
        out.iter()
            .map(|delivery| format!("{} ({})", delivery.event.id, delivery.event.key))
            .collect()
    }
}

impl Handler<Stop> for Publisher {
    type Result = ();

    fn handle(&mut self, _: Stop, context: &mut Self::Context) {
        self.stopping = true;
        context.stop();
    }
}
