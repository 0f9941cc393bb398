//! The supervisor: builds the other actors, rebuilds them when one dies, runs the breakers and the
//! timers of lag and pruning, and brings everything to an orderly end.
//!
//! # Role
//! Owns the *generation*: marker, publishers, claimer and listener, built together, sink first. An
//! actor that dies takes its generation with it, since credits and claims in its hands are unknown
//! then; the next generation takes over the old token. That is the same path as for a process that
//! died, so it needs no proof of its own.
//! # Receives
//! [`Exited`] from every child, [`Trouble`] and [`Flowing`] from the publishers, [`Died`] from the
//! marker, [`Idle`] from the claimer, the transport's state from the sink, [`Drain`], [`Nudge`] and
//! [`Observe`] from outside.
//! # Sends
//! `Ready` to the claimer, `Destination` and `GiveBack` to the publishers, and the messages of the
//! end.
//! # Invariants
//! Nothing is claimed before broker and destination have answered a probe well, nor while nothing
//! can be delivered. Which breaker is open is decided by [`super::circuits`].
//! # On failure
//! Too many rebuilds in a minute end the process with an error: an orchestrator knows more.
//! # On shutdown
//! In flow order: listener, claimer (claims no more), publishers (finish what is out), marker
//! (records it), claimer (frees the buckets). Bounded by the grace time.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use actix::prelude::*;
use futures_util::{Stream, StreamExt as _};
use tokio::sync::{oneshot, watch};

use self::database::DatabaseWatch;
use super::breaker::State;
use super::circuits::{Circuit, Circuits, Delivering};
use super::claimer::{self, Ready, Wake};
use super::failure::{Blame, Cause};
use super::generation::{Generation, Plan};
use super::listener::Hearing;
use super::marker::Totals;
use super::outcome::{Outcomes, Subject};
use super::sweep::ALL_BUCKETS;
use crate::alert::Alerter;
use crate::config::{Config, ConfigError};
use crate::metrics;
use crate::sink::{Sink, SinkError, Transport};
use crate::store::Store;

mod breakers;
mod database;
mod upkeep;

/// More rebuilds within [`REBUILD_WINDOW`] are a fault that rebuilding does not mend.
const MOST_REBUILDS: usize = 5;
const REBUILD_WINDOW: Duration = Duration::from_secs(60);
/// Before a rebuild, times the number of recent ones.
const REBUILD_PAUSE: Duration = Duration::from_millis(200);
/// Which child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Child {
    /// The listener.
    Listener,
    /// The claimer.
    Claimer,
    /// The publisher of this partition.
    Publisher(usize),
    /// The marker.
    Marker,
}

/// A child has stopped.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Exited {
    child: Child,
    /// It was told to, or came to its end in order.
    wanted: bool,
    panicked: bool,
}

impl Exited {
    /// Called by every child in its `stopped`.
    pub fn report(supervisor: &Recipient<Self>, child: Child, wanted: bool) {
        let exited = Self {
            child,
            wanted,
            panicked: std::thread::panicking(),
        };
        // The supervisor outlives its children; at the very end nobody is left to be told.
        supervisor.try_send(exited).ok();
    }
}

/// A failure that speaks for a breaker.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Trouble {
    /// Whose.
    pub blame: Blame,
    /// Where the event was going; of several places the one that the error speaks of.
    pub destination: Arc<str>,
    /// What the broker or the network said.
    pub error: SinkError,
}

/// Confirms arrive.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Flowing {
    /// From these destinations and, where there are several, sinks.
    pub destinations: Vec<Arc<str>>,
}

/// An event was dead-lettered.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct Died {
    /// The event.
    pub subject: Subject,
    /// Class of the reason.
    pub cause: &'static str,
    /// Class and reason.
    pub error: String,
    /// Failed attempts.
    pub attempts: i32,
    /// Does it hold back the later events of its aggregate?
    pub holds: bool,
    /// Where a copy of it went.
    pub copied_to: Option<Arc<str>>,
}

