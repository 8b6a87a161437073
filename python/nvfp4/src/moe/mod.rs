//! The operator `nvfp4::moe`, and the packing of a layer's weights.

mod cpu;
mod cuda;
mod operands;

use nvfp4::backend::cuda::MoeLauncher;
use nvfp4::format::BLOCK;
use nvfp4::fp4::InputScales;
use nvfp4::kernels::moe::{weight_bytes, workspace_bytes};
use nvfp4::moe::{Activation, MoeSizes};
use nvfp4::problem::{MAX_TOP_K, TokenDtype, TokenFormat};
use pyo3::prelude::*;

use self::operands::{Operands, Projections, RawProjection};
use crate::error::{exception, invalid};
use crate::tensor::{self, Dtype, Place, Tensor, token_type};

/// Computes a layer: writes `out`, and `workspace` if it is given.
#[pyfunction]
#[pyo3(signature = (out, hidden_states, topk_ids, topk_weights, weights, experts, intermediate, *, shared_intermediate=None,
    expert_map=None, shared_weights=None, weights_on_input=false, workspace=None, activation="silu", biases=false,
    token_format="16-bit", input_scales=false))]
#[expect(clippy::too_many_arguments, reason = "each operand is a named argument of the operator")]
pub fn moe(
    py: Python<'_>,
    out: &Bound<'_, PyAny>,
    hidden_states: &Bound<'_, PyAny>,
    topk_ids: &Bound<'_, PyAny>,
    topk_weights: &Bound<'_, PyAny>,
    weights: &Bound<'_, PyAny>,
    experts: usize,
    intermediate: usize,
    shared_intermediate: Option<usize>,
    expert_map: Option<&Bound<'_, PyAny>>,
    shared_weights: Option<&Bound<'_, PyAny>>,
    weights_on_input: bool,
    workspace: Option<&Bound<'_, PyAny>>,
    activation: &str,
    biases: bool,
    token_format: &str,
    input_scales: bool,
) -> PyResult<()> {
    let operands = Operands {
        out: Tensor::read("out", out)?,
        hidden_states: Tensor::read("hidden_states", hidden_states)?,
        topk_ids: Tensor::read("topk_ids", topk_ids)?,
        topk_weights: Tensor::read("topk_weights", topk_weights)?,
        weights: Tensor::read("weights", weights)?,
        expert_map: Tensor::read_optional("expert_map", expert_map)?,
        shared_weights: Tensor::read_optional("shared_weights", shared_weights)?,
        weights_on_input,
        workspace: Tensor::read_optional("workspace", workspace)?,
    };
    let activation = activation_of(activation)?;
    let token_format = tensor::token_format(token_format)?;
    let kind = Kind { experts, intermediate, shared_intermediate, activation, biases, token_format, input_scales };
    let sizes = operands.sizes(&kind)?;
    match operands.hidden_states.place {
        Place::Cpu => cpu::moe(py, &operands, &sizes),
        Place::Cuda(ordinal) => cuda::moe(py, &operands, &sizes, ordinal),
    }
}

/// Properties of a layer that its tensors do not determine.
#[derive(Default)]
struct Kind {
    experts: usize,
    intermediate: usize,
    shared_intermediate: Option<usize>,
    activation: Activation,
    biases: bool,
    token_format: TokenFormat,
    input_scales: bool,
}

impl Kind {
    /// Returns the layer's sizes.
    fn sizes(&self, hidden: usize, named_experts: usize, top_k: usize, dtype: TokenDtype) -> PyResult<MoeSizes> {
        let &Self { experts, intermediate, shared_intermediate, activation, biases, token_format, input_scales } = self;
        let sizes = MoeSizes {
            hidden,
            intermediate,
            experts,
            named_experts,
            top_k,
            shared_intermediate,
            dtype,
            activation,
            biases,
            token_format,
            input_scales,
        };
        sizes.check().map_err(exception)?;
        Ok(sizes)
    }

