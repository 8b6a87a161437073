//! The backend against a driver that writes down its calls, and whose kernel is the oracle fed by the descriptors.

use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::cust::stream::{Stream, StreamFlags};
use fake_cuda::{FakeCuda, Launch};
use kernels_gpu::gated_simt::abi;

use super::*;
use crate::backend;
use crate::compare::{Comparison, Tolerance, compare, compare_with};
use crate::format::blocked::{self, BlockedScales};
use crate::format::{BLOCK, Matrix};
use crate::generate::{self, Generator};
use crate::oracle::{Reference, silu};
use crate::output::Output;
use crate::plan::variant::LaunchSchedule;
use crate::problem::{Expert, Group, Op, OutDtype, Step};

const CUDA_ERROR_OUT_OF_MEMORY: i32 = 2;
const CUDA_ERROR_ILLEGAL_ADDRESS: i32 = 700;
const CUDA_ERROR_UNSUPPORTED_PTX_VERSION: i32 = 222;

const OPS: [Op; 2] = [Op::Gated, Op::Plain];

/// Ragged groups: none, one and many tokens; K not a whole number of scale tiles; N of the least.
const GROUPS: [Group; 4] = [
    Group { m: 3, n: 8, k: 48 },
    Group { m: 0, n: 24, k: 64 },
    Group { m: 130, n: 72, k: 16 },
    Group { m: 1, n: 16, k: 320 },
];

fn with_tokens<const G: usize>(tokens: [usize; G]) -> [Group; G] {
    std::array::from_fn(|index| Group { m: tokens[index], ..GROUPS[index] })
}

fn step(weights: &Weights<'_>, groups: &[Group], dtype: OutDtype) -> Step<'static> {
    let tokens = generate::activations(Generator::PublicDual, groups, 5).unwrap();
    Step::new(weights, tokens, dtype).unwrap()
}

fn weights(op: Op) -> Weights<'static> {
    generate::weights(Generator::PublicDual, op, &GROUPS, 5).unwrap()
}

/// What the kernel is launched with, read as it reads it.
///
/// # Safety
///
/// The launch is one of this backend's, and what its descriptors point to is alive.
unsafe fn descriptors(launch: &Launch) -> (abi::Launch, Vec<abi::Group>) {
    // SAFETY: the caller's promise; the fake device's addresses are this process's.
    unsafe {
        let parameter: abi::Launch = launch.parameter(0);
        let groups = std::slice::from_raw_parts(parameter.groups as *const abi::Group, parameter.group_count as usize);
        (parameter, groups.to_vec())
    }
}

/// A matrix of device memory.
///
/// # Safety
///
/// `rows × k` packed values lie at `values`, their scales in the blocked layout at `scales`.
unsafe fn matrix(rows: u32, k: u32, values: u64, scales: u64, global: f32) -> Matrix<'static> {
    let (rows, k) = (rows as usize, k as usize);
    // SAFETY: the caller's promise.
    let (values, scales) = unsafe {
        let blocked = blocked::len(rows, k / BLOCK);
        (
            std::slice::from_raw_parts(values as *const u8, rows * k / 2),
            std::slice::from_raw_parts(scales as *const u8, blocked),
        )
    };
    let scales = BlockedScales::new(rows, k / BLOCK, scales).unwrap().to_linear();
    Matrix::new(rows, k, values.to_vec(), scales, global).unwrap()
}

/// Computes a group as the kernels' contract says.
///
/// # Safety
///
/// What the group points to is alive.
unsafe fn compute(op: Op, dtype: OutDtype, group: &abi::Group) {
    if group.m == 0 {
        return;
    }
    for address in [group.a, group.a_scales, group.b[0], group.b_scales[0], group.c] {
        assert!(address.is_multiple_of(16), "{address:#x}");
    }
    // SAFETY: the caller's promise.
    unsafe {
        let projection = |i: usize| matrix(group.n, group.k, group.b[i], group.b_scales[i], group.alpha[i]);
        multiply(op, dtype, matrix(group.m, group.k, group.a, group.a_scales, 1.0), projection, group.c);
    }
}

/// Writes what tokens and projections, whose global scales are alpha, make.
///
/// # Safety
///
/// The output lies at `c`.
unsafe fn multiply(op: Op, dtype: OutDtype, tokens: Matrix<'static>, of: impl Fn(usize) -> Matrix<'static>, c: u64) {
    let expert = match op {
        Op::Gated => Expert::Gated { gate: of(0), up: of(1) },
        Op::Plain => Expert::Plain(of(0)),
    };
    let weights = Weights::new(op, vec![expert]).unwrap();
    let step = Step::new(&weights, vec![tokens], dtype).unwrap();
    let bits = Reference::new(&weights, &step).output(&step);
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(bits.bits().as_ptr(), c as *mut u16, bits.bits().len()) };
}

