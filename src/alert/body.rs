//! The bodies of the requests: Slack's message, and the JSON object for everybody else.

use std::time::Duration;

use serde::Serialize;
use serde_json::json;

use super::mailbox::Notice;
use super::text::{Origin, Room, text};
use super::{Alert, DeadLetter, IntakeTrouble};
use crate::store::Lag;

/// A Slack message. `mrkdwn` off: ids and errors are shown as they are, and stay copyable. Slack
/// still reads `&`, `<` and `>`, which could call a channel.
pub(super) fn slack(notice: &Notice, origin: &Origin) -> String {
    let mut escaped = String::new();
    for letter in text(notice, origin).chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            other => escaped.push(other),
        }
    }
    json!({
        "text": escaped,
        "mrkdwn": false,
        "link_names": false,
        "unfurl_links": false,
        "unfurl_media": false,
    })
    .to_string()
}

/// The JSON object. Fields may be added, but not renamed or removed.
#[derive(Serialize)]
struct Object<'a> {
    /// The same on every try: receivers can drop repeats.
    alert_id: String,
    kind: &'static str,
    at: String,
    replica: &'a str,
    table: &'a str,
    text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<&'a str>,
    #[serde(flatten)]
    fields: Fields,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Fields {
    DeadLettered {
        events: Vec<DeadLetter>,
        more: u64,
    },
    Lag {
        lag: Lag,
        threshold_seconds: f64,
    },
    BreakerOpened {
        subject: String,
        reason: String,
        handed_back: Option<u64>,
    },
    BreakerClosed {
        subject: String,
        after_seconds: Option<f64>,
    },
    Reason {
        reason: String,
    },
    DatabaseBack {
        after_seconds: f64,
    },
    Intake(IntakeTrouble),
}

pub(super) fn webhook(notice: &Notice, origin: &Origin) -> String {
    let object = Object {
        alert_id: format!("{:032x}", rand::random::<u128>()),
        kind: notice.kind(),
        at: humantime::format_rfc3339_millis(notice.at).to_string(),
        replica: &origin.replica,
        table: &origin.table,
        text: text(notice, origin),
        link: origin.link.as_deref(),
        fields: fields(notice),
    };
    serde_json::to_string(&object).expect("strings and numbers are always JSON")
}

fn fields(notice: &Notice) -> Fields {
    let room = Room::of(notice);
    match notice.alerts.first() {
        Some(Alert::LagBegan { lag, threshold } | Alert::LagEnded { lag, threshold }) => {
            Fields::Lag {
                lag: cut_lag(lag, room),
                threshold_seconds: threshold.as_secs_f64(),
            }
        }
        Some(Alert::BreakerOpened {
            subject,
            reason,
            handed_back,
        }) => Fields::BreakerOpened {
            subject: room.name(subject),
            reason: room.error(reason),
            handed_back: *handed_back,
        },
        Some(Alert::BreakerClosed { subject, after }) => Fields::BreakerClosed {
            subject: room.name(subject),
            after_seconds: after.as_ref().map(Duration::as_secs_f64),
        },
        Some(Alert::RelayFailed { reason } | Alert::DatabaseLost { reason }) => Fields::Reason {
            reason: room.error(reason),
        },
        Some(Alert::DatabaseBack { after }) => Fields::DatabaseBack {
            after_seconds: after.as_secs_f64(),
        },
        Some(Alert::Intake(trouble)) => Fields::Intake(IntakeTrouble {
            source: room.name(&trouble.source),
            event_id: trouble.event_id.as_deref().map(|id| room.name(id)),
            reason: room.error(&trouble.reason),
            ..trouble.clone()
        }),
        Some(Alert::DeadLettered(_)) | None => Fields::DeadLettered {
            events: dead_letters(notice)
                .map(|letter| cut_letter(letter, room))
                .collect(),
            more: notice.more,
        },
    }
}

/// Those told in full.
pub(super) fn dead_letters(notice: &Notice) -> impl Iterator<Item = &DeadLetter> {
    notice.alerts.iter().filter_map(|alert| match alert {
        Alert::DeadLettered(letter) => Some(letter),
        _ => None,
    })
}

fn cut_letter(letter: &DeadLetter, room: Room) -> DeadLetter {
    DeadLetter {
        aggregate_type: room.name(&letter.aggregate_type),
        aggregate_id: room.name(&letter.aggregate_id),
        event_type: room.name(&letter.event_type),
        last_error: room.error(&letter.last_error),
        copied_to: letter.copied_to.as_deref().map(|place| room.name(place)),
        ..letter.clone()
    }
}

