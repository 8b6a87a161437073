//! Operands of a call, and of the packing.

use nvfp4::bias::Bias;

use crate::tensor::Tensor;

/// The tensors of a call.
pub struct Operands<'py> {
    pub out: Tensor<'py>,
    pub hidden_states: Tensor<'py>,
    pub topk_ids: Tensor<'py>,
    pub topk_weights: Tensor<'py>,
    pub weights: Tensor<'py>,
    pub expert_map: Option<Tensor<'py>>,
    pub shared_weights: Option<Tensor<'py>>,
    pub weights_on_input: bool,
    pub workspace: Option<Tensor<'py>>,
}

/// Gate, up and down; `None` for a projection that is not given.
pub type Projections<T> = [Option<T>; 3];

/// A checked projection.
pub struct RawProjection<'py> {
    pub values: Tensor<'py>,
    pub scales: Tensor<'py>,
    pub global_scales: Vec<f32>,
    pub bias: Option<Bias<'py>>,
}

impl RawProjection<'_> {
    /// Bytes from one expert to the next, of values and of scales.
    pub fn strides(&self) -> [usize; 2] {
        [&self.values, &self.scales].map(|tensor| match tensor.shape() {
            [1, rows, columns] => rows * columns,
            _ => tensor.stride(0) as usize,
        })
    }
}
