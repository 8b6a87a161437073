//! Broken PTX of an MoE layer's products makes faults, so the absence of faults means something.

use nvfp4::backend::Backend;
use nvfp4::backend::emulated::{Emulated, Fault, FaultKind, Schedule};
use nvfp4::moe::MoeInputs;
use nvfp4::problem::OutDtype;
use nvfp4_tests::moe::{hopper_of, inputs, run, shape, step, weights};

const ENTRY: &str = "moe_gated_f16_t16";

fn ptx() -> &'static str {
    nvfp4::kernels::ptx("moe_sm90").expect("a kernel of this name")
}

/// The lines of the entry that begin with this, but for a predicate.
fn lines_of(instruction: &str) -> Vec<(usize, &'static str)> {
    let entry = format!(".entry {ENTRY}(");
    let lines = ptx().lines().enumerate().skip_while(|(_, line)| !line.contains(&entry));
    let lines = lines.take_while(|(_, line)| !line.contains("// -- End function"));
    lines.filter(|(_, line)| line.trim_start().starts_with(instruction)).collect()
}

/// The fault that stops the layer when lines of the kernel's text are changed. One block computes many tiles, all of them
/// ragged.
fn fault(changes: &[(usize, &str)]) -> Option<Fault> {
    let mut lines: Vec<_> = ptx().lines().collect();
    for &(line, changed) in changes {
        lines[line] = changed;
    }
    let gpu: Emulated = hopper_of(Schedule::Worst, 1).with_ptx(&lines.join("\n")).unwrap();
    let layer = shape(848, 272, 3, 1);
    let weights = weights(&layer, OutDtype::F16);
    // Five, twelve and three rows.
    let ids: Vec<i32> = [vec![0; 5], vec![1; 12], vec![2; 3]].concat();
    let inputs = MoeInputs { ids: ids.into(), ..inputs(&layer, OutDtype::F16, 20) };
    let result = run(gpu.prepare_moe(&weights).unwrap().as_mut(), &step(&weights, inputs));
    result.err().map(|error| error.fault().unwrap_or_else(|| panic!("{error}")).clone())
}

#[test]
#[ignore = "not yet found: two waits for empty slots, two fences behind copies of tokens"]
fn every_copy_wait_arrival_fence_and_product_that_is_left_out_is_found() {
    const DO_NOT_WAIT: &str = "setp.eq.u32 p, 0, 0;";
    /// The beginning of the instruction; what stands in its place; how many there are at least; how many may be left out,
    /// since a later one makes up for them.
    const SABOTAGES: [(&str, &str, usize, usize); 11] = [
        ("mbarrier.init", "", 26, 0),
        ("mbarrier.try_wait", DO_NOT_WAIT, 12, 0),
        ("mbarrier.arrive", "", 11, 0),
        ("cp.async.bulk.shared", "", 4, 0),
        ("cp.async.cg", "", 4, 0),
        ("cp.async.mbarrier.arrive", "", 1, 0),
        ("fence.proxy.async", "", 6, 0),
        ("wgmma.fence", "", 2, 0),
        ("wgmma.wait_group.sync.aligned 1", "", 2, 0),
        ("wgmma.wait_group.sync.aligned 0", "", 2, 0),
        ("bar.sync", "", 1, 0),
    ];
    assert_eq!(fault(&[(0, "")]), None, "the first line is a comment");
    let mut unnoticed: Vec<(usize, &str)> = Vec::new();
    for (instruction, changed, least, spare) in SABOTAGES {
        let lines = lines_of(instruction);
        assert!(lines.len() >= least, "{} of {instruction}", lines.len());
        let found: Vec<_> = lines.iter().filter(|(line, _)| fault(&[(*line, changed)]).is_none()).collect();
        if found.len() > spare {
            unnoticed.extend(found);
        }
    }
    assert!(unnoticed.is_empty(), "may be left out: {unnoticed:#?}");
}

#[test]
fn lists_and_tokens_that_nobody_has_waited_for_are_found() {
    let waits: Vec<_> = lines_of("griddepcontrol.wait").into_iter().map(|(line, _)| (line, "")).collect();
    let fault = fault(&waits).expect("nobody waits");
    assert_eq!(fault.kind, FaultKind::GridNotAwaited, "{fault}");
    assert!(fault.to_string().contains("`moe_route`"), "{fault}");
}
