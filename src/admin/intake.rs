//! Dead letters of the intake over HTTP, behind the admin token.

use actix_web::HttpResponse;
use actix_web::web::{Data, Json, Path, Query};
use serde::{Deserialize, Serialize};

use super::dead::Admitted;
use super::{Sources, refused, unavailable};
use crate::intake::dead::{Letter, LetterFilter, STATUSES};
use crate::intake::http::execution_id;
use crate::intake::replay;

/// Dead letters in one answer, unless asked for otherwise.
const LISTED: u32 = 100;
/// Dead letters in one answer or discarded by one request, at most.
const MOST: u32 = 10_000;

/// Which dead letters, as query parameters.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Listing {
    source: Option<String>,
    reason: Option<String>,
    event_type: Option<String>,
    /// One or several of [`STATUSES`], by commas.
    status: Option<String>,
    limit: Option<u32>,
}

/// What to replay.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ReplayOrder {
    dry_run: bool,
    include_parked: bool,
    limit: u32,
    event_ids: Option<Vec<String>>,
    reason: Option<String>,
}

impl Default for ReplayOrder {
    fn default() -> Self {
        Self {
            dry_run: true,
            include_parked: false,
            limit: replay::DEFAULT_LIMIT,
            event_ids: None,
            reason: None,
        }
    }
}

/// What to discard.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct DiscardOrder {
    source: Option<String>,
    event_ids: Option<Vec<String>>,
    reason: Option<String>,
    event_type: Option<String>,
    /// Needed to mean every open dead letter.
    all: bool,
    dry_run: bool,
    limit: Option<u32>,
}

#[derive(Serialize)]
struct Listed {
    /// Of this kind, whatever the limit.
    matched: i64,
    events: Vec<Letter>,
}

#[derive(Serialize)]
struct Discarded {
    dry_run: bool,
    matched: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    would_change: Option<i64>,
    changed: usize,
}

fn no_intake() -> HttpResponse {
    HttpResponse::NotFound().body("there is no intake in this process: intake.listen is off\n")
}

pub(super) async fn list(
    _: Admitted,
    sources: Data<Sources>,
    listing: Query<Listing>,
) -> HttpResponse {
    let Some(intake) = sources.intake.as_deref() else {
        return no_intake();
    };
    let listing = listing.into_inner();
    let limit = listing.limit.unwrap_or(LISTED);
    if limit > MOST {
        return refused(&format!("limit: must be at most {MOST}"));
    }
    let statuses: Option<Vec<String>> = listing.status.map(|words| {
        words
            .split(',')
            .map(|word| word.trim().to_owned())
            .collect()
    });
    if let Some(word) = statuses
        .iter()
        .flatten()
        .find(|word| !STATUSES.contains(&word.as_str()))
    {
        return refused(&format!(
            "status: no `{word}`; there are {}",
            STATUSES.join(", ")
        ));
    }
    let filter = LetterFilter {
        source: listing.source,
        event_ids: None,
        reason: listing.reason,
        event_type: listing.event_type,
        statuses,
    };
    let answer = async {
        Ok(Listed {
            matched: intake.store().letter_count(&filter).await?,
            events: intake.store().letters(&filter, limit).await?,
        })
    };
    match answer.await {
        Ok(listed) => HttpResponse::Ok().json(listed),
        Err(error) => unavailable(&error),
    }
}

pub(super) async fn show(
    _: Admitted,
    sources: Data<Sources>,
    path: Path<(String, String)>,
) -> HttpResponse {
    let Some(intake) = sources.intake.as_deref() else {
        return no_intake();
    };
    let (source, id) = path.into_inner();
    match intake.store().event(&source, &id).await {
        Ok(Some(event)) => HttpResponse::Ok().json(event),
        Ok(None) => HttpResponse::NotFound().body("there is no event of this id\n"),
        Err(error) => unavailable(&error),
    }
}

pub(super) async fn replay(
    _: Admitted,
    sources: Data<Sources>,
    order: Json<ReplayOrder>,
) -> HttpResponse {
    let Some(intake) = sources.intake.as_deref() else {
        return no_intake();
    };
    let order = order.into_inner();
    if !(1..=replay::MOST).contains(&order.limit) {
        return refused(&format!("limit: must be between 1 and {}", replay::MOST));
    }
    let order = replay::Order {
        dry_run: order.dry_run,
        include_parked: order.include_parked,
        limit: order.limit,
        event_ids: order.event_ids,
        reason: order.reason,
        stranded_only: false,
    };
    match Box::pin(intake.replay().run(&order, |_, _| {})).await {
        Ok(report) => HttpResponse::Ok().json(report),
        Err(error) => unavailable(&error),
    }
}

pub(super) async fn discard(
    _: Admitted,
    sources: Data<Sources>,
    order: Json<DiscardOrder>,
) -> HttpResponse {
    let Some(intake) = sources.intake.as_deref() else {
        return no_intake();
    };
    let order = order.into_inner();
    let filter = LetterFilter {
        source: order.source,
        event_ids: order.event_ids,
        reason: order.reason,
        event_type: order.event_type,
        statuses: None,
    };
    if filter.is_empty() && !order.all {
        return refused("no condition is given: say which, or \"all\": true for every dead letter");
    }
    if !filter.is_empty() && order.all {
        return refused("\"all\": true contradicts the conditions beside it");
    }
    let limit = order.limit.unwrap_or(MOST);
    if !(1..=MOST).contains(&limit) {
        return refused(&format!("limit: must be between 1 and {MOST}"));
    }
    let answer = async {
        let matched = intake.store().letter_count(&filter).await?;
        let changed = if order.dry_run {
            Vec::new()
        } else {
            let execution_id = execution_id();
            intake
                .store()
                .discard(&filter, limit, &execution_id)
                .await?
        };
        Ok(Discarded {
            dry_run: order.dry_run,
            matched,
            would_change: order.dry_run.then(|| matched.min(i64::from(limit))),
            changed: changed.len(),
        })
    };
    match answer.await {
        Ok(discarded) => HttpResponse::Ok().json(discarded),
        Err(error) => unavailable(&error),
    }
}
