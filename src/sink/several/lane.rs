//! One lane over several sinks: a lane of each, and one settlement for what all of them say of an event.
//!
//! Invariants:
//! - Each delivery taken from the lane is in `out` until all of its copies are settled, and then settled once.
//! - An inner lane has at most one copy of an event, and so at most a window of copies: copies for the same sink go
//!   one after the other, those for different sinks at the same time. Once a sink refused one copy, it gets no
//!   further ones of that event.
//! - An inner lane that ends before its deliveries are closed has panicked. What it had is settled as lost, and
//!   the next delivery for it starts another.
//! - Dropping the run aborts the inner lanes.

#![expect(
    clippy::indexing_slicing,
    reason = "parts and copies by numbers that were given out here"
)]

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use futures_util::stream::{self, BoxStream, SelectAll};
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::{Address, Delivery, SeveralSinks, SinkError, unknown, verdict};
use crate::event::EventId;
use crate::relay::failure::Cause;
use crate::sink::{Lane, Settlement};

/// Deliveries handed on, or batches of settlements taken, before the results leave.
const TURN: usize = 128;

/// Copies of one event for one sink: the first is under way, the others follow.
struct Copies {
    part: usize,
    /// Where the one goes that is under way.
    destination: Arc<str>,
    later: VecDeque<Address>,
}

/// An event on its way.
struct Out {
    delivery: Delivery,
    /// Not settled yet.
    copies: Vec<Copies>,
    results: Vec<Result<(), SinkError>>,
}

/// What the lane of a sink says, by the sink's number: settlements, or that it has ended.
type Told = (usize, Option<Vec<Settlement>>);

/// A lane at work.
pub(super) struct Run<'a> {
    sinks: &'a SeveralSinks,
    partition: usize,
    window: usize,
    /// By the sink's number: the way to its lane, if there is one.
    lanes: Vec<Option<mpsc::Sender<Delivery>>>,
    told: SelectAll<BoxStream<'static, Told>>,
    tasks: JoinSet<()>,
    out: HashMap<EventId, Out>,
    settlements: Vec<Settlement>,
}

impl<'a> Run<'a> {
    pub(super) fn new(sinks: &'a SeveralSinks, lane: &Lane) -> Self {
        Self {
            sinks,
            partition: lane.partition,
            window: lane.window,
            lanes: sinks.parts.iter().map(|_| None).collect(),
            told: SelectAll::new(),
            tasks: JoinSet::new(),
            out: HashMap::with_capacity(lane.window),
            settlements: Vec::new(),
        }
    }

    /// Serves the lane until its deliveries are closed and everything is settled.
    pub(super) async fn serve(mut self, mut lane: Lane) {
        let mut more = true;
        while more || !self.out.is_empty() {
            tokio::select! {
                biased;
                Some(told) = self.told.next() => self.hear(told),
                delivery = lane.deliveries.recv(), if more => match delivery {
                    Some(delivery) => self.deliver(delivery),
                    None => more = false,
                },
            }
            for _ in 0..TURN {
                match self.told.next().now_or_never().flatten() {
                    Some(told) => self.hear(told),
                    None => break,
                }
            }
            for _ in 0..TURN {
                match lane.deliveries.try_recv() {
                    Ok(delivery) => self.deliver(delivery),
                    Err(_) => break,
                }
            }
            if !self.settlements.is_empty() {
                // A publisher that is gone wants no settlements.
                let _ = lane.settled.send(std::mem::take(&mut self.settlements));
            }
        }
        self.lanes.clear();
        while self.tasks.join_next().await.is_some() {}
    }

