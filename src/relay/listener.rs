//! NOTIFY: hears the doorbell and wakes the claimer.
//!
//! # Role
//! Keeps one session that has done LISTEN; passes rings on as wake-ups. Where the relay polls, by
//! choice or behind a pooler in transaction mode, it keeps none and has nothing to do.
//! # Receives
//! [`Drain`]; its own connection's end.
//! # Sends
//! `Wake` to the claimer; `Exited` to the supervisor.
//! # Invariants
//! LISTEN, then one look, then wait; the same after every reconnect: what was committed in between
//! is found by the look. The session is never in a transaction. It proves that it hears at the start
//! and whenever it was quiet for a minute, so that a pooler in transaction mode or a half-open
//! socket is noticed. Wake-ups are hints: coalesced, never counted.
//! # On failure
//! Reconnects with growing pauses; meanwhile the claimer's tick is the backstop, and the log and
//! `/status` say so.
//! # On shutdown
//! Stops at once: nothing depends on it.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use backoff::ExponentialBackoff;
use backoff::backoff::Backoff as _;
use tokio::sync::watch;
use tokio::time::timeout;

use super::breaker::pauses;
use super::claimer::Wake;
use super::supervisor::{Child, Exited};
use super::sweep::ALL_BUCKETS;
use crate::config::WakeSetting;
use crate::metrics;
use crate::store::{Connector, Notifications, Store, StoreError};

/// The first word of a proof; every relay ignores those of the others.
const PROOF: &str = "prove:";
/// Payload of a replica's ring when shares may have changed.
const PEER: &str = "peer";
/// Payload of a replica's ring when it keeps writers from ringing from now on.
const PEER_AWAKE: &str = "awake";
/// What a ring begins with that says in which bucket events were freed.
const FREED: &str = "freed:";
/// Quiet for this long: prove again. Once a minute keeps an idle relay quiet.
const QUIET: Duration = Duration::from_secs(60);
/// A notification to oneself takes a round trip.
const PROOF_TIMEOUT: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Stop.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Drain;

/// Does the listener hear?
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hearing {
    /// Notifications arrive.
    Hears,
    /// Events leave by the tick, as configured.
    Polls,
    /// Events leave by the tick: notifications cannot arrive. The sentence names the remedy.
    PollsFor(&'static str),
    /// Not now, and why.
    Lost(String),
}

impl Hearing {
    /// `notify` or `poll-only`: what is meant to wake the relay.
    pub fn wake(&self) -> &'static str {
        match self {
            Self::Hears | Self::Lost(_) => "notify",
            Self::Polls | Self::PollsFor(_) => "poll-only",
        }
    }

    /// What somebody should do something about.
    pub fn trouble(&self) -> Option<&str> {
        match self {
            Self::Hears | Self::Polls => None,
            Self::PollsFor(remedy) => Some(remedy),
            Self::Lost(reason) => Some(reason),
        }
    }
}

/// Why a relay polls that was not told to.
pub const POOLED: &str = "notifications do not arrive through a connection pooler in transaction mode, \
    events wait for the tick: set database.listen_url to a direct connection";

/// How listening ended.
enum End {
    Lost(String),
    /// There is nothing to listen on.
    Pooled,
}

/// See the module's head.
pub struct Listener {
    store: Store,
    claimer: Recipient<Wake>,
    supervisor: Recipient<Exited>,
    hearing: Arc<watch::Sender<Hearing>>,
    wake: WakeSetting,
    pauses: ExponentialBackoff,
    stopping: bool,
}

impl Listener {
    /// A listener that reports on `hearing`.
    pub fn new(
        store: Store,
        claimer: Recipient<Wake>,
        supervisor: Recipient<Exited>,
        hearing: Arc<watch::Sender<Hearing>>,
        wake: WakeSetting,
    ) -> Self {
        Self {
            wake,
            store,
            claimer,
            supervisor,
            hearing,
            pauses: pauses(FIRST_PAUSE, LONGEST_PAUSE),
            stopping: false,
        }
    }

    fn listen(&mut self, context: &mut Context<Self>) {
        let session = listen(
            self.store.clone(),
            self.claimer.clone(),
            self.hearing.clone(),
        );
        context.spawn(session.into_actor(self).map(|end, actor, context| {
            let End::Lost(reason) = end else {
                tracing::warn!("{POOLED}");
                actor.poll(Hearing::PollsFor(POOLED));
                return;
            };
            if *actor.hearing.borrow() == Hearing::Hears {
                actor.pauses.reset();
                tracing::warn!(reason, "not listening, events wait for the tick");
            }
            ::metrics::gauge!(metrics::LISTENING).set(0.0);
            drop(actor.hearing.send_replace(Hearing::Lost(reason)));
            let pause = actor.pauses.next_backoff().unwrap_or(LONGEST_PAUSE);
            context.run_later(pause, Self::listen);
        }));
    }

    fn poll(&self, why: Hearing) {
        ::metrics::gauge!(metrics::LISTENING).set(0.0);
        drop(self.hearing.send_replace(why));
    }
}

