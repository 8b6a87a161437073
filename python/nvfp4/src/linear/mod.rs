//! The operator `nvfp4::linear`, and the packing of a layer's weights.

mod cpu;
mod cuda;
mod operands;

use nvfp4::backend::cuda::LinearLauncher;
use nvfp4::format::BLOCK;
use nvfp4::fp4::check_input_scale;
use nvfp4::linear::LinearSizes;
use nvfp4::problem::{TokenDtype, TokenFormat};
use pyo3::prelude::*;

use self::operands::{Operands, Raw};
use crate::error::{exception, invalid};
use crate::tensor::{self, Dtype, Place, Tensor, token_type};

/// Computes a layer and writes `out`.
#[pyfunction]
pub fn linear(
    py: Python<'_>,
    out: &Bound<'_, PyAny>,
    x: &Bound<'_, PyAny>,
    weights: &Bound<'_, PyAny>,
    out_features: usize,
    token_format: &str,
) -> PyResult<()> {
    let operands = Operands {
        out: Tensor::read("out", out)?,
        x: Tensor::read("x", x)?,
        weights: Tensor::read("weights", weights)?,
    };
    let sizes = operands.sizes(out_features, tensor::token_format(token_format)?)?;
    match operands.x.place {
        Place::Cpu => cpu::linear(py, &operands, &sizes),
        Place::Cuda(ordinal) => cuda::linear(py, &operands, &sizes, ordinal),
    }
}

impl Operands<'_> {
    /// Checks every tensor and returns the layer's sizes.
    fn sizes(&self, n: usize, token_format: TokenFormat) -> PyResult<LinearSizes> {
        let Self { out, x, weights } = self;
        let [tokens, k] = x.expect_dimensions("[tokens, K]")?;
        let without = LinearSizes { n, k, dtype: x.token_type()?, bias: false, token_format };
        without.check().map_err(|error| x.invalid(error))?;
        out.expect_dtype(&[x.dtype])?;
        out.expect_shape(&[tokens, n])?;
        out.expect_contiguous()?;
        weights.expect_dtype(&[Dtype::U8])?;
        let [bytes] = weights.expect_dimensions("bytes")?;
        weights.expect_contiguous()?;
        for tensor in [out, weights] {
            tensor.expect_place(x.place)?;
        }
        // A layer with a bias has more bytes than one without.
        let with = LinearSizes { bias: true, ..without };
        let [expected, with_bias] = [&without, &with].map(|sizes| packed_bytes(sizes, x.place));
        match bytes {
            _ if bytes == expected => Ok(without),
            _ if bytes == with_bias => Ok(with),
            _ => Err(weights.invalid(format_args!(
                "expected {expected} bytes for {n}×{k} on {}, or {with_bias} with a bias, got {bytes}; pack the weights for these \
                 sizes on that device",
                x.place
            ))),
        }
    }
}

/// Number of bytes of packed weights. The CPU's number never equals a GPU's, so a tensor packed for one is refused on
/// the other.
fn packed_bytes(sizes: &LinearSizes, place: Place) -> usize {
    match place {
        Place::Cpu => cpu::Layout::new(sizes).bytes,
        Place::Cuda(_) => LinearLauncher::weight_bytes(sizes),
    }
}

fn sizes_of(
    out_features: usize,
    in_features: usize,
    dtype: TokenDtype,
    bias: bool,
    token_format: TokenFormat,
) -> PyResult<LinearSizes> {
    let sizes = LinearSizes { n: out_features, k: in_features, dtype, bias, token_format };
    sizes.check().map_err(|error| invalid("values", error))?;
    Ok(sizes)
}

/// Returns the number of bytes of a layer's packed weights, on the CPU or on a GPU.
#[pyfunction]
pub fn linear_weight_bytes(
    out_features: usize,
    in_features: usize,
    dtype: &Bound<'_, PyAny>,
    bias: bool,
    token_format: &str,
    is_cuda: bool,
) -> PyResult<usize> {
    let sizes = sizes_of(out_features, in_features, token_type(dtype)?, bias, tensor::token_format(token_format)?)?;
    Ok(packed_bytes(&sizes, if is_cuda { Place::Cuda(0) } else { Place::Cpu }))
}

/// Checks that the scales packed on a GPU were valid. `head`: first [`LinearLauncher::HEAD_BYTES`] bytes of the packed
/// weights.
#[pyfunction]
pub fn check_packed_linear(head: &[u8], out_features: usize, in_features: usize) -> PyResult<()> {
    let head = head.try_into().map_err(|_| invalid("head", "wrong length; pass the first LINEAR_HEAD_BYTES bytes"))?;
    let sizes = sizes_of(out_features, in_features, TokenDtype::Bf16, false, TokenFormat::default())?;
    LinearLauncher::check_packed(&sizes, head).map_err(exception)
}

/// Packs a matrix into `weights`: values `[N, K/2]`, scales `[N, K/16]`, rows and global scale per projection, a bias
/// in host memory, and the input scale of NVFP4 tokens.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "the parts of a layer")]
pub fn pack_linear<'py>(
    py: Python<'py>,
    weights: &Bound<'py, PyAny>,
    dtype: &Bound<'py, PyAny>,
    values: &Bound<'py, PyAny>,
    scales: &Bound<'py, PyAny>,
    global_scales: Vec<(usize, f32)>,
    bias: Option<&Bound<'py, PyAny>>,
    token_format: &str,
    input_scale: Option<f32>,
) -> PyResult<()> {
    let weights = Tensor::read("weights", weights)?;
    let [values, scales] = [Tensor::read("values", values)?, Tensor::read("scales", scales)?];
    let bias = Tensor::read_optional("bias", bias)?;
    let [n, half_k] = values.expect_dimensions("[N, K/2]")?;
    let sizes = sizes_of(n, 2 * half_k, token_type(dtype)?, bias.is_some(), tensor::token_format(token_format)?)?;
    values.expect_dtype(&[Dtype::U8])?;
    scales.expect_dtype(&[Dtype::E4m3, Dtype::U8])?;
    scales.expect_shape(&[n, 2 * half_k / BLOCK])?;
    for tensor in [&values, &scales] {
        tensor.expect_place(weights.place)?;
        tensor.expect_contiguous()?;
    }
    if let Some((rows, _)) = global_scales.iter().find(|(rows, _)| !rows.is_multiple_of(BLOCK)) {
        return Err(invalid(
            "global_scale",
            format_args!("a projection of {rows} rows; expected a multiple of {BLOCK}"),
        ));
    }
    if global_scales.iter().map(|(rows, _)| rows).sum::<usize>() != n {
        return Err(invalid(
            "global_scale",
            format_args!("the projections' rows do not add up to the {n} rows of values"),
        ));
    }
    let bias = bias.map(|bias| bias.bias(sizes.dtype, &[n])).transpose()?;
    if let Some(input_scale) = input_scale {
        check_input_scale(input_scale).map_err(|error| invalid("input_scale", error))?;
    }
    let raw = Raw { values, scales, global_scales, bias, input_scale };
    weights.expect_dtype(&[Dtype::U8])?;
    weights.expect_shape(&[packed_bytes(&sizes, weights.place)])?;
    weights.expect_contiguous()?;
    match weights.place {
        Place::Cpu => cpu::pack(&weights, &sizes, &raw),
        Place::Cuda(ordinal) => cuda::pack(py, &weights, &sizes, &raw, ordinal),
    }
}
