//! Medians, percentiles and ratios, printed and collected for `--json`.

use serde_json::{Map, Value, json};

/// The unit of a row's numbers.
#[derive(Clone, Copy)]
pub(crate) enum Unit {
    Ms,
    Mb,
    /// Number of processes.
    Count,
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Unit::Ms => "ms",
            Unit::Mb => "MB",
            Unit::Count => "",
        }
    }
}

/// The names of the sides in JSON.
const SIDES: [&str; 2] = ["cnibox", "reference"];

/// Prints each row as soon as it is measured, to show progress.
pub(crate) struct Table {
    sides: usize,
    rows: Vec<Value>,
}

impl Table {
    /// Prints the heading: the left side, and the right side if there are two.
    pub(crate) fn new(left: &str, right: Option<&str>) -> Table {
        let sides = 1 + usize::from(right.is_some());
        let mut line = vec![format!("{:<24} {:<20}", "case", "what")];
        for side in [Some(left), right].into_iter().flatten() {
            line.push(format!("{side:>14} {:>10}", "p99"));
        }
        if right.is_some() {
            line.push(format!("{:>7}", "ratio"));
        }
        let line = line.join(" ");
        println!("\n{line}\n{}", "-".repeat(line.len()));
        Table { sides, rows: Vec::new() }
    }

    /// Adds a row with the samples of each side.
    pub(crate) fn row(&mut self, case: &str, what: &str, unit: Unit, samples: &[Vec<f64>]) {
        let sides = self.sides;
        self.add(&SIDES[..sides], (case, what), unit, samples);
    }

    /// Adds a row whose right side is not the peer's directory.
    pub(crate) fn beside(
        &mut self,
        right: &str,
        case: &str,
        what: &str,
        unit: Unit,
        samples: &[Vec<f64>],
    ) {
        self.add(&[SIDES[0], right], (case, what), unit, samples);
    }

    fn add(
        &mut self,
        sides: &[&str],
        (case, what): (&str, &str),
        unit: Unit,
        samples: &[Vec<f64>],
    ) {
        let name = unit.name();
        let mut line = vec![format!("{case:<24} {what:<20}")];
        let mut medians = Vec::new();
        let mut row = Map::new();
        row.extend(
            [("case", case), ("what", what), ("unit", name)].map(|(k, v)| (k.into(), json!(v))),
        );
        // A side without the plugin has no samples.
        for (side, key) in samples.iter().zip(sides) {
            let (median, p99) = (percentile(side, 50), percentile(side, 99));
            if median.is_nan() {
                line.push(format!("{:>14} {:>10}", "-", "-"));
                continue;
            }
            line.push(format!("{median:>11.2} {name:<2} {p99:>7.2} {name:<2}"));
            medians.push(median);
            let round = |percent| (percentile(side, percent) * 1000.0).round() / 1000.0;
            row.insert(
                (*key).into(),
                json!({"samples": side.len(), "p10": round(10), "median": round(50), "p90": round(90)}),
            );
        }
        if let [left, right] = medians[..]
            && left > 0.0
        {
            line.push(format!("{:>7.2}", right / left));
        }
        println!("{}", line.join(" ").trim_end());
        self.rows.push(Value::Object(row));
    }

    /// All rows: `case`, `what`, `unit`, and the `samples`, `p10`, `median` and `p90` of each side.
    pub(crate) fn rows(&self) -> &[Value] {
        &self.rows
    }
}

/// Prints why a row is missing.
pub(crate) fn note(case: &str, text: &str) {
    println!("{case:<24} {text}");
}

/// The percentile by nearest rank.
fn percentile(samples: &[f64], percent: usize) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(f64::NAN)
}
