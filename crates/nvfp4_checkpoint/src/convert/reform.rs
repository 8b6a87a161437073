//! Converts NVFP4 models between ModelOpt's and compressed-tensors' names, and between separate experts and experts that
//! share a tensor. Codes and block scales keep their bits; a global scale becomes its inverse where the formats differ.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::config::{Config, Others, Quantization};
use super::place::is_one_file;
use super::rewrite::{self, Done, Fate, Rewrite, TensorLayout};
use super::stored::Weight;
use super::unquantized::unquantized;
use super::weights::{self, Form, PRE_QUANT_SCALE, Readable};
use super::written::{Converted, Written, all_converted, converted};
use crate::file::{Tensor, TensorFile};
use crate::names::{Expert, Projection, Role};
use crate::write::TensorWriter;
use crate::{Checkpoint, Dtype, Format, place};
use nvfp4_core::Error;
use nvfp4_core::format::BLOCK;

/// How the experts of a layer are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Experts {
    /// Each projection of each expert has its own tensors.
    Apart,
    /// All experts share a tensor `[E, N, K/2]` per projection; gate and up share one too, with gate in the first half of
    /// N.
    Fused,
}

impl Experts {
    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Apart => "apart",
            Self::Fused => "fused",
        }
    }
}

/// A matrix of a new tensor.
struct Part<'a> {
    module: String,
    weight: Weight<'a>,
    /// Tensor that holds the values in the input.
    tensor: &'a str,
    input_scale: Option<f32>,
}

/// A weight of the output: one matrix, or all experts of a projection.
struct New<'a> {
    module: String,
    /// Number of experts; `None` for one matrix.
    experts: Option<usize>,
    /// Matrices in the order in which they are written. If gate and up share the tensor, each expert has gate, then up.
    parts: Vec<Part<'a>>,
    /// Tensors of the biases. The output joins them to one tensor.
    biases: Vec<&'a str>,
}

/// A conversion between forms of NVFP4 that is planned and ready to write.
pub struct Reform<'a> {
    checkpoint: &'a Checkpoint,
    format: Format,
    config: Config,
    others: Others,
    /// New weights. The key is a tensor of the input; its weights are written when this tensor's turn comes.
    new: BTreeMap<&'a str, Vec<New<'a>>>,
    dropped: BTreeSet<String>,
    readable: BTreeMap<&'a str, Readable<'a>>,
    input_scales: bool,
}

impl<'a> Reform<'a> {
    /// Finds the NVFP4 weights. `experts`: `None` keeps the experts as they are stored.
    ///
    /// # Errors
    /// Returns an error if a weight cannot be read, the model has other quantized weights than NVFP4, a part of the weights
    /// has no input scale, or the experts of a layer cannot share a tensor.
    pub fn new(checkpoint: &'a Checkpoint, format: Format, experts: Option<Experts>) -> Result<Self, Error> {
        let (config, others) = Config::and_others(checkpoint)?;
        let readable = weights::all(checkpoint, &config, false)?;
        let at = |error: Error, name: &str| error.at(checkpoint.place(name));
        if let Some((name, other)) = readable.iter().find(|(_, readable)| !readable.form.is_nvfp4()) {
            let what =
                format!("this weight is {}; only models whose weights are NVFP4 are converted", other.form.name());
            return Err(at(Error::Invalid(what), name));
        }
        if readable.is_empty() {
            let what = "the model has no NVFP4 weight; quantize it with `nvfp4 quantize`";
            return Err(Error::Invalid(what.into()).at(checkpoint.path().display()));
        }
        let mut reform = Self {
            checkpoint,
            format,
            config,
            others,
            new: BTreeMap::new(),
            dropped: BTreeSet::new(),
            readable,
            input_scales: false,
        };
        reform.check_pre_quant_scales(experts)?;
        reform.plan(experts)?;
        reform.check_input_scales()?;
        Ok(reform)
    }

    /// Refuses factors of the tokens (AWQ) where the output has no name for them.
    fn check_pre_quant_scales(&self, experts: Option<Experts>) -> Result<(), Error> {
        let Some(name) = self.checkpoint.names().find(|name| name.ends_with(PRE_QUANT_SCALE)) else { return Ok(()) };
        let where_to = match (self.format, experts) {
            (Format::CompressedTensors, _) => "compressed-tensors has no pre_quant_scale (NVFP4_AWQ)",
            (_, Some(Experts::Fused)) => "experts in one tensor have no pre_quant_scale (NVFP4_AWQ)",
            _ => return Ok(()),
        };
        let what = format!(
            "{where_to}; use --to modelopt with separate experts, or `nvfp4 dequantize`, which multiplies it into the weight"
        );
        Err(Error::NotComputed(what).at(self.checkpoint.place(name)))
    }

