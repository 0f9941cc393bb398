//! What the supervisor does beside the breakers: the lag check, pruning, and telling the people.

use std::time::{Duration, Instant};

use actix::prelude::*;

use super::{Died, Supervisor};
use crate::alert::{Alert, DeadLetter};
use crate::config::{PruneConfig, WakeSetting};
use crate::metrics;
use crate::relay::breaker::State;
use crate::relay::circuits::Circuit;
use crate::store::{Lag, Pruned, Store, StoreError};

/// The longest time between lag checks: once a minute keeps an idle relay quiet.
const LAG_EVERY: Duration = Duration::from_secs(60);
/// The shortest one, however soon an alert is wanted.
const LAG_SOONEST: Duration = Duration::from_secs(1);
/// After a check that failed: is the database away?
const LAG_AGAIN: Duration = Duration::from_secs(5);
/// Between steps of a pruning that goes on: the application's writes come first.
const PRUNE_PAUSE: Duration = Duration::from_millis(500);
/// A step that takes too long is halved, down to this.
const SMALLEST_STEP: u32 = 100;

/// How long the end of a single pass may prune: one that runs each minute has to keep up with what it
/// publishes, and has to be over before the next one.
const ONCE_PRUNING: Duration = Duration::from_secs(10);
/// After a breaker closed, until the others are asked whether theirs are: they probe this often.
const CLEAR_AFTER: Duration = Duration::from_secs(2);
/// Dead events that are looked up for their alert. More wait only in a flood, and go untold in detail.
const MOST_LOOKED_UP: usize = 20;

impl Supervisor {
    // ---- lag -----------------------------------------------------------------------------------

    pub(super) fn lag(&mut self, context: &mut Context<Self>) {
        let store = self.plan.store.clone();
        let threshold = self.plan.config.lag.alert;
        let looked = async move { check_lag(&store, threshold).await };
        context.spawn(looked.into_actor(self).map(|looked, actor, context| {
            let mut every = (actor.plan.config.lag.alert / 2).clamp(LAG_SOONEST, LAG_EVERY);
            if looked.is_err() {
                every = every.min(LAG_AGAIN);
            }
            actor.watch_database(looked.as_ref().err());
            actor.lag_checked(looked, context);
            context.run_later(every, Self::lag);
        }));
    }

    /// Each relay tells of a lost database by itself: what the fleet agrees on is kept there.
    fn watch_database(&mut self, error: Option<&StoreError>) {
        let after = self.plan.config.alerts.breaker_after;
        let news = match error {
            Some(error) => {
                self.database
                    .failed(Instant::now(), after)
                    .then(|| Alert::DatabaseLost {
                        reason: error.to_string(),
                    })
            }
            None => self
                .database
                .answered(Instant::now())
                .map(|after| Alert::DatabaseBack { after }),
        };
        if let Some(alert) = news {
            self.alerter.send(alert);
        }
    }

    fn lag_checked(&mut self, looked: Result<LagCheck, StoreError>, context: &mut Context<Self>) {
        match looked {
            Ok(LagCheck { lag, changed }) => {
                show_lag(&lag);
                self.clear_leftovers(&lag.raised, context);
                let threshold = self.plan.config.lag.alert;
                match changed {
                    Some(true) => self.alerter.send(Alert::LagBegan { lag, threshold }),
                    Some(false) => self.alerter.send(Alert::LagEnded { lag, threshold }),
                    None => {}
                }
            }
            Err(error) => tracing::debug!(%error, "lag could not be looked up"),
        }
    }

    /// The end of a single pass: what a relay that stays does by its timers is done once.
    pub(super) fn once_more(&mut self, unconfirmed: Vec<String>, context: &mut Context<Self>) {
        let store = self.plan.store.clone();
        let threshold = self.plan.config.lag.alert;
        let prune = self.plan.config.prune.clone();
        let untold = self.untold();
        let looked = async move {
            let mut letters = Vec::new();
            for died in &untold {
                letters.push(detailed(&store, died).await);
            }
            if let Err(error) = prune_for_a_while(&store, &prune).await {
                tracing::warn!(%error, "pruning failed");
            }
            (letters, check_lag(&store, threshold).await)
        };
        context.spawn(looked.into_actor(self).map(|looked, actor, context| {
            let (letters, looked) = looked;
            for letter in letters {
                actor.alerter.send(Alert::DeadLettered(letter));
            }
            actor.lag_checked(looked, context);
            actor.end(unconfirmed, None, context);
        }));
    }

