//! Subjects: what may become one, and which of them a stream takes. Pure: no I/O.
//!
//! The rule: what is filled in from an event is one token. A value that is empty, or has
//! whitespace, a control character, `*`, `>` or `.` in it, is refused: it would end in another
//! subject than meant, or make the server close the connection. So is a subject that is too long.

use crate::event::OneLine;
use crate::relay::failure::Cause;
use crate::sink::{Delivery, SinkError};

/// NATS advises against longer subjects; a line of its protocol, which holds one, ends at 4096.
pub(super) const LONGEST_SUBJECT: usize = 255;
/// In errors, of a value that may be of any length.
const SHOWN: usize = 60;

/// Last tokens of a copy of a dead event whose own cannot be.
const ODD_LETTER: &str = "dead";

/// The subject of a delivery: the route's key, or `<prefix>.<aggregate_type>.<event_type>`. A copy of
/// a dead event goes to another stream, whose subjects cannot be the same ones: its begin with that
/// stream's name.
pub(super) fn subject(delivery: &Delivery, prefix: &str) -> Result<String, SinkError> {
    let event = &*delivery.event;
    let stream = &*delivery.address.destination;
    if delivery.is_letter() {
        let subject = by_types(delivery, stream);
        return Ok(subject.unwrap_or_else(|_| format!("{stream}.{ODD_LETTER}")));
    }
    let Some(key) = &delivery.address.key else {
        return by_types(delivery, prefix);
    };
    for (name, value) in delivery.route.filled_into_key(&delivery.address, event) {
        check_value(name, value)?;
    }
    for token in key.split('.') {
        check_token("the subject that the route gives", token, key)?;
    }
    check_length(key)?;
    Ok(key.to_string())
}

fn by_types(delivery: &Delivery, prefix: &str) -> Result<String, SinkError> {
    let event = &*delivery.event;
    let (aggregate_type, event_type) = (&*event.key.aggregate_type, &*event.event_type);
    check_value("aggregate_type", aggregate_type)?;
    check_value("event_type", event_type)?;
    let subject = format!("{prefix}.{aggregate_type}.{event_type}");
    check_length(&subject)?;
    Ok(subject)
}

/// A stream's name becomes part of subjects of the API.
pub(super) fn check_stream(name: &str) -> Result<(), SinkError> {
    check_token("the stream that the route gives", name, name)?;
    if name.contains(['.', '/', '\\']) || name.len() > LONGEST_SUBJECT {
        return Err(illegal(format!(
            "the stream that the route gives, '{}', is no name of a stream: no dots, no slashes, \
             at most {LONGEST_SUBJECT} bytes",
            shown(name)
        )));
    }
    Ok(())
}

fn check_value(name: &str, value: &str) -> Result<(), SinkError> {
    check_token(name, value, value)?;
    if value.contains('.') {
        return Err(illegal(format!(
            "{name} '{}' has a dot, which would make two tokens of it in a NATS subject",
            shown(value)
        )));
    }
    Ok(())
}

fn check_token(what: &str, token: &str, whole: &str) -> Result<(), SinkError> {
    if token.is_empty() {
        let reason = match whole {
            "" => format!("{what} is empty: no token of a NATS subject"),
            whole => format!("{what}, '{}', has an empty token", shown(whole)),
        };
        return Err(illegal(reason));
    }
    let odd = |letter: &char| {
        letter.is_whitespace() || letter.is_control() || matches!(letter, '*' | '>')
    };
    match token.chars().find(odd) {
        Some(letter) => Err(illegal(format!(
            "{what} '{}' has the character {letter:?}, which no token of a NATS subject can have",
            shown(token)
        ))),
        None => Ok(()),
    }
}

fn check_length(subject: &str) -> Result<(), SinkError> {
    if subject.len() <= LONGEST_SUBJECT {
        return Ok(());
    }
    Err(illegal(format!(
        "the subject '{}' has {} bytes, at most {LONGEST_SUBJECT} are sent",
        shown(subject),
        subject.len()
    )))
}

fn illegal(reason: String) -> SinkError {
    SinkError::new(Cause::IllegalName, reason)
}

fn shown(text: &str) -> String {
    OneLine(text).cut(SHOWN)
}

