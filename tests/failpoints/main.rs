//! A relay crashes right before or right after one of its steps, in the midst of its work; another one
//! takes over. Needs a build with the feature `failpoints`: `make test-failpoints` makes one.

#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)]

#[expect(dead_code, unused_imports, reason = "what only the other tests need")]
#[path = "../it/support/mod.rs"]
mod support;

use std::collections::{HashMap, HashSet};
use std::os::unix::process::ExitStatusExt as _;

use rustix::process::Signal;
use support::{Ledger, Proxy, Relay, SOON, World, amqp_url};

const AGGREGATES: i32 = 50;
const ROWS: i32 = 12;
/// Small enough that the backlog takes many claims, and large enough that each has several rows.
const SMALL_HAND: [(&str, &str); 2] = [("relay.partitions", "2"), ("relay.window", "8")];
/// Sent and unconfirmed at most, with these settings.
const MOST_SENT: i64 = 2 * 8;

/// How often the events arrive that the crashed relay had at hand at the point.
#[derive(Clone, Copy)]
enum Arrive {
    /// They were never sent before.
    Once,
    /// They were confirmed before, and that is not recorded.
    Twice,
    /// What the crash left of sending, or of recording, decides.
    OnceOrTwice,
}

/// What the crashed relay left behind.
struct Crash {
    /// The events it had at hand at the point.
    at_hand: HashSet<i64>,
    /// The events that it had claimed and not recorded as published.
    in_hand: HashSet<i64>,
}

