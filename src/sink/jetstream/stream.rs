//! What the API says of a stream: whether it is there, and whether it takes events and tells so.

use std::time::Duration;

use serde::Deserialize;

use super::link::{Answer, Link};
use super::subject::overlap;
use crate::event::OneLine;
use crate::relay::failure::Cause;
use crate::sink::SinkError;

/// The API's code for a stream that does not exist.
const NOT_FOUND: u64 = 10_059;

/// What was seen of a stream.
#[derive(Debug)]
pub(super) enum Seen {
    /// It is there.
    Stream(Box<Settings>),
    /// It does not exist.
    Missing,
    /// We may not look.
    Denied,
}

/// The part of a stream's configuration that matters to a publisher.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Settings {
    subjects: Vec<String>,
    sealed: bool,
    no_ack: bool,
    mirror: Option<serde::de::IgnoredAny>,
    /// Nanoseconds.
    duplicate_window: u64,
}

#[derive(Deserialize)]
struct Reply {
    config: Option<Settings>,
    error: Option<Refusal>,
}

#[derive(Deserialize)]
struct Refusal {
    #[serde(default)]
    err_code: u64,
    #[serde(default)]
    description: String,
}

/// Looks at a stream.
pub(super) async fn look(link: &Link, stream: &str, within: Duration) -> Result<Seen, SinkError> {
    let unavailable = |reason: &str| {
        SinkError::new(
            Cause::Unreachable,
            format!("JetStream at {} is not available: {reason}", link.place()),
        )
    };
    let reply = match link
        .ask(&format!("$JS.API.STREAM.INFO.{stream}"), within)
        .await?
    {
        Answer::Denied => return Ok(Seen::Denied),
        Answer::Nobody => return Err(unavailable("nobody answers its API")),
        Answer::Reply(reply) => reply,
    };
    seen(&reply).map_err(|reason| unavailable(&reason))
}

/// What the API's answer says, or why it says nothing.
pub(super) fn seen(reply: &[u8]) -> Result<Seen, String> {
    match serde_json::from_slice::<Reply>(reply) {
        Ok(Reply {
            error: Some(error), ..
        }) if error.err_code == NOT_FOUND => Ok(Seen::Missing),
        Ok(Reply {
            error: Some(error), ..
        }) => Err(error.description),
        Ok(Reply {
            config: Some(settings),
            ..
        }) => Ok(Seen::Stream(Box::new(settings))),
        _ => Err("its API answers something else".into()),
    }
}

impl Settings {
    /// Does it keep what is published there?
    pub(super) fn takes(&self, subject: &str) -> bool {
        self.subjects.iter().any(|taken| overlap(taken, subject))
    }

    /// Why nothing can be published to it with certainty.
    pub(super) fn obstacle(&self, stream: &str) -> Option<SinkError> {
        let why = if self.sealed {
            "is sealed: it takes nothing any more"
        } else if self.no_ack {
            "has no_ack set: it would never say that it has an event; unset it"
        } else if self.mirror.is_some() {
            "is a mirror: it takes what its origin has; name that one"
        } else {
            return None;
        };
        Some(SinkError::new(
            Cause::Forbidden,
            format!("stream '{stream}' {why}"),
        ))
    }

    pub(super) fn duplicate_window(&self) -> Duration {
        Duration::from_nanos(self.duplicate_window)
    }

    /// Its subjects, for people.
    pub(super) fn shown(&self) -> String {
        let subjects: Vec<_> = self
            .subjects
            .iter()
            .map(|subject| OneLine(subject).to_string())
            .collect();
        match subjects.as_slice() {
            [] => "no subject".to_owned(),
            subjects => subjects.join(", "),
        }
    }
}

/// The stream does not exist.
pub(super) fn missing(stream: &str) -> SinkError {
    SinkError::new(
        Cause::DestinationMissing,
        format!(
            "stream '{stream}' does not exist: create it (nats stream add), or set jetstream.stream"
        ),
    )
}
