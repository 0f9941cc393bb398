//! The supervisor: builds the other actors, rebuilds them when one dies, runs the breaker and the
//! lag timer, and brings everything to an orderly end.
//!
//! # Role
//! Owns the *generation*: marker, publishers, claimer and listener, built together, sink first. An
//! actor that dies takes its generation with it, since credits and claims in its hands are unknown
//! then; the next generation takes over the old token. That is the same path as for a process that
//! died, so it needs no proof of its own.
//! # Receives
//! [`Exited`] from every child, [`Trouble`] and [`Flowing`] from the publishers, [`Idle`] from the
//! claimer, the transport's state from the sink, [`Drain`] and [`Observe`] from outside.
//! # Sends
//! `Ready` to the claimer, `GiveBack` to the publishers, and the messages of the end.
//! # Invariants
//! Nothing is claimed before a probe of the broker has succeeded, nor while the breaker is open.
//! # On failure
//! Too many rebuilds in a minute end the process with an error: an orchestrator knows more.
//! # On shutdown
//! In flow order: listener, claimer (claims no more), publishers (finish what is out), marker
//! (records it), claimer (frees the buckets). Bounded by the grace time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use actix::prelude::*;
use futures_util::future::join_all;
use tokio::sync::{oneshot, watch};
use tokio::time::{timeout, timeout_at};

use super::breaker::{Breaker, State};
use super::claimer::{self, Abandon, Claimer, Leave, Ready};
use super::listener::{self, Hearing, Listener};
use super::marker::{Flush, Marker, Policy, ReturnTo, Totals};
use super::publisher::{self, GiveBack, Kill, Publisher};
use crate::config::Config;
use crate::metrics;
use crate::sink::{Sink, Transport};
use crate::store::{Lag, Store};

/// The lag gauges. Once a minute keeps an idle relay quiet; `/status` asks anew each time.
const LAG_EVERY: Duration = Duration::from_secs(60);
/// More rebuilds within [`REBUILD_WINDOW`] are a fault that rebuilding does not mend.
const MOST_REBUILDS: usize = 5;
const REBUILD_WINDOW: Duration = Duration::from_secs(60);
/// Before a rebuild, times the number of recent ones.
const REBUILD_PAUSE: Duration = Duration::from_millis(200);
/// Part of the grace time that is kept for marks and the release of claims.
const MOST_FOR_MARKS: Duration = Duration::from_secs(3);
/// A claimer that is being abandoned answers at once or not at all.
const ABANDON_TIMEOUT: Duration = Duration::from_millis(500);

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

/// A failure that speaks for the broker.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Trouble {
    /// What the broker or the network said.
    pub message: String,
}

/// Confirms arrive.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Flowing;

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
    /// `closed`, `open` or `half-open`.
    pub breaker: &'static str,
    /// Why the breaker is not closed.
    pub breaker_reason: Option<String>,
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
    /// Rebuilds after an actor died.
    pub restarts: u64,
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
    /// Events whose confirm was still outstanding when the grace time was over.
    pub unconfirmed: Vec<String>,
    /// Why it could not go on.
    pub error: Option<String>,
}

struct Generation {
    listener: Addr<Listener>,
    claimer: Addr<Claimer>,
    publishers: Vec<Addr<Publisher>>,
    marker: Addr<Marker>,
}

/// See the module's head.
pub struct Supervisor {
    store: Store,
    config: Arc<Config>,
    replica: String,
    once: bool,
    sink: Arc<dyn Sink>,
    generation: Option<Generation>,
    breaker: Breaker,
    hearing: Arc<watch::Sender<Hearing>>,
    totals: Arc<Totals>,
    rebuilds: VecDeque<Instant>,
    restarts: u64,
    /// The breaker has been closed before.
    delivered: bool,
    /// Why the end is an untimely one.
    fault: Option<String>,
    ending: bool,
    ended: Option<oneshot::Sender<Ending>>,
}

impl Supervisor {
    /// A supervisor that tells `ended` how it went.
    pub fn new(
        store: Store,
        config: Arc<Config>,
        replica: String,
        once: bool,
        sink: Arc<dyn Sink>,
        ended: oneshot::Sender<Ending>,
    ) -> Self {
        Self {
            breaker: Breaker::new(config.retry.stop_after_failures, Instant::now()),
            store,
            config,
            replica,
            once,
            sink,
            generation: None,
            hearing: Arc::new(watch::channel(Hearing::Lost("not connected yet".into())).0),
            totals: Arc::default(),
            rebuilds: VecDeque::new(),
            restarts: 0,
            delivered: false,
            fault: None,
            ending: false,
            ended: Some(ended),
        }
    }

    // ---- the generation ------------------------------------------------------------------------

