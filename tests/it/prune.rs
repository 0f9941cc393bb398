//! Published events are deleted when their time is over, in steps, and nothing else ever is; the relay
//! goes on meanwhile.

use std::time::{Duration, Instant};

use crate::support::{Load, Relay, Run, SOON, World};

const DONE: Option<i32> = Some(0);
const FAILED: Option<i32> = Some(1);

impl World {
    /// So many events that were published ten days ago, without the triggers.
    async fn published_long_ago(&self, count: i32) {
        self.sql(&format!(
            "SET session_replication_role = replica;
             INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, status, created_at, published_at)
             SELECT 'old', (n % 1000)::text, 'Placed', '{{}}', 'published', now() - interval '11 days',
                    now() - interval '10 days' + n * interval '1 millisecond'
             FROM generate_series(1, {count}) n;
             SET session_replication_role = DEFAULT"
        ))
        .await;
    }

    /// An event of each status that is a year old by all its times, and a published one that was
    /// written last year and published a minute ago.
    async fn that_stay(&self) {
        self.sql(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, status, created_at, published_at,
                                 next_attempt_at)
             SELECT 'stays', s, 'Placed', '{}'::jsonb, s, now() - interval '1 year', now() - interval '1 year',
                    'infinity'::timestamptz
             FROM unnest(ARRAY['pending', 'dead', 'discarded']) s
             UNION ALL
             SELECT 'stays', 'fresh', 'Placed', '{}'::jsonb, 'published', now() - interval '1 year',
                    now() - interval '1 minute', now()
             UNION ALL
             SELECT 'stays', 'without', 'Placed', '{}'::jsonb, 'published', now() - interval '1 year', NULL, now()",
        )
        .await;
    }

    async fn assert_all_stayed(&self) {
        let stayed: String = self
            .one("SELECT string_agg(aggregate_id, ' ' ORDER BY id) FROM outbox WHERE aggregate_type = 'stays'")
            .await;
        assert_eq!(stayed, "pending dead discarded fresh without");
    }

    async fn old(&self) -> i64 {
        self.one("SELECT count(*) FROM outbox WHERE aggregate_type = 'old'")
            .await
    }

    async fn until_pruned(&self, within: Duration) {
        let gone = "SELECT NOT EXISTS (SELECT FROM outbox WHERE aggregate_type = 'old')";
        self.until(gone, within).await;
    }
}