    /// Returns the layer's sizes, with placeholders for the sizes that belong to a call.
    fn sizes_of_weights(&self, hidden: usize, dtype: TokenDtype) -> PyResult<MoeSizes> {
        self.sizes(hidden, self.experts, 1, dtype)
    }
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
    fn sizes(&self, kind: &Kind) -> PyResult<MoeSizes> {
        let shared = kind.shared_intermediate;
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
        let named_experts = self.expert_map.as_ref().map_or(kind.experts, Tensor::len);
        let sizes = kind.sizes(hidden, named_experts, top_k, dtype)?;
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
#[expect(clippy::too_many_arguments, reason = "a layer's sizes")]
pub fn moe_weight_bytes(
    hidden: usize,
    intermediate: usize,
    experts: usize,
    shared_intermediate: Option<usize>,
    dtype: &Bound<'_, PyAny>,
    activation: &str,
    biases: bool,
    token_format: &str,
    input_scales: bool,
    is_cuda: bool,
) -> PyResult<usize> {
    let activation = activation_of(activation)?;
    let token_format = tensor::token_format(token_format)?;
    let kind = Kind { experts, intermediate, shared_intermediate, activation, biases, token_format, input_scales };
    let sizes = kind.sizes_of_weights(hidden, token_type(dtype)?)?;
    Ok(packed_bytes(&sizes, if is_cuda { Place::Cuda(0) } else { Place::Cpu }))
}

/// Returns the bytes of workspace that a call with `tokens` tokens needs on a GPU, for any activation.
#[pyfunction]
pub fn moe_workspace_bytes(
    tokens: usize,
    top_k: usize,
    hidden: usize,
    intermediate: usize,
    experts: usize,
    shared_intermediate: Option<usize>,
    token_format: &str,
) -> PyResult<usize> {
    let token_format = tensor::token_format(token_format)?;
    let kind = Kind { experts, intermediate, shared_intermediate, token_format, ..Kind::default() };
    Ok(workspace_bytes(&kind.sizes(hidden, experts, top_k, TokenDtype::Bf16)?, tokens))
}

/// Checks that the scales packed on a GPU were valid. `head`: first [`MoeLauncher::HEAD_BYTES`] bytes of the packed
/// weights.
#[pyfunction]
pub fn check_packed_moe(
    head: &[u8],
    hidden: usize,
    intermediate: usize,
    experts: usize,
    shared_intermediate: Option<usize>,
    activation: &str,
) -> PyResult<()> {
    let activation = activation_of(activation)?;
    let kind = Kind { experts, intermediate, shared_intermediate, activation, ..Kind::default() };
    let sizes = kind.sizes_of_weights(hidden, TokenDtype::Bf16)?;
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

/// Packs gate, up and down of a layer and of its shared expert into `weights`.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "the parts of a layer")]
pub fn pack_moe<'py>(
    py: Python<'py>,
    weights: &Bound<'py, PyAny>,
    dtype: &Bound<'py, PyAny>,
    projections: Projections<Projection<'py>>,
    shared: Option<Projections<Projection<'py>>>,
    activation: &str,
    biases: bool,
    token_format: &str,
    input_scales: Option<[Vec<f32>; 2]>,
) -> PyResult<()> {
    let weights = Tensor::read("weights", weights)?;
    let (dtype, activation) = (token_type(dtype)?, activation_of(activation)?);
    let token_format = tensor::token_format(token_format)?;
    if projections.iter().chain(shared.iter().flatten()).flatten().any(|projection| projection.3.is_some()) && !biases {
        return Err(invalid("biases", "a projection has biases, but the layer was declared without them"));
    }
    let Some((first, names)) =
        projections[..2].iter().zip(&NAMES).find_map(|(first, names)| Some((first.as_ref()?, names)))
    else {
        return Err(invalid("up", "missing; every layer has an up projection"));
    };
    let [experts, intermediate, half_hidden] =
        Tensor::read(names[0], &first.0)?.expect_dimensions("[experts, rows, columns/2]")?;
    let shared_intermediate = match shared.as_ref().and_then(|shared| shared[1].as_ref()) {
        Some(up) => Some(Tensor::read("shared up.values", &up.0)?.expect_dimensions::<3>("[1, rows, columns/2]")?[1]),
        None => None,
    };
    let scales = input_scales.map(|scales| input_scales_of(scales, experts + usize::from(shared.is_some())));
    let (input_scales, scales) = (scales.is_some(), scales.transpose()?.unwrap_or_default());
    let kind = Kind { experts, intermediate, shared_intermediate, activation, biases, token_format, input_scales };
    let sizes = kind.sizes_of_weights(2 * half_hidden, dtype)?;
    let routed = checked(projections, &NAMES[..3], &sizes, (experts, intermediate), weights.place)?;
    let of_shared = |shared| checked(shared, &NAMES[3..], &sizes, (1, shared_intermediate.unwrap_or(0)), weights.place);
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
