//! The queue of one partition: which delivery may go next.
//!
//! A plain value: no I/O, no actix.
//!
//! Invariants:
//! - At most one delivery of an aggregate is in flight, and deliveries of an aggregate leave in the
//!   order in which they came in.
//! - At most `window` deliveries are in flight; a suspect is sent only alone.
//! - Every delivery that came in leaves exactly once: confirmed, failed, or given back.

use std::collections::{HashMap, VecDeque};

use crate::event::{AggregateKey, EventId};
use crate::sink::Delivery;

/// Which publisher serves a bucket. Fixed: an aggregate always goes through the same one.
pub fn partition_of(bucket: u8, partitions: usize) -> usize {
    usize::from(bucket) % partitions
}

/// Deliveries of one partition, waiting and in flight.
#[derive(Debug)]
pub struct PartitionQueue {
    window: usize,
    /// Per aggregate what waits behind the one in flight (or ready). An entry exists exactly while
    /// the aggregate has one in flight, ready or suspect, or anything waiting.
    aggregates: HashMap<AggregateKey, VecDeque<Delivery>>,
    /// Heads of aggregates that have nothing in flight.
    ready: VecDeque<Delivery>,
    in_flight: HashMap<EventId, Delivery>,
    /// Unconfirmed when the broker closed the channel: sent again one at a time, to find out whose
    /// fault it was. Their aggregates wait.
    suspects: VecDeque<Delivery>,
    /// A suspect is in flight: nothing may be beside it.
    alone: bool,
    waiting: usize,
}

impl PartitionQueue {
    /// An empty queue with this many in flight at most.
    pub fn new(window: usize) -> Self {
        Self {
            window,
            aggregates: HashMap::new(),
            ready: VecDeque::new(),
            in_flight: HashMap::new(),
            suspects: VecDeque::new(),
            alone: false,
            waiting: 0,
        }
    }

    /// Takes in a delivery; of one aggregate in the order to send.
    pub fn push(&mut self, delivery: Delivery) {
        if let Some(behind) = self.aggregates.get_mut(&delivery.event.key) {
            behind.push_back(delivery);
            self.waiting += 1;
        } else {
            self.aggregates
                .insert(delivery.event.key.clone(), VecDeque::new());
            self.ready.push_back(delivery);
        }
    }

    /// The next delivery to send now, if any may go. It is in flight from here on.
    pub fn next_to_send(&mut self) -> Option<Delivery> {
        self.alone &= !self.in_flight.is_empty();
        let delivery = if self.alone || (!self.suspects.is_empty() && !self.in_flight.is_empty()) {
            return None;
        } else if let Some(suspect) = self.suspects.pop_front() {
            self.alone = true;
            suspect
        } else if self.in_flight.len() < self.window {
            self.ready.pop_front()?
        } else {
            return None;
        };
        self.in_flight.insert(delivery.event.id, delivery.clone());
        Some(delivery)
    }

    /// A delivery in flight was confirmed.
    pub fn confirmed(&mut self, id: EventId) -> Option<Delivery> {
        let delivery = self.in_flight.remove(&id)?;
        self.advance(&delivery.event.key);
        Some(delivery)
    }

    /// A delivery in flight failed: it and what waits behind it leave.
    pub fn failed(&mut self, id: EventId) -> Option<(Delivery, Vec<Delivery>)> {
        let delivery = self.in_flight.remove(&id)?;
        let later = self
            .aggregates
            .remove(&delivery.event.key)
            .unwrap_or_default();
        self.waiting -= later.len();
        Some((delivery, later.into()))
    }

    /// A delivery in flight was void, unsent: it leaves alone, each one behind it is asked anew.
    pub fn dropped(&mut self, id: EventId) -> Option<Delivery> {
        self.confirmed(id)
    }

    /// A delivery in flight is a suspect: to be sent again, alone.
    pub fn suspected(&mut self, id: EventId) {
        if let Some(delivery) = self.in_flight.remove(&id) {
            self.suspects.push_back(delivery);
        }
    }

