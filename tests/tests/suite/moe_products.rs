//! Checks the kernels that multiply in an MoE layer: every instance is right under every schedule, and broken PTX must
//! cause faults or wrong outputs.

use std::collections::BTreeSet;

use nvfp4::Error;
use nvfp4::backend::Backend;
use nvfp4::backend::emulated::{Fault, FaultKind, Schedule};
use nvfp4::moe::compare::compare;
use nvfp4::moe::{Activation, LayerShape, MoeInputs, MoeStep, MoeWeights};
use nvfp4::problem::{TokenDtype, TokenFormat};
use nvfp4_tests::instances::sampled_schedules;
use nvfp4_tests::moe::{DTYPES, emulated, emulated_of, inputs, run, shape, step, verified, weights};
use nvfp4_tests::sabotage::{Sabotage, changed, check_sampled_sabotages, fault_of, is_found, lines_of, only_entries};
use nvfp4_tests::sampled;
use rayon::prelude::*;

/// A kernel with the entry that a layer with these rows per expert uses.
struct Products {
    kernel: &'static str,
    arch: &'static str,
    entry: &'static str,
    rows: &'static [usize],
    /// Intermediate size of the layer.
    intermediate: usize,
}

const FEW: &[usize] = &[5, 12, 3];
const HOPPER: Products =
    Products { kernel: "moe_sm90", arch: "sm_90a", entry: "moe_gated_f16_t16", rows: FEW, intermediate: 496 };
const CONSUMER: Products =
    Products { kernel: "moe_sm120", arch: "sm_120f", entry: "moe_sm120_gated_f16_t16", rows: FEW, intermediate: 496 };
const PORTABLE: Products =
    Products { kernel: "moe_sm80", arch: "sm_80", entry: "moe_sm80_gated_f16_t16", rows: FEW, intermediate: 496 };

/// Few tiles, so that each warp has its own strip of weights. The rows need MMAs for 8 tokens and for 16.
const STRIPS: Products = Products {
    kernel: "moe_sm90",
    arch: "sm_90a",
    entry: "moe_gated_f16_t16_strips",
    rows: &[5, 12],
    intermediate: 96,
};

/// Many tiles of few tokens with a short K of the down projection: a CTA computes runs of tiles.
const RUNS: Products = Products {
    kernel: "moe_sm90",
    arch: "sm_90a",
    entry: "moe_plain_f16_t8_strips_run4",
    rows: &[5, 3, 1, 4, 2, 1, 3],
    intermediate: 496,
};

/// Rows that need MMAs of every width of tiles of 64 tokens.
const SORTED: Products = Products {
    kernel: "moe_sm90",
    arch: "sm_90a",
    entry: "moe_gated_f16_t64",
    rows: &[70, 62, 12, 3, 48, 51, 20],
    intermediate: 496,
};

