//! The one connection of a sink, shared by its lanes and made when it is needed.
//!
//! Invariants:
//! - **Single flight:** who makes it holds the [`Turn`] meanwhile, so lanes wait for the same attempt, and a
//!   failure is everybody's answer for [`RETRY_PAUSE`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, MutexGuard};

use super::SinkError;

/// A failed attempt to connect is not repeated sooner.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// A connection, or why there is none.
pub(super) struct Shared<L>(Mutex<State<L>>);

struct State<L> {
    link: Option<Arc<L>>,
    failed: Option<(Instant, SinkError)>,
}

/// Nobody else looks at the connection or makes it meanwhile.
pub(super) struct Turn<'a, L>(MutexGuard<'a, State<L>>);

impl<L> Default for Shared<L> {
    fn default() -> Self {
        Self(Mutex::new(State {
            link: None,
            failed: None,
        }))
    }
}

impl<L> Shared<L> {
    pub(super) async fn turn(&self) -> Turn<'_, L> {
        Turn(self.0.lock().await)
    }
}

impl<L> Turn<'_, L> {
    /// The connection if it is of use, or the failure if it has just failed; none: it is to be made.
    pub(super) fn answer(
        &self,
        is_of_use: impl FnOnce(&L) -> bool,
    ) -> Option<Result<Arc<L>, SinkError>> {
        if let Some(link) = &self.0.link
            && is_of_use(link)
        {
            return Some(Ok(link.clone()));
        }
        match &self.0.failed {
            Some((at, error)) if at.elapsed() < RETRY_PAUSE => Some(Err(error.clone())),
            _ => None,
        }
    }

    /// There is none any more.
    pub(super) fn take(&mut self) -> Option<Arc<L>> {
        self.0.link.take()
    }

    /// What an attempt came to is what the next ones are answered.
    pub(super) fn keep(&mut self, attempt: Result<Arc<L>, SinkError>) -> Result<Arc<L>, SinkError> {
        match &attempt {
            Ok(link) => {
                self.0.failed = None;
                self.0.link = Some(link.clone());
            }
            Err(error) => self.0.failed = Some((Instant::now(), error.clone())),
        }
        attempt
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::failure::Cause;

    /// As lanes do it; `attempts` counts the connections made.
    async fn link(
        shared: &Shared<bool>,
        attempts: &mut u32,
        comes_to: Result<bool, ()>,
    ) -> Result<Arc<bool>, SinkError> {
        let mut turn = shared.turn().await;
        if let Some(answer) = turn.answer(|is_up| *is_up) {
            return answer;
        }
        turn.take();
        *attempts += 1;
        let error = |()| SinkError::new(Cause::Unreachable, format!("attempt {attempts}"));
        turn.keep(comes_to.map(Arc::new).map_err(error))
    }

    #[tokio::test]
    async fn one_connection_serves_all_until_it_is_of_no_use() {
        let (shared, mut attempts) = (Shared::default(), 0);
        for _ in 0..3 {
            let link = link(&shared, &mut attempts, Ok(true)).await;
            assert_eq!((*link.unwrap(), attempts), (true, 1));
        }
        shared.turn().await.take();
        let lost = link(&shared, &mut attempts, Ok(false)).await;
        assert_eq!((*lost.unwrap(), attempts), (false, 2));
        let next = link(&shared, &mut attempts, Ok(true)).await;
        assert_eq!((*next.unwrap(), attempts), (true, 3));
    }

    #[tokio::test]
    async fn a_failure_is_everybodys_answer_for_a_while() {
        let (shared, mut attempts) = (Shared::<bool>::default(), 0);
        for _ in 0..3 {
            let error = link(&shared, &mut attempts, Err(())).await.unwrap_err();
            assert_eq!((error.message.as_str(), attempts), ("attempt 1", 1));
        }
        tokio::time::sleep(RETRY_PAUSE).await;
        assert!(link(&shared, &mut attempts, Ok(true)).await.is_ok());
        // An old failure is forgotten.
        shared.turn().await.take();
        assert!(link(&shared, &mut attempts, Ok(true)).await.is_ok());
        assert_eq!(attempts, 3);
    }
}
