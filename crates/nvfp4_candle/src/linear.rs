//! The linear layer.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Module, Result, Shape, Tensor, bail};
use candle_nn::VarBuilder;
use nvfp4::backend::{Backend, cpu::Cpu};
use nvfp4::linear::{LinearInputs, LinearOutput, LinearStep, LinearWeights};

use crate::{checkpoint, error, token_bits, token_type, tokens};

/// A linear layer, `x·Wᵀ + bias`, in the tokens' type.
#[derive(Clone, Debug)]
pub struct Nvfp4Linear {
    weights: Arc<LinearWeights<'static>>,
}

impl Nvfp4Linear {
    /// The layer `[out_features, in_features]` below `vb`, for tokens of type `dtype`: `weight`, `weight_scale` and `weight_scale_2`
    /// as ModelOpt names them, and `bias` if there is one.
    ///
    /// # Errors
    /// If a tensor lacks or has another shape or type, a size is no multiple of 16, or a scale is negative or NaN; it names the place.
    pub fn new(in_features: usize, out_features: usize, dtype: DType, vb: VarBuilder<'_>) -> Result<Self> {
        let matrix = checkpoint::matrix(&vb, out_features, in_features)?;
        let bias = if vb.contains_tensor("bias") { Some(vb.get(out_features, "bias")?) } else { None };
        Self::of(matrix, bias.as_ref(), dtype)
    }

    /// The layer of a matrix of numbers, quantised here by ModelOpt's algorithm.
    ///
    /// # Errors
    /// If a size is no multiple of 16, or a number is not finite.
    pub fn quantize(numbers: &Tensor, bias: Option<&Tensor>, dtype: DType) -> Result<Self> {
        let (rows, k) = numbers.dims2()?;
        let numbers = numbers.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        Self::of(nvfp4::quantize::quantize(&numbers, rows, k).map_err(error)?, bias, dtype)
    }

    fn of(matrix: nvfp4::format::Matrix<'static>, bias: Option<&Tensor>, dtype: DType) -> Result<Self> {
        let mut weights = LinearWeights::new(token_type(dtype)?, matrix).map_err(error)?;
        if let Some(bias) = bias {
            weights = weights.with_bias(checkpoint::bias(bias)?).map_err(error)?;
        }
        Ok(Self { weights: Arc::new(weights) })
    }
}

impl Module for Nvfp4Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.contiguous()?.apply_op1_no_bwd(self)
    }
}

impl CustomOp1 for Nvfp4Linear {
    fn name(&self) -> &'static str {
        "nvfp4-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let sizes = self.weights.sizes();
        let mut shape = layout.dims().to_vec();
        let Some(columns) = shape.last_mut().filter(|columns| **columns == sizes.k) else {
            bail!("tokens are {:?}; the layer takes {} numbers a token", layout.dims(), sizes.k)
        };
        *columns = sizes.n;
        let x = token_bits(storage, layout, sizes.dtype)?;
        let inputs = LinearInputs { tokens: x.len() / sizes.k, x: x.into(), stride: sizes.k };
        let step = LinearStep::new(&self.weights, inputs).map_err(error)?;
        let mut output = LinearOutput::new(&step);
        let mut layer = Cpu::new().prepare_linear(&self.weights).map_err(error)?;
        layer.execute(&step, &mut output).map_err(error)?;
        Ok((tokens(output.out, sizes.dtype), shape.into()))
    }
}
