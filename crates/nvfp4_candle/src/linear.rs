//! The linear layer.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod operator;

use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Device, Module, Result, Tensor, bail};
use candle_nn::VarBuilder;
use nvfp4::linear::LinearSizes;
use nvfp4::problem::TokenFormat;

use crate::checkpoint::{self, Projection};
use crate::tokens::{dense, expect_device, expect_dtype, token_type};
use crate::{error, no_layers_on};

/// A linear layer, `x·Wᵀ + bias`, in the token type.
#[derive(Clone)]
pub struct Nvfp4Linear {
    sizes: LinearSizes,
    dtype: DType,
    device: Device,
    weights: Weights,
}

/// A layer's weights in the layout of its device.
#[derive(Clone)]
enum Weights {
    Cpu(Arc<cpu::Linear>),
    #[cfg(feature = "cuda")]
    Cuda(Arc<cuda::Linear>),
}

impl Nvfp4Linear {
    /// Loads the layer `[out_features, in_features]` below `vb`, on its device, for tokens of type `dtype`: `weight`,
    /// `weight_scale` and `weight_scale_2` as in ModelOpt's checkpoints, and `bias` if there is one.
    ///
    /// # Errors
    /// - A tensor is missing or has the wrong shape or type, a size is not a multiple of 16, or a scale is negative or
    ///   NaN. The error names the place.
    /// - The device fails, or has no kernel for the layer.
    pub fn new(in_features: usize, out_features: usize, dtype: DType, vb: VarBuilder<'_>) -> Result<Self> {
        let projection = Projection::load(&vb, out_features, in_features)?;
        let bias = if vb.contains_tensor("bias") { Some(vb.get(out_features, "bias")?) } else { None };
        Self::of(&projection, bias.as_ref(), dtype)
    }

    /// Quantizes a matrix with ModelOpt's algorithm and makes a layer of it, on the device of the numbers.
    ///
    /// # Errors
    /// - A size is not a multiple of 16, or a number is not finite.
    /// - The device fails, or has no kernel for the layer.
    pub fn quantize(numbers: &Tensor, bias: Option<&Tensor>, dtype: DType) -> Result<Self> {
        Self::of(&Projection::quantize(numbers)?, bias, dtype)
    }

    fn of(projection: &Projection, bias: Option<&Tensor>, dtype: DType) -> Result<Self> {
        let ((n, half), device) = (projection.values.dims2()?, projection.values.device().clone());
        let sizes = LinearSizes {
            n,
            k: 2 * half,
            dtype: token_type(dtype)?,
            bias: bias.is_some(),
            token_format: TokenFormat::Bits16,
        };
        sizes.check().map_err(error)?;
        let bias = bias.map(checkpoint::bias).transpose()?;
        let weights = match &device {
            Device::Cpu => Weights::Cpu(Arc::new(cpu::Linear::new(sizes, projection, bias)?)),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Weights::Cuda(Arc::new(cuda::Linear::new(gpu, sizes, projection, bias.as_ref())?)),
            other => return Err(no_layers_on(other)),
        };
        Ok(Self { sizes, dtype, device, weights })
    }
}

impl Module for Nvfp4Linear {
    /// # Errors
    /// The tokens are on another device than the layer, or have the wrong type or last dimension.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        expect_device("tokens", x, &self.device)?;
        expect_dtype("tokens", x, self.dtype)?;
        if x.dims().last() != Some(&self.sizes.k) {
            bail!("tokens are {:?}; expected {} numbers per token", x.dims(), self.sizes.k);
        }
        let x = dense(x)?;
        match &self.weights {
            Weights::Cpu(layer) => x.apply_op1_no_bwd(layer.as_ref()),
            #[cfg(feature = "cuda")]
            Weights::Cuda(layer) => x.apply_op1_no_bwd(layer.as_ref()),
        }
    }
}

impl fmt::Debug for Nvfp4Linear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sizes, device, .. } = self;
        f.debug_struct("Nvfp4Linear").field("sizes", sizes).field("device", device).finish_non_exhaustive()
    }
}
