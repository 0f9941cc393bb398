//! The relay in your own process.
//!
//! ```text
//!   your runtime                        thread "bellwire-relay"
//!   OutboxRelay::start ───config──────▶ actix system: Relay, alerts
//!   RunningRelay ◀── View, Ending ───── supervisor
//! ```
//!
//! # Invariants
//! - The actor system has a thread and a runtime of its own: whatever runtime calls, and however busy it
//!   is, leases are renewed in time.
//! - The thread ends by itself once it was told to stop, or its handle was dropped, or the relay came to
//!   its end; whoever waits for it is then told how it went.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use actix::Addr;
use tokio::sync::{oneshot, watch};

use super::OutboxError;
use crate::alert::{Alert, Alerter};
use crate::config::Config;
use crate::relay::supervisor::{Ending, Nudge, Observe, Supervisor, View};
use crate::relay::{Relay, wait_for_outbox};
use crate::sink;
use crate::store::Store;

/// How long the end waits for alerts that are still to be sent.
const FLUSH_ALERTS: Duration = Duration::from_secs(5);

/// A relay for your own process: what `bellwire run` is, without the admin port, signals and logs.
///
/// Events are logged by `tracing` and counted by `metrics`, for whichever subscriber and recorder your
/// program has. Other replicas, in your program or out of it, share the work.
///
/// ```no_run
/// use bellwire::config::Config;
/// use bellwire::outbox::OutboxRelay;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// // bellwire.toml and the environment, as `bellwire run` reads them.
/// let config = Config::load(None)?;
/// let mut relay = OutboxRelay::new(config)?.start()?;
/// tokio::select! {
///     ended = relay.ended() => {
///         ended?; // only ever an error: nobody told it to stop
///     }
///     _ = tokio::signal::ctrl_c() => {}
/// }
/// let ending = relay.stop().await?;
/// println!("{} events published", ending.published);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct OutboxRelay {
    config: Arc<Config>,
}

impl OutboxRelay {
    /// A relay of this configuration. Connects to nothing yet.
    ///
    /// # Errors
    /// Names the key of the configuration that is wrong.
    pub fn new(config: Config) -> Result<Self, OutboxError> {
        config.validate()?;
        // Whatever speaks TLS takes it from here. An error means that your program has chosen already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // Both only look at the configuration; they are made anew where they are used.
        Store::new(&config.database, "bellwire library")?;
        Ok(Self {
            config: Arc::new(config),
        })
    }

    /// Starts the relay on a thread of its own; it runs until it is told to stop.
    ///
    /// A database or broker that is away is waited for, also at the start.
    ///
    /// # Errors
    /// There can be no thread.
    pub fn start(&self) -> Result<RunningRelay, OutboxError> {
        self.spawn(false)
    }

    /// One pass over what is due, as `bellwire run --once` makes it; answers how many events were
    /// delivered. For who has a scheduler of their own: each pass connects anew and registers as a
    /// replica, so that in a loop without pause [`Self::start`] is the better choice.
    ///
    /// Events that fail in a pass are tried again by a later one, or are dead: see
    /// [`Lag`](crate::store::Lag).
    ///
    /// # Errors
    /// The outbox is not what this version works with, or the database or broker is away. No event has
    /// lost an attempt by that, and none is marked that the broker did not confirm.
    pub async fn deliver(&self) -> Result<u64, OutboxError> {
        let mut relay = self.spawn(true)?;
        let ending = relay.ended().await?;
        if ending.handed_back > 0 && ending.published == 0 && ending.failed + ending.dead == 0 {
            return Err(OutboxError::Relay(format!(
                "nothing could be delivered: {} event(s) were handed back",
                ending.handed_back
            )));
        }
        Ok(ending.published)
    }

