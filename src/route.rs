//! Routes: which destination an event goes to, and what happens to it when it is given up. One
//! mechanism for all sinks; what a destination is (exchange, stream, topic) is the sink's matter.
//!
//! Pure: no I/O. The answer is a function of configuration and row, so that a repeat goes the same way.

use std::sync::Arc;

use crate::config::{ConfigError, OnDead, RouteConfig};
use crate::event::{ClaimToken, OutboxEvent};
use crate::sink::Delivery;

/// Where a delivery goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// For RabbitMQ the exchange, for JetStream the stream, for Kafka the topic: what can be missing, full or forbidden as
    /// a whole, and so what a breaker of its own stands for.
    pub destination: Arc<str>,
    /// Where within it, for RabbitMQ the routing key, for JetStream the subject, for Kafka the
    /// record's key; none: the sink's own rule. There are many, so none of them has a breaker.
    pub key: Option<Arc<str>>,
}

/// What one route says.
#[derive(Debug)]
pub struct Route {
    aggregate_type: Pattern,
    event_type: Pattern,
    destination: Template,
    key: Option<Template>,
    on_dead: OnDead,
    publish_to: Option<Template>,
}

impl Route {
    fn address(&self, event: &OutboxEvent) -> Address {
        Address {
            destination: self.destination.fill(event),
            key: self.key.as_ref().map(|key| key.fill(event)),
        }
    }

    /// What of the event its key is filled in with, by name: to see whether the transport can carry
    /// it, which the filled-in key tells no more.
    pub fn filled_into_key<'a>(&self, event: &'a OutboxEvent) -> Vec<(&'static str, &'a str)> {
        let Some(Template::Filled(pieces)) = &self.key else {
            return Vec::new();
        };
        let named = |piece: &Piece| {
            let name = match piece {
                Piece::Text(_) => return None,
                Piece::AggregateType => "aggregate_type",
                Piece::AggregateId => "aggregate_id",
                Piece::EventType => "event_type",
            };
            Some((name, piece.of(event)?))
        };
        pieces.iter().filter_map(named).collect()
    }

    /// Does a dead event hold back the later ones of its aggregate?
    pub fn holds(&self) -> bool {
        self.on_dead == OnDead::Hold
    }

    /// Where a copy of this dead event goes, if anywhere.
    pub fn letter_address(&self, event: &OutboxEvent) -> Option<Address> {
        let destination = self.publish_to.as_ref()?.fill(event);
        Some(Address {
            destination,
            key: None,
        })
    }
}

/// All routes of a relay.
#[derive(Debug)]
pub struct Router {
    /// In order; the last one matches everything.
    routes: Vec<Arc<Route>>,
}

impl Router {
    /// The configured routes, with `destination` for whatever they leave open.
    ///
    /// # Errors
    /// Names the route's key that is wrong.
    pub fn new(routes: &[RouteConfig], destination: &str) -> Result<Self, ConfigError> {
        Self::with_default(routes, || Template::Fixed(destination.into()))
    }

    /// The configured routes; what they leave open goes to a destination for each aggregate type, named
    /// by this and the type.
    ///
    /// # Errors
    /// Names the route's key that is wrong.
    pub fn by_aggregate_type(routes: &[RouteConfig], before: &str) -> Result<Self, ConfigError> {
        Self::with_default(routes, || {
            Template::Filled(vec![Piece::Text(before.to_owned()), Piece::AggregateType])
        })
    }

    fn with_default(
        routes: &[RouteConfig],
        default: impl Fn() -> Template,
    ) -> Result<Self, ConfigError> {
        let mut built = Vec::with_capacity(routes.len() + 1);
        for (number, route) in routes.iter().enumerate() {
            let template = |option: &str, text: &Option<String>| {
                text.as_deref()
                    .map(|text| Template::parse(&format!("routes[{number}].{option}"), text))
                    .transpose()
            };
            built.push(Arc::new(Route {
                aggregate_type: Pattern::new(&route.aggregate_type),
                event_type: Pattern::new(&route.event_type),
                destination: template("destination", &route.destination)?.unwrap_or_else(&default),
                key: template("routing_key", &route.routing_key)?,
                on_dead: route.on_dead,
                publish_to: template("publish_to", &route.publish_to)?,
            }));
        }
        built.push(Arc::new(Route {
            aggregate_type: Pattern::new("*"),
            event_type: Pattern::new("*"),
            destination: default(),
            key: None,
            on_dead: OnDead::Hold,
            publish_to: None,
        }));
        // What stands behind a route for everything is never asked.
        if let Some(last) = built.iter().position(|route| route.matches_all()) {
            built.truncate(last + 1);
        }
        Ok(Self { routes: built })
    }

