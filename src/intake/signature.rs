//! Signatures of the Standard Webhooks: HMAC-SHA256 over id, timestamp and the raw body.
//!
//! # Invariants
//! - [`Verified`] comes from [`Unverified::verify`] alone, and only a verified call is ever stored.
//! - What is signed are the bytes as they came: nothing is parsed before.
//! - Each try takes the same time whatever differs, and there are few of them however long the header.
//!
//! Pure: the clock is an argument.

use std::fmt;
use std::time::Duration;

use base64::Engine as _;
use base64::alphabet;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use bytes::Bytes;
use ring::hmac;
use subtle::ConstantTimeEq as _;

/// Names the event; the same on every try.
pub const ID_HEADER: &str = "webhook-id";
/// Seconds since 1970.
pub const TIMESTAMP_HEADER: &str = "webhook-timestamp";
/// `v1,<base64>`, several separated by spaces.
pub const SIGNATURE_HEADER: &str = "webhook-signature";

/// Longest id, in bytes.
pub const MAX_ID_BYTES: usize = 256;
/// What a sender that replaces its secrets sends at once; more would be a way to keep us busy.
const MAX_SIGNATURES: usize = 16;
/// Shorter keys could be guessed.
const SHORTEST_KEY: usize = 16;

const PREFIX: &str = "whsec_";
/// Of keys that are not shared, which are not taken.
const ASYMMETRIC: [&str; 2] = ["whsk_", "whpk_"];

/// Standard alphabet, with padding or without.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);
/// The alphabet for addresses, with padding or without.
const LENIENT_URL: GeneralPurpose = GeneralPurpose::new(
    &alphabet::URL_SAFE,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The keys of one source. Not printed.
#[derive(Clone, Default)]
pub struct Keys(Vec<hmac::Key>);

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} key(s)", self.0.len())
    }
}

impl Keys {
    /// Adds the secrets of a text, separated by white space.
    ///
    /// A secret `whsec_<base64>` (either alphabet, with padding or without) is what it decodes to. One
    /// without the prefix is its bytes; if it is base64 as well, what it decodes to is tried too, since
    /// that is how the reference libraries read it.
    ///
    /// # Errors
    /// Says what is wrong, never what was given.
    pub fn add(&mut self, text: &str) -> Result<(), String> {
        let mut found = false;
        for secret in text.split_ascii_whitespace() {
            found = true;
            for key in read_secret(secret)? {
                self.0.push(hmac::Key::new(hmac::HMAC_SHA256, &key));
            }
        }
        if found {
            return Ok(());
        }
        Err("is empty: give a secret like whsec_ and 24 or more random bytes in base64".into())
    }

    /// Is there none?
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What a sender writes into `webhook-signature`, by the first key.
    pub fn sign(&self, id: &str, timestamp: &str, body: &[u8]) -> Option<String> {
        let key = self.0.first()?;
        Some(format!("v1,{}", tag(key, id, timestamp, body)))
    }
}

fn read_secret(secret: &str) -> Result<Vec<Vec<u8>>, String> {
    let decode = |text: &str| {
        LENIENT
            .decode(text)
            .or_else(|_| LENIENT_URL.decode(text))
            .ok()
    };
    if let Some(given) = ASYMMETRIC.iter().find(|form| secret.starts_with(**form)) {
        return Err(format!(
            "begins with `{given}`: signatures by key pairs (v1a) are not taken, ask the sender for a \
             shared secret (`{PREFIX}…`)"
        ));
    }
    if secret.starts_with("v1,") || secret.starts_with("v1a,") {
        return Err("begins like a signature: give what follows the comma".into());
    }
    let keys = match secret.strip_prefix(PREFIX) {
        Some(encoded) => vec![
            decode(encoded)
                .ok_or_else(|| format!("what follows `{PREFIX}` is no base64 (is it cut off?)"))?,
        ],
        None => {
            let raw = secret.as_bytes().to_vec();
            let decoded = decode(secret).filter(|key| key.len() >= SHORTEST_KEY);
            [Some(raw), decoded].into_iter().flatten().collect()
        }
    };
    if keys.iter().any(|key| key.len() < SHORTEST_KEY) {
        return Err(format!(
            "is a key of less than {SHORTEST_KEY} bytes, which could be guessed: give a longer one"
        ));
    }
    Ok(keys)
}

fn tag(key: &hmac::Key, id: &str, timestamp: &str, body: &[u8]) -> String {
    let mut context = hmac::Context::with_key(key);
    for part in [id.as_bytes(), b".", timestamp.as_bytes(), b".", body] {
        context.update(part);
    }
    STANDARD.encode(context.sign())
}

