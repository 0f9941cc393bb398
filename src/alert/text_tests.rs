//! What people read, word for word where it matters.

use super::*;

pub(in crate::alert) fn origin() -> Origin {
    Origin {
        replica: "relay-1".into(),
        table: "public.outbox".into(),
        link: None,
    }
}

pub(in crate::alert) fn dead_letter(id: i64) -> DeadLetter {
    DeadLetter {
        id,
        aggregate_type: "order".into(),
        aggregate_id: "ORD-1".into(),
        event_type: "OrderPlaced".into(),
        attempts: 5,
        last_error: "unroutable: no queue is bound for order.OrderPlaced".into(),
        cause: "unroutable",
        payload_bytes: Some(72),
        held_back: Some(3),
        held_back_capped: false,
        holds: true,
        copied_to: None,
        table: "public.outbox".into(),
    }
}

pub(in crate::alert) fn lag(age_seconds: f64) -> Lag {
    Lag {
        pending: 120,
        dead: 1,
        counted_to: 10_000,
        oldest: Some(OldestEvent {
            id: 7,
            aggregate_type: "order".into(),
            aggregate_id: "ORD-1".into(),
            event_type: "OrderPlaced".into(),
            attempts: 0,
            last_error: None,
            age_seconds: Some(age_seconds),
            behind_dead: None,
            waits_for: "it is in hand of relay-2#7".into(),
        }),
        was_lagging: false,
        raised: Vec::new(),
    }
}

fn of(alert: Alert) -> String {
    text(&Notice::new(alert), &origin())
}

fn of_letter(change: impl FnOnce(&mut DeadLetter)) -> String {
    let mut letter = dead_letter(42);
    change(&mut letter);
    of(Alert::DeadLettered(letter))
}

#[test]
fn a_dead_letter_says_what_why_who_waits_and_what_to_do() {
    assert_eq!(
        of_letter(|_| {}),
        "Outbox event 42 (order ORD-1, OrderPlaced) was dead-lettered after 5 attempts.\n\
         Last error: unroutable: no queue is bound for order.OrderPlaced. Payload size: 72 bytes.\n\
         3 later events of order ORD-1 are held back to keep their order. Other aggregates are not \
         affected.\n\
         Fix the cause, then replay: bellwire dead replay --id 42\n\
         or give up on it: bellwire dead discard --id 42 (to look at it: bellwire dead show --id 42)\n\
         In SQL: UPDATE public.outbox SET status = 'pending', attempts = 0, next_attempt_at = now() \
         WHERE id = 42 AND status = 'dead';\n\
         or: UPDATE public.outbox SET status = 'discarded' WHERE id = 42 AND status = 'dead';\n\
         Replica relay-1, table public.outbox."
    );
}

#[test]
fn a_dead_letter_says_only_what_is_known() {
    let too_large = of_letter(|letter| {
        letter.cause = "too_large";
        letter.attempts = 0;
        letter.held_back = None;
    });
    assert!(
        too_large.contains("dead-lettered at once.\n"),
        "{too_large}"
    );
    assert!(
        too_large.contains("72 bytes (compare with the broker's max_message_size)."),
        "{too_large}"
    );
    assert!(
        too_large.contains("\nLater events of order ORD-1 are held back"),
        "{too_large}"
    );
    let one = of_letter(|letter| {
        letter.attempts = 1;
        letter.held_back = Some(1);
        letter.payload_bytes = None;
    });
    assert!(one.contains("after 1 attempt.\n"), "{one}");
    assert!(
        one.contains("1 later event of order ORD-1 is held back to keep its order"),
        "{one}"
    );
    assert!(!one.contains("Payload"), "{one}");
    let skipped = of_letter(|letter| {
        letter.holds = false;
        letter.copied_to = Some("exchange dead-letters".into());
    });
    assert!(
        skipped.contains(
            "Later events of order ORD-1 go on without it. A copy was sent to exchange dead-letters.\n"
        ),
        "{skipped}"
    );
}

#[test]
fn a_count_at_its_cap_says_so() {
    let capped = of_letter(|letter| {
        letter.held_back = Some(1_000);
        letter.held_back_capped = true;
    });
    assert!(
        capped.contains("1000 or more later events of order ORD-1 are held back"),
        "{capped}"
    );
    let mut lag = lag(372.0);
    lag.pending = lag.counted_to;
    let threshold = Duration::from_secs(300);
    for alert in [
        Alert::LagBegan {
            lag: lag.clone(),
            threshold,
        },
        Alert::LagEnded { lag, threshold },
    ] {
        let said = of(alert);
        assert!(
            said.contains("10000 or more pending, 1 dead-lettered"),
            "{said}"
        );
    }
}

#[test]
fn lag_says_which_event_waits_and_for_what_and_when_it_is_over() {
    let threshold = Duration::from_secs(300);
    let mut began = lag(372.0);
    assert_eq!(
        of(Alert::LagBegan {
            lag: began.clone(),
            threshold
        }),
        "Outbox lagging: event 7 (order ORD-1, OrderPlaced) has waited 6.2 min (threshold 5 min); \
         120 pending, 1 dead-lettered.\nIt is in hand of relay-2#7.\n\
         Replica relay-1, table public.outbox."
    );
    began.oldest.as_mut().unwrap().last_error = Some("nacked: queue full".into());
    let said = of(Alert::LagBegan {
        lag: began,
        threshold,
    });
    assert!(
        said.contains("\nIts last error: nacked: queue full.\n"),
        "{said}"
    );
    assert_eq!(
        of(Alert::LagEnded {
            lag: lag(1.0),
            threshold
        }),
        "Outbox back to normal: no event waits longer than 5 min (120 pending, 1 dead-lettered).\n\
         Replica relay-1, table public.outbox."
    );
}

