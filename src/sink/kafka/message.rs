//! From an event to a record for Kafka. Pure: no I/O.
//!
//! Invariants:
//! - Key and headers are functions of the row, the configuration and (header `attempt` only) the
//!   attempt: a repeat carries the same `event_id`, which consumers know it by.
//! - Whatever Kafka cannot carry is found here, before anything is sent.
//! - The payload is not looked at: JSON `null` is sent as these four bytes.
//! - **Keys:** the aggregate's id, so that its events are in one partition, in order. An empty one is
//!   sent as an empty key, never as none: records without a key go to any partition.

use std::collections::BTreeMap;
use std::sync::Arc;

use rdkafka::message::{Header, OwnedHeaders};
use serde_json::value::RawValue;

use super::topic;
use crate::config::KafkaConfig;
use crate::event::{OneLine, OutboxEvent};
use crate::relay::failure::Cause;
use crate::sink::{Delivery, SinkError, cloudevents};

/// A record ready to be sent; its value is the event's payload.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) key: Arc<str>,
    pub(super) headers: OwnedHeaders,
}

/// By name; none is a header without a value.
type Headers = BTreeMap<String, Option<String>>;

/// What all records of a sink have in common.
#[derive(Debug)]
pub(super) struct Composer {
    source: String,
    cloudevents: bool,
}

impl Composer {
    pub(super) fn new(config: &KafkaConfig) -> Self {
        Self {
            source: config.source.clone(),
            cloudevents: config.cloudevents,
        }
    }

    /// The record of an event, or why there can be none: the row's own permanent failure.
    pub(super) fn compose(&self, delivery: &Delivery) -> Result<Message, SinkError> {
        topic::check_name(&delivery.address.destination)?;
        let all = self.headers(delivery)?;
        let mut headers = OwnedHeaders::new_with_capacity(all.len());
        for (name, value) in &all {
            headers = headers.insert(Header {
                key: name,
                value: value.as_deref(),
            });
        }
        let key = delivery.address.key.as_ref();
        Ok(Message {
            key: key.unwrap_or(&delivery.event.key.aggregate_id).clone(),
            headers,
        })
    }

    fn headers(&self, delivery: &Delivery) -> Result<Headers, SinkError> {
        let event = &*delivery.event;
        let mut headers = Headers::new();
        if let Some(text) = event.headers.as_deref().filter(|text| *text != "null") {
            match row_headers(text, &mut headers) {
                Ok(()) => {}
                // Whatever the event is given up for, its copy should get through.
                Err(_) if delivery.is_letter() => headers.clear(),
                Err(error) => return Err(error),
            }
        }
        self.own_headers(event, &mut headers);
        match self.attributes(event) {
            Ok(attributes) => headers.extend(attributes),
            Err(_) if delivery.is_letter() => {}
            Err(error) => return Err(error),
        }
        match &event.event_id {
            Some(event_id) => drop(headers.insert("event_id".into(), Some(event_id.clone()))),
            // That may be what it is given up for.
            None if delivery.is_letter() => {}
            None => {
                return Err(SinkError::new(
                    Cause::Undecodable,
                    "column event_id is NULL: it is what consumers of Kafka know repeats by (bellwire \
                     migrate fills it in)",
                ));
            }
        }
        if let Some(reason) = &delivery.letter {
            let mut put = |name: &str, value: String| headers.insert(name.into(), Some(value));
            put("dead_cause", reason.cause.class().to_owned());
            put("dead_error", reason.message.clone());
        }
        Ok(headers)
    }

    /// Of a CloudEvent, if it shall be one. Its binding to Kafka spells the content's type like this.
    fn attributes(&self, event: &OutboxEvent) -> Result<Headers, SinkError> {
        if !self.cloudevents {
            return Ok(Headers::new());
        }
        let attributes = cloudevents::attributes(event, &self.source)?;
        let content_type = ("content-type", "application/json".to_owned());
        let all = attributes.into_iter().chain([content_type]);
        Ok(all
            .map(|(name, value)| (name.into(), Some(value)))
            .collect())
    }

