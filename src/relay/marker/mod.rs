//! MARK: records in batches what became of claimed rows, of all partitions.
//!
//! # Role
//! The only one that writes to claimed rows after the claim. One statement at a time; confirmed ids
//! are gathered for a few milliseconds or a few hundred.
//! # Receives
//! [`Confirmed`], [`Failed`], [`Waiting`], [`HandBack`], [`Dropped`]; [`Flush`].
//! # Sends
//! `Returned` to the claimer, `Exited` to the supervisor.
//! # Invariants
//! Every row told of is returned to the claimer exactly once, after its statement committed: until
//! then nothing more of its aggregate is claimed. A failure and the hand-back of the later rows of
//! its aggregate are one statement. What a statement did not reach is either locked by somebody
//! (tried again) or no longer ours (counted, logged, returned).
//! # On failure
//! The database not answering costs a pause; nothing is forgotten.
//! # On shutdown
//! [`Flush`] is answered when nothing is left to record.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use actix::prelude::*;
use backoff::ExponentialBackoff;
use backoff::backoff::Backoff as _;
use tokio::sync::oneshot;

use super::breaker::pauses;
use super::claimer::Returned;
use super::failure::Outcome;
use super::outcome::{self, Outcomes};
use super::supervisor::{Child, Died, Exited};
use crate::metrics;
use crate::store::{Failed as Recorded, Failure, Store, StoreError};

mod messages;
mod statements;

pub use messages::{Confirmed, Dropped, Failed, Flush, HandBack, Held, ReturnTo, Waiting};
use statements::{Statement, described, reached, waited};

/// Confirmed ids per statement, at most.
const BATCH: usize = 500;
/// As many as make it worth not to wait for more.
const ENOUGH: usize = 250;
/// How long a confirmed id waits for company.
const GATHER: Duration = Duration::from_millis(2);
/// Before a row that somebody holds locked is tried again.
const LOCKED_PAUSE: Duration = Duration::from_millis(200);
/// Somebody who asks for a flush waits about so long for it: tries follow each other quickly.
const HURRY: Duration = Duration::from_secs(3);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// What a relay did since its start.
#[derive(Debug, Default)]
pub struct Totals {
    /// Events published.
    pub published: AtomicU64,
    /// Failed attempts.
    pub failed: AtomicU64,
    /// Events dead-lettered.
    pub dead: AtomicU64,
    /// Events handed back.
    pub handed_back: AtomicU64,
    /// Events that wait for their destination.
    pub waited: AtomicU64,
    /// Events published whose claim was lost before the mark.
    pub lost: AtomicU64,
}

fn count(total: &AtomicU64, metric: &'static str, by: usize) {
    total.fetch_add(by as u64, Ordering::Relaxed);
    ::metrics::counter!(metric).increment(by as u64);
}

/// How failures are recorded.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// See `retry.max_attempts`.
    pub max_attempts: u32,
    /// See `retry.backoff`.
    pub backoff: Duration,
}

enum Work {
    Fail(Failed),
    Wait(Waiting),
    Release(Vec<Held>, outcome::Result),
}

/// See the module's head.
pub struct Marker {
    store: Store,
    policy: Policy,
    totals: Arc<Totals>,
    outcomes: Outcomes,
    died: Recipient<Died>,
    claimer: Option<Recipient<Returned>>,
    exited: Recipient<Exited>,
    confirmed: VecDeque<Held>,
    confirmed_at: Option<Instant>,
    work: VecDeque<Work>,
    /// Rows that were locked, waiting for their next try.
    resting: usize,
    busy: bool,
    /// Until the next try after a failure.
    pausing: Option<SpawnHandle>,
    flush_asked: Instant,
    gathering: Option<SpawnHandle>,
    pauses: ExponentialBackoff,
    trouble: bool,
    flushing: Vec<oneshot::Sender<()>>,
    stopping: bool,
}

