//! The breakers' probes, and what follows from their answers: whether anything is claimed.

use std::sync::Arc;
use std::time::Instant;

use actix::prelude::*;

use super::Supervisor;
use crate::metrics;
use crate::relay::breaker::State;
use crate::relay::circuits::{Circuit, Delivering};
use crate::relay::claimer::Ready;
use crate::sink::SinkError;

/// What a breaker says that has never been asked.
const NOT_ASKED: &str = "not connected yet";

impl Supervisor {
    /// Makes the probes that are due, and arms the timer for the next ones.
    pub(super) fn probe(&mut self, context: &mut Context<Self>) {
        if self.ending {
            return;
        }
        for circuit in self.circuits.due(Instant::now()) {
            let sink = self.plan.sink.clone();
            let asked = circuit.clone();
            let probed = async move {
                match &asked {
                    Circuit::Connection => sink.probe().await,
                    Circuit::Destination(name) => sink.probe_destination(name).await.map(drop),
                }
            };
            context.spawn(probed.into_actor(self).map(move |answer, actor, context| {
                actor.probed(&circuit, answer, context);
            }));
        }
        self.show_breakers();
        if let Some(timer) = self.probe_timer.take() {
            context.cancel_future(timer);
        }
        if let Some(at) = self.circuits.next_probe() {
            let wait = at.saturating_duration_since(Instant::now());
            self.probe_timer = Some(context.run_later(wait, Self::probe));
        }
    }

    pub(super) fn probed(
        &mut self,
        circuit: &Circuit,
        answer: Result<(), SinkError>,
        context: &mut Context<Self>,
    ) {
        let before = match circuit {
            Circuit::Connection => self.circuits.connection().reason().map(str::to_owned),
            Circuit::Destination(name) => self.circuits.down(name).map(|(error, _)| error.message),
        };
        let reason = answer.as_ref().err().map(|error| error.message.clone());
        let closed = self.circuits.probed(circuit, answer, Instant::now());
        if closed {
            self.breaker_closed(circuit, context);
        } else {
            self.breaker_open(circuit, context);
        }
        match circuit {
            Circuit::Connection => {}
            Circuit::Destination(name) => {
                if closed && before.is_some() {
                    tracing::info!(
                        destination = &**name,
                        "breaker closed, delivering to it again"
                    );
                } else if !closed && before != reason {
                    tracing::error!(destination = &**name, reason, "destination takes no events");
                }
                self.tell_destination(name);
            }
        }
        self.delivering_changed(context);
        self.probe(context);
    }

    pub(super) fn tell_destination(&self, name: &Arc<str>) {
        if let Some(generation) = &self.generation {
            generation.tell_destination(name, self.circuits.down(name).as_ref());
        }
    }

    pub(super) fn opened(&mut self, circuit: &Circuit, context: &mut Context<Self>) {
        self.breaker_open(circuit, context);
        match circuit {
            Circuit::Connection => {
                let reason = self.circuits.connection().reason();
                tracing::error!(reason, "breaker open, nothing is sent");
            }
            Circuit::Destination(name) => {
                let reason = self.circuits.down(name).map(|(error, _)| error.message);
                tracing::error!(
                    destination = &**name,
                    reason,
                    "breaker open, nothing is sent to it"
                );
                self.tell_destination(name);
            }
        }
        self.delivering_changed(context);
        self.probe(context);
    }

    /// Lets the claimer claim exactly while something can be delivered.
    pub(super) fn delivering_changed(&mut self, context: &mut Context<Self>) {
        match self.circuits.delivering() {
            Delivering::Unknown => {}
            Delivering::Yes if self.ready => {}
            Delivering::Yes => {
                self.ready = true;
                self.delivered = true;
                self.not_ready = None;
                tracing::info!(sink = self.plan.sink.name(), "breaker closed, delivering");
                if let Some(generation) = &self.generation {
                    generation.claimer.try_send(Ready(true)).ok();
                }
            }
            Delivering::No(reason) => {
                if std::mem::replace(&mut self.ready, false)
                    && let Some(generation) = &self.generation
                {
                    generation.claimer.try_send(Ready(false)).ok();
                    generation.give_back();
                }
                if self.connection_was_asked() {
                    self.not_delivering(reason, context);
                }
            }
        }
    }

    /// Before the first probe was answered there is nothing to say.
    pub(super) fn connection_was_asked(&self) -> bool {
        self.delivered || self.circuits.connection().reason() != Some(NOT_ASKED)
    }

    pub(super) fn not_delivering(&mut self, reason: String, context: &mut Context<Self>) {
        if self.not_ready.as_deref() != Some(&reason) {
            tracing::error!(reason, "not ready to publish, nothing is claimed");
            self.not_ready = Some(reason.clone());
        }
        if self.plan.once && !self.ending {
            // One pass does not wait for a broker.
            let claimed = if self.delivered {
                "The pass was given up."
            } else {
                "Nothing was claimed."
            };
            let stop = if reason.ends_with('.') { "" } else { "." };
            self.fault = Some(format!("{reason}{stop} {claimed}"));
            self.drain(context);
        }
    }

    pub(super) fn show_breakers(&self) {
        let state = match (
            self.circuits.delivering(),
            self.circuits.connection().state(),
        ) {
            (Delivering::Yes, _) => 0.0,
            (_, State::HalfOpen) | (Delivering::Unknown, _) => 1.0,
            _ => 2.0,
        };
        ::metrics::gauge!(metrics::BREAKER_STATE).set(state);
        let down = self.circuits.destinations_down().count();
        ::metrics::gauge!(metrics::DESTINATIONS_DOWN).set(down as f64);
    }
}
