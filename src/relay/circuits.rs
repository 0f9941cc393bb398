//! The breakers of a relay: one for the connection, one for each destination in trouble. Where there are several
//! sinks, each is a destination, too, that stands for all of those whose names begin with its own.
//!
//! A plain value: no I/O, no clock of its own, no actix.
//!
//! Invariants:
//! - Nothing may be delivered while the connection's breaker is not closed, nor before one of the
//!   destinations known beforehand has answered well.
//! - A destination's trouble says nothing of another destination, nor of the connection.
//! - While one of several sinks is in trouble, nothing is asked of the destinations behind it.
//! - A destination that depends on the event is known here only while it is in trouble.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::breaker::{Breaker, State};
use super::failure::{Blame, Cause, decide};
use crate::sink::SinkError;

/// Destinations asked at the same time: a thousand that are missing must not become a storm.
const PROBES_AT_ONCE: usize = 4;

/// What a breaker stands for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Circuit {
    /// The connection to the broker.
    Connection,
    /// This destination.
    Destination(Arc<str>),
}

/// Can anything be delivered?
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delivering {
    /// Something can.
    Yes,
    /// Not all that could say so has answered yet.
    Unknown,
    /// Nothing can, for this reason.
    No(String),
}

#[derive(Debug)]
struct Gate {
    breaker: Breaker,
    /// Known beforehand, and events (not only copies of dead ones) go there.
    primary: bool,
    /// Known beforehand.
    fixed: bool,
    /// It has been asked.
    answered: bool,
    error: SinkError,
    /// When it opened.
    since: Instant,
}

/// See the module's head.
#[derive(Debug)]
pub struct Circuits {
    connection: Breaker,
    destinations: BTreeMap<Arc<str>, Gate>,
    /// Names of sinks, where there are several.
    sinks: Vec<Arc<str>>,
    /// Some events go to destinations that depend on them.
    open_ended: bool,
    stop_after: u32,
}

impl Circuits {
    /// Nothing is known to work yet; all probes are due. `primary`: where events go, `letters`:
    /// where copies of dead ones go.
    pub fn new(
        stop_after: u32,
        primary: Vec<Arc<str>>,
        letters: Vec<Arc<str>>,
        open_ended: bool,
        now: Instant,
    ) -> Self {
        let mut circuits = Self {
            connection: Breaker::new(stop_after, now),
            destinations: BTreeMap::new(),
            sinks: Vec::new(),
            open_ended,
            stop_after,
        };
        for name in letters {
            circuits.know(name, false, now);
        }
        for name in primary {
            circuits.know(name, true, now);
        }
        circuits
    }

    /// The same for several sinks of these names.
    #[must_use]
    pub fn of_sinks(mut self, sinks: Vec<Arc<str>>, now: Instant) -> Self {
        for name in &sinks {
            self.know(name.clone(), false, now);
        }
        self.sinks = sinks;
        self
    }

    fn know(&mut self, name: Arc<str>, primary: bool, now: Instant) {
        let gate = Gate {
            breaker: Breaker::new(self.stop_after, now),
            primary,
            fixed: true,
            answered: false,
            error: SinkError::new(Cause::Unreachable, "not asked yet"),
            since: now,
        };
        self.destinations.insert(name, gate);
    }

    /// Is this the name of one of several sinks?
    pub fn is_sink(&self, name: &str) -> bool {
        self.sinks.iter().any(|sink| **sink == *name)
    }

    /// The sink in trouble that this destination is behind.
    fn sink_down(&self, name: &str) -> Option<&Gate> {
        let (sink, _) = name.split_once(':')?;
        let gate = self.destinations.get(sink).filter(|_| self.is_sink(sink))?;
        (gate.breaker.state() != &State::Closed).then_some(gate)
    }