/// Why a call was refused. What it says is for whoever sent it: nothing of what is known here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// More than `max_body_bytes`.
    #[error("body_too_large: more than {0} bytes")]
    BodyTooLarge(u64),
    /// One of the three is missing, there twice, or has a form that it cannot have.
    #[error(
        "missing_headers: webhook-id, webhook-timestamp and webhook-signature are required, once each"
    )]
    MissingHeaders,
    /// Too far from our clock.
    #[error("stale_timestamp: webhook-timestamp is not within {0}s of now (possible replay)")]
    StaleTimestamp(u64),
    /// By none of the secrets.
    #[error("bad_signature: no v1 signature matches the shared secret")]
    BadSignature,
    /// Well signed, but no UTF-8 or no JSON. Says where, not what.
    #[error("not_utf8_json: the body is not UTF-8 JSON ({0})")]
    NotUtf8Json(String),
    /// Well signed JSON, but no object.
    #[error("not_json_object: the body must be a JSON object")]
    NotJsonObject,
    /// A body that would have to be unpacked.
    #[error("unsupported_encoding: send the body as it was signed, without Content-Encoding")]
    UnsupportedEncoding,
    /// The body did not arrive in time.
    #[error("too_slow: the body did not arrive within {0}s")]
    TooSlow(u64),
    /// The body ended before its end.
    #[error("incomplete_body: the body ended too early")]
    Incomplete,
    /// No source of this name.
    #[error("unknown_source: nothing is received here")]
    UnknownSource,
    /// A method other than POST.
    #[error("method_not_allowed: POST the event")]
    WrongMethod,
}

impl Rejection {
    /// The first word of its text: a fixed set, for metrics.
    pub fn class(&self) -> &'static str {
        match self {
            Self::BodyTooLarge(_) => "body_too_large",
            Self::MissingHeaders => "missing_headers",
            Self::StaleTimestamp(_) => "stale_timestamp",
            Self::BadSignature => "bad_signature",
            Self::NotUtf8Json(_) => "not_utf8_json",
            Self::NotJsonObject => "not_json_object",
            Self::UnsupportedEncoding => "unsupported_encoding",
            Self::TooSlow(_) => "too_slow",
            Self::Incomplete => "incomplete_body",
            Self::UnknownSource => "unknown_source",
            Self::WrongMethod => "method_not_allowed",
        }
    }

    /// Status code of the answer: whose fault it is, and that sending it again as it is will not help.
    pub fn status(&self) -> u16 {
        match self {
            Self::BodyTooLarge(_) => 413,
            Self::StaleTimestamp(_) | Self::BadSignature => 401,
            Self::UnsupportedEncoding => 415,
            Self::TooSlow(_) => 408,
            Self::UnknownSource => 404,
            Self::WrongMethod => 405,
            Self::MissingHeaders
            | Self::NotUtf8Json(_)
            | Self::NotJsonObject
            | Self::Incomplete => 400,
        }
    }
}

/// A call as it came.
#[derive(Clone, Debug)]
pub struct Unverified {
    id: String,
    timestamp: String,
    signatures: String,
    body: Bytes,
}

impl Unverified {
    /// The three headers, each as often as it was there, and the raw body.
    ///
    /// # Errors
    /// [`Rejection::MissingHeaders`].
    pub fn new(
        ids: &[&[u8]],
        timestamps: &[&[u8]],
        signatures: &[&[u8]],
        body: Bytes,
    ) -> Result<Self, Rejection> {
        let text = |bytes: &[u8]| {
            let text = std::str::from_utf8(bytes).ok()?;
            (!text.is_empty()).then(|| text.to_owned())
        };
        // Two ids or timestamps: which of them was signed, and which is meant?
        let one = |values: &[&[u8]]| match values {
            [value] => text(value),
            _ => None,
        };
        let id = one(ids).filter(|id| {
            id.len() <= MAX_ID_BYTES && !id.contains(|letter: char| letter.is_control())
        });
        // Several lines of one header are one list.
        let signatures: Option<Vec<_>> = signatures.iter().map(|value| text(value)).collect();
        let signatures = signatures.map(|lines| lines.join(" "));
        match (
            id,
            one(timestamps),
            signatures.filter(|list| !list.is_empty()),
        ) {
            (Some(id), Some(timestamp), Some(signatures)) => Ok(Self {
                id,
                timestamp,
                signatures,
                body,
            }),
            _ => Err(Rejection::MissingHeaders),
        }
    }

