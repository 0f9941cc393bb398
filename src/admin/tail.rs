//! `/tail`: outcomes of events as they happen, one JSON object a line.

use std::sync::Arc;
use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::web::{Bytes, Data, Query};
use futures_util::stream;
use serde::Deserialize;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Instant, timeout, timeout_at};

use super::{ANSWER_TIMEOUT, Sources, refused};
use crate::relay::outcome::{Line, WORDS};
use crate::relay::supervisor::Watch;

/// An empty line now and then keeps the connection open and finds a watcher that is gone.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Which outcomes. Each condition that is given must hold.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Wanted {
    aggregate_type: Option<String>,
    aggregate_id: Option<String>,
    event_type: Option<String>,
    /// One or several of [`WORDS`], by commas.
    outcome: Option<String>,
}

impl Wanted {
    /// A word that no outcome has: nothing would ever be shown.
    fn unknown_word(&self) -> Option<&str> {
        let words = self.outcome.as_deref()?;
        words
            .split(',')
            .map(str::trim)
            .find(|word| !WORDS.contains(word))
    }

    fn matches(&self, line: &Line) -> bool {
        let same = |wanted: &Option<String>, found: Option<&str>| {
            wanted.as_deref().is_none_or(|wanted| found == Some(wanted))
        };
        same(&self.aggregate_type, Some(&line.aggregate_type))
            && same(&self.aggregate_id, Some(&line.aggregate_id))
            && same(&self.event_type, line.event_type.as_deref())
            && self
                .outcome
                .as_deref()
                .is_none_or(|words| words.split(',').any(|word| word.trim() == line.outcome))
    }
}

pub(super) async fn tail(sources: Data<Sources>, wanted: Query<Wanted>) -> HttpResponse {
    if let Some(word) = wanted.unknown_word() {
        let known = WORDS.join(", ");
        return refused(&format!("outcome: no `{word}`; there are {known}"));
    }
    let Some(supervisor) = &sources.supervisor else {
        return HttpResponse::NotFound().body(super::NO_RELAY);
    };
    let Ok(Ok(outcomes)) = timeout(ANSWER_TIMEOUT, supervisor.send(Watch)).await else {
        return HttpResponse::ServiceUnavailable().body("the supervisor does not answer\n");
    };
    let watch = (outcomes.watch(), wanted.into_inner());
    let lines = stream::unfold(watch, |(mut watch, wanted)| async {
        // Not renewed by lines that are not wanted: to this watcher they are silence.
        let deadline = Instant::now() + KEEP_ALIVE;
        let text = loop {
            match timeout_at(deadline, watch.recv()).await {
                Err(_) => break Bytes::from_static(b"\n"),
                Ok(Ok(line)) if wanted.matches(&line) => break json(&line),
                Ok(Ok(_)) => {}
                Ok(Err(RecvError::Lagged(missed))) => {
                    break Bytes::from(format!("{{\"missed\":{missed}}}\n"));
                }
                Ok(Err(RecvError::Closed)) => return None,
            }
        };
        Some((Ok::<_, std::convert::Infallible>(text), (watch, wanted)))
    });
    HttpResponse::Ok()
        .content_type("application/x-ndjson")
        .streaming(lines)
}

fn json(line: &Arc<Line>) -> Bytes {
    let mut text = serde_json::to_vec(&**line).unwrap_or_default();
    text.push(b'\n');
    text.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> Line {
        Line {
            at: "2025-11-30T16:24:39.120Z".into(),
            id: 1,
            aggregate_type: "order".into(),
            aggregate_id: "7".into(),
            event_type: Some("Placed".into()),
            outcome: "failed",
            result: "failed attempt 1".into(),
            attempts: Some(1),
            error: None,
        }
    }

    #[test]
    fn every_condition_that_is_given_must_hold() {
        let wanted = |text: &str| Query::<Wanted>::from_query(text).unwrap().into_inner();
        for (query, matches) in [
            ("", true),
            ("aggregate_type=order&aggregate_id=7", true),
            ("aggregate_type=order&aggregate_id=8", false),
            ("outcome=published,failed", true),
            ("outcome=published", false),
            ("event_type=Placed", true),
            ("event_type=", false),
        ] {
            assert_eq!(wanted(query).matches(&line()), matches, "{query}");
        }
        assert!(Query::<Wanted>::from_query("aggregate=order").is_err());
        assert_eq!(wanted("outcome=failed, waits").unknown_word(), None);
        assert_eq!(
            wanted("outcome=failed,fialed").unknown_word(),
            Some("fialed")
        );
        assert_eq!(wanted("outcome=").unknown_word(), Some(""));
    }
}
