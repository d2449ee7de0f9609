//! Medians, percentiles, ratios.

/// What the numbers of a row are.
#[derive(Clone, Copy)]
pub(crate) enum Unit {
    Ms,
    Mb,
}

/// Prints its rows as they come, so that a long run shows how far it is.
pub(crate) struct Table {
    sides: usize,
}

impl Table {
    /// Prints the heading: the left side, and the right one if there are two.
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
        Table { sides }
    }

    /// One row: the samples of each side.
    pub(crate) fn row(&mut self, case: &str, what: &str, unit: Unit, samples: &[Vec<f64>]) {
        let unit = match unit {
            Unit::Ms => "ms",
            Unit::Mb => "MB",
        };
        let mut line = vec![format!("{case:<24} {what:<20}")];
        let mut medians = Vec::new();
        // A side that lacks a plugin has none.
        for side in samples.iter().take(self.sides) {
            let (median, p99) = (percentile(side, 50), percentile(side, 99));
            if median.is_nan() {
                line.push(format!("{:>14} {:>10}", "-", "-"));
                continue;
            }
            line.push(format!("{median:>11.2} {unit} {p99:>7.2} {unit}"));
            medians.push(median);
        }
        if let [left, right] = medians[..] {
            line.push(format!("{:>7.2}", right / left));
        }
        println!("{}", line.join(" "));
    }
}

/// Why a row is missing.
pub(crate) fn note(case: &str, text: &str) {
    println!("{case:<24} {text}");
}

/// The nearest rank.
fn percentile(samples: &[f64], percent: usize) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(f64::NAN)
}
