//! The linear layer on the library's CPU backend, in candle's memory.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape};
use nvfp4::backend::cpu::{Cpu, CpuLinearLayer};
use nvfp4::bias::Bias;
use nvfp4::linear::{LinearInputs, LinearOutput, LinearSizes, LinearWeights};

use super::operator::{NAME, output_shape};
use crate::checkpoint::Projection;
use crate::cpu::{token_bits, tokens};
use crate::error;

/// A layer in host memory, prepared once.
pub struct Linear(CpuLinearLayer<'static>);

impl Linear {
    pub fn new(sizes: LinearSizes, projection: &Projection, bias: Option<Bias<'static>>) -> Result<Self> {
        let weights = LinearWeights::new(sizes.dtype, projection.matrix()?).map_err(error)?;
        let weights = match bias {
            Some(bias) => weights.with_bias(bias).map_err(error)?,
            None => weights,
        };
        Ok(Self(Cpu::new().prepare_linear_layer(&weights).map_err(error)?))
    }
}

impl CustomOp1 for Linear {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let sizes = self.0.sizes();
        let x = token_bits(storage, layout, sizes.dtype)?;
        let inputs = LinearInputs { tokens: x.len() / sizes.k, x: x.into(), stride: sizes.k };
        let step = self.0.step(inputs).map_err(error)?;
        let mut output = LinearOutput::new(&step);
        self.0.execute(&step, &mut output).map_err(error)?;
        Ok((tokens(output.out, sizes.dtype), output_shape(layout.shape(), &sizes)))
    }
}