    // ---- breakers ------------------------------------------------------------------------------

    /// It is not closed. The people are told if it stays so, once for all relays.
    pub(super) fn breaker_open(&mut self, circuit: &Circuit, context: &mut Context<Self>) {
        if !self.watched.contains_key(circuit) {
            let since = Instant::now();
            self.watched.insert(circuit.clone(), since);
            self.raise_later(circuit.clone(), since, context);
        }
    }

    fn raise_later(&self, circuit: Circuit, since: Instant, context: &mut Context<Self>) {
        // One pass tells of its failure by itself.
        if self.plan.once {
            return;
        }
        let after = self.plan.config.alerts.breaker_after;
        context.run_later(after, move |actor, context| {
            if actor.watched.get(&circuit) == Some(&since) {
                actor.raise(circuit, since, context);
            }
        });
    }

    fn raise(&self, circuit: Circuit, since: Instant, context: &mut Context<Self>) {
        let store = self.plan.store.clone();
        let replica = self.plan.replica.clone();
        let subject = subject(&circuit);
        let raised = async move { store.raise(&subject, &replica).await };
        context.spawn(
            raised
                .into_actor(self)
                .map(move |raised, actor, context| match raised {
                    Ok(true) => {
                        let reason = match &circuit {
                            Circuit::Connection => actor.circuits.connection().reason(),
                            Circuit::Destination(name) => actor.circuits.reason(name),
                        };
                        actor.alerter.send(Alert::BreakerOpened {
                            subject: actor.name(&circuit),
                            reason: reason.unwrap_or("it is well again by now").to_owned(),
                            handed_back: None,
                        });
                    }
                    Ok(false) => {}
                    Err(error) => {
                        tracing::debug!(%error, "an alert could not be raised, trying again");
                        actor.raise_later(circuit, since, context);
                    }
                }),
        );
    }

    /// It is closed again.
    pub(super) fn breaker_closed(&mut self, circuit: &Circuit, context: &mut Context<Self>) {
        if self.watched.remove(circuit).is_some() && !self.plan.once {
            let circuit = circuit.clone();
            context.run_later(CLEAR_AFTER, move |actor, context| {
                actor.clear(circuit, context);
            });
        }
    }

    /// Takes back the alert of a breaker, whoever raised it.
    fn clear(&self, circuit: Circuit, context: &mut Context<Self>) {
        if self.watched.contains_key(&circuit) {
            return;
        }
        let store = self.plan.store.clone();
        let subject = subject(&circuit);
        let cleared = async move { store.clear(&subject).await };
        context.spawn(cleared.into_actor(self).map(move |cleared, actor, _| {
            match cleared {
                Ok(Some(after)) => actor.alerter.send(Alert::BreakerClosed {
                    subject: actor.name(&circuit),
                    after: Some(after),
                }),
                Ok(None) => {}
                // The next lag check finds that it still stands.
                Err(error) => tracing::debug!(%error, "an alert could not be cleared"),
            }
        }));
    }

