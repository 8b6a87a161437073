//! The fault report and the coverage table in the README are real output. `BLESS=1 cargo test` rewrites the table.

use ptx_emulator::coverage;

const README: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");
const TABLE: &str = "Written by `ptx-emulator coverage`.\n\n";

#[test]
fn readme_has_a_real_fault_and_current_coverage() {
    let text = std::fs::read_to_string(README).unwrap();
    assert!(text.contains(include_str!("fail/overwrite_during_bulk_store.fault").trim_end()));
    let (before, table) = text.split_once(TABLE).expect("the coverage section");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(README, format!("{before}{TABLE}{}", coverage())).unwrap();
    } else {
        assert!(table == coverage(), "the table is out of date: run with BLESS=1");
    }
}
