//! What an alert says to people: what happened, why, what it means for others, and what to do.

use std::fmt::Write as _;
use std::time::Duration;

use super::body::dead_letters;
use super::mailbox::Notice;
use super::{Alert, DeadLetter, IntakeTrouble, Trouble};
use crate::store::{Lag, OldestEvent};

/// Longest text, in characters: what a Slack client shows without folding it away.
const LONGEST: usize = 3_000;

/// Where an alert comes from.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    pub(super) replica: String,
    pub(super) table: String,
    pub(super) link: Option<String>,
}

/// How much of a value from a row is shown, in characters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    name: usize,
    error: usize,
}

impl Room {
    /// Of several events each gets less, so that the remedy behind them still has its place.
    pub(super) fn of(notice: &Notice) -> Self {
        if notice.alerts.len() > 1 {
            Self {
                name: 40,
                error: 120,
            }
        } else {
            Self {
                name: 200,
                error: 1_000,
            }
        }
    }

    /// An id, a type, or the name of a thing.
    pub(super) fn name(self, text: &str) -> String {
        cut(text, self.name)
    }

    /// A reason.
    pub(super) fn error(self, text: &str) -> String {
        cut(text, self.error)
    }

    fn shown_name(self, text: &str) -> String {
        cut(&escape(&self.name(text)), self.name)
    }

    fn shown_error(self, text: &str) -> String {
        cut(&escape(&self.error(text)), self.error)
    }
}

/// At most so many characters, with a mark where something is missing.
fn cut(text: &str, longest: usize) -> String {
    if text.chars().count() <= longest {
        return text.to_owned();
    }
    let mut kept: String = text.chars().take(longest.saturating_sub(1)).collect();
    kept.push('…');
    kept
}

/// One line, and nothing that changes how the rest is read (such as a right-to-left override). Quotes
/// are left alone.
fn escape(text: &str) -> String {
    text.chars().fold(String::new(), |mut escaped, letter| {
        match letter {
            '"' | '\'' => escaped.push(letter),
            other => escaped.extend(other.escape_debug()),
        }
        escaped
    })
}

/// `1 event`, `2 events`, `10000 or more events`.
fn counted(count: i64, capped: bool, one: &str, many: &str) -> String {
    let noun = if count == 1 && !capped { one } else { many };
    let or_more = if capped { " or more" } else { "" };
    format!("{count}{or_more} {noun}")
}

/// `42 s`, `6.2 min`, `3.5 h`, `2.1 days`.
fn span(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    let (number, unit) = match seconds {
        ..120.0 => (seconds, "s"),
        ..7_200.0 => (seconds / 60.0, "min"),
        ..172_800.0 => (seconds / 3_600.0, "h"),
        _ => (seconds / 86_400.0, "days"),
    };
    let number = format!("{number:.1}");
    format!("{} {unit}", number.strip_suffix(".0").unwrap_or(&number))
}

/// `order ORD-1, OrderPlaced`.
fn described(aggregate_type: &str, aggregate_id: &str, event_type: &str, room: Room) -> String {
    format!(
        "{} {}, {}",
        room.shown_name(aggregate_type),
        room.shown_name(aggregate_id),
        room.shown_name(event_type)
    )
}

/// The whole text, unescaped for any markup.
pub(super) fn text(notice: &Notice, origin: &Origin) -> String {
    let room = Room::of(notice);
    let said = match notice.alerts.first() {
        Some(Alert::LagBegan { lag, threshold }) => lag_began(lag, *threshold, room),
        Some(Alert::LagEnded { lag, threshold }) => lag_ended(lag, *threshold),
        Some(Alert::BreakerOpened {
            subject,
            reason,
            handed_back,
        }) => breaker_opened(subject, reason, *handed_back, room),
        Some(Alert::BreakerClosed { subject, after }) => breaker_closed(subject, *after, room),
        Some(Alert::DatabaseLost { reason }) => database_lost(reason, room),
        Some(Alert::DatabaseBack { after }) => {
            format!(
                "Outbox relay reaches its database again, after {}.",
                span(*after)
            )
        }
        Some(Alert::RelayFailed { reason }) => relay_failed(reason, room),
        Some(Alert::Intake(trouble)) => intake(trouble, room),
        Some(Alert::DeadLettered(_)) | None => dead_lettered(notice, room),
    };
    let mut foot = format!(
        "\nReplica {}, table {}.",
        room.shown_name(&origin.replica),
        room.shown_name(&origin.table)
    );
    if let Some(link) = &origin.link {
        let _ = write!(foot, "\n{link}");
    }
    let left = LONGEST.saturating_sub(foot.chars().count());
    format!("{}{foot}", cut(&said, left))
}

