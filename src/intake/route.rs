//! Routes: what is done with the events of a type. The first that matches decides.
//!
//! Pure: a handler is a list of statements with their values; running them is the store's matter.

#![expect(
    clippy::string_slice,
    reason = "at places that were found in this very text"
)]

use std::collections::BTreeMap;

use super::pointer::Pointer;
use super::signature::Verified;
use super::statement::{self, Parameter, Statement};
use crate::config::{ConfigError, EmitConfig, IntakeRouteConfig};
use crate::route::template::Pattern;

/// An event as it goes through the intake: well signed, and a JSON object.
#[derive(Clone, Debug)]
pub struct Event {
    /// Where it came from.
    pub source: String,
    /// The call that brought it, now or when it was stored.
    pub id: String,
    /// Its type as the body has it; empty where it has none.
    pub event_type: String,
    /// The body.
    pub text: String,
    /// What it is done under.
    pub execution_id: String,
}

impl Event {
    /// Of a verified call whose body was found to be text.
    pub fn new(
        source: &str,
        verified: &Verified,
        event_type: String,
        text: &str,
        execution_id: &str,
    ) -> Self {
        Self {
            source: source.to_owned(),
            id: verified.id().to_owned(),
            event_type,
            text: text.to_owned(),
            execution_id: execution_id.to_owned(),
        }
    }
}

/// One step of a handler.
#[derive(Clone, Debug)]
pub enum Step {
    /// The user's statement.
    Sql(Statement),
    /// An event for the outbox.
    Emit(Emit),
}

/// What a step runs: a statement and its values, all of them text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order<'a> {
    /// A statement of the user's.
    Sql(&'a str, Vec<Option<String>>),
    /// Aggregate type, aggregate id, event type, payload.
    Emit([String; 4]),
}

impl Step {
    /// What this event makes of it.
    ///
    /// # Errors
    /// What the event lacks: a business failure.
    pub fn order(&self, event: &Event) -> Result<Order<'_>, String> {
        match self {
            Self::Sql(statement) => {
                let values = statement
                    .parameters
                    .iter()
                    .map(|parameter| value(parameter, event))
                    .collect::<Result<_, _>>()?;
                Ok(Order::Sql(&statement.sql, values))
            }
            Self::Emit(emit) => emit.order(event),
        }
    }
}

fn value(parameter: &Parameter, event: &Event) -> Result<Option<String>, String> {
    let text = match parameter {
        Parameter::EventId => event.id.clone(),
        Parameter::EventType => event.event_type.clone(),
        Parameter::Source => event.source.clone(),
        Parameter::ExecutionId => event.execution_id.clone(),
        Parameter::Payload => event.text.clone(),
        Parameter::At(pointer) => match pointer.text(&event.text) {
            Some(text) => text.into_owned(),
            None => return Ok(None),
        },
    };
    if text.contains('\0') {
        let what = match parameter {
            Parameter::At(pointer) => pointer.to_string(),
            _ => "the event type".into(),
        };
        return Err(format!(
            "{what} holds \\u0000, which PostgreSQL cannot store"
        ));
    }
    Ok(Some(text))
}

/// A route.
#[derive(Debug)]
pub struct Route {
    pattern: Pattern,
    /// In this order, in one savepoint.
    pub steps: Vec<Step>,
}

impl Route {
    /// Reads what the configuration says; `at` names the place.
    ///
    /// # Errors
    /// Names the option that is wrong.
    pub fn new(config: &IntakeRouteConfig, at: &str) -> Result<Self, ConfigError> {
        let mut pointers = BTreeMap::new();
        for (name, pointer) in &config.parameters {
            let option = format!("{at}.parameters.{name}");
            pointers.insert(name.clone(), read_pointer(&option, pointer)?);
        }
        let mut steps = Vec::new();
        if let Some((text, place)) = config.sql_text(at)? {
            let statements = statement::parse(&text, &pointers)
                .map_err(|reason| ConfigError::Key { key: place, reason })?;
            steps.extend(statements.into_iter().map(Step::Sql));
        }
        if let Some(emit) = &config.outbox {
            steps.push(Step::Emit(Emit::new(emit, &format!("{at}.outbox"))?));
        }
        Ok(Self {
            pattern: Pattern::new(&config.event_type),
            steps,
        })
    }

