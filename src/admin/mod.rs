//! The admin port: `/metrics`, `/healthz`, `/readyz`, `/status`, `/tail`, `/openapi.json`; `/wake` behind
//! its key; dead letters, those of the intake too, behind the token.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use actix::Addr;
use actix_web::dev::{Server, ServerHandle};
use actix_web::http::header::AUTHORIZATION;
use actix_web::web::{Data, Path, get, post};
use actix_web::{App, HttpRequest, HttpResponse, HttpServer};
use metrics_exporter_prometheus::PrometheusHandle;
use serde::Serialize;
use tokio::time::timeout;

use crate::config::{AdminConfig, Secret};
use crate::intake::Intake;
use crate::relay::supervisor::{self, Nudge, Supervisor};
use crate::store::{Lag, ReplicaStatus, Store, StoreError};

mod dead;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod intake;
mod tail;

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

/// Where a relay is asked for and `relay.enabled` is false.
const NO_RELAY: &str = "there is no relay in this process: relay.enabled is false\n";

#[derive(Clone)]
struct Sources {
    /// Of the relay, if there is one.
    supervisor: Option<Addr<Supervisor>>,
    /// If there is one.
    intake: Option<Arc<Intake>>,
    store: Store,
    metrics: PrometheusHandle,
    token: Option<Secret>,
    wake_key: Option<Secret>,
}

/// Refuses without a configured secret, and without the right one.
fn refuses(secret: Option<&Secret>, key: &str, given: Option<&str>) -> Option<HttpResponse> {
    let Some(secret) = secret else {
        return Some(
            HttpResponse::Forbidden().body(format!("not open: {key} is not configured\n")),
        );
    };
    let right = given.is_some_and(|given| secret.is(given));
    (!right).then(|| {
        HttpResponse::Unauthorized()
            .insert_header(("WWW-Authenticate", "Bearer"))
            .body("give the right key as `Authorization: Bearer ...`\n")
    })
}

fn bearer(request: &HttpRequest) -> Option<&str> {
    let (scheme, given) = request
        .headers()
        .get(AUTHORIZATION)?
        .to_str()
        .ok()?
        .split_once(' ')?;
    scheme
        .eq_ignore_ascii_case("bearer")
        .then(|| given.trim_start())
}

fn refused(reason: &str) -> HttpResponse {
    HttpResponse::BadRequest().body(format!("{reason}\n"))
}

fn unavailable(error: &StoreError) -> HttpResponse {
    HttpResponse::ServiceUnavailable().body(format!("{error}\n"))
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
    (supervisor, intake): (Option<Addr<Supervisor>>, Option<Arc<Intake>>),
    store: Store,
    metrics: PrometheusHandle,
    config: &AdminConfig,
) -> std::io::Result<(Server, ServerHandle)> {
    let sources = Sources {
        supervisor,
        intake,
        store,
        metrics,
        token: config.token.clone(),
        wake_key: config.wake_key.clone(),
    };
    let server = HttpServer::new(move || {
        App::new()
            .app_data(Data::new(sources.clone()))
            .app_data(dead::orders())
            .route("/metrics", get().to(metrics_text))
            .route("/healthz", get().to(healthz))
            .route("/readyz", get().to(readyz))
            .route("/status", get().to(status))
            .route("/tail", get().to(tail::tail))
            .route("/wake", post().to(wake))
            .route("/wake/{key}", post().to(wake_by_path))
            .route("/dead", get().to(dead::list))
            .route("/dead/replay", post().to(dead::replay))
            .route("/dead/discard", post().to(dead::discard))
            .route("/dead/{id}", get().to(dead::show))
            .route("/intake/dead", get().to(intake::list))
            .route("/intake/dead/discard", post().to(intake::discard))
            .route("/intake/dead/{source}/{event_id}", get().to(intake::show))
            .route("/intake/replay", post().to(intake::replay))
            .route("/openapi.json", get().to(openapi))
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

/// What this port and the intake's take and answer.
async fn openapi() -> HttpResponse {
    HttpResponse::Ok()
        .content_type("application/json")
        .body(include_str!("openapi.json"))
}

async fn observe(sources: &Sources) -> Option<supervisor::View> {
    let supervisor = sources.supervisor.as_ref()?;
    timeout(ANSWER_TIMEOUT, supervisor.send(supervisor::Observe))
        .await
        .ok()?
        .ok()
}

/// The process: does its supervisor still answer? A broker that is away is no reason to restart it.
async fn healthz(sources: Data<Sources>) -> HttpResponse {
    if sources.supervisor.is_none() {
        return HttpResponse::Ok().body("ok\n");
    }
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
    let (ready, reasons) = if sources.supervisor.is_none() {
        // An intake alone: it can take webhooks while the database answers.
        let answered = timeout(ANSWER_TIMEOUT, sources.store.server_version()).await;
        match answered {
            Ok(Ok(_)) => (true, Vec::new()),
            _ => (false, vec!["database"]),
        }
    } else {
        observe(&sources)
            .await
            .map_or((false, vec!["supervisor"]), |view| {
                (view.ready, view.reasons)
            })
    };
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

/// A nudge from whoever has just committed: for writers that silence the trigger, or cannot have it.
async fn wake(request: HttpRequest, sources: Data<Sources>) -> HttpResponse {
    nudge(&sources, bearer(&request))
}

async fn wake_by_path(key: Path<String>, sources: Data<Sources>) -> HttpResponse {
    nudge(&sources, Some(key.as_str()))
}

fn nudge(sources: &Sources, key: Option<&str>) -> HttpResponse {
    if let Some(refusal) = refuses(sources.wake_key.as_ref(), "admin.wake_key", key) {
        return refusal;
    }
    match sources
        .supervisor
        .as_ref()
        .map(|relay| relay.try_send(Nudge))
    {
        Some(Ok(())) => HttpResponse::Accepted().body("awake\n"),
        Some(Err(_)) => HttpResponse::ServiceUnavailable().body("the supervisor does not answer\n"),
        None => HttpResponse::NotFound().body(NO_RELAY),
    }
}