/// Look whether there is anything to carry.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Nudge;

/// Outcomes of events, from now on.
#[derive(Message)]
#[rtype(result = "Outcomes")]
pub struct Watch;

impl<A, M> actix::dev::MessageResponse<A, M> for Outcomes
where
    A: Actor,
    M: Message<Result = Self>,
{
    fn handle(self, _: &mut A::Context, answer: Option<actix::dev::OneshotSender<Self>>) {
        if let Some(answer) = answer {
            let _ = answer.send(self);
        }
    }
}

/// One pass is done.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Idle;

/// Stop at once: the generation is given up.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Stop;

/// Come to an orderly end.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Drain;

/// How does the relay stand?
#[derive(Message)]
#[rtype(result = "View")]
pub struct Observe;

/// How the relay stands.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct View {
    /// Can it deliver now? What `/readyz` says.
    pub ready: bool,
    /// Why not, one machine-readable word each.
    pub reasons: Vec<&'static str>,
    /// The connection's: `closed`, `open` or `half-open`.
    pub breaker: &'static str,
    /// Why nothing can be delivered, while nothing can.
    pub breaker_reason: Option<String>,
    /// Destinations that take no events.
    pub destinations_down: Vec<DestinationView>,
    /// What wakes the relay: `notify`, or `poll-only` for the tick alone.
    pub wake: &'static str,
    /// Why notifications do not arrive, while they do not. Events wait for the tick then.
    pub listener_trouble: Option<String>,
    /// The claimer's part.
    pub claimer: claimer::View,
    /// Events published since the start.
    pub published: u64,
    /// Failed attempts since the start.
    pub failed: u64,
    /// Events dead-lettered since the start.
    pub dead_lettered: u64,
    /// Events handed back since the start.
    pub handed_back: u64,
    /// Times that an event was left to wait for its destination since the start.
    pub waited: u64,
    /// Rebuilds after an actor died.
    pub restarts: u64,
}

/// A destination that takes no events.
#[derive(Clone, Debug, serde::Serialize)]
pub struct DestinationView {
    /// Its name.
    pub name: String,
    /// `open` or `half-open`.
    pub breaker: &'static str,
    /// Why.
    pub reason: String,
}

/// How a relay ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    /// Events published.
    pub published: u64,
    /// Failed attempts, of which the event is tried again.
    pub failed: u64,
    /// Events dead-lettered.
    pub dead: u64,
    /// Events handed back unpublished.
    pub handed_back: u64,
    /// Events that wait for their destination.
    pub waited: u64,
    /// Events whose confirm was still outstanding when the grace time was over.
    pub unconfirmed: Vec<String>,
    /// Why it could not go on.
    pub error: Option<String>,
}

/// See the module's head.
pub struct Supervisor {
    pub(super) plan: Plan,
    pub(super) alerter: Alerter,
    /// Dead events that nobody was told of yet.
    pub(super) dead: VecDeque<Died>,
    /// The one of them that is being told.
    pub(super) telling: Option<Died>,
    /// Destinations of standing alerts are being asked.
    pub(super) asking: bool,
    pub(super) ringing: bool,
    pub(super) ring_again: bool,
    /// The database could not be reached since then.
    database: DatabaseWatch,
    /// Breakers that are open, and since when: those that stay so are worth an alert.
    pub(super) watched: BTreeMap<Circuit, Instant>,
    generation: Option<Generation>,
    pub(super) circuits: Circuits,
    /// What the claimer was told last.
    ready: bool,
    /// Why nothing can be delivered, as logged last.
    not_ready: Option<String>,
    probe_timer: Option<SpawnHandle>,
    rebuilds: VecDeque<Instant>,
    restarts: u64,
    /// Something could be delivered before.
    delivered: bool,
    /// Why the end is an untimely one.
    fault: Option<String>,
    ending: bool,
    ended: Option<oneshot::Sender<Ending>>,
}