    /// Assigns each matrix to a weight of the output.
    fn plan(&mut self, experts: Option<Experts>) -> Result<(), Error> {
        let mut fused: BTreeMap<String, Vec<Part<'a>>> = BTreeMap::new();
        for (&name, Readable { stored, shape, .. }) in &self.readable {
            self.dropped.extend(stored.scales.iter().filter(|part| !part.ends_with(PRE_QUANT_SCALE)).cloned());
            let is_fused = shape.len() == 3;
            let inputs = self.input_scales_of(stored.name, &stored.weights, is_fused)?;
            for (weight, input_scale) in stored.weights.iter().zip(inputs) {
                let weight = Weight { module: weight.module.clone(), source: weight.source };
                let part = Part { module: weight.module.clone(), weight, tensor: name, input_scale };
                let together = match experts {
                    Some(Experts::Apart) => false,
                    Some(Experts::Fused) => true,
                    None => is_fused,
                };
                match fused_module(&part.module).filter(|_| together) {
                    Some(module) => fused.entry(module).or_default().push(part),
                    None => {
                        let module = part.module.clone();
                        let new = New { module, experts: None, parts: vec![part], biases: Vec::new() };
                        self.new.entry(name).or_default().push(new);
                    }
                }
            }
        }
        for (module, parts) in fused {
            let new = self.fuse(module, parts)?;
            self.dropped.extend(new.biases.iter().map(|name| (*name).to_owned()));
            self.new.entry(new.parts[0].tensor).or_default().push(new);
        }
        // These values are written when the turn of another tensor comes.
        let moved = self.readable.keys().filter(|name| !self.new.contains_key(*name)).map(|name| (*name).to_owned());
        self.dropped.extend(moved.collect::<Vec<_>>());
        Ok(())
    }

    /// Puts all experts of a projection in order, and checks that they can share a tensor.
    fn fuse(&self, module: String, mut parts: Vec<Part<'a>>) -> Result<New<'a>, Error> {
        let wrong = |what: String| {
            Error::Invalid(format!("{what}; use --experts apart")).at(place(self.checkpoint.path(), &module))
        };
        let key = |part: &Part<'_>| expert_and_role(&part.module);
        parts.sort_by_key(key);
        let per_expert = parts.iter().take_while(|part| key(part).0 == key(&parts[0]).0).count();
        let experts = parts.len() / per_expert;
        let sizes = parts[0].weight.source.sizes();
        for (index, part) in parts.iter().enumerate() {
            if key(part).0 != index / per_expert || part.weight.source.sizes() != sizes {
                let what = format!(
                    "the experts cannot share a tensor: {} is missing or has other sizes than the first expert",
                    part.module
                );
                return Err(wrong(what));
            }
        }
        let roles = parts.iter().take(per_expert).map(|part| key(part).1).collect::<Vec<_>>();
        let module = match roles[..] {
            [Role::Gate, Role::Up] | [Role::Down] => module.clone(),
            // Experts without a gate.
            [Role::Up] => module.replace("gate_up_proj", "up_proj"),
            _ => return Err(wrong("the experts have different projections".into())),
        };
        let bias = |part: &Part<'a>| {
            let mut names = self.checkpoint.names_under(&part.module);
            names.find(|name| name[part.module.len()..] == *".bias")
        };
        let biases: Vec<_> = parts.iter().filter_map(bias).collect();
        if !biases.is_empty() && biases.len() != parts.len() {
            return Err(wrong(format!("{} of {} projections have a bias", biases.len(), parts.len())));
        }
        let layouts = || biases.iter().filter_map(|name| self.checkpoint.tensor(name));
        if let Some(first) = layouts().next()
            && layouts().any(|bias| (bias.dtype, bias.shape) != (first.dtype, first.shape))
        {
            return Err(wrong("the biases have different types or shapes".into()));
        }
        Ok(New { module, experts: Some(experts), parts, biases })
    }

