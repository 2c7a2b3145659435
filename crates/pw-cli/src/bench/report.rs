//! Medians, ratios, tables, the JSON file.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

/// Middle, least and greatest of some figures.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Spread {
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Spread {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let count = values.len();
        let median = match count {
            0 => f64::NAN,
            n if n % 2 == 1 => values[n / 2],
            n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
        };
        Spread { median, min: values.first().copied().unwrap_or(f64::NAN), max: values.last().copied().unwrap_or(f64::NAN) }
    }

    /// Of the ratios of neighbours.
    pub(super) fn of_ratios(ours: &[f64], theirs: &[f64]) -> Spread {
        Spread::of(ours.iter().zip(theirs).map(|(a, b)| a / b))
    }

    /// `0.87 (0.80 to 0.93)`.
    pub(super) fn text(self) -> String {
        format!("{:.2} ({:.2} to {:.2})", self.median, self.min, self.max)
    }
}

/// A figure with as many digits as it deserves.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        _ if !value.is_finite() => "-".to_owned(),
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

pub(super) fn mib(bytes: u64) -> String {
    format!("{:.0} MiB", bytes as f64 / (1 << 20) as f64)
}

/// `goal >= 0.85: met`.
pub(super) fn goal(text: &str, met: bool) -> String {
    format!("{text}: {}", if met { "met" } else { "MISSED" })
}

/// Rows of cells; the first column is aligned left, the others right but for the last.
pub(super) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(head: &[&str]) -> Table {
        Table { rows: vec![head.iter().map(|&h| h.to_owned()).collect()] }
    }

    pub(super) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    pub(super) fn print(&self) {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |c: usize| self.rows.iter().filter_map(|r| r.get(c)).map(|cell| cell.chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let pad = " ".repeat(widths[column] - cell.chars().count());
                if column == 0 || column + 1 == columns {
                    line += &format!("{cell}{pad}  ");
                } else {
                    line += &format!("{pad}{cell}  ");
                }
            }
            println!("{}", line.trim_end());
        }
    }
}

pub(super) fn write_json(path: &Path, mut figures: Value) -> Result<()> {
    figures["build"] = crate::build::id().into();
    figures["machine_after"] = super::machine::describe().into();
    std::fs::write(path, format!("{figures:#}\n")).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Spread::of([4.0, 1.0]).median, 2.5);
        assert!(Spread::of([]).median.is_nan());
        assert_eq!(Spread::of_ratios(&[1.0, 4.0, 9.0], &[2.0, 2.0, 3.0]).text(), "2.00 (0.50 to 3.00)");
    }
}
