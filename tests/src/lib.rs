//! Code that integration tests share: this machine's backends, and the checks that every backend must pass.

pub mod allocation;
pub mod differential;
pub mod instances;
pub mod linear;
pub mod moe;
pub mod sabotage;

use std::collections::BTreeSet;
use std::io::Write;
use std::sync::Mutex;

use nvfp4::Output;
use nvfp4::backend::emulated::{self, Emulated, Options};
use nvfp4::backend::{self, Backend, Layer, cpu::Cpu, cuda::Cuda};
use nvfp4::compare::{Comparison, Tolerance, compare_with};
use nvfp4::format::Matrix;
use nvfp4::generate::{self, Generator};
use nvfp4::oracle::{Reference, magnitudes};
use nvfp4::problem::{Expert, Group, Op, Step, TokenDtype, Weights};
use nvfp4::shape::Shape;

/// `true` if the environment variable `NVFP4_FULL_TESTS` is set.
///
/// Tests that take minutes then try every instruction, twenty seeds or every built-in shape; otherwise, they try a
/// sample ([`sampled`]).
pub fn is_full() -> bool {
    std::env::var_os("NVFP4_FULL_TESTS").is_some()
}

/// Returns all items if [`is_full`]; otherwise up to `count` of them (at least 2), evenly spaced from the first to the
/// last.
pub fn sampled<T>(items: Vec<T>, count: usize) -> Vec<T> {
    let all = items.len();
    if is_full() || all <= count {
        return items;
    }
    // From the first to the last one; a single one is the last.
    let nth = |index: usize| if count == 1 { all - 1 } else { index * (all - 1) / (count - 1) };
    let mut chosen = (0..count).map(nth).peekable();
    items
        .into_iter()
        .enumerate()
        .filter(|(index, _)| chosen.next_if_eq(index).is_some())
        .map(|(_, item)| item)
        .collect()
}

/// Returns the backends that run at full speed on this machine; names the others on stderr with the reason.
pub fn backends() -> Vec<Box<dyn Backend>> {
    let mut backends: Vec<Box<dyn Backend>> = vec![Box::new(Cpu::new())];
    match Cuda::open(0) {
        Ok(gpu) => backends.push(Box::new(gpu)),
        Err(error) if error.is_no_device() => skip("backend cuda", error),
        Err(error) => panic!("backend cuda: {error}"),
    }
    backends
}

/// Returns one emulated GPU per kernel.
fn emulated_gpus() -> Vec<Emulated> {
    let mut gpus: Vec<Emulated> = Vec::new();
    for arch in emulated::arches() {
        let gpu = Emulated::new(arch, Options::default()).expect("a kernel for every architecture");
        if gpus.iter().all(|other| other.kernel() != gpu.kernel()) {
            gpus.push(gpu);
        }
    }
    gpus
}

fn all_backends() -> Vec<Box<dyn Backend>> {
    let emulated = emulated_gpus().into_iter().map(|gpu| Box::new(gpu) as Box<dyn Backend>);
    backends().into_iter().chain(emulated).collect()
}

/// Reports that the current test cannot run on `what`, with the reason.
pub fn skip(what: &str, why: impl std::fmt::Display) {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    say(&format!("skipped: {test} on {what}: {why}"));
}

/// Prints a line once per process, even if the test harness captures output.
pub fn say(text: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if SAID.lock().is_ok_and(|mut said| said.insert(text.to_owned())) {
        // A closed stderr must not fail a test.
        let _ = writeln!(std::io::stderr(), "{text}");
    }
}

/// Inputs of one step.
pub struct Inputs {
    /// Weights, one expert per group.
    pub weights: Weights<'static>,
    /// Tokens, one matrix per group.
    pub tokens: Vec<Matrix<'static>>,
}

/// Generates inputs of the given sizes.
pub fn inputs(generator: Generator, op: Op, groups: &[Group], seed: u64) -> Inputs {
    Inputs {
        weights: generate::weights(generator, op, groups, seed).expect("valid sizes"),
        tokens: generate::activations(generator, groups, seed).expect("valid sizes"),
    }
}

/// Makes groups from `(M, N, K)`.
pub fn groups(sizes: &[(usize, usize, usize)]) -> Vec<Group> {
    sizes.iter().map(|&(m, n, k)| Group { m, n, k }).collect()
}

/// Checks the inputs on every backend of [`backends`] and on every kernel in the emulator: outputs lie within the
/// public tolerance, and a rerun gives the same bits.
pub fn check(inputs: &Inputs, out_dtype: TokenDtype) {
    check_at(&all_backends(), inputs, out_dtype, |_| Tolerance::of(out_dtype));
}

/// Same as [`check`], for inputs on which even a correct f32 sum may miss the public tolerance. Each element's
/// tolerance is widened by one rounding of `Σ|products|` per block of 16 of its dot product.
pub fn check_widened(inputs: &Inputs, out_dtype: TokenDtype) {
    let step = step(inputs, out_dtype);
    let groups = step.problem().groups();
    let magnitudes: Vec<_> = (0..groups.len()).map(|group| magnitudes(&inputs.weights, &step, group)).collect();
    check_at(&all_backends(), inputs, out_dtype, |place| {
        let (sums, at) = (&magnitudes[place.group], place.row * groups[place.group].n + place.column);
        let sums = [sums[0][at], sums.get(1).map_or(0.0, |up| up[at])];
        let roundings = (groups[place.group].k / 16) as f64;
        Tolerance::of(out_dtype).widened(&place.element, sums, roundings)
    });
}

