//! Tests of the backend with a fake driver that records its calls and whose kernel is the oracle, fed from the
//! descriptors.

use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::cust::stream::{Stream, StreamFlags};
use fake_cuda::{FakeCuda, Launch};
use kernels_gpu::simt::gated_simt::abi;
use nvfp4_kernels::builds::Build;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use super::*;
use crate::Output;
use crate::backend;
use crate::compare::{Comparison, compare, compare_with};
use crate::generate::{self, Generator};
use crate::oracle::Reference;
use crate::problem::{Group, Op, Step, TokenDtype};
use nvfp4_kernels::fake::{SMS, kernel};

const CUDA_ERROR_OUT_OF_MEMORY: i32 = 2;
const CUDA_ERROR_ILLEGAL_ADDRESS: i32 = 700;
const CUDA_ERROR_UNSUPPORTED_PTX_VERSION: i32 = 222;

const OPS: [Op; 2] = [Op::Gated, Op::Plain];

/// Ragged groups: zero, one and many tokens, K that is not a whole number of scale tiles, and the smallest N.
const GROUPS: [Group; 4] = [
    Group { m: 3, n: 8, k: 48 },
    Group { m: 0, n: 24, k: 64 },
    Group { m: 130, n: 72, k: 16 },
    Group { m: 1, n: 16, k: 320 },
];

fn with_tokens<const G: usize>(tokens: [usize; G]) -> [Group; G] {
    std::array::from_fn(|index| Group { m: tokens[index], ..GROUPS[index] })
}

fn step(weights: &Weights<'_>, groups: &[Group], dtype: TokenDtype) -> Step<'static> {
    let tokens = generate::activations(Generator::PublicDual, groups, 5).unwrap();
    Step::new(weights, tokens, dtype).unwrap()
}

fn weights(op: Op) -> Weights<'static> {
    generate::weights(Generator::PublicDual, op, &GROUPS, 5).unwrap()
}

