//! JSON pointers (RFC 6901) into a body as it came: a number is told as it is written, however long.
//!
//! Where a key is there twice the last one counts, as it does for PostgreSQL and for the validator.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// A parsed pointer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pointer {
    text: String,
    steps: Vec<String>,
}

impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Pointer {
    /// Reads a pointer; the empty one is the whole.
    ///
    /// # Errors
    /// Says what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no JSON pointer: give one like /data/order_id");
        let steps = match text.strip_prefix('/') {
            None if text.is_empty() => Vec::new(),
            None => return Err(wrong()),
            Some(rest) => rest
                .split('/')
                .map(|step| unescape(step).ok_or_else(wrong))
                .collect::<Result<_, _>>()?,
        };
        Ok(Self {
            text: text.to_owned(),
            steps,
        })
    }

    /// The value's JSON text; none where there is nothing.
    pub fn find<'a>(&self, body: &'a str) -> Option<&'a str> {
        let mut found = body.trim_matches([' ', '\t', '\n', '\r']);
        for step in &self.steps {
            found = child(found, step)?;
        }
        Some(found)
    }

    /// The value as text: a string without its quotes, everything else as JSON; none for null and
    /// where there is nothing.
    pub fn text<'a>(&self, body: &'a str) -> Option<Cow<'a, str>> {
        let found = self.find(body)?;
        match found.as_bytes().first()? {
            b'"' => serde_json::from_str(found).ok().map(Cow::Owned),
            b'n' => None,
            _ => Some(Cow::Borrowed(found)),
        }
    }
}

/// `~1` is a slash and `~0` a tilde; a tilde before anything else is wrong.
fn unescape(step: &str) -> Option<String> {
    let mut plain = String::new();
    let mut letters = step.chars();
    while let Some(letter) = letters.next() {
        plain.push(match letter {
            '~' => match letters.next()? {
                '0' => '~',
                '1' => '/',
                _ => return None,
            },
            other => other,
        });
    }
    Some(plain)
}

fn child<'a>(text: &'a str, step: &str) -> Option<&'a str> {
    let mut parser = serde_json::Deserializer::from_str(text);
    match text.as_bytes().first()? {
        b'{' => parser.deserialize_map(Member(step)).ok()?,
        b'[' => {
            // A leading zero or a sign is no index.
            let index: usize = step.parse().ok()?;
            (index.to_string() == step).then_some(())?;
            parser.deserialize_seq(Element(index)).ok()?
        }
        _ => None,
    }
}

/// The last member of this name.
struct Member<'s>(&'s str);

impl<'de> Visitor<'de> for Member<'_> {
    type Value = Option<&'de str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(Key(name)) = members.next_key()? {
            if name == self.0 {
                found = Some(members.next_value::<&'de RawValue>()?.get());
            } else {
                members.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// A key, borrowed where it has no escapes.
#[derive(serde::Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

/// The element at this place.
struct Element(usize);

impl<'de> Visitor<'de> for Element {
    type Value = Option<&'de str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        let mut place = 0;
        while let Some(element) = elements.next_element::<&'de RawValue>()? {
            if place == self.0 {
                found = Some(element.get());
            }
            place += 1;
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_and_told_as_they_are_written() {
        let body = r#" {"a": {"b/c": [1, {"~": "x\n\u00e9"}], "": 2},
            "n": 123456789012345678901234567890.10, "e": 1e400, "z": null, "t": true,
            "d": 1, "d": {"x": 3}, "d": {"x": 4}, "\u0064x": 5} "#;
        for (pointer, text) in [
            ("/a/b~1c/0", Some("1")),
            ("/a/b~1c/1/~0", Some("x\né")),
            ("/a/", Some("2")),
            ("/n", Some("123456789012345678901234567890.10")),
            ("/e", Some("1e400")),
            ("/t", Some("true")),
            ("/d/x", Some("4")),
            ("/dx", Some("5")),
            ("/z", None),
            ("/a/b~1c/2", None),
            ("/a/b~1c/01", None),
            ("/a/b~1c/-1", None),
            ("/n/x", None),
            ("/missing/x", None),
        ] {
            let found = Pointer::parse(pointer).unwrap().text(body);
            assert_eq!(found.as_deref(), text, "{pointer}");
        }
        let whole = Pointer::parse("").unwrap();
        assert_eq!(whole.find(body), Some(body.trim()));
    }

    #[test]
    fn what_is_no_pointer_is_refused() {
        for text in ["a", "a/b", "/a~", "/a~2", "$.a"] {
            assert!(Pointer::parse(text).is_err(), "{text}");
        }
    }
}

#[cfg(test)]
#[path = "pointer_properties.rs"]
mod properties;
