//! The experts of an MoE layer.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, bail};
use candle_nn::VarBuilder;
use nvfp4::backend::{Backend, cpu::Cpu};
use nvfp4::moe::{Activation, MoeExpert, MoeInputs, MoeOutput, MoeStep, MoeWeights};

use crate::{checkpoint, error, token_bits, token_type, tokens};

/// The experts of a layer: the sum over a token's experts of `weight · (silu(x·gateᵀ) ∘ (x·upᵀ))·downᵀ`, or of another
/// [`Activation`].
#[derive(Clone, Debug)]
pub struct Nvfp4Moe {
    weights: Arc<MoeWeights<'static>>,
}

impl Nvfp4Moe {
    /// The experts below `vb`, for tokens of type `dtype` that name `top_k` of them: `E.gate_proj`, `E.up_proj` and `E.down_proj`, each
    /// with `weight`, `weight_scale` and `weight_scale_2` as ModelOpt names them. Gate and up keep their own global scales.
    ///
    /// # Errors
    /// If a tensor lacks or has another shape or type, a size is no multiple of 16, or a scale is negative or NaN; it names the place.
    pub fn new(
        hidden: usize,
        intermediate: usize,
        experts: usize,
        top_k: usize,
        activation: Activation,
        dtype: DType,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let expert = |index: usize| {
            let vb = vb.pp(index);
            let up = checkpoint::matrix(&vb.pp("up_proj"), intermediate, hidden)?;
            let down = checkpoint::matrix(&vb.pp("down_proj"), hidden, intermediate)?;
            if !activation.has_gate() {
                return Ok(MoeExpert::ungated(up, down));
            }
            Ok(MoeExpert::gated(checkpoint::matrix(&vb.pp("gate_proj"), intermediate, hidden)?, up, down))
        };
        let experts = (0..experts).map(expert).collect::<Result<Vec<_>>>()?;
        let weights = MoeWeights::with_activation(token_type(dtype)?, top_k, activation, experts).map_err(error)?;
        Ok(Self { weights: Arc::new(weights) })
    }

    /// The output `[T, H]` for `hidden` `[T, H]`, with the experts of each token, `ids` `[T, k]` of type U32, and their weights,
    /// `[T, k]` of type F32.
    ///
    /// # Errors
    /// If a shape or a type is another.
    pub fn forward(&self, hidden: &Tensor, ids: &Tensor, weights: &Tensor) -> Result<Tensor> {
        hidden.contiguous()?.apply_op3_no_bwd(&ids.contiguous()?, &weights.contiguous()?, self)
    }
}

impl CustomOp3 for Nvfp4Moe {
    fn name(&self) -> &'static str {
        "nvfp4-moe"
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
        let sizes = self.weights.sizes();
        let (rows, columns) = hidden_layout.shape().dims2()?;
        let choices = [rows, sizes.top_k];
        if columns != sizes.hidden || ids_layout.dims() != choices || weights_layout.dims() != choices {
            bail!(
                "tokens {:?}, experts {:?} and weights {:?}: expected [T, {}] and twice [T, {}]",
                hidden_layout.dims(),
                ids_layout.dims(),
                weights_layout.dims(),
                sizes.hidden,
                sizes.top_k
            );
        }
        let (ids, weights) = match (ids, weights) {
            (CpuStorage::U32(ids), CpuStorage::F32(weights)) => {
                let (of_ids, of_weights) = (ids_layout.contiguous_offsets(), weights_layout.contiguous_offsets());
                let (Some(i), Some(w)) = (of_ids, of_weights) else { bail!("experts or weights have gaps") };
                (&ids[i.0..i.1], &weights[w.0..w.1])
            }
            _ => bail!("experts must be U32, weights F32"),
        };
        // A number that is no expert of the layer's is refused by the step.
        let ids = ids.iter().map(|&id| i32::try_from(id).unwrap_or(i32::MAX)).collect::<Vec<_>>();
        let inputs = MoeInputs {
            tokens: rows,
            hidden: token_bits(hidden, hidden_layout, sizes.dtype)?.into(),
            stride: columns,
            ids: ids.into(),
            weights: weights.into(),
            ..Default::default()
        };
        let step = MoeStep::new(&self.weights, inputs).map_err(error)?;
        let mut output = MoeOutput::new(&step);
        Cpu::new().prepare_moe(&self.weights).map_err(error)?.execute(&step, &mut output).map_err(error)?;
        Ok((tokens(output.hidden, sizes.dtype), hidden_layout.shape().clone()))
    }
}
