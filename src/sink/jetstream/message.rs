//! From an event to a message for JetStream. Pure: no I/O.
//!
//! Invariants:
//! - Subject and headers are functions of the row, the configuration and (header `attempt` only)
//!   the attempt: a repeat carries the same `Nats-Msg-Id`, so the stream drops it.
//! - Whatever NATS cannot carry is found here, before anything is sent. One illegal line would
//!   close the connection and take the innocent neighbours with it.
//! - The payload is not looked at.
//!
//! Values of headers are percent-encoded where NATS cannot carry them as they are: control
//! characters (a line break ends a header), whitespace at either end (clients trim it), and `%`
//! itself, so that decoding always gives the original.

use std::collections::BTreeMap;

use async_nats::HeaderMap;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::value::RawValue;

use super::subject;
use crate::config::JetstreamConfig;
use crate::event::{OneLine, OutboxEvent};
use crate::relay::failure::Cause;
use crate::sink::{Delivery, SinkError, cloudevents};

/// By this the stream drops repeats. Spelt exactly so, or it does not.
const MESSAGE_ID: &str = "Nats-Msg-Id";
/// Another stream that takes the subject then refuses.
const EXPECTED_STREAM: &str = "Nats-Expected-Stream";
/// Headers of the server's own, in whatever case: some make it do something.
const RESERVED: &str = "nats-";
/// Before the headers, and after each of them and all.
const HEADER_LINE: usize = "NATS/1.0\r\n".len();
const LINE_END: usize = "\r\n".len();
/// JetStream stores no more, whatever `max_payload` says.
const MOST_HEADERS: usize = 65_535;

/// A message ready to be sent; its body is the event's payload.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) subject: String,
    pub(super) headers: HeaderMap,
    /// Bytes of the headers on the wire.
    headers_size: usize,
}

/// What all messages of a sink have in common.
#[derive(Debug)]
pub(super) struct Composer {
    source: String,
    prefix: String,
    cloudevents: bool,
}

impl Composer {
    pub(super) fn new(config: &JetstreamConfig) -> Self {
        Self {
            source: config.source.clone(),
            prefix: config.prefix.clone(),
            cloudevents: config.cloudevents,
        }
    }

