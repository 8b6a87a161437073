//! Linear layers on the library's CPU backend, in PyTorch's memory.

use std::ops::Range;

use bytemuck::pod_read_unaligned;
use nvfp4::Error;
use nvfp4::backend::cpu::Cpu;
use nvfp4::bias::Bias;
use nvfp4::format::{BLOCK, Bytes, Matrix};
use nvfp4::linear::{LinearInputs, LinearOutput, LinearSizes, LinearWeights};
use pyo3::prelude::*;

use super::operands::{Operands, Raw};
use crate::error::exception;
use crate::prepared::Prepared;
use crate::tensor::{GPU_ALIGNMENT, Tensor};

/// First bytes of packed weights.
const HEADER: &[u8; 16] = b"nvfp4 cpu lin 2\n";

/// Layout of a layer's weights in one tensor: a header, one global scale per row, the bias, an input scale (0 if there
/// is none), and values and scales as in a checkpoint.
pub struct Layout {
    pub bytes: usize,
    /// Little-endian f32, like the bias.
    global_scales: Range<usize>,
    bias: Range<usize>,
    input_scale: Range<usize>,
    values: Range<usize>,
    scales: Range<usize>,
}

impl Layout {
    pub fn new(sizes: &LinearSizes) -> Self {
        let &LinearSizes { n, k, bias, .. } = sizes;
        let mut end = HEADER.len();
        let mut take = |bytes: usize| {
            end += bytes;
            end - bytes..end
        };
        let global_scales = take(size_of::<f32>() * n);
        // At least as large as the padding below, so that the total size tells whether there is a bias.
        let bias = take(if bias { (size_of::<f32>() * n).max(GPU_ALIGNMENT) } else { 0 });
        let input_scale = take(size_of::<f32>());
        let (values, scales) = (take(n * k / 2), take(n * k / BLOCK));
        let bytes = end.next_multiple_of(GPU_ALIGNMENT) + HEADER.len();
        Self { bytes, global_scales, bias, input_scale, values, scales }
    }

    /// Returns one layer per range of rows with the same global scale, in the order of the rows. Checks every scale.
    fn layers<'a>(&self, sizes: &LinearSizes, bytes: &Bytes<'a>) -> Result<Vec<LinearWeights<'a>>, Error> {
        if !bytes.starts_with(HEADER) {
            return Err(Error::Invalid("weights: not packed for the CPU; pack the weights on the CPU".into()));
        }
        let numbers = |range: &Range<usize>| -> Vec<f32> {
            bytes[range.clone()].chunks_exact(size_of::<f32>()).take(sizes.n).map(pod_read_unaligned).collect()
        };
        let (global_scales, bias) = (numbers(&self.global_scales), numbers(&self.bias));
        let input_scale = numbers(&self.input_scale)[0];
        let mut first = 0;
        let of_rows = |rows: &[f32]| {
            let range = first..first + rows.len();
            first = range.end;
            let part = |whole: &Range<usize>, bytes_of_row: usize| {
                bytes.slice(whole.start + range.start * bytes_of_row..whole.start + range.end * bytes_of_row)
            };
            let (values, scales) = (part(&self.values, sizes.k / 2), part(&self.scales, sizes.k / BLOCK));
            let layer = LinearWeights::new(sizes.dtype, Matrix::new(range.len(), sizes.k, values, scales, rows[0])?)?;
            let mut layer = layer.with_token_format(sizes.token_format);
            if input_scale != 0.0 {
                layer = layer.with_input_scale(input_scale)?;
            }
            if sizes.bias { layer.with_bias(Bias::F32(bias[range].to_vec().into())) } else { Ok(layer) }
        };
        global_scales.chunk_by(|a, b| a.to_bits() == b.to_bits()).map(of_rows).collect()
    }
}

/// Computes a call.
pub fn linear(py: Python<'_>, operands: &Operands<'_>, sizes: &LinearSizes) -> PyResult<()> {
    let Operands { out, x, weights } = operands;
    let (tokens, stride) = (x.shape()[0], x.row_stride()?);
    let elements = if tokens == 0 { 0 } else { (tokens - 1) * stride + sizes.k };
    // SAFETY: the sizes, types and strides of PyTorch's tensors were checked, and the caller keeps the tensors alive.
    // The operator's contract: `out` overlaps no other tensor, and nothing writes any of the tensors during the call.
    let (x, to) = unsafe { (x.elements::<u16>(elements)?, out.elements_mut::<u16>(tokens * sizes.n)?) };
    let prepared = Prepared::linear(py, weights, sizes, |bytes| {
        let make = || {
            let (cpu, layers) = (Cpu::new(), Layout::new(sizes).layers(sizes, &bytes)?);
            layers.iter().map(|layer| cpu.prepare_linear_layer(layer)).collect::<Result<Vec<_>, Error>>()
        };
        py.detach(make).map_err(exception)
    })?;
    let layers = prepared.get().linear_layers();
    let computed = py.detach(|| {
        let mut first = 0;
        for layer in layers {
            let step = layer.step(LinearInputs { tokens, x: x.into(), stride })?;
            let mut output = LinearOutput::new(&step);
            layer.execute(&step, &mut output)?;
            let n = layer.sizes().n;
            for (row, from) in output.out.chunks_exact(n).enumerate() {
                to[row * sizes.n + first..][..n].copy_from_slice(from);
            }
            first += n;
        }
        Ok(())
    });
    computed.map_err(exception)
}

/// Packs a layer.
pub fn pack(weights: &Tensor<'_>, sizes: &LinearSizes, raw: &Raw<'_>) -> PyResult<()> {
    let layout = Layout::new(sizes);
    // SAFETY: the sizes and types were checked, and the caller keeps the tensors alive. `weights` was allocated for
    // this call.
    let (to, values, scales) = unsafe {
        (
            weights.elements_mut::<u8>(weights.len())?,
            raw.values.elements::<u8>(raw.values.len())?,
            raw.scales.elements::<u8>(raw.scales.len())?,
        )
    };
    to.fill(0);
    to[..HEADER.len()].copy_from_slice(HEADER);
    let rows = raw.global_scales.iter().flat_map(|&(rows, scale)| std::iter::repeat_n(scale, rows));
    let bias = raw.bias.as_ref().map(|bias| bias.numbers(sizes.dtype)).unwrap_or_default();
    let mut write = |range: &Range<usize>, numbers: &mut dyn Iterator<Item = f32>| {
        for (to, number) in to[range.clone()].chunks_exact_mut(size_of::<f32>()).zip(numbers) {
            to.copy_from_slice(&number.to_le_bytes());
        }
    };
    write(&layout.global_scales, &mut { rows });
    write(&layout.bias, &mut bias.iter().copied());
    write(&layout.input_scale, &mut raw.input_scale.into_iter());
    to[layout.values.clone()].copy_from_slice(values);
    to[layout.scales.clone()].copy_from_slice(scales);
    layout.layers(sizes, &Bytes::Borrowed(to)).map_err(exception)?;
    Ok(())
}
