//! What holds of rounds over a table that answers as `claim.sql` does.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::event::{AggregateKey, EventId};
use crate::store::{ClaimedRow, Visit};

/// Few of them, in which much happens.
const USED: u8 = 8;

#[derive(Clone, Debug)]
enum Step {
    /// Rows of an aggregate, which ring.
    Insert(u8, i64, u8),
    Claim,
    ClaimFails,
    /// Rows are handed back marked, these many.
    Return(u8, usize),
    Own(Vec<u8>),
    LeaveDownTo(usize),
    StayUpTo(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let owned = proptest::sample::subsequence((0..USED).collect::<Vec<_>>(), 0..usize::from(USED));
    let step = prop_oneof![
        8 => (0..USED, -3..4_i64, 1..20_u8).prop_map(|(bucket, aggregate, rows)| {
            Step::Insert(bucket, aggregate, rows)
        }),
        10 => Just(Step::Claim),
        1 => Just(Step::ClaimFails),
        8 => (1..30_u8, any::<usize>()).prop_map(|(rows, which)| Step::Return(rows, which)),
        2 => owned.prop_map(Step::Own),
        1 => (0..usize::from(USED)).prop_map(Step::LeaveDownTo),
        1 => (0..usize::from(USED)).prop_map(Step::StayUpTo),
    ];
    proptest::collection::vec(step, 0..100)
}

/// Rows that wait, by bucket and aggregate, and rows in hand.
struct World {
    rounds: Rounds,
    partitions: usize,
    batch_size: usize,
    most_in_hand: usize,
    waiting: BTreeMap<(u8, i64), VecDeque<i64>>,
    in_hand: Vec<(u8, i64)>,
    owned: BTreeSet<u8>,
    next_id: i64,
}

impl World {
    fn new(partitions: usize, batch_size: usize, most_in_hand: usize) -> Self {
        Self {
            rounds: Rounds::new(partitions, batch_size, most_in_hand),
            partitions,
            batch_size,
            most_in_hand,
            waiting: BTreeMap::new(),
            in_hand: Vec::new(),
            owned: BTreeSet::new(),
            next_id: 1,
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Insert(bucket, aggregate, rows) => {
                for _ in 0..*rows {
                    let rows = self.waiting.entry((*bucket, *aggregate)).or_default();
                    rows.push_back(self.next_id);
                    self.next_id += 1;
                }
                self.rounds.wake();
            }
            Step::Claim => {
                self.claim();
            }
            Step::ClaimFails => {
                if self.rounds.next_claim().is_some() {
                    self.rounds.claim_failed();
                }
            }
            Step::Return(rows, which) => self.give(usize::from(*rows), *which),
            Step::Own(owned) => self.own(owned.iter().copied().collect()),
            Step::LeaveDownTo(keep) => self.rounds.leave_down_to(*keep),
            Step::StayUpTo(keep) => self.rounds.stay_up_to(*keep),
        }
        self.check();
    }

    fn own(&mut self, mut owned: BTreeSet<u8>) {
        // A bucket is given up only once nothing of it is in hand.
        owned.extend(self.in_hand.iter().map(|(bucket, _)| *bucket));
        self.rounds
            .set_owned(&owned.iter().copied().collect::<Vec<_>>());
        self.owned = owned;
    }

    fn claim(&mut self) -> bool {
        let Some(request) = self.rounds.next_claim() else {
            return false;
        };
        assert!(request.limit >= 1 && request.limit <= int(self.batch_size));
        let leaving: Vec<u8> = self.rounds.given_up();
        for bucket in &request.buckets {
            let bucket = u8::try_from(*bucket).unwrap();
            assert!(
                self.owned.contains(&bucket) && !leaving.contains(&bucket),
                "{bucket}"
            );
        }
        let answer = self.answer(&request);
        self.rounds.claimed(&request, &answer);
        true
    }

