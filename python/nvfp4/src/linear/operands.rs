//! Operands of a call, and of the packing.

use nvfp4::bias::Bias;

use crate::tensor::Tensor;

/// The tensors of a call.
pub struct Operands<'py> {
    pub out: Tensor<'py>,
    pub x: Tensor<'py>,
    pub weights: Tensor<'py>,
}

/// Checked weights of a layer.
pub struct Raw<'py> {
    pub values: Tensor<'py>,
    pub scales: Tensor<'py>,
    /// Number of rows and global scale of each projection.
    pub global_scales: Vec<(usize, f32)>,
    pub bias: Option<Bias<'py>>,
    /// Global scale of NVFP4 tokens. `None`: each token has its own.
    pub input_scale: Option<f32>,
}