    /// Alerts that stand although our breaker is closed, for example of a relay that was killed. They are
    /// taken back only by whoever knows that all is well: a relay that has no events for a destination
    /// has to ask.
    fn clear_leftovers(&mut self, raised: &[String], context: &mut Context<Self>) {
        let well = self.circuits.connection().state() == &State::Closed;
        if self.plan.once || !well || self.asking {
            return;
        }
        let mut destinations = Vec::new();
        for circuit in raised.iter().filter_map(|subject| circuit(subject)) {
            match circuit {
                _ if self.watched.contains_key(&circuit) => {}
                Circuit::Connection => self.clear(circuit, context),
                Circuit::Destination(name) => destinations.push(name),
            }
        }
        if destinations.is_empty() {
            return;
        }
        self.asking = true;
        let sink = self.plan.sink.clone();
        let asked = async move {
            let mut well = Vec::new();
            for name in destinations {
                if sink.probe_destination(&name).await.is_ok() {
                    well.push(name);
                }
            }
            well
        };
        context.spawn(asked.into_actor(self).map(|well, actor, context| {
            actor.asking = false;
            for name in well {
                actor.clear(Circuit::Destination(name), context);
            }
        }));
    }

    /// What takes no events, for people.
    fn name(&self, circuit: &Circuit) -> String {
        match circuit {
            Circuit::Connection => format!("the broker ({})", self.plan.sink.name()),
            Circuit::Destination(name) if self.circuits.is_sink(name) => format!("sink '{name}'"),
            Circuit::Destination(name) => format!("destination '{name}'"),
        }
    }

    // ---- dead letters ----------------------------------------------------------------------------

    /// Tells the people of dead events, one after the other, beside the work.
    pub(super) fn tell_dead(&mut self, context: &mut Context<Self>) {
        while self.dead.len() > MOST_LOOKED_UP
            && let Some(died) = self.dead.pop_front()
        {
            let letter = undetailed(&died, self.plan.store.names().display());
            self.alerter.send(Alert::DeadLettered(letter));
        }
        if self.telling.is_some() {
            return;
        }
        let Some(died) = self.dead.pop_front() else {
            return;
        };
        self.telling = Some(died.clone());
        let store = self.plan.store.clone();
        let told = async move { detailed(&store, &died).await };
        context.spawn(told.into_actor(self).map(|letter, actor, context| {
            // Unless the end was quicker.
            if actor.telling.take().is_some() {
                actor.alerter.send(Alert::DeadLettered(letter));
                actor.tell_dead(context);
            }
        }));
    }

    /// Dead events that nobody was told of, which is left to the caller.
    fn untold(&mut self) -> Vec<Died> {
        self.telling
            .take()
            .into_iter()
            .chain(self.dead.drain(..))
            .collect()
    }

    /// At the end, when nothing is looked up any more.
    pub(super) fn tell_the_rest(&mut self) {
        for died in self.untold() {
            let letter = undetailed(&died, self.plan.store.names().display());
            self.alerter.send(Alert::DeadLettered(letter));
        }
    }

    // ---- wake ------------------------------------------------------------------------------------

    /// Rings for the other relays: whoever wakes one by hand does not know which one owns the event.
    /// However many ask, one ring is under way and at most one waits.
    pub(super) fn ring(&mut self, context: &mut Context<Self>) {
        if self.plan.config.relay.wake == WakeSetting::Poll {
            return;
        }
        if self.ringing {
            self.ring_again = true;
            return;
        }
        self.ringing = true;
        let store = self.plan.store.clone();
        let rung = async move { store.ring().await };
        context.spawn(rung.into_actor(self).map(|rung, actor, context| {
            actor.ringing = false;
            if let Err(error) = rung {
                tracing::debug!(%error, "the other relays could not be woken");
            }
            if std::mem::take(&mut actor.ring_again) {
                actor.ring(context);
            }
        }));
    }

    // ---- prune ---------------------------------------------------------------------------------

    pub(super) fn prune_later(&mut self, context: &mut Context<Self>) {
        let prune = &self.plan.config.prune;
        if let Some(keep) = prune.keep.0 {
            let step = prune.step;
            context.run_later(prune.every, move |actor, context| {
                actor.prune(keep, step, context);
            });
        }
    }

