//! A whole MoE layer of a model: routed experts, shared expert and router. Whatever else in the decoder layer adds to
//! the block's output is refused by name, because the result would be another layer.

use rayon::prelude::*;

use super::around::{Around, Branch, Surroundings};
use super::block::{Block, DOWNLOAD, Kind};
use super::convert::Lossless;
use super::file::Tensor;
use super::fused::Part;
use super::layer_tensors::{LayerTensors, Scope};
use super::model_config::ModelConfig;
use super::names::{BIAS, ROUTER_WEIGHTS, Role};
use super::router::{LayerRouter, RouterRule};
use super::token_transform::{Matrices, shared_transform};
use super::{Checkpoint, Dtype};
use nvfp4_core::Error;
use nvfp4_core::bias::Bias;
use nvfp4_core::moe::{Activation, Biases, MoeExpert, MoeInputs, MoeSizes, MoeWeights};
use nvfp4_core::problem::TokenDtype;
use nvfp4_core::router::{Router, Table};

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

/// Dense MLPs of LongCat-Flash's layers: each is behind an attention of its own, and the experts are a shortcut past them.
const LONGCAT_MLPS: [&str; 1] = ["mlps"];

/// Names of Gemma 4's tensors beside the router's matrix: the weights of a norm, and factors of the experts' weights.
const ROUTER_NORM: &str = "scale";
const EXPERT_SCALE: &str = "per_expert_scale";

/// An MoE layer of a model. Weights stay in place in the mapped files where possible.
#[derive(Clone, Debug)]
pub struct MoeLayer<'a> {
    /// Routed experts. If [`Self::around`] is `None`, the shared expert too.
    pub weights: MoeWeights<'a>,
    /// Norms and projections around the experts, and the summands beside their output (Nemotron 3, Kimi-K3, Gemma 4,
    /// LongCat-Flash).
    pub around: Option<Around<'a>>,
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
        self.around.as_ref().map_or(self.weights.sizes().hidden, Around::hidden)
    }

    /// Builds the router's inputs of tokens `[T, H]` without gaps. They are the inputs of `weights`, unless something is around
    /// the experts: then [`Around::routed`] makes those. `token_ids` are the ids of the tokens for a router with a table.
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
    beside: Option<Beside<'b, 'n>>,
    config: ModelConfig,
    activation: Activation,
    top_k: usize,
    router: RouterTensors,
    /// Norms and projections around the routed experts.
    around: Option<Surroundings>,
    rule: RouterRule,
    /// Factor of both outputs, of the routed and the shared experts.
    shared_factor: f32,
    tensors: LayerTensors,
}

/// Shared expert, or dense branch beside the experts.
struct Beside<'b, 'n> {
    block: &'b Block<'n>,
    activation: Activation,
    /// Whether the host computes it, because a projection is in floats or FP8.
    on_host: bool,
}

/// Modules of a layer that [`Checkpoint::moe_layer`] computes.
pub(super) struct LayerModules {
    /// Projections of NVFP4 or MXFP4 experts.
    pub experts: Vec<String>,
    /// Projections in any form, which the host computes.
    pub on_host: Vec<String>,
}

/// Names of the router's tensors that exist.
struct RouterTensors {
    matrix: String,
    bias: Option<String>,
    shared_gate: Option<String>,
    corrections: Option<String>,
    /// Experts of each token id.
    table: Option<String>,
    /// Weights of a norm of the tokens, and factors of the experts' weights (Gemma 4).
    norm: Option<String>,
    expert_scale: Option<String>,
}

impl RouterTensors {
    fn names(&self) -> impl Iterator<Item = &str> {
        let Self { matrix, bias, shared_gate, corrections, table, norm, expert_scale } = self;
        let others = [bias, shared_gate, corrections, table, norm, expert_scale];
        std::iter::once(&matrix[..]).chain(others.into_iter().flatten().map(String::as_str))
    }
}

