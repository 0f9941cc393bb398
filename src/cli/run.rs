//! `bellwire run`: carry events until told to stop, or one pass.

use std::sync::Arc;

use actix_web::dev::ServerHandle;
use anyhow::{Context as _, anyhow};
use clap::Args;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{EVENTS_FAILED, FAILED, Failure, TO_NOWHERE, open_sink, open_store, replica_name};
use crate::alert::{Alert, Alerter};
use crate::config::{Config, SinkSetting};
use crate::relay::supervisor::Ending;
use crate::relay::{Relay, wait_for_outbox};
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
    let sink = open_sink(&config)?;
    let recorder = metrics::install().context("cannot install the metrics recorder")?;
    tokio::select! {
        checked = wait_for_outbox(&store, &config.relay, once) => checked?,
        () = stop.asked() => return Ok(Carried::Never),
    }
    let address = config.admin.listen.0.filter(|_| !once);
    let listener = address
        .map(admin::bind)
        .transpose()
        .map_err(anyhow::Error::from)?;
    let config = Arc::new(config);
    tracing::info!(
        replica,
        table = store.names().display(),
        sink = sink.name(),
        "starting"
    );
    if config.relay.sink == SinkSetting::Null {
        tracing::warn!("{TO_NOWHERE}");
    }
    let mut relay = Relay::start(
        store.clone(),
        config.clone(),
        replica,
        (sink, alerter.clone()),
        once,
    )?;
    let admin = match listener {
        Some(listener) => {
            // As bound: the port may have been left to the system.
            let bound = listener.local_addr().context("admin port")?;
            let (server, handle) =
                admin::serve(listener, relay.supervisor(), store, recorder, &config.admin)
                    .context("admin port")?;
            actix_rt::spawn(server);
            tracing::info!(address = %bound, "admin port open");
            Some(handle)
        }
        None => None,
    };
    let ending = tokio::select! {
        ending = relay.ended() => ending,
        () = stop.asked() => {
            relay.drain();
            tokio::select! {
                ending = relay.ended() => ending,
                () = stop.asked() => return Ok(Carried::Abandoned),
            }
        }
    };
    close(admin).await;
    Ok(Carried::Ended(ending))
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