    /// A failure that speaks for a breaker. Answers which one opened by it.
    pub fn failed(
        &mut self,
        blame: Blame,
        destination: &Arc<str>,
        error: &SinkError,
        now: Instant,
    ) -> Option<Circuit> {
        match blame {
            Blame::Event => None,
            Blame::Connection => self
                .connection
                .failed(&error.message, now)
                .then_some(Circuit::Connection),
            Blame::Destination | Blame::DestinationForSure => {
                let gate = self.gate(destination, error, now);
                let opened = if blame == Blame::DestinationForSure {
                    gate.breaker.open(&error.message, now)
                } else {
                    gate.breaker.failed(&error.message, now)
                };
                if opened {
                    gate.error = error.clone();
                    gate.since = now;
                }
                opened.then(|| Circuit::Destination(destination.clone()))
            }
        }
    }

    fn gate(&mut self, destination: &Arc<str>, error: &SinkError, now: Instant) -> &mut Gate {
        self.destinations
            .entry(destination.clone())
            .or_insert_with(|| Gate {
                breaker: Breaker::closed(self.stop_after, now),
                primary: false,
                fixed: false,
                answered: true,
                error: error.clone(),
                since: now,
            })
    }

    /// The transport says that it is down or blocked. True if the connection's breaker opened.
    pub fn transport_failed(&mut self, reason: &str, now: Instant) -> bool {
        self.connection.open(reason, now)
    }

    /// Events were confirmed at these destinations.
    pub fn confirmed(&mut self, destinations: &[Arc<str>]) {
        self.connection.confirmed();
        for name in destinations {
            let Some(gate) = self.destinations.get_mut(name) else {
                continue;
            };
            gate.breaker.confirmed();
            if !gate.fixed && gate.breaker.state() == &State::Closed {
                self.destinations.remove(name);
            }
        }
    }

    /// The probes to make now; each must be answered by [`Self::probed`].
    pub fn due(&mut self, now: Instant) -> Vec<Circuit> {
        if self.connection.probe(now) {
            return vec![Circuit::Connection];
        }
        if self.connection.state() != &State::Closed {
            return Vec::new();
        }
        let under_way = self
            .destinations
            .values()
            .filter(|gate| gate.breaker.state() == &State::HalfOpen)
            .count();
        let within_reach: Vec<_> = self
            .destinations
            .keys()
            .filter(|name| self.sink_down(name).is_none())
            .cloned()
            .collect();
        let mut ask = |name: &Arc<str>| {
            let gate = self.destinations.get_mut(name);
            gate.is_some_and(|gate| gate.breaker.probe(now))
        };
        within_reach
            .into_iter()
            .filter(|name| ask(name))
            .take(PROBES_AT_ONCE.saturating_sub(under_way))
            .map(Circuit::Destination)
            .collect()
    }

    /// When the next probe falls due, unless one that is under way has to be answered first.
    pub fn next_probe(&self) -> Option<Instant> {
        let until = |breaker: &Breaker| match breaker.state() {
            State::Open { until } => Some(*until),
            _ => None,
        };
        if self.connection.state() != &State::Closed {
            return until(&self.connection);
        }
        let under_way = self
            .destinations
            .values()
            .filter(|gate| gate.breaker.state() == &State::HalfOpen)
            .count();
        if under_way >= PROBES_AT_ONCE {
            return None;
        }
        self.destinations
            .iter()
            .filter(|(name, _)| self.sink_down(name).is_none())
            .filter_map(|(_, gate)| until(&gate.breaker))
            .min()
    }

    /// A probe's answer. True if the breaker closed.
    pub fn probed(
        &mut self,
        circuit: &Circuit,
        answer: Result<(), SinkError>,
        now: Instant,
    ) -> bool {
        let told = answer.as_ref().map_err(|error| error.message.as_str());
        match circuit {
            Circuit::Connection => self.connection.probed(told.copied(), now),
            Circuit::Destination(name) => {
                let is_sink = self.is_sink(name);
                let Some(gate) = self.destinations.get_mut(name) else {
                    return false;
                };
                let closed = gate.breaker.probed(told.copied(), now);
                match answer {
                    Ok(()) => gate.answered = true,
                    // The connection was lost meanwhile: that says nothing of the destination.
                    Err(error) if decide(error.cause).1 == Blame::Connection => {}
                    Err(error) if error.cause == Cause::SinkDown && !is_sink => {}
                    Err(error) => {
                        gate.answered = true;
                        gate.error = error;
                    }
                }
                closed
            }
        }
    }

