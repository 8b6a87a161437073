//! Problems of a self-test: small ragged problems that reach every instance, each compared with its reference. A second
//! run of a kernel must give the same bits.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::Output;
use crate::backend::cuda::{Cuda, Options, Verdicts};
use crate::backend::{self, Backend, cpu::Cpu};
use crate::bias::Bias;
use crate::compare::{Tolerance, compare_with};
use crate::generate::{self, Generator};
use crate::linear::{self, LinearOutput, LinearSizes, LinearStep};
use crate::moe::compare::{MoeComparison, Stage};
use crate::moe::generate::Routing;
use crate::moe::{self, Activation, LayerShape, MoeOutput, MoeSizes, MoeStep, shape};
use crate::oracle::Reference;
use crate::problem::{Group, Op, Step, TokenDtype, TokenFormat};
use crate::router::{self, GroupScore, Logits, Router, Rule, Score, Scoring};
use nvfp4_kernels::subject::{Subject, UNFUSED, odd_part_of, part_of};
use nvfp4_kernels::variant::{LaunchSchedule, Variant};
use nvfp4_kernels::{GroupedKernel, KERNELS};

const SEED: u64 = 1;
const DTYPES: [TokenDtype; 2] = [TokenDtype::F16, TokenDtype::Bf16];

/// A part of a self-test: its name and its problem.
pub(super) struct Part {
    pub name: String,
    problem: Problem,
}

/// A fault of a part.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Fault {
    /// Description.
    pub why: String,
    /// Entries that the plan must not choose. Empty: the fault belongs to no instance that the plan chooses.
    pub instances: Vec<String>,
}

enum Problem {
    Groups(Variant, Op, Tiles),
    Moe { layer: LayerShape, sms: u32, dtype: TokenDtype },
    Linear { n: usize, k: usize, tokens: usize, sms: u32, dtype: TokenDtype, token_format: TokenFormat },
    Router(Router),
}

/// Tiles of tokens of a named instance.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tiles {
    /// Tiles that the plan gives to the instance.
    Planned,
    /// Tiles that start at odd columns of scales.
    Odd,
}