impl Marker {
    /// A marker with nothing to record.
    pub fn new(
        store: Store,
        policy: Policy,
        totals: Arc<Totals>,
        outcomes: Outcomes,
        (exited, died): (Recipient<Exited>, Recipient<Died>),
    ) -> Self {
        Self {
            store,
            policy,
            totals,
            outcomes,
            died,
            claimer: None,
            exited,
            confirmed: VecDeque::new(),
            confirmed_at: None,
            work: VecDeque::new(),
            resting: 0,
            busy: false,
            pausing: None,
            flush_asked: Instant::now(),
            gathering: None,
            pauses: pauses(FIRST_PAUSE, LONGEST_PAUSE),
            trouble: false,
            flushing: Vec::new(),
            stopping: false,
        }
    }

    /// Does the next thing, if nothing is under way.
    fn step(&mut self, context: &mut Context<Self>) {
        if self.busy {
            return;
        }
        if let Some(work) = self.work.pop_front() {
            match work {
                Work::Fail(failed) => self.fail(failed, context),
                Work::Wait(waiting) => self.wait(waiting, context),
                Work::Release(held, why) => self.release(held, why, context),
            }
        } else if !self.confirmed.is_empty() {
            let waited = self
                .confirmed_at
                .is_none_or(|since| since.elapsed() >= GATHER);
            if waited || self.confirmed.len() >= ENOUGH || !self.flushing.is_empty() {
                self.mark(context);
            } else if self.gathering.is_none() {
                self.gathering = Some(context.run_later(GATHER, |actor, context| {
                    actor.gathering = None;
                    actor.step(context);
                }));
            }
        } else if self.resting == 0 {
            for flushed in self.flushing.drain(..) {
                let _ = flushed.send(());
            }
        }
    }