#[test]
fn breaker_and_failure_say_that_nothing_is_lost() {
    let subject = "RabbitMQ at mq:5672".to_owned();
    let reason = "3 events failed in a row, the last with: connection reset.".to_owned();
    let opened = of(Alert::BreakerOpened {
        subject: subject.clone(),
        reason: reason.clone(),
        handed_back: Some(1),
    });
    assert!(
        opened.starts_with(
            "Outbox relay stopped publishing to RabbitMQ at mq:5672: 3 events failed in a row, the last \
             with: connection reset.\n1 claimed event went back, with no attempt counted. Unpublished"
        ),
        "{opened}"
    );
    let after = Some(Duration::from_secs(12));
    let closed = of(Alert::BreakerClosed { subject, after });
    assert!(
        closed.starts_with("Outbox relay publishes to RabbitMQ at mq:5672 again, after 12 s.\n"),
        "{closed}"
    );
    let failed = of(Alert::RelayFailed { reason });
    assert!(
        failed.contains(
            "connection reset.\nClaims of this run were released; unpublished events stay"
        ),
        "{failed}"
    );
}

#[test]
fn several_dead_letters_are_told_with_the_number_of_the_rest_and_the_remedy() {
    let long = |id| {
        let mut letter = dead_letter(id);
        letter.aggregate_type = "t".repeat(10_000);
        letter.aggregate_id = "i".repeat(10_000);
        letter.event_type = "e".repeat(10_000);
        letter.last_error = "x".repeat(10_000);
        letter.copied_to = Some("c".repeat(10_000));
        letter
    };
    for letter in [dead_letter as fn(i64) -> DeadLetter, long] {
        let mut notice = Notice::new(Alert::DeadLettered(letter(i64::MAX)));
        for nth in 1..5 {
            notice
                .alerts
                .push(Alert::DeadLettered(letter(i64::MAX - nth)));
        }
        notice.more = 37;
        let said = text(&notice, &origin());
        for nth in 0..5 {
            let begin = format!("Outbox event {} (", i64::MAX - nth);
            assert!(said.contains(&begin), "{said}");
        }
        assert!(
            said.contains("\n… and 37 more events were dead-lettered: bellwire dead list\n"),
            "{said}"
        );
        assert!(said.contains("bellwire dead replay --id ID\n"), "{said}");
        let ids = format!("WHERE id IN ({}, {}, ", i64::MAX, i64::MAX - 1);
        assert!(said.contains(&ids), "{said}");
        assert!(
            said.contains("Replica relay-1, table public.outbox."),
            "{said}"
        );
        assert!(said.chars().count() <= LONGEST, "{}", said.chars().count());
    }
}

#[test]
fn ids_and_errors_neither_break_a_line_nor_reorder_it() {
    let said = of_letter(|letter| {
        letter.aggregate_id = "a\r\nOutbox back to normal\u{202e}\u{0}\u{1b}[31m".into();
        letter.event_type = "it's \"so\"".into();
        letter.last_error = "illegal_name: \u{7}bell\nnext".into();
    });
    assert_eq!(
        said.lines().count(),
        of_letter(|_| {}).lines().count(),
        "{said}"
    );
    let odd = |letter: char| (letter.is_control() && letter != '\n') || letter == '\u{202e}';
    assert!(!said.contains(odd), "{said:?}");
    assert!(said.contains("it's \"so\""), "{said}");
}

#[test]
fn a_text_is_bounded_and_cut_between_characters() {
    for filling in ["x", "é", "\u{1f600}", "\n", "\u{0}"] {
        let filled = filling.repeat(20_000);
        let letter = of_letter(|letter| {
            letter.aggregate_type.clone_from(&filled);
            letter.aggregate_id.clone_from(&filled);
            letter.event_type.clone_from(&filled);
            letter.last_error.clone_from(&filled);
        });
        assert!(letter.chars().count() <= LONGEST);
        assert!(letter.contains("WHERE id = 42"), "{letter}");
        let reason = filled.clone();
        let failed = of(Alert::RelayFailed { reason });
        assert!(failed.chars().count() <= LONGEST);
        assert!(failed.contains("…"));
        let opened = of(Alert::BreakerOpened {
            subject: filled.clone(),
            reason: filled,
            handed_back: None,
        });
        assert!(opened.chars().count() <= LONGEST);
        assert!(opened.ends_with("Replica relay-1, table public.outbox."));
    }
}

#[test]
fn the_link_ends_every_text() {
    let linked = Origin {
        link: Some("https://grafana.example/d/bellwire".into()),
        ..origin()
    };
    let reason = "x".repeat(20_000);
    let said = text(&Notice::new(Alert::RelayFailed { reason }), &linked);
    assert!(
        said.ends_with("\nhttps://grafana.example/d/bellwire"),
        "{said}"
    );
}
