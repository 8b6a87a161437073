//! Hazards that are allowed or continued after, consecutive launches, and the contents of faults.

use ptx_emulator::program::Program;
use ptx_emulator::{Device, DeviceConfig, Fault, FaultKind, LaunchConfig, Module, Report};

/// Two threads write different values at line 9. A warp writes at line 12 the words that the other warp reads at line
/// 14.
const RACES: &str = r#"
.version 8.0
.target sm_80
.address_size 64
.shared .align 4 .u32 x;
.visible .entry _Z5racesPj(.param .u64 p) {
.reg .pred %q; .reg .b32 %r<4>; .reg .b64 %d;
mov.u32 %r1, %tid.x; ld.param.u64 %d, [p]; setp.lt.u32 %q, %r1, 32;
st.shared.u32 [x], %r1;
bar.sync 0;
@!%q bra DONE;
st.shared.u32 [x], 5;
DONE:
ld.shared.u32 %r2, [x];
@%q st.global.u32 [%d], 7;
ret;
}"#;

fn run(head: &str, text: &str) -> Result<Report, Fault> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("k.ptx");
    let head: Vec<_> = head.lines().map(|line| format!("//! {line}")).collect();
    std::fs::write(&path, format!("{}\n{}", head.join("\n"), text.trim_start())).unwrap();
    Program::read(&path).unwrap().prepare().unwrap_or_else(|error| panic!("{error:#}")).run()
}