    fn prune(&mut self, keep: Duration, step: u32, context: &mut Context<Self>) {
        let store = self.plan.store.clone();
        let pruned = async move { store.prune(keep, step).await };
        context.spawn(pruned.into_actor(self).map(move |pruned, actor, context| {
            let next = match pruned {
                Ok(Pruned::Rows(rows)) => {
                    ::metrics::counter!(metrics::PRUNED).increment(rows);
                    if rows > 0 {
                        tracing::debug!(rows, "pruned published events");
                    }
                    (rows >= u64::from(step)).then_some(step)
                }
                Ok(Pruned::Elsewhere) => None,
                Err(error) if error.is_timeout() && step > SMALLEST_STEP => {
                    let smaller = (step / 2).max(SMALLEST_STEP);
                    tracing::warn!(%error, step, smaller, "pruning takes too long, going on in smaller steps");
                    Some(smaller)
                }
                Err(error) => {
                    tracing::warn!(%error, "pruning failed, trying again later");
                    None
                }
            };
            match next {
                Some(step) => drop(context.run_later(PRUNE_PAUSE, move |actor, context| {
                    actor.prune(keep, step, context);
                })),
                None => actor.prune_later(context),
            }
        }));
    }
}

fn show_lag(lag: &Lag) {
    ::metrics::gauge!(metrics::OLDEST_PENDING_SECONDS).set(lag.age().as_secs_f64());
    ::metrics::gauge!(metrics::PENDING).set(lag.pending as f64);
    ::metrics::gauge!(metrics::DEAD).set(lag.dead as f64);
}

struct LagCheck {
    lag: Lag,
    /// It was us who recorded that the outbox began (or ceased) to lag.
    changed: Option<bool>,
}

async fn check_lag(store: &Store, threshold: Duration) -> Result<LagCheck, StoreError> {
    let lag = store.lag().await?;
    let lagging = lag.age() >= threshold;
    let changed = lagging != lag.was_lagging && store.lag_changed(lagging).await?;
    Ok(LagCheck {
        lag,
        changed: changed.then_some(lagging),
    })
}

/// Prefix of a destination's subject in the table of alerts.
const DESTINATION: &str = "destination:";
/// Subject of the connection in the table of alerts.
const BROKER: &str = "broker";

fn subject(circuit: &Circuit) -> String {
    match circuit {
        Circuit::Connection => BROKER.to_owned(),
        Circuit::Destination(name) => format!("{DESTINATION}{name}"),
    }
}

fn circuit(subject: &str) -> Option<Circuit> {
    if subject == BROKER {
        return Some(Circuit::Connection);
    }
    let name = subject.strip_prefix(DESTINATION)?;
    Some(Circuit::Destination(name.into()))
}

/// Step by step, until nothing is left to prune or the time is over.
async fn prune_for_a_while(store: &Store, prune: &PruneConfig) -> Result<(), StoreError> {
    let Some(keep) = prune.keep.0 else {
        return Ok(());
    };
    let began = Instant::now();
    while began.elapsed() < ONCE_PRUNING
        && store.prune(keep, prune.step).await? == Pruned::Rows(prune.step.into())
    {}
    Ok(())
}

/// What the database knows of a dead event.
async fn detailed(store: &Store, died: &Died) -> DeadLetter {
    let found = store.dead_letter(died.subject.id.0).await;
    let mut letter = match found {
        Ok(Some(letter)) => letter,
        // Somebody was quicker, or the database is away: it was dead all the same.
        Ok(None) | Err(_) => undetailed(died, store.names().display()),
    };
    letter.cause = died.cause;
    letter.copied_to = died.copied_to.as_deref().map(str::to_owned);
    letter
}

/// What the relay itself knows of a dead event.
fn undetailed(died: &Died, table: String) -> DeadLetter {
    let Died { subject, .. } = died;
    DeadLetter {
        id: subject.id.0,
        aggregate_type: subject.key.aggregate_type.to_string(),
        aggregate_id: subject.key.aggregate_id.to_string(),
        event_type: subject.event_type.as_deref().unwrap_or("?").to_owned(),
        attempts: died.attempts,
        last_error: died.error.clone(),
        cause: died.cause,
        payload_bytes: None,
        held_back: None,
        held_back_capped: false,
        holds: died.holds,
        copied_to: died.copied_to.as_deref().map(str::to_owned),
        table,
    }
}
