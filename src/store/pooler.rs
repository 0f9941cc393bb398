//! Poolers: does a connection of ours keep one server session, or one for a transaction at a time?
//!
//! In transaction mode nothing that belongs to a session may be relied on: no advisory lock, no SET,
//! no LISTEN, no prepared statement. Taking a direct connection for a pooled one would cost speed,
//! the other way round would lose what was set: so the question is settled before the first statement.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::OnceCell;
use tokio_postgres::{Client, SimpleQueryMessage};

use super::StoreError;
use super::connect::{Connector, in_time};
use crate::config::PoolerSetting;

/// Other clients of the pooler may take the very session that is looked for: look more than once.
const ROUNDS: usize = 3;

/// How long a connection of ours keeps its server session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// As long as it lives: a direct connection, or a pooler in session mode.
    Session,
    /// For one transaction.
    Transaction,
}

/// What is known of the pooler.
#[derive(Debug)]
pub(super) struct Pooler {
    setting: PoolerSetting,
    asked: OnceCell<Pooling>,
    /// A statement failed as it only can behind a pooler.
    betrayed: AtomicBool,
}

impl Pooler {
    pub(super) fn new(setting: PoolerSetting) -> Self {
        Self {
            setting,
            asked: OnceCell::new(),
            betrayed: AtomicBool::new(false),
        }
    }

    /// What is known without asking; none yet means that nothing was asked.
    pub(super) fn known(&self) -> Option<Pooling> {
        match self.setting {
            PoolerSetting::None => Some(Pooling::Session),
            PoolerSetting::Transaction => Some(Pooling::Transaction),
            PoolerSetting::Auto if self.betrayed.load(Ordering::Acquire) => {
                Some(Pooling::Transaction)
            }
            PoolerSetting::Auto => self.asked.get().copied(),
        }
    }

    /// Asks, unless it is known.
    pub(super) async fn find(&self, connector: &Connector) -> Result<Pooling, StoreError> {
        if let Some(known) = self.known() {
            return Ok(known);
        }
        let found = self.asked.get_or_try_init(|| ask(connector)).await?;
        Ok(*found)
    }

    /// Learns from an error: prepared statements do not vanish from a session of one's own.
    pub(super) fn learn(&self, error: &StoreError) {
        if error.is_of_pooler()
            && self.known() == Some(Pooling::Session)
            && self.setting == PoolerSetting::Auto
            && !self.betrayed.swap(true, Ordering::AcqRel)
        {
            tracing::warn!(%error, "prepared statements do not stay: there is a connection pooler in transaction mode");
        }
    }
}

/// One connection sets a word; another, which never does, looks for any; the first looks for its own.
/// If the second finds one, or the first does not, they share server sessions: on direct connections
/// neither can be. A pooler hands out the session used last, or the one used longest ago: hence the
/// growing number of looks. Nobody waits with a session in hand: others may be asking, too.
async fn ask(connector: &Connector) -> Result<Pooling, StoreError> {
    let (setter, _) = connector.bare(|_| {}).await?;
    let (other, _) = connector.bare(|_| {}).await?;
    let mut shared = false;
    for round in 1..=ROUNDS {
        let word = format!("{:016x}", rand::random::<u64>());
        in_time(setter.batch_execute(&format!("SET bellwire.probe = '{word}'"))).await?;
        for _ in 0..round {
            // Once reset, it is empty.
            shared |= look(&other).await?.is_some_and(|found| !found.is_empty());
        }
        shared |= look(&setter).await?.as_deref() != Some(&word);
        if shared {
            // From where it is likely to be: the session serves others.
            in_time(other.batch_execute("RESET bellwire.probe")).await?;
            tracing::debug!("the database is reached through a pooler in transaction mode");
            return Ok(Pooling::Transaction);
        }
    }
    Ok(Pooling::Session)
}

/// In a transaction and by the simple protocol, which leaves nothing behind.
async fn look(client: &Client) -> Result<Option<String>, StoreError> {
    let answer = in_time(async {
        let (begun, answer, ended) = futures_util::join!(
            client.batch_execute("BEGIN"),
            client.simple_query("SELECT current_setting('bellwire.probe', true)"),
            client.batch_execute("ROLLBACK"),
        );
        begun?;
        let answer = answer?;
        ended?;
        Ok(answer)
    })
    .await
    .map_err(without_transactions)?;
    Ok(answer.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    }))
}

fn without_transactions(error: StoreError) -> StoreError {
    match error {
        StoreError::Refused { message, .. } if message.contains("statement pooling mode") => {
            StoreError::Shape(
                "database.url leads to a connection pooler in statement mode, which allows no \
                 transactions: set it to transaction or session mode, or give a direct connection"
                    .into(),
            )
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(setting: PoolerSetting, pooling: Pooling) -> Pooler {
        let pooler = Pooler::new(setting);
        pooler.asked.set(pooling).unwrap();
        pooler
    }

    fn refused(code: &str) -> StoreError {
        StoreError::Refused {
            code: code.into(),
            message: String::new(),
        }
    }

    #[test]
    fn vanished_statements_betray_a_pooler_and_other_errors_do_not() {
        let pooler = found(PoolerSetting::Auto, Pooling::Session);
        for code in ["42P01", "25006", "57P01"] {
            pooler.learn(&refused(code));
        }
        assert_eq!(pooler.known(), Some(Pooling::Session));
        pooler.learn(&refused("26000"));
        assert_eq!(pooler.known(), Some(Pooling::Transaction));
    }

    #[test]
    fn what_is_configured_is_neither_asked_nor_learned() {
        let pooler = Pooler::new(PoolerSetting::None);
        pooler.learn(&refused("42P05"));
        assert_eq!(pooler.known(), Some(Pooling::Session));
        let pooler = Pooler::new(PoolerSetting::Transaction);
        assert_eq!(pooler.known(), Some(Pooling::Transaction));
        assert_eq!(Pooler::new(PoolerSetting::Auto).known(), None);
    }
}
