//! Checks every launch schedule of every kernel on ragged groups: in the emulator, and on a GPU if there is one, with
//! and without a graph.

use nvfp4::Output;
use nvfp4::backend::Backend;
use nvfp4::backend::cuda::Cuda;
use nvfp4::backend::emulated::{Emulated, Options};
use nvfp4::generate::Generator;
use nvfp4::kernels::GroupedKernel;
use nvfp4::plan::variant::{LaunchSchedule, Variant};
use nvfp4::problem::{Op, TokenDtype};
use nvfp4_tests::{Case, groups, inputs, skip};

const SCHEDULES: [LaunchSchedule; 5] = [
    LaunchSchedule::Persistent,
    LaunchSchedule::PerGroup,
    LaunchSchedule::Streams(1),
    LaunchSchedule::Streams(3),
    LaunchSchedule::Unfused,
];

/// Sizes of groups with few, many and no tokens. All sizes end inside a tile.
const SIZES: [(usize, usize, usize); 5] = [(1, 72, 320), (0, 136, 64), (7, 136, 192), (130, 200, 64), (40, 8, 1120)];

/// Returns the output of a variant after checking it within the variant's tolerance.
fn verified(case: &Case<'_>, gpu: &dyn Backend, variant: Variant, out_dtype: TokenDtype) -> Output {
    let mut layer = case.prepare(gpu);
    let tolerance = |place: &nvfp4_tests::Place| variant.schedule.tolerance(out_dtype, &place.element);
    let output = case.verified(gpu, layer.as_mut(), tolerance);
    let groups = SIZES.iter().filter(|(m, ..)| *m > 0).count();
    // Hopper's kernel decodes tokens in a separate grid.
    let decode = usize::from(variant.kernel.is_some_and(|kernel| kernel.name() == "gated_sm90"));
    let launches = match variant.schedule {
        _ if variant.graph => 1,
        LaunchSchedule::Persistent => 1 + decode,
        LaunchSchedule::PerGroup | LaunchSchedule::Streams(_) => groups * (1 + decode),
        LaunchSchedule::Unfused => 3 + decode,
    };
    assert_eq!(layer.launches(), Some(launches), "{variant}");
    assert!(case.run(gpu, layer.as_mut()) == output, "{variant}: a rerun gave different bits");
    output
}

/// Checks that every schedule of a kernel is right, and that all fused schedules give the same bits with the same
/// instance.
fn check(kernel: GroupedKernel, instance: &'static str, graphs: &[bool], gpu: impl Fn(Variant) -> Box<dyn Backend>) {
    for out_dtype in [TokenDtype::F16, TokenDtype::Bf16] {
        let inputs = inputs(Generator::Gaussian, Op::Gated, &groups(&SIZES), 6);
        let case = Case::new(&inputs, out_dtype);
        let mut fused: Option<Output> = None;
        for schedule in SCHEDULES {
            for &graph in graphs {
                let variant = Variant { kernel: Some(kernel), instance: Some(instance), schedule, graph };
                let output = verified(&case, &*gpu(variant), variant, out_dtype);
                if schedule != LaunchSchedule::Unfused {
                    let first = fused.get_or_insert_with(|| output.clone());
                    assert!(output == *first, "{variant}: different bits from a single launch");
                }
            }
        }
    }
}

/// Returns an instance that both operations have and that takes any number of tokens: `t64` if it exists, because with
/// it Hopper's kernel decodes tokens in a separate grid, otherwise the first.
fn instance(kernel: GroupedKernel) -> &'static str {
    let gpu = emulated(kernel);
    let inputs = inputs(Generator::Gaussian, Op::Gated, &groups(&SIZES), 6);
    let case = Case::new(&inputs, TokenDtype::F16);
    let takes = |name: &&'static str| {
        let variant = Variant { kernel: Some(kernel), instance: Some(name), ..Variant::default() };
        let gpu = gpu.clone().with_variant(variant).unwrap();
        kernel.instances(Op::Plain).contains(name) && case.try_run(case.prepare(&gpu).as_mut()).is_ok()
    };
    let names = kernel.instances(Op::Gated);
    let preferred = names.iter().copied().find(|name| *name == "t64");
    preferred.or_else(|| names.into_iter().find(takes)).expect("an instance for any number of tokens")
}

/// Returns a small emulated GPU of the kernel's first architecture.
fn emulated(kernel: GroupedKernel) -> Emulated {
    Emulated::new(kernel.arches()[0], Options { sms: Some(4), ..Options::default() }).unwrap()
}

#[test]
fn every_schedule_of_every_kernel_is_right_in_the_emulator() {
    let check = |kernel: GroupedKernel| {
        let gpu = emulated(kernel);
        check(kernel, instance(kernel), &[false], |variant| Box::new(gpu.clone().with_variant(variant).unwrap()));
    };
    std::thread::scope(|scope| GroupedKernel::all().for_each(|kernel| drop(scope.spawn(move || check(kernel)))));
}

#[test]
fn every_schedule_of_every_kernel_is_right_on_this_machines_gpu() {
    let gpu = match Cuda::open(0) {
        Ok(gpu) => gpu,
        Err(error) if error.is_no_device() => return skip("backend cuda", error),
        Err(error) => panic!("{error}"),
    };
    for kernel in GroupedKernel::all() {
        match gpu.clone().with_variant(Variant { kernel: Some(kernel), ..Variant::default() }) {
            Ok(_) => check(kernel, instance(kernel), &[false, true], |variant| {
                Box::new(gpu.clone().with_variant(variant).unwrap())
            }),
            Err(error) => skip("backend cuda", error),
        }
    }
}

#[test]
fn emulator_refuses_a_graph_with_the_reason() {
    let gpu = Emulated::new("sm_100f", Options::default()).unwrap();
    let refused = gpu.with_variant("graph".parse().unwrap()).err().unwrap().to_string();
    assert!(refused.contains("cannot capture launches"), "{refused}");
}