impl Supervisor {
    /// A supervisor that tells `ended` how it went.
    ///
    /// # Errors
    /// Names the route that is wrong.
    pub fn new(
        store: Store,
        config: Arc<Config>,
        replica: String,
        once: bool,
        (sink, alerter): (Arc<dyn Sink>, Alerter),
        ended: oneshot::Sender<Ending>,
    ) -> Result<Self, ConfigError> {
        let router = Arc::new(config.router()?);
        let (primary, letters) = router.destinations();
        let sinks = if config.sinks_in_use().several {
            let used = config.sinks_in_use().sinks.into_iter();
            used.map(|used| used.sink.name().into()).collect()
        } else {
            Vec::new()
        };
        let now = Instant::now();
        let circuits = Circuits::new(
            config.retry.stop_after_failures,
            primary,
            letters,
            !router.is_fixed(),
            now,
        )
        .of_sinks(sinks, now);
        let plan = Plan {
            outcomes: Outcomes::new(config.log.outcomes),
            store,
            config,
            replica,
            once,
            sink,
            router,
            hearing: Arc::new(watch::channel(Hearing::Lost("not connected yet".into())).0),
            totals: Arc::default(),
        };
        Ok(Self {
            plan,
            alerter,
            dead: VecDeque::new(),
            telling: None,
            asking: false,
            ringing: false,
            ring_again: false,
            database: DatabaseWatch::default(),
            watched: BTreeMap::new(),
            generation: None,
            circuits,
            ready: false,
            not_ready: None,
            probe_timer: None,
            rebuilds: VecDeque::new(),
            restarts: 0,
            delivered: false,
            fault: None,
            ending: false,
            ended: Some(ended),
        })
    }

    // ---- the generation ------------------------------------------------------------------------

    fn build(&mut self, old_tokens: Vec<i32>, context: &mut Context<Self>) {
        let generation = Generation::build(&self.plan, old_tokens, &context.address());
        for (name, _, _) in self.circuits.destinations_down() {
            let down = self.circuits.down(name);
            generation.tell_destination(name, down.as_ref());
        }
        let ready = self.circuits.delivering() == Delivering::Yes;
        generation.claimer.try_send(Ready(ready)).ok();
        self.generation = Some(generation);
    }

    /// Gives the generation up and builds another, unless that has been tried too often.
    fn rebuild(&mut self, context: &mut Context<Self>) {
        let Some(generation) = self.generation.take() else {
            return;
        };
        let now = Instant::now();
        self.rebuilds.retain(|at| now - *at < REBUILD_WINDOW);
        self.rebuilds.push_back(now);
        self.restarts += 1;
        ::metrics::counter!(metrics::RESTARTS).increment(1);
        if self.rebuilds.len() > MOST_REBUILDS {
            self.end(
                Vec::new(),
                Some("its actors died again and again".into()),
                context,
            );
            return;
        }
        let pause = REBUILD_PAUSE * u32::try_from(self.rebuilds.len()).unwrap_or(1);
        let abandon = async move {
            let tokens = generation.abandon().await;
            tokio::time::sleep(pause).await;
            tokens
        };
        context.spawn(abandon.into_actor(self).map(|tokens, actor, context| {
            if !actor.ending {
                actor.build(tokens, context);
            }
        }));
    }

    // ---- the end -------------------------------------------------------------------------------

    fn drain(&mut self, context: &mut Context<Self>) {
        if std::mem::replace(&mut self.ending, true) {
            return;
        }
        let Some(generation) = self.generation.take() else {
            self.end(Vec::new(), None, context);
            return;
        };
        let grace = self.plan.config.relay.grace;
        tracing::info!(?grace, "stopping");
        let drained = generation.drain(grace);
        context.spawn(drained.into_actor(self).map(|unconfirmed, actor, context| {
            if actor.plan.once {
                actor.once_more(unconfirmed, context);
            } else {
                actor.end(unconfirmed, None, context);
            }
        }));
    }