    /// The message of an event, or why there can be none: the row's own permanent failure.
    pub(super) fn compose(&self, delivery: &Delivery) -> Result<Message, SinkError> {
        let event = &*delivery.event;
        let stream = &*delivery.address.destination;
        subject::check_stream(stream)?;
        let mut headers = BTreeMap::new();
        if let Some(text) = event.headers.as_deref().filter(|text| *text != "null") {
            match row_headers(text, &mut headers) {
                Ok(()) => {}
                // Whatever the event is given up for, its copy should get through.
                Err(_) if delivery.is_letter() => headers.clear(),
                Err(error) => return Err(error),
            }
        }
        self.own_headers(event, &mut headers);
        if self.cloudevents {
            match cloudevents::attributes(event, &self.source) {
                Ok(attributes) => headers.extend(
                    attributes
                        .into_iter()
                        .map(|(name, value)| (name.into(), encoded(&value))),
                ),
                Err(_) if delivery.is_letter() => {}
                Err(error) => return Err(error),
            }
        }
        if let Some(reason) = &delivery.letter {
            headers.insert("dead_cause".into(), encoded(reason.cause.class()));
            headers.insert("dead_error".into(), encoded(&reason.message));
        }
        headers.insert(MESSAGE_ID.into(), self.message_id(delivery)?);
        headers.insert(EXPECTED_STREAM.into(), stream.to_owned());
        let lines = headers
            .iter()
            .map(|(name, value)| name.len() + ": ".len() + value.len() + LINE_END);
        let headers_size = HEADER_LINE + lines.sum::<usize>() + LINE_END;
        if headers_size > MOST_HEADERS {
            return Err(SinkError::new(
                Cause::TooLarge,
                format!("headers take {headers_size} bytes, JetStream takes {MOST_HEADERS}"),
            ));
        }
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(name, value);
        }
        Ok(Message {
            subject: subject::subject(delivery, &self.prefix)?,
            headers: map,
            headers_size,
        })
    }

    /// The event's UUID with the source's name: ids of several outboxes meet in one stream, and it
    /// drops what has the same message id under whatever subject. An event that comes late was there
    /// before perhaps, and a copy of a dead one is another message: neither may be taken for a repeat.
    fn message_id(&self, delivery: &Delivery) -> Result<String, SinkError> {
        let event = &*delivery.event;
        if delivery.is_letter() {
            let (source, id) = (&self.source, event.id);
            return Ok(match &event.event_id {
                Some(event_id) => format!("{source}:{event_id}:dead"),
                // That may be what it is given up for.
                None => format!("{source}:id-{id}:dead"),
            });
        }
        let event_id = event.event_id.as_deref().ok_or_else(|| {
            SinkError::new(
                Cause::Undecodable,
                "column event_id is NULL: it is what JetStream knows repeats by (bellwire migrate \
                 fills it in)",
            )
        })?;
        let suffix = if event.replayed { ":replayed" } else { "" };
        Ok(format!("{}:{event_id}{suffix}", self.source))
    }

    /// They win over a row's header of the same name.
    fn own_headers(&self, event: &OutboxEvent, headers: &mut BTreeMap<String, String>) {
        let mut put = |name: &str, value: &str| headers.insert(name.into(), encoded(value));
        put("event_sequence", &event.id.to_string());
        put("aggregate_type", &event.key.aggregate_type);
        put("aggregate_id", &event.key.aggregate_id);
        put("event_type", &event.event_type);
        put("attempt", &event.attempt().to_string());
        put("content_type", "application/json");
        put("source", &self.source);
        if let Some(correlation_id) = &event.correlation_id {
            put("correlation_id", correlation_id);
        }
        if let Some(seconds) = event.created_at {
            put("created_at", &seconds.to_string());
        }
        if event.replayed {
            put("replayed", "true");
        }
    }
}

impl Message {
    /// Can a server that takes messages of this size carry it? Headers count.
    pub(super) fn fits(&self, payload: usize, max_payload: usize) -> Result<(), SinkError> {
        let size = self.headers_size + payload;
        if size <= max_payload {
            return Ok(());
        }
        Err(SinkError::new(
            Cause::TooLarge,
            format!(
                "payload and headers take {size} bytes, the NATS server takes {max_payload} \
                 (max_payload)"
            ),
        ))
    }
}

/// Adds the entries of the row's `headers`, a JSON object. Strings as they are, all else as its JSON
/// text, since NATS knows nothing but text.
fn row_headers(text: &str, headers: &mut BTreeMap<String, String>) -> Result<(), SinkError> {
    let entries: BTreeMap<String, Box<RawValue>> = serde_json::from_str(text)
        .map_err(|_| SinkError::new(Cause::Undecodable, "column headers is not a JSON object"))?;
    for (name, value) in entries {
        check_name(&name)?;
        let json = value.get();
        let value = if json.starts_with('"') {
            serde_json::from_str::<String>(json).map_err(|_| {
                SinkError::new(
                    Cause::Undecodable,
                    format!("header {name} in column headers cannot be decoded"),
                )
            })?
        } else {
            json.to_owned()
        };
        headers.insert(name, encoded(&value));
    }
    Ok(())
}

fn check_name(name: &str) -> Result<(), SinkError> {
    let illegal = |reason: String| Err(SinkError::new(Cause::IllegalName, reason));
    let plain = |letter: char| letter.is_ascii_graphic() && letter != ':';
    if name.is_empty() || !name.chars().all(plain) {
        return illegal(format!(
            "header name '{}': NATS takes printable ASCII without spaces and colons",
            OneLine(name)
        ));
    }
    let begins = name.get(..RESERVED.len());
    if begins.is_some_and(|start| start.eq_ignore_ascii_case(RESERVED)) {
        return illegal(format!(
            "header {name}: names that begin with Nats- are the server's own; choose another"
        ));
    }
    Ok(())
}

