//! Decides loss, order and identity of repeats from what a consumer got, in arrival order.

use std::collections::{HashMap, HashSet};

use super::Arrival;

/// What a consumer that drops repeats would see.
#[derive(Debug, Default)]
pub struct Ledger {
    first: HashMap<i64, Vec<u8>>,
    last_of: HashMap<(String, String), i64>,
    /// Messages whose id had arrived before.
    pub repeats: usize,
    /// First arrivals with a lower id than an earlier first arrival of the same aggregate.
    pub order_violations: Vec<(i64, i64)>,
    /// Repeats whose body differs from the first.
    pub changed_repeats: Vec<i64>,
}

impl Ledger {
    pub fn of(arrivals: &[Arrival]) -> Self {
        let mut ledger = Self::default();
        for arrival in arrivals {
            ledger.take(arrival);
        }
        ledger
    }

    pub fn take(&mut self, arrival: &Arrival) {
        if let Some(body) = self.first.get(&arrival.id) {
            self.repeats += 1;
            if *body != arrival.body {
                self.changed_repeats.push(arrival.id);
            }
            return;
        }
        self.first.insert(arrival.id, arrival.body.clone());
        let last = self
            .last_of
            .entry(arrival.aggregate.clone())
            .or_insert(i64::MIN);
        if *last > arrival.id {
            self.order_violations.push((*last, arrival.id));
        }
        *last = arrival.id;
    }

    /// Committed ids that never arrived, and arrived ids that were never committed.
    pub fn difference(&self, committed: &[i64]) -> (Vec<i64>, Vec<i64>) {
        let wanted: HashSet<i64> = committed.iter().copied().collect();
        let lost = committed
            .iter()
            .copied()
            .filter(|id| !self.first.contains_key(id))
            .collect();
        let foreign = self
            .first
            .keys()
            .copied()
            .filter(|id| !wanted.contains(id))
            .collect();
        (lost, foreign)
    }

    /// Nothing lost, nothing foreign, in order after dropping repeats, repeats identical.
    pub fn assert_sound(&self, committed: &[i64]) {
        let (lost, foreign) = self.difference(committed);
        assert_eq!(lost, [0i64; 0], "lost");
        assert_eq!(foreign, [0i64; 0], "arrived, but never committed");
        assert_eq!(
            self.order_violations,
            [(0i64, 0i64); 0],
            "out of order: (earlier arrival, later arrival)"
        );
        assert_eq!(self.changed_repeats, [0i64; 0], "repeats with another body");
    }
}
