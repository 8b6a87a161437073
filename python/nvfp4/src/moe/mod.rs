//! The operator `nvfp4::moe`, and the packing of a layer's weights.

mod cpu;
mod cuda;

use nvfp4::backend::cuda::MoeLauncher;
use nvfp4::format::BLOCK;
use nvfp4::kernels::moe::{weight_bytes, workspace_bytes};
use nvfp4::moe::{Activation, MoeSizes};
use nvfp4::problem::OutDtype;
use pyo3::prelude::*;

use crate::error::{exception, invalid};
use crate::tensor::{Dtype, Place, Tensor};

/// The most experts that a token names.
const MAX_TOP_K: usize = 32;

/// Computes a layer: `out` is written, and `workspace` if there is one.
#[pyfunction]
#[pyo3(signature = (out, hidden_states, topk_ids, topk_weights, weights, experts, intermediate, *, shared_intermediate=None,
    expert_map=None, shared_weights=None, weights_on_input=false, workspace=None))]
#[expect(clippy::too_many_arguments, reason = "an operator takes each by its name")]
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
    let sizes = operands.sizes(experts, intermediate, shared_intermediate)?;
    match operands.hidden_states.place {
        Place::Cpu => cpu::moe(py, &operands, &sizes),
        Place::Cuda(ordinal) => cuda::moe(py, &operands, &sizes, ordinal),
    }
}

/// The tensors of a call.
struct Operands<'py> {
    out: Tensor<'py>,
    hidden_states: Tensor<'py>,
    topk_ids: Tensor<'py>,
    topk_weights: Tensor<'py>,
    weights: Tensor<'py>,
    expert_map: Option<Tensor<'py>>,
    shared_weights: Option<Tensor<'py>>,
    weights_on_input: bool,
    workspace: Option<Tensor<'py>>,
}

impl Operands<'_> {
    /// Checks every tensor; the layer's sizes.
    fn sizes(&self, experts: usize, intermediate: usize, shared: Option<usize>) -> PyResult<MoeSizes> {
        let place = self.hidden_states.place;
        let [tokens, hidden] = self.hidden_states.expect_dimensions("[tokens, hidden size]")?;
        let dtype = self.hidden_states.token_type()?;
        if hidden == 0 || hidden % BLOCK != 0 {
            return Err(self
                .hidden_states
                .invalid(format_args!("rows of {hidden} numbers; expected a multiple of {BLOCK}")));
        }
        self.out.expect_dtype(&[self.hidden_states.dtype])?;
        self.out.expect_shape(self.hidden_states.shape())?;
        let [_, top_k] = self.topk_ids.expect_dimensions("[tokens, experts of a token]")?;
        if top_k == 0 || top_k > MAX_TOP_K {
            return Err(self.topk_ids.invalid(format_args!("{top_k} experts a token; expected 1 to {MAX_TOP_K}")));
        }
        for (tensor, dtype) in [(&self.topk_ids, Dtype::I32), (&self.topk_weights, Dtype::F32)] {
            tensor.expect_dtype(&[dtype])?;
            tensor.expect_shape(&[tokens, top_k])?;
            tensor.expect_contiguous()?;
        }
        if self.weights_on_input && (top_k > 1 || shared.is_some()) {
            let text = "only for one expert a token and no shared expert";
            return Err(invalid("weights_on_input", text));
        }
        if let Some(map) = &self.expert_map {
            map.expect_dtype(&[Dtype::I32])?;
            map.expect_dimensions::<1>("an expert's number for each that tokens can name")?;
            map.expect_contiguous()?;
        }
        if let Some(weights) = &self.shared_weights {
            if shared.is_none() {
                return Err(weights.invalid("the layer has no shared expert; leave them out"));
            }
            weights.expect_dtype(&[Dtype::F32])?;
            weights.expect_shape(&[tokens])?;
            weights.expect_contiguous()?;
        }
        let optional = [&self.expert_map, &self.shared_weights, &self.workspace].into_iter().flatten();
        for tensor in [&self.out, &self.topk_ids, &self.topk_weights, &self.weights].into_iter().chain(optional) {
            tensor.expect_place(place)?;
        }
        let named_experts = self.expert_map.as_ref().map_or(experts, Tensor::len);
        let sizes = sizes_of([hidden, intermediate, experts, named_experts, top_k], shared, dtype);
        sizes.check().map_err(exception)?;
        for (tensor, len) in [(Some(&self.weights), packed_bytes(&sizes, place)), (self.workspace.as_ref(), 0)] {
            let Some(tensor) = tensor else { continue };
            tensor.expect_dtype(&[Dtype::U8])?;
            let [bytes] = tensor.expect_dimensions("bytes")?;
            tensor.expect_contiguous()?;
            if len > 0 && bytes != len {
                return Err(tensor.invalid(format_args!(
                    "expected {len} bytes for such a layer on {place}, got {bytes}; pack them for these sizes, where they are used"
                )));
            }
        }
        Ok(sizes)
    }
}

