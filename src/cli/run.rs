//! `bellwire run`: carry events and take webhooks until told to stop, or one pass over the outbox.
//!
//! Relay and intake are two doors of one process. Whichever is configured runs, and the end of one does
//! not end the other.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use actix_web::dev::ServerHandle;
use anyhow::{Context as _, anyhow};
use clap::Args;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{EVENTS_FAILED, FAILED, Failure, open_sink, open_store, replica_name, to_nowhere};
use crate::alert::{Alert, Alerter};
use crate::config::{Config, IntakeConfig, SinkSetting};
use crate::intake::{self, Door, Intake};
use crate::relay::supervisor::Ending;
use crate::relay::{Relay, wait_for_outbox};
use crate::sink::Sink;
use crate::store::Store;
use crate::{admin, metrics};

/// How long the end of the process waits for alerts that are still to be sent.
const FLUSH_ALERTS: std::time::Duration = std::time::Duration::from_secs(5);

/// Carry events until told to stop.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Make one pass over what is due, then exit: for cron
    #[arg(long)]
    once: bool,
}

/// Both ways to ask for an orderly end. A second one ends the process at once.
struct Stop {
    terminate: Signal,
    interrupt: Signal,
}

impl Stop {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn asked(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// How it went, short of an error at the start.
enum Carried {
    /// Told to stop before it began.
    Never,
    /// Its own end.
    Ended(Ending),
    /// Told to stop twice.
    Abandoned,
}

pub(super) async fn run(config: Config, arguments: Arguments) -> Result<u8, Failure> {
    let stop = Stop::new().context("cannot handle signals")?;
    let replica = replica_name(&config);
    let store = open_store(&config, &format!("run {replica}"))?;
    let alerter = Alerter::start(&config.alerts, &replica, &store.names().display());
    let carried = carry(stop, config, (store, replica), &alerter, arguments.once).await;
    let done = match carried {
        Ok(Carried::Never) => Ok(0),
        Ok(Carried::Ended(ending)) => report(&ending, arguments.once),
        Ok(Carried::Abandoned) => {
            return Err(anyhow!(
                "told to stop twice: ended at once, unrecorded events are published again"
            )
            .into());
        }
        Err(failure) => Err(failure),
    };
    if let Err(failure) = &done {
        let reason = failure.text();
        alerter.send(Alert::RelayFailed { reason });
    }
    alerter.flush(FLUSH_ALERTS).await;
    done
}

async fn carry(
    mut stop: Stop,
    config: Config,
    (store, replica): (Store, String),
    alerter: &Alerter,
    once: bool,
) -> Result<Carried, Failure> {
    let takes = config.intake.is_on() && !once;
    if !config.relay.enabled && !takes {
        return Err(Failure::Misused(
            "nothing to do: relay.enabled is false, and there is no intake.listen to take webhooks on \
             (`--once` is for the relay)"
                .into(),
        ));
    }
    let sink = config
        .relay
        .enabled
        .then(|| open_sink(&config))
        .transpose()?;
    let intake = takes
        .then(|| Prepared::new(&config, &replica, alerter))
        .transpose()?;
    let recorder = metrics::install().context("cannot install the metrics recorder")?;
    tokio::select! {
        checked = wait_for_outbox(&store, &config.relay, once) => checked?,
        () = stop.asked() => return Ok(Carried::Never),
    }
    if let Some(intake) = &intake {
        intake.intake.check().await?;
    }
    let address = config.admin.listen.0.filter(|_| !once);
    let listener = address
        .map(admin::bind)
        .transpose()
        .map_err(anyhow::Error::from)?;
    let config = Arc::new(config);
    let shared = intake.as_ref().map(|intake| intake.intake.clone());
    let door = intake
        .map(|intake| intake.open(&config.intake, config.relay.grace))
        .transpose()?;
    let mut relay = sink
        .map(|sink| start_relay(&store, &config, &replica, (sink, alerter.clone()), once))
        .transpose()?;
    let admin = match listener {
        Some(listener) => {
            // As bound: the port may have been left to the system.
            let bound = listener.local_addr().context("admin port")?;
            let doors = (relay.as_ref().map(Relay::supervisor), shared);
            let (server, handle) = admin::serve(listener, doors, store, recorder, &config.admin)
                .context("admin port")?;
            actix_rt::spawn(server);
            tracing::info!(address = %bound, "admin port open");
            Some(handle)
        }
        None => None,
    };
    let carried = until_ended(&mut stop, relay.as_mut(), door, alerter).await;
    close(admin).await;
    Ok(carried)
}

/// An intake whose port is bound.
struct Prepared {
    intake: Arc<Intake>,
    listener: TcpListener,
}

impl Prepared {
    fn new(config: &Config, replica: &str, alerter: &Alerter) -> Result<Self, Failure> {
        let address = config.intake.listen.0.expect("asked for by the caller");
        Ok(Self {
            intake: Arc::new(Intake::new(config, replica, alerter.clone())?),
            listener: intake::bind(address)?,
        })
    }

    fn open(self, config: &IntakeConfig, grace: Duration) -> Result<Door, Failure> {
        let bound = self.listener.local_addr().context("intake port")?;
        let door = Door::open(self.intake, self.listener, config, grace)?;
        tracing::info!(address = %bound, tls = config.cert_file.is_some(), "intake port open");
        Ok(door)
    }
}

fn start_relay(
    store: &Store,
    config: &Arc<Config>,
    replica: &str,
    (sink, alerter): (Arc<dyn Sink>, Alerter),
    once: bool,
) -> Result<Relay, Failure> {
    tracing::info!(
        replica,
        table = store.names().display(),
        sink = sink.name(),
        "starting"
    );
    let used = config.sinks_in_use();
    if used.contains(SinkSetting::Null) {
        tracing::warn!("{}", to_nowhere(&used));
    }
    let replica = replica.to_owned();
    Ok(Relay::start(
        store.clone(),
        config.clone(),
        replica,
        (sink, alerter),
        once,
    )?)
}

/// Until both doors have ended, or somebody was asked twice.
async fn until_ended(
    stop: &mut Stop,
    relay: Option<&mut Relay>,
    door: Option<Door>,
    alerter: &Alerter,
) -> Carried {
    let Some(relay) = relay else {
        stop.asked().await;
        return closed(stop, door, async { Ending::default() }).await;
    };
    tokio::select! {
        ending = relay.ended() => {
            if let (Some(reason), true) = (&ending.error, door.is_some()) {
                // Webhooks are taken on: the liveness probe has somebody restart the whole.
                tracing::error!(reason, "the relay has ended, the intake goes on");
                alerter.send(Alert::RelayFailed { reason: reason.clone() });
                stop.asked().await;
            }
            closed(stop, door, async { ending }).await
        }
        () = stop.asked() => {
            relay.drain();
            closed(stop, door, relay.ended()).await
        }
    }
}

/// Waits for the ends of both, unless it is told to stop once more.
async fn closed(
    stop: &mut Stop,
    door: Option<Door>,
    relay: impl Future<Output = Ending>,
) -> Carried {
    let intake = async {
        if let Some(door) = door {
            door.close().await;
        }
    };
    tokio::select! {
        (ending, ()) = async { tokio::join!(relay, intake) } => Carried::Ended(ending),
        () = stop.asked() => Carried::Abandoned,
    }
}

async fn close(admin: Option<ServerHandle>) {
    if let Some(handle) = admin {
        handle.stop(false).await;
    }
}

fn report(ending: &Ending, once: bool) -> Result<u8, Failure> {
    if let Some(error) = &ending.error {
        return Err(anyhow!("{error}").into());
    }
    tracing::info!(
        published = ending.published,
        failed = ending.failed,
        dead_lettered = ending.dead,
        handed_back = ending.handed_back,
        unconfirmed = ending.unconfirmed.len(),
        "stopped"
    );
    if !once {
        return Ok(0);
    }
    println!(
        "published {}, failed {}, dead-lettered {}, handed back {}",
        ending.published, ending.failed, ending.dead, ending.handed_back
    );
    if ending.failed + ending.dead > 0 {
        return Ok(EVENTS_FAILED);
    }
    // Without a failure of its own an event is handed back for the broker's sake only.
    Ok(if ending.handed_back > 0 && ending.published == 0 {
        FAILED
    } else {
        0
    })
}
