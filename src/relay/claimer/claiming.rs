//! The claim, and what was claimed on its way to the publishers.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::prelude::*;
use backoff::backoff::Backoff as _;

use super::{Claimer, LONGEST_PAUSE};
use crate::event::{ClaimToken, OutboxEvent};
use crate::metrics;
use crate::relay::failure::{Cause, Outcome};
use crate::relay::marker::{Failed, HandBack, Held};
use crate::relay::outcome;
use crate::relay::partition::partition_of;
use crate::relay::publisher::Publish;
use crate::sink::{Delivery, SinkError};
use crate::store::{ClaimAnswer, ClaimRequest, ClaimedRow, Session, StoreError};

/// A claim takes a few milliseconds; one that takes longer may have a plan from a smaller table.
const SLOW_CLAIM: Duration = Duration::from_millis(25);
/// On a machine that is simply slow, plans are not remade all the time.
const REPLAN_PAUSE: Duration = Duration::from_secs(1);
/// Before a row that somebody holds locked is tried again.
pub(super) const LOCKED_PAUSE: Duration = Duration::from_millis(250);
/// Payload bytes read in one piece, as far as they are known before.
const PIECE_BYTES: usize = 1 << 20;
/// From this size on PostgreSQL may have compressed a payload
/// (<https://www.postgresql.org/docs/current/storage-toast.html>), ...
const COMPRESSED_FROM: usize = 2_000;
/// ... mostly not by more than this.
const COMPRESSED_BY: usize = 8;
/// Rows read in one piece.
const PIECE_ROWS: usize = 500;
/// Loaded payload in hand beyond which no more is read.
const LOADED_BYTES: usize = 16 << 20;

/// How much a payload may take once it is read.
fn expected_bytes(row: &ClaimedRow) -> usize {
    if row.stored_bytes < COMPRESSED_FROM {
        row.stored_bytes
    } else {
        row.stored_bytes.saturating_mul(COMPRESSED_BY)
    }
}

impl Claimer {
    pub(super) fn claim(
        &mut self,
        session: Rc<Session>,
        request: ClaimRequest,
        context: &mut Context<Self>,
    ) {
        let token = session.token().clone();
        let began = Instant::now();
        let asked = request.clone();
        self.run_or(
            context,
            async move { session.claim(&asked).await },
            move |actor, answer| {
                let took = began.elapsed();
                ::metrics::histogram!(metrics::CLAIM_SECONDS).record(took);
                actor.replan_due = took > SLOW_CLAIM && actor.replanned_at.elapsed() > REPLAN_PAUSE;
                actor.claimed(&request, answer, &token);
            },
            |actor| actor.rounds.claim_failed(),
        );
    }

    pub(super) fn claimed(
        &mut self,
        request: &ClaimRequest,
        answer: ClaimAnswer,
        token: &Arc<ClaimToken>,
    ) {
        self.rounds.claimed(request, &answer);
        self.doorbell
            .claimed(answer.rows.len(), answer.cut, Instant::now());
        if answer.beyond {
            self.widen();
        }
        if answer.locked {
            self.locked_at = Some(Instant::now() + LOCKED_PAUSE);
        }
        self.met_aside(&answer.stuck, answer.due_in);
        if !answer.rows.is_empty() {
            ::metrics::counter!(metrics::CLAIMED).increment(answer.rows.len() as u64);
            ::metrics::gauge!(metrics::IN_HAND).set(self.rounds.in_hand() as f64);
        }
        self.to_load
            .extend(answer.rows.into_iter().map(|row| (row, token.clone())));
        if !self.ready || self.drained.is_some() {
            self.hand_back_unloaded();
        }
    }

    /// Reads the next piece of what was claimed, if there is room in memory.
    pub(super) fn load(&mut self, context: &mut Context<Self>) {
        if self.loading || self.loaded_bytes >= LOADED_BYTES {
            return;
        }
        let Some((_, token)) = self.to_load.front() else {
            return;
        };
        let token = token.clone();
        let most = if self.load_singly > 0 { 1 } else { PIECE_ROWS };
        let mut bytes = 0;
        let mut rows = Vec::new();
        while rows.len() < most
            && let Some((row, _)) = self
                .to_load
                .front()
                .filter(|(_, claimed)| Arc::ptr_eq(claimed, &token))
            && (rows.is_empty() || bytes + expected_bytes(row) <= PIECE_BYTES)
        {
            bytes += expected_bytes(row);
            rows.extend(self.to_load.pop_front().map(|(row, _)| row));
        }
        // Of several claims, perhaps: no two of them hold rows of the same aggregate.
        rows.sort_unstable_by_key(|row| row.id);
        self.load_singly = self.load_singly.saturating_sub(rows.len());
        self.loading = true;
        let store = self.store.clone();
        let loaded = async move {
            let loaded = store.load(&rows).await;
            (rows, loaded)
        };
        context.spawn(
            loaded
                .into_actor(self)
                .map(move |(rows, loaded), actor, context| {
                    actor.loading = false;
                    match loaded {
                        Ok(events) => {
                            actor.well();
                            actor.loaded(&rows, events, &token);
                            actor.step(context);
                        }
                        Err(error) => actor.not_loaded(rows, &token, &error, context),
                    }
                }),
        );
    }

