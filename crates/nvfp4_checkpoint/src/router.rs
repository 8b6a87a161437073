//! The router of a model's layer: its matrix, and the rule from `config.json`.

use rayon::prelude::*;
use serde_json::Value;

use super::around::Norm;
use super::model_config::ModelConfig;
use nvfp4_core::Error;
use nvfp4_core::moe::{MoeInputs, MoeSizes};
use nvfp4_core::router::{GroupScore, Logits, Router, Routes, Rule, Score, Scoring, Table, route_with_ids};
use nvfp4_core::transform::TokenTransform;

/// Models whose routers use sigmoid scores, although their configurations do not mention it.
const BY_SIGMOID: [&str; 26] = [
    "deepseek_v3",
    "glm4_moe",
    "glm4v_moe",
    "glm_moe",
    "glm5_next",
    "dots1",
    "dots3",
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
    "hy_v3",
    "hy_v4",
    "step3p",
    "axk",
    "beam",
    "laguna",
    "sarvam_moe",
    "sarvam_mla",
];

/// Models whose routers use softmax scores, although their configurations do not mention it. If a model is neither here
/// nor in [`BY_SIGMOID`], its router is refused, because a guess could give another layer.
const BY_SOFTMAX: [&str; 17] = [
    "qwen2_moe",
    "qwen3",
    "mixtral",
    "olmoe",
    "flex_olmo",
    "minimax",
    "ernie4_5",
    "hunyuan",
    "jamba",
    "deepseek_v2",
    "deepseek_vl",
    "bailing_moe",
    "mistral4",
    "mistral_large4",
    "mellum",
    "lara_mini",
    "longcat",
];

/// Models whose weights are always divided by their sum, although their configurations do not mention it.
const RENORMALIZED: [&str; 12] = [
    "mixtral",
    "minimax",
    "qwen3_5",
    "qwen3_6",
    "qwen3_vl_moe",
    "hunyuan",
    "ernie4_5",
    "afmoe",
    "hy_v3",
    "mistral_large4",
    "step3p",
    "laguna",
];

/// Models with a router of their own that is not computed.
const NOT_COMPUTED: [(&str, &str); 2] = [
    ("phimoe", "SparseMixer (phimoe)"),
    ("kolibri", "one that compares experts by logit plus bias, and weights them by sigmoid (Kolibri)"),
];

/// Configuration key of the number of identity experts: experts without weights, whose output is the token (LongCat-Flash).
const IDENTITY_EXPERTS: &str = "zero_expert_num";

/// Configuration key of what experts without weights compute.
const IDENTITY_KIND: &str = "zero_expert_type";

/// Models whose layers need not have corrections of the router's choice, of [`BY_SIGMOID`].
const WITHOUT_CORRECTIONS: [&str; 2] = ["lfm2_moe", "step3p"];

/// Configuration keys that say whether a model has corrections of the router's choice.
const HAS_CORRECTIONS: [&str; 5] =
    ["use_routing_bias", "use_expert_bias", "moe_router_enable_expert_bias", "use_moe_router_bias", "moe_use_aux_free"];

/// Configuration key of the comparison of experts.
const METHOD: &str = "topk_method";

/// Configuration keys; models name the same number differently.
const SCORING: [&str; 6] = [
    "scoring_func",
    "score_function",
    "score_func",
    "moe_router_activation_func",
    "moe_router_activation",
    "expert_selection_fn",
];
const RENORMALIZE: [&str; 4] = ["norm_topk_prob", "norm_expert_weight", "moe_renormalize", "route_norm"];
const FACTOR: [&str; 5] = [
    "routed_scaling_factor",
    "router_scaling_factor",
    "moe_router_scaling_factor",
    "moe_routed_scaling_factor",
    "route_scale",
];

