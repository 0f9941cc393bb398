//! JSON Schema: compiled at the start, where everything that would be ignored later is refused.
//!
//! # Invariants
//! - A keyword that the draft does not have stops the start: JSON Schema would ignore it, and with it
//!   the check that somebody meant.
//! - Nothing is fetched: a reference leads into the schema itself or is refused.
//! - `format` is asserted in every draft, and a format that is not known is refused.
//! - Patterns run on an automaton, in time that grows with the text alone. What it cannot do
//!   (look-behind, back-references) is refused at the start.
//! - What is said of an invalid body is bounded, and shows none of its values.

use std::collections::BTreeMap;

use jsonschema::{Draft, PatternOptions, Validator};
use serde_json::Value;

/// Errors that are told, at most.
const MOST_ERRORS: usize = 10;
/// Letters of all of them, at most.
const LONGEST: usize = 1_500;

/// Why a schema was refused. Names the place within it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SchemaError(String);

/// A compiled schema.
#[derive(Debug)]
pub struct Schema(Validator);

/// What a keyword's value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holds {
    /// No schema.
    Value,
    Schema,
    /// An array of schemas.
    List,
    /// A schema, or before 2020-12 an array of them.
    SchemaOrList,
    /// An object of them.
    Named,
}

/// Each keyword with the drafts that have it, first and last, and what it holds.
const KEYWORDS: &[(&str, u8, u8, Holds)] = &[
    ("$schema", 4, 20, Holds::Value),
    ("id", 4, 4, Holds::Value),
    ("$id", 6, 20, Holds::Value),
    ("$ref", 4, 20, Holds::Value),
    ("$comment", 7, 20, Holds::Value),
    ("$anchor", 19, 20, Holds::Value),
    ("$dynamicRef", 20, 20, Holds::Value),
    ("$dynamicAnchor", 20, 20, Holds::Value),
    ("$recursiveRef", 19, 19, Holds::Value),
    ("$recursiveAnchor", 19, 19, Holds::Value),
    ("$vocabulary", 19, 20, Holds::Value),
    ("$defs", 19, 20, Holds::Named),
    // Later drafts keep it for the references into it.
    ("definitions", 4, 20, Holds::Named),
    ("title", 4, 20, Holds::Value),
    ("description", 4, 20, Holds::Value),
    ("default", 4, 20, Holds::Value),
    ("examples", 6, 20, Holds::Value),
    ("deprecated", 19, 20, Holds::Value),
    ("readOnly", 7, 20, Holds::Value),
    ("writeOnly", 7, 20, Holds::Value),
    ("type", 4, 20, Holds::Value),
    ("enum", 4, 20, Holds::Value),
    ("const", 6, 20, Holds::Value),
    ("multipleOf", 4, 20, Holds::Value),
    ("maximum", 4, 20, Holds::Value),
    ("exclusiveMaximum", 4, 20, Holds::Value),
    ("minimum", 4, 20, Holds::Value),
    ("exclusiveMinimum", 4, 20, Holds::Value),
    ("maxLength", 4, 20, Holds::Value),
    ("minLength", 4, 20, Holds::Value),
    ("pattern", 4, 20, Holds::Value),
    ("format", 4, 20, Holds::Value),
    ("contentEncoding", 7, 20, Holds::Value),
    ("contentMediaType", 7, 20, Holds::Value),
    ("contentSchema", 19, 20, Holds::Schema),
    ("items", 4, 20, Holds::SchemaOrList),
    ("prefixItems", 20, 20, Holds::List),
    ("additionalItems", 4, 19, Holds::Schema),
    ("unevaluatedItems", 19, 20, Holds::Schema),
    ("contains", 6, 20, Holds::Schema),
    ("minContains", 19, 20, Holds::Value),
    ("maxContains", 19, 20, Holds::Value),
    ("maxItems", 4, 20, Holds::Value),
    ("minItems", 4, 20, Holds::Value),
    ("uniqueItems", 4, 20, Holds::Value),
    ("properties", 4, 20, Holds::Named),
    ("patternProperties", 4, 20, Holds::Named),
    ("additionalProperties", 4, 20, Holds::Schema),
    ("unevaluatedProperties", 19, 20, Holds::Schema),
    ("propertyNames", 6, 20, Holds::Schema),
    ("maxProperties", 4, 20, Holds::Value),
    ("minProperties", 4, 20, Holds::Value),
    ("required", 4, 20, Holds::Value),
    // Of schemas, or of lists of names, which are no objects and so are not looked into.
    ("dependencies", 4, 7, Holds::Named),
    ("dependentRequired", 19, 20, Holds::Value),
    ("dependentSchemas", 19, 20, Holds::Named),
    ("allOf", 4, 20, Holds::List),
    ("anyOf", 4, 20, Holds::List),
    ("oneOf", 4, 20, Holds::List),
    ("not", 4, 20, Holds::Schema),
    ("if", 7, 20, Holds::Schema),
    ("then", 7, 20, Holds::Schema),
    ("else", 7, 20, Holds::Schema),
];

