//! What goes wrong, and when: a pure function of the seed.
//!
//! Invariants:
//! - The same seed gives the same rounds, however long the run and whatever the relays do.
//! - Every kind of fault comes once before any comes again: a short run sees many kinds.
//! - Within a round each target is hit once, so that no fault undoes or hides another.
//! - Every sixth round is one relay killed while all else is well: how long a takeover takes is measured by these.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};

/// Faults of one round. There are as many targets as the most, with three relays.
const AT_ONCE: std::ops::RangeInclusive<usize> = 4..=5;
/// A fault begins within this of its round's beginning.
const SPREAD_MS: u64 = 1_500;
/// Of so many rounds one is a lone kill, so long after the faults before it that they are over.
const LONE_KILL_EVERY: usize = 6;
const LONE_KILL_AFTER: Duration = Duration::from_secs(4);
/// Shorter and longer than the lease.
const HOLD_MS: std::ops::Range<u64> = 500..5_500;
/// Without faults after each round.
const CALM_MS: std::ops::Range<u64> = 500..1_500;

/// One way to go wrong.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Kind {
    /// SIGKILL; started again.
    KillRelay,
    /// SIGSTOP for shorter or longer than the lease, then SIGCONT.
    FreezeRelay,
    /// SIGTERM; started again once it has ended.
    TerminateRelay,
    /// Its host's time is set a day ahead, and back.
    ClockAhead,
    /// The other way round.
    ClockBehind,
    /// Its connections to PostgreSQL are cut, and new ones refused for a while.
    CutDatabase,
    /// PostgreSQL answers late.
    DelayDatabase,
    /// PostgreSQL's answers are held back.
    MuteDatabase,
    /// What the relay tells PostgreSQL is held back.
    DeafenDatabase,
    /// Its connections to the broker are cut, and new ones refused for a while.
    CutBroker,
    /// The broker answers late.
    DelayBroker,
    /// The broker's answers are held back.
    MuteBroker,
    /// What the relay tells the broker is held back.
    DeafenBroker,
    /// Orderly.
    RestartPostgres,
    /// SIGKILL of every process; it recovers at its start.
    KillPostgres,
    /// Every backend of the relays is terminated.
    TerminateBackends,
    /// New transactions may not write.
    ReadOnly,
    /// Orderly.
    RestartBroker,
    /// SIGKILL.
    KillBroker,
    /// The broker stops reading from publishers.
    MemoryAlarm,
    /// Deleted, and declared again with its bindings.
    DeleteExchange,
    /// The queue rejects what is published.
    FullQueue,
    /// Nothing is bound for one event type: its events are returned.
    Unbind,
}

/// What a fault is done to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Target {
    Relay(usize),
    Postgres,
    Broker,
}

impl Kind {
    pub const ALL: [Self; 23] = [
        Self::KillRelay,
        Self::FreezeRelay,
        Self::TerminateRelay,
        Self::ClockAhead,
        Self::ClockBehind,
        Self::CutDatabase,
        Self::DelayDatabase,
        Self::MuteDatabase,
        Self::DeafenDatabase,
        Self::CutBroker,
        Self::DelayBroker,
        Self::MuteBroker,
        Self::DeafenBroker,
        Self::RestartPostgres,
        Self::KillPostgres,
        Self::TerminateBackends,
        Self::ReadOnly,
        Self::RestartBroker,
        Self::KillBroker,
        Self::MemoryAlarm,
        Self::DeleteExchange,
        Self::FullQueue,
        Self::Unbind,
    ];

    /// May it make a relay send an event again? An orderly stop, a clock that is set, a refusal and a return may not.
    pub const fn repeats(self) -> bool {
        !matches!(
            self,
            Self::TerminateRelay
                | Self::ClockAhead
                | Self::ClockBehind
                | Self::FullQueue
                | Self::Unbind
        )
    }

    const fn target(self, relay: usize) -> Target {
        match self {
            Self::RestartPostgres
            | Self::KillPostgres
            | Self::TerminateBackends
            | Self::ReadOnly => Target::Postgres,
            Self::RestartBroker
            | Self::KillBroker
            | Self::MemoryAlarm
            | Self::DeleteExchange
            | Self::FullQueue
            | Self::Unbind => Target::Broker,
            _ => Target::Relay(relay),
        }
    }
}

