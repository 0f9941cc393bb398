//! `[[routes]]`: which events go where, and what happens to those that are given up.

use serde::Deserialize;

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
    /// Where these events go, for RabbitMQ the exchange; `{aggregate_type}`, `{aggregate_id}` and
    /// `{event_type}` are filled in. `rabbitmq.exchange` unless given.
    pub destination: Option<String>,
    /// Routing key, filled in likewise. `{aggregate_type}.{event_type}` unless given.
    pub routing_key: Option<String>,
    /// What a dead event means for the later ones of its aggregate.
    pub on_dead: OnDead,
    /// Where a copy of each dead event goes, filled in likewise. Nowhere unless given.
    pub publish_to: Option<String>,
}

impl Default for RouteConfig {
    fn default() -> Self {
        Self {
            aggregate_type: "*".into(),
            event_type: "*".into(),
            destination: None,
            routing_key: None,
            on_dead: OnDead::default(),
            publish_to: None,
        }
    }
}
