//! The sweep: where to look for parked rows that nothing holds any more. The claimer's memory of what it owes to
//! those; what a sweep is for is written in [`crate::store`].
//!
//! A plain value: no I/O, no clock of its own, no actix.
//!
//! Invariants:
//! - A bucket that is asked for is looked through from its first aggregate to its last, in as many statements
//!   as it takes, all of them after it was asked for.
//! - A bucket that becomes ours is looked through: whoever had it before may have owed it that.
//! - A lap, for which nobody rang, takes a tenth of the time at most.

#![expect(
    clippy::indexing_slicing,
    reason = "buckets by number: there is one of each"
)]

use std::time::{Duration, Instant};

use crate::event::BUCKETS;
use crate::store::{SweepAnswer, SweepRequest};

/// Aggregates looked at in one statement: a few milliseconds.
const MOST_VISITS: usize = 512;
/// A lap rests for so many times as long as its statement took.
const REST: u32 = 9;
/// Before a row that somebody holds locked is tried again.
const LOCKED_PAUSE: Duration = Duration::from_secs(1);

/// Every bucket, as one number.
pub const ALL_BUCKETS: u64 = u64::MAX;

/// Why it is looked through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Cause {
    /// To be on the safe side.
    Lap,
    /// Something there was freed, or may have been.
    Freed,
}

#[derive(Clone, Debug, Default)]
struct Bucket {
    owned: bool,
    /// It is being looked through: why, and from where to go on.
    under_way: Option<(Cause, i64)>,
    /// It is to be, from its beginning, after that.
    wanted: Option<Cause>,
    /// It is to be, from then on.
    again_at: Option<Instant>,
}

impl Bucket {
    fn want(&mut self, cause: Cause) {
        if !self.owned {
            return;
        }
        self.wanted = self.wanted.max(Some(cause));
        if let Some((present, _)) = &mut self.under_way {
            *present = cause.max(*present);
        }
    }

    fn begin(&mut self, now: Instant) {
        if self.again_at.take_if(|at| *at <= now).is_some() {
            self.want(Cause::Lap);
        }
        if self.under_way.is_none() {
            self.under_way = self.wanted.take().map(|cause| (cause, i64::MIN));
        }
    }
}

/// See the module's head.
#[derive(Debug)]
pub struct Sweep {
    buckets: Vec<Bucket>,
    /// No statement of a lap before this.
    rest_until: Option<Instant>,
}

impl Default for Sweep {
    /// Owns nothing, owes nothing.
    fn default() -> Self {
        Self {
            buckets: vec![Bucket::default(); usize::from(BUCKETS)],
            rest_until: None,
        }
    }
}

impl Sweep {
    /// The database's word on which buckets are ours. New ones are looked through.
    pub fn set_owned(&mut self, owned: &[u8]) {
        for (number, bucket) in (0..BUCKETS).zip(&mut self.buckets) {
            let ours = owned.contains(&number);
            if !ours {
                *bucket = Bucket::default();
            } else if !bucket.owned {
                bucket.owned = true;
                bucket.want(Cause::Freed);
            }
        }
    }

    /// Something in these buckets was freed; bit 0 stands for bucket 0.
    pub fn freed(&mut self, buckets: u64) {
        for (number, bucket) in self.buckets.iter_mut().enumerate() {
            if buckets >> number & 1 == 1 {
                bucket.want(Cause::Freed);
            }
        }
    }

    /// All buckets are to be looked through, without haste.
    pub fn lap(&mut self) {
        for bucket in &mut self.buckets {
            bucket.want(Cause::Lap);
        }
    }

    /// Somebody held a row of this bucket locked that is to be freed.
    pub fn missed(&mut self, bucket: u8, now: Instant) {
        let bucket = &mut self.buckets[usize::from(bucket)];
        if bucket.owned {
            bucket.again_at.get_or_insert(now + LOCKED_PAUSE);
        }
    }

    /// What to look through now; what was freed before what a lap asks for.
    pub fn next(&mut self, now: Instant) -> Option<SweepRequest> {
        for bucket in &mut self.buckets {
            bucket.begin(now);
        }
        let cause = self.under_way().map(|(_, cause, _)| cause).max()?;
        if cause == Cause::Lap && self.rest_until.is_some_and(|until| now < until) {
            return None;
        }
        let (buckets, starts): (Vec<_>, Vec<_>) = self
            .under_way()
            .filter(|(_, its, _)| *its == cause)
            .map(|(number, _, start)| (i32::from(number), start))
            .unzip();
        let visits = MOST_VISITS.div_ceil(buckets.len());
        Some(SweepRequest {
            buckets,
            starts,
            visits: i32::try_from(visits).unwrap_or(i32::MAX),
        })
    }