/// One fault of a round.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Fault {
    pub kind: Kind,
    pub target: Target,
    /// From the round's beginning.
    pub after: Duration,
    /// Until it is undone.
    pub hold: Duration,
}

/// Faults that overlap, and the calm after them.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Round {
    pub faults: Vec<Fault>,
    pub calm: Duration,
}

/// Endless.
pub struct Schedule {
    random: StdRng,
    relays: usize,
    lone_kill_every: usize,
    deck: Vec<Kind>,
    rounds: usize,
}

impl Schedule {
    pub fn new(seed: u64, relays: usize) -> Self {
        Self {
            random: StdRng::seed_from_u64(seed),
            relays,
            lone_kill_every: LONE_KILL_EVERY,
            deck: Vec::new(),
            rounds: 0,
        }
    }

    /// Each round is a lone kill: as many takeovers as can be.
    pub fn of_kills(seed: u64, relays: usize) -> Self {
        Self {
            lone_kill_every: 1,
            ..Self::new(seed, relays)
        }
    }

    fn hold(&mut self) -> Duration {
        Duration::from_millis(self.random.random_range(HOLD_MS))
    }

    fn lone_kill(&mut self) -> Fault {
        Fault {
            kind: Kind::KillRelay,
            target: Target::Relay(self.random.random_range(0..self.relays)),
            after: LONE_KILL_AFTER,
            hold: self.hold(),
        }
    }

    fn together(&mut self) -> Vec<Fault> {
        let count = self.random.random_range(AT_ONCE);
        let mut faults: Vec<Fault> = Vec::new();
        // A kind whose target is taken keeps its turn for the next round.
        let mut later = Vec::new();
        while faults.len() < count && later.len() < *AT_ONCE.end() {
            let kind = self.draw();
            let relay = self.random.random_range(0..self.relays);
            let free = |target: &Target| faults.iter().all(|fault| fault.target != *target);
            let Some(target) = (relay..relay + self.relays)
                .map(|relay| kind.target(relay % self.relays))
                .find(free)
            else {
                later.push(kind);
                continue;
            };
            let after = Duration::from_millis(self.random.random_range(0..SPREAD_MS));
            let hold = self.hold();
            faults.push(Fault {
                kind,
                target,
                after,
                hold,
            });
        }
        self.deck.append(&mut later);
        faults
    }

    fn draw(&mut self) -> Kind {
        if self.deck.is_empty() {
            self.deck = Kind::ALL.to_vec();
            self.deck.shuffle(&mut self.random);
        }
        self.deck.pop().expect("it has just been filled")
    }
}

impl Iterator for Schedule {
    type Item = Round;

    fn next(&mut self) -> Option<Round> {
        self.rounds += 1;
        let faults = if self.rounds.is_multiple_of(self.lone_kill_every) {
            vec![self.lone_kill()]
        } else {
            self.together()
        };
        let calm = Duration::from_millis(self.random.random_range(CALM_MS));
        Some(Round { faults, calm })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_faults() {
        let rounds = |seed| Schedule::new(seed, 3).take(50).collect::<Vec<_>>();
        assert_eq!(rounds(7), rounds(7));
        assert_ne!(rounds(7), rounds(8));
    }

    #[test]
    fn every_kind_comes_soon_and_no_target_is_hit_twice_at_once() {
        for seed in 0..20 {
            let rounds: Vec<_> = Schedule::new(seed, 3).take(60).collect();
            let kinds: HashSet<_> = rounds
                .iter()
                .flat_map(|round| round.faults.iter().map(|fault| fault.kind))
                .collect();
            assert_eq!(kinds.len(), Kind::ALL.len());
            for round in rounds {
                assert!(!round.faults.is_empty());
                for (nth, fault) in round.faults.iter().enumerate() {
                    let others = &round.faults[nth + 1..];
                    assert!(others.iter().all(|other| other.target != fault.target));
                }
            }
        }
    }
}
