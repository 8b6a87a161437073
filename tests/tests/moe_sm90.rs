//! Broken PTX of an MoE layer's products makes faults, so the absence of faults means something.

use nvfp4::backend::Backend;
use nvfp4::backend::emulated::{Emulated, Fault, FaultKind, Schedule};
use nvfp4::moe::{LayerShape, MoeInputs};
use nvfp4::problem::OutDtype;
use nvfp4_tests::moe::{hopper_of, inputs, run, shape, step, weights};
use nvfp4_tests::sabotage::{Sabotage, changed, check_sabotages, fault_of, lines_of};

const ENTRY: &str = "moe_gated_f16_t16";

fn ptx() -> &'static str {
    nvfp4::kernels::ptx("moe_sm90").expect("a kernel of this name")
}

/// The fault that stops a layer with this text of the kernel. One block computes many tiles, all of them ragged.
fn fault(layer: &LayerShape, ptx: &str) -> Option<Fault> {
    let gpu: Emulated = hopper_of(Schedule::Worst, 1).with_ptx(ptx).unwrap();
    let weights = weights(layer, OutDtype::F16);
    // Five, twelve and three rows.
    let ids: Vec<i32> = [vec![0; 5], vec![1; 12], vec![2; 3]].concat();
    let inputs = MoeInputs { ids: ids.into(), ..inputs(layer, OutDtype::F16, 20) };
    fault_of(run(gpu.prepare_moe(&weights).unwrap().as_mut(), &step(&weights, inputs)))
}

#[test]
#[ignore = "not yet found: two waits for empty slots, two fences behind copies of tokens"]
fn every_copy_wait_arrival_fence_and_product_that_is_left_out_is_found() {
    const SABOTAGES: [Sabotage; 11] = [
        Sabotage::leave_out("mbarrier.init", 26),
        Sabotage::do_not_wait(12),
        Sabotage::leave_out("mbarrier.arrive", 11),
        Sabotage::leave_out("cp.async.bulk.shared", 4),
        Sabotage::leave_out("cp.async.cg", 4),
        Sabotage::leave_out("cp.async.mbarrier.arrive", 1),
        Sabotage::leave_out("fence.proxy.async", 6),
        Sabotage::leave_out("wgmma.fence", 2),
        Sabotage::leave_out("wgmma.wait_group.sync.aligned 1", 2),
        Sabotage::leave_out("wgmma.wait_group.sync.aligned 0", 2),
        Sabotage::leave_out("bar.sync", 1),
    ];
    let layer = shape(848, 496, 3, 1);
    check_sabotages(ptx(), ENTRY, &SABOTAGES, |ptx| fault(&layer, ptx));
}

#[test]
fn lists_and_tokens_that_nobody_has_waited_for_are_found() {
    let waits: Vec<_> = lines_of(ptx(), ENTRY, "griddepcontrol.wait").into_iter().map(|(line, _)| (line, "")).collect();
    let fault = fault(&shape(848, 496, 3, 1), &changed(ptx(), &waits)).expect("nobody waits");
    assert_eq!(fault.kind, FaultKind::GridNotAwaited, "{fault}");
    assert!(fault.to_string().contains("`moe_route`"), "{fault}");
}
