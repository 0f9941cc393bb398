//! Events that cannot go cost the others nothing, and go as soon as they can, whatever frees them. The tick is an hour
//! here: only a ring, a timer or the sweep can have brought them back.

use std::time::{Duration, Instant};

use crate::support::{Arrival, Ledger, Relay, SOON, World};

const NO_TICK: (&str, &str) = ("relay.tick", "1h");
/// "Within a second", on a machine that runs all of this on two cores.
const AT_ONCE: Duration = Duration::from_secs(3);
/// Nothing is parked behind an event that is due within ten seconds.
const LATE: &str = "now() + interval '11 seconds'";

fn ids(arrivals: &[Arrival]) -> Vec<i64> {
    arrivals.iter().map(|arrival| arrival.id).collect()
}

impl World {
    /// A dead event and so many behind it, in each of so many aggregates named 1, 2, …; the ids of each
    /// aggregate ascend.
    async fn held(&self, aggregates: i32, behind: i32) {
        let sql = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, status, holds)
                   SELECT 'held', a::text, 'Happened', '{}', CASE n WHEN 0 THEN 'dead' ELSE 'pending' END,
                          CASE n WHEN 0 THEN true END
                   FROM generate_series(0, $2::int) n, generate_series(1, $1::int) a ORDER BY n, a";
        self.db.execute(sql, &[&aggregates, &behind]).await.unwrap();
    }

    async fn scheduled(&self, aggregate_id: &str, event_type: &str, at: &str) -> i64 {
        self.one(&format!(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, next_attempt_at)
             VALUES ('order', '{aggregate_id}', '{event_type}', '{{}}', {at}) RETURNING id"
        ))
        .await
    }

    async fn of_aggregate(&self, aggregate_id: &str, status: &str) -> Vec<i64> {
        self.one(&format!(
            "SELECT coalesce(array_agg(id ORDER BY id), '{{}}') FROM outbox
             WHERE aggregate_id = '{aggregate_id}' AND status = '{status}'"
        ))
        .await
    }

    /// Waits until so many events are parked. Each round parks some: so many as wait behind one are asked for by
    /// events that go.
    async fn until_parked(&mut self, count: i64) -> usize {
        let parked = "SELECT count(*) FROM outbox WHERE status = 'pending' AND claimed_by IS NULL AND parked";
        let (began, mut sent) = (Instant::now(), 0);
        while self.one::<i64>(parked).await != count {
            assert!(
                began.elapsed() < SOON,
                "not {count} parked\n{}",
                self.table_state().await
            );
            let id = self.insert(("wake", "1"), "Happened", "{}").await;
            assert_eq!(self.next_arrival(SOON).await.unwrap().id, id);
            sent += 1;
        }
        self.until(
            "SELECT NOT EXISTS (SELECT FROM outbox WHERE aggregate_type = 'wake' AND status = 'pending')",
            SOON,
        )
        .await;
        sent
    }

    /// So many events of one aggregate leave, each before the next is written: the relay claims so many times.
    async fn leave_one_by_one(&mut self, events: usize) {
        for _ in 0..events {
            let id = self.insert(("free", "1"), "Happened", "{}").await;
            let arrival = self.next_arrival(AT_ONCE).await.expect("at once");
            assert_eq!(arrival.id, id);
        }
    }

    /// What the relay reads for events that leave one by one. Not while the sweep looks at all that are parked, which it
    /// does once a minute.
    async fn cost_of(&mut self, events: usize) -> Cost {
        loop {
            let before = self.cost().await;
            self.leave_one_by_one(events).await;
            let after = self.cost().await;
            let cost = Cost {
                visits: after.visits - before.visits,
                swept: after.swept - before.swept,
                reads: after.reads - before.reads,
            };
            // A heartbeat asks, too, whether any is parked.
            if cost.swept < 100 {
                return cost;
            }
        }
    }

    /// All that the relay read so far. A session of PostgreSQL's tells its counts where
    /// a transaction ends, but once a second at most, and else when it has idled for ten (`pgstat_report_stat`): one
    /// more event, a second later, has the relay's session end one.
    async fn cost(&mut self) -> Cost {
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        self.leave_one_by_one(1).await;
        Cost {
            visits: self.settled(VISITS).await,
            swept: self.one(SWEPT).await,
            reads: self.one(READS).await,
        }
    }

    /// A count of the server's, once it does not change any more: until version 15 it was told by a process of its own,
    /// a moment late.
    async fn settled(&self, sql: &str) -> i64 {
        let (mut count, mut since) = (self.one(sql).await, Instant::now());
        while since.elapsed() < Duration::from_secs(3) {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let now = self.one(sql).await;
            if now != count {
                (count, since) = (now, Instant::now());
            }
        }
        count
    }
}

