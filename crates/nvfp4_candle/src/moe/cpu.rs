//! The MoE layer on the library's CPU backend, in candle's memory.

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape};
use nvfp4::backend::cpu::{Cpu, CpuMoeLayer};
use nvfp4::moe::{MoeExpert, MoeInputs, MoeOutput, MoeSizes, MoeWeights};

use super::operator::{Expert, NAME};
use crate::cpu::{elements, token_bits, tokens};
use crate::error;

/// A layer in host memory, prepared once.
pub struct Moe(CpuMoeLayer<'static>);

impl Moe {
    pub fn new(sizes: &MoeSizes, experts: &[Expert]) -> Result<Self> {
        let expert = |Expert { gate, up, down }: &Expert| {
            let (up, down) = (up.matrix()?, down.matrix()?);
            Ok(match gate {
                Some(gate) => MoeExpert::gated(gate.matrix()?, up, down),
                None => MoeExpert::ungated(up, down),
            })
        };
        let experts = experts.iter().map(expert).collect::<Result<Vec<_>>>()?;
        let weights = MoeWeights::with_activation(sizes.dtype, sizes.top_k, sizes.activation, experts);
        Ok(Self(Cpu::new().prepare_moe_layer(&weights.map_err(error)?).map_err(error)?))
    }
}

impl CustomOp3 for Moe {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        hidden: &CpuStorage,
        hidden_layout: &Layout,
        ids: &CpuStorage,
        ids_layout: &Layout,
        weights: &CpuStorage,
        weights_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let sizes = self.0.sizes();
        // An id beyond i32 has no expert in the layer, and neither has `i32::MAX`.
        let ids = elements::<u32>(ids, ids_layout)?;
        let ids = ids.iter().map(|&id| i32::try_from(id).unwrap_or(i32::MAX)).collect::<Vec<_>>();
        let inputs = MoeInputs {
            tokens: hidden_layout.dims()[0],
            hidden: token_bits(hidden, hidden_layout, sizes.dtype)?.into(),
            stride: sizes.hidden,
            ids: ids.into(),
            weights: elements::<f32>(weights, weights_layout)?.into(),
            ..Default::default()
        };
        let step = self.0.step(inputs).map_err(error)?;
        let mut output = MoeOutput::new(&step);
        self.0.execute(&step, &mut output).map_err(error)?;
        Ok((tokens(output.hidden, sizes.dtype), hidden_layout.shape().clone()))
    }
}
