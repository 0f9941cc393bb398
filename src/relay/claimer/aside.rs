//! Bringing back what was set aside: promotion of what has become due, and the sweep. What they are for is
//! written in [`crate::store`].

use std::rc::Rc;
use std::time::{Duration, Instant};

use actix::prelude::*;

use super::Claimer;
use super::claiming::LOCKED_PAUSE;
use crate::relay::listener::Hearing;
use crate::store::{Promoted, Session, SweepRequest};

/// Between laps of the sweep while rings are heard: a backstop for those that were not.
const LAP: Duration = Duration::from_secs(60);

impl Claimer {
    /// Parked events of these buckets may go by now; bit 0 stands for bucket 0.
    pub(super) fn freed(&mut self, buckets: u64) {
        self.sweep.freed(buckets);
    }

    /// What a claim says of rows set aside.
    pub(super) fn met_aside(&mut self, stuck: &[u8], due_in: Option<Duration>) {
        let now = Instant::now();
        for bucket in stuck {
            self.sweep.missed(*bucket, now);
        }
        match due_in {
            None => {}
            Some(Duration::ZERO) => {
                self.promote_due |= self.promote_after.is_none_or(|after| after <= now);
            }
            Some(wait) => self.due_within(wait),
        }
    }

    /// Nobody may have rung for what was freed.
    pub(super) fn begin_lap(&mut self, now: Instant) {
        self.sweep.lap();
        let hears = *self.links.hearing.borrow() == Hearing::Hears;
        self.lap_at = now
            + if hears {
                LAP
            } else {
                self.settings.tick.min(LAP)
            };
    }

    /// Takes one step of it, if there is one to take.
    pub(super) fn bring_back(
        &mut self,
        session: &Rc<Session>,
        context: &mut Context<Self>,
    ) -> bool {
        if std::mem::take(&mut self.promote_due) {
            self.promote(session.clone(), context);
        } else if let Some(request) = self.sweep.next(Instant::now()) {
            self.sweep(session.clone(), request, context);
        } else {
            return false;
        }
        true
    }

    fn promote(&mut self, session: Rc<Session>, context: &mut Context<Self>) {
        self.run_or(
            context,
            async move { session.promote().await },
            |actor, promoted| actor.promoted(promoted),
            |actor| actor.promote_due = true,
        );
    }

    fn promoted(&mut self, promoted: Promoted) {
        if promoted.rows > 0 {
            self.rounds.wake();
        }
        self.promote_after = None;
        if promoted.more && promoted.rows > 0 {
            self.promote_due = true;
        } else if promoted.more {
            // All that are left are locked.
            self.promote_after = Some(Instant::now() + LOCKED_PAUSE);
            self.due_within(LOCKED_PAUSE);
        }
        if let Some(wait) = promoted.due_in {
            self.due_within(wait);
        }
    }

    fn sweep(&mut self, session: Rc<Session>, request: SweepRequest, context: &mut Context<Self>) {
        let began = Instant::now();
        let asked = request.clone();
        self.run(
            context,
            async move { session.sweep(&asked).await },
            move |actor, answer| {
                actor
                    .sweep
                    .swept(&request, &answer, began.elapsed(), Instant::now());
                if answer.freed > 0 {
                    tracing::debug!(aggregates = answer.freed, "freed what was parked");
                    // Of those that are not due yet the time to wait is learnt from the claim.
                    actor.rounds.wake();
                }
            },
        );
    }
}