/// A matrix of weights from its slabs.
///
/// # Safety
///
/// They lie there.
unsafe fn unpack(rows: u32, k: u32, slabs: u64, global: f32) -> Matrix<'static> {
    use kernels_gpu::gated_sm90::abi::{
        K_BLOCK, K_BLOCK_BYTES, LANE_BYTES, SLAB_BYTES, SLAB_ROWS, SLAB_VALUE_BYTES, lane_offset, slab_byte,
    };
    const K_BLOCK_SCALES: u32 = K_BLOCK / kernels_gpu::format::BLOCK;
    // SAFETY: the caller's promise: `at` is in a slab of the matrix.
    let byte = |row: u32, step: u32, at: u32| unsafe {
        let slab = row / SLAB_ROWS * k.div_ceil(K_BLOCK) + step;
        *(slabs as *const u8).add((slab * SLAB_BYTES + at) as usize)
    };
    let value = |row: u32, column: u32| {
        let (step, lane, rest) = (column / K_BLOCK_BYTES, column % K_BLOCK_BYTES / LANE_BYTES, column % LANE_BYTES);
        let packed = byte(row, step, lane_offset(row % SLAB_ROWS, lane) + rest);
        (0..=u8::MAX).find(|&codes| slab_byte(codes) == packed).unwrap()
    };
    let scale = |row: u32, column: u32| {
        let at =
            blocked::offset((row % SLAB_ROWS) as usize, (column % K_BLOCK_SCALES) as usize, K_BLOCK_SCALES as usize);
        byte(row, column / K_BLOCK_SCALES, SLAB_VALUE_BYTES + at as u32)
    };
    let values = (0..rows).flat_map(|row| (0..k / 2).map(move |column| value(row, column)));
    let scales = (0..rows).flat_map(|row| (0..k / kernels_gpu::format::BLOCK).map(move |column| scale(row, column)));
    let (values, scales): (Vec<_>, Vec<_>) = (values.collect(), scales.collect());
    Matrix::new(rows as usize, k as usize, values, scales, global).unwrap()
}

/// Computes every segment as the contract of the unfused baseline's last kernel says.
fn silu_mul(launch: &Launch) {
    use kernels_gpu::silu_mul::abi::{Segment, THREADS};
    // SAFETY: as in `kernel`.
    unsafe {
        let parameter: kernels_gpu::silu_mul::abi::Launch = launch.parameter(0);
        let dtype = if parameter.format == kernels_gpu::format::OUTPUT_BF16 { OutDtype::Bf16 } else { OutDtype::F16 };
        let count = parameter.segment_count as usize;
        let mut blocks = 0;
        for segment in std::slice::from_raw_parts(parameter.segments as *const Segment, count) {
            assert_eq!(u64::from(segment.first_block), blocks);
            blocks += Segment::blocks(segment.elements);
            for element in 0..segment.elements as usize {
                let [gate, up] =
                    [segment.gate, segment.up].map(|from| dtype.decode(*(from as *const u16).add(element)));
                *(segment.c as *mut u16).add(element) = dtype.round(silu(gate) * up);
            }
        }
        assert_eq!((launch.grid, launch.block), ([u32::try_from(blocks).unwrap(), 1, 1], [THREADS, 1, 1]));
    }
}

/// Computes every group as the kernel's contract says, and checks the launch against the groups.
fn kernel(launch: &Launch) {
    if launch.kernel == "silu_mul" {
        return silu_mul(launch);
    }
    // SAFETY: launched by the tests below, whose operands are alive and lie where the backend has put them.
    unsafe {
        let (parameter, groups) = descriptors(launch);
        let op = if launch.kernel.starts_with("gated") { Op::Gated } else { Op::Plain };
        let dtype = if parameter.output == kernels_gpu::format::OUTPUT_BF16 { OutDtype::Bf16 } else { OutDtype::F16 };
        let instance = abi::INSTANCES.iter().find(|instance| instance.entry == launch.kernel).unwrap();
        let mut blocks = 0;
        for group in &groups {
            assert_eq!(u64::from(group.first_tile), blocks);
            blocks += instance.tile.count(group.m, group.n);
            compute(op, dtype, group);
        }
        assert_eq!(launch.grid, [u32::try_from(blocks).unwrap(), 1, 1]);
        assert_eq!(launch.block, [abi::Instance::THREADS, 1, 1]);
        assert_eq!(launch.shared_bytes, instance.shared_bytes());
    }
}

/// [`kernel`] for the Blackwell kernel, whose values are behind tensor maps; the fake driver writes their arguments down.
fn blackwell_kernel(launch: &Launch) {
    if launch.kernel == "silu_mul" {
        return silu_mul(launch);
    }
    // SAFETY: as in `kernel`.
    unsafe {
        let parameter: kernels_gpu::gated_sm100::abi::Launch = launch.parameter(0);
        let tiles = parameter.tiles as *const kernels_gpu::gated_sm100::abi::Tile;
        let tiles = std::slice::from_raw_parts(tiles, parameter.tile_count as usize);
        let instance =
            kernels_gpu::gated_sm100::abi::INSTANCES.iter().find(|instance| instance.entry == launch.kernel).unwrap();
        let op = if instance.matrices == 2 { Op::Gated } else { Op::Plain };
        let dtype = if parameter.output == kernels_gpu::format::OUTPUT_BF16 { OutDtype::Bf16 } else { OutDtype::F16 };
        for tile in tiles.iter().filter(|tile| (tile.first_row, tile.first_token) == (0, 0)) {
            let group = &*(parameter.groups as *const kernels_gpu::gated_sm100::abi::Group).add(tile.group as usize);
            let values = |map: u64, rows: u32, box_rows: u32| {
                assert!(map.is_multiple_of(64), "{map:#x}");
                let map: [u64; 5] = *(map as *const [u64; 5]);
                assert_eq!(
                    map[1..],
                    [group.k / 2, rows, kernels_gpu::gated_sm100::abi::K_BLOCK_BYTES, box_rows].map(u64::from)
                );
                map[0]
            };
            let weights = |i: usize| {
                let present = i < instance.matrices as usize;
                if present { values(group.b_maps[i], group.n, kernels_gpu::gated_sm100::abi::TILE_ROWS) } else { 0 }
            };
            let group = abi::Group {
                a: values(group.a_map, group.m, instance.block_tokens()),
                a_scales: group.a_scales,
                b: [weights(0), weights(1)],
                b_scales: group.b_scales,
                c: group.c,
                alpha: group.alpha,
                m: group.m,
                n: group.n,
                k: group.k,
                first_tile: 0,
            };
            compute(op, dtype, &group);
        }
        let blocks = (parameter.tile_count * instance.blocks).min(SMS);
        assert!((1..=blocks).contains(&launch.grid[0]) && launch.grid[1..] == [1, 1], "{:?}", launch.grid);
        assert_eq!((launch.block, launch.cluster), ([instance.threads(), 1, 1], [instance.blocks, 1, 1]));
        assert_eq!(launch.shared_bytes, instance.shared_bytes());
    }
}

