//! What integration tests share: the backends of this machine, and the body that every one of them must pass.

pub mod allocation;
pub mod files;

use std::io::Write;

use nvfp4::Output;
use nvfp4::backend::{self, Backend, cpu::Cpu, cuda::Cuda};
use nvfp4::compare::{Comparison, Tolerance, compare_with};
use nvfp4::format::Matrix;
use nvfp4::generate::{self, Generator};
use nvfp4::oracle::{Reference, magnitudes};
use nvfp4::problem::{Expert, Group, Op, OutDtype, Step, Weights};
use nvfp4::shape::Shape;

/// The backends that this machine can run; the others are named on stderr with the reason.
pub fn backends() -> Vec<Box<dyn Backend>> {
    let mut backends: Vec<Box<dyn Backend>> = vec![Box::new(Cpu::new())];
    match Cuda::open(0) {
        Ok(gpu) => backends.push(Box::new(gpu)),
        Err(error) if error.is_no_device() => skip("backend cuda", error),
        Err(error) => panic!("backend cuda: {error}"),
    }
    backends
}

/// Says, past the test harness's capture, which test cannot run on what here, and why.
pub fn skip(what: &str, why: impl std::fmt::Display) {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    // A test must not fail because nobody listens.
    let _ = writeln!(std::io::stderr(), "skipped: {test} on {what}: {why}");
}

/// Inputs of a step.
pub struct Inputs {
    /// One expert for each group.
    pub weights: Weights<'static>,
    /// Tokens for each group.
    pub tokens: Vec<Matrix<'static>>,
}

/// Inputs for some sizes.
pub fn inputs(generator: Generator, op: Op, groups: &[Group], seed: u64) -> Inputs {
    Inputs {
        weights: generate::weights(generator, op, groups, seed).expect("valid sizes"),
        tokens: generate::activations(generator, groups, seed).expect("valid sizes"),
    }
}

/// Groups from `(M, N, K)`.
pub fn groups(sizes: &[(usize, usize, usize)]) -> Vec<Group> {
    sizes.iter().map(|&(m, n, k)| Group { m, n, k }).collect()
}

/// Every backend computes the inputs within the public tolerance, and the same bits again.
pub fn check(inputs: &Inputs, out_dtype: OutDtype) {
    check_at(inputs, out_dtype, |_| Tolerance::of(out_dtype));
}

/// As [`check`], for inputs of which even a correct f32 sum may be off by more than the public tolerance: each element's
/// is widened by as many roundings of `Σ|products|` as its dot product has blocks.
pub fn check_widened(inputs: &Inputs, out_dtype: OutDtype) {
    let step = step(inputs, out_dtype);
    let groups = step.problem().groups();
    let magnitudes: Vec<_> = (0..groups.len()).map(|group| magnitudes(&inputs.weights, &step, group)).collect();
    check_at(inputs, out_dtype, |place| {
        let (sums, at) = (&magnitudes[place.group], place.row * groups[place.group].n + place.column);
        let sums = [sums[0][at], sums.get(1).map_or(0.0, |up| up[at])];
        let roundings = (groups[place.group].k / 16) as f64;
        Tolerance::of(out_dtype).widened(&place.element, sums, roundings)
    });
}

/// Builds a shape's inputs with its own generator and checks them.
pub fn check_shape(shape: &Shape) {
    check(&inputs(shape.input, shape.op, &shape.groups, 0), OutDtype::F16);
}

struct Place {
    group: usize,
    row: usize,
    column: usize,
    element: nvfp4::oracle::Element,
}

fn step<'a>(inputs: &'a Inputs, out_dtype: OutDtype) -> Step<'a> {
    Step::new(&inputs.weights, inputs.tokens.clone(), out_dtype).expect("inputs that belong together")
}

fn check_at(inputs: &Inputs, out_dtype: OutDtype, tolerance: impl Fn(&Place) -> Tolerance + Sync) {
    let step = step(inputs, out_dtype);
    let reference = Reference::new(&inputs.weights, &step);
    for backend in backends() {
        let name = backend.name();
        let mut layer = backend.prepare(&inputs.weights).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut run = || {
            let mut output = Output::new(step.problem());
            backend::run(layer.as_mut(), &step, &mut output).unwrap_or_else(|error| panic!("{name}: {error}"));
            output
        };
        let output = run();
        let found: Comparison = compare_with(&output, &reference, &step, |group, row, column, &element| {
            tolerance(&Place { group, row, column, element })
        });
        if let Some(first) = found.first {
            panic!("{name}: {} of {} elements are wrong, the first {first}", found.mismatches, found.checked);
        }
        assert!(run() == output, "{name}: a rerun gave other bits");
    }
}

/// A matrix of one value and one scale, signs of neighbours along K alternating where asked.
pub fn constant(rows: usize, k: usize, value: u8, alternate: bool, scale: u8, global: f32) -> Matrix<'static> {
    let byte = value | (value | if alternate { 8 } else { 0 }) << 4;
    Matrix::new(rows, k, vec![byte; rows * k / 2], vec![scale; rows * k / 16], global).expect("valid sizes")
}

/// Inputs of given matrices: tokens, gate and up for each group.
pub fn gated(experts: Vec<[Matrix<'static>; 3]>) -> Inputs {
    let (mut tokens, mut weights) = (Vec::new(), Vec::new());
    for [a, gate, up] in experts {
        tokens.push(a);
        weights.push(Expert::Gated { gate, up });
    }
    Inputs { weights: Weights::new(Op::Gated, weights).expect("valid sizes"), tokens }
}
