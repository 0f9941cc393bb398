//! What others sign, send and call JSON.

use std::time::Duration;

use bellwire::intake::signature::{Keys, Unverified};
use serde::Deserialize;

use crate::support::World;

/// Any object is taken.
const ANYTHING: &str = r#"
[intake]
listen = "127.0.0.1:0"
[[intake.source]]
name = "plain"
event_type_at = "/action"
[[intake.source.route]]
sql = "SELECT 1"
"#;

#[derive(Deserialize)]
struct Signed {
    by: String,
    secret: String,
    id: String,
    timestamp: i64,
    body: String,
    signature: String,
}

#[test]
fn what_the_reference_packages_sign_is_taken_and_signed_alike() {
    let vectors: Vec<Signed> =
        serde_json::from_str(include_str!("data/standard-webhooks/signed.json")).unwrap();
    assert!(vectors.len() >= 70);
    for vector in vectors {
        let mut keys = Keys::default();
        keys.add(&vector.secret).unwrap();
        let call = Unverified::new(
            &[vector.id.as_bytes()],
            &[vector.timestamp.to_string().as_bytes()],
            &[vector.signature.as_bytes()],
            vector.body.clone().into(),
        )
        .unwrap();
        let verified = call.verify(&keys, vector.timestamp, Duration::from_secs(300));
        assert!(verified.is_ok(), "{} {}", vector.by, vector.id);
        if vector.secret.starts_with("whsec_") {
            let ours = keys.sign(
                &vector.id,
                &vector.timestamp.to_string(),
                vector.body.as_bytes(),
            );
            assert_eq!(
                ours.unwrap(),
                vector.signature,
                "{} {}",
                vector.by,
                vector.id
            );
        }
    }
}

#[derive(Deserialize)]
struct Case {
    name: String,
    input: String,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_case_of_the_json_test_suite_is_taken_or_refused_and_none_is_a_fault() {
    let world = World::new().await;
    let (mut relay, sender) = world.intake(ANYTHING, "plain", &[]).await;
    let mut cases: Vec<Case> =
        serde_json::from_str(include_str!("data/json-test-suite/parsing.json")).unwrap();
    // These two are too large for the file.
    let generated = [
        ("n_structure_100000_opening_arrays", "[".repeat(100_000)),
        ("n_structure_open_array_object", "[{\"\":".repeat(50_000)),
    ];
    cases.extend(generated.map(|(name, input)| Case {
        name: name.into(),
        input,
    }));
    assert!(cases.len() > 300);
    let mut objects = 0;
    for case in &cases {
        // Each as it is, and as a value within an object.
        for (form, body) in [
            ("as it is", case.input.clone()),
            ("within", format!("{{\"x\":{}}}", case.input)),
        ] {
            let id = format!("{}-{form}", case.name);
            let answer = sender.try_post(&id, body.as_bytes()).await.unwrap();
            let name = &case.name;
            assert!(answer.code < 500, "{name} {form}: {answer:?}");
            let is_object = form == "within" || case.input.trim_start().starts_with('{');
            if name.starts_with("y_") && is_object {
                assert_eq!(answer.code, 200, "{name} {form}: {answer:?}");
                objects += 1;
            } else if name.starts_with("y_") {
                answer.assert(400, "rejected");
            } else if name.starts_with("n_")
                && form == "as it is"
                && !case.input.contains('\u{fffd}')
            {
                // What the file could not carry as text has become something else.
                answer.assert(400, "rejected");
            }
        }
    }
    assert!(objects > 100);
    assert!(relay.is_running());
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_payloads_of_github_are_taken() {
    let world = World::new().await;
    world
        .sql("CREATE TABLE calls (repository TEXT, body JSONB)")
        .await;
    let config = ANYTHING.replace(
        "sql = \"SELECT 1\"",
        "sql = \"INSERT INTO calls VALUES (:repository, :payload)\"\nparameters = { repository = \"/repository/full_name\" }",
    );
    let (_relay, sender) = world.intake(&config, "plain", &[]).await;
    let payloads: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(include_str!("data/github/payloads.json")).unwrap();
    assert_eq!(payloads.len(), 8);
    for (kind, payload) in &payloads {
        let body = serde_json::to_string_pretty(payload).unwrap();
        sender.post(kind, &body).await.assert(200, "processed");
        let same: bool = world
            .db
            .query_one(
                "SELECT convert_from(payload, 'UTF8') = $2 AND convert_from(payload, 'UTF8')::jsonb IN (SELECT body FROM calls)
                 FROM outbox_webhook_events WHERE event_id = $1",
                &[kind, &body],
            )
            .await
            .unwrap()
            .get(0);
        assert!(same, "{kind}");
    }
    world.clean().await;
}
