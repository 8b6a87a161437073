//! The operator `nvfp4::route`.

use nvfp4::backend::{Backend, cpu::Cpu, cuda::RouterArguments};
use nvfp4::problem::TokenDtype;
use nvfp4::router::{LogitType, Logits, Router, Scoring};
use pyo3::prelude::*;

use crate::device::{current_stream, launchers};
use crate::error::{exception, invalid};
use crate::tensor::{Dtype, Place, Tensor};

/// Writes the experts of each token to `ids` and their weights to `weights`.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "each operand is a named argument of the operator")]
pub fn route(
    py: Python<'_>,
    weights: &Bound<'_, PyAny>,
    ids: &Bound<'_, PyAny>,
    logits: &Bound<'_, PyAny>,
    scoring: &str,
    bias: Option<&Bound<'_, PyAny>>,
    groups: usize,
    top_groups: usize,
    renormalize: bool,
    scale: f32,
) -> PyResult<()> {
    let [weights, ids, logits] =
        [("weights", weights), ("ids", ids), ("logits", logits)].map(|(name, tensor)| Tensor::read(name, tensor));
    let (weights, ids, logits) = (weights?, ids?, logits?);
    let bias = Tensor::read_optional("bias", bias)?;
    logits.expect_dtype(&[Dtype::F32, Dtype::Bf16, Dtype::F16])?;
    let [tokens, experts] = logits.expect_dimensions("[tokens, experts]")?;
    let [_, top_k] = ids.expect_dimensions("[tokens, experts of a token]")?;
    for (tensor, dtype) in [(&weights, Dtype::F32), (&ids, Dtype::I32)] {
        tensor.expect_dtype(&[dtype])?;
        tensor.expect_shape(&[tokens, top_k])?;
        tensor.expect_contiguous()?;
        tensor.expect_place(logits.place)?;
    }
    if let Some(bias) = &bias {
        bias.expect_dtype(&[Dtype::F32])?;
        bias.expect_shape(&[experts])?;
        bias.expect_contiguous()?;
        bias.expect_place(logits.place)?;
    }
    let numbers = match (&bias, logits.place) {
        // SAFETY: `bias` is a contiguous CPU tensor of `experts` f32, and the caller keeps it alive.
        (Some(bias), Place::Cpu) => unsafe { bias.elements::<f32>(experts)? }.to_vec(),
        // On a GPU the kernel reads the biases.
        _ => vec![0.0; experts],
    };
    let scoring = match scoring {
        "softmax" => Scoring::Softmax { renormalize },
        "topk-softmax" => Scoring::TopKSoftmax,
        "sigmoid-top1" => Scoring::SigmoidTop1,
        "sigmoid" => Scoring::SigmoidGroups { bias: numbers, groups, top_groups, renormalize, scale },
        other => {
            let text =
                format_args!("unknown scoring `{other}`; expected softmax, topk-softmax, sigmoid or sigmoid-top1");
            return Err(invalid("scoring", text));
        }
    };
    if bias.is_some() && !matches!(scoring, Scoring::SigmoidGroups { .. }) {
        return Err(invalid("bias", "only sigmoid scoring supports a bias; omit it"));
    }
    let router = Router::new(experts, top_k, scoring).map_err(exception)?;
    match logits.place {
        Place::Cpu => on_the_cpu(py, &router, &weights, &ids, &logits),
        Place::Cuda(ordinal) => {
            let bias = match (&bias, router.bias()) {
                (None, Some(_)) => return Err(invalid("bias", "sigmoid scoring needs a bias; pass zeros for no bias")),
                (bias, _) => bias.as_ref().map_or(0, |bias| bias.address),
            };
            let arguments = RouterArguments {
                token_count: tokens,
                logits: logits.address,
                logit_type: match logits.dtype {
                    Dtype::F32 => LogitType::F32,
                    Dtype::Bf16 => LogitType::Token(TokenDtype::Bf16),
                    _ => LogitType::Token(TokenDtype::F16),
                },
                logits_stride: logits.row_stride()?,
                bias,
                ids: ids.address,
                weights: weights.address,
            };
            let stream = current_stream(py, ordinal)?;
            // SAFETY: PyTorch's streams belong to the primary context. The tensors' sizes, types and device were
            // checked. PyTorch's allocator reuses their memory only for later work on the stream.
            unsafe { launchers(ordinal)?.router()?.launch(&router, &arguments, stream) }.map_err(exception)
        }
    }
}

fn on_the_cpu(
    py: Python<'_>,
    router: &Router,
    weights: &Tensor<'_>,
    ids: &Tensor<'_>,
    logits: &Tensor<'_>,
) -> PyResult<()> {
    logits.expect_contiguous()?;
    // SAFETY: the tensors are contiguous and have these types and lengths, and the caller keeps them alive. By the
    // operator's contract nothing writes them during the call.
    let (numbers, to_ids, to_weights) = unsafe {
        let numbers = match logits.dtype {
            Dtype::F32 => Logits::F32(logits.elements::<f32>(logits.len())?.into()),
            Dtype::Bf16 => Logits::Bf16(logits.elements::<u16>(logits.len())?.into()),
            _ => Logits::F16(logits.elements::<u16>(logits.len())?.into()),
        };
        (numbers, ids.elements_mut::<i32>(ids.len())?, weights.elements_mut::<f32>(weights.len())?)
    };
    let routes = py.detach(|| Cpu::new().route(router, &numbers)).map_err(exception)?;
    to_ids.copy_from_slice(&routes.ids);
    to_weights.copy_from_slice(&routes.weights);
    Ok(())
}
