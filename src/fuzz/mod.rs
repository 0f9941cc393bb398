//! Whatever comes from outside, fed with any bytes: each target returns, whatever they are. Run by libFuzzer
//! (`make fuzz`), and for a moment each with the other tests.

use std::sync::Arc;

use crate::event::{ClaimToken, OutboxEvent};
use crate::relay::failure::Cause;
use crate::route::Router;
use crate::route::template::Pattern;
use crate::sink::{Delivery, SinkError};

#[cfg(test)]
mod tests;

/// A parser, with what must hold of its answer.
pub type Target = fn(&[u8]);

/// By name, as in `fuzz/`.
pub const TARGETS: &[(&str, Target)] = &[
    ("config", crate::config::fuzz::file),
    ("environment", crate::config::fuzz::environment),
    ("postgres_url", crate::config::fuzz::postgres_url),
    ("route", route),
    ("signature", crate::intake::fuzz::signature),
    ("secret", crate::intake::fuzz::secret),
    ("body", crate::intake::fuzz::body),
    ("pointer", crate::intake::fuzz::pointer),
    ("statement", crate::intake::fuzz::statement),
    ("schema", crate::intake::fuzz::schema),
    ("admin_query", crate::admin::fuzz::query),
    ("admin_order", crate::admin::fuzz::order),
    #[cfg(feature = "rabbitmq")]
    (
        "management_answer",
        crate::sink::rabbitmq::fuzz::management_answer,
    ),
    #[cfg(feature = "rabbitmq")]
    ("rabbitmq_message", crate::sink::rabbitmq::fuzz::message),
    #[cfg(feature = "jetstream")]
    ("jetstream_answer", crate::sink::jetstream::fuzz::answer),
    #[cfg(feature = "jetstream")]
    ("jetstream_message", crate::sink::jetstream::fuzz::message),
    #[cfg(feature = "kafka")]
    ("kafka_message", crate::sink::kafka::fuzz::message),
];

/// Feeds the target of this name.
///
/// # Panics
/// There is none, or what must hold of its answer does not.
pub fn run(name: &str, bytes: &[u8]) {
    let found = TARGETS.iter().find(|(target, _)| *target == name);
    let (_, target) = found.expect("a name of TARGETS");
    target(bytes);
}

/// The parts of an input, which zero bytes separate; missing ones are empty.
pub(crate) fn parts<const N: usize>(bytes: &[u8]) -> [&[u8]; N] {
    let mut parts = bytes.splitn(N, |byte| *byte == 0);
    std::array::from_fn(|_| parts.next().unwrap_or_default())
}

/// As text, which outside of the intake all input is.
pub(crate) fn texts<const N: usize>(bytes: &[u8]) -> Option<[&str; N]> {
    let mut texts = [""; N];
    for (text, part) in texts.iter_mut().zip(parts::<N>(bytes)) {
        *text = std::str::from_utf8(part).ok()?;
    }
    Some(texts)
}

/// An event with whatever a row can hold, on its way to `destination`, and its copy as a dead one.
pub(crate) fn deliveries(bytes: &[u8], destination: &str) -> Vec<Delivery> {
    let Some([kind, id, event_type, headers, correlation_id, created]) = texts(bytes) else {
        return Vec::new();
    };
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let event = OutboxEvent {
        headers: some(headers),
        correlation_id: some(correlation_id),
        created_at: created.parse().ok(),
        event_id: Some("0190b5a0-0000-7000-8000-000000000001".into()),
        ..OutboxEvent::sample(1, (kind, id), event_type)
    };
    let router = Router::new(&[], destination).expect("no route is wrong");
    let token = Arc::new(ClaimToken::new(1, "t".into()));
    let delivery = router.deliver(event, &token);
    let letter = Delivery {
        letter: Some(Arc::new(SinkError::new(Cause::Unroutable, correlation_id))),
        ..delivery.clone()
    };
    vec![delivery, letter]
}

fn route(bytes: &[u8]) {
    let Some([pattern, kind, template, id]) = texts(bytes) else {
        return;
    };
    Pattern::new(pattern).matches(kind);
    let route = crate::config::RouteConfig {
        aggregate_type: pattern.to_owned(),
        destination: Some(template.to_owned()),
        routing_key: Some(template.to_owned()),
        ..Default::default()
    };
    if let Ok(router) = Router::new(&[route], "events") {
        let token = Arc::new(ClaimToken::new(1, "t".into()));
        let delivery = router.deliver(OutboxEvent::sample(1, (kind, id), "E"), &token);
        let fixed = router.destinations().0;
        let known = fixed.contains(&delivery.address.destination);
        assert!(known || !router.is_fixed(), "known beforehand");
    }
}
