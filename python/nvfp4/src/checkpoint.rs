//! Reads an MoE layer of a checkpoint for Python: all numbers of the layer, from which Python makes tensors.

use std::path::PathBuf;

use nvfp4::Error;
use nvfp4::bias::Bias;
use nvfp4::checkpoint::{Around, Checkpoint, FeedForward, LayerRouter, MoeLayer, Norm, Projection, Steps};
use nvfp4::format::Matrix;
use nvfp4::moe::{MoeExpert, MoeWeights};
use nvfp4::problem::TokenDtype;
use nvfp4::router::{Score, Scoring};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::error::exception;
use crate::tensor::token_type;

/// Returns the parts of layer `layer` of the checkpoint at `path`, for tokens of type `dtype`. Python's `MoeBlock` is the
/// only reader.
#[pyfunction]
pub fn read_moe<'py>(
    py: Python<'py>,
    path: PathBuf,
    layer: usize,
    dtype: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyDict>> {
    let dtype = token_type(dtype)?;
    let checkpoint = Checkpoint::open(&path).map_err(exception)?;
    let layer = checkpoint.moe_layer(layer, dtype).map_err(exception)?;
    let mut all = layer.around.iter().filter_map(Around::branch).chain([&layer.weights]);
    all.try_for_each(|weights| weights.check_no_transforms("nvfp4.MoeBlock")).map_err(exception)?;
    let parts = PyDict::new(py);
    parts.set_item("hidden", layer.hidden())?;
    parts.set_item("top_k", layer.weights.sizes().top_k)?;
    parts.set_item("router", router(py, &layer)?)?;
    parts.set_item("experts", weights(py, &layer.weights, dtype)?)?;
    parts.set_item("around", layer.around.as_ref().map(|around| surroundings(py, around, dtype)).transpose()?)?;
    parts.set_item("used", layer.tensors.used)?;
    checkpoint.check_unchanged().map_err(exception)?;
    Ok(parts)
}

/// Bytes of numbers.
fn bytes<'py, T: bytemuck::NoUninit>(py: Python<'py>, numbers: &[T]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, bytemuck::cast_slice(numbers))
}

/// The router: matrix, bias, norm, gate of the shared expert, factors, and the arguments of `nvfp4.route`.
fn router<'py>(py: Python<'py>, layer: &MoeLayer<'_>) -> PyResult<Bound<'py, PyDict>> {
    let LayerRouter { matrix, bias, norm: of_tokens, shared_gate, shared_factor, rule, factor, transform } =
        &layer.router;
    let parts = PyDict::new(py);
    parts.set_item("matrix", bytes(py, matrix))?;
    parts.set_item("logit_bias", bytes(py, bias))?;
    parts.set_item("norm", of_tokens.as_ref().map(|of_tokens| norm(py, of_tokens)).transpose()?)?;
    parts.set_item("shared_gate", shared_gate.as_ref().map(|gate| bytes(py, gate)))?;
    parts.set_item("shared_factor", shared_factor)?;
    parts.set_item("factor", factor)?;
    parts.set_item("weights_on_input", rule.weights_on_input())?;
    let factors = match transform.as_ref().or_else(|| layer.around.as_ref()?.transform()) {
        None => None,
        Some(transform) => Some(transform.factors().ok_or_else(|| {
            let what =
                "nvfp4.MoeBlock does not compute Hadamard transforms of tokens; use `nvfp4 run --op moe --backend cpu`";
            exception(Error::NotComputed(what.into()))
        })?),
    };
    parts.set_item("token_factors", factors.map(|factors| bytes(py, factors)))?;
    let of_rule = rule.rule();
    let scoring = match (rule.scoring(), of_rule.score) {
        (Scoring::TopKSoftmax, _) => "topk-softmax",
        (Scoring::SigmoidTop1, _) => "sigmoid-top1",
        (_, Score::Softmax) => "softmax",
        (_, Score::Sigmoid) => "sigmoid",
        (_, Score::SqrtSoftplus) => "sqrt-softplus",
    };
    let options = PyDict::new(py);
    options.set_item("scoring", scoring)?;
    if !scoring.contains("top") {
        options.set_item("groups", of_rule.groups)?;
        options.set_item("top_groups", of_rule.top_groups)?;
        options.set_item("renormalize", of_rule.renormalize)?;
        options.set_item("scale", of_rule.scale)?;
        options.set_item("null_experts", of_rule.null_experts)?;
        for (name, numbers) in [("bias", &of_rule.bias), ("expert_scale", &of_rule.expert_scale)] {
            options.set_item(name, (!numbers.is_empty()).then(|| bytes(py, numbers)))?;
        }
    }
    parts.set_item("options", options)?;
    parts.set_item("table", of_rule.table.as_ref().map(|table| bytes(py, &table.ids)))?;
    Ok(parts)
}

/// Weights and epsilon of a norm.
fn norm<'py>(py: Python<'py>, Norm { weights, epsilon }: &Norm) -> PyResult<Bound<'py, PyTuple>> {
    (bytes(py, weights), *epsilon).into_pyobject(py)
}