impl Checkpoint {
    /// Loads an MoE layer with its router, for tokens of type `dtype`. Experts are stored in separate tensors, or all
    /// in one tensor. In one tensor, gate and up are the two halves, or alternate row by row (gpt-oss). Experts in MXFP4 are
    /// converted if no number changes. Projections around the experts and a shared expert or dense branch ([`Around`]) may have
    /// any form. A transform of the tokens that all experts share (factors of NVFP4_AWQ, a Hadamard transform) belongs to
    /// [`Around`] or, if nothing is around the experts, to the router. Other transforms belong to the weights
    /// ([`MoeWeights::with_transforms`](nvfp4_core::moe::MoeWeights::with_transforms)), and only the CPU computes them.
    ///
    /// # Errors
    /// Returns an error if the layer does not exist or has no experts, a part is missing or wrong, the decoder layer
    /// has a tensor that adds to the output and is not computed, `config.json` is missing, or `config.json` names an
    /// unsupported activation or router.
    pub fn moe_layer(&self, layer: usize, dtype: TokenDtype) -> Result<MoeLayer<'_>, Error> {
        let blocks = self.blocks(Some(layer));
        let plan = self.plan(&blocks, layer)?;
        let &Plan { routed, activation, top_k, .. } = &plan;
        let place = |error: Error| error.at(format_args!("{}: layer {layer}", self.path().display()));
        let lossless = Lossless::of(self)?;
        let experts = match routed.kind {
            Kind::Fused => self.fused_experts(routed, activation, plan.config.is_model("gpt_oss"), &lossless)?,
            _ => self.experts(routed, activation, &lossless)?,
        };
        let mut weights = MoeWeights::with_activation(dtype, top_k, activation, experts).map_err(place)?;
        let width = weights.sizes().hidden;
        let mut matrices = Matrices::new();
        let mut transforms = self.transforms_of(routed, &plan.config, weights.experts(), &mut matrices)?;
        let around = plan.around.as_ref().map(|around| self.around(&plan.config, around, width));
        let mut around = around.transpose()?;
        if let Some(around) = &mut around {
            around.set_identity_experts(plan.rule.identity_experts()).map_err(place)?;
        }
        match (&plan.beside, &mut around) {
            (Some(beside), Some(around)) => {
                let branch = self.branch(beside, &plan.config, dtype, &lossless, &mut matrices);
                branch.and_then(|branch| around.set_branch(branch)).map_err(place)?;
            }
            (Some(Beside { block, activation, .. }), None) => {
                let expert = self.experts(block, *activation, &lossless)?;
                transforms.extend(self.transforms_of(block, &plan.config, &expert, &mut matrices)?);
                weights = expert.into_iter().try_fold(weights, MoeWeights::with_shared).map_err(place)?;
            }
            (None, _) => {}
        }
        let within = plan.beside.as_ref().map(|beside| beside.block).filter(|_| around.is_none());
        let weights = self.with_input_scales(weights, routed, within, plan.config.fp8_tokens()).map_err(place)?;
        let hidden = around.as_ref().map_or(width, Around::hidden);
        let mut router = self.router(&plan, MoeSizes { hidden, ..weights.sizes() })?;
        // A transform of all experts is computed once, for any backend; other transforms belong to single experts.
        let transform = shared_transform(&transforms);
        let weights = if transform.is_some() { weights } else { weights.with_transforms(transforms).map_err(place)? };
        match &mut around {
            Some(around) => around.set_transform(transform),
            None => router.transform = transform,
        }
        let blocks = [routed].into_iter().chain(plan.beside.as_ref().map(|beside| beside.block));
        let patterns = blocks.flat_map(|block| Role::ALL.map(|role| block.pattern(role)));
        let (modules, mxfp4_blocks) = (patterns.flatten().collect(), lossless.blocks());
        Ok(MoeLayer { weights, around, router, modules, tensors: plan.tensors, mxfp4_blocks })
    }

    /// Loads a branch beside the experts: a layer of its own, or projections in any form.
    fn branch<'a>(
        &'a self,
        &Beside { block, activation, on_host }: &Beside<'_, '_>,
        config: &ModelConfig,
        dtype: TokenDtype,
        lossless: &Lossless<'_>,
        matrices: &mut Matrices,
    ) -> Result<Branch<'a>, Error> {
        if on_host {
            return self.load_feed_forward(config, block, activation).map(Branch::Host);
        }
        let experts = self.experts(block, activation, lossless)?;
        let weights = MoeWeights::with_activation(dtype, 1, activation, experts)?;
        let weights = self.with_input_scales(weights, block, None, config.fp8_tokens())?;
        let transforms = self.transforms_of(block, config, weights.experts(), matrices)?;
        weights.with_transforms(transforms).map(Branch::Layer)
    }

    /// Returns the modules of a layer that [`Checkpoint::moe_layer`] computes.
    ///
    /// # Errors
    /// Returns the reason why the layer is not computed, as far as it is known before weights are read.
    pub(super) fn moe_modules(&self, layer: usize) -> Result<LayerModules, Error> {
        let blocks = self.blocks(Some(layer));
        let plan = self.plan(&blocks, layer)?;
        let modules = |block: &Block<'_>| Role::ALL.map(|role| block.modules(role)).concat();
        let mut found = LayerModules { experts: modules(plan.routed), on_host: Vec::new() };
        found.on_host.extend(plan.around.iter().flat_map(Surroundings::projections));
        if let Some(Beside { block, on_host, .. }) = plan.beside {
            if on_host { &mut found.on_host } else { &mut found.experts }.extend(modules(block));
        }
        Ok(found)
    }

    /// Decides what a layer consists of, from names and the configuration.
    fn plan<'b, 'n>(&self, blocks: &'b [Block<'n>], layer: usize) -> Result<Plan<'b, 'n>, Error> {
        let at = |error: Error| error.at(self.path().display());
        let routed = self.routed_block(blocks, layer).map_err(at)?;
        self.check_forms(routed, &Role::ALL, true)?;
        let around = self.surroundings(routed.path())?;
        let beside = beside(blocks, routed, around.as_ref()).map_err(at)?;
        [routed].into_iter().chain(beside).try_for_each(Block::check).map_err(at)?;
        let on_host = beside.filter(|block| self.has_other_forms(block));
        let of_host = on_host.map(|block| self.feed_forward_tensors(block)).transpose()?;
        let router = self.router_tensors(&routed.path());
        let config = ModelConfig::beside(self)?;
        let of_router = router.iter().flat_map(RouterTensors::names);
        let around_experts = around.iter().flat_map(|around| &around.tensors).chain(of_host.iter().flatten());
        let scope = Scope {
            blocks: [routed].into_iter().chain(beside).collect(),
            roles: &Role::ALL,
            router: Some(of_router.chain(around_experts.map(String::as_str)).collect()),
            apart: if config.as_ref().is_some_and(|config| config.is_model("longcat")) { &LONGCAT_MLPS } else { &[] },
            on_host,
        };
        // The name of a router says more than the name of its first tensor.
        config.iter().try_for_each(|config| {
            RouterRule::check_computed(config).map_err(|error| error.at(config.path().display()))
        })?;
        let tensors = self.account(&scope)?;
        let router = router.ok_or_else(|| {
            let names = ROUTER_WEIGHTS.map(|name| format!("{}{name}.weight", routed.path()));
            let name = format!("the router ({})", names.join(" or "));
            at(Error::Missing { name, remedy: DOWNLOAD.into() })
        })?;
        let config = config.ok_or_else(|| {
            let remedy = "it defines the router; give the folder of the whole model".into();
            at(Error::Missing { name: "config.json".into(), remedy })
        })?;
        self.check_transforms_of_layer(&config, routed, beside, &router)?;
        let at_config = |error: Error| error.at(config.path().display());
        if let (Some((key, value)), None) = (config.shared_experts(layer), beside) {
            let name = format!("the shared expert of layer {layer} ({key} is {value})");
            return Err(at_config(Error::Missing { name, remedy: "give the folder of the whole model".into() }));
        }
        let shared_factor = if beside.is_some() { config.factor_with_shared()? } else { 1.0 };
        let is_gated = config.is_any(&["qwen2_moe", "qwen3_next", "qwen3_5", "qwen3_6"]);
        if beside.is_some() && router.shared_gate.is_none() && is_gated {
            let name = format!("{}shared_expert_gate.weight", routed.path());
            return Err(at(Error::Missing { name, remedy: DOWNLOAD.into() }));
        }
        let activation = activation_of(&config, layer, routed, false)?;
        let beside = beside.map(|block| {
            let activation = activation_of(&config, layer, block, true)?;
            Ok::<_, Error>(Beside { block, activation, on_host: on_host.is_some() })
        });
        let beside = beside.transpose()?;
        let rule = RouterRule::of(&config, router.corrections.is_some()).map_err(at_config)?;
        let is_summed = rule.identity_experts() > 0;
        let is_apart = |beside: &Beside<'_, '_>| beside.on_host || beside.activation != activation;
        let around = around.or_else(|| {
            (is_summed || beside.as_ref().is_some_and(is_apart)).then(|| Surroundings::alone(routed.path()))
        });
        let (_, top_k) = config.number_of_layer(&TOP_K, layer).ok_or_else(|| {
            let name = format!("the number of experts per token ({})", TOP_K[0]);
            at_config(Error::Missing { name, remedy: DOWNLOAD.into() })
        })?;
        self.check_router_norm(&config, &router)?;
        check_router_parts(&config, &router, layer).map_err(at)?;
        Ok(Plan { routed, beside, activation, top_k, router, around, rule, shared_factor, tensors, config })
    }

    /// Refuses transforms of tokens that are not computed: all of them for the router and for experts in one tensor.
    fn check_transforms_of_layer(
        &self,
        config: &ModelConfig,
        routed: &Block<'_>,
        beside: Option<&Block<'_>>,
        router: &RouterTensors,
    ) -> Result<(), Error> {
        if routed.kind == Kind::Fused {
            return config.check_transforms();
        }
        let blocks = [routed].into_iter().chain(beside);
        for module in blocks.flat_map(|block| Role::ALL.map(|role| block.modules(role))).flatten() {
            config.input_transform(&module)?;
        }
        for name in [&router.matrix].into_iter().chain(&router.shared_gate) {
            let module = name.strip_suffix(".weight").unwrap_or(name);
            if let Some(transform) = config.input_transform(module)? {
                let what = format!("transform {} of the router's tokens is not computed", transform.group);
                return Err(Error::NotComputed(format!("{what}; export the model without it")).at(self.place(name)));
            }
        }
        Ok(())
    }

    /// Refuses a router with a norm of its own, or factors of the experts, in a model that is not known to have them, and
    /// a router without them in a model that needs them.
    fn check_router_norm(&self, config: &ModelConfig, router: &RouterTensors) -> Result<(), Error> {
        let is_gemma = config.is_model("gemma4");
        let of_matrix = router.matrix.strip_suffix("proj.weight").unwrap_or(&router.matrix);
        for (name, part) in [(&router.norm, ROUTER_NORM), (&router.expert_scale, EXPERT_SCALE)] {
            match name {
                Some(name) if !is_gemma => return Err(self.not_computed(name)),
                None if is_gemma => {
                    let error = Error::Missing { name: format!("{of_matrix}{part}"), remedy: DOWNLOAD.into() };
                    return Err(error.at(self.path().display()));
                }
                _ => {}
            }
        }
        Ok(())
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
        block.check_roles(activation).map_err(|error| error.at(self.path().display()))?;
        let merged = block.modules(Role::GateUp);
        let modules = [Role::Gate, Role::Up, Role::Down].map(|role| block.modules(role));
        let experts = modules[2].len();
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
            let beside = ["", "moe_statics.", "experts."].map(|part| format!("{path}{part}{name}"));
            // LongCat-Flash: `router.classifier.weight` and `router.e_score_correction_bias`.
            let above = module.rsplit_once('.').map(|(parent, _)| format!("{parent}.{name}"));
            let places = [format!("{module}.{name}")].into_iter().chain(beside).chain(above);
            places.into_iter().find_map(existing)
        });
        let beside = |part: &str| existing(format!("{}.{part}", module.strip_suffix(".proj")?));
        Some(RouterTensors {
            norm: beside(ROUTER_NORM),
            expert_scale: beside(EXPERT_SCALE),
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
        let tensor = self.tensor(name).expect("the tensor exists");
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
        let experts = sizes.experts + plan.rule.identity_experts();
        let matrix = self.numbers(&names.matrix, &[experts, sizes.hidden], "[experts, hidden size]")?;
        let some = |name: &Option<String>, shape: &[usize], words: &str| {
            name.as_ref().map(|name| self.numbers(name, shape, words)).transpose()
        };
        let of_experts = [experts];
        let mut bias = some(&names.bias, &of_experts, "[experts]")?;
        let shared_gate = some(&names.shared_gate, &[1, sizes.hidden], "[1, hidden size]")?;
        // Ernie 4.5 has one row of corrections.
        let is_row = |name: &String| self.tensor(name).is_some_and(|tensor| tensor.shape == [1, experts]);
        let of_row = [1, experts];
        let shape = if names.corrections.as_ref().is_some_and(is_row) { &of_row[..] } else { &of_experts };
        let mut corrections = some(&names.corrections, shape, "[experts]")?;
        let table = names.table.as_ref().map(|name| self.table(name, sizes.top_k)).transpose()?;
        if corrections.is_none() && plan.rule.has_corrections() && has_corrections_as_bias(&plan.config) {
            corrections = bias.take();
        }
        let expert_scale = some(&names.expert_scale, &of_experts, "[experts]")?.unwrap_or_default();
        let root = (sizes.hidden as f64).sqrt();
        let norm = names.norm.as_ref().map(|name| self.norm_with(&plan.config, name, sizes.hidden, 1.0 / root));
        let norm = norm.transpose()?;
        let scoring = plan.rule.scoring(experts, corrections, expert_scale, table);
        let at_config = |error: Error| error.at(plan.config.path().display());
        let rule = Router::new(experts, sizes.top_k, scoring).map_err(at_config)?;
        for (name, numbers) in [
            (Some(&names.matrix), Some(&matrix)),
            (names.bias.as_ref(), bias.as_ref()),
            (names.shared_gate.as_ref(), shared_gate.as_ref()),
        ] {
            let (Some(name), Some(numbers)) = (name, numbers) else { continue };
            if let Some(at) = numbers.iter().position(|number| !number.is_finite()) {
                let what = format!("element {at} is {}; a router needs finite numbers; {DOWNLOAD}", numbers[at]);
                return Err(Error::Invalid(what).at(self.place(name)));
            }
        }
        let bias = bias.unwrap_or_else(|| vec![0.0; experts]);
        let (shared_factor, transform) = (plan.shared_factor, None);
        let factor = plan.rule.factor() * shared_factor;
        Ok(LayerRouter { matrix, bias, norm, shared_gate, shared_factor, rule, factor, transform })
    }
}

