//! Places where a test lets the process crash. Built only with the feature `failpoints`.
//!
//! `BELLWIRE_FAILPOINTS` arms one of [`POINTS`]: with `mark:before=abort(3)` the process crashes when it comes
//! there for the third time. Before that it says on standard error what it had at hand, by id:
//! `failpoint mark:before: 17 18`.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Before and after the statement, or the hand-over, that the step is named after. Those of publish are
/// in the RabbitMQ sink.
const POINTS: [&str; 10] = [
    "claim:before",
    "claim:after",
    "publish:before",
    "publish:after",
    "confirm:before",
    "confirm:after",
    "mark:before",
    "mark:after",
    "release:before",
    "release:after",
];

struct Armed {
    point: &'static str,
    left: AtomicU64,
}

static ARMED: LazyLock<Option<Armed>> = LazyLock::new(|| {
    let setting = std::env::var("BELLWIRE_FAILPOINTS").ok()?;
    let armed = parse(&setting);
    assert!(
        armed.is_some(),
        "BELLWIRE_FAILPOINTS={setting} is no fail point"
    );
    armed
});

fn parse(setting: &str) -> Option<Armed> {
    let (name, action) = setting.split_once('=')?;
    let times: u64 = action
        .strip_prefix("abort(")?
        .strip_suffix(')')?
        .parse()
        .ok()?;
    let point = POINTS.into_iter().find(|point| *point == name)?;
    let left = AtomicU64::new(times);
    Some(Armed { point, left })
}

/// The process has come to this point with these events at hand.
pub(crate) fn reached(point: &str, ids: impl IntoIterator<Item = i64>) {
    debug_assert!(POINTS.contains(&point), "{point}");
    let Some(armed) = ARMED.as_ref().filter(|armed| armed.point == point) else {
        return;
    };
    if armed.left.fetch_sub(1, Ordering::Relaxed) == 1 {
        let ids: Vec<String> = ids.into_iter().map(|id| id.to_string()).collect();
        eprintln!("failpoint {point}: {}", ids.join(" "));
        std::process::abort();
    }
}