    fn build(&mut self, old_tokens: Vec<i32>, context: &mut Context<Self>) {
        let me = context.address();
        let relay = &self.config.relay;
        let policy = Policy {
            max_attempts: self.config.retry.max_attempts,
            backoff: self.config.retry.backoff,
        };
        let marker = Marker::new(
            self.store.clone(),
            policy,
            self.totals.clone(),
            me.clone().recipient(),
        )
        .start();
        let links = publisher::Links {
            marker: marker.clone(),
            trouble: me.clone().recipient(),
            flowing: me.clone().recipient(),
            exited: me.clone().recipient(),
        };
        let publishers: Vec<_> = (0..relay.partitions)
            .map(|partition| {
                Publisher::new(partition, relay.window, self.sink.clone(), links.clone()).start()
            })
            .collect();
        let settings = claimer::Settings {
            replica: self.replica.clone(),
            lease: relay.lease,
            tick: relay.tick,
            partitions: relay.partitions,
            batch_size: relay.batch_size,
            // Twice what can be in flight: the next rows are at hand when confirms come.
            most_in_hand: relay.partitions * relay.window * 2,
            once: self.once,
        };
        let links = claimer::Links {
            publishers: publishers.clone(),
            marker: marker.clone(),
            exited: me.clone().recipient(),
            idle: me.clone().recipient(),
        };
        let claimer = Claimer::new(self.store.clone(), settings, links, old_tokens).start();
        marker.try_send(ReturnTo(claimer.clone().recipient())).ok();
        let listener = Listener::new(
            self.store.clone(),
            claimer.clone().recipient(),
            me.recipient(),
            self.hearing.clone(),
            relay.wake,
        )
        .start();
        claimer
            .try_send(Ready(self.breaker.state() == &State::Closed))
            .ok();
        self.generation = Some(Generation {
            listener,
            claimer,
            publishers,
            marker,
        });
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
            let tokens = timeout(ABANDON_TIMEOUT, generation.claimer.send(Abandon)).await;
            generation.listener.try_send(listener::Drain).ok();
            for publisher in &generation.publishers {
                publisher.try_send(Stop).ok();
            }
            generation.marker.try_send(Stop).ok();
            tokio::time::sleep(pause).await;
            // A claimer that died left its session to end with it; the lock it held is gone then.
            tokens.ok().and_then(Result::ok).unwrap_or_default()
        };
        context.spawn(abandon.into_actor(self).map(|tokens, actor, context| {
            if !actor.ending {
                actor.build(tokens, context);
            }
        }));
    }

    // ---- the breaker ---------------------------------------------------------------------------

    fn opened(&mut self, context: &mut Context<Self>) {
        tracing::error!(
            reason = self.breaker.reason(),
            "breaker open, nothing is sent"
        );
        if let Some(generation) = &self.generation {
            generation.claimer.try_send(Ready(false)).ok();
            for publisher in &generation.publishers {
                publisher.try_send(GiveBack).ok();
            }
        }
        self.rest(context);
    }

    /// Arms the timer for the next probe.
    fn rest(&mut self, context: &mut Context<Self>) {
        self.show_breaker();
        if let State::Open { until } = *self.breaker.state() {
            context.run_later(until.saturating_duration_since(Instant::now()), Self::probe);
        }
    }

    fn probe(&mut self, context: &mut Context<Self>) {
        if self.ending || !self.breaker.probe(Instant::now()) {
            return;
        }
        self.show_breaker();
        let sink = self.sink.clone();
        context.spawn(async move { sink.probe().await }.into_actor(self).map(
            |probed, actor, context| {
                actor.probed(probed.map_err(|error| error.message), context);
            },
        ));
    }

    fn probed(&mut self, probed: Result<(), String>, context: &mut Context<Self>) {
        let before = self.breaker.reason().map(str::to_owned);
        let answer = probed.as_ref().copied().map_err(String::as_str);
        if self.breaker.probed(answer, Instant::now()) {
            self.delivered = true;
            tracing::info!(sink = self.sink.name(), "breaker closed, delivering");
            if let Some(generation) = &self.generation {
                generation.claimer.try_send(Ready(true)).ok();
            }
        } else if let Err(reason) = probed {
            if before.as_deref() != Some(&reason) {
                tracing::error!(reason, "not ready to publish, nothing is claimed");
            }
            if self.once {
                // One pass does not wait for a broker.
                let claimed = if self.delivered {
                    "The pass was given up."
                } else {
                    "Nothing was claimed."
                };
                let stop = if reason.ends_with('.') { "" } else { "." };
                self.fault = Some(format!("{reason}{stop} {claimed}"));
                self.drain(context);
                return;
            }
        }
        self.rest(context);
    }

    fn show_breaker(&self) {
        let state = match self.breaker.state() {
            State::Closed => 0.0,
            State::HalfOpen => 1.0,
            State::Open { .. } => 2.0,
        };
        ::metrics::gauge!(metrics::BREAKER_STATE).set(state);
    }

    // ---- lag -----------------------------------------------------------------------------------

    fn lag(&mut self, context: &mut Context<Self>) {
        let store = self.store.clone();
        context.spawn(
            async move { store.lag().await }
                .into_actor(self)
                .map(|lag, _, context| {
                    match lag {
                        Ok(lag) => show_lag(&lag),
                        Err(error) => tracing::debug!(%error, "lag could not be looked up"),
                    }
                    context.run_later(LAG_EVERY, Self::lag);
                }),
        );
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
        tracing::info!(grace = ?self.config.relay.grace, "stopping");
        let drained = drain(generation, self.config.relay.grace);
        context.spawn(drained.into_actor(self).map(|unconfirmed, actor, context| {
            actor.end(unconfirmed, None, context);
        }));
    }

    fn end(
        &mut self,
        unconfirmed: Vec<String>,
        error: Option<String>,
        context: &mut Context<Self>,
    ) {
        self.ending = true;
        let Some(ended) = self.ended.take() else {
            return;
        };
        let count = |total: &std::sync::atomic::AtomicU64| total.load(Ordering::Relaxed);
        let ending = Ending {
            published: count(&self.totals.published),
            failed: count(&self.totals.failed),
            dead: count(&self.totals.dead),
            handed_back: count(&self.totals.handed_back),
            unconfirmed,
            error: error.or(self.fault.take()),
        };
        let sink = self.sink.clone();
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

fn show_lag(lag: &Lag) {
    let age = lag
        .oldest
        .as_ref()
        .and_then(|oldest| oldest.age_seconds)
        .unwrap_or(0.0);
    ::metrics::gauge!(metrics::OLDEST_PENDING_SECONDS).set(age);
    ::metrics::gauge!(metrics::PENDING).set(lag.pending as f64);
    ::metrics::gauge!(metrics::DEAD).set(lag.dead as f64);
}

/// The orderly end of a generation; answers which events were still unconfirmed.
async fn drain(generation: Generation, grace: Duration) -> Vec<String> {
    let deadline = tokio::time::Instant::now() + grace;
    let publish_deadline = deadline - MOST_FOR_MARKS.min(grace / 4);
    generation.listener.try_send(listener::Drain).ok();
    let _ = timeout_at(publish_deadline, generation.claimer.send(claimer::Drain)).await;
    let publishers = generation
        .publishers
        .iter()
        .map(|publisher| publisher.send(publisher::Drain));
    let _ = timeout_at(publish_deadline, join_all(publishers)).await;
    let mut unconfirmed = Vec::new();
    for publisher in &generation.publishers {
        unconfirmed.extend(publisher.send(Kill).await.unwrap_or_default());
    }
    for event in &unconfirmed {
        tracing::warn!(
            event,
            "its confirm was outstanding at the stop: a duplicate is possible"
        );
    }
    if timeout_at(deadline, generation.marker.send(Flush))
        .await
        .is_err()
    {
        tracing::warn!(
            "not everything could be recorded within the grace time: its rows wait for the lease"
        );
    }
    let _ = timeout_at(deadline, generation.claimer.send(Leave)).await;
    let _ = timeout(ABANDON_TIMEOUT, generation.claimer.send(Abandon)).await;
    generation.marker.try_send(Stop).ok();
    unconfirmed
}

impl Actor for Supervisor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        // Reports of children must not be refused; there are at most as many as confirms.
        context.set_mailbox_capacity(0);
        let changes = futures_util::stream::unfold(self.sink.transport(), |mut transport| async {
            transport.changed().await.ok()?;
            let now = transport.borrow_and_update().clone();
            Some((now, transport))
        });
        context.add_stream(changes);
        self.build(Vec::new(), context);
        self.probe(context);
        self.lag(context);
    }
}

