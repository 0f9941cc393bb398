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
//!
//! **The doorbell.** NOTIFY takes a lock of the whole cluster through the commit, so writers ring only
//! while every relay sleeps. The sequence `outbox_awake_until` says until when they need not: the
//! insert trigger notifies only if the database's clock is past it. States of a relay
//! ([`doorbell`]):
//!
//! ```text
//!            many events found: push                    few left: set 0, list writers
//!   asleep ───────────────────────▶ awake (pushes on) ──────────────────────────────▶ listed
//!     ▲ │                              ▲                                               │ │
//!     │ └── a peer pushes ──▶ awake (looks on) ── the peer's time is over: list ──▶ ───┘ │
//!     └───────────────────── all listed have ended, and all buckets were walked since ───┘
//! ```
//!
//! Nothing is missed, because:
//! - *Whoever skips the ring has read the value before it was 0 or over, and holds its lock on the
//!   outbox from before that until its rows can be seen.* So a list of the lock's holders that is
//!   made after the value was set to 0, or was found to be over, has it; or it has ended, and a claim
//!   after the list sees its rows. A relay sleeps only after a walk that followed the end of all in
//!   the list.
//! - *A relay that sleeps while a peer pushes would be missed out.* So the first push rings for the
//!   peers (`awake`), and each of them looks by itself until the time is over, then lists for itself.
//!   The push takes the time after it has set the value: a peer that found the old value over before
//!   that hears the ring, one that looks after that finds the new value.
//! - *A ring may be lost* with a connection. So every new session, of the listener or the claimer,
//!   begins as if a peer had pushed.
//! - *A relay may die* while it keeps writers from ringing. The value is over a moment later; what
//!   it missed is walked by whoever takes its buckets over.
//! - A relay that cannot deliver pushes no more: it sets 0 and rings once, for its peers.
//!
//! The tick is the backstop for what no protocol covers, such as triggers that are disabled.

pub mod supervisor;
mod generation;
pub mod listener;
pub mod claimer;
pub mod rounds;
pub mod doorbell;
pub mod horizon;
pub mod publisher;
pub mod partition;
pub mod failure;
pub mod outcome;
pub mod marker;
pub mod breaker;
pub mod circuits;
mod start;

use std::sync::Arc;

use actix::prelude::*;
use tokio::sync::oneshot;

use crate::alert::Alerter;
use crate::config::{Config, ConfigError};
use crate::sink::Sink;
use crate::store::Store;

use supervisor::{Ending, Supervisor};

pub use start::wait_for_outbox;

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
