//! Routes: which destinations an event goes to, and what happens to it when it is given up. One
//! mechanism for all sinks; what a destination is (exchange, stream, topic) is the sink's matter. Where
//! events have several places, by one sink or more, the name of a destination has its sink's before it.
//!
//! Pure: no I/O. The answer is a function of configuration and row, so that a repeat goes the same way.

use std::sync::Arc;

use self::template::{Pattern, Piece, Template};
use crate::config::{AlsoConfig, ConfigError, OnDead, RouteConfig, SinkSetting, SinksInUse};
use crate::event::{ClaimToken, OutboxEvent};
use crate::sink::Delivery;

pub(crate) mod template;

/// Where a delivery goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// For RabbitMQ the exchange, for JetStream the stream, for Kafka the topic: what can be missing, full or forbidden as
    /// a whole, and so what a breaker of its own stands for.
    pub destination: Arc<str>,
    /// Where within it, for RabbitMQ the routing key, for JetStream the subject, for Kafka the
    /// record's key; none: the sink's own rule. There are many, so none of them has a breaker.
    pub key: Option<Arc<str>>,
    /// By which sink; none: there is one alone. The destination's name begins with it then.
    pub sink: Option<Arc<str>>,
    /// Which of the places of its route this is.
    pub place: usize,
}

impl Address {
    /// The destination's name as its sink knows it.
    pub fn name(&self) -> &str {
        let own = |sink: &Arc<str>| {
            let rest = self.destination.strip_prefix(&**sink)?;
            rest.strip_prefix(':')
        };
        let known = self.sink.as_ref().and_then(own);
        known.unwrap_or(&self.destination)
    }
}

/// One place that the events of a route go to.
#[derive(Debug)]
struct Place {
    setting: SinkSetting,
    /// Its name, where there are several.
    sink: Option<Arc<str>>,
    destination: Template,
    key: Option<Template>,
}

impl Place {
    fn address(&self, number: usize, event: &OutboxEvent) -> Address {
        Address {
            destination: self.destination.fill(event),
            key: self.key.as_ref().map(|key| key.fill(event)),
            sink: self.sink.clone(),
            place: number,
        }
    }

    /// Two copies of one event in one JetStream stream are one: it drops the second as a repeat.
    fn collides(&self, other: &Self) -> Option<&'static str> {
        if self.setting != other.setting {
            return None;
        }
        match (&self.destination, &other.destination) {
            (one, other_one) if one == other_one && self.key == other.key => {
                Some("is a place that the route has already")
            }
            (Template::Fixed(one), Template::Fixed(other)) if one != other => None,
            _ if self.setting == SinkSetting::Jetstream => Some(
                "may be a stream that the route has already, and that would drop the second copy of an event \
                 as a repeat: give each its own, without {…} in the name",
            ),
            _ => None,
        }
    }
}

/// What one route says.
#[derive(Debug)]
pub struct Route {
    aggregate_type: Pattern,
    event_type: Pattern,
    /// Where its events go: never empty.
    places: Vec<Place>,
    on_dead: OnDead,
    publish_to: Option<Template>,
}

impl Route {
    /// What of the event the key of this place is filled in with, by name: to see whether the transport can carry
    /// it, which the filled-in key tells no more.
    pub fn filled_into_key<'a>(
        &self,
        address: &Address,
        event: &'a OutboxEvent,
    ) -> Vec<(&'static str, &'a str)> {
        let place = self.places.get(address.place);
        let Some(Template::Filled(pieces)) = place.and_then(|place| place.key.as_ref()) else {
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
            sink: self.places.first()?.sink.clone(),
            place: 0,
        })
    }
}

/// Where events go whose route does not say where by its sink.
#[derive(Clone, Copy, Debug)]
pub enum Unless<'a> {
    /// To this destination.
    Named(&'a str),
    /// To one for each aggregate type, named by this, a dot and the type.
    ByAggregateType(&'a str),
}

impl Unless<'_> {
    fn template(self) -> Template {
        match self {
            Self::Named(name) => Template::Fixed(name.into()),
            Self::ByAggregateType(prefix) => Template::Filled(vec![
                Piece::Text(format!("{prefix}.")),
                Piece::AggregateType,
            ]),
        }
    }
}

