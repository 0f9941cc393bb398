//! PUBLISH: one partition, in order.
//!
//! # Role
//! Feeds its lane of the sink with what may go next and tells the marker what came of it. Which may
//! go is decided by [`super::partition`], what a failure means by [`super::failure`].
//! # Receives
//! [`Publish`] and [`Voided`] from the claimer; [`GiveBack`], [`Drain`], [`Kill`] from the
//! supervisor; settlements from the lane.
//! # Sends
//! `Confirmed`, `Failed`, `HandBack`, `Dropped` to the marker; `Trouble`, `Flowing` and `Exited` to
//! the supervisor.
//! # Invariants
//! At most one unconfirmed event per aggregate. Every delivery taken in is told to the marker
//! exactly once. Nothing is sent under a void token (the lane asks right before each send).
//! # On failure
//! A lane that ends settles what it had out as lost with the connection; a new one is started.
//! # On shutdown
//! [`Drain`] hands back what was not sent and answers when all that was sent is settled. [`Kill`]
//! gives up waiting and answers what was still unconfirmed.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use tokio::sync::{mpsc, oneshot};

use super::failure::{Blame, Cause, Outcome, decide};
use super::marker::{Confirmed, Dropped, Failed, HandBack, Held, Marker};
use super::partition::PartitionQueue;
use super::supervisor::{Child, Exited, Flowing, Stop, Trouble};
use crate::metrics;
use crate::sink::{Delivery, Lane, Settlement, Sink, SinkError};

/// Before a lane that ended is started again.
const LANE_PAUSE: Duration = Duration::from_millis(200);

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
    partition: usize,
    window: usize,
    sink: Arc<dyn Sink>,
    marker: Addr<Marker>,
    trouble: Recipient<Trouble>,
    flowing: Recipient<Flowing>,
    exited: Recipient<Exited>,
    queue: PartitionQueue,
    lane: Option<mpsc::Sender<Delivery>>,
    drained: Option<oneshot::Sender<()>>,
    draining: bool,
    stopping: bool,
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
    pub fn new(partition: usize, window: usize, sink: Arc<dyn Sink>, links: Links) -> Self {
        Self {
            partition,
            window,
            sink,
            marker: links.marker,
            trouble: links.trouble,
            flowing: links.flowing,
            exited: links.exited,
            queue: PartitionQueue::new(window),
            lane: None,
            drained: None,
            draining: false,
            stopping: false,
        }
    }

    fn start_lane(&mut self, context: &mut Context<Self>) {
        let (lane, deliveries) = mpsc::channel(self.window);
        let (settled, mut settlements) = mpsc::unbounded_channel();
        self.lane = Some(lane);
        let lane = Lane {
            partition: self.partition,
            window: self.window,
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
            // The lane's queue is as long as the window, so only a lane that ended refuses.
            if lane.try_send(delivery).is_err() {
                self.lane = None;
                self.failed(
                    id,
                    SinkError::new(Cause::Unreachable, "the lane to the broker ended"),
                );
            }
        }
        if self.queue.in_flight_len() == 0
            && self.queue.waiting_len() == 0
            && let Some(drained) = self.drained.take()
        {
            let _ = drained.send(());
        }
    }

    fn failed(&mut self, id: crate::event::EventId, error: SinkError) {
        let (outcome, blame) = decide(&error.cause);
        if blame != Blame::Event {
            let message = error.message.clone();
            self.trouble.try_send(Trouble { message }).ok();
        }
        match outcome {
            Outcome::Drop => {
                if let Some(delivery) = self.queue.dropped(id) {
                    self.tell(Dropped {
                        held: vec![Held::of(&delivery)],
                    });
                }
            }
            Outcome::Isolate => self.queue.suspected(id),
            Outcome::HandBack => {
                if let Some((delivery, later)) = self.queue.failed(id) {
                    if error.maybe_sent {
                        tracing::warn!(id = id.0, %error, "not confirmed, handed back: a duplicate is possible");
                    } else {
                        tracing::debug!(id = id.0, %error, "handed back");
                    }
                    let held = std::iter::once(&delivery)
                        .chain(&later)
                        .map(Held::of)
                        .collect();
                    self.tell(HandBack { held });
                }
            }
            Outcome::Retry | Outcome::RetryOrDead | Outcome::Dead => {
                if let Some((delivery, later)) = self.queue.failed(id) {
                    self.tell(Failed {
                        held: Held::of(&delivery),
                        key: delivery.event.key.clone(),
                        error,
                        later: later.iter().map(Held::of).collect(),
                    });
                }
            }
        }
    }

    fn give_back(&mut self) {
        let held: Vec<Held> = self.queue.give_back().iter().map(Held::of).collect();
        if !held.is_empty() {
            self.tell(HandBack { held });
        }
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
            Child::Publisher(self.partition),
            self.stopping,
        );
    }
}

impl StreamHandler<Vec<Settlement>> for Publisher {
    fn handle(&mut self, settlements: Vec<Settlement>, _: &mut Self::Context) {
        let mut confirmed = Vec::with_capacity(settlements.len());
        for settlement in settlements {
            match settlement.result {
                Ok(()) => {
                    if let Some(delivery) = self.queue.confirmed(settlement.id) {
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
            self.tell(Confirmed { held: confirmed });
            self.flowing.try_send(Flowing).ok();
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
                partition = self.partition,
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