/// Whether the model's files store the corrections of the router's choice as the router's bias, as DeepSeek's own files do.
fn has_corrections_as_bias(config: &ModelConfig) -> bool {
    config.is_model("deepseek")
}

/// Refuses a router without a part that the configuration says it has.
fn check_router_parts(config: &ModelConfig, router: &RouterTensors, layer: usize) -> Result<(), Error> {
    let missing = |name: String| Err(Error::Missing { name, remedy: DOWNLOAD.into() });
    if router.table.is_some() {
        return Ok(());
    }
    if let Some(said) = RouterRule::says_table(config, layer) {
        return missing(format!("the table of experts by token id (tid2eid) of layer {layer} ({said})"));
    }
    let has_corrections = router.corrections.is_some() || has_corrections_as_bias(config) && router.bias.is_some();
    match RouterRule::says_corrections(config).filter(|_| !has_corrections) {
        Some(said) => {
            missing(format!("the corrections of the router of layer {layer} ({}; {said})", CORRECTIONS.join(" or ")))
        }
        None => Ok(()),
    }
}

/// Returns the activation of the routed experts of a layer, or of the block beside them.
fn activation_of(config: &ModelConfig, layer: usize, block: &Block<'_>, is_beside: bool) -> Result<Activation, Error> {
    let activation = config.activation(layer, is_beside)?;
    // Models call the activation the same with and without a gate.
    let has_gate = [Role::Gate, Role::GateUp].into_iter().any(|role| block.has_role(role));
    Ok(if activation == Activation::Relu2 && has_gate { Activation::GatedRelu2 } else { activation })
}

/// Returns the block beside the routed experts: a shared expert, or the dense branch of a family that has one.
fn beside<'b, 'n>(
    blocks: &'b [Block<'n>],
    routed: &Block<'_>,
    around: Option<&Surroundings>,
) -> Result<Option<&'b Block<'n>>, Error> {
    let kind = around.map_or(Kind::Shared, Surroundings::branch_kind);
    let found = blocks.iter().filter(|block| block.kind == kind && block.stack() == routed.stack());
    let (layer, what) = (routed.layer, if kind == Kind::Shared { "shared experts" } else { "dense branches" });
    match found.collect::<Vec<_>>()[..] {
        [] if kind == Kind::Shared => Ok(None),
        [] => {
            let name = format!("the dense branch beside the experts of layer {layer}");
            Err(Error::Missing { name, remedy: DOWNLOAD.into() })
        }
        [found] => Ok(Some(found)),
        [one, other, ..] => {
            let what = format!("layer {layer} has two {what}, {} and {}", one.prefix(), other.prefix());
            Err(Error::NotComputed(format!("{what}; only one is supported")))
        }
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
