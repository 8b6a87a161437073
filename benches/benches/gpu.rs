//! Times every instance and every launch schedule of the GPU kernels with events. The L2 cache is flushed before every
//! run. A kernel runs if this machine's GPU is one of the kernel's GPUs. For the other kernels the bench prints the
//! reason why they were skipped.

mod common;

use std::time::Duration;

use common::criterion;
use criterion::{Criterion, SamplingMode};
use nvfp4::backend::cuda::{Cache, Cuda};
use nvfp4::generate::{self, Generator};
use nvfp4::kernels::GroupedKernel;
use nvfp4::plan::variant::{LaunchSchedule, Variant};
use nvfp4::problem::{Op, Step, TokenDtype, Weights};
use nvfp4::{Error, Output, shape};
use nvfp4_benches::check_variant;

const SHAPES: [&str; 7] = ["moe-1", "moe-2", "moe-3", "moe-4", "decode-1", "decode-4", "decode-16"];

/// Returns every instance in one launch, and every schedule with and without a graph, with the instance that the plan
/// chooses.
fn variants(kernel: GroupedKernel) -> Vec<Variant> {
    let of_kernel = Variant { kernel: Some(kernel), ..Variant::default() };
    let instances = kernel.instances(Op::Gated).into_iter();
    let instances = instances.map(|instance| Variant { instance: Some(instance), ..of_kernel });
    let schedules =
        [LaunchSchedule::Persistent, LaunchSchedule::PerGroup, LaunchSchedule::Streams(4), LaunchSchedule::Unfused];
    let schedules =
        schedules.into_iter().flat_map(|schedule| [false, true].map(|graph| Variant { schedule, graph, ..of_kernel }));
    schedules.chain(instances).collect()
}

/// Checks a variant's output, then times the variant.
fn bench_variant(
    criterion: &mut Criterion,
    gpu: &Cuda,
    name: &str,
    variant: Variant,
    weights: &Weights<'_>,
    step: &Step<'_>,
) -> Result<(), Error> {
    let mut layer = gpu.clone().with_variant(variant)?.prepare_layer(weights)?;
    let mut resident = layer.upload(step)?;
    resident.time(Cache::Flushed)?;
    let mut output = Output::new(step.problem());
    resident.download(&mut output)?;
    check_variant(variant, weights, step, &output);

    let mut group = criterion.benchmark_group(name);
    group.sampling_mode(SamplingMode::Flat);
    group.bench_function(variant.to_string(), |bencher| {
        bencher.iter_custom(|iterations| {
            let run = |_| resident.time(Cache::Flushed).expect("the device worked before").device;
            (0..iterations).map(run).sum::<Duration>()
        });
    });
    group.finish();
    Ok(())
}

fn main() {
    let mut criterion = criterion();
    let gpu = Cuda::open(0);
    for kernel in GroupedKernel::all() {
        let there = gpu.as_ref().map_err(ToString::to_string).and_then(|gpu| {
            let variant = Variant { kernel: Some(kernel), ..Variant::default() };
            gpu.clone().with_variant(variant).map_err(|error| error.to_string())
        });
        let gpu = match there {
            Ok(gpu) => gpu,
            Err(reason) => {
                for variant in variants(kernel) {
                    println!("skipped: {variant} on {}: {reason}", SHAPES.join(", "));
                }
                continue;
            }
        };
        for name in SHAPES {
            let shape = shape::find(name).expect("a built-in shape");
            let weights = generate::weights(Generator::Gaussian, shape.op, &shape.groups, 1).expect("a valid shape");
            let tokens = generate::activations(Generator::Gaussian, &shape.groups, 1).expect("a valid shape");
            let step = Step::new(&weights, tokens, TokenDtype::F16).expect("tokens of the same shape");
            for variant in variants(kernel) {
                if let Err(reason) = bench_variant(&mut criterion, &gpu, name, variant, &weights, &step) {
                    println!("skipped: {variant} on {name}: {reason}");
                }
            }
        }
    }
    criterion.final_summary();
}
