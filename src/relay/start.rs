//! Before the first claim: is the database there, and is the outbox what this version works with?

use std::time::Duration;

use crate::config::{Ordering, RelayConfig, WakeSetting};
use crate::store::{SilentTrigger, Store, StoreError};

/// Between tries to reach the database.
const PAUSE: Duration = Duration::from_secs(1);

/// Waits for a database that is away, refuses an outbox that is wrong.
///
/// # Errors
/// Nothing but the table or an operator can mend it; with `once` also: the database is away.
pub async fn wait_for_outbox(
    store: &Store,
    relay: &RelayConfig,
    once: bool,
) -> Result<(), StoreError> {
    let mut logged = false;
    loop {
        match check_outbox(store, relay.ordering).await {
            Ok(silent) => {
                for trigger in silent.iter().filter(|_| relay.wake == WakeSetting::Notify) {
                    let (name, state) = (&trigger.name, trigger.state);
                    tracing::warn!(
                        trigger = name,
                        "trigger is {state}, events wait for the tick"
                    );
                }
                return Ok(());
            }
            Err(error) if once || error.is_fatal_at_start() => return Err(error),
            Err(error) if !logged => {
                logged = true;
                tracing::warn!(%error, "waiting for the database");
            }
            Err(_) => {}
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn check_outbox(store: &Store, ordering: Ordering) -> Result<Vec<SilentTrigger>, StoreError> {
    let silent = store.check_shape().await?;
    if ordering == Ordering::Strict {
        store.check_strict().await?;
    } else if let Some(sequence) = store.id_sequence().await?
        && sequence.cache > 1
    {
        tracing::warn!(
            sequence = sequence.name,
            cache = sequence.cache,
            "sessions draw ids ahead: within an aggregate ids may not follow the order of its writers"
        );
    }
    Ok(silent)
}