fn races(more: &str) -> Result<Report, Fault> {
    let head =
        format!(r#"{{"block": [64, 1, 1], "buffers": {{"p": {{"bytes": 4}}}}, "args": [{{"pointer": "p"}}]{more}}}"#);
    run(&head, RACES)
}

#[test]
fn first_hazard_ends_the_launch() {
    let fault = races("").unwrap_err();
    assert_eq!((fault.kind, fault.place.as_ref().map(|place| place.line)), (FaultKind::DataRace, Some(9)));
    let text = fault.to_string();
    assert!(text.contains("in kernel `races(unsigned int*)`, CTA (0, 0, 0), warp"), "{text}");
    assert!(text.contains("- CTA (0, 0, 0), warp") && text.contains("remedy: order the two accesses"), "{text}");
}

#[test]
fn continued_launch_lists_all_hazards_by_place() {
    let report = races(r#", "keep_going": true"#).unwrap();
    let lines: Vec<_> = report.hazards.iter().map(|hazard| hazard.fault.place.as_ref().unwrap().line).collect();
    assert_eq!(lines, [9, 12], "{report}");
    assert_eq!(report.hazards[1].fault.others[0].place.as_ref().unwrap().line, 14, "{report}");
    assert!(report.hazards.iter().all(|hazard| hazard.fault.kind == FaultKind::DataRace));
    assert!(report.hazards.iter().any(|hazard| hazard.times >= 32), "{report}");
    assert!(report.to_string().contains("times at this place"));
}

#[test]
fn allowed_hazards_are_not_reported() {
    let report = races(r#", "allow": ["data-race"]"#).unwrap();
    assert!(report.hazards.is_empty() && report.warnings.is_empty());
    assert_eq!(races(r#", "allow": ["read-in-flight"]"#).unwrap_err().kind, FaultKind::DataRace);
    let fault = races(r#", "allow": ["data-race:9"]"#).unwrap_err();
    assert_eq!(fault.place.unwrap().line, 12);
    assert!(races(r#", "allow": ["data-race:9", "data-race:14"]"#).is_ok(), "the line of either access matches");
}

#[test]
fn fatal_kinds_and_bad_rules_are_refused() {
    for (allow, what) in
        [("deadlock", "no run can continue"), ("races", "is not a kind"), ("data-race:x", "is not a line")]
    {
        let error = allow.parse::<ptx_emulator::Allow>().unwrap_err();
        assert!(error.contains(what), "{error}");
    }
}

#[test]
fn later_fault_lists_earlier_hazards() {
    let text = RACES.replace("@%q st.global.u32 [%d], 7;", "@%q st.global.u32 [%d+4], 7;");
    let head =
        r#"{"block": [64, 1, 1], "buffers": {"p": {"bytes": 4}}, "args": [{"pointer": "p"}], "keep_going": true}"#;
    let fault = run(head, &text).unwrap_err();
    assert_eq!(fault.kind, FaultKind::OutOfBounds);
    assert!(!fault.before.is_empty() && fault.to_string().contains("fault[data-race]"), "{fault}");
}

#[test]
fn grid_races_are_found_unless_disabled() {
    let text =
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 p) {\n.reg .b32 %r; .reg .b64 %d;
ld.param.u64 %d, [p]; mov.u32 %r, %ctaid.x;\nst.global.u32 [%d], %r;\nret;\n}";
    let head = |more| {
        format!(r#"{{"grid": [8, 1, 1], "buffers": {{"p": {{"bytes": 4}}}}, "args": [{{"pointer": "p"}}]{more}}}"#)
    };
    let fault = run(&head(""), text).unwrap_err();
    assert_eq!((fault.kind, fault.cta), (FaultKind::DataRace, Some([1, 0, 0])), "{fault}");
    assert!(run(&head(r#", "global_races": false"#), text).unwrap().hazards.is_empty());
    let report = run(&head(r#", "keep_going": true"#), text).unwrap();
    assert_eq!(report.hazards.len(), 1, "{report}");
    assert_eq!(report.hazards[0].times, 7, "{report}");
    assert!(run(&head(r#", "allow": ["data-race:8"]"#), text).is_ok());
}

#[test]
fn output_before_a_fault_is_kept() {
    let text = r#"
.version 8.0
.target sm_80
.address_size 64
.extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);
.global .align 1 .b8 text[7] = {104, 101, 108, 108, 111, 10, 0};
.visible .entry k() {
.reg .b64 %d<4>; .reg .b32 %r<2>;
mov.u64 %d1, text; cvta.global.u64 %d2, %d1; mov.u64 %d3, 0;
{ .param .b64 f; st.param.b64 [f], %d2; .param .b64 a; st.param.b64 [a], %d3; .param .b32 r; call (r), vprintf, (f, a); }
trap;
}"#;
    let fault = run(r#"{"block": [1, 1, 1]}"#, text).unwrap_err();
    assert_eq!((fault.kind, fault.printed.as_str()), (FaultKind::Trap, "hello\n"));
    assert!(fault.to_string().ends_with("printed before:\nhello\n"), "{fault}");
}

/// Adds 1 to each word that a table of pointers refers to, up to a null pointer.
const TABLE: &str = r#"
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 table) {
.reg .pred %p; .reg .b32 %r; .reg .b64 %d<3>;
ld.param.u64 %d1, [table];
NEXT:
ld.global.u64 %d2, [%d1];
setp.eq.u64 %p, %d2, 0;
@%p bra DONE;
ld.global.u32 %r, [%d2];
add.u32 %r, %r, 1;
st.global.u32 [%d2], %r;
add.u64 %d1, %d1, 8;
bra NEXT;
DONE: ret;
}
.visible .entry copy(.param .u64 from, .param .u64 to) {
.reg .b32 %r; .reg .b64 %d<3>;
ld.param.u64 %d1, [from]; ld.param.u64 %d2, [to];
ld.global.u32 %r, [%d1]; st.global.u32 [%d2], %r; ret;
}"#;

#[test]
fn buffers_hold_pointers_across_consecutive_launches() {
    let head = r#"{"entry": "k", "buffers": {"a": {"u32": [10, 20]}, "b": {"u32": [30]},
        "table": {"pointers": ["a", {"buffer": "a", "offset": 4}, "b", null]},
        "other": {"bytes": 24, "patches": [{"at": 8, "pointer": "b"}]}},
      "args": [{"pointer": "table"}],
      "then": [{}, {"args": [{"pointer": "other", "offset": 8}]},
               {"entry": "copy", "args": [{"pointer": "b"}, {"pointer": "a"}]}]}"#;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("k.ptx");
    let head: Vec<_> = head.lines().map(|line| format!("//! {line}")).collect();
    std::fs::write(&path, format!("{}{TABLE}", head.join("\n"))).unwrap();
    let mut prepared = Program::read(&path).unwrap().prepare().unwrap();
    let report = prepared.run().unwrap();
    assert_eq!((report.kernel.as_str(), report.ctas), ("k, copy", 4));
    let words = |name: &str| prepared.device.download::<u32>(prepared.buffers[name]);
    assert_eq!((words("a"), words("b")), (vec![33, 22], vec![33]));
}

/// `ptxas` 13.5 refuses a kernel whose `tcgen05` instructions name both groups. Older ones did not, and a commit of the
/// other group was an illegal instruction on a B200 (tile-ai/tilelang#2287).
#[test]
fn instructions_of_another_cta_group_fault() {
    let text = |group: u32| {
        format!(
            ".version 8.8\n.target sm_100a\n.address_size 64\n.shared .b64 full;\n.visible .entry k() {{\n\
             tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n\
             tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.b64 [full];\nret;\n}}"
        )
    };
    let run = |group: u32| {
        let module = Module::parse(&text(group)).unwrap();
        let config = LaunchConfig { sanitize: false, ..LaunchConfig::linear(1, 32) };
        Device::new(DeviceConfig::default()).launch(&module, "k", &config, &[])
    };
    let fault = run(2).expect_err("both groups");
    assert_eq!(fault.kind, FaultKind::InvalidOperand);
    assert_eq!(fault.place.as_ref().map(|place| place.line), Some(7), "{fault}");
    assert!(!run(1).is_err_and(|fault| fault.kind == FaultKind::InvalidOperand));
}