fn dead_lettered(notice: &Notice, room: Room) -> String {
    let letters: Vec<_> = dead_letters(notice).collect();
    let mut said = String::new();
    for letter in &letters {
        said.push_str(&dead_letter(letter, room, letters.len() > 1));
    }
    if notice.more > 0 {
        let _ = writeln!(
            said,
            "… and {} more event{} dead-lettered: bellwire dead list",
            notice.more,
            if notice.more == 1 { " was" } else { "s were" }
        );
    }
    said.push_str(&remedy(&letters, room));
    said
}

/// `short`: among others, so that nothing is said twice.
fn dead_letter(letter: &DeadLetter, room: Room, short: bool) -> String {
    let tried = match letter.attempts {
        ..=0 => "at once".to_owned(),
        attempts => format!(
            "after {}",
            counted(attempts.into(), false, "attempt", "attempts")
        ),
    };
    let mut said = format!(
        "Outbox event {} ({}) was dead-lettered {tried}.\nLast error: {}.",
        letter.id,
        described(
            &letter.aggregate_type,
            &letter.aggregate_id,
            &letter.event_type,
            room
        ),
        room.shown_error(&letter.last_error).trim_end_matches('.'),
    );
    if let Some(bytes) = letter.payload_bytes {
        // Only where the size may be the reason.
        let compare = match letter.cause {
            "too_large" | "closed_by_broker" => " (compare with the broker's max_message_size)",
            _ => "",
        };
        let _ = write!(said, " Payload size: {bytes} bytes{compare}.");
    }
    said.push('\n');
    let aggregate = if short {
        "its aggregate".to_owned()
    } else {
        format!(
            "{} {}",
            room.shown_name(&letter.aggregate_type),
            room.shown_name(&letter.aggregate_id)
        )
    };
    said.push_str(&held_back(letter, &aggregate));
    if let Some(place) = &letter.copied_to {
        let _ = write!(said, " A copy was sent to {}.", room.shown_name(place));
    }
    said.push('\n');
    said
}

fn held_back(letter: &DeadLetter, aggregate: &str) -> String {
    if !letter.holds {
        return format!("Later events of {aggregate} go on without it.");
    }
    let held = match letter.held_back {
        Some(1) if !letter.held_back_capped => {
            format!("1 later event of {aggregate} is held back to keep its order")
        }
        Some(count @ 1..) => format!(
            "{} of {aggregate} are held back to keep their order",
            counted(
                count,
                letter.held_back_capped,
                "later event",
                "later events"
            )
        ),
        Some(_) | None => format!("Later events of {aggregate} are held back to keep their order"),
    };
    format!("{held}. Other aggregates are not affected.")
}

/// By command and by plain SQL. The status is asked for: alerts are read late, and an event that
/// somebody replayed meanwhile must not go out again.
fn remedy(letters: &[&DeadLetter], room: Room) -> String {
    let Some(first) = letters.first() else {
        return String::new();
    };
    let table = room.shown_name(&first.table);
    let (id, which) = if letters.len() == 1 {
        (first.id.to_string(), format!("id = {}", first.id))
    } else {
        let ids: Vec<_> = letters.iter().map(|letter| letter.id.to_string()).collect();
        ("ID".to_owned(), format!("id IN ({})", ids.join(", ")))
    };
    format!(
        "Fix the cause, then replay: bellwire dead replay --id {id}\n\
         or give up on it: bellwire dead discard --id {id} (to look at it: bellwire dead show --id {id})\n\
         In SQL: UPDATE {table} SET status = 'pending', attempts = 0, next_attempt_at = now() \
         WHERE {which} AND status = 'dead';\n\
         or: UPDATE {table} SET status = 'discarded' WHERE {which} AND status = 'dead';"
    )
}

fn counts(lag: &Lag) -> String {
    let count = |count: i64, noun| counted(count, count >= lag.counted_to, noun, noun);
    format!(
        "{}, {}",
        count(lag.pending, "pending"),
        count(lag.dead, "dead-lettered")
    )
}

