//! Checks an output of a grouped problem or of an MoE layer against the exact reference: all elements or a sample.

use nvfp4::Output;
use nvfp4::compare::{Comparison, Mismatch, Tolerance, compare_with};
use nvfp4::moe::{MoeOutput, MoeStep, MoeWeights, compare as moe_compare};
use nvfp4::oracle::{Element, Reference, element_at};
use nvfp4::problem::{Group, Step, Weights};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::args::{Args, Verify};
use crate::cli::progress::Progress;

/// Compares the requested elements of an output with the variant's tolerance. `None`: no check was requested.
pub fn verify(args: &Args, weights: &Weights<'_>, step: &Step<'_>, output: &Output) -> Option<Comparison> {
    let tolerance = |element: &Element| args.variant.schedule.tolerance(output.dtype(), element);
    match args.verify {
        _ if args.no_values => None,
        Verify::Full => Some(verify_all(weights, step, output, tolerance)),
        Verify::Sample => Some(verify_sample(weights, step, output, tolerance, args.seed)),
        Verify::Off => None,
    }
}

fn verify_all(
    weights: &Weights<'_>,
    step: &Step<'_>,
    output: &Output,
    tolerance: impl Fn(&Element) -> Tolerance + Sync,
) -> Comparison {
    let projections = step.problem().op().projections();
    let dot_products = step.problem().groups().iter().map(|group| projections * group.m * group.n).sum();
    let progress = Progress::new("verifying", dot_products);
    let reference = Reference::with_progress(weights, step, &|done| progress.add(done));
    compare_with(output, &reference, step, |_, _, _, element| tolerance(element))
}

fn verify_sample(
    weights: &Weights<'_>,
    step: &Step<'_>,
    output: &Output,
    tolerance: impl Fn(&Element) -> Tolerance,
    seed: u64,
) -> Comparison {
    const ELEMENTS: usize = 4096;
    let dtype = output.dtype();
    let groups: Vec<(usize, &Group)> =
        step.problem().groups().iter().enumerate().filter(|(_, group)| group.m > 0).collect();
    let mut comparison = Comparison::default();
    if groups.is_empty() {
        return comparison;
    }
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let progress = Progress::new("verifying", ELEMENTS);
    for _ in 0..ELEMENTS {
        let (group, sizes) = groups[rng.random_range(0..groups.len())];
        let (row, column) = (rng.random_range(0..sizes.m), rng.random_range(0..sizes.n));
        let exact = element_at(weights, step, group, row, column);
        let (got, want) = (dtype.decode(output.group(group)[row * sizes.n + column]), exact.value);
        comparison.add(tolerance(&exact), dtype, Mismatch { group, row, column, got, want });
        progress.add(1);
    }
    comparison
}

/// Number of elements of each stage of an MoE layer in a sample.
const LAYER_SAMPLE: usize = 4096;

/// Compares an MoE layer's output with the reference, as --verify says.
pub(super) fn compare_layer(
    args: &Args,
    weights: &MoeWeights<'_>,
    step: &MoeStep<'_>,
    output: &MoeOutput,
) -> Option<moe_compare::MoeComparison> {
    match args.verify {
        _ if args.no_values => None,
        Verify::Off => None,
        Verify::Sample => Some(moe_compare::compare_sample(weights, step, output, LAYER_SAMPLE, args.seed)),
        Verify::Full => {
            let progress = Progress::new("verifying", moe_compare::elements(step));
            Some(moe_compare::compare_with_progress(weights, step, output, &|done| progress.add(done)))
        }
    }
}
