//! One lane: a task that owns a channel, sends deliveries on it and settles them.
//!
//! Invariants:
//! - Every delivery taken from the lane is in exactly one place: `held`, in flight, awaiting its
//!   verdict, or settled. [`Run::wind_up`] empties the middle two whatever happened.
//! - A channel is used until its first failure. Then nothing is sent before all its messages are
//!   settled and it is closed: a late copy cannot overtake, and lapin's bookkeeping of dropped
//!   confirms ends with it.
//! - Settlements of a turn leave as one batch.

use std::pin::Pin;
use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::time::{Instant, Sleep, sleep_until};

use super::channel::{Open, Sent, Whose};
use super::connection::Connector;
use super::fault::{Unconfirmed, tells_why};
use super::guard::Guard;
use super::link::Link;
use super::message::Composer;
use super::verdicts::Verdict;
use crate::event::EventId;
use crate::relay::failure::Cause;
use crate::sink::{Delivery, Lane, Settlement, SinkError};

/// Deliveries sent between two passes over the confirms, and before other tasks get a turn.
const TURN: usize = 128;
/// What the lane needs of its sink.
pub(super) struct Parts<'a> {
    pub(super) connector: &'a Connector,
    pub(super) composer: &'a Composer,
    pub(super) guard: Option<&'a Guard>,
    pub(super) confirm_timeout: Duration,
}

/// Why a channel is given up.
enum Why {
    Fault,
    ConfirmTimeout,
    StrayReturn,
}

/// A lane at work.
pub(super) struct Run<'a> {
    parts: Parts<'a>,
    open: Option<Open>,
    held: Option<Delivery>,
    settlements: Vec<Settlement>,
    verdicts: Vec<(Whose, Verdict)>,
    timer: Pin<Box<Sleep>>,
    armed: bool,
}

impl<'a> Run<'a> {
    pub(super) fn new(parts: Parts<'a>) -> Self {
        Self {
            parts,
            open: None,
            held: None,
            settlements: Vec::new(),
            verdicts: Vec::new(),
            timer: Box::pin(sleep_until(Instant::now())),
            armed: false,
        }
    }

    /// Serves the lane until its deliveries are closed and everything is settled.
    pub(super) async fn serve(mut self, mut lane: Lane) {
        let mut more = true;
        loop {
            self.observe();
            let taken = self.take(&mut lane, &mut more).await;
            self.judge();
            let trouble = self.trouble();
            let again = trouble.is_some();
            if let Some(why) = trouble {
                self.wind_up(why).await;
            }
            if !self.settlements.is_empty() {
                // A publisher that is gone wants no settlements.
                let _ = lane.settled.send(std::mem::take(&mut self.settlements));
            }
            let owed = self.open.as_ref().is_some_and(|open| open.verdicts.owed());
            if taken == TURN || owed || again {
                tokio::task::yield_now().await;
                continue;
            }
            if !more && self.held.is_none() && self.is_idle() {
                break;
            }
            self.wait(&mut lane, &mut more).await;
        }
        if let Some(open) = self.open.take() {
            open.link.close_channel(&open.channel).await;
        }
    }

    fn is_idle(&self) -> bool {
        self.open.as_ref().is_none_or(Open::is_idle)
    }

    /// One pass over the confirms.
    fn observe(&mut self) {
        if let Some(open) = &mut self.open {
            open.observe();
        }
    }

    /// Sends what is waiting, at most a turn's worth.
    async fn take(&mut self, lane: &mut Lane, more: &mut bool) -> usize {
        for taken in 0..TURN {
            let delivery = match self.held.take() {
                Some(held) => held,
                None if !*more => return taken,
                None => match lane.deliveries.try_recv() {
                    Ok(delivery) => delivery,
                    Err(TryRecvError::Empty) => return taken,
                    Err(TryRecvError::Disconnected) => {
                        *more = false;
                        return taken;
                    }
                },
            };
            self.deliver(delivery).await;
            if self.held.is_some() {
                return taken;
            }
        }
        TURN
    }

    /// Sends one, settles it unsent, or holds it until the broken channel is wound up.
    async fn deliver(&mut self, delivery: Delivery) {
        if let Some(open) = &mut self.open
            && !open.is_usable()
        {
            if !open.is_idle() {
                open.broken = true;
                self.held = Some(delivery);
                return;
            }
            self.open = None;
        }
        let id = delivery.event.id;
        if let Err(error) = self.send(delivery).await {
            self.settle(id, Err(error));
        }
    }

    async fn send(&mut self, delivery: Delivery) -> Result<(), SinkError> {
        let message = self.parts.composer.compose(&delivery)?;
        let Delivery {
            event,
            token,
            address,
            ..
        } = delivery;
        if self.open.is_none() {
            let link = self.parts.connector.link().await?;
            if link.is_blocked() {
                return Err(link.blocked_error());
            }
            let channel = link.open_channel().await?;
            self.open = Some(Open::new(link, channel));
        }
        let open = self.open.as_mut().expect("it was opened above");
        let frame_max = open.link.frame_max();
        if message.header_frame > frame_max {
            return Err(SinkError::new(
                Cause::TooLarge,
                format!(
                    "properties and headers take {} bytes, RabbitMQ takes {frame_max} (frame_max)",
                    message.header_frame
                ),
            ));
        }
        if open.link.is_blocked() {
            return Err(open.link.blocked_error());
        }
        if !token.holds() {
            return Err(SinkError::new(Cause::Void, "the claim is void: not sent"));
        }
        let sent = Sent {
            whose: Whose {
                id: event.id,
                exchange: address.destination,
            },
            message_id: message.message_id.clone(),
            at: Instant::now(),
        };
        let deadline = sent.at + self.parts.confirm_timeout;
        #[cfg(feature = "failpoints")]
        crate::failpoint::reached("publish:before", [event.id.0]);
        open.start(sent, message, event.payload.clone());
        #[cfg(feature = "failpoints")]
        crate::failpoint::reached("publish:after", [event.id.0]);
        if !self.armed {
            self.armed = true;
            self.timer.as_mut().reset(deadline);
        }
        Ok(())
    }

