//! The publishes of one channel whose outcome is awaited.
//!
//! Like `FuturesUnordered`, but with an order that [`super::verdicts`] can rely on: that one may end
//! a round early (its budget, a half-done enqueue by another thread), so "it has nothing more"
//! does not mean that everything that was ready has been seen.
//!
//! Invariant: **a pass observes everything that resolved before the pass began**, and so all that
//! resolved before anything that the previous pass observed. Proof: a future is polled once when
//! added, and from then on is resolved, registered with its waker, or queued. Whoever resolves
//! it calls the waker before resolving the next one (lapin resolves confirms on one thread). The
//! waker puts it on the list under the lock; a pass takes the whole list under the same lock,
//! and polls all of it. A wake that finds its future already queued needs no second entry: the
//! `queued` flag is cleared before the poll, which then sees the result.

#![expect(
    clippy::indexing_slicing,
    reason = "slots by numbers that were given out here, and slots are never taken away"
)]

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

/// A publish and its confirm.
pub(super) type Pending<O> = Pin<Box<dyn Future<Output = O> + Send>>;

/// Publishes whose outcome is awaited, each with an item of the caller's.
pub(super) struct InFlight<T, O> {
    slots: Vec<Slot<T, O>>,
    free: Vec<usize>,
    queue: Arc<Queue>,
    /// Kept for its allocation.
    taken: Vec<usize>,
}

struct Slot<T, O> {
    entry: Option<(T, Pending<O>)>,
    /// The output, if the first poll brought it: not to be polled again.
    ended: Option<O>,
    waker_state: Arc<SlotWaker>,
    /// Made of `waker_state` once; slots are used again and again.
    waker: Waker,
    use_number: u64,
}

/// Names one use of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    slot: usize,
    use_number: u64,
}

#[derive(Default)]
struct Queue {
    ready: Mutex<Vec<usize>>,
    task: AtomicWaker,
}

impl Queue {
    fn ready(&self) -> MutexGuard<'_, Vec<usize>> {
        // Nothing can panic while the lock is held.
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct SlotWaker {
    slot: usize,
    queued: AtomicBool,
    queue: Arc<Queue>,
}

impl Wake for SlotWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::AcqRel) {
            self.queue.ready().push(self.slot);
            self.queue.task.wake();
        }
    }
}

impl<T, O> InFlight<T, O> {
    pub(super) fn new() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            queue: Arc::default(),
            taken: Vec::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Starts a publish: it is polled once here, which hands the message to lapin. So messages
    /// leave in the order of the calls.
    pub(super) fn start(&mut self, item: T, pending: Pending<O>) -> Ticket {
        let index = self.free.pop().unwrap_or_else(|| self.add_slot());
        let slot = &mut self.slots[index];
        slot.use_number += 1;
        let mut pending = pending;
        slot.waker_state.queued.swap(false, Ordering::AcqRel);
        let polled = pending.as_mut().poll(&mut Context::from_waker(&slot.waker));
        slot.entry = Some((item, pending));
        if let Poll::Ready(output) = polled {
            // Refused; or this thread was paused for so long that the confirm is here already.
            slot.ended = Some(output);
            slot.waker_state.wake_by_ref();
        }
        Ticket {
            slot: index,
            use_number: slot.use_number,
        }
    }

    /// One pass: reports everything that resolved before it began.
    pub(super) fn pass(&mut self, mut observe: impl FnMut(T, O)) {
        let mut taken = std::mem::take(&mut self.taken);
        std::mem::swap(&mut *self.queue.ready(), &mut taken);
        for index in taken.drain(..) {
            let slot = &mut self.slots[index];
            slot.waker_state.queued.swap(false, Ordering::AcqRel);
            let Some((_, pending)) = &mut slot.entry else {
                continue; // woken for an earlier use
            };
            let polled = match slot.ended.take() {
                Some(output) => Poll::Ready(output),
                None => pending.as_mut().poll(&mut Context::from_waker(&slot.waker)),
            };
            if let Poll::Ready(output) = polled {
                let (item, _) = slot.entry.take().expect("it was just polled");
                self.free.push(index);
                observe(item, output);
            }
        }
        self.taken = taken;
    }

    /// Ends when a pass may find something.
    pub(super) fn woken(&self) -> impl Future<Output = ()> + Send + use<T, O> {
        let queue = self.queue.clone();
        poll_fn(move |context| {
            queue.task.register(context.waker());
            if queue.ready().is_empty() {
                Poll::Pending
            } else {
                Poll::Ready(())
            }
        })
    }

    /// The item, unless its publish has ended.
    pub(super) fn get(&self, ticket: Ticket) -> Option<&T> {
        let slot = &self.slots[ticket.slot];
        let entry = slot.entry.as_ref()?;
        (slot.use_number == ticket.use_number).then_some(&entry.0)
    }

    /// The items of everything that has not ended; it is forgotten.
    pub(super) fn abandon(self) -> impl Iterator<Item = T> {
        self.slots
            .into_iter()
            .filter_map(|slot| slot.entry.map(|(item, _)| item))
    }

    fn add_slot(&mut self) -> usize {
        let slot = self.slots.len();
        let waker_state = Arc::new(SlotWaker {
            slot,
            queued: AtomicBool::new(false),
            queue: self.queue.clone(),
        });
        self.slots.push(Slot {
            entry: None,
            ended: None,
            waker: waker_state.clone().into(),
            waker_state,
            use_number: 0,
        });
        slot
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    type Answer = Result<u32, oneshot::error::RecvError>;

    fn pass(in_flight: &mut InFlight<u32, Answer>) -> Vec<(u32, u32)> {
        let mut seen = Vec::new();
        in_flight.pass(|item, answer| seen.push((item, answer.unwrap())));
        seen
    }

    #[test]
    fn a_pass_reports_what_resolved_before_it_in_that_order() {
        let mut in_flight = InFlight::new();
        let mut senders = Vec::new();
        for item in 0..4 {
            let (sender, receiver) = oneshot::channel();
            in_flight.start(item, Box::pin(receiver));
            senders.push(Some(sender));
        }
        assert!(pass(&mut in_flight).is_empty());
        for index in [2, 0, 3] {
            senders[index].take().unwrap().send(10).unwrap();
        }
        assert_eq!(pass(&mut in_flight), [(2, 10), (0, 10), (3, 10)]);
        assert_eq!(in_flight.len(), 1);
        assert_eq!(in_flight.abandon().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn tickets_outlive_the_use_of_their_slot() {
        let mut in_flight: InFlight<u32, Answer> = InFlight::new();
        let (sender, receiver) = oneshot::channel();
        let first = in_flight.start(1, Box::pin(receiver));
        sender.send(0).unwrap();
        assert_eq!(in_flight.get(first), Some(&1));
        pass(&mut in_flight);
        let (_sender, receiver) = oneshot::channel();
        let second = in_flight.start(2, Box::pin(receiver));
        assert_eq!(in_flight.get(first), None);
        assert_eq!(in_flight.get(second), Some(&2));
    }

    #[test]
    fn what_ends_at_once_is_reported_by_the_next_pass() {
        let mut in_flight: InFlight<u32, Answer> = InFlight::new();
        in_flight.start(1, Box::pin(std::future::ready(Ok(2))));
        assert_eq!(in_flight.len(), 1);
        assert_eq!(pass(&mut in_flight), [(1, 2)]);
        assert!(in_flight.is_empty());
        assert!(pass(&mut in_flight).is_empty());
    }
}