/// Does the same as [`kernel`] for the portable kernel, but leaves the last element unwritten.
fn forgetful_kernel(launch: &Launch) {
    // SAFETY: the tests below launch this with a parameter whose groups and outputs are in memory that the backend
    // allocated and that lives until the launch is done.
    unsafe {
        let parameter: abi::Launch = launch.parameter(0);
        let groups = std::slice::from_raw_parts(parameter.groups as *const abi::Group, parameter.group_count as usize);
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
fn all_operations_and_types_are_right() {
    let fake = fake();
    for op in OPS {
        let weights = weights(op);
        let gpu = Cuda::open(0).unwrap();
        let mut layer = gpu.prepare(&weights).unwrap();
        for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
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

/// Opens the device with a variant.
fn gpu(variant: &str) -> Cuda {
    Cuda::open(0).unwrap().with_variant(variant.parse().unwrap()).unwrap()
}

#[test]
fn blackwell_tensor_maps_are_encoded_once() {
    let fake = fake();
    fake.set_device(10, 0, SMS as i32);

    let sizes = [Group { m: 3, n: 8, k: 64 }, Group { m: 0, n: 24, k: 32 }, Group { m: 130, n: 136, k: 320 }];
    for op in OPS {
        let weights = generate::weights(Generator::PublicDual, op, &sizes, 5).unwrap();
        assert!(Cuda::open(0).unwrap().prepare_layer(&weights).unwrap().kernel().ends_with("_simt"));
        let mut layer = gpu("gated_sm100").prepare_layer(&weights).unwrap();
        assert!(layer.kernel().ends_with("_sm100"));
        for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
            let step = step(&weights, &sizes, dtype);
            let mut output = Output::new(step.problem());
            let encoded: Vec<_> = (0..2)
                .map(|_| {
                    fake.take_calls();
                    backend::run(&mut layer, &step, &mut output).unwrap();
                    fake.take_calls().iter().filter(|call| *call == "cuTensorMapEncodeTiled").count()
                })
                .collect();
            let first = if dtype == TokenDtype::F16 { 2 * (1 + op.projections()) } else { 0 };
            assert_eq!(encoded, [first, 0], "{op:?} {dtype:?}");
            let found = compare(&output, &Reference::new(&weights, &step), &step);
            assert!(found.passed(), "{op:?} {dtype:?}: {found:?}");
        }
    }
}

#[test]
fn unsupported_weights_use_the_portable_kernel_unless_named() {
    let fake = fake();
    fake.set_device(9, 0, SMS as i32);
    let weights = weights(Op::Gated);
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&weights).unwrap();
    let step = step(&weights, &GROUPS, TokenDtype::F16);
    let mut output = Output::new(step.problem());
    backend::run(&mut layer, &step, &mut output).unwrap();
    assert_eq!(layer.kernel(), "gated_simt");
    assert!(compare(&output, &Reference::new(&weights, &step), &step).passed());

    let refused = gpu("gated_sm90").prepare_layer(&weights).err().unwrap().to_string();
    assert_eq!(refused, "expert 0: gated_sm90 does not support K = 48; use gated_simt");
    let refused = Cuda::open(0).unwrap().with_variant("gated_sm100".parse().unwrap()).err().unwrap().to_string();
    assert_eq!(refused, "gated_sm100 is for sm_100f and does not run on compute capability 9.0");
}

#[test]
fn a_second_run_allocates_nothing_and_launches_once() {
    let fake = fake();
    let weights = weights(Op::Gated);
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&weights).unwrap();
    let step = step(&weights, &GROUPS, TokenDtype::F16);
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
    assert_eq!(output, first, "reruns must give the same bits");
    assert_eq!(layer.allocations(), allocations);
}

#[test]
fn only_larger_steps_allocate_memory() {
    let _fake = fake();
    let weights = weights(Op::Plain);
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&weights).unwrap();
    let mut allocations = |tokens| {
        let step = step(&weights, &with_tokens(tokens), TokenDtype::F16);
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
fn the_time_excludes_copies() {
    let _fake = fake();
    let weights = weights(Op::Gated);
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&weights).unwrap();
    let step = step(&weights, &GROUPS, TokenDtype::F16);
    // On the clock of the fake device, a launch takes 250 µs and a copy takes 1 ms.
    let time = layer.execute(&step, &mut Output::new(step.problem())).unwrap();
    assert_eq!(time, std::time::Duration::from_micros(250));
}

#[test]
fn steps_without_tokens_call_no_driver() {
    let fake = fake();
    let weights = weights(Op::Gated);
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&weights).unwrap();
    let step = step(&weights, &with_tokens([0, 0, 0, 0]), TokenDtype::F16);
    fake.take_calls();
    assert!(layer.execute(&step, &mut Output::new(step.problem())).unwrap().is_zero());
    assert_eq!(fake.take_calls(), [""; 0]);

    let none = Weights::new(Op::Gated, vec![]).unwrap();
    let step = Step::new(&none, vec![], TokenDtype::F16).unwrap();
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&none).unwrap();
    layer.execute(&step, &mut Output::new(step.problem())).unwrap();
}

#[test]
fn unwritten_elements_are_found() {
    let fake = fake();
    fake.on_launch(forgetful_kernel);
    let weights = weights(Op::Gated);
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&weights).unwrap();
    let step = step(&weights, &GROUPS, TokenDtype::F16);
    let mut output = Output::new(step.problem());
    // The first run leaves the right value in device memory. It must not hide the error of the second run.
    for _ in 0..2 {
        backend::run(&mut layer, &step, &mut output).unwrap();
        let found = compare(&output, &Reference::new(&weights, &step), &step);
        let first = found.first.unwrap();
        assert_eq!((found.mismatches, first.group, first.row, first.column), (1, 3, 0, 15));
        assert!(first.got.is_nan());
    }
}