/// See the module's head.
fn encoded(text: &str) -> String {
    let trimmed_start = text.len() - text.trim_start().len();
    let trimmed_end = text.trim_end().len();
    let mut out = String::with_capacity(text.len());
    for (at, letter) in text.char_indices() {
        let outside = at < trimmed_start || at >= trimmed_end;
        if letter == '%' || letter.is_control() || outside {
            let mut bytes = [0; 4];
            out.extend(utf8_percent_encode(
                letter.encode_utf8(&mut bytes),
                NON_ALPHANUMERIC,
            ));
        } else {
            out.push(letter);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::event::{AggregateKey, ClaimToken};
    use crate::route::Router;

    const UUID: &str = "0190b5a0-0000-7000-8000-000000000001";

    fn event() -> OutboxEvent {
        OutboxEvent {
            event_id: Some(UUID.into()),
            created_at: Some(1_700_000_000),
            attempts: 2,
            ..OutboxEvent::sample(42, ("order", "ORD-1"), "Placed")
        }
    }

    fn delivery(event: &OutboxEvent) -> Delivery {
        let token = Arc::new(ClaimToken::new(1, "t".into()));
        let router = Router::new(&[], "EVENTS").unwrap();
        router.deliver(event.clone(), &token)
    }

    fn composer() -> Composer {
        Composer::new(&JetstreamConfig {
            source: "shop".into(),
            ..JetstreamConfig::default()
        })
    }

    fn compose(event: &OutboxEvent) -> Result<Message, SinkError> {
        composer().compose(&delivery(event))
    }

    fn header(message: &Message, name: &str) -> Option<String> {
        message.headers.get(name).map(ToString::to_string)
    }

    #[test]
    fn the_message_tells_the_row() {
        let message = compose(&event()).unwrap();
        assert_eq!(message.subject, "events.order.Placed");
        let expected_id = format!("shop:{UUID}");
        for (name, value) in [
            ("Nats-Msg-Id", expected_id.as_str()),
            ("Nats-Expected-Stream", "EVENTS"),
            ("aggregate_type", "order"),
            ("aggregate_id", "ORD-1"),
            ("event_type", "Placed"),
            ("event_sequence", "42"),
            ("attempt", "3"),
            ("content_type", "application/json"),
            ("source", "shop"),
            ("created_at", "1700000000"),
        ] {
            assert_eq!(header(&message, name).as_deref(), Some(value), "{name}");
        }
        assert_eq!(header(&message, "correlation_id"), None);
        assert_eq!(header(&message, "replayed"), None);
    }

    #[test]
    fn a_repeat_has_the_same_message_id_and_one_that_comes_late_another() {
        let first = header(&compose(&event()).unwrap(), MESSAGE_ID);
        let mut repeat = event();
        repeat.attempts = 4;
        assert_eq!(header(&compose(&repeat).unwrap(), MESSAGE_ID), first);
        repeat.replayed = true;
        let late = compose(&repeat).unwrap();
        assert_ne!(header(&late, MESSAGE_ID), first);
        assert_eq!(header(&late, "replayed").as_deref(), Some("true"));
    }

    #[test]
    fn without_a_uuid_there_is_no_message() {
        let mut event = event();
        event.event_id = None;
        let error = compose(&event).unwrap_err();
        assert_eq!(error.cause, Cause::Undecodable);
        assert!(error.message.contains("event_id"), "{error}");
    }

    #[test]
    fn no_value_can_end_its_header_and_decoding_gives_the_original() {
        for value in [
            "a\r\nNats-Msg-Id: x",
            " a b ",
            "50% off",
            "\u{85}ü",
            "",
            "a\tb",
            "%0D",
        ] {
            let mut event = event();
            event.key = AggregateKey::new("order", value);
            let message = compose(&event).unwrap();
            let sent = header(&message, "aggregate_id").unwrap();
            assert_eq!(sent.trim(), sent);
            assert!(!sent.contains(char::is_control), "{sent:?}");
            let decoded = percent_encoding::percent_decode_str(&sent);
            assert_eq!(decoded.decode_utf8().unwrap(), value);
        }
    }

    #[test]
    fn headers_of_the_row_keep_their_values_and_never_replace_ours() {
        let mut event = event();
        event.headers = Some(
            r#"{"traceparent": "00-ab", "n": 1.50, "flag": true, "none": null, "deep": {"a": [1]},
                "aggregate_id": "other"}"#
                .into(),
        );
        let message = compose(&event).unwrap();
        for (name, value) in [
            ("traceparent", "00-ab"),
            ("n", "1.50"),
            ("flag", "true"),
            ("none", "null"),
            ("deep", r#"{"a": [1]}"#),
            ("aggregate_id", "ORD-1"),
        ] {
            assert_eq!(header(&message, name).as_deref(), Some(value), "{name}");
        }
        event.headers = Some("null".into());
        compose(&event).unwrap();
    }

    #[test]
    fn headers_that_nats_cannot_carry_are_refused() {
        for (headers, cause) in [
            (r#"{"Nats-Msg-Id": "x"}"#, Cause::IllegalName),
            (r#"{"nats-rollup": "all"}"#, Cause::IllegalName),
            (r#"{"a b": "x"}"#, Cause::IllegalName),
            (r#"{"a:b": "x"}"#, Cause::IllegalName),
            (r#"{"ü": "x"}"#, Cause::IllegalName),
            (r#"{"": "x"}"#, Cause::IllegalName),
            (r#"{"a\r\nb": "x"}"#, Cause::IllegalName),
            (r#"["x"]"#, Cause::Undecodable),
            (r#"{"a": "\ud800"}"#, Cause::Undecodable),
        ] {
            let mut event = event();
            event.headers = Some(headers.into());
            let error = compose(&event).unwrap_err();
            assert_eq!(error.cause, cause, "{headers}: {error}");
            assert!(!error.message.contains(['\r', '\n']), "{error}");
        }
    }

    #[test]
    fn a_message_is_a_cloudevent_too_if_asked_for() {
        let composer = Composer::new(&JetstreamConfig {
            cloudevents: true,
            ..JetstreamConfig::default()
        });
        let message = composer.compose(&delivery(&event())).unwrap();
        for (name, value) in [
            ("ce_specversion", "1.0"),
            ("ce_id", UUID),
            ("ce_source", "bellwire"),
            ("ce_type", "Placed"),
        ] {
            assert_eq!(header(&message, name).as_deref(), Some(value), "{name}");
        }
        let plain = compose(&event()).unwrap();
        assert_eq!(header(&plain, "ce_id"), None);
    }

    #[test]
    fn a_copy_of_a_dead_event_says_why_and_gets_through() {
        let mut event = event();
        event.headers = Some(r#"{"Nats-Msg-Id": "x"}"#.into());
        let mut delivery = delivery(&event);
        let reason = SinkError::new(Cause::IllegalName, "two\nlines");
        delivery.letter = Some(Arc::new(reason));
        let message = composer().compose(&delivery).unwrap();
        assert_eq!(
            header(&message, "dead_cause").as_deref(),
            Some("illegal_name")
        );
        assert_eq!(
            header(&message, "dead_error").as_deref(),
            Some("two%0Alines")
        );
        assert_ne!(header(&message, MESSAGE_ID), Some(format!("shop:{UUID}")));
    }

    #[test]
    fn headers_count_as_part_of_the_message() {
        let message = compose(&event()).unwrap();
        message.fits(10, message.headers_size + 10).unwrap();
        let error = message.fits(10, message.headers_size + 9).unwrap_err();
        assert_eq!(error.cause, Cause::TooLarge);
        let mut event = event();
        event.correlation_id = Some("x".repeat(MOST_HEADERS));
        assert_eq!(compose(&event).unwrap_err().cause, Cause::TooLarge);
    }
}
