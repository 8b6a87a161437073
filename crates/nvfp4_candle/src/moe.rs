//! The experts of an MoE layer.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod operator;

use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::VarBuilder;
use nvfp4::moe::{Activation, MoeSizes};
use nvfp4::problem::TokenFormat;

use self::operator::Expert;
use crate::checkpoint::Projection;
use crate::tokens::{dense, expect_device, expect_dtype, token_type};
use crate::{error, no_layers_on};

/// The experts of a layer. The output is the sum of `weight · (silu(x·gateᵀ) ∘ (x·upᵀ))·downᵀ`, or with another
/// [`Activation`], over each token's experts.
#[derive(Clone)]
pub struct Nvfp4Moe {
    sizes: MoeSizes,
    dtype: DType,
    device: Device,
    weights: Weights,
}

/// A layer's weights in the layout of its device.
#[derive(Clone)]
enum Weights {
    Cpu(Arc<cpu::Moe>),
    #[cfg(feature = "cuda")]
    Cuda(Arc<cuda::Moe>),
}

impl Nvfp4Moe {
    /// Loads the experts below `vb`, on its device, for tokens of type `dtype` with `top_k` experts per token:
    /// `E.gate_proj`, `E.up_proj` and `E.down_proj`, each with `weight`, `weight_scale` and `weight_scale_2` as in
    /// ModelOpt's checkpoints. Gate and up keep separate global scales.
    ///
    /// # Errors
    /// - A tensor is missing or has the wrong shape or type, a size is not a multiple of 16, or a scale is negative or
    ///   NaN. The error names the place.
    /// - The device fails, or has no kernel for the layer.
    pub fn new(
        hidden: usize,
        intermediate: usize,
        experts: usize,
        top_k: usize,
        activation: Activation,
        dtype: DType,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let sizes = MoeSizes {
            hidden,
            intermediate,
            experts,
            named_experts: experts,
            top_k,
            shared_intermediate: None,
            dtype: token_type(dtype)?,
            activation,
            biases: false,
            token_format: TokenFormat::Bits16,
            input_scales: false,
        };
        sizes.check().map_err(|e| error(e).context(vb.prefix()))?;
        let expert = |index: usize| {
            let vb = vb.pp(index);
            let load = |name: &str, rows, k| Projection::load(&vb.pp(name), rows, k);
            let gate = activation.has_gate().then(|| load("gate_proj", intermediate, hidden)).transpose()?;
            let (up, down) = (load("up_proj", intermediate, hidden)?, load("down_proj", hidden, intermediate)?);
            Ok(Expert { gate, up, down })
        };
        let loaded = (0..experts).map(expert).collect::<Result<Vec<_>>>()?;
        let device = vb.device().clone();
        let weights = match &device {
            Device::Cpu => Weights::Cpu(Arc::new(cpu::Moe::new(&sizes, &loaded)?)),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => {
                Weights::Cuda(Arc::new(cuda::Moe::new(gpu, sizes, &loaded).map_err(|e| e.context(vb.prefix()))?))
            }
            other => return Err(no_layers_on(other)),
        };
        Ok(Self { sizes, dtype, device, weights })
    }

    /// Returns the output `[T, H]` for `hidden` `[T, H]`, the experts of each token, `ids` `[T, k]` of type U32, and
    /// their weights, `[T, k]` of type F32. An id without an expert in the layer contributes nothing.
    ///
    /// # Errors
    /// An argument is on another device than the layer, or has the wrong shape or type.
    pub fn forward(&self, hidden: &Tensor, ids: &Tensor, weights: &Tensor) -> Result<Tensor> {
        for (name, argument, dtype) in
            [("tokens", hidden, self.dtype), ("experts", ids, DType::U32), ("weights", weights, DType::F32)]
        {
            expect_device(name, argument, &self.device)?;
            expect_dtype(name, argument, dtype)?;
        }
        let MoeSizes { hidden: columns, top_k, .. } = self.sizes;
        let choices = [hidden.dims().first().copied().unwrap_or(0), top_k];
        if hidden.dims() != [choices[0], columns] || ids.dims() != choices || weights.dims() != choices {
            bail!(
                "tokens {:?}, experts {:?}, weights {:?}; expected [T, {columns}], [T, {top_k}] and [T, {top_k}]",
                hidden.dims(),
                ids.dims(),
                weights.dims(),
            );
        }
        let (hidden, ids, weights) = (dense(hidden)?, ids.contiguous()?, weights.contiguous()?);
        match &self.weights {
            Weights::Cpu(layer) => hidden.apply_op3_no_bwd(&ids, &weights, layer.as_ref()),
            #[cfg(feature = "cuda")]
            Weights::Cuda(layer) => hidden.apply_op3_no_bwd(&ids, &weights, layer.as_ref()),
        }
    }
}

impl fmt::Debug for Nvfp4Moe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sizes, device, .. } = self;
        f.debug_struct("Nvfp4Moe").field("sizes", sizes).field("device", device).finish_non_exhaustive()
    }
}