    /// Checks timestamp and signature. `now` is in seconds since 1970.
    ///
    /// # Errors
    /// [`Rejection::StaleTimestamp`] or [`Rejection::BadSignature`].
    pub fn verify(self, keys: &Keys, now: i64, tolerance: Duration) -> Result<Verified, Rejection> {
        let stale = Rejection::StaleTimestamp(tolerance.as_secs());
        let digits = self.timestamp.bytes().all(|byte| byte.is_ascii_digit());
        let sent: i64 = match self.timestamp.parse() {
            Ok(sent) if digits => sent,
            _ => return Err(stale),
        };
        if now.abs_diff(sent) > tolerance.as_secs() {
            return Err(stale);
        }
        let given: Vec<&str> = self
            .signatures
            .split_ascii_whitespace()
            .filter_map(|signature| signature.strip_prefix("v1,"))
            .take(MAX_SIGNATURES)
            .collect();
        if given.is_empty() {
            return Err(Rejection::BadSignature);
        }
        let mut right = false;
        for key in &keys.0 {
            let expected = tag(key, &self.id, &self.timestamp, &self.body);
            for signature in &given {
                right |= bool::from(expected.as_bytes().ct_eq(signature.as_bytes()));
            }
        }
        if !right {
            return Err(Rejection::BadSignature);
        }
        Ok(Verified {
            id: self.id,
            body: self.body,
        })
    }
}

/// A call that somebody who knows the secret has made, lately.
#[derive(Clone, Debug)]
pub struct Verified {
    id: String,
    body: Bytes,
}

