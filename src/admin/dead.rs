//! Dead letters over HTTP, behind the admin token.

use actix_web::web::{Data, Json, Path, Query};
use std::future::{Ready, ready};

use actix_web::dev::Payload;
use actix_web::error::InternalError;
use actix_web::web::JsonConfig;
use actix_web::{FromRequest, HttpRequest, HttpResponse};
use serde::{Deserialize, Serialize};

use super::{Sources, bearer, refused, refuses, unavailable};
use crate::store::{Change, DeadEvent, DeadFilter};

/// Events in one answer, unless asked for otherwise.
const LISTED: u32 = 100;
/// Events in one answer or changed by one request, at most.
const MOST: u32 = 10_000;

/// Longest body: ten thousand ids of twenty digits.
const LONGEST_BODY: usize = 256 * 1024;

/// Whoever has the token. The first argument of each operation, so that nothing else of a request is
/// looked at without it.
pub(super) struct Admitted;

impl FromRequest for Admitted {
    type Error = actix_web::Error;
    type Future = Ready<Result<Self, Self::Error>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let token = request
            .app_data::<Data<Sources>>()
            .and_then(|sources| sources.token.as_ref());
        ready(match refuses(token, "admin.token", bearer(request)) {
            Some(refusal) => Err(InternalError::from_response("not admitted", refusal).into()),
            None => Ok(Self),
        })
    }
}

/// How orders are read: as JSON whatever the client calls it, since `curl --data` calls it a form.
pub(super) fn orders() -> JsonConfig {
    JsonConfig::default()
        .limit(LONGEST_BODY)
        .content_type_required(false)
        .content_type(|_| true)
        .error_handler(|error, _| {
            let reason =
                format!("the body is no order, a JSON object like {{\"ids\": [42]}}: {error}");
            InternalError::from_response(error, refused(&reason)).into()
        })
}

/// Which dead events, as query parameters.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Listing {
    aggregate_type: Option<String>,
    aggregate_id: Option<String>,
    event_type: Option<String>,
    reason: Option<String>,
    #[serde(with = "humantime_serde")]
    older_than: Option<std::time::Duration>,
    #[serde(with = "humantime_serde")]
    newer_than: Option<std::time::Duration>,
    /// With ids above this one.
    after: Option<i64>,
    limit: Option<u32>,
}

/// What to replay or discard.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Order {
    ids: Option<Vec<i64>>,
    aggregate_type: Option<String>,
    aggregate_id: Option<String>,
    event_type: Option<String>,
    reason: Option<String>,
    #[serde(with = "humantime_serde")]
    older_than: Option<std::time::Duration>,
    #[serde(with = "humantime_serde")]
    newer_than: Option<std::time::Duration>,
    /// Needed to mean every dead event.
    all: bool,
    dry_run: bool,
    limit: Option<u32>,
}

impl Order {
    /// Which dead events it means: every one only if it says so.
    pub(super) fn filter(self) -> Result<DeadFilter, &'static str> {
        let all = self.all;
        let filter = DeadFilter {
            ids: self.ids,
            aggregate_type: self.aggregate_type,
            aggregate_id: self.aggregate_id,
            event_type: self.event_type,
            reason: self.reason,
            older_than: self.older_than,
            newer_than: self.newer_than,
        };
        match (filter.is_empty(), all) {
            (true, false) => {
                Err("no condition is given: say which, or \"all\": true for every dead event")
            }
            (false, true) => Err("\"all\": true contradicts the conditions beside it"),
            _ => Ok(filter),
        }
    }
}

#[derive(Serialize)]
struct Listed {
    /// Of this kind, whatever the limit.
    matched: i64,
    events: Vec<DeadEvent>,
}

pub(super) async fn list(
    _: Admitted,
    sources: Data<Sources>,
    listing: Query<Listing>,
) -> HttpResponse {
    let listing = listing.into_inner();
    let filter = DeadFilter {
        ids: None,
        aggregate_type: listing.aggregate_type,
        aggregate_id: listing.aggregate_id,
        event_type: listing.event_type,
        reason: listing.reason,
        older_than: listing.older_than,
        newer_than: listing.newer_than,
    };
    let after = listing.after.unwrap_or(i64::MIN);
    let limit = listing.limit.unwrap_or(LISTED);
    if limit > MOST {
        return refused(&format!("limit: must be at most {MOST}"));
    }
    let answer = async {
        Ok(Listed {
            matched: sources.store.dead_count(&filter).await?,
            events: sources.store.dead_list(&filter, after, limit).await?,
        })
    };
    match answer.await {
        Ok(listed) => HttpResponse::Ok().json(listed),
        Err(error) => unavailable(&error),
    }
}

pub(super) async fn show(_: Admitted, sources: Data<Sources>, id: Path<i64>) -> HttpResponse {
    match sources.store.event(*id).await {
        Ok(Some(event)) => HttpResponse::Ok().json(event),
        Ok(None) => HttpResponse::NotFound().body("there is no event of this id\n"),
        Err(error) => unavailable(&error),
    }
}

pub(super) async fn replay(
    _: Admitted,
    sources: Data<Sources>,
    order: Json<Order>,
) -> HttpResponse {
    change(&sources, order.into_inner(), Change::Replay).await
}

pub(super) async fn discard(
    _: Admitted,
    sources: Data<Sources>,
    order: Json<Order>,
) -> HttpResponse {
    change(&sources, order.into_inner(), Change::Discard).await
}

async fn change(sources: &Sources, order: Order, change: Change) -> HttpResponse {
    let (limit, dry_run) = (order.limit, order.dry_run);
    let filter = match order.filter() {
        Ok(filter) => filter,
        Err(reason) => return refused(reason),
    };
    let limit = limit.unwrap_or(MOST);
    if !(1..=MOST).contains(&limit) {
        return refused(&format!("limit: must be between 1 and {MOST}"));
    }
    let answer = sources
        .store
        .dead_order(change, &filter, Some(limit.into()), dry_run, |_, _| {})
        .await;
    match answer {
        Ok(report) => HttpResponse::Ok().json(report),
        Err(error) => unavailable(&error),
    }
}
