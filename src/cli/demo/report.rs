//! What the user sees: progress on a terminal, then a table or one JSON object.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use super::Arguments;
use super::tally::{Tally, Verdict};

/// Everything found out.
pub(super) struct Findings {
    pub(super) verdict: Verdict,
    /// Events in transactions and savepoints that were rolled back.
    pub(super) rolled_back: usize,
    pub(super) kill: Option<Kill>,
    /// Events that arrived, but were not recorded as published in time.
    pub(super) unmarked: i64,
}

/// The relay that was killed.
#[derive(Clone, Debug)]
pub(super) struct Kill {
    pub(super) relay: String,
    /// Events delivered before.
    pub(super) after: u64,
    /// How long its buckets were nobody's; none if that never ended.
    pub(super) taken_over: Option<Duration>,
}

/// Shown on a terminal only, on standard error.
pub(super) struct Progress(ProgressBar);

impl Progress {
    pub(super) fn new(arguments: &Arguments) -> Self {
        if arguments.json {
            return Self(ProgressBar::hidden());
        }
        // Hides itself where standard error is no terminal.
        let target = ProgressDrawTarget::stderr();
        let bar = ProgressBar::with_draw_target(Some(u64::from(arguments.events)), target);
        let style =
            ProgressStyle::with_template("{bar:30} {human_pos}/{human_len} delivered  {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self(bar)
    }

    /// One line about what was done.
    pub(super) fn step(&self, text: impl AsRef<str>) {
        self.0.println(text);
    }

    pub(super) fn show(&self, tally: &Tally) {
        self.0.set_message(format!(
            "{} committed, {} repeats",
            tally.committed_count(),
            tally.repeats()
        ));
        self.0.set_position(tally.delivered_count());
    }

    pub(super) fn clear(&self) {
        self.0.finish_and_clear();
    }
}

#[derive(Serialize)]
struct Report {
    committed: u64,
    delivered: u64,
    lost: u64,
    repeats: u64,
    order_violations: u64,
    rolled_back_seen: u64,
    latency_ms: LatencyMs,
    events_per_second: f64,
}

#[derive(Serialize)]
struct LatencyMs {
    p50: Option<f64>,
    p99: Option<f64>,
}

/// Times are not known any better than this.
fn one_decimal(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

fn ms(duration: Duration) -> f64 {
    one_decimal(duration.as_secs_f64() * 1000.0)
}

/// One JSON object.
pub(super) fn json(verdict: &Verdict) -> serde_json::Result<String> {
    serde_json::to_string(&Report {
        committed: verdict.committed,
        delivered: verdict.delivered,
        lost: verdict.lost,
        repeats: verdict.repeats,
        order_violations: verdict.order_violations,
        rolled_back_seen: verdict.rolled_back_seen,
        latency_ms: LatencyMs {
            p50: verdict.latency.map(|(p50, _)| ms(p50)),
            p99: verdict.latency.map(|(_, p99)| ms(p99)),
        },
        events_per_second: one_decimal(verdict.events_per_second()),
    })
}

/// The table, with the verdict as its last line.
pub(super) fn table(findings: &Findings, arguments: &Arguments) -> String {
    let verdict = &findings.verdict;
    let latency = |of: fn((Duration, Duration)) -> Duration| {
        verdict
            .latency
            .map_or("none".to_owned(), |pair| format!("{:.1} ms", ms(of(pair))))
    };
    let rolled_back = format!("of {} events rolled back", findings.rolled_back);
    let lines = [
        (
            "committed",
            verdict.committed.to_string(),
            written(arguments),
        ),
        ("delivered", verdict.delivered.to_string(), String::new()),
        ("lost", verdict.lost.to_string(), String::new()),
        (
            "repeats",
            verdict.repeats.to_string(),
            "allowed: consumers drop them by message id".into(),
        ),
        (
            "order violations",
            verdict.order_violations.to_string(),
            "within an aggregate, repeats dropped".into(),
        ),
        (
            "rolled back, seen",
            verdict.rolled_back_seen.to_string(),
            rolled_back,
        ),
        (
            "latency p50",
            latency(|pair| pair.0),
            "from commit to consumer, writers at full speed".into(),
        ),
        (
            "latency p99",
            latency(|pair| pair.1),
            if findings.kill.is_some() {
                "includes the kill".into()
            } else {
                String::new()
            },
        ),
        (
            "events per second",
            format!("{:.0}", verdict.events_per_second()),
            String::new(),
        ),
    ];
    let mut table: String = lines
        .iter()
        .map(|(name, value, note)| {
            format!("{name:<18} {value:>11}  {note}")
                .trim_end()
                .to_owned()
                + "\n"
        })
        .collect();
    table.push_str(&killed(findings.kill.as_ref()));
    if findings.unmarked > 0 {
        table.push_str(&format!(
            "{} events arrived but are not recorded as published\n",
            findings.unmarked
        ));
    }
    table.push_str(&conclusion(verdict));
    table
}

fn written(arguments: &Arguments) -> String {
    let Arguments {
        aggregates,
        writers,
        relays,
        ..
    } = *arguments;
    format!(
        "aggregates {aggregates}, writers {}, relays {relays}",
        writers.min(aggregates)
    )
}

fn killed(kill: Option<&Kill>) -> String {
    let Some(Kill {
        relay,
        after,
        taken_over,
    }) = kill
    else {
        return "no relay was killed\n".to_owned();
    };
    let then = match taken_over {
        Some(time) => format!("its aggregates were taken over within {:.0} ms", ms(*time)),
        None => "its aggregates were NOT taken over".to_owned(),
    };
    format!("{relay} was killed after {after} deliveries: {then}\n")
}

fn conclusion(verdict: &Verdict) -> String {
    if verdict.is_clean() {
        return "OK: nothing lost, nothing out of order, nothing rolled back was delivered"
            .to_owned();
    }
    format!(
        "FAILED: {} lost, {} out of order, {} rolled back but delivered",
        verdict.lost, verdict.order_violations, verdict.rolled_back_seen
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict() -> Verdict {
        Verdict {
            committed: 10,
            delivered: 10,
            lost: 0,
            repeats: 2,
            order_violations: 0,
            rolled_back_seen: 0,
            latency: Some((Duration::from_micros(1_260), Duration::from_millis(90))),
            took: Duration::from_secs(2),
        }
    }

    #[test]
    fn the_object_has_exactly_the_promised_keys() {
        let expected = r#"{"committed":10,"delivered":10,"lost":0,"repeats":2,"order_violations":0,"rolled_back_seen":0,"latency_ms":{"p50":1.3,"p99":90.0},"events_per_second":5.0}"#;
        assert_eq!(json(&verdict()).unwrap(), expected);
        let nothing = Verdict {
            latency: None,
            ..verdict()
        };
        assert!(
            json(&nothing)
                .unwrap()
                .contains(r#"{"p50":null,"p99":null}"#)
        );
    }

    #[test]
    fn the_last_line_is_the_verdict() {
        assert!(conclusion(&verdict()).starts_with("OK"));
        let bad = Verdict {
            lost: 1,
            ..verdict()
        };
        assert_eq!(
            conclusion(&bad),
            "FAILED: 1 lost, 0 out of order, 0 rolled back but delivered"
        );
    }
}