/// Routes as they are configured, made into those that events take.
struct Parse<F> {
    default: SinkSetting,
    unless: F,
    /// Destinations have their sink's name before their own.
    several: bool,
}

impl<'a, F> Parse<F>
where
    F: Fn(SinkSetting) -> Result<Unless<'a>, ConfigError>,
{
    fn route(&self, at: &str, route: &RouteConfig) -> Result<Route, ConfigError> {
        let places = self.places(at, route)?;
        let publish_to = match &route.publish_to {
            Some(text) => {
                let template = Template::parse(&format!("{at}.publish_to"), text)?;
                Some(template.of_sink(places.first().and_then(|place| place.sink.as_deref())))
            }
            None => None,
        };
        Ok(Route {
            aggregate_type: Pattern::new(&route.aggregate_type),
            event_type: Pattern::new(&route.event_type),
            places,
            on_dead: route.on_dead,
            publish_to,
        })
    }

    fn places(&self, at: &str, route: &RouteConfig) -> Result<Vec<Place>, ConfigError> {
        let own = AlsoConfig {
            sink: route.sink,
            destination: route.destination.clone(),
            routing_key: route.routing_key.clone(),
        };
        let mut places = vec![self.place(at, &own)?];
        for (number, also) in route.also.iter().enumerate() {
            let at = format!("{at}.also[{number}]");
            let place = self.place(&at, also)?;
            if let Some(wrong) = places.iter().find_map(|known| place.collides(known)) {
                return Err(ConfigError::key(at, wrong));
            }
            places.push(place);
        }
        Ok(places)
    }

    fn place(&self, at: &str, place: &AlsoConfig) -> Result<Place, ConfigError> {
        let setting = place.sink.unwrap_or(self.default);
        let sink: Option<Arc<str>> = self.several.then(|| setting.name().into());
        let destination = match &place.destination {
            Some(text) => Template::parse(&format!("{at}.destination"), text)?,
            None => (self.unless)(setting)?.template(),
        };
        let key = match &place.routing_key {
            Some(text) => Some(Template::parse(&format!("{at}.routing_key"), text)?),
            None => None,
        };
        Ok(Place {
            setting,
            destination: destination.of_sink(sink.as_deref()),
            sink,
            key,
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
        Self::of(routes, SinkSetting::default(), |_| {
            Ok(Unless::Named(destination))
        })
    }

    /// The configured routes; `default` is the sink where they name none, and `unless` says where events
    /// go by a sink.
    ///
    /// # Errors
    /// Names the route's key that is wrong.
    pub fn of<'a>(
        routes: &[RouteConfig],
        default: SinkSetting,
        unless: impl Fn(SinkSetting) -> Result<Unless<'a>, ConfigError>,
    ) -> Result<Self, ConfigError> {
        let parse = Parse {
            default,
            unless,
            several: SinksInUse::of(routes, default).several,
        };
        let mut built = Vec::with_capacity(routes.len() + 1);
        for (number, route) in routes.iter().enumerate() {
            built.push(Arc::new(parse.route(&format!("routes[{number}]"), route)?));
        }
        match built.iter().position(|route| route.matches_all()) {
            // What stands behind a route for everything is never asked.
            Some(last) => built.truncate(last + 1),
            None => built.push(Arc::new(parse.route("relay", &RouteConfig::default())?)),
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
        let mut places = route.places.iter().enumerate();
        let (own, first) = places.next().expect("a route has a place");
        Delivery {
            address: first.address(own, &event),
            also: places
                .map(|(number, place)| place.address(number, &event))
                .collect(),
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
            distinct(&mut self.places().map(|place| &place.destination)),
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
        self.places()
            .all(|place| matches!(place.destination, Template::Fixed(_)))
    }

    /// Has any route a key of its own by this sink?
    pub fn has_keys(&self, sink: SinkSetting) -> bool {
        self.places()
            .any(|place| place.setting == sink && place.key.is_some())
    }

    fn places(&self) -> impl Iterator<Item = &Place> {
        self.routes.iter().flat_map(|route| &route.places)
    }

    /// Do all events go to one destination?
    pub fn is_sole(&self) -> bool {
        self.is_fixed() && self.destinations().0.len() == 1
    }
}

impl Route {
    fn matches_all(&self) -> bool {
        self.aggregate_type.is_any() && self.event_type.is_any()
    }
}

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;