#[track_caller]
fn assert_code(run: &Run, code: Option<i32>) {
    assert_eq!(run.status.code(), code, "{}\n{}", run.stdout, run.stderr);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_published_events_are_pruned_and_by_the_time_they_were_published() {
    let world = World::new().await;
    world.published_long_ago(250).await;
    world.that_stay().await;
    let run = world.command(&[], &["prune", "--dry-run"]).await;
    assert_code(&run, DONE);
    assert_eq!(run.stdout, "250 published event(s) would be deleted");
    let run = world.command(&[], &["prune", "--dry-run", "--json"]).await;
    let report = r#"{"dry_run":true,"pruned":0,"matched":250}"#;
    assert_eq!(run.stdout, report);
    assert_eq!(world.old().await, 250, "a dry run changes nothing");

    for (older_than, left) in [("11d", 250), ("90000years", 250), ("9d", 0)] {
        let run = world
            .command(&[], &["prune", "--older-than", older_than])
            .await;
        assert_code(&run, DONE);
        assert_eq!(world.old().await, left, "{older_than}: {}", run.stdout);
    }
    world.assert_all_stayed().await;
    for age in ["", "-1d", "week"] {
        let run = world.command(&[], &["prune", "--older-than", age]).await;
        assert_code(&run, Some(2));
    }
    world.published_long_ago(1).await;
    let run = world.command(&[], &["prune", "--json"]).await;
    assert_eq!(run.stdout, r#"{"dry_run":false,"pruned":1}"#);
    world.assert_all_stayed().await;
    world.clean().await;
}

/// Each statement that deletes leaves a row with how many it deleted, and how long it may take.
async fn audit(world: &World) {
    let schema = &world.schema;
    world
        .sql(&format!(
            "CREATE TABLE audit (rows BIGINT, statement_timeout TEXT);
             CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema} AS $$
             BEGIN
                 INSERT INTO audit SELECT count(*), current_setting('statement_timeout') FROM gone;
                 RETURN NULL;
             END $$;
             CREATE TRIGGER audit AFTER DELETE ON outbox REFERENCING OLD TABLE AS gone
                 FOR EACH STATEMENT EXECUTE FUNCTION audit()"
        ))
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pruning_goes_in_steps_under_a_timeout_of_its_own() {
    let world = World::new().await;
    world.published_long_ago(1_050).await;
    audit(&world).await;
    let url = world.login("relay", &["statement_timeout = '5s'"]).await;
    let settings = [("prune.step", "100"), ("DATABASE_URL", url.as_str())];
    let run = world.command(&settings, &["prune"]).await;
    assert_code(&run, DONE);
    assert_eq!(run.stdout, "deleted 1050 published event(s)");
    let steps: String = world
        .one("SELECT string_agg(rows::text, ' ' ORDER BY rows DESC) FROM audit")
        .await;
    assert_eq!(steps, "100 100 100 100 100 100 100 100 100 100 50");
    let timeouts: String = world
        .one("SELECT string_agg(DISTINCT statement_timeout, ' ') FROM audit")
        .await;
    assert_eq!(timeouts, "10s");
    // The default, and the rights that an operator lacks.
    world.published_long_ago(10_001).await;
    let operator = world.login("operator", &[]).await;
    let run = world
        .command(&[("DATABASE_URL", &operator)], &["prune"])
        .await;
    assert_code(&run, FAILED);
    assert!(run.stderr.contains("permission denied"), "{}", run.stderr);
    world.sql("TRUNCATE audit").await;
    assert_code(&world.command(&[], &["prune"]).await, DONE);
    let greatest: i64 = world.one("SELECT max(rows) FROM audit").await;
    assert_eq!(greatest, 10_000);
    world.drop_roles().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_prunes_by_itself_step_by_step_and_one_that_keeps_for_ever_never() {
    let world = World::new().await;
    world.published_long_ago(500).await;
    world.that_stay().await;
    let often = [("prune.every", "1s"), ("prune.step", "200")];
    let forever = [often.as_slice(), &[("prune.keep", "forever")]].concat();
    let mut relay = world.ready_relay(&forever).await;
    let run = world
        .command(&[("prune.keep", "forever")], &["prune"])
        .await;
    assert_code(&run, Some(2));
    assert!(
        run.stderr.contains("prune.keep") && run.stderr.contains("--older-than"),
        "{}",
        run.stderr
    );
    // Three of its turns.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(world.old().await, 500);
    relay.terminate(SOON).await;
    let relay = world.ready_relay(&often).await;
    world.until_pruned(SOON).await;
    world.assert_all_stayed().await;
    assert_eq!(
        relay.logged("pruned published events"),
        3,
        "{}",
        relay.log()
    );
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pass_of_run_once_keeps_up_with_what_passes_publish() {
    let world = World::new().await;
    world.published_long_ago(450).await;
    world.that_stay().await;
    let run = world
        .command(&[("prune.step", "100")], &["run", "--once"])
        .await;
    assert_code(&run, DONE);
    assert_eq!(world.old().await, 0);
    world.assert_all_stayed().await;
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_table_is_pruned_while_the_relay_delivers() {
    let mut world = World::new().await;
    let began = Instant::now();
    world.published_long_ago(PUBLISHED).await;
    world.sql("ANALYZE outbox").await;
    eprintln!("written in {:?}", began.elapsed());
    let _relay = world
        .ready_relay(&[("prune.every", "1s"), ("prune.keep", "forever")])
        .await;
    let load = Load::start(&world);
    load.more(20).await;
    let began = Instant::now();
    let prune = Relay::start(&world.environment(), &[], &["prune"]);
    // Whatever is deleted meanwhile, events arrive at once.
    let mut slowest = Duration::ZERO;
    while world
        .one::<bool>("SELECT EXISTS (SELECT FROM outbox WHERE aggregate_type = 'old')")
        .await
    {
        let asked = Instant::now();
        let next = world.insert(("order", "1"), "Placed", "{}").await;
        while world.next_arrival(SOON).await.expect("delivered").id != next {}
        slowest = slowest.max(asked.elapsed());
        assert!(began.elapsed() < SOON * 2, "{} are left", world.old().await);
    }
    eprintln!(
        "pruned in {:?}, slowest delivery {slowest:?}",
        began.elapsed()
    );
    let run = prune.finished(SOON).await;
    assert_code(&run, DONE);
    assert_eq!(
        run.stdout,
        format!("deleted {PUBLISHED} published event(s)")
    );
    assert!(slowest < Duration::from_secs(2), "{slowest:?}");
    let slowest = load.stop().await;
    assert!(
        slowest < Duration::from_secs(2),
        "a commit took {slowest:?}"
    );
    world.clean().await;
}

/// Two millions take a minute to write here; this many show the same.
const PUBLISHED: i32 = 300_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_that_prune_at_once_neither_collide_nor_delete_anything_twice() {
    let world = World::new().await;
    world.published_long_ago(20_000).await;
    audit(&world).await;
    let settings = [("prune.step", "500")];
    let prunes: Vec<Relay> = (0..3)
        .map(|_| Relay::start(&world.environment(), &settings, &["prune", "--json"]))
        .collect();
    let mut pruned = 0;
    let mut waited = 0;
    for prune in prunes {
        let run = prune.finished(SOON).await;
        let report: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
        pruned += report["pruned"].as_i64().unwrap();
        assert!(!run.stderr.contains("deadlock"), "{}", run.stderr);
        waited += usize::from(run.stderr.contains("somebody else is pruning this outbox"));
        assert_code(&run, DONE);
    }
    assert_eq!((pruned, world.old().await), (20_000, 0));
    assert!(waited >= 1, "one of them had to wait, and says so");
    world.clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_finds_another_at_it_all_the_time_says_so() {
    let world = World::new().await;
    world.published_long_ago(10).await;
    let other = world.client().await;
    let hold = format!(
        "BEGIN; SELECT pg_advisory_xact_lock({}, 'outbox'::regclass::oid::int)",
        0x6277_7072
    );
    other.batch_execute(&hold).await.unwrap();
    let run = world.command(&[], &["prune"]).await;
    assert_code(&run, FAILED);
    assert_eq!(run.stdout, "deleted 0 published event(s)");
    assert!(
        run.stderr
            .contains("somebody else was pruning all the while"),
        "{}",
        run.stderr
    );
    other.batch_execute("ROLLBACK").await.unwrap();
    assert_code(&world.command(&[], &["prune"]).await, DONE);
    world.clean().await;
}