    pub(super) fn end(
        &mut self,
        unconfirmed: Vec<String>,
        error: Option<String>,
        context: &mut Context<Self>,
    ) {
        self.ending = true;
        let Some(ended) = self.ended.take() else {
            return;
        };
        self.tell_the_rest();
        let Totals {
            published,
            failed,
            dead,
            handed_back,
            waited,
            ..
        } = &*self.plan.totals;
        let ending = Ending {
            published: count(published),
            failed: count(failed),
            dead: count(dead),
            handed_back: count(handed_back),
            waited: count(waited),
            unconfirmed,
            error: error.or(self.fault.take()),
        };
        let sink = self.plan.sink.clone();
        context.spawn(
            async move { sink.close().await }
                .into_actor(self)
                .map(|(), _, context| {
                    let _ = ended.send(ending);
                    context.stop();
                }),
        );
    }
}

/// How the transport of one of several sinks stands by now.
struct PartChanged {
    sink: Arc<str>,
    transport: Transport,
}

fn changes(transport: watch::Receiver<Transport>) -> impl Stream<Item = Transport> {
    futures_util::stream::unfold(transport, |mut transport| async {
        transport.changed().await.ok()?;
        let now = transport.borrow_and_update().clone();
        Some((now, transport))
    })
}

/// Why nothing can be sent, if nothing can.
fn trouble(transport: Transport) -> Option<String> {
    match transport {
        Transport::Unknown | Transport::Up => None,
        Transport::Blocked(reason) => Some(format!("the broker asks to wait: {reason}")),
        Transport::Down(reason) => Some(reason),
    }
}

fn count(total: &AtomicU64) -> u64 {
    total.load(Ordering::Relaxed)
}

fn state_name(state: &State) -> &'static str {
    match state {
        State::Closed => "closed",
        State::HalfOpen => "half-open",
        State::Open { .. } => "open",
    }
}

impl Actor for Supervisor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        // Reports of children must not be refused; there are at most as many as confirms.
        context.set_mailbox_capacity(0);
        context.add_stream(changes(self.plan.sink.transport()));
        for (sink, transport) in self.plan.sink.parts() {
            let changes = changes(transport);
            context.add_stream(changes.map(move |transport| PartChanged {
                sink: sink.clone(),
                transport,
            }));
        }
        self.build(Vec::new(), context);
        self.probe(context);
        self.lag(context);
        self.prune_later(context);
    }
}

impl StreamHandler<Transport> for Supervisor {
    fn handle(&mut self, transport: Transport, context: &mut Self::Context) {
        let Some(reason) = trouble(transport) else {
            return;
        };
        if !self.ending && self.circuits.transport_failed(&reason, Instant::now()) {
            self.opened(&Circuit::Connection, context);
        }
    }

    fn finished(&mut self, _: &mut Self::Context) {}
}

impl StreamHandler<PartChanged> for Supervisor {
    fn handle(
        &mut self,
        PartChanged { sink, transport }: PartChanged,
        context: &mut Self::Context,
    ) {
        let Some(reason) = trouble(transport) else {
            return;
        };
        let error = SinkError {
            destination: Some(sink.clone()),
            ..SinkError::new(Cause::SinkDown, format!("{sink}: {reason}"))
        };
        let (blame, now) = (Blame::DestinationForSure, Instant::now());
        if !self.ending
            && let Some(opened) = self.circuits.failed(blame, &sink, &error, now)
        {
            self.opened(&opened, context);
        }
    }

    fn finished(&mut self, _: &mut Self::Context) {}
}

impl Handler<Exited> for Supervisor {
    type Result = ();

    fn handle(&mut self, exited: Exited, context: &mut Self::Context) {
        if exited.wanted || self.ending {
            return;
        }
        tracing::error!(child = ?exited.child, panicked = exited.panicked, "an actor died, rebuilding");
        self.rebuild(context);
    }
}