/// Is there a subject that both take? Either may have wildcards; a plain subject takes itself.
pub(super) fn overlap(one: &str, other: &str) -> bool {
    let (mut one, mut other) = (one.split('.'), other.split('.'));
    loop {
        match (one.next(), other.next()) {
            (None, None) => return true,
            // It stands for one token or more.
            (Some(">"), Some(_)) | (Some(_), Some(">")) => return true,
            (Some(a), Some(b)) if a == b || a == "*" || b == "*" => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::config::RouteConfig;
    use crate::event::{ClaimToken, OutboxEvent};
    use crate::route::Router;

    fn of(types: (&str, &str), key: Option<&str>) -> Result<String, SinkError> {
        let route = RouteConfig {
            routing_key: key.map(Into::into),
            ..RouteConfig::default()
        };
        let token = Arc::new(ClaimToken::new(1, "t".into()));
        let event = OutboxEvent::sample(1, (types.0, "7.5"), types.1);
        let router = Router::new(&[route], "EVENTS").unwrap();
        subject(&router.deliver(event, &token), "shop.v1")
    }

    #[test]
    fn subjects_are_made_of_the_types_or_as_the_route_says() {
        assert_eq!(
            of(("order", "Placed"), None).unwrap(),
            "shop.v1.order.Placed"
        );
        assert_eq!(of(("köln", "a-b_c"), None).unwrap(), "shop.v1.köln.a-b_c");
        let key = Some("v2.{event_type}.x");
        assert_eq!(of(("order", "Placed"), key).unwrap(), "v2.Placed.x");
    }

    #[test]
    fn what_is_no_token_is_refused_and_named() {
        for odd in [
            "",
            " ",
            "a b",
            "a.b",
            ".",
            "*",
            "a*",
            ">",
            "a>b",
            "a\r\nPUB x",
            "\0",
            "\u{2028}",
        ] {
            for (types, name) in [
                ((odd, "Placed"), "aggregate_type"),
                (("order", odd), "event_type"),
            ] {
                let error = of(types, None).unwrap_err();
                assert_eq!(error.cause, Cause::IllegalName);
                assert!(error.message.starts_with(name), "{error}");
                assert!(!error.message.contains(['\r', '\n', '\0']), "{error}");
            }
        }
    }

    #[test]
    fn a_value_with_a_dot_does_not_become_two_tokens_of_a_routes_subject() {
        let error = of(("order", "Placed"), Some("v2.{aggregate_id}")).unwrap_err();
        assert!(error.message.starts_with("aggregate_id '7.5'"), "{error}");
        for key in ["a..b", "a.", "a.*", "a b"] {
            let error = of(("order", "Placed"), Some(key)).unwrap_err();
            assert_eq!(error.cause, Cause::IllegalName, "{key}");
        }
    }

    #[test]
    fn a_long_subject_is_refused_and_not_shown_in_full() {
        let long = "x".repeat(300);
        let error = of(("order", &long), None).unwrap_err();
        assert_eq!(error.cause, Cause::IllegalName);
        assert!(
            error.message.contains("bytes") && error.message.len() < 200,
            "{error}"
        );
    }

    #[test]
    fn a_copy_of_a_dead_event_goes_below_its_streams_name_whatever_its_own() {
        let token = Arc::new(ClaimToken::new(1, "t".into()));
        let reason = Arc::new(SinkError::new(Cause::TooLarge, "too large"));
        for (event_type, wanted) in [("Placed", "DEAD.order.Placed"), ("a b", "DEAD.dead")] {
            let event = OutboxEvent::sample(1, ("order", "7"), event_type);
            let mut delivery = Router::new(&[], "DEAD").unwrap().deliver(event, &token);
            delivery.letter = Some(reason.clone());
            assert_eq!(subject(&delivery, "events").unwrap(), wanted);
        }
    }

    #[test]
    fn wildcards_take_what_they_take() {
        for (one, other, wanted) in [
            ("a.b", "a.b", true),
            ("a.b", "a.c", false),
            ("a.*", "a.b", true),
            ("a.*", "a.b.c", false),
            ("a.>", "a.b.c", true),
            ("a.>", "a", false),
            (">", "a.b", true),
            ("*.order.>", "events.>", true),
            ("events.order", "events.>", true),
            ("a.>", "b.>", false),
        ] {
            assert_eq!(overlap(one, other), wanted, "{one} {other}");
            assert_eq!(overlap(other, one), wanted, "{other} {one}");
        }
    }
}
