//! Operations that backends compute.

use super::{Backend, Layer};
use crate::Error;
use crate::Output;
use crate::linear::{LinearOutput, LinearStep, LinearWeights};
use crate::moe::{MoeOutput, MoeStep, MoeWeights};
use crate::problem::{Step, Weights};

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

/// Groups of products with one matrix or with gate and up ([`problem`](crate::problem)).
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
