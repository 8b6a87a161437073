//! The router of a model's layer: its matrix, and the rule from `config.json`.

use rayon::prelude::*;

use super::around::Norm;
use super::model_config::ModelConfig;
use nvfp4_core::Error;
use nvfp4_core::moe::{MoeInputs, MoeSizes};
use nvfp4_core::router::{Logits, Router, Routes, Rule, Score, Scoring, Table, route_with_ids};
use nvfp4_core::transform::TokenTransform;

/// Models whose routers use sigmoid scores, although their configurations do not mention it.
const BY_SIGMOID: [&str; 16] = [
    "deepseek_v3",
    "glm4_moe",
    "glm4v_moe",
    "glm_moe",
    "dots1",
    "nemotron_h",
    "lfm2_moe",
    "minimax_m2",
    "minimax_m3",
    "bailing_hybrid",
    "exaone_moe",
    "solar_open",
    "afmoe",
    "mimo_v2",
    "kimi_linear",
    "kimi_k3",
];

/// Models whose weights are always divided by their sum, although their configurations do not mention it.
const RENORMALIZED: [&str; 7] = ["mixtral", "minimax", "qwen3_5", "qwen3_6", "hunyuan", "ernie4_5", "afmoe"];

/// Models with a router of their own that is not computed.
const NOT_COMPUTED: [(&str, &str); 2] = [
    ("phimoe", "SparseMixer (phimoe)"),
    ("longcat", "one with identity experts, which add the token itself (LongCat-Flash)"),
];

/// Configuration keys; models name the same number differently.
const SCORING: [&str; 5] =
    ["scoring_func", "score_function", "score_func", "moe_router_activation_func", "moe_router_activation"];
const RENORMALIZE: [&str; 4] = ["norm_topk_prob", "norm_expert_weight", "moe_renormalize", "route_norm"];
const FACTOR: [&str; 3] = ["routed_scaling_factor", "moe_router_scaling_factor", "route_scale"];

/// Rule of a model's router, without the numbers of the layer's corrections.
#[derive(Clone, Debug)]
pub(super) struct RouterRule {
    /// Without corrections.
    scoring: Scoring,
    /// Factor of the final weights.
    factor: f32,
}

