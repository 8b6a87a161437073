//! A whole MoE layer of a model: routed experts, shared expert and router. Unknown tensors of the block are refused,
//! because they could change the result.

use rayon::prelude::*;

use super::layer::{Block, Kind};
use super::linear::BIAS;
use super::model_config::ModelConfig;
use super::names::{Aside, ROUTER_WEIGHTS, Role};
use super::router::{LayerRouter, scoring};
use super::{Checkpoint, Dtype, Format, QuantizedWeight};
use crate::bias::Bias;
use crate::error::Error;
use crate::format::{BLOCK, Matrix};
use crate::fp4::InputScales;
use crate::moe::{Activation, Biases, MoeExpert, MoeWeights};
use crate::problem::TokenDtype;
use crate::router::{Router, Scoring};

/// Projections of an MoE layer.
const ROLES: [Role; 4] = [Role::Gate, Role::Up, Role::Down, Role::GateUp];

/// Configuration keys for the number of experts per token.
const TOP_K: [&str; 5] = ["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"];

/// Name of the corrections of the router's choice, below the router or beside it.
const CORRECTIONS: &str = "e_score_correction_bias";

/// Suffixes of the packed values of fused experts.
pub(super) const FUSED_VALUES: [&str; 4] = ["_packed", ".weight_packed", ".weight", ""];

/// Suffixes of the block scales of fused experts.
pub(super) const FUSED_SCALES: [&str; 3] = ["_weight_scale", ".weight_scale", "_scale"];

/// Suffixes of global scales that divide, of fused experts.
pub(super) const FUSED_DIVISORS: [&str; 2] = [".weight_global_scale", "_weight_global_scale"];

/// Suffixes of global scales that multiply, of fused experts.
pub(super) const FUSED_FACTORS: [&str; 3] = ["_weight_scale_2", ".weight_scale_2", "_scale_2"];

/// Suffixes of the biases `[E, N]` of fused experts.
pub(super) const FUSED_BIASES: [&str; 2] = ["_bias", ".bias"];

/// An MoE layer of a model. Weights stay in place in the mapped files where possible.
#[derive(Clone, Debug)]
pub struct MoeLayer<'a> {
    /// Experts, including the shared expert if the layer has one.
    pub weights: MoeWeights<'a>,
    /// Router of the layer.
    pub router: LayerRouter,
    /// Module names, with `*` for the number of the expert.
    pub modules: Vec<String>,
}

impl Checkpoint {
    /// Loads an MoE layer with its router, for tokens of type `dtype`. Experts are stored in separate tensors, or all
    /// in one tensor `[E, N, K/2]`. In one tensor, gate and up are the two halves of N, or alternate row by row
    /// (gpt-oss).
    ///
    /// # Errors
    /// Returns an error if the layer does not exist or has no experts, a part is missing or wrong, a tensor of the
    /// block is not computed, `config.json` is missing, or `config.json` names an unsupported activation or router.
    pub fn moe_layer(&self, layer: usize, dtype: TokenDtype) -> Result<MoeLayer<'_>, Error> {
        let at = |error: Error| error.at(self.path().display());
        let blocks = self.blocks(Some(layer));
        let routed = self.routed_block(&blocks, layer).map_err(at)?;
        let shared: Vec<_> =
            blocks.iter().filter(|block| block.kind == Kind::Shared && block.path() == routed.path()).collect();
        for block in [routed].into_iter().chain(shared.iter().copied()) {
            block.check().map_err(at)?;
            if let Some(name) = self.not_understood(block, &ROLES, true).first() {
                return Err(self.not_computed(name));
            }
        }
        let config = ModelConfig::beside(self)?.ok_or_else(|| {
            let remedy = "it defines the router; give the folder of the whole model".into();
            at(Error::Missing { name: "config.json".into(), remedy })
        })?;
        config.check_transforms()?;
        let activation = config.activation()?;
        let at_config = |error: Error| error.at(config.path().display());
        let (_, top_k) = config.number(&TOP_K).ok_or_else(|| {
            let name = format!("the number of experts per token ({})", TOP_K[0]);
            at_config(Error::Missing { name, remedy: "download the model again".into() })
        })?;

