//! Common code of the benchmarks.

use std::time::Instant;

use nvfp4::Output;
use nvfp4::compare::{Comparison, Mismatch, Tolerance};
use nvfp4::oracle::{self, Element};
use nvfp4::plan::variant::Variant;
use nvfp4::problem::{Step, Weights};

/// Runs routines in turns: once to warm up, then `turns` times. Returns the seconds of each routine per turn. Other
/// load on the machine affects all routines alike, so their ratios are reliable even if their times are not.
pub fn in_turns<const N: usize>(turns: usize, mut routines: [&mut dyn FnMut(); N]) -> [Vec<f64>; N] {
    let mut seconds = [const { Vec::new() }; N];
    routines.iter_mut().for_each(|routine| routine());
    for _ in 0..turns {
        for (routine, seconds) in routines.iter_mut().zip(&mut seconds) {
            let start = Instant::now();
            routine();
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    seconds
}

/// Returns the median.
///
/// # Panics
/// If there are no numbers.
pub fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// Compares a sample of an output's elements with the oracle, with the tolerance of the output's type.
///
/// # Panics
/// If an element is wrong, so that no bench times a wrong result.
pub fn check_sample(who: &str, weights: &Weights<'_>, step: &Step<'_>, output: &Output) {
    check_sample_at(who, weights, step, output, |_| Tolerance::of(output.dtype()));
}

/// Like [`check_sample`], with the tolerance of a variant.
///
/// # Panics
/// If an element is wrong.
pub fn check_variant(variant: Variant, weights: &Weights<'_>, step: &Step<'_>, output: &Output) {
    let tolerance = |element: &Element| variant.schedule.tolerance(output.dtype(), element);
    check_sample_at(&variant.to_string(), weights, step, output, tolerance);
}

/// Compares a sample of elements, with a tolerance per element.
fn check_sample_at(
    who: &str,
    weights: &Weights<'_>,
    step: &Step<'_>,
    output: &Output,
    tolerance: impl Fn(&Element) -> Tolerance,
) {
    /// Number of compared elements per group.
    const SAMPLES: usize = 64;
    let dtype = output.dtype();
    let mut found = Comparison::default();
    for (group, sizes) in step.problem().groups().iter().enumerate() {
        let bits = output.group(group);
        // Evenly spaced elements, with the last element included.
        for at in (1..=SAMPLES.min(bits.len())).map(|sample| bits.len() * sample / SAMPLES.min(bits.len()) - 1) {
            let (row, column) = (at / sizes.n, at % sizes.n);
            let exact = oracle::element_at(weights, step, group, row, column);
            let (got, want) = (dtype.decode(bits[at]), exact.value);
            found.add(tolerance(&exact), dtype, Mismatch { group, row, column, got, want });
        }
    }
    assert!(found.passed() && found.checked > 0, "{who}: {found:?}");
}