/// [`kernel`] for the Hopper kernel. The grid that decodes tokens leaves only word of where they lie, in the place of the decoded
/// ones; the one that multiplies follows it, and brings weights back from their slabs.
fn hopper_kernel(launch: &Launch) {
    use kernels_gpu::gated_sm90::abi::{INSTANCES, Launch as Multiply, TOKENS_ENTRY, Tile, Tokens, TokensLaunch};
    if launch.kernel == "silu_mul" {
        return silu_mul(launch);
    }
    // SAFETY: as in `kernel`.
    unsafe {
        if launch.kernel == TOKENS_ENTRY {
            let parameter: TokensLaunch = launch.parameter(0);
            let groups = parameter.groups as *const Tokens;
            let mut blocks = 0;
            for tokens in std::slice::from_raw_parts(groups, parameter.group_count as usize) {
                assert_eq!(u64::from(tokens.first_block), blocks);
                blocks += Tokens::blocks(tokens.m, tokens.k);
                *(tokens.decoded as *mut [u64; 2]) = [tokens.values, tokens.scales];
            }
            assert_eq!((launch.grid, launch.block), ([blocks as u32, 1, 1], [Tokens::THREADS, 1, 1]));
            return;
        }
        let parameter: Multiply = launch.parameter(0);
        let instance = INSTANCES.iter().find(|instance| instance.entry == launch.kernel).unwrap();
        let op = if instance.matrices == 2 { Op::Gated } else { Op::Plain };
        let dtype = if parameter.output == kernels_gpu::format::OUTPUT_BF16 { OutDtype::Bf16 } else { OutDtype::F16 };
        let tile = |index: u32| *(parameter.tiles as *const Tile).add(index as usize);
        let next = |of: &Tile| (of.next > 0).then(|| tile(of.next));
        for first in 0..launch.grid[0] {
            for tile in std::iter::successors(Some(tile(first)), next) {
                if (tile.first_column, tile.first_token) != (0, 0) {
                    continue;
                }
                let kernels_gpu::gated_sm90::abi::Group { tokens, token_scales, b, c, alpha, m, n, k, .. } = tile.group;
                let packed = [tokens, token_scales];
                let [values, scales] = if instance.decodes_tokens() { packed } else { *(tokens as *const [u64; 2]) };
                let projection = |i: usize| unpack(n, k, b[i], alpha[i]);
                multiply(op, dtype, matrix(m, k, values, scales, 1.0), projection, c);
            }
        }
        assert_eq!((launch.block, launch.shared_bytes), ([instance.threads(), 1, 1], instance.shared_bytes()));
    }
}

/// As [`kernel`], but forgets the last element.
fn forgetful_kernel(launch: &Launch) {
    // SAFETY: as in `kernel`.
    unsafe {
        let (_, groups) = descriptors(launch);
        let last = groups.iter().rfind(|group| group.m > 0).unwrap();
        let element = (last.c as *mut u16).add((last.m * last.n) as usize - 1);
        let before = element.read();
        kernel(launch);
        element.write(before);
    }
}

fn fake() -> FakeCuda {
    let fake = fake_cuda::install();
    fake.on_launch(kernel);
    fake
}

#[test]
fn every_operation_and_type_is_computed_from_what_lies_on_the_device() {
    let fake = fake();
    for op in OPS {
        let weights = weights(op);
        let gpu = Cuda::open(0).unwrap();
        let mut layer = gpu.prepare(&weights).unwrap();
        for dtype in [OutDtype::F16, OutDtype::Bf16] {
            for tokens in [[3, 0, 130, 1], [0, 0, 0, 9], [1, 1, 1, 1]] {
                let step = step(&weights, &with_tokens(tokens), dtype);
                let mut output = Output::new(step.problem());
                backend::run(layer.as_mut(), &step, &mut output).unwrap();
                let found = compare(&output, &Reference::new(&weights, &step), &step);
                assert!(found.passed(), "{op:?} {dtype:?} {tokens:?}: {found:?}");
            }
        }
    }
    drop(fake);
}

/// Multiprocessors of the fake device.
const SMS: u32 = 4;

/// The device, computing steps in this way.
fn gpu(variant: &str) -> Cuda {
    Cuda::open(0).unwrap().with_variant(variant.parse().unwrap()).unwrap()
}

