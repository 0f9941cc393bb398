//! The intake: signed webhooks into PostgreSQL, each exactly once.
//!
//! ```text
//!   sender ──POST──▶ http ──▶ signature ──▶ source ──▶ gate ──▶ store ──▶ answer
//!                    size     id, time,     JSON,      a place  one transaction:
//!                    limit    HMAC          schema,    or 503   repeat? handler, dead letter, audit
//!                                           route
//! ```
//!
//! # Invariants
//! - A webhook that was answered with 200 is a committed effect or a dead letter: never both, never
//!   twice, never lost. One that was answered with anything else left nothing, unless the outcome of the
//!   commit was unknown: then its repeat is told.
//! - Nothing that was not verified is stored.
//! - The intake has connections and threads of its own: what becomes of it does not concern the relay,
//!   nor the other way round.
//!
//! [`signature`] decides who sent it, [`source`] what is to be done with it, [`store`] does it.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use actix_web::dev::ServerHandle;
use actix_web::web::Data;
use actix_web::{App, HttpServer};
use tokio::sync::watch;

use crate::alert::Alerter;
use crate::config::{Config, ConfigError, IntakeConfig};
use crate::store::StoreError;
use crate::tls;

pub mod http;
pub mod signature;
pub mod pointer;
pub mod statement;
pub mod schema;
pub mod route;
pub mod source;
pub mod gate;
pub mod work;
pub mod store;
pub mod answer;
pub mod replay;
pub mod dead;
pub mod report;
mod upkeep;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;

use gate::Gate;
use replay::Replay;
use report::Reports;
use source::Source;
use store::IntakeStore;

/// Threads that read, verify and validate. The database is what takes the time.
const WORKERS: usize = 2;
/// Connections for replays and upkeep beside those for requests.
const MORE_CONNECTIONS: usize = 2;
/// Between tries to serve the port again, should that ever end by itself.
const SERVE_PAUSE: Duration = Duration::from_secs(1);

/// Why the intake could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum IntakeError {
    /// An option is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The database is not what the routes need.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The port is not to be had.
    #[error("intake.listen: cannot listen on {address}: {reason}; give a free address, or `off`")]
    Listen {
        /// As configured.
        address: SocketAddr,
        /// Of the operating system.
        reason: std::io::Error,
    },
}

/// What all requests share.
pub struct Intake {
    sources: Vec<Arc<Source>>,
    store: IntakeStore,
    gate: Gate,
    reports: Reports,
    read_timeout: Duration,
    deadline: Duration,
}

impl Intake {
    /// Reads sources, secrets, schemas and routes; connects to nothing yet.
    ///
    /// # Errors
    /// Names the option that is wrong.
    pub fn new(config: &Config, replica: &str, alerter: Alerter) -> Result<Self, IntakeError> {
        let IntakeConfig {
            concurrency,
            queue,
            read_timeout,
            deadline,
            ..
        } = config.intake;
        let size = usize::try_from(concurrency).unwrap_or(usize::MAX);
        let store = IntakeStore::new(
            &config.database,
            &format!("bellwire intake {replica}"),
            size.saturating_add(MORE_CONNECTIONS),
            deadline,
        )?;
        Ok(Self {
            sources: source::sources(&config.intake)?,
            store,
            gate: Gate::new(concurrency, queue, gate::MOST_BUFFERED),
            reports: Reports::new(alerter),
            read_timeout,
            deadline,
        })
    }

    /// Has the database look at every statement of the routes.
    ///
    /// # Errors
    /// Names the statement that it refuses, and why.
    pub async fn check(&self) -> Result<(), StoreError> {
        self.store.check(&self.sources).await
    }

    /// Where events are.
    pub fn store(&self) -> &IntakeStore {
        &self.store
    }

    /// Who sends.
    pub fn sources(&self) -> &[Arc<Source>] {
        &self.sources
    }

