//! Checks MoE layers on every backend that computes them, each stage against the reference.

use gpu_arch::Arch;
use half::{bf16, f16};
use nvfp4::backend::cuda::Cuda;
use nvfp4::backend::emulated::{Emulated, Options, Schedule};
use nvfp4::backend::{Backend, Layer, Moe, cpu::Cpu};
use nvfp4::generate::Generator;
use nvfp4::moe::compare::compare;
use nvfp4::moe::generate::Routing;
use nvfp4::moe::{self, LayerShape, MoeInputs, MoeOutput, MoeStep, MoeWeights};
use nvfp4::problem::{TokenDtype, TokenFormat};

use crate::skip;

/// The token types.
pub const DTYPES: [TokenDtype; 2] = [TokenDtype::F16, TokenDtype::Bf16];

/// Makes a module per architecture with one test per function. A function takes the module's name, or a type made of
/// it ([`On`]).
#[macro_export]
macro_rules! on_architectures {
    ($($arch:ident)*; $tests:tt) => {
        $(mod $arch { $crate::on_architectures!(@tests $arch $tests); })*
    };
    (@tests $arch:ident { $($test:ident)* }) => {
        $(#[test] fn $test() { super::$test(stringify!($arch).into()) })*
    };
}

/// Returns a small emulated GPU of an architecture: its CTAs compute many tiles.
pub fn emulated(arch: &str, schedule: Schedule) -> Emulated {
    emulated_of(arch, schedule, 3)
}

/// Returns an emulated GPU with `sms` SMs.
pub fn emulated_of(arch: &str, schedule: Schedule, sms: u32) -> Emulated {
    let options = Options { schedule, sms: Some(sms), ..Options::default() };
    Emulated::new(arch, options).expect("an architecture with a kernel")
}

/// Returns a small emulated Hopper GPU.
pub fn hopper(schedule: Schedule) -> Emulated {
    emulated("sm_90a", schedule)
}

/// Returns an emulated Hopper GPU with `sms` SMs.
pub fn hopper_of(schedule: Schedule, sms: u32) -> Emulated {
    emulated_of("sm_90a", schedule, sms)
}

/// Returns the CPU, the emulated GPU of an architecture, and this machine's GPU if it runs that architecture's code.
pub fn backends(arch: &str) -> Vec<Box<dyn Backend>> {
    let mut backends: Vec<Box<dyn Backend>> = vec![Box::new(Cpu::new()), Box::new(emulated(arch, Schedule::Fair))];
    let runs_on = |capability| arch.parse::<Arch>().expect("an architecture's name").runs_on(capability);
    match Cuda::open(0) {
        Ok(gpu) if runs_on(gpu.info().capability) => backends.push(Box::new(gpu)),
        Ok(gpu) => skip("backend cuda", format!("{} does not run code for {arch}", gpu.device())),
        Err(error) if error.is_no_device() => skip("backend cuda", error),
        Err(error) => panic!("backend cuda: {error}"),
    }
    backends
}

/// Returns the shape of a layer with these sizes.
pub fn shape(hidden: usize, intermediate: usize, experts: usize, top_k: usize) -> LayerShape {
    let text = format!(
        r#"{{"hidden": {hidden}, "intermediate": {intermediate}, "experts": {experts}, "top_k": {top_k}, "tokens": 0}}"#
    );
    moe::shape::parse(&text).expect("sizes of a layer").remove(0)
}

/// Generates the weights of a layer.
pub fn weights(shape: &LayerShape, dtype: TokenDtype) -> MoeWeights<'static> {
    moe::generate::weights(shape, Generator::Gaussian, dtype, 1, &|| ()).expect("valid sizes")
}

/// An architecture with the format in which it multiplies a layer's tokens.
#[derive(Clone, Copy)]
pub struct On {
    /// Name of the architecture.
    pub arch: &'static str,
    /// Format in which tokens are multiplied.
    pub tokens: TokenFormat,
    /// Whether the experts have input scales.
    pub input_scales: bool,
}

impl From<&'static str> for On {
    /// Parses a name: `sm_120f` stands for the default token format of that architecture, `sm_120f_nvfp4` for NVFP4,
    /// and `sm_120f_calibrated` for NVFP4 with input scales.
    fn from(name: &'static str) -> Self {
        let of_nvfp4 = |arch, input_scales| Self { arch, tokens: TokenFormat::Nvfp4, input_scales };
        if let Some(arch) = name.strip_suffix("_nvfp4") {
            of_nvfp4(arch, false)
        } else if let Some(arch) = name.strip_suffix("_calibrated") {
            of_nvfp4(arch, true)
        } else {
            let tokens = emulated(name, Schedule::Fair).moe_token_format();
            Self { arch: name, tokens, input_scales: false }
        }
    }
}

impl On {
    /// Same as [`weights`], for tokens in this format.
    pub fn weights(self, shape: &LayerShape, dtype: TokenDtype) -> MoeWeights<'static> {
        let shape = shape.clone().with_token_format(self.tokens);
        weights(&if self.input_scales { shape.with_input_scales() } else { shape }, dtype)
    }
}

/// Generates tokens for the layer.
pub fn inputs(shape: &LayerShape, dtype: TokenDtype, tokens: usize) -> MoeInputs<'static> {
    moe::generate::inputs(shape, Generator::Gaussian, Routing::Uniform, dtype, tokens, 2).expect("valid sizes")
}

/// Makes a step of the layer.
pub fn step<'i>(weights: &MoeWeights<'_>, inputs: MoeInputs<'i>) -> MoeStep<'i> {
    MoeStep::new(weights, inputs).expect("inputs of the layer")
}

/// Runs a prepared layer and returns the output with every stage.
pub fn run(layer: &mut dyn Layer<Moe>, step: &MoeStep<'_>) -> Result<MoeOutput, nvfp4::Error> {
    let mut output = MoeOutput::with_stages(step);
    layer.execute(step, &mut output)?;
    Ok(output)
}

/// Same as [`run`], and checks every element of every stage.
pub fn verified(layer: &mut dyn Layer<Moe>, weights: &MoeWeights<'_>, step: &MoeStep<'_>) -> MoeOutput {
    let output = run(layer, step).unwrap_or_else(|error| panic!("{}: {error}", layer.kernel()));
    let found = compare(weights, step, &output);
    if let Some(first) = found.first() {
        panic!(
            "{}: {} of {} elements are wrong, the first {first}",
            layer.kernel(),
            found.mismatches(),
            found.checked()
        );
    }
    output
}

/// Checks a step on every backend: the output is right, and a rerun gives the same bits.
pub fn check(arch: &str, weights: &MoeWeights<'_>, step: &MoeStep<'_>) {
    for backend in backends(arch) {
        let mut layer = backend.prepare_moe(weights).unwrap_or_else(|error| panic!("{}: {error}", backend.name()));
        let output = verified(layer.as_mut(), weights, step);
        // As in production, no intermediate results are kept for a comparison.
        let mut again = MoeOutput::new(step);
        layer.execute(step, &mut again).expect("it ran before");
        assert!(again.hidden == output.hidden, "{}: a rerun gave different bits", backend.name());
    }
}

/// Rounds a number to a token type and returns its bits.
pub fn bits(dtype: TokenDtype, number: f32) -> u16 {
    match dtype {
        TokenDtype::F16 => f16::from_f32(number).to_bits(),
        TokenDtype::Bf16 => bf16::from_f32(number).to_bits(),
    }
}