/// What may stand beside `$ref` up to draft 7, where everything beside it is ignored.
const BESIDE_REF: &[&str] = &[
    "$ref",
    "$schema",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "definitions",
    "readOnly",
    "writeOnly",
];

/// `$schema` without scheme and fragment, with the draft and its number above.
const DRAFTS: &[(&str, Draft, u8)] = &[
    ("json-schema.org/draft-04/schema", Draft::Draft4, 4),
    ("json-schema.org/draft-06/schema", Draft::Draft6, 6),
    ("json-schema.org/draft-07/schema", Draft::Draft7, 7),
    (
        "json-schema.org/draft/2019-09/schema",
        Draft::Draft201909,
        19,
    ),
    (
        "json-schema.org/draft/2020-12/schema",
        Draft::Draft202012,
        20,
    ),
];

impl Schema {
    /// Compiles a schema.
    ///
    /// # Errors
    /// Names the place that is wrong.
    pub fn compile(text: &str) -> Result<Self, SchemaError> {
        let schema: Value = serde_json::from_str(text)
            .map_err(|error| SchemaError(format!("is no JSON: {error}")))?;
        let top = schema
            .as_object()
            .filter(|top| top.get("type").and_then(Value::as_str) == Some("object"));
        let Some(top) = top else {
            return Err(SchemaError(
                "must be a JSON Schema object whose top-level type is \"object\"".into(),
            ));
        };
        debug_assert!(top.contains_key("type"));
        Self::compile_any(&schema)
    }

    /// As [`Self::compile`], whatever the schema is of.
    fn compile_any(schema: &Value) -> Result<Self, SchemaError> {
        let (draft, number) = draft_of(schema)?;
        let mut checker = Checker {
            draft,
            number,
            options: jsonschema::options().with_draft(draft),
            keywords: KEYWORDS
                .iter()
                .filter(|(_, first, last, _)| (*first..=*last).contains(&number))
                .map(|(name, _, _, holds)| (*name, *holds))
                .collect(),
        };
        checker.check(schema, "#", true)?;
        let validator = jsonschema::options()
            .with_draft(draft)
            .should_validate_formats(true)
            .should_ignore_unknown_formats(false)
            .with_pattern_options(PatternOptions::regex())
            .offline()
            .build(schema)
            .map_err(|error| {
                SchemaError(format!("#{}: {error}", error.instance_path().as_str()))
            })?;
        Ok(Self(validator))
    }

    /// Checks a body.
    ///
    /// # Errors
    /// What is wrong with it, in one line of bounded length, by place and without its values.
    pub fn validate(&self, body: &Value) -> Result<(), String> {
        if self.0.is_valid(body) {
            return Ok(());
        }
        let errors: Vec<_> = self
            .0
            .iter_errors(body)
            .take(MOST_ERRORS)
            .map(|error| format!("#{}: {}", error.instance_path().as_str(), error.masked()))
            .collect();
        Err(errors.join("; ").chars().take(LONGEST).collect())
    }
}

