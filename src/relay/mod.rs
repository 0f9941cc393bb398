//! The relay: a pipeline of actors from NOTIFY to mark.
//!
//! ```text
//!                       PostgreSQL                                     broker
//!      NOTIFY │         ▲ heartbeat, claim      ▲ mark                   ▲ │
//!             ▼         │ load                  │ fail, release          │ ▼ confirm
//!        ┌──────────┐  ┌┴────────┐ Publish  ┌───┴───┐           ┌────────┴─────────┐
//!        │ listener │─▶│ claimer │─────────────────────────────▶│ publisher 0..P-1 │
//!        └──────────┘  └─────────┘          └───────┘           └──────────────────┘
//!            Wake           ▲ Returned ◀─── marker ◀── Confirmed, Failed, │
//!         (a hint)          │  (credits)               HandBack, Dropped ─┘
//!                      ┌────┴───────┐
//!                      │ supervisor │ builds all, breaker (Ready), lag, the end (Drain)
//!                      └────────────┘
//! ```
//!
//! **Credits, not mailboxes.** The claimer has `partitions × window × 2` credits. Each claimed row
//! takes one and gives it back when the marker has recorded what became of it, so no mailbox can
//! hold more than that.
//!
//! **Order.** An aggregate hashes to a bucket, a bucket to a partition, a partition has one publisher,
//! and that has at most one event of an aggregate unconfirmed. The database hands out the unbroken
//! prefix of an aggregate, and nothing of it while any of it is in hand (see [`crate::store`]).
//!
//! **Authority.** Every claimed row travels with its [`crate::event::ClaimToken`]; once that is void,
//! nothing is sent under it any more.

pub mod supervisor;
mod generation;
mod upkeep;
pub mod listener;
pub mod claimer;
pub mod rounds;
pub mod publisher;
pub mod partition;
pub mod failure;
pub mod outcome;
pub mod marker;
pub mod breaker;
pub mod circuits;

use std::sync::Arc;

use actix::prelude::*;
use tokio::sync::oneshot;

use crate::alert::Alerter;
use crate::config::{Config, ConfigError};
use crate::sink::Sink;
use crate::store::Store;

use supervisor::{Ending, Supervisor};

/// A running relay.
pub struct Relay {
    supervisor: Addr<Supervisor>,
    ended: oneshot::Receiver<Ending>,
}

impl Relay {
    /// Starts a relay on the present actix system. `once`: one pass over what is due, then the end.
    ///
    /// # Errors
    /// Names the route that is wrong.
    pub fn start(
        store: Store,
        config: Arc<Config>,
        replica: String,
        (sink, alerter): (Arc<dyn Sink>, Alerter),
        once: bool,
    ) -> Result<Self, ConfigError> {
        let (ended_sender, ended) = oneshot::channel();
        let supervisor =
            Supervisor::new(store, config, replica, once, (sink, alerter), ended_sender)?.start();
        Ok(Self { supervisor, ended })
    }

    /// For the admin port.
    pub fn supervisor(&self) -> Addr<Supervisor> {
        self.supervisor.clone()
    }

    /// Asks for the orderly end.
    pub fn drain(&self) {
        // The supervisor's mailbox is never full for long, and an ended one needs no drain.
        self.supervisor.try_send(supervisor::Drain).ok();
    }

    /// Waits for the end.
    pub async fn ended(&mut self) -> Ending {
        (&mut self.ended).await.unwrap_or_else(|_| Ending {
            error: Some("the supervisor died".into()),
            ..Ending::default()
        })
    }
}
