//! The operator `nvfp4::route`.

use nvfp4::backend::{Backend, cpu::Cpu, cuda::RouterArguments};
use nvfp4::problem::TokenDtype;
use nvfp4::router::{GroupScore, LogitType, Logits, Router, Rule, Score, Scoring, Table};
use pyo3::prelude::*;

use crate::device::{current_stream, launchers};
use crate::error::{exception, invalid};
use crate::tensor::{Dtype, Place, Tensor};

/// Arguments of a rule that are not tensors.
#[derive(FromPyObject)]
pub struct Options {
    #[pyo3(item)]
    scoring: String,
    #[pyo3(item)]
    groups: usize,
    #[pyo3(item)]
    top_groups: usize,
    #[pyo3(item)]
    renormalize: bool,
    #[pyo3(item)]
    scale: f32,
    #[pyo3(item)]
    null_experts: usize,
}

/// Lists of a rule.
struct Lists<'py> {
    bias: Option<Tensor<'py>>,
    expert_scale: Option<Tensor<'py>>,
    table: Option<Tensor<'py>>,
    token_ids: Option<Tensor<'py>>,
}

/// Writes the experts of each token to `ids` and their weights to `weights`. `lists` are the tensors of the rule: bias,
/// expert_scale, table, token_ids.
#[pyfunction]
pub fn route(
    py: Python<'_>,
    weights: &Bound<'_, PyAny>,
    ids: &Bound<'_, PyAny>,
    logits: &Bound<'_, PyAny>,
    lists: [Option<Bound<'_, PyAny>>; 4],
    options: Options,
) -> PyResult<()> {
    let [weights, ids, logits] =
        [("weights", weights), ("ids", ids), ("logits", logits)].map(|(name, tensor)| Tensor::read(name, tensor));
    let (weights, ids, logits) = (weights?, ids?, logits?);
    logits.expect_dtype(&[Dtype::F32, Dtype::Bf16, Dtype::F16])?;
    let [tokens, experts] = logits.expect_dimensions("[tokens, experts]")?;
    let [_, top_k] = ids.expect_dimensions("[tokens, experts of a token]")?;
    for (tensor, dtype) in [(&weights, Dtype::F32), (&ids, Dtype::I32)] {
        tensor.expect_dtype(&[dtype])?;
        tensor.expect_shape(&[tokens, top_k])?;
        tensor.expect_contiguous()?;
        tensor.expect_place(logits.place)?;
    }
    let lists = Lists::read(&lists, &logits, [tokens, experts, top_k])?;
    let router = Router::new(experts, top_k, lists.scoring(&options, [experts, top_k])?).map_err(exception)?;
    match logits.place {
        Place::Cpu => on_the_cpu(py, &router, &weights, &ids, &logits, lists.token_ids.as_ref()),
        Place::Cuda(ordinal) => {
            let address = |list: &Option<Tensor<'_>>| list.as_ref().map_or(0, |list| list.address);
            let arguments = RouterArguments {
                token_count: tokens,
                logits: logits.address,
                logit_type: match logits.dtype {
                    Dtype::F32 => LogitType::F32,
                    Dtype::Bf16 => LogitType::Token(TokenDtype::Bf16),
                    _ => LogitType::Token(TokenDtype::F16),
                },
                logits_stride: logits.row_stride()?,
                bias: address(&lists.bias),
                expert_scale: address(&lists.expert_scale),
                table: address(&lists.table),
                token_ids: address(&lists.token_ids),
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

impl<'py> Lists<'py> {
    /// Reads and checks the tensors of a rule.
    fn read(
        lists: &[Option<Bound<'py, PyAny>>; 4],
        logits: &Tensor<'_>,
        [tokens, experts, top_k]: [usize; 3],
    ) -> PyResult<Self> {
        let read = |index: usize, name, dtype| {
            let Some(tensor) = Tensor::read_optional(name, lists[index].as_ref())? else { return Ok(None) };
            tensor.expect_dtype(&[dtype])?;
            match index {
                0 | 1 => tensor.expect_shape(&[experts])?,
                2 => {
                    let [vocabulary, _] = tensor.expect_dimensions("[token ids, experts of a token]")?;
                    tensor.expect_shape(&[vocabulary, top_k])?;
                }
                _ => tensor.expect_shape(&[tokens])?,
            }
            tensor.expect_contiguous()?;
            tensor.expect_place(logits.place)?;
            Ok::<_, PyErr>(Some(tensor))
        };
        let (bias, expert_scale) = (read(0, "bias", Dtype::F32)?, read(1, "expert_scale", Dtype::F32)?);
        let (table, token_ids) = (read(2, "table", Dtype::I32)?, read(3, "token_ids", Dtype::I32)?);
        if table.is_some() != token_ids.is_some() {
            return Err(invalid("token_ids", "pass both a table and token ids, or neither"));
        }
        Ok(Self { bias, expert_scale, table, token_ids })
    }

    /// Returns the numbers of a list in CPU memory, and zeros for a list on a GPU, which the kernel reads itself.
    fn numbers(list: &Option<Tensor<'_>>, experts: usize) -> PyResult<Vec<f32>> {
        match list {
            None => Ok(Vec::new()),
            // SAFETY: a contiguous CPU tensor of `experts` f32, which the caller keeps alive.
            Some(list) if list.place == Place::Cpu => Ok(unsafe { list.elements::<f32>(experts)? }.to_vec()),
            Some(_) => Ok(vec![0.0; experts]),
        }
    }

    /// Returns the scoring: a usual one where it has the same meaning, or a rule.
    fn scoring(&self, options: &Options, [experts, top_k]: [usize; 2]) -> PyResult<Scoring> {
        let &Options { ref scoring, groups, top_groups, renormalize, scale, null_experts } = options;
        let score = match scoring.as_str() {
            "topk-softmax" | "sigmoid-top1" => None,
            "softmax" => Some(Score::Softmax),
            "sigmoid" => Some(Score::Sigmoid),
            "sqrt-softplus" => Some(Score::SqrtSoftplus),
            other => {
                let text = format_args!(
                    "unknown scoring `{other}`; expected softmax, topk-softmax, sigmoid, sqrt-softplus or sigmoid-top1"
                );
                return Err(invalid("scoring", text));
            }
        };
        let table = match &self.table {
            None => None,
            Some(table) => {
                let vocabulary = table.len() / top_k.max(1);
                let ids = match table.place {
                    // SAFETY: a contiguous CPU tensor of i32, which the caller keeps alive.
                    Place::Cpu => unsafe { table.elements::<i32>(table.len())? }.to_vec(),
                    Place::Cuda(_) => Vec::new(),
                };
                Some(Table { vocabulary, ids })
            }
        };
        let is_plain = self.expert_scale.is_none() && table.is_none() && null_experts == 0;
        let has_groups = groups > 1 || scale != 1.0;
        let Some(score) = score else {
            if !is_plain || has_groups || self.bias.is_some() {
                let text = format_args!("{scoring} has no other arguments; omit them or take another scoring");
                return Err(invalid("scoring", text));
            }
            return Ok(if scoring == "topk-softmax" { Scoring::TopKSoftmax } else { Scoring::SigmoidTop1 });
        };
        let bias = Self::numbers(&self.bias, experts)?;
        Ok(match score {
            Score::Softmax if is_plain && !has_groups && bias.is_empty() => Scoring::Softmax { renormalize },
            Score::Sigmoid if is_plain && !bias.is_empty() => {
                Scoring::SigmoidGroups { bias, groups, top_groups, renormalize, scale }
            }
            score => Scoring::Rule(Rule {
                score,
                groups,
                top_groups,
                group_score: if bias.is_empty() { GroupScore::Best } else { GroupScore::BestTwo },
                bias,
                renormalize,
                scale,
                expert_scale: Self::numbers(&self.expert_scale, experts)?,
                null_experts,
                table,
            }),
        })
    }
}

fn on_the_cpu(
    py: Python<'_>,
    router: &Router,
    weights: &Tensor<'_>,
    ids: &Tensor<'_>,
    logits: &Tensor<'_>,
    token_ids: Option<&Tensor<'_>>,
) -> PyResult<()> {
    logits.expect_contiguous()?;
    // SAFETY: the tensors are contiguous and have these types and lengths, and the caller keeps them alive. By the
    // operator's contract nothing writes them during the call.
    let (numbers, token_ids, to_ids, to_weights) = unsafe {
        let numbers = match logits.dtype {
            Dtype::F32 => Logits::F32(logits.elements::<f32>(logits.len())?.into()),
            Dtype::Bf16 => Logits::Bf16(logits.elements::<u16>(logits.len())?.into()),
            _ => Logits::F16(logits.elements::<u16>(logits.len())?.into()),
        };
        let token_ids = token_ids.map(|ids| ids.elements::<i32>(ids.len())).transpose()?.unwrap_or_default();
        (numbers, token_ids, ids.elements_mut::<i32>(ids.len())?, weights.elements_mut::<f32>(weights.len())?)
    };
    let routes = py.detach(|| Cpu::new().route_with_ids(router, &numbers, token_ids)).map_err(exception)?;
    to_ids.copy_from_slice(&routes.ids);
    to_weights.copy_from_slice(&routes.weights);
    Ok(())
}
