//! What holds of the attributes of any event.

use proptest::prelude::*;

use super::*;
use crate::properties;

/// PostgreSQL's last moment, in the year 294276.
const LATEST: u64 = 9_224_318_015_999;

#[test]
fn any_event_with_a_type_is_told_by_attributes_that_are_not_empty() {
    let created = proptest::option::of(prop_oneof![
        0..=LATEST,
        any::<u64>(),
        YEAR_10000 - 2..YEAR_10000 + 2
    ]);
    let id = proptest::option::of(Just("0190b5a0-0000-7000-8000-000000000001".to_owned()));
    let texts = [
        properties::texts(),
        properties::texts(),
        properties::texts(),
    ];
    let inputs = (any::<i64>(), id, created, texts);
    properties::hold(
        &inputs,
        |(number, event_id, created_at, [kind, aggregate, event_type])| {
            let event = OutboxEvent {
                event_id,
                created_at,
                ..OutboxEvent::sample(number, (&kind, &aggregate), &event_type)
            };
            let Ok(attributes) = attributes(&event, "shop") else {
                assert!(event_type.is_empty());
                return;
            };
            let value = |wanted: &str| {
                let found: Vec<_> = attributes
                    .iter()
                    .filter(|(name, _)| *name == wanted)
                    .collect();
                assert!(found.len() <= 1, "{wanted} twice");
                found.first().map(|(_, value)| value.as_str())
            };
            for required in ["ce_specversion", "ce_id", "ce_source", "ce_type"] {
                assert!(
                    value(required).is_some_and(|value| !value.is_empty()),
                    "{required}"
                );
            }
            assert_eq!(value("ce_type"), Some(&*event_type));
            assert_eq!(value("ce_subject").unwrap_or_default(), aggregate);
            let told = created_at.filter(|since| *since < YEAR_10000);
            let time = value("ce_time").map(|time| humantime::parse_rfc3339(time).unwrap());
            let since = time.map(|time| time.duration_since(UNIX_EPOCH).unwrap().as_secs());
            assert_eq!(since, told);
        },
    );
}