impl Products {
    fn ptx(&self) -> &'static str {
        nvfp4::kernels::ptx(self.kernel).expect("a kernel of this name")
    }

    fn entries(&self) -> BTreeSet<String> {
        self.ptx().split(".entry ").skip(1).map(|text| text[..text.find('(').unwrap()].to_owned()).collect()
    }

    /// Runs a layer with a PTX text of the kernel, and returns the output's mismatches. One CTA computes many tiles,
    /// all of them ragged.
    fn mismatches(&self, layer: &LayerShape, ptx: &str) -> Result<usize, Error> {
        let gpu = emulated_of(self.arch, Schedule::Worst, 1).with_ptx(ptx).unwrap();
        let weights = weights(layer, TokenDtype::F16);
        // The kernel reads the first expert's rows first. They belong to the last tokens, which the launch before
        // writes last.
        let mut ids: Vec<i32> = (0..).zip(self.rows).flat_map(|(expert, &rows)| vec![expert; rows]).collect();
        ids.reverse();
        let step = step(&weights, MoeInputs { ids: ids.clone().into(), ..inputs(layer, TokenDtype::F16, ids.len()) });
        let output = run(gpu.prepare_moe(&weights).unwrap().as_mut(), &step)?;
        Ok(compare(&weights, &step, &output).mismatches())
    }

    /// Returns the fault that stops a layer with a PTX text of the kernel.
    fn fault(&self, layer: &LayerShape, ptx: &str) -> Option<Fault> {
        fault_of(self.mismatches(layer, ptx))
    }

    /// `true` if one of the layers is stopped by a fault, or has a wrong output.
    fn is_found(&self, layers: &[LayerShape], ptx: &str) -> bool {
        layers.iter().any(|layer| is_found(self.mismatches(layer, ptx), |mismatches| mismatches > 0))
    }

    /// Returns the kernel's text with only the entries whose tiles have as many tokens as tiles of `entry`.
    fn text_of_entry(&self) -> String {
        let is_tile = |part: &&str| part.strip_prefix('t').is_some_and(|tokens| tokens.parse::<u32>().is_ok());
        let tile = self.entry.split('_').find(is_tile).expect("a part `t` with a number of tokens in the entry's name");
        only_entries(self.ptx(), |name| name.split('_').any(|part| part == tile))
    }

    /// Returns the layer for these rows.
    fn layer(&self, hidden: usize) -> LayerShape {
        shape(hidden, self.intermediate, self.rows.len(), 1)
    }
}

#[test]
fn sm_120_instances_are_right_on_random_and_worst_schedules() {
    check_every_instance(&CONSUMER);
}

#[test]
fn sm_80_instances_are_right_on_random_and_worst_schedules() {
    check_every_instance(&PORTABLE);
}

/// An activation of the instances with curves.
const CURVE: Activation = Activation::Situ { beta: 1.5, linear: Some(2.5) };

fn check_every_instance(products: &Products) {
    let (mut used, of_kernel) = (BTreeSet::new(), format!("{}_", products.kernel));
    // Few tiles, many tiles, and larger tiles. K ends inside a k-block, and N inside a tile.
    for (tokens, experts) in [(3, 2), (30, 6), (70, 2)] {
        for (dtype, activation) in DTYPES.into_iter().flat_map(|dtype| [(dtype, Activation::Silu), (dtype, CURVE)]) {
            let layer = shape(240, 112, experts, 1).with_activation(activation, false);
            let weights = weights(&layer, dtype);
            let step = step(&weights, inputs(&layer, dtype, tokens));
            used.extend(check_schedules(products.arch, &weights, &step, &of_kernel));
        }
    }
    assert_eq!(used, products.entries());
}

/// Checks that a step is right on random schedules and the worst, with the same bits on each. Returns the used entries
/// whose names begin with `names`.
fn check_schedules(arch: &str, weights: &MoeWeights<'_>, step: &MoeStep<'_>, names: &str) -> BTreeSet<String> {
    let ran: Vec<_> = sampled_schedules()
        .into_par_iter()
        .map(|schedule| {
            let mut layer = emulated(arch, schedule).prepare_moe(weights).unwrap();
            let output = verified(layer.as_mut(), weights, step);
            (output, layer.counters().expect("a kernel ran").kernel.clone())
        })
        .collect();
    assert!(ran.windows(2).all(|pair| pair[0] == pair[1]), "schedules gave different bits");
    ran[0].1.split(", ").filter(|entry| entry.starts_with(names)).map(str::to_owned).collect()
}

#[test]
fn removing_any_sync_copy_or_mma_is_found() {
    const SABOTAGES: [Sabotage; 11] = [
        Sabotage::leave_out("mbarrier.init", 26),
        // Spare waits: the first tile's slot is empty from the start, and no emulated schedule fills all slots later.
        Sabotage::do_not_wait(12).spare(2),
        Sabotage::leave_out("mbarrier.arrive", 11),
        Sabotage::leave_out("cp.async.bulk.shared", 4),
        Sabotage::leave_out("cp.async.cg", 4),
        Sabotage::leave_out("cp.async.mbarrier.arrive", 1),
        // The spare fence follows the token copies of one mainloop. No emulated schedule makes its absence
        // visible.
        Sabotage::leave_out("fence.proxy.async", 6).spare(1),
        Sabotage::leave_out("wgmma.fence", 2),
        Sabotage::leave_out("wgmma.wait_group.sync.aligned 1", 2),
        Sabotage::leave_out("wgmma.wait_group.sync.aligned 0", 2),
        Sabotage::leave_out("bar.sync", 1),
    ];
    check(&HOPPER, &[848], &SABOTAGES);
}

