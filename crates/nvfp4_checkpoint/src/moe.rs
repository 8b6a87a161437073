//! A whole MoE layer of a model: routed experts, shared expert and router. Whatever else in the decoder layer adds to
//! the block's output is refused by name, because the result would be another layer.

use rayon::prelude::*;

use super::block::{Block, Kind};
use super::convert::Lossless;
use super::file::Tensor;
use super::fused::Part;
use super::latent::Latent;
use super::layer_tensors::{LayerTensors, Scope};
use super::model_config::ModelConfig;
use super::names::{BIAS, ROUTER_WEIGHTS, Role};
use super::router::{LayerRouter, RouterRule};
use super::token_transform::TokenTransform;
use super::{Checkpoint, Dtype};
use nvfp4_core::Error;
use nvfp4_core::bias::Bias;
use nvfp4_core::moe::{Activation, Biases, MoeExpert, MoeInputs, MoeSizes, MoeWeights};
use nvfp4_core::problem::TokenDtype;
use nvfp4_core::router::{Router, Table};

/// Projections of an MoE layer.
pub(super) const ROLES: [Role; 4] = [Role::Gate, Role::Up, Role::Down, Role::GateUp];

/// Configuration keys for the number of experts per token.
const TOP_K: [&str; 7] = [
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "experts_per_token",
];

/// Names of the corrections of the router's choice, below the router or beside it.
const CORRECTIONS: [&str; 3] = ["e_score_correction_bias", "expert_bias", "router_bias"];

/// An MoE layer of a model. Weights stay in place in the mapped files where possible.
#[derive(Clone, Debug)]
pub struct MoeLayer<'a> {
    /// Experts, including the shared expert if the layer has one and is not in a latent space.
    pub weights: MoeWeights<'a>,
    /// Projections around the experts, and the shared expert beside the projections, if the experts are in a latent space.
    pub latent: Option<Latent<'a>>,
    /// Router of the layer.
    pub router: LayerRouter,
    /// Module names, with `*` for the number of the expert.
    pub modules: Vec<String>,
    /// Tensors of the decoder layer that are used, and tensors that are left: attention and norms.
    pub tensors: LayerTensors,
    /// Number of NVFP4 blocks of 16 that were converted from MXFP4, without a change of any number.
    pub mxfp4_blocks: usize,
}

impl MoeLayer<'_> {
    /// H: number of elements of the layer's tokens.
    pub fn hidden(&self) -> usize {
        self.latent.as_ref().map_or(self.weights.sizes().hidden, Latent::hidden)
    }

    /// Builds the router's inputs of tokens `[T, H]` without gaps. They are the inputs of `weights`, unless the experts are
    /// in a latent space: then [`Latent::routed`] makes those. `token_ids` are the ids of the tokens for a router with a table.
    ///
    /// # Errors
    /// The errors of [`LayerRouter::inputs_with_ids`].
    pub fn inputs(&self, hidden: Vec<u16>, token_ids: &[i32]) -> Result<MoeInputs<'static>, Error> {
        let sizes = MoeSizes { hidden: self.hidden(), ..self.weights.sizes() };
        self.router.inputs_with_ids(sizes, hidden, token_ids)
    }
}

/// What an MoE layer consists of, known before any weight is read.
struct Plan<'b, 'n> {
    routed: &'b Block<'n>,
    shared: Option<&'b Block<'n>>,
    config: ModelConfig,
    activation: Activation,
    top_k: usize,
    router: RouterTensors,
    /// Whether projections to a latent space and back surround the routed experts.
    latent: bool,
    rule: RouterRule,
    /// Change of the tokens after routing.
    transform: Option<TokenTransform>,
    tensors: LayerTensors,
}

/// Names of the router's tensors that exist.
struct RouterTensors {
    matrix: String,
    bias: Option<String>,
    shared_gate: Option<String>,
    corrections: Option<String>,
    /// Experts of each token id.
    table: Option<String>,
}

impl RouterTensors {
    fn names(&self) -> impl Iterator<Item = &str> {
        let Self { matrix, bias, shared_gate, corrections, table } = self;
        let others = [bias, shared_gate, corrections, table];
        std::iter::once(&matrix[..]).chain(others.into_iter().flatten().map(String::as_str))
    }
}

