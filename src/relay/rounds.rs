//! Rounds: what to claim next. The claimer's memory of its buckets and of what is in hand.
//!
//! A plain value: no I/O, no actix.
//!
//! A *round* visits every bucket of ours from its first aggregate to its last, in as many claims as
//! it takes. Wake-ups are hints: whatever rings during a round asks for one more round after it.
//! Invariants:
//! - Never more in hand than `most_in_hand`, and never more claimed for a partition than it has
//!   room for.
//! - A claim that a limit cut short is gone on with from there, in the same round: every aggregate
//!   has its turn in every round.
//! - A round that left something behind is followed by another: after the next return of rows if an
//!   aggregate was busy, after a pause if a row was locked.
//! - An aggregate is met in a round if it has a row in the walk; those aside are brought back by others
//!   ([`super::sweep`], and the promotion).
//! - A bucket that is being given up is not claimed from.

#![expect(
    clippy::indexing_slicing,
    reason = "buckets and partitions by number: there is one of each"
)]

use std::collections::BTreeMap;

use crate::event::BUCKETS;
use crate::relay::partition::partition_of;
use crate::store::{ClaimAnswer, ClaimRequest};

/// Rows of one aggregate per claim to begin with: one is in flight at a time, so breadth is worth
/// more than depth.
const ROWS_PER_AGGREGATE: usize = 4;
/// With few aggregates waiting, depth is all there is.
const MOST_ROWS_PER_AGGREGATE: usize = 256;
/// Candidates looked at per row wanted: some aggregates have fewer rows than asked for.
const LOOK_AHEAD: usize = 2;
/// Aggregates visited per bucket and claim, at most: bounds a claim in which nothing can go.
const MOST_VISITS: usize = 32;

const ALL: usize = BUCKETS as usize;

/// How many buckets each of `replicas` may own, at most.
pub fn fair_share(replicas: usize) -> usize {
    ALL.div_ceil(replicas.max(1))
}

#[derive(Clone, Debug, Default)]
struct Bucket {
    owned: bool,
    leaving: bool,
    /// Still to be walked in this round.
    open: bool,
    /// Where to go on in this round; none: at the first aggregate.
    cursor: Option<i64>,
    in_hand: usize,
}

/// See the module's head.
#[derive(Debug)]
pub struct Rounds {
    partitions: usize,
    batch_size: usize,
    most_in_hand: usize,
    buckets: Vec<Bucket>,
    in_hand: usize,
    rows_per_aggregate: usize,
    wanted: bool,
    busy_left: bool,
    /// Rows were returned while the last claim was under way: what it found busy may be free by now.
    returned_meanwhile: bool,
    visits: usize,
}

impl Rounds {
    /// Owns nothing, has nothing in hand.
    pub fn new(partitions: usize, batch_size: usize, most_in_hand: usize) -> Self {
        Self {
            partitions,
            batch_size,
            most_in_hand,
            buckets: vec![Bucket::default(); ALL],
            in_hand: 0,
            rows_per_aggregate: ROWS_PER_AGGREGATE,
            wanted: false,
            busy_left: false,
            returned_meanwhile: false,
            visits: 1,
        }
    }

    /// Asks for a round after the present one.
    pub fn wake(&mut self) {
        self.wanted = true;
    }

    /// The database's word on which buckets are ours. New ones are walked at once.
    pub fn set_owned(&mut self, owned: &[u8]) {
        for (number, bucket) in self.buckets.iter_mut().enumerate() {
            let ours = owned.iter().any(|ours| usize::from(*ours) == number);
            if ours && !bucket.owned {
                bucket.open = true;
                bucket.cursor = None;
            }
            if !ours {
                bucket.open = false;
                bucket.leaving = false;
            }
            bucket.owned = ours;
        }
    }

    /// How many buckets we own and mean to keep.
    pub fn kept(&self) -> usize {
        self.buckets
            .iter()
            .filter(|bucket| bucket.owned && !bucket.leaving)
            .count()
    }

    /// Stops claiming in some buckets, those with the least in hand first, until `keep` are left.
    pub fn leave_down_to(&mut self, keep: usize) {
        let mut candidates: Vec<usize> = (0..ALL)
            .filter(|number| self.buckets[*number].owned && !self.buckets[*number].leaving)
            .collect();
        candidates.sort_by_key(|number| self.buckets[*number].in_hand);
        let surplus = candidates.len().saturating_sub(keep);
        for number in &candidates[..surplus] {
            self.buckets[*number].leaving = true;
            self.buckets[*number].open = false;
        }
    }