impl RouterRule {
    /// Reads the rule from a model's configuration. `has_corrections`: the layer has numbers that are added to the
    /// scores when experts are compared.
    ///
    /// Sources: the modules of transformers (`Qwen3MoeTopKRouter`, `Qwen3_5MoeTopKRouter`, `MixtralSparseMoeBlock`,
    /// `GptOssTopKRouter`, `GraniteMoeTopKGating`, `DeepseekV2Moe`, `DeepseekV3TopkRouter`, `Llama4Router`,
    /// `Lfm2MoeSparseMoeBlock`, `HunYuanMoEV1Gate`, `Ernie4_5_MoeTopKRouter`, `DeepseekV4TopKRouter`,
    /// `DeepseekV4HashRouter`, `Gemma4TextRouter`, `AfmoeTokenChoiceRouter` and the `TopkRouter` of bailing_hybrid, exaone_moe, glm4v_moe,
    /// glm_moe_dsa, solar_open and mimo_v2_flash) and vLLM's `step3p5.py`.
    pub(super) fn of(config: &ModelConfig, has_corrections: bool) -> Result<Self, Error> {
        let is = |names: &[&str]| names.iter().any(|name| config.is_model(name));
        let refuse = |what: String| Err(Error::NotComputed(format!("{what}; this router is not supported")));
        if let Some((_, what)) = NOT_COMPUTED.iter().find(|(model, _)| config.is_model(model)) {
            return refuse(format!("its router is {what}"));
        }
        if is(&["llama4"]) {
            return Ok(Self { scoring: Scoring::SigmoidTop1, factor: 1.0 });
        }
        if is(&["gpt_oss", "granitemoe"]) {
            return Ok(Self { scoring: Scoring::TopKSoftmax, factor: 1.0 });
        }
        if is(&["gemma4"]) {
            let rule = Rule { renormalize: true, ..Rule::default() };
            return Ok(Self { scoring: Scoring::Rule(rule), factor: 1.0 });
        }
        let value = |keys: &[&str]| keys.iter().find_map(|key| config.get(key));
        let word = |keys: &[&str]| value(keys).and_then(|value| value.as_str());
        let factor = value(&FACTOR).and_then(|value| value.as_f64()).unwrap_or(1.0) as f32;
        let score = match word(&SCORING) {
            None if is(&BY_SIGMOID) => Score::Sigmoid,
            None | Some("softmax") => Score::Softmax,
            Some("sigmoid") => Score::Sigmoid,
            Some("sqrtsoftplus") => Score::SqrtSoftplus,
            Some(other) => return refuse(format!("its router scores with {other}")),
        };
        let is_plain = score == Score::Softmax && !has_corrections;
        let method = word(&["topk_method"]);
        // DeepSeek-V2 compares groups by their best expert.
        let by_best_of_group = is_plain && method == Some("group_limited_greedy");
        let usual = if is_plain { "greedy" } else { "noaux_tc" };
        if let Some(method) = method.filter(|&method| method != usual && !by_best_of_group) {
            return refuse(format!("topk_method is {method}"));
        }
        let renormalize = match value(&RENORMALIZE).and_then(|value| value.as_bool()) {
            Some(renormalize) => renormalize,
            None if is(&RENORMALIZED) => true,
            None if is(&["jamba"]) => false,
            None => {
                let remedy = "add this key: true if the weights of a token's experts are divided by their sum";
                return Err(Error::Missing { name: RENORMALIZE[0].into(), remedy: remedy.into() });
            }
        };
        if is_plain && !by_best_of_group {
            return Ok(Self { scoring: Scoring::Softmax { renormalize }, factor });
        }
        let number = |keys: &[&'static str]| match config.number(keys) {
            Some((_, number)) => Ok(number),
            None if is(&["deepseek_v2", "deepseek_v3", "deepseek_vl"]) => {
                Err(Error::Missing { name: keys[0].into(), remedy: "download the model again".into() })
            }
            None => Ok(1),
        };
        let groups = number(&["n_group", "num_expert_group"])?;
        let top_groups = number(&["topk_group"])?;
        if score != Score::Sigmoid {
            let (groups, top_groups) = if by_best_of_group { (groups, top_groups) } else { (1, 1) };
            let rule = Rule { score, groups, top_groups, renormalize, scale: factor, ..Rule::default() };
            return Ok(Self { scoring: Scoring::Rule(rule), factor: 1.0 });
        }
        let scoring = Scoring::SigmoidGroups { bias: Vec::new(), groups, top_groups, renormalize, scale: factor };
        Ok(Self { scoring, factor: 1.0 })
    }

    /// Whether corrections are added to the scores when experts are compared.
    pub(super) fn has_corrections(&self) -> bool {
        matches!(self.scoring, Scoring::SigmoidGroups { .. } | Scoring::Rule(_))
    }

    /// Factor of the final weights.
    pub(super) fn factor(&self) -> f32 {
        self.factor
    }

    /// Returns the rule for a layer of `experts` experts, completed by tensors of the layer: `corrections` of the scores,
    /// one factor of the weights per expert (`expert_scale`, may be empty), and the `table` of experts by token id.
    pub(super) fn scoring(
        &self,
        experts: usize,
        corrections: Option<Vec<f32>>,
        expert_scale: Vec<f32>,
        table: Option<Table>,
    ) -> Scoring {
        let mut scoring = self.scoring.clone();
        match &mut scoring {
            Scoring::SigmoidGroups { bias, .. } => *bias = corrections.unwrap_or_else(|| vec![0.0; experts]),
            Scoring::Rule(rule) => {
                (rule.bias, rule.expert_scale, rule.table) = (corrections.unwrap_or_default(), expert_scale, table);
            }
            _ => {}
        }
        scoring
    }
}