    fn spawn(&self, once: bool) -> Result<RunningRelay, OutboxError> {
        let (stop, stopping) = watch::channel(false);
        let (tell, ended) = oneshot::channel();
        let (supervised, supervisor) = watch::channel(None);
        let config = self.config.clone();
        let thread = thread::Builder::new().name("bellwire-relay".into());
        let spawned = thread.spawn(move || {
            let carried = actix_rt::System::new()
                .block_on(Box::pin(carry(config, once, stopping, supervised)));
            // Nobody waits for it any more: it was told to stop by dropping the handle.
            let _ = tell.send(carried);
        });
        spawned.map_err(|error| OutboxError::Relay(format!("cannot start a thread: {error}")))?;
        Ok(RunningRelay {
            stop,
            supervisor,
            ended: Ended::Not(ended),
        })
    }
}

/// A relay at work. Dropping it tells the relay to stop, and does not wait.
#[derive(Debug)]
pub struct RunningRelay {
    stop: watch::Sender<bool>,
    supervisor: watch::Receiver<Option<Addr<Supervisor>>>,
    ended: Ended,
}

#[derive(Debug)]
enum Ended {
    Not(oneshot::Receiver<Result<Ending, OutboxError>>),
    /// And it was told already.
    Told,
}

impl RunningRelay {
    /// Stops it in order, as SIGTERM stops `bellwire run`: nothing more is claimed, what is in flight is
    /// confirmed and marked within `relay.grace`, the rest is released. Answers what it did.
    ///
    /// # Errors
    /// As of [`Self::ended`].
    pub async fn stop(mut self) -> Result<Ending, OutboxError> {
        self.stop.send_replace(true);
        self.ended().await
    }

    /// Waits for its end. Without [`Self::stop`] that is an untimely one. May be dropped and called
    /// again.
    ///
    /// # Errors
    /// The outbox is not what this version works with, the configuration cannot be used, or its actors
    /// died again and again.
    pub async fn ended(&mut self) -> Result<Ending, OutboxError> {
        let Ended::Not(ended) = &mut self.ended else {
            return Err(OutboxError::NoAnswer("the relay has ended, as was told"));
        };
        let told = ended.await;
        self.ended = Ended::Told;
        told.unwrap_or_else(|_| Err(OutboxError::Relay("the relay's thread panicked".into())))
    }

    /// How it stands: can it deliver, and if not, why. None before it has found the outbox, and after
    /// its end.
    pub async fn view(&self) -> Option<View> {
        let supervisor = self.supervisor.borrow().clone()?;
        supervisor.send(Observe).await.ok()
    }

    /// Has it look for events now: for writers whose trigger is silent.
    pub fn wake(&self) {
        if let Some(supervisor) = &*self.supervisor.borrow() {
            // An ended relay has nothing to look for.
            supervisor.try_send(Nudge).ok();
        }
    }
}

async fn carry(
    config: Arc<Config>,
    once: bool,
    mut stopping: watch::Receiver<bool>,
    supervised: watch::Sender<Option<Addr<Supervisor>>>,
) -> Result<Ending, OutboxError> {
    let replica = config.replica_name();
    let store = Store::new(&config.database, &format!("bellwire library {replica}"))?;
    let alerter = Alerter::start(&config.alerts, &replica, &store.names().display());
    let sink = sink::open(&config)?;
    let asked = async move {
        // A handle that was dropped asks, too.
        let _ = stopping.wait_for(|stop| *stop).await;
    };
    tokio::pin!(asked);
    tokio::select! {
        checked = wait_for_outbox(&store, &config.relay, once) => checked?,
        () = &mut asked => return Ok(Ending::default()),
    }
    let mut relay = Relay::start(store, config, replica, (sink, alerter.clone()), once)?;
    supervised.send_replace(Some(relay.supervisor()));
    let ending = tokio::select! {
        ending = relay.ended() => ending,
        () = &mut asked => {
            relay.drain();
            relay.ended().await
        }
    };
    supervised.send_replace(None);
    let ended = match ending.error.clone() {
        None => Ok(ending),
        Some(reason) => {
            alerter.send(Alert::RelayFailed {
                reason: reason.clone(),
            });
            Err(OutboxError::Relay(reason))
        }
    };
    alerter.flush(FLUSH_ALERTS).await;
    ended
}
