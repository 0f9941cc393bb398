//! Breaker: stops asking a broker that is in trouble, and asks again with growing pauses.
//!
//! A plain value: no I/O, no clock of its own, no actix.

use std::time::{Duration, Instant};

use backoff::ExponentialBackoff;
use backoff::backoff::Backoff as _;

/// First pause before a probe: a broker that merely restarted a connection is back at once.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause: after an outage of any length delivery resumes within seconds.
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Pauses that double from `first` to `longest`, a tenth at random, without end.
pub(crate) fn pauses(first: Duration, longest: Duration) -> ExponentialBackoff {
    ExponentialBackoff {
        current_interval: first,
        initial_interval: first,
        max_interval: longest,
        multiplier: 2.0,
        randomization_factor: 0.1,
        max_elapsed_time: None,
        ..ExponentialBackoff::default()
    }
}

/// Where a breaker stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Flowing.
    Closed,
    /// Refusing until a probe at this moment.
    Open {
        /// When to probe.
        until: Instant,
    },
    /// One probe is under way.
    HalfOpen,
}

/// The breaker of a connection or of one destination.
#[derive(Debug)]
pub struct Breaker {
    state: State,
    failures: u32,
    stop_after: u32,
    reason: String,
    pauses: ExponentialBackoff,
    closed_at: Instant,
    /// Something was confirmed, or it stayed closed for long: the last trouble is over.
    recovered: bool,
}

impl Breaker {
    /// An open breaker whose first probe is due: nothing flows until a probe has succeeded.
    pub fn new(stop_after: u32, now: Instant) -> Self {
        Self {
            state: State::Open { until: now },
            failures: 0,
            stop_after,
            reason: "not connected yet".into(),
            pauses: pauses(FIRST_PAUSE, LONGEST_PAUSE),
            closed_at: now,
            recovered: false,
        }
    }

    /// A closed breaker, of something that has worked so far.
    pub fn closed(stop_after: u32, now: Instant) -> Self {
        Self {
            state: State::Closed,
            ..Self::new(stop_after, now)
        }
    }

    /// Where it stands.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Why it is not closed.
    pub fn reason(&self) -> Option<&str> {
        (self.state != State::Closed).then_some(self.reason.as_str())
    }

    /// An event was confirmed.
    pub fn confirmed(&mut self) {
        self.failures = 0;
        self.recovered = true;
    }

    /// A failure that speaks for this breaker. True if it opened just now.
    pub fn failed(&mut self, reason: &str, now: Instant) -> bool {
        self.failures = self.failures.saturating_add(1);
        if self.state != State::Closed || self.failures < self.stop_after {
            return false;
        }
        self.open(reason, now)
    }

    /// Opens at once, whatever was counted. True if it was closed.
    pub fn open(&mut self, reason: &str, now: Instant) -> bool {
        let was_closed = self.state == State::Closed;
        reason.clone_into(&mut self.reason);
        if was_closed {
            // A destination that a probe finds but that takes no event opens it again and again.
            if self.recovered || now.duration_since(self.closed_at) > LONGEST_PAUSE {
                self.pauses.reset();
            }
            self.rest(now);
        }
        was_closed
    }

    /// A probe is sent: true exactly if one is due.
    pub fn probe(&mut self, now: Instant) -> bool {
        match self.state {
            State::Open { until } if until <= now => {
                self.state = State::HalfOpen;
                true
            }
            _ => false,
        }
    }

    /// The probe's answer. True if the breaker closed.
    pub fn probed(&mut self, answer: Result<(), &str>, now: Instant) -> bool {
        match answer {
            Ok(()) => {
                self.state = State::Closed;
                self.failures = 0;
                self.closed_at = now;
                self.recovered = false;
                true
            }
            Err(reason) => {
                reason.clone_into(&mut self.reason);
                self.rest(now);
                false
            }
        }
    }

    fn rest(&mut self, now: Instant) {
        let pause = self.pauses.next_backoff().unwrap_or(LONGEST_PAUSE);
        self.state = State::Open { until: now + pause };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closed(stop_after: u32, now: Instant) -> Breaker {
        let mut breaker = Breaker::new(stop_after, now);
        assert!(breaker.probe(now));
        assert!(breaker.probed(Ok(()), now));
        breaker
    }

    #[test]
    fn nothing_flows_before_the_first_probe_succeeded() {
        let now = Instant::now();
        let mut breaker = Breaker::new(3, now);
        assert!(breaker.reason().is_some());
        assert!(breaker.probe(now));
        assert!(!breaker.probe(now), "one probe at a time");
        assert!(!breaker.probed(Err("refused"), now));
        assert_eq!(breaker.reason(), Some("refused"));
        assert!(!breaker.probe(now), "only after a pause");
        assert!(breaker.probe(now + LONGEST_PAUSE * 2));
        assert!(breaker.probed(Ok(()), now));
        assert_eq!(breaker.state(), &State::Closed);
    }

    #[test]
    fn it_opens_after_failures_in_a_row_only() {
        let now = Instant::now();
        let mut breaker = closed(3, now);
        assert!(!breaker.failed("lost", now));
        assert!(!breaker.failed("lost", now));
        breaker.confirmed();
        assert!(!breaker.failed("lost", now));
        assert!(!breaker.failed("lost", now));
        assert!(breaker.failed("lost", now));
        assert!(!breaker.failed("lost", now), "opens once");
    }

    #[test]
    fn pauses_grow_to_a_bound_and_begin_anew_after_recovery() {
        let mut now = Instant::now();
        let mut breaker = closed(1, now);
        assert!(breaker.failed("lost", now));
        let mut last = Duration::ZERO;
        for _ in 0..20 {
            let State::Open { until } = *breaker.state() else {
                panic!("open");
            };
            last = until - now;
            assert!(last <= LONGEST_PAUSE.mul_f64(1.11));
            now = until;
            assert!(breaker.probe(now));
            breaker.probed(Err("still"), now);
        }
        assert!(last >= LONGEST_PAUSE.mul_f64(0.89));
        now += last * 2;
        assert!(breaker.probe(now));
        assert!(breaker.probed(Ok(()), now));
        breaker.confirmed();
        assert!(breaker.failed("lost", now));
        let State::Open { until } = *breaker.state() else {
            panic!("open");
        };
        assert!(until - now < FIRST_PAUSE * 2);
    }

    #[test]
    fn probes_that_succeed_while_no_event_is_taken_do_not_shorten_the_pauses() {
        let mut now = Instant::now();
        let mut breaker = closed(1, now);
        for round in 0..10 {
            assert!(breaker.failed("refused", now));
            let State::Open { until } = *breaker.state() else {
                panic!("open");
            };
            assert!(until - now > FIRST_PAUSE.mul_f64(0.89) * (1 << round.min(5)));
            now = until;
            assert!(breaker.probe(now));
            assert!(breaker.probed(Ok(()), now));
        }
        now += LONGEST_PAUSE * 2;
        assert!(breaker.failed("lost", now));
        let State::Open { until } = *breaker.state() else {
            panic!("open");
        };
        assert!(
            until - now < FIRST_PAUSE * 2,
            "it had stayed closed for long"
        );
    }
}

#[cfg(test)]
#[path = "breaker_properties.rs"]
mod properties;
