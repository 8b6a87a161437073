//! Checks a kernel's instances in the emulator: outputs are right, and every schedule gives the same bits.

use nvfp4::Output;
use nvfp4::backend::emulated::{Emulated, Options, Schedule};
use nvfp4::compare::Tolerance;
use nvfp4::kernels::GroupedKernel;
use nvfp4::problem::{Group, Op, TokenDtype};
use nvfp4::shape::{self, Shape};
use rayon::prelude::*;

use crate::{Case, inputs, is_full, sampled};

/// Operations that every kernel has entries for.
pub const OPS: [Op; 2] = [Op::Gated, Op::Plain];

/// Number of SMs of [`device`]: few, so that a CTA computes many tiles.
const SMS: u32 = 3;

/// Returns a small emulated GPU of an architecture.
pub fn device(arch: &str, schedule: Schedule) -> Emulated {
    Emulated::new(arch, Options { schedule, sms: Some(SMS), ..Options::default() })
        .expect("an architecture with a kernel")
}

/// Schedules on which every instance of a kernel must be right: twenty random schedules and the worst schedule.
pub fn schedules() -> impl Iterator<Item = Schedule> + Send {
    (0..20).map(Schedule::Seed).chain([Schedule::Worst])
}

/// Returns [`schedules`] if [`is_full`], otherwise a random one and the worst.
pub fn sampled_schedules() -> Vec<Schedule> {
    sampled(schedules().collect(), 2)
}

/// Returns the built-in shapes that the emulator computes in a moment.
pub fn small_shapes() -> impl Iterator<Item = &'static Shape> {
    const MULTIPLY_ADDS: usize = 1 << 28;
    let multiply_adds = |shape: &Shape| -> usize {
        let products: usize = shape.groups.iter().map(|group| group.m * group.n * group.k).sum();
        shape.op.projections() * products
    };
    shape::builtin().iter().filter(move |shape| multiply_adds(shape) < MULTIPLY_ADDS)
}

/// Cuts a shape down to its corner tiles: each group keeps K, and keeps only the first and the last tile along tokens
/// and along columns if it has more than two. A tile's result does not depend on the tiles in between.
pub fn corners(shape: &Shape) -> Shape {
    /// A multiple of every instance's tile size, in tokens and in columns.
    const TILE: usize = 128;
    let cut = |size: usize| if size > 2 * TILE { TILE + (size - 1) % TILE + 1 } else { size };
    let mut corners = shape.clone();
    for group in &mut corners.groups {
        *group = Group { m: cut(group.m), n: cut(group.n), k: group.k };
    }
    corners
}

/// Checks every built-in shape with a kernel if [`is_full`], otherwise the corners of a sample.
pub fn check_built_in_shapes(kernel: &str, arch: &str) {
    let kernel = GroupedKernel::named(kernel).expect("a kernel of this name");
    if is_full() {
        check_shapes(kernel, arch, shape::builtin());
    } else {
        check_shapes(kernel, arch, &sampled(shape::builtin().iter().map(corners).collect(), 3));
    }
}

/// Checks shapes with a kernel on an architecture.
pub fn check_shapes<'a>(kernel: GroupedKernel, arch: &str, shapes: impl IntoIterator<Item = &'a Shape>) {
    let gpu = Emulated::new(arch, Options::default()).expect("an architecture with a kernel");
    let gpu = with_instance(gpu, kernel.name());
    for shape in shapes {
        // The last name printed is the shape that failed.
        println!("{}", shape.name);
        let inputs = inputs(shape.input, shape.op, &shape.groups, 0);
        let case = Case::new(&inputs, TokenDtype::F16);
        case.verified(&gpu, case.prepare(&gpu).as_mut(), |_| Tolerance::of(TokenDtype::F16));
    }
}

/// Returns the device with every step computed by the given instance or kernel.
pub fn with_instance(gpu: Emulated, name: &str) -> Emulated {
    gpu.with_variant(name.parse().expect("the name of an instance or kernel"))
        .expect("an instance of a kernel that this device has")
}

/// Returns a device's output after checking that it is right and that `entry` computed it.
pub fn verified(case: &Case<'_>, gpu: &Emulated, out_dtype: TokenDtype, entry: &str) -> Output {
    let mut layer = case.prepare(gpu);
    let output = case.verified(gpu, layer.as_mut(), |_| Tolerance::of(out_dtype));
    let kernels = &layer.counters().expect("a kernel ran").kernel;
    // On Hopper, another grid decodes the tokens first if there are many.
    assert_eq!(kernels.strip_prefix("tokens_sm90, ").unwrap_or(kernels), entry);
    output
}

/// Checks that all outputs are right and equal. Each device runs on a separate thread: CTAs that share a ticket
/// share a thread.
pub fn check(case: &Case<'_>, gpus: impl Iterator<Item = Emulated> + Send, out_dtype: TokenDtype, entry: &str) {
    let outputs: Vec<_> = gpus.par_bridge().map(|gpu| verified(case, &gpu, out_dtype, entry)).collect();
    assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]), "{entry}: schedules gave different bits");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn corners_keep_partial_tiles_of_the_shape() {
        let group = |m, n| Group { m, n, k: 7168 };
        let mut shape = shape::builtin()[0].clone();
        shape.groups = vec![group(1, 4096), group(256, 264), group(300, 128), group(384, 72)];
        assert_eq!(corners(&shape).groups, [group(1, 256), group(256, 136), group(172, 128), group(256, 72)]);
    }

    #[test]
    fn small_shapes_are_group_test_shapes_and_dual_test_2() {
        let grouped = shape::builtin().iter().filter(|shape| shape.name.starts_with("group-test-"));
        let mut expected: Vec<_> = grouped.map(|shape| shape.name.as_str()).collect();
        expected.insert(0, "dual-test-2");
        let small: Vec<_> = small_shapes().map(|shape| shape.name.as_str()).collect();
        assert_eq!(small, expected);
    }
}
