//! The admin port: `/metrics`, `/healthz`, `/readyz`, `/status`.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use actix::Addr;
use actix_web::dev::{Server, ServerHandle};
use actix_web::web::{Data, get};
use actix_web::{App, HttpResponse, HttpServer};
use metrics_exporter_prometheus::PrometheusHandle;
use serde::Serialize;
use tokio::time::timeout;

use crate::relay::supervisor::{self, Supervisor};
use crate::store::{Lag, ReplicaStatus, Store};

/// A supervisor or database that answers later than this is in trouble.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// For requests under way at the stop.
const SHUTDOWN_SECONDS: u64 = 1;

/// Why the admin port could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("admin.listen: cannot listen on {address}: {reason}; give a free address, or `off`")]
pub struct AdminError {
    address: SocketAddr,
    reason: std::io::Error,
}

#[derive(Clone)]
struct Sources {
    supervisor: Addr<Supervisor>,
    store: Store,
    metrics: PrometheusHandle,
}

/// What `/status` answers.
#[derive(Debug, Serialize)]
pub struct Status {
    /// This relay.
    pub relay: supervisor::View,
    /// The outbox; none when the database did not answer.
    pub lag: Option<Lag>,
    /// All relays of this outbox, as the database knows them.
    pub replicas: Vec<ReplicaStatus>,
}

/// Binds the port. Done before a relay starts, so that a taken address stops the start.
///
/// # Errors
/// When the address cannot be bound.
pub fn bind(address: SocketAddr) -> Result<TcpListener, AdminError> {
    TcpListener::bind(address).map_err(|reason| AdminError { address, reason })
}

/// Serves a bound port.
///
/// # Errors
/// When the listener cannot be used.
pub fn serve(
    listener: TcpListener,
    supervisor: Addr<Supervisor>,
    store: Store,
    metrics: PrometheusHandle,
) -> std::io::Result<(Server, ServerHandle)> {
    let sources = Sources {
        supervisor,
        store,
        metrics,
    };
    let server = HttpServer::new(move || {
        App::new()
            .app_data(Data::new(sources.clone()))
            .route("/metrics", get().to(metrics_text))
            .route("/healthz", get().to(healthz))
            .route("/readyz", get().to(readyz))
            .route("/status", get().to(status))
    })
    .workers(1)
    .disable_signals()
    .shutdown_timeout(SHUTDOWN_SECONDS)
    .listen(listener)?
    .run();
    let handle = server.handle();
    Ok((server, handle))
}

async fn metrics_text(sources: Data<Sources>) -> HttpResponse {
    sources.metrics.run_upkeep();
    HttpResponse::Ok()
        .content_type("text/plain; version=0.0.4; charset=utf-8")
        .body(sources.metrics.render())
}

async fn observe(sources: &Sources) -> Option<supervisor::View> {
    timeout(ANSWER_TIMEOUT, sources.supervisor.send(supervisor::Observe))
        .await
        .ok()?
        .ok()
}

/// The process: does its supervisor still answer? A broker that is away is no reason to restart it.
async fn healthz(sources: Data<Sources>) -> HttpResponse {
    match observe(&sources).await {
        Some(_) => HttpResponse::Ok().body("ok\n"),
        None => HttpResponse::ServiceUnavailable().body("the supervisor does not answer\n"),
    }
}

/// Delivering, or at least able to. An idle outbox is ready.
async fn readyz(sources: Data<Sources>) -> HttpResponse {
    #[derive(Serialize)]
    struct Readiness {
        ready: bool,
        reasons: Vec<&'static str>,
    }
    let (ready, reasons) = observe(&sources)
        .await
        .map_or((false, vec!["supervisor"]), |view| {
            (view.ready, view.reasons)
        });
    let readiness = Readiness { ready, reasons };
    if ready {
        HttpResponse::Ok().json(readiness)
    } else {
        HttpResponse::ServiceUnavailable().json(readiness)
    }
}

async fn status(sources: Data<Sources>) -> HttpResponse {
    let (relay, lag, replicas) = futures_util::join!(
        observe(&sources),
        timeout(ANSWER_TIMEOUT, sources.store.lag()),
        timeout(ANSWER_TIMEOUT, sources.store.replicas()),
    );
    HttpResponse::Ok().json(Status {
        relay: relay.unwrap_or_default(),
        lag: lag.ok().and_then(Result::ok),
        replicas: replicas.ok().and_then(Result::ok).unwrap_or_default(),
    })
}
