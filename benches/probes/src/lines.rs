//! Measured values, one line per probe.

use std::cell::RefCell;
use std::collections::BTreeMap;

use anyhow::{Context, Result};

/// Values of one probe.
#[derive(Clone, Debug)]
pub struct Line {
    values: Vec<f64>,
}

impl Line {
    /// Makes a line from values in the order of measurement.
    pub fn new(values: Vec<f64>) -> Self {
        Self { values }
    }

    /// Returns the median, the least and the largest value.
    pub fn spread(&self) -> [f64; 3] {
        let mut sorted = self.values.clone();
        sorted.sort_by(f64::total_cmp);
        [sorted[sorted.len() / 2], sorted[0], sorted[sorted.len() - 1]]
    }
}

/// All lines by name. Each is printed when it is measured.
pub struct Lines {
    lines: RefCell<BTreeMap<String, Line>>,
    repeats: usize,
}

impl Lines {
    /// Makes lines with `repeats` values each.
    pub fn new(repeats: usize) -> Self {
        Self { lines: RefCell::default(), repeats }
    }

    /// Calls `one` once per value, with a warm-up call before if there are several values. Makes one line per returned
    /// number, with its unit.
    pub fn measure<const N: usize>(
        &self,
        names: [(String, &str); N],
        mut one: impl FnMut() -> Result<[f64; N]>,
    ) -> Result<()> {
        let what = || names.first().map_or_else(String::new, |(name, _)| name.clone());
        if self.repeats > 1 {
            one().with_context(what)?;
        }
        let measured = (0..self.repeats).map(|_| one()).collect::<Result<Vec<_>>>().with_context(what)?;
        for (n, (name, unit)) in names.into_iter().enumerate() {
            let line = Line::new(measured.iter().map(|values| values[n]).collect());
            let [median, least, most] = line.spread();
            println!("{name:<38} {median:>10.2} {least:>10.2} {most:>10.2} {unit}");
            self.lines.borrow_mut().insert(name, line);
        }
        Ok(())
    }

    /// Computes a line from other lines, value by value. `None`: one of them was not measured.
    pub fn combine<const N: usize>(&self, names: [&str; N], formula: impl Fn([f64; N]) -> f64) -> Option<Line> {
        let lines = self.lines.borrow();
        let lines: Vec<&Line> = names.iter().map(|&name| lines.get(name)).collect::<Option<_>>()?;
        let value = |n: usize| formula(std::array::from_fn(|of| lines[of].values[n]));
        Some(Line::new((0..self.repeats).map(value).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_combined_value_by_value() {
        let lines = Lines::new(3);
        let mut n = 0.0;
        lines
            .measure([("a".to_owned(), "ns"), ("b".to_owned(), "ns")], || {
                n += 1.0;
                Ok([n, 10.0 - n])
            })
            .unwrap();
        // The first call is the warm-up.
        assert_eq!(lines.combine(["a"], |[a]| a).unwrap().spread(), [3.0, 2.0, 4.0]);
        assert_eq!(lines.combine(["a", "b"], |[a, b]| a + b).unwrap().spread(), [10.0; 3]);
        assert!(lines.combine(["a", "c"], |[a, c]| a + c).is_none());
    }
}