#[test]
fn removing_any_sync_copy_or_mma_of_sorted_tokens_is_found() {
    const SABOTAGES: [Sabotage; 10] = [
        Sabotage::leave_out("mbarrier.init", 32),
        // The spare wait is for the first tile's slot, which is empty from the start.
        Sabotage::do_not_wait(24).spare(1),
        Sabotage::leave_out("mbarrier.arrive", 24),
        Sabotage::leave_out("cp.async.bulk.shared", 4),
        Sabotage::leave_out("fence.proxy.async", 8),
        Sabotage::leave_out("wgmma.fence", 8),
        Sabotage::leave_out("wgmma.wait_group.sync.aligned 1", 8),
        Sabotage::leave_out("wgmma.wait_group.sync.aligned 0", 8),
        Sabotage::leave_out("wgmma.commit_group", 16),
        Sabotage::leave_out("bar.sync", 1),
    ];
    check(&SORTED, &[1232, 112], &SABOTAGES);
}

#[test]
fn removing_any_copy_wait_or_arrival_is_found_on_sm_120() {
    const SABOTAGES: [Sabotage; 6] = [
        // Warps do not take turns on sm_120, so the two mbarriers for turns are unused.
        Sabotage::leave_out("mbarrier.init", 26).spare(2),
        // The spare wait is for the first tile's slot, which is empty from the start.
        Sabotage::do_not_wait(12).spare(1),
        Sabotage::leave_out("mbarrier.arrive", 11),
        Sabotage::leave_out("cp.async.bulk.shared", 2),
        Sabotage::leave_out("cp.async.mbarrier.arrive", 1),
        Sabotage::leave_out("bar.sync", 1),
    ];
    // The fence before a stage's release is not in the list: the emulator completes a load at once, a GPU does not.
    // With many k-blocks per tile, free stages run out first. With one k-block per tile, free tile slots run out first.
    check(&CONSUMER, &[848, 112], &SABOTAGES);
    // Without a copy a token keeps older bytes: wrong values, or a fault.
    check_left_out(&CONSUMER, &CONSUMER.layer(848), "cp.async.cg", 4);
}

#[test]
fn removing_any_wait_or_barrier_is_found_on_sm_80() {
    const SABOTAGES: [Sabotage; 2] =
        [Sabotage::leave_out("cp.async.wait_group", 2), Sabotage::leave_out("bar.sync", 4)];
    check(&PORTABLE, &[848, 112], &SABOTAGES);
}

#[test]
fn removing_any_wait_or_barrier_of_strips_is_found() {
    const SABOTAGES: [Sabotage; 2] =
        [Sabotage::leave_out("cp.async.wait_group", 12), Sabotage::leave_out("bar.sync", 6)];
    // 1488 columns are long enough for two unrolled chunks, whose stages are compile-time constants.
    check(&STRIPS, &[1488, 112], &SABOTAGES);
}

#[test]
fn removing_any_wait_or_barrier_of_runs_is_found() {
    const SABOTAGES: [Sabotage; 2] =
        [Sabotage::leave_out("cp.async.wait_group", 6), Sabotage::leave_out("bar.sync", 4)];
    // 720 columns of C are three runs of four tiles; the last tile has 16 columns. The first three k-blocks of a tile
    // are complete before its mainloop, so the waits of whole chunks matter in the second chunk, which K of 1024 has. K
    // of 496 needs the waits of partial k-blocks.
    let layers = [1024, 496].map(|intermediate| Products { intermediate, ..RUNS }.layer(720));
    check_sampled_sabotages(&RUNS.text_of_entry(), RUNS.entry, &SABOTAGES, |ptx| RUNS.is_found(&layers, ptx));
}

