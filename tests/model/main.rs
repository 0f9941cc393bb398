//! The protocols of ownership and of the doorbell, checked in every order in which their steps can happen; and the proof
//! that the check would find a mistake: each one that is named in a model is made in turn, and has to be found.
//!
//! A model says nothing of the SQL and Rust that carry the protocol out: that is for `tests/it`.

use std::fmt::Debug;
use std::hash::Hash;

use stateright::{Checker, HasDiscoveries, Model};

use doorbell::Doorbell;
use ownership::Ownership;

mod doorbell;
mod ownership;

/// Crashes, lost connections and leases that end under a living holder.
const FAULTS: u8 = 1;
/// How often relays begin to look by themselves.
const PUSHES: u8 = 2;

fn ownership(mistake: ownership::Mistake) -> Ownership {
    Ownership {
        mistake,
        faults: FAULTS,
    }
}

fn doorbell(mistake: doorbell::Mistake) -> Doorbell {
    Doorbell {
        mistake,
        pushes: PUSHES,
        faults: FAULTS,
    }
}

fn holds<M>(model: M)
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq + Send + Sync + 'static,
{
    let checked = model.checker().threads(2).spawn_bfs().join();
    println!("{} states", checked.unique_state_count());
    checked.assert_properties();
}

/// The property that a model's mistake breaks, if any.
fn broken<M>(model: M) -> Option<&'static str>
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq + Send + Sync + 'static,
{
    let checked = model
        .checker()
        .threads(2)
        .finish_when(HasDiscoveries::AnyFailures)
        .spawn_bfs()
        .join();
    let found = checked.discoveries();
    let mut failures = found.keys().filter(|property| {
        checked.discovery_classification(property).to_string() == "counterexample"
    });
    failures.next().copied()
}

#[test]
fn events_have_one_owner_leave_in_order_and_are_never_stranded() {
    holds(ownership(ownership::Mistake::None));
}

#[test]
fn each_mistake_in_ownership_would_be_found() {
    use ownership::Mistake::*;
    for (mistake, property) in [
        (MarkWithoutToken, "only the holder acts"),
        (ReleaseWithoutToken, "only the holder acts"),
        (ClaimWithoutBucketLock, "nothing is stranded"),
        (TakeoverOnOldSnapshot, "nothing is stranded"),
        (ClaimBesideRowsInHand, "first copies leave in order"),
        (SendWithoutLease, "only the holder acts"),
        (RenewOverLease, "nothing is stranded"),
        (LateClock, "no row is in two hands"),
        (TwoUnconfirmed, "first copies leave in order"),
    ] {
        assert_eq!(broken(ownership(mistake)), Some(property), "{mistake:?}");
    }
}

#[test]
fn no_wake_up_is_lost_although_writers_ring_only_while_all_sleep() {
    holds(doorbell(doorbell::Mistake::None));
}

#[test]
fn each_mistake_in_the_doorbell_would_be_found() {
    use doorbell::Mistake::*;
    for mistake in [
        SleepWithoutList,
        ListBeforeZero,
        SleepWithoutWalk,
        PushWithoutRing,
        TimeBeforePush,
        PushWithoutLock,
        ReadBeforeLock,
        NoLookAfterReconnect,
    ] {
        assert_eq!(
            broken(doorbell(mistake)),
            Some("no wake-up is lost"),
            "{mistake:?}"
        );
    }
}
