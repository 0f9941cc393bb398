//! The event as the application has it, before it is a row.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use serde::Serialize;
use serde_json::value::RawValue;

use super::OutboxError;
use crate::event::{AggregateKey, EventId, OneLine, OutboxEvent};
use crate::store::Rows;

/// Bytes of `aggregate_type`, `event_type` and of a header's name: no broker carries a longer routing
/// key. As in the SQL function.
const LONGEST_NAME: usize = 255;
/// Bytes of `aggregate_id` and `correlation_id`: longer ones are mistakes. As in the SQL function.
const LONGEST_KEY: usize = 4_096;
/// Bytes of all headers, as JSON: as much as a JetStream message has room for. As in the SQL function.
const MOST_HEADERS: usize = 65_535;
/// The furthest that an event may be scheduled: a thousand years.
const FURTHEST: Duration = Duration::from_secs(1000 * 365 * 86_400);
/// Characters of a wrong UUID that are shown.
const SHOWN: usize = 40;
/// Lengths of the groups of a UUID's text.
const UUID_GROUPS: [usize; 5] = [8, 4, 4, 4, 12];
/// What the database would give the event: as long as any other.
const SOME_UUID: &str = "00000000-0000-4000-8000-000000000000";

/// When an event may leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    Now,
    At(SystemTime),
    /// By the database's clock.
    In(Duration),
}

/// An event to be published.
///
/// ```
/// use std::time::Duration;
/// use bellwire::outbox::NewEvent;
///
/// #[derive(serde::Serialize)]
/// struct OrderPlaced<'a> {
///     order_id: &'a str,
///     total_cents: u64,
/// }
///
/// let body = OrderPlaced { order_id: "ORD-10492", total_cents: 14_950 };
/// let event = NewEvent::of("order", "ORD-10492", "OrderPlaced", &body)?
///     .correlation_id("req-7")
///     .header("tenant", "acme")
///     .due_in(Duration::from_secs(60));
/// assert_eq!(event.payload(), r#"{"order_id":"ORD-10492","total_cents":14950}"#);
/// # Ok::<(), bellwire::outbox::OutboxError>(())
/// ```
///
/// Wrong parts are found when it is published; building it cannot fail, but for serialising a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEvent {
    aggregate_type: String,
    aggregate_id: String,
    event_type: String,
    payload: String,
    headers: BTreeMap<String, String>,
    correlation_id: Option<String>,
    event_id: Option<String>,
    due: Due,
}

impl NewEvent {
    /// An event whose payload is this JSON text.
    ///
    /// The text goes to PostgreSQL as it is; what consumers get is the column's text form of it. A `jsonb`
    /// column keeps every digit of a number, and neither white space nor the order of keys; a `json`
    /// column keeps each byte.
    pub fn raw(
        aggregate_type: impl Into<String>,
        aggregate_id: impl Into<String>,
        event_type: impl Into<String>,
        payload: impl Into<String>,
    ) -> Self {
        Self {
            aggregate_type: aggregate_type.into(),
            aggregate_id: aggregate_id.into(),
            event_type: event_type.into(),
            payload: payload.into(),
            headers: BTreeMap::new(),
            correlation_id: None,
            event_id: None,
            due: Due::Now,
        }
    }

    /// An event whose payload is this value as JSON, serialised once and straight to text.
    ///
    /// # Errors
    /// The value cannot be JSON: a map whose keys are no strings, or its own `Serialize` fails.
    /// (`serde_json` writes floats that are not finite as `null`.)
    pub fn of(
        aggregate_type: impl Into<String>,
        aggregate_id: impl Into<String>,
        event_type: impl Into<String>,
        payload: &(impl Serialize + ?Sized),
    ) -> Result<Self, OutboxError> {
        let text = serde_json::to_string(payload)
            .map_err(|error| OutboxError::Event(format!("payload cannot be JSON: {error}")))?;
        Ok(Self::raw(aggregate_type, aggregate_id, event_type, text))
    }

