//! Lists the quantized weights of a model, says which of them run, and reports all their faults.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rayon::prelude::*;

use super::block::{Block, Kind, ranges};
use super::layer_tensors::Scope;
use super::model_config::ModelConfig;
use super::moe::LayerModules;
use super::names::{self, Projection, Role, natural, without_expert};
use super::{Checkpoint, Dtype, Format, QuantizedWeight, Tensor, floats};
use nvfp4_core::Error;
use nvfp4_core::format::{e2m1, e4m3};
use nvfp4_core::problem::Op;

/// Content of a model.
#[derive(Debug)]
pub struct Inspection {
    /// Number of files that could be opened.
    pub files: usize,
    /// Number of tensors in these files.
    pub tensors: usize,
    /// NVFP4 weights in the order of the layers; experts that differ only in their number share an entry.
    pub weights: Vec<Weight>,
    /// Other quantized weights and other projections of feed-forward blocks, grouped in the same way.
    pub others: Vec<OtherWeight>,
    /// All faults.
    pub problems: Vec<Problem>,
}

/// A fault of a model, or a warning.
#[derive(Debug)]
pub struct Problem {
    /// Kind of problem, as a code that never changes: [`Error::code`], or a code of the inspection.
    pub code: &'static str,
    /// `true` if a layer cannot be run or served. `false`: a warning.
    pub is_error: bool,
    /// What is wrong, where, and how to fix it.
    pub error: Error,
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Self { code: error.code(), is_error: true, error }
    }
}

impl Problem {
    fn new(code: &'static str, place: impl std::fmt::Display, what: String) -> Self {
        Self { code, is_error: true, error: Error::Invalid(what).at(place) }
    }
}

/// NVFP4 weights that differ only in the number of their expert.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// Module name, with `*` for the number of the expert.
    pub module: String,
    /// Naming of the parts.
    pub format: Format,
    /// Number of output features.
    pub n: usize,
    /// Number of input features.
    pub k: usize,
    /// Number of weights in this entry.
    pub count: usize,
    /// Operations of `nvfp4 run` that compute the weights: `moe`, `gated`, `plain`, `linear`.
    pub runs: Vec<&'static str>,
    /// Why an operation refuses the weights; `None` if each operation that could compute them does.
    pub why_not: Option<String>,
    /// Range of the block scales.
    pub block_scales: Range,
    /// Range of the global scales, as factors.
    pub global_scales: Range,
    /// Range of the input scales, as factors; `None` if a weight has none.
    pub input_scales: Option<Range>,
}

/// Weights of another type. The host computes some of them as a part of an MoE layer; the others do not run.
#[derive(Clone, Debug, PartialEq)]
pub struct OtherWeight {
    /// Module name, with `*` for the number of the expert.
    pub module: String,
    /// Type of the weights: `FP8`, `MXFP4`, `BF16` …
    pub kind: String,
    /// Shape of the tensor with the values.
    pub shape: Vec<usize>,
    /// Number of weights in this entry.
    pub count: usize,
    /// Operations of `nvfp4 run` that compute the weights: `moe` for a shared expert, a dense branch beside experts, and
    /// projections around experts.
    pub runs: Vec<&'static str>,
    /// Reason why no operation computes them, and the remedy; `None` if one does.
    pub why: Option<&'static str>,
}

/// Minimum and maximum of some numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// Minimum.
    pub min: f32,
    /// Maximum.
    pub max: f32,
}

impl Range {
    fn join(self, other: Self) -> Self {
        Self { min: self.min.min(other.min), max: self.max.max(other.max) }
    }

    fn of(number: f32) -> Self {
        Self { min: number, max: number }
    }
}

