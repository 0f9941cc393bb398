//! Makes the one producer of a sink, shared by its lanes.
//!
//! Invariants:
//! - Lanes wait for the same attempt (see `shared`).
//! - A new producer counts only once the brokers have answered it.

use std::sync::Arc;

use tokio::sync::watch;

use super::link::Link;
use super::settings::{self, Batching};
use crate::config::KafkaConfig;
use crate::relay::failure::Cause;
use crate::sink::board::Board;
use crate::sink::shared::Shared;
use crate::sink::{SinkError, Transport};

/// Makes the producer when it is needed.
pub(super) struct Connector {
    config: KafkaConfig,
    batching: Batching,
    board: Arc<Board>,
    shared: Shared<Link>,
}

impl Connector {
    pub(super) fn new(config: KafkaConfig, batching: Batching) -> Self {
        Self {
            config,
            batching,
            board: Arc::default(),
            shared: Shared::default(),
        }
    }

    pub(super) fn transport(&self) -> watch::Receiver<Transport> {
        self.board.state.subscribe()
    }

    /// The producer, made if needed.
    pub(super) async fn link(&self) -> Result<Arc<Link>, SinkError> {
        let mut turn = self.shared.turn().await;
        if let Some(answer) = turn.answer(Link::is_up) {
            return answer;
        }
        let number = self.board.next_link();
        let attempt = self.open(number).await;
        match &attempt {
            Ok(link) => link.announce(),
            Err(error) => self.board.set_down(number, error),
        }
        turn.keep(attempt)
    }

    async fn open(&self, number: u64) -> Result<Arc<Link>, SinkError> {
        let wrong = |error: crate::config::ConfigError| {
            SinkError::new(Cause::Unreachable, error.to_string())
        };
        let options = settings::producer(&self.config, self.batching).map_err(wrong)?;
        // Any name will do, but where asking makes a topic: there all are asked for.
        let sign_of_life = (!self.config.auto_create_topics).then(|| self.config.prefix.clone());
        let about = (number, self.board.clone());
        let within = self.config.connect_timeout;
        Link::open(&options, about, sign_of_life, within)
            .await
            .map(Arc::new)
    }

    pub(super) async fn close(&self) {
        if let Some(link) = self.shared.turn().await.take() {
            link.kill(SinkError::new(Cause::Unreachable, "closed"));
        }
    }
}
