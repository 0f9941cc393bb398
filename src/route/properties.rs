//! What holds of patterns and templates, whatever is written in them.

use proptest::prelude::*;

use super::*;
use crate::properties;

/// What a pattern means, without a thought for the time it takes.
fn matches_naively(pattern: &[char], text: &[char]) -> bool {
    match pattern.split_first() {
        None => text.is_empty(),
        Some(('*', rest)) => (0..=text.len()).any(|end| matches_naively(rest, &text[end..])),
        Some((letter, rest)) => text
            .split_first()
            .is_some_and(|(first, text)| first == letter && matches_naively(rest, text)),
    }
}

/// Of few letters, so that there is much to mistake for something else.
fn short(letters: &'static str) -> impl Strategy<Value = String> {
    let letters = proptest::sample::select(letters.chars().collect::<Vec<_>>());
    proptest::collection::vec(letters, 0..9).prop_map(|letters| letters.into_iter().collect())
}

#[test]
fn a_pattern_matches_what_its_letters_and_stars_say() {
    properties::hold(&(short("ab*é"), short("abé")), |(pattern, text)| {
        let letters = |text: &str| text.chars().collect::<Vec<_>>();
        let right = matches_naively(&letters(&pattern), &letters(&text));
        assert_eq!(Pattern::new(&pattern).matches(&text), right);
        // Where a star stands, anything does.
        let filled = pattern.replace('*', &text);
        assert!(Pattern::new(&pattern).matches(&filled), "{filled}");
    });
}

#[test]
fn a_template_is_filled_in_where_it_says_so_and_nowhere_else() {
    let piece = prop_oneof![
        properties::texts().prop_map(|text| text.replace('{', "")),
        Just("{aggregate_type}".to_owned()),
        Just("{aggregate_id}".to_owned()),
        Just("{event_type}".to_owned()),
    ];
    let pieces = proptest::collection::vec(piece, 1..6);
    let values = (
        properties::texts(),
        properties::texts(),
        properties::texts(),
    );
    properties::hold(&(pieces, values), |(pieces, values)| {
        let text = pieces.concat();
        let event = OutboxEvent::sample(1, (&values.0, &values.1), &values.2);
        let Ok(template) = Template::parse("key", &text) else {
            assert!(text.is_empty(), "{text}");
            return;
        };
        let right = pieces.iter().map(|piece| match piece.as_str() {
            "{aggregate_type}" => &values.0,
            "{aggregate_id}" => &values.1,
            "{event_type}" => &values.2,
            _ => piece,
        });
        let right: String = right.map(String::as_str).collect();
        assert_eq!(&*template.fill(&event), right);
        if let Some(fixed) = template.fixed() {
            assert_eq!(&*fixed, text, "known beforehand");
        }
    });
}

#[test]
fn the_first_route_that_matches_takes_the_event_and_some_route_always_does() {
    let routes = proptest::collection::vec((short("ab*"), short("ab*")), 0..6);
    properties::hold(
        &(routes, short("ab"), short("ab")),
        |(patterns, one, other)| {
            let routes = patterns
                .iter()
                .enumerate()
                .map(|(number, patterns)| RouteConfig {
                    aggregate_type: patterns.0.clone(),
                    event_type: patterns.1.clone(),
                    destination: Some(format!("route-{number}")),
                    ..RouteConfig::default()
                });
            let router = Router::new(&routes.collect::<Vec<_>>(), "default").unwrap();
            let event = OutboxEvent::sample(1, (&one, "7"), &other);
            let letters = |text: &str| text.chars().collect::<Vec<_>>();
            let matches =
                |pattern: &str, text: &str| matches_naively(&letters(pattern), &letters(text));
            let first = patterns
                .iter()
                .position(|(a, b)| matches(a, &one) && matches(b, &other));
            let right = first.map_or("default".to_owned(), |number| format!("route-{number}"));
            let token = Arc::new(ClaimToken::new(1, "t".into()));
            let delivery = router.deliver(event, &token);
            assert_eq!(*delivery.address.destination, *right);
            let foretold = router.destinations().0;
            assert!(
                foretold.contains(&delivery.address.destination),
                "known beforehand"
            );
        },
    );
}