#[test]
fn blackwell_gets_its_own_kernel_with_tensor_maps_that_are_encoded_once() {
    let fake = fake();
    fake.set_device(10, 0, SMS as i32);
    fake.on_launch(blackwell_kernel);
    let sizes = [Group { m: 3, n: 8, k: 64 }, Group { m: 0, n: 24, k: 32 }, Group { m: 130, n: 136, k: 320 }];
    for op in OPS {
        let weights = generate::weights(Generator::PublicDual, op, &sizes, 5).unwrap();
        assert!(Cuda::open(0).unwrap().prepare_layer(&weights).unwrap().kernel().ends_with("_simt"));
        let mut layer = gpu("gated_sm100").prepare_layer(&weights).unwrap();
        assert!(layer.kernel().ends_with("_sm100"));
        for dtype in [OutDtype::F16, OutDtype::Bf16] {
            let step = step(&weights, &sizes, dtype);
            let mut output = Output::new(step.problem());
            let encoded: Vec<_> = (0..2)
                .map(|_| {
                    fake.take_calls();
                    backend::run(&mut layer, &step, &mut output).unwrap();
                    fake.take_calls().iter().filter(|call| *call == "cuTensorMapEncodeTiled").count()
                })
                .collect();
            let first = if dtype == OutDtype::F16 { 2 * (1 + op.projections()) } else { 0 };
            assert_eq!(encoded, [first, 0], "{op:?} {dtype:?}");
            let found = compare(&output, &Reference::new(&weights, &step), &step);
            assert!(found.passed(), "{op:?} {dtype:?}: {found:?}");
        }
    }
}

#[test]
fn weights_that_the_devices_kernel_does_not_take_go_to_the_portable_one_unless_it_was_named() {
    let fake = fake();
    fake.set_device(9, 0, SMS as i32);
    let weights = weights(Op::Gated);
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&weights).unwrap();
    let step = step(&weights, &GROUPS, OutDtype::F16);
    let mut output = Output::new(step.problem());
    backend::run(&mut layer, &step, &mut output).unwrap();
    assert_eq!(layer.kernel(), "gated_simt");
    assert!(compare(&output, &Reference::new(&weights, &step), &step).passed());

    let refused = gpu("gated_sm90").prepare_layer(&weights).err().unwrap().to_string();
    assert_eq!(refused, "expert 0: K = 48 is not for gated_sm90; take gated_simt");
    let refused = Cuda::open(0).unwrap().with_variant("gated_sm100".parse().unwrap()).err().unwrap().to_string();
    assert_eq!(refused, "gated_sm100 is for sm_100f and does not run on compute capability 9.0");
}

#[test]
fn a_second_run_of_a_plan_allocates_nothing_and_launches_once() {
    let fake = fake();
    let weights = weights(Op::Gated);
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&weights).unwrap();
    let step = step(&weights, &GROUPS, OutDtype::F16);
    let mut output = Output::new(step.problem());
    layer.execute(&step, &mut output).unwrap();
    let first = output.clone();
    let allocations = layer.allocations();
    fake.take_calls();

    backend::run(&mut layer, &step, &mut output).unwrap();
    assert_eq!(
        fake.take_calls(),
        [
            "cuCtxSetCurrent",
            "cuMemcpyHtoDAsync_v2",
            "cuEventRecord",
            "cuCtxSetCurrent",
            "cuLaunchKernel",
            "cuEventRecord",
            "cuEventRecord",
            "cuMemcpyDtoHAsync_v2",
            "cuStreamSynchronize",
            "cuEventElapsedTime"
        ]
    );
    assert_eq!(output, first, "reruns are bit-identical");
    assert_eq!(layer.allocations(), allocations);
}

#[test]
fn a_smaller_step_needs_no_memory_and_a_larger_one_does() {
    let _fake = fake();
    let weights = weights(Op::Plain);
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&weights).unwrap();
    let mut allocations = |tokens| {
        let step = step(&weights, &with_tokens(tokens), OutDtype::F16);
        layer.execute(&step, &mut Output::new(step.problem())).unwrap();
        layer.allocations()
    };
    let first = allocations([200, 10, 0, 5]);
    for tokens in 1..10 {
        assert_eq!(allocations([100, tokens, 7, 5]), first);
    }
    let larger = allocations([900, 900, 900, 900]);
    assert!(larger > first);
    assert_eq!(allocations([200, 10, 0, 5]), larger);
}

#[test]
fn the_time_is_the_kernels_without_the_copies() {
    let _fake = fake();
    let weights = weights(Op::Gated);
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&weights).unwrap();
    let step = step(&weights, &GROUPS, OutDtype::F16);
    // On the fake device's clock a launch takes 250 µs and a copy a millisecond.
    let time = layer.execute(&step, &mut Output::new(step.problem())).unwrap();
    assert_eq!(time, std::time::Duration::from_micros(250));
}

#[test]
fn a_step_without_tokens_calls_no_driver() {
    let fake = fake();
    let weights = weights(Op::Gated);
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&weights).unwrap();
    let step = step(&weights, &with_tokens([0, 0, 0, 0]), OutDtype::F16);
    fake.take_calls();
    assert!(layer.execute(&step, &mut Output::new(step.problem())).unwrap().is_zero());
    assert_eq!(fake.take_calls(), [""; 0]);

    let none = Weights::new(Op::Gated, vec![]).unwrap();
    let step = Step::new(&none, vec![], OutDtype::F16).unwrap();
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&none).unwrap();
    layer.execute(&step, &mut Output::new(step.problem())).unwrap();
}

