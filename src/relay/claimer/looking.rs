//! When to look for events nobody rang for, and up to which id under strict order.

use std::rc::Rc;
use std::time::Instant;

use actix::prelude::*;

use super::Claimer;
use crate::relay::doorbell::{AWAKE, Step};
use crate::relay::horizon::{self, Horizon};
use crate::store::{Drawn, Quiet, Session};

impl Claimer {
    /// There may be events beyond the horizon.
    pub(super) fn widen(&mut self) {
        if let Some(horizon) = &mut self.horizon {
            horizon.want();
        }
    }

    pub(super) fn look_at_the_horizon(
        &mut self,
        session: Rc<Session>,
        step: horizon::Step,
        context: &mut Context<Self>,
    ) {
        match step {
            horizon::Step::List => self.run_or(
                context,
                async move { session.drawn().await },
                |actor, drawn: Drawn| {
                    let now = Instant::now();
                    if let Some(horizon) = &mut actor.horizon
                        && horizon.listed(drawn.last, drawn.writers, now)
                    {
                        actor.rounds.wake();
                    }
                },
                |actor| {
                    if let Some(horizon) = &mut actor.horizon {
                        horizon.not_listed();
                    }
                },
            ),
            horizon::Step::Check(writers) => self.run(
                context,
                async move { session.writers(Some(&writers)).await },
                |actor, open| {
                    if let Some(horizon) = &mut actor.horizon
                        && horizon.checked(&open, Instant::now())
                    {
                        actor.rounds.wake();
                    }
                },
            ),
        }
    }

    pub(super) fn stay_awake(&mut self, session: Rc<Session>, context: &mut Context<Self>) {
        self.run(
            context,
            async move { session.stay_awake(AWAKE).await },
            |actor, _: ()| actor.doorbell.pushed(Instant::now()),
        );
    }

    pub(super) fn minds_the_doorbell(&self) -> bool {
        !self.settings.once
            && self.rounds.is_walked()
            && self.horizon.as_ref().is_none_or(Horizon::is_settled)
    }

    /// All that can be seen was claimed: what is still owed to writers that did not ring?
    pub(super) fn mind_the_doorbell(&mut self, session: Rc<Session>, context: &mut Context<Self>) {
        match self.doorbell.step(Instant::now()) {
            None => {}
            Some(Step::Look) => {
                self.widen();
                self.rounds.wake();
                if let Some(request) = self.next_claim() {
                    self.claim(session, request, context);
                }
            }
            Some(Step::List { ours }) => self.run(
                context,
                async move { session.quiet(ours).await },
                |actor, quiet: Quiet| {
                    let now = Instant::now();
                    actor.doorbell.listed(quiet.kept_awake, quiet.writers, now);
                    actor.widen();
                    actor.rounds.wake();
                },
            ),
            Some(Step::Count) => self.run(
                context,
                async move { session.writers(None).await },
                |actor, writers| actor.doorbell.counted(writers.len()),
            ),
            Some(Step::Check(writers)) => self.run(
                context,
                async move { session.writers(Some(&writers)).await },
                |actor, open| {
                    if actor.doorbell.checked(open, Instant::now()) {
                        actor.widen();
                        actor.rounds.wake();
                    }
                },
            ),
        }
    }
}
