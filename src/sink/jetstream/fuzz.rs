//! What is sent to JetStream and what it answers, fed with any bytes.

use super::message::Composer;
use super::verdict::{self, Verdict};
use super::{Seen, stream, subject};
use crate::config::JetstreamConfig;
use crate::fuzz::{deliveries, texts};

/// To a publish, or to the question for the stream.
pub(crate) fn answer(bytes: &[u8]) {
    if let Verdict::Kept { .. } = verdict::of_body(bytes, "EVENTS") {
        let text = String::from_utf8_lossy(bytes);
        assert!(
            text.contains("EVENTS") || text.contains("\\u"),
            "only the expected stream's own word"
        );
    }
    if let Ok(Seen::Stream(settings)) = stream::seen(bytes) {
        let _ = (
            settings.takes("events.order.Placed"),
            settings.obstacle("EVENTS"),
        );
        let _ = (settings.duplicate_window(), settings.shown());
    }
    if let Some([one, other]) = texts(bytes) {
        assert_eq!(subject::overlap(one, other), subject::overlap(other, one));
    }
}

/// An event's message.
pub(crate) fn message(bytes: &[u8]) {
    for cloudevents in [false, true] {
        let config = JetstreamConfig {
            cloudevents,
            ..JetstreamConfig::default()
        };
        for delivery in deliveries(bytes, "EVENTS") {
            let Ok(message) = Composer::new(&config).compose(&delivery) else {
                continue;
            };
            assert!(!message.subject.contains(char::is_whitespace));
            for (_, values) in message.headers.iter() {
                for value in values {
                    assert!(!value.as_str().contains(char::is_control), "{value:?}");
                }
            }
        }
    }
}