/// Times that it was looked for events that hold an aggregate, which is done at each visit of one.
const VISITS: &str = "SELECT pg_stat_get_numscans('outbox_holding'::regclass)";
/// Steps of the sweep from one aggregate to the next.
const SWEPT: &str = "SELECT pg_stat_get_numscans('outbox_parked'::regclass)";
/// Entries of the outbox's indexes that were read, also by heartbeats; but for those that the look at the lag counts
/// in.
const READS: &str = "SELECT sum(pg_stat_get_tuples_returned(oid))::bigint FROM pg_class
     WHERE relkind = 'i' AND relnamespace = current_schema()::regnamespace AND relname LIKE 'outbox%'
       AND relname NOT IN ('outbox_due', 'outbox_dead')";

#[derive(Debug)]
struct Cost {
    visits: i64,
    swept: i64,
    reads: i64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_leaves_at_once_beside_many_aggregates_that_cannot_go() {
    const MANY: i32 = 5_000;
    let mut world = World::new().await;
    world.held(MANY, 1).await;
    world
        .sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, next_attempt_at)
             SELECT 'tomorrow', n::text, 'Reminded', '{}', now() + interval '1 day' FROM generate_series(1, 5000) n",
        )
        .await;
    let _relay = world.ready_relay(&[NO_TICK]).await;
    world.until_parked(MANY.into()).await;
    for statistics in ["stale", "fresh"] {
        if statistics == "fresh" {
            world.sql("VACUUM ANALYZE outbox").await;
        }
        // Whoever comes first meets what is left of those that were parked.
        world.leave_one_by_one(5).await;
        let cost = world.cost_of(5).await;
        assert!((5..500).contains(&cost.visits), "{statistics}: {cost:?}");
        // A statement that reads one class from its beginning to its end would read as many at once.
        assert!(cost.reads < i64::from(MANY), "{statistics}: {cost:?}");
    }
    let pending = world.count("pending").await;
    assert_eq!(pending, i64::from(MANY) + 5_000, "held, and still there");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_is_done_to_what_held_them_back_frees_them_at_once_and_in_order() {
    let mut world = World::new().await;
    world.held(1_000, 12).await;
    let _relay = world.ready_relay(&[NO_TICK]).await;
    world.until_parked(12_000).await;
    for (aggregate, change) in [
        ("1", "UPDATE outbox SET status = 'discarded'"),
        (
            "2",
            "UPDATE outbox SET status = 'pending', next_attempt_at = now()",
        ),
        // Long after it was written.
        (
            "3",
            "UPDATE outbox SET status = 'pending', created_at = now() - interval '1 day', next_attempt_at = now()",
        ),
        ("4", "DELETE FROM outbox"),
        ("5", "UPDATE outbox SET holds = false"),
    ] {
        let mut wanted = world.of_aggregate(aggregate, "pending").await;
        if change.contains("'pending'") {
            wanted.insert(0, world.of_aggregate(aggregate, "dead").await[0]);
        }
        let filter = format!("WHERE status = 'dead' AND aggregate_id = '{aggregate}'");
        world.sql(&format!("{change} {filter}")).await;
        let arrivals = world.arrivals(wanted.len(), AT_ONCE).await;
        assert_eq!(ids(&arrivals), wanted, "{change}");
    }
    // Many at once, by the command.
    let many: Vec<i64> = world
        .one("SELECT array_agg(id ORDER BY id) FROM outbox WHERE aggregate_id::int > 500 AND status IN ('dead', 'pending')")
        .await;
    world
        .sql("UPDATE outbox SET last_error = 'nacked: x' WHERE aggregate_id::int > 500 AND status = 'dead'")
        .await;
    let run = world
        .command(&[], &["dead", "replay", "--reason", "nacked"])
        .await;
    assert_eq!(run.status.code(), Some(0), "{}", run.stderr);
    let arrivals = world.arrivals(many.len(), SOON).await;
    Ledger::of(&arrivals).assert_sound(&many);
    assert_eq!(
        world.count("pending").await,
        495 * 12,
        "the others are held"
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_behind_a_scheduled_one_leave_after_it_in_order() {
    let mut world = World::new().await;
    let _relay = world.ready_relay(&[NO_TICK]).await;
    // One that is due too soon for anything to be parked behind it, and one that is not.
    let soon = world
        .scheduled("soon", "Reminded", "now() + interval '2 seconds'")
        .await;
    let late = world.scheduled("late", "Reminded", LATE).await;
    let mut wanted = vec![vec![soon], vec![late]];
    for _ in 0..6 {
        for (aggregate, ids) in ["soon", "late"].into_iter().zip(&mut wanted) {
            ids.push(world.insert(("order", aggregate), "Happened", "{}").await);
        }
    }
    assert_eq!(
        ids(&world.arrivals(7, Duration::from_secs(2) + AT_ONCE).await),
        wanted[0]
    );
    world.until_parked(6).await;
    let oldest = world.store.lag().await.unwrap().oldest.unwrap();
    assert_eq!(oldest.id, wanted[1][1]);
    let said = format!("it is behind event {late}, which is due in ");
    assert!(oldest.waits_for.starts_with(&said), "{}", oldest.waits_for);
    assert_eq!(
        ids(&world.arrivals(7, Duration::from_secs(11) + AT_ONCE).await),
        wanted[1]
    );
    world.until_published(SOON).await;
    let early: bool = world
        .one("SELECT bool_or(published_at < next_attempt_at) FROM outbox")
        .await;
    assert!(!early, "before it was due");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scheduled_event_that_is_changed_by_plain_sql_lets_the_others_go() {
    let mut world = World::new().await;
    let _relay = world.ready_relay(&[NO_TICK]).await;
    for change in [
        "UPDATE outbox SET next_attempt_at = now()",
        "UPDATE outbox SET status = 'discarded'",
        "DELETE FROM outbox",
        // Put off first, by which it is in the walk again, and then called off.
        "UPDATE outbox SET parked = false WHERE status = 'pending' AND next_attempt_at > now();
         UPDATE outbox SET status = 'discarded'",
    ] {
        let head = world
            .scheduled("1", "Reminded", "now() + interval '1 day'")
            .await;
        let mut wanted = vec![head];
        for _ in 0..6 {
            wanted.push(world.insert(("order", "1"), "Happened", "{}").await);
        }
        world.until_parked(6).await;
        if !change.starts_with("UPDATE outbox SET next_attempt_at") {
            wanted.remove(0);
        }
        world.sql(&format!("{change} WHERE id = {head}")).await;
        assert_eq!(
            ids(&world.arrivals(wanted.len(), AT_ONCE).await),
            wanted,
            "{change}"
        );
        world.until_published(SOON).await;
    }
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_whose_transaction_outlasts_its_time_leaves_at_its_commit() {
    let mut world = World::new().await;
    let _relay = world.ready_relay(&[NO_TICK]).await;
    let writer = world.client().await;
    writer
        .batch_execute(
            "BEGIN; INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, next_attempt_at)
                    VALUES ('order', '1', 'Reminded', '{}', now() + interval '1100 milliseconds');
             SELECT pg_sleep(1.5); COMMIT",
        )
        .await
        .unwrap();
    world.arrivals(1, AT_ONCE).await;
    world.until_published(SOON).await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_events_behind_a_dead_one_are_held_and_then_drain_in_order() {
    let mut world = World::new().await;
    world.held(1, 2_000).await;
    // As they are after many rounds.
    world
        .sql("UPDATE outbox SET parked = true WHERE status = 'pending' AND id % 7 <> 0")
        .await;
    let _relay = world.ready_relay(&[NO_TICK]).await;
    world.insert(("free", "1"), "Happened", "{}").await;
    world.arrivals(1, AT_ONCE).await;
    assert_eq!(world.count("pending").await, 2_000);
    world
        .sql("UPDATE outbox SET status = 'discarded' WHERE status = 'dead'")
        .await;
    let wanted = world.of_aggregate("1", "pending").await;
    assert_eq!(wanted.len(), 2_000);
    let arrivals = world.arrivals(wanted.len(), SOON * 2).await;
    assert_eq!(ids(&arrivals), wanted);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_handed_back_behind_a_failed_event_goes_on() {
    let mut world = World::new().await;
    world.unbind("#").await;
    world.bind("*.Happened").await;
    let file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    std::fs::write(
        file.path(),
        "[[routes]]\naggregate_type = \"order\"\non_dead = \"skip\"\n",
    )
    .unwrap();
    let path = file.path().to_str().unwrap();
    let settings = [NO_TICK, ("retry.max_attempts", "1")];
    let relay = Relay::start(&world.environment(), &settings, &["--config", path, "run"]);
    world.until_owned(&relay).await;
    let head = world
        .scheduled("1", "Lost", "now() + interval '1 day'")
        .await;
    let mut wanted = Vec::new();
    for _ in 0..3 {
        wanted.push(world.insert(("order", "1"), "Happened", "{}").await);
    }
    world.until_parked(3).await;
    // All four are claimed together, three of them from where they were parked.
    world
        .sql(&format!(
            "UPDATE outbox SET next_attempt_at = now() WHERE id = {head}"
        ))
        .await;
    assert_eq!(ids(&world.arrivals(3, AT_ONCE).await), wanted);
    assert_eq!(world.of_aggregate("1", "dead").await, [head]);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parked_event_that_is_locked_when_its_turn_comes_leaves_once_it_is_not() {
    let mut world = World::new().await;
    world.held(1, 6).await;
    let _relay = world.ready_relay(&[NO_TICK]).await;
    world.until_parked(6).await;
    let wanted = world.of_aggregate("1", "pending").await;
    let operator = world.client().await;
    // A claim of an aggregate with others waiting takes four.
    let lock = format!(
        "BEGIN; SELECT FROM outbox WHERE id = {} FOR UPDATE",
        wanted[4]
    );
    operator.batch_execute(&lock).await.unwrap();
    world
        .sql("UPDATE outbox SET status = 'discarded' WHERE status = 'dead'")
        .await;
    assert_eq!(ids(&world.arrivals(4, AT_ONCE).await), wanted[..4]);
    operator.batch_execute("COMMIT").await.unwrap();
    assert_eq!(ids(&world.arrivals(2, AT_ONCE).await), wanted[4..]);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_postponed_event_that_is_locked_when_it_is_due_leaves_once_it_is_not() {
    let mut world = World::new().await;
    let _relay = world.ready_relay(&[NO_TICK]).await;
    let id = world
        .scheduled("1", "Reminded", "now() + interval '1500 milliseconds'")
        .await;
    let operator = world.client().await;
    let lock = format!("BEGIN; SELECT FROM outbox WHERE id = {id} FOR UPDATE");
    operator.batch_execute(&lock).await.unwrap();
    let due =
        format!("SELECT next_attempt_at < now() - interval '1 second' FROM outbox WHERE id = {id}");
    world.until(&due, SOON).await;
    operator.batch_execute("COMMIT").await.unwrap();
    world.arrivals(1, AT_ONCE).await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_freed_without_a_ring_is_found_by_the_sweep() {
    let mut world = World::new().await;
    world.held(20, 6).await;
    let _relay = world.ready_relay(&[NO_TICK]).await;
    world.until_parked(120).await;
    world
        .sql("SET bellwire.ring = off; UPDATE outbox SET status = 'discarded' WHERE status = 'dead'; RESET bellwire.ring")
        .await;
    let wanted: Vec<i64> = world
        .one("SELECT array_agg(id) FROM outbox WHERE status = 'pending'")
        .await;
    // Of its minute, and of a heartbeat.
    let arrivals = world.arrivals(120, Duration::from_secs(60) + SOON).await;
    Ledger::of(&arrivals).assert_sound(&wanted);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_that_polls_finds_by_the_tick_what_was_freed() {
    let mut world = World::new().await;
    world.held(20, 6).await;
    let settings = [("relay.wake", "poll"), ("relay.tick", "500ms")];
    let _relay = world.ready_relay(&settings).await;
    world.until_parked(120).await;
    let wanted: Vec<i64> = world
        .one("SELECT array_agg(id) FROM outbox WHERE status = 'pending'")
        .await;
    world
        .sql("UPDATE outbox SET status = 'discarded' WHERE status = 'dead'")
        .await;
    let arrivals = world.arrivals(120, AT_ONCE * 2).await;
    Ledger::of(&arrivals).assert_sound(&wanted);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_freed_while_its_relay_is_dead_leaves_by_the_one_that_takes_over() {
    let mut world = World::new().await;
    world.held(200, 6).await;
    let mut first = world.ready_relay(&[NO_TICK]).await;
    world.until_shares(&[64], SOON).await;
    world.until_parked(1_200).await;
    let mut wanted = [Vec::new(), Vec::new()];
    for (half, ids) in wanted.iter_mut().enumerate() {
        *ids = world
            .one(&format!(
                "SELECT array_agg(id) FROM outbox WHERE status = 'pending' AND aggregate_id::int % 2 = {half}"
            ))
            .await;
    }
    let discard = |half: u8| {
        format!(
            "UPDATE outbox SET status = 'discarded' WHERE status = 'dead' AND aggregate_id::int % 2 = {half}"
        )
    };
    // Nobody hears it.
    first.kill().await;
    world.sql(&discard(0)).await;
    let mut second = world.ready_relay(&[NO_TICK]).await;
    Ledger::of(&world.arrivals(600, SOON).await).assert_sound(&wanted[0]);
    // A peer hears it that does not own them yet.
    let _third = world.ready_relay(&[NO_TICK]).await;
    world.until_shares(&[32, 32], SOON).await;
    second.kill().await;
    world.sql(&discard(1)).await;
    Ledger::of(&world.arrivals(600, SOON).await).assert_sound(&wanted[1]);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_pass_takes_along_what_was_set_aside_and_may_go() {
    let mut world = World::new().await;
    let free: Vec<i64> = world
        .one(
            "WITH free AS (
                 INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at, next_attempt_at, parked)
                 SELECT 'order', (n % 20)::text, 'Happened', '{}', now() - interval '1 day', now(), CASE WHEN n % 3 = 0 THEN NULL ELSE true END
                 FROM generate_series(1, 300) n RETURNING id)
             SELECT array_agg(id) FROM free",
        )
        .await;
    world.held(5, 3).await;
    let run = world.command(&[], &["run", "--once"]).await;
    assert_eq!(run.status.code(), Some(0), "{}", run.stderr);
    Ledger::of(&world.arrivals(300, SOON).await).assert_sound(&free);
    assert_eq!(world.count("pending").await, 15);
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_time_that_a_row_can_have_fails_its_insert_or_stops_the_relay() {
    let mut world = World::new().await;
    let _relay = world.ready_relay(&[NO_TICK]).await;
    let times = "'-infinity', '4713-01-01 BC', '1969-12-31', now(), '2999-12-31', '294276-01-01', 'infinity'";
    world
        .sql(&format!(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at, next_attempt_at, parked)
             SELECT 'order', row_number() OVER ()::text, 'Happened', '{{}}', c, n, p
             FROM unnest(ARRAY[{times}]::timestamptz[]) c, unnest(ARRAY[{times}]::timestamptz[]) n,
                  unnest(ARRAY[NULL, false, true]) p"
        ))
        .await;
    // Three times and the present, each with seven times of writing and three states.
    world.arrivals(4 * 7 * 3, SOON).await;
    world
        .until(
            "SELECT bool_and(next_attempt_at > now()) FROM outbox WHERE status = 'pending'",
            SOON,
        )
        .await;
    world.clean().await;
}
