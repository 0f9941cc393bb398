//! What it means that no stream has acknowledged a message. Pure: no I/O.
//!
//! The reply alone does not tell whether the stream is missing (all its events wait), or takes no
//! such subject (this event is charged); and a missing reply may come of a subscriber that takes
//! what no stream does. The stream itself is looked at, and this decides.

use super::stream::{Seen, missing};
use crate::relay::failure::Cause;
use crate::sink::SinkError;

/// Why a message is in doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doubt {
    /// Nobody listens on its subject.
    Nobody,
    /// Another stream refused it.
    Elsewhere,
    /// No reply came in time.
    Overdue,
}

/// Why the stream has not acknowledged a message, if it can be told. `acknowledges`: it has acknowledged
/// others lately, which is what can be known of one that may not be looked at.
pub(super) fn explained(
    (stream, subject): (&str, &str),
    doubt: Doubt,
    seen: Result<&Seen, &SinkError>,
    acknowledges: bool,
) -> Option<SinkError> {
    let error = |cause, message: String| Some(SinkError::new(cause, message));
    match (seen, doubt) {
        (Err(_), Doubt::Overdue) | (Ok(Seen::Denied), Doubt::Overdue) => None,
        (Err(error), _) => Some(error.clone()),
        (Ok(Seen::Missing), _) => Some(missing(stream)),
        (_, Doubt::Elsewhere) => error(
            Cause::Unroutable,
            format!("subject '{subject}' belongs to another stream than '{stream}'"),
        ),
        (Ok(Seen::Denied), Doubt::Nobody) if acknowledges => error(
            Cause::Unroutable,
            format!("no stream covers the subject '{subject}'"),
        ),
        // No event may die of a stream that was deleted: it waits, uncharged, until another event of the
        // stream is acknowledged or somebody says which it is.
        (Ok(Seen::Denied), Doubt::Nobody) => error(
            Cause::DestinationMissing,
            format!(
                "stream '{stream}' does not exist, or does not cover the subject '{subject}': which of \
                 them cannot be told without permission for $JS.API.STREAM.INFO.{stream}"
            ),
        ),
        (Ok(Seen::Stream(settings)), doubt) => {
            if !settings.takes(subject) {
                return error(
                    Cause::Unroutable,
                    format!(
                        "no stream covers the subject '{subject}': stream '{stream}' takes {}",
                        settings.shown()
                    ),
                );
            }
            if let Some(obstacle) = settings.obstacle(stream) {
                return Some(obstacle);
            }
            match doubt {
                Doubt::Overdue => None,
                _ => error(
                    Cause::DestinationMissing,
                    format!(
                        "stream '{stream}' did not answer: it was just created, or has no leader"
                    ),
                ),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(settings: &str) -> Seen {
        Seen::Stream(Box::new(serde_json::from_str(settings).unwrap()))
    }

    fn cause(subject: &str, doubt: Doubt, seen: &Seen) -> Option<Cause> {
        explained(("EVENTS", subject), doubt, Ok(seen), false).map(|error| error.cause)
    }

    #[test]
    fn a_missing_stream_is_waited_for_and_a_subject_that_it_does_not_take_is_charged() {
        let sound = stream(r#"{"subjects": ["events.order.>"]}"#);
        for doubt in [Doubt::Nobody, Doubt::Elsewhere, Doubt::Overdue] {
            let missing = cause("events.order.x", doubt, &Seen::Missing);
            assert_eq!(missing, Some(Cause::DestinationMissing));
            let uncovered = cause("events.invoice.x", doubt, &sound);
            assert_eq!(uncovered, Some(Cause::Unroutable));
        }
        let created = cause("events.order.x", Doubt::Nobody, &sound);
        assert_eq!(created, Some(Cause::DestinationMissing));
    }

    #[test]
    fn silence_of_a_stream_that_takes_the_subject_leaves_the_doubt() {
        let sound = stream(r#"{"subjects": ["events.>"]}"#);
        assert_eq!(cause("events.order.x", Doubt::Overdue, &sound), None);
        assert_eq!(cause("events.order.x", Doubt::Overdue, &Seen::Denied), None);
        let silent = stream(r#"{"subjects": ["events.>"], "no_ack": true}"#);
        let cause = cause("events.order.x", Doubt::Overdue, &silent);
        assert_eq!(cause, Some(Cause::Forbidden));
    }

    #[test]
    fn a_stream_that_may_not_be_looked_at_is_taken_to_be_missing_until_it_acknowledges() {
        let of = |acknowledges| {
            let about = ("EVENTS", "events.x.y");
            explained(about, Doubt::Nobody, Ok(&Seen::Denied), acknowledges).unwrap()
        };
        assert_eq!(of(true).cause, Cause::Unroutable);
        assert_eq!(of(false).cause, Cause::DestinationMissing);
        assert!(of(false).message.contains("$JS.API.STREAM.INFO.EVENTS"));
    }

    #[test]
    fn what_could_not_be_looked_at_charges_nobody() {
        let lost = SinkError::new(Cause::Unreachable, "lost");
        let of = |doubt| explained(("EVENTS", "events.x.y"), doubt, Err(&lost), true);
        assert_eq!(of(Doubt::Nobody).unwrap().cause, Cause::Unreachable);
        assert_eq!(of(Doubt::Overdue).map(|error| error.cause), None);
    }
}
