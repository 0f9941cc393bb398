//! Who may publish what: lease, bucket, claim, send, confirm, mark, hand-back and takeover.
//!
//! One bucket with the three events of one aggregate, of which the last commits at any time; two replicas that die,
//! freeze (whatever does nothing for a while is frozen) and come back; a broker that takes messages late. Statements of
//! a client run on after it died, as they do in a PostgreSQL backend.
//!
//! What the code says of these things is in `src/store/mod.rs` and `src/relay/mod.rs`.

use std::collections::BTreeSet;

use stateright::{Model, Property};

const REPLICAS: usize = 2;
const EVENTS: usize = 3;
/// Every event once, and all of them again by another holder.
const LONGEST_LOG: usize = 2 * EVENTS;

/// A token is the number of the process start, from 1.
type Token = u8;

/// What could have been built wrong, and has to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    None,
    /// Marks ask for id and status only.
    MarkWithoutToken,
    /// Hand-backs ask for id and status only.
    ReleaseWithoutToken,
    /// Nothing bars a claim of a dead client while its bucket is freed.
    ClaimWithoutBucketLock,
    /// Takeover sees the rows as they were before it waited for a claim that still ran.
    TakeoverOnOldSnapshot,
    /// More is claimed of an aggregate that has rows in hand.
    ClaimBesideRowsInHand,
    /// The lease is not looked at before each send.
    SendWithoutLease,
    /// A heartbeat revives a lease that is over.
    RenewOverLease,
    /// The holder thinks that its lease lasts longer than the database does.
    LateClock,
    /// Two events of an aggregate are unconfirmed at a time.
    TwoUnconfirmed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Row {
    visible: bool,
    published: bool,
    claim: Option<Token>,
}

/// Of a token, in the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Lease {
    Valid,
    /// Its time is over.
    Over,
    /// Taken over: the replica's row is gone.
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Stage {
    /// Claimed, not sent.
    Held,
    /// The lease was looked at; it is about to leave.
    Leaving,
    Sent,
    Confirmed,
}

/// A process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Replica {
    token: Option<Token>,
    /// By its own clock, or because it was told.
    void: bool,
    hand: Vec<(usize, Stage)>,
}

/// A claim as the backend runs it, whatever became of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Claim {
    replica: usize,
    token: Token,
}

/// A statement on its way to the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Write {
    Mark(usize, Token),
    Release(usize, Token),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    rows: Vec<Row>,
    bucket: Option<Token>,
    leases: Vec<Lease>,
    replicas: Vec<Replica>,
    claim: Option<Claim>,
    /// Taking over this token, with the rows that its snapshot saw.
    takeover: Option<(Token, BTreeSet<usize>)>,
    writes: BTreeSet<Write>,
    /// Messages that the broker has not taken yet.
    wire: BTreeSet<(usize, Token)>,
    /// What the broker took, in this order.
    log: Vec<usize>,
    faults: u8,
    /// What must never happen, and did.
    wrong: Option<&'static str>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Action {
    Commit(usize),
    Start(usize),
    Acquire(usize),
    ClaimBegins(usize),
    ClaimEnds,
    Look(usize, usize),
    Leave(usize, usize),
    Taken(usize, Token),
    Confirm(usize, usize),
    AskMark(usize, usize),
    AskRelease(usize),
    Apply(Write),
    Renew(usize),
    TakeoverBegins(Token),
    TakeoverEnds,
    // Faults and the passing of time.
    LeaseOver(Token),
    Crash(usize),
    Lose(usize, Token),
}

impl Action {
    /// Does it happen by itself, sooner or later? Nothing may depend on the others.
    fn is_progress(&self, state: &State) -> bool {
        match self {
            Self::Crash(_) | Self::Lose(..) | Self::Renew(_) | Self::AskRelease(_) => false,
            // Of a process that is gone: its time ends by itself.
            Self::LeaseOver(token) => !state
                .replicas
                .iter()
                .any(|replica| replica.token == Some(*token)),
            _ => true,
        }
    }
}

