//! What holds of all breakers together, whatever happens, in whatever order.

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

/// The last two are not known beforehand.
const NAMES: [&str; 6] = ["a", "b", "c", "letters", "x", "y"];

#[derive(Clone, Debug)]
enum Step {
    Failed(Cause, usize),
    TransportFailed,
    Confirmed(usize),
    Due,
    Answer(usize, Result<(), Cause>),
    Wait(u64),
}

fn causes() -> impl Strategy<Value = Cause> {
    proptest::sample::select(Cause::ALL.to_vec())
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let name = 0..NAMES.len();
    let answer = prop_oneof![2 => Just(Ok(())), 1 => causes().prop_map(Err)];
    let step = prop_oneof![
        8 => (causes(), name.clone()).prop_map(|(cause, name)| Step::Failed(cause, name)),
        1 => Just(Step::TransportFailed),
        2 => name.prop_map(Step::Confirmed),
        5 => Just(Step::Due),
        8 => (any::<usize>(), answer).prop_map(|(which, answer)| Step::Answer(which, answer)),
        3 => (0..8_000_u64).prop_map(Step::Wait),
    ];
    proptest::collection::vec(step, 0..100)
}

struct World {
    circuits: Circuits,
    open_ended: bool,
    now: Instant,
    /// Probes that are not answered.
    under_way: Vec<Circuit>,
}

impl World {
    fn new(open_ended: bool) -> Self {
        let now = Instant::now();
        let primary = NAMES[..3].iter().map(|name| Arc::from(*name)).collect();
        Self {
            circuits: Circuits::new(2, primary, vec!["letters".into()], open_ended, now),
            open_ended,
            now,
            under_way: Vec::new(),
        }
    }

    /// Which of the breakers are closed, the connection's under no name.
    fn closed(&self) -> BTreeSet<&str> {
        let connection = self.circuits.connection.state() == &State::Closed;
        let closed = self.circuits.destinations.iter();
        closed
            .filter(|(_, gate)| gate.breaker.state() == &State::Closed)
            .map(|(name, _)| &**name)
            .chain(connection.then_some(""))
            .collect()
    }

    fn step(&mut self, step: &Step) {
        let before: BTreeSet<String> = self.closed().into_iter().map(str::to_owned).collect();
        match step {
            Step::Failed(cause, name) => self.fail(*cause, NAMES[*name], &before),
            Step::TransportFailed => {
                let opened = self.circuits.transport_failed("lost", self.now);
                assert_eq!(opened, before.contains(""));
            }
            Step::Confirmed(name) => self.circuits.confirmed(&[NAMES[*name].into()]),
            Step::Due => self.ask(),
            Step::Answer(which, answer) => {
                if !self.under_way.is_empty() {
                    let circuit = self.under_way.swap_remove(which % self.under_way.len());
                    let well = answer.is_ok();
                    let answer = answer.map_err(|cause| SinkError::new(cause, "probe"));
                    assert_eq!(self.circuits.probed(&circuit, answer, self.now), well);
                }
            }
            Step::Wait(milliseconds) => self.now += Duration::from_millis(*milliseconds),
        }
        self.check();
    }

    /// Only what the failure speaks for may open by it.
    fn fail(&mut self, cause: Cause, name: &str, before: &BTreeSet<String>) {
        let blame = decide(cause).1;
        let error = SinkError::new(cause, "failed");
        let opened = self.circuits.failed(blame, &name.into(), &error, self.now);
        let blamed = match blame {
            Blame::Event => None,
            Blame::Connection => Some(""),
            Blame::Destination | Blame::DestinationForSure => Some(name),
        };
        let after = self.closed();
        for was_closed in before {
            let is_closed = after.contains(was_closed.as_str());
            assert!(
                is_closed || blamed == Some(was_closed),
                "{was_closed} by {cause:?}"
            );
        }
        match opened {
            Some(Circuit::Connection) => assert_eq!(blamed, Some("")),
            Some(Circuit::Destination(opened)) => assert_eq!(blamed, Some(&*opened)),
            None => {}
        }
        if blame == Blame::DestinationForSure {
            assert!(!after.contains(name), "it leaves no doubt");
        }
    }

    fn ask(&mut self) {
        let connected = self.circuits.connection.state() == &State::Closed;
        let due = self.circuits.due(self.now);
        for circuit in &due {
            assert_eq!(
                connected,
                *circuit != Circuit::Connection,
                "the connection first"
            );
            assert!(
                !self.under_way.contains(circuit),
                "asked twice: {circuit:?}"
            );
        }
        self.under_way.extend(due);
        let destinations = self.under_way.iter();
        let destinations = destinations.filter(|circuit| **circuit != Circuit::Connection);
        assert!(destinations.count() <= PROBES_AT_ONCE);
    }

    fn check(&self) {
        let closed = self.closed();
        let somewhere = self.open_ended || NAMES[..3].iter().any(|name| closed.contains(name));
        let delivering = self.circuits.delivering() == Delivering::Yes;
        assert_eq!(delivering, closed.contains("") && somewhere);
        for name in NAMES {
            let known = self.circuits.destinations.contains_key(name);
            if self.circuits.down(name).is_some() {
                assert!(known && !closed.contains(name), "{name}");
            }
        }
    }

    /// All is well from here on: whatever is asked is answered so.
    fn recover(&mut self) {
        for _ in 0..100 {
            for circuit in std::mem::take(&mut self.under_way) {
                assert!(self.circuits.probed(&circuit, Ok(()), self.now));
            }
            self.now = self.circuits.next_probe().unwrap_or(self.now);
            self.ask();
            if self.under_way.is_empty() {
                break;
            }
        }
        assert_eq!(self.circuits.delivering(), Delivering::Yes);
        assert_eq!(self.circuits.next_probe(), None, "nothing is left to ask");
        assert_eq!(self.circuits.destinations_down().count(), 0);
    }
}

#[test]
fn a_failure_opens_what_it_speaks_for_alone_and_once_all_is_well_everything_flows() {
    let inputs = (any::<bool>(), steps());
    crate::properties::hold(&inputs, |(open_ended, steps)| {
        let mut world = World::new(open_ended);
        for step in &steps {
            world.step(step);
        }
        world.recover();
    });
}
