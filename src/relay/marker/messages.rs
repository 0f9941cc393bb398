//! What the marker is told, and what it does at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::prelude::*;
use tokio::sync::oneshot;

use super::{Marker, Work};
use crate::event::ClaimToken;
use crate::relay::claimer::Returned;
use crate::relay::failure::Outcome;
use crate::relay::outcome::{self, Subject};
use crate::relay::supervisor::Stop;
use crate::sink::{Delivery, SinkError};
use crate::store::ClaimedRow;

/// A claimed row, as far as credits and marks need it.
#[derive(Clone, Debug)]
pub struct Held {
    /// Which event.
    pub subject: Subject,
    /// Its bucket.
    pub bucket: u8,
    /// Loaded payload bytes that it holds.
    pub bytes: usize,
    /// The claim it is held under.
    pub token: Arc<ClaimToken>,
}

impl Held {
    /// Of a loaded event.
    pub fn of(delivery: &Delivery) -> Self {
        Self {
            subject: Subject {
                id: delivery.event.id,
                key: delivery.event.key.clone(),
                event_type: Some(delivery.event.event_type.clone()),
            },
            bucket: delivery.event.bucket,
            bytes: delivery.event.payload.len(),
            token: delivery.token.clone(),
        }
    }

    /// Of a row whose payload was not read.
    pub fn of_row(row: &ClaimedRow, token: &Arc<ClaimToken>) -> Self {
        Self {
            subject: Subject {
                id: row.id,
                key: row.key.clone(),
                event_type: None,
            },
            bucket: row.bucket,
            bytes: 0,
            token: token.clone(),
        }
    }

    pub(super) fn id(&self) -> i64 {
        self.subject.id.0
    }
}

/// The broker has these for good.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Confirmed {
    /// In the order in which they were confirmed.
    pub held: Vec<Held>,
}

/// An event was not published, and that is to be recorded with it.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Failed {
    /// The event.
    pub held: Held,
    /// Why.
    pub error: SinkError,
    /// `Retry`, `RetryOrDead` or `Dead`.
    pub outcome: Outcome,
    /// Does it hold back the later events of its aggregate once dead?
    pub holds: bool,
    /// Where a copy of it went before it was given up.
    pub copied_to: Option<Arc<str>>,
    /// Later events of its aggregate in hand, unsent.
    pub later: Vec<Held>,
}

/// Events that wait for one destination, no attempt counted.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Waiting {
    /// The first event of each aggregate.
    pub heads: Vec<Held>,
    /// Later events of their aggregates in hand, unsent.
    pub later: Vec<Held>,
    /// Why the destination takes nothing.
    pub error: SinkError,
    /// Until they may be tried again.
    pub wait: Duration,
}

/// Not published, no attempt counted.
#[derive(Message)]
#[rtype(result = "()")]
pub struct HandBack {
    /// The rows.
    pub held: Vec<Held>,
    /// What became of them, for the log.
    pub why: outcome::Result,
}

/// Not published, and no longer ours.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Dropped {
    /// The rows.
    pub held: Vec<Held>,
}

/// Answered when everything told so far is recorded.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Flush;

/// Who gets the credits back. Told once, since claimer and marker know each other.
#[derive(Message)]
#[rtype(result = "()")]
pub struct ReturnTo(pub Recipient<Returned>);

impl Handler<ReturnTo> for Marker {
    type Result = ();

    fn handle(&mut self, ReturnTo(claimer): ReturnTo, _: &mut Self::Context) {
        self.claimer = Some(claimer);
    }
}

impl Handler<Confirmed> for Marker {
    type Result = ();

    fn handle(&mut self, confirmed: Confirmed, context: &mut Self::Context) {
        self.confirmed_at.get_or_insert_with(Instant::now);
        self.confirmed.extend(confirmed.held);
        self.step(context);
    }
}

impl Handler<Failed> for Marker {
    type Result = ();

    fn handle(&mut self, failed: Failed, context: &mut Self::Context) {
        self.work.push_back(Work::Fail(failed));
        self.step(context);
    }
}

impl Handler<Waiting> for Marker {
    type Result = ();

    fn handle(&mut self, waiting: Waiting, context: &mut Self::Context) {
        self.work.push_back(Work::Wait(waiting));
        self.step(context);
    }
}

impl Handler<HandBack> for Marker {
    type Result = ();

    fn handle(&mut self, back: HandBack, context: &mut Self::Context) {
        self.work.push_back(Work::Release(back.held, back.why));
        self.step(context);
    }
}

impl Handler<Dropped> for Marker {
    type Result = ();

    fn handle(&mut self, dropped: Dropped, _: &mut Self::Context) {
        self.tell(&dropped.held, &outcome::Result::LeaseLost);
        self.return_rows(&dropped.held, None);
    }
}

impl Handler<Flush> for Marker {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, _: Flush, context: &mut Self::Context) -> Self::Result {
        let (answer, done) = oneshot::channel();
        self.flushing.push(answer);
        // Whoever asks is about to give the rows away: what can be recorded before spares a repeat.
        self.flush_asked = Instant::now();
        if let Some(pause) = self.pausing.take() {
            context.cancel_future(pause);
            self.busy = false;
        }
        self.step(context);
        Box::pin(async { drop(done.await) })
    }
}

impl Handler<Stop> for Marker {
    type Result = ();

    fn handle(&mut self, _: Stop, context: &mut Self::Context) {
        self.stopping = true;
        context.stop();
    }
}
