//! Which confirms are worth believing. Pure: no I/O, no clock.
//!
//! The trap: RabbitMQ returns an unroutable message **before** it acknowledges it, and lapin keeps
//! the returned messages of a channel in one FIFO, handing its head to whichever confirm resolves
//! next. So a confirm may carry a neighbour's return, and the confirm of an unroutable message
//! may carry none.
//!
//! What can be relied on (lapin 4.12: `returned_messages.rs`, `acknowledgement.rs`; both run on the
//! connection's one I/O thread):
//! - A message's return enters the FIFO before its own confirm resolves.
//! - A confirm that carries nothing resolved while the FIFO was empty. Every earlier return had
//!   then been handed to a confirm that resolved **before** it.
//! - (from [`super::in_flight`]) What resolved before something that pass `n` observed is observed
//!   by the end of pass `n + 1`.
//!
//! Hence the rules, applied at the end of each pass:
//! - Returned is who has its own message id among all returns seen.
//! - A confirm that carried nothing, observed in pass `n`, is believed at the end of pass `n + 1`.
//! - A confirm that carried a neighbour's return, observed in pass `n`, waits for one that carried
//!   nothing and resolved later, i.e. was observed in pass `n + 2` or after; that one's rule then
//!   speaks for both.
//! - Once nothing is outstanding every return has been seen: each popped return needs a confirm,
//!   and there are never fewer confirms than returns left.
//! - What cannot be told apart (a return without a known message id, or whose id several events in
//!   flight share) is doubtful, never a success: a repeat is allowed, a loss is not.

use std::collections::HashMap;
use std::sync::Arc;

/// What became of a confirmed message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Acknowledged, and not returned.
    Published,
    /// Refused, and not returned.
    Nacked,
    /// Returned, with the broker's reason.
    Returned(Arc<str>),
    /// May have been returned.
    Doubtful,
}

/// A returned message, as far as it matters.
#[derive(Debug)]
pub(super) struct Return {
    /// Message id of the returned message, if it has one.
    pub(super) message_id: Option<String>,
    /// The broker's reason.
    pub(super) reason: String,
}

/// A confirm whose verdict is still open.
#[derive(Debug)]
struct Confirmed<T> {
    item: T,
    id: Arc<str>,
    ack: bool,
    pass: u64,
    carried: bool,
}

/// What is known under one message id.
#[derive(Debug, Default)]
struct Known {
    /// Messages under this id, sent and without a verdict. More than one is the user's doing
    /// (`event_id` used twice).
    undecided: usize,
    returned: Option<Arc<str>>,
    /// Several messages were undecided when one of them was returned.
    ambiguous: bool,
}

/// The book of one channel. `T` is whatever the caller wants back with the verdict.
#[derive(Debug)]
pub(super) struct Verdicts<T> {
    known: HashMap<Arc<str>, Known>,
    confirmed: Vec<Confirmed<T>>,
    outstanding: usize,
    pass: u64,
    /// A confirm that carried nothing was observed in the pass under way.
    bare_now: bool,
    /// The latest finished pass in which one was observed.
    bare_pass: Option<u64>,
    stray: bool,
}

impl<T> Verdicts<T> {
    pub(super) fn new() -> Self {
        Self {
            known: HashMap::new(),
            confirmed: Vec::new(),
            outstanding: 0,
            pass: 0,
            bare_now: false,
            bare_pass: None,
            stray: false,
        }
    }

    /// A message was handed to the channel.
    pub(super) fn sent(&mut self, id: Arc<str>) {
        self.outstanding += 1;
        let known = self.known.entry(id).or_default();
        known.undecided += 1;
        known.ambiguous |= known.returned.is_some();
    }

    /// A message's confirm was observed in the pass under way.
    pub(super) fn confirmed(&mut self, item: T, id: Arc<str>, ack: bool, carried: Option<Return>) {
        self.outstanding -= 1;
        self.bare_now |= carried.is_none();
        self.confirmed.push(Confirmed {
            item,
            id,
            ack,
            pass: self.pass,
            carried: carried.is_some(),
        });
        if let Some(carried) = carried {
            self.returned(carried);
        }
    }