    pub(super) fn loaded(
        &mut self,
        rows: &[ClaimedRow],
        events: Vec<OutboxEvent>,
        token: &Arc<ClaimToken>,
    ) {
        if events.len() < rows.len() {
            let mut ids = events.iter().map(|event| event.id).peekable();
            let held: Vec<Held> = rows
                .iter()
                .filter(|row| ids.next_if_eq(&row.id).is_none())
                .map(|row| Held::of_row(row, token))
                .collect();
            tracing::warn!(
                rows = held.len(),
                "claimed rows are gone: deleted by somebody"
            );
            // Handed back all the same: what is gone costs nothing, and what is not must not stay
            // claimed by nobody.
            let why = outcome::Result::LeaseLost;
            self.links.marker.try_send(HandBack { held, why }).ok();
        }
        let partitions = self.settings.partitions;
        let mut batches: BTreeMap<usize, Vec<Delivery>> = BTreeMap::new();
        for event in events {
            self.loaded_bytes += event.payload.len();
            let partition = partition_of(event.bucket, partitions);
            let delivery = self.settings.router.deliver(event, token);
            batches.entry(partition).or_default().push(delivery);
        }
        for (number, publisher) in self.links.publishers.iter().enumerate() {
            if let Some(deliveries) = batches.remove(&number) {
                // Refused only by a publisher that is gone, which takes the whole generation with it.
                publisher.try_send(Publish { deliveries }).ok();
            }
        }
    }

    pub(super) fn not_loaded(
        &mut self,
        rows: Vec<ClaimedRow>,
        token: &Arc<ClaimToken>,
        error: &StoreError,
        context: &mut Context<Self>,
    ) {
        if let [row] = rows.as_slice()
            && error.is_about_data()
        {
            self.undecodable(row, token, error);
            self.step(context);
            return;
        }
        if error.is_about_data() {
            self.load_singly = rows.len();
        } else {
            self.unwell(&error.to_string());
        }
        for row in rows.into_iter().rev() {
            self.to_load.push_front((row, token.clone()));
        }
        if !token.holds() {
            self.drop_void_rows();
        }
        let pause = self.pauses.next_backoff().unwrap_or(LONGEST_PAUSE);
        self.loading = true;
        context.run_later(pause, |actor, context| {
            actor.loading = false;
            actor.step(context);
        });
    }

    /// The server cannot even send it: dead, and nothing else is held up by it.
    pub(super) fn undecodable(
        &self,
        row: &ClaimedRow,
        token: &Arc<ClaimToken>,
        error: &StoreError,
    ) {
        self.links
            .marker
            .try_send(Failed {
                held: Held::of_row(row, token),
                error: SinkError::new(Cause::Undecodable, error.to_string()),
                outcome: Outcome::Dead,
                // Which route it would have taken is not known.
                holds: true,
                copied_to: None,
                later: Vec::new(),
            })
            .ok();
    }

    pub(super) fn hand_back_unloaded(&mut self) {
        self.load_singly = 0;
        let held: Vec<Held> = self
            .to_load
            .drain(..)
            .map(|(row, token)| Held::of_row(&row, &token))
            .collect();
        if !held.is_empty() {
            let why = if self.drained.is_some() {
                outcome::Result::Stopping
            } else {
                outcome::Result::BreakerOpen
            };
            self.links.marker.try_send(HandBack { held, why }).ok();
        }
    }

    pub(super) fn drop_void_rows(&mut self) {
        self.load_singly = 0;
        let mut gone = Vec::new();
        self.to_load.retain(|(row, token)| {
            let holds = token.holds();
            if !holds {
                gone.push(row.bucket);
            }
            holds
        });
        self.rounds.returned(&gone);
    }
}