/// Checks a shape with inputs from its generator, on the backends that are fast enough for any size.
pub fn check_shape(shape: &Shape) {
    let inputs = inputs(shape.input, shape.op, &shape.groups, 0);
    check_at(&backends(), &inputs, TokenDtype::F16, |_| Tolerance::of(TokenDtype::F16));
}

/// Position of an element of the output.
pub struct Place {
    group: usize,
    row: usize,
    column: usize,
    /// Exact value of the element.
    pub element: nvfp4::oracle::Element,
}

fn step<'a>(inputs: &'a Inputs, out_dtype: TokenDtype) -> Step<'a> {
    Step::new(&inputs.weights, inputs.tokens.clone(), out_dtype).expect("inputs that match the weights")
}

fn check_at(
    backends: &[Box<dyn Backend>],
    inputs: &Inputs,
    out_dtype: TokenDtype,
    tolerance: impl Fn(&Place) -> Tolerance + Sync,
) {
    let case = Case::new(inputs, out_dtype);
    for backend in backends {
        let mut layer = case.prepare(backend.as_ref());
        let output = case.verified(backend.as_ref(), layer.as_mut(), &tolerance);
        let rerun = case.run(backend.as_ref(), layer.as_mut());
        assert!(rerun == output, "{}: a rerun gave different bits", name(backend.as_ref()));
    }
}

/// A step with the exact reference of its output. The methods panic with the backend's name if the backend fails.
pub struct Case<'a> {
    weights: &'a Weights<'static>,
    step: Step<'a>,
    reference: Reference,
}

impl<'a> Case<'a> {
    /// Makes the case of these inputs.
    pub fn new(inputs: &'a Inputs, out_dtype: TokenDtype) -> Self {
        let step = step(inputs, out_dtype);
        Self { reference: Reference::new(&inputs.weights, &step), weights: &inputs.weights, step }
    }

    /// Prepares a layer of the weights on a backend.
    pub fn prepare(&self, backend: &dyn Backend) -> Box<dyn Layer + 'a> {
        backend.prepare(self.weights).unwrap_or_else(|error| panic!("{}: {error}", name(backend)))
    }

    /// Runs a prepared layer and returns its output.
    pub fn run(&self, backend: &dyn Backend, layer: &mut dyn Layer) -> Output {
        self.try_run(layer).unwrap_or_else(|error| panic!("{}: {error}", name(backend)))
    }

    /// Same as [`Case::run`], but returns the error.
    ///
    /// # Errors
    /// The backend's error.
    pub fn try_run(&self, layer: &mut dyn Layer) -> Result<Output, nvfp4::Error> {
        let mut output = Output::new(self.step.problem());
        backend::run(layer, &self.step, &mut output)?;
        Ok(output)
    }

    /// Same as [`Case::run`], and checks that every element lies within its tolerance.
    pub fn verified(
        &self,
        backend: &dyn Backend,
        layer: &mut dyn Layer,
        tolerance: impl Fn(&Place) -> Tolerance + Sync,
    ) -> Output {
        let output = self.run(backend, layer);
        if let Some(mismatch) = self.mismatch(&output, tolerance) {
            panic!("{}: {mismatch}", name(backend));
        }
        output
    }

    /// Describes the wrong elements of an output; `None` if every element is right.
    pub fn mismatch(&self, output: &Output, tolerance: impl Fn(&Place) -> Tolerance + Sync) -> Option<String> {
        let found: Comparison = compare_with(output, &self.reference, &self.step, |group, row, column, &element| {
            tolerance(&Place { group, row, column, element })
        });
        let (wrong, checked) = (found.mismatches, found.checked);
        found.first.map(|first| format!("{wrong} of {checked} elements are wrong, the first {first}"))
    }
}

fn name(backend: &dyn Backend) -> String {
    format!("{} ({})", backend.name(), backend.device())
}

/// Makes a matrix with one value and one scale everywhere. With `alternate`, every second value along K is negative.
pub fn constant(rows: usize, k: usize, value: u8, alternate: bool, scale: u8, global: f32) -> Matrix<'static> {
    let byte = value | (value | if alternate { 8 } else { 0 }) << 4;
    Matrix::new(rows, k, vec![byte; rows * k / 2], vec![scale; rows * k / 16], global).expect("valid sizes")
}

/// Makes inputs from given matrices: `[tokens, gate, up]` per group.
pub fn gated(experts: Vec<[Matrix<'static>; 3]>) -> Inputs {
    let (mut tokens, mut weights) = (Vec::new(), Vec::new());
    for [a, gate, up] in experts {
        tokens.push(a);
        weights.push(Expert::Gated { gate, up });
    }
    Inputs { weights: Weights::new(Op::Gated, weights).expect("valid sizes"), tokens }
}