    /// Adds a header, which the message will have; a second one of the same name replaces the first.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), value.into());
        self
    }

    /// Sets the correlation id, which the message will have as a header.
    #[must_use]
    pub fn correlation_id(mut self, correlation_id: impl Into<String>) -> Self {
        self.correlation_id = Some(correlation_id.into());
        self
    }

    /// Sets the event's UUID, which JetStream knows repeats by (and RabbitMQ's consumers where
    /// `rabbitmq.message_id = "event_id"`); the database gives it one otherwise. Takes the text or
    /// whatever shows itself so, as `uuid::Uuid` does.
    #[must_use]
    pub fn event_id(mut self, event_id: impl fmt::Display) -> Self {
        self.event_id = Some(event_id.to_string());
        self
    }

    /// It leaves at this time, not before; until then it holds back the later events of its aggregate.
    #[must_use]
    pub fn due_at(mut self, at: SystemTime) -> Self {
        self.due = Due::At(at);
        self
    }

    /// It leaves so long after it was written, by the database's clock, and holds back the later events
    /// of its aggregate until then.
    #[must_use]
    pub fn due_in(mut self, delay: Duration) -> Self {
        self.due = Due::In(delay);
        self
    }

    /// For example `order`.
    pub fn aggregate_type(&self) -> &str {
        &self.aggregate_type
    }

    /// For example `ORD-10492`.
    pub fn aggregate_id(&self) -> &str {
        &self.aggregate_id
    }

    /// For example `OrderPlaced`.
    pub fn event_type(&self) -> &str {
        &self.event_type
    }

    /// The JSON text that goes to the database.
    pub fn payload(&self) -> &str {
        &self.payload
    }

    /// Everything that can be said without the database.
    pub(super) fn check(&self) -> Result<(), OutboxError> {
        check_name("aggregate_type", &self.aggregate_type, LONGEST_NAME)?;
        check_name("aggregate_id", &self.aggregate_id, LONGEST_KEY)?;
        check_name("event_type", &self.event_type, LONGEST_NAME)?;
        if let Some(correlation_id) = &self.correlation_id {
            check_text("correlation_id", correlation_id, LONGEST_KEY)?;
        }
        // Only looked over: no value is made of it, numbers and depth do not matter.
        if let Err(error) = serde_json::from_str::<&RawValue>(&self.payload) {
            return Err(wrong(format!("payload is no JSON: {error}")));
        }
        if self.payload.contains('\0') {
            return Err(wrong("payload has a NUL character".into()));
        }
        self.check_headers()?;
        if let Some(event_id) = &self.event_id
            && !is_uuid(event_id)
        {
            let start: String = event_id.chars().take(SHOWN).collect();
            return Err(wrong(format!("event_id `{}` is no UUID", OneLine(&start))));
        }
        self.check_due()
    }

    fn check_headers(&self) -> Result<(), OutboxError> {
        for (name, value) in &self.headers {
            check_name("headers: a name", name, LONGEST_NAME)?;
            if value.contains('\0') {
                return Err(wrong(format!(
                    "headers: the value of {} has a NUL character",
                    OneLine(name)
                )));
            }
        }
        let size = self.headers_json().map_or(0, |text| text.len());
        if size > MOST_HEADERS {
            return Err(wrong(format!(
                "headers has {size} bytes, at most {MOST_HEADERS} are taken"
            )));
        }
        Ok(())
    }

    fn check_due(&self) -> Result<(), OutboxError> {
        let far = match self.due {
            Due::Now => false,
            Due::In(delay) => delay > FURTHEST,
            Due::At(at) => {
                let from_epoch = at.duration_since(SystemTime::UNIX_EPOCH);
                from_epoch.unwrap_or_else(|before| before.duration()) > FURTHEST
            }
        };
        if far {
            return Err(wrong(
                "it is due more than a thousand years from now".into(),
            ));
        }
        Ok(())
    }

    fn headers_json(&self) -> Option<String> {
        (!self.headers.is_empty()).then(|| {
            serde_json::to_string(&self.headers).expect("a map of strings is always an object")
        })
    }

    /// As the relay will have it, for what the sink says of names and headers.
    pub(super) fn as_claimed(&self) -> OutboxEvent {
        OutboxEvent {
            id: EventId(i64::MAX),
            key: AggregateKey::new(&self.aggregate_type, &self.aggregate_id),
            bucket: 0,
            event_type: Arc::from(self.event_type.as_str()),
            payload: Bytes::new(),
            headers: self.headers_json(),
            correlation_id: self.correlation_id.clone(),
            event_id: Some(self.event_id.clone().unwrap_or_else(|| SOME_UUID.into())),
            created_at: Some(0),
            age: None,
            loaded: Instant::now(),
            attempts: 0,
            replayed: false,
        }
    }
}