impl Checkpoint {
    /// Loads an MoE layer with its router, for tokens of type `dtype`. Experts are stored in separate tensors, or all
    /// in one tensor. In one tensor, gate and up are the two halves, or alternate row by row (gpt-oss). Experts in MXFP4 are
    /// converted if no number changes. Projections around the experts ([`Latent`]) may have any form. Factors of the tokens
    /// that all experts share (NVFP4_AWQ) are part of the router, which multiplies the tokens after it chose their experts.
    ///
    /// # Errors
    /// Returns an error if the layer does not exist or has no experts, a part is missing or wrong, the decoder layer
    /// has a tensor that adds to the output and is not computed, `config.json` is missing, or `config.json` names an
    /// unsupported activation or router.
    pub fn moe_layer(&self, layer: usize, dtype: TokenDtype) -> Result<MoeLayer<'_>, Error> {
        let blocks = self.blocks(Some(layer));
        let plan = self.plan(&blocks, layer)?;
        let &Plan { routed, shared, activation, top_k, .. } = &plan;
        let place = |error: Error| error.at(format_args!("{}: layer {layer}", self.path().display()));
        let lossless = Lossless::of(self)?;
        let experts = match routed.kind {
            Kind::Fused => self.fused_experts(routed, activation, plan.config.is_model("gpt_oss"), &lossless)?,
            _ => self.experts(routed, activation, &lossless)?,
        };
        let mut weights = MoeWeights::with_activation(dtype, top_k, activation, experts).map_err(place)?;
        let (path, width) = (routed.path(), weights.sizes().hidden);
        let mut latent = plan.latent.then(|| self.latent(&plan.config, &path, width)).transpose()?;
        if let Some(shared) = shared {
            let expert = self.experts(shared, activation, &lossless)?.remove(0);
            match &mut latent {
                Some(latent) => latent.set_shared(self.shared_layer(shared, expert, &plan, dtype).map_err(place)?),
                None => weights = weights.with_shared(expert).map_err(place)?,
            }
        }
        let within = shared.filter(|_| latent.is_none());
        let weights = self.with_input_scales(weights, routed, within, plan.config.fp8_tokens()).map_err(place)?;
        let hidden = latent.as_ref().map_or(width, Latent::hidden);
        if let Some(shared) = latent.as_ref().and_then(Latent::shared).filter(|shared| shared.sizes().hidden != hidden)
        {
            let what = "elements per token of the shared expert";
            return Err(place(Error::Mismatch { what, got: shared.sizes().hidden, expected: hidden }));
        }
        let router = self.router(&plan, MoeSizes { hidden, ..weights.sizes() })?;
        let patterns = [routed].into_iter().chain(shared).flat_map(|block| ROLES.map(|role| block.pattern(role)));
        let (modules, mxfp4_blocks) = (patterns.flatten().collect(), lossless.blocks());
        Ok(MoeLayer { weights, latent, router, modules, tensors: plan.tensors, mxfp4_blocks })
    }

    /// Returns the shared expert as a layer of its own, for experts in a latent space.
    fn shared_layer<'a>(
        &self,
        block: &Block<'_>,
        expert: MoeExpert<'a>,
        plan: &Plan<'_, '_>,
        dtype: TokenDtype,
    ) -> Result<MoeWeights<'a>, Error> {
        let weights = MoeWeights::with_activation(dtype, 1, plan.activation, vec![expert])?;
        self.with_input_scales(weights, block, None, plan.config.fp8_tokens())
    }

    /// Returns the projections of a layer that [`Checkpoint::moe_layer`] computes.
    ///
    /// # Errors
    /// Returns the reason why the layer is not computed, as far as it is known before weights are read.
    pub(super) fn moe_modules(&self, layer: usize) -> Result<Vec<String>, Error> {
        let blocks = self.blocks(Some(layer));
        let plan = self.plan(&blocks, layer)?;
        let computed = [plan.routed].into_iter().chain(plan.shared);
        Ok(computed.flat_map(|block| ROLES.map(|role| block.modules(role))).flatten().collect())
    }

    /// Decides what a layer consists of, from names and the configuration.
    fn plan<'b, 'n>(&self, blocks: &'b [Block<'n>], layer: usize) -> Result<Plan<'b, 'n>, Error> {
        let at = |error: Error| error.at(self.path().display());
        let routed = self.routed_block(blocks, layer).map_err(at)?;
        let shared: Vec<_> =
            blocks.iter().filter(|block| block.kind == Kind::Shared && block.stack() == routed.stack()).collect();
        let shared = match shared[..] {
            [] => None,
            [shared] => Some(shared),
            [one, other, ..] => {
                let what = format!("layer {layer} has two shared experts, {} and {}", one.prefix(), other.prefix());
                return Err(at(Error::NotComputed(format!("{what}; only one is supported"))));
            }
        };
        [routed].into_iter().chain(shared).try_for_each(Block::check).map_err(at)?;
        let router = self.router_tensors(&routed.path());
        let latent = self.latent_tensors(&routed.path());
        let beside = latent.iter().flatten().map(String::as_str);
        let scope = Scope {
            blocks: [routed].into_iter().chain(shared).collect(),
            roles: &ROLES,
            router: Some(router.iter().flat_map(RouterTensors::names).chain(beside).collect()),
        };
        let tensors = self.account(&scope)?;
        let router = router.ok_or_else(|| {
            let names = ROUTER_WEIGHTS.map(|name| format!("{}{name}.weight", routed.path()));
            let name = format!("the router ({})", names.join(" or "));
            at(Error::Missing { name, remedy: "download the model again".into() })
        })?;
        let config = ModelConfig::beside(self)?.ok_or_else(|| {
            let remedy = "it defines the router; give the folder of the whole model".into();
            at(Error::Missing { name: "config.json".into(), remedy })
        })?;
        config.check_transforms()?;
        let at_config = |error: Error| error.at(config.path().display());
        if let (Some((key, value)), None) = (config.shared_experts(layer), shared) {
            let name = format!("the shared expert of layer {layer} ({key} is {value})");
            return Err(at_config(Error::Missing { name, remedy: "give the folder of the whole model".into() }));
        }
        let is_gated = ["qwen2_moe", "qwen3_next", "qwen3_5", "qwen3_6"].iter().any(|model| config.is_model(model));
        if shared.is_some() && router.shared_gate.is_none() && is_gated {
            let name = format!("{}shared_expert_gate.weight", routed.path());
            return Err(at(Error::Missing { name, remedy: "download the model again".into() }));
        }
        let mut activation = config.activation(layer, shared.is_some())?;
        // Models call the activation the same with and without a gate.
        if activation == Activation::Relu2 && [Role::Gate, Role::GateUp].into_iter().any(|role| routed.has_role(role)) {
            activation = Activation::GatedRelu2;
        }
        let (_, top_k) = config.number_of_layer(&TOP_K, layer).ok_or_else(|| {
            let name = format!("the number of experts per token ({})", TOP_K[0]);
            at_config(Error::Missing { name, remedy: "download the model again".into() })
        })?;
        let rule = RouterRule::of(&config, router.corrections.is_some()).map_err(at_config)?;
        let modules = |roles: &[Role]| -> Vec<String> {
            let blocks = [routed].into_iter().chain(shared);
            blocks.flat_map(|block| roles.iter().flat_map(|&role| block.modules(role))).collect()
        };
        let (reading, inside) = (modules(&[Role::Gate, Role::Up, Role::GateUp]), modules(&[Role::Down]));
        let hidden = self.tensor(&router.matrix).and_then(|matrix| matrix.shape.last().copied()).unwrap_or_default();
        let transform = self.factors_of_experts(&reading, &inside, hidden)?;
        if latent.is_some() && transform.is_some() {
            let what = format!("layer {layer} has experts in a latent space and factors of their tokens (NVFP4_AWQ)");
            return Err(at(Error::NotComputed(format!("{what}; `nvfp4 dequantize` multiplies them into the weights"))));
        }
        let latent = latent.is_some();
        Ok(Plan { routed, shared, activation, top_k, router, latent, rule, transform, tensors, config })
    }

    /// Returns the only block of a layer with routed experts.
    fn routed_block<'b, 'n>(&self, blocks: &'b [Block<'n>], layer: usize) -> Result<&'b Block<'n>, Error> {
        let mut routed = blocks.iter().filter(|block| matches!(block.kind, Kind::Routed | Kind::Fused));
        match (routed.next(), routed.next()) {
            (Some(block), None) => Ok(block),
            (Some(one), Some(other)) => Err(Error::Invalid(format!(
                "layer {layer} has two blocks of experts, {} and {}; choose a stack of layers with --stack, or export the model \
                 with one of them",
                one.path(),
                other.path()
            ))),
            (None, _) if !blocks.is_empty() => Err(Error::NotComputed(format!(
                "layer {layer} is dense and has no experts; use --op gated for its gate and up projections"
            ))),
            (None, _) => Err(self.no_such_block(layer)),
        }
    }

    /// Loads experts stored in separate tensors.
    fn experts<'a>(
        &'a self,
        block: &Block<'_>,
        activation: Activation,
        lossless: &Lossless<'_>,
    ) -> Result<Vec<MoeExpert<'a>>, Error> {
        let merged = block.modules(Role::GateUp);
        let roles = [("gate", Role::Gate), ("up", Role::Up), ("down", Role::Down)];
        let modules = roles.map(|(_, role)| block.modules(role));
        let experts = modules[2].len();
        for ((what, role), modules) in roles.iter().zip(&modules) {
            let is_merged = *role != Role::Down && activation.has_gate() && merged.len() == experts;
            let has_none = is_merged || *role == Role::Gate && !activation.has_gate();
            let expected = if has_none { 0 } else { experts };
            if modules.len() != expected || experts == 0 {
                let what = format!("{activation} needs {expected} {what} projections, found {}", modules.len());
                return Err(Error::NotComputed(what).at(format_args!("{}: {}", self.path().display(), block.path())));
            }
        }
        let part = |role: usize, expert: usize| -> Result<Part<'a>, Error> {
            let module = &modules[role][expert];
            let matrix = match lossless.matrix(module)? {
                Some(matrix) => matrix,
                None => self.weight(module)?.matrix,
            };
            let bias = self.bias(&format!("{module}{BIAS}"), matrix.rows())?;
            Ok((matrix, bias))
        };
        let expert = |expert: usize| {
            let (gate, up) = match merged.get(expert) {
                Some(module) => self.merged(module, lossless).map(|[gate, up]| (Some(gate), up))?,
                None if activation.has_gate() => (Some(part(0, expert)?), part(1, expert)?),
                None => (None, part(1, expert)?),
            };
            Ok(expert_of(gate, up, part(2, expert)?))
        };
        (0..experts).into_par_iter().map(expert).collect()
    }

    /// Loads gate and up that share one matrix, with their biases.
    fn merged(&self, module: &str, lossless: &Lossless<'_>) -> Result<[Part<'_>; 2], Error> {
        let halves = match lossless.halves(module)? {
            Some(halves) => halves,
            None => self.halves(module)?.map(|half| half.matrix),
        };
        let rows = halves[0].rows();
        let name = format!("{module}{BIAS}");
        let biases = self.tensor(&name).map(|_| self.numbers(&name, &[2 * rows], "[2I]")).transpose()?;
        let bias = |half: usize| Some(Bias::F32(biases.as_ref()?[half * rows..][..rows].to_vec().into()));
        let [gate, up] = halves;
        Ok([(gate, bias(0)), (up, bias(1))])
    }

    /// Loads experts stored in one tensor per projection.
    fn fused_experts<'a>(
        &'a self,
        block: &Block<'_>,
        activation: Activation,
        in_turn: bool,
        lossless: &Lossless<'_>,
    ) -> Result<Vec<MoeExpert<'a>>, Error> {
        let at = |error: Error| error.at(format_args!("{}: {}", self.path().display(), block.path()));
        let one = |role: Role, what: &str, parts: usize| {
            let module = block.modules(role).into_iter().next();
            let module = module.ok_or_else(|| {
                at(Error::NotComputed(format!("the block has no {what} projection; export the model again")))
            })?;
            match lossless.parts(&module)? {
                Some(all) => {
                    let mut all = all.into_iter();
                    Ok((0..all.len() / parts).map(|_| all.by_ref().take(parts).collect()).collect())
                }
                None => self.fused(&module, parts, in_turn)?.split(),
            }
        };
        let mismatch = |what, got, expected| at(Error::Mismatch { what, got, expected });
        let down = one(Role::Down, "down", 1)?;
        let gate_up = if !block.modules(Role::GateUp).is_empty() {
            one(Role::GateUp, "gate and up", 2)?
        } else {
            let up = one(Role::Up, "up", 1)?;
            let gate = if activation.has_gate() { one(Role::Gate, "gate", 1)? } else { vec![Vec::new(); up.len()] };
            if gate.len() != up.len() {
                return Err(mismatch("number of experts of up", up.len(), gate.len()));
            }
            gate.into_iter().zip(up).map(|(gate, up)| gate.into_iter().chain(up).collect()).collect()
        };
        if gate_up.len() != down.len() {
            return Err(mismatch("number of experts of down", down.len(), gate_up.len()));
        }
        let experts = gate_up.into_iter().zip(down).map(|(mut gate_up, mut down): (Vec<Part<'_>>, _)| {
            let up = gate_up.pop().expect("`split` returns at least one part");
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

    /// Finds the router's tensors of the block with this path; `None` without a matrix.
    fn router_tensors(&self, path: &str) -> Option<RouterTensors> {
        let existing = |name: String| self.tensor(&name).map(|_| name);
        let matrix = ROUTER_WEIGHTS.iter().find_map(|name| existing(format!("{path}{name}.weight")))?;
        let module = matrix.strip_suffix(".weight").expect("the name ends in .weight");
        let corrections = CORRECTIONS.iter().find_map(|name| {
            let places = [format!("{module}.{name}"), format!("{path}{name}"), format!("{path}moe_statics.{name}")];
            places.into_iter().find_map(existing)
        });
        Some(RouterTensors {
            bias: existing(format!("{module}{BIAS}")),
            shared_gate: existing(format!("{path}shared_expert_gate.weight")),
            table: existing(format!("{module}.tid2eid")),
            corrections,
            matrix,
        })
    }

    /// Loads the experts of each token id.
    fn table(&self, name: &str, top_k: usize) -> Result<Table, Error> {
        let at = |error: Error| error.at(self.place(name));
        let tensor = self.tensor(name).expect("the name is one of an existing tensor");
        let [vocabulary, width] = tensor.shape[..] else {
            let expected = "[token ids, experts of a token]".into();
            return Err(at(Error::Shape { got: tensor.shape.to_vec(), expected }));
        };
        if width != top_k {
            return Err(at(Error::Mismatch { what: "experts of a token", got: width, expected: top_k }));
        }
        let ids = integers(tensor).ok_or_else(|| {
            let (expected, remedy) = (vec![Dtype::I32, Dtype::I64], "export the model again");
            at(Error::Dtype { got: tensor.dtype, expected, remedy })
        })?;
        Ok(Table { vocabulary, ids })
    }

    /// Loads the router of a layer.
    fn router(&self, plan: &Plan<'_, '_>, sizes: MoeSizes) -> Result<LayerRouter, Error> {
        let names = &plan.router;
        let matrix = self.numbers(&names.matrix, &[sizes.experts, sizes.hidden], "[experts, hidden size]")?;
        let some = |name: &Option<String>, shape: &[usize], words: &str| {
            name.as_ref().map(|name| self.numbers(name, shape, words)).transpose()
        };
        let of_experts = [sizes.experts];
        let mut bias = some(&names.bias, &of_experts, "[experts]")?;
        let shared_gate = some(&names.shared_gate, &[1, sizes.hidden], "[1, hidden size]")?;
        // Ernie 4.5 has one row of corrections.
        let is_row = |name: &String| self.tensor(name).is_some_and(|tensor| tensor.shape == [1, sizes.experts]);
        let of_row = [1, sizes.experts];
        let shape = if names.corrections.as_ref().is_some_and(is_row) { &of_row[..] } else { &of_experts };
        let mut corrections = some(&names.corrections, shape, "[experts]")?;
        let table = names.table.as_ref().map(|name| self.table(name, sizes.top_k)).transpose()?;
        // DeepSeek's own files call the corrections the router's bias.
        if corrections.is_none() && plan.rule.has_corrections() && plan.config.is_model("deepseek") {
            corrections = bias.take();
        }
        let scoring = plan.rule.scoring(sizes.experts, corrections, table);
        let at_config = |error: Error| error.at(plan.config.path().display());
        let rule = Router::new(sizes.experts, sizes.top_k, scoring).map_err(at_config)?;
        let bias = bias.unwrap_or_else(|| vec![0.0; sizes.experts]);
        let (factor, transform) = (plan.rule.factor(), plan.transform.clone());
        Ok(LayerRouter { matrix, bias, shared_gate, rule, factor, transform })
    }
}

/// Returns the integers of a tensor, with -1 for an integer outside of i32; `None` for another type.
pub(super) fn integers(tensor: Tensor<'_>) -> Option<Vec<i32>> {
    match tensor.dtype {
        Dtype::I32 => Some(tensor.numbers::<i32>().into_owned()),
        Dtype::I64 => Some(tensor.numbers::<i64>().iter().map(|&number| i32::try_from(number).unwrap_or(-1)).collect()),
        _ => None,
    }
}

/// Builds an expert from its projections.
fn expert_of<'a>(gate: Option<Part<'a>>, (up, up_bias): Part<'a>, (down, down_bias): Part<'a>) -> MoeExpert<'a> {
    let (gate, gate_bias) = gate.map_or((None, None), |(gate, bias)| (Some(gate), bias));
    let expert = match gate {
        Some(gate) => MoeExpert::gated(gate, up, down),
        None => MoeExpert::ungated(up, down),
    };
    expert.with_biases(Biases { gate: gate_bias, up: up_bias, down: down_bias })
}
