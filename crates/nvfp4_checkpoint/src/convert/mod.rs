//! Converts a model in floats, FP8 or MXFP4 to NVFP4: quantizes the chosen weights, copies every other tensor bit for
//! bit, and adapts the files beside the weights.
//!
//! Weights are converted in parts, so memory holds a few megabytes for a tensor of any size.
//!
//! Submodules:
//! - [`rewrite`] writes the files of the new model.
//! - [`stored`] finds the weights.
//! - [`mxfp4`] converts MXFP4 without loss, and [`lossless`] does so for a layer that runs.
//! - [`select`] decides which weights are quantized.
//! - [`config`] describes the result to servers.
//! - [`calibration`] provides the scales of activations.
//! - [`recorded`] reads activations, with which [`gptq`] rounds better.

mod calibration;
mod config;
mod dequantize;
mod gptq;
mod lossless;
mod mxfp4;
mod options;
mod place;
mod recorded;
mod reform;
mod rewrite;
mod select;
mod stored;
mod unquantized;
pub(super) mod weights;
mod written;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::rc::Rc;

use rayon::prelude::*;

pub use self::calibration::Calibration;
pub(super) use self::config::Config;
use self::config::{Others, Quantization};
pub use self::dequantize::Dequantization;
use self::gptq::Factor;
pub(super) use self::lossless::Lossless;
pub use self::mxfp4::Exact;
pub use self::options::Options;
use self::place::{file_name, is_one_file};
pub use self::recorded::Recorded;
pub use self::reform::{Experts, Reform};
use self::rewrite::{Done, Fate, Rewrite, TensorLayout};
pub use self::select::Left;
use self::select::Selection;
use self::stored::{Stored, WEIGHT, Weight};
use self::unquantized::unquantized;
pub use self::weights::Form;
pub use self::written::{Converted, Written};
use self::written::{all_converted, converted};
use super::file::{Tensor, TensorFile};
use super::floats::with;
use super::names::{Expert, Projection, merged_with, natural};
use super::write::TensorWriter;
use super::{Checkpoint, Dtype, Format};
use nvfp4_core::Error;
use nvfp4_core::format::BLOCK;
use nvfp4_core::quantize::{Loss, Scales, global_scale_for, quantize_blocks_by};

/// A matrix with up to this many elements stays in memory between its two reads.
const KEPT_ELEMENTS: usize = 16 << 20;

/// Number of factors of activations that stay in memory: projections of an expert read two kinds of tokens.
const KEPT_FACTORS: usize = 2;

/// A conversion that is planned and ready to write, or that reports why it cannot.
pub struct Conversion<'a> {
    checkpoint: &'a Checkpoint,
    format: Format,
    separate_scales: bool,
    scales: Scales,
    exact: bool,
    config: Config,
    selection: Selection<'a>,
    /// Modules to quantize, with the tensor that holds each.
    modules: BTreeMap<String, &'a str>,
    /// Largest magnitude of each module read so far.
    amax: RefCell<BTreeMap<String, f32>>,
    /// Largest exponent of each MXFP4 module read so far.
    exponents: RefCell<BTreeMap<String, Option<i32>>>,
    /// Largest magnitudes of activations: for every module to quantize, or empty.
    inputs: BTreeMap<String, f32>,
    /// Names in the calibration that belong to no module to quantize.
    unused: Vec<String>,
    /// Recorded activations, and the tensor of each module that has some.
    recorded: Option<(&'a Recorded, BTreeMap<String, &'a str>)>,
    /// Factors of the tensors that were used last.
    factors: RefCell<VecDeque<(&'a str, Rc<Factor>)>>,
    others: Others,
    /// Tensors that are only useful with the original form of a converted weight.
    dropped: BTreeSet<String>,
}

