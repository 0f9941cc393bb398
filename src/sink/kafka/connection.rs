//! Makes the one producer of a sink, shared by its lanes.
//!
//! Invariants:
//! - **Single flight:** the mutex is held through an attempt, so lanes wait for the same one, and a
//!   failure is everybody's answer for [`RETRY_PAUSE`].
//! - A new producer counts only once the brokers have answered it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::link::Link;
use super::settings::{self, Batching};
use crate::config::KafkaConfig;
use crate::relay::failure::Cause;
use crate::sink::board::Board;
use crate::sink::{SinkError, Transport};

/// A failed attempt is not repeated sooner.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Makes the producer when it is needed.
pub(super) struct Connector {
    config: KafkaConfig,
    batching: Batching,
    board: Arc<Board>,
    state: tokio::sync::Mutex<State>,
}

#[derive(Default)]
struct State {
    link: Option<Arc<Link>>,
    failed: Option<(Instant, SinkError)>,
}

impl Connector {
    pub(super) fn new(config: KafkaConfig, batching: Batching) -> Self {
        Self {
            config,
            batching,
            board: Arc::default(),
            state: tokio::sync::Mutex::default(),
        }
    }

    pub(super) fn transport(&self) -> watch::Receiver<Transport> {
        self.board.state.subscribe()
    }

    /// The producer, made if needed.
    pub(super) async fn link(&self) -> Result<Arc<Link>, SinkError> {
        let mut state = self.state.lock().await;
        if let Some(link) = &state.link
            && link.is_up()
        {
            return Ok(link.clone());
        }
        if let Some((at, error)) = &state.failed
            && at.elapsed() < RETRY_PAUSE
        {
            return Err(error.clone());
        }
        let number = self.board.next_link();
        match self.open(number).await {
            Ok(link) => {
                link.announce();
                state.failed = None;
                state.link = Some(link.clone());
                Ok(link)
            }
            Err(error) => {
                self.board
                    .set(number, Transport::Down(error.message.clone()));
                state.failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
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
        if let Some(link) = self.state.lock().await.link.take() {
            link.kill(SinkError::new(Cause::Unreachable, "closed"));
        }
    }
}
