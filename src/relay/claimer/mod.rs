//! CLAIM: owns the replica's session, claims rows while there is room, and routes them.
//!
//! # Role
//! The only one that talks on the session: heartbeat, takeover, sharing of buckets, claims; one
//! statement at a time, chosen by `step`. Decisions are in [`super::rounds`] and [`super::sweep`].
//! # Receives
//! [`Wake`] from the listener, [`Ready`] from the supervisor, [`Returned`] from the marker,
//! [`Drain`] and [`Leave`] from the supervisor, [`Observe`].
//! # Sends
//! `Publish` and `Voided` to the publishers, `HandBack`, `Failed` and `Flush` to the marker, `Idle`
//! and `Exited` to the supervisor.
//! # Invariants
//! Credits: what is in hand never exceeds what the publishers have room for; every claimed row comes
//! back exactly once, as one [`Returned`]. Rows go to a publisher in id order within an aggregate.
//! Nothing is claimed while the broker's breaker is open. What was claimed under a void token is
//! dropped unsent.
//! # On failure
//! A session that breaks voids its token: a new one is opened with growing pauses, and the old
//! token's rows are taken over by it.
//! # On shutdown
//! [`Drain`]: claims no more and hands back what is not yet with a publisher. [`Leave`]: ends the
//! token and frees the buckets.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::prelude::*;
use backoff::ExponentialBackoff;
use backoff::backoff::Backoff as _;
use tokio::sync::{oneshot, watch};

use super::breaker::pauses;
use super::doorbell::Doorbell;
use super::horizon::Horizon;
use super::listener::Hearing;
use super::marker::Marker;
use super::publisher::Publisher;
use super::rounds::Rounds;
use super::supervisor::{Child, Exited, Idle};
use super::sweep::Sweep;
use crate::event::ClaimToken;
use crate::route::Router;
use crate::store::{ClaimRequest, ClaimedRow, Session, Store, StoreError, Tended};

mod aside;
mod claiming;
mod looking;
mod messages;
mod session;

use messages::SessionLost;
pub use messages::{Abandon, Drain, Leave, Observe, Ready, Returned, View, Wake};

/// Peers are looked at this often while any of them is known to be awake.
const WATCH: Duration = Duration::from_millis(500);
/// After a wake-up, when no peer seems busy (yet), they are watched for this long.
const WATCH_AFTER_WAKE: Duration = Duration::from_secs(2);
/// Between tries after a failure: first and longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Settings of a claimer.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of this replica.
    pub replica: String,
    /// See `relay.lease`.
    pub lease: Duration,
    /// See `relay.tick`.
    pub tick: Duration,
    /// See `relay.partitions`.
    pub partitions: usize,
    /// See `relay.batch_size`.
    pub batch_size: usize,
    /// Credits of all publishers together.
    pub most_in_hand: usize,
    /// Which events go where.
    pub router: Arc<Router>,
    /// See `relay.ordering`.
    pub strict: bool,
    /// One pass only.
    pub once: bool,
}

/// Whom a claimer talks to.
#[derive(Clone)]
pub struct Links {
    /// One for each partition.
    pub publishers: Vec<Addr<Publisher>>,
    /// The marker.
    pub marker: Addr<Marker>,
    /// The supervisor, for the end.
    pub exited: Recipient<Exited>,
    /// The supervisor, when one pass is done.
    pub idle: Recipient<Idle>,
    /// Does the listener hear? While it does not, what rings would tell is looked for by the tick.
    pub hearing: watch::Receiver<Hearing>,
}

/// See the module's head.
pub struct Claimer {
    store: Store,
    settings: Settings,
    links: Links,
    rounds: Rounds,
    sweep: Sweep,
    /// When the next lap of the sweep is due.
    lap_at: Instant,
    /// Rows that waited for their time are due.
    promote_due: bool,
    /// Those that are left of them are locked by somebody: not before this.
    promote_after: Option<Instant>,
    /// It is the turn of promotion and sweep; then of claims again.
    aside_turn: bool,
    doorbell: Doorbell,
    /// Only under strict order.
    horizon: Option<Horizon>,
    /// Writers are to ring again, for our peers.
    quiet_due: bool,
    session: Option<Rc<Session>>,
    opening: bool,
    /// Tokens of our own that are void and not yet taken over.
    old_tokens: Vec<i32>,
    dead_peers: Vec<i32>,
    busy: bool,
    ready: bool,
    owned: Vec<u8>,
    acquire: usize,
    tended: Option<Tended>,
    tend_due: bool,
    ring_due: bool,
    strays: bool,
    replan_due: bool,
    replanned_at: Instant,
    to_load: VecDeque<(ClaimedRow, Arc<ClaimToken>)>,
    /// Rows at the head of `to_load` that are read one at a time, since one of them is odd.
    load_singly: usize,
    loading: bool,
    loaded_bytes: usize,
    tick_at: Instant,
    due_at: Option<Instant>,
    locked_at: Option<Instant>,
    rest_until: Option<Instant>,
    watch_until: Instant,
    tended_at: Instant,
    backstop_at: Instant,
    timer: Option<SpawnHandle>,
    pauses: ExponentialBackoff,
    reopen_pauses: ExponentialBackoff,
    opened_at: Instant,
    trouble: Option<String>,
    drained: Option<Vec<oneshot::Sender<()>>>,
    leave: Option<oneshot::Sender<()>>,
    stopping: bool,
}