#[test]
fn removing_any_mma_of_strips_is_found() {
    // K is a chunk and one k-block.
    check_left_out(&STRIPS, &shape(640, 64, 2, 1), "mma.sync", 120);
}

#[test]
fn removing_any_mma_is_found_on_sm_120() {
    // At least 8 MMAs of 16 columns for 8 tokens, and 16 for 16 tokens.
    check_left_out(&CONSUMER, &shape(128, 64, 2, 1), "mma.sync", 24);
}

#[test]
fn removing_any_mma_or_copy_is_found_on_sm_80() {
    check_left_out(&PORTABLE, &shape(128, 64, 2, 1), "mma.sync", 24);
    // Without a copy a stage keeps older bytes: wrong values, or a fault.
    check_left_out(&PORTABLE, &shape(848, 496, 2, 1), "cp.async.cg", 12);
}

/// Checks that each sabotage is found in a layer with one of these hidden sizes.
fn check(of: &Products, hidden: &[usize], sabotages: &[Sabotage]) {
    let layers: Vec<_> = hidden.iter().map(|&hidden| of.layer(hidden)).collect();
    check_sampled_sabotages(&of.text_of_entry(), of.entry, sabotages, |ptx| of.is_found(&layers, ptx));
}

/// Checks that removing any instruction of a kind causes wrong values or a fault.
fn check_left_out(of: &Products, layer: &LayerShape, instruction: &str, least: usize) {
    check_changed(of, layer, instruction, least, |_| String::new());
}

/// Checks that changing any instruction of a kind causes wrong values or a fault.
fn check_changed(of: &Products, layer: &LayerShape, instruction: &str, least: usize, change: impl Fn(&str) -> String) {
    let weights = weights(layer, TokenDtype::F16);
    // Ten rows and seven rows: MMAs for twice 8 tokens, and for 8.
    let ids: Vec<i32> = [vec![0; 10], vec![1; 7]].concat();
    let step = step(&weights, MoeInputs { ids: ids.into(), ..inputs(layer, TokenDtype::F16, 17) });
    let gpu = emulated_of(of.arch, Schedule::Fair, 1);
    let wrong = |ptx: &str| {
        let mut layer = gpu.clone().with_ptx(ptx).unwrap().prepare_moe(&weights).unwrap();
        let Ok(output) = run(layer.as_mut(), &step) else { return true };
        assert!(layer.counters().expect("a kernel ran").kernel.contains(of.entry));
        compare(&weights, &step, &output).mismatches() > 0
    };
    let ptx = of.text_of_entry();
    assert!(!wrong(&ptx));
    let lines = lines_of(&ptx, of.entry, instruction);
    assert!(lines.len() >= least, "found {} of `{instruction}`, expected at least {least}", lines.len());
    for (line, text) in sampled(lines, 16) {
        let other = change(text);
        if other != text {
            assert!(
                wrong(&changed(&ptx, &[(line, &other)])),
                "changing line {line} to `{other}` went unnoticed: {text}"
            );
        }
    }
}

const BLACKWELL_NVFP4: Products =
    Products { kernel: "moe_sm100", arch: "sm_100f", entry: "moe_sm100_gated_t16", rows: FEW, intermediate: 496 };
/// Down of few tokens, which loads weights before the wait. It has more k-blocks than stages.
const EARLY_NVFP4: Products = Products {
    kernel: "moe_sm100",
    arch: "sm_100f",
    entry: "moe_sm100_plain_t16_early",
    rows: FEW,
    intermediate: 2896,
};
const CONSUMER_NVFP4: Products = Products {
    kernel: "moe_nvfp4_sm120",
    arch: "sm_120f",
    entry: "moe_nvfp4_sm120_gated_t16",
    rows: FEW,
    intermediate: 496,
};

