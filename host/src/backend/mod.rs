//! Devices that run steps. A backend receives checked weights and steps and returns outputs. It decides nothing about
//! shapes.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "emulated")]
pub mod emulated;

use std::time::Duration;

use crate::Error;
use crate::Output;
use crate::linear::{LinearOutput, LinearStep, LinearWeights};
use crate::moe::{MoeOutput, MoeStep, MoeWeights};
use crate::plan::roofline::Peaks;
use crate::problem::{Step, TokenFormat, Weights};
use crate::router::{Logits, Router, Routes};

/// A device that can run steps.
pub trait Backend {
    /// Name on the command line: `cpu`, `cuda` or `emulated`.
    fn name(&self) -> &'static str;

    /// Name of the device, for people.
    fn device(&self) -> String;

    /// Peak rates of the device, if they are known.
    fn peaks(&self) -> Option<Peaks> {
        None
    }

    /// Compute capability and number of SMs of a real or emulated GPU, from which the plan chooses instances.
    fn gpu(&self) -> Option<((u32, u32), u32)> {
        None
    }

    /// Predicted time of the last step on a GPU, if it was predicted.
    #[cfg(feature = "emulated")]
    fn prediction(&self) -> Option<emulated::clock::Prediction> {
        None
    }

    /// Copies or packs the weights for the kernel, once for many steps. The caller may drop the weights afterwards, but
    /// must keep the bytes that their matrices borrow.
    ///
    /// # Errors
    /// If the device fails or is out of memory.
    fn prepare<'w>(&self, weights: &Weights<'w>) -> Result<Box<dyn Layer + 'w>, Error>;

    /// Like [`Backend::prepare`], for a whole MoE layer.
    ///
    /// # Errors
    /// If the device fails or is out of memory, or the backend computes no such layer.
    fn prepare_moe<'w>(&self, _: &MoeWeights<'w>) -> Result<Box<dyn Layer<Moe> + 'w>, Error> {
        Err(Error::NotComputed(format!("{} computes no MoE layers on {}; use the CPU", self.name(), self.device())))
    }

    /// Default token format of MoE layers: 16-bit, or NVFP4 on tensor cores that multiply NVFP4.
    fn moe_token_format(&self) -> TokenFormat {
        TokenFormat::Bits16
    }

    /// Like [`Backend::prepare`], for a linear layer.
    ///
    /// # Errors
    /// If the device fails or is out of memory, or the backend computes no such layer.
    fn prepare_linear<'w>(&self, _: &LinearWeights<'w>) -> Result<Box<dyn Layer<Linear> + 'w>, Error> {
        Err(Error::NotComputed(format!("{} computes no linear layers on {}; use the CPU", self.name(), self.device())))
    }

    /// Returns the experts of each token and their weights, from logits in host memory.
    ///
    /// # Errors
    /// If the number of logits is not a multiple of the router's number of experts, the router needs token ids, or the
    /// device fails.
    fn route(&self, router: &Router, logits: &Logits<'_>) -> Result<Routes, Error> {
        self.route_with_ids(router, logits, &[])
    }

    /// Same as [`Self::route`], with the id of each token for a router with a table ([`Rule::table`](crate::router::Rule)),
    /// and without ids for other routers.
    ///
    /// # Errors
    /// If the number of logits or of ids does not fit, or the device fails.
    fn route_with_ids(&self, router: &Router, logits: &Logits<'_>, token_ids: &[i32]) -> Result<Routes, Error>;
}

/// Prepared weights of an operation: of grouped GEMMs, of an MoE layer ([`Moe`]) or of a linear layer ([`Linear`]).
///
/// ```
/// use nvfp4::backend::{Backend, cpu::Cpu};
/// use nvfp4::linear::{LinearInputs, LinearOutput, LinearStep, LinearWeights, compare::compare};
/// use nvfp4::problem::TokenDtype;
/// use nvfp4::quantize::quantize;
///
/// let numbers: Vec<f32> = (0..32 * 64).map(|i| (i % 13) as f32 / 50.0 - 0.1).collect();
/// let weights = LinearWeights::new(TokenDtype::Bf16, quantize(&numbers, 32, 64)?)?;
/// let mut layer = Cpu::new().prepare_linear(&weights)?;
/// let x = vec![0x3F80; 3 * 64]; // three tokens of ones, as bits of bf16
/// let step = LinearStep::new(&weights, LinearInputs { tokens: 3, x: x.into(), stride: 64 })?;
/// let mut output = LinearOutput::new(&step);
/// layer.execute(&step, &mut output)?;
/// assert!(compare(&weights, &step, &output).mismatches == 0);
/// # Ok::<_, nvfp4::Error>(())
/// ```
pub trait Layer<O: Operation = Grouped> {
    /// Name of the kernel that the next step uses.
    fn kernel(&self) -> &str;

