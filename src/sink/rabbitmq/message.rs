//! From an event to an AMQP message. Pure: no I/O.
//!
//! Invariants:
//! - Routing key, properties and headers are functions of the row, the configuration and (header
//!   `attempt` only) the attempt: a repeat carries the same message id.
//! - Whatever AMQP cannot carry is found here, before anything is sent. One illegal frame would
//!   close the channel or the connection and take the innocent neighbours with it.
//! - The payload is not looked at.

use std::collections::BTreeMap;
use std::sync::Arc;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use serde_json::value::RawValue;

use crate::config::{MessageId, RabbitmqConfig};
use crate::event::{OneLine, OutboxEvent};
use crate::relay::failure::Cause;
use crate::sink::{Delivery, SinkError, cloudevents};

/// Survives a broker restart in a durable queue.
const PERSISTENT: u8 = 2;
/// Frame type, channel and size before a frame's payload; the end octet after it.
const FRAME_OVERHEAD: usize = 8;
/// Class, weight, body size and property flags of a content header.
const CONTENT_HEADER: usize = 14;
/// RabbitMQ reads routing keys from these headers and closes the channel unless they are arrays.
const ROUTING_HEADERS: [&str; 2] = ["CC", "BCC"];

/// A message ready to be sent; its body is the event's payload.
#[derive(Debug)]
pub(super) struct Message {
    /// The route's destination.
    pub(super) exchange: ShortString,
    /// The route's, `<aggregate_type>.<event_type>` unless it has one.
    pub(super) routing_key: ShortString,
    /// Everything but the body.
    pub(super) properties: BasicProperties,
    /// The same as in `properties`; what returned messages are recognised by.
    pub(super) message_id: Arc<str>,
    /// Bytes of the content header frame, which must not exceed the connection's `frame_max`.
    pub(super) header_frame: usize,
}

/// What all messages of a sink have in common.
#[derive(Debug)]
pub(super) struct Composer {
    source: ShortString,
    content_type: ShortString,
    message_id: MessageId,
    names: OwnNames,
    cloudevents: bool,
}

/// The headers that every message has; they win over a row's header of the same name.
#[derive(Debug)]
struct OwnNames {
    aggregate_type: ShortString,
    aggregate_id: ShortString,
    attempt: ShortString,
    correlation_id: ShortString,
    replayed: ShortString,
    dead_cause: ShortString,
    dead_error: ShortString,
}

/// Routing key of a copy of a dead event whose own cannot be one.
const ODD_LETTER_KEY: &str = "dead";

impl Composer {
    /// # Errors
    /// The source is too long to be an `app_id`.
    pub(super) fn new(config: &RabbitmqConfig) -> Result<Self, SinkError> {
        Ok(Self {
            source: short("rabbitmq.source", config.source.clone())?,
            content_type: "application/json".into(),
            message_id: config.message_id,
            names: OwnNames {
                aggregate_type: "aggregate_type".into(),
                aggregate_id: "aggregate_id".into(),
                attempt: "attempt".into(),
                correlation_id: "correlation_id".into(),
                replayed: "replayed".into(),
                dead_cause: "dead_cause".into(),
                dead_error: "dead_error".into(),
            },
            cloudevents: config.cloudevents,
        })
    }

