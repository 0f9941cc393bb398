//! What the supervisor does now and then: the lag check and pruning.

use std::time::Duration;

use actix::prelude::*;

use super::supervisor::{Died, Supervisor};
use crate::metrics;
use crate::store::{Lag, Pruned};

/// The longest time between lag checks: once a minute keeps an idle relay quiet.
const LAG_EVERY: Duration = Duration::from_secs(60);
/// The shortest one, however soon an alert is wanted.
const LAG_SOONEST: Duration = Duration::from_secs(1);
/// Between steps of a pruning that goes on: the application's writes come first.
const PRUNE_PAUSE: Duration = Duration::from_millis(500);
/// A step that takes too long is halved, down to this.
const SMALLEST_STEP: u32 = 100;

impl Supervisor {
    // ---- lag -----------------------------------------------------------------------------------

    pub(super) fn lag(&mut self, context: &mut Context<Self>) {
        let store = self.plan.store.clone();
        let looked = async move { store.lag().await };
        context.spawn(looked.into_actor(self).map(|lag, actor, context| {
            match lag {
                Ok(lag) => show_lag(&lag),
                Err(error) => tracing::debug!(%error, "lag could not be looked up"),
            }
            let every = (actor.plan.config.lag.alert / 2).clamp(LAG_SOONEST, LAG_EVERY);
            context.run_later(every, Self::lag);
        }));
    }

    // ---- dead letters ----------------------------------------------------------------------------

    pub(super) fn died(&mut self, died: Died, _: &mut Context<Self>) {
        let _ = died;
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