    /// They win over a row's header of the same name.
    fn own_headers(&self, event: &OutboxEvent, headers: &mut Headers) {
        let mut put = |name: &str, value: &str| headers.insert(name.into(), Some(value.to_owned()));
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

/// Adds the entries of the row's `headers`, a JSON object. Strings as they are, null as no value, all
/// else as its JSON text, since Kafka knows nothing but bytes.
fn row_headers(text: &str, headers: &mut Headers) -> Result<(), SinkError> {
    let entries: BTreeMap<String, Box<RawValue>> = serde_json::from_str(text)
        .map_err(|_| SinkError::new(Cause::Undecodable, "column headers is not a JSON object"))?;
    for (name, value) in entries {
        if name.is_empty() || name.contains('\0') {
            return Err(SinkError::new(
                Cause::IllegalName,
                format!(
                    "header name '{}': Kafka's clients take no empty names and none with a zero byte",
                    OneLine(&name)
                ),
            ));
        }
        let value = match value.get() {
            "null" => None,
            text if text.starts_with('"') => {
                Some(serde_json::from_str::<String>(text).map_err(|_| {
                    SinkError::new(
                        Cause::Undecodable,
                        format!(
                            "header {} in column headers cannot be decoded",
                            OneLine(&name)
                        ),
                    )
                })?)
            }
            json => Some(json.to_owned()),
        };
        headers.insert(name, value);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{RouteConfig, SinkSetting};
    use crate::event::{AggregateKey, ClaimToken};
    use crate::route::{Router, Unless};

    const UUID: &str = "0190b5a0-0000-7000-8000-000000000001";

    fn event() -> OutboxEvent {
        OutboxEvent {
            event_id: Some(UUID.into()),
            created_at: Some(1_700_000_000),
            attempts: 2,
            ..OutboxEvent::sample(42, ("order", "ORD-1"), "Placed")
        }
    }

    fn deliver(event: &OutboxEvent, routes: &[RouteConfig]) -> Delivery {
        let token = Arc::new(ClaimToken::new(1, "t".into()));
        let router = Router::of(routes, SinkSetting::Kafka, |_| {
            Ok(Unless::ByAggregateType("events"))
        });
        let router = router.unwrap();
        router.deliver(event.clone(), &token)
    }

    fn composer() -> Composer {
        Composer::new(&KafkaConfig {
            source: "shop".into(),
            ..KafkaConfig::default()
        })
    }

    fn headers(event: &OutboxEvent) -> Result<Headers, SinkError> {
        composer().headers(&deliver(event, &[]))
    }

    #[test]
    fn a_record_goes_to_its_types_topic_and_tells_the_row() {
        let delivery = deliver(&event(), &[]);
        assert_eq!(&*delivery.address.destination, "events.order");
        let headers = composer().headers(&delivery).unwrap();
        for (name, value) in [
            ("event_id", UUID),
            ("event_sequence", "42"),
            ("event_type", "Placed"),
            ("aggregate_type", "order"),
            ("aggregate_id", "ORD-1"),
            ("attempt", "3"),
            ("content_type", "application/json"),
            ("source", "shop"),
            ("created_at", "1700000000"),
        ] {
            assert_eq!(headers[name].as_deref(), Some(value), "{name}");
        }
        assert!(!headers.contains_key("correlation_id") && !headers.contains_key("replayed"));
        let message = composer().compose(&delivery).unwrap();
        assert_eq!(&*message.key, "ORD-1");
    }

    #[test]
    fn keys_are_the_aggregates_id_however_odd_unless_a_route_has_one() {
        for id in ["", " ", "ü€😀", "a\r\nb"] {
            let mut event = event();
            event.key = AggregateKey::new("order", id);
            let message = composer().compose(&deliver(&event, &[])).unwrap();
            assert_eq!(&*message.key, id);
        }
        let route = RouteConfig {
            routing_key: Some("{event_type}:{aggregate_id}".into()),
            ..RouteConfig::default()
        };
        let message = composer().compose(&deliver(&event(), &[route])).unwrap();
        assert_eq!(&*message.key, "Placed:ORD-1");
    }

    #[test]
    fn a_type_that_makes_no_topic_is_refused() {
        for odd in ["order line", "a/b", "ü", "", "..", &"a".repeat(260)] {
            let mut event = event();
            event.key = AggregateKey::new(odd, "1");
            let topic = &deliver(&event, &[]).address.destination;
            // `events.` and `events...` are names like others.
            let legal = ["", ".."].contains(&odd);
            let composed = composer().compose(&deliver(&event, &[]));
            assert_eq!(composed.is_ok(), legal, "{topic}");
            if let Err(error) = composed {
                assert_eq!(error.cause, Cause::IllegalName);
            }
        }
    }

    #[test]
    fn headers_of_the_row_keep_their_values_and_never_replace_ours() {
        let mut event = event();
        event.headers = Some(
            r#"{"traceparent": "00-ab", "n": 1.50, "flag": true, "none": null, "deep": {"a": [1]},
                "aggregate_id": "other", "ü b": "x\r\ny"}"#
                .into(),
        );
        let headers = headers(&event).unwrap();
        for (name, value) in [
            ("traceparent", Some("00-ab")),
            ("n", Some("1.50")),
            ("flag", Some("true")),
            ("none", None),
            ("deep", Some(r#"{"a": [1]}"#)),
            ("aggregate_id", Some("ORD-1")),
            ("ü b", Some("x\r\ny")),
        ] {
            assert_eq!(headers[name].as_deref(), value, "{name}");
        }
    }

    #[test]
    fn headers_that_kafka_cannot_carry_are_refused() {
        for (text, cause) in [
            (r#"{"": "x"}"#, Cause::IllegalName),
            (r#"["x"]"#, Cause::Undecodable),
            (r#"{"a": "\ud800"}"#, Cause::Undecodable),
        ] {
            let mut event = event();
            event.headers = Some(text.into());
            let error = headers(&event).unwrap_err();
            assert_eq!(error.cause, cause, "{text}: {error}");
        }
        let mut event = event();
        event.event_id = None;
        assert_eq!(headers(&event).unwrap_err().cause, Cause::Undecodable);
    }

    #[test]
    fn a_record_is_a_cloudevent_too_if_asked_for() {
        let composer = Composer::new(&KafkaConfig {
            cloudevents: true,
            ..KafkaConfig::default()
        });
        let headers = composer.headers(&deliver(&event(), &[])).unwrap();
        for (name, value) in [
            ("ce_specversion", "1.0"),
            ("ce_id", UUID),
            ("ce_source", "bellwire"),
            ("ce_type", "Placed"),
            ("ce_subject", "ORD-1"),
            ("content-type", "application/json"),
            ("event_id", UUID),
        ] {
            assert_eq!(headers[name].as_deref(), Some(value), "{name}");
        }
        let headers = self::composer().headers(&deliver(&event(), &[])).unwrap();
        assert!(!headers.keys().any(|name| name.starts_with("ce_")));
    }

    #[test]
    fn a_copy_of_a_dead_event_says_why_and_gets_through() {
        let mut event = event();
        event.headers = Some(r#"{"": "x"}"#.into());
        event.event_id = None;
        let mut delivery = deliver(&event, &[]);
        let reason = SinkError::new(Cause::IllegalName, "two\nlines");
        delivery.letter = Some(Arc::new(reason));
        let headers = composer().headers(&delivery).unwrap();
        assert_eq!(headers["dead_cause"].as_deref(), Some("illegal_name"));
        assert_eq!(headers["dead_error"].as_deref(), Some("two\nlines"));
    }
}
