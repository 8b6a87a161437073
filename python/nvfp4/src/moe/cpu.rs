//! MoE layers on the library's CPU backend, in PyTorch's memory.

use std::ops::Range;

use bytemuck::pod_read_unaligned;
use nvfp4::Error;
use nvfp4::backend::cpu::Cpu;
use nvfp4::bias::Bias;
use nvfp4::format::{BLOCK, Bytes, Matrix};
use nvfp4::fp4::InputScales;
use nvfp4::kernels::moe::ExpertPart;
use nvfp4::moe::{Biases, MoeExpert, MoeInputs, MoeOutput, MoeSizes, MoeStep, MoeWeights};
use pyo3::prelude::*;

use super::operands::{Operands, Projections, RawProjection};
use crate::error::exception;
use crate::prepared::Prepared;
use crate::tensor::{GPU_ALIGNMENT, Tensor};

/// First bytes of packed weights.
const HEADER: &[u8; 16] = b"nvfp4 cpu moe 1\n";

/// Layout of a layer's weights in one tensor: a header, input scales, and per projection its global scales, biases,
/// values and scales. Values and scales are as in a checkpoint.
pub struct Layout {
    pub bytes: usize,
    /// Little-endian f32: the scale of gate and up, then of down, per expert, then for the shared expert. Empty if
    /// there are none.
    input_scales: Range<usize>,
    routed: Projections<Part>,
    shared: Option<Projections<Part>>,
}

/// A projection of every expert.
struct Part {
    rows: usize,
    k: usize,
    /// Little-endian f32, like the biases.
    global_scales: Range<usize>,
    /// Empty if there are no biases.
    bias: Range<usize>,
    values: Range<usize>,
    scales: Range<usize>,
}

impl Layout {
    pub fn new(sizes: &MoeSizes) -> Self {
        let mut end = HEADER.len();
        let mut take = |bytes: usize| {
            end += bytes;
            end - bytes..end
        };
        let with_scales =
            if sizes.input_scales { sizes.experts + usize::from(sizes.shared_intermediate.is_some()) } else { 0 };
        let input_scales = take(size_of::<[f32; 2]>() * with_scales);
        let mut parts = |experts: usize, intermediate: usize| {
            let shapes = [(intermediate, sizes.hidden), (intermediate, sizes.hidden), (sizes.hidden, intermediate)];
            [0, 1, 2].map(|index| {
                let (rows, k) = shapes[index];
                (index > 0 || sizes.activation.has_gate()).then(|| Part {
                    rows,
                    k,
                    global_scales: take(size_of::<f32>() * experts),
                    bias: take(if sizes.biases { size_of::<f32>() * experts * rows } else { 0 }),
                    values: take(experts * rows * k / 2),
                    scales: take(experts * rows * k / BLOCK),
                })
            })
        };
        let routed = parts(sizes.experts, sizes.intermediate);
        let shared = sizes.shared_intermediate.map(|intermediate| parts(1, intermediate));
        let bytes = end.next_multiple_of(GPU_ALIGNMENT) + HEADER.len();
        Self { bytes, input_scales, routed, shared }
    }

    /// Returns the parts with one piece per routed expert, in the order of the experts.
    pub fn expert_parts(&self, experts: usize) -> Vec<ExpertPart> {
        // The shared expert's input scales follow the routed experts'.
        let Range { start, end } = self.input_scales;
        let input_scales = start..end.min(start + size_of::<[f32; 2]>() * experts);
        let ranges = |part: &Part| [&part.global_scales, &part.bias, &part.values, &part.scales].map(Clone::clone);
        let of_projections = self.routed.iter().flatten().flat_map(ranges);
        let parts = of_projections.chain([input_scales]).filter(|part| !part.is_empty());
        parts.map(|part| ExpertPart { start: part.start, bytes_of_one: part.len() / experts }).collect()
    }

    /// Returns the layer in packed weights. Checks every scale.
    fn weights<'a>(&self, sizes: &MoeSizes, bytes: &Bytes<'a>) -> Result<MoeWeights<'a>, Error> {
        if !bytes.starts_with(HEADER) {
            return Err(Error::Invalid("weights: not packed for the CPU; pack the weights on the CPU".into()));
        }
        let experts = (0..sizes.experts).map(|expert| expert_of(&self.routed, bytes, expert));
        let experts = experts.collect::<Result<_, _>>()?;
        let weights = MoeWeights::with_activation(sizes.dtype, sizes.top_k, sizes.activation, experts)?;
        let mut weights = weights.with_token_format(sizes.token_format);
        if let Some(shared) = &self.shared {
            weights = weights.with_shared(expert_of(shared, bytes, 0).map_err(|error| error.at("shared expert"))?)?;
        }
        if sizes.input_scales {
            let all = bytes[self.input_scales.clone()].chunks_exact(size_of::<[f32; 2]>()).map(pod_read_unaligned);
            let all = all.map(|[gate_up, down]: [f32; 2]| InputScales { gate_up, down });
            weights = weights.with_input_scales(all.collect())?;
        }
        Ok(weights)
    }
}

