//! Figures: ratios of what was measured in turns, their table and their file.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::Options;

/// Which way is better, and how far one wants to get.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    AtLeast(f64),
    AtMost(f64),
    /// For orientation only.
    None,
}

/// One ratio: a name, what was measured and what it is set against, round by round.
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) unit: &'static str,
    pub(crate) target: Target,
    /// Each round's measured value and what it is set against.
    pub(crate) turns: Vec<(f64, f64)>,
}

impl Figure {
    fn ratios(&self) -> Vec<f64> {
        let ratio = |(measured, reference): &(f64, f64)| measured / reference;
        self.turns.iter().map(ratio).collect()
    }

    fn medians(&self) -> (f64, f64) {
        let (measured, reference): (Vec<f64>, Vec<f64>) = self.turns.iter().copied().unzip();
        (quantile(&measured, 0.5), quantile(&reference, 0.5))
    }

    fn line(&self) -> String {
        let ratios = self.ratios();
        let (measured, reference) = self.medians();
        let target = match self.target {
            Target::AtLeast(target) => format!(">= {target}"),
            Target::AtMost(target) => format!("<= {target}"),
            Target::None => "-".into(),
        };
        format!(
            "{:<38} {:>7.3} {:>7.3} ..{:>7.3} {target:>8}   {} over {} {}",
            self.name,
            quantile(&ratios, 0.5),
            quantile(&ratios, 0.0),
            quantile(&ratios, 1.0),
            short(measured),
            short(reference),
            self.unit,
        )
    }

    fn json(&self) -> Value {
        let ratios = self.ratios();
        let (measured, reference) = self.medians();
        let (at_least, at_most) = match self.target {
            Target::AtLeast(target) => (Some(target), None),
            Target::AtMost(target) => (None, Some(target)),
            Target::None => (None, None),
        };
        json!({
            "name": self.name,
            "median": quantile(&ratios, 0.5),
            "min": quantile(&ratios, 0.0),
            "max": quantile(&ratios, 1.0),
            "target": { "at_least": at_least, "at_most": at_most },
            "unit": self.unit,
            "measured_median": measured,
            "reference_median": reference,
            "rounds": self.turns.iter().map(|(measured, reference)| {
                json!({ "measured": measured, "reference": reference })
            }).collect::<Vec<_>>(),
        })
    }
}

/// Everything that one run found.
pub(crate) struct Report {
    settings: Value,
    facts: serde_json::Map<String, Value>,
    figures: Vec<Figure>,
}

impl Report {
    pub(crate) fn new(options: &Options) -> Self {
        let cpus = std::thread::available_parallelism().map_or(0, usize::from);
        let mut facts = serde_json::Map::new();
        facts.insert("cpus".into(), cpus.into());
        Self {
            settings: json!({
                "rounds": options.rounds,
                "rows": options.rows,
                "waiting": options.waiting,
                "payload_bytes": options.payload_bytes,
                "partitions": options.partitions,
                "window": options.window,
                "batch": options.batch,
            }),
            facts,
            figures: Vec::new(),
        }
    }

    /// Something to know about the machine or the servers.
    pub(crate) fn fact(&mut self, name: &str, value: impl Into<Value>) {
        self.facts.insert(name.into(), value.into());
    }

    pub(crate) fn add(&mut self, figure: Figure) {
        println!("{}", figure.line());
        self.figures.push(figure);
    }

    pub(crate) fn print(&self) {
        println!(
            "\n{:<38} {:>7} {:>17} {:>8}",
            "figure", "median", "min .. max", "target"
        );
        for figure in &self.figures {
            println!("{}", figure.line());
        }
        for (name, value) in &self.facts {
            println!("{name}: {value}");
        }
    }

    /// Writes the file that tools read; answers where it is.
    pub(crate) fn write(&self) -> PathBuf {
        // Not CARGO_TARGET_DIR: the file is where people look for it, wherever things are built.
        let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/bench");
        std::fs::create_dir_all(&directory).expect("target/bench can be created");
        let path = directory.join("report.json");
        let report = json!({
            "settings": self.settings,
            "facts": self.facts,
            "figures": self.figures.iter().map(Figure::json).collect::<Vec<_>>(),
        });
        std::fs::write(&path, format!("{report:#}\n")).expect("report.json can be written");
        path
    }
}

/// The value below which this part of all values lies, between neighbours where it falls between
/// them; of an empty list, none.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "an index into a list of a few thousand"
)]
pub(crate) fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else {
        return f64::NAN;
    };
    let place = last as f64 * part;
    let below = sorted[place.floor() as usize];
    let above = sorted[place.ceil() as usize];
    below + (above - below) * place.fract()
}

/// Three digits that matter, also of numbers in the ten thousands.
fn short(value: f64) -> String {
    if value >= 100.0 {
        format!("{value:.0}")
    } else {
        format!("{value:.3}")
    }
}
