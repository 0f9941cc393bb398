//! The wait after a failed attempt, as the database computes it, beside what is promised of it.

use std::time::Duration;

use bellwire::event::EventId;
use bellwire::store::{Failed, Failure};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::support::World;

const ROWS: i64 = 400;
const HOUR: f64 = 3600.0;

/// Of any size: from none to years.
fn backoff(rng: &mut StdRng) -> Duration {
    let exponent = rng.random_range(-3.0..8.0_f64);
    if rng.random_ratio(1, 10) {
        return Duration::ZERO;
    }
    Duration::from_millis((10_f64.powf(exponent) * 1000.0) as u64)
}

fn attempts(rng: &mut StdRng) -> i32 {
    match rng.random_range(0..10) {
        0 => i32::MAX,
        1 => i32::MAX - 1,
        2 => rng.random_range(0..i32::MAX),
        3 => -1,
        _ => rng.random_range(0..40),
    }
}

/// What the table of policies promises.
fn promised(before: i32, failure: &Failure) -> (i32, bool, f64) {
    let attempts = before.saturating_add(1);
    let most = failure.max_attempts.map_or(i64::MAX, i64::from);
    let doubled = failure.backoff.as_secs_f64() * 2_f64.powi((attempts - 1).clamp(0, 30));
    let dead = failure.dead_now || i64::from(attempts) >= most;
    (attempts, dead, doubled.min(HOUR))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_doubles_up_to_an_hour_whatever_the_numbers_are() {
    let seed = std::env::var("BELLWIRE_SEED")
        .map_or_else(|_| rand::random(), |text| text.parse().unwrap());
    let mut rng = StdRng::seed_from_u64(seed);
    let world = World::new().await;
    let given: Vec<i32> = (0..ROWS).map(|_| attempts(&mut rng)).collect();
    let sql = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, attempts, claimed_by, claimed_until)
         SELECT 'order', n::text, 'Placed', '{}', a, 'ours', now() + interval '1 hour'
         FROM unnest($1::int[]) WITH ORDINALITY AS given (a, n) RETURNING id, attempts";
    let rows = world.db.query(sql, &[&given]).await.unwrap();
    let failures: Vec<_> = rows
        .iter()
        .map(|row| Failure {
            id: EventId(row.get(0)),
            later: Vec::new(),
            dead_now: rng.random_ratio(1, 10),
            max_attempts: rng.random_bool(0.5).then(|| rng.random_range(1..60)),
            backoff: backoff(&mut rng),
            error: "test: failed".into(),
            holds: rng.random(),
        })
        .collect();
    for (failure, row) in failures.iter().zip(&rows) {
        let before: i32 = row.get(1);
        let mark = world.store.mark_failed(failure, "ours").await;
        let told = format!("BELLWIRE_SEED={seed}: {failure:?} after {before}");
        let (failed, released) = mark.unwrap_or_else(|error| panic!("{told}: {error}"));
        let Failed {
            attempts,
            dead,
            wait,
        } = failed.unwrap_or_else(|| panic!("{told}: not reached"));
        let (right_attempts, right_dead, right_wait) = promised(before, failure);
        assert_eq!((attempts, dead), (right_attempts, right_dead), "{told}");
        let off = (wait.as_secs_f64() - right_wait).abs();
        assert!(off < 0.001, "{told}: {wait:?} for {right_wait}");
        assert!(released.is_empty(), "{told}");
    }
    world.clean().await;
}
