//! Whether an exchange may be published to, where the management API is configured.
//!
//! Invariants:
//! - What the API says of an exchange is the broker's word: one that leads nowhere is refused, at
//!   the start and later.
//! - The API is not the way that events go. At the start its silence refuses the exchange, since a
//!   guard was asked for. Once an event was confirmed there, silence no longer stops delivery: it is
//!   logged, once for each change, and AMQP is relied on alone.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::management::{Management, Problem};
use crate::relay::failure::Cause;
use crate::sink::SinkError;

/// See the module's head.
pub(super) struct Guard {
    management: Management,
    /// As many as there are exchanges that events went to.
    known: Mutex<HashMap<Arc<str>, Known>>,
}

/// What is known of an exchange.
#[derive(Debug, Default)]
struct Known {
    /// An event was confirmed there.
    delivered: bool,
    /// Why the API was of no help, as logged last.
    silence: Option<String>,
}

impl Guard {
    pub(super) fn new(management: Management) -> Self {
        Self {
            management,
            known: Mutex::default(),
        }
    }

    /// An event was confirmed at this exchange.
    pub(super) fn delivered(&self, exchange: &Arc<str>) {
        let mut known = self.known();
        match known.get_mut(exchange) {
            Some(known) => known.delivered = true,
            None => {
                let delivered = Known {
                    delivered: true,
                    ..Known::default()
                };
                known.insert(exchange.clone(), delivered);
            }
        }
    }

    /// May this exchange, which AMQP has found, be published to? Answers what was found.
    pub(super) async fn ask(&self, exchange: &str) -> Result<String, SinkError> {
        let refused = |message| Err(SinkError::new(Cause::DestinationMissing, message));
        match self.management.examine(exchange).await {
            Ok(found) => {
                self.answers(exchange);
                Ok(found.to_string())
            }
            Err(Problem::Unfit(message)) => {
                self.answers(exchange);
                refused(message)
            }
            Err(Problem::Silent(message)) if self.goes_on(exchange, &message) => {
                Ok(format!("bindings not checked: {message}"))
            }
            Err(Problem::Silent(message)) => refused(message),
        }
    }

    fn answers(&self, exchange: &str) {
        let mut known = self.known();
        let silence = known
            .get_mut(exchange)
            .and_then(|known| known.silence.take());
        if silence.is_some() {
            tracing::info!(destination = exchange, "the management API answers again");
        }
    }

    /// Delivery there does not depend on the API any more.
    fn goes_on(&self, exchange: &str, silence: &str) -> bool {
        let mut known = self.known();
        let Some(known) = known.get_mut(exchange).filter(|known| known.delivered) else {
            return false;
        };
        if known.silence.as_deref() != Some(silence) {
            tracing::warn!(
                destination = exchange,
                reason = silence,
                "the management API is of no help, relying on AMQP alone"
            );
            known.silence = Some(silence.to_owned());
        }
        true
    }

    /// What a thread that panicked left is as good as any: each field stands for itself.
    fn known(&self) -> MutexGuard<'_, HashMap<Arc<str>, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
