//! Answers: what the sender is told, and whether sending it again would help.
//!
//! | code | means |
//! | --- | --- |
//! | 200 | the event is ours now: processed, repeated, or kept among the dead letters |
//! | 4xx | the same request would be refused again |
//! | 503 | nothing was stored, or nobody knows: send it again |
//!
//! Never 410, which would end the subscription at many senders.

use actix_web::HttpResponse;
use actix_web::http::StatusCode;
use actix_web::http::header::{ALLOW, RETRY_AFTER};
use serde::Serialize;

use super::route::Event;
use super::signature::Rejection;
use super::store::{Outcome, Taken};

/// Seconds until a sender should try again: most troubles of a database are over then.
const RETRY_AFTER_SECONDS: u64 = 5;

/// What is answered when something of ours is the reason.
pub const TRY_AGAIN: &str = "the intake failed after verification; the sender should retry";
/// The same when the commit may have gone through.
pub const UNKNOWN: &str =
    "the outcome of the commit is unknown; the sender should retry, and is told then";

/// Of an event that is ours now.
#[derive(Debug, Serialize)]
struct Accepted<'a> {
    outcome: &'static str,
    event_id: &'a str,
    event_type: &'a str,
    stored_status: &'a str,
    attempts: i32,
    detail: &'a str,
    first_execution_id: &'a str,
    execution_id: &'a str,
}

/// Of all others.
#[derive(Debug, Serialize)]
struct Refused<'a> {
    outcome: &'static str,
    reason: &'a str,
    event_id: &'a str,
    execution_id: &'a str,
}

/// Whatever was committed.
pub fn taken(event: &Event, taken: &Taken) -> HttpResponse {
    if taken.outcome == Outcome::Conflict {
        let reason = format!(
            "id_conflict: event {} is already in the store with a different payload; the new body was \
             not stored",
            event.id
        );
        return refusal(
            StatusCode::CONFLICT,
            &Refused {
                outcome: taken.outcome.word(),
                reason: &reason,
                event_id: &event.id,
                execution_id: &event.execution_id,
            },
        );
    }
    HttpResponse::Ok().json(Accepted {
        outcome: taken.outcome.word(),
        event_id: &event.id,
        event_type: &event.event_type,
        stored_status: &taken.stored_status,
        attempts: taken.attempts,
        detail: &taken.detail,
        first_execution_id: &taken.first_execution_id,
        execution_id: &event.execution_id,
    })
}

/// Something the sender did wrong.
pub fn rejected(rejection: &Rejection, event_id: &str, execution_id: &str) -> HttpResponse {
    let status = StatusCode::from_u16(rejection.status()).expect("a code of the list");
    let mut response = refusal(
        status,
        &Refused {
            outcome: "rejected",
            reason: &rejection.to_string(),
            event_id,
            execution_id,
        },
    );
    if *rejection == Rejection::WrongMethod {
        let post = "POST".parse().expect("a header's value");
        response.headers_mut().insert(ALLOW, post);
    }
    // The rest of the body is not waited for.
    if matches!(
        rejection,
        Rejection::BodyTooLarge(_)
            | Rejection::TooSlow(_)
            | Rejection::Incomplete
            | Rejection::UnsupportedEncoding
            | Rejection::UnknownSource
            | Rejection::WrongMethod
    ) {
        response
            .head_mut()
            .set_connection_type(actix_web::http::ConnectionType::Close);
    }
    response
}

/// Something that sending again helps.
pub fn later(reason: &str, event_id: &str, execution_id: &str) -> HttpResponse {
    let mut response = refusal(
        StatusCode::SERVICE_UNAVAILABLE,
        &Refused {
            outcome: "error",
            reason,
            event_id,
            execution_id,
        },
    );
    response
        .headers_mut()
        .insert(RETRY_AFTER, RETRY_AFTER_SECONDS.into());
    response
}

fn refusal(status: StatusCode, refused: &Refused<'_>) -> HttpResponse {
    HttpResponse::build(status).json(refused)
}