fn lag_began(lag: &Lag, threshold: Duration, room: Room) -> String {
    let threshold = span(threshold);
    let Some(oldest) = &lag.oldest else {
        return format!("Outbox lagging (threshold {threshold}); {}.", counts(lag));
    };
    let mut said = format!(
        "Outbox lagging: event {} ({}) has waited {} (threshold {threshold}); {}.\n{}.",
        oldest.id,
        described(
            &oldest.aggregate_type,
            &oldest.aggregate_id,
            &oldest.event_type,
            room
        ),
        waited(oldest),
        counts(lag),
        sentence(&room.shown_error(&oldest.waits_for)),
    );
    if let Some(error) = &oldest.last_error {
        let error = room.shown_error(error);
        let _ = write!(said, "\nIts last error: {}.", error.trim_end_matches('.'));
    }
    said
}

fn waited(oldest: &OldestEvent) -> String {
    oldest
        .age_seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok())
        .map_or_else(|| "an unknown time".to_owned(), span)
}

/// With a capital, without its full stop.
fn sentence(text: &str) -> String {
    let mut letters = text.trim_end_matches('.').chars();
    letters.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(letters).collect()
    })
}

fn lag_ended(lag: &Lag, threshold: Duration) -> String {
    format!(
        "Outbox back to normal: no event waits longer than {} ({}).",
        span(threshold),
        counts(lag)
    )
}

fn breaker_opened(subject: &str, reason: &str, handed_back: Option<u64>, room: Room) -> String {
    let reason = room.shown_error(reason);
    let mut said = format!(
        "Outbox relay stopped publishing to {}: {}.\n",
        room.shown_name(subject),
        reason.trim_end_matches('.')
    );
    if let Some(events) = handed_back.and_then(|events| i64::try_from(events).ok()) {
        let events = counted(events, false, "claimed event", "claimed events");
        let _ = write!(said, "{events} went back, with no attempt counted. ");
    }
    said.push_str(
        "Unpublished events stay in the outbox. The relay asks again with growing pauses and goes on by \
         itself.",
    );
    said
}

fn breaker_closed(subject: &str, after: Option<Duration>, room: Room) -> String {
    let after = after.map_or_else(String::new, |after| format!(", after {}", span(after)));
    format!(
        "Outbox relay publishes to {} again{after}.",
        room.shown_name(subject)
    )
}

fn database_lost(reason: &str, room: Room) -> String {
    let reason = room.shown_error(reason);
    format!(
        "Outbox relay cannot reach its database: {}.\nWhat was committed stays in the outbox. The relay tries \
         again with growing pauses and goes on by itself. Every relay that cannot reach it says so.",
        reason.trim_end_matches('.')
    )
}

fn relay_failed(reason: &str, room: Room) -> String {
    let reason = room.shown_error(reason);
    format!(
        "Outbox relay failed: {}.\nClaims of this run were released; unpublished events stay in the \
         outbox for the next run.",
        reason.trim_end_matches('.')
    )
}

fn intake(trouble: &IntakeTrouble, room: Room) -> String {
    let source = room.shown_name(&trouble.source);
    let reason = room.shown_error(&trouble.reason);
    let reason = reason.trim_end_matches('.');
    let event = trouble.event_id.as_deref().map_or_else(String::new, |id| {
        format!(" (event {})", room.shown_name(id))
    });
    let others = match trouble.count {
        ..=1 => String::new(),
        count => format!(" {count} since the last message of this kind."),
    };
    match trouble.trouble {
        Trouble::Rejected => format!(
            "Webhook intake {source} rejected a call: {reason}.{others}\nNothing of it was stored. A forger, \
             or a sender whose secret or clock is wrong."
        ),
        Trouble::Parked => format!(
            "A poison event of webhook intake {source} was parked after {} failed attempts{event} and \
             will not be replayed automatically: {reason}.{others}\nFix the cause, then: bellwire intake \
             replay --source {source} --include-parked --apply\nor give up on it: bellwire intake dead \
             discard --source {source} --id ID",
            trouble.max_attempts
        ),
        Trouble::Deadline => format!(
            "Webhook intake {source} exceeded its deadline and was stopped{event}: {reason}.{others}\n\
             Nothing of it was kept, so the sender's retry will be processed."
        ),
        Trouble::Failed => format!(
            "Webhook intake {source} could not store an event{event}: {reason}.{others}\nThe sender was \
             told to try again."
        ),
    }
}

#[cfg(test)]
#[path = "text_tests.rs"]
pub(super) mod tests;