impl Actor for Listener {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        match self.wake {
            WakeSetting::Notify => self.listen(context),
            WakeSetting::Poll => self.poll(Hearing::Polls),
        }
    }

    fn stopped(&mut self, _: &mut Self::Context) {
        Exited::report(&self.supervisor, Child::Listener, self.stopping);
    }
}

impl Handler<Drain> for Listener {
    type Result = ();

    fn handle(&mut self, _: Drain, context: &mut Self::Context) {
        self.stopping = true;
        context.stop();
    }
}

/// Listens until the session is lost.
async fn listen(
    store: Store,
    claimer: Recipient<Wake>,
    hearing: Arc<watch::Sender<Hearing>>,
) -> End {
    let listened = async {
        match store.listen_connector().await? {
            Some(connector) => {
                let channel = store.names().channel();
                let lost = listen_on(connector, channel, &claimer, &hearing).await?;
                Ok::<_, StoreError>(End::Lost(lost))
            }
            None => Ok(End::Pooled),
        }
    };
    listened
        .await
        .unwrap_or_else(|error| End::Lost(error.to_string()))
}

async fn listen_on(
    connector: &Connector,
    channel: &str,
    claimer: &Recipient<Wake>,
    hearing: &watch::Sender<Hearing>,
) -> Result<String, StoreError> {
    let (on_lost, is_lost) = tokio::sync::oneshot::channel();
    let (client, mut notifications) = connector.open(|reason| drop(on_lost.send(reason))).await?;
    client
        .batch_execute(&format!("LISTEN \"{}\"", channel.replace('"', "\"\"")))
        .await?;
    // What was committed before LISTEN took effect rang for nobody, and what peers said was heard by
    // nobody.
    wake(
        claimer,
        Wake {
            peers: false,
            awake: true,
            freed: ALL_BUCKETS,
        },
    );
    let lost = async { is_lost.await.unwrap_or_else(|_| "closed".into()) };
    let hear = async {
        loop {
            if !prove(&client, channel, &mut notifications, claimer).await? {
                return Ok(
                    "notifications do not arrive (a connection pooler in transaction mode, or a \
                     half-open connection?)"
                        .to_owned(),
                );
            }
            if *hearing.borrow() != Hearing::Hears {
                tracing::info!(channel, "listening");
                ::metrics::gauge!(metrics::LISTENING).set(1.0);
                drop(hearing.send_replace(Hearing::Hears));
            }
            while let Ok(ring) = timeout(QUIET, notifications.recv()).await {
                let Some(ring) = ring else {
                    return Ok("closed".to_owned());
                };
                pass_on(ring.payload(), &mut notifications, claimer);
            }
        }
    };
    tokio::select! {
        reason = lost => Ok(reason),
        heard = hear => heard,
    }
}

/// Notifies ourselves and waits to hear it. Rings that come first are passed on.
async fn prove(
    client: &tokio_postgres::Client,
    channel: &str,
    notifications: &mut Notifications,
    claimer: &Recipient<Wake>,
) -> Result<bool, StoreError> {
    let word = format!("{PROOF}{:016x}", rand::random::<u64>());
    let heard = async {
        client
            .execute("SELECT pg_notify($1, $2)", &[&channel, &word])
            .await?;
        while let Some(ring) = notifications.recv().await {
            if ring.payload() == word {
                return Ok(true);
            }
            // One by one: the word we wait for may be among those that follow.
            if is_ring(ring.payload()) {
                wake(claimer, hint(ring.payload()));
            }
        }
        Ok(false)
    };
    timeout(PROOF_TIMEOUT, heard).await.unwrap_or(Ok(false))
}

/// One wake-up for this ring and all that came with it.
fn pass_on(first: &str, notifications: &mut Notifications, claimer: &Recipient<Wake>) {
    let mut rung = is_ring(first);
    let mut hint = hint(first);
    while let Ok(more) = notifications.try_recv() {
        rung |= is_ring(more.payload());
        let more = self::hint(more.payload());
        hint.peers |= more.peers;
        hint.awake |= more.awake;
        hint.freed |= more.freed;
    }
    if rung {
        wake(claimer, hint);
    }
}

fn is_ring(payload: &str) -> bool {
    !payload.starts_with(PROOF)
}

fn hint(payload: &str) -> Wake {
    Wake {
        peers: payload == PEER,
        awake: payload == PEER_AWAKE,
        freed: payload.strip_prefix(FREED).map_or(0, freed),
    }
}

/// The bucket as a bit; of one that cannot be read, all of them.
fn freed(bucket: &str) -> u64 {
    let number = bucket
        .parse()
        .ok()
        .filter(|number: &u32| *number < u64::BITS);
    number.map_or(ALL_BUCKETS, |number| 1 << number)
}

fn wake(claimer: &Recipient<Wake>, hint: Wake) {
    // Refused only by a claimer that is gone.
    let _ = claimer.try_send(hint);
}