impl World {
    async fn ids(&self, condition: &str) -> HashSet<i64> {
        let sql = format!("SELECT id FROM outbox WHERE {condition}");
        let rows = self.db.query(&sql, &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    /// Waits for the crash of this relay at this point.
    async fn crash(&self, relay: Relay, point: &str) -> Crash {
        let name = relay.name.clone();
        let run = relay.finished(SOON).await;
        let signal = run.status.signal();
        assert_eq!(signal, Some(Signal::ABORT.as_raw()), "{}", run.stderr);
        let mark = format!("failpoint {point}:");
        let said = run.stderr.lines().find_map(|line| line.strip_prefix(&mark));
        let said = said.unwrap_or_else(|| panic!("not at {point}:\n{}", run.stderr));
        let at_hand = said
            .split_whitespace()
            .map(|id| id.parse().unwrap())
            .collect();
        // What it had sent to the database is done, or never will be.
        let gone = format!(
            "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name LIKE '%{name}')"
        );
        self.until(&gone, SOON).await;
        assert!(self.count("published").await > 0, "it had done nothing yet");
        assert!(self.count("pending").await > 0, "it had done everything");
        let claimed = format!("status = 'pending' AND claimed_by LIKE '{name}#%'");
        Crash {
            at_hand,
            in_hand: self.ids(&claimed).await,
        }
    }

    /// Another relay takes over: everything arrives, in order, and what arrives again is of the crashed
    /// one's hand; what that had at hand at the point arrives as often as said.
    async fn assert_taken_over(mut self, crash: &Crash, arrive: Arrive) {
        let relay = self.ready_relay(&[]).await;
        self.until_published(SOON).await;
        let events = usize::try_from(AGGREGATES * ROWS).unwrap();
        let arrivals = self.arrivals(events, SOON).await;
        Ledger::of(&arrivals).assert_sound(&self.committed().await);
        let mut times: HashMap<i64, usize> = HashMap::new();
        for arrival in &arrivals {
            *times.entry(arrival.id).or_default() += 1;
        }
        for (id, times) in &times {
            let most = if crash.in_hand.contains(id) { 2 } else { 1 };
            assert!(*times <= most, "event {id} arrived {times} times");
        }
        for id in &crash.at_hand {
            let right = match arrive {
                Arrive::Once => times[id] == 1,
                Arrive::Twice => times[id] == 2,
                Arrive::OnceOrTwice => true,
            };
            assert!(right, "event {id} at the point arrived {} times", times[id]);
        }
        drop(relay);
        self.clean().await;
    }

    async fn backlog() -> Self {
        let world = Self::new().await;
        world.fill("order", AGGREGATES, ROWS).await;
        world
    }

    /// A relay with the backlog before it that crashes the `time`th time that it comes to the point.
    async fn crashed(&self, point: &str, time: u32) -> Crash {
        let armed = format!("{point}=abort({time})");
        let settings = [&SMALL_HAND[..], &[("BELLWIRE_FAILPOINTS", &armed)]].concat();
        self.crash(self.relay(&settings), point).await
    }

    /// A relay that is told to stop while the broker owes it confirms, and crashes when it hands back what it had
    /// not sent.
    async fn crashed_in_release(&self, point: &str) -> Crash {
        let broker = Proxy::new(&amqp_url()).await;
        let url = broker.through(&amqp_url());
        let armed = format!("{point}=abort(1)");
        let settings = [
            ("AMQP_URL", url.as_str()),
            ("BELLWIRE_FAILPOINTS", &armed),
            // Late confirms must not be what has something handed back.
            ("rabbitmq.confirm_timeout", "50s"),
            ("relay.lease", "60s"),
        ];
        let relay = self.relay(&[&SMALL_HAND[..], &settings].concat());
        self.until(
            "SELECT count(*) > 50 FROM outbox WHERE status = 'published'",
            SOON,
        )
        .await;
        broker.mute(true);
        let unsent = format!(
            "SELECT count(*) > {MOST_SENT} FROM outbox WHERE status = 'pending' AND claimed_by LIKE '{}#%'",
            relay.name
        );
        self.until(&unsent, SOON).await;
        relay.signal(Signal::TERM);
        self.crash(relay, point).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_before_a_claim_repeats_only_what_was_sent_of_earlier_ones() {
    let world = World::backlog().await;
    let crash = world.crashed("claim:before", 12).await;
    assert!(crash.at_hand.is_empty(), "nothing of this claim is known");
    world.assert_taken_over(&crash, Arrive::Once).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_after_a_claim_repeats_nothing_of_it() {
    let world = World::backlog().await;
    let crash = world.crashed("claim:after", 12).await;
    assert!(!crash.at_hand.is_empty());
    assert!(crash.at_hand.is_subset(&crash.in_hand), "claimed for good");
    world.assert_taken_over(&crash, Arrive::Once).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_before_a_publish_does_not_repeat_it() {
    let world = World::backlog().await;
    let crash = world.crashed("publish:before", 100).await;
    assert_eq!(crash.at_hand.len(), 1);
    assert!(crash.at_hand.is_subset(&crash.in_hand));
    world.assert_taken_over(&crash, Arrive::Once).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_after_a_publish_repeats_no_more_than_was_in_hand() {
    let world = World::backlog().await;
    let crash = world.crashed("publish:after", 100).await;
    assert_eq!(crash.at_hand.len(), 1);
    assert!(
        crash.at_hand.is_subset(&crash.in_hand),
        "no confirm, no mark"
    );
    world.assert_taken_over(&crash, Arrive::OnceOrTwice).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_before_a_confirm_is_passed_on_repeats_its_event() {
    let world = World::backlog().await;
    let crash = world.crashed("confirm:before", 40).await;
    assert!(!crash.at_hand.is_empty());
    assert!(crash.at_hand.is_subset(&crash.in_hand));
    world.assert_taken_over(&crash, Arrive::Twice).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_after_a_confirm_was_passed_on_repeats_what_was_not_marked() {
    let world = World::backlog().await;
    let crash = world.crashed("confirm:after", 40).await;
    assert!(!crash.at_hand.is_empty());
    // The marker may have been as quick as the crash.
    world.assert_taken_over(&crash, Arrive::OnceOrTwice).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_before_a_mark_repeats_what_it_would_have_marked() {
    let world = World::backlog().await;
    let crash = world.crashed("mark:before", 3).await;
    assert!(!crash.at_hand.is_empty());
    assert!(crash.at_hand.is_subset(&crash.in_hand));
    world.assert_taken_over(&crash, Arrive::Twice).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_after_a_mark_repeats_nothing_of_it() {
    let world = World::backlog().await;
    let crash = world.crashed("mark:after", 3).await;
    assert!(!crash.at_hand.is_empty());
    assert!(crash.at_hand.is_disjoint(&crash.in_hand), "marked for good");
    world.assert_taken_over(&crash, Arrive::Once).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_before_a_release_repeats_nothing_of_it() {
    let world = World::backlog().await;
    let crash = world.crashed_in_release("release:before").await;
    assert!(!crash.at_hand.is_empty());
    assert!(crash.at_hand.is_subset(&crash.in_hand));
    world.assert_taken_over(&crash, Arrive::Once).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_after_a_release_repeats_nothing_of_it() {
    let world = World::backlog().await;
    let crash = world.crashed_in_release("release:after").await;
    assert!(!crash.at_hand.is_empty());
    assert!(
        crash.at_hand.is_disjoint(&crash.in_hand),
        "handed back for good"
    );
    world.assert_taken_over(&crash, Arrive::Once).await;
}