    /// Can anything be delivered?
    pub fn delivering(&self) -> Delivering {
        if let Some(reason) = self.connection.reason() {
            return Delivering::No(reason.to_owned());
        }
        let mut primary = self
            .destinations
            .iter()
            .filter(|(_, gate)| gate.primary)
            .map(|(name, gate)| self.sink_down(name).unwrap_or(gate));
        let is_closed = |gate: &Gate| gate.breaker.state() == &State::Closed;
        if self.open_ended || primary.clone().any(is_closed) {
            return Delivering::Yes;
        }
        if primary.clone().any(|gate| !gate.answered) {
            return Delivering::Unknown;
        }
        let reason = primary
            .next()
            .map_or("no route", |gate| &gate.error.message);
        Delivering::No(reason.to_owned())
    }

    /// The connection's breaker.
    pub fn connection(&self) -> &Breaker {
        &self.connection
    }

    /// Why nothing may be sent to this destination, and since when.
    pub fn down(&self, name: &str) -> Option<(SinkError, Instant)> {
        let gate = self.destinations.get(name)?;
        let is_down = gate.breaker.state() != &State::Closed && gate.answered;
        is_down.then(|| (gate.error.clone(), gate.since))
    }

    /// Why a destination takes no events.
    pub fn reason(&self, name: &str) -> Option<&str> {
        let gate = self.destinations.get(name)?;
        (gate.breaker.state() != &State::Closed).then_some(gate.error.message.as_str())
    }