impl StreamHandler<Transport> for Supervisor {
    fn handle(&mut self, transport: Transport, context: &mut Self::Context) {
        let reason = match transport {
            Transport::Unknown | Transport::Up => return,
            Transport::Blocked(reason) => format!("the broker asks to wait: {reason}"),
            Transport::Down(reason) => reason,
        };
        if !self.ending && self.breaker.open(&reason, Instant::now()) {
            self.opened(context);
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
        if self.breaker.failed(&trouble.message, Instant::now()) {
            self.opened(context);
        }
    }
}

impl Handler<Flowing> for Supervisor {
    type Result = ();

    fn handle(&mut self, _: Flowing, _: &mut Self::Context) {
        self.breaker.confirmed();
    }
}

impl Handler<Idle> for Supervisor {
    type Result = ();

    fn handle(&mut self, _: Idle, context: &mut Self::Context) {
        self.drain(context);
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
        let count = |total: &std::sync::atomic::AtomicU64| total.load(Ordering::Relaxed);
        let hearing = self.hearing.borrow().clone();
        let mut view = View {
            breaker: match self.breaker.state() {
                State::Closed => "closed",
                State::HalfOpen => "half-open",
                State::Open { .. } => "open",
            },
            breaker_reason: self.breaker.reason().map(str::to_owned),
            listener_trouble: hearing.trouble().map(str::to_owned),
            wake: hearing.wake(),
            published: count(&self.totals.published),
            failed: count(&self.totals.failed),
            dead_lettered: count(&self.totals.dead),
            handed_back: count(&self.totals.handed_back),
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
                (view.breaker != "closed", "broker"),
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
    use crate::sink::null::NullSink;

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
        let supervisor =
            Supervisor::new(store, Arc::new(config), "test".into(), false, sink, ended).start();
        (supervisor, end)
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