    /// The message of an event, or why there can be none: the row's own permanent failure.
    pub(super) fn compose(&self, delivery: &Delivery) -> Result<Message, SinkError> {
        let event = &*delivery.event;
        let exchange = exchange(&delivery.address.destination)?;
        let message_id = self.message_id(event)?;
        let (headers, kind, routing_key) = match &delivery.letter {
            None => (
                self.headers(event)?,
                short("event_type (AMQP type)", event.event_type.to_string())?,
                routing_key(delivery)?,
            ),
            // Whatever the event is given up for, its copy should get through.
            Some(reason) => (
                self.letter_headers(event, reason),
                short("", event.event_type.to_string()).unwrap_or_else(|_| ODD_LETTER_KEY.into()),
                routing_key(delivery).unwrap_or_else(|_| ODD_LETTER_KEY.into()),
            ),
        };
        let headers_size = table_size(&headers);
        let kind_size = kind.as_str().len();
        let mut properties = BasicProperties::default()
            .with_content_type(self.content_type.clone())
            .with_headers(headers)
            .with_delivery_mode(PERSISTENT)
            .with_message_id(short("message id", message_id.clone())?)
            .with_type(kind)
            .with_app_id(self.source.clone());
        if let Some(seconds) = event.created_at {
            properties = properties.with_timestamp(seconds);
        }
        let sizes = [
            self.content_type.as_str().len(),
            message_id.len(),
            kind_size,
            self.source.as_str().len(),
        ];
        Ok(Message {
            exchange,
            routing_key,
            header_frame: FRAME_OVERHEAD
                + CONTENT_HEADER
                + sizes.iter().map(|size| 1 + size).sum::<usize>()
                + headers_size
                + size_of_val(&PERSISTENT)
                + event.created_at.map_or(0, |seconds| size_of_val(&seconds)),
            message_id: message_id.into(),
            properties,
        })
    }

    fn message_id(&self, event: &OutboxEvent) -> Result<String, SinkError> {
        match self.message_id {
            MessageId::Id => Ok(event.id.to_string()),
            MessageId::EventId => event.event_id.clone().ok_or_else(|| {
                SinkError::new(
                    Cause::Undecodable,
                    "column event_id is NULL, and rabbitmq.message_id = \"event_id\" takes the \
                     message id from it",
                )
            }),
        }
    }

    fn headers(&self, event: &OutboxEvent) -> Result<FieldTable, SinkError> {
        let mut table = BTreeMap::new();
        // JSON null, as some write it for none.
        if let Some(text) = event.headers.as_deref().filter(|text| *text != "null") {
            row_headers(text, &mut table)?;
        }
        self.own_headers(event, &mut table);
        self.add_attributes(event, &mut table)?;
        Ok(table.into())
    }

    /// Of a copy of an event that is given up. Headers of the row's that cannot be carried are left
    /// out: they may be what it is given up for.
    fn letter_headers(&self, event: &OutboxEvent, reason: &SinkError) -> FieldTable {
        let mut table = BTreeMap::new();
        if let Some(text) = event.headers.as_deref()
            && row_headers(text, &mut table).is_err()
        {
            table.clear();
        }
        self.own_headers(event, &mut table);
        // That it has none may be what it is given up for.
        let _ = self.add_attributes(event, &mut table);
        table.insert(self.names.dead_cause.clone(), long(reason.cause.class()));
        table.insert(self.names.dead_error.clone(), long(&reason.message));
        table.into()
    }

    /// Of a CloudEvent, if it shall be one.
    fn add_attributes(
        &self,
        event: &OutboxEvent,
        table: &mut BTreeMap<ShortString, AMQPValue>,
    ) -> Result<(), SinkError> {
        if self.cloudevents {
            let attributes = cloudevents::attributes(event, self.source.as_str())?;
            let entries = attributes.iter();
            table.extend(entries.map(|(name, value)| ((*name).into(), long(value))));
        }
        Ok(())
    }

    fn own_headers(&self, event: &OutboxEvent, table: &mut BTreeMap<ShortString, AMQPValue>) {
        let names = &self.names;
        table.insert(
            names.aggregate_type.clone(),
            long(&event.key.aggregate_type),
        );
        table.insert(names.aggregate_id.clone(), long(&event.key.aggregate_id));
        table.insert(names.attempt.clone(), AMQPValue::LongInt(event.attempt()));
        if let Some(correlation_id) = &event.correlation_id {
            table.insert(names.correlation_id.clone(), long(correlation_id));
        }
        if event.replayed {
            table.insert(names.replayed.clone(), AMQPValue::Boolean(true));
        }
    }
}