impl Handler<Trouble> for Supervisor {
    type Result = ();

    fn handle(&mut self, trouble: Trouble, context: &mut Self::Context) {
        let Trouble {
            blame,
            destination,
            error,
        } = trouble;
        let now = Instant::now();
        if let Some(opened) = self.circuits.failed(blame, &destination, &error, now) {
            self.opened(&opened, context);
        }
    }
}

impl Handler<Flowing> for Supervisor {
    type Result = ();

    fn handle(&mut self, flowing: Flowing, _: &mut Self::Context) {
        self.circuits.confirmed(&flowing.destinations);
    }
}

impl Handler<Idle> for Supervisor {
    type Result = ();

    fn handle(&mut self, _: Idle, context: &mut Self::Context) {
        self.drain(context);
    }
}

impl Handler<Died> for Supervisor {
    type Result = ();

    fn handle(&mut self, died: Died, context: &mut Self::Context) {
        self.dead.push_back(died);
        self.tell_dead(context);
    }
}

impl Handler<Nudge> for Supervisor {
    type Result = ();

    fn handle(&mut self, _: Nudge, context: &mut Self::Context) {
        if let Some(generation) = &self.generation {
            // Of one who asks for it by hand: whatever may go.
            let wake = Wake {
                freed: ALL_BUCKETS,
                ..Wake::default()
            };
            generation.claimer.try_send(wake).ok();
        }
        self.ring(context);
    }
}

impl Handler<Watch> for Supervisor {
    type Result = Outcomes;

    fn handle(&mut self, _: Watch, _: &mut Self::Context) -> Outcomes {
        self.plan.outcomes.clone()
    }
}

impl Handler<Drain> for Supervisor {
    type Result = ();

    fn handle(&mut self, _: Drain, context: &mut Self::Context) {
        self.drain(context);
    }
}

impl Handler<Observe> for Supervisor {
    type Result = ResponseFuture<View>;

    fn handle(&mut self, _: Observe, _: &mut Self::Context) -> Self::Result {
        let totals = &self.plan.totals;
        let hearing = self.plan.hearing.borrow().clone();
        let not_delivering = match self.circuits.delivering() {
            Delivering::Yes => None,
            Delivering::Unknown => Some("not asked yet".to_owned()),
            Delivering::No(reason) => Some(reason),
        };
        let connected = self.circuits.connection().state() == &State::Closed;
        let delivers = not_delivering.is_none();
        let mut view = View {
            breaker: state_name(self.circuits.connection().state()),
            breaker_reason: not_delivering,
            destinations_down: self
                .circuits
                .destinations_down()
                .map(|(name, state, error)| DestinationView {
                    name: name.to_string(),
                    breaker: state_name(state),
                    reason: error.message.clone(),
                })
                .collect(),
            listener_trouble: hearing.trouble().map(str::to_owned),
            wake: hearing.wake(),
            published: count(&totals.published),
            failed: count(&totals.failed),
            dead_lettered: count(&totals.dead),
            handed_back: count(&totals.handed_back),
            waited: count(&totals.waited),
            restarts: self.restarts,
            ..View::default()
        };
        let ending = self.ending;
        let claimer = self
            .generation
            .as_ref()
            .map(|generation| generation.claimer.clone());
        Box::pin(async move {
            if let Some(claimer) = claimer {
                view.claimer = claimer.send(claimer::Observe).await.unwrap_or_default();
            }
            let checks = [
                (ending, "stopping"),
                (!connected, "broker"),
                (connected && !delivers, "destination"),
                (
                    view.claimer.token.is_none() || view.claimer.trouble.is_some(),
                    "database",
                ),
            ];
            view.reasons = checks
                .into_iter()
                .filter_map(|(wrong, reason)| wrong.then_some(reason))
                .collect();
            view.ready = view.reasons.is_empty();
            view
        })
    }
}

#[cfg(test)]
mod tests;