    /// A delivery in flight is to be sent again in this form, before what waits behind it.
    pub fn again(&mut self, delivery: Delivery) {
        if self.in_flight.remove(&delivery.event.id).is_some() {
            self.ready.push_front(delivery);
        }
    }

    /// Everything not in flight leaves.
    pub fn give_back(&mut self) -> Vec<Delivery> {
        self.give_back_where(|_| true)
    }

    /// Everything not in flight whose claim is void leaves.
    pub fn drop_void(&mut self) -> Vec<Delivery> {
        self.give_back_where(|delivery| !delivery.token.holds())
    }

    fn give_back_where(&mut self, wanted: impl Fn(&Delivery) -> bool) -> Vec<Delivery> {
        let mut given = Vec::new();
        let mut freed = Vec::new();
        for heads in [&mut self.suspects, &mut self.ready] {
            heads.retain(|head| {
                let goes = wanted(head);
                if goes {
                    freed.push(head.event.key.clone());
                    given.push(head.clone());
                }
                !goes
            });
        }
        for behind in self.aggregates.values_mut() {
            let before = behind.len();
            behind.retain(|delivery| {
                let goes = wanted(delivery);
                if goes {
                    given.push(delivery.clone());
                }
                !goes
            });
            self.waiting -= before - behind.len();
        }
        for key in freed {
            self.advance(&key);
        }
        given
    }

    /// The aggregate has nothing in flight any more: its next becomes ready, or it is forgotten.
    fn advance(&mut self, key: &AggregateKey) {
        let Some(behind) = self.aggregates.get_mut(key) else {
            return;
        };
        if let Some(next) = behind.pop_front() {
            self.waiting -= 1;
            self.ready.push_back(next);
        } else {
            self.aggregates.remove(key);
        }
    }

    /// The delivery in flight with this id.
    pub fn in_flight_of(&self, id: EventId) -> Option<&Delivery> {
        self.in_flight.get(&id)
    }

    /// Deliveries in flight.
    pub fn in_flight(&self) -> impl Iterator<Item = &Delivery> {
        self.in_flight.values()
    }

    /// How many are in flight.
    pub fn in_flight_len(&self) -> usize {
        self.in_flight.len()
    }