pub(crate) struct Ownership {
    pub(crate) mistake: Mistake,
    pub(crate) faults: u8,
}

impl Ownership {
    fn is(&self, mistake: Mistake) -> bool {
        self.mistake == mistake
    }

    fn may_claim(&self, state: &State, token: Token) -> bool {
        state.bucket == Some(token)
    }

    /// The unbroken prefix, unless any of it is in hand.
    fn claimable(&self, state: &State) -> Vec<usize> {
        let waiting = |row: &Row| row.visible && !row.published;
        if !self.is(Mistake::ClaimBesideRowsInHand)
            && state
                .rows
                .iter()
                .any(|row| waiting(row) && row.claim.is_some())
        {
            return Vec::new();
        }
        (0..EVENTS)
            .filter(|id| waiting(&state.rows[*id]) && state.rows[*id].claim.is_none())
            .collect()
    }

    fn holder_is_dead(state: &State, token: Token) -> bool {
        let lease = state.leases[usize::from(token) - 1];
        // The session's lock goes with the process.
        let session = state
            .replicas
            .iter()
            .any(|replica| replica.token == Some(token));
        lease != Lease::Gone && (lease == Lease::Over || !session)
    }
}

impl Model for Ownership {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let row = Row {
            visible: true,
            published: false,
            claim: None,
        };
        let mut rows = vec![row; EVENTS];
        rows[EVENTS - 1].visible = false;
        vec![State {
            rows,
            bucket: None,
            leases: Vec::new(),
            replicas: vec![
                Replica {
                    token: None,
                    void: false,
                    hand: Vec::new()
                };
                REPLICAS
            ],
            claim: None,
            takeover: None,
            writes: BTreeSet::new(),
            wire: BTreeSet::new(),
            log: Vec::new(),
            faults: 0,
            wrong: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.wrong.is_some() {
            return;
        }
        actions.extend(
            (0..EVENTS)
                .filter(|id| !state.rows[*id].visible)
                .map(Action::Commit),
        );
        let may_fail = state.faults < self.faults;
        for (number, replica) in state.replicas.iter().enumerate() {
            let Some(token) = replica.token else {
                actions.push(Action::Start(number));
                continue;
            };
            if may_fail {
                actions.push(Action::Crash(number));
            }
            let lease = state.leases[usize::from(token) - 1];
            if replica.void {
                // What it holds it drops; a new token begins.
                actions.push(Action::Start(number));
            } else {
                if state.bucket.is_none() && lease == Lease::Valid {
                    actions.push(Action::Acquire(number));
                }
                if state.claim.is_none()
                    && self.may_claim(state, token)
                    && !self.claimable(state).is_empty()
                {
                    actions.push(Action::ClaimBegins(number));
                }
            }
            if self.is(Mistake::RenewOverLease) && lease == Lease::Over {
                actions.push(Action::Renew(number));
            }
            let unconfirmed = replica
                .hand
                .iter()
                .filter(|(_, stage)| matches!(stage, Stage::Leaving | Stage::Sent))
                .count();
            let next = replica
                .hand
                .iter()
                .position(|(_, stage)| *stage == Stage::Held);
            let most = if self.is(Mistake::TwoUnconfirmed) {
                2
            } else {
                1
            };
            if let Some(place) = next
                && unconfirmed < most
                && (!replica.void || self.is(Mistake::SendWithoutLease))
            {
                actions.push(Action::Look(number, place));
            }
            if !replica.void && replica.hand.iter().any(|(_, stage)| *stage == Stage::Held) {
                actions.push(Action::AskRelease(number));
            }
            for (place, (_, stage)) in replica.hand.iter().enumerate() {
                match stage {
                    Stage::Held => {}
                    Stage::Leaving => actions.push(Action::Leave(number, place)),
                    Stage::Sent => actions.push(Action::Confirm(number, place)),
                    Stage::Confirmed => actions.push(Action::AskMark(number, place)),
                }
            }
        }
        if state.claim.is_some() {
            actions.push(Action::ClaimEnds);
        }
        for (id, token) in &state.wire {
            actions.push(Action::Taken(*id, *token));
            // Of a connection that is gone.
            if !state
                .replicas
                .iter()
                .any(|replica| replica.token == Some(*token))
            {
                actions.push(Action::Lose(*id, *token));
            }
        }
        actions.extend(state.writes.iter().copied().map(Action::Apply));
        for token in (1..).take(state.leases.len()) {
            let lives = state
                .replicas
                .iter()
                .any(|replica| replica.token == Some(token));
            if state.leases[usize::from(token) - 1] == Lease::Valid && (may_fail || !lives) {
                actions.push(Action::LeaseOver(token));
            }
            let somebody = state
                .replicas
                .iter()
                .any(|replica| replica.token.is_some_and(|other| other != token) && !replica.void);
            if state.takeover.is_none() && somebody && Self::holder_is_dead(state, token) {
                actions.push(Action::TakeoverBegins(token));
            }
        }
        if let Some((token, _)) = state.takeover {
            let barred = state.claim.is_some_and(|claim| claim.token == token)
                && !self.is(Mistake::ClaimWithoutBucketLock);
            if !barred {
                actions.push(Action::TakeoverEnds);
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Commit(id) => state.rows[id].visible = true,
            Action::Start(number) => {
                state.leases.push(Lease::Valid);
                let token = Token::try_from(state.leases.len()).expect("a few starts");
                state.replicas[number] = Replica {
                    token: Some(token),
                    void: false,
                    hand: Vec::new(),
                };
            }
            Action::Acquire(number) => state.bucket = state.replicas[number].token,
            Action::ClaimBegins(number) => {
                let token = state.replicas[number].token?;
                state.claim = Some(Claim {
                    replica: number,
                    token,
                });
            }
            Action::ClaimEnds => {
                let claim = state.claim.take()?;
                let ids = self.claimable(&state);
                for id in &ids {
                    state.rows[*id].claim = Some(claim.token);
                }
                // The answer finds its client, or nobody.
                let replica = &mut state.replicas[claim.replica];
                if replica.token == Some(claim.token) && !replica.void {
                    replica
                        .hand
                        .extend(ids.into_iter().map(|id| (id, Stage::Held)));
                }
            }
            Action::Look(number, place) => {
                if state.replicas[number].void {
                    state.wrong = Some("sent under a void token");
                }
                state.replicas[number].hand[place].1 = Stage::Leaving;
            }
            Action::Leave(number, place) => {
                let (id, stage) = &mut state.replicas[number].hand[place];
                *stage = Stage::Sent;
                let id = *id;
                let token = state.replicas[number].token?;
                state.wire.insert((id, token));
            }
            Action::Taken(id, token) => {
                state.wire.remove(&(id, token));
                state.log.push(id);
            }
            Action::Confirm(number, place) => {
                let (id, _) = state.replicas[number].hand[place];
                let token = state.replicas[number].token?;
                if state.wire.contains(&(id, token)) {
                    return None;
                }
                state.replicas[number].hand[place].1 = Stage::Confirmed;
            }
            Action::AskMark(number, place) => {
                let (id, _) = state.replicas[number].hand.remove(place);
                state
                    .writes
                    .insert(Write::Mark(id, state.replicas[number].token?));
            }
            Action::AskRelease(number) => {
                // The first that was not sent and all that follow, in one statement.
                let token = state.replicas[number].token?;
                let first = state.replicas[number]
                    .hand
                    .iter()
                    .position(|(_, stage)| *stage == Stage::Held)?;
                for (id, _) in state.replicas[number].hand.split_off(first) {
                    state.writes.insert(Write::Release(id, token));
                }
            }
            Action::Apply(write) => {
                state.writes.remove(&write);
                let (id, token, checks) = match write {
                    Write::Mark(id, token) => (id, token, !self.is(Mistake::MarkWithoutToken)),
                    Write::Release(id, token) => {
                        (id, token, !self.is(Mistake::ReleaseWithoutToken))
                    }
                };
                let row = &mut state.rows[id];
                let ours = row.claim == Some(token);
                if row.published || (checks && !ours) {
                    return Some(state);
                }
                if !ours {
                    state.wrong = Some("a row was changed by who does not hold it");
                }
                match write {
                    Write::Mark(..) => row.published = true,
                    Write::Release(..) => row.claim = None,
                }
            }
            Action::Renew(number) => {
                let token = state.replicas[number].token?;
                state.leases[usize::from(token) - 1] = Lease::Valid;
                state.replicas[number].void = false;
            }
            Action::TakeoverBegins(token) => {
                state.leases[usize::from(token) - 1] = Lease::Over;
                let rows = (0..EVENTS)
                    .filter(|id| state.rows[*id].claim == Some(token))
                    .collect();
                state.takeover = Some((token, rows));
            }
            Action::TakeoverEnds => {
                let (token, seen) = state.takeover.take()?;
                state.leases[usize::from(token) - 1] = Lease::Gone;
                if state.bucket == Some(token) {
                    state.bucket = None;
                }
                for (id, row) in state.rows.iter_mut().enumerate() {
                    let sees = !self.is(Mistake::TakeoverOnOldSnapshot) || seen.contains(&id);
                    if row.claim == Some(token) && !row.published && sees {
                        row.claim = None;
                    }
                }
            }
            Action::LeaseOver(token) => {
                state.leases[usize::from(token) - 1] = Lease::Over;
                for replica in &mut state.replicas {
                    if replica.token == Some(token) {
                        state.faults += 1;
                        replica.void = !self.is(Mistake::LateClock);
                    }
                }
            }
            Action::Crash(number) => {
                state.faults += 1;
                state.replicas[number] = Replica {
                    token: None,
                    void: false,
                    hand: Vec::new(),
                };
            }
            Action::Lose(id, token) => {
                state.wire.remove(&(id, token));
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("first copies leave in order", |_, state: &State| {
                let mut seen = 0;
                state.log.iter().all(|id| {
                    let fits = *id <= seen;
                    seen = seen.max(*id + 1);
                    fits
                })
            }),
            Property::always(
                "without a fault nothing leaves twice",
                |_, state: &State| {
                    let ids: BTreeSet<_> = state.log.iter().collect();
                    state.faults > 0 || ids.len() == state.log.len()
                },
            ),
            Property::always("what is marked was confirmed", |_, state: &State| {
                (0..EVENTS).all(|id| !state.rows[id].published || state.log.contains(&id))
            }),
            Property::always("no row is in two hands", |_, state: &State| {
                let mut held = BTreeSet::new();
                let valid = state.replicas.iter().filter(|replica| !replica.void);
                valid
                    .flat_map(|replica| &replica.hand)
                    .all(|(id, _)| held.insert(*id))
            }),
            Property::always("only the holder acts", |_, state: &State| {
                state.wrong.is_none()
            }),
            Property::always("nothing is stranded", |model: &Self, state: &State| {
                let mut actions = Vec::new();
                model.actions(state, &mut actions);
                let goes_on = actions.iter().any(|action| {
                    action.is_progress(state) && model.next_state(state, action.clone()).is_some()
                });
                goes_on || state.wrong.is_some() || state.rows.iter().all(|row| row.published)
            }),
            Property::sometimes("all is published after a takeover", |_, state: &State| {
                state.leases.contains(&Lease::Gone) && state.rows.iter().all(|row| row.published)
            }),
        ]
    }

    fn within_boundary(&self, state: &State) -> bool {
        // Each fault starts one process anew, beside the first ones; a hand-back makes a round of its own.
        state.leases.len() <= REPLICAS + usize::from(self.faults) && state.log.len() <= LONGEST_LOG
    }
}
