use std::collections::{HashSet, VecDeque};

use super::*;

fn id(text: &str) -> Arc<str> {
    text.into()
}

fn of(message_id: &str) -> Option<Return> {
    Some(Return {
        message_id: Some(message_id.to_owned()),
        reason: format!("no route {message_id}"),
    })
}

fn returned(message_id: &str) -> Verdict {
    Verdict::Returned(format!("no route {message_id}").into())
}

fn book(ids: &[&str]) -> Verdicts<&'static str> {
    let mut book = Verdicts::new();
    for each in ids {
        book.sent(id(each));
    }
    book
}

fn pass(book: &mut Verdicts<&'static str>) -> Vec<(&'static str, Verdict)> {
    let mut verdicts = Vec::new();
    book.end_pass(&mut verdicts);
    verdicts
}

#[test]
fn a_bare_ack_counts_one_pass_later() {
    let mut book = book(&["a", "b"]);
    book.confirmed("a", id("a"), true, None);
    assert!(pass(&mut book).is_empty());
    assert!(book.owed());
    assert_eq!(pass(&mut book), [("a", Verdict::Published)]);
    assert!(!book.is_idle());
}

#[test]
fn the_last_ack_outstanding_counts_at_once() {
    let mut book = book(&["a"]);
    book.confirmed("a", id("a"), true, None);
    assert_eq!(pass(&mut book), [("a", Verdict::Published)]);
    assert!(book.is_idle() && !book.owed());
}

#[test]
fn a_return_on_a_neighbours_ack_is_the_neighbours_innocence() {
    let mut book = book(&["a", "bad", "c"]);
    // The unroutable one's own confirm is observed first, bare.
    book.confirmed("bad", id("bad"), true, None);
    assert!(pass(&mut book).is_empty());
    book.confirmed("a", id("a"), true, of("bad"));
    assert_eq!(pass(&mut book), [("bad", returned("bad"))]);
    // `a` waits: its own return might be handed to the confirm of `c`.
    assert!(pass(&mut book).is_empty());
    assert!(!book.owed());
    book.confirmed("c", id("c"), true, None);
    let mut verdicts = pass(&mut book);
    verdicts.sort_by_key(|(item, _)| *item);
    assert_eq!(
        verdicts,
        [("a", Verdict::Published), ("c", Verdict::Published)]
    );
}

#[test]
fn a_chain_of_handed_on_returns_accuses_exactly_the_returned() {
    let mut book = book(&["a", "x", "y", "d"]);
    book.confirmed("a", id("a"), true, of("x"));
    book.confirmed("x", id("x"), true, of("y"));
    assert_eq!(pass(&mut book), [("x", returned("x"))]);
    book.confirmed("y", id("y"), true, None);
    assert_eq!(pass(&mut book), [("y", returned("y"))]);
    // A bare confirm that resolved surely later than `a` settles it.
    assert_eq!(pass(&mut book), []);
    book.confirmed("d", id("d"), true, None);
    assert_eq!(pass(&mut book).len(), 2);
}

#[test]
fn a_later_bare_confirm_frees_who_carried_a_neighbours_return() {
    let mut book = book(&["a", "x", "c", "later"]);
    book.confirmed("a", id("a"), true, of("x"));
    assert!(pass(&mut book).is_empty()); // 0
    assert!(pass(&mut book).is_empty()); // 1
    book.confirmed("c", id("c"), true, None);
    assert!(pass(&mut book).is_empty()); // 2
    assert!(book.owed());
    let verdicts = pass(&mut book); // 3
    assert_eq!(
        verdicts,
        [("a", Verdict::Published), ("c", Verdict::Published)]
    );
}

#[test]
fn nacks_follow_the_same_rules() {
    let mut book = book(&["a", "b", "c"]);
    book.confirmed("a", id("a"), false, of("b"));
    book.confirmed("b", id("b"), false, None);
    book.confirmed("c", id("c"), false, None);
    assert_eq!(
        pass(&mut book),
        [
            ("a", Verdict::Nacked),
            ("b", returned("b")),
            ("c", Verdict::Nacked)
        ]
    );
}

#[test]
fn an_unknown_return_leaves_nothing_certain() {
    for message_id in [None, Some("nobody".to_owned())] {
        let mut book = book(&["a", "b", "c"]);
        let carried = Return {
            message_id,
            reason: "no route".into(),
        };
        book.confirmed("a", id("a"), true, Some(carried));
        book.confirmed("b", id("b"), true, None);
        book.confirmed("c", id("c"), true, None);
        assert!(book.stray());
        assert!(pass(&mut book).is_empty());
        assert!(
            book.end()
                .iter()
                .all(|(_, verdict)| *verdict == Verdict::Doubtful)
        );
    }
}

#[test]
fn a_shared_message_id_is_doubtful_once_returned() {
    let mut book = book(&["twin", "twin", "c"]);
    book.confirmed("first", id("twin"), true, of("twin"));
    assert_eq!(pass(&mut book), [("first", Verdict::Doubtful)]);
    book.confirmed("second", id("twin"), true, None);
    assert_eq!(pass(&mut book), [("second", Verdict::Doubtful)]);
    book.confirmed("c", id("c"), true, None);
    assert_eq!(pass(&mut book), [("c", Verdict::Published)]);
}

