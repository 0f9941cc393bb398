//! What holds of a breaker whatever happens, in whatever order.

use proptest::prelude::*;

use super::*;
use crate::properties;

#[derive(Clone, Debug)]
enum Step {
    Confirmed,
    Failed,
    Open,
    Probe,
    Answer(bool),
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        2 => Just(Step::Confirmed),
        6 => Just(Step::Failed),
        1 => Just(Step::Open),
        3 => Just(Step::Probe),
        3 => any::<bool>().prop_map(Step::Answer),
        3 => (0..8_000_u64).prop_map(Step::Wait),
    ];
    proptest::collection::vec(step, 0..80)
}

/// The breaker beside the little that has to be known to foretell it.
struct Watched {
    breaker: Breaker,
    stop_after: u32,
    now: Instant,
    in_a_row: u32,
}

impl Watched {
    fn opened(&self) -> bool {
        self.breaker.state() != &State::Closed
    }

    fn step(&mut self, step: &Step) {
        let (before, now) = (self.breaker.state().clone(), self.now);
        match step {
            Step::Confirmed => {
                self.breaker.confirmed();
                self.in_a_row = 0;
                assert_eq!(self.breaker.state(), &before, "a confirm is no probe");
            }
            Step::Failed => {
                self.in_a_row += 1;
                let opens = before == State::Closed && self.in_a_row >= self.stop_after;
                assert_eq!(self.breaker.failed("failed", now), opens);
                assert!(opens || self.breaker.state() == &before);
            }
            Step::Open => {
                assert_eq!(self.breaker.open("told", now), before == State::Closed);
                assert!(before == State::Closed || self.breaker.state() == &before);
            }
            Step::Probe => {
                let due = matches!(before, State::Open { until } if until <= now);
                assert_eq!(self.breaker.probe(now), due);
                let after = if due { &State::HalfOpen } else { &before };
                assert_eq!(self.breaker.state(), after);
            }
            // Nobody answers what was not asked.
            Step::Answer(_) if before != State::HalfOpen => {}
            Step::Answer(well) => {
                let answer = if *well { Ok(()) } else { Err("probe") };
                assert_eq!(self.breaker.probed(answer, now), *well);
                assert_eq!(self.opened(), !well);
                if *well {
                    self.in_a_row = 0;
                }
            }
            Step::Wait(milliseconds) => self.now += Duration::from_millis(*milliseconds),
        }
        self.check(&before);
    }

    fn check(&self, before: &State) {
        assert_eq!(self.breaker.reason().is_some(), self.opened());
        let State::Open { until } = self.breaker.state() else {
            return;
        };
        if before != self.breaker.state() {
            let pause = *until - self.now;
            assert!(pause >= FIRST_PAUSE.mul_f64(0.89), "a storm: {pause:?}");
            assert!(pause <= LONGEST_PAUSE.mul_f64(1.11), "too long: {pause:?}");
        }
    }
}

#[test]
fn it_opens_by_failures_in_a_row_alone_and_closes_by_a_probe_alone() {
    let inputs = (1..6_u32, any::<bool>(), steps());
    properties::hold(&inputs, |(stop_after, closed, steps)| {
        let now = Instant::now();
        let breaker = if closed {
            Breaker::closed(stop_after, now)
        } else {
            Breaker::new(stop_after, now)
        };
        let mut watched = Watched {
            breaker,
            stop_after,
            now,
            in_a_row: 0,
        };
        for step in &steps {
            watched.step(step);
        }
    });
}
