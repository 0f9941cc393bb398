//! The session: opened, tended, lost, and the tokens of others taken over on it.

use std::rc::Rc;
use std::time::{Duration, Instant};

use actix::prelude::*;
use backoff::backoff::Backoff as _;

use super::{Claimer, LONGEST_PAUSE, SessionLost, WATCH};
use crate::metrics;
use crate::relay::doorbell::Doorbell;
use crate::relay::marker::Flush;
use crate::relay::publisher::Voided;
use crate::relay::rounds::fair_share;
use crate::store::{Session, StoreError, Takeover, Tended};

/// How long a new session waits for marks under the old token, to spare repeats.
const FLUSH_BEFORE_NEW_TOKEN: Duration = Duration::from_secs(2);
/// A timer further ahead is of no use: the tick comes first.
const FARTHEST: Duration = Duration::from_secs(3600);

impl Claimer {
    pub(super) fn open(&mut self, context: &mut Context<Self>) {
        if self.opening || self.session.is_some() || self.drained.is_some() {
            return;
        }
        self.opening = true;
        let (store, marker) = (self.store.clone(), self.links.marker.clone());
        let (replica, lease) = (self.settings.replica.clone(), self.settings.lease);
        let lost = context.address().recipient();
        let flush_first = !self.old_tokens.is_empty();
        let opened = async move {
            if flush_first {
                // What was confirmed under the old token can still be marked under it.
                let _ = tokio::time::timeout(FLUSH_BEFORE_NEW_TOKEN, marker.send(Flush)).await;
            }
            let lost = move |token, reason| drop(lost.try_send(SessionLost { token, reason }));
            Session::open(&store, &replica, lease, lost).await
        };
        context.spawn(opened.into_actor(self).map(|opened, actor, context| {
            actor.opening = false;
            match opened {
                Ok(session) => {
                    tracing::info!(token = session.token().name(), "session open");
                    actor.session = Some(Rc::new(session));
                    actor.opened_at = Instant::now();
                    actor.doorbell = Doorbell::new(actor.opened_at);
                    if let Some(horizon) = &mut actor.horizon {
                        // A list that was being made went with the old session.
                        horizon.not_listed();
                    }
                    actor.well();
                    actor.tend_due = true;
                    actor.step(context);
                }
                Err(error) => {
                    actor.unwell(&error.to_string());
                    let pause = actor.reopen_pauses.next_backoff().unwrap_or(LONGEST_PAUSE);
                    context.run_later(pause, Self::open);
                    actor.answer_waiting();
                }
            }
        }));
    }

    /// The token is void: everything in hand is dropped unsent, and a new token starts.
    pub(super) fn lose(&mut self, reason: &str, context: &mut Context<Self>) {
        let Some(session) = self.session.take() else {
            return;
        };
        session.token().void();
        ::metrics::counter!(metrics::FAILED_PASSES, "step" => "claim").increment(1);
        self.trouble = Some(reason.to_owned());
        tracing::warn!(token = session.token().name(), reason, "claim token void");
        self.old_tokens.push(session.token().number());
        self.owned.clear();
        self.rounds.set_owned(&[]);
        self.sweep.set_owned(&[]);
        self.acquire = 0;
        self.dead_peers.clear();
        self.tended = None;
        ::metrics::gauge!(metrics::BUCKETS_OWNED).set(0.0);
        self.drop_void_rows();
        for publisher in &self.links.publishers {
            publisher.try_send(Voided).ok();
        }
        // A session that opens and soon fails again, for example for want of a privilege, must not be
        // tried in a tight loop.
        if self.opened_at.elapsed() > LONGEST_PAUSE * 2 {
            self.reopen_pauses.reset();
        }
        let pause = self.reopen_pauses.next_backoff().unwrap_or(LONGEST_PAUSE);
        context.run_later(pause, Self::open);
    }

    pub(super) fn well(&mut self) {
        if self.trouble.take().is_some() {
            tracing::info!("database answers again");
        }
    }

    /// Logged when the trouble is new or another one, not at every try.
    pub(super) fn unwell(&mut self, reason: &str) {
        ::metrics::counter!(metrics::FAILED_PASSES, "step" => "claim").increment(1);
        if self.trouble.as_deref() != Some(reason) {
            tracing::warn!(reason, "database trouble");
            self.trouble = Some(reason.to_owned());
        }
    }

