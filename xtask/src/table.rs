//! Markdown tables that are readable as plain text.

use std::fmt;

/// Rows of cells, the header first. The first `left` columns hold words, the others numbers.
pub struct Table {
    left: usize,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with a header.
    pub fn new(left: usize, header: &[&str]) -> Self {
        Self { left, rows: vec![header.iter().map(|&name| name.to_owned()).collect()] }
    }

    /// Adds a row with one cell per column.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.push(cells.into());
    }

    /// Adds a row whose number of cells is known at run time only.
    pub fn push(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.rows[0].len(), "a row has one cell per column");
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows[0].len();
        let width = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<_> = (0..columns).map(|column| width(column).max(2)).collect();
        for (index, row) in self.rows.iter().enumerate() {
            for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                if column < self.left {
                    write!(f, "| {cell:<width$} ")?;
                } else {
                    write!(f, "| {cell:>width$} ")?;
                }
            }
            writeln!(f, "|")?;
            if index == 0 {
                for (column, &width) in widths.iter().enumerate() {
                    let line = "-".repeat(width);
                    if column < self.left { write!(f, "|-{line}-")? } else { write!(f, "|-{line}:")? }
                }
                writeln!(f, "|")?;
            }
        }
        Ok(())
    }
}

/// Returns the geometric mean of `values`.
pub fn geomean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value.ln(), count + 1));
    (sum / f64::from(count.max(1))).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_align_left_and_numbers_right() {
        let mut table = Table::new(1, &["name", "n"]);
        table.row(["µ".into(), "100".into()]);
        assert_eq!(table.to_string(), "| name |   n |\n|------|----:|\n| µ    | 100 |\n");
    }
}