    fn returned(&mut self, carried: Return) {
        let known = carried
            .message_id
            .and_then(|id| self.known.get_mut(id.as_str()));
        match known {
            Some(known) => {
                known.ambiguous |= known.undecided != 1;
                known.returned = Some(carried.reason.into());
            }
            None => self.stray = true,
        }
    }

    /// A return was seen that belongs to no message of this channel: the caller must give the
    /// channel up, since any confirm may be the one it belongs to.
    pub(super) fn stray(&self) -> bool {
        self.stray
    }

    /// Nothing awaits a confirm or a verdict.
    pub(super) fn is_idle(&self) -> bool {
        self.outstanding == 0 && self.confirmed.is_empty()
    }

    /// Another pass will bring verdicts, even if nothing new is observed in it.
    pub(super) fn owed(&self) -> bool {
        // Of the confirms left after a pass, those that carried nothing are of that pass.
        self.confirmed.iter().any(|confirmed| !confirmed.carried) || self.bare_pass_is_fresh()
    }

    fn bare_pass_is_fresh(&self) -> bool {
        !self.confirmed.is_empty() && self.bare_pass == self.pass.checked_sub(1)
    }

    /// Ends a pass: everything that was ready has been reported. Appends the verdicts reached.
    pub(super) fn end_pass(&mut self, verdicts: &mut Vec<(T, Verdict)>) {
        if !self.confirmed.is_empty() {
            let complete = self.outstanding == 0;
            self.decide(complete, verdicts);
        }
        if self.bare_now {
            self.bare_pass = Some(self.pass);
            self.bare_now = false;
        }
        self.pass += 1;
    }

    /// Ends the last pass and the channel: no confirm will be observed any more. Whatever is not
    /// certain by now is doubtful.
    pub(super) fn end(mut self) -> Vec<(T, Verdict)> {
        let mut verdicts = Vec::new();
        self.end_pass(&mut verdicts);
        for confirmed in std::mem::take(&mut self.confirmed) {
            let verdict = match self.known.get(&confirmed.id) {
                Some(known) if !known.ambiguous => known.returned.clone(),
                _ => None,
            };
            let verdict = verdict.map_or(Verdict::Doubtful, Verdict::Returned);
            verdicts.push((confirmed.item, verdict));
        }
        verdicts
    }

    fn decide(&mut self, complete: bool, verdicts: &mut Vec<(T, Verdict)>) {
        if self.stray {
            return;
        }
        let (pass, bare_pass) = (self.pass, self.bare_pass);
        let known = &mut self.known;
        let ripe = |confirmed: &mut Confirmed<T>| {
            let returned = known
                .get(&confirmed.id)
                .is_some_and(|known| known.returned.is_some());
            returned
                || complete
                || if confirmed.carried {
                    bare_pass.is_some_and(|bare| bare >= confirmed.pass + 2)
                } else {
                    pass > confirmed.pass
                }
        };
        let ripe: Vec<_> = self.confirmed.extract_if(.., ripe).collect();
        for confirmed in ripe {
            let verdict = Self::verdict(&mut self.known, &confirmed);
            verdicts.push((confirmed.item, verdict));
        }
    }

    /// Strikes the message from the book.
    fn verdict(known: &mut HashMap<Arc<str>, Known>, confirmed: &Confirmed<T>) -> Verdict {
        let entry = known
            .get_mut(&confirmed.id)
            .expect("a confirmed message was sent, and is struck only once");
        let verdict = match &entry.returned {
            Some(_) if entry.ambiguous => Verdict::Doubtful,
            Some(reason) => Verdict::Returned(reason.clone()),
            None if confirmed.ack => Verdict::Published,
            None => Verdict::Nacked,
        };
        entry.undecided -= 1;
        if entry.undecided == 0 {
            known.remove(&confirmed.id);
        }
        verdict
    }
}

#[cfg(test)]
#[path = "verdicts_tests.rs"]
mod tests;
