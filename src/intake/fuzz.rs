//! What senders post and operators write for them, fed with any bytes.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use serde_json::Value;

use super::pointer::Pointer;
use super::schema::Schema;
use super::signature::{Keys, Unverified, Verified};
use super::source::{self, Source};
use super::statement;
use crate::config::{IntakeConfig, IntakeRouteConfig, SourceConfig};
use crate::fuzz::{parts, texts};

/// Of the seeds.
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const NOW: i64 = 1_614_265_330;
const TOLERANCE: Duration = Duration::from_secs(300);

fn keys() -> Keys {
    let mut keys = Keys::default();
    keys.add(SECRET).expect("a right secret");
    keys
}

fn signed(body: &[u8]) -> Verified {
    let (keys, timestamp) = (keys(), NOW.to_string());
    let signature = keys.sign("id", &timestamp, body).expect("there is a key");
    let (timestamp, signature) = (timestamp.as_bytes(), signature.as_bytes());
    Unverified::new(
        &[b"id"],
        &[timestamp],
        &[signature],
        Bytes::copy_from_slice(body),
    )
    .and_then(|call| call.verify(&keys, NOW, TOLERANCE))
    .expect("it is rightly signed")
}

/// Id, timestamp, signatures and body.
pub(crate) fn signature(bytes: &[u8]) {
    let [id, timestamp, signatures, body] = parts(bytes);
    let keys = keys();
    let call = Unverified::new(
        &[id],
        &[timestamp],
        &[signatures],
        Bytes::copy_from_slice(body),
    );
    if let Ok(verified) = call.and_then(|call| call.verify(&keys, NOW, TOLERANCE)) {
        let timestamp = std::str::from_utf8(timestamp).expect("it was verified");
        let right = keys.sign(verified.id(), timestamp, body);
        let right = right.expect("there is a key");
        let given = String::from_utf8_lossy(signatures);
        assert!(given.contains(&right), "nothing else is taken");
        assert_eq!((verified.id().as_bytes(), &verified.body()[..]), (id, body));
    }
}

/// What signatures are made with.
pub(crate) fn secret(bytes: &[u8]) {
    let Some([text]) = texts(bytes) else {
        return;
    };
    let mut keys = Keys::default();
    if keys.add(text).is_ok() {
        let signature = keys.sign("id", "1", b"{}").expect("there is a key");
        assert!(signature.starts_with("v1,"));
    }
}

/// With a schema and routes. Made once: a schema takes longer to compile than a body to be read.
static SOURCES: LazyLock<Vec<Arc<Source>>> = LazyLock::new(|| {
    let source = SourceConfig {
        name: "orders".into(),
        secrets: vec![SECRET.into()],
        schema: Some(include_str!("../../examples/orders/order-event.schema.json").into()),
        route: vec![IntakeRouteConfig {
            event_type: "order.*".into(),
            sql: Some("SELECT :order_id, :payload, :type".into()),
            parameters: BTreeMap::from([("order_id".into(), "/data/order_id".into())]),
            ..IntakeRouteConfig::default()
        }],
        ..SourceConfig::default()
    };
    let config = IntakeConfig {
        source: vec![source],
        ..IntakeConfig::default()
    };
    source::sources(&config).expect("a right configuration")
});

/// A body, by a source.
pub(crate) fn body(bytes: &[u8]) {
    let source = &SOURCES[0];
    let Ok(read) = source.read(&signed(bytes), "execution") else {
        return;
    };
    assert_eq!(read.event.text.as_bytes(), bytes, "as it came");
    match source.judge(&read) {
        Ok(route) => {
            for step in &route.steps {
                let _ = step.order(&read.event);
            }
        }
        Err(failure) => assert!(
            format!("{failure:?}").len() < 20_000,
            "what is said is bounded"
        ),
    }
}

/// A pointer, and what it leads into.
pub(crate) fn pointer(bytes: &[u8]) {
    let Some([pointer, body]) = texts(bytes) else {
        return;
    };
    let Ok(parsed) = Pointer::parse(pointer) else {
        return;
    };
    let (found, text) = (parsed.find(body), parsed.text(body));
    if let Ok(value) = serde_json::from_str::<Value>(body) {
        let found =
            found.map(|text| serde_json::from_str::<Value>(text).expect("JSON within JSON"));
        assert_eq!(found.as_ref(), value.pointer(pointer));
        let is_null = found.is_none_or(|value| value.is_null());
        assert_eq!(text.is_none(), is_null);
    }
}

/// The SQL of a route.
pub(crate) fn statement(bytes: &[u8]) {
    let Some([text]) = texts(bytes) else {
        return;
    };
    let pointer = Pointer::parse("/a").expect("a right pointer");
    let Ok(statements) = statement::parse(text, &BTreeMap::from([("a".into(), pointer)])) else {
        return;
    };
    for statement in statements {
        assert!(!statement.sql.is_empty());
        for number in 1..=statement.parameters.len() {
            assert!(
                statement.sql.contains(&format!("(${number}::text)")),
                "each value is used"
            );
        }
    }
}

/// A schema, and a body.
pub(crate) fn schema(bytes: &[u8]) {
    let Some([schema, body]) = texts(bytes) else {
        return;
    };
    let Ok(schema) = Schema::compile(schema) else {
        return;
    };
    let given = serde_json::from_str(body).unwrap_or_default();
    for body in [
        given,
        serde_json::json!({}),
        serde_json::json!({ "type": "a", "data": [1, null] }),
    ] {
        if let Err(reason) = schema.validate(&body) {
            assert!(reason.len() < 8_000, "what is said is bounded");
        }
    }
}