    /// The event on its way.
    pub fn deliver(&self, event: OutboxEvent, token: &Arc<ClaimToken>) -> Delivery {
        let route = self
            .routes
            .iter()
            .find(|route| {
                route.aggregate_type.matches(&event.key.aggregate_type)
                    && route.event_type.matches(&event.event_type)
            })
            .expect("the last route matches everything");
        Delivery {
            address: route.address(&event),
            route: route.clone(),
            event: Arc::new(event),
            token: token.clone(),
            letter: None,
        }
    }

    /// The destinations known beforehand, each once: where events go, and where copies of dead ones
    /// go. Those that depend on the event are not among them.
    pub fn destinations(&self) -> (Vec<Arc<str>>, Vec<Arc<str>>) {
        let distinct = |templates: &mut dyn Iterator<Item = &Template>| {
            let mut names: Vec<Arc<str>> = templates.filter_map(Template::fixed).collect();
            names.sort_unstable();
            names.dedup();
            names
        };
        (
            distinct(&mut self.routes.iter().map(|route| &route.destination)),
            distinct(
                &mut self
                    .routes
                    .iter()
                    .filter_map(|route| route.publish_to.as_ref()),
            ),
        )
    }

    /// Do all events go to the destinations known beforehand?
    pub fn is_fixed(&self) -> bool {
        self.routes
            .iter()
            .all(|route| matches!(route.destination, Template::Fixed(_)))
    }

    /// Has any route a key of its own?
    pub fn has_keys(&self) -> bool {
        self.routes.iter().any(|route| route.key.is_some())
    }

    /// Do all events go to one destination?
    pub fn is_sole(&self) -> bool {
        self.is_fixed() && self.destinations().0.len() == 1
    }
}

impl Route {
    fn matches_all(&self) -> bool {
        self.aggregate_type.0 == [""; 2] && self.event_type.0 == [""; 2]
    }
}

/// A text with `*` for any run of characters: the pieces between the stars.
#[derive(Debug)]
pub(crate) struct Pattern(Vec<String>);

impl Pattern {
    pub(crate) fn new(text: &str) -> Self {
        let mut pieces: Vec<String> = text.split('*').map(str::to_owned).collect();
        // `**` says no more than `*`.
        let last = pieces.len() - 1;
        let mut number = 0;
        pieces.retain(|piece| {
            number += 1;
            number == 1 || number == last + 1 || !piece.is_empty()
        });
        Self(pieces)
    }

    pub(crate) fn matches(&self, text: &str) -> bool {
        let [first, middle @ .., last] = self.0.as_slice() else {
            return self.0.first().is_some_and(|whole| whole == text);
        };
        let Some(mut rest) = text.strip_prefix(first.as_str()) else {
            return false;
        };
        for piece in middle {
            // The earliest place leaves the most for what follows.
            let Some(at) = rest.find(piece.as_str()) else {
                return false;
            };
            rest = &rest[at + piece.len()..];
        }
        rest.ends_with(last.as_str())
    }
}

/// A name, or one to be filled in from the event.
#[derive(Debug)]
enum Template {
    Fixed(Arc<str>),
    Filled(Vec<Piece>),
}

#[derive(Debug)]
enum Piece {
    Text(String),
    AggregateType,
    AggregateId,
    EventType,
}

impl Piece {
    /// What it is filled in with; none: it is a text of its own.
    fn of<'a>(&self, event: &'a OutboxEvent) -> Option<&'a str> {
        match self {
            Self::Text(_) => None,
            Self::AggregateType => Some(&event.key.aggregate_type),
            Self::AggregateId => Some(&event.key.aggregate_id),
            Self::EventType => Some(&event.event_type),
        }
    }
}

impl Template {
    fn parse(key: &str, text: &str) -> Result<Self, ConfigError> {
        let wrong = |reason: String| ConfigError::Key {
            key: key.to_owned(),
            reason,
        };
        if text.is_empty() {
            return Err(wrong("must not be empty".into()));
        }
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some(start) = rest.find('{') {
            if start > 0 {
                pieces.push(Piece::Text(rest[..start].to_owned()));
            }
            let after = &rest[start + 1..];
            let end = after
                .find('}')
                .ok_or_else(|| wrong(format!("`{text}` has a `{{` without its `}}`")))?;
            pieces.push(match &after[..end] {
                "aggregate_type" => Piece::AggregateType,
                "aggregate_id" => Piece::AggregateId,
                "event_type" => Piece::EventType,
                other => {
                    return Err(wrong(format!(
                        "`{{{other}}}` is not known: {{aggregate_type}}, {{aggregate_id}} and \
                         {{event_type}} are filled in"
                    )));
                }
            });
            rest = &after[end + 1..];
        }
        if pieces.is_empty() {
            return Ok(Self::Fixed(text.into()));
        }
        if !rest.is_empty() {
            pieces.push(Piece::Text(rest.to_owned()));
        }
        Ok(Self::Filled(pieces))
    }

    fn fixed(&self) -> Option<Arc<str>> {
        match self {
            Self::Fixed(name) => Some(name.clone()),
            Self::Filled(_) => None,
        }
    }

