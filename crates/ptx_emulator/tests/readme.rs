//! The README's fault report and coverage table are the emulator's own. `BLESS=1 cargo test` renews the table.

use ptx_emulator::coverage;

const README: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");
const TABLE: &str = "Written by `ptx-emulator coverage`.\n\n";

#[test]
fn the_fault_report_is_real_and_the_coverage_table_current() {
    let text = std::fs::read_to_string(README).unwrap();
    assert!(text.contains(include_str!("fail/overwrite_during_bulk_store.fault").trim_end()));
    let (before, table) = text.split_once(TABLE).expect("the coverage section");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(README, format!("{before}{TABLE}{}", coverage())).unwrap();
    } else {
        assert!(table == coverage(), "the table is out of date: run with BLESS=1");
    }
}
