//! What is sent to RabbitMQ and what it answers, fed with any bytes.

use super::management;
use super::message::Composer;
use crate::config::RabbitmqConfig;
use crate::fuzz::deliveries;

/// Of the management API, to each of its questions.
pub(crate) fn management_answer(bytes: &[u8]) {
    management::read_any(bytes);
}

/// An event's message.
pub(crate) fn message(bytes: &[u8]) {
    for cloudevents in [false, true] {
        let config = RabbitmqConfig {
            cloudevents,
            ..RabbitmqConfig::default()
        };
        let composer = Composer::new(&config).expect("the default source is short");
        for delivery in deliveries(bytes, "domain-events") {
            let composed = composer.compose(&delivery);
            assert!(
                composed.is_ok() || !delivery.is_letter(),
                "a copy gets through"
            );
            if let Ok(message) = composed {
                assert!(message.routing_key.as_str().len() <= 255);
                assert_eq!(&*message.message_id, "1");
            }
        }
    }
}