    /// Returns the input scale of each weight of a tensor.
    fn input_scales_of(&self, name: &str, weights: &[Weight<'_>], is_fused: bool) -> Result<Vec<Option<f32>>, Error> {
        if !is_fused {
            return weights.iter().map(|weight| self.checkpoint.input_scale(&weight.module)).collect();
        }
        let projection = Projection::parse(name).expect("`weights` parsed the name");
        let parts = if projection.role == Role::GateUp { 2 } else { 1 };
        let scales = self.checkpoint.fused_input_scales(projection.module, weights.len() / parts, parts);
        scales.into_iter().map(|scale| scale.value).collect()
    }

    /// Checks that all weights have an input scale, or none.
    fn check_input_scales(&mut self) -> Result<(), Error> {
        let parts = || self.new.values().flatten().flat_map(|new| &new.parts);
        let without = parts().filter(|part| part.input_scale.is_none()).count();
        let all = parts().count();
        if without > 0 && without < all {
            let first = parts().find(|part| part.input_scale.is_none()).map_or("", |part| &part.module[..]);
            let what = format!(
                "{without} of {all} weights have no input scale, starting with {first}; calibrate all of them with `nvfp4 \
                 quantize --calibrate`, or none"
            );
            return Err(Error::Invalid(what).at(self.checkpoint.path().display()));
        }
        self.input_scales = without == 0;
        Ok(())
    }

    /// Weights that are converted, in natural order.
    pub fn converted(&self) -> Vec<Converted<'_>> {
        all_converted(self.readable.values().map(|readable| (&readable.stored, true)))
    }

    /// Form of the input.
    pub fn input_form(&self) -> Form {
        self.readable.values().next().expect("`new` refuses a model without weights").form
    }

    /// Total bytes of the tensors that will be read.
    pub fn bytes(&self) -> usize {
        rewrite::bytes(self.checkpoint)
    }

    /// Notes for the user.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if is_one_file(self.checkpoint) {
            notes.push("only one file is converted: no config.json is written, which servers need".to_owned());
        } else {
            notes.extend(self.config.kv_cache().loss(self.format));
        }
        if !self.others.left.is_empty() {
            notes.push(format!("not copied: {}", self.others.left.join(", ")));
        }
        notes
    }

    /// Checks that the result can be written to `out`.
    ///
    /// # Errors
    /// Returns an error if `out` cannot be written, is the input, or is a folder that is not empty.
    pub fn check_target(&self, out: &Path) -> Result<(), Error> {
        rewrite::check_target(self.checkpoint, out)
    }

    /// Writes the model: one file if a file was opened, otherwise a folder. `done` is called after each tensor. `out` stays
    /// absent or unchanged until everything is written.
    ///
    /// # Errors
    /// Returns the errors of [`Reform::check_target`], and an error if an input file changes meanwhile.
    pub fn write(&self, out: &Path, mut done: impl FnMut(Written<'_>)) -> Result<(), Error> {
        rewrite::write(self.checkpoint, &self.others, self, out, &mut done)
    }

    /// Names of the tensors of a weight: values, block scales, global scales, input scales.
    fn names(&self, new: &New<'_>) -> [String; 4] {
        let format = self.format;
        let [values, scales, global, input] = match new.experts {
            None => [format.values(), format.scales(), format.global(), format.input()],
            Some(_) => {
                let (values, global, input) = match format {
                    Format::ModelOpt => ("", "_weight_scale_2", "_input_scale"),
                    Format::CompressedTensors => ("_packed", "_weight_global_scale", "_input_global_scale"),
                };
                // vLLM's name of w13 and w2.
                let values = if new.module.ends_with("_proj") { values } else { "_weight" };
                [values, "_weight_scale", global, input]
            }
        };
        [values, scales, global, input].map(|suffix| format!("{}{suffix}", new.module))
    }

    /// Returns a scale as the format stores it.
    fn stored(&self, factor: f32) -> f32 {
        match self.format {
            Format::ModelOpt => factor,
            Format::CompressedTensors => factor.recip(),
        }
    }

    fn layout(&self, new: &New<'_>) -> Vec<TensorLayout> {
        let [n, k] = new.parts[0].weight.source.sizes();
        let [values, scales, global, input] = self.names(new);
        let (before, of_scalars) = match new.experts {
            None if self.format == Format::ModelOpt => (vec![], vec![]),
            None => (vec![], vec![1]),
            Some(experts) => (vec![experts], vec![experts, new.parts.len() / experts]),
        };
        let rows = n * new.parts.len() / new.experts.unwrap_or(1);
        let matrix = |columns: usize| [&before[..], &[rows, columns]].concat();
        let mut layout = vec![
            (values, Dtype::U8, matrix(k / 2)),
            (scales, Dtype::F8_E4M3, matrix(k / BLOCK)),
            (global, Dtype::F32, of_scalars.clone()),
        ];
        if self.input_scales {
            layout.push((input, Dtype::F32, of_scalars));
        }
        if let Some(bias) = new.biases.first().and_then(|name| self.checkpoint.tensor(name)) {
            layout.push((format!("{}_bias", new.module), bias.dtype, [&before[..], &[rows]].concat()));
        }
        layout
    }

    fn write_new(&self, new: &New<'_>, writer: &mut TensorWriter) -> Result<(), Error> {
        let [values, scales, global, input] = self.names(new);
        let [values_at, scales_at] = [&values, &scales].map(|name| writer.place(name));
        let (mut codes_written, mut scales_written) = (0, 0);
        let mut globals = Vec::with_capacity(new.parts.len());
        for part in &new.parts {
            let (codes, block_scales, factor) = part.weight.source.nvfp4().expect("`new` refuses other forms");
            writer.write_part(&values_at, codes_written, &codes)?;
            writer.write_part(&scales_at, scales_written, &block_scales)?;
            codes_written += codes.len();
            scales_written += block_scales.len();
            globals.push(self.stored(factor));
            self.checkpoint.file_with(part.tensor).release();
        }
        if let Some(wrong) = globals.iter().position(|stored| self.format.factor(*stored).is_err()) {
            let what = format!("the global scale of {} has no inverse that is a finite f32", new.parts[wrong].module);
            return Err(Error::Invalid(what));
        }
        writer.write(&global, bytemuck::cast_slice(&globals))?;
        if self.input_scales {
            let inputs = new.parts.iter().filter_map(|part| part.input_scale).map(|scale| self.stored(scale));
            writer.write(&input, bytemuck::cast_slice(&inputs.collect::<Vec<f32>>()))?;
        }
        if !new.biases.is_empty() {
            let tensors = new.biases.iter().filter_map(|name| self.checkpoint.tensor(name));
            let bytes: Vec<u8> = tensors.flat_map(|tensor| tensor.data).copied().collect();
            writer.write(&format!("{}_bias", new.module), &bytes)?;
        }
        Ok(())
    }
}