fn cut_lag(lag: &Lag, room: Room) -> Lag {
    let mut lag = lag.clone();
    if let Some(oldest) = &mut lag.oldest {
        oldest.aggregate_type = room.name(&oldest.aggregate_type);
        oldest.aggregate_id = room.name(&oldest.aggregate_id);
        oldest.event_type = room.name(&oldest.event_type);
        oldest.last_error = oldest.last_error.as_deref().map(|error| room.error(error));
        oldest.waits_for = room.error(&oldest.waits_for);
    }
    lag
}

#[cfg(test)]
mod tests {
    use super::super::text::tests::{dead_letter, lag, origin};
    use super::*;

    fn object(notice: &Notice) -> serde_json::Value {
        serde_json::from_str(&webhook(notice, &origin())).unwrap()
    }

    #[test]
    fn nothing_from_a_row_calls_a_channel_or_formats_a_message() {
        let mut letter = dead_letter(42);
        letter.aggregate_id = "<!channel> *b* _i_ `c` ~s~ &amp; <@U1> @here".into();
        letter.last_error = "unroutable: <https://evil.example|click>".into();
        let notice = Notice::new(Alert::DeadLettered(letter));
        let message: serde_json::Value = serde_json::from_str(&slack(&notice, &origin())).unwrap();
        let text = message["text"].as_str().unwrap();
        assert!(!text.contains(['<', '>']), "{text}");
        assert!(
            text.contains("&lt;!channel&gt; *b* _i_ `c` ~s~ &amp;amp; &lt;@U1&gt; @here"),
            "{text}"
        );
        assert_eq!(message["mrkdwn"], false);
        assert_eq!(message["link_names"], false);
    }

    #[test]
    fn the_object_has_the_fields_of_each_kind() {
        let threshold = Duration::from_secs(300);
        let subject = "RabbitMQ at mq:5672".to_owned();
        let reason = "connection refused".to_owned();
        let cases: Vec<(Alert, &str, &[&str])> = vec![
            (
                Alert::DeadLettered(dead_letter(42)),
                "dead_lettered",
                &["events", "more"],
            ),
            (
                Alert::LagBegan {
                    lag: lag(372.0),
                    threshold,
                },
                "lag_began",
                &["lag", "threshold_seconds"],
            ),
            (
                Alert::LagEnded {
                    lag: lag(1.0),
                    threshold,
                },
                "lag_ended",
                &["lag", "threshold_seconds"],
            ),
            (
                Alert::BreakerOpened {
                    subject: subject.clone(),
                    reason: reason.clone(),
                    handed_back: Some(7),
                },
                "breaker_opened",
                &["subject", "reason", "handed_back"],
            ),
            (
                Alert::BreakerClosed {
                    subject,
                    after: Some(threshold),
                },
                "breaker_closed",
                &["subject", "after_seconds"],
            ),
            (
                Alert::DatabaseLost {
                    reason: reason.clone(),
                },
                "database_lost",
                &["reason"],
            ),
            (
                Alert::DatabaseBack { after: threshold },
                "database_back",
                &["after_seconds"],
            ),
            (Alert::RelayFailed { reason }, "relay_failed", &["reason"]),
        ];
        for (alert, kind, fields) in cases {
            let object = object(&Notice::new(alert));
            assert_eq!(object["kind"], kind);
            let at = object["at"].as_str().unwrap();
            assert!(
                humantime::parse_rfc3339(at).is_ok() && at.ends_with('Z'),
                "{at}"
            );
            assert_eq!(object["replica"], "relay-1");
            assert_eq!(object["table"], "public.outbox");
            assert!(!object["text"].as_str().unwrap().is_empty());
            for field in fields {
                assert!(object.get(field).is_some(), "{kind}: {field}: {object}");
            }
        }
    }

    #[test]
    fn dead_letters_are_a_list_whether_one_or_many() {
        let mut notice = Notice::new(Alert::DeadLettered(dead_letter(1)));
        assert_eq!(object(&notice)["events"][0]["id"], 1);
        assert_eq!(object(&notice)["events"][0]["cause"], "unroutable");
        notice.alerts.push(Alert::DeadLettered(dead_letter(2)));
        notice.more = 3;
        let object = object(&notice);
        assert_eq!(object["events"].as_array().unwrap().len(), 2);
        assert_eq!(object["more"], 3);
    }

    #[test]
    fn ids_of_any_length_and_content_leave_a_bounded_object() {
        let mut letter = dead_letter(1);
        letter.aggregate_id = "\u{0}\"\\\u{1f600}\n".repeat(100_000);
        letter.last_error = "é".repeat(100_000);
        let notice = Notice::new(Alert::DeadLettered(letter));
        let body = webhook(&notice, &origin());
        assert!(body.chars().count() < 10_000, "{}", body.chars().count());
        serde_json::from_str::<serde_json::Value>(&body).unwrap();
    }
}