        let in_turn =
            config.get("model_type").and_then(|name| name.as_str()).is_some_and(|name| name.contains("gpt_oss"));
        let (experts, mut input_scales) = if routed.kind == Kind::Fused {
            (self.fused_experts(routed, activation, in_turn)?, vec![None])
        } else {
            self.experts(routed, activation)?
        };
        let place = |error: Error| error.at(format_args!("{}: layer {layer}", self.path().display()));
        let mut weights = MoeWeights::with_activation(dtype, top_k, activation, experts).map_err(place)?;
        if let [shared] = shared[..] {
            let (mut expert, of_shared) = self.experts(shared, activation)?;
            weights = weights.with_shared(expert.remove(0)).map_err(place)?;
            input_scales.extend(of_shared);
        }
        // Without a complete set of input scales, each token gets its own global scale.
        if let Some(input_scales) = input_scales.into_iter().collect::<Option<Vec<_>>>() {
            weights = weights.with_input_scales(input_scales).map_err(place)?;
        }
        let router = self.router(routed, &weights, &config)?;
        let patterns = [routed].into_iter().chain(shared).flat_map(|block| ROLES.map(|role| block.pattern(role)));
        Ok(MoeLayer { weights, router, modules: patterns.flatten().collect() })
    }

    /// Returns the only block of a layer with routed experts.
    fn routed_block<'b, 'n>(&self, blocks: &'b [Block<'n>], layer: usize) -> Result<&'b Block<'n>, Error> {
        let mut routed = blocks.iter().filter(|block| matches!(block.kind, Kind::Routed | Kind::Fused));
        match (routed.next(), routed.next()) {
            (Some(block), None) => Ok(block),
            (Some(one), Some(other)) => Err(Error::Invalid(format!(
                "layer {layer} has two blocks of experts, {} and {}; export the model with one of them",
                one.path(),
                other.path()
            ))),
            (None, _) if !blocks.is_empty() => Err(Error::NotComputed(format!(
                "layer {layer} is dense and has no experts; use --op gated for its gate and up projections"
            ))),
            (None, _) => Err(self.no_such_block(layer)),
        }
    }

    /// Loads experts stored in separate tensors. An expert's input scales are set if all its projections have one.
    fn experts(
        &self,
        block: &Block<'_>,
        activation: Activation,
    ) -> Result<(Vec<MoeExpert<'_>>, Vec<Option<InputScales>>), Error> {
        let roles = [("gate", Role::Gate), ("up", Role::Up), ("down", Role::Down)];
        let modules = roles.map(|(_, role)| block.modules(role));
        let experts = modules[2].len();
        for ((what, role), modules) in roles.iter().zip(&modules) {
            let expected = if *role == Role::Gate && !activation.has_gate() { 0 } else { experts };
            if modules.len() != expected || experts == 0 {
                let what = format!("{activation} needs {expected} {what} projections, found {}", modules.len());
                return Err(Error::NotComputed(what).at(format_args!("{}: {}", self.path().display(), block.path())));
            }
        }
        let part = |role: usize, expert: usize| -> Result<(Part<'_>, Option<f32>), Error> {
            let module = &modules[role][expert];
            let QuantizedWeight { matrix, input_scale, .. } = self.quantized(module)?;
            let bias = self.bias(&format!("{module}{BIAS}"), matrix.rows())?;
            Ok(((matrix, bias), input_scale))
        };
        let expert = |expert| {
            let gate = if activation.has_gate() { Some(part(0, expert)?) } else { None };
            let ((up, of_up), (down, of_down)) = (part(1, expert)?, part(2, expert)?);
            // Gate and up read the same tokens.
            let (gate, of_gate) = gate.map_or((None, of_up), |(gate, scale)| (Some(gate), scale));
            let gate_up = of_gate.zip(of_up).map(|(gate, up)| gate.max(up));
            let input_scales = gate_up.zip(of_down).map(|(gate_up, down)| InputScales { gate_up, down });
            Ok((expert_of(gate, up, down), input_scales))
        };
        let experts = (0..experts).into_par_iter().map(expert).collect::<Result<Vec<_>, Error>>()?;
        Ok(experts.into_iter().unzip())
    }

    /// Loads experts stored in one tensor per projection.
    fn fused_experts(
        &self,
        block: &Block<'_>,
        activation: Activation,
        in_turn: bool,
    ) -> Result<Vec<MoeExpert<'_>>, Error> {
        let at = |error: Error| error.at(format_args!("{}: {}", self.path().display(), block.path()));
        let one = |role: Role, what: &str| {
            let module = block.modules(role).into_iter().next();
            module.ok_or_else(|| {
                at(Error::NotComputed(format!("the block has no {what} projection; export the model again")))
            })
        };
        let down = self.fused(&one(Role::Down, "down")?, 1, false)?;
        let gate_up = match block.modules(Role::GateUp).first() {
            Some(module) => self.fused(module, 2, in_turn)?,
            None => {
                let up = self.fused(&one(Role::Up, "up")?, 1, false)?;
                if activation.has_gate() {
                    let gate = self.fused(&one(Role::Gate, "gate")?, 1, false)?;
                    if gate.len() != up.len() {
                        return Err(at(Error::Mismatch {
                            what: "number of experts of up",
                            got: up.len(),
                            expected: gate.len(),
                        }));
                    }
                    gate.into_iter().zip(up).map(|(gate, up)| gate.into_iter().chain(up).collect()).collect()
                } else {
                    up
                }
            }
        };
        if gate_up.len() != down.len() {
            return Err(at(Error::Mismatch {
                what: "number of experts of down",
                got: down.len(),
                expected: gate_up.len(),
            }));
        }
        let experts = gate_up.into_iter().zip(down).map(|(mut gate_up, mut down)| {
            let up = gate_up.pop().expect("`fused` returns at least one part");
            let gate = gate_up.pop();
            if gate.is_some() != activation.has_gate() {
                return Err(at(Error::NotComputed(format!(
                    "{activation} does not match these projections: export the model again"
                ))));
            }
            Ok(expert_of(gate, up, down.remove(0)))
        });
        experts.collect()
    }

    /// Splits a tensor `[E, N, K/2]` of packed values into `parts` matrices per expert: contiguous parts of the rows,
    /// or alternating rows if `in_turn`. Scales are `[E, N, K/16]`. There is one global scale for all, per expert, or
    /// per part.
    fn fused(&self, module: &str, parts: usize, in_turn: bool) -> Result<Vec<Vec<Part<'_>>>, Error> {
        let find = |what: &'static str, suffixes: &[&str], dtype: Dtype| {
            let names = suffixes.iter().map(|suffix| format!("{module}{suffix}"));
            let name = names.clone().find(|name| self.tensor(name).is_some()).ok_or_else(|| {
                let remedy = "fused experts need packed values, scales and global scales; quantize the model with `nvfp4 quantize`";
                let names = names.collect::<Vec<_>>().join(" or ");
                Error::Missing { name: format!("{what} ({names})"), remedy: remedy.into() }.at(self.path().display())
            })?;
            let tensor = self.tensor(&name).expect("found above");
            if tensor.dtype != dtype {
                let remedy = "quantize the model with `nvfp4 quantize`";
                let error = Error::Dtype { got: tensor.dtype, expected: vec![dtype], remedy };
                return Err(error.at(self.place(&name)));
            }
            Ok((name, tensor))
        };
        let shape = |name: &str, got: &[usize], expected: String| {
            Error::Shape { got: got.to_vec(), expected }.at(self.place(name))
        };
        let (values_name, values) = find("the packed values", &FUSED_VALUES, Dtype::U8)?;
        let &[experts, rows, packed] = values.shape else {
            return Err(shape(&values_name, values.shape, "[E, N, K/2]".into()));
        };
        let k = packed.checked_mul(2).ok_or(Error::TooLarge)?;
        if rows == 0 || !rows.is_multiple_of(parts) || !k.is_multiple_of(BLOCK) || k == 0 {
            return Err(shape(
                &values_name,
                values.shape,
                format!("[E, N, K/2] with K a multiple of 16 and N a multiple of {parts}"),
            ));
        }
        let (scales_name, scales) = find("the block scales", &FUSED_SCALES, Dtype::F8_E4M3)?;
        if scales.shape != [experts, rows, k / BLOCK] {
            return Err(shape(&scales_name, scales.shape, format!("{:?} ([E, N, K/16])", [experts, rows, k / BLOCK])));
        }
        let all = [&FUSED_DIVISORS[..], &FUSED_FACTORS].concat();
        let (global_name, global) = find("the global scales", &all, Dtype::F32)?;
        let divides = FUSED_DIVISORS.iter().any(|suffix| global_name.ends_with(suffix));
        let format = if divides { Format::CompressedTensors } else { Format::ModelOpt };
        let stored = global.numbers::<f32>();
        if ![1, experts, experts * parts].contains(&stored.len()) {
            return Err(shape(&global_name, global.shape, format!("[], [{experts}] or [{experts}, {parts}]")));
        }
        let factors = (0..experts * parts).map(|part| {
            let index = part / (experts * parts / stored.len());
            format.factor(stored[index]).map_err(|error| error.at(self.place(&global_name)))
        });
        let factors = factors.collect::<Result<Vec<_>, _>>()?;
        let names = FUSED_BIASES.map(|suffix| format!("{module}{suffix}"));
        let biases = match names.iter().find(|name| self.tensor(name).is_some()) {
            Some(name) => Some(self.numbers(name, &[experts, rows], "[E, N]")?),
            None => None,
        };
        let one = |expert: usize, part: usize| {
            let rows_of_part = rows / parts;
            let bias = biases.as_ref().map(|biases| -> Bias<'static> {
                let of_expert = &biases[expert * rows..][..rows];
                Bias::F32(match in_turn {
                    true => of_expert.iter().skip(part).step_by(parts).copied().collect(),
                    false => of_expert[part * rows_of_part..][..rows_of_part].to_vec().into(),
                })
            });
            let take = |data: &'_ [u8], row_bytes: usize| -> std::ops::Range<usize> {
                debug_assert_eq!(data.len(), experts * rows * row_bytes);
                let first = expert * rows + if in_turn { 0 } else { part * rows_of_part };
                let count = if in_turn { rows } else { rows_of_part };
                first * row_bytes..(first + count) * row_bytes
            };
            let (value_bytes, scale_bytes) = (packed, k / BLOCK);
            let values = &values.data[take(values.data, value_bytes)];
            let scales = &scales.data[take(scales.data, scale_bytes)];
            let factor = factors[expert * parts + part];
            let matrix = if in_turn && parts > 1 {
                let every = |data: &[u8], row_bytes: usize| -> Vec<u8> {
                    data.chunks(row_bytes).skip(part).step_by(parts).flatten().copied().collect()
                };
                Matrix::new(rows_of_part, k, every(values, value_bytes), every(scales, scale_bytes), factor)
            } else {
                Matrix::new(rows_of_part, k, values, scales, factor)
            };
            let place = |error: Error| error.at(format_args!("{}: expert {expert}", self.place(&scales_name)));
            Ok((matrix.map_err(place)?, bias))
        };
        let experts = (0..experts).into_par_iter().map(|expert| (0..parts).map(|part| one(expert, part)).collect());
        experts.collect()
    }

    /// Loads the router of a block.
    fn router(&self, block: &Block<'_>, weights: &MoeWeights<'_>, config: &ModelConfig) -> Result<LayerRouter, Error> {
        let (path, sizes) = (block.path(), weights.sizes());
        let names = ROUTER_WEIGHTS.map(|name| format!("{path}{name}.weight"));
        let name = names.iter().find(|name| self.tensor(name).is_some()).ok_or_else(|| {
            let name = format!("the router ({})", names.join(" or "));
            Error::Missing { name, remedy: "download the model again".into() }.at(self.path().display())
        })?;
        let matrix = self.numbers(name, &[sizes.experts, sizes.hidden], "[experts, hidden size]")?;
        let module = name.strip_suffix(".weight").expect("the name ends in .weight");
        let some = |name: String, shape: &[usize], words: &str| match self.tensor(&name) {
            Some(_) => self.numbers(&name, shape, words).map(Some),
            None => Ok(None),
        };
        let bias_name = format!("{module}{BIAS}");
        let bias = some(bias_name.clone(), &[sizes.experts], "[experts]")?;
        let gate_name = format!("{path}shared_expert_gate.weight");
        let shared_gate = some(gate_name.clone(), &[1, sizes.hidden], "[1, hidden size]")?;
        let corrections_names = [format!("{module}.{CORRECTIONS}"), format!("{path}{CORRECTIONS}")];
        let corrections_name = corrections_names.iter().find(|name| self.tensor(name).is_some());
        let corrections = match corrections_name {
            Some(name) => Some(self.numbers(name, &[sizes.experts], "[experts]")?),
            None => None,
        };
        let known = [Some(name), Some(&bias_name), Some(&gate_name), corrections_name];
        let is_unknown = |other: &&str| {
            let first = other[path.len()..].split('.').next().unwrap_or_default();
            Aside::of(first) == Some(Aside::Router) && !known.iter().flatten().any(|name| name == other)
        };
        if let Some(other) = self.names_under(&path).find(is_unknown) {
            return Err(self.not_computed(other));
        }
        let at_config = |error: Error| error.at(config.path().display());
        let (scoring, factor) = scoring(config, sizes.experts, corrections).map_err(at_config)?;
        if let (Some(name), false) = (corrections_name, matches!(scoring, Scoring::SigmoidGroups { .. })) {
            let what = "a correction of the router's choice is only supported with sigmoid scores";
            return Err(Error::NotComputed(what.into()).at(self.place(name)));
        }
        let rule = Router::new(sizes.experts, sizes.top_k, scoring).map_err(at_config)?;
        let bias = bias.unwrap_or_else(|| vec![0.0; sizes.experts]);
        Ok(LayerRouter { matrix, bias, shared_gate, rule, factor })
    }
}

/// A matrix with its optional bias.
type Part<'a> = (Matrix<'a>, Option<Bias<'static>>);

/// Builds an expert from its projections.
fn expert_of<'a>(gate: Option<Part<'a>>, (up, up_bias): Part<'a>, (down, down_bias): Part<'a>) -> MoeExpert<'a> {
    let (gate, gate_bias) = gate.map_or((None, None), |(gate, bias)| (Some(gate), bias));
    let expert = match gate {
        Some(gate) => MoeExpert::gated(gate, up, down),
        None => MoeExpert::ungated(up, down),
    };
    expert.with_biases(Biases { gate: gate_bias, up: up_bias, down: down_bias })
}
