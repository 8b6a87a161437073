//! The router of a model's layer: its matrix, and the rule from `config.json`.

use rayon::prelude::*;

use super::model_config::ModelConfig;
use crate::error::Error;
use crate::moe::{MoeInputs, MoeSizes};
use crate::router::{Logits, Router, Routes, Scoring, route};

/// Models whose routers use grouped sigmoid scores, although their configurations do not mention it.
const BY_SIGMOID: [&str; 4] = ["deepseek_v3", "glm4_moe", "dots1", "nemotron_h"];

/// Returns the scoring rule of a model's router and the factor of the final weights.
///
/// `corrections` are added to sigmoid scores when experts are compared, if the model has them.
///
/// Sources: the modules of transformers (`Qwen3MoeTopKRouter`, `MixtralSparseMoeBlock`, `GptOssTopKRouter`,
/// `GraniteMoeTopKGating`, `DeepseekV2Moe`, `DeepseekV3TopkRouter`, `Llama4Router`).
pub(super) fn scoring(
    config: &ModelConfig,
    experts: usize,
    corrections: Option<Vec<f32>>,
) -> Result<(Scoring, f32), Error> {
    let word = |key: &str| config.get(key).and_then(|value| value.as_str());
    let refuse = |what: String| Err(Error::NotComputed(format!("{what}; this router is not supported")));
    let missing = |name: &str, remedy: &str| Error::Missing { name: name.into(), remedy: remedy.into() };
    let model = word("model_type").unwrap_or_default();
    let is = |names: &[&str]| names.iter().any(|name| model.starts_with(name));
    if is(&["llama4"]) {
        return Ok((Scoring::SigmoidTop1, 1.0));
    }
    if is(&["gpt_oss", "granitemoe"]) {
        return Ok((Scoring::TopKSoftmax, 1.0));
    }
    let renormalize = match config.get("norm_topk_prob").and_then(|value| value.as_bool()) {
        Some(renormalize) => Ok(renormalize),
        None if is(&["mixtral", "minimax_m2"]) => Ok(true),
        None => {
            let remedy = "add this key: true if the weights of a token's experts are divided by their sum";
            Err(missing("norm_topk_prob", remedy))
        }
    };
    let scale = config.get("routed_scaling_factor").and_then(|value| value.as_f64()).unwrap_or(1.0) as f32;
    let is_sigmoid = match word("scoring_func").or_else(|| word("score_function")) {
        None => is(&BY_SIGMOID),
        Some("softmax") => false,
        Some("sigmoid") => true,
        Some(other) => return refuse(format!("its router scores with {other}")),
    };
    let usual = if is_sigmoid { "noaux_tc" } else { "greedy" };
    if let Some(method) = word("topk_method").filter(|&method| method != usual) {
        return refuse(format!("topk_method is {method}"));
    }
    if !is_sigmoid {
        return Ok((Scoring::Softmax { renormalize: renormalize? }, scale));
    }
    let number = |key: &'static str| match config.number(&[key]) {
        Some((_, number)) => Ok(number),
        None if is(&["deepseek"]) => Err(missing(key, "download the model again")),
        None => Ok(1),
    };
    let scoring = Scoring::SigmoidGroups {
        bias: corrections.unwrap_or_else(|| vec![0.0; experts]),
        groups: number("n_group")?,
        top_groups: number("topk_group")?,
        renormalize: renormalize?,
        scale,
    };
    Ok((scoring, 1.0))
}

/// Router of a layer: a small matrix and a rule.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerRouter {
    /// Matrix `[E, H]`.
    pub matrix: Vec<f32>,
    /// Bias of the logits, `[E]`.
    pub bias: Vec<f32>,
    /// Gate of the shared expert, `[H]`: the sigmoid of its dot product with a token is the weight of the shared
    /// expert. `None`: the shared expert has no gate.
    pub shared_gate: Option<Vec<f32>>,
    /// Rule that turns logits into experts and weights.
    pub rule: Router,
    /// Factor of the final weights.
    pub factor: f32,
}

impl LayerRouter {
    /// Builds the step of tokens `[T, H]` without gaps, with the experts that the router chooses. Logits are summed in
    /// f64 and rounded to f32.
    ///
    /// # Errors
    /// Returns an error if there are too many tokens.
    pub fn inputs(&self, sizes: MoeSizes, hidden: Vec<u16>) -> Result<MoeInputs<'static>, Error> {
        let tokens = hidden.len() / sizes.hidden;
        let scores = hidden.par_chunks(sizes.hidden).map(|token| {
            let token: Vec<f64> = token.iter().map(|&bits| sizes.dtype.decode(bits)).collect();
            let product = |row: &[f32]| token.iter().zip(row).map(|(x, &w)| x * f64::from(w)).sum::<f64>();
            let logits = self.matrix.chunks(sizes.hidden).zip(&self.bias);
            let logits: Vec<f32> = logits.map(|(row, &bias)| (product(row) + f64::from(bias)) as f32).collect();
            let shared = self.shared_gate.as_ref().map(|gate| (1.0 / (1.0 + (-product(gate)).exp())) as f32);
            (logits, shared)
        });
        let (logits, shared): (Vec<_>, Vec<_>) = scores.unzip();
        let Routes { ids, mut weights } = route(&self.rule, &Logits::F32(logits.concat().into()))?;
        weights.iter_mut().for_each(|weight| *weight *= self.factor);
        let shared = shared.into_iter().collect::<Option<Vec<_>>>().filter(|_| self.shared_gate.is_some());
        Ok(MoeInputs {
            tokens,
            hidden: hidden.into(),
            stride: sizes.hidden,
            ids: ids.into(),
            weights: weights.into(),
            weights_on_input: self.rule.weights_on_input(),
            shared_weights: shared.map(Into::into),
        })
    }
}