    /// What `claim.sql` would find.
    fn answer(&mut self, request: &ClaimRequest) -> ClaimAnswer {
        let mut answer = ClaimAnswer::default();
        let mut left = usize::try_from(request.limit).unwrap();
        let mut rooms = request.rooms.clone();
        for (bucket, start) in request.buckets.iter().zip(&request.starts) {
            let bucket = u8::try_from(*bucket).unwrap();
            let room = &mut rooms[partition_of(bucket, self.partitions)];
            let met = self
                .waiting
                .range_mut((bucket, *start)..=(bucket, i64::MAX));
            let met = met.take(usize::try_from(request.visits).unwrap());
            for (visited, ((_, aggregate), rows)) in (1..).zip(met) {
                answer.visits.retain(|visit| visit.bucket != bucket);
                answer.visits.push(Visit {
                    bucket,
                    last: *aggregate,
                    visited,
                });
                if self.in_hand.contains(&(bucket, *aggregate)) {
                    answer.more_after_mark = true;
                    continue;
                }
                let wanted = rows
                    .len()
                    .min(usize::try_from(request.rows_per_aggregate).unwrap());
                answer.more_after_mark |= wanted < rows.len();
                let taken = wanted.min(left).min(usize::try_from(*room).unwrap());
                if taken < wanted && !answer.cuts.iter().any(|(cut, _)| *cut == bucket) {
                    answer.cuts.push((bucket, *aggregate));
                }
                left -= taken;
                *room -= int(taken);
                for id in rows.drain(..taken) {
                    self.in_hand.push((bucket, *aggregate));
                    answer.rows.push(ClaimedRow {
                        id: EventId(id),
                        bucket,
                        key: AggregateKey::new("a", &aggregate.to_string()),
                        stored_bytes: 2,
                    });
                }
            }
        }
        self.waiting.retain(|_, rows| !rows.is_empty());
        answer
    }

    fn give(&mut self, rows: usize, which: usize) {
        let mut buckets = Vec::new();
        for _ in 0..rows.min(self.in_hand.len()) {
            let (bucket, _) = self.in_hand.swap_remove(which % self.in_hand.len());
            buckets.push(bucket);
        }
        self.rounds.returned(&buckets);
    }

    fn check(&self) {
        assert_eq!(self.rounds.in_hand(), self.in_hand.len());
        assert!(self.in_hand.len() <= self.most_in_hand);
        let room = (self.most_in_hand * 2).div_ceil(self.partitions);
        for partition in 0..self.partitions {
            let of_it =
                |(bucket, _): &&(u8, i64)| partition_of(*bucket, self.partitions) == partition;
            assert!(self.in_hand.iter().filter(of_it).count() <= room);
        }
        for bucket in self.rounds.given_up() {
            assert!(self.in_hand.iter().all(|(in_hand, _)| *in_hand != bucket));
        }
    }

    /// All buckets are ours and everything in hand comes back: nothing may be left behind, though
    /// nobody rings any more.
    fn finish(&mut self) {
        self.own((0..USED).collect());
        self.rounds.stay_up_to(usize::from(USED));
        let mut rounds = 0;
        while !self.rounds.is_idle() || !self.in_hand.is_empty() {
            while self.claim() {
                self.check();
            }
            self.give(7, rounds);
            rounds += 1;
            assert!(rounds < 10_000, "it never ends: {:?}", self.waiting);
        }
        assert!(self.waiting.is_empty(), "left behind: {:?}", self.waiting);
    }
}

#[test]
fn no_more_is_claimed_than_there_is_room_for_and_nothing_is_left_behind() {
    let inputs = (1..4_usize, 1..40_usize, 1..60_usize, steps());
    crate::properties::hold(&inputs, |(partitions, batch_size, most_in_hand, steps)| {
        let mut world = World::new(partitions, batch_size, most_in_hand);
        for step in &steps {
            world.step(step);
        }
        world.finish();
    });
}
