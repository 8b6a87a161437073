//! MoE layers on a GPU: launches on PyTorch's current stream, with PyTorch's memory.

use nvfp4::backend::cuda::{MoeArguments, MoeTensor, MoeTensors, PackedMoe};
use nvfp4::fp4::InputScales;
use nvfp4::kernels::moe::workspace_bytes;
use nvfp4::moe::MoeSizes;
use pyo3::intern;
use pyo3::prelude::*;

use super::operands::{Operands, Projections, RawProjection};
use crate::device::{current_stream, launchers};
use crate::error::exception;
use crate::tensor::Tensor;

/// Alignment of the workspace, in bytes.
const WORKSPACE_ALIGNMENT: u64 = 256;

/// Queues a call. PyTorch owns the output and the workspace, and keeps them until the stream has passed the call.
pub fn moe(py: Python<'_>, operands: &Operands<'_>, sizes: &MoeSizes, ordinal: u32) -> PyResult<()> {
    let launcher = launchers(ordinal)?.moe()?;
    let Operands { out, hidden_states, topk_ids, topk_weights, .. } = operands;
    let token_count = hidden_states.shape()[0];
    let needed = workspace_bytes(sizes, token_count);
    let made;
    let workspace = match &operands.workspace {
        Some(workspace) if workspace.len() < needed => {
            return Err(workspace.invalid(format_args!("expected at least {needed} bytes, got {}", workspace.len())));
        }
        Some(workspace) => workspace,
        None => {
            // Made with the weights' `new_empty`, because the weights are bytes on the same device.
            made = operands.weights.object().call_method1(intern!(py, "new_empty"), (needed,))?;
            &Tensor::read("workspace", &made)?
        }
    };
    if !workspace.address.is_multiple_of(WORKSPACE_ALIGNMENT) {
        let address = workspace.address;
        return Err(workspace.invalid(format_args!("address {address:#x} is not a multiple of {WORKSPACE_ALIGNMENT}")));
    }
    let address = |tensor: &Option<Tensor<'_>>| tensor.as_ref().map_or(0, |tensor| tensor.address);
    let arguments = MoeArguments {
        token_count,
        tokens: hidden_states.address,
        token_pitch: hidden_states.gpu_pitch()?,
        topk_ids: topk_ids.address,
        topk_weights: topk_weights.address,
        weights_on_input: operands.weights_on_input,
        shared_weights: address(&operands.shared_weights),
        output: out.address,
        output_pitch: out.gpu_pitch()?,
    };
    let layer =
        PackedMoe { sizes: *sizes, weights: operands.weights.address, expert_map: address(&operands.expert_map) };
    let stream = current_stream(py, ordinal)?;
    // SAFETY: PyTorch's streams belong to the primary context. The tensors' sizes, types and device were checked.
    // PyTorch's allocator reuses their memory only for later work on the stream.
    unsafe { launcher.launch(&layer, &arguments, workspace.address, stream) }.map_err(exception)?;
    Ok(())
}

/// Queues the packing.
pub fn pack(
    py: Python<'_>,
    weights: &Tensor<'_>,
    sizes: &MoeSizes,
    routed: &Projections<RawProjection<'_>>,
    shared: Option<&Projections<RawProjection<'_>>>,
    input_scales: &[InputScales],
    ordinal: u32,
) -> PyResult<()> {
    let launcher = launchers(ordinal)?.moe()?;
    let (of_experts, of_shared) = input_scales.split_at(input_scales.len().min(sizes.experts));
    let (routed, shared) = (tensors(routed, of_experts), shared.map(|shared| tensors(shared, of_shared)));
    let stream = current_stream(py, ordinal)?;
    // SAFETY: PyTorch's streams belong to the primary context, the tensors' sizes, types and device were checked, and
    // PyTorch's allocator reuses their memory only for later work on the stream.
    unsafe { launcher.pack(sizes, &routed, shared.as_ref(), weights.address, stream) }.map_err(exception)
}

fn tensors<'a>(projections: &'a Projections<RawProjection<'_>>, input_scales: &'a [InputScales]) -> MoeTensors<'a> {
    let tensor = |index: usize| {
        let raw = projections[index].as_ref()?;
        let [values_stride, scales_stride] = raw.strides();
        Some(MoeTensor {
            values: raw.values.address,
            values_stride,
            scales: raw.scales.address,
            scales_stride,
            global_scales: &raw.global_scales,
            bias: raw.bias.as_ref(),
        })
    };
    let [up, down] = [1, 2].map(|index| tensor(index).expect("every layer has an up and a down projection"));
    MoeTensors { gate: tensor(0), up, down, input_scales }
}
