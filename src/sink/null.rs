//! Null sink: confirms everything at once, for benches and trials without a broker.

use async_trait::async_trait;
use tokio::sync::watch;

use super::{Delivery, Lane, Settlement, Sink, SinkError, Transport};
use crate::relay::failure::Cause;

/// Deliveries settled as one batch, at most.
const BATCH: usize = 256;

/// Confirms each delivery at once.
#[derive(Debug)]
pub struct NullSink {
    transport: watch::Sender<Transport>,
}

impl NullSink {
    /// A sink that is always up.
    pub fn new() -> Self {
        Self {
            transport: watch::Sender::new(Transport::Up),
        }
    }
}

impl Default for NullSink {
    fn default() -> Self {
        Self::new()
    }
}

fn settle(delivery: &Delivery) -> Settlement {
    let result = if delivery.token.holds() {
        Ok(())
    } else {
        Err(SinkError::new(Cause::Void, "the claim is void: not sent"))
    };
    Settlement {
        id: delivery.event.id,
        result,
    }
}

#[async_trait]
impl Sink for NullSink {
    fn name(&self) -> &'static str {
        "null"
    }

    async fn probe(&self) -> Result<(), SinkError> {
        Ok(())
    }

    async fn probe_destination(&self, _: &str) -> Result<String, SinkError> {
        Ok("takes everything".to_owned())
    }

    async fn run_lane(&self, mut lane: Lane) {
        let mut deliveries = Vec::with_capacity(BATCH);
        while lane.deliveries.recv_many(&mut deliveries, BATCH).await > 0 {
            // A publisher that is gone wants no settlements.
            let _ = lane.settled.send(deliveries.iter().map(settle).collect());
            deliveries.clear();
        }
    }

    fn transport(&self) -> watch::Receiver<Transport> {
        self.transport.subscribe()
    }

    async fn close(&self) {}
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::sync::mpsc;

    use super::*;
    use crate::event::{ClaimToken, EventId, OutboxEvent};
    use crate::route::Router;

    fn delivery(id: i64, token: &Arc<ClaimToken>) -> Delivery {
        let event = OutboxEvent::sample(id, ("order", "1"), "OrderPlaced");
        Router::new(&[], "events").unwrap().deliver(event, token)
    }

    #[tokio::test]
    async fn everything_is_confirmed_unless_the_claim_is_void() {
        let token = Arc::new(ClaimToken::new(1, "a".into()));
        token.renewed(ClaimToken::now(), Duration::from_secs(60));
        let void = Arc::new(ClaimToken::new(2, "b".into()));
        let (deliver, deliveries) = mpsc::channel(2);
        let (settled, mut settlements) = mpsc::unbounded_channel();
        deliver.send(delivery(1, &token)).await.unwrap();
        deliver.send(delivery(2, &void)).await.unwrap();
        drop(deliver);
        let lane = Lane {
            partition: 0,
            window: 2,
            deliveries,
            settled,
        };
        NullSink::new().run_lane(lane).await;
        let batch = settlements.recv().await.unwrap();
        assert_eq!(batch[0].id, EventId(1));
        assert!(batch[0].result.is_ok());
        assert_eq!(batch[1].result.as_ref().unwrap_err().cause, Cause::Void);
    }
}