impl Claimer {
    /// A claimer that opens its session once started.
    pub fn new(store: Store, settings: Settings, links: Links, old_tokens: Vec<i32>) -> Self {
        let now = Instant::now();
        Self {
            rounds: Rounds::new(
                settings.partitions,
                settings.batch_size,
                settings.most_in_hand,
            ),
            sweep: Sweep::default(),
            lap_at: now,
            promote_due: false,
            promote_after: None,
            aside_turn: true,
            doorbell: Doorbell::new(now),
            horizon: settings.strict.then(|| Horizon::new(now)),
            quiet_due: false,
            store,
            settings,
            links,
            session: None,
            opening: false,
            old_tokens,
            dead_peers: Vec::new(),
            busy: false,
            ready: false,
            owned: Vec::new(),
            acquire: 0,
            tended: None,
            tend_due: true,
            ring_due: false,
            strays: false,
            replan_due: false,
            replanned_at: now,
            to_load: VecDeque::new(),
            load_singly: 0,
            loading: false,
            loaded_bytes: 0,
            tick_at: now,
            due_at: None,
            locked_at: None,
            rest_until: None,
            watch_until: now,
            tended_at: now,
            backstop_at: now,
            timer: None,
            pauses: pauses(FIRST_PAUSE, LONGEST_PAUSE),
            reopen_pauses: pauses(FIRST_PAUSE, LONGEST_PAUSE),
            opened_at: now,
            trouble: None,
            drained: None,
            leave: None,
            stopping: false,
        }
    }

    // ---- one statement at a time ---------------------------------------------------------------

    /// Does the one thing that is most urgent, if nothing is under way.
    fn step(&mut self, context: &mut Context<Self>) {
        self.load(context);
        self.take_step(context);
        self.answer_waiting();
        self.report_idle();
        self.arm(context);
    }

    fn take_step(&mut self, context: &mut Context<Self>) {
        let Some(session) = self.session.clone() else {
            return;
        };
        if self.busy || self.rest_until.is_some_and(|until| Instant::now() < until) {
            return;
        }
        self.rest_until = None;
        if !session.token().holds() {
            self.lose("its lease is over", context);
        } else if std::mem::take(&mut self.quiet_due) {
            self.ring_due = true;
            self.run(
                context,
                async move { session.go_quiet().await },
                |_, _: ()| {},
            );
        } else if self.leave.is_some() {
            self.run(
                context,
                async move { session.leave().await },
                |actor, _: ()| {
                    actor.session = None;
                    actor.stopping = true;
                },
            );
        } else if self.tend_due {
            self.tend(session, context);
        } else if let Some(token) = self.old_tokens.pop() {
            self.take_over(session, token, true, context);
        } else if let Some(token) = self.dead_peers.pop() {
            self.take_over(session, token, false, context);
        } else if self.ring_due {
            self.ring_due = false;
            self.run(context, async move { session.ring().await }, |_, _: ()| {});
        } else if std::mem::take(&mut self.strays) {
            self.run(
                context,
                async move { session.release_strays().await },
                |actor, rows| {
                    if rows > 0 {
                        tracing::warn!(rows, "released rows whose claim nobody stands for");
                        actor.rounds.wake();
                        actor.ring_due = true;
                    }
                },
            );
        } else if std::mem::take(&mut self.replan_due) {
            self.replanned_at = Instant::now();
            self.run(
                context,
                async move { session.replan_claim().await },
                |_, _: ()| {},
            );
        } else {
            self.share_or_claim(session, context);
        }
    }

    fn share_or_claim(&mut self, session: Rc<Session>, context: &mut Context<Self>) {
        let given = self.rounds.given_up();
        if !given.is_empty() {
            self.owned.retain(|bucket| !given.contains(bucket));
            self.run(
                context,
                async move { session.give_up(&given).await },
                |actor, _: ()| {
                    actor.own();
                },
            );
        } else if self.acquire > 0 {
            let most = std::mem::take(&mut self.acquire);
            self.run(
                context,
                async move { session.acquire(most).await },
                |actor, acquired| {
                    tracing::debug!(buckets = acquired.len(), "took free buckets");
                    actor.owned.extend(acquired);
                    actor.own();
                },
            );
        } else if self.may_claim() {
            // In turns, so that neither waits for the whole of the other.
            if std::mem::take(&mut self.aside_turn) && self.bring_back(&session, context) {
                return;
            }
            self.aside_turn = true;
            self.look_for_events(&session, context);
            if !self.busy {
                self.bring_back(&session, context);
            }
        }
    }

