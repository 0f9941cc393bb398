//! `[[routes]]`: which events go where, and what happens to those that are given up.

use serde::Deserialize;

use super::SinkSetting;
use crate::route::template::Pattern;

/// What a dead event means for the later ones of its aggregate.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub enum OnDead {
    /// They wait until it is replayed or discarded: order is kept.
    #[default]
    Hold,
    /// They go on: a later replay comes out of order, and says so by its header `replayed`.
    Skip,
}

impl TryFrom<String> for OnDead {
    type Error = String;

    fn try_from(value: String) -> Result<Self, String> {
        match value.as_str() {
            "hold" => Ok(Self::Hold),
            "skip" => Ok(Self::Skip),
            _ => Err(format!("must be `hold` or `skip`, is `{value}`")),
        }
    }
}

/// One route. The first one that matches an event decides; what none matches takes the defaults.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouteConfig {
    /// Which aggregate types; `*` stands for any run of characters.
    pub aggregate_type: String,
    /// Which event types; `*` stands for any run of characters.
    pub event_type: String,
    /// Which sink these events go to; `relay.sink` unless given.
    pub sink: Option<SinkSetting>,
    /// Where these events go, for RabbitMQ the exchange; `{aggregate_type}`, `{aggregate_id}` and
    /// `{event_type}` are filled in. `rabbitmq.exchange` unless given.
    pub destination: Option<String>,
    /// Routing key, filled in likewise. `{aggregate_type}.{event_type}` unless given.
    pub routing_key: Option<String>,
    /// What a dead event means for the later ones of its aggregate.
    pub on_dead: OnDead,
    /// Where a copy of each dead event goes, by the same sink, filled in likewise. Nowhere unless given.
    pub publish_to: Option<String>,
    /// Where these events go beside that. One is published once all of its places have confirmed it.
    pub also: Vec<AlsoConfig>,
}

/// A further place for the events of a route, with the same defaults.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AlsoConfig {
    /// Which sink; `relay.sink` unless given.
    pub sink: Option<SinkSetting>,
    /// Where by that sink.
    pub destination: Option<String>,
    /// Routing key, subject or record key there.
    pub routing_key: Option<String>,
}

impl Default for RouteConfig {
    fn default() -> Self {
        Self {
            aggregate_type: "*".into(),
            event_type: "*".into(),
            sink: None,
            destination: None,
            routing_key: None,
            on_dead: OnDead::default(),
            publish_to: None,
            also: Vec::new(),
        }
    }
}

impl RouteConfig {
    /// Is no event left for the routes behind it?
    fn takes_all(&self) -> bool {
        Pattern::new(&self.aggregate_type).is_any() && Pattern::new(&self.event_type).is_any()
    }
}

/// A sink that events can get to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SinkInUse {
    /// Which.
    pub sink: SinkSetting,
    /// The key that says so, for example `routes[0].sink`.
    pub key: String,
}

/// The sinks that events can get to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SinksInUse {
    /// Each once, in the order of the routes.
    pub sinks: Vec<SinkInUse>,
    /// There is more than one, or some events go to several places: then the name of a destination has its sink's
    /// before it, as in `kafka:orders`.
    pub several: bool,
}

impl SinksInUse {
    /// Of these routes; `default` is where events go that have no other sink.
    pub fn of(routes: &[RouteConfig], default: SinkSetting) -> Self {
        let mut sinks: Vec<SinkInUse> = Vec::new();
        let mut add = |given: Option<SinkSetting>, place: &str| {
            let key = match given {
                Some(_) => format!("{place}.sink"),
                None => "relay.sink".to_owned(),
            };
            let sink = given.unwrap_or(default);
            if !sinks.iter().any(|known| known.sink == sink) {
                sinks.push(SinkInUse { sink, key });
            }
        };
        // Those behind one that takes all are never reached.
        let all = routes.iter().position(RouteConfig::takes_all);
        let reached = routes
            .iter()
            .take(all.map_or(routes.len(), |last| last + 1));
        for (number, route) in reached.clone().enumerate() {
            add(route.sink, &format!("routes[{number}]"));
            for (other, also) in route.also.iter().enumerate() {
                add(also.sink, &format!("routes[{number}].also[{other}]"));
            }
        }
        if all.is_none() {
            add(None, "");
        }
        let several = sinks.len() > 1 || reached.clone().any(|route| !route.also.is_empty());
        Self { sinks, several }
    }

    /// Is this one among them?
    pub fn contains(&self, sink: SinkSetting) -> bool {
        self.sinks.iter().any(|known| known.sink == sink)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(aggregate_type: &str, sink: Option<SinkSetting>) -> RouteConfig {
        RouteConfig {
            aggregate_type: aggregate_type.into(),
            sink,
            ..RouteConfig::default()
        }
    }

    fn in_use(routes: &[RouteConfig]) -> (Vec<(SinkSetting, String)>, bool) {
        let used = SinksInUse::of(routes, SinkSetting::Rabbitmq);
        let sinks = used.sinks.into_iter().map(|used| (used.sink, used.key));
        (sinks.collect(), used.several)
    }

    #[test]
    fn a_sink_is_in_use_once_an_event_can_get_to_it() {
        let rabbitmq = (SinkSetting::Rabbitmq, "relay.sink".to_owned());
        let kafka = (SinkSetting::Kafka, "routes[0].sink".to_owned());
        assert_eq!(in_use(&[]), (vec![rabbitmq.clone()], false));
        let orders = route("order", Some(SinkSetting::Kafka));
        let both = vec![kafka.clone(), rabbitmq.clone()];
        assert_eq!(in_use(std::slice::from_ref(&orders)), (both, true));
        let all = route("**", Some(SinkSetting::Kafka));
        let never = route("order", Some(SinkSetting::Jetstream));
        assert_eq!(in_use(&[all, never]), (vec![kafka], false));
    }

    #[test]
    fn two_places_by_one_sink_are_several() {
        let mut twice = route("*", None);
        twice.also.push(AlsoConfig {
            destination: Some("audit".into()),
            ..AlsoConfig::default()
        });
        let rabbitmq = (SinkSetting::Rabbitmq, "relay.sink".to_owned());
        assert_eq!(in_use(&[twice.clone()]), (vec![rabbitmq.clone()], true));
        twice.also.push(AlsoConfig {
            sink: Some(SinkSetting::Jetstream),
            ..AlsoConfig::default()
        });
        let jetstream = (SinkSetting::Jetstream, "routes[0].also[1].sink".to_owned());
        assert_eq!(in_use(&[twice]), (vec![rabbitmq, jetstream], true));
    }
}