/// Configuration keys of steps that are not computed, and the value that means no such step.
const STEPS: [(&str, f64); 3] = [
    ("moe_router_logit_softcapping", 0.0),
    ("router_logit_softcapping", 0.0),
    ("moe_apply_router_weight_on_input", 0.0),
];

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
    /// `DeepseekV4HashRouter`, `Gemma4TextRouter`, `AfmoeTokenChoiceRouter`, `HYV3TopKRouter`, `Step3p7TopKRouter`,
    /// `Mistral4TopkRouter`, `Cohere2MoeTopKRouter`, `LagunaTopKRouter`, `LongcatFlashTopkRouter`, and the `TopkRouter` of axk1, bailing_hybrid, beam,
    /// dots3_note, exaone_moe, glm4v_moe, glm5_next, glm_moe_dsa, hy_v4, mistral_large4, solar_open and mimo_v2_flash) and
    /// vLLM's `step3p5.py`.
    pub(super) fn of(config: &ModelConfig, has_corrections: bool) -> Result<Self, Error> {
        let refuse = |what: String| Err(refused(&what));
        if config.is_model("llama4") {
            return Ok(Self { scoring: Scoring::SigmoidTop1, factor: 1.0 });
        }
        if config.is_any(&["gpt_oss", "granitemoe"]) {
            return Ok(Self { scoring: Scoring::TopKSoftmax, factor: 1.0 });
        }
        if config.is_model("gemma4") {
            let rule = Rule { renormalize: true, ..Rule::default() };
            return Ok(Self { scoring: Scoring::Rule(rule), factor: 1.0 });
        }
        let value = |keys: &[&str]| keys.iter().find_map(|key| config.get(key));
        let factor = typed(config, &FACTOR, "a number", Value::as_f64)?.unwrap_or(1.0) as f32;
        let score = score_of(config)?;
        check_steps(config)?;
        // Cohere's softmax is the softmax of the chosen experts alone.
        if config.is_model("cohere2_moe") && score == Score::Softmax {
            return Ok(Self { scoring: Scoring::TopKSoftmax, factor });
        }
        let is_plain = score == Score::Softmax && !has_corrections;
        let method = typed(config, &[METHOD], "a word", Value::as_str)?;
        // DeepSeek-V2 compares groups by their best expert.
        let by_best_of_group = is_plain && method == Some("group_limited_greedy");
        let usual = if is_plain { "greedy" } else { "noaux_tc" };
        if let Some(method) = method.filter(|&method| method != usual && !by_best_of_group) {
            return refuse(format!("topk_method is {method}"));
        }
        let renormalize = match value(&RENORMALIZE).and_then(|value| value.as_bool()) {
            Some(renormalize) => renormalize,
            None if config.is_any(&RENORMALIZED) => true,
            None if config.is_any(&["jamba", "longcat"]) => false,
            None => {
                let remedy = "add this key: true if the weights of a token's experts are divided by their sum";
                return Err(Error::Missing { name: RENORMALIZE[0].into(), remedy: remedy.into() });
            }
        };
        let null_experts = identity_experts(config)?;
        let is_ungrouped = is_plain && !by_best_of_group;
        let number = |keys: &[&'static str]| match typed(config, keys, "a number", Value::as_u64)? {
            Some(number) => Ok(usize::try_from(number).unwrap_or(usize::MAX)),
            None if !is_ungrouped && config.is_any(&["deepseek_v2", "deepseek_v3", "deepseek_vl"]) => {
                Err(Error::Missing { name: keys[0].into(), remedy: "download the model again".into() })
            }
            None => Ok(1),
        };
        let groups = number(&["n_group", "num_expert_group"])?;
        let top_groups = number(&["topk_group"])?;
        if score != Score::Sigmoid {
            let by_best_two = is_plain && config.is_any(&["mistral4", "mistral_large4"]);
            let has_groups = groups > 1 && top_groups < groups && method != Some("greedy");
            if has_groups && !by_best_of_group && !by_best_two {
                return refuse(format!("n_group is {groups}, and it is unknown how its router compares groups"));
            }
            if is_plain && !has_groups && null_experts == 0 {
                return Ok(Self { scoring: Scoring::Softmax { renormalize }, factor });
            }
            let (groups, top_groups) = if has_groups { (groups, top_groups) } else { (1, 1) };
            let group_score = if by_best_two { GroupScore::BestTwo } else { GroupScore::Best };
            let scale = factor;
            let rule =
                Rule { score, groups, top_groups, group_score, renormalize, scale, null_experts, ..Rule::default() };
            return Ok(Self { scoring: Scoring::Rule(rule), factor: 1.0 });
        }
        if null_experts > 0 {
            return refuse(format!("{IDENTITY_EXPERTS} is {null_experts} and experts are scored by sigmoid"));
        }
        let scoring = Scoring::SigmoidGroups { bias: Vec::new(), groups, top_groups, renormalize, scale: factor };
        Ok(Self { scoring, factor: 1.0 })
    }

    /// Refuses a model with a router that this library knows but does not support.
    ///
    /// # Errors
    /// Returns an error that names the router.
    pub(super) fn check_computed(config: &ModelConfig) -> Result<(), Error> {
        match NOT_COMPUTED.iter().find(|(model, _)| config.is_model(model)) {
            Some((_, what)) => Err(refused(&format!("its router is {what}"))),
            None => Ok(()),
        }
    }

    /// Returns the reason why the routers of this model must have corrections; `None` if they need not.
    pub(super) fn says_corrections(config: &ModelConfig) -> Option<String> {
        let said = HAS_CORRECTIONS.iter().find_map(|&key| Some((key, config.get(key)?.as_bool()?)));
        match said {
            Some((key, is_true)) => is_true.then(|| format!("{key} is true")),
            None if config.get(METHOD).is_some_and(|method| method == "noaux_tc") => {
                Some(format!("{METHOD} is noaux_tc"))
            }
            None if config.is_any(&BY_SIGMOID) && !config.is_any(&WITHOUT_CORRECTIONS)
                || config.is_model("ernie4_5") =>
            {
                Some("all models of this type have them".into())
            }
            None => None,
        }
    }

    /// Returns the configuration entry by which token ids choose a layer's experts; `None` if there is none.
    pub(super) fn says_table(config: &ModelConfig, layer: usize) -> Option<String> {
        let kind = config.get("mlp_layer_types").and_then(|kinds| kinds.get(layer));
        if kind.is_some_and(|kind| kind == "hash_moe") {
            return Some(format!("mlp_layer_types has hash_moe for layer {layer}"));
        }
        let (key, count) = config.number(&["num_hash_layers", "n_hash_layers"])?;
        (layer < count).then(|| format!("{key} is {count}"))
    }

    /// Whether corrections are added to the scores when experts are compared.
    pub(super) fn has_corrections(&self) -> bool {
        matches!(self.scoring, Scoring::SigmoidGroups { .. } | Scoring::Rule(_))
    }

    /// Number of identity experts, whose logits follow those of the experts with weights.
    pub(super) fn identity_experts(&self) -> usize {
        match &self.scoring {
            Scoring::Rule(rule) => rule.null_experts,
            _ => 0,
        }
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

fn refused(what: &str) -> Error {
    Error::NotComputed(format!("{what}; this router is not supported"))
}

/// Returns how a model's routers score experts: as the configuration states, otherwise as all models of its type do.
///
/// # Errors
/// Returns an error if neither is known, or if such scores are not computed.
fn score_of(config: &ModelConfig) -> Result<Score, Error> {
    let model = config.get("model_type").and_then(|model| model.as_str());
    match (typed(config, &SCORING, "a word", Value::as_str)?, model) {
        (None, _) if config.is_any(&BY_SIGMOID) => Ok(Score::Sigmoid),
        (None, Some(model)) if !config.is_any(&BY_SOFTMAX) => {
            let remedy = format!("the router of {model} is unknown; add this key: softmax or sigmoid");
            Err(Error::Missing { name: SCORING[0].into(), remedy })
        }
        (None | Some("softmax"), _) => Ok(Score::Softmax),
        (Some("sigmoid"), _) => Ok(Score::Sigmoid),
        (Some("sqrtsoftplus"), _) => Ok(Score::SqrtSoftplus),
        (Some(other), _) => Err(refused(&format!("its router scores with {other}"))),
    }
}

/// Returns the number of identity experts.
///
/// # Errors
/// Returns an error if experts without weights compute something else.
fn identity_experts(config: &ModelConfig) -> Result<usize, Error> {
    let count = typed(config, &[IDENTITY_EXPERTS], "a number", Value::as_u64)?.unwrap_or(0);
    match typed(config, &[IDENTITY_KIND], "a word", Value::as_str)? {
        Some(kind) if count > 0 && kind != "identity" => Err(refused(&format!("{IDENTITY_KIND} is {kind}"))),
        _ => Ok(usize::try_from(count).unwrap_or(usize::MAX)),
    }
}

/// Refuses a router with a step that this library does not support.
///
/// # Errors
/// Returns an error that names the step's configuration key.
fn check_steps(config: &ModelConfig) -> Result<(), Error> {
    for (key, none) in STEPS {
        let Some(value) = config.get(key) else { continue };
        if value.as_f64().or(value.as_bool().map(f64::from)) != Some(none) {
            return Err(refused(&format!("{key} is {value}")));
        }
    }
    Ok(())
}

/// Returns the value of the first of these keys that exists.
///
/// # Errors
/// Returns an error if the value is of another type.
fn typed<'c, T>(
    config: &'c ModelConfig,
    keys: &[&'static str],
    what: &str,
    read: fn(&'c Value) -> Option<T>,
) -> Result<Option<T>, Error> {
    let Some((key, value)) = keys.iter().find_map(|&key| Some((key, config.get(key)?))) else { return Ok(None) };
    let wrong = || Error::Invalid(format!("{key} is {value}, which is not {what}; download the model again"));
    read(value).map(Some).ok_or_else(wrong)
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
    /// Factor of the shared expert's weight: ½ in a model that averages the routed and the shared experts' outputs.
    pub shared_factor: f32,
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
        let gates = shared.into_iter().map(|gate: Option<f32>| gate.unwrap_or(1.0) * self.shared_factor).collect();
        let shared = Some(gates).filter(|_: &Vec<f32>| self.shared_gate.is_some() || self.shared_factor != 1.0);
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn rule(config: Value, has_corrections: bool) -> Result<RouterRule, String> {
        RouterRule::of(&ModelConfig::of_test(config), has_corrections).map_err(|error| error.to_string())
    }

    #[test]
    fn router_without_a_stated_score_follows_the_model() {
        for model in ["hy_v3", "hy_v4", "glm5_next_text", "step3p7_text", "axk1", "dots3_note", "beam", "laguna"] {
            let RouterRule { scoring, .. } = rule(json!({"model_type": model, "norm_topk_prob": true}), true).unwrap();
            assert!(matches!(scoring, Scoring::SigmoidGroups { .. }), "{model}: {scoring:?}");
        }
        for model in ["qwen3_moe", "mellum", "mistral4", "minimax"] {
            let RouterRule { scoring, .. } = rule(json!({"model_type": model, "norm_topk_prob": true}), false).unwrap();
            assert_eq!(scoring, Scoring::Softmax { renormalize: true }, "{model}");
        }
        let error = rule(json!({"model_type": "unknown_moe", "norm_topk_prob": true}), false).unwrap_err();
        assert!(error.contains("scoring_func is missing; the router of unknown_moe is unknown"), "{error}");
        let said = json!({"model_type": "unknown_moe", "norm_topk_prob": true, "scoring_func": "softmax"});
        assert_eq!(rule(said, false).unwrap().scoring, Scoring::Softmax { renormalize: true });
        let of_cohere = |word: &str| {
            rule(json!({"model_type": "cohere2_moe", "norm_topk_prob": true, "expert_selection_fn": word}), false)
        };
        assert_eq!(of_cohere("softmax").unwrap().scoring, Scoring::TopKSoftmax);
        assert!(matches!(of_cohere("sigmoid").unwrap().scoring, Scoring::SigmoidGroups { .. }));
    }

    #[test]
    fn factor_of_the_weights_is_found_by_all_its_names() {
        for (model, key) in [
            ("hy_v3", "router_scaling_factor"),
            ("laguna", "moe_routed_scaling_factor"),
            ("step3p7", "moe_router_scaling_factor"),
        ] {
            let scoring = rule(json!({"model_type": model, key: 2.5}), true).unwrap().scoring;
            assert!(matches!(scoring, Scoring::SigmoidGroups { scale: 2.5, renormalize: true, .. }), "{scoring:?}");
        }
    }

    #[test]
    fn groups_of_softmax_scores_are_computed_or_refused() {
        let with = |model: &str, method: Value| {
            let config = json!({"model_type": model, "norm_topk_prob": true, "n_group": 4, "topk_group": 2, "topk_method": method});
            rule(config, false)
        };
        let Scoring::Rule(rule) = with("mistral4", Value::Null).unwrap().scoring else { panic!("no rule") };
        assert_eq!((rule.groups, rule.top_groups, rule.group_score), (4, 2, GroupScore::BestTwo));
        let Scoring::Rule(rule) = with("deepseek_v2", json!("group_limited_greedy")).unwrap().scoring else {
            panic!("no rule")
        };
        assert_eq!((rule.groups, rule.top_groups, rule.group_score), (4, 2, GroupScore::Best));
        assert_eq!(with("deepseek_v2", json!("greedy")).unwrap().scoring, Scoring::Softmax { renormalize: true });
        let error = with("qwen3_moe", Value::Null).unwrap_err();
        assert!(error.contains("n_group is 4, and it is unknown how its router compares groups"), "{error}");
    }

    #[test]
    fn value_of_another_type_is_refused() {
        for (key, value) in [
            ("routed_scaling_factor", json!("2.5")),
            ("scoring_func", json!(3)),
            ("topk_method", json!([1])),
            ("n_group", json!("4")),
        ] {
            let mut config = json!({"model_type": "qwen3_moe", "norm_topk_prob": true});
            config[key] = value;
            let error = rule(config, false).unwrap_err();
            assert!(error.contains(key) && error.contains("which is not a "), "{error}");
        }
    }

    #[test]
    fn parts_of_a_router_are_expected_as_the_configuration_says() {
        let corrections = |config: Value| RouterRule::says_corrections(&ModelConfig::of_test(config));
        for (config, words) in [
            (json!({"topk_method": "noaux_tc"}), "topk_method is noaux_tc"),
            (json!({"model_type": "minimax_m2", "use_routing_bias": true}), "use_routing_bias is true"),
            (json!({"model_type": "lfm2_moe", "use_expert_bias": true}), "use_expert_bias is true"),
            (json!({"model_type": "ernie4_5_moe"}), "all models of this type have them"),
            (json!({"model_type": "hy_v3"}), "all models of this type have them"),
        ] {
            assert_eq!(corrections(config).as_deref(), Some(words));
        }
        for config in [
            json!({"model_type": "qwen3_moe"}),
            json!({"model_type": "lfm2_moe"}),
            json!({"model_type": "minimax_m2", "use_routing_bias": false}),
        ] {
            assert_eq!(corrections(config), None);
        }
        let table = |config: Value, layer| RouterRule::says_table(&ModelConfig::of_test(config), layer);
        let kinds = json!({"mlp_layer_types": ["hash_moe", "moe"]});
        assert!(table(kinds.clone(), 0).is_some() && table(kinds, 1).is_none());
        let count = json!({"num_hash_layers": 3});
        assert!(table(count.clone(), 2).is_some() && table(count, 3).is_none());
        assert!(table(json!({}), 0).is_none());
    }

    #[test]
    fn steps_of_a_router_that_are_not_computed_are_refused() {
        for (key, value) in
            [("moe_router_logit_softcapping", json!(30.0)), ("moe_apply_router_weight_on_input", json!(true))]
        {
            let error = rule(json!({"model_type": "laguna", key: value}), true).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
        let without = json!({"model_type": "laguna", "moe_router_logit_softcapping": 0.0, "moe_apply_router_weight_on_input": false});
        assert!(rule(without, true).is_ok());
    }
}