    fn deliver(&mut self, delivery: Delivery) {
        let id = delivery.event.id;
        let mut copies: Vec<Copies> = Vec::with_capacity(self.lanes.len());
        let mut results = Vec::new();
        for address in delivery.addresses() {
            let sink = address.sink.as_deref().unwrap_or_default();
            let Some((part, _)) = self.sinks.part(sink) else {
                results.push(Err(unknown(&address.destination)));
                continue;
            };
            match copies.iter_mut().find(|copies| copies.part == part) {
                Some(copies) => copies.later.push_back(address.clone()),
                None => copies.push(Copies {
                    part,
                    destination: address.destination.clone(),
                    later: VecDeque::from([address.clone()]),
                }),
            }
        }
        let parts: Vec<_> = copies.iter().map(|copies| copies.part).collect();
        let out = Out {
            delivery,
            copies,
            results,
        };
        self.out.insert(id, out);
        for part in parts {
            self.send_next(id, part);
        }
        self.settle_if_all(id);
    }

    /// Sends the next copy for this sink, or has done with it.
    fn send_next(&mut self, id: EventId, part: usize) {
        let Some(out) = self.out.get_mut(&id) else {
            return;
        };
        let Some(at) = out.copies.iter().position(|copies| copies.part == part) else {
            return;
        };
        let Some(address) = out.copies[at].later.pop_front() else {
            out.copies.swap_remove(at);
            return;
        };
        let copy = out.delivery.copy_for(&address);
        out.copies[at].destination = address.destination;
        if self.lanes[part].is_none() {
            self.start(part);
        }
        let sent = self.lanes[part]
            .as_ref()
            .is_some_and(|lane| lane.try_send(copy).is_ok());
        if !sent {
            // Its queue is as long as the window, so it has just ended.
            self.settled(id, part, Err(ended()));
        }
    }

    fn start(&mut self, part: usize) {
        let (deliver, deliveries) = mpsc::channel(self.window);
        let (settled, mut settlements) = mpsc::unbounded_channel();
        let lane = Lane {
            partition: self.partition,
            window: self.window,
            deliveries,
            settled,
        };
        let sink = self.sinks.parts[part].sink.clone();
        // A task of its own: a panic in it ends that lane and not this one.
        self.tasks.spawn(async move { sink.run_lane(lane).await });
        let settlements = stream::poll_fn(move |task| settlements.poll_recv(task))
            .map(move |settlements| (part, Some(settlements)))
            .chain(stream::once(std::future::ready((part, None))));
        self.told.push(settlements.boxed());
        self.lanes[part] = Some(deliver);
    }

    fn hear(&mut self, (part, told): Told) {
        if let Some(settlements) = told {
            for Settlement { id, result } in settlements {
                self.settled(id, part, result);
            }
            return;
        }
        self.lanes[part] = None;
        tracing::warn!(
            partition = self.partition,
            sink = &*self.sinks.parts[part].name,
            "the lane to one of several sinks ended"
        );
        let has_copy = |out: &Out| out.copies.iter().any(|copies| copies.part == part);
        let lost: Vec<_> = self
            .out
            .iter()
            .filter_map(|(id, out)| has_copy(out).then_some(*id))
            .collect();
        for id in lost {
            self.settled(id, part, Err(ended().after_sending()));
        }
    }

    /// The copy that was under way to this sink is settled.
    fn settled(&mut self, id: EventId, part: usize, result: Result<(), SinkError>) {
        let Some(out) = self.out.get_mut(&id) else {
            return;
        };
        let Some(at) = out.copies.iter().position(|copies| copies.part == part) else {
            return;
        };
        let Err(error) = result else {
            out.results.push(Ok(()));
            self.send_next(id, part);
            self.settle_if_all(id);
            return;
        };
        let copies = out.copies.swap_remove(at);
        let told = self.sinks.parts[part].told(&copies.destination, error);
        out.results.push(Err(told));
        self.settle_if_all(id);
    }

    fn settle_if_all(&mut self, id: EventId) {
        if self.out.get(&id).is_some_and(|out| out.copies.is_empty())
            && let Some(out) = self.out.remove(&id)
        {
            let result = verdict::of_all(out.results);
            self.settlements.push(Settlement { id, result });
        }
    }
}

fn ended() -> SinkError {
    SinkError::new(Cause::Unreachable, "its lane ended")
}