fn expert_of<'a>(parts: &Projections<Part>, bytes: &Bytes<'a>, expert: usize) -> Result<MoeExpert<'a>, Error> {
    let of_expert = |part: &Range<usize>, bytes_of_one: usize| {
        let start = part.start + expert * bytes_of_one;
        bytes.slice(start..start + bytes_of_one)
    };
    let matrix = |index: usize| {
        let Some(Part { rows, k, global_scales, values, scales, .. }) = &parts[index] else { return Ok(None) };
        let (values, scales) = (of_expert(values, rows * k / 2), of_expert(scales, rows * k / BLOCK));
        let global = pod_read_unaligned(&of_expert(global_scales, size_of::<f32>()));
        let name = ["gate", "up", "down"][index];
        let matrix = Matrix::new(*rows, *k, values, scales, global);
        matrix.map(Some).map_err(|error| error.at(format_args!("expert {expert}: {name}")))
    };
    let bias = |index: usize| {
        let Part { rows, bias, .. } = parts[index].as_ref().filter(|part| !part.bias.is_empty())?;
        let numbers = of_expert(bias, size_of::<f32>() * rows);
        let numbers: Vec<f32> = numbers.chunks_exact(size_of::<f32>()).map(pod_read_unaligned).collect();
        Some(Bias::F32(numbers.into()))
    };
    let every = "every layer has an up and a down projection";
    let (gate, up, down) = (matrix(0)?, matrix(1)?.expect(every), matrix(2)?.expect(every));
    Ok(MoeExpert { gate, up, down, biases: Biases { gate: bias(0), up: bias(1), down: bias(2) } })
}

/// Computes a call.
pub fn moe(py: Python<'_>, operands: &Operands<'_>, sizes: &MoeSizes) -> PyResult<()> {
    let Operands { out, hidden_states, topk_ids, topk_weights, .. } = operands;
    let (tokens, hidden) = (hidden_states.shape()[0], sizes.hidden);
    let (stride, out_stride) = (hidden_states.row_stride()?, out.row_stride()?);
    let elements = |stride: usize| if tokens == 0 { 0 } else { (tokens - 1) * stride + hidden };
    // SAFETY: the sizes, types and strides of PyTorch's tensors were checked, and the caller keeps the tensors alive.
    // The operator's contract: `out` overlaps no other tensor, and nothing writes any of the tensors during the call.
    let (states, ids, topk_weights, map, shared_weights, to) = unsafe {
        (
            hidden_states.elements::<u16>(elements(stride))?,
            topk_ids.elements::<i32>(topk_ids.len())?,
            topk_weights.elements::<f32>(topk_weights.len())?,
            operands.expert_map.as_ref().map(|map| map.elements::<i32>(map.len())).transpose()?,
            operands.shared_weights.as_ref().map(|weights| weights.elements::<f32>(tokens)).transpose()?,
            out.elements_mut::<u16>(elements(out_stride))?,
        )
    };
    let weights_on_input = operands.weights_on_input;
    let prepared = Prepared::moe(py, &operands.weights, sizes, |bytes| {
        let make = || Cpu::new().prepare_moe_layer(&Layout::new(sizes).weights(sizes, &bytes)?);
        py.detach(make).map_err(exception)
    })?;
    let layer = prepared.get().moe_layer();
    let computed = py.detach(|| {
        let inputs = MoeInputs {
            tokens,
            hidden: states.into(),
            stride,
            ids: ids.into(),
            weights: topk_weights.into(),
            weights_on_input,
            shared_weights: shared_weights.map(Into::into),
        };
        let step = MoeStep::of_sizes(*sizes, map, inputs)?;
        let mut output = MoeOutput::new(&step);
        layer.execute(&step, &mut output)?;
        for (row, from) in output.hidden.chunks_exact(hidden).enumerate() {
            to[row * out_stride..][..hidden].copy_from_slice(from);
        }
        Ok(())
    });
    computed.map_err(exception)
}

/// Packs a layer.
pub fn pack(
    weights: &Tensor<'_>,
    sizes: &MoeSizes,
    routed: &Projections<RawProjection<'_>>,
    shared: Option<&Projections<RawProjection<'_>>>,
    input_scales: &[InputScales],
) -> PyResult<()> {
    let layout = Layout::new(sizes);
    // SAFETY: the size and type were checked, and the caller keeps the tensor alive. `weights` was allocated for this
    // call.
    let to = unsafe { weights.elements_mut::<u8>(weights.len())? };
    to.fill(0);
    to[..HEADER.len()].copy_from_slice(HEADER);
    let scales = input_scales.iter().flat_map(|of| [of.gate_up, of.down]);
    for (to, number) in to[layout.input_scales.clone()].chunks_exact_mut(size_of::<f32>()).zip(scales) {
        to.copy_from_slice(&number.to_le_bytes());
    }
    let of_shared = layout.shared.iter().flatten().zip(shared.into_iter().flatten());
    let pairs = layout.routed.iter().zip(routed).chain(of_shared);
    for (part, raw) in pairs.filter_map(|(part, raw)| Some((part.as_ref()?, raw.as_ref()?))) {
        let bias = raw.bias.as_ref().map(|bias| bias.numbers(sizes.dtype)).unwrap_or_default();
        for (range, numbers) in [(&part.global_scales, &raw.global_scales[..]), (&part.bias, &bias)] {
            for (to, number) in to[range.clone()].chunks_exact_mut(size_of::<f32>()).zip(numbers) {
                to.copy_from_slice(&number.to_le_bytes());
            }
        }
        let experts = raw.global_scales.len();
        for (tensor, stride, range) in
            [(&raw.values, raw.strides()[0], &part.values), (&raw.scales, raw.strides()[1], &part.scales)]
        {
            let bytes_of_one = range.len() / experts;
            // SAFETY: the shape and strides were checked, the last expert ends at this length, and the caller keeps the
            // tensor alive.
            let from = unsafe { tensor.elements::<u8>((experts - 1) * stride + bytes_of_one)? };
            for (expert, to) in to[range.clone()].chunks_exact_mut(bytes_of_one).enumerate() {
                to.copy_from_slice(&from[expert * stride..][..bytes_of_one]);
            }
        }
    }
    layout.weights(sizes, &Bytes::Borrowed(to)).map_err(exception)?;
    Ok(())
}