    /// Computes a step from host memory and writes all of `output`, including its stages if it has them. Returns the time
    /// of the kernels without transfers. A layer of grouped GEMMs allocates nothing if an earlier step was at least as
    /// large. The emulator always allocates, so that it finds kernels that read data of the previous step.
    ///
    /// # Errors
    /// If the step was made for other weights, or the device fails.
    fn execute(&mut self, step: &O::Step<'_>, output: &mut O::Output) -> Result<Duration, Error>;

    /// Number of launches of the last step, if the backend launches kernels. A graph counts as one launch.
    fn launches(&self) -> Option<usize> {
        None
    }

    /// Host time to queue the launches of the last step, if it was measured.
    fn host_time(&self) -> Option<Duration> {
        None
    }

    /// Counters of all launches of the last step, if the kernels were emulated. Then the step's time is the emulator's
    /// time, and does not predict the time on a device.
    #[cfg(feature = "emulated")]
    fn counters(&self) -> Option<&ptx_emulator::Report> {
        None
    }
}

/// An operation: the types of its weights, steps and outputs. A backend computes it with a [`Layer`].
pub trait Operation: Sized + 'static {
    /// Checked weights of a layer.
    type Weights<'w>;
    /// Checked inputs of one forward pass.
    type Step<'s>;
    /// Output of one forward pass.
    type Output;

    /// Prepares weights on a backend.
    ///
    /// # Errors
    /// If the device fails or is out of memory, or the backend does not compute the operation.
    fn prepare<'w>(backend: &dyn Backend, weights: &Self::Weights<'w>) -> Result<Box<dyn Layer<Self> + 'w>, Error>;

    /// Creates a poisoned output for a step.
    fn output(step: &Self::Step<'_>) -> Self::Output;

    /// Fills an output with NaN, so that elements that a kernel does not write are found.
    fn poison(output: &mut Self::Output);
}

/// Grouped GEMMs: each expert has one matrix, or gate and up ([`problem`](crate::problem)).
#[derive(Clone, Copy, Debug)]
pub struct Grouped;

/// MoE layers ([`moe`](crate::moe)).
#[derive(Clone, Copy, Debug)]
pub struct Moe;

/// Linear layers ([`linear`](crate::linear)).
#[derive(Clone, Copy, Debug)]
pub struct Linear;

impl Operation for Grouped {
    type Weights<'w> = Weights<'w>;
    type Step<'s> = Step<'s>;
    type Output = Output;

    fn prepare<'w>(backend: &dyn Backend, weights: &Self::Weights<'w>) -> Result<Box<dyn Layer<Self> + 'w>, Error> {
        backend.prepare(weights)
    }

    fn output(step: &Step<'_>) -> Output {
        Output::new(step.problem())
    }

    fn poison(output: &mut Output) {
        output.poison();
    }
}

impl Operation for Moe {
    type Weights<'w> = MoeWeights<'w>;
    type Step<'s> = MoeStep<'s>;
    type Output = MoeOutput;

    fn prepare<'w>(backend: &dyn Backend, weights: &Self::Weights<'w>) -> Result<Box<dyn Layer<Self> + 'w>, Error> {
        backend.prepare_moe(weights)
    }

    fn output(step: &MoeStep<'_>) -> MoeOutput {
        MoeOutput::new(step)
    }

    fn poison(output: &mut MoeOutput) {
        output.poison();
    }
}

impl Operation for Linear {
    type Weights<'w> = LinearWeights<'w>;
    type Step<'s> = LinearStep<'s>;
    type Output = LinearOutput;

    fn prepare<'w>(backend: &dyn Backend, weights: &Self::Weights<'w>) -> Result<Box<dyn Layer<Self> + 'w>, Error> {
        backend.prepare_linear(weights)
    }

    fn output(step: &LinearStep<'_>) -> LinearOutput {
        LinearOutput::new(step)
    }

    fn poison(output: &mut LinearOutput) {
        output.poison();
    }
}

/// Fills `output` with NaN, then computes a step into it. Use this for a step whose output will be checked.
///
/// # Errors
/// The errors of [`Layer::execute`].
pub fn run<O: Operation>(
    layer: &mut dyn Layer<O>,
    step: &O::Step<'_>,
    output: &mut O::Output,
) -> Result<Duration, Error> {
    O::poison(output);
    layer.execute(step, output)
}