#[test]
fn an_element_that_the_kernel_forgets_is_found() {
    let fake = fake();
    fake.on_launch(forgetful_kernel);
    let weights = weights(Op::Gated);
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&weights).unwrap();
    let step = step(&weights, &GROUPS, OutDtype::F16);
    let mut output = Output::new(step.problem());
    // The first run leaves the right value in the device's memory; the second must not profit from it.
    for _ in 0..2 {
        backend::run(&mut layer, &step, &mut output).unwrap();
        let found = compare(&output, &Reference::new(&weights, &step), &step);
        let first = found.first.unwrap();
        assert_eq!((found.mismatches, first.group, first.row, first.column), (1, 3, 0, 15));
        assert!(first.got.is_nan());
    }
}

#[test]
fn steps_in_device_memory_run_on_the_callers_stream_without_waiting() {
    let fake = fake();
    let weights = weights(Op::Gated);
    let gpu = Cuda::open(0).unwrap();
    let mut layer = gpu.prepare_layer(&weights).unwrap();
    let step = step(&weights, &GROUPS, OutDtype::Bf16);
    let stream = Stream::new(StreamFlags::DEFAULT, None).unwrap();

    let operands = OnDevice::new(&step);
    let groups = &operands.groups;
    for launch in 0..10 {
        fake.take_calls();
        // SAFETY: operands of these sizes lie there, nobody else touches them, and the stream is this context's.
        unsafe { layer.launch(groups, OutDtype::Bf16, stream.as_inner()) }.unwrap();
        let calls = fake.take_calls();
        if launch >= 1 {
            assert_eq!(calls, ["cuCtxSetCurrent", "cuLaunchKernel", "cuEventRecord"]);
        }
    }
    stream.synchronize().unwrap();
    let output = operands.output(&step);
    assert!(compare(&output, &Reference::new(&weights, &step), &step).passed());

    let few = &groups[..2];
    // SAFETY: refused before anything is looked at.
    let error = unsafe { layer.launch(few, OutDtype::Bf16, stream.as_inner()) }.unwrap_err();
    assert_eq!(error.to_string(), "groups of tokens (one for each expert): got 2, expected 4");
    let mut infinite = groups.clone();
    infinite[2].global_scale = f32::NAN;
    // SAFETY: as above.
    let error = unsafe { layer.launch(&infinite, OutDtype::Bf16, stream.as_inner()) }.unwrap_err();
    assert!(error.to_string().starts_with("group 2: global scales multiply to NaN"), "{error}");
}

