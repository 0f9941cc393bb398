//! HTTP: reads a request, has it verified, waits for its turn, and answers what was committed.
//!
//! # Invariants
//! - Cheap checks come before dear ones, and nothing of a call that was not verified goes further than
//!   a counter. What a stranger is told does not depend on what is stored.
//! - The body is counted as it comes: no header of the sender's is believed.
//! - Every wait ends: for the body after `intake.read_timeout`, for everything after `intake.deadline`.
//! - A transaction is not the request's: it goes on when the sender hangs up, and ends by its own rule.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use actix_web::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, HeaderMap};
use actix_web::web::{Bytes, BytesMut, Data, Path, Payload, ServiceConfig, resource, route};
use actix_web::{HttpRequest, HttpResponse};
use futures_util::StreamExt as _;
use tokio::time::timeout_at;

use super::Intake;
use super::answer;
use super::gate::Room;
use super::signature::{
    ID_HEADER, Rejection, SIGNATURE_HEADER, TIMESTAMP_HEADER, Unverified, Verified,
};
use super::source::{Read, Source};
use super::store::{TakeError, Taken};
use super::work::Progress;

/// Where senders post to.
pub const PATH: &str = "/webhooks/{source}";

/// The routes of the intake's port.
pub(super) fn routes(config: &mut ServiceConfig) {
    config
        .service(resource(PATH).route(route().to(receive)))
        .default_service(route().to(nowhere));
}

/// A name for one request or replay.
pub fn execution_id() -> String {
    format!("{:032x}", rand::random::<u128>())
}

/// Why a request came to nothing.
enum Stopped {
    Rejected(Rejection),
    Overloaded,
}

impl From<Rejection> for Stopped {
    fn from(rejection: Rejection) -> Self {
        Self::Rejected(rejection)
    }
}

async fn nowhere() -> HttpResponse {
    answer::rejected(&Rejection::UnknownSource, "", &execution_id())
}

async fn receive(
    request: HttpRequest,
    name: Path<String>,
    payload: Payload,
    intake: Data<Intake>,
) -> HttpResponse {
    let call = Call {
        began: Instant::now(),
        execution_id: execution_id(),
        intake: intake.into_inner(),
    };
    let (source, word, response) = call.answer(&request, name.as_str(), payload).await;
    let took = call.began.elapsed();
    call.intake.reports.answered(source.as_deref(), word, took);
    response
}

/// One request.
struct Call {
    began: Instant,
    execution_id: String,
    intake: Arc<Intake>,
}

impl Call {
    async fn answer(
        &self,
        request: &HttpRequest,
        name: &str,
        payload: Payload,
    ) -> (Option<Arc<Source>>, &'static str, HttpResponse) {
        let Some(source) = self.intake.source(name) else {
            let rejection = Rejection::UnknownSource;
            let response = answer::rejected(&rejection, "", &self.execution_id);
            return (None, rejection.class(), response);
        };
        let id = text_of(request.headers(), ID_HEADER);
        let (word, response) = match self.verified(request, &source, payload).await {
            Err(Stopped::Rejected(rejection)) => {
                self.intake
                    .reports
                    .rejected(&source, rejection.class(), &rejection.to_string());
                let response = answer::rejected(&rejection, &id, &self.execution_id);
                (rejection.class(), response)
            }
            Err(Stopped::Overloaded) => ("overloaded", self.overloaded(&id)),
            Ok((verified, room)) => {
                let read = source.read(&verified, &self.execution_id);
                match read {
                    Err(rejection) => {
                        self.intake.reports.rejected(
                            &source,
                            rejection.class(),
                            &rejection.to_string(),
                        );
                        let response = answer::rejected(&rejection, &id, &self.execution_id);
                        (rejection.class(), response)
                    }
                    Ok(read) => {
                        let answered = self.take(source.clone(), read).await;
                        drop(room);
                        answered
                    }
                }
            }
        };
        (Some(source), word, response)
    }

    fn overloaded(&self, id: &str) -> HttpResponse {
        answer::later(
            "overloaded: too many requests at once; the sender should retry",
            id,
            &self.execution_id,
        )
    }