    fn under_way(&self) -> impl Iterator<Item = (u8, Cause, i64)> + '_ {
        let numbered = (0..BUCKETS).zip(&self.buckets);
        numbered.filter_map(|(number, bucket)| {
            let (cause, start) = bucket.under_way?;
            Some((number, cause, start))
        })
    }

    /// Takes in what a sweep found that took so long. `request` is what [`Self::next`] asked for.
    pub fn swept(
        &mut self,
        request: &SweepRequest,
        answer: &SweepAnswer,
        took: Duration,
        now: Instant,
    ) {
        for number in &request.buckets {
            let Ok(number) = u8::try_from(*number) else {
                continue;
            };
            let visit = answer.visits.iter().find(|visit| visit.bucket == number);
            let on = visit
                .filter(|visit| visit.visited >= request.visits)
                // After the greatest there is nothing more.
                .and_then(|visit| visit.last.checked_add(1));
            let bucket = &mut self.buckets[usize::from(number)];
            bucket.under_way = bucket.under_way.and_then(|(cause, _)| Some((cause, on?)));
        }
        for bucket in &answer.missed {
            self.missed(*bucket, now);
        }
        self.rest_until = Some(now + took * REST);
    }

    /// Has all been looked through that was asked for?
    pub fn is_done(&self) -> bool {
        let mut buckets = self.buckets.iter();
        buckets.all(|bucket| bucket.under_way.is_none() && bucket.wanted.is_none())
    }

    /// When there is something to do next, unless something else happens; it may be over.
    pub fn next_at(&self) -> Option<Instant> {
        let again = self.buckets.iter().filter_map(|bucket| bucket.again_at);
        let lap = self.rest_until.filter(|_| !self.is_done());
        again.chain(lap).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Visit;

    const MS: Duration = Duration::from_millis(1);

    fn sweep(owned: &[u8]) -> Sweep {
        let mut sweep = Sweep::default();
        sweep.set_owned(owned);
        sweep
    }

    /// Nothing is owed any more.
    fn settled(owned: &[u8], now: Instant) -> Sweep {
        let mut sweep = sweep(owned);
        let request = sweep.next(now).expect("new buckets are looked through");
        assert_eq!(request.buckets.len(), owned.len());
        sweep.swept(&request, &SweepAnswer::default(), MS, now);
        assert_eq!(sweep.next(now), None);
        assert!(sweep.is_done());
        sweep
    }

    fn more(bucket: u8, last: i64, request: &SweepRequest) -> SweepAnswer {
        SweepAnswer {
            visits: vec![Visit {
                bucket,
                last,
                visited: request.visits,
            }],
            ..SweepAnswer::default()
        }
    }

    #[test]
    fn a_bucket_is_looked_through_when_it_becomes_ours_and_only_then() {
        let now = Instant::now();
        let mut sweep = settled(&[3, 4], now);
        sweep.set_owned(&[3, 4, 5]);
        let request = sweep.next(now).expect("the new one");
        assert_eq!((request.buckets, request.starts), (vec![5], vec![i64::MIN]));
        sweep.set_owned(&[3]);
        assert!(sweep.is_done(), "it is no longer ours");
        sweep.freed(ALL_BUCKETS);
        assert_eq!(sweep.next(now).expect("a request").buckets, [3]);
    }

    #[test]
    fn a_bucket_with_more_aggregates_than_visits_is_gone_through_to_its_end() {
        let now = Instant::now();
        let mut sweep = settled(&[3, 4], now);
        sweep.freed(1 << 3);
        let request = sweep.next(now).expect("a request");
        sweep.swept(&request, &more(3, 41, &request), MS, now);
        let request = sweep.next(now).expect("the rest");
        assert_eq!((&request.buckets, &request.starts), (&vec![3], &vec![42]));
        sweep.swept(&request, &more(3, i64::MAX, &request), MS, now);
        assert_eq!(sweep.next(now), None);
    }

    #[test]
    fn what_is_freed_while_its_bucket_is_looked_through_is_not_missed() {
        let now = Instant::now();
        let mut sweep = settled(&[3], now);
        sweep.freed(1 << 3);
        let request = sweep.next(now).expect("a request");
        sweep.freed(1 << 3);
        sweep.swept(&request, &more(3, 41, &request), MS, now);
        let request = sweep.next(now).expect("the rest");
        sweep.swept(&request, &SweepAnswer::default(), MS, now);
        let request = sweep.next(now).expect("once more");
        assert_eq!(request.starts, [i64::MIN]);
        sweep.swept(&request, &SweepAnswer::default(), MS, now);
        assert!(sweep.is_done());
    }

    #[test]
    fn a_statement_that_failed_is_repeated() {
        let now = Instant::now();
        let mut sweep = settled(&[3], now);
        sweep.freed(1 << 3);
        let request = sweep.next(now);
        assert!(request.is_some());
        assert_eq!(sweep.next(now), request);
    }

    #[test]
    fn a_lap_takes_a_tenth_of_the_time_and_what_was_freed_goes_before_it() {
        let now = Instant::now();
        let mut sweep = settled(&[3, 4], now);
        sweep.lap();
        assert_eq!(sweep.next(now), None, "it rests from the last one");
        let later = sweep.next_at().expect("a time");
        assert_eq!(later, now + MS * REST);
        let request = sweep.next(later).expect("the lap");
        assert_eq!(request.buckets, [3, 4]);
        sweep.swept(&request, &more(4, 7, &request), MS * 5, later);
        assert_eq!(sweep.next(later + MS * 44), None);
        sweep.freed(1 << 3);
        let request = sweep.next(later).expect("at once");
        assert_eq!(request.buckets, [3]);
        sweep.swept(&request, &SweepAnswer::default(), MS, later);
        let request = sweep.next(later + MS * REST).expect("the rest of the lap");
        assert_eq!((&request.buckets, &request.starts), (&vec![4], &vec![8]));
        sweep.freed(1 << 4);
        assert!(sweep.next(later).is_some(), "it hurries now");
    }

    #[test]
    fn a_locked_row_is_tried_again_after_a_while() {
        let now = Instant::now();
        let mut sweep = settled(&[3], now);
        sweep.missed(3, now);
        sweep.missed(5, now);
        assert_eq!(sweep.next(now), None);
        assert_eq!(sweep.next_at(), Some(now + LOCKED_PAUSE));
        let request = sweep.next(now + LOCKED_PAUSE).expect("again");
        let missed = SweepAnswer {
            missed: vec![3],
            ..SweepAnswer::default()
        };
        sweep.swept(&request, &missed, MS, now + LOCKED_PAUSE);
        assert!(sweep.is_done());
        assert!(sweep.next_at().is_some(), "and again");
    }
}
