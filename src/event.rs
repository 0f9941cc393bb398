//! The event: one row of the outbox, as it travels from claim to mark.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;

/// Number of buckets that aggregates are hashed into; the unit of ownership between replicas.
///
/// Part of the on-disk contract: the expression indexes and `outbox_bucket` are built for it, so
/// it can only change by a migration.
pub const BUCKETS: u8 = 64;

/// The outbox id of an event. Ids of one aggregate give its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventId(pub i64);

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What order is kept for: the pair of aggregate type and aggregate id.
///
/// Always compared as a pair. A joined string would take `("a", "b.c")` and `("a.b", "c")` for
/// one aggregate.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AggregateKey {
    /// For example `order`.
    pub aggregate_type: Arc<str>,
    /// For example `ORD-10492`.
    pub aggregate_id: Arc<str>,
}

impl AggregateKey {
    /// The key of one aggregate.
    pub fn new(aggregate_type: &str, aggregate_id: &str) -> Self {
        Self {
            aggregate_type: aggregate_type.into(),
            aggregate_id: aggregate_id.into(),
        }
    }
}

impl fmt::Display for AggregateKey {
    /// For people and logs only.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (aggregate_type, aggregate_id) = (&self.aggregate_type, &self.aggregate_id);
        write!(f, "{} {}", OneLine(aggregate_type), OneLine(aggregate_id))
    }
}

/// A text from outside for people and logs: whatever would end the line, or steer a terminal, is
/// escaped.
#[derive(Clone, Copy, Debug)]
pub struct OneLine<'a>(pub &'a str);

impl OneLine<'_> {
    /// Its beginning, if it is long.
    pub fn cut(&self, most: usize) -> String {
        let line = self.to_string();
        let mut rest = line.chars();
        let shown: String = rest.by_ref().take(most).collect();
        match rest.next() {
            Some(_) => format!("{shown}…"),
            None => line,
        }
    }
}

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            // Line and paragraph separators, and those that turn the direction of the text.
            let steers = matches!(character, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
            if character.is_control() || steers {
                write!(f, "{}", character.escape_default())?;
            } else {
                fmt::Write::write_char(f, character)?;
            }
        }
        Ok(())
    }
}

/// A claimed event with everything a sink needs.
#[derive(Clone, Debug)]
pub struct OutboxEvent {
    /// Outbox id; also the message id unless configured otherwise.
    pub id: EventId,
    /// The aggregate whose order this event belongs to.
    pub key: AggregateKey,
    /// `0..BUCKETS`, as computed by the database.
    pub bucket: u8,
    /// For example `OrderPlaced`.
    pub event_type: Arc<str>,
    /// Exactly `payload::text`, never re-encoded.
    pub payload: Bytes,
    /// The row's own headers as `headers::text`, if any.
    pub headers: Option<String>,
    /// The row's correlation id, if any.
    pub correlation_id: Option<String>,
    /// The row's UUID in text form, if any.
    pub event_id: Option<String>,
    /// `created_at` in whole seconds since 1970; none for `infinity` and for times before 1970.
    pub created_at: Option<u64>,
    /// Age at the moment it was loaded, by the database's clock; none for `infinity`.
    pub age: Option<Duration>,
    /// When it was loaded: with `age`, the time from insert to confirm without our clock's offset.
    pub loaded: Instant,
    /// Failed attempts so far; the attempt in hand is one more.
    pub attempts: i32,
    /// It was dead while the later events of its aggregate went on, and comes late now.
    pub replayed: bool,
}

impl OutboxEvent {
    /// Number of the attempt in hand, as carried in the `attempt` header. Counts from 1.
    pub fn attempt(&self) -> i32 {
        self.attempts.saturating_add(1)
    }

    /// An event for tests.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn sample(id: i64, aggregate: (&str, &str), event_type: &str) -> Self {
        Self {
            id: EventId(id),
            key: AggregateKey::new(aggregate.0, aggregate.1),
            bucket: 0,
            event_type: event_type.into(),
            payload: Bytes::from_static(b"{}"),
            headers: None,
            correlation_id: None,
            event_id: None,
            created_at: None,
            age: None,
            loaded: Instant::now(),
            attempts: 0,
            replayed: false,
        }
    }
}

