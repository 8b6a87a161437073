//! What integration tests share: the backends of this machine, and the body that every one of them must pass.

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

/// The backends that this machine can run at full speed; the others are named on stderr with the reason.
pub fn backends() -> Vec<Box<dyn Backend>> {
    let mut backends: Vec<Box<dyn Backend>> = vec![Box::new(Cpu::new())];
    match Cuda::open(0) {
        Ok(gpu) => backends.push(Box::new(gpu)),
        Err(error) if error.is_no_device() => skip("backend cuda", error),
        Err(error) => panic!("backend cuda: {error}"),
    }
    backends
}

/// An emulated GPU for each kernel that there is.
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

/// Says which test cannot run on what here, and why.
pub fn skip(what: &str, why: impl std::fmt::Display) {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    say(&format!("skipped: {test} on {what}: {why}"));
}

/// Says something once, past what the test harness captures.
pub fn say(text: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if SAID.lock().is_ok_and(|mut said| said.insert(text.to_owned())) {
        // A test must not fail because nobody listens.
        let _ = writeln!(std::io::stderr(), "{text}");
    }
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

/// Every backend of [`backends`] and every kernel in the emulator compute the inputs within the public tolerance, and the same bits
/// again.
pub fn check(inputs: &Inputs, out_dtype: TokenDtype) {
    check_at(&all_backends(), inputs, out_dtype, |_| Tolerance::of(out_dtype));
}

/// As [`check`], for inputs on which even a correct f32 sum may be off by more than the public tolerance. Each element's
/// tolerance is widened by one rounding of `Σ|products|` for every block of its dot product.
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

/// Builds a shape's inputs with its own generator and checks them, on the backends that are fast enough for any size.
pub fn check_shape(shape: &Shape) {
    let inputs = inputs(shape.input, shape.op, &shape.groups, 0);
    check_at(&backends(), &inputs, TokenDtype::F16, |_| Tolerance::of(TokenDtype::F16));
}

/// An element of the output.
pub struct Place {
    group: usize,
    row: usize,
    column: usize,
    /// Its exact value.
    pub element: nvfp4::oracle::Element,
}

fn step<'a>(inputs: &'a Inputs, out_dtype: TokenDtype) -> Step<'a> {
    Step::new(&inputs.weights, inputs.tokens.clone(), out_dtype).expect("inputs that belong together")
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
        assert!(rerun == output, "{}: a rerun gave other bits", name(backend.as_ref()));
    }
}

/// A step with the exact reference of its output. Its methods panic with the backend's name if the backend fails.
pub struct Case<'a> {
    weights: &'a Weights<'static>,
    step: Step<'a>,
    reference: Reference,
}

impl<'a> Case<'a> {
    /// The step of these inputs.
    pub fn new(inputs: &'a Inputs, out_dtype: TokenDtype) -> Self {
        let step = step(inputs, out_dtype);
        Self { reference: Reference::new(&inputs.weights, &step), weights: &inputs.weights, step }
    }

    /// A backend's layer of the weights.
    pub fn prepare(&self, backend: &dyn Backend) -> Box<dyn Layer + 'a> {
        backend.prepare(self.weights).unwrap_or_else(|error| panic!("{}: {error}", name(backend)))
    }

    /// What a prepared layer computes.
    pub fn run(&self, backend: &dyn Backend, layer: &mut dyn Layer) -> Output {
        self.try_run(layer).unwrap_or_else(|error| panic!("{}: {error}", name(backend)))
    }

    /// As [`Case::run`].
    ///
    /// # Errors
    /// The backend's.
    pub fn try_run(&self, layer: &mut dyn Layer) -> Result<Output, nvfp4::Error> {
        let mut output = Output::new(self.step.problem());
        backend::run(layer, &self.step, &mut output)?;
        Ok(output)
    }

    /// As [`Case::run`], every element within its tolerance.
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

    /// What is wrong with an output, in words, if anything is.
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

/// A matrix of one value and one scale, signs of neighbors along K alternating where asked.
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
