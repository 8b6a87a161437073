//! Converts a quantized model to floats: NVFP4, FP8 and MXFP4 weights become f32, f16 or bf16, in the layout that they
//! are stored in. Experts that share a tensor still share one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use super::config::{CONFIG, Config, Others, QUANT_CONFIG};
use super::place;
use super::rewrite::{self, Done, Fate, Rewrite};
use super::stored::Weight;
use super::weights::{self, Readable};
use super::written::{Converted, Written, all_converted, converted};
use crate::file::{Tensor, TensorFile};
use crate::source::Rows;
use crate::write::TensorWriter;
use crate::{Checkpoint, Dtype};
use nvfp4_core::Error;

/// A conversion to floats that is planned and ready to write.
pub struct Dequantization<'a> {
    checkpoint: &'a Checkpoint,
    dtype: Dtype,
    config: Config,
    others: Others,
    chosen: BTreeMap<&'a str, Readable<'a>>,
    /// Number of quantized tensors that stay quantized.
    kept: usize,
    /// Tensors that mean nothing without the quantization.
    dropped: BTreeSet<String>,
    /// Number of these tensors that are scales of a KV cache.
    cache_scales: usize,
}

impl<'a> Dequantization<'a> {
    /// Types of the output.
    pub const DTYPES: [Dtype; 3] = [Dtype::BF16, Dtype::F16, Dtype::F32];