    /// Takes back the decision to leave, as far as `keep` allows.
    pub fn stay_up_to(&mut self, keep: usize) {
        let mut missing = keep.saturating_sub(self.kept());
        for bucket in &mut self.buckets {
            if missing > 0 && bucket.leaving {
                bucket.leaving = false;
                bucket.open = true;
                bucket.cursor = None;
                missing -= 1;
            }
        }
    }

    /// Buckets that can be given up now: leaving, with nothing in hand.
    pub fn given_up(&self) -> Vec<u8> {
        (0..BUCKETS)
            .filter(|number| {
                let bucket = &self.buckets[usize::from(*number)];
                bucket.owned && bucket.leaving && bucket.in_hand == 0
            })
            .collect()
    }

    /// Is there nothing in hand, nothing asked for and nothing left to walk?
    pub fn is_idle(&self) -> bool {
        self.in_hand == 0 && !self.wanted && !self.buckets.iter().any(|bucket| bucket.open)
    }

    /// Has everything been walked that was asked for?
    pub fn is_walked(&self) -> bool {
        !self.wanted && !self.buckets.iter().any(|bucket| bucket.open)
    }

    /// Rows in hand.
    pub fn in_hand(&self) -> usize {
        self.in_hand
    }

    /// The next claim, if there is anything to claim and room for it.
    pub fn next_claim(&mut self) -> Option<ClaimRequest> {
        if !self.buckets.iter().any(|bucket| bucket.open) && self.wanted {
            self.wanted = false;
            self.busy_left = false;
            for bucket in &mut self.buckets {
                bucket.open = bucket.owned && !bucket.leaving;
                bucket.cursor = None;
            }
        }
        let limit = self
            .batch_size
            .min(self.most_in_hand.saturating_sub(self.in_hand));
        if limit == 0 {
            return None;
        }
        let rooms = self.rooms();
        let walked: Vec<usize> = (0..ALL)
            .filter(|number| self.buckets[*number].open && rooms[self.partition(*number)] > 0)
            .collect();
        if walked.is_empty() {
            return None;
        }
        self.visits = (limit * LOOK_AHEAD)
            .div_ceil(walked.len() * self.rows_per_aggregate)
            .clamp(1, MOST_VISITS);
        self.returned_meanwhile = false;
        Some(ClaimRequest {
            buckets: walked.iter().map(|number| int(*number)).collect(),
            starts: walked
                .iter()
                .map(|number| self.buckets[*number].cursor.unwrap_or(i64::MIN))
                .collect(),
            visits: int(self.visits),
            rows_per_aggregate: int(self.rows_per_aggregate),
            limit: int(limit),
            rooms: rooms.into_iter().map(int).collect(),
            horizon: i64::MAX,
        })
    }

    fn partition(&self, bucket: usize) -> usize {
        partition_of(u8::try_from(bucket).unwrap_or(BUCKETS), self.partitions)
    }

    /// Free room of each partition: its fair part of all, twice over, so that a partition whose
    /// broker side is slow cannot take all room from the others.
    fn rooms(&self) -> Vec<usize> {
        let most = (self.most_in_hand * 2).div_ceil(self.partitions);
        let mut rooms = vec![most; self.partitions];
        for (number, bucket) in self.buckets.iter().enumerate() {
            let room = &mut rooms[self.partition(number)];
            *room = room.saturating_sub(bucket.in_hand);
        }
        rooms
    }

    /// Takes in what a claim found. `request` is what [`Self::next_claim`] asked for.
    pub fn claimed(&mut self, request: &ClaimRequest, answer: &ClaimAnswer) {
        let visits: BTreeMap<u8, _> = answer
            .visits
            .iter()
            .map(|visit| (visit.bucket, visit))
            .collect();
        let mut exhausted = true;
        for number in request
            .buckets
            .iter()
            .filter_map(|bucket| u8::try_from(*bucket).ok())
        {
            let bucket = &mut self.buckets[usize::from(number)];
            let more = visits
                .get(&number)
                .filter(|visit| visit.visited >= request.visits);
            let cut = answer.cuts.iter().find(|(cut, _)| *cut == number);
            bucket.cursor = match cut {
                // There was no room for it: nobody is passed over.
                Some((_, hash)) => Some(*hash),
                // The hash after the last one; after the greatest there is nothing more.
                None => more.and_then(|visit| visit.last.checked_add(1)),
            };
            bucket.open = bucket.cursor.is_some();
            exhausted &= !bucket.open;
        }
        for row in &answer.rows {
            self.buckets[usize::from(row.bucket)].in_hand += 1;
        }
        self.in_hand += answer.rows.len();
        if answer.more_after_mark && self.returned_meanwhile {
            // No other return may follow.
            self.wanted = true;
        } else {
            self.busy_left |= answer.more_after_mark;
        }
        self.rows_per_aggregate = if !exhausted {
            ROWS_PER_AGGREGATE
        } else if answer.more_after_mark && !answer.rows.is_empty() {
            (self.rows_per_aggregate * 2).min(MOST_ROWS_PER_AGGREGATE)
        } else {
            self.rows_per_aggregate
        };
    }