    fn run<T: 'static>(
        &mut self,
        context: &mut Context<Self>,
        statement: impl Future<Output = T> + 'static,
        then: impl FnOnce(&mut Self, T, &mut Context<Self>) + 'static,
    ) {
        self.busy = true;
        context.spawn(
            statement
                .into_actor(self)
                .map(move |answer, actor, context| {
                    actor.busy = false;
                    then(actor, answer, context);
                    actor.step(context);
                }),
        );
    }

    fn mark(&mut self, context: &mut Context<Self>) {
        let held = self.take_confirmed();
        let store = self.store.clone();
        let began = Instant::now();
        let marked = async move {
            let answer = reached(&store, &held, Statement::Published).await;
            (held, answer)
        };
        self.run(
            context,
            marked,
            move |actor, (held, answer), context| match answer {
                Ok(reached) => {
                    actor.well();
                    ::metrics::histogram!(metrics::MARK_SECONDS).record(began.elapsed());
                    let (done, rest) =
                        partition(held, |held| reached.done.binary_search(&held.id()).is_ok());
                    let (locked, lost) =
                        partition(rest, |held| reached.locked.contains(&held.id()));
                    count(&actor.totals.published, metrics::PUBLISHED, done.len());
                    actor.tell(&done, &outcome::Result::Published);
                    actor.return_rows(&done, None);
                    actor.lost(&lost);
                    actor.rest(locked, context, |actor, locked| {
                        for held in locked.into_iter().rev() {
                            actor.confirmed.push_front(held);
                        }
                    });
                }
                Err(error) => {
                    for held in held.into_iter().rev() {
                        actor.confirmed.push_front(held);
                    }
                    actor.unwell(&error, context);
                }
            },
        );
    }

    /// The next batch: confirmed ids under one token.
    fn take_confirmed(&mut self) -> Vec<Held> {
        let mut batch = Vec::with_capacity(self.confirmed.len().min(BATCH));
        while batch.len() < BATCH
            && let Some(next) = self.confirmed.front()
            && batch
                .first()
                .is_none_or(|first: &Held| Arc::ptr_eq(&first.token, &next.token))
        {
            batch.extend(self.confirmed.pop_front());
        }
        self.confirmed_at = (!self.confirmed.is_empty()).then(Instant::now);
        batch
    }

    fn lost(&mut self, lost: &[Held]) {
        if lost.is_empty() {
            return;
        }
        count(&self.totals.lost, metrics::LEASE_LOST, lost.len());
        self.tell(lost, &outcome::Result::PublishedLate);
        self.return_rows(lost, None);
    }

    fn tell(&self, held: &[Held], result: &outcome::Result) {
        for held in held {
            self.outcomes.tell(&held.subject, result);
        }
    }

    fn fail(&mut self, failed: Failed, context: &mut Context<Self>) {
        let failure = Failure {
            id: failed.held.subject.id,
            later: failed.later.iter().map(Held::id).collect(),
            dead_now: failed.outcome == Outcome::Dead,
            max_attempts: (failed.outcome == Outcome::RetryOrDead)
                .then_some(self.policy.max_attempts),
            backoff: self.policy.backoff,
            error: described(&failed.error),
            holds: failed.holds,
        };
        let store = self.store.clone();
        let token = failed.held.token.clone();
        let recorded = async move {
            let answer = match store.mark_failed(&failure, token.name()).await {
                Ok((None, released)) => store
                    .still_claimed(&[failure.id.0], token.name())
                    .await
                    .map(|still| (None, released, !still.is_empty())),
                Ok((recorded, released)) => Ok((recorded, released, false)),
                Err(error) => Err(error),
            };
            (failed, answer)
        };
        self.run(
            context,
            recorded,
            |actor, (mut failed, answer), context| match answer {
                Ok((recorded, released, locked)) => {
                    actor.well();
                    let (back, left) = partition(std::mem::take(&mut failed.later), |held| {
                        released.contains(&held.id())
                    });
                    count(&actor.totals.handed_back, metrics::HANDED_BACK, back.len());
                    actor.tell(&back, &outcome::Result::Behind);
                    actor.return_rows(&back, None);
                    if locked {
                        failed.later = left;
                        actor.rest(vec![failed], context, |actor, failed| {
                            actor.work.extend(failed.into_iter().map(Work::Fail));
                        });
                        return;
                    }
                    actor.failed(&failed, recorded.as_ref());
                    if !left.is_empty() {
                        let behind = outcome::Result::Behind;
                        actor.work.push_front(Work::Release(left, behind));
                    }
                }
                Err(error) => {
                    actor.work.push_front(Work::Fail(failed));
                    actor.unwell(&error, context);
                }
            },
        );
    }

    fn failed(&mut self, failed: &Failed, recorded: Option<&Recorded>) {
        let cause = failed.error.cause.class();
        let result = match recorded {
            None => outcome::Result::LeaseLost,
            Some(recorded) if recorded.dead => {
                self.totals.dead.fetch_add(1, Ordering::Relaxed);
                ::metrics::counter!(metrics::DEAD_LETTERED, "cause" => cause).increment(1);
                let died = Died {
                    subject: failed.held.subject.clone(),
                    cause,
                    error: described(&failed.error),
                    attempts: recorded.attempts,
                    holds: failed.holds,
                    copied_to: failed.copied_to.clone(),
                };
                self.died.try_send(died).ok();
                outcome::Result::DeadLettered {
                    attempts: recorded.attempts,
                    error: described(&failed.error),
                }
            }
            Some(recorded) => {
                self.totals.failed.fetch_add(1, Ordering::Relaxed);
                ::metrics::counter!(metrics::FAILED, "cause" => cause).increment(1);
                outcome::Result::Failed {
                    attempts: recorded.attempts,
                    error: described(&failed.error),
                }
            }
        };
        self.outcomes.tell(&failed.held.subject, &result);
        let due_in = recorded.and_then(|recorded| match recorded.dead {
            false => Some(recorded.wait),
            // The later ones of its aggregate go on at once, unless they are held.
            true => (!failed.holds).then_some(Duration::ZERO),
        });
        self.return_rows(std::slice::from_ref(&failed.held), due_in);
    }

    fn wait(&mut self, waiting: Waiting, context: &mut Context<Self>) {
        let store = self.store.clone();
        let recorded = async move {
            let answer = waited(&store, &waiting).await;
            (waiting, answer)
        };
        self.run(
            context,
            recorded,
            |actor, (waiting, answer), context| match answer {
                Ok(locked) => {
                    actor.well();
                    let Waiting {
                        heads,
                        later,
                        error,
                        wait,
                    } = waiting;
                    let is_locked = |held: &Held| locked.contains(&held.id());
                    let (locked_heads, heads) = partition(heads, is_locked);
                    let (locked_later, later) = partition(later, is_locked);
                    count(&actor.totals.waited, metrics::WAITED, heads.len());
                    let text = described(&error);
                    actor.tell(&heads, &outcome::Result::Waits { error: text });
                    actor.return_rows(&heads, Some(wait));
                    count(&actor.totals.handed_back, metrics::HANDED_BACK, later.len());
                    actor.tell(&later, &outcome::Result::Behind);
                    actor.return_rows(&later, None);
                    if !locked.is_empty() {
                        let again = Waiting {
                            heads: locked_heads,
                            later: locked_later,
                            error,
                            wait,
                        };
                        actor.rest(vec![again], context, |actor, again| {
                            actor.work.extend(again.into_iter().map(Work::Wait));
                        });
                    }
                }
                Err(error) => {
                    actor.work.push_front(Work::Wait(waiting));
                    actor.unwell(&error, context);
                }
            },
        );
    }

    fn release(&mut self, held: Vec<Held>, why: outcome::Result, context: &mut Context<Self>) {
        let store = self.store.clone();
        let released = async move {
            let answer = reached(&store, &held, Statement::Release).await;
            (held, answer)
        };
        self.run(
            context,
            released,
            move |actor, (held, answer), context| match answer {
                Ok(reached) => {
                    actor.well();
                    let (locked, gone) =
                        partition(held, |held| reached.locked.contains(&held.id()));
                    count(&actor.totals.handed_back, metrics::HANDED_BACK, gone.len());
                    actor.tell(&gone, &why);
                    actor.return_rows(&gone, None);
                    actor.rest(locked, context, move |actor, locked| {
                        actor.work.push_back(Work::Release(locked, why));
                    });
                }
                Err(error) => {
                    actor.work.push_front(Work::Release(held, why));
                    actor.unwell(&error, context);
                }
            },
        );
    }

    /// Rows that somebody holds locked are tried again after a while, without waiting for the lock.
    fn rest<T: 'static>(
        &mut self,
        locked: Vec<T>,
        context: &mut Context<Self>,
        again: impl FnOnce(&mut Self, Vec<T>) + 'static,
    ) {
        if locked.is_empty() {
            return;
        }
        let rows = locked.len();
        self.resting += rows;
        context.run_later(LOCKED_PAUSE, move |actor, context| {
            actor.resting -= rows;
            again(actor, locked);
            actor.step(context);
        });
    }

    fn well(&mut self) {
        self.pauses.reset();
        if std::mem::take(&mut self.trouble) {
            tracing::info!("marks are recorded again");
        }
    }

    fn unwell(&mut self, error: &StoreError, context: &mut Context<Self>) {
        ::metrics::counter!(metrics::FAILED_PASSES, "step" => "mark").increment(1);
        if !std::mem::replace(&mut self.trouble, true) {
            tracing::warn!(%error, "marks cannot be recorded, trying again");
        }
        self.busy = true;
        let mut pause = self.pauses.next_backoff().unwrap_or(LONGEST_PAUSE);
        if self.flush_asked.elapsed() < HURRY {
            pause = pause.min(LOCKED_PAUSE);
        }
        self.pausing = Some(context.run_later(pause, |actor, context| {
            actor.pausing = None;
            actor.busy = false;
            actor.step(context);
        }));
    }

    fn return_rows(&self, held: &[Held], due_in: Option<Duration>) {
        if held.is_empty() {
            return;
        }
        let returned = Returned {
            buckets: held.iter().map(|held| held.bucket).collect(),
            bytes: held.iter().map(|held| held.bytes).sum(),
            due_in,
        };
        if let Some(claimer) = &self.claimer {
            // A claimer that is gone takes the whole generation with it.
            claimer.try_send(returned).ok();
        }
    }
}

fn partition(held: Vec<Held>, wanted: impl Fn(&Held) -> bool) -> (Vec<Held>, Vec<Held>) {
    held.into_iter().partition(wanted)
}

impl Actor for Marker {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        // Without a bound of its own: credits are the bound, and a refused message would be a lost row.
        context.set_mailbox_capacity(0);
    }

    fn stopped(&mut self, _: &mut Self::Context) {
        Exited::report(&self.exited, Child::Marker, self.stopping);
    }
}