#[test]
fn device_steps_run_on_the_callers_stream() {
    let fake = fake();
    let weights = weights(Op::Gated);
    let gpu = Cuda::open(0).unwrap();
    let mut layer = gpu.prepare_layer(&weights).unwrap();
    let step = step(&weights, &GROUPS, TokenDtype::Bf16);
    let stream = Stream::new(StreamFlags::DEFAULT, None).unwrap();

    let operands = OnDevice::new(&step);
    let groups = &operands.groups;
    for launch in 0..10 {
        fake.take_calls();
        // SAFETY: `operands` has these sizes and lives until `synchronize`, nobody else accesses it, and the stream
        // belongs to this context.
        unsafe { layer.launch(groups, TokenDtype::Bf16, stream.as_inner()) }.unwrap();
        let calls = fake.take_calls();
        if launch >= 1 {
            assert_eq!(calls, ["cuCtxSetCurrent", "cuLaunchKernel", "cuEventRecord"]);
        }
    }
    stream.synchronize().unwrap();
    let output = operands.output(&step);
    assert!(compare(&output, &Reference::new(&weights, &step), &step).passed());

    let few = &groups[..2];
    // SAFETY: the call is refused before it accesses any address.
    let error = unsafe { layer.launch(few, TokenDtype::Bf16, stream.as_inner()) }.unwrap_err();
    assert_eq!(error.to_string(), "groups of tokens (one per expert): got 2, expected 4");
    let mut infinite = groups.clone();
    infinite[2].global_scale = f32::NAN;
    // SAFETY: the call is refused before it accesses any address.
    let error = unsafe { layer.launch(&infinite, TokenDtype::Bf16, stream.as_inner()) }.unwrap_err();
    assert!(error.to_string().starts_with("group 2: the product of the global scales is NaN"), "{error}");
}

