//! Linear layers on a GPU: launches on PyTorch's current stream, with PyTorch's memory.

use nvfp4::backend::cuda::{LinearArguments, LinearLauncher, LinearTensor, PackedLinear};
use nvfp4::linear::LinearSizes;
use pyo3::intern;
use pyo3::prelude::*;

use super::operands::{Operands, Raw};
use crate::device::{current_stream, launchers};
use crate::error::exception;
use crate::tensor::Tensor;

/// Queues a call. PyTorch owns the output and the workspace, and keeps them until the stream has passed the call.
pub fn linear(py: Python<'_>, operands: &Operands<'_>, sizes: &LinearSizes, ordinal: u32) -> PyResult<()> {
    let Operands { out, x, weights } = operands;
    let arguments = LinearArguments {
        token_count: x.shape()[0],
        tokens: x.address,
        token_pitch: x.gpu_pitch()?,
        output: out.address,
    };
    let layer = PackedLinear { sizes: *sizes, weights: weights.address };
    // Keeps the workspace alive until the call is queued.
    let made;
    let workspace = match LinearLauncher::workspace_bytes(sizes, arguments.token_count) {
        0 => 0,
        // Made with the weights' `new_empty`, because the weights are bytes on the same device. PyTorch aligns
        // allocations to 512.
        needed => {
            made = weights.object().call_method1(intern!(py, "new_empty"), (needed,))?;
            Tensor::read("workspace", &made)?.address
        }
    };
    let stream = current_stream(py, ordinal)?;
    // SAFETY: PyTorch's streams belong to the primary context. The tensors' sizes, types and device were checked.
    // PyTorch's allocator reuses their memory only for later work on the stream. Packing is complete, because
    // `nvfp4.Linear` waits for it to read its result.
    unsafe { launchers(ordinal)?.linear()?.launch(&layer, &arguments, workspace, stream) }.map_err(exception)?;
    Ok(())
}

/// Queues the packing.
pub fn pack(py: Python<'_>, weights: &Tensor<'_>, sizes: &LinearSizes, raw: &Raw<'_>, ordinal: u32) -> PyResult<()> {
    let tensor = LinearTensor {
        values: raw.values.address,
        scales: raw.scales.address,
        global_scales: &raw.global_scales,
        bias: raw.bias.as_ref(),
        input_scale: raw.input_scale,
    };
    let stream = current_stream(py, ordinal)?;
    // SAFETY: PyTorch's streams belong to the primary context, the tensors' sizes, types and device were checked, and
    // PyTorch's allocator reuses their memory only for later work on the stream.
    unsafe { launchers(ordinal)?.linear()?.pack(sizes, &tensor, weights.address, stream) }.map_err(exception)
}
