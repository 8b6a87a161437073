//! Checks that every kernel must pass in the emulator: the emulator knows its instructions, every instance is right on
//! ragged groups under every schedule, and the small built-in shapes are right.

use nvfp4::Error;
use nvfp4::backend::emulated::{Emulated, Options, Schedule};
use nvfp4::compare::Tolerance;
use nvfp4::generate::Generator;
use nvfp4::kernels::GroupedKernel;
use nvfp4::plan::variant::Variant;
use nvfp4::problem::TokenDtype;
use nvfp4_tests::instances::{OPS, check_shapes, small_shapes};
use nvfp4_tests::{Case, groups, inputs};

/// Runs a check for every kernel and every architecture that it is compiled for, in parallel.
fn for_every_kernel(check: impl Fn(GroupedKernel, &str) + Sync) {
    let check = &check;
    std::thread::scope(|scope| {
        for kernel in GroupedKernel::all() {
            for arch in kernel.arches() {
                scope.spawn(move || check(kernel, arch));
            }
        }
    });
}

/// Returns a small GPU that runs an instance of a kernel.
fn card(kernel: GroupedKernel, arch: &str, instance: Option<&'static str>, schedule: Schedule) -> Emulated {
    let gpu = Emulated::new(arch, Options { schedule, sms: Some(3), ..Options::default() }).unwrap();
    gpu.with_variant(Variant { kernel: Some(kernel), instance, ..Variant::default() }).unwrap()
}

#[test]
fn emulator_knows_every_instruction() {
    for_every_kernel(|kernel, arch| {
        let gpu = card(kernel, arch, None, Schedule::Fair);
        for entry in ptx_emulator::Module::parse(gpu.ptx()).unwrap().entries() {
            assert!(entry.unsupported.is_empty(), "{}: {:?}", entry.name, entry.unsupported);
        }
    });
}

#[test]
fn every_instance_gives_right_stable_bits_on_ragged_groups() {
    // The first set has too many tokens in a group for instances that take few tokens only.
    let sizes = [40, 7].map(|most| groups(&[(0, 8, 64), (1, 136, 320), (most, 72, 224), (3, 8, 32)]));
    for_every_kernel(|kernel, arch| {
        for (op, instance) in
            OPS.into_iter().flat_map(|op| kernel.instances(op).into_iter().map(move |name| (op, name)))
        {
            let mut done = false;
            for sizes in &sizes {
                let inputs = inputs(Generator::Gaussian, op, sizes, 8);
                let case = Case::new(&inputs, TokenDtype::Bf16);
                let run = |schedule| {
                    let gpu = card(kernel, arch, Some(instance), schedule);
                    case.try_run(case.prepare(&gpu).as_mut())
                };
                match run(Schedule::Fair) {
                    Err(Error::At { error, .. }) if error.to_string().contains("supports at most") => continue,
                    fair => {
                        let fair = fair.unwrap_or_else(|error| panic!("{kernel:?} {instance}: {error}"));
                        assert_eq!(case.mismatch(&fair, |_| Tolerance::of(TokenDtype::Bf16)), None, "{instance}");
                        let worst = run(Schedule::Worst).unwrap();
                        assert!(worst == fair, "{kernel:?} {instance}: the worst schedule gave different bits");
                        done = true;
                        break;
                    }
                }
            }
            assert!(done, "{kernel:?} {instance} refuses both sets of groups");
        }
    });
}

#[test]
fn small_built_in_shapes_are_right() {
    for_every_kernel(|kernel, arch| check_shapes(kernel, arch, small_shapes()));
}