    /// Destinations whose breaker is not closed, with their state and reason.
    pub fn destinations_down(&self) -> impl Iterator<Item = (&Arc<str>, &State, &SinkError)> {
        self.destinations
            .iter()
            .filter(|(_, gate)| gate.breaker.state() != &State::Closed && gate.answered)
            .map(|(name, gate)| (name, gate.breaker.state(), &gate.error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn name(text: &str) -> Arc<str> {
        text.into()
    }

    fn destination(text: &str) -> Circuit {
        Circuit::Destination(name(text))
    }

    fn missing() -> SinkError {
        SinkError::new(Cause::DestinationMissing, "it does not exist")
    }

    fn circuits(primary: &[&str], open_ended: bool, now: Instant) -> Circuits {
        let primary = primary.iter().map(|text| name(text)).collect();
        Circuits::new(3, primary, vec![name("letters")], open_ended, now)
    }

    /// Everything answers well.
    fn sound(primary: &[&str], now: Instant) -> Circuits {
        let mut circuits = circuits(primary, false, now);
        loop {
            let due = circuits.due(now);
            if due.is_empty() {
                return circuits;
            }
            for circuit in due {
                assert!(circuits.probed(&circuit, Ok(()), now));
            }
        }
    }

    #[test]
    fn nothing_is_delivered_before_connection_and_a_destination_answered() {
        let now = Instant::now();
        let mut circuits = circuits(&["a", "b"], false, now);
        assert!(matches!(circuits.delivering(), Delivering::No(_)));
        assert_eq!(circuits.due(now), [Circuit::Connection]);
        assert!(circuits.due(now).is_empty(), "destinations come after it");
        assert!(circuits.probed(&Circuit::Connection, Ok(()), now));
        assert_eq!(circuits.delivering(), Delivering::Unknown);
        assert_eq!(circuits.due(now).len(), 3);
        assert!(!circuits.probed(&destination("a"), Err(missing()), now));
        assert_eq!(circuits.delivering(), Delivering::Unknown);
        assert!(!circuits.probed(&destination("b"), Err(missing()), now));
        let no = Delivering::No("it does not exist".into());
        assert_eq!(circuits.delivering(), no);
        assert!(circuits.probed(&destination("letters"), Ok(()), now));
        assert_eq!(circuits.delivering(), no, "copies are not events");
        let later = circuits.next_probe().unwrap();
        for circuit in circuits.due(later + Duration::from_secs(1)) {
            assert!(circuits.probed(&circuit, Ok(()), later));
        }
        assert_eq!(circuits.delivering(), Delivering::Yes);
    }

    #[test]
    fn a_missing_destination_opens_its_own_breaker_at_once_and_no_other() {
        let now = Instant::now();
        let mut circuits = sound(&["a", "b"], now);
        let opened = circuits.failed(Blame::DestinationForSure, &name("a"), &missing(), now);
        assert_eq!(opened, Some(destination("a")));
        assert!(circuits.down("a").is_some());
        assert!(circuits.down("b").is_none());
        assert_eq!(circuits.delivering(), Delivering::Yes);
        assert_eq!(circuits.destinations_down().count(), 1);
    }

    #[test]
    fn refusals_open_a_destinations_breaker_after_some_in_a_row() {
        let now = Instant::now();
        let mut circuits = sound(&["a"], now);
        let nacked = SinkError::new(Cause::Nacked, "full");
        let refuse =
            |circuits: &mut Circuits| circuits.failed(Blame::Destination, &name("a"), &nacked, now);
        assert_eq!(refuse(&mut circuits), None);
        assert_eq!(refuse(&mut circuits), None);
        circuits.confirmed(&[name("a")]);
        assert_eq!(refuse(&mut circuits), None);
        assert_eq!(refuse(&mut circuits), None);
        assert_eq!(refuse(&mut circuits), Some(destination("a")));
        assert_eq!(circuits.delivering(), Delivering::No("full".into()));
    }

    #[test]
    fn trouble_of_the_connection_stops_all_and_is_asked_for_first() {
        let now = Instant::now();
        let mut circuits = sound(&["a", "b"], now);
        circuits.failed(Blame::DestinationForSure, &name("a"), &missing(), now);
        assert!(circuits.transport_failed("lost", now));
        assert_eq!(circuits.delivering(), Delivering::No("lost".into()));
        let later = now + Duration::from_secs(60);
        assert_eq!(circuits.due(later), [Circuit::Connection]);
        assert!(circuits.probed(&Circuit::Connection, Ok(()), later));
        assert_eq!(circuits.due(later), [destination("a")]);
    }

    #[test]
    fn a_destination_that_depends_on_the_event_is_forgotten_once_it_is_well() {
        let now = Instant::now();
        let mut circuits = circuits(&[], true, now);
        assert_eq!(circuits.due(now), [Circuit::Connection]);
        assert!(circuits.probed(&Circuit::Connection, Ok(()), now));
        assert_eq!(circuits.delivering(), Delivering::Yes);
        circuits.failed(Blame::DestinationForSure, &name("x"), &missing(), now);
        assert!(circuits.down("x").is_some());
        let later = now + Duration::from_secs(60);
        for circuit in circuits.due(later) {
            circuits.probed(&circuit, Ok(()), later);
        }
        assert!(circuits.down("x").is_none());
        circuits.confirmed(&[name("x")]);
        assert!(!circuits.destinations.contains_key("x"));
        assert!(circuits.destinations.contains_key("letters"));
    }

    fn of_two_sinks(now: Instant) -> Circuits {
        let primary = ["kafka:a", "kafka:b", "nats:c"].map(name).to_vec();
        let sinks = ["kafka", "nats"].map(name).to_vec();
        Circuits::new(3, primary, Vec::new(), false, now).of_sinks(sinks, now)
    }

    #[test]
    fn a_sink_that_is_away_is_asked_alone_and_stops_only_what_is_behind_it() {
        let now = Instant::now();
        let mut circuits = of_two_sinks(now);
        circuits.due(now);
        assert!(circuits.probed(&Circuit::Connection, Ok(()), now));
        assert_eq!(
            circuits.due(now),
            [destination("kafka"), destination("nats")]
        );
        let away = SinkError::new(Cause::SinkDown, "away");
        assert!(!circuits.probed(&destination("kafka"), Err(away.clone()), now));
        assert!(circuits.probed(&destination("nats"), Ok(()), now));
        assert_eq!(circuits.delivering(), Delivering::Unknown);
        assert_eq!(circuits.due(now), [destination("nats:c")]);
        // It is only the sink's own next probe that is waited for.
        assert!(circuits.next_probe().unwrap() > now);
        assert!(!circuits.probed(&destination("nats:c"), Err(missing()), now));
        assert_eq!(circuits.delivering(), Delivering::No("away".into()));
        let later = now + Duration::from_secs(60);
        assert_eq!(
            circuits.due(later),
            [destination("kafka"), destination("nats:c")]
        );
        assert!(circuits.probed(&destination("nats:c"), Ok(()), later));
        assert_eq!(circuits.delivering(), Delivering::Yes);
        assert!(circuits.down("kafka").is_some());
        assert!(circuits.down("kafka:a").is_none(), "it was never asked");
        assert!(circuits.probed(&destination("kafka"), Ok(()), later));
        assert_eq!(
            circuits.due(later),
            [destination("kafka:a"), destination("kafka:b")]
        );
        assert!(!circuits.probed(&destination("kafka:a"), Err(away), later));
        assert!(circuits.down("kafka:a").is_none(), "nor did it say that");
    }

    #[test]
    fn failures_in_a_row_open_one_sinks_breaker_and_confirms_begin_them_anew() {
        let now = Instant::now();
        let mut circuits = of_two_sinks(now);
        loop {
            let due = circuits.due(now);
            if due.is_empty() {
                break;
            }
            for circuit in due {
                circuits.probed(&circuit, Ok(()), now);
            }
        }
        let silent = SinkError::new(Cause::SinkDown, "no confirm");
        let fail = |circuits: &mut Circuits| {
            circuits.failed(Blame::Destination, &name("nats"), &silent, now)
        };
        assert_eq!((fail(&mut circuits), fail(&mut circuits)), (None, None));
        circuits.confirmed(&["nats", "nats:c"].map(name));
        assert_eq!((fail(&mut circuits), fail(&mut circuits)), (None, None));
        assert_eq!(fail(&mut circuits), Some(destination("nats")));
        assert_eq!(circuits.delivering(), Delivering::Yes);
        assert_eq!(circuits.destinations_down().count(), 1);
    }

    #[test]
    fn a_colon_in_the_name_of_a_destination_means_nothing_by_itself() {
        let now = Instant::now();
        let mut circuits = sound(&["a", "a:b"], now);
        circuits.failed(Blame::DestinationForSure, &name("a"), &missing(), now);
        circuits.failed(Blame::DestinationForSure, &name("a:b"), &missing(), now);
        let later = now + Duration::from_secs(60);
        assert_eq!(circuits.due(later), [destination("a"), destination("a:b")]);
    }

    #[test]
    fn many_missing_destinations_are_asked_a_few_at_a_time() {
        let now = Instant::now();
        let mut circuits = circuits(&[], true, now);
        circuits.due(now);
        circuits.probed(&Circuit::Connection, Ok(()), now);
        for number in 0..100 {
            let name = name(&number.to_string());
            circuits.failed(Blame::DestinationForSure, &name, &missing(), now);
        }
        let later = now + Duration::from_secs(60);
        let due = circuits.due(later);
        assert_eq!(due.len(), PROBES_AT_ONCE);
        assert_eq!(circuits.next_probe(), None, "after one of them");
        assert!(circuits.due(later).is_empty());
        circuits.probed(&due[0], Err(missing()), later);
        assert_eq!(circuits.due(later).len(), 1);
    }
}

#[cfg(test)]
#[path = "circuits_properties.rs"]
mod properties;
