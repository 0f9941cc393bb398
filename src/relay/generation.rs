//! A generation of actors: marker, publishers, claimer and listener, built together, sink first, and
//! brought to their end together.

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::prelude::*;
use futures_util::future::join_all;
use tokio::sync::watch;
use tokio::time::{timeout, timeout_at};

use super::claimer::{self, Abandon, Claimer, Leave};
use super::listener::{self, Hearing, Listener};
use super::marker::{Flush, Marker, Policy, ReturnTo, Totals};
use super::outcome::Outcomes;
use super::publisher::{self, GiveBack, Kill, Publisher};
use super::supervisor::{Stop, Supervisor};
use crate::config::{Config, Ordering};
use crate::route::Router;
use crate::sink::{Sink, SinkError};
use crate::store::Store;

/// Part of the grace time that is kept for marks and the release of claims.
const MOST_FOR_MARKS: Duration = Duration::from_secs(3);
/// A claimer that is being abandoned answers at once or not at all.
const ABANDON_TIMEOUT: Duration = Duration::from_millis(500);

/// What every generation is built from.
pub(super) struct Plan {
    pub(super) store: Store,
    pub(super) config: Arc<Config>,
    pub(super) replica: String,
    pub(super) once: bool,
    pub(super) sink: Arc<dyn Sink>,
    pub(super) router: Arc<Router>,
    pub(super) hearing: Arc<watch::Sender<Hearing>>,
    pub(super) totals: Arc<Totals>,
    pub(super) outcomes: Outcomes,
}

/// The actors of one generation.
pub(super) struct Generation {
    pub(super) listener: Addr<Listener>,
    pub(super) claimer: Addr<Claimer>,
    pub(super) publishers: Vec<Addr<Publisher>>,
    pub(super) marker: Addr<Marker>,
}

impl Generation {
    /// Starts the actors. Nothing is claimed before the claimer is told that it may.
    pub(super) fn build(plan: &Plan, old_tokens: Vec<i32>, supervisor: &Addr<Supervisor>) -> Self {
        let relay = &plan.config.relay;
        let policy = Policy {
            max_attempts: plan.config.retry.max_attempts,
            backoff: plan.config.retry.backoff,
        };
        let marker = Marker::new(
            plan.store.clone(),
            policy,
            plan.totals.clone(),
            plan.outcomes.clone(),
            (
                supervisor.clone().recipient(),
                supervisor.clone().recipient(),
            ),
        )
        .start();
        let links = publisher::Links {
            marker: marker.clone(),
            trouble: supervisor.clone().recipient(),
            flowing: supervisor.clone().recipient(),
            exited: supervisor.clone().recipient(),
        };
        let publishers: Vec<_> = (0..relay.partitions)
            .map(|partition| {
                let settings = publisher::Settings {
                    partition,
                    window: relay.window,
                    max_attempts: plan.config.retry.max_attempts,
                    sole_destination: plan.router.is_sole(),
                };
                Publisher::new(settings, plan.sink.clone(), links.clone()).start()
            })
            .collect();
        let settings = claimer::Settings {
            replica: plan.replica.clone(),
            lease: relay.lease,
            tick: relay.tick,
            partitions: relay.partitions,
            batch_size: relay.batch_size,
            // Twice what can be in flight: the next rows are at hand when confirms come.
            most_in_hand: relay.partitions * relay.window * 2,
            router: plan.router.clone(),
            strict: relay.ordering == Ordering::Strict,
            once: plan.once,
        };
        let links = claimer::Links {
            publishers: publishers.clone(),
            marker: marker.clone(),
            exited: supervisor.clone().recipient(),
            idle: supervisor.clone().recipient(),
            hearing: plan.hearing.subscribe(),
        };
        let claimer = Claimer::new(plan.store.clone(), settings, links, old_tokens).start();
        marker.try_send(ReturnTo(claimer.clone().recipient())).ok();
        let listener = Listener::new(
            plan.store.clone(),
            claimer.clone().recipient(),
            supervisor.clone().recipient(),
            plan.hearing.clone(),
            relay.wake,
        )
        .start();
        Self {
            listener,
            claimer,
            publishers,
            marker,
        }
    }

    /// Tells the publishers that a destination's breaker has opened or closed.
    pub(super) fn tell_destination(&self, name: &Arc<str>, down: Option<&(SinkError, Instant)>) {
        for publisher in &self.publishers {
            let destination = publisher::Destination {
                name: name.clone(),
                down: down.cloned(),
            };
            publisher.try_send(destination).ok();
        }
    }

    /// Has the publishers hand back what was not sent.
    pub(super) fn give_back(&self) {
        for publisher in &self.publishers {
            publisher.try_send(GiveBack).ok();
        }
    }

    /// Gives the generation up; answers the tokens that the next one should take over.
    pub(super) async fn abandon(self) -> Vec<i32> {
        let tokens = timeout(ABANDON_TIMEOUT, self.claimer.send(Abandon)).await;
        self.listener.try_send(listener::Drain).ok();
        for publisher in &self.publishers {
            publisher.try_send(Stop).ok();
        }
        self.marker.try_send(Stop).ok();
        // A claimer that died left its session to end with it; the lock it held is gone then.
        tokens.ok().and_then(Result::ok).unwrap_or_default()
    }

    /// The orderly end, in flow order; answers which events were still unconfirmed.
    pub(super) async fn drain(self, grace: Duration) -> Vec<String> {
        let deadline = tokio::time::Instant::now() + grace;
        let publish_deadline = deadline - MOST_FOR_MARKS.min(grace / 4);
        self.listener.try_send(listener::Drain).ok();
        let _ = timeout_at(publish_deadline, self.claimer.send(claimer::Drain)).await;
        let publishers = self
            .publishers
            .iter()
            .map(|publisher| publisher.send(publisher::Drain));
        let _ = timeout_at(publish_deadline, join_all(publishers)).await;
        let mut unconfirmed = Vec::new();
        for publisher in &self.publishers {
            unconfirmed.extend(publisher.send(Kill).await.unwrap_or_default());
        }
        for event in &unconfirmed {
            tracing::warn!(
                event,
                "its confirm was outstanding at the stop: a duplicate is possible"
            );
        }
        if timeout_at(deadline, self.marker.send(Flush)).await.is_err() {
            tracing::warn!(
                "not everything could be recorded within the grace time: its rows wait for the lease"
            );
        }
        let _ = timeout_at(deadline, self.claimer.send(Leave)).await;
        let _ = timeout(ABANDON_TIMEOUT, self.claimer.send(Abandon)).await;
        self.marker.try_send(Stop).ok();
        unconfirmed
    }
}