#[test]
fn failing_calls_are_named_and_the_next_step_works() {
    let fake = fake();
    let weights = weights(Op::Gated);
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&weights).unwrap();
    let step = step(&weights, &GROUPS, TokenDtype::F16);
    let mut output = Output::new(step.problem());
    for (call, code, text) in [
        ("cuMemAlloc_v2", CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"),
        ("cuMemAllocHost_v2", CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"),
        (
            "cuLaunchKernel",
            912,
            "CUDA_ERROR_INVALID_CLUSTER_SIZE (912): a kernel launch error has occurred due to cluster misconfiguration",
        ),
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
fn refused_kernels_are_named_with_the_reason() {
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

    // The kernel does not run on this device, so the driver's compiler reports an error.
    fake.set_device(7, 5, 40);
    let error = gpu.prepare(&weights).err().unwrap().to_string();
    assert!(
        error.starts_with(
            "kernel gated_simt (sm_80): compiler log of the driver: \"ptxas fatal : the target is not for this \
             device\": cuModuleLoadDataEx failed on CUDA device 0 (Fake GPU): CUDA_ERROR_NO_BINARY_FOR_GPU (209)"
        ),
        "{error}"
    );
}

#[test]
fn kernels_load_once_and_everything_is_freed() {
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
fn layers_may_be_used_and_dropped_on_another_thread() {
    let fake = fake();
    let weights = weights(Op::Gated);
    let step = step(&weights, &GROUPS, TokenDtype::F16);
    let mut layer = Cuda::open(0).unwrap().prepare_layer(&weights).unwrap();
    std::thread::scope(|scope| {
        // The layer is the last owner of the device, so the module and the context are dropped on that thread too.
        scope.spawn(move || layer.execute(&step, &mut Output::new(step.problem())).unwrap());
    });
    assert_eq!(fake.live_objects(), 0);
}

#[test]
fn cubin_files_are_preferred_to_ptx() {
    let fake = fake();
    fake.set_device(8, 9, 128);
    let folder = tempfile::tempdir().unwrap();
    let weights = weights(Op::Gated);
    let prepare = || {
        Cuda::open_with(0, Options { cubins: Some(folder.path().into()), ..Options::default() })
            .unwrap()
            .prepare_layer(&weights)
    };

    assert!(prepare().is_ok(), "without a file, PTX is used");
    // The fake driver accepts any data that starts like an ELF file, and finds every entry in it.
    std::fs::write(folder.path().join("gated_simt.sm_89.cubin"), b"\x7fELF").unwrap();
    assert!(prepare().is_ok());
    std::fs::write(folder.path().join("gated_simt.sm_89.cubin"), b"no machine code").unwrap();
    let error = prepare().err().unwrap().to_string();
    assert!(error.contains("gated_simt.sm_89.cubin: cuModuleLoadDataEx failed on CUDA device 0"), "{error}");
}

#[test]
fn ptx_replaces_machine_code_that_the_driver_refuses() {
    let fake = fake();
    fake.set_device(8, 9, 128);
    let device = Device::open(0, Options::default()).unwrap();
    let build = builds::find("gated_simt", (8, 9)).unwrap();
    let with = |code: &[u8]| {
        let packed = compress_to_vec(code, CompressionLevel::Uncompressed);
        let build: &Build = Box::leak(Box::new(build.with_machine_code("sm_80", packed.leak())));
        assert_ne!(build.hash((8, 9)), builds::find("gated_simt", (8, 9)).unwrap().hash((8, 9)));
        (device.standing.code.of(build, (8, 9)).unwrap().place, device.load(build).map(|_| ()))
    };
    let _entered = device.enter().unwrap();
    let place = "kernel gated_simt (machine code for sm_80)";
    assert!(matches!(with(b"\x7fELF"), (found, Ok(())) if found == place));
    assert!(matches!(with(b"no machine code"), (found, Ok(())) if found == place));
}

#[test]
fn code_from_a_file_replaces_its_kernel() {
    let _fake = fake();
    let weights = weights(Op::Plain);
    let folder = tempfile::tempdir().unwrap();
    let open = |text: &[u8]| {
        let path = folder.path().join("mine");
        std::fs::write(&path, text).unwrap();
        Cuda::open_with(0, Options { code: Some(path), ..Options::default() })
    };
    let ptx = builds::find("gated_simt", (8, 9)).unwrap().ptx();
    let mut layer = open(ptx.as_bytes()).unwrap().prepare_layer(&weights).unwrap();
    let step = step(&weights, &GROUPS, TokenDtype::F16);
    let mut output = Output::new(step.problem());
    backend::run(&mut layer, &step, &mut output).unwrap();
    assert!(compare(&output, &Reference::new(&weights, &step), &step).passed());
    open(b"\x7fELF gated_simt").unwrap().prepare_layer(&weights).unwrap();
    let error = open(b"gated_simt, but no code").unwrap().prepare_layer(&weights).err().unwrap().to_string();
    assert!(error.contains("mine: compiler log") || error.contains("mine: cuModuleLoadDataEx"), "{error}");
    let error = open(b"nothing").err().unwrap().to_string();
    assert!(error.contains("mine: the code contains no entry of any kernel"), "{error}");
    let error = open(b"gated_sm90_t64").err().unwrap().to_string();
    assert!(error.contains("gated_sm90 is for sm_90a"), "{error}");
}

#[test]
fn without_a_usable_device_the_error_says_why() {
    let fake = fake();
    let refused = |ordinal| Cuda::open(ordinal).map(|_| ()).unwrap_err();
    assert_eq!(refused(1).to_string(), "no CUDA device: there is no device 1; the driver lists 1 devices");
    fake.set_device(7, 5, 40);
    let error = refused(0);
    assert!(error.is_no_device());
    assert_eq!(error.to_string(), "no CUDA device: no kernel runs on Fake GPU (compute capability 7.5)");
    fake.set_device_count(0);
    assert!(refused(0).is_no_device());
    assert!(devices().unwrap_err().is_no_device());
}

#[test]
fn devices_are_listed_with_their_default_kernel() {
    let fake = fake();
    fake.set_device(8, 6, 84);
    let expected = DeviceInfo {
        ordinal: 0,
        name: "Fake GPU".into(),
        capability: (8, 6),
        sms: 84,
        memory: 8 << 30,
        driver: devices().unwrap()[0].driver.clone(),
        kernel: Some(("gated_simt", "sm_80")),
        notes: vec![],
    };
    assert_eq!(devices().unwrap(), [expected]);
}

/// Compares an output with the exact output, at the tolerance of the variant.
fn check(variant: &str, weights: &Weights<'_>, step: &Step<'_>, output: &Output) -> Comparison {
    let schedule = variant.parse::<Variant>().unwrap().schedule;
    compare_with(output, &Reference::new(weights, step), step, |_, _, _, element| {
        schedule.tolerance(output.dtype(), element)
    })
}

/// Every launch schedule, its number of launches for [`GROUPS`], and the number of streams that it uses.
const LAUNCH_SCHEDULES: [(&str, usize, usize); 5] =
    [("persistent", 1, 1), ("per-group", 3, 1), ("streams=2", 3, 2), ("streams=16", 3, 3), ("unfused", 3, 1)];

#[test]
fn all_schedules_and_graphs_are_right_in_every_step() {
    let fake = fake();
    let weights = weights(Op::Gated);
    // Two steps that occur again, with more steps between them than stay planned.
    let tokens =
        [[3, 0, 130, 1], [0, 0, 0, 9], [3, 0, 130, 1], [1, 1, 1, 1], [2, 2, 2, 2], [4, 0, 0, 0], [3, 0, 130, 1]];
    for (schedule, ..) in LAUNCH_SCHEDULES {
        for variant in [schedule.to_owned(), format!("{schedule},graph")] {
            for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
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

/// Asserts that every launch schedule of these instances is right, with and without a graph.
fn schedules_are_right((major, minor): (i32, i32), kernel: &str, instances: [&str; 2]) {
    let fake = fake();
    fake.set_device(major, minor, SMS as i32);
    let sizes = [Group { m: 3, n: 8, k: 64 }, Group { m: 0, n: 24, k: 32 }, Group { m: 130, n: 136, k: 320 }];
    let weights = generate::weights(Generator::PublicDual, Op::Gated, &sizes, 5).unwrap();
    let step = step(&weights, &sizes, TokenDtype::F16);
    for (schedule, ..) in LAUNCH_SCHEDULES {
        for (instance, graph) in instances.into_iter().flat_map(|instance| [(instance, ""), (instance, ",graph")]) {
            let variant = format!("{kernel},{instance},{schedule}{graph}");
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
fn all_schedules_are_right_on_blackwell() {
    schedules_are_right((10, 0), "gated_sm100", ["t64", "t64_pair"]);
}

#[test]
fn all_schedules_are_right_on_hopper() {
    schedules_are_right((9, 0), "gated_sm90", ["t16", "t64"]);
}

/// A step's tokens and output in device memory.
struct OnDevice {
    groups: Vec<DeviceGroup>,
    outputs: Vec<DeviceBuffer<u16>>,
    _tokens: Vec<DeviceBuffer<u8>>,
}

impl OnDevice {
    /// The context must be current, as it is after a device was opened.
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

/// Streams of the launches that have run.
static STREAMS: std::sync::Mutex<Vec<usize>> = std::sync::Mutex::new(Vec::new());

fn kernel_that_notes_its_stream(launch: &Launch) {
    STREAMS.lock().unwrap().push(launch.stream);
    kernel(launch);
}

#[test]
fn repeated_steps_only_launch() {
    let fake = fake();
    fake.on_launch(kernel_that_notes_its_stream);
    let weights = weights(Op::Gated);
    let step = step(&weights, &GROUPS, TokenDtype::F16);
    for (schedule, launches, streams) in LAUNCH_SCHEDULES {
        for graph in [false, true] {
            let variant = if graph { format!("{schedule},graph") } else { schedule.to_owned() };
            let mut layer = gpu(&variant).prepare_layer(&weights).unwrap();
            let operands = OnDevice::new(&step);
            let stream = Stream::new(StreamFlags::NON_BLOCKING, None).unwrap();
            let mut launch = || {
                fake.take_calls();
                // SAFETY: `operands` has these sizes and lives until `synchronize`, nobody else accesses it, and the
                // stream belongs to this context.
                unsafe { layer.launch(&operands.groups, TokenDtype::F16, stream.as_inner()) }.unwrap();
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
                    // One event is recorded at the fork and one at the end of each stream. Each stream waits for the
                    // fork, and the caller's stream waits for each end.
                    let (marks, waits) = if dealt { (1 + streams, 2 * streams) } else { (0, 0) };
                    assert_eq!((order("cuEventRecord"), order("cuStreamWaitEvent")), (marks + 1, waits), "{variant}");
                    assert_eq!(calls.len(), 1 + launches + marks + 1 + waits, "{variant}: {calls:?}");
                }
            }
            STREAMS.lock().unwrap().clear();
            stream.synchronize().unwrap();
            let ran = std::mem::take(&mut *STREAMS.lock().unwrap());
            assert_eq!(ran.len(), 4 * launches, "{variant}: the caller's stream must wait for every launch");
            let distinct: std::collections::BTreeSet<_> = ran.into_iter().collect();
            assert_eq!(distinct.len(), streams, "{variant}");
            assert!(check(&variant, &weights, &step, &operands.output(&step)).passed(), "{variant}");
        }
    }
}

#[test]
fn graphs_are_captured_only_for_unplanned_steps() {
    let fake = fake();
    let weights = weights(Op::Gated);
    let mut layer = gpu("per-group,graph").prepare_layer(&weights).unwrap();
    let stream = Stream::new(StreamFlags::NON_BLOCKING, None).unwrap();
    let (large, small) =
        (step(&weights, &GROUPS, TokenDtype::F16), step(&weights, &with_tokens([3, 0, 9, 1]), TokenDtype::F16));
    let (first, elsewhere, fewer) = (OnDevice::new(&large), OnDevice::new(&large), OnDevice::new(&small));
    let mut captured = |operands: &OnDevice, dtype| {
        fake.take_calls();
        // SAFETY: `operands` has these sizes and lives until `synchronize`, nobody else accesses it, and the stream
        // belongs to this context.
        unsafe { layer.launch(&operands.groups, dtype, stream.as_inner()) }.unwrap();
        let calls = fake.take_calls();
        let count = |call: &str| calls.iter().filter(|made| **made == call).count();
        assert_eq!(count("cuGraphLaunch"), 1);
        assert_eq!(count("cuStreamBeginCapture_v2"), count("cuGraphInstantiateWithFlags"));
        count("cuStreamBeginCapture_v2") == 1
    };
    for (operands, dtype, anew) in [
        (&first, TokenDtype::F16, true),
        (&elsewhere, TokenDtype::F16, true),
        (&fewer, TokenDtype::F16, true),
        (&first, TokenDtype::Bf16, true),
        (&elsewhere, TokenDtype::F16, false),
        (&fewer, TokenDtype::Bf16, true),
        // This step was the oldest of four, so another step took its place.
        (&first, TokenDtype::F16, true),
        (&first, TokenDtype::F16, false),
    ] {
        assert_eq!(captured(operands, dtype), anew);
    }
    stream.synchronize().unwrap();
    for (operands, step) in [(&first, &large), (&elsewhere, &large)] {
        assert!(compare(&operands.output(step), &Reference::new(&weights, step), step).passed());
    }
}

#[test]
fn repeated_steps_on_another_stream_wait_for_descriptors() {
    let _fake = fake();
    let weights = weights(Op::Gated);
    let step = step(&weights, &GROUPS, TokenDtype::F16);
    for variant in ["persistent", "persistent,graph", "streams=2", "unfused"] {
        let mut layer = gpu(variant).prepare_layer(&weights).unwrap();
        let operands = OnDevice::new(&step);
        let streams = [(); 2].map(|()| Stream::new(StreamFlags::NON_BLOCKING, None).unwrap());
        for stream in &streams {
            // SAFETY: `operands` has these sizes, nobody else accesses it, and the streams belong to this context.
            unsafe { layer.launch(&operands.groups, TokenDtype::F16, stream.as_inner()) }.unwrap();
        }
        // Nothing has run yet. Of the first stream's work, only the part that the second stream waits for will run.
        streams[1].synchronize().unwrap();
        assert!(check(variant, &weights, &step, &operands.output(&step)).passed(), "{variant}");
    }
}

#[test]
fn failed_captures_are_named_and_the_next_step_works() {
    let fake = fake();
    let weights = weights(Op::Gated);
    let mut layer = gpu("streams=2,graph").prepare_layer(&weights).unwrap();
    let step = step(&weights, &GROUPS, TokenDtype::F16);
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
fn resident_steps_are_timed_and_keep_their_output() {
    let fake = fake();
    let weights = weights(Op::Gated);
    let step = step(&weights, &GROUPS, TokenDtype::F16);
    for cache in [Cache::Warm, Cache::Flushed] {
        let mut layer = gpu("per-group").prepare_layer(&weights).unwrap();
        let mut resident = layer.upload(&step).unwrap();
        let mut output = Output::new(step.problem());
        resident.download(&mut output).unwrap();
        assert!(!compare(&output, &Reference::new(&weights, &step), &step).passed(), "no step has run yet");
        // On the clock of the fake device, a launch takes 250 µs.
        assert_eq!(resident.time(cache).unwrap().device, std::time::Duration::from_micros(3 * 250));
        assert_eq!(resident.launches(), Some(3));
        resident.download(&mut output).unwrap();
        assert!(compare(&output, &Reference::new(&weights, &step), &step).passed());
        let other = Step::new(&Weights::new(Op::Gated, vec![]).unwrap(), vec![], TokenDtype::F16).unwrap();
        assert!(resident.download(&mut Output::new(other.problem())).is_err());
    }
    assert_eq!(fake.live_objects(), 0);
}