    /// How many wait.
    pub fn waiting_len(&self) -> usize {
        self.waiting + self.ready.len() + self.suspects.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::event::{ClaimToken, OutboxEvent};
    use crate::route::Router;

    fn token() -> Arc<ClaimToken> {
        let token = ClaimToken::new(1, "t".into());
        token.renewed(ClaimToken::now(), Duration::from_secs(60));
        Arc::new(token)
    }

    fn delivery(id: i64, aggregate: &str, token: &Arc<ClaimToken>) -> Delivery {
        let event = OutboxEvent::sample(id, ("order", aggregate), "E");
        Router::new(&[], "events").unwrap().deliver(event, token)
    }

    fn sent(queue: &mut PartitionQueue) -> Vec<i64> {
        std::iter::from_fn(|| queue.next_to_send())
            .map(|delivery| delivery.event.id.0)
            .collect()
    }

    #[test]
    fn one_of_an_aggregate_is_in_flight_and_many_aggregates_are() {
        let token = token();
        let mut queue = PartitionQueue::new(10);
        for (id, aggregate) in [(1, "a"), (2, "a"), (3, "b"), (4, "a"), (5, "b")] {
            queue.push(delivery(id, aggregate, &token));
        }
        assert_eq!(sent(&mut queue), [1, 3]);
        queue.confirmed(EventId(1));
        assert_eq!(sent(&mut queue), [2]);
        queue.confirmed(EventId(3));
        queue.confirmed(EventId(2));
        assert_eq!(sent(&mut queue), [5, 4]);
        queue.confirmed(EventId(4));
        queue.confirmed(EventId(5));
        assert_eq!((queue.in_flight_len(), queue.waiting_len()), (0, 0));
        assert!(queue.aggregates.is_empty(), "aggregates are forgotten");
    }

    #[test]
    fn the_window_bounds_what_is_in_flight() {
        let token = token();
        let mut queue = PartitionQueue::new(2);
        for id in 1..=5 {
            queue.push(delivery(id, &id.to_string(), &token));
        }
        assert_eq!(sent(&mut queue), [1, 2]);
        queue.confirmed(EventId(2));
        assert_eq!(sent(&mut queue), [3]);
    }

    #[test]
    fn a_failure_takes_what_follows_with_it_and_nothing_else() {
        let token = token();
        let mut queue = PartitionQueue::new(10);
        for (id, aggregate) in [(1, "a"), (2, "a"), (3, "b"), (4, "a")] {
            queue.push(delivery(id, aggregate, &token));
        }
        assert_eq!(sent(&mut queue), [1, 3]);
        let (failed, later) = queue.failed(EventId(1)).expect("in flight");
        assert_eq!(failed.event.id.0, 1);
        assert_eq!(
            later.iter().map(|d| d.event.id.0).collect::<Vec<_>>(),
            [2, 4]
        );
        assert_eq!(sent(&mut queue), [0i64; 0]);
        assert!(queue.failed(EventId(1)).is_none(), "once only");
    }

    #[test]
    fn suspects_go_one_at_a_time_before_anything_else() {
        let token = token();
        let mut queue = PartitionQueue::new(10);
        for (id, aggregate) in [(1, "a"), (2, "b"), (3, "c"), (4, "a")] {
            queue.push(delivery(id, aggregate, &token));
        }
        assert_eq!(sent(&mut queue), [1, 2, 3]);
        queue.suspected(EventId(1));
        queue.suspected(EventId(2));
        queue.suspected(EventId(3));
        queue.push(delivery(5, "d", &token));
        assert_eq!(sent(&mut queue), [1]);
        queue.confirmed(EventId(1));
        assert_eq!(sent(&mut queue), [2]);
        let (failed, later) = queue.failed(EventId(2)).expect("in flight");
        assert_eq!((failed.event.id.0, later.len()), (2, 0));
        assert_eq!(sent(&mut queue), [3], "the last one, too, is alone");
        queue.confirmed(EventId(3));
        assert_eq!(sent(&mut queue), [5, 4]);
    }

    #[test]
    fn void_claims_leave_and_the_others_stay_in_order() {
        let (old, new) = (token(), token());
        let mut queue = PartitionQueue::new(1);
        for (id, aggregate, token) in [
            (1, "a", &old),
            (2, "b", &old),
            (3, "b", &new),
            (4, "b", &new),
        ] {
            queue.push(delivery(id, aggregate, token));
        }
        assert_eq!(sent(&mut queue), [1]);
        old.void();
        let gone: Vec<i64> = queue.drop_void().iter().map(|d| d.event.id.0).collect();
        assert_eq!(gone, [2]);
        queue.dropped(EventId(1));
        assert_eq!(sent(&mut queue), [3]);
        queue.confirmed(EventId(3));
        assert_eq!(sent(&mut queue), [4]);
        assert_eq!(queue.waiting_len(), 0);
    }

    #[test]
    fn giving_back_keeps_what_is_in_flight() {
        let token = token();
        let mut queue = PartitionQueue::new(1);
        for (id, aggregate) in [(1, "a"), (2, "a"), (3, "b"), (4, "b")] {
            queue.push(delivery(id, aggregate, &token));
        }
        assert_eq!(sent(&mut queue), [1]);
        let mut given: Vec<i64> = queue.give_back().iter().map(|d| d.event.id.0).collect();
        given.sort_unstable();
        assert_eq!(given, [2, 3, 4]);
        assert_eq!((queue.in_flight_len(), queue.waiting_len()), (1, 0));
        queue.confirmed(EventId(1));
        assert!(queue.aggregates.is_empty());
    }
}

#[cfg(test)]
#[path = "partition_properties.rs"]
mod properties;
