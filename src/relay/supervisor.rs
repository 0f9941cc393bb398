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
use tokio::sync::{oneshot, watch};

use super::breaker::State;
use super::circuits::{Circuit, Circuits, Delivering};
use super::claimer::{self, Ready, Wake};
use super::failure::Blame;
use super::generation::{Generation, Plan};
use super::listener::Hearing;
use super::marker::Totals;
use super::outcome::{Outcomes, Subject};
use crate::alert::Alerter;
use crate::config::{Config, ConfigError};
use crate::metrics;
use crate::sink::{Sink, SinkError, Transport};
use crate::store::Store;

/// What a breaker says that has never been asked.
const NOT_ASKED: &str = "not connected yet";
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
    /// Where the event was going.
    pub destination: Arc<str>,
    /// What the broker or the network said.
    pub error: SinkError,
}

/// Confirms arrive.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Flowing {
    /// From these destinations.
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
        let circuits = Circuits::new(
            config.retry.stop_after_failures,
            primary,
            letters,
            !router.is_fixed(),
            Instant::now(),
        );
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

    // ---- the breakers --------------------------------------------------------------------------

    /// Makes the probes that are due, and arms the timer for the next ones.
    fn probe(&mut self, context: &mut Context<Self>) {
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

    fn probed(
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

    fn tell_destination(&self, name: &Arc<str>) {
        if let Some(generation) = &self.generation {
            generation.tell_destination(name, self.circuits.down(name).as_ref());
        }
    }

    fn opened(&mut self, circuit: &Circuit, context: &mut Context<Self>) {
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
    fn delivering_changed(&mut self, context: &mut Context<Self>) {
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
    fn connection_was_asked(&self) -> bool {
        self.delivered || self.circuits.connection().reason() != Some(NOT_ASKED)
    }

    fn not_delivering(&mut self, reason: String, context: &mut Context<Self>) {
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

    fn show_breakers(&self) {
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
        let changes =
            futures_util::stream::unfold(self.plan.sink.transport(), |mut transport| async {
                transport.changed().await.ok()?;
                let now = transport.borrow_and_update().clone();
                Some((now, transport))
            });
        context.add_stream(changes);
        self.build(Vec::new(), context);
        self.probe(context);
        self.lag(context);
        self.prune_later(context);
    }
}

impl StreamHandler<Transport> for Supervisor {
    fn handle(&mut self, transport: Transport, context: &mut Self::Context) {
        let reason = match transport {
            Transport::Unknown | Transport::Up => return,
            Transport::Blocked(reason) => format!("the broker asks to wait: {reason}"),
            Transport::Down(reason) => reason,
        };
        if !self.ending && self.circuits.transport_failed(&reason, Instant::now()) {
            self.opened(&Circuit::Connection, context);
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
            generation.claimer.try_send(Wake::default()).ok();
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
mod tests {
    use super::*;
    use crate::config::DatabaseConfig;
    use crate::relay::claimer::Claimer;
    use crate::relay::listener::Listener;
    use crate::relay::marker::Marker;
    use crate::relay::publisher::Publisher;
    use crate::sink::null::NullSink;
    use tokio::time::timeout;

    /// Makes one actor of the present generation panic.
    #[derive(Message)]
    #[rtype(result = "()")]
    struct Crash(Child);

    #[derive(Message)]
    #[rtype(result = "()")]
    struct Panic;

    macro_rules! panics {
        ($($actor:ty),+) => {$(
            impl Handler<Panic> for $actor {
                type Result = ();

                fn handle(&mut self, _: Panic, _: &mut Self::Context) {
                    panic!("on purpose");
                }
            }
        )+};
    }
    panics!(Listener, Claimer, Publisher, Marker);

    impl Handler<Crash> for Supervisor {
        type Result = ();

        fn handle(&mut self, Crash(child): Crash, _: &mut Self::Context) {
            let Some(generation) = &self.generation else {
                return;
            };
            match child {
                Child::Listener => generation.listener.try_send(Panic).unwrap(),
                Child::Claimer => generation.claimer.try_send(Panic).unwrap(),
                Child::Publisher(partition) => {
                    generation.publishers[partition].try_send(Panic).unwrap();
                }
                Child::Marker => generation.marker.try_send(Panic).unwrap(),
            }
        }
    }

    /// Nobody listens there: the actors keep trying to connect, which is all they need to do here.
    fn supervisor() -> (Addr<Supervisor>, oneshot::Receiver<Ending>) {
        let database = DatabaseConfig {
            url: Some("postgres://nobody@127.0.0.1:1/none".into()),
            ..DatabaseConfig::default()
        };
        let config = Config {
            database,
            ..Config::default()
        };
        let store = Store::new(&config.database, "test").unwrap();
        let (ended, end) = oneshot::channel();
        let sink = Arc::new(NullSink::new());
        let alerter = Alerter::start(&config.alerts, "test", "outbox");
        let supervisor = Supervisor::new(
            store,
            Arc::new(config),
            "test".into(),
            false,
            (sink, alerter),
            ended,
        )
        .unwrap();
        (supervisor.start(), end)
    }

    async fn restarts(supervisor: &Addr<Supervisor>) -> u64 {
        supervisor.send(Observe).await.unwrap().restarts
    }

    async fn crash(supervisor: &Addr<Supervisor>, child: Child) {
        let before = restarts(supervisor).await;
        let rebuilt = async {
            while restarts(supervisor).await == before {
                supervisor.send(Crash(child)).await.unwrap();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_secs(10), rebuilt)
            .await
            .expect("rebuilt");
    }

    #[actix_rt::test]
    async fn whichever_actor_dies_is_rebuilt_and_the_end_is_still_orderly() {
        let (supervisor, end) = supervisor();
        for child in [
            Child::Marker,
            Child::Publisher(3),
            Child::Claimer,
            Child::Listener,
        ] {
            crash(&supervisor, child).await;
        }
        supervisor.send(Drain).await.unwrap();
        let ending = timeout(Duration::from_secs(30), end)
            .await
            .unwrap()
            .unwrap();
        assert_eq!(ending.error, None);
    }

    #[actix_rt::test]
    async fn actors_that_die_again_and_again_end_the_relay_with_an_error() {
        let (supervisor, mut end) = supervisor();
        let ending = async {
            loop {
                if let Ok(ending) = end.try_recv() {
                    return ending;
                }
                let _ = supervisor.send(Crash(Child::Marker)).await;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let ending = timeout(Duration::from_secs(30), ending).await.unwrap();
        assert!(ending.error.is_some());
    }
}
