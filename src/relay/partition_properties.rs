//! What holds of a partition's queue, whatever happens to the deliveries in it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::event::{ClaimToken, OutboxEvent};
use crate::route::Router;

#[derive(Clone, Debug)]
enum Step {
    /// A delivery of this aggregate, under one of two tokens, of which the first will be void.
    Push(u8, bool),
    Send,
    Confirm(usize),
    Fail(usize),
    Drop(usize),
    Suspect(usize),
    SuspectAll,
    Again(usize),
    GiveBack,
    /// The first token is void from here on.
    Void,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let which = any::<usize>();
    let step = prop_oneof![
        12 => (0..5_u8, any::<bool>()).prop_map(|(aggregate, second)| Step::Push(aggregate, second)),
        12 => Just(Step::Send),
        4 => which.prop_map(Step::Confirm),
        2 => which.prop_map(Step::Fail),
        1 => which.prop_map(Step::Drop),
        1 => which.prop_map(Step::Suspect),
        1 => Just(Step::SuspectAll),
        1 => which.prop_map(Step::Again),
        1 => Just(Step::GiveBack),
        1 => Just(Step::Void),
    ];
    proptest::collection::vec(step, 0..150)
}

fn token() -> Arc<ClaimToken> {
    let token = ClaimToken::new(1, "t".into());
    token.renewed(ClaimToken::now(), Duration::from_secs(60));
    Arc::new(token)
}

struct World {
    queue: PartitionQueue,
    window: usize,
    router: Router,
    tokens: [Arc<ClaimToken>; 2],
    next_id: i64,
    /// What came in and has not left, by aggregate, in order.
    held: BTreeMap<AggregateKey, Vec<Delivery>>,
    in_flight: BTreeSet<EventId>,
    suspects: BTreeSet<EventId>,
    /// A suspect that is in flight.
    alone: Option<EventId>,
}

impl World {
    fn new(window: usize) -> Self {
        Self {
            queue: PartitionQueue::new(window),
            window,
            router: Router::new(&[], "events").unwrap(),
            tokens: [token(), token()],
            next_id: 1,
            held: BTreeMap::new(),
            in_flight: BTreeSet::new(),
            suspects: BTreeSet::new(),
            alone: None,
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Push(aggregate, second) => self.push(*aggregate, *second),
            Step::Send => {
                self.send();
            }
            Step::Confirm(which) => self.with(*which, |world, id| {
                let left = world.queue.confirmed(id).unwrap();
                world.leave(&[left]);
            }),
            Step::Drop(which) => self.with(*which, |world, id| {
                let left = world.queue.dropped(id).unwrap();
                world.leave(&[left]);
            }),
            Step::Fail(which) => self.with(*which, Self::fail),
            Step::Suspect(which) => self.with(*which, Self::suspect),
            Step::SuspectAll => {
                for id in self.in_flight.clone() {
                    self.suspect(id);
                }
            }
            Step::Again(which) => self.with(*which, |world, id| {
                let again = world.queue.in_flight_of(id).unwrap().clone();
                world.in_flight.remove(&id);
                world.queue.again(again);
            }),
            Step::GiveBack => {
                let given = self.queue.give_back();
                self.leave(&given);
                let held = self.held.values().flatten();
                assert!(
                    held.into_iter()
                        .all(|held| self.in_flight.contains(&held.event.id))
                );
            }
            Step::Void => {
                self.tokens[0].void();
                let given = self.queue.drop_void();
                assert!(given.iter().all(|given| !given.token.holds()));
                self.leave(&given);
                let held = self.held.values().flatten();
                let mut idle = held.filter(|held| !self.in_flight.contains(&held.event.id));
                assert!(idle.all(|held| held.token.holds()));
            }
        }
        self.check();
    }

    fn push(&mut self, aggregate: u8, second: bool) {
        let event = OutboxEvent::sample(self.next_id, ("order", &aggregate.to_string()), "E");
        self.next_id += 1;
        let delivery = self
            .router
            .deliver(event, &self.tokens[usize::from(second)]);
        let behind = self.held.entry(delivery.event.key.clone()).or_default();
        behind.push(delivery.clone());
        self.queue.push(delivery);
    }

    fn send(&mut self) -> bool {
        let Some(sent) = self.queue.next_to_send() else {
            return false;
        };
        let id = sent.event.id;
        assert!(self.alone.is_none(), "{id} beside a suspect");
        assert_eq!(
            self.held[&sent.event.key][0].event.id, id,
            "the oldest of its aggregate"
        );
        if self.suspects.remove(&id) {
            assert!(self.in_flight.is_empty(), "the suspect {id} beside others");
            self.alone = Some(id);
        } else {
            assert!(self.suspects.is_empty(), "{id} before the suspects");
        }
        assert!(self.in_flight.insert(id), "{id} is in flight already");
        true
    }

    fn with(&mut self, which: usize, act: impl Fn(&mut Self, EventId)) {
        let all: Vec<_> = self.in_flight.iter().copied().collect();
        if let Some(id) = all.get(which.checked_rem(all.len()).unwrap_or(0)) {
            act(self, *id);
        }
    }

    fn fail(&mut self, id: EventId) {
        let (failed, later) = self.queue.failed(id).unwrap();
        let behind = self.held[&failed.event.key][1..].iter();
        let behind: Vec<_> = behind.map(|delivery| delivery.event.id).collect();
        let given: Vec<_> = later.iter().map(|delivery| delivery.event.id).collect();
        assert_eq!(given, behind, "all that wait behind it, in order");
        self.leave(&[vec![failed], later].concat());
    }

    fn suspect(&mut self, id: EventId) {
        self.queue.suspected(id);
        self.in_flight.remove(&id);
        self.suspects.insert(id);
    }

    fn leave(&mut self, left: &[Delivery]) {
        for delivery in left {
            let id = delivery.event.id;
            let held = self.held.get_mut(&delivery.event.key).unwrap();
            let place = held.iter().position(|held| held.event.id == id);
            held.remove(place.expect("each leaves once"));
            self.in_flight.remove(&id);
            self.suspects.remove(&id);
        }
    }

    fn check(&mut self) {
        self.alone = self.alone.filter(|id| self.in_flight.contains(id));
        let ids: BTreeSet<_> = self.queue.in_flight().map(|one| one.event.id).collect();
        assert_eq!(ids, self.in_flight);
        assert_eq!(self.queue.in_flight_len(), ids.len());
        assert!(ids.len() <= self.window);
        let keys: BTreeSet<_> = self.queue.in_flight().map(|one| &one.event.key).collect();
        assert_eq!(keys.len(), ids.len(), "one of an aggregate");
        let held: usize = self.held.values().map(Vec::len).sum();
        assert_eq!(
            self.queue.waiting_len() + ids.len(),
            held,
            "none is lost, none twice"
        );
    }

    /// Everything is confirmed from here on.
    fn drain(&mut self) {
        while self.held.values().any(|held| !held.is_empty()) {
            while self.send() {}
            let Some(id) = self.in_flight.first().copied() else {
                panic!("stuck: {:?}", self.held);
            };
            let left = self.queue.confirmed(id).unwrap();
            self.leave(&[left]);
            self.check();
        }
        assert!(
            self.queue.aggregates.is_empty(),
            "nothing is remembered for ever"
        );
    }
}

#[test]
fn each_delivery_leaves_once_in_order_and_never_beside_one_of_its_aggregate() {
    let inputs = (1..5_usize, steps());
    crate::properties::hold(&inputs, |(window, steps)| {
        let mut world = World::new(window);
        for step in &steps {
            world.step(step);
        }
        world.drain();
    });
}