impl Inspection {
    /// Opens a model as [`Checkpoint::open`] does, and checks every quantized weight. All faults become problems,
    /// including a missing file.
    pub fn of(path: &Path) -> Self {
        let (checkpoint, errors) = Checkpoint::survey(path);
        let mut problems: Vec<Problem> = errors.into_iter().map(Problem::from).collect();
        let blocks = checkpoint.blocks(None);
        let fused = fused_modules(&checkpoint, &blocks);
        // Fused experts can have the same endings.
        let mut modules: Vec<&str> =
            checkpoint.quantized_modules().into_iter().filter(|module| !is_of_all_experts(module)).collect();
        modules.extend(fused.iter().map(String::as_str));
        modules.sort_unstable();
        let config = ModelConfig::beside(&checkpoint);
        let is_quantized = |module: &String| modules.binary_search(&&module[..]).is_ok();
        let known = config.as_ref().ok().and_then(Option::as_ref);
        let running = Running::of(&checkpoint, &blocks, known, is_quantized, &mut problems);
        let surveyed = modules.par_iter().map(|module| match fused.contains(*module) {
            true => survey_fused(&checkpoint, module, &running),
            false => survey(&checkpoint, module, &running),
        });
        let surveyed: Vec<_> = surveyed.collect();
        let mut found = BTreeMap::new();
        let mut weights: BTreeMap<_, Weight> = BTreeMap::new();
        for (&module, surveyed) in modules.iter().zip(surveyed) {
            match surveyed {
                Ok(weight) => {
                    check_input_scales(&checkpoint, module, fused.contains(module), &mut problems);
                    let runs = (weight.runs.clone(), weight.why_not.clone());
                    let key = (natural(&weight.module), weight.format.name(), weight.n, weight.k, runs);
                    found.insert(module, Some(weight.clone()));
                    weights.entry(key).and_modify(|alike| alike.add(&weight)).or_insert(weight);
                }
                Err(errors) => {
                    found.insert(module, None);
                    problems.extend(errors.into_iter().map(Problem::from));
                }
            }
        }
        for block in &blocks {
            check_block(&checkpoint, block, &found, &running.on_host, &mut problems);
        }
        check_sizes_of_numbers(&checkpoint, &found, &mut problems);
        problems.extend(outside_the_index(&checkpoint));
        let others = others(&checkpoint, &found, &running.on_host);
        match config {
            Ok(None) => {}
            Ok(Some(config)) => check_config(&checkpoint, &config, &blocks, &found, &mut problems),
            Err(error) => problems.push(error.into()),
        }
        problems.extend(checkpoint.check_unchanged().err().map(|error| Problem { code: "changed", ..error.into() }));
        Self {
            files: checkpoint.files().len(),
            tensors: checkpoint.names().count(),
            weights: weights.into_values().collect(),
            others,
            problems,
        }
    }
}

/// Returns the modules that hold all experts of a layer in NVFP4.
fn fused_modules(checkpoint: &Checkpoint, blocks: &[Block<'_>]) -> BTreeSet<String> {
    let fused = blocks.iter().filter(|block| block.kind == Kind::Fused);
    let modules = fused.flat_map(|block| Role::ALL.map(|role| block.modules(role))).flatten();
    modules.filter(|module| checkpoint.is_fused(module)).collect()
}

fn is_of_all_experts(module: &str) -> bool {
    Projection::parse(module).is_some_and(|projection| projection.expert == names::Expert::Fused)
}

impl Weight {
    fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.block_scales = self.block_scales.join(other.block_scales);
        self.global_scales = self.global_scales.join(other.global_scales);
        self.input_scales = match (self.input_scales, other.input_scales) {
            (Some(one), Some(two)) => Some(one.join(two)),
            (one, two) => one.or(two),
        };
    }
}

/// Operations of `nvfp4 run` that compute each module, or the reason why one does not.
#[derive(Default)]
struct Running<'c> {
    config: Option<&'c ModelConfig>,
    operations: BTreeMap<String, Vec<&'static str>>,
    refusals: BTreeMap<String, String>,
    /// Modules in any form that the host computes as a part of an MoE layer.
    on_host: BTreeSet<String>,
    /// Why no layer of the model runs.
    at_all: Option<String>,
}