#[test]
fn a_failing_call_is_named_with_its_device_and_the_next_step_works() {
    let fake = fake();
    let weights = weights(Op::Gated);
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&weights).unwrap();
    let step = step(&weights, &GROUPS, OutDtype::F16);
    let mut output = Output::new(step.problem());
    for (call, code, text) in [
        ("cuMemAlloc_v2", CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"),
        ("cuMemAllocHost_v2", CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"),
        ("cuLaunchKernel", 912, "CUDA_ERROR_INVALID_CLUSTER_SIZE (912): cluster misconfiguration"),
        (
            "cuStreamSynchronize",
            CUDA_ERROR_ILLEGAL_ADDRESS,
            "CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered",
        ),
    ] {
        fake.fail_next(call, code);
        let error = layer.execute(&step, &mut output).unwrap_err().to_string();
        assert_eq!(error, format!("{call} failed on CUDA device 0 (Fake GPU): {text}"));
    }
    backend::run(&mut layer, &step, &mut output).unwrap();
    assert!(compare(&output, &Reference::new(&weights, &step), &step).passed());
}

#[test]
fn a_kernel_that_the_driver_refuses_is_named_with_the_reason() {
    let fake = fake();
    let weights = weights(Op::Gated);
    let gpu = Cuda::open(0).unwrap();
    fake.fail_next("cuModuleLoadDataEx", CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
    let error = gpu.prepare(&weights).err().unwrap().to_string();
    assert_eq!(
        error,
        "kernel gated_simt (sm_80): cuModuleLoadDataEx failed on CUDA device 0 (Fake GPU): \
         CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222): the provided PTX was compiled with an unsupported toolchain."
    );

    // A device for which the kernel is not: its compiler has something to say.
    fake.set_device(7, 5, 40);
    let error = gpu.prepare(&weights).err().unwrap().to_string();
    assert!(
        error.starts_with(
            "kernel gated_simt (sm_80), of which the driver's compiler says \"ptxas fatal : the target is not for this \
             device\": cuModuleLoadDataEx failed on CUDA device 0 (Fake GPU): CUDA_ERROR_NO_BINARY_FOR_GPU (209)"
        ),
        "{error}"
    );
}

#[test]
fn a_kernel_is_loaded_once_for_all_layers_and_everything_is_given_back() {
    let fake = fake();
    {
        let (gated, plain) = (weights(Op::Gated), weights(Op::Plain));
        let gpu = Cuda::open(0).unwrap();
        let _layers = [gpu.prepare_layer(&gated).unwrap(), gpu.clone().prepare_layer(&plain).unwrap()];
        let loads = fake.take_calls().into_iter().filter(|call| call == "cuModuleLoadDataEx").count();
        assert_eq!(loads, 1);
        assert!(fake.live_objects() > 0);
    }
    assert_eq!(fake.live_objects(), 0);
}

#[test]
fn a_layer_may_be_used_and_dropped_on_another_thread() {
    let fake = fake();
    let weights = weights(Op::Gated);
    let step = step(&weights, &GROUPS, OutDtype::F16);
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&weights).unwrap();
    std::thread::scope(|scope| {
        // The layer holds the device, so its module and context go on that thread too.
        scope.spawn(move || layer.execute(&step, &mut Output::new(step.problem())).unwrap());
    });
    assert_eq!(fake.live_objects(), 0);
}

#[test]
fn machine_code_is_preferred_to_ptx_where_there_is_a_file() {
    let fake = fake();
    fake.set_device(8, 9, 128);
    let folder = tempfile::tempdir().unwrap();
    let weights = weights(Op::Gated);
    let prepare =
        || Cuda::open_with(0, Options { cubins: Some(folder.path().into()) }).unwrap().prepare_layer(&weights);

    assert!(prepare().is_ok(), "no file, so PTX");
    // The fake driver takes anything that begins like an ELF file, and finds every entry in it.
    std::fs::write(folder.path().join("gated_simt.sm_89.cubin"), b"\x7fELF").unwrap();
    assert!(prepare().is_ok());
    std::fs::write(folder.path().join("gated_simt.sm_89.cubin"), b"no machine code").unwrap();
    let error = prepare().err().unwrap().to_string();
    assert!(error.contains("gated_simt.sm_89.cubin: cuModuleLoadDataEx failed on CUDA device 0"), "{error}");
}

#[test]
fn without_a_usable_device_the_reason_is_told() {
    let fake = fake();
    let refused = |ordinal| Cuda::open(ordinal).map(|_| ()).unwrap_err();
    assert_eq!(refused(1).to_string(), "no CUDA device: there is no device 1, the driver shows 1");
    fake.set_device(7, 5, 40);
    let error = refused(0);
    assert!(error.is_no_device());
    assert_eq!(error.to_string(), "no CUDA device: Fake GPU has compute capability 7.5, no kernel runs on that");
    fake.set_device_count(0);
    assert!(refused(0).is_no_device());
    assert!(devices().unwrap_err().is_no_device());
}

#[test]
fn devices_are_listed_with_the_kernel_that_would_run() {
    let fake = fake();
    fake.set_device(8, 6, 84);
    let expected = DeviceInfo {
        ordinal: 0,
        name: "Fake GPU".into(),
        capability: (8, 6),
        sms: 84,
        memory: 8 << 30,
        kernel: Some(("gated_simt", "sm_80")),
    };
    assert_eq!(devices().unwrap(), [expected]);
}

/// Compares an output with the exact one, at the variant's tolerance.
fn check(variant: &str, weights: &Weights<'_>, step: &Step<'_>, output: &Output) -> Comparison {
    let unfused = variant.parse::<Variant>().unwrap().schedule == LaunchSchedule::Unfused;
    let dtype = output.dtype();
    compare_with(output, &Reference::new(weights, step), step, |_, _, _, element| {
        if unfused { Tolerance::unfused(dtype, element) } else { Tolerance::of(dtype) }
    })
}

/// Every launch schedule, launches of [`GROUPS`] in it, and the streams that they are on.
const LAUNCH_SCHEDULES: [(&str, usize, usize); 5] =
    [("persistent", 1, 1), ("per-group", 3, 1), ("streams=2", 3, 2), ("streams=16", 3, 3), ("unfused", 3, 1)];

#[test]
fn every_schedule_with_and_without_a_graph_is_right_step_after_step() {
    let fake = fake();
    let weights = weights(Op::Gated);
    // Two steps that come again, and more in between than stay planned.
    let tokens =
        [[3, 0, 130, 1], [0, 0, 0, 9], [3, 0, 130, 1], [1, 1, 1, 1], [2, 2, 2, 2], [4, 0, 0, 0], [3, 0, 130, 1]];
    for (schedule, ..) in LAUNCH_SCHEDULES {
        for variant in [schedule.to_owned(), format!("{schedule},graph")] {
            for dtype in [OutDtype::F16, OutDtype::Bf16] {
                let mut layer = gpu(&variant).prepare_layer(&weights).unwrap();
                for tokens in tokens {
                    let step = step(&weights, &with_tokens(tokens), dtype);
                    let mut output = Output::new(step.problem());
                    backend::run(&mut layer, &step, &mut output).unwrap();
                    let found = check(&variant, &weights, &step, &output);
                    assert!(found.passed(), "{variant} {dtype:?} {tokens:?}: {found:?}");
                }
            }
        }
    }
    assert_eq!(fake.live_objects(), 0);
}

/// Every schedule of instances of a module, with and without a graph, is right on a device whose kernels are `kernel`.
fn schedules_are_right((major, minor): (i32, i32), kernel: fn(&Launch), module: &str, instances: [&str; 2]) {
    let fake = fake();
    fake.set_device(major, minor, SMS as i32);
    fake.on_launch(kernel);
    let sizes = [Group { m: 3, n: 8, k: 64 }, Group { m: 0, n: 24, k: 32 }, Group { m: 130, n: 136, k: 320 }];
    let weights = generate::weights(Generator::PublicDual, Op::Gated, &sizes, 5).unwrap();
    let step = step(&weights, &sizes, OutDtype::F16);
    for (schedule, ..) in LAUNCH_SCHEDULES {
        for (instance, graph) in instances.into_iter().flat_map(|instance| [(instance, ""), (instance, ",graph")]) {
            let variant = format!("{module},{instance},{schedule}{graph}");
            let mut layer = gpu(&variant).prepare_layer(&weights).unwrap();
            let mut output = Output::new(step.problem());
            for _ in 0..2 {
                backend::run(&mut layer, &step, &mut output).unwrap();
                assert!(check(&variant, &weights, &step, &output).passed(), "{variant}");
            }
        }
    }
}

#[test]
fn every_schedule_is_right_with_the_blackwell_kernel() {
    schedules_are_right((10, 0), blackwell_kernel, "gated_sm100", ["t64", "t64_pair"]);
}

#[test]
fn every_schedule_is_right_with_the_hopper_kernel_and_the_grid_before_it() {
    schedules_are_right((9, 0), hopper_kernel, "gated_sm90", ["t16", "t64"]);
}

/// A step's tokens and output in device memory.
struct OnDevice {
    groups: Vec<DeviceGroup>,
    outputs: Vec<DeviceBuffer<u16>>,
    _tokens: Vec<DeviceBuffer<u8>>,
}

impl OnDevice {
    /// With the context current, as an open device leaves it.
    fn new(step: &Step<'_>) -> Self {
        let mut tokens_memory = Vec::new();
        let mut outputs = Vec::new();
        let operands = step.activations().iter().zip(step.problem().groups());
        let groups = operands.map(|(tokens, group)| {
            let mut copy = |bytes: &[u8]| {
                tokens_memory.push(DeviceBuffer::from_slice(bytes).unwrap());
                tokens_memory.last().unwrap().as_device_ptr().as_raw()
            };
            outputs.push(DeviceBuffer::from_slice(&vec![0_u16; group.m * group.n]).unwrap());
            DeviceGroup {
                rows: group.m,
                values: copy(tokens.values()),
                scales: copy(tokens.blocked_scales().bytes()),
                global_scale: tokens.global_scale(),
                output: outputs.last().unwrap().as_device_ptr().as_raw(),
            }
        });
        Self { groups: groups.collect(), outputs, _tokens: tokens_memory }
    }

    fn output(&self, step: &Step<'_>) -> Output {
        let mut output = Output::new(step.problem());
        for (bits, buffer) in output.groups_mut().zip(&self.outputs) {
            buffer.copy_to(bits).unwrap();
        }
        output
    }
}

/// The streams of the launches that have run.
static STREAMS: std::sync::Mutex<Vec<usize>> = std::sync::Mutex::new(Vec::new());

fn kernel_that_notes_its_stream(launch: &Launch) {
    STREAMS.lock().unwrap().push(launch.stream);
    kernel(launch);
}

#[test]
fn a_step_that_comes_again_is_launches_alone_and_with_a_graph_one() {
    let fake = fake();
    fake.on_launch(kernel_that_notes_its_stream);
    let weights = weights(Op::Gated);
    let step = step(&weights, &GROUPS, OutDtype::F16);
    for (schedule, launches, streams) in LAUNCH_SCHEDULES {
        for graph in [false, true] {
            let variant = if graph { format!("{schedule},graph") } else { schedule.to_owned() };
            let mut layer = gpu(&variant).prepare_layer(&weights).unwrap();
            let operands = OnDevice::new(&step);
            let stream = Stream::new(StreamFlags::NON_BLOCKING, None).unwrap();
            let mut launch = || {
                fake.take_calls();
                // SAFETY: operands of these sizes lie there, nobody else touches them; the stream is this context's.
                unsafe { layer.launch(&operands.groups, OutDtype::F16, stream.as_inner()) }.unwrap();
                assert_eq!(layer.launches(), Some(if graph { 1 } else { launches }), "{variant}");
                assert!(layer.host_time().is_some());
                (fake.take_calls(), layer.allocations())
            };
            let (_, allocations) = launch();
            for _ in 0..3 {
                let (calls, again) = launch();
                assert_eq!(again, allocations);
                if graph {
                    assert_eq!(calls, ["cuCtxSetCurrent", "cuGraphLaunch", "cuEventRecord"], "{variant}");
                } else {
                    let dealt = schedule.starts_with("streams");
                    let order = |call: &str| calls.iter().filter(|made| **made == call).count();
                    assert_eq!(order("cuLaunchKernel"), launches, "{variant}");
                    // A fork, and each stream's end; each waits for it, and is waited for.
                    let (marks, waits) = if dealt { (1 + streams, 2 * streams) } else { (0, 0) };
                    assert_eq!((order("cuEventRecord"), order("cuStreamWaitEvent")), (marks + 1, waits), "{variant}");
                    assert_eq!(calls.len(), 1 + launches + marks + 1 + waits, "{variant}: {calls:?}");
                }
            }
            STREAMS.lock().unwrap().clear();
            stream.synchronize().unwrap();
            let ran = std::mem::take(&mut *STREAMS.lock().unwrap());
            assert_eq!(ran.len(), 4 * launches, "{variant}: the caller's stream waits for every launch");
            let distinct: std::collections::BTreeSet<_> = ran.into_iter().collect();
            assert_eq!(distinct.len(), streams, "{variant}");
            assert!(check(&variant, &weights, &step, &operands.output(&step)).passed(), "{variant}");
        }
    }
}

#[test]
fn a_graph_is_captured_anew_for_other_addresses_sizes_or_types_and_not_for_a_step_among_the_last() {
    let fake = fake();
    let weights = weights(Op::Gated);
    let mut layer = gpu("per-group,graph").prepare_layer(&weights).unwrap();
    let stream = Stream::new(StreamFlags::NON_BLOCKING, None).unwrap();
    let (large, small) =
        (step(&weights, &GROUPS, OutDtype::F16), step(&weights, &with_tokens([3, 0, 9, 1]), OutDtype::F16));
    let (first, elsewhere, fewer) = (OnDevice::new(&large), OnDevice::new(&large), OnDevice::new(&small));
    let mut captured = |operands: &OnDevice, dtype| {
        fake.take_calls();
        // SAFETY: operands of these sizes lie there, nobody else touches them; the stream is this context's.
        unsafe { layer.launch(&operands.groups, dtype, stream.as_inner()) }.unwrap();
        let calls = fake.take_calls();
        let count = |call: &str| calls.iter().filter(|made| **made == call).count();
        assert_eq!(count("cuGraphLaunch"), 1);
        assert_eq!(count("cuStreamBeginCapture_v2"), count("cuGraphInstantiateWithFlags"));
        count("cuStreamBeginCapture_v2") == 1
    };
    for (operands, dtype, anew) in [
        (&first, OutDtype::F16, true),
        (&elsewhere, OutDtype::F16, true),
        (&fewer, OutDtype::F16, true),
        (&first, OutDtype::Bf16, true),
        (&elsewhere, OutDtype::F16, false),
        (&fewer, OutDtype::Bf16, true),
        // It was the oldest of four, and has made room.
        (&first, OutDtype::F16, true),
        (&first, OutDtype::F16, false),
    ] {
        assert_eq!(captured(operands, dtype), anew);
    }
    stream.synchronize().unwrap();
    for (operands, step) in [(&first, &large), (&elsewhere, &large)] {
        assert!(compare(&operands.output(step), &Reference::new(&weights, step), step).passed());
    }
}

#[test]
fn a_step_that_comes_again_on_another_stream_waits_for_its_descriptors() {
    let _fake = fake();
    let weights = weights(Op::Gated);
    let step = step(&weights, &GROUPS, OutDtype::F16);
    for variant in ["persistent", "persistent,graph", "streams=2", "unfused"] {
        let mut layer = gpu(variant).prepare_layer(&weights).unwrap();
        let operands = OnDevice::new(&step);
        let streams = [(); 2].map(|()| Stream::new(StreamFlags::NON_BLOCKING, None).unwrap());
        for stream in &streams {
            // SAFETY: operands of these sizes lie there, nobody else touches them; the streams are this context's.
            unsafe { layer.launch(&operands.groups, OutDtype::F16, stream.as_inner()) }.unwrap();
        }
        // Nothing has run yet, and of the first stream only what the second waits for will.
        streams[1].synchronize().unwrap();
        assert!(check(variant, &weights, &step, &operands.output(&step)).passed(), "{variant}");
    }
}

#[test]
fn a_failure_while_a_graph_is_made_is_named_and_the_next_step_works() {
    let fake = fake();
    let weights = weights(Op::Gated);
    let mut layer = gpu("streams=2,graph").prepare_layer(&weights).unwrap();
    let step = step(&weights, &GROUPS, OutDtype::F16);
    let mut output = Output::new(step.problem());
    for call in [
        "cuStreamBeginCapture_v2",
        "cuLaunchKernel",
        "cuStreamWaitEvent",
        "cuGraphInstantiateWithFlags",
        "cuGraphLaunch",
    ] {
        fake.fail_next(call, CUDA_ERROR_OUT_OF_MEMORY);
        let error = layer.execute(&step, &mut output).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{call} failed on CUDA device 0 (Fake GPU)")), "{error}");
    }
    backend::run(&mut layer, &step, &mut output).unwrap();
    assert!(compare(&output, &Reference::new(&weights, &step), &step).passed());
}

#[test]
fn a_resident_step_is_timed_alone_and_leaves_its_output_on_the_device() {
    let fake = fake();
    let weights = weights(Op::Gated);
    let step = step(&weights, &GROUPS, OutDtype::F16);
    for cache in [Cache::Warm, Cache::Flushed] {
        let mut layer = gpu("per-group").prepare_layer(&weights).unwrap();
        let mut resident = layer.upload(&step).unwrap();
        let mut output = Output::new(step.problem());
        resident.download(&mut output).unwrap();
        assert!(!compare(&output, &Reference::new(&weights, &step), &step).passed(), "nothing was computed yet");
        // On the fake device's clock a launch takes 250 µs.
        assert_eq!(resident.time(cache).unwrap().device, std::time::Duration::from_micros(3 * 250));
        assert_eq!(resident.launches(), Some(3));
        resident.download(&mut output).unwrap();
        assert!(compare(&output, &Reference::new(&weights, &step), &step).passed());
        let other = Step::new(&Weights::new(Op::Gated, vec![]).unwrap(), vec![], OutDtype::F16).unwrap();
        assert!(resident.download(&mut Output::new(other.problem())).is_err());
    }
    assert_eq!(fake.live_objects(), 0);
}