fn exchange(destination: &str) -> Result<ShortString, SinkError> {
    if destination.is_empty() {
        // To AMQP that is the default exchange, which would take the routing key for a queue's name.
        return Err(SinkError::new(
            Cause::IllegalName,
            "the route's destination is an empty name for this event",
        ));
    }
    short("exchange that the route gives", destination.to_owned())
}

fn routing_key(delivery: &Delivery) -> Result<ShortString, SinkError> {
    if let Some(key) = &delivery.address.key {
        return short("routing key that the route gives", key.to_string());
    }
    let event = &delivery.event;
    let mut key =
        String::with_capacity(event.key.aggregate_type.len() + 1 + event.event_type.len());
    key.push_str(&event.key.aggregate_type);
    key.push('.');
    key.push_str(&event.event_type);
    short("routing key <aggregate_type>.<event_type>", key)
}

/// Adds the entries of the row's `headers`, a JSON object.
fn row_headers(text: &str, table: &mut BTreeMap<ShortString, AMQPValue>) -> Result<(), SinkError> {
    // Raw values: numbers that no float can hold and any depth of nesting are fine.
    let headers: BTreeMap<String, Box<RawValue>> = serde_json::from_str(text)
        .map_err(|_| SinkError::new(Cause::Undecodable, "column headers is not a JSON object"))?;
    for (name, value) in headers {
        if ROUTING_HEADERS.contains(&name.as_str()) {
            return Err(SinkError::new(
                Cause::IllegalName,
                format!(
                    "header {name}: RabbitMQ takes routing keys from a header of this name; \
                     choose another"
                ),
            ));
        }
        let value = field(value.get()).ok_or_else(|| {
            SinkError::new(
                Cause::Undecodable,
                format!(
                    "header {} in column headers cannot be decoded",
                    OneLine(&name)
                ),
            )
        })?;
        table.insert(short("header name", name)?, value);
    }
    Ok(())
}

/// One JSON value as an AMQP field. Floats, large integers, arrays and objects keep their exact
/// JSON text, since no AMQP number or nested table would say the same to every client.
fn field(json: &str) -> Option<AMQPValue> {
    Some(match json.as_bytes().first()? {
        b'"' => long(&serde_json::from_str::<String>(json).ok()?),
        b't' => AMQPValue::Boolean(true),
        b'f' => AMQPValue::Boolean(false),
        b'n' => AMQPValue::Void,
        _ => json
            .parse()
            .map_or_else(|_| long(json), AMQPValue::LongLongInt),
    })
}

