//! Figures: ratios of what was measured in turns and a few absolute ones, their table and their file.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::options::Options;

/// Which way is better, and how far one wants to get.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    AtLeast(f64),
    AtMost(f64),
    /// For orientation only.
    None,
}

/// What one thing came to, round by round.
pub(crate) enum Turns {
    /// Each round's measured value and what it is set against.
    Ratios(Vec<(f64, f64)>),
    /// Each round's value, which is set against nothing.
    Absolute(Vec<f64>),
}

/// One line of the table.
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) unit: &'static str,
    pub(crate) target: Target,
    pub(crate) turns: Turns,
}

impl Figure {
    /// Each round's ratio, or its value.
    fn values(&self) -> Vec<f64> {
        match &self.turns {
            Turns::Ratios(turns) => turns.iter().map(|turn| turn.0 / turn.1).collect(),
            Turns::Absolute(turns) => turns.clone(),
        }
    }

    /// Of what was measured, and of what it is set against.
    fn medians(&self) -> (f64, Option<f64>) {
        match &self.turns {
            Turns::Ratios(turns) => {
                let (measured, reference): (Vec<f64>, Vec<f64>) = turns.iter().copied().unzip();
                (quantile(&measured, 0.5), Some(quantile(&reference, 0.5)))
            }
            Turns::Absolute(turns) => (quantile(turns, 0.5), None),
        }
    }

    fn line(&self) -> String {
        let values = self.values();
        let target = match self.target {
            Target::AtLeast(target) => format!(">= {target}"),
            Target::AtMost(target) => format!("<= {target}"),
            Target::None => "-".into(),
        };
        let of = match self.medians() {
            (measured, Some(reference)) => {
                format!(
                    "{} over {} {}",
                    short(measured),
                    short(reference),
                    self.unit
                )
            }
            (_, None) => self.unit.to_owned(),
        };
        format!(
            "{:<40} {:>7} {:>7} ..{:>7} {target:>8}   {of}",
            self.name,
            short(quantile(&values, 0.5)),
            short(quantile(&values, 0.0)),
            short(quantile(&values, 1.0)),
        )
    }

    fn json(&self) -> Value {
        let values = self.values();
        let (measured, reference) = self.medians();
        let (at_least, at_most) = match self.target {
            Target::AtLeast(target) => (Some(target), None),
            Target::AtMost(target) => (None, Some(target)),
            Target::None => (None, None),
        };
        let (kind, rounds): (_, Vec<Value>) = match &self.turns {
            Turns::Ratios(turns) => (
                "ratio",
                turns
                    .iter()
                    .map(|turn| json!({ "measured": turn.0, "reference": turn.1 }))
                    .collect(),
            ),
            Turns::Absolute(turns) => (
                "absolute",
                turns
                    .iter()
                    .map(|value| json!({ "measured": value, "reference": null }))
                    .collect(),
            ),
        };
        json!({
            "name": self.name,
            "kind": kind,
            "median": quantile(&values, 0.5),
            "min": quantile(&values, 0.0),
            "max": quantile(&values, 1.0),
            "target": { "at_least": at_least, "at_most": at_most },
            "unit": self.unit,
            "measured_median": measured,
            "reference_median": reference,
            "rounds": rounds,
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
                "quick": options.quick,
                "rounds": options.rounds,
                "rows": options.rows,
                "waiting": options.waiting,
                "payload_bytes": options.payload_bytes,
                "partitions": options.partitions,
                "window": options.window,
                "batch": options.batch,
                "replicas": options.replicas,
            }),
            facts,
            figures: Vec::new(),
        }
    }

    /// Something to know about the machine or the servers.
    pub(crate) fn fact(&mut self, name: &str, value: impl Into<Value>) {
        self.facts.insert(name.into(), value.into());
    }

    /// A figure that is the ratio of each pair.
    pub(crate) fn ratio(
        &mut self,
        name: impl Into<String>,
        unit: &'static str,
        target: Target,
        turns: Vec<(f64, f64)>,
    ) {
        self.add(Figure {
            name: name.into(),
            unit,
            target,
            turns: Turns::Ratios(turns),
        });
    }

    /// A figure that is set against nothing.
    pub(crate) fn absolute(
        &mut self,
        name: impl Into<String>,
        unit: &'static str,
        target: Target,
        turns: Vec<f64>,
    ) {
        self.add(Figure {
            name: name.into(),
            unit,
            target,
            turns: Turns::Absolute(turns),
        });
    }

    fn add(&mut self, figure: Figure) {
        println!("{}", figure.line());
        self.figures.push(figure);
    }

    pub(crate) fn print(&self) {
        println!(
            "\n{:<40} {:>7} {:>17} {:>8}",
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