    fn fill(&self, event: &OutboxEvent) -> Arc<str> {
        match self {
            Self::Fixed(name) => name.clone(),
            Self::Filled(pieces) => pieces
                .iter()
                .map(|piece| match piece {
                    Piece::Text(text) => text.as_str(),
                    filled => filled.of(event).unwrap_or_default(),
                })
                .collect::<String>()
                .into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn event(aggregate_type: &str, event_type: &str) -> OutboxEvent {
        OutboxEvent::sample(1, (aggregate_type, "7"), event_type)
    }

    fn token() -> Arc<ClaimToken> {
        let token = ClaimToken::new(1, "t".into());
        token.renewed(ClaimToken::now(), Duration::from_secs(60));
        Arc::new(token)
    }

    fn route(aggregate_type: &str, event_type: &str, destination: &str) -> RouteConfig {
        RouteConfig {
            aggregate_type: aggregate_type.into(),
            event_type: event_type.into(),
            destination: Some(destination.into()),
            ..RouteConfig::default()
        }
    }

    fn goes_to(router: &Router, aggregate_type: &str, event_type: &str) -> String {
        let delivery = router.deliver(event(aggregate_type, event_type), &token());
        delivery.address.destination.to_string()
    }

    #[test]
    fn the_first_route_that_matches_decides_and_the_rest_takes_the_default() {
        let routes = [
            route("order", "Cancelled", "cancellations"),
            route("order", "*", "orders"),
            route("in*e", "*Paid*", "billing"),
        ];
        let router = Router::new(&routes, "events").unwrap();
        assert_eq!(goes_to(&router, "order", "Cancelled"), "cancellations");
        assert_eq!(goes_to(&router, "order", "Placed"), "orders");
        assert_eq!(goes_to(&router, "invoice", "WasPaidLate"), "billing");
        assert_eq!(goes_to(&router, "invoice", "Sent"), "events");
        assert_eq!(goes_to(&router, "orders", "Cancelled"), "events");
        assert!(!router.is_sole());
        assert_eq!(
            router
                .destinations()
                .0
                .iter()
                .map(AsRef::as_ref)
                .collect::<Vec<&str>>(),
            ["billing", "cancellations", "events", "orders"]
        );
    }

    #[test]
    fn stars_stand_for_any_run_of_characters_and_nothing_else_does() {
        for (pattern, text, matches) in [
            ("*", "", true),
            ("*", "anything", true),
            ("", "", true),
            ("", "a", false),
            ("a", "a", true),
            ("a.c", "abc", false),
            ("a*", "a", true),
            ("*a", "ba", true),
            ("a*a", "a", false),
            ("a*a", "aa", true),
            ("a*b*c", "axxbxxc", true),
            ("a*b*c", "acb", false),
            ("a**c", "ac", true),
            ("*ab*", "aab", true),
            ("ü*", "üx", true),
        ] {
            assert_eq!(
                Pattern::new(pattern).matches(text),
                matches,
                "{pattern} {text}"
            );
        }
    }

    #[test]
    fn names_are_filled_in_from_the_event() {
        let routes = [RouteConfig {
            destination: Some("{aggregate_type}-events".into()),
            routing_key: Some("v1.{event_type}.{aggregate_id}".into()),
            publish_to: Some("dead-{aggregate_type}".into()),
            on_dead: OnDead::Skip,
            ..RouteConfig::default()
        }];
        let router = Router::new(&routes, "events").unwrap();
        let delivery = router.deliver(event("order", "Placed"), &token());
        assert_eq!(&*delivery.address.destination, "order-events");
        assert_eq!(delivery.address.key.as_deref(), Some("v1.Placed.7"));
        let filled = delivery.route.filled_into_key(&delivery.event);
        assert_eq!(filled, [("event_type", "Placed"), ("aggregate_id", "7")]);
        let letter = delivery.route.letter_address(&delivery.event).unwrap();
        assert_eq!(&*letter.destination, "dead-order");
        assert!(!delivery.route.holds());
        assert!(!router.is_fixed());
    }

    #[test]
    fn a_route_for_everything_replaces_the_default() {
        let router = Router::new(&[route("*", "*", "orders")], "events").unwrap();
        assert!(router.is_sole());
        assert_eq!(router.destinations().0, ["orders".into()]);
        assert!(Router::new(&[], "{odd} but literal").unwrap().is_sole());
    }

    #[test]
    fn a_template_that_is_wrong_names_its_key() {
        for (text, said) in [("{tenant}", "{tenant}"), ("a{b", "without"), ("", "empty")] {
            let error = Router::new(&[route("*", "*", text)], "events").unwrap_err();
            let error = error.to_string();
            assert!(error.starts_with("routes[0].destination: "), "{error}");
            assert!(error.contains(said), "{error}");
        }
    }
}

#[cfg(test)]
#[path = "route_properties.rs"]
mod properties;