impl<'a> Conversion<'a> {
    /// Examines all names, types and shapes, and decides the fate of each tensor.
    ///
    /// # Errors
    /// Returns an error if no included weight can be quantized, the configuration beside the model cannot be read, or
    /// the calibration does not fit. Requested tensors that cannot be quantized are no error here; [`Conversion::left`]
    /// lists them.
    pub fn new(checkpoint: &'a Checkpoint, options: &Options<'_>) -> Result<Self, Error> {
        let (config, others) = Config::and_others(checkpoint)?;
        let selection = select::select(checkpoint, &config, options);
        if selection.chosen.is_empty() && !selection.left.iter().any(|left| left.refusal.is_some()) {
            let left = match &selection.left[..] {
                [] => "no included tensor is a two-dimensional tensor of numbers".to_owned(),
                [first, ..] => {
                    format!("every included tensor is skipped, starting with {} ({})", first.name, first.reason)
                }
            };
            let what = format!("nothing to quantize: {left}");
            return Err(Error::Invalid(what).at(checkpoint.path().display()));
        }
        let weights = selection.chosen.iter().flat_map(|(&name, stored)| stored.weights.iter().map(move |w| (w, name)));
        let modules: BTreeMap<_, _> = weights.map(|(weight, name)| (weight.module.clone(), name)).collect();
        let mut conversion = Self {
            dropped: dropped(&selection),
            checkpoint,
            format: options.format,
            separate_scales: options.separate_scales,
            scales: options.scales,
            exact: options.exact,
            config,
            selection,
            modules,
            amax: RefCell::default(),
            exponents: RefCell::default(),
            inputs: BTreeMap::new(),
            unused: Vec::new(),
            recorded: None,
            factors: RefCell::default(),
            others,
        };
        if let Some(calibration) = options.calibration {
            conversion.inputs = conversion.calibrate(calibration)?;
            conversion.unused = calibration
                .unused(conversion.modules.keys().map(String::as_str))
                .into_iter()
                .map(str::to_owned)
                .collect();
        }
        Ok(conversion)
    }

    /// Rounds the weights that have recorded activations by GPTQ. MXFP4 keeps its numbers. Memory holds 8·K² bytes for each
    /// of two tensors of activations.
    ///
    /// # Errors
    /// Returns an error if no weight has activations, or the activations of a weight have another width.
    pub fn with_activations(mut self, recorded: &'a Recorded) -> Result<Self, Error> {
        let mut found = BTreeMap::new();
        for (module, weight) in self.chosen_weights() {
            let name = recorded.tensor_of(module, weight.source.sizes()[1])?;
            found.extend(name.map(|name| (module.to_owned(), name)));
        }
        if found.is_empty() {
            let example = self.modules.keys().next().map_or("", |module| module);
            let missing = Error::Missing {
                name: "activations of a weight to quantize".into(),
                remedy: format!("give tensors [tokens, K] by the names of modules, such as {example}"),
            };
            return Err(missing.at(recorded.path().display()));
        }
        let unused = recorded.unused(self.modules.keys().map(String::as_str));
        self.unused.extend(unused.into_iter().map(str::to_owned));
        self.recorded = Some((recorded, found));
        Ok(self)
    }