fn draft_of(top: &Value) -> Result<(Draft, u8), SchemaError> {
    let Some(named) = top.get("$schema") else {
        return Ok((Draft::Draft202012, 20));
    };
    let plain = named.as_str().map(|uri| {
        let uri = uri.strip_suffix('#').unwrap_or(uri);
        let uri = uri.strip_prefix("https://").unwrap_or(uri);
        uri.strip_prefix("http://").unwrap_or(uri).to_owned()
    });
    DRAFTS
        .iter()
        .find(|(uri, _, _)| plain.as_deref() == Some(*uri))
        .map(|(_, draft, number)| (*draft, *number))
        .ok_or_else(|| {
            SchemaError(format!(
                "#/$schema: {named} is not known; draft 4, 6, 7, 2019-09 and 2020-12 are"
            ))
        })
}

/// Looks for what the validator would ignore.
struct Checker<'a> {
    draft: Draft,
    number: u8,
    options: jsonschema::ValidationOptions<'a>,
    keywords: BTreeMap<&'static str, Holds>,
}

impl Checker<'_> {
    fn check(&mut self, schema: &Value, at: &str, top: bool) -> Result<(), SchemaError> {
        let members = match schema {
            Value::Object(members) => members,
            Value::Bool(_) if self.number > 4 => return Ok(()),
            // Draft 4 has booleans for additionalProperties and additionalItems alone.
            Value::Bool(_) if at.ends_with("/additionalProperties") => return Ok(()),
            Value::Bool(_) if at.ends_with("/additionalItems") => return Ok(()),
            _ => return Err(SchemaError(format!("{at}: a schema must be an object"))),
        };
        for (name, value) in members {
            let place = format!("{at}/{}", name.replace('~', "~0").replace('/', "~1"));
            let Some(holds) = self.keywords.get(name.as_str()).copied() else {
                return Err(SchemaError(format!(
                    "{place}: the draft has no keyword `{name}`, and would ignore it"
                )));
            };
            if name == "$schema" && !top {
                return Err(SchemaError(format!(
                    "{place}: only the whole schema has a draft"
                )));
            }
            if self.number <= 7
                && members.contains_key("$ref")
                && !BESIDE_REF.contains(&name.as_str())
            {
                return Err(SchemaError(format!(
                    "{place}: up to draft 7 whatever stands beside $ref is ignored: put it into an allOf"
                )));
            }
            if name == "format" {
                self.check_format(value, &place)?;
            }
            self.check_inside(holds, value, &place)?;
        }
        Ok(())
    }

    fn check_format(&self, format: &Value, place: &str) -> Result<(), SchemaError> {
        match format.as_str() {
            Some(name) if self.options.is_known_format(self.draft, name) => Ok(()),
            _ => Err(SchemaError(format!(
                "{place}: the format {format} is not known, and would be ignored"
            ))),
        }
    }

    fn check_inside(&mut self, holds: Holds, value: &Value, at: &str) -> Result<(), SchemaError> {
        match (holds, value) {
            (Holds::List, Value::Array(schemas)) => self.check_list(schemas, at),
            (Holds::SchemaOrList, Value::Array(schemas)) if self.number < 20 => {
                self.check_list(schemas, at)
            }
            (Holds::Named, Value::Object(named)) => {
                for (name, schema) in named {
                    if schema.is_array() && at.ends_with("/dependencies") {
                        continue;
                    }
                    self.check(schema, &format!("{at}/{name}"), false)?;
                }
                Ok(())
            }
            (Holds::Schema | Holds::SchemaOrList, schema) => self.check(schema, at, false),
            // Values, and what is wrong by the draft's own schema, which the compiler says.
            _ => Ok(()),
        }
    }

    fn check_list(&mut self, schemas: &[Value], at: &str) -> Result<(), SchemaError> {
        for (number, schema) in schemas.iter().enumerate() {
            self.check(schema, &format!("{at}/{number}"), false)?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "schema_suite.rs"]
mod suite;

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use serde_json::json;

    use super::*;

    fn compile(mut schema: Value) -> Result<Schema, String> {
        if let Some(members) = schema.as_object_mut() {
            members.entry("type").or_insert_with(|| "object".into());
        }
        Schema::compile(&schema.to_string()).map_err(|error| error.to_string())
    }

    fn of_x(schema: &Value) -> Result<Schema, String> {
        compile(json!({ "properties": { "x": schema } }))
    }

    fn takes(schema: &Value, value: Value) -> bool {
        let schema = of_x(schema).unwrap();
        schema.validate(&json!({ "x": value })).is_ok()
    }

    #[test]
    fn what_would_be_ignored_is_refused_by_its_place() {
        for (schema, place) in [
            (json!({ "requird": ["a"] }), "#/requird"),
            (
                json!({ "properties": { "a": { "maxlength": 3 } } }),
                "#/properties/a/maxlength",
            ),
            (
                json!({ "properties": { "a": { "nullable": true } } }),
                "#/properties/a/nullable",
            ),
            (json!({ "x-note": "a" }), "#/x-note"),
            (
                json!({ "allOf": [{ "then": { "requird": [] } }] }),
                "#/allOf/0/then/requird",
            ),
            (json!({ "items": { "x": {} } }), "#/items/x"),
            (json!({ "additionalItems": false }), "#/additionalItems"),
            (
                json!({ "properties": { "a": { "format": "date-tim" } } }),
                "#/properties/a/format",
            ),
            (
                json!({ "properties": { "a": { "$schema": "http://json-schema.org/draft-04/schema#" } } }),
                "#/properties/a/$schema",
            ),
            (
                json!({ "$schema": "http://json-schema.org/draft-05/schema#" }),
                "#/$schema",
            ),
            (
                json!({ "$schema": "http://json-schema.org/draft-07/schema#",
                        "definitions": { "b": {} },
                        "properties": { "a": { "$ref": "#/definitions/b", "minimum": 1 } } }),
                "#/properties/a/minimum",
            ),
            (
                json!({ "$schema": "http://json-schema.org/draft-04/schema#", "const": {} }),
                "#/const",
            ),
        ] {
            let error = compile(schema).unwrap_err();
            assert!(error.starts_with(place), "{error}");
        }
    }

    #[test]
    fn what_a_schema_cannot_mean_is_refused() {
        for schema in [
            json!({ "properties": { "a": { "minimum": "1" } } }),
            json!({ "properties": { "a": { "pattern": "(" } } }),
            json!({ "properties": { "a": { "pattern": "[" } } }),
            json!({ "properties": { "a": { "pattern": "(a)\\1" } } }),
            json!({ "properties": { "a": { "$ref": "https://example.com/a.json" } } }),
            json!({ "properties": { "a": { "$ref": "a.json" } } }),
            json!({ "properties": { "a": { "$ref": "file:///etc/passwd" } } }),
            json!({ "properties": { "a": { "$ref": "#/$defs/none" } } }),
            json!({ "type": ["object"] }),
            json!({ "type": "array" }),
            json!({ "items": [{}] }),
            json!([]),
            json!(true),
        ] {
            assert!(compile(schema.clone()).is_err(), "{schema}");
        }
        assert!(Schema::compile("{").is_err());
    }

    #[test]
    fn names_of_properties_are_no_keywords() {
        let schema = compile(json!({
            "properties": { "maxlength": { "const": 1 }, "x-note": true, "$ref": { "type": "string" } },
            "patternProperties": { "^requird": { "type": "integer" } },
            "$defs": { "nullable": { "type": "null" } },
            "dependentRequired": { "a": ["b"] },
            "default": { "unknown": 1 },
            "enum": [{ "maxlength": 1, "unknown": {} }, { "maxlength": 1 }],
        }))
        .unwrap();
        assert!(schema.validate(&json!({ "maxlength": 1 })).is_ok());
        assert!(schema.validate(&json!({ "maxlength": 2 })).is_err());
        let old = compile(json!({
            "$schema": "http://json-schema.org/draft-07/schema#",
            "dependencies": { "a": ["b"], "c": { "required": ["d"] } },
        }))
        .unwrap();
        assert!(old.validate(&json!({ "a": 1 })).is_err());
        assert!(old.validate(&json!({ "c": 1 })).is_err());
    }

    #[test]
    fn formats_are_asserted_in_every_draft() {
        for (uri, _, _) in DRAFTS {
            let schema = compile(json!({
                "$schema": format!("http://{uri}#"),
                "properties": { "at": { "type": "string", "format": "date-time" } },
            }))
            .unwrap();
            for (at, right) in [
                ("2024-02-29T00:00:00Z", true),
                ("2024-02-29t00:00:00z", true),
                ("2024-02-29T00:00:00.123+05:30", true),
                ("1998-12-31T23:59:60Z", true),
                ("not-a-date", false),
                ("2024-02-30T00:00:00Z", false),
                ("2024-01-01 00:00:00Z", false),
                ("2024-01-01T00:00:00", false),
                ("2024-01-01T00:00:00+25:00", false),
                ("1998-12-31T23:58:60Z", false),
            ] {
                let answer = schema.validate(&json!({ "at": at }));
                assert_eq!(answer.is_ok(), right, "{uri} {at}: {answer:?}");
            }
        }
    }

    #[test]
    fn patterns_mean_what_they_mean_in_ecmascript() {
        let pattern =
            |pattern: &str, text: &str| takes(&json!({ "pattern": pattern }), text.into());
        assert!(pattern("^\\d+$", "123"));
        assert!(!pattern("^\\d+$", "१२३"));
        assert!(!pattern("^\\d+$", "1\n"));
        assert!(pattern("b", "abc"));
        assert!(pattern("^\\p{L}+$", "żółw"));
        assert!(pattern("^\\u0061$", "a"));
        assert!(pattern("^\\cA$", "\u{1}"));
        let five = json!({ "maxLength": 5 });
        assert!(takes(&five, "🦀🦀🦀🦀🦀".into()));
        assert!(!takes(&five, "🦀🦀🦀🦀🦀🦀".into()));
    }

    #[test]
    fn no_pattern_takes_longer_than_its_text() {
        let text = format!("{}b", "a".repeat(100_000));
        for pattern in [
            "(a+)+$",
            "^(a|a)*$",
            "^(a|aa)+$",
            "(.*)*x",
            "^(([a-z])+.)+[A-Z]([a-z])+$",
        ] {
            let Ok(schema) = of_x(&json!({ "pattern": pattern })) else {
                panic!("{pattern}");
            };
            let began = Instant::now();
            assert!(schema.validate(&json!({ "x": text })).is_err());
            assert!(began.elapsed() < Duration::from_secs(10), "{pattern}");
        }
    }

    #[test]
    fn what_is_said_is_bounded_and_shows_no_value() {
        let schema = compile(json!({
            "properties": { "list": { "items": { "type": "integer" } }, "mail": { "format": "email" } },
        }))
        .unwrap();
        let many = vec!["S3cret"; 10_000];
        let said = schema
            .validate(&json!({ "list": many, "mail": "S3cret" }))
            .unwrap_err();
        assert!(said.chars().count() <= LONGEST);
        assert_eq!(said.split("; ").count(), MOST_ERRORS, "{said}");
        assert!(
            said.contains("#/list/0: value is not of type \"integer\""),
            "{said}"
        );
        assert!(!said.contains("S3cr"), "{said}");
    }
}