fn long(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

/// `ShortString::from` would panic over 255 bytes.
fn short(what: &str, text: String) -> Result<ShortString, SinkError> {
    let bytes = text.len();
    ShortString::try_new(text).map_err(|_| {
        SinkError::new(
            Cause::IllegalName,
            format!("the {what} has {bytes} bytes, AMQP takes at most 255"),
        )
    })
}

/// Encoded size of a table of the kinds of value that [`Composer::headers`] makes.
fn table_size(table: &FieldTable) -> usize {
    let length = size_of::<u32>();
    let entry = |(name, value): (&ShortString, &AMQPValue)| {
        let value = match value {
            AMQPValue::LongString(text) => length + text.len(),
            AMQPValue::LongLongInt(_) => size_of::<i64>(),
            AMQPValue::LongInt(_) => size_of::<i32>(),
            AMQPValue::Boolean(_) => 1,
            _ => 0,
        };
        1 + name.as_str().len() + 1 + value
    };
    length + table.into_iter().map(entry).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{AggregateKey, ClaimToken};
    use crate::route::Router;

    fn event() -> OutboxEvent {
        OutboxEvent {
            created_at: Some(1_700_000_000),
            attempts: 2,
            ..OutboxEvent::sample(42, ("order", "ORD-10492"), "OrderPlaced")
        }
    }

    fn delivery(event: &OutboxEvent) -> Delivery {
        let token = Arc::new(ClaimToken::new(1, "t".into()));
        let router = Router::new(&[], "domain-events").unwrap();
        router.deliver(event.clone(), &token)
    }

    fn composer(message_id: MessageId) -> Composer {
        Composer::new(&RabbitmqConfig {
            source: "shop".into(),
            message_id,
            ..RabbitmqConfig::default()
        })
        .unwrap()
    }

    fn compose(event: &OutboxEvent) -> Result<Message, SinkError> {
        composer(MessageId::Id).compose(&delivery(event))
    }

    fn header(message: &Message, name: &str) -> Option<AMQPValue> {
        let table = message.properties.headers().as_ref().unwrap();
        table.inner().get(name).cloned()
    }

    fn encoded(message: &Message) -> usize {
        let header = amq_frame_size(message);
        header + FRAME_OVERHEAD
    }

    /// Class, weight and body size, then what the library itself writes for the properties.
    fn amq_frame_size(message: &Message) -> usize {
        let buffer = Vec::new();
        let context = lapin::protocol::basic::gen_properties(&message.properties)(buffer.into());
        12 + context.unwrap().into_inner().0.len()
    }

    #[test]
    fn a_message_carries_what_the_table_in_the_readme_says() {
        let mut event = event();
        event.correlation_id = Some("c-1".into());
        let message = compose(&event).unwrap();
        assert_eq!(message.routing_key.as_str(), "order.OrderPlaced");
        assert_eq!(&*message.message_id, "42");
        let properties = &message.properties;
        assert_eq!(properties.message_id().as_ref().unwrap().as_str(), "42");
        assert_eq!(properties.app_id().as_ref().unwrap().as_str(), "shop");
        assert_eq!(properties.kind().as_ref().unwrap().as_str(), "OrderPlaced");
        assert_eq!(
            properties.content_type().as_ref().unwrap().as_str(),
            "application/json"
        );
        assert_eq!(*properties.delivery_mode(), Some(2));
        assert_eq!(*properties.timestamp(), Some(1_700_000_000));
        assert_eq!(header(&message, "aggregate_type"), Some(long("order")));
        assert_eq!(header(&message, "aggregate_id"), Some(long("ORD-10492")));
        assert_eq!(header(&message, "attempt"), Some(AMQPValue::LongInt(3)));
        assert_eq!(header(&message, "correlation_id"), Some(long("c-1")));
    }

    #[test]
    fn the_rows_headers_keep_their_exact_values_and_own_names_win() {
        let mut event = event();
        let deep = format!("{}1{}", "[".repeat(400), "]".repeat(400));
        event.headers = Some(format!(
            "{{\"traceparent\": \"00-ab\\u00e9\", \"yes\": true, \"no\": false, \"none\": null, \
             \"int\": -7, \"big\": 9223372036854775808, \"odd\": 1e400, \"half\": 0.50, \
             \"list\": [1, 2], \"deep\": {deep}, \"attempt\": 99, \"\": \"empty\"}}"
        ));
        let message = compose(&event).unwrap();
        for (name, value) in [
            ("traceparent", long("00-ab\u{e9}")),
            ("yes", AMQPValue::Boolean(true)),
            ("no", AMQPValue::Boolean(false)),
            ("none", AMQPValue::Void),
            ("int", AMQPValue::LongLongInt(-7)),
            ("big", long("9223372036854775808")),
            ("odd", long("1e400")),
            ("half", long("0.50")),
            ("list", long("[1, 2]")),
            ("deep", long(&deep)),
            ("attempt", AMQPValue::LongInt(3)),
            ("", long("empty")),
        ] {
            assert_eq!(header(&message, name), Some(value), "{name}");
        }
        assert_eq!(message.header_frame, encoded(&message));
    }

    #[test]
    fn a_message_is_a_cloudevent_too_if_asked_for() {
        let composer = Composer::new(&RabbitmqConfig {
            cloudevents: true,
            ..RabbitmqConfig::default()
        })
        .unwrap();
        let message = composer.compose(&delivery(&event())).unwrap();
        for (name, value) in [
            ("ce_specversion", "1.0"),
            ("ce_id", "42"),
            ("ce_source", "bellwire"),
            ("ce_type", "OrderPlaced"),
        ] {
            assert_eq!(header(&message, name), Some(long(value)), "{name}");
        }
        assert_eq!(header(&compose(&event()).unwrap(), "ce_id"), None);
    }

    #[test]
    fn a_copy_of_a_dead_event_gets_through_whatever_the_event_died_of() {
        let mut event = event();
        event.headers = Some("{\"CC\": [\"elsewhere\"]}".into());
        event.event_type = "x".repeat(300).into();
        let mut delivery = delivery(&event);
        let reason = composer(MessageId::Id).compose(&delivery).unwrap_err();
        delivery.letter = Some(Arc::new(reason));
        let message = composer(MessageId::Id).compose(&delivery).unwrap();
        assert_eq!(message.routing_key.as_str(), "dead");
        assert_eq!(&*message.message_id, "42");
        assert_eq!(header(&message, "dead_cause"), Some(long("illegal_name")));
        assert!(header(&message, "dead_error").is_some());
        assert_eq!(header(&message, "CC"), None);
        assert_eq!(message.header_frame, encoded(&message));
    }

    #[test]
    fn an_event_that_comes_late_says_so() {
        let mut event = event();
        assert_eq!(header(&compose(&event).unwrap(), "replayed"), None);
        event.replayed = true;
        let message = compose(&event).unwrap();
        assert_eq!(header(&message, "replayed"), Some(AMQPValue::Boolean(true)));
        assert_eq!(message.header_frame, encoded(&message));
    }

    #[test]
    fn the_default_exchange_is_never_meant() {
        let mut delivery = delivery(&event());
        delivery.address.destination = "".into();
        let error = composer(MessageId::Id).compose(&delivery).unwrap_err();
        assert_eq!(error.cause, Cause::IllegalName);
    }

    #[test]
    fn headers_that_are_no_object_are_undecodable() {
        for text in ["[]", "1", "\"a\"", "{\"a\":", ""] {
            let mut event = event();
            event.headers = Some(text.into());
            let error = compose(&event).unwrap_err();
            assert_eq!(error.cause, Cause::Undecodable, "{text}");
        }
    }

    #[test]
    fn names_of_more_than_255_bytes_are_illegal() {
        let long_name = "é".repeat(128);
        let mut key = event();
        key.key = AggregateKey::new(&long_name, "1");
        let mut kind = event();
        kind.event_type = "a".repeat(256).into();
        let mut name = event();
        name.headers = Some(format!("{{\"{long_name}\": 1}}"));
        let mut routing = event();
        routing.headers = Some("{\"CC\": \"elsewhere\"}".into());
        for (event, text) in [
            (key, "268 bytes"),
            (kind, "256 bytes"),
            (name, "256 bytes"),
            (routing, "CC"),
        ] {
            let error = compose(&event).unwrap_err();
            assert_eq!(error.cause, Cause::IllegalName);
            assert!(error.message.contains(text), "{}", error.message);
        }
    }

    #[test]
    fn empty_names_are_legal() {
        let mut event = event();
        event.key = AggregateKey::new("", "");
        event.event_type = "".into();
        assert_eq!(compose(&event).unwrap().routing_key.as_str(), ".");
    }

    #[test]
    fn a_missing_event_id_is_not_replaced_by_anything() {
        let by_uuid = composer(MessageId::EventId);
        let mut event = event();
        let error = by_uuid.compose(&delivery(&event)).unwrap_err();
        assert_eq!(error.cause, Cause::Undecodable);
        assert!(error.message.contains("event_id"));
        event.event_id = Some("0189".into());
        assert_eq!(
            &*by_uuid.compose(&delivery(&event)).unwrap().message_id,
            "0189"
        );
    }

    #[test]
    fn the_header_frames_size_is_exact() {
        let mut event = event();
        event.key = AggregateKey::new("order", &"x".repeat(10_000));
        let message = compose(&event).unwrap();
        assert_eq!(message.header_frame, encoded(&message));
        event.created_at = None;
        let message = compose(&event).unwrap();
        assert_eq!(message.header_frame, encoded(&message));
    }
}
