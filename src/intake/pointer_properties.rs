//! What holds of pointers, whatever they are and lead into.

use proptest::prelude::*;
use serde_json::{Map, Value};

use super::*;
use crate::properties;

/// Names that a pointer has to escape, or that look like places in an array.
fn names() -> impl Strategy<Value = String> + Clone {
    prop_oneof![
        proptest::sample::select(vec![
            "", "0", "1", "01", "-", "a", "~", "/", "~1", "a/b", "é\n"
        ])
        .prop_map(str::to_owned),
        properties::texts(),
    ]
}

fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        properties::texts().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
            proptest::collection::btree_map(names(), inner, 0..4)
                .prop_map(|members| Value::Object(Map::from_iter(members))),
        ]
    })
}

/// The pointer to some place within.
fn descend(mut value: &Value, choices: &[usize]) -> String {
    let mut text = String::new();
    for choice in choices {
        let step = match value {
            Value::Object(members) if !members.is_empty() => {
                let (name, inner) = members.iter().nth(choice % members.len()).unwrap();
                value = inner;
                name.replace('~', "~0").replace('/', "~1")
            }
            Value::Array(elements) if !elements.is_empty() => {
                let place = choice % elements.len();
                value = &elements[place];
                place.to_string()
            }
            _ => break,
        };
        text = format!("{text}/{step}");
    }
    text
}

#[track_caller]
fn assert_finds(body: &str, value: &Value, pointer: &str) {
    let parsed = Pointer::parse(pointer).unwrap();
    assert_eq!(parsed.to_string(), pointer);
    let right = value.pointer(pointer);
    let found = parsed
        .find(body)
        .map(|text| serde_json::from_str::<Value>(text).unwrap());
    assert_eq!(found.as_ref(), right);
    let text = match right {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) => Some(text.clone()),
        Some(_) => parsed.find(body).map(str::to_owned),
    };
    assert_eq!(parsed.text(body).as_deref(), text.as_deref());
}

#[test]
fn every_place_is_found_as_serde_json_finds_it_however_the_body_is_written() {
    let choices = proptest::collection::vec(any::<usize>(), 0..6);
    properties::hold(&(values(), choices), |(value, choices)| {
        let pointer = descend(&value, &choices);
        assert_finds(&value.to_string(), &value, &pointer);
        assert_finds(
            &serde_json::to_string_pretty(&value).unwrap(),
            &value,
            &pointer,
        );
    });
}

#[test]
fn what_is_not_there_is_not_found() {
    let steps = proptest::collection::vec(names(), 0..4);
    properties::hold(&(values(), steps), |(value, steps)| {
        let escaped = steps
            .iter()
            .map(|step| step.replace('~', "~0").replace('/', "~1"));
        let pointer: String = escaped.map(|step| format!("/{step}")).collect();
        assert_finds(&format!(" {value}\n"), &value, &pointer);
    });
}