    fn look_for_events(&mut self, session: &Rc<Session>, context: &mut Context<Self>) {
        let session = session.clone();
        if !self.settings.once && self.doorbell.push_due(Instant::now()) {
            self.stay_awake(session, context);
        } else if let Some(step) = self
            .horizon
            .as_mut()
            .and_then(|horizon| horizon.step(Instant::now()))
        {
            self.look_at_the_horizon(session, step, context);
        } else if let Some(request) = self.next_claim() {
            self.claim(session, request, context);
        } else if self.minds_the_doorbell() {
            self.mind_the_doorbell(session, context);
        }
    }

    fn next_claim(&mut self) -> Option<ClaimRequest> {
        let mut request = self.rounds.next_claim()?;
        if let Some(horizon) = &self.horizon {
            request.horizon = horizon.reached();
        }
        Some(request)
    }

    fn may_claim(&self) -> bool {
        self.ready && self.drained.is_none()
    }

    /// Runs a statement of the session; `then` is called with its answer if the session is still
    /// the same.
    fn run<T: 'static>(
        &mut self,
        context: &mut Context<Self>,
        statement: impl Future<Output = Result<T, StoreError>> + 'static,
        then: impl FnOnce(&mut Self, T) + 'static,
    ) {
        self.run_or(context, statement, then, |_| {});
    }

    /// As `run`; `otherwise` is called when the statement failed.
    fn run_or<T: 'static>(
        &mut self,
        context: &mut Context<Self>,
        statement: impl Future<Output = Result<T, StoreError>> + 'static,
        then: impl FnOnce(&mut Self, T) + 'static,
        otherwise: impl FnOnce(&mut Self) + 'static,
    ) {
        self.busy = true;
        let asked = self
            .session
            .as_ref()
            .map(|session| session.token().number());
        context.spawn(
            statement
                .into_actor(self)
                .map(move |answer, actor, context| {
                    actor.busy = false;
                    let present = actor
                        .session
                        .as_ref()
                        .map(|session| session.token().number());
                    if asked == present {
                        match answer {
                            Ok(answer) => {
                                actor.pauses.reset();
                                actor.well();
                                then(actor, answer);
                            }
                            Err(error) => {
                                otherwise(actor);
                                actor.failed(&error, context);
                            }
                        }
                    }
                    actor.step(context);
                }),
        );
    }

    // ---- timers and answers ------------------------------------------------------------------

    /// One timer for whatever comes first.
    fn arm(&mut self, context: &mut Context<Self>) {
        if let Some(timer) = self.timer.take() {
            context.cancel_future(timer);
        }
        if self.session.is_none() {
            return;
        }
        let doorbell = self.doorbell.next_at();
        let doorbell = doorbell.filter(|_| self.may_claim() && self.minds_the_doorbell());
        let horizon = self.horizon.as_ref().and_then(Horizon::next_at);
        let horizon = horizon.filter(|_| self.may_claim());
        // While a statement runs, or after one that failed, its time may be over already.
        let sweep = self.sweep.next_at();
        let sweep = sweep.filter(|_| self.may_claim() && !self.busy && self.rest_until.is_none());
        let next = [
            self.due_at,
            self.locked_at,
            self.rest_until,
            doorbell,
            horizon,
            sweep,
        ]
        .into_iter()
        .flatten()
        .fold(self.tick_at, Instant::min);
        let wait = next
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1));
        self.timer = Some(context.run_later(wait, |actor, context| {
            actor.timer = None;
            actor.look(Instant::now());
            actor.step(context);
        }));
    }

    fn look(&mut self, now: Instant) {
        if now >= self.tick_at {
            self.tend_due = true;
            self.tick_at = now + self.settings.tick;
        }
        if self.due_at.take_if(|at| now >= *at).is_some() {
            self.promote_due = true;
            self.rounds.wake();
        }
        if self.locked_at.take_if(|at| now >= *at).is_some() {
            self.rounds.wake();
        }
    }

    fn answer_waiting(&mut self) {
        if let Some(waiting) = &mut self.drained
            && !self.busy
            && !self.loading
            && self.to_load.is_empty()
        {
            for answer in waiting.drain(..) {
                let _ = answer.send(());
            }
        }
        if self.session.is_none()
            && let Some(answer) = self.leave.take()
        {
            let _ = answer.send(());
        }
    }

    /// One pass is done when a whole round found nothing and nothing is in hand.
    fn report_idle(&self) {
        let settled = self.tended.is_some() && !self.tend_due && !self.busy && self.acquire == 0;
        if self.settings.once
            && self.ready
            && settled
            && self.old_tokens.is_empty()
            && self.dead_peers.is_empty()
            && self.to_load.is_empty()
            && !self.promote_due
            && self.sweep.is_done()
            && self.rounds.is_idle()
            && self.horizon.as_ref().is_none_or(Horizon::is_settled)
        {
            self.links.idle.try_send(Idle).ok();
        }
    }
}

impl Actor for Claimer {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        // Without a bound of its own: credits are the bound, and a refused message would be a lost credit.
        context.set_mailbox_capacity(0);
        self.open(context);
    }

    fn stopped(&mut self, _: &mut Self::Context) {
        if let Some(session) = &self.session {
            session.token().void();
        }
        Exited::report(&self.links.exited, Child::Claimer, self.stopping);
    }
}
