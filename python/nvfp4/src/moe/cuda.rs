//! On a GPU: launches on PyTorch's current stream, with PyTorch's memory.

use nvfp4::backend::cuda::{MoeArguments, MoeTensor, MoeTensors, PackedMoe};
use nvfp4::kernels::moe::workspace_bytes;
use nvfp4::moe::MoeSizes;
use pyo3::intern;
use pyo3::prelude::*;

use super::{Operands, RawProjection};
use crate::device::{current_stream, launcher};
use crate::error::exception;
use crate::tensor::Tensor;

/// What tokens and their rows are aligned to on a GPU, in bytes: kernels read so many at once.
const ALIGNMENT: usize = 16;

/// As [`ALIGNMENT`], of the workspace.
const WORKSPACE_ALIGNMENT: u64 = 256;

/// Queues a call. The output and the workspace are PyTorch's, which keeps them until the stream has come past it.
pub fn moe(py: Python<'_>, operands: &Operands<'_>, sizes: &MoeSizes, ordinal: u32) -> PyResult<()> {
    let launcher = launcher(ordinal)?;
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
            // Of the layer's weights, since those are bytes on the same device.
            made = operands.weights.object().call_method1(intern!(py, "new_empty"), (needed,))?;
            &Tensor::read("workspace", &made)?
        }
    };
    let pitch = |tensor: &Tensor<'_>| {
        let pitch = size_of::<u16>() * tensor.row_stride()?;
        if !pitch.is_multiple_of(ALIGNMENT) || !tensor.address.is_multiple_of(ALIGNMENT as u64) {
            return Err(tensor.invalid(format_args!(
                "lies at {:#x}, its rows {pitch} bytes apart; expected multiples of {ALIGNMENT}: call .contiguous()",
                tensor.address
            )));
        }
        Ok(pitch)
    };
    if !workspace.address.is_multiple_of(WORKSPACE_ALIGNMENT) {
        let address = workspace.address;
        return Err(workspace.invalid(format_args!("lies at {address:#x}, not at a multiple of {WORKSPACE_ALIGNMENT}")));
    }
    let address = |tensor: &Option<Tensor<'_>>| tensor.as_ref().map_or(0, |tensor| tensor.address);
    let arguments = MoeArguments {
        token_count,
        tokens: hidden_states.address,
        token_pitch: pitch(hidden_states)?,
        topk_ids: topk_ids.address,
        topk_weights: topk_weights.address,
        weights_on_input: operands.weights_on_input,
        shared_weights: address(&operands.shared_weights),
        output: out.address,
        output_pitch: pitch(out)?,
    };
    let layer =
        PackedMoe { sizes: *sizes, weights: operands.weights.address, expert_map: address(&operands.expert_map) };
    let stream = current_stream(py, ordinal)?;
    // SAFETY: PyTorch's streams are of the primary context, and its tensors have the sizes, the types and the device that were
    // checked. Its allocator gives none of their memory to work that is not behind this call on the stream.
    unsafe { launcher.launch(&layer, &arguments, workspace.address, stream) }.map_err(exception)?;
    Ok(())
}

/// Queues the packing.
pub fn pack(
    py: Python<'_>,
    weights: &Tensor<'_>,
    sizes: &MoeSizes,
    routed: &[RawProjection<'_>],
    shared: Option<&[RawProjection<'_>]>,
    ordinal: u32,
) -> PyResult<()> {
    let launcher = launcher(ordinal)?;
    let (routed, shared) = (tensors(routed), shared.map(tensors));
    let stream = current_stream(py, ordinal)?;
    // SAFETY: as above.
    unsafe { launcher.pack(sizes, &routed, shared.as_ref(), weights.address, stream) }.map_err(exception)
}

fn tensors<'a>(projections: &'a [RawProjection<'_>]) -> MoeTensors<'a> {
    let tensor = |index: usize| {
        let raw: &RawProjection<'_> = &projections[index];
        let [values_stride, scales_stride] = raw.strides();
        MoeTensor {
            values: raw.values.address,
            values_stride,
            scales: raw.scales.address,
            scales_stride,
            global_scales: &raw.global_scales,
            bias: None,
        }
    };
    MoeTensors { gate: Some(tensor(0)), up: tensor(1), down: tensor(2) }
}
