//! The public test suite of JSON Schema: what is offered agrees with it, the rest is refused.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::Value;

use super::Schema;

#[derive(Deserialize)]
struct Group {
    description: String,
    schema: Value,
    tests: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    description: String,
    data: Value,
    valid: bool,
}

const DRAFTS: [(&str, &str); 4] = [
    (
        "http://json-schema.org/draft-04/schema#",
        include_str!("../../tests/it/data/json-schema-test-suite/draft4.json"),
    ),
    (
        "http://json-schema.org/draft-07/schema#",
        include_str!("../../tests/it/data/json-schema-test-suite/draft7.json"),
    ),
    (
        "https://json-schema.org/draft/2019-09/schema",
        include_str!("../../tests/it/data/json-schema-test-suite/draft2019-09.json"),
    ),
    (
        "https://json-schema.org/draft/2020-12/schema",
        include_str!("../../tests/it/data/json-schema-test-suite/draft2020-12.json"),
    ),
];

/// Files in which some schemas are refused, each for a reason of the module's head.
const REFUSED_IN: &[&str] = &[
    "dynamicRef",
    "optional/format/unknown",
    "ref",
    "refRemote",
    "vocabulary",
];

#[test]
fn what_is_offered_agrees_with_the_suite_and_the_rest_is_refused() {
    let mut wrong = Vec::new();
    let mut refused: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let (mut agreed, mut groups) = (0, 0);
    for (uri, text) in DRAFTS {
        let files: BTreeMap<String, Vec<Group>> = serde_json::from_str(text).unwrap();
        for (file, file_groups) in files {
            for group in file_groups {
                groups += 1;
                let mut schema = group.schema;
                if let Some(members) = schema.as_object_mut() {
                    members.entry("$schema").or_insert_with(|| uri.into());
                }
                let compiled = match Schema::compile_any(&schema) {
                    Ok(compiled) => compiled,
                    Err(error) => {
                        let reason = error.to_string();
                        refused.entry(file.clone()).or_default().insert(reason);
                        continue;
                    }
                };
                for case in group.tests {
                    if compiled.validate(&case.data).is_ok() == case.valid {
                        agreed += 1;
                    } else {
                        wrong.push(format!(
                            "{uri} {file}: {}: {}",
                            group.description, case.description
                        ));
                    }
                }
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} wrong:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    let files: Vec<_> = refused.keys().map(String::as_str).collect();
    assert_eq!(files, REFUSED_IN, "{refused:#?}");
    assert!(
        agreed > 2_000 && groups > 600,
        "{agreed} of {groups} groups"
    );
}
