//! The doorbell: no wake-up is lost although writers ring only while every relay sleeps.
//!
//! A writer whose event belongs to the first of two relays (writers do not know of each other, and the relays are alike);
//! relays that begin and cease to look by themselves, die, and lose their notifications. There is no tick: the protocol has to do without.
//!
//! What the code says of it is in `src/relay/mod.rs` and `src/relay/doorbell.rs`.

use std::collections::BTreeSet;

use stateright::{Model, Property};

const RELAYS: usize = 2;
const WRITERS: usize = 1;

/// What could have been built wrong, and has to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    None,
    /// To sleep without a look at the writers that are under way.
    SleepWithoutList,
    /// To list the writers before they are asked to ring again.
    ListBeforeZero,
    /// To sleep as soon as the listed writers have ended, without another walk.
    SleepWithoutWalk,
    /// Not to ring for the peers when we begin to look by ourselves.
    PushWithoutRing,
    /// To take the time before the value is set.
    TimeBeforePush,
    /// One may set the value to 0 while another is between reading and setting it.
    PushWithoutLock,
    /// Writers read the value before they hold their lock.
    ReadBeforeLock,
    /// To sleep on after notifications were lost.
    NoLookAfterReconnect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Writer {
    Idle,
    /// The value was read without the lock (a mistake): will it ring?
    Read(bool),
    /// It holds its lock on the outbox.
    Locked,
    /// The trigger has run: will it ring?
    Decided(bool),
    /// Its row can be seen, its lock is still held.
    Visible,
    Ended,
}