impl Verified {
    /// `webhook-id`.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The bytes that were signed.
    pub fn body(&self) -> &Bytes {
        &self.body
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLERANCE: Duration = Duration::from_secs(300);

    /// Secret, id, timestamp, body, signature: as the public libraries have them.
    const VECTORS: [(&str, &str, i64, &str, &str); 2] = [
        (
            "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD",
            "msg_27UH4WbU6Z5A5EzD8u03UvzRbpk",
            1_649_367_553,
            r#"{"email":"test@example.com","username":"test_user"}"#,
            "v1,tZ1I4/hDygAJgO5TYxiSd6Sd0kDW6hPenDe+bTa3Kkw=",
        ),
        (
            "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
            1_614_265_330,
            r#"{"test": 2432232314}"#,
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
        ),
    ];

    fn keys(secret: &str) -> Keys {
        let mut keys = Keys::default();
        keys.add(secret).unwrap();
        keys
    }

    fn call(id: &str, timestamp: &str, signatures: &str, body: &str) -> Unverified {
        Unverified::new(
            &[id.as_bytes()],
            &[timestamp.as_bytes()],
            &[signatures.as_bytes()],
            Bytes::copy_from_slice(body.as_bytes()),
        )
        .unwrap()
    }

    #[test]
    fn the_published_vectors_are_taken_and_no_neighbour_of_theirs() {
        for (secret, id, at, body, signature) in VECTORS {
            let keys = keys(secret);
            let stamp = at.to_string();
            assert_eq!(keys.sign(id, &stamp, body.as_bytes()).unwrap(), signature);
            let verify = |id: &str, stamp: &str, body: &str| {
                call(id, stamp, signature, body).verify(&keys, at, TOLERANCE)
            };
            let verified = verify(id, &stamp, body).unwrap();
            assert_eq!((verified.id(), &verified.body()[..]), (id, body.as_bytes()));
            for (id, stamp, body) in [
                (format!("{id}x"), stamp.clone(), body.to_owned()),
                (id.to_owned(), (at + 1).to_string(), body.to_owned()),
                (id.to_owned(), stamp.clone(), format!("{body}\n")),
                (id.to_owned(), stamp.clone(), body.replace(':', " :")),
            ] {
                let answer = verify(&id, &stamp, &body);
                assert_eq!(answer.unwrap_err(), Rejection::BadSignature, "{body}");
            }
        }
    }

    #[test]
    fn a_timestamp_counts_to_the_second_on_both_sides() {
        let (secret, id, at, body, signature) = VECTORS[0];
        let keys = keys(secret);
        for (now, right) in [
            (at - 301, false),
            (at - 300, true),
            (at + 300, true),
            (at + 301, false),
            (i64::MAX, false),
            (i64::MIN, false),
        ] {
            let answer = call(id, &at.to_string(), signature, body).verify(&keys, now, TOLERANCE);
            assert_eq!(answer.is_ok(), right, "{now}");
        }
        for stamp in [
            "",
            "+1649367553",
            " 1649367553",
            "1649367553.0",
            "1e9",
            "-1649367553",
            "٣",
            "99999999999999999999999",
            "0x62",
        ] {
            let answer = Unverified::new(
                &[id.as_bytes()],
                &[stamp.as_bytes()],
                &[signature.as_bytes()],
                Bytes::from_static(b"{}"),
            )
            .and_then(|call| call.verify(&keys, at, TOLERANCE));
            assert!(
                matches!(
                    answer,
                    Err(Rejection::StaleTimestamp(300) | Rejection::MissingHeaders)
                ),
                "{stamp}"
            );
        }
    }

    #[test]
    fn any_good_v1_signature_among_others_will_do() {
        let (secret, id, at, body, good) = VECTORS[0];
        let plain = good.strip_prefix("v1,").unwrap();
        let keys = keys(secret);
        let many = |count: usize| format!("{} {good}", "v1,AAAA ".repeat(count));
        for (header, right) in [
            (good.to_owned(), true),
            (format!("v1,BAD {good}"), true),
            (format!("v1a,xxx {good}"), true),
            (format!("{good} v1,BAD"), true),
            (many(15), true),
            (many(10_000), false),
            (format!("v2,{plain}"), false),
            (format!("v1a,{plain}"), false),
            (format!("v1,{plain}x"), false),
            (plain.to_owned(), false),
            ("v1,".to_owned(), false),
            ("v1".to_owned(), false),
            (",".to_owned(), false),
            (format!("V1,{plain}"), false),
        ] {
            let answer = call(id, &at.to_string(), &header, body).verify(&keys, at, TOLERANCE);
            assert_eq!(answer.is_ok(), right, "{header:.60}");
        }
    }

    #[test]
    fn the_secret_that_is_being_replaced_still_does() {
        let (old, id, at, body, good) = VECTORS[0];
        let both = keys(&format!("{} {old}\n", VECTORS[1].0));
        let verified = call(id, &at.to_string(), good, body).verify(&both, at, TOLERANCE);
        assert!(verified.is_ok());
    }

    #[test]
    fn each_form_of_a_secret_works_by_a_rule_or_is_refused_with_a_reason() {
        let (secret, id, at, body, good) = VECTORS[0];
        let bare = secret.strip_prefix(PREFIX).unwrap();
        // 24 bytes need no padding; this key has 25.
        let padded = format!("{PREFIX}{}", STANDARD.encode([0xfb_u8; 25]));
        let url_safe = padded.replace('+', "-").replace('/', "_").replace('=', "");
        assert_ne!(padded, url_safe);
        let signed = |secret: &str| keys(secret).sign(id, "1", b"{}").unwrap();
        assert_eq!(signed(&padded), signed(&url_safe));
        for form in [secret.to_owned(), format!("{secret}\n"), bare.to_owned()] {
            let answer = call(id, &at.to_string(), good, body).verify(&keys(&form), at, TOLERANCE);
            assert!(answer.is_ok(), "{form}");
        }
        // Without the prefix the bytes themselves are a key, too.
        let raw = hmac::Key::new(hmac::HMAC_SHA256, bare.as_bytes());
        let by_bytes = format!("v1,{}", tag(&raw, id, &at.to_string(), body.as_bytes()));
        let answer = call(id, &at.to_string(), &by_bytes, body).verify(&keys(bare), at, TOLERANCE);
        assert!(answer.is_ok());
        for (form, word) in [
            ("", "empty"),
            (" \n", "empty"),
            ("whsec_", "less than 16"),
            ("whsec_QUJD", "less than 16"),
            ("whsec_S3cr!t-S3cr!t-S3cr!t", "no base64"),
            ("v1,whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD", "comma"),
            ("whsk_C2FVsBQIhrscChlQIMV+b5sSYspob7oD", "key pairs"),
            ("S3cret", "less than 16"),
        ] {
            let reason = Keys::default().add(form).unwrap_err();
            assert!(reason.contains(word), "{form}: {reason}");
            assert!(!reason.contains("S3cr"), "{reason}");
        }
    }

    #[test]
    fn each_header_is_needed_once() {
        let body = Bytes::from_static(b"{}");
        let long = "x".repeat(MAX_ID_BYTES + 1);
        let just = "x".repeat(MAX_ID_BYTES);
        let call = |ids: &[&[u8]], stamps: &[&[u8]], signatures: &[&[u8]]| {
            Unverified::new(ids, stamps, signatures, body.clone()).is_ok()
        };
        assert!(call(&[just.as_bytes()], &[b"1"], &[b"v1,a", b"v1,b"]));
        assert!(!call(&[long.as_bytes()], &[b"1"], &[b"v1,a"]));
        assert!(!call(&[], &[b"1"], &[b"v1,a"]));
        assert!(!call(&[b"a", b"b"], &[b"1"], &[b"v1,a"]));
        assert!(!call(&[b"a"], &[b"1", b"1"], &[b"v1,a"]));
        assert!(!call(&[b"a"], &[b"1"], &[]));
        assert!(!call(&[b"a"], &[b"1"], &[b""]));
        assert!(!call(&[b"a\xff"], &[b"1"], &[b"v1,a"]));
        assert!(!call(&[b"a\tb"], &[b"1"], &[b"v1,a"]));
    }
}

#[cfg(test)]
#[path = "signature_properties.rs"]
mod properties;
