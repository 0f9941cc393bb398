//! What a reply to a published message says. Pure: no I/O.
//!
//! Anybody may subscribe to a subject and reply. Only an acknowledgement that names the expected
//! stream is success, and only an error in JetStream's own form is one; all else is not heard, since
//! the stream's own reply may still come.

use serde::Deserialize;

use async_nats::{Message, StatusCode};

use crate::relay::failure::Cause;
use crate::sink::SinkError;

/// Another stream takes the subject than the one expected.
const WRONG_STREAM: u64 = 10_060;
/// Over the stream's `max_msg_size`.
const TOO_LARGE: u64 = 10_054;
/// Headers over 64 KiB.
const HEADERS_TOO_LARGE: u64 = 10_097;
/// The stream takes nothing any more.
const SEALED: u64 = 10_109;

/// What a reply says.
#[derive(Debug)]
pub(super) enum Verdict {
    /// The stream has it. `duplicate`: it had a message of this id before and dropped this one.
    Kept { duplicate: bool },
    /// No stream takes the subject, nor does anybody else listen.
    Nobody,
    /// Another stream than the expected one takes the subject, and refused.
    Elsewhere,
    /// The stream refused.
    Refused(SinkError),
    /// Not from JetStream, or not about our stream.
    Stray,
}

#[derive(Deserialize)]
struct Reply {
    stream: Option<String>,
    seq: Option<u64>,
    #[serde(default)]
    duplicate: bool,
    error: Option<Refusal>,
}

#[derive(Deserialize)]
struct Refusal {
    err_code: u64,
    #[serde(default)]
    description: String,
}

/// What this reply says of a message for this stream.
pub(super) fn verdict(reply: &Message, stream: &str) -> Verdict {
    if reply.status == Some(StatusCode::NO_RESPONDERS) {
        return Verdict::Nobody;
    }
    of_body(&reply.payload, stream)
}

pub(super) fn of_body(body: &[u8], stream: &str) -> Verdict {
    let Ok(reply) = serde_json::from_slice::<Reply>(body) else {
        return Verdict::Stray;
    };
    if let Some(error) = reply.error {
        return match error.err_code {
            WRONG_STREAM => Verdict::Elsewhere,
            code => Verdict::Refused(refused(code, &error.description, stream)),
        };
    }
    match (reply.stream, reply.seq) {
        (Some(name), Some(1..)) if name == stream => Verdict::Kept {
            duplicate: reply.duplicate,
        },
        _ => Verdict::Stray,
    }
}

fn refused(code: u64, description: &str, stream: &str) -> SinkError {
    let cause = match code {
        TOO_LARGE | HEADERS_TOO_LARGE => Cause::TooLarge,
        SEALED => Cause::Forbidden,
        // Full (10077, of whichever limit), over the account's limits, no leader, and what later
        // servers may come up with: counted, and no reason to give an event up.
        _ => Cause::Nacked,
    };
    SinkError::new(
        cause,
        format!("stream '{stream}' refused the message: {description} (error {code})"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(body: &str) -> Verdict {
        of_body(body.as_bytes(), "EVENTS")
    }

    #[test]
    fn only_an_acknowledgement_of_the_expected_stream_is_success() {
        let kept = of(r#"{"stream": "EVENTS", "seq": 7, "domain": "x"}"#);
        assert!(matches!(kept, Verdict::Kept { duplicate: false }));
        let again = of(r#"{"stream":"EVENTS","seq":7,"duplicate":true}"#);
        assert!(matches!(again, Verdict::Kept { duplicate: true }));
        for stray in [
            "",
            "+OK",
            "{}",
            "null",
            r#"{"stream":"OTHER","seq":7}"#,
            r#"{"stream":"EVENTS"}"#,
            r#"{"stream":"EVENTS","seq":0}"#,
            r#"{"stream":"EVENTS","seq":"7"}"#,
            r#"{"error":"no"}"#,
        ] {
            assert!(matches!(of(stray), Verdict::Stray), "{stray}");
        }
    }

    #[test]
    fn refusals_are_told_apart_by_their_code() {
        let error = |code: u64| {
            let body = format!(
                r#"{{"error":{{"code":400,"err_code":{code},"description":"why"}},"stream":"EVENTS","seq":0}}"#
            );
            of(&body)
        };
        for (code, cause) in [
            (10_077, Cause::Nacked),
            (10_047, Cause::Nacked),
            (10_054, Cause::TooLarge),
            (10_097, Cause::TooLarge),
            (10_109, Cause::Forbidden),
            (99_999, Cause::Nacked),
        ] {
            let Verdict::Refused(error) = error(code) else {
                panic!("{code}");
            };
            assert_eq!(error.cause, cause);
            assert!(error.message.contains("EVENTS") && error.message.contains("why"));
        }
        assert!(matches!(error(10_060), Verdict::Elsewhere));
    }
}