/// The rows of these events.
pub(super) fn rows(events: &[NewEvent]) -> Rows<'_> {
    let mut rows = Rows::default();
    for event in events {
        rows.aggregate_type.push(&event.aggregate_type);
        rows.aggregate_id.push(&event.aggregate_id);
        rows.event_type.push(&event.event_type);
        rows.payload.push(&event.payload);
        rows.headers.push(event.headers_json());
        rows.correlation_id.push(event.correlation_id.as_deref());
        rows.event_id.push(event.event_id.as_deref());
        let (at, after) = match event.due {
            Due::Now => (None, None),
            Due::At(at) => (Some(at), None),
            Due::In(delay) => (None, Some(delay.as_secs_f64())),
        };
        rows.due_at.push(at);
        rows.due_in.push(after);
    }
    rows
}

fn wrong(reason: String) -> OutboxError {
    OutboxError::Event(reason)
}

fn check_name(part: &str, text: &str, longest: usize) -> Result<(), OutboxError> {
    if text.is_empty() {
        return Err(wrong(format!("{part} is empty")));
    }
    check_text(part, text, longest)
}

fn check_text(part: &str, text: &str, longest: usize) -> Result<(), OutboxError> {
    if text.len() > longest {
        return Err(wrong(format!(
            "{part} has {} bytes, at most {longest} are taken",
            text.len()
        )));
    }
    if text.contains('\0') {
        return Err(wrong(format!("{part} has a NUL character")));
    }
    Ok(())
}

fn is_uuid(text: &str) -> bool {
    let groups: Vec<_> = text.split('-').collect();
    groups.len() == UUID_GROUPS.len()
        && groups.iter().zip(UUID_GROUPS).all(|(group, length)| {
            group.len() == length && group.bytes().all(|letter| letter.is_ascii_hexdigit())
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(event: &NewEvent) -> String {
        event.check().unwrap_err().to_string()
    }

    fn event() -> NewEvent {
        NewEvent::raw("order", "1", "Placed", "{}")
    }

    #[test]
    fn the_wrong_part_is_named() {
        let long = "x".repeat(5_000);
        for (event, words) in [
            (
                NewEvent::raw("", "1", "Placed", "{}"),
                "aggregate_type is empty",
            ),
            (
                NewEvent::raw("order", "", "Placed", "{}"),
                "aggregate_id is empty",
            ),
            (NewEvent::raw("order", "1", "", "{}"), "event_type is empty"),
            (
                NewEvent::raw("order", &long, "Placed", "{}"),
                "aggregate_id has 5000",
            ),
            (
                NewEvent::raw(&long, "1", "Placed", "{}"),
                "aggregate_type has 5000",
            ),
            (
                NewEvent::raw("a\0b", "1", "Placed", "{}"),
                "aggregate_type has a NUL",
            ),
            (event().correlation_id("\0"), "correlation_id has a NUL"),
            (event().header("", "x"), "headers: a name is empty"),
            (
                event().header("a", "\0"),
                "headers: the value of a has a NUL",
            ),
            (event().header("a", "x".repeat(70_000)), "headers has 70"),
            (event().event_id("1"), "event_id `1` is no UUID"),
            (event().due_in(Duration::MAX), "thousand years"),
        ] {
            let error = refused(&event);
            assert!(error.contains(words), "{words}: {error}");
        }
        event().check().unwrap();
    }

    #[test]
    fn what_is_no_json_is_found_before_anything_is_sent() {
        for payload in ["", "{", "{]", "nul", "1 2", "'a'", "NaN", "\"\n\""] {
            let event = NewEvent::raw("order", "1", "Placed", payload);
            assert!(
                refused(&event).starts_with("payload is no JSON"),
                "{payload}"
            );
        }
    }

    #[test]
    fn json_that_no_value_could_hold_is_left_as_it_is() {
        let deep = format!("{}{}", "[".repeat(5_000), "]".repeat(5_000));
        let digits = "1".repeat(400);
        for payload in [
            "1e400",
            " {\"a\" : 1.50, \"a\": 2} ",
            &digits,
            &deep,
            "null",
        ] {
            let event = NewEvent::raw("order", "1", "Placed", payload);
            event.check().unwrap();
            assert_eq!(rows(std::slice::from_ref(&event)).payload, [payload]);
        }
    }

    #[test]
    fn a_uuid_is_taken_in_its_usual_form() {
        assert!(is_uuid("0190b5a0-0000-7000-8000-00000000000A"));
        for odd in [
            "",
            "0190b5a0",
            "0190b5a0-0000-7000-8000-00000000000g",
            "0190b5a0-0000-7000-8000-0000000000000",
        ] {
            assert!(!is_uuid(odd), "{odd}");
        }
    }
}