    /// A statement failed: rest a little, or give the session up.
    pub(super) fn failed(&mut self, error: &StoreError, context: &mut Context<Self>) {
        // Lock timeout, statement timeout, serialization failure, deadlock: the session is sound.
        let passing = matches!(error, StoreError::Refused { code, .. }
            if matches!(code.as_str(), "55P03" | "57014" | "40001" | "40P01"));
        if passing {
            tracing::debug!(%error, "statement failed, trying again");
            let again = Instant::now() + self.pauses.next_backoff().unwrap_or(LONGEST_PAUSE);
            self.rest_until = Some(again);
            // If it was the heartbeat, the next one must not wait for the tick.
            self.tick_at = self.tick_at.min(again);
        } else {
            self.lose(&error.to_string(), context);
        }
    }

    pub(super) fn own(&mut self) {
        self.rounds.set_owned(&self.owned);
        self.sweep.set_owned(&self.owned);
        ::metrics::gauge!(metrics::BUCKETS_OWNED).set(self.owned.len() as f64);
    }

    pub(super) fn tend(&mut self, session: Rc<Session>, context: &mut Context<Self>) {
        self.tend_due = false;
        let ready = self.ready && self.drained.is_none();
        self.run(
            context,
            async move { session.tend(ready).await },
            move |actor, tended| {
                actor.tended(tended, ready);
            },
        );
    }

    pub(super) fn tended(&mut self, tended: Tended, ready: bool) {
        let now = Instant::now();
        self.tended_at = now;
        self.owned.clone_from(&tended.owned);
        self.own();
        self.dead_peers.clone_from(&tended.dead_peers);
        if ready {
            let share = fair_share(tended.ready_peers + 1);
            if self.rounds.kept() > share {
                self.rounds.leave_down_to(share);
            } else {
                self.rounds.stay_up_to(share);
                self.acquire = share.saturating_sub(self.rounds.kept()).min(tended.free);
            }
        } else if tended.ready_peers > 0 {
            self.rounds.leave_down_to(0);
            self.acquire = 0;
        }
        if tended.due && now >= self.backstop_at {
            self.backstop_at = now + self.settings.tick;
            self.rounds.wake();
        }
        if tended.parked && now >= self.lap_at {
            self.begin_lap(now);
        }
        if let Some(wait) = tended.kept_awake {
            self.doorbell.kept_awake(wait, now);
        }
        self.strays = tended.strays;
        if let Some(wait) = tended.next_due {
            self.due_within(wait);
        }
        let watching = tended.peers + tended.dead_peers.len() > 0
            && (tended.peers_busy || self.rounds.in_hand() > 0 || now < self.watch_until);
        let pause = if watching {
            WATCH.min(self.settings.tick)
        } else {
            self.settings.tick.min(self.settings.lease / 2)
        };
        self.tick_at = now + pause;
        self.tended = Some(tended);
    }

    pub(super) fn due_within(&mut self, wait: Duration) {
        if wait < FARTHEST {
            let due = Instant::now() + wait;
            self.due_at = Some(self.due_at.map_or(due, |earlier| earlier.min(due)));
        }
    }

    pub(super) fn take_over(
        &mut self,
        session: Rc<Session>,
        token: i32,
        own: bool,
        context: &mut Context<Self>,
    ) {
        self.run_or(
            context,
            async move { session.takeover(token, own).await },
            |actor, takeover| {
                if let Takeover::Done {
                    name,
                    buckets,
                    rows,
                    complete,
                } = takeover
                {
                    if complete {
                        ::metrics::counter!(metrics::TAKEOVERS).increment(1);
                    }
                    // Rows that somebody keeps locked are asked for again and again: not news.
                    if complete || buckets + rows > 0 {
                        tracing::warn!(
                            token = name,
                            buckets,
                            rows,
                            complete,
                            "took over a dead replica"
                        );
                    }
                    actor.rounds.wake();
                    actor.ring_due |= buckets + rows > 0;
                    // Our share of the freed buckets.
                    actor.tend_due = true;
                    if !complete {
                        // Somebody holds one of its rows locked. Its lease is ended for good, so the
                        // next look finds it among the dead, whosever it was; claims go on meanwhile.
                        actor.tend_due = false;
                        actor.tick_at = Instant::now() + WATCH;
                    }
                }
            },
            move |actor| {
                // A claim of the dead client's may still run: the server ends it within seconds.
                if own {
                    actor.old_tokens.push(token);
                }
            },
        );
    }
}