/// Nanoseconds on the boot-time clock, which runs on while the host is suspended and cannot be set.
fn boot_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(
        u64::try_from(now.tv_sec).unwrap_or(0),
        u32::try_from(now.tv_nsec).unwrap_or(0),
    )
}

/// The right of one process start to claim: a number drawn from the database, its lease, and
/// whether it is void.
///
/// Invariants (who relies on them: every publisher, before each send):
/// - Once void, a token stays void; a process that wants to go on draws a new one.
/// - `holds()` is false from the moment the lease is over **on this host's boot-time clock,
///   counted from before the statement that renewed it was sent**. The database counts from a
///   later moment, so no peer can find the lease over while `holds()` is still true.
#[derive(Debug)]
pub struct ClaimToken {
    number: i32,
    name: String,
    lease_until_ms: AtomicU64,
    void: AtomicBool,
}

impl ClaimToken {
    /// A token whose lease has not begun: `holds()` is false until the first [`Self::renewed`].
    pub fn new(number: i32, name: String) -> Self {
        Self {
            number,
            name,
            lease_until_ms: AtomicU64::new(0),
            void: AtomicBool::new(false),
        }
    }

    /// The number in `outbox_replica` and `outbox_bucket`, and of the session advisory lock.
    pub fn number(&self) -> i32 {
        self.number
    }

    /// The text in `claimed_by`; unique for each token of a database.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The moment to hand to [`Self::renewed`]. Take it **before** sending the renewing statement.
    pub fn now() -> LeaseStart {
        LeaseStart(boot_time())
    }

    /// Extends the lease to `start + lease`. Without effect on a void token.
    pub fn renewed(&self, start: LeaseStart, lease: Duration) {
        let until = u64::try_from((start.0 + lease).as_millis()).unwrap_or(u64::MAX);
        self.lease_until_ms.fetch_max(until, Ordering::AcqRel);
    }

    /// Declares the token void for good.
    pub fn void(&self) {
        self.void.store(true, Ordering::Release);
    }

    /// May an event claimed under this token be handed to a broker now?
    pub fn holds(&self) -> bool {
        !self.void.load(Ordering::Acquire)
            && boot_time().as_millis() < u128::from(self.lease_until_ms.load(Ordering::Acquire))
    }

    /// Time left of the lease; zero when it is over or the token is void.
    pub fn remaining(&self) -> Duration {
        if self.void.load(Ordering::Acquire) {
            return Duration::ZERO;
        }
        Duration::from_millis(self.lease_until_ms.load(Ordering::Acquire))
            .saturating_sub(boot_time())
    }
}

/// A moment on the boot-time clock before a lease statement was sent.
#[derive(Clone, Copy, Debug)]
pub struct LeaseStart(Duration);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_compared_as_a_pair() {
        assert_ne!(AggregateKey::new("a", "b.c"), AggregateKey::new("a.b", "c"));
    }

    #[test]
    fn a_text_from_outside_stays_one_line() {
        let text = OneLine("it's \"é\"\r\n\u{1b}[31m\u{202e}x\\").to_string();
        assert_eq!(text, "it's \"é\"\\r\\n\\u{1b}[31m\\u{202e}x\\");
    }

    #[test]
    fn a_token_holds_only_within_its_lease_and_never_again_once_void() {
        let token = ClaimToken::new(1, "a".into());
        assert!(!token.holds(), "no lease yet");
        token.renewed(ClaimToken::now(), Duration::from_secs(60));
        assert!(token.holds());
        token.void();
        token.renewed(ClaimToken::now(), Duration::from_secs(60));
        assert!(!token.holds());
        assert_eq!(token.remaining(), Duration::ZERO);
    }

    #[test]
    fn an_older_renewal_does_not_shorten_a_lease() {
        let token = ClaimToken::new(1, "a".into());
        let start = ClaimToken::now();
        token.renewed(start, Duration::from_secs(60));
        token.renewed(start, Duration::from_secs(1));
        assert!(token.remaining() > Duration::from_secs(30));
    }
}