impl Rewrite for Reform<'_> {
    fn fate(&self, name: &str) -> Fate {
        match self.new.get(name) {
            Some(new) => Fate::Replaced(new.iter().flat_map(|new| self.layout(new)).collect()),
            None if self.dropped.contains(name) => Fate::Dropped,
            None => Fate::Copied,
        }
    }

    fn replace(
        &self,
        _: &TensorFile,
        name: &str,
        tensor: Tensor<'_>,
        writer: &mut TensorWriter,
        done: Done<'_>,
    ) -> Result<(), Error> {
        self.new[name].iter().try_for_each(|new| self.write_new(new, writer))?;
        let Some(Readable { stored, .. }) = self.readable.get(name) else { return Ok(()) };
        let bytes = tensor.data.len() / stored.weights.len().max(1);
        for weight in &stored.weights {
            done(Written::Converted { weight: converted(stored, weight, true), bytes, loss: None, exact: None });
        }
        Ok(())
    }

    fn configurations(&self) -> Vec<(&'static str, String)> {
        let modules: BTreeSet<String> = self.converted().into_iter().map(|weight| weight.module.to_owned()).collect();
        let left = unquantized(self.checkpoint, self.format, &|name| self.readable.contains_key(name));
        let quantization = Quantization {
            format: self.format,
            input_scales: self.input_scales,
            ignored: super::config::ignored(self.format, left, modules),
            kv_cache: self.config.kv_cache(),
        };
        quantization.files(&self.config)
    }
}

/// Returns the name of the module that holds the projection of all experts; `None` if it is no projection of an expert.
fn fused_module(module: &str) -> Option<String> {
    let projection = Projection::parse(module)?;
    let Expert::Routed(_) = projection.expert else { return None };
    let last = module.split('.').find(|segment| Projection::parse(&format!("layers.0.{segment}")).is_some())?;
    let (before, _) = module.split_once(".experts.")?;
    let called = match projection.role {
        Role::Gate | Role::Up if last.starts_with('w') => "w13",
        Role::Gate | Role::Up => "gate_up_proj",
        _ => last,
    };
    Some(format!("{before}.experts.{called}"))
}

/// Returns the number of the expert, and the role of the projection.
fn expert_and_role(module: &str) -> (usize, Role) {
    match Projection::parse(module) {
        Some(Projection { expert: Expert::Routed(expert), role, .. }) => (expert, role),
        _ => unreachable!("`fused_module` accepts only projections of experts"),
    }
}