    /// Is it for events of this type?
    pub fn matches(&self, event_type: &str) -> bool {
        self.pattern.matches(event_type)
    }
}

fn read_pointer(option: &str, text: &str) -> Result<Pointer, ConfigError> {
    Pointer::parse(text).map_err(|reason| ConfigError::Key {
        key: option.to_owned(),
        reason,
    })
}

/// A text itself, or where it is found.
#[derive(Clone, Debug)]
enum Piece {
    Text(String),
    At(Pointer),
    EventType,
    EventId,
    Source,
}

impl Piece {
    fn of(&self, event: &Event, what: &str) -> Result<String, String> {
        match self {
            Self::Text(text) => Ok(text.clone()),
            Self::EventType => Ok(event.event_type.clone()),
            Self::EventId => Ok(event.id.clone()),
            Self::Source => Ok(event.source.clone()),
            Self::At(pointer) => scalar(pointer, event, what),
        }
    }
}

/// A string, number or boolean.
fn scalar(pointer: &Pointer, event: &Event, what: &str) -> Result<String, String> {
    let found = pointer.find(&event.text).unwrap_or_default();
    if found.starts_with(['{', '[']) {
        return Err(format!("{what}: {pointer} leads to no plain value"));
    }
    match pointer.text(&event.text) {
        None => Err(format!("{what}: there is nothing at {pointer}")),
        Some(text) if text.contains('\0') => Err(format!(
            "{what}: {pointer} holds \\u0000, which PostgreSQL cannot store"
        )),
        Some(text) => Ok(text.into_owned()),
    }
}

/// An event for the outbox.
#[derive(Clone, Debug)]
pub struct Emit {
    aggregate_type: Piece,
    aggregate_id: Pointer,
    event_type: Vec<Piece>,
    payload: Pointer,
}

impl Emit {
    fn new(config: &EmitConfig, at: &str) -> Result<Self, ConfigError> {
        let option = |name: &str| format!("{at}.{name}");
        let aggregate_type = if config.aggregate_type.starts_with('/') {
            Piece::At(read_pointer(
                &option("aggregate_type"),
                &config.aggregate_type,
            )?)
        } else if config.aggregate_type.is_empty() {
            return Err(ConfigError::Key {
                key: option("aggregate_type"),
                reason: "is empty: give the type, or a JSON pointer to it".into(),
            });
        } else {
            Piece::Text(config.aggregate_type.clone())
        };
        Ok(Self {
            aggregate_type,
            aggregate_id: read_pointer(&option("aggregate_id"), &config.aggregate_id)?,
            event_type: template(&config.event_type).map_err(|reason| ConfigError::Key {
                key: option("event_type"),
                reason,
            })?,
            payload: read_pointer(&option("payload"), &config.payload)?,
        })
    }

    fn order(&self, event: &Event) -> Result<Order<'_>, String> {
        let mut event_type = String::new();
        for piece in &self.event_type {
            event_type.push_str(&piece.of(event, "event_type")?);
        }
        let payload = self
            .payload
            .find(&event.text)
            .ok_or_else(|| format!("payload: there is nothing at {}", self.payload))?;
        Ok(Order::Emit([
            self.aggregate_type.of(event, "aggregate_type")?,
            scalar(&self.aggregate_id, event, "aggregate_id")?,
            event_type,
            payload.to_owned(),
        ]))
    }
}

