//! What is sent to Kafka, fed with any bytes.

use super::message::Composer;
use crate::config::KafkaConfig;
use crate::fuzz::deliveries;

/// An event's record.
pub(crate) fn message(bytes: &[u8]) {
    for cloudevents in [false, true] {
        let config = KafkaConfig {
            cloudevents,
            ..KafkaConfig::default()
        };
        for delivery in deliveries(bytes, "events.order") {
            let composed = Composer::new(&config).compose(&delivery);
            assert!(
                composed.is_ok() || !delivery.is_letter(),
                "a copy gets through"
            );
            if let Ok(message) = composed {
                assert_eq!(message.key, delivery.event.key.aggregate_id);
            }
        }
    }
}