    /// Finds the quantized weights. `chosen` returns `true` for the weights (`M.weight`) that become floats; the others
    /// stay as they are.
    ///
    /// # Errors
    /// Returns an error if the configuration or a quantized weight cannot be read, no weight is chosen, or only a part of
    /// a tensor is.
    pub fn new(checkpoint: &'a Checkpoint, dtype: Dtype, chosen: &dyn Fn(&str) -> bool) -> Result<Self, Error> {
        let (config, others) = Config::and_others(checkpoint)?;
        let all = weights::all(checkpoint, &config, false)?;
        let is_chosen = |readable: &Readable<'_>| -> Result<bool, Error> {
            let stored = &readable.stored;
            let asked = stored.weights.iter().filter(|weight| chosen(&format!("{}.weight", weight.module))).count();
            if asked > 0 && asked < stored.weights.len() {
                let what = format!(
                    "--filter matches {asked} of the {} weights in this tensor; match all of them or none",
                    stored.weights.len()
                );
                return Err(Error::Invalid(what).at(checkpoint.place(stored.name)));
            }
            Ok(asked > 0 || chosen(stored.name))
        };
        let (mut converted, mut kept) = (BTreeMap::new(), 0);
        for (name, readable) in all {
            if is_chosen(&readable)? {
                converted.insert(name, readable);
            } else {
                kept += 1;
            }
        }
        if converted.is_empty() {
            let what = match kept {
                0 => "the model has no quantized weight".to_owned(),
                _ => format!("--filter matches none of the {kept} tensors with quantized weights"),
            };
            return Err(Error::Invalid(what).at(checkpoint.path().display()));
        }
        let parts = converted.values().flat_map(|readable| readable.stored.scales.iter().cloned());
        let mut dropped: BTreeSet<String> = parts.collect();
        let cache_scales: Vec<_> = match kept {
            0 => checkpoint.names().filter(|name| is_cache_scale(name)).map(str::to_owned).collect(),
            _ => Vec::new(),
        };
        let count = cache_scales.len();
        dropped.extend(cache_scales);
        Ok(Self { checkpoint, dtype, config, others, chosen: converted, kept, dropped, cache_scales: count })
    }

    /// Weights that become floats, in natural order.
    pub fn converted(&self) -> Vec<Converted<'_>> {
        all_converted(self.chosen.values().map(|readable| (&readable.stored, false)))
    }

    /// Total bytes of the tensors that will be read.
    pub fn bytes(&self) -> usize {
        rewrite::bytes(self.checkpoint)
    }

    /// Notes for the user.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if place::is_one_file(self.checkpoint) {
            notes.push("only one file is converted: no config.json is written".to_owned());
        }
        if self.kept > 0 {
            notes.push(format!("{} tensors with quantized weights stay quantized", self.kept));
        }
        if self.cache_scales > 0 {
            notes.push(format!("dropped: {} scales of a quantized KV cache", self.cache_scales));
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
    /// Returns the errors of [`Dequantization::check_target`], and an error if a number exceeds the range of f16, or an
    /// input file changes meanwhile.
    pub fn write(&self, out: &Path, mut done: impl FnMut(Written<'_>)) -> Result<(), Error> {
        rewrite::write(self.checkpoint, &self.others, self, out, &mut done)
    }

    /// Writes one matrix in parts.
    fn write_matrix(
        &self,
        file: &TensorFile,
        weight: &Weight<'_>,
        name: &str,
        writer: &mut TensorWriter,
    ) -> Result<(), Error> {
        let at = writer.place(name);
        let source = &weight.source;
        let (k, size) = (source.sizes()[1], self.dtype.bitsize() / 8);
        let shared = &*writer;
        source.chunks().try_for_each_init(
            || (Vec::new(), Vec::new()),
            |(decoded, bytes), rows| {
                let first = rows.start * k;
                let numbers = source.decoded(rows, decoded);
                encode(numbers, self.dtype, bytes).map_err(|error| error.further_on(first))?;
                shared.write_part(&at, first * size, bytes)
            },
        )?;
        file.release();
        Ok(())
    }

    /// Writes all experts of a tensor, one expert at a time.
    fn write_experts(
        &self,
        file: &TensorFile,
        readable: &Readable<'_>,
        writer: &mut TensorWriter,
        mut done: impl FnMut(&Weight<'_>),
    ) -> Result<(), Error> {
        let at = writer.place(&readable.plain_name);
        let [experts, lines, length] = readable.shape[..] else { unreachable!("experts have three dimensions") };
        let size = self.dtype.bitsize() / 8;
        let weights = &readable.stored.weights;
        let parts = weights.len().checked_div(experts).unwrap_or_default().max(1);
        let (mut numbers, mut decoded, mut bytes) = (vec![0.0; lines * length], Vec::new(), Vec::new());
        for (expert, weights) in weights.chunks(parts).enumerate() {
            for Weight { source, .. } in weights {
                let k = source.sizes()[1];
                // Rows of this matrix among the rows of the expert.
                let Rows { first, step, .. } = source.placement();
                for rows in source.chunks().collect::<Vec<_>>() {
                    let lines = source.decoded(rows.clone(), &mut decoded).chunks_exact(k);
                    for (row, line) in rows.zip(lines) {
                        let row = first + row * step;
                        if readable.transposed {
                            numbers.iter_mut().skip(row).step_by(length).zip(line).for_each(|(to, from)| *to = *from);
                        } else {
                            numbers[row * k..][..k].copy_from_slice(line);
                        }
                    }
                }
            }
            encode(&numbers, self.dtype, &mut bytes).map_err(|error| error.further_on(expert * lines * length))?;
            writer.write_part(&at, expert * lines * length * size, &bytes)?;
            file.release();
            weights.iter().for_each(&mut done);
        }
        Ok(())
    }
}

impl Rewrite for Dequantization<'_> {
    fn fate(&self, name: &str) -> Fate {
        match self.chosen.get(name) {
            Some(readable) => Fate::Replaced(vec![(readable.plain_name.clone(), self.dtype, readable.shape.clone())]),
            None if self.dropped.contains(name) => Fate::Dropped,
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
        let readable = &self.chosen[name];
        let stored = &readable.stored;
        let bytes = tensor.data.len() / stored.weights.len().max(1);
        let mut said = |weight: &Weight<'_>| {
            done(Written::Converted { weight: converted(stored, weight, false), bytes, loss: None, exact: None });
        };
        match (&stored.weights[..], readable.shape.len()) {
            ([weight], 2) => {
                self.write_matrix(file, weight, &readable.plain_name, writer)?;
                said(weight);
                Ok(())
            }
            _ => self.write_experts(file, readable, writer, said),
        }
    }

    fn configurations(&self) -> Vec<(&'static str, String)> {
        let name = match self.dtype {
            Dtype::F32 => "float32",
            Dtype::F16 => "float16",
            _ => "bfloat16",
        };
        if self.kept == 0 {
            return self.config.dequantized(name).map(|text| (CONFIG, text)).into_iter().collect();
        }
        let modules: BTreeSet<&str> = self.converted().into_iter().map(|weight| weight.module).collect();
        let (config, quantization) = self.config.with_ignored(&modules);
        let files = [(CONFIG, config), (QUANT_CONFIG, quantization)];
        files.into_iter().filter_map(|(name, text)| Some((name, text?))).collect()
    }
}

/// Whether a tensor is a scale of a quantized KV cache, as ModelOpt and compressed-tensors name them.
fn is_cache_scale(name: &str) -> bool {
    [".k_scale", ".v_scale", ".q_scale"].iter().any(|ending| name.ends_with(ending))
}

/// Writes numbers in a type of floats, rounded to nearest, ties to even.
///
/// # Errors
/// Returns an error with the index of a finite number that is too large for f16.
fn encode(numbers: &[f32], dtype: Dtype, bytes: &mut Vec<u8>) -> Result<(), Error> {
    bytes.clear();
    match dtype {
        Dtype::F32 => bytes.extend_from_slice(bytemuck::cast_slice(numbers)),
        Dtype::F16 => {
            let mut narrow = vec![half::f16::ZERO; numbers.len()];
            narrow.convert_from_f32_slice(numbers);
            let overflow = |(wide, narrow): &(&f32, &half::f16)| wide.is_finite() && narrow.is_infinite();
            if let Some((index, (value, _))) = numbers.iter().zip(&narrow).enumerate().find(|(_, pair)| overflow(pair))
            {
                let what = format!("element {index} is {value}, which f16 cannot represent; use bf16 or f32");
                return Err(Error::Invalid(what));
            }
            bytes.extend(narrow.iter().flat_map(|number| number.to_le_bytes()));
        }
        _ => bytes.extend(numbers.iter().flat_map(|&number| half::bf16::from_f32(number).to_le_bytes())),
    }
    Ok(())
}
