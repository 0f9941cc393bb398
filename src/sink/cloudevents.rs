//! An event as a CloudEvent (1.0) in binary mode: its attributes as headers `ce_*`, the body as it is. Pure: no I/O.

use std::time::{Duration, UNIX_EPOCH};

use crate::event::OutboxEvent;
use crate::relay::failure::Cause;
use crate::sink::SinkError;

/// In seconds since 1970.
const YEAR_10000: u64 = 253_402_300_800;

/// The attributes, with the prefix. `source` names the installation: with the id it is unique.
///
/// # Errors
/// The event has no type, and a CloudEvent cannot be without.
pub(super) fn attributes(
    event: &OutboxEvent,
    source: &str,
) -> Result<Vec<(&'static str, String)>, SinkError> {
    if event.event_type.is_empty() {
        return Err(SinkError::new(
            Cause::IllegalName,
            "event_type is empty, and a CloudEvent needs a type",
        ));
    }
    let id = event.event_id.clone();
    let mut attributes = vec![
        ("ce_specversion", "1.0".to_owned()),
        ("ce_id", id.unwrap_or_else(|| event.id.to_string())),
        ("ce_source", source.to_owned()),
        ("ce_type", event.event_type.to_string()),
    ];
    // An attribute that is there must not be empty.
    if !event.key.aggregate_id.is_empty() {
        attributes.push(("ce_subject", event.key.aggregate_id.to_string()));
    }
    // PostgreSQL knows later years, but the form of an attribute has four digits for one.
    let created = event.created_at.filter(|since| *since < YEAR_10000);
    if let Some(since) = created {
        let created = UNIX_EPOCH + Duration::from_secs(since);
        let text = humantime::format_rfc3339_seconds(created).to_string();
        attributes.push(("ce_time", text));
    }
    Ok(attributes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_told_by_the_attributes_that_a_cloudevent_needs() {
        let event = OutboxEvent {
            event_id: Some("0190b5a0-0000-7000-8000-000000000001".into()),
            created_at: Some(1_700_000_000),
            ..OutboxEvent::sample(42, ("order", "ORD-1"), "com.example.Placed")
        };
        let attributes = attributes(&event, "shop").unwrap();
        let wanted = [
            ("ce_specversion", "1.0"),
            ("ce_id", "0190b5a0-0000-7000-8000-000000000001"),
            ("ce_source", "shop"),
            ("ce_type", "com.example.Placed"),
            ("ce_subject", "ORD-1"),
            ("ce_time", "2023-11-14T22:13:20Z"),
        ];
        let wanted = wanted.map(|(name, value)| (name, value.to_owned()));
        assert_eq!(attributes, wanted);
    }

    #[test]
    fn no_attribute_is_empty() {
        let event = OutboxEvent::sample(42, ("order", ""), "Placed");
        let attributes = attributes(&event, "shop").unwrap();
        assert!(attributes.iter().all(|(_, value)| !value.is_empty()));
        assert!(attributes.contains(&("ce_id", "42".to_owned())));
        let event = OutboxEvent::sample(42, ("order", "1"), "");
        let error = super::attributes(&event, "shop").unwrap_err();
        assert_eq!(error.cause, Cause::IllegalName);
    }
}

#[cfg(test)]
#[path = "cloudevents_properties.rs"]
mod properties;