    /// Ends the pass: what is certain is settled.
    fn judge(&mut self) {
        let Some(open) = &mut self.open else { return };
        open.verdicts.end_pass(&mut self.verdicts);
        self.settle_verdicts();
    }

    fn settle_verdicts(&mut self) {
        let mut verdicts = std::mem::take(&mut self.verdicts);
        for (Whose { id, exchange }, verdict) in verdicts.drain(..) {
            let result = match verdict {
                Verdict::Published => {
                    if let Some(guard) = self.parts.guard {
                        guard.delivered(&exchange);
                    }
                    Ok(())
                }
                Verdict::Returned(reason) => Err(SinkError::new(Cause::Unroutable, &*reason)),
                Verdict::Nacked => Err(SinkError::new(
                    Cause::Nacked,
                    format!(
                        "a queue behind exchange '{exchange}' refused the message (basic.nack): \
                         full, or not available"
                    ),
                )),
                Verdict::Doubtful => Err(SinkError::new(
                    Cause::ConfirmTimeout,
                    "a returned message could not be told apart from this one, its confirm does \
                     not count",
                )),
            };
            self.settle(id, result);
        }
        self.verdicts = verdicts;
    }

    fn settle(&mut self, id: EventId, result: Result<(), SinkError>) {
        self.settlements.push(Settlement { id, result });
    }

    fn trouble(&mut self) -> Option<Why> {
        let open = self.open.as_mut()?;
        if open.fault.is_some() || open.broken {
            return Some(Why::Fault);
        }
        if open.verdicts.stray() {
            return Some(Why::StrayReturn);
        }
        let deadline = open.first_sent()? + self.parts.confirm_timeout;
        (deadline <= Instant::now()).then_some(Why::ConfirmTimeout)
    }

    async fn wait(&mut self, lane: &mut Lane, more: &mut bool) {
        let Self {
            open, timer, held, ..
        } = self;
        let woken = open.as_ref().map(|open| open.in_flight.woken());
        let woken = OptionFuture::from(woken);
        let may_receive = *more && held.is_none();
        tokio::select! {
            biased;
            Some(()) = woken => {}
            delivery = lane.deliveries.recv(), if may_receive => match delivery {
                Some(delivery) => *held = Some(delivery),
                None => *more = false,
            },
            () = timer, if self.armed => self.rearm(),
        }
    }

    /// The timer is set for the first message in flight and left alone until it fires, so that a
    /// confirm costs no timer.
    fn rearm(&mut self) {
        let first = self.open.as_mut().and_then(Open::first_sent);
        self.armed = first.is_some();
        if let Some(at) = first {
            let deadline = at + self.parts.confirm_timeout;
            self.timer.as_mut().reset(deadline);
        }
    }

    /// Closes the channel and settles all that was sent on it.
    async fn wind_up(&mut self, why: Why) {
        let Some(mut open) = self.open.take() else {
            return;
        };
        self.armed = false;
        if !matches!(why, Why::Fault) {
            self.parts.connector.be_wary();
            open.link.close_channel(&open.channel).await;
        }
        if !open.drain(&mut self.verdicts).await {
            open.link.kill("its channels do not end");
            open.drain(&mut self.verdicts).await;
        }
        open.observe();
        let Open {
            link,
            in_flight,
            verdicts,
            mut failed,
            fault,
            ..
        } = open;
        let mut doubtful = Vec::new();
        for (whose, verdict) in verdicts.end() {
            match verdict {
                Verdict::Doubtful => doubtful.push(whose),
                verdict => self.verdicts.push((whose, verdict)),
            }
        }
        self.settle_verdicts();
        failed.extend(in_flight.abandon());
        let unconfirmed = Unconfirmed {
            on_channel: failed.len() + doubtful.len(),
            // Doubtful ones were confirmed, and so taken off.
            on_connection: link.unconfirmed() + doubtful.len(),
        };
        if link.is_up() {
            link.settled(failed.len());
        }
        for whose in failed.into_iter().map(|sent| sent.whose).chain(doubtful) {
            let error = match why {
                Why::Fault => self.blame(&link, fault.as_ref(), &whose.exchange, unconfirmed),
                Why::ConfirmTimeout => self.timeout_error(),
                Why::StrayReturn => SinkError::new(
                    Cause::ConfirmTimeout,
                    "RabbitMQ returned a message without a known message id: no confirm of this \
                     channel counts",
                ),
            };
            self.settle(whose.id, Err(error.after_sending()));
        }
    }

    fn blame(
        &self,
        link: &Link,
        fault: Option<&lapin::Error>,
        exchange: &str,
        unconfirmed: Unconfirmed,
    ) -> SinkError {
        let place = &self.parts.connector.place;
        if let Some(why) = link.killed() {
            return place.connection_lost(why);
        }
        let fault = fault.filter(|fault| tells_why(fault)).or(link.why());
        match fault {
            Some(fault) => place.closed(fault, exchange, unconfirmed),
            None => place.connection_lost("the channel ended for no known reason"),
        }
    }

    fn timeout_error(&self) -> SinkError {
        let place = &self.parts.connector.place;
        SinkError::new(
            Cause::ConfirmTimeout,
            format!(
                "no confirm from RabbitMQ at {} within {:?}, for this or another message on the \
                 channel",
                place.address, self.parts.confirm_timeout
            ),
        )
    }
}