/// Router of a layer: a small matrix and a rule.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerRouter {
    /// Matrix `[E, H]`.
    pub matrix: Vec<f32>,
    /// Bias of the logits, `[E]`.
    pub bias: Vec<f32>,
    /// Norm of the tokens before the matrix (Gemma 4). `None`: the matrix multiplies the tokens themselves.
    pub norm: Option<Norm>,
    /// Gate of the shared expert, `[H]`: the sigmoid of its dot product with a token is the weight of the shared
    /// expert. `None`: the shared expert has no gate.
    pub shared_gate: Option<Vec<f32>>,
    /// Rule that turns logits into experts and weights.
    pub rule: Router,
    /// Factor of the final weights.
    pub factor: f32,
    /// Change of the tokens after routing: the transform that all experts share (`pre_quant_scale` of NVFP4_AWQ). `None`:
    /// the experts read the tokens as they are.
    pub transform: Option<TokenTransform>,
}

impl LayerRouter {
    /// Builds the step of tokens `[T, H]` without gaps, with the experts that the router chooses. Logits are summed in
    /// f64 and rounded to f32. Then the tokens are transformed for the experts.
    ///
    /// # Errors
    /// Returns an error if there are too many tokens, the router needs their ids, or a transformed token is not finite.
    pub fn inputs(&self, sizes: MoeSizes, hidden: Vec<u16>) -> Result<MoeInputs<'static>, Error> {
        self.inputs_with_ids(sizes, hidden, &[])
    }

    /// Number of token ids that choose experts by a table; `None` if the router chooses by scores.
    pub fn vocabulary(&self) -> Option<usize> {
        self.rule.rule().table.as_ref().map(|table| table.vocabulary)
    }

    /// Same as [`Self::inputs`], with the id of each token for a router with a table.
    ///
    /// # Errors
    /// Returns an error if there are too many tokens, their width is not the router's, the number of ids does not fit, or a
    /// transformed token is not finite.
    pub fn inputs_with_ids(
        &self,
        sizes: MoeSizes,
        mut hidden: Vec<u16>,
        token_ids: &[i32],
    ) -> Result<MoeInputs<'static>, Error> {
        let (got, expected) = (self.matrix.len(), self.bias.len() * sizes.hidden);
        if got != expected {
            return Err(Error::Mismatch { what: "elements of the router's matrix", got, expected });
        }
        let tokens = hidden.len() / sizes.hidden;
        let scores = hidden.par_chunks(sizes.hidden).map(|token| {
            let mut token: Vec<f64> = token.iter().map(|&bits| sizes.dtype.decode(bits)).collect();
            let product =
                |token: &[f64], row: &[f32]| token.iter().zip(row).map(|(x, &w)| x * f64::from(w)).sum::<f64>();
            let shared = self.shared_gate.as_ref().map(|gate| (1.0 / (1.0 + (-product(&token, gate)).exp())) as f32);
            self.norm.iter().for_each(|norm| norm.apply(&mut token));
            let logits = self.matrix.chunks(sizes.hidden).zip(&self.bias);
            let logits: Vec<f32> = logits.map(|(row, &bias)| (product(&token, row) + f64::from(bias)) as f32).collect();
            (logits, shared)
        });
        let (logits, shared): (Vec<_>, Vec<_>) = scores.unzip();
        let Routes { ids, mut weights } = route_with_ids(&self.rule, &Logits::F32(logits.concat().into()), token_ids)?;
        weights.iter_mut().for_each(|weight| *weight *= self.factor);
        let shared = shared.into_iter().collect::<Option<Vec<_>>>().filter(|_| self.shared_gate.is_some());
        if let Some(transform) = &self.transform {
            transform.tokens(sizes.dtype, sizes.hidden, &mut hidden)?;
        }
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