impl<'c> Running<'c> {
    /// Also adds the tensors that prevent a quantized module from running to the problems.
    fn of(
        checkpoint: &Checkpoint,
        blocks: &[Block<'_>],
        config: Option<&'c ModelConfig>,
        is_quantized: impl Fn(&String) -> bool,
        problems: &mut Vec<Problem>,
    ) -> Self {
        let refusal = |check: fn(&ModelConfig) -> Result<(), Error>| Some(check(config?).err()?.to_string());
        let mut running = Self { at_all: refusal(ModelConfig::check_transforms), config, ..Self::default() };
        let not_gated = running.at_all.clone().or_else(|| refusal(ModelConfig::check_activation));
        // Both operations can meet the same tensor, which is reported once.
        let mut said = BTreeSet::new();
        for of_layer in blocks.chunk_by(|one, other| one.layer == other.layer) {
            running.add_moe(checkpoint, of_layer, &is_quantized);
            let of_kind = |kind| of_layer.iter().filter(move |block| block.kind == kind);
            let kind = if of_kind(Kind::Routed).count() > 0 { Kind::Routed } else { Kind::Dense };
            if kind == Kind::Dense && of_kind(Kind::Fused).count() > 0 {
                continue;
            }
            let mut chosen = of_kind(kind);
            let (Some(block), None) = (chosen.next(), chosen.next()) else { continue };
            for (op, refusal) in [(Op::Gated, &not_gated), (Op::Plain, &running.at_all.clone())] {
                let roles = block.roles_of(op);
                let modules: Vec<Vec<String>> = roles.iter().map(|&role| block.modules(role)).collect();
                if modules.iter().any(Vec::is_empty) || !modules.iter().flatten().any(&is_quantized) {
                    continue;
                }
                let names =
                    checkpoint.refused(&Scope { blocks: vec![block], roles, router: None, apart: &[], on_host: None });
                let first = names.first().map(|name| checkpoint.not_computed(name).to_string());
                let unsaid = names.into_iter().filter(|name| said.insert(*name));
                problems.extend(unsaid.map(|name| checkpoint.not_computed(name).into()));
                let other = modules.iter().flatten().find(|module| !is_quantized(module));
                let refusal = first.or_else(|| refusal.clone()).or_else(|| Some(not_nvfp4(op.name(), other?)));
                modules.into_iter().flatten().for_each(|module| running.add(module, op.name(), refusal.as_ref()));
            }
        }
        running
    }

    /// Adds what `--op moe` computes of a layer with experts.
    fn add_moe(&mut self, checkpoint: &Checkpoint, of_layer: &[Block<'_>], is_quantized: impl Fn(&String) -> bool) {
        let modules = |block: &Block<'_>| -> Vec<String> {
            Role::ALL.map(|role| block.modules(role)).into_iter().flatten().collect()
        };
        let experts = of_layer.iter().filter(|block| matches!(block.kind, Kind::Routed | Kind::Fused));
        let is_fp4 = |module: &String| is_quantized(module) || checkpoint.mxfp4_values(module).is_some();
        let Some(first) = experts.clone().next().filter(|first| modules(first).iter().any(is_fp4)) else {
            return;
        };
        let shared = of_layer.iter().filter(|block| block.kind == Kind::Shared);
        let computed = checkpoint.moe_modules(first.layer);
        let (modules, on_host, refusal) = match computed {
            Err(error) => {
                let why = format!("not by moe: {error}");
                (experts.chain(shared).flat_map(modules).collect(), Vec::new(), Some(why))
            }
            Ok(LayerModules { experts, on_host }) => {
                let other = experts.iter().find(|module| !is_fp4(module));
                let refusal = other.map(|other| not_nvfp4("moe", other));
                (experts, on_host, refusal)
            }
        };
        for module in modules.into_iter().chain(on_host.iter().cloned()) {
            self.add(module, "moe", refusal.as_ref());
        }
        if refusal.is_none() {
            self.on_host.extend(on_host);
        }
    }

    fn add(&mut self, module: String, operation: &'static str, refusal: Option<&String>) {
        match refusal {
            None => self.operations.entry(module).or_default().push(operation),
            Some(why) => _ = self.refusals.entry(module).or_insert_with(|| why.clone()),
        }
    }

    /// Returns the operations that compute a module with a valid weight, and the reason why one does not.
    fn of_module(&self, checkpoint: &Checkpoint, module: &str, is_fused: bool) -> (Vec<&'static str>, Option<String>) {
        let mut operations = self.operations.get(module).cloned().unwrap_or_default();
        let mut why = self.refusals.get(module).cloned().or_else(|| self.at_all.clone());
        if !is_fused {
            let transform = self.config.map(|config| config.input_transform(module)).transpose();
            match (checkpoint.linear_refusal(module), transform) {
                (None, Ok(_)) => operations.push("linear"),
                (None, Err(error)) => why = why.or_else(|| Some(error.to_string())),
                (Some(part), _) => {
                    let of_part = || format!("its tensor {} is not supported", &part[module.len()..]);
                    why = why.or_else(|| Some(of_part()));
                }
            }
        }
        if operations.is_empty() && why.is_none() {
            why = Some("not in a layer of experts that --op moe computes".into());
        }
        (operations, why)
    }
}

/// Returns why an operation does not compute a layer in which a projection is not NVFP4.
fn not_nvfp4(operation: &str, module: &str) -> String {
    format!("not by {operation}: {module} is not NVFP4; quantize the model with `nvfp4 quantize`")
}

/// Checks one NVFP4 weight.
fn survey(checkpoint: &Checkpoint, module: &str, running: &Running<'_>) -> Result<Weight, Vec<Error>> {
    let QuantizedWeight { format, matrix, input_scale } = checkpoint.survey_quantized(module)?;
    let (runs, why_not) = running.of_module(checkpoint, module, false);
    Ok(Weight {
        module: without_expert(module),
        format,
        n: matrix.rows(),
        k: matrix.k(),
        count: 1,
        runs,
        why_not,
        block_scales: range_of_codes(matrix.scales()),
        global_scales: Range::of(matrix.global_scale()),
        input_scales: input_scale.map(Range::of),
    })
}

/// Checks all experts of a layer in one tensor.
fn survey_fused(checkpoint: &Checkpoint, module: &str, running: &Running<'_>) -> Result<Weight, Vec<Error>> {
    let is_both = Projection::parse(module).is_some_and(|projection| projection.role == Role::GateUp);
    let parts = if is_both { 2 } else { 1 };
    let fused = checkpoint.fused(module, parts, false).map_err(|error| vec![error])?;
    let [count, n, k] = fused.sizes;
    let checked = fused.split().map_err(|error| vec![error])?;
    let scales = checked.iter().flatten().map(|(matrix, _)| range_of_codes(matrix.scales()));
    let inputs = checkpoint.fused_input_scales(module, count, parts);
    let inputs = inputs.iter().filter_map(|scale| scale.value.as_ref().ok().copied().flatten()).map(Range::of);
    let (runs, why_not) = running.of_module(checkpoint, module, true);
    Ok(Weight {
        module: module.to_owned(),
        format: fused.format,
        n,
        k,
        count,
        runs,
        why_not,
        block_scales: scales.reduce(Range::join).unwrap_or(Range::of(0.0)),
        global_scales: fused.factors.iter().copied().map(Range::of).reduce(Range::join).unwrap_or(Range::of(0.0)),
        input_scales: inputs.reduce(Range::join),
    })
}

/// Returns the range of some block scales.
fn range_of_codes(codes: &[u8]) -> Range {
    // Codes of positive E4M3 scales have the order of their values.
    let codes = codes.iter().fold((e4m3::MAX_CODE, 0), |(min, max), &code| (min.min(code), max.max(code)));
    Range { min: e4m3::decode(codes.0), max: e4m3::decode(codes.1) }
}

/// Reports input scales that tokens cannot be quantized with.
fn check_input_scales(checkpoint: &Checkpoint, module: &str, is_fused: bool, problems: &mut Vec<Problem>) {
    let fault = match is_fused {
        false => checkpoint.input_scale(module).err(),
        true => checkpoint.fused_input_scales(module, 1, 1).into_iter().find_map(|scale| scale.value.err()),
    };
    problems.extend(fault.map(|error| Problem { code: "input-scale", ..error.into() }));
}

/// Checks that the experts of a block match: if one expert's projection is NVFP4, the same projection of every expert
/// must be NVFP4. The host computes blocks with other forms.
fn check_block(
    checkpoint: &Checkpoint,
    block: &Block<'_>,
    found: &BTreeMap<&str, Option<Weight>>,
    on_host: &BTreeSet<String>,
    problems: &mut Vec<Problem>,
) {
    let at = |module: &str| super::place(checkpoint.path(), module);
    if let Err(error) = block.check() {
        problems.push(error.at(checkpoint.path().display()).into());
        return;
    }
    let (gates, ups, downs) = (block.modules(Role::Gate), block.modules(Role::Up), block.modules(Role::Down));
    for modules in [&[&gates, &ups][..], &[&downs]] {
        let modules: Vec<&String> = modules.iter().copied().flatten().collect();
        if !modules.iter().any(|module| found.contains_key(&module[..])) {
            continue;
        }
        for module in modules.iter().filter(|module| !found.contains_key(&module[..]) && !on_host.contains(**module)) {
            problems.extend(checkpoint.quantized(module).err().map(Problem::from));
        }
        // Servers that quantize activations need input scales for all weights of a layer or for none.
        let sound: Vec<(&str, &Weight)> =
            modules.iter().filter_map(|module| Some((&module[..], found.get(&module[..])?.as_ref()?))).collect();
        // An input scale that cannot be used is reported by itself.
        let without = sound.iter().filter(|(module, _)| matches!(checkpoint.input_scale(module), Ok(None)));
        if let (Some((first, _)), count) = (without.clone().next(), without.count())
            && count < sound.len()
        {
            let what = format!(
                "{count} of {} matching weights of layer {} have no input scale, starting with this one; calibrate all of them or none",
                sound.len(),
                block.layer
            );
            problems.push(Problem::new("input-scales-partly-missing", at(first), what));
        }
    }
    for (gate, up) in gates.iter().zip(&ups) {
        let (Some(Some(expected)), Some(Some(got))) = (found.get(&gate[..]), found.get(&up[..])) else { continue };
        let ([n, k], [expected_n, expected_k]) = ([got.n, got.k], [expected.n, expected.k]);
        if [n, k] != [expected_n, expected_k] {
            let what = format!(
                "its shape is [{n}, {k}] but {gate} is [{expected_n}, {expected_k}]; both must have the same shape"
            );
            problems.push(Problem::new("unequal-shapes", at(up), what));
        }
    }
    let scale = |module: &str| Some(found.get(module)?.as_ref()?.global_scales.max);
    let pairs = gates.iter().zip(&ups).filter_map(|(gate, up)| Some((up, scale(gate)?, scale(up)?)));
    let unequal: Vec<_> = pairs.filter(|(_, gate, up)| gate != up).collect();
    if let Some((up, of_gate, of_up)) = unequal.first() {
        let what = format!(
            "its global scale is {of_up:e} but the gate's is {of_gate:e}, as in {} of {} experts; this library uses \
             both, but servers that merge the projections use one for both",
            unequal.len(),
            gates.len()
        );
        problems.push(Problem { is_error: false, ..Problem::new("unequal-global-scales", at(up), what) });
    }
}

/// Reports weights that are too large for a model: their global scale is stored inverted.
fn check_sizes_of_numbers(
    checkpoint: &Checkpoint,
    found: &BTreeMap<&str, Option<Weight>>,
    problems: &mut Vec<Problem>,
) {
    /// Weights of models are smaller by several powers of ten; an inverted scale gives about 10⁷.
    const LARGEST: f32 = 1e5;
    let largest = |weight: &Weight| e2m1::MAX * weight.block_scales.max * weight.global_scales.max;
    let large = || {
        found
            .iter()
            .filter_map(|(module, weight)| Some((*module, largest(weight.as_ref()?))))
            .filter(|(_, largest)| *largest > LARGEST)
    };
    if let Some((module, largest)) = large().next() {
        let what = format!(
            "its numbers reach {largest:.1e}, as in {} weights: the global scale is probably stored inverted (ModelOpt's \
             weight_scale_2 multiplies, compressed-tensors' weight_global_scale divides); export the model again",
            large().count()
        );
        problems.push(Problem::new("global-scale-size", super::place(checkpoint.path(), module), what));
    }
}

/// Reports files of weights that lie beside the index and are not read.
fn outside_the_index(checkpoint: &Checkpoint) -> Option<Problem> {
    let files = checkpoint.files_outside_the_index();
    let names: Vec<_> = files.iter().filter_map(|path| path.file_name()).map(|name| name.to_string_lossy()).collect();
    let what = format!("the index does not list these files, and their weights are not read: {}", names.join(", "));
    let problem = Problem::new("files-outside-the-index", checkpoint.path().display(), what);
    (!names.is_empty()).then_some(Problem { is_error: false, ..problem })
}

/// Reports contradictions between the configuration and the tensors.
fn check_config(
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    blocks: &[Block<'_>],
    found: &BTreeMap<&str, Option<Weight>>,
    problems: &mut Vec<Problem>,
) {
    let mut wrong = |code, what| problems.push(Problem::new(code, config.path().display(), what));
    let first = found.iter().find_map(|(module, weight)| Some((*module, weight.as_ref()?)));
    if let Some((module, weight)) = first {
        match config.format() {
            None if config.quantization().is_none() => wrong(
                "config-without-quantisation",
                format!("it describes no quantization, but {module} is NVFP4; servers will not load the model"),
            ),
            Some(format) if format != weight.format => wrong(
                "config-format",
                format!(
                    "it describes a model in {} format, but {module} has the names of {} format",
                    format.name(),
                    weight.format.name()
                ),
            ),
            None => {
                let method = config.method().map_or(String::new(), |method| format!(" ({method})"));
                wrong("config-format", format!("it describes another quantization{method}, but {module} is NVFP4"));
            }
            Some(_) => {}
        }
        if let Some(what) = config.contradiction() {
            wrong("config-quantisation", what);
        }
        let sound = || found.iter().filter_map(|(module, weight)| Some((*module, weight.as_ref()?)));
        let otherwise = sound()
            .find_map(|(module, _)| Some((module, config.algorithm_of(module)?)).filter(|(_, a)| !a.contains("NVFP4")));
        if let Some((module, algorithm)) = otherwise {
            wrong(
                "config-quantisation",
                format!("quantized_layers says that {module} is {algorithm}, but it is NVFP4"),
            );
        }
        let excluded = || sound().filter_map(|(module, _)| Some((module, config.excluding(module)?)));
        if let Some((module, entry)) = excluded().next() {
            let count = excluded().count();
            wrong(
                "config-exclusion",
                format!(
                    "{entry:?} excludes {module} from quantization, but this module is NVFP4 ({count} modules like this)"
                ),
            );
        }
        if config.quantizes_activations() && sound().all(|(_, weight)| weight.input_scales.is_none()) {
            let what = "it requires quantized activations, but no weight has an input scale; use W4A16_NVFP4, which needs none";
            wrong("config-input-scales", what.into());
        }
    } else if config.format().is_some() && config.contradiction().is_none() && found.is_empty() && config.says_nvfp4() {
        wrong("config-quantisation", "it says that the model is NVFP4, but no weight is NVFP4".into());
    }
    // A single shard does not contain all layers.
    let is_shard = checkpoint.path().file_stem().is_some_and(|name| name.to_string_lossy().contains("-of-"));
    if !is_shard {
        check_config_sizes(checkpoint, config, blocks, &mut wrong);
    }
}

/// Compares the numbers of layers and experts with the configuration.
fn check_config_sizes(
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    blocks: &[Block<'_>],
    wrong: &mut impl FnMut(&'static str, String),
) {
    let layers = checkpoint.layers();
    if let (Some((key, expected)), false) = (config.number(&["num_hidden_layers", "n_layer"]), layers.is_empty()) {
        // Draft layers are numbered after the model's own layers.
        let drafts = config.number(&["num_nextn_predict_layers", "num_mtp_layers"]).map_or(0, |(_, count)| count);
        let missing: BTreeSet<usize> = (0..expected.min(1 << 16)).filter(|layer| !layers.contains(layer)).collect();
        if !missing.is_empty() {
            wrong(
                "config-layers",
                format!("{key} is {expected}, but there are no tensors of layers {}", ranges(&missing)),
            );
        }
        let more: BTreeSet<usize> =
            layers.iter().copied().filter(|&layer| layer >= expected.saturating_add(drafts)).collect();
        if !more.is_empty() {
            wrong("config-layers", format!("{key} is {expected}, but there are tensors of layers {}", ranges(&more)));
        }
    }
    let keys = ["n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"];
    if let Some((key, expected)) = config.number(&keys) {
        let differs = |block: &&Block<'_>| block.kind == Kind::Routed && block.numbers() != expected;
        if let Some(block) = blocks.iter().find(differs) {
            wrong(
                "config-experts",
                format!("{key} is {expected}, but layer {} has {} experts", block.layer, block.numbers()),
            );
        }
    }
}

/// Returns the weights that are not NVFP4 and are quantized in another way, or are projections of feed-forward blocks.
fn others(
    checkpoint: &Checkpoint,
    found: &BTreeMap<&str, Option<Weight>>,
    on_host: &BTreeSet<String>,
) -> Vec<OtherWeight> {
    let mut others: BTreeMap<_, OtherWeight> = BTreeMap::new();
    for name in checkpoint.names() {
        let Some(tensor) = checkpoint.tensor(name) else { continue };
        let Some((module, kind, why)) = other_kind(checkpoint, name, tensor) else { continue };
        if found.contains_key(module) {
            continue;
        }
        let (runs, why) = if on_host.contains(module) { (vec!["moe"], None) } else { (Vec::new(), Some(why)) };
        let (module, shape) = (without_expert(module), tensor.shape.to_vec());
        let key = (natural(&module), kind.clone(), shape.clone());
        let other = others.entry(key).or_insert(OtherWeight { module, kind, shape, count: 0, runs, why });
        other.count += 1;
    }
    others.into_values().collect()
}

/// Returns the module of a tensor of values, the type of the values, and the reason why they do not run.
fn other_kind<'n>(
    checkpoint: &Checkpoint,
    name: &'n str,
    tensor: Tensor<'_>,
) -> Option<(&'n str, String, &'static str)> {
    const QUANTIZE: &str = "convert it with `nvfp4 quantize`";
    const UNKNOWN: &str = "only NVFP4 weights run; start from a model that is not quantized this way";
    const FUSED: &str = "all experts in one tensor; `nvfp4 quantize` splits them if they are not quantized yet";
    let dtype = |name: &str| checkpoint.tensor(name).map(|tensor| tensor.dtype);
    if let Some(module) = name.strip_suffix("_blocks")
        && tensor.dtype == Dtype::U8
        && dtype(&format!("{module}_scales")).is_some()
    {
        return Some((module, "MXFP4".into(), QUANTIZE));
    }
    for suffix in [".qweight", ".weight_packed"] {
        if let Some(module) = name.strip_suffix(suffix) {
            return Some(match tensor.dtype {
                Dtype::U8 | Dtype::I8 | Dtype::F4 => (module, "MXFP4".into(), QUANTIZE),
                _ => (module, format!("integers packed in {}", tensor.dtype), UNKNOWN),
            });
        }
    }
    let module = name.strip_suffix(".weight");
    let scale = |suffix: &str| module.and_then(|module| dtype(&format!("{module}{suffix}")));
    let projection = Projection::parse(name).filter(|projection| [".weight", ""].contains(&projection.part));
    let fused = projection.is_some_and(|projection| projection.expert == names::Expert::Fused);
    let module = module.or(projection.map(|projection| projection.module))?;
    Some(match tensor.dtype {
        Dtype::F8_E4M3 | Dtype::F8_E5M2 | Dtype::F8_E4M3FNUZ | Dtype::F8_E5M2FNUZ => {
            let in_blocks = scale(".weight_scale_inv").is_some() || scale(".scale").is_some();
            (module, if in_blocks { "FP8 in blocks" } else { "FP8" }.into(), QUANTIZE)
        }
        Dtype::U8 | Dtype::I8 | Dtype::F4
            if [scale(".scale"), scale(".weight_scale")]
                .iter()
                .flatten()
                .any(|dtype| [Dtype::F8_E8M0, Dtype::U8].contains(dtype)) =>
        {
            (module, "MXFP4".into(), QUANTIZE)
        }
        Dtype::I8 if scale(".weight_scale").is_some() => (module, "INT8".into(), UNKNOWN),
        dtype if floats::DTYPES.contains(&dtype) => {
            projection?;
            (module, dtype.to_string(), if fused { FUSED } else { QUANTIZE })
        }
        dtype => {
            projection?;
            (module, dtype.to_string(), UNKNOWN)
        }
    })
}