fn template(text: &str) -> Result<Vec<Piece>, String> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while let Some(open) = rest.find('{') {
        if open > 0 {
            pieces.push(Piece::Text(rest[..open].to_owned()));
        }
        let close = rest[open..]
            .find('}')
            .ok_or_else(|| format!("`{text}`: a brace is not closed"))?
            + open;
        pieces.push(match &rest[open + 1..close] {
            "event_type" => Piece::EventType,
            "event_id" => Piece::EventId,
            "source" => Piece::Source,
            pointer if pointer.starts_with('/') => Piece::At(Pointer::parse(pointer)?),
            other => {
                return Err(format!(
                    "`{{{other}}}` is not known: there are {{event_type}}, {{event_id}}, {{source}} and \
                     {{/json/pointer}}"
                ));
            }
        });
        rest = &rest[close + 1..];
    }
    if !rest.is_empty() {
        pieces.push(Piece::Text(rest.to_owned()));
    }
    if pieces.is_empty() {
        return Err("is empty".into());
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(text: &str) -> Event {
        Event {
            source: "orders".into(),
            id: "msg_1".into(),
            event_type: "order.paid".into(),
            text: text.into(),
            execution_id: "e1".into(),
        }
    }

    fn emit(config: EmitConfig, text: &str) -> Result<[String; 4], String> {
        let route = IntakeRouteConfig {
            outbox: Some(config),
            ..IntakeRouteConfig::default()
        };
        let route = Route::new(&route, "r").map_err(|error| error.to_string())?;
        match route.steps[0].order(&event(text))? {
            Order::Emit(order) => Ok(order),
            Order::Sql(..) => unreachable!(),
        }
    }

    fn config(aggregate_type: &str, event_type: &str, payload: &str) -> EmitConfig {
        EmitConfig {
            aggregate_type: aggregate_type.into(),
            aggregate_id: "/data/id".into(),
            event_type: event_type.into(),
            payload: payload.into(),
        }
    }

    #[test]
    fn an_event_for_the_outbox_takes_its_fields_from_the_body() {
        let body = r#"{"kind":"order","data":{"id":12345678901234567890123,"x":1.10}}"#;
        assert_eq!(
            emit(
                config("/kind", "{source}:{event_type}.{/data/x}", "/data"),
                body
            )
            .unwrap(),
            [
                "order",
                "12345678901234567890123",
                "orders:order.paid.1.10",
                r#"{"id":12345678901234567890123,"x":1.10}"#
            ]
        );
        let whole = emit(config("order", "Paid", ""), body).unwrap();
        assert_eq!(whole[0], "order");
        assert_eq!(whole[3], body);
    }

    #[test]
    fn what_the_body_lacks_is_named() {
        for (body, word) in [
            ("{}", "aggregate_id: there is nothing at /data/id"),
            (r#"{"data":{"id":null}}"#, "nothing at /data/id"),
            (r#"{"data":{"id":{}}}"#, "no plain value"),
            (r#"{"data":{"id":"a\u0000"}}"#, "\\u0000"),
        ] {
            let error = emit(config("order", "x", ""), body).unwrap_err();
            assert!(error.contains(word), "{body}: {error}");
        }
        for wrong in [
            config("", "x", ""),
            config("order", "", ""),
            config("order", "{id}", ""),
            config("order", "{", ""),
            config("order", "x", "data"),
        ] {
            assert!(emit(wrong.clone(), "{}").is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_statement_gets_texts_and_no_nul() {
        let route = IntakeRouteConfig {
            sql: Some("SELECT :n, :id, :gone".into()),
            parameters: [("n", "/n"), ("gone", "/gone")]
                .map(|(name, pointer)| (name.to_owned(), pointer.to_owned()))
                .into(),
            ..IntakeRouteConfig::default()
        };
        let route = Route::new(&route, "r").unwrap();
        let order = |body: &str| match route.steps[0].order(&event(body)) {
            Ok(Order::Sql(_, values)) => Ok(values),
            Ok(Order::Emit(_)) => unreachable!(),
            Err(reason) => Err(reason),
        };
        let text = |value: &str| Some(value.to_owned());
        assert_eq!(
            order(r#"{"n":1e400}"#).unwrap(),
            [text("1e400"), text("msg_1"), None]
        );
        assert!(order(r#"{"n":"\u0000"}"#).unwrap_err().contains("/n holds"));
        // Where nobody looks, it does no harm.
        assert!(order(r#"{"n":1,"x":"\u0000"}"#).is_ok());
    }
}
