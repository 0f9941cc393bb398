//! Texts of a configuration that say something of events: patterns that match them, and names that are filled in from
//! them. Pure: no I/O.

#![expect(
    clippy::string_slice,
    reason = "at places that were found in this very text"
)]

use std::sync::Arc;

use crate::config::ConfigError;
use crate::event::OutboxEvent;

/// A text with `*` for any run of characters: the pieces between the stars.
#[derive(Debug)]
pub(crate) struct Pattern(Vec<String>);

impl Pattern {
    pub(crate) fn new(text: &str) -> Self {
        let mut pieces: Vec<String> = text.split('*').map(str::to_owned).collect();
        // `**` says no more than `*`.
        let last = pieces.len() - 1;
        let mut number = 0;
        pieces.retain(|piece| {
            number += 1;
            number == 1 || number == last + 1 || !piece.is_empty()
        });
        Self(pieces)
    }

    /// Does it match every text?
    pub(crate) fn is_any(&self) -> bool {
        self.0 == [""; 2]
    }

    pub(crate) fn matches(&self, text: &str) -> bool {
        let [first, middle @ .., last] = self.0.as_slice() else {
            return self.0.first().is_some_and(|whole| whole == text);
        };
        let Some(mut rest) = text.strip_prefix(first.as_str()) else {
            return false;
        };
        for piece in middle {
            // The earliest place leaves the most for what follows.
            let Some(at) = rest.find(piece.as_str()) else {
                return false;
            };
            rest = &rest[at + piece.len()..];
        }
        rest.ends_with(last.as_str())
    }
}

/// A name, or one to be filled in from the event.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Template {
    Fixed(Arc<str>),
    Filled(Vec<Piece>),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Text(String),
    AggregateType,
    AggregateId,
    EventType,
}

impl Piece {
    /// What it is filled in with; none: it is a text of its own.
    pub(super) fn of<'a>(&self, event: &'a OutboxEvent) -> Option<&'a str> {
        match self {
            Self::Text(_) => None,
            Self::AggregateType => Some(&event.key.aggregate_type),
            Self::AggregateId => Some(&event.key.aggregate_id),
            Self::EventType => Some(&event.event_type),
        }
    }
}

impl Template {
    pub(super) fn parse(key: &str, text: &str) -> Result<Self, ConfigError> {
        let wrong = |reason: String| ConfigError::Key {
            key: key.to_owned(),
            reason,
        };
        if text.is_empty() {
            return Err(wrong("must not be empty".into()));
        }
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some(start) = rest.find('{') {
            if start > 0 {
                pieces.push(Piece::Text(rest[..start].to_owned()));
            }
            let after = &rest[start + 1..];
            let end = after
                .find('}')
                .ok_or_else(|| wrong(format!("`{text}` has a `{{` without its `}}`")))?;
            pieces.push(match &after[..end] {
                "aggregate_type" => Piece::AggregateType,
                "aggregate_id" => Piece::AggregateId,
                "event_type" => Piece::EventType,
                other => {
                    return Err(wrong(format!(
                        "`{{{other}}}` is not known: {{aggregate_type}}, {{aggregate_id}} and \
                         {{event_type}} are filled in"
                    )));
                }
            });
            rest = &after[end + 1..];
        }
        if pieces.is_empty() {
            return Ok(Self::Fixed(text.into()));
        }
        if !rest.is_empty() {
            pieces.push(Piece::Text(rest.to_owned()));
        }
        Ok(Self::Filled(pieces))
    }

    /// The same by this sink, where there are several.
    pub(super) fn of_sink(self, sink: Option<&str>) -> Self {
        let Some(sink) = sink else {
            return self;
        };
        match self {
            Self::Fixed(name) => Self::Fixed(format!("{sink}:{name}").into()),
            Self::Filled(mut pieces) => {
                pieces.insert(0, Piece::Text(format!("{sink}:")));
                Self::Filled(pieces)
            }
        }
    }

    pub(super) fn fixed(&self) -> Option<Arc<str>> {
        match self {
            Self::Fixed(name) => Some(name.clone()),
            Self::Filled(_) => None,
        }
    }

    pub(super) fn fill(&self, event: &OutboxEvent) -> Arc<str> {
        match self {
            Self::Fixed(name) => name.clone(),
            Self::Filled(pieces) => pieces
                .iter()
                .map(|piece| match piece {
                    Piece::Text(text) => text.as_str(),
                    filled => filled.of(event).unwrap_or_default(),
                })
                .collect::<String>()
                .into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_any_run_of_characters_and_nothing_else_does() {
        for (pattern, text, matches) in [
            ("*", "", true),
            ("*", "anything", true),
            ("", "", true),
            ("", "a", false),
            ("a", "a", true),
            ("a.c", "abc", false),
            ("a*", "a", true),
            ("*a", "ba", true),
            ("a*a", "a", false),
            ("a*a", "aa", true),
            ("a*b*c", "axxbxxc", true),
            ("a*b*c", "acb", false),
            ("a**c", "ac", true),
            ("*ab*", "aab", true),
            ("ü*", "üx", true),
        ] {
            assert_eq!(
                Pattern::new(pattern).matches(text),
                matches,
                "{pattern} {text}"
            );
        }
    }
}