/// Norm and projection (K, matrix, bias), each or nothing.
fn steps<'py>(py: Python<'py>, Steps { norm: first, projection }: &Steps) -> PyResult<Bound<'py, PyTuple>> {
    let first = first.as_ref().map(|first| norm(py, first)).transpose()?;
    (first, projection.as_ref().map(|projection| matrix(py, projection))).into_pyobject(py)
}

/// A float32 matrix for Python: K, the matrix's bytes, the bias's bytes.
type Plain<'py> = (usize, Bound<'py, PyBytes>, Option<Bound<'py, PyBytes>>);

fn matrix<'py>(py: Python<'py>, Projection { k, weights, bias, .. }: &Projection) -> Plain<'py> {
    (*k, bytes(py, weights), bias.as_ref().map(|bias| bytes(py, bias)))
}

/// Returns the activation and the projections of a branch that is not NVFP4. Without a gate, the first projection is `None`.
fn feed_forward<'py>(py: Python<'py>, block: &FeedForward) -> PyResult<Bound<'py, PyDict>> {
    let parts = PyDict::new(py);
    parts.set_item("activation", block.activation.to_string())?;
    let gate = block.gate.as_ref().map(|gate| matrix(py, gate));
    parts.set_item("projections", (gate, matrix(py, &block.up), matrix(py, &block.down)))?;
    Ok(parts)
}

/// What surrounds the experts.
fn surroundings<'py>(py: Python<'py>, around: &Around<'_>, dtype: TokenDtype) -> PyResult<Bound<'py, PyDict>> {
    let parts = PyDict::new(py);
    parts.set_item("before", steps(py, around.before())?)?;
    parts.set_item("behind", steps(py, around.behind())?)?;
    let norms = around.branch_norms().map(|found| found.map(|found| norm(py, found)).transpose());
    let [first, last] = norms;
    parts.set_item("branch_norms", (first?, last?))?;
    parts.set_item("identity_experts", around.identity_experts())?;
    parts.set_item("branch", around.branch().map(|branch| weights(py, branch, dtype)).transpose()?)?;
    parts.set_item("torch_branch", around.host_branch().map(|block| feed_forward(py, block)).transpose()?)?;
    Ok(parts)
}

/// The experts of a layer as `nvfp4.Moe` takes them, without tensors.
fn weights<'py>(py: Python<'py>, weights: &MoeWeights<'_>, dtype: TokenDtype) -> PyResult<Bound<'py, PyDict>> {
    let sizes = weights.sizes();
    let parts = PyDict::new(py);
    parts.set_item("activation", sizes.activation.to_string())?;
    let projections = |experts: &[&MoeExpert<'_>]| -> PyResult<Bound<'py, PyList>> {
        let roles = ["gate", "up", "down"].map(|role| projection(py, experts, role, dtype));
        PyList::new(py, roles.into_iter().collect::<PyResult<Vec<_>>>()?)
    };
    parts.set_item("projections", projections(&weights.experts().iter().collect::<Vec<_>>())?)?;
    parts.set_item("shared", weights.shared().map(|shared| projections(&[shared])).transpose()?)?;
    parts.set_item("biases", sizes.biases)?;
    let count = weights.experts().len() + usize::from(weights.shared().is_some());
    let scales: Option<Vec<_>> = (0..count).map(|expert| weights.input_scales(expert)).collect();
    let scales =
        scales.map(|scales| scales.into_iter().map(|scales| (scales.gate_up, scales.down)).collect::<Vec<_>>());
    parts.set_item("input_scales", scales)?;
    parts.set_item("input_scale_fault", weights.input_scale_fault())?;
    Ok(parts)
}

/// Shape, values, scales, global scales and biases of a projection of all experts; nothing if they do not have it.
fn projection<'py>(
    py: Python<'py>,
    experts: &[&MoeExpert<'_>],
    role: &str,
    dtype: TokenDtype,
) -> PyResult<Option<Bound<'py, PyTuple>>> {
    let found = experts.iter().filter_map(|expert| expert.projections().find(|(name, ..)| *name == role));
    let found: Vec<(_, &Matrix<'_>, Option<&Bias<'_>>)> = found.collect();
    let Some((_, first, _)) = found.first() else { return Ok(None) };
    let joined = |parts: Vec<&[u8]>| {
        PyBytes::new_with(py, parts.iter().map(|part| part.len()).sum(), |buffer| {
            let mut first = 0;
            for part in parts {
                buffer[first..first + part.len()].copy_from_slice(part);
                first += part.len();
            }
            Ok(())
        })
    };
    let values = joined(found.iter().map(|(_, matrix, _)| matrix.values()).collect())?;
    let scales = joined(found.iter().map(|(_, matrix, _)| matrix.scales()).collect())?;
    let globals: Vec<f32> = found.iter().map(|(_, matrix, _)| matrix.global_scale()).collect();
    let biases: Vec<f32> = found
        .iter()
        .flat_map(|(_, matrix, bias)| {
            bias.map_or_else(|| vec![0.0; matrix.rows()], |bias| bias.numbers(dtype).into_owned())
        })
        .collect();
    let shape = (found.len(), first.rows(), first.k());
    Ok(Some((shape, values, scales, globals, bytes(py, &biases)).into_pyobject(py)?))
}