/// MoE layers, with the number of SMs that each is planned for. The rows per expert select the tokens per tile, the SMs
/// select the columns per tile; a test checks that these layers reach every instance. No size is a multiple of a
/// k-block, unit or tile.
#[rustfmt::skip] // One layer per line.
const MOE: [(u32, &str); 15] = [
    (1, r#"{"hidden": 464, "intermediate": 496, "experts": 6, "top_k": 2, "tokens": 5}"#),
    (1, r#"{"hidden": 464, "intermediate": 496, "experts": 6, "top_k": 2, "tokens": 24}"#),
    (16, r#"{"hidden": 464, "intermediate": 336, "experts": 6, "top_k": 2, "tokens": 24}"#),
    (16, r#"{"hidden": 464, "intermediate": 336, "experts": 6, "top_k": 2, "tokens": 5}"#),
    (32, r#"{"hidden": 464, "intermediate": 336, "experts": 12, "top_k": 2, "tokens": 9}"#),
    (16, r#"{"hidden": 464, "intermediate": 336, "experts": 12, "top_k": 2, "tokens": 5}"#),
    (3, r#"{"hidden": 464, "intermediate": 336, "experts": 3, "top_k": 2, "tokens": 110}"#),
    (3, r#"{"hidden": 464, "intermediate": 336, "experts": 2, "top_k": 2, "tokens": 170, "named_experts": 3}"#),
    (7, r#"{"hidden": 176, "intermediate": 80, "experts": 5, "top_k": 1, "tokens": 33, "activation": "silu-limit=2.5", "weights_on_input": true}"#),
    (7, r#"{"hidden": 176, "intermediate": 80, "experts": 5, "top_k": 2, "tokens": 33, "activation": "gelu-tanh", "shared_intermediate": 48}"#),
    (7, r#"{"hidden": 176, "intermediate": 80, "experts": 5, "top_k": 3, "tokens": 33, "activation": "gpt-oss", "biases": true}"#),
    (7, r#"{"hidden": 176, "intermediate": 80, "experts": 5, "top_k": 2, "tokens": 33, "activation": "relu2", "biases": true}"#),
    (1, r#"{"hidden": 720, "intermediate": 208, "experts": 7, "top_k": 2, "tokens": 9}"#),
    (3, r#"{"hidden": 1168, "intermediate": 976, "experts": 6, "top_k": 3, "tokens": 1}"#),
    (7, r#"{"hidden": 80, "intermediate": 48, "experts": 600, "top_k": 16, "tokens": 45}"#),
];

/// Like `MOE`, with FP8 tokens. The rows per expert select the tokens per tile.
#[rustfmt::skip] // One layer per line.
const MOE_FP8: [(u32, &str); 7] = [
    (32, r#"{"hidden": 464, "intermediate": 336, "experts": 6, "top_k": 2, "tokens": 5, "token_format": "fp8"}"#),
    (7, r#"{"hidden": 464, "intermediate": 336, "experts": 3, "top_k": 2, "tokens": 24, "token_format": "fp8"}"#),
    (3, r#"{"hidden": 464, "intermediate": 336, "experts": 3, "top_k": 2, "tokens": 60, "token_format": "fp8"}"#),
    (3, r#"{"hidden": 464, "intermediate": 336, "experts": 2, "top_k": 2, "tokens": 90, "token_format": "fp8"}"#),
    (3, r#"{"hidden": 464, "intermediate": 336, "experts": 2, "top_k": 2, "tokens": 170, "token_format": "fp8"}"#),
    (7, r#"{"hidden": 176, "intermediate": 80, "experts": 5, "top_k": 2, "tokens": 33, "activation": "gpt-oss", "biases": true, "shared_intermediate": 48, "token_format": "fp8"}"#),
    (7, r#"{"hidden": 80, "intermediate": 48, "experts": 600, "top_k": 16, "tokens": 45, "token_format": "fp8"}"#),
];

/// Like `MOE`, with NVFP4 tokens.
#[rustfmt::skip] // One layer per line.
const MOE_NVFP4: [(u32, &str); 13] = [
    (32, r#"{"hidden": 464, "intermediate": 336, "experts": 6, "top_k": 2, "tokens": 5, "token_format": "nvfp4"}"#),
    (7, r#"{"hidden": 464, "intermediate": 336, "experts": 3, "top_k": 2, "tokens": 24, "token_format": "nvfp4"}"#),
    (3, r#"{"hidden": 464, "intermediate": 336, "experts": 3, "top_k": 2, "tokens": 90, "token_format": "nvfp4"}"#),
    (3, r#"{"hidden": 464, "intermediate": 336, "experts": 2, "top_k": 2, "tokens": 170, "token_format": "nvfp4"}"#),
    (7, r#"{"hidden": 176, "intermediate": 80, "experts": 5, "top_k": 2, "tokens": 33, "activation": "gpt-oss", "biases": true, "shared_intermediate": 48, "token_format": "nvfp4"}"#),
    (7, r#"{"hidden": 464, "intermediate": 336, "experts": 6, "top_k": 2, "tokens": 5, "token_format": "nvfp4", "input_scales": true}"#),
    (7, r#"{"hidden": 176, "intermediate": 80, "experts": 5, "top_k": 2, "tokens": 33, "activation": "relu2", "shared_intermediate": 48, "token_format": "nvfp4", "input_scales": true}"#),
    (3, r#"{"hidden": 464, "intermediate": 336, "experts": 2, "top_k": 2, "tokens": 170, "token_format": "nvfp4", "input_scales": true}"#),
    (7, r#"{"hidden": 80, "intermediate": 48, "experts": 600, "top_k": 16, "tokens": 45, "token_format": "nvfp4"}"#),
    (7, r#"{"hidden": 80, "intermediate": 48, "experts": 600, "top_k": 16, "tokens": 70, "token_format": "nvfp4"}"#),
    (7, r#"{"hidden": 176, "intermediate": 80, "experts": 5, "top_k": 2, "tokens": 5, "shared_intermediate": 48, "token_format": "nvfp4"}"#),
    (7, r#"{"hidden": 176, "intermediate": 80, "experts": 2, "top_k": 2, "tokens": 40, "shared_intermediate": 48, "token_format": "nvfp4"}"#),
    (7, r#"{"hidden": 80, "intermediate": 32, "experts": 27, "top_k": 1, "tokens": 1030, "token_format": "nvfp4"}"#),
];

/// Numbers of tokens and SMs for which the plan of a linear layer selects each instance in turn; a test checks this.
const LINEAR: [(usize, u32); 12] = [
    (1, 132),
    (16, 19),
    (32, 19),
    (16, 5),
    (32, 10),
    (32, 5),
    (64, 10),
    (128, 14),
    (128, 7),
    (128, 3),
    (128, 1),
    (200, 1),
];

/// Like `LINEAR`, for a layer whose K has two parts on Hopper.
const LINEAR_SPLIT: [(usize, u32); 7] = [(1, 132), (16, 12), (32, 12), (64, 12), (96, 12), (128, 1), (200, 1)];

/// N and K of the linear layers.
const LINEAR_SIZES: [usize; 2] = [592, 208];

/// N and K of the linear layers whose K has two parts.
const LINEAR_SPLIT_SIZES: [usize; 2] = [208, 12304];

/// Like `LINEAR`, with FP8 tokens.
const LINEAR_FP8: [(usize, u32); 8] = [(13, 19), (13, 3), (30, 3), (60, 19), (60, 3), (125, 5), (125, 3), (300, 10)];

/// Like `LINEAR`, with NVFP4 tokens.
const LINEAR_NVFP4: [(usize, u32); 4] = [(5, 19), (30, 19), (125, 3), (300, 3)];

/// Returns the parts of a subject; instances used by default come first.
pub(super) fn parts(subject: Subject) -> Vec<Part> {
    match subject {
        Subject::Groups(kernel) => of_groups(kernel),
        Subject::Moe => of_moe(&MOE),
        Subject::Fp8 => [of_moe(&MOE_FP8), of_linear(&LINEAR_FP8, TokenFormat::Fp8)].into_iter().flatten().collect(),
        Subject::Nvfp4 => {
            [of_moe(&MOE_NVFP4), of_linear(&LINEAR_NVFP4, TokenFormat::Nvfp4)].into_iter().flatten().collect()
        }
        Subject::Linear => {
            let split = of_linear_sizes(LINEAR_SPLIT_SIZES, &LINEAR_SPLIT, TokenFormat::Bits16);
            of_linear(&LINEAR, TokenFormat::Bits16).into_iter().chain(split).collect()
        }
        Subject::Router => of_router(),
    }
}

fn of_groups(kernel: GroupedKernel) -> Vec<Part> {
    let ops = [Op::Gated, Op::Plain];
    let instances = |op| kernel.instances(op).into_iter().map(move |name| (op, name));
    let mut instances: Vec<_> = ops.into_iter().flat_map(instances).collect();
    instances.sort_by_key(|(op, name)| !kernel.get().chosen(*op, name));
    let of_instance = |(op, name), part_of: fn(Op, &str) -> String, tiles| {
        let variant = Variant { kernel: Some(kernel), instance: Some(name), ..Variant::default() };
        Part { name: part_of(op, name), problem: Problem::Groups(variant, op, tiles) }
    };
    let odd = instances.iter().filter(|(op, name)| kernel.get().odd_above(*op, name).is_some());
    let odd = odd.map(|&instance| of_instance(instance, odd_part_of, Tiles::Odd));
    let planned = instances.iter().map(|&instance| of_instance(instance, part_of, Tiles::Planned));
    let mut parts: Vec<_> = planned.chain(odd).collect();
    if kernel == GroupedKernel::portable() {
        let variant = Variant { kernel: Some(kernel), schedule: LaunchSchedule::Unfused, ..Variant::default() };
        parts.push(Part { name: UNFUSED.into(), problem: Problem::Groups(variant, Op::Gated, Tiles::Planned) });
    }
    parts
}

/// Curves that a self-test computes, each with some of the instances.
const CURVES: [Activation; 4] = [
    Activation::Situ { beta: 4.0, linear: Some(2.0) },
    Activation::SwigluStep { limit: 1.5 },
    Activation::Gelu,
    Activation::GatedRelu2,
];

/// Parts of layers. A layer with SiLU is also a part with a curve, which other instances compute.
fn of_moe(layers: &[(u32, &str)]) -> Vec<Part> {
    let part = |dtype: TokenDtype, sms: u32, layer: LayerShape| {
        let LayerShape { tokens, experts, activation, .. } = &layer;
        let scales = if layer.input_scales { ", input scales" } else { "" };
        let name = format!("{tokens} tokens, {experts} experts, {activation}, {}{scales}, {sms} SMs", dtype.name());
        Part { name, problem: Problem::Moe { layer, sms, dtype } }
    };
    let layers: Vec<_> = layers
        .iter()
        .enumerate()
        .flat_map(|(index, &(sms, text))| {
            let layer = shape::parse(text).expect("a test parses these layers").remove(0);
            let curve = CURVES[index % CURVES.len()];
            let with_curve =
                (layer.activation == Activation::Silu).then(|| layer.clone().with_activation(curve, layer.biases));
            [Some(layer), with_curve].into_iter().flatten().map(move |layer| (sms, layer))
        })
        .collect();
    DTYPES
        .into_iter()
        .flat_map(|dtype| layers.iter().map(move |(sms, layer)| part(dtype, *sms, layer.clone())))
        .collect()
}

fn of_linear(layers: &[(usize, u32)], token_format: TokenFormat) -> Vec<Part> {
    of_linear_sizes(LINEAR_SIZES, layers, token_format)
}

fn of_linear_sizes([n, k]: [usize; 2], layers: &[(usize, u32)], token_format: TokenFormat) -> Vec<Part> {
    let part = |dtype: TokenDtype, &(tokens, sms): &(usize, u32)| Part {
        name: format!("a linear layer {n}×{k}, {tokens} tokens, {}, {sms} SMs", dtype.name()),
        problem: Problem::Linear { n, k, tokens, sms, dtype, token_format },
    };
    DTYPES.into_iter().flat_map(|dtype| layers.iter().map(move |of| part(dtype, of))).collect()
}

fn of_router() -> Vec<Part> {
    let bias = (0..36).map(|expert| [0.0, 0.125, -0.25, 0.125, 0.5][expert * 7 % 5]).collect();
    let groups = Scoring::SigmoidGroups { bias, groups: 6, top_groups: 2, renormalize: true, scale: 2.5 };
    let softplus = Rule {
        score: Score::SqrtSoftplus,
        bias: (0..896).map(|expert| (expert % 7) as f32 / 16.0).collect(),
        groups: 8,
        top_groups: 4,
        group_score: GroupScore::BestTwo,
        renormalize: true,
        scale: 2.5,
        ..Rule::default()
    };
    let scales = (0..40).map(|expert| 0.5 + expert as f32 / 32.0).collect();
    let scaled = Rule { renormalize: true, expert_scale: scales, null_experts: 8, ..Rule::default() };
    let routers = [
        ("softmax", 128, 8, Scoring::Softmax { renormalize: true }),
        ("softmax of all", 60, 4, Scoring::Softmax { renormalize: false }),
        ("softmax of the chosen", 512, 32, Scoring::TopKSoftmax),
        ("sigmoid", 16, 1, Scoring::SigmoidTop1),
        ("sigmoids in groups", 36, 6, groups),
        ("square roots of softplus", 896, 16, Scoring::Rule(softplus)),
        ("factors of experts", 40, 4, Scoring::Rule(scaled)),
    ];
    let part = |(name, experts, top_k, scoring): (&str, _, _, _)| {
        let router = Router::new(experts, top_k, scoring).expect("the sizes of the router are valid");
        Part { name: name.into(), problem: Problem::Router(router) }
    };
    routers.into_iter().map(part).collect()
}

/// A device, opened once per number of SMs for which launches are planned.
pub(super) struct Card {
    ordinal: u32,
    options: Options,
    open: HashMap<u32, Cuda>,
}

impl Card {
    /// Opens the device.
    ///
    /// # Errors
    /// Returns the errors of [`Cuda::open`].
    pub fn open(ordinal: u32, options: &Options) -> Result<Self, Error> {
        // The kernel under test must run regardless of earlier verdicts.
        Self::judged(ordinal, Options { verdicts: Verdicts::Ignored, ..options.clone() })
    }

    /// Opens the device with the verdicts of the options.
    pub(super) fn judged(ordinal: u32, options: Options) -> Result<Self, Error> {
        let mut card = Self { ordinal, options, open: HashMap::new() };
        card.with_sms(ALL_SMS)?;
        Ok(card)
    }

    pub(super) fn with_sms(&mut self, sms: u32) -> Result<Cuda, Error> {
        Ok(match self.open.entry(sms) {
            Entry::Occupied(open) => open.get().clone(),
            Entry::Vacant(place) => {
                let options = Options { sms: Some(sms), ..self.options.clone() };
                place.insert(Cuda::open_with(self.ordinal, options)?).clone()
            }
        })
    }
}

/// More SMs than any device has: use all SMs.
pub(super) const ALL_SMS: u32 = u32::MAX;

impl Part {
    /// Returns the part in which the plan chooses the instances of a kernel.
    #[cfg(test)]
    pub fn of_plan(kernel: GroupedKernel, op: Op) -> Self {
        let variant = Variant { kernel: Some(kernel), ..Variant::default() };
        Self { name: format!("{} by the plan", op.name()), problem: Problem::Groups(variant, op, Tiles::Planned) }
    }

    /// Returns the fault; `None` if the result is correct.
    ///
    /// # Errors
    /// Returns the errors of the device.
    pub fn run(&self, card: &mut Card) -> Result<Option<Fault>, Error> {
        let multiplying = self.multiplying(card)?;
        let of_all = |why: Option<String>| why.map(|why| Fault { why, instances: multiplying.clone() });
        Ok(match &self.problem {
            Problem::Groups(variant, op, tiles) => {
                of_all(groups(&card.with_sms(ALL_SMS)?.with_variant(*variant)?, *variant, *op, *tiles)?)
            }
            Problem::Moe { layer, sms, dtype } => moe(&card.with_sms(*sms)?, layer, *dtype, &multiplying)?,
            Problem::Linear { n, k, tokens, sms, dtype, token_format } => {
                of_all(linear(&card.with_sms(*sms)?, [*n, *k], *tokens, *dtype, *token_format)?)
            }
            Problem::Router(router) => of_all(route(&card.with_sms(ALL_SMS)?, router)?),
        })
    }

    /// Returns the entries that the plan must not choose if the part ends its process: all instances that it launches.
    /// Empty: the part launches no instance, or with tiles that the plan never gives to it.
    ///
    /// # Errors
    /// If the plan finds no instance.
    pub fn instances(&self, card: &Card) -> Result<Vec<String>, Error> {
        Ok(distinct(self.multiplying(card)?))
    }

    /// Returns the same entries, one for each launch.
    fn multiplying(&self, card: &Card) -> Result<Vec<String>, Error> {
        let gpu = &card.open[&ALL_SMS];
        let names = |entries: Vec<&str>| entries.into_iter().map(str::to_owned).collect();
        let most = |sms: u32| sms.min(gpu.info().sms);
        Ok(match &self.problem {
            Problem::Groups(Variant { kernel: Some(kernel), instance: Some(name), .. }, op, Tiles::Planned) => {
                names(kernel.get().entry(*op, name).into_iter().collect())
            }
            Problem::Groups(..) | Problem::Router(_) => Vec::new(),
            Problem::Moe { layer, sms, dtype } => {
                names(gpu.moe_entries(&layer.sizes(*dtype), layer.tokens, most(*sms))?)
            }
            &Problem::Linear { n, k, tokens, sms, dtype, token_format } => {
                let sizes = LinearSizes { n, k, dtype, bias: true, token_format };
                names(vec![gpu.linear_entry(&sizes, tokens, most(sms))?])
            }
        })
    }
}

/// Returns groups of no, one and several tiles of tokens, the largest first; fewer tokens for instances that accept
/// few.
fn sizes(most: usize) -> Vec<Group> {
    let group = |(m, n, k)| Group { m, n, k };
    [(most, 136, 320), (0, 8, 64), (1, 72, 224), (3, 8, 32), (most.min(9), 264, 96)].map(group).into()
}

fn groups(gpu: &Cuda, variant: Variant, op: Op, tiles: Tiles) -> Result<Option<String>, Error> {
    let kernel = variant.kernel.expect("a part names its kernel").get();
    let one_tile = variant.instance.and_then(|name| kernel.odd_above(op, name)).filter(|_| tiles == Tiles::Planned);
    let most = one_tile.map_or(vec![200, 40, 7], |tokens| vec![tokens as usize]);

    // Model-like numbers, and small numbers whose sums are exact in any order, so that every bit of a plain product
    // must match.
    for generator in [Generator::Gaussian, Generator::PublicGroup] {
        for dtype in DTYPES {
            // An instance with small tiles refuses many tokens.
            let mut refusal = None;
            for &most in &most {
                match groups_of(gpu, variant, (generator, op), &sizes(most), dtype) {
                    Err(error) if matches!(innermost(&error), Error::Invalid(_)) => refusal = Some(error),
                    Ok(None) => {
                        refusal = None;
                        break;
                    }
                    other => return other,
                }
            }
            if let Some(error) = refusal {
                return Ok(Some(format!("the instance refuses even a few tokens ({error})")));
            }
        }
    }
    Ok(None)
}

/// Returns the error without its places.
fn innermost(error: &Error) -> &Error {
    match error {
        Error::At { error, .. } => innermost(error),
        other => other,
    }
}

fn groups_of(
    gpu: &Cuda,
    variant: Variant,
    (generator, op): (Generator, Op),
    sizes: &[Group],
    dtype: TokenDtype,
) -> Result<Option<String>, Error> {
    let weights = generate::weights(generator, op, sizes, SEED)?;
    let step = Step::new(&weights, generate::activations(generator, sizes, SEED)?, dtype)?;
    let mut layer = gpu.prepare_layer(&weights)?;
    let (mut output, mut again) = (Output::new(step.problem()), Output::new(step.problem()));
    backend::run(&mut layer, &step, &mut output)?;
    backend::run(&mut layer, &step, &mut again)?;
    let exact = op == Op::Plain && generator == Generator::PublicGroup;
    let found = compare_with(&output, &Reference::new(&weights, &step), &step, |_, _, _, element| match exact {
        true => Tolerance { absolute: 0.0, relative: 0.0 },
        false => variant.schedule.tolerance(dtype, element),
    });
    let (wrong, of) = (found.mismatches, found.checked);
    Ok(wrong_elements(wrong, of, found.first).or_else(|| other_bits(output == again)))
}

/// `multiplying`: entries of gate and up, of down, and of both for the shared expert.
fn moe(gpu: &Cuda, layer: &LayerShape, dtype: TokenDtype, multiplying: &[String]) -> Result<Option<Fault>, Error> {
    let sizes = layer.sizes(dtype);
    let weights = moe::generate::weights(layer, Generator::Gaussian, dtype, SEED, &|| ())?;
    let inputs = moe::generate::inputs(layer, Generator::Gaussian, Routing::Uniform, dtype, layer.tokens, SEED)?;
    let step = MoeStep::new(&weights, inputs)?;
    let mut layer = gpu.prepare_moe(&weights)?;
    let mut run = |mut output: MoeOutput| layer.execute(&step, &mut output).map(|_| output);
    // The second run stores no stages, as in normal use.
    let (output, again) = (run(MoeOutput::with_stages(&step))?, run(MoeOutput::new(&step))?);
    let found = moe::compare::compare(&weights, &step, &output);
    let is_same = output.hidden == again.hidden;
    let why = wrong_elements(found.mismatches(), found.checked(), found.first()).or_else(|| other_bits(is_same));
    Ok(why.map(|why| Fault { why, instances: at_fault(&found, &sizes, multiplying) }))
}

/// Returns the entries that have written wrong stages; all entries if no stage is wrong, and none if the stage of a launch
/// is wrong that does not multiply.
fn at_fault(found: &MoeComparison, sizes: &MoeSizes, multiplying: &[String]) -> Vec<String> {
    // A chain of two launches multiplies in both. With input scales, a gated product quantizes its own result.
    let few = KERNELS.iter().filter(|kernel| kernel.name() == "moe_few_sm90").flat_map(|kernel| kernel.entries());
    let in_two_launches = few.into_iter().any(|entry| entry.name == multiplying[0]);
    let quantizes = sizes.has_input_scales() && sizes.activation.has_gate();
    let index = |stage: Stage| match stage {
        Stage::Intermediate => Some(0),
        Stage::Partial => Some(1),
        Stage::SharedIntermediate => Some(2),
        Stage::SharedPartial => Some(3),
        Stage::QuantizedIntermediate if quantizes => Some(0),
        Stage::SharedQuantizedIntermediate if quantizes => Some(2),
        Stage::Output if in_two_launches => Some(1),
        _ => None,
    };
    let wrong: Vec<_> = found.stages.iter().filter(|stage| stage.mismatches > 0).map(|of| index(of.stage)).collect();
    if wrong.is_empty() {
        return distinct(multiplying.to_vec());
    }
    let wrong: Option<BTreeSet<_>> = wrong.into_iter().collect();
    distinct(wrong.into_iter().flatten().map(|index| multiplying[index].clone()).collect())
}

/// Returns the names without repetitions.
fn distinct(names: Vec<String>) -> Vec<String> {
    names.into_iter().collect::<BTreeSet<_>>().into_iter().collect()
}

fn linear(
    gpu: &Cuda,
    [n, k]: [usize; 2],
    tokens: usize,
    dtype: TokenDtype,
    token_format: TokenFormat,
) -> Result<Option<String>, Error> {
    let bias = (0..n).map(|row| (row % 29) as f32 / 3.0 - 4.0).collect();
    let weights = linear::generate::weights(Generator::Gaussian, n, k, dtype, SEED)?.with_bias(Bias::F32(bias))?;
    let weights = weights.with_token_format(token_format);
    let step = LinearStep::new(&weights, linear::generate::inputs(Generator::Gaussian, tokens, k, dtype, SEED)?)?;
    let mut layer = gpu.prepare_linear(&weights)?;
    let mut run = || {
        let mut output = LinearOutput::new(&step);
        layer.execute(&step, &mut output).map(|_| output)
    };
    let (output, again) = (run()?, run()?);
    let found = linear::compare::compare(&weights, &step, &output);
    Ok(wrong_elements(found.mismatches, found.checked, found.first).or_else(|| other_bits(output == again)))
}

fn route(gpu: &Cuda, router: &Router) -> Result<Option<String>, Error> {
    // Includes ties, and distances that leave weights of 0.
    let number = |i: usize| match i.wrapping_mul(0x9E37_79B9) >> 7 & 0xFF {
        x if x < 64 => (x % 8) as f32 - 4.0,
        64 => -300.0,
        x => (x as f32 - 128.0) / 13.0 + (i % 7) as f32 / 100.0,
    };
    let numbers: Vec<f32> = (0..9 * router.experts()).map(number).collect();
    let logits: [Logits<'_>; 3] = [
        Logits::F16(numbers.iter().map(|&x| f16::from_f32(x).to_bits()).collect()),
        Logits::Bf16(numbers.iter().map(|&x| bf16::from_f32(x).to_bits()).collect()),
        Logits::F32(numbers.into()),
    ];
    for logits in logits {
        let (routes, on_cpu) = (gpu.route(router, &logits)?, Cpu::new().route(router, &logits)?);
        if let Some(first) = router::compare::compare(router, &logits, &routes)? {
            return Ok(Some(first.to_string()));
        }
        if routes != on_cpu {
            return Ok(Some("the bits differ from the CPU's result".into()));
        }
    }
    Ok(None)
}

fn wrong_elements(wrong: usize, of: usize, first: Option<impl std::fmt::Display>) -> Option<String> {
    first.map(|first| format!("{wrong} of {of} elements are wrong, the first {first}"))
}

fn other_bits(same: bool) -> Option<String> {
    (!same).then(|| "a second run gave different bits".into())
}
