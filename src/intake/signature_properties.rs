//! What holds of signatures, whatever is signed.

use proptest::prelude::*;

use super::*;
use crate::properties;

const TOLERANCE: Duration = Duration::from_secs(300);

/// Secret, id, time, body.
fn calls() -> impl Strategy<Value = (Vec<u8>, String, u32, Vec<u8>)> {
    let secret = proptest::collection::vec(any::<u8>(), SHORTEST_KEY..80);
    let id = proptest::collection::vec(0x20..0x7f_u8, 1..40);
    let id = id.prop_map(|letters| String::from_utf8(letters).unwrap());
    let body = proptest::collection::vec(any::<u8>(), 0..100);
    (secret, id, any::<u32>(), body)
}

fn keys(secret: &[u8]) -> Keys {
    let mut keys = Keys::default();
    keys.add(&format!("{PREFIX}{}", STANDARD.encode(secret)))
        .unwrap();
    keys
}

fn verify(keys: &Keys, parts: &[Vec<u8>; 4], now: i64) -> Result<Verified, Rejection> {
    let [id, timestamp, signature, body] = parts;
    let body = Bytes::copy_from_slice(body);
    Unverified::new(
        &[id.as_slice()],
        &[timestamp.as_slice()],
        &[signature.as_slice()],
        body,
    )?
    .verify(keys, now, TOLERANCE)
}

fn signed(keys: &Keys, id: &str, at: u32, body: &[u8]) -> [Vec<u8>; 4] {
    let timestamp = at.to_string();
    let signature = keys.sign(id, &timestamp, body).unwrap();
    [id.into(), timestamp.into(), signature.into(), body.to_vec()]
}

#[test]
fn what_is_signed_is_taken_and_no_byte_of_it_can_be_another() {
    let change = (0..4_usize, any::<usize>(), 1..=u8::MAX);
    properties::hold(
        &(calls(), change),
        |((secret, id, at, body), (part, place, flip))| {
            let (keys, now) = (keys(&secret), i64::from(at));
            let mut parts = signed(&keys, &id, at, &body);
            let verified = verify(&keys, &parts, now).unwrap();
            assert_eq!(
                (verified.id(), &verified.body()[..]),
                (id.as_str(), &body[..])
            );
            let changed = &mut parts[part];
            if let Some(length) = std::num::NonZero::new(changed.len()) {
                changed[place % length] ^= flip;
                assert!(verify(&keys, &parts, now).is_err());
            }
        },
    );
}

#[test]
fn nothing_can_be_added_to_what_is_signed_or_taken_from_it() {
    let change = (0..4_usize, any::<usize>(), any::<Option<u8>>());
    properties::hold(
        &(calls(), change),
        |((secret, id, at, body), (part, place, added))| {
            let (keys, now) = (keys(&secret), i64::from(at));
            let mut parts = signed(&keys, &id, at, &body);
            let changed = &mut parts[part];
            match added {
                // Between signatures there is white space, which says nothing.
                Some(byte) if part == 2 && byte.is_ascii_whitespace() => return,
                Some(byte) => changed.insert(place % (changed.len() + 1), byte),
                None if changed.is_empty() => return,
                None => drop(changed.remove(place % changed.len())),
            }
            assert!(verify(&keys, &parts, now).is_err());
        },
    );
}

#[test]
fn another_key_takes_nothing_and_any_of_several_does() {
    let inputs = (
        calls(),
        proptest::collection::vec(any::<u8>(), SHORTEST_KEY..80),
    );
    properties::hold(&inputs, |((secret, id, at, body), other)| {
        // Keys that differ in zeros at the end are one to HMAC.
        if_they_differ(&secret, &other, |one, another| {
            let parts = signed(&keys(one), &id, at, &body);
            let now = i64::from(at);
            assert_eq!(
                verify(&keys(another), &parts, now).unwrap_err(),
                Rejection::BadSignature
            );
            let mut both = keys(another);
            both.0.extend(keys(one).0);
            assert!(verify(&both, &parts, now).is_ok());
        });
    });
}

fn if_they_differ(one: &[u8], other: &[u8], then: impl Fn(&[u8], &[u8])) {
    let trimmed = |key: &[u8]| {
        let end = key
            .iter()
            .rposition(|byte| *byte != 0)
            .map_or(0, |last| last + 1);
        key[..end].to_vec()
    };
    if trimmed(one) != trimmed(other) {
        then(one, other);
    }
}

#[test]
fn the_clock_decides_to_the_second_and_never_overflows() {
    let near = prop_oneof![
        -400..400_i64,
        proptest::sample::select(vec![-301, -300, 300, 301])
    ];
    properties::hold(
        &(calls(), any::<i64>(), near),
        |((secret, id, at, body), now, near)| {
            let keys = keys(&secret);
            let parts = signed(&keys, &id, at, &body);
            for now in [now, i64::from(at) + near] {
                let right = now.abs_diff(i64::from(at)) <= TOLERANCE.as_secs();
                assert_eq!(verify(&keys, &parts, now).is_ok(), right, "{now}");
            }
        },
    );
}