    /// For replays.
    pub fn replay(&self) -> Replay<'_> {
        Replay {
            store: &self.store,
            sources: &self.sources,
            reports: Some(&self.reports),
            deadline: self.deadline,
        }
    }

    fn source(&self, name: &str) -> Option<Arc<Source>> {
        let found = self.sources.iter().find(|source| *source.name == *name);
        found.cloned()
    }
}

/// Binds the port. Done before anything starts, so that a taken address stops the start.
///
/// # Errors
/// When the address cannot be bound.
pub fn bind(address: SocketAddr) -> Result<TcpListener, IntakeError> {
    TcpListener::bind(address).map_err(|reason| IntakeError::Listen { address, reason })
}

/// A port that is served. Goes on until [`Door::close`].
pub struct Door {
    closing: watch::Sender<bool>,
    served: actix_rt::task::JoinHandle<()>,
    upkeep: actix_rt::task::JoinHandle<()>,
}

impl Door {
    /// Serves a bound port, with TLS where there is a certificate. `grace` bounds the end.
    ///
    /// # Errors
    /// When certificate or key cannot be used.
    pub fn open(
        intake: Arc<Intake>,
        listener: TcpListener,
        config: &IntakeConfig,
        grace: Duration,
    ) -> Result<Self, ConfigError> {
        let tls = match (&config.cert_file, &config.key_file) {
            (Some(certificate), Some(key)) => Some(tls::server_config(
                ("intake.cert_file", certificate),
                ("intake.key_file", key),
            )?),
            _ => None,
        };
        let upkeep = actix_rt::spawn(upkeep::run(intake.clone()));
        let (closing, closes) = watch::channel(false);
        let served = actix_rt::spawn(serve(intake, listener, tls, grace, closes));
        Ok(Self {
            closing,
            served,
            upkeep,
        })
    }

    /// Takes no more requests, and waits for those under way, as long as the grace time.
    pub async fn close(self) {
        self.upkeep.abort();
        self.closing.send_replace(true);
        // It died: then there is nothing to wait for.
        let _ = self.served.await;
    }
}

/// Serves until told to end; again, should the server end by itself.
async fn serve(
    intake: Arc<Intake>,
    listener: TcpListener,
    tls: Option<rustls::ServerConfig>,
    grace: Duration,
    mut closes: watch::Receiver<bool>,
) {
    let intake = Data::from(intake);
    loop {
        let started = start(&intake, &listener, tls.clone(), grace);
        let ended = match started {
            Ok((server, handle)) => {
                tokio::pin!(server);
                tokio::select! {
                    ended = &mut server => ended,
                    _ = closes.wait_for(|closing| *closing) => {
                        let stopping = handle.stop(true);
                        let _ = futures_util::join!(stopping, server);
                        return;
                    }
                }
            }
            Err(error) => Err(error),
        };
        let reason = ended
            .err()
            .map_or_else(String::new, |error| error.to_string());
        tracing::error!(reason, "the intake's port is served again");
        tokio::time::sleep(SERVE_PAUSE).await;
    }
}

fn start(
    intake: &Data<Intake>,
    listener: &TcpListener,
    tls: Option<rustls::ServerConfig>,
    grace: Duration,
) -> std::io::Result<(actix_web::dev::Server, ServerHandle)> {
    let listener = listener.try_clone()?;
    let read_timeout = intake.read_timeout;
    let shared = intake.clone();
    let server =
        HttpServer::new(move || App::new().app_data(shared.clone()).configure(http::routes))
            .workers(WORKERS)
            // For the head of a request.
            .client_request_timeout(read_timeout)
            .disable_signals()
            .shutdown_timeout(grace.as_secs());
    let server = match tls {
        Some(tls) => server.listen_rustls_0_23(listener, tls)?,
        None => server.listen(listener)?,
    };
    let server = server.run();
    let handle = server.handle();
    Ok((server, handle))
}