    /// Returns the tensor of the recorded activations by which a module's weight is rounded; `None`: it is rounded to
    /// nearest.
    pub fn activations_of(&self, module: &str) -> Option<&'a str> {
        let (_, tensors) = self.recorded.as_ref()?;
        tensors.get(module).copied().filter(|_| !self.weight(module).source.is_mxfp4())
    }

    /// Returns the factor of the activations of a module. `None`: the module's weight is rounded to nearest.
    fn factor(&self, module: &str) -> Result<Option<Rc<Factor>>, Error> {
        let (Some((recorded, _)), Some(name)) = (&self.recorded, self.activations_of(module)) else { return Ok(None) };
        let mut factors = self.factors.borrow_mut();
        let known = factors.iter().position(|(known, _)| *known == name).and_then(|index| factors.remove(index));
        let entry = match known {
            Some(entry) => entry,
            None => {
                // The oldest factor goes first, so that memory never holds one more.
                factors.truncate(KEPT_FACTORS - 1);
                (name, Rc::new(recorded.factor(name)?))
            }
        };
        let factor = entry.1.clone();
        factors.push_front(entry);
        Ok(Some(factor))
    }

    /// Returns the largest magnitude of the activations of each module.
    fn calibrate(&self, calibration: &Calibration) -> Result<BTreeMap<String, f32>, Error> {
        let (mut found, mut unknown) = (BTreeMap::new(), Vec::new());
        for (module, stored) in self.chosen_weights() {
            let k = stored.source.sizes()[1];
            match calibration.amax(module, k)? {
                Some(amax) => _ = found.insert(module.to_owned(), amax),
                None => unknown.push(module),
            }
        }
        // An expert without tokens gets the largest magnitude of its layer's other experts.
        let mut of_layers: BTreeMap<String, f32> = BTreeMap::new();
        for (module, &amax) in &found {
            if let Some(others) = of_any_expert(module) {
                of_layers.entry(others).and_modify(|largest| *largest = largest.max(amax)).or_insert(amax);
            }
        }
        for module in unknown {
            let others = of_any_expert(module).and_then(|others| of_layers.get(&others));
            let remedy = || "add its activations or their largest magnitude, or exclude the module".to_owned();
            let missing = || Error::Missing { name: format!("calibration data for {module}"), remedy: remedy() };
            found.insert(module.to_owned(), *others.ok_or_else(missing)?);
        }
        // Projections that engines merge read the same activations and share one scale.
        if !self.separate_scales {
            let largest = |module: &String, amax: f32| {
                merged_with(module).filter_map(|other| found.get(&other)).fold(amax, |largest, &amax| largest.max(amax))
            };
            return Ok(found.iter().map(|(module, &amax)| (module.clone(), largest(module, amax))).collect());
        }
        Ok(found)
    }

    fn chosen_weights(&self) -> impl Iterator<Item = (&str, &Weight<'a>)> {
        let weights = self.selection.chosen.values().flat_map(|stored| &stored.weights);
        weights.map(|weight| (&weight.module[..], weight))
    }

    /// Total bytes of the tensors that will be read.
    pub fn bytes(&self) -> usize {
        rewrite::bytes(self.checkpoint)
    }

    /// Weights that will be converted, in natural order.
    pub fn converted(&self) -> Vec<Converted<'_>> {
        let Selection { chosen, widened, .. } = &self.selection;
        let quantized = chosen.values().map(|stored| (stored, true));
        all_converted(quantized.chain(widened.values().map(|stored| (stored, false))))
    }

    /// Requested tensors that are not quantized, in natural order.
    pub fn left(&self) -> Vec<&Left> {
        let mut left: Vec<_> = self.selection.left.iter().collect();
        left.sort_by_cached_key(|left| natural(&left.name));
        left
    }

    /// Whether input scales are written.
    pub fn has_input_scales(&self) -> bool {
        !self.inputs.is_empty()
    }

    /// Files that will be written beside the weights: configurations, and copies.
    pub fn other_files(&self) -> Vec<String> {
        if is_one_file(self.checkpoint) {
            return Vec::new();
        }
        let copied = self.others.copied.iter().map(|path| file_name(path).display().to_string());
        self.configurations().into_iter().map(|(name, _)| name.to_owned()).chain(copied).collect()
    }

    /// Notes for the user about the files beside the weights.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if is_one_file(self.checkpoint) {
            notes.push("only one file is converted: no config.json is written, which servers need".to_owned());
        } else if !self.config.exists() {
            notes.push("the input has no config.json: the new config.json describes only the quantization".to_owned());
        }
        if !is_one_file(self.checkpoint) {
            notes.extend(self.config.kv_cache().loss(self.format));
        }
        if let Some(first) = self.unused.first() {
            let count = self.unused.len();
            notes.push(format!(
                "entries of the calibration that name no weight to quantize: {count}, starting with {first}"
            ));
        }
        if self.recorded.is_some() {
            let mut without = self.modules.keys().filter(|module| self.activations_of(module).is_none());
            if let Some(first) = without.next() {
                let (count, all) = (1 + without.count(), self.modules.len());
                notes.push(format!(
                    "rounded to nearest, without recorded activations: {count} of {all} weights, starting with {first}"
                ));
            }
        }
        if !self.others.left.is_empty() {
            notes.push(format!("not copied: {}", self.others.left.join(", ")));
        }
        notes
    }

    /// Checks that every requested tensor can be quantized.
    ///
    /// # Errors
    /// Returns the first refused tensor of [`Conversion::left`], and the number of further ones.
    pub fn check(&self) -> Result<(), Error> {
        let mut refused = self.left().into_iter().filter_map(|left| left.refusal.as_ref());
        let Some(first) = refused.next() else { return Ok(()) };
        let message = match refused.count() {
            0 => first.to_string(),
            more => format!("{first} ({more} more refused tensors; list them with --dry-run)"),
        };
        Err(Error::Invalid(message))
    }

    /// Checks that the result can be written to `out`.
    ///
    /// # Errors
    /// Returns an error if `out` cannot be written, is the input, or is a folder that is not empty.
    pub fn check_target(&self, out: &Path) -> Result<(), Error> {
        rewrite::check_target(self.checkpoint, out)
    }

    /// Writes the model: one file if a file was opened. Otherwise a folder with files of the same names, their index,
    /// the configurations and the small files of the model. `done` is called after each tensor. `out` stays absent or
    /// unchanged until everything is written.
    ///
    /// # Errors
    /// Returns the errors of [`Conversion::check`] and [`Conversion::check_target`], and an error if a chosen tensor
    /// contains NaN or an infinity, or an input file changes during the conversion.
    pub fn write(&self, out: &Path, mut done: impl FnMut(Written<'_>)) -> Result<(), Error> {
        self.check()?;
        rewrite::write(self.checkpoint, &self.others, self, out, &mut done)
    }

    /// Modules that servers must load unquantized: every matrix that stays unquantized.
    fn ignored(&self) -> Vec<String> {
        let widened = self.selection.widened.values().flat_map(|stored| &stored.weights);
        let is_quantized = |name: &str| {
            let module = name.strip_suffix(WEIGHT).unwrap_or(name);
            let is_nvfp4 = self.selection.nvfp4.contains(module) || name.ends_with(".weight_packed");
            is_nvfp4 || self.selection.chosen.contains_key(name) || self.selection.widened.contains_key(name)
        };
        let left = unquantized(self.checkpoint, self.format, &is_quantized);
        let left = left.into_iter().chain(widened.map(|weight| weight.module.clone()));
        let quantized = self.modules.keys().chain(&self.selection.nvfp4).cloned();
        config::ignored(self.format, left, quantized)
    }

    /// Returns the weights of a tensor that are converted, and `true` if they become NVFP4.
    fn converted_tensor(&self, name: &str) -> Option<(&Stored<'a>, bool)> {
        let chosen = self.selection.chosen.get(name).map(|stored| (stored, true));
        chosen.or_else(|| self.selection.widened.get(name).map(|stored| (stored, false)))
    }

    /// Names, types and shapes of the tensors that replace a converted tensor.
    fn layout(&self, stored: &Stored<'_>, quantized: bool) -> Vec<TensorLayout> {
        let mut layout = Vec::new();
        for Weight { module, source } in &stored.weights {
            let [n, k] = source.sizes();
            if !quantized {
                layout.push((format!("{module}{WEIGHT}"), Dtype::BF16, vec![n, k]));
                continue;
            }
            let scalar = match self.format {
                Format::ModelOpt => vec![],
                Format::CompressedTensors => vec![1],
            };
            layout.push((format!("{module}{}", self.format.values()), Dtype::U8, vec![n, k / 2]));
            layout.push((format!("{module}{}", self.format.scales()), Dtype::F8_E4M3, vec![n, k / BLOCK]));
            layout.push((format!("{module}{}", self.format.global()), Dtype::F32, scalar.clone()));
            if self.has_input_scales() {
                layout.push((format!("{module}{}", self.format.input()), Dtype::F32, scalar));
            }
        }
        if let Some(biases) = &stored.biases {
            let parts = biases.parts.iter();
            layout
                .extend(parts.map(|(module, rows)| (format!("{module}.bias"), biases.tensor.dtype, vec![rows.count])));
        }
        layout
    }

    /// Writes the weights of a tensor, and their biases.
    fn convert(
        &self,
        file: &TensorFile,
        stored: &Stored<'_>,
        quantized: bool,
        tensor: Tensor<'_>,
        writer: &mut TensorWriter,
        done: Done<'_>,
    ) -> Result<(), Error> {
        let mut unsaid = tensor.data.len();
        for (index, weight) in stored.weights.iter().enumerate() {
            let of_one = |error: Error| if stored.weights.len() > 1 { error.at(&weight.module) } else { error };
            let (loss, exact) = if quantized {
                let (loss, exact) = self.quantize(file, weight, writer).map_err(of_one)?;
                (Some(loss), exact)
            } else {
                widen(file, weight, writer).map_err(of_one)?;
                (None, None)
            };
            // Each part of a transposed matrix reads the same pages again.
            if stored.weights.len() > 1 {
                file.release();
            }
            let bytes = unsaid / (stored.weights.len() - index);
            unsaid -= bytes;
            done(Written::Converted { weight: converted(stored, weight, quantized), bytes, loss, exact });
        }
        if let Some(biases) = &stored.biases {
            for (module, rows) in &biases.parts {
                writer.write(&format!("{module}.bias"), &biases.bytes(*rows))?;
            }
        }
        Ok(())
    }

    /// Quantizes one weight; returns the loss, and for MXFP4 the number of blocks without loss.
    fn quantize(
        &self,
        file: &TensorFile,
        weight: &Weight<'_>,
        writer: &mut TensorWriter,
    ) -> Result<(Loss, Option<Exact>), Error> {
        let Weight { module, source } = weight;
        let exponent = self.global_exponent(module)?;
        let stored = match exponent {
            Some(exponent) => self.stored(f32::exp2(exponent as f32)),
            None => self.stored(self.scales.global_scale_for(self.amax(module)?)),
        };
        // Readers see the factor after rounding, so the block scales are computed for that factor.
        let global = self.format.factor(stored)?;
        let part = |suffix: &str| format!("{module}{suffix}");
        let [values_at, scales_at] =
            [self.format.values(), self.format.scales()].map(|suffix| writer.place(&part(suffix)));
        let k = source.sizes()[1];
        let factor = if exponent.is_none() { self.factor(module)? } else { None };
        let factor = factor.as_deref();
        let (shared, rule) = (&*writer, self.scales);
        let losses = source.chunks().map_init(Default::default, |buffers: &mut Buffers, rows| {
            let Buffers { decoded, values, scales } = buffers;
            let first = rows.start * k;
            let count = rows.len() * k;
            values.resize(count / 2, 0);
            scales.resize(count / BLOCK, 0);
            let loss = match exponent {
                Some(exponent) => mxfp4::convert_rows(source, rows.clone(), exponent, values, scales),
                None if let Some(factor) = factor => {
                    let numbers = source.decoded(rows.clone(), decoded);
                    factor.quantize(rule, numbers, global, values, scales).map(|loss| (loss, Exact::default()))
                }
                None => {
                    let numbers = source.rows(rows.clone(), decoded);
                    let loss = with!(numbers, numbers => quantize_blocks_by(rule, numbers, global, values, scales));
                    loss.map(|loss| (loss, Exact::default()))
                }
            };
            let loss = loss.map_err(|error| error.further_on(first))?;
            shared.write_part(&values_at, first / 2, values)?;
            shared.write_part(&scales_at, first / BLOCK, scales)?;
            if let Some(bytes) = source.in_place(rows) {
                file.release_part(bytes);
            }
            Ok(loss)
        });
        // Results are collected and joined in order, so the figures do not depend on the number of threads.
        let losses: Vec<Result<(Loss, Exact), Error>> = losses.collect();
        let (mut loss, mut exact) = (Loss::default(), Exact::default());
        for part in losses {
            let (of_part, exact_of_part) = part?;
            loss = loss.join(of_part);
            exact += exact_of_part;
        }
        if self.exact && exact.blocks < exact.all {
            let rounded = exact.all - exact.blocks;
            let what = format!(
                "{rounded} of {} blocks of 16 cannot keep their numbers, because the exponents of the tensor span more \
                 than 17; leave out --exact to round them",
                exact.all
            );
            return Err(Error::Invalid(what));
        }
        writer.write(&part(self.format.global()), &stored.to_le_bytes())?;
        if let Some(&amax) = self.inputs.get(module) {
            let scale = self.stored(global_scale_for(amax));
            writer.write(&part(self.format.input()), &scale.to_le_bytes())?;
        }
        Ok((loss, exponent.map(|_| exact)))
    }

    /// Returns a global scale as the format stores it.
    fn stored(&self, global: f32) -> f32 {
        match self.format {
            Format::ModelOpt => global,
            Format::CompressedTensors => global.recip(),
        }
    }

    /// Returns the exponent of the global scale with which MXFP4 keeps its numbers; `None` if the weight, or a weight
    /// that shares its scale, is not MXFP4.
    fn global_exponent(&self, module: &str) -> Result<Option<i32>, Error> {
        let mut largest = self.largest_exponent(module)?;
        if !self.weight(module).source.is_mxfp4() {
            return Ok(None);
        }
        if !self.separate_scales {
            for other in merged_with(module).filter(|other| self.modules.contains_key(other)) {
                if !self.weight(&other).source.is_mxfp4() {
                    return Ok(None);
                }
                // A weight that cannot be converted is refused when its turn comes.
                largest = largest.max(self.largest_exponent(&other).unwrap_or_default());
            }
        }
        Ok(Some(mxfp4::global_exponent(largest)))
    }

    fn largest_exponent(&self, module: &str) -> Result<Option<i32>, Error> {
        if let Some(&known) = self.exponents.borrow().get(module) {
            return Ok(known);
        }
        let largest = mxfp4::largest_exponent(&self.weight(module).source)?;
        self.exponents.borrow_mut().insert(module.to_owned(), largest);
        Ok(largest)
    }

    /// Returns the weight of a module to quantize.
    fn weight(&self, module: &str) -> &Weight<'a> {
        let stored = &self.selection.chosen[self.modules[module]];
        let weight = stored.weights.iter().find(|weight| weight.module == module);
        weight.expect("`modules` maps each module to its tensor")
    }

    /// Returns the largest magnitude of a weight and of the weights merged with it.
    fn amax(&self, module: &str) -> Result<f32, Error> {
        let mut amax = self.amax_alone(module)?;
        if !self.separate_scales {
            for other in merged_with(module).filter(|other| self.modules.contains_key(other)) {
                // A weight that cannot be quantized is refused when its turn comes.
                amax = self.amax_alone(&other).map_or(amax, |other| amax.max(other));
            }
        }
        Ok(amax)
    }

    fn amax_alone(&self, module: &str) -> Result<f32, Error> {
        if let Some(&known) = self.amax.borrow().get(module) {
            return Ok(known);
        }
        let (name, weight) = (self.modules[module], self.weight(module));
        let file = &self.checkpoint.files[self.checkpoint.file_of[name]];
        // Small weights stay in memory for the second read.
        let is_large = weight.source.sizes().iter().product::<usize>() > KEPT_ELEMENTS;
        let amax = weight.source.amax(|bytes| {
            if is_large {
                file.release_part(bytes);
            }
        })?;
        self.amax.borrow_mut().insert(module.to_owned(), amax);
        Ok(amax)
    }
}

