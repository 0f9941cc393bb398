//! The gate: how many requests are worked on, how many wait, and how much of them is in memory.
//!
//! # Invariants
//! - Only verified requests reach the queue: a stranger can fill the room for bodies, and no more.
//! - Whoever is not let in is told at once, and when to come again. Nobody waits without a bound.
//! - What was taken is given back when its holder is dropped, however that comes about.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::metrics;

/// Bytes of bodies in memory, at most: more than a thousand slow senders need, and less than hurts.
pub const MOST_BUFFERED: u64 = 64 * 1024 * 1024;

/// There is no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("overloaded: come again in a moment")]
pub struct Full;

/// See the module's head.
#[derive(Debug)]
pub struct Gate {
    places: Arc<Semaphore>,
    queue: u64,
    waiting: Arc<AtomicU64>,
    buffered: Arc<AtomicU64>,
    most_buffered: u64,
}

/// A place among those at work.
#[derive(Debug)]
pub struct Place {
    _permit: OwnedSemaphorePermit,
}

/// Room for a body, as much of it as has come.
#[derive(Debug)]
pub struct Room {
    taken: u64,
    most: u64,
    buffered: Arc<AtomicU64>,
}

impl Gate {
    /// For so many at work, and so many that wait.
    pub fn new(concurrency: u32, queue: u32, most_buffered: u64) -> Self {
        let places = usize::try_from(concurrency).unwrap_or(Semaphore::MAX_PERMITS);
        Self {
            places: Arc::new(Semaphore::new(places)),
            queue: queue.into(),
            waiting: Arc::default(),
            buffered: Arc::default(),
            most_buffered,
        }
    }

    /// Waits for a place, unless too many do already.
    ///
    /// # Errors
    /// [`Full`].
    pub async fn enter(&self) -> Result<Place, Full> {
        if let Ok(permit) = self.places.clone().try_acquire_owned() {
            return Ok(Place { _permit: permit });
        }
        let _turn = Turn::take(&self.waiting, self.queue)?;
        let permit = self.places.clone().acquire_owned().await;
        Ok(Place {
            _permit: permit.expect("the semaphore is never closed"),
        })
    }

    /// How many wait for a place.
    pub fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Room for a body that is about to come.
    pub fn room(&self) -> Room {
        Room {
            taken: 0,
            most: self.most_buffered,
            buffered: self.buffered.clone(),
        }
    }
}

/// One that waits.
struct Turn<'a>(&'a AtomicU64);

impl<'a> Turn<'a> {
    fn take(waiting: &'a AtomicU64, most: u64) -> Result<Self, Full> {
        let before = waiting.fetch_add(1, Ordering::Relaxed);
        let turn = Self(waiting);
        ::metrics::gauge!(metrics::INTAKE_WAITING).increment(1.0);
        if before < most { Ok(turn) } else { Err(Full) }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
        ::metrics::gauge!(metrics::INTAKE_WAITING).decrement(1.0);
    }
}

impl Room {
    /// Takes so many bytes more.
    ///
    /// # Errors
    /// [`Full`].
    pub fn take(&mut self, bytes: u64) -> Result<(), Full> {
        let before = self.buffered.fetch_add(bytes, Ordering::Relaxed);
        self.taken += bytes;
        if before + bytes > self.most {
            return Err(Full);
        }
        Ok(())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.buffered.fetch_sub(self.taken, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn those_at_work_and_those_that_wait_are_counted_and_the_next_is_refused() {
        let gate = Gate::new(1, 1, 10);
        let first = gate.enter().await.unwrap();
        let mut second = Box::pin(gate.enter());
        assert!(futures_util::poll!(&mut second).is_pending());
        assert_eq!(gate.waiting(), 1);
        assert_eq!(gate.enter().await.unwrap_err(), Full);
        assert_eq!(gate.waiting(), 1);
        drop(first);
        let second = second.await.unwrap();
        assert_eq!(gate.waiting(), 0);
        // Whoever leaves the queue makes room in it.
        let mut third = Box::pin(gate.enter());
        assert!(futures_util::poll!(&mut third).is_pending());
        drop(third);
        assert_eq!(gate.waiting(), 0);
        drop(second);
        gate.enter().await.unwrap();
    }

    #[test]
    fn bodies_share_one_room_and_give_it_back() {
        let gate = Gate::new(1, 1, 10);
        let (mut one, mut other) = (gate.room(), gate.room());
        one.take(6).unwrap();
        other.take(4).unwrap();
        assert_eq!(other.take(1), Err(Full));
        drop(other);
        one.take(4).unwrap();
    }
}
