//! Tables for the terminal.

use comfy_table::{CellAlignment, ContentLineStyle, LineStyle, Table, TableStyle};

/// Spaces between columns, and a line under the header.
const STYLE: TableStyle = TableStyle::new()
    .header_lines(ContentLineStyle::none().junction(' '))
    .header_separator(LineStyle::none().fill('─').junction(' '))
    .content_lines(ContentLineStyle::none().junction(' '));

/// Returns a table with a header; the first `words` columns are left-aligned, the number columns after them
/// right-aligned.
pub fn table(header: &[&str], words: usize) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(header.iter().copied());
    for column in table.column_iter_mut().skip(words) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Formats a number with separated thousands.
pub fn thousands(number: usize) -> String {
    let digits = number.to_string();
    let groups: Vec<_> =
        digits.as_bytes().rchunks(3).rev().map(|group| std::str::from_utf8(group).expect("digits are ASCII")).collect();
    groups.join(",")
}

/// Formats a time in a suitable unit.
pub fn time(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.2} µs", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

/// Formats a number of bytes in a suitable decimal unit.
pub fn bytes(count: f64) -> String {
    match count {
        b if b < 1e6 => format!("{:.1} kB", b / 1e3),
        b if b < 1e9 => format!("{:.1} MB", b / 1e6),
        b if b < 1e12 => format!("{:.1} GB", b / 1e9),
        b => format!("{:.1} TB", b / 1e12),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_get_readable_units() {
        assert_eq!(thousands(0), "0");
        assert_eq!(thousands(4_194_304), "4,194,304");
        assert_eq!([time(18.833e-6), time(0.25), time(2.0)], ["18.83 µs", "250.00 ms", "2.00 s"]);
        assert_eq!([bytes(1500.0), bytes(2.64e8), bytes(9.3e12)], ["1.5 kB", "264.0 MB", "9.3 TB"]);
    }
}
