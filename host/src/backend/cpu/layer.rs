//! Prepared MoE and linear layers, independent of the kernel that computes them.

use std::time::Duration;

use crate::Error;
use crate::backend::{Layer, Linear, Moe};
use crate::linear::{LinearInputs, LinearOutput, LinearSizes, LinearStep};
use crate::moe::{MoeInputs, MoeOutput, MoeSizes, MoeStep};

/// Computes steps of an MoE layer.
pub(super) trait MoeCompute: Send + Sync {
    /// Computes a step that fits the layer into an output that fits the step. Returns the elapsed time.
    fn compute(&self, step: &MoeStep<'_>, output: &mut MoeOutput) -> Duration;
}

/// Computes steps of a linear layer.
pub(super) trait LinearCompute: Send + Sync {
    /// Computes a step that fits the layer into an output that fits the step. Returns the elapsed time.
    fn compute(&self, step: &LinearStep<'_>, output: &mut LinearOutput) -> Duration;
}

/// Prepared weights of an MoE layer. Several threads may execute steps at once.
///
/// `'w` is the lifetime of the bytes that the matrices of the weights borrow.
pub struct CpuMoeLayer<'w> {
    pub(super) kernel: &'static str,
    pub(super) sizes: MoeSizes,
    pub(super) expert_map: Option<Box<[i32]>>,
    pub(super) compute: Box<dyn MoeCompute + 'w>,
}

impl CpuMoeLayer<'_> {
    /// The layer's sizes.
    pub fn sizes(&self) -> MoeSizes {
        self.sizes
    }

    /// Makes a step of this layer.
    ///
    /// # Errors
    /// The errors of [`MoeStep::new`].
    pub fn step<'a>(&self, inputs: MoeInputs<'a>) -> Result<MoeStep<'a>, Error> {
        MoeStep::of_sizes(self.sizes, self.expert_map.as_deref(), inputs)
    }

    /// Computes a step into `output`, like [`Layer::execute`]. The step may have another top-k and another expert
    /// map than the layer, since the weights depend on neither.
    ///
    /// # Errors
    /// The errors of [`Layer::execute`].
    pub fn execute(&self, step: &MoeStep<'_>, output: &mut MoeOutput) -> Result<Duration, Error> {
        let MoeSizes { top_k, named_experts, .. } = step.sizes();
        step.check_fits(MoeSizes { top_k, named_experts, ..self.sizes })?;
        output.check_fits(step)?;
        Ok(self.compute.compute(step, output))
    }
}

impl Layer<Moe> for CpuMoeLayer<'_> {
    fn kernel(&self) -> &str {
        self.kernel
    }

    fn execute(&mut self, step: &MoeStep<'_>, output: &mut MoeOutput) -> Result<Duration, Error> {
        step.check_fits(self.sizes)?;
        Self::execute(self, step, output)
    }
}

/// Prepared weights of a linear layer. Several threads may execute steps at once.
///
/// `'w` is the lifetime of the bytes that the matrix of the weights borrows.
pub struct CpuLinearLayer<'w> {
    pub(super) kernel: &'static str,
    pub(super) sizes: LinearSizes,
    pub(super) compute: Box<dyn LinearCompute + 'w>,
}

impl CpuLinearLayer<'_> {
    /// The layer's sizes.
    pub fn sizes(&self) -> LinearSizes {
        self.sizes
    }

    /// Makes a step of this layer.
    ///
    /// # Errors
    /// The errors of [`LinearStep::new`].
    pub fn step<'a>(&self, inputs: LinearInputs<'a>) -> Result<LinearStep<'a>, Error> {
        LinearStep::of_sizes(self.sizes, inputs)
    }

    /// Computes a step into `output`, like [`Layer::execute`].
    ///
    /// # Errors
    /// The errors of [`Layer::execute`].
    pub fn execute(&self, step: &LinearStep<'_>, output: &mut LinearOutput) -> Result<Duration, Error> {
        step.check_fits(self.sizes)?;
        output.check_fits(step)?;
        Ok(self.compute.compute(step, output))
    }
}

impl Layer<Linear> for CpuLinearLayer<'_> {
    fn kernel(&self) -> &str {
        self.kernel
    }

    fn execute(&mut self, step: &LinearStep<'_>, output: &mut LinearOutput) -> Result<Duration, Error> {
        Self::execute(self, step, output)
    }
}
