//! Dead letters over HTTP, behind the admin token.

use actix_web::web::{Data, Json, Path, Query};
use actix_web::{HttpRequest, HttpResponse};
use serde::{Deserialize, Serialize};

use super::{Sources, refused, unavailable};
use crate::store::{Change, DeadEvent, DeadFilter};

/// Events in one answer, unless asked for otherwise.
const LISTED: u32 = 100;
/// Events in one answer or changed by one request, at most.
const MOST: u32 = 10_000;

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

#[derive(Serialize)]
struct Listed {
    /// Of this kind, whatever the limit.
    matched: i64,
    events: Vec<DeadEvent>,
}

#[derive(Serialize)]
struct Changed {
    dry_run: bool,
    /// Before the change.
    matched: i64,
    changed: u64,
}

pub(super) async fn list(
    request: HttpRequest,
    sources: Data<Sources>,
    listing: Query<Listing>,
) -> HttpResponse {
    if let Some(refusal) = sources.refuses(&request) {
        return refusal;
    }
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
    let limit = listing.limit.unwrap_or(LISTED).min(MOST);
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

pub(super) async fn show(
    request: HttpRequest,
    sources: Data<Sources>,
    id: Path<i64>,
) -> HttpResponse {
    if let Some(refusal) = sources.refuses(&request) {
        return refusal;
    }
    match sources.store.event(*id).await {
        Ok(Some(event)) => HttpResponse::Ok().json(event),
        Ok(None) => HttpResponse::NotFound().body("there is no event of this id\n"),
        Err(error) => unavailable(&error),
    }
}

pub(super) async fn replay(
    request: HttpRequest,
    sources: Data<Sources>,
    order: Json<Order>,
) -> HttpResponse {
    change(&request, &sources, order.into_inner(), Change::Replay).await
}

pub(super) async fn discard(
    request: HttpRequest,
    sources: Data<Sources>,
    order: Json<Order>,
) -> HttpResponse {
    change(&request, &sources, order.into_inner(), Change::Discard).await
}

async fn change(
    request: &HttpRequest,
    sources: &Sources,
    order: Order,
    change: Change,
) -> HttpResponse {
    if let Some(refusal) = sources.refuses(request) {
        return refusal;
    }
    let filter = DeadFilter {
        ids: order.ids,
        aggregate_type: order.aggregate_type,
        aggregate_id: order.aggregate_id,
        event_type: order.event_type,
        reason: order.reason,
        older_than: order.older_than,
        newer_than: order.newer_than,
    };
    if filter.is_empty() && !order.all {
        return refused("no condition is given: say which, or \"all\": true for every dead event");
    }
    if !filter.is_empty() && order.all {
        return refused("\"all\": true contradicts the conditions beside it");
    }
    let answer = async {
        let matched = sources.store.dead_count(&filter).await?;
        let changed = if order.dry_run {
            0
        } else {
            let limit = u64::from(order.limit.unwrap_or(MOST).min(MOST));
            let store = &sources.store;
            store
                .dead_change_all(change, &filter, Some(limit), |_| {})
                .await?
        };
        Ok(Changed {
            dry_run: order.dry_run,
            matched,
            changed,
        })
    };
    match answer.await {
        Ok(changed) => HttpResponse::Ok().json(changed),
        Err(error) => unavailable(&error),
    }
}
