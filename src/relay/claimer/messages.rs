//! What the claimer is told, and what it does at once.

use std::time::{Duration, Instant};

use actix::prelude::*;
use tokio::sync::oneshot;

use super::{Claimer, WATCH, WATCH_AFTER_WAKE};
use crate::metrics;
use crate::relay::doorbell::{AWAKE, Doorbell};

/// A hint that there may be something to claim.
#[derive(Clone, Copy, Debug, Default, Message)]
#[rtype(result = "()")]
pub struct Wake {
    /// Shares may have changed, too.
    pub peers: bool,
    /// A peer keeps writers from ringing.
    pub awake: bool,
    /// Buckets in which parked events may go by now; bit 0 stands for bucket 0.
    pub freed: u64,
}

/// Can events be published now?
#[derive(Message)]
#[rtype(result = "()")]
pub struct Ready(pub bool);

/// Rows that left our hands, whatever became of them.
#[derive(Default, Message)]
#[rtype(result = "()")]
pub struct Returned {
    /// The bucket of each.
    pub buckets: Vec<u8>,
    /// Loaded payload bytes that were freed.
    pub bytes: usize,
    /// A row among them is due again after this.
    pub due_in: Option<Duration>,
}

/// Claim no more; answered when nothing claimed is left here.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Drain;

/// End the token and free the buckets; answered when done, or when it cannot be.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Leave;

/// The session's connection has ended.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct SessionLost {
    pub(super) token: i32,
    pub(super) reason: String,
}

/// How does it stand?
#[derive(Message)]
#[rtype(result = "View")]
pub struct Observe;

/// How it stands.
#[derive(Clone, Debug, Default, MessageResponse, serde::Serialize)]
pub struct View {
    /// Name of the present token, none without a session.
    pub token: Option<String>,
    /// Buckets owned, of 64.
    pub buckets: usize,
    /// Live peers.
    pub peers: usize,
    /// Rows claimed and not yet returned.
    pub in_hand: usize,
    /// Why the database cannot be used, while it cannot.
    pub trouble: Option<String>,
}

/// Stop without any ceremony: the generation is being rebuilt.
#[derive(Message)]
#[rtype(result = "Vec<i32>")]
pub struct Abandon;

impl Handler<Wake> for Claimer {
    type Result = ();

    fn handle(&mut self, wake: Wake, context: &mut Self::Context) {
        let now = Instant::now();
        self.rounds.wake();
        self.widen();
        self.freed(wake.freed);
        if wake.awake {
            self.doorbell.kept_awake(AWAKE, now);
        }
        self.watch_until = now + WATCH_AFTER_WAKE;
        let has_peers = self
            .tended
            .as_ref()
            .is_some_and(|tended| tended.peers + tended.dead_peers.len() > 0);
        if wake.peers {
            self.tend_due = true;
        } else if has_peers {
            // Claim first: a look at the peers is for later, but not for as late as the tick.
            self.tick_at = self.tick_at.min((self.tended_at + WATCH).max(now));
        }
        self.step(context);
    }
}

impl Handler<Ready> for Claimer {
    type Result = ();

    fn handle(&mut self, Ready(ready): Ready, context: &mut Self::Context) {
        if ready == self.ready {
            return;
        }
        self.ready = ready;
        self.tend_due = true;
        if ready {
            self.ring_due = true;
            self.rounds.wake();
            // What was written meanwhile may not have rung.
            self.doorbell = Doorbell::new(Instant::now());
        } else {
            self.quiet_due |= self.doorbell.stop_pushing();
            self.hand_back_unloaded();
        }
        self.step(context);
    }
}

impl Handler<Returned> for Claimer {
    type Result = ();

    fn handle(&mut self, returned: Returned, context: &mut Self::Context) {
        self.loaded_bytes = self.loaded_bytes.saturating_sub(returned.bytes);
        self.rounds.returned(&returned.buckets);
        ::metrics::gauge!(metrics::IN_HAND).set(self.rounds.in_hand() as f64);
        if let Some(wait) = returned.due_in {
            self.due_within(wait);
        }
        self.step(context);
    }
}

impl Handler<SessionLost> for Claimer {
    type Result = ();

    fn handle(&mut self, lost: SessionLost, context: &mut Self::Context) {
        if self
            .session
            .as_ref()
            .is_some_and(|session| session.token().number() == lost.token)
        {
            self.lose(&format!("session lost: {}", lost.reason), context);
        }
        self.step(context);
    }
}

impl Handler<Drain> for Claimer {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, _: Drain, context: &mut Self::Context) -> Self::Result {
        let (answer, done) = oneshot::channel();
        self.drained.get_or_insert_default().push(answer);
        self.quiet_due |= self.doorbell.stop_pushing();
        self.hand_back_unloaded();
        self.step(context);
        Box::pin(async { drop(done.await) })
    }
}

impl Handler<Leave> for Claimer {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, _: Leave, context: &mut Self::Context) -> Self::Result {
        let (answer, done) = oneshot::channel();
        self.leave = Some(answer);
        self.step(context);
        Box::pin(async { drop(done.await) })
    }
}

impl Handler<Observe> for Claimer {
    type Result = View;

    fn handle(&mut self, _: Observe, _: &mut Self::Context) -> View {
        View {
            token: self
                .session
                .as_ref()
                .map(|session| session.token().name().to_owned()),
            buckets: self.owned.len(),
            peers: self.tended.as_ref().map_or(0, |tended| tended.peers),
            in_hand: self.rounds.in_hand(),
            trouble: self.trouble.clone(),
        }
    }
}

impl Handler<Abandon> for Claimer {
    type Result = Vec<i32>;

    /// Answers the tokens that the next generation should take over.
    fn handle(&mut self, _: Abandon, context: &mut Self::Context) -> Vec<i32> {
        self.stopping = true;
        let mut tokens = std::mem::take(&mut self.old_tokens);
        if let Some(session) = self.session.take() {
            session.token().void();
            tokens.push(session.token().number());
        }
        context.stop();
        tokens
    }
}
