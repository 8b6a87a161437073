//! The operator `nvfp4::moe`, and the packing of a layer's weights.

mod cpu;
mod cuda;
mod operands;

use nvfp4::backend::cuda::MoeLauncher;
use nvfp4::format::BLOCK;
use nvfp4::fp4::InputScales;
use nvfp4::kernels::moe::{expert_parts, weight_bytes, workspace_bytes};
use nvfp4::moe::{Activation, MoeSizes};
use nvfp4::problem::{MAX_TOP_K, TokenDtype, TokenFormat};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyDict, PyString};

use self::operands::{Operands, Projections, RawProjection};
use crate::error::{exception, invalid};
use crate::tensor::{self, Dtype, Place, Tensor, token_type};

/// Computes a layer: writes `out`, and the option `workspace` if it is given. `options`: the operator's named arguments
/// that are not the default.
#[pyfunction]
#[pyo3(signature = (out, hidden_states, topk_ids, topk_weights, weights, experts, intermediate, **options))]
#[expect(clippy::too_many_arguments, reason = "the operator's operands without a default")]
pub fn moe<'py>(
    py: Python<'py>,
    out: &Bound<'py, PyAny>,
    hidden_states: &Bound<'py, PyAny>,
    topk_ids: &Bound<'py, PyAny>,
    topk_weights: &Bound<'py, PyAny>,
    weights: &Bound<'py, PyAny>,
    experts: usize,
    intermediate: usize,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<()> {
    let mut operands = Operands {
        out: Tensor::read("out", out)?,
        hidden_states: Tensor::read("hidden_states", hidden_states)?,
        topk_ids: Tensor::read("topk_ids", topk_ids)?,
        topk_weights: Tensor::read("topk_weights", topk_weights)?,
        weights: Tensor::read("weights", weights)?,
        expert_map: None,
        shared_weights: None,
        weights_on_input: false,
        workspace: None,
    };
    let layer = layer_of(experts, intermediate, options, |name, value| {
        let tensor = Some(value).filter(|value| !value.is_none());
        match name {
            "expert_map" => operands.expert_map = Tensor::read_optional("expert_map", tensor)?,
            "shared_weights" => operands.shared_weights = Tensor::read_optional("shared_weights", tensor)?,
            "weights_on_input" => operands.weights_on_input = value.extract()?,
            "workspace" => operands.workspace = Tensor::read_optional("workspace", tensor)?,
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    let sizes = operands.sizes(layer)?;
    match operands.hidden_states.place {
        Place::Cpu => cpu::moe(py, &operands, &sizes),
        Place::Cuda(ordinal) => cuda::moe(py, &operands, &sizes, ordinal),
    }
}

/// Returns the sizes of a layer that its tensors do not determine, with placeholders for the others. `options`: the
/// options of the layer that are not the default. `other` reads an option of a call, and returns whether it knows it.
fn layer_of<'py>(
    experts: usize,
    intermediate: usize,
    options: Option<&Bound<'py, PyDict>>,
    mut other: impl FnMut(&str, &Bound<'py, PyAny>) -> PyResult<bool>,
) -> PyResult<MoeSizes> {
    let mut layer = MoeSizes {
        hidden: 0,
        intermediate,
        experts,
        named_experts: experts,
        top_k: 1,
        shared_intermediate: None,
        dtype: TokenDtype::Bf16,
        activation: Activation::Silu,
        biases: false,
        token_format: TokenFormat::Bits16,
        input_scales: false,
    };
    for (name, value) in options.into_iter().flatten() {
        let name = name.cast::<PyString>()?;
        match name.to_cow()?.as_ref() {
            "shared_intermediate" => layer.shared_intermediate = value.extract()?,
            "activation" => layer.activation = activation_of(&value.extract::<PyBackedStr>()?)?,
            "biases" => layer.biases = value.extract()?,
            "token_format" => layer.token_format = tensor::token_format(&value.extract::<PyBackedStr>()?)?,
            "input_scales" => layer.input_scales = value.extract()?,
            name if other(name, &value)? => (),
            name => return Err(PyTypeError::new_err(format!("unexpected keyword argument '{name}'"))),
        }
    }
    Ok(layer)
}

/// Same as [`layer_of`] for weights, which have no options of a call.
fn weights_of(
    hidden: usize,
    dtype: TokenDtype,
    experts: usize,
    intermediate: usize,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<MoeSizes> {
    let layer = layer_of(experts, intermediate, options, |_, _| Ok(false))?;
    checked_sizes(MoeSizes { hidden, dtype, ..layer })
}

fn checked_sizes(sizes: MoeSizes) -> PyResult<MoeSizes> {
    sizes.check().map_err(exception)?;
    Ok(sizes)
}

fn activation_of(text: &str) -> PyResult<Activation> {
    // The most common activation; parsing takes time.
    if text == "silu" {
        return Ok(Activation::Silu);
    }
    text.parse().map_err(|error: nvfp4::Error| invalid("activation", error))
}

impl Operands<'_> {
    /// Checks every tensor and returns the layer's sizes.
    fn sizes(&self, layer: MoeSizes) -> PyResult<MoeSizes> {
        let shared = layer.shared_intermediate;
        let place = self.hidden_states.place;
        let [tokens, hidden] = self.hidden_states.expect_dimensions("[tokens, hidden size]")?;
        let dtype = self.hidden_states.token_type()?;
        if hidden == 0 || hidden % BLOCK != 0 {
            return Err(self
                .hidden_states
                .invalid(format_args!("rows have {hidden} numbers; expected a multiple of {BLOCK}")));
        }
        self.out.expect_dtype(&[self.hidden_states.dtype])?;
        self.out.expect_shape(self.hidden_states.shape())?;
        let [_, top_k] = self.topk_ids.expect_dimensions("[tokens, experts of a token]")?;
        if top_k == 0 || top_k > MAX_TOP_K {
            return Err(self.topk_ids.invalid(format_args!("{top_k} experts per token; expected 1 to {MAX_TOP_K}")));
        }
        for (tensor, dtype) in [(&self.topk_ids, Dtype::I32), (&self.topk_weights, Dtype::F32)] {
            tensor.expect_dtype(&[dtype])?;
            tensor.expect_shape(&[tokens, top_k])?;
            tensor.expect_contiguous()?;
        }
        if self.weights_on_input && (top_k > 1 || shared.is_some()) {
            let text = "supported only with one expert per token and without a shared expert";
            return Err(invalid("weights_on_input", text));
        }
        if let Some(map) = &self.expert_map {
            map.expect_dtype(&[Dtype::I32])?;
            map.expect_dimensions::<1>("one index per named expert")?;
            map.expect_contiguous()?;
        }
        if let Some(weights) = &self.shared_weights {
            if shared.is_none() {
                return Err(weights.invalid("the layer has no shared expert; omit this argument"));
            }
            weights.expect_dtype(&[Dtype::F32])?;
            weights.expect_shape(&[tokens])?;
            weights.expect_contiguous()?;
        }
        let optional = [&self.expert_map, &self.shared_weights, &self.workspace].into_iter().flatten();
        for tensor in [&self.out, &self.topk_ids, &self.topk_weights, &self.weights].into_iter().chain(optional) {
            tensor.expect_place(place)?;
        }
        let named_experts = self.expert_map.as_ref().map_or(layer.experts, Tensor::len);
        let sizes = checked_sizes(MoeSizes { hidden, named_experts, top_k, dtype, ..layer })?;
        for (tensor, len) in [(Some(&self.weights), packed_bytes(&sizes, place)), (self.workspace.as_ref(), 0)] {
            let Some(tensor) = tensor else { continue };
            tensor.expect_dtype(&[Dtype::U8])?;
            let [bytes] = tensor.expect_dimensions("bytes")?;
            tensor.expect_contiguous()?;
            if len > 0 && bytes != len {
                return Err(tensor.invalid(format_args!(
                    "expected {len} bytes for a layer of these sizes on {place}, got {bytes}; pack the weights on {place}"
                )));
            }
        }
        Ok(sizes)
    }
}

/// Number of bytes of packed weights. The CPU's number never equals a GPU's, so a tensor packed for one is refused on
/// the other.
fn packed_bytes(sizes: &MoeSizes, place: Place) -> usize {
    match place {
        Place::Cpu => cpu::Layout::new(sizes).bytes,
        Place::Cuda(_) => weight_bytes(sizes),
    }
}

/// Returns the number of bytes of a layer's packed weights, on the CPU or on a GPU.
#[pyfunction]
#[pyo3(signature = (hidden, experts, intermediate, dtype, is_cuda, **options))]
pub fn moe_weight_bytes(
    hidden: usize,
    experts: usize,
    intermediate: usize,
    dtype: &Bound<'_, PyAny>,
    is_cuda: bool,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<usize> {
    let sizes = weights_of(hidden, token_type(dtype)?, experts, intermediate, options)?;
    Ok(packed_bytes(&sizes, if is_cuda { Place::Cuda(0) } else { Place::Cpu }))
}

/// Returns the parts of packed weights that belong to the routed experts: start and bytes of one expert's piece. The pieces of
/// a part follow each other in the order of the experts.
#[pyfunction]
#[pyo3(signature = (hidden, experts, intermediate, dtype, is_cuda, **options))]
pub fn moe_expert_parts(
    hidden: usize,
    experts: usize,
    intermediate: usize,
    dtype: &Bound<'_, PyAny>,
    is_cuda: bool,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<Vec<(usize, usize)>> {
    let sizes = weights_of(hidden, token_type(dtype)?, experts, intermediate, options)?;
    let parts = if is_cuda { expert_parts(&sizes) } else { cpu::Layout::new(&sizes).expert_parts(experts) };
    Ok(parts.into_iter().map(|part| (part.start, part.bytes_of_one)).collect())
}

/// Returns the bytes of workspace that a call with `tokens` tokens needs on a GPU, for any activation.
#[pyfunction]
#[pyo3(signature = (tokens, top_k, hidden, experts, intermediate, **options))]
pub fn moe_workspace_bytes(
    tokens: usize,
    top_k: usize,
    hidden: usize,
    experts: usize,
    intermediate: usize,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<usize> {
    let sizes = weights_of(hidden, TokenDtype::Bf16, experts, intermediate, options)?;
    Ok(workspace_bytes(&checked_sizes(MoeSizes { top_k, ..sizes })?, tokens))
}

/// Checks that the scales packed on a GPU were valid. `head`: first [`MoeLauncher::HEAD_BYTES`] bytes of the packed
/// weights.
#[pyfunction]
#[pyo3(signature = (head, hidden, experts, intermediate, **options))]
pub fn check_packed_moe(
    head: &[u8],
    hidden: usize,
    experts: usize,
    intermediate: usize,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    let sizes = weights_of(hidden, TokenDtype::Bf16, experts, intermediate, options)?;
    let head = head.try_into().map_err(|_| invalid("head", "wrong length; pass the first MOE_HEAD_BYTES bytes"))?;
    MoeLauncher::check_packed(&sizes, head).map_err(exception)
}

/// A projection of every expert: values `[E, N, K/2]`, scales `[E, N, K/16]`, global scales, and biases `[E, N]` in
/// host memory.
type Projection<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Vec<f32>, Option<Bound<'py, PyAny>>);

const NAMES: [[&str; 3]; 6] = [
    ["gate.values", "gate.scales", "gate's biases"],
    ["up.values", "up.scales", "up's biases"],
    ["down.values", "down.scales", "down's biases"],
    ["shared gate.values", "shared gate.scales", "shared gate's biases"],
    ["shared up.values", "shared up.scales", "shared up's biases"],
    ["shared down.values", "shared down.scales", "shared down's biases"],
];

/// Packs gate, up and down of a layer and of its shared expert into `weights`. `scales`: the input scales. `options`: the
/// layer's options that are not the default. One of them says whether there are input scales.
#[pyfunction]
#[pyo3(signature = (weights, dtype, projections, shared, scales, **options))]
pub fn pack_moe<'py>(
    py: Python<'py>,
    weights: &Bound<'py, PyAny>,
    dtype: &Bound<'py, PyAny>,
    projections: Projections<Projection<'py>>,
    shared: Option<Projections<Projection<'py>>>,
    scales: Option<[Vec<f32>; 2]>,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<()> {
    let weights = Tensor::read("weights", weights)?;
    let mut given = projections.iter().chain(shared.iter().flatten()).flatten();
    let has_biases = given.any(|projection| projection.3.is_some());
    let Some((first, names)) =
        projections[..2].iter().zip(&NAMES).find_map(|(first, names)| Some((first.as_ref()?, names)))
    else {
        return Err(invalid("up", "missing; every layer has an up projection"));
    };
    let [experts, intermediate, half_hidden] =
        Tensor::read(names[0], &first.0)?.expect_dimensions("[experts, rows, columns/2]")?;
    let sizes = weights_of(2 * half_hidden, token_type(dtype)?, experts, intermediate, options)?;
    if has_biases && !sizes.biases {
        return Err(invalid("biases", "a projection has biases, but the layer was declared without them"));
    }
    let scales = scales.map(|scales| input_scales_of(scales, experts + usize::from(shared.is_some())));
    let scales = scales.transpose()?.unwrap_or_default();
    let routed = checked(projections, &NAMES[..3], &sizes, (experts, intermediate), weights.place)?;
    let of_shared =
        |shared| checked(shared, &NAMES[3..], &sizes, (1, sizes.shared_intermediate.unwrap_or(0)), weights.place);
    let shared = shared.map(of_shared).transpose()?;
    weights.expect_dtype(&[Dtype::U8])?;
    weights.expect_shape(&[packed_bytes(&sizes, weights.place)])?;
    weights.expect_contiguous()?;
    match weights.place {
        Place::Cpu => cpu::pack(&weights, &sizes, &routed, shared.as_ref(), &scales),
        Place::Cuda(ordinal) => cuda::pack(py, &weights, &sizes, &routed, shared.as_ref(), &scales, ordinal),
    }
}

/// Converts the scales of gate and up and of down of `experts` experts.
fn input_scales_of([gate_up, down]: [Vec<f32>; 2], experts: usize) -> PyResult<Vec<InputScales>> {
    if [gate_up.len(), down.len()] != [experts; 2] {
        let text = format_args!(
            "{} and {} scales; expected {experts} each: one per expert, then one for the shared expert if there is one",
            gate_up.len(),
            down.len()
        );
        return Err(invalid("input_scales", text));
    }
    let scales: Vec<_> = gate_up.into_iter().zip(down).map(|(gate_up, down)| InputScales { gate_up, down }).collect();
    for (expert, scales) in scales.iter().enumerate() {
        scales.check().map_err(|error| invalid("input_scales", error.at(format_args!("expert {expert}"))))?;
    }
    Ok(scales)
}

/// Checks the projections of `experts` experts with an intermediate size of `intermediate`.
fn checked<'py>(
    projections: Projections<Projection<'py>>,
    names: &[[&'static str; 3]],
    sizes: &MoeSizes,
    (experts, intermediate): (usize, usize),
    place: Place,
) -> PyResult<Projections<RawProjection<'py>>> {
    let mut found = [None, None, None];
    for (index, (projection, names)) in projections.into_iter().zip(names).enumerate() {
        let is_there = index > 0 || sizes.activation.has_gate();
        let Some((values, scales, global_scales, bias)) = projection.filter(|_| is_there) else {
            if is_there {
                let name = names[0].trim_end_matches(".values");
                return Err(invalid(name, format_args!("missing; the activation {} needs it", sizes.activation)));
            }
            continue;
        };
        let (rows, k) = if index == 2 { (sizes.hidden, intermediate) } else { (intermediate, sizes.hidden) };
        let [values, scales] = [Tensor::read(names[0], &values)?, Tensor::read(names[1], &scales)?];
        values.expect_dtype(&[Dtype::U8])?;
        scales.expect_dtype(&[Dtype::E4m3, Dtype::U8])?;
        for (tensor, columns) in [(&values, k / 2), (&scales, k / BLOCK)] {
            tensor.expect_place(place)?;
            tensor.expect_shape(&[experts, rows, columns])?;
            tensor.expect_dense_from(1)?;
            if experts > 1 && tensor.stride(0) < (rows * columns) as i64 {
                return Err(tensor
                    .invalid(format_args!("an expert stride of {} elements makes experts overlap", tensor.stride(0))));
            }
        }
        if global_scales.len() != experts {
            return Err(values.invalid(format_args!("{} global scales for {experts} experts", global_scales.len())));
        }
        let bias = Tensor::read_optional(names[2], bias.as_ref())?;
        let bias = bias.map(|bias| bias.bias(sizes.dtype, &[experts, rows])).transpose()?;
        found[index] = Some(RawProjection { values, scales, global_scales, bias });
    }
    Ok(found)
}