impl Products {
    /// Returns the fault that stops a layer with NVFP4 tokens and a PTX text of the kernel. One CTA computes many
    /// tiles, all of them ragged.
    fn nvfp4_fault(&self, layer: &LayerShape, ptx: &str) -> Option<Fault> {
        let layer = layer.clone().with_token_format(TokenFormat::Nvfp4);
        let gpu = emulated_of(self.arch, Schedule::Worst, 1).with_ptx(ptx).unwrap();
        let weights = weights(&layer, TokenDtype::F16);
        // The experts have 5, 12 and 3 rows.
        let ids: Vec<i32> = [vec![0; 5], vec![1; 12], vec![2; 3]].concat();
        let inputs = MoeInputs { ids: ids.into(), ..inputs(&layer, TokenDtype::F16, 20) };
        fault_of(run(gpu.prepare_moe(&weights).unwrap().as_mut(), &step(&weights, inputs)))
    }
}

#[test]
fn missing_wait_for_the_nvfp4_token_grid_is_found() {
    for products in [BLACKWELL_NVFP4, CONSUMER_NVFP4] {
        let (ptx, layer) = (products.ptx(), shape(848, 496, 3, 1));
        assert_eq!(products.nvfp4_fault(&layer, ptx), None);
        let waits = lines_of(ptx, products.entry, "griddepcontrol.wait");
        let waits: Vec<_> = waits.into_iter().map(|(line, _)| (line, "")).collect();
        let fault = products.nvfp4_fault(&layer, &changed(ptx, &waits)).expect("a fault, as no warp waits");
        assert_eq!(fault.kind, FaultKind::GridNotAwaited, "{fault}");
        assert!(fault.to_string().contains("`moe_quantize_nvfp4_route_f16`"), "{fault}");
    }
}

#[test]
fn removing_any_copy_or_wait_of_early_weights_is_found_on_sm_100() {
    const SABOTAGES: [Sabotage; 5] = [
        // The loading thread's wait, and the wait of the other warps. The latter is spare here: what these warps read from
        // memory, they read after products of operands that the loading thread has waited for.
        Sabotage::leave_out("griddepcontrol.wait", 2).spare(1),
        Sabotage::do_not_wait(4),
        Sabotage::leave_out("mbarrier.arrive", 3),
        // Weights early, tokens after the wait, and both together.
        Sabotage::leave_out("cp.async.bulk", 8),
        Sabotage::leave_out("tcgen05.commit", 2),
    ];
    let of = &EARLY_NVFP4;
    let layer = of.layer(144);
    check_sampled_sabotages(&of.text_of_entry(), of.entry, &SABOTAGES, |ptx| of.nvfp4_fault(&layer, ptx).is_some());
}

#[test]
fn removing_any_copy_wait_or_arrival_is_found_on_sm_100() {
    const SABOTAGES: [Sabotage; 5] = [
        Sabotage::leave_out("mbarrier.init", 4),
        Sabotage::do_not_wait(4),
        Sabotage::leave_out("mbarrier.arrive", 2),
        Sabotage::leave_out("cp.async.bulk", 6),
        Sabotage::leave_out("tcgen05.commit", 2),
    ];
    let layer = shape(2896, 496, 3, 1);
    let is_found = |ptx: &str| BLACKWELL_NVFP4.nvfp4_fault(&layer, ptx).is_some();
    check_sampled_sabotages(&BLACKWELL_NVFP4.text_of_entry(), BLACKWELL_NVFP4.entry, &SABOTAGES, is_found);
}

#[test]
fn removing_any_nvfp4_copy_or_sync_is_found_on_sm_120() {
    const SABOTAGES: [Sabotage; 4] = [
        Sabotage::leave_out("mbarrier.init", 2),
        Sabotage::do_not_wait(2),
        Sabotage::leave_out("mbarrier.arrive", 2),
        Sabotage::leave_out("cp.async.bulk", 6),
    ];
    // The fence before a stage's release is not in the list: the emulator completes a load at once, a GPU does not.
    let layer = shape(1360, 144, 3, 1);
    let is_found = |ptx: &str| CONSUMER_NVFP4.nvfp4_fault(&layer, ptx).is_some();
    check_sampled_sabotages(&CONSUMER_NVFP4.text_of_entry(), CONSUMER_NVFP4.entry, &SABOTAGES, is_found);
}