    /// Reads the body and checks who sent it.
    async fn verified(
        &self,
        request: &HttpRequest,
        source: &Source,
        payload: Payload,
    ) -> Result<(Verified, Room), Stopped> {
        if request.method() != actix_web::http::Method::POST {
            return Err(Rejection::WrongMethod.into());
        }
        let headers = request.headers();
        let encoded = headers
            .get_all(CONTENT_ENCODING)
            .any(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity"));
        if encoded {
            return Err(Rejection::UnsupportedEncoding.into());
        }
        let (body, room) = self
            .read_body(headers, source.max_body_bytes, payload)
            .await?;
        let all = |name: &str| -> Vec<&[u8]> {
            headers
                .get_all(name)
                .map(actix_web::http::header::HeaderValue::as_bytes)
                .collect()
        };
        let call = Unverified::new(
            &all(ID_HEADER),
            &all(TIMESTAMP_HEADER),
            &all(SIGNATURE_HEADER),
            body,
        )?;
        let verified = call.verify(&source.keys, now(), source.tolerance)?;
        Ok((verified, room))
    }

    async fn read_body(
        &self,
        headers: &HeaderMap,
        most: u64,
        mut payload: Payload,
    ) -> Result<(Bytes, Room), Stopped> {
        let announced = headers
            .get(CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if announced.is_some_and(|length| length > most) {
            return Err(Rejection::BodyTooLarge(most).into());
        }
        let timeout = self.intake.read_timeout;
        let deadline = (self.began + timeout).into();
        let mut room = self.intake.gate.room();
        let mut body = BytesMut::new();
        loop {
            let chunk = match timeout_at(deadline, payload.next()).await {
                Err(_) => return Err(Rejection::TooSlow(timeout.as_secs()).into()),
                Ok(None) => return Ok((body.freeze(), room)),
                Ok(Some(Err(_))) => return Err(Rejection::Incomplete.into()),
                Ok(Some(Ok(chunk))) => chunk,
            };
            let length = body.len() as u64 + chunk.len() as u64;
            if length > most {
                return Err(Rejection::BodyTooLarge(most).into());
            }
            if room.take(chunk.len() as u64).is_err() {
                return Err(Stopped::Overloaded);
            }
            body.extend_from_slice(&chunk);
        }
    }

    /// Waits for a place, and then for the transaction.
    async fn take(&self, source: Arc<Source>, read: Read) -> (&'static str, HttpResponse) {
        let deadline = self.began + self.intake.deadline;
        let id = read.event.id.clone();
        let place = match timeout_at(deadline.into(), self.intake.gate.enter()).await {
            Ok(Ok(place)) => place,
            Ok(Err(_)) => return ("overloaded", self.overloaded(&id)),
            Err(_) => return self.overdue(&source, &id, answer::TRY_AGAIN),
        };
        let (intake, reports) = (self.intake.clone(), self.intake.clone());
        let of_source = source.clone();
        // A task of its own: a sender that hangs up does not stop it halfway.
        let task = actix_rt::spawn(async move {
            let _place = place;
            let progress = Rc::new(Progress::default());
            let verdict = of_source.judge(&read);
            let work = intake
                .store
                .take(&of_source, &read.event, verdict, &progress);
            match timeout_at(deadline.into(), Box::pin(work)).await {
                Ok(answer) => {
                    if let Ok(taken) = &answer {
                        intake.reports.settled(
                            &of_source,
                            taken.outcome,
                            &read.event.id,
                            &taken.detail,
                        );
                    }
                    (read, Ok(answer))
                }
                Err(_) => (read, Err(progress.is_committing())),
            }
        });
        match task.await {
            Ok((read, Ok(Ok(taken)))) => answered(&read, &taken),
            // The server's own limit of a statement is the same deadline, and may be the first to say so.
            Ok((_, Ok(Err(TakeError::Nothing(error))))) if error.is_timeout() => {
                self.overdue(&source, &id, answer::TRY_AGAIN)
            }
            Ok((_, Ok(Err(error)))) => {
                reports.reports.failed(&source, &id, &error.to_string());
                let reason = match error {
                    TakeError::Nothing(_) => answer::TRY_AGAIN,
                    TakeError::Unknown(_) => answer::UNKNOWN,
                };
                ("error", answer::later(reason, &id, &self.execution_id))
            }
            Ok((_, Err(committing))) => {
                let reason = if committing {
                    answer::UNKNOWN
                } else {
                    answer::TRY_AGAIN
                };
                self.overdue(&source, &id, reason)
            }
            Err(error) => {
                tracing::error!(%error, "the task of a webhook died");
                let reason = answer::UNKNOWN;
                ("error", answer::later(reason, &id, &self.execution_id))
            }
        }
    }

    fn overdue(&self, source: &Source, id: &str, reason: &str) -> (&'static str, HttpResponse) {
        self.intake
            .reports
            .overdue(source, id, self.intake.deadline);
        ("deadline", answer::later(reason, id, &self.execution_id))
    }
}

fn answered(read: &Read, taken: &Taken) -> (&'static str, HttpResponse) {
    (taken.outcome.word(), answer::taken(&read.event, taken))
}

/// For the answer only; nothing is believed of it.
fn text_of(headers: &HeaderMap, name: &str) -> String {
    let value = headers.get(name).and_then(|value| value.to_str().ok());
    let text = value.unwrap_or_default();
    text.chars().take(super::signature::MAX_ID_BYTES).collect()
}

/// Seconds since 1970.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    i64::try_from(since.unwrap_or(Duration::ZERO).as_secs()).unwrap_or(i64::MAX)
}
