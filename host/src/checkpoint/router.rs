//! The router of a model's layer: which experts a token names, with which weights.

use rayon::prelude::*;

use super::model_config::ModelConfig;
use crate::error::Error;
use crate::moe::{MoeInputs, MoeSizes};

/// How scores become weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Softmax of all scores, of which the largest are taken, times a factor; they may be divided by their sum before.
    Softmax {
        /// Whether they are.
        renormalised: bool,
        /// The factor.
        factor: f32,
    },
    /// The largest scores are taken, and softmax of these.
    SoftmaxOfChosen,
}

impl Rule {
    /// What a model's configuration says.
    ///
    /// Sources: the modules of transformers (`Qwen3MoeTopKRouter`, `MixtralSparseMoeBlock`, `GptOssTopKRouter`,
    /// `GraniteMoeTopKGating`, `DeepseekV2Moe`).
    pub(super) fn of(config: &ModelConfig) -> Result<Self, Error> {
        let word = |key: &str| config.get(key).and_then(|value| value.as_str());
        let refuse = |what: String| Err(Error::NotComputed(format!("{what}; such routers are not computed")));
        let model = word("model_type").unwrap_or_default();
        match word("scoring_func").or_else(|| word("score_function")) {
            None | Some("softmax") => {}
            Some(other) => return refuse(format!("its router's scores are by {other}")),
        }
        if let Some(method) = word("topk_method").filter(|&method| method != "greedy") {
            return refuse(format!("topk_method is {method}"));
        }
        // These choose by sigmoid scores, whether or not their configurations say so.
        let by_sigmoid = ["llama4", "deepseek_v3", "glm4_moe", "dots1", "minimax_m2", "ernie4_5_moe", "kimi"];
        if by_sigmoid.iter().any(|name| model.starts_with(name)) {
            return refuse(format!("model_type is {model}, whose router's scores are sigmoid or corrected"));
        }
        if ["gpt_oss", "granitemoe"].iter().any(|name| model.starts_with(name)) {
            return Ok(Self::SoftmaxOfChosen);
        }
        let renormalised = match config.get("norm_topk_prob").and_then(|value| value.as_bool()) {
            Some(renormalised) => renormalised,
            None if model == "mixtral" => true,
            None => {
                let remedy = "add it: true if the weights of a token's experts are divided by their sum";
                return Err(Error::Missing { name: "norm_topk_prob".into(), remedy: remedy.into() });
            }
        };
        let factor = config.get("routed_scaling_factor").and_then(|value| value.as_f64()).unwrap_or(1.0);
        Ok(Self::Softmax { renormalised, factor: factor as f32 })
    }
}

/// A router: a small matrix and a rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Router {
    /// `[E, H]`.
    pub matrix: Vec<f32>,
    /// What is added to scores, E numbers.
    pub bias: Vec<f32>,
    /// H numbers, whose product with a token goes through a sigmoid and is the shared expert's weight, if it has one.
    pub shared_gate: Option<Vec<f32>>,
    /// Experts that a token names.
    pub top_k: usize,
    /// How scores become weights.
    pub rule: Rule,
}

impl Router {
    /// The step of tokens `[T, H]` without gaps, with the experts that the router chooses for them. Scores are summed in f64.
    pub fn inputs(&self, sizes: MoeSizes, hidden: Vec<u16>) -> MoeInputs<'static> {
        let tokens = hidden.len() / sizes.hidden;
        let choices = hidden.par_chunks(sizes.hidden).map(|token| {
            let token: Vec<f64> = token.iter().map(|&bits| sizes.dtype.decode(bits)).collect();
            let product = |row: &[f32]| token.iter().zip(row).map(|(x, &w)| x * f64::from(w)).sum::<f64>();
            let scores = self.matrix.chunks(sizes.hidden).zip(&self.bias);
            let scores: Vec<f64> = scores.map(|(row, &bias)| product(row) + f64::from(bias)).collect();
            let shared = self.shared_gate.as_ref().map(|gate| (1.0 / (1.0 + (-product(gate)).exp())) as f32);
            (choose(&scores, self.top_k, self.rule), shared)
        });
        let (chosen, shared): (Vec<_>, Vec<_>) = choices.unzip();
        let (ids, weights): (Vec<i32>, Vec<f32>) = chosen.into_iter().flatten().unzip();
        MoeInputs {
            tokens,
            hidden: hidden.into(),
            stride: sizes.hidden,
            ids: ids.into(),
            weights: weights.into(),
            shared_weights: shared
                .into_iter()
                .collect::<Option<Vec<_>>>()
                .filter(|_| self.shared_gate.is_some())
                .map(Into::into),
            ..Default::default()
        }
    }
}

/// The experts of the largest scores with their weights, the largest first; of equal ones the lower expert.
fn choose(scores: &[f64], top_k: usize, rule: Rule) -> Vec<(i32, f32)> {
    let mut experts: Vec<usize> = (0..scores.len()).collect();
    experts.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    let largest = experts.first().map_or(0.0, |&expert| scores[expert]);
    let power = |expert: usize| (scores[expert] - largest).exp();
    let all: f64 = (0..scores.len()).map(power).sum();
    experts.truncate(top_k);
    let chosen: f64 = experts.iter().map(|&expert| power(expert)).sum();
    let (sum, factor) = match rule {
        Rule::Softmax { renormalised: false, factor } => (all, factor),
        Rule::Softmax { factor, .. } => (chosen, factor),
        Rule::SoftmaxOfChosen => (chosen, 1.0),
    };
    experts.into_iter().map(|expert| (expert as i32, (power(expert) / sum * f64::from(factor)) as f32)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_scores_are_chosen_and_of_equal_ones_the_lower_expert() {
        let softmax = |renormalised| Rule::Softmax { renormalised, factor: 2.0 };
        let scores = [0.0, 3f64.ln(), 0.0, 3f64.ln()];
        // Of 1 + 3 + 1 + 3, the chosen have 3 and 3, then 1.
        let near = |found: Vec<(i32, f32)>, expected: &[(i32, f32)]| {
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(expected) {
                assert!(found.0 == expected.0 && (found.1 - expected.1).abs() < 1e-6, "{found:?} {expected:?}");
            }
        };
        near(choose(&scores, 3, softmax(false)), &[(1, 0.75), (3, 0.75), (0, 0.25)]);
        near(choose(&scores, 2, softmax(true)), &[(1, 1.0), (3, 1.0)]);
        near(choose(&scores, 3, Rule::SoftmaxOfChosen), &[(1, 3.0 / 7.0), (3, 3.0 / 7.0), (0, 1.0 / 7.0)]);
    }
}