impl Rewrite for Conversion<'_> {
    fn fate(&self, name: &str) -> Fate {
        match self.converted_tensor(name) {
            _ if self.dropped.contains(name) => Fate::Dropped,
            Some((stored, quantized)) => Fate::Replaced(self.layout(stored, quantized)),
            None => Fate::Copied,
        }
    }

    fn replace(
        &self,
        file: &TensorFile,
        name: &str,
        tensor: Tensor<'_>,
        writer: &mut TensorWriter,
        done: Done<'_>,
    ) -> Result<(), Error> {
        let (stored, quantized) = self.converted_tensor(name).expect("only converted tensors are replaced");
        self.convert(file, stored, quantized, tensor, writer, done)
    }

    fn configurations(&self) -> Vec<(&'static str, String)> {
        let quantization = Quantization {
            format: self.format,
            input_scales: self.has_input_scales(),
            ignored: self.ignored(),
            kv_cache: self.config.kv_cache(),
        };
        quantization.files(&self.config)
    }
}

/// Returns the tensors that are only useful with the original form of a converted weight.
fn dropped(selection: &Selection<'_>) -> BTreeSet<String> {
    let all = selection.chosen.values().chain(selection.widened.values());
    all.flat_map(|stored| stored.scales.iter().chain(stored.biases.iter().map(|biases| &biases.name)))
        .cloned()
        .collect()
}

/// Buffers that are reused for each part of a weight.
#[derive(Default)]
struct Buffers {
    decoded: Vec<f32>,
    values: Vec<u8>,
    scales: Vec<u8>,
}

/// Writes a weight as bf16.
fn widen(file: &TensorFile, weight: &Weight<'_>, writer: &mut TensorWriter) -> Result<(), Error> {
    let Weight { module, source } = weight;
    let at = writer.place(&format!("{module}{WEIGHT}"));
    let k = source.sizes()[1];
    let shared = &*writer;
    source.chunks().try_for_each_init(
        || (Vec::new(), Vec::new()),
        |(decoded, bytes), rows| {
            let first = rows.start * k;
            bytes.clear();
            source.rows(rows.clone(), decoded).to_bf16(bytes);
            shared.write_part(&at, first * 2, bytes)?;
            if let Some(bytes) = source.in_place(rows) {
                file.release_part(bytes);
            }
            Ok(())
        },
    )
}

/// Returns the name of an expert's projection without the number of the expert; `None` for other modules.
fn of_any_expert(module: &str) -> Option<String> {
    let projection = Projection::parse(module)?;
    matches!(projection.expert, Expert::Routed(_)).then(|| super::names::without_expert(module))
}
