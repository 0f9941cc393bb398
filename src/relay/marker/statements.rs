//! The marker's statements, for each token among the rows.

use std::sync::Arc;

use super::{Held, Waiting};
use crate::event::ClaimToken;
use crate::sink::SinkError;
use crate::store::{Store, StoreError};

/// What `last_error` says: the class, then the reason.
pub(super) fn described(error: &SinkError) -> String {
    format!("{}: {}", error.cause.class(), error.message)
}

/// Records a wait for each token among the rows; answers the rows that somebody holds locked.
pub(super) async fn waited(store: &Store, waiting: &Waiting) -> Result<Vec<i64>, StoreError> {
    let mut locked = Vec::new();
    let text = described(&waiting.error);
    let mut tokens: Vec<&Arc<ClaimToken>> = Vec::new();
    for held in &waiting.heads {
        if !tokens.iter().any(|token| Arc::ptr_eq(token, &held.token)) {
            tokens.push(&held.token);
        }
    }
    for token in tokens {
        let of_token = |held: &[Held]| -> Vec<i64> {
            held.iter()
                .filter(|held| Arc::ptr_eq(&held.token, token))
                .map(Held::id)
                .collect()
        };
        let (heads, later) = (of_token(&waiting.heads), of_token(&waiting.later));
        let done = store
            .mark_waiting((&heads, &later), token.name(), waiting.wait, &text)
            .await?;
        if done.len() < heads.len() + later.len() {
            let missed: Vec<i64> = heads
                .into_iter()
                .chain(later)
                .filter(|id| !done.contains(id))
                .collect();
            locked.extend(store.still_claimed(&missed, token.name()).await?);
        }
    }
    Ok(locked)
}

#[derive(Clone, Copy)]
pub(super) enum Statement {
    Published,
    Release,
}

pub(super) struct Reached {
    pub(super) done: Vec<i64>,
    pub(super) locked: Vec<i64>,
}

/// Runs the statement for each token among the rows; what it missed is asked for.
pub(super) async fn reached(
    store: &Store,
    held: &[Held],
    statement: Statement,
) -> Result<Reached, StoreError> {
    let mut reached = Reached {
        done: Vec::with_capacity(held.len()),
        locked: Vec::new(),
    };
    for same_token in held.chunk_by(|one, next| Arc::ptr_eq(&one.token, &next.token)) {
        let Some(Held { token, .. }) = same_token.first() else {
            continue;
        };
        let token = token.name();
        let ids: Vec<i64> = same_token.iter().map(Held::id).collect();
        let done = match statement {
            Statement::Published => store.mark_published(&ids, token).await?,
            Statement::Release => store.release(&ids, token).await?,
        };
        if done.len() < ids.len() {
            let missed: Vec<i64> = ids.into_iter().filter(|id| !done.contains(id)).collect();
            reached
                .locked
                .extend(store.still_claimed(&missed, token).await?);
        }
        reached.done.extend(done);
    }
    // Looked up by id for each row below.
    reached.done.sort_unstable();
    Ok(reached)
}