#[test]
fn the_end_of_a_channel_leaves_the_undecided_doubtful() {
    let mut book = book(&["a", "x", "c", "lost"]);
    book.confirmed("c", id("c"), true, None);
    book.confirmed("a", id("a"), true, of("x"));
    assert!(pass(&mut book).is_empty());
    let mut verdicts = book.end();
    verdicts.sort_by_key(|(item, _)| *item);
    // `a` might have a return that was never handed out.
    assert_eq!(
        verdicts,
        [("a", Verdict::Doubtful), ("c", Verdict::Published)]
    );
}

/// A small generator, so that the seed is fixed and no crate's algorithm matters.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(bound).unwrap()).unwrap()
    }
}

#[derive(Clone)]
struct Sent {
    number: u64,
    routable: bool,
    nacked: bool,
}

/// RabbitMQ, lapin's I/O thread and the lane's passes, interleaved at random.
struct World {
    dice: Dice,
    next: u64,
    /// Sent, and neither returned nor confirmed.
    at_broker: Vec<Sent>,
    /// Returned or routable: may be confirmed.
    answerable: Vec<Sent>,
    /// lapin's FIFO.
    waiting: VecDeque<u64>,
    /// Resolved and queued for the lane, in whatever order wakes had queued them.
    resolved: Vec<(Sent, Option<u64>)>,
    book: Verdicts<u64>,
    truth: HashMap<u64, Sent>,
    decided: HashSet<u64>,
}

impl World {
    fn new(seed: u64) -> Self {
        Self {
            dice: Dice(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15)),
            next: 0,
            at_broker: Vec::new(),
            answerable: Vec::new(),
            waiting: VecDeque::new(),
            resolved: Vec::new(),
            book: Verdicts::new(),
            truth: HashMap::new(),
            decided: HashSet::new(),
        }
    }

    fn send(&mut self) {
        let sent = Sent {
            number: self.next,
            routable: self.dice.below(3) > 0,
            nacked: self.dice.below(10) == 0,
        };
        self.next += 1;
        self.book.sent(sent.number.to_string().into());
        self.truth.insert(sent.number, sent.clone());
        self.at_broker.push(sent);
    }

    /// The broker routes the next message: an unroutable one is returned.
    fn route(&mut self) {
        if self.at_broker.is_empty() {
            return;
        }
        let sent = self.at_broker.remove(0);
        if !sent.routable {
            self.waiting.push_back(sent.number);
        }
        self.answerable.push(sent);
    }

    /// Confirms one, or several in the arbitrary order in which lapin walks a multiple ack.
    fn confirm(&mut self) {
        let several = 1 + self.dice.below(6);
        for _ in 0..several.min(self.answerable.len()) {
            let index = self.dice.below(self.answerable.len());
            let sent = self.answerable.swap_remove(index);
            let carried = self.waiting.pop_front();
            self.resolved.push((sent, carried));
        }
    }

    /// One pass of the lane. What resolved before it began is observed in it, in any order; what
    /// resolves meanwhile may be (a wake of another cause had queued its future).
    fn pass(&mut self) {
        let mut batch = std::mem::take(&mut self.resolved);
        while !batch.is_empty() {
            let index = self.dice.below(batch.len());
            let (sent, carried) = batch.swap_remove(index);
            self.observe(sent, carried);
            if self.dice.below(4) == 0 {
                self.confirm();
                if !self.resolved.is_empty() && self.dice.below(2) == 0 {
                    let early = self.dice.below(self.resolved.len());
                    let (sent, carried) = self.resolved.swap_remove(early);
                    self.observe(sent, carried);
                }
            }
        }
        let mut verdicts = Vec::new();
        self.book.end_pass(&mut verdicts);
        self.check(verdicts);
    }

    fn observe(&mut self, sent: Sent, carried: Option<u64>) {
        let carried = carried.and_then(|number| of(&number.to_string()));
        let id = sent.number.to_string().into();
        self.book.confirmed(sent.number, id, !sent.nacked, carried);
    }

    fn check(&mut self, verdicts: Vec<(u64, Verdict)>) {
        for (number, verdict) in verdicts {
            let truth = &self.truth[&number];
            let right = match (truth.routable, truth.nacked) {
                (false, _) => returned(&number.to_string()),
                (true, true) => Verdict::Nacked,
                (true, false) => Verdict::Published,
            };
            assert_eq!(verdict, right, "message {number}");
            assert!(self.decided.insert(number), "message {number} twice");
        }
    }
}

#[test]
fn no_interleaving_makes_a_false_verdict() {
    for seed in 1..=400 {
        let mut world = World::new(seed);
        for _ in 0..600 {
            match world.dice.below(8) {
                0..=2 if world.next - world.decided.len() as u64 <= 64 => world.send(),
                3 | 4 => world.route(),
                5 | 6 => world.confirm(),
                _ => world.pass(),
            }
        }
        while !world.book.is_idle() {
            world.route();
            world.confirm();
            world.pass();
        }
        assert_eq!(world.decided.len() as u64, world.next);
    }
}

#[test]
fn the_end_of_a_channel_at_any_moment_makes_no_false_success() {
    for seed in 1..=400 {
        let mut world = World::new(seed);
        for _ in 0..80 {
            match world.dice.below(8) {
                0..=2 => world.send(),
                3 | 4 => world.route(),
                5 | 6 => world.confirm(),
                _ => world.pass(),
            }
        }
        // The last passes observe what has resolved; the rest is rejected.
        world.answerable.clear();
        world.pass();
        let book = std::mem::replace(&mut world.book, Verdicts::new());
        let verdicts = book.end();
        let certain = verdicts
            .into_iter()
            .filter(|(_, verdict)| *verdict != Verdict::Doubtful)
            .collect();
        world.check(certain);
    }
}