/// Bytes of packed weights. Those of the CPU are never as many as those of a GPU, so neither is taken for the other.
fn packed_bytes(sizes: &MoeSizes, place: Place) -> usize {
    match place {
        Place::Cpu => cpu::Layout::new(sizes).bytes,
        Place::Cuda(_) => weight_bytes(sizes),
    }
}

/// The sizes of a layer with SiLU and without biases: H, I, E, the experts that tokens name, k.
fn sizes_of(sizes: [usize; 5], shared_intermediate: Option<usize>, dtype: OutDtype) -> MoeSizes {
    let [hidden, intermediate, experts, named_experts, top_k] = sizes;
    MoeSizes {
        hidden,
        intermediate,
        experts,
        named_experts,
        top_k,
        shared_intermediate,
        dtype,
        activation: Activation::Silu,
        biases: false,
    }
}

/// A layer's sizes as far as its weights know them.
fn sizes_of_weights(
    hidden: usize,
    intermediate: usize,
    experts: usize,
    shared_intermediate: Option<usize>,
    dtype: OutDtype,
) -> PyResult<MoeSizes> {
    let sizes = sizes_of([hidden, intermediate, experts, experts, 1], shared_intermediate, dtype);
    sizes.check().map_err(exception)?;
    Ok(sizes)
}

fn token_type(dtype: &Bound<'_, PyAny>) -> PyResult<OutDtype> {
    match Dtype::of(dtype)? {
        Some(Dtype::Bf16) => Ok(OutDtype::Bf16),
        Some(Dtype::F16) => Ok(OutDtype::F16),
        _ => Err(invalid("dtype", format_args!("expected torch.bfloat16 or torch.float16, got {dtype}"))),
    }
}

/// Bytes of a layer's packed weights on the CPU or on a GPU.
#[pyfunction]
pub fn moe_weight_bytes(
    hidden: usize,
    intermediate: usize,
    experts: usize,
    shared_intermediate: Option<usize>,
    dtype: &Bound<'_, PyAny>,
    is_cuda: bool,
) -> PyResult<usize> {
    let sizes = sizes_of_weights(hidden, intermediate, experts, shared_intermediate, token_type(dtype)?)?;
    Ok(packed_bytes(&sizes, if is_cuda { Place::Cuda(0) } else { Place::Cpu }))
}

/// Bytes of workspace that a call with so many tokens needs on a GPU.
#[pyfunction]
pub fn moe_workspace_bytes(
    tokens: usize,
    top_k: usize,
    hidden: usize,
    intermediate: usize,
    experts: usize,
    shared_intermediate: Option<usize>,
) -> PyResult<usize> {
    let sizes = sizes_of_weights(hidden, intermediate, experts, shared_intermediate, OutDtype::Bf16)?;
    let sizes = MoeSizes { top_k, ..sizes };
    sizes.check().map_err(exception)?;
    Ok(workspace_bytes(&sizes, tokens))
}

/// Says whether the scales that were packed on a GPU were valid, by the first [`MoeLauncher::HEAD_BYTES`] of the weights.
#[pyfunction]
pub fn check_packed_moe(
    head: &[u8],
    hidden: usize,
    intermediate: usize,
    experts: usize,
    shared_intermediate: Option<usize>,
    dtype: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let sizes = sizes_of_weights(hidden, intermediate, experts, shared_intermediate, token_type(dtype)?)?;
    let head = head.try_into().map_err(|_| invalid("head", "not as long as what packed weights begin with"))?;
    MoeLauncher::check_packed(&sizes, head).map_err(exception)
}