impl Writer {
    fn holds_lock(self) -> bool {
        matches!(self, Self::Locked | Self::Decided(_) | Self::Visible)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Asleep,
    /// Begins to look by itself and has read the value. Is it over?
    Reading {
        over: bool,
    },
    /// It has set a new value. Was the former one over by then?
    Pushing {
        over_before: bool,
    },
    /// It keeps writers from ringing.
    AwakeOurs,
    /// A peer does, or may have.
    AwakePeer,
    /// It has had writers ring again, and will list them.
    Zeroed,
    /// Listed in the wrong order: has to set the value to 0.
    ListedFirst(BTreeSet<usize>),
    Listed(BTreeSet<usize>),
}

impl Phase {
    fn pushes(&self) -> bool {
        matches!(
            self,
            Self::Reading { .. } | Self::Pushing { .. } | Self::AwakeOurs
        )
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Relay {
    phase: Phase,
    /// A walk over the bucket is due.
    wanted: bool,
    /// Its LISTEN stands.
    listening: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Ring {
    Event,
    Awake,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    /// Writers need not ring: the value is ahead of the clock.
    ahead: bool,
    writers: [Writer; WRITERS],
    /// By writer: was its row claimed?
    claimed: [bool; WRITERS],
    relays: Vec<Relay>,
    /// Notifications under way, by relay.
    rings: BTreeSet<(usize, Ring)>,
    pushes: u8,
    faults: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Action {
    // Writers.
    ReadEarly(usize),
    Lock(usize),
    Trigger(usize),
    Commit(usize),
    Unlock(usize),
    // The clock.
    TimeOver,
    // Relays.
    Heard(usize, Ring),
    Walk(usize),
    Push(usize),
    Set(usize),
    RingPeers(usize),
    StopPushing(usize),
    List(usize),
    Check(usize),
    Sleep(usize),
    Listen(usize),
    // Faults.
    LoseNotifications(usize),
    Die(usize),
}

impl Action {
    /// Does it happen by itself, sooner or later?
    fn is_progress(&self) -> bool {
        !matches!(
            self,
            Self::Push(_) | Self::LoseNotifications(_) | Self::Die(_)
        )
    }
}

pub(crate) struct Doorbell {
    pub(crate) mistake: Mistake,
    pub(crate) pushes: u8,
    pub(crate) faults: u8,
}

impl Doorbell {
    fn is(&self, mistake: Mistake) -> bool {
        self.mistake == mistake
    }

    fn ring(state: &mut State, ring: Ring) {
        for (number, relay) in state.relays.iter().enumerate() {
            if relay.listening {
                state.rings.insert((number, ring));
            }
        }
    }

    fn under_way(state: &State) -> BTreeSet<usize> {
        (0..WRITERS)
            .filter(|writer| state.writers[*writer].holds_lock())
            .collect()
    }

    fn writer_actions(&self, state: &State, actions: &mut Vec<Action>) {
        for (number, writer) in state.writers.iter().enumerate() {
            actions.push(match writer {
                Writer::Idle if self.is(Mistake::ReadBeforeLock) => Action::ReadEarly(number),
                Writer::Idle | Writer::Read(_) => Action::Lock(number),
                Writer::Locked => Action::Trigger(number),
                Writer::Decided(_) => Action::Commit(number),
                Writer::Visible => Action::Unlock(number),
                Writer::Ended => continue,
            });
        }
    }

    /// Another one holds the lock under which the value is read and set.
    fn is_locked(&self, number: usize, state: &State) -> bool {
        let others = state
            .relays
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != number);
        let mut phases = others.map(|(_, relay)| &relay.phase);
        !self.is(Mistake::PushWithoutLock)
            && phases.any(|phase| matches!(phase, Phase::Reading { .. } | Phase::Pushing { .. }))
    }

    fn relay_actions(
        &self,
        number: usize,
        relay: &Relay,
        state: &State,
        actions: &mut Vec<Action>,
    ) {
        if relay.wanted {
            actions.push(Action::Walk(number));
        }
        if !relay.listening {
            actions.push(Action::Listen(number));
        }
        match &relay.phase {
            Phase::Asleep | Phase::AwakeOurs | Phase::ListedFirst(_)
                if self.is_locked(number, state) => {}
            Phase::Asleep if state.pushes < self.pushes => actions.push(Action::Push(number)),
            Phase::Asleep => {}
            Phase::Reading { .. } => actions.push(Action::Set(number)),
            Phase::Pushing { .. } => actions.push(Action::RingPeers(number)),
            Phase::AwakeOurs => actions.push(Action::StopPushing(number)),
            // It looks on by itself meanwhile; when the time is over, it lists.
            Phase::AwakePeer if state.ahead => {}
            Phase::AwakePeer | Phase::Zeroed => actions.push(Action::List(number)),
            Phase::ListedFirst(_) => actions.push(Action::StopPushing(number)),
            Phase::Listed(writers) if writers.is_empty() => {
                if !relay.wanted || self.is(Mistake::SleepWithoutWalk) {
                    actions.push(Action::Sleep(number));
                }
            }
            Phase::Listed(writers) => {
                if writers.intersection(&Self::under_way(state)).count() < writers.len() {
                    actions.push(Action::Check(number));
                }
            }
        }
    }

    /// A new session, of the listener or of the claimer: nobody knows what came before it.
    fn begin(relay: &mut Relay) {
        relay.phase = Phase::AwakePeer;
        relay.wanted = true;
    }
}

impl Model for Doorbell {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let relay = Relay {
            phase: Phase::Asleep,
            wanted: false,
            listening: true,
        };
        vec![State {
            ahead: false,
            writers: [Writer::Idle; WRITERS],
            claimed: [false; WRITERS],
            relays: vec![relay; RELAYS],
            rings: BTreeSet::new(),
            pushes: 0,
            faults: 0,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        self.writer_actions(state, actions);
        if state.ahead {
            actions.push(Action::TimeOver);
        }
        actions.extend(
            state
                .rings
                .iter()
                .map(|(number, ring)| Action::Heard(*number, *ring)),
        );
        for (number, relay) in state.relays.iter().enumerate() {
            self.relay_actions(number, relay, state, actions);
            if state.faults < self.faults {
                // A push is one statement, which its backend ends whatever becomes of the client. That the backend itself
                // is terminated within it is left to the tick.
                if !matches!(relay.phase, Phase::Reading { .. } | Phase::Pushing { .. }) {
                    actions.push(Action::Die(number));
                }
                if relay.listening {
                    actions.push(Action::LoseNotifications(number));
                }
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::ReadEarly(writer) => state.writers[writer] = Writer::Read(!state.ahead),
            Action::Lock(writer) => {
                state.writers[writer] = match state.writers[writer] {
                    Writer::Read(rings) => Writer::Decided(rings),
                    _ => Writer::Locked,
                };
            }
            Action::Trigger(writer) => state.writers[writer] = Writer::Decided(!state.ahead),
            Action::Commit(writer) => {
                if state.writers[writer] == Writer::Decided(true) {
                    Self::ring(&mut state, Ring::Event);
                }
                state.writers[writer] = Writer::Visible;
            }
            Action::Unlock(writer) => state.writers[writer] = Writer::Ended,
            Action::TimeOver => {
                state.ahead = false;
                for relay in &mut state.relays {
                    // The time is taken after the new value was set.
                    if let Phase::Reading { over } = &mut relay.phase {
                        *over |= !self.is(Mistake::TimeBeforePush);
                    }
                }
            }
            Action::Heard(number, ring) => {
                state.rings.remove(&(number, ring));
                let relay = &mut state.relays[number];
                relay.wanted = true;
                if ring == Ring::Awake && !relay.phase.pushes() {
                    relay.phase = Phase::AwakePeer;
                }
            }
            Action::Walk(number) => {
                state.relays[number].wanted = false;
                // A writer's event is in the bucket of the relay of its number.
                if let Some(writer) = state.writers.get(number) {
                    state.claimed[number] |= matches!(writer, Writer::Visible | Writer::Ended);
                }
            }
            Action::Push(number) => {
                state.pushes += 1;
                state.relays[number].phase = Phase::Reading { over: !state.ahead };
            }
            Action::Set(number) => {
                let Phase::Reading { over } = state.relays[number].phase else {
                    return None;
                };
                state.ahead = true;
                state.relays[number].phase = Phase::Pushing { over_before: over };
            }
            Action::RingPeers(number) => {
                let Phase::Pushing { over_before } = state.relays[number].phase else {
                    return None;
                };
                if over_before && !self.is(Mistake::PushWithoutRing) {
                    Self::ring(&mut state, Ring::Awake);
                }
                state.relays[number].phase = Phase::AwakeOurs;
                state.relays[number].wanted = true;
            }
            Action::StopPushing(number) => {
                let relay = &mut state.relays[number];
                relay.phase = match &relay.phase {
                    Phase::ListedFirst(writers) => Phase::Listed(writers.clone()),
                    _ if self.is(Mistake::SleepWithoutList) => Phase::Listed(BTreeSet::new()),
                    _ if self.is(Mistake::ListBeforeZero) => {
                        let writers = Self::under_way(last);
                        relay.wanted = true;
                        relay.phase = Phase::ListedFirst(writers);
                        return Some(state);
                    }
                    _ => Phase::Zeroed,
                };
                state.ahead = false;
            }
            Action::List(number) => {
                // Of a peer that pushes meanwhile.
                let kept_awake = state.ahead;
                let writers = Self::under_way(&state);
                let relay = &mut state.relays[number];
                relay.phase = if kept_awake {
                    Phase::AwakePeer
                } else {
                    Phase::Listed(writers)
                };
                relay.wanted = true;
            }
            Action::Check(number) => {
                let open = Self::under_way(&state);
                let relay = &mut state.relays[number];
                if let Phase::Listed(writers) = &mut relay.phase {
                    writers.retain(|writer| open.contains(writer));
                    relay.wanted = !self.is(Mistake::SleepWithoutWalk);
                }
            }
            Action::Sleep(number) => state.relays[number].phase = Phase::Asleep,
            Action::Listen(number) => {
                let relay = &mut state.relays[number];
                relay.listening = true;
                if relay.phase.pushes() {
                    // It looks by itself, and lists before it sleeps.
                    relay.wanted = true;
                } else if !self.is(Mistake::NoLookAfterReconnect) {
                    Self::begin(relay);
                }
            }
            Action::LoseNotifications(number) => {
                state.faults += 1;
                state.relays[number].listening = false;
                state.rings.retain(|(relay, _)| *relay != number);
            }
            Action::Die(number) => {
                // Whoever takes its bucket over begins with it as with a new session.
                state.faults += 1;
                state.rings.retain(|(relay, _)| *relay != number);
                Self::begin(&mut state.relays[number]);
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("no wake-up is lost", |model: &Self, state: &State| {
                let mut actions = Vec::new();
                model.actions(state, &mut actions);
                actions.iter().any(Action::is_progress)
                    || state.claimed.iter().all(|claimed| *claimed)
            }),
            Property::sometimes("a writer is spared the ring", |_, state: &State| {
                state.writers.contains(&Writer::Decided(false))
            }),
            Property::sometimes("all sleep again", |_, state: &State| {
                state.pushes == 2
                    && state.claimed.iter().all(|claimed| *claimed)
                    && state
                        .relays
                        .iter()
                        .all(|relay| relay.phase == Phase::Asleep)
            }),
        ]
    }
}