    /// A claim was not answered: it is asked again in a round of its own.
    pub fn claim_failed(&mut self) {
        self.wanted = true;
    }

    /// Rows left our hands (marked, failed, released or dropped): the bucket of each.
    pub fn returned(&mut self, buckets: &[u8]) {
        for number in buckets {
            let bucket = &mut self.buckets[usize::from(*number)];
            debug_assert!(bucket.in_hand > 0, "a row is returned once");
            bucket.in_hand = bucket.in_hand.saturating_sub(1);
        }
        self.in_hand = self.in_hand.saturating_sub(buckets.len());
        self.returned_meanwhile |= !buckets.is_empty();
        if self.busy_left && !buckets.is_empty() {
            self.busy_left = false;
            self.wanted = true;
        }
    }
}

fn int(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{AggregateKey, EventId};
    use crate::store::{ClaimedRow, Visit};

    fn all() -> Vec<u8> {
        (0..BUCKETS).collect()
    }

    fn row(id: i64, bucket: u8) -> ClaimedRow {
        ClaimedRow {
            id: EventId(id),
            bucket,
            key: AggregateKey::new("a", "b"),
            stored_bytes: 2,
        }
    }

    fn found(rows: Vec<ClaimedRow>) -> ClaimAnswer {
        ClaimAnswer {
            rows,
            ..ClaimAnswer::default()
        }
    }

    #[test]
    fn nothing_is_claimed_without_buckets_and_new_buckets_are_walked_unasked() {
        let mut rounds = Rounds::new(8, 500, 1000);
        rounds.wake();
        assert_eq!(rounds.next_claim(), None);
        rounds.set_owned(&[3, 4]);
        assert_eq!(rounds.next_claim().expect("a claim").buckets, [3, 4]);
    }

    #[test]
    fn a_ring_during_a_round_asks_for_exactly_one_more() {
        let mut rounds = Rounds::new(8, 500, 1000);
        rounds.set_owned(&all());
        let request = rounds.next_claim().expect("a claim");
        rounds.wake();
        rounds.wake();
        rounds.claimed(&request, &ClaimAnswer::default());
        let request = rounds.next_claim().expect("one more");
        rounds.claimed(&request, &ClaimAnswer::default());
        assert_eq!(rounds.next_claim(), None);
        assert!(rounds.is_idle());
    }

    #[test]
    fn a_bucket_with_more_aggregates_than_visits_is_walked_on_from_there() {
        let mut rounds = Rounds::new(8, 500, 1000);
        rounds.set_owned(&[7]);
        let request = rounds.next_claim().expect("a claim");
        let answer = ClaimAnswer {
            visits: vec![Visit {
                bucket: 7,
                last: 41,
                visited: request.visits,
            }],
            ..ClaimAnswer::default()
        };
        rounds.claimed(&request, &answer);
        let next = rounds.next_claim().expect("the rest of the round");
        assert_eq!(next.starts, [42]);
        rounds.claimed(&next, &ClaimAnswer::default());
        assert_eq!(rounds.next_claim(), None);
    }

    #[test]
    fn a_claim_that_a_limit_cut_short_is_gone_on_with_from_there() {
        let mut rounds = Rounds::new(8, 500, 10);
        rounds.set_owned(&[7, 8]);
        let request = rounds.next_claim().expect("a claim");
        let answer = ClaimAnswer {
            cut: true,
            cuts: vec![(8, -5)],
            ..found((0..10).map(|id| row(id, 7)).collect())
        };
        rounds.claimed(&request, &answer);
        assert_eq!(rounds.next_claim(), None, "no room");
        rounds.returned(&[7; 10]);
        let next = rounds.next_claim().expect("the rest");
        assert_eq!((next.buckets, next.starts), (vec![8], vec![-5]));
    }

    #[test]
    fn an_aggregate_that_was_busy_is_looked_at_again_after_a_return_and_not_before() {
        let mut rounds = Rounds::new(8, 500, 1000);
        rounds.set_owned(&all());
        let request = rounds.next_claim().expect("a claim");
        let answer = ClaimAnswer {
            more_after_mark: true,
            ..found(vec![row(1, 0)])
        };
        rounds.claimed(&request, &answer);
        assert_eq!(rounds.next_claim(), None);
        assert!(!rounds.is_idle());
        rounds.returned(&[0]);
        assert!(rounds.next_claim().is_some());
    }

    #[test]
    fn a_return_during_the_claim_that_found_an_aggregate_busy_is_not_missed() {
        let mut rounds = Rounds::new(8, 500, 1000);
        rounds.set_owned(&all());
        let request = rounds.next_claim().expect("a claim");
        rounds.claimed(&request, &found(vec![row(1, 0)]));
        rounds.wake();
        let request = rounds.next_claim().expect("a claim");
        rounds.returned(&[0]);
        let busy = ClaimAnswer {
            more_after_mark: true,
            ..ClaimAnswer::default()
        };
        rounds.claimed(&request, &busy);
        assert!(!rounds.is_idle());
        let request = rounds.next_claim().expect("one more");
        rounds.claimed(&request, &busy);
        assert_eq!(rounds.next_claim(), None, "nothing was returned since");
    }

    #[test]
    fn no_more_is_claimed_than_there_is_room_for() {
        let mut rounds = Rounds::new(2, 500, 100);
        rounds.set_owned(&all());
        let request = rounds.next_claim().expect("a claim");
        assert_eq!(
            (request.limit, request.rooms.as_slice()),
            (100, [100, 100].as_slice())
        );
        // All of partition 0 (even buckets).
        rounds.claimed(&request, &found((0..60).map(|id| row(id, 2)).collect()));
        rounds.wake();
        let request = rounds.next_claim().expect("a claim");
        assert_eq!(
            (request.limit, request.rooms.as_slice()),
            (40, [40, 100].as_slice())
        );
        rounds.claimed(&request, &found((60..100).map(|id| row(id, 2)).collect()));
        rounds.wake();
        assert_eq!(rounds.next_claim(), None, "no room at all");
        rounds.returned(&[2; 50]);
        let request = rounds.next_claim().expect("room again");
        assert_eq!(
            (request.limit, request.rooms.as_slice()),
            (50, [50, 100].as_slice())
        );
    }

    #[test]
    fn a_full_partition_does_not_keep_the_others_waiting() {
        let mut rounds = Rounds::new(4, 500, 100);
        rounds.set_owned(&all());
        let request = rounds.next_claim().expect("a claim");
        rounds.claimed(&request, &found((0..50).map(|id| row(id, 1)).collect()));
        rounds.wake();
        let request = rounds.next_claim().expect("a claim");
        assert!(request.buckets.iter().all(|bucket| bucket % 4 != 1));
        rounds.claimed(&request, &ClaimAnswer::default());
        assert_eq!(rounds.next_claim(), None);
        assert!(
            !rounds.is_idle(),
            "buckets of the full partition are still to be walked"
        );
        rounds.returned(&[1; 50]);
        assert!(
            rounds
                .next_claim()
                .expect("a claim")
                .buckets
                .iter()
                .all(|bucket| bucket % 4 == 1)
        );
    }

    #[test]
    fn a_leaving_bucket_is_given_up_when_nothing_of_it_is_in_hand() {
        let mut rounds = Rounds::new(8, 500, 1000);
        rounds.set_owned(&[1, 2]);
        let request = rounds.next_claim().expect("a claim");
        rounds.claimed(&request, &found(vec![row(1, 1), row(2, 2), row(3, 2)]));
        rounds.leave_down_to(0);
        assert_eq!(rounds.kept(), 0);
        assert_eq!(rounds.given_up(), [0u8; 0]);
        rounds.returned(&[2, 1]);
        assert_eq!(rounds.given_up(), [1]);
        rounds.wake();
        assert_eq!(rounds.next_claim(), None, "not claimed from");
        rounds.stay_up_to(1);
        assert_eq!(rounds.kept(), 1);
        assert!(rounds.next_claim().is_some());
    }

    #[test]
    fn shares_cover_all_buckets() {
        for replicas in 1..=100 {
            assert!(fair_share(replicas) * replicas >= ALL);
        }
        assert_eq!((fair_share(1), fair_share(2), fair_share(3)), (64, 32, 22));
    }

    #[test]
    fn with_few_aggregates_claims_go_deep() {
        let mut rounds = Rounds::new(8, 500, 1000);
        rounds.set_owned(&all());
        for _ in 0..10 {
            rounds.wake();
            let request = rounds.next_claim().expect("a claim");
            let answer = ClaimAnswer {
                more_after_mark: true,
                ..found(vec![row(1, 0)])
            };
            rounds.claimed(&request, &answer);
            rounds.returned(&[0]);
        }
        assert_eq!(rounds.rows_per_aggregate, MOST_ROWS_PER_AGGREGATE);
    }
}

#[cfg(test)]
#[path = "rounds_properties.rs"]
mod properties;