#[test]
fn removing_any_nvfp4_mma_or_changing_a_selector_is_found() {
    let of = &CONSUMER_NVFP4;
    let layer = shape(256, 64, 3, 1).with_token_format(TokenFormat::Nvfp4);
    // 16 MMAs: 2 slabs, twice 8 tokens, 4 steps.
    check_left_out(of, &layer, "mma.sync", 16);
    for (from, to) in [("{0, 0}", "{0, 1}"), ("{0, 1}", "{0, 0}")] {
        check_changed(of, &layer, "mma.sync", 16, |text| text.replacen(from, to, 1));
    }
}

/// With input scales, the epilogue of gate and up stores the quantized intermediate that down multiplies.
#[test]
fn removing_any_store_of_the_quantized_intermediate_is_found() {
    let layer = shape(256, 80, 3, 1).with_token_format(TokenFormat::Nvfp4).with_input_scales();
    for (of, stores, words, shuffles) in [(BLACKWELL_NVFP4, 1, 2, 1), (CONSUMER_NVFP4, 8, 8, 12)] {
        check_left_out(&of, &layer, "st.global.b8", stores);
        check_left_out(&of, &layer, "st.global.b32", words);
        check_left_out(&of, &layer, "shfl.sync.bfly", shuffles);
    }
}

#[test]
fn nvfp4_sm_100_instances_are_right_on_random_and_worst_schedules() {
    check_every_nvfp4_instance(&BLACKWELL_NVFP4);
}

#[test]
fn nvfp4_sm_120_instances_are_right_on_random_and_worst_schedules() {
    check_every_nvfp4_instance(&CONSUMER_NVFP4);
}

fn check_every_nvfp4_instance(products: &Products) {
    let (mut used, of_kernel) = (BTreeSet::new(), format!("{}_", products.kernel));
    // Tiles of 16, 64 and 128 tokens. K ends inside a k-block, and N inside a tile. The last two have so many rows that
    // weights are not loaded early.
    for (tokens, experts, [hidden, intermediate]) in
        [(12, 3, [592, 112]), (70, 2, [592, 112]), (170, 2, [592, 112]), (1030, 130, [48, 32]), (1030, 27, [80, 32])]
    {
        for dtype in DTYPES {
            let own = shape(hidden, intermediate, experts, 1).with_token_format(TokenFormat::Nvfp4);
            // With a shared expert, a launch before the tokens' makes the lists, and gate and up load weights early.
            let mut shared = own.clone();
            shared.shared_intermediate = Some(intermediate);
            for layer in [own.clone(), own.clone().with_activation(CURVE, false), own.with_input_scales(), shared] {
                let weights = weights(&layer, dtype);
                let step = step(&weights, inputs(&layer, dtype, tokens));
                used.extend(check_schedules(products.arch, &weights, &step, &of_kernel));
            }
        }
    }
    assert_eq!(used, products.entries());
}

#[test]
fn missing_wait_for_lists_and_tokens_is_found() {
    for (products, before) in
        [(HOPPER, "moe_route"), (STRIPS, "moe_route"), (CONSUMER, "moe_route"), (SORTED, "moe_expand")]
    {
        let (ptx, layer) = (products.ptx(), products.layer(848));
        let waits = lines_of(ptx, products.entry, "griddepcontrol.wait");
        let waits: Vec<_> = waits.into_iter().map(|(line, _)| (line, "")).collect();
        let fault = products.fault(&layer, &changed(ptx, &waits));
        let fault = fault.unwrap_or_else(|| panic!("{}: expected a fault, as no warp waits", products.entry));
        assert_eq!(fault.kind, FaultKind::GridNotAwaited, "{fault}");
        assert!(fault.to_string().contains(&format!("`{before}`")), "{fault}");
    }
}