/// A projection of every expert: values `[E, N, K/2]`, scales `[E, N, K/16]`, global scales.
type Projection<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Vec<f32>);

/// A projection that was checked.
struct RawProjection<'py> {
    values: Tensor<'py>,
    scales: Tensor<'py>,
    global_scales: Vec<f32>,
}

impl RawProjection<'_> {
    /// Bytes from one expert to the next: of values, of scales.
    fn strides(&self) -> [usize; 2] {
        [&self.values, &self.scales].map(|tensor| match tensor.shape() {
            [1, rows, columns] => rows * columns,
            _ => tensor.stride(0) as usize,
        })
    }
}

const NAMES: [[&str; 2]; 6] = [
    ["gate.values", "gate.scales"],
    ["up.values", "up.scales"],
    ["down.values", "down.scales"],
    ["shared gate.values", "shared gate.scales"],
    ["shared up.values", "shared up.scales"],
    ["shared down.values", "shared down.scales"],
];

/// Packs a layer's gate, up and down, and those of its shared expert, into `weights`.
#[pyfunction]
pub fn pack_moe<'py>(
    py: Python<'py>,
    weights: &Bound<'py, PyAny>,
    dtype: &Bound<'py, PyAny>,
    projections: [Projection<'py>; 3],
    shared: Option<[Projection<'py>; 3]>,
) -> PyResult<()> {
    let weights = Tensor::read("weights", weights)?;
    let mut names = NAMES.iter();
    let mut read = |projections: [Projection<'py>; 3]| -> PyResult<Vec<RawProjection<'py>>> {
        let read = |((values, scales, global_scales), names): (Projection<'py>, &[&'static str; 2])| {
            let [values, scales] = [Tensor::read(names[0], &values)?, Tensor::read(names[1], &scales)?];
            Ok(RawProjection { values, scales, global_scales })
        };
        projections.into_iter().zip(&mut names).map(read).collect()
    };
    let routed = read(projections)?;
    let shared = shared.map(read).transpose()?;
    let [experts, intermediate, half_hidden] = routed[0].values.expect_dimensions("[experts, rows, columns/2]")?;
    let hidden = 2 * half_hidden;
    let shared_intermediate = match &shared {
        Some(shared) => Some(shared[0].values.expect_dimensions::<3>("[1, rows, columns/2]")?[1]),
        None => None,
    };
    let sizes = sizes_of_weights(hidden, intermediate, experts, shared_intermediate, token_type(dtype)?)?;
    let of_shared = shared.iter().map(|shared| (shared, 1, shared_intermediate.unwrap_or(0)));
    for (projections, experts, intermediate) in [(&routed, experts, intermediate)].into_iter().chain(of_shared) {
        for (index, RawProjection { values, scales, global_scales }) in projections.iter().enumerate() {
            let (rows, k) = if index == 2 { (hidden, intermediate) } else { (intermediate, hidden) };
            values.expect_dtype(&[Dtype::U8])?;
            scales.expect_dtype(&[Dtype::E4m3, Dtype::U8])?;
            for (tensor, columns) in [(values, k / 2), (scales, k / 16)] {
                tensor.expect_place(weights.place)?;
                tensor.expect_shape(&[experts, rows, columns])?;
                tensor.expect_dense_from(1)?;
                if experts > 1 && tensor.stride(0) < (rows * columns) as i64 {
                    return Err(
                        tensor.invalid(format_args!("experts are {} elements apart and overlap", tensor.stride(0)))
                    );
                }
            }
            if global_scales.len() != experts {
                return Err(values.invalid(format_args!("{} global scales for {experts} experts", global_scales.len())));
            }
        }
    }
    weights.expect_dtype(&[Dtype::U8])?;
    weights.expect_shape(&[packed_bytes(&sizes, weights.place)])?;
    weights.expect_contiguous()?;
    match weights.place {
        Place::Cpu => cpu::pack(&weights, &sizes, &routed, shared.as_deref()),
        Place::Cuda(ordinal) => cuda::pack(py, &weights, &sizes, &routed, shared.as_deref(), ordinal),
    }
}
