//! NVFP4 experts stored in one tensor per projection.
//!
//! | values | block scales | found in |
//! |---|---|---|
//! | U8 `[E, N, K/2]` | F8_E4M3 `[E, N, K/16]` | Transformers 5, vLLM |
//! | U8 `[E, K/2, N]` | F8_E4M3 `[E, K/16, N]` | ModelOpt's exports of Llama 4 and gpt-oss |
//!
//! Gate and up can share a tensor: they are the two halves of N, or alternate along N (gpt-oss). There is one global
//! scale for all, per expert, or per expert and part; the same holds for input scales.

use std::borrow::Cow;

use rayon::prelude::*;

use super::file::Tensor;
use super::input_scales::InputScale;
use super::source::{Elements, Rows, Source};
use super::{Checkpoint, Dtype, Format};
use nvfp4_core::Error;
use nvfp4_core::bias::Bias;
use nvfp4_core::format::{BLOCK, Matrix, e4m3};
use nvfp4_core::fp4::check_input_scale;

/// Suffixes of the packed values.
const VALUES: [&str; 5] = ["_packed", ".weight_packed", ".weight", "_weight", ""];

/// Suffixes of the block scales.
const SCALES: [&str; 3] = ["_weight_scale", ".weight_scale", "_scale"];

/// Suffixes of the global scales of both formats.
const GLOBALS: [(&str, Format); 5] = [
    (".weight_global_scale", Format::CompressedTensors),
    ("_weight_global_scale", Format::CompressedTensors),
    ("_weight_scale_2", Format::ModelOpt),
    (".weight_scale_2", Format::ModelOpt),
    ("_scale_2", Format::ModelOpt),
];

/// Suffixes of the input scales of both formats.
const INPUTS: [(&str, Format); 4] = [
    (".input_global_scale", Format::CompressedTensors),
    ("_input_global_scale", Format::CompressedTensors),
    ("_input_scale", Format::ModelOpt),
    (".input_scale", Format::ModelOpt),
];

/// Suffixes of the biases `[E, N]`.
pub(super) const BIASES: [&str; 2] = ["_bias", ".bias"];

/// Returns `true` if `part` is the suffix of a tensor of fused experts that is computed.
pub(super) fn is_part(part: &str) -> bool {
    let scales = GLOBALS.iter().chain(&INPUTS).map(|(suffix, _)| suffix);
    VALUES.iter().chain(&SCALES).chain(scales).any(|known| *known == part)
}

/// Returns `true` if `part` is the suffix of packed values.
pub(super) fn is_values(part: &str) -> bool {
    VALUES.contains(&part)
}

/// Suffixes of the tensors that belong to packed values.
pub(super) fn suffixes_beside_values() -> impl Iterator<Item = &'static str> {
    SCALES.into_iter().chain(GLOBALS.iter().chain(&INPUTS).map(|(suffix, _)| *suffix))
}

/// A matrix with its optional bias.
pub(super) type Part<'a> = (Matrix<'a>, Option<Bias<'static>>);

/// All experts of a projection, checked, with their places in the tensors.
pub(super) struct Fused<'a> {
    /// Naming of the parts.
    pub format: Format,
    /// E, N and K of the tensor.
    pub sizes: [usize; 3],
    /// Number of matrices per expert that the tensor holds: gate and up, or one.
    parts: usize,
    /// Whether rows of the parts alternate.
    in_turn: bool,
    /// Whether the tensor is stored as `[E, K/2, N]`.
    transposed: bool,
    values: &'a [u8],
    scales: &'a [u8],
    /// Global scales of all parts of all experts, as factors.
    pub factors: Vec<f32>,
    biases: Option<Vec<f32>>,
    /// File and name of the block scales, for messages.
    place: String,
}

impl Checkpoint {
    /// Returns the modules that hold all experts of a layer in NVFP4: those with packed values and global scales.
    pub(super) fn is_fused(&self, module: &str) -> bool {
        let has = |suffix: &str| self.tensor(&format!("{module}{suffix}"));
        VALUES.iter().any(|suffix| has(suffix).is_some_and(|values| values.dtype == Dtype::U8))
            && GLOBALS.iter().any(|(suffix, _)| has(suffix).is_some())
    }

    /// Finds and checks the tensors of a module that holds `parts` matrices per expert.
    pub(super) fn fused(&self, module: &str, parts: usize, in_turn: bool) -> Result<Fused<'_>, Error> {
        let shape = |name: &str, got: &[usize], expected: String| {
            Error::Shape { got: got.to_vec(), expected }.at(self.place(name))
        };
        let (values_name, values) = self.fused_part(module, "the packed values", &VALUES, Dtype::U8)?;
        let (scales_name, scales) = self.fused_part(module, "the block scales", &SCALES, Dtype::F8_E4M3)?;
        let &[experts, a, b] = values.shape else {
            return Err(shape(&values_name, values.shape, "[E, N, K/2] or [E, K/2, N]".into()));
        };
        // Eight packed bytes along K have one block scale.
        let transposed = scales.shape == [experts, a / 8, b] && a.is_multiple_of(8) && a > 0;
        let (rows, packed) = if transposed { (b, a) } else { (a, b) };
        let k = packed.checked_mul(2).ok_or(Error::TooLarge)?;
        if rows == 0 || !rows.is_multiple_of(parts) || !k.is_multiple_of(BLOCK) || k == 0 {
            let expected = format!("[E, N, K/2] with K a multiple of 16 and N a multiple of {parts}");
            return Err(shape(&values_name, values.shape, expected));
        }
        if !transposed && scales.shape != [experts, rows, k / BLOCK] {
            return Err(shape(&scales_name, scales.shape, format!("{:?} ([E, N, K/16])", [experts, rows, k / BLOCK])));
        }
        let (global_name, format, global) = self.fused_scales(module, &GLOBALS).ok_or_else(|| {
            let names: Vec<_> = GLOBALS.iter().map(|(suffix, _)| format!("{module}{suffix}")).collect();
            self.fused_missing("the global scales", &names)
        })??;
        let factors = spread(&global, experts, parts).ok_or_else(|| {
            let expected = format!("[], [{experts}] or [{experts}, {parts}]");
            shape(&global_name, &[global.len()], expected)
        })?;
        let factors = factors.into_iter().map(|stored| format.factor(stored)).collect::<Result<_, _>>();
        let names = BIASES.map(|suffix| format!("{module}{suffix}"));
        let biases = names.iter().find(|name| self.tensor(name).is_some());
        let biases = biases.map(|name| self.numbers(name, &[experts, rows], "[E, N]")).transpose()?;
        Ok(Fused {
            format,
            sizes: [experts, rows, k],
            parts,
            in_turn: in_turn && parts > 1,
            transposed,
            values: values.data,
            scales: scales.data,
            factors: factors.map_err(|error| error.at(self.place(&global_name)))?,
            biases,
            place: self.place(&scales_name),
        })
    }

    /// Returns the input scales of a module that holds `parts` matrices per expert: one entry per part of an expert.
    pub(super) fn fused_input_scales(&self, module: &str, experts: usize, parts: usize) -> Vec<InputScale> {
        let entries = |value: &dyn Fn(usize) -> Result<Option<f32>, Error>| {
            let entry = |index| {
                let (expert, part) = (index / parts, index % parts);
                InputScale { expert, place: format!("{module}, expert {expert}, part {part}"), value: value(index) }
            };
            (0..experts * parts).map(entry).collect()
        };
        match self.fused_scales(module, &INPUTS) {
            None => entries(&|_| Ok(None)),
            Some(Err(error)) => entries(&|_| Err(Error::Invalid(error.to_string()))),
            Some(Ok((name, format, stored))) => {
                let spread = spread(&stored, experts, parts);
                entries(&|index| {
                    let stored = spread.as_ref().map(|spread| spread[index]).ok_or_else(|| {
                        let expected = format!("[], [{experts}] or [{experts}, {parts}]");
                        Error::Shape { got: vec![stored.len()], expected }
                    });
                    let factor = stored.and_then(|stored| format.factor(stored));
                    let factor = factor.and_then(|factor| check_input_scale(factor).map(|()| Some(factor)));
                    factor.map_err(|error| error.at(self.place(&name)))
                })
            }
        }
    }

    /// Returns the numbers of the first existing tensor of scales, with its name and format.
    #[expect(clippy::type_complexity, reason = "a name, a format and numbers, if they exist and can be read")]
    fn fused_scales(
        &self,
        module: &str,
        suffixes: &[(&str, Format)],
    ) -> Option<Result<(String, Format, Vec<f32>), Error>> {
        let found = suffixes.iter().find_map(|(suffix, format)| {
            let name = format!("{module}{suffix}");
            self.tensor(&name).map(|tensor| (name, *format, tensor))
        });
        let (name, format, tensor) = found?;
        if tensor.dtype != Dtype::F32 {
            let remedy = "export the model again";
            let error = Error::Dtype { got: tensor.dtype, expected: vec![Dtype::F32], remedy };
            return Some(Err(error.at(self.place(&name))));
        }
        let numbers = tensor.numbers::<f32>().to_vec();
        Some(Ok((name, format, numbers)))
    }

    /// Returns the first existing tensor of a part, which must have this type.
    fn fused_part(
        &self,
        module: &str,
        what: &'static str,
        suffixes: &[&str],
        dtype: Dtype,
    ) -> Result<(String, Tensor<'_>), Error> {
        let names: Vec<_> = suffixes.iter().map(|suffix| format!("{module}{suffix}")).collect();
        let found = names.iter().find_map(|name| Some((name.clone(), self.tensor(name)?)));
        let (name, tensor) = found.ok_or_else(|| self.fused_missing(what, &names))?;
        if tensor.dtype != dtype {
            let remedy = "quantize the model with `nvfp4 quantize`";
            let error = Error::Dtype { got: tensor.dtype, expected: vec![dtype], remedy };
            return Err(error.at(self.place(&name)));
        }
        Ok((name, tensor))
    }

    fn fused_missing(&self, what: &str, names: &[String]) -> Error {
        let remedy =
            "fused experts need packed values, scales and global scales; quantize the model with `nvfp4 quantize`";
        let name = format!("{what} ({})", names.join(" or "));
        Error::Missing { name, remedy: remedy.into() }.at(self.path().display())
    }
}

/// Returns one number per part of each expert. `stored` has one number in all, one per expert, or one per part; `None`
/// for another count.
fn spread(stored: &[f32], experts: usize, parts: usize) -> Option<Vec<f32>> {
    let all = experts * parts;
    [1, experts, all].contains(&stored.len()).then(|| (0..all).map(|part| stored[part * stored.len() / all]).collect())
}

impl<'a> Fused<'a> {
    /// Returns the matrices of all experts.
    pub(super) fn split(&self) -> Result<Vec<Vec<Part<'a>>>, Error> {
        let expert = |expert: usize| {
            let parts = (0..self.parts).map(|part| Ok((self.matrix(expert, part)?, self.bias(expert, part))));
            parts
                .collect::<Result<Vec<_>, Error>>()
                .map_err(|error| error.at(format!("{}: expert {expert}", self.place)))
        };
        (0..self.sizes[0]).into_par_iter().map(expert).collect()
    }

    /// Returns one matrix of an expert, in place if it is stored contiguously.
    pub(super) fn matrix(&self, expert: usize, part: usize) -> Result<Matrix<'a>, Error> {
        let [_, rows, k] = self.sizes;
        let [values, scales] = [(self.values, k / 2), (self.scales, k / BLOCK)].map(|(data, row_bytes)| {
            let of_expert = &data[expert * rows * row_bytes..][..rows * row_bytes];
            self.rows_of_part(of_expert, row_bytes, part)
        });
        Matrix::new(rows / self.parts, k, values, scales, self.factors[expert * self.parts + part])
    }

    /// Returns one matrix of an expert in place, whatever its order in memory.
    pub(super) fn source(&self, expert: usize, part: usize) -> Source<'a> {
        let [_, n, k] = self.sizes;
        let [codes, scales] =
            [(self.values, n * k / 2), (self.scales, n * k / BLOCK)].map(|(data, size)| &data[expert * size..][..size]);
        let elements =
            Elements::Nvfp4 { codes, scales, global: self.factors[expert * self.parts + part], columns: None };
        let count = n / self.parts;
        let rows = match self.in_turn {
            true => Rows { first: part, step: self.parts, count },
            false => Rows { first: part * count, step: 1, count },
        };
        Source::new(elements, if self.transposed { [k, n] } else { [n, k] }, self.transposed, rows)
    }

    /// Checks all block scales in place.
    ///
    /// # Errors
    /// Returns an error with the first scale that is negative or NaN.
    pub(super) fn check_scales(&self) -> Result<(), Error> {
        let [_, n, k] = self.sizes;
        let Some(at) = self.scales.par_iter().position_first(|code| *code > e4m3::MAX_CODE) else { return Ok(()) };
        let (expert, in_expert) = (at / (n * k / BLOCK), at % (n * k / BLOCK));
        let [row, block] = match self.transposed {
            true => [in_expert % n, in_expert / n],
            false => [in_expert / (k / BLOCK), in_expert % (k / BLOCK)],
        };
        let error = Error::BlockScale { code: self.scales[at], row, block };
        Err(error.at(format!("{}: expert {expert}", self.place)))
    }

    /// Whether the tensor is stored as `[E, K/2, N]`.
    pub(super) fn is_transposed(&self) -> bool {
        self.transposed
    }

    /// Returns the rows of a part, `row_bytes` each, of an expert's bytes.
    fn rows_of_part(&self, data: &'a [u8], row_bytes: usize, part: usize) -> Cow<'a, [u8]> {
        let rows = self.sizes[1];
        let count = rows / self.parts;
        let place = |row: usize| if self.in_turn { row * self.parts + part } else { part * count + row };
        match (self.transposed, self.in_turn) {
            (true, _) => {
                let byte = |index: usize| data[index % row_bytes * rows + place(index / row_bytes)];
                (0..count * row_bytes).map(byte).collect::<Vec<_>>().into()
            }
            (false, true) => {
                let rows = data.chunks_exact(row_bytes).skip(part).step_by(self.parts);
                rows.flatten().copied().collect::<Vec<_>>().into()
            }
            (false, false) => data[part * count * row_bytes..][..count * row_bytes].into(),
        }
    }

    fn bias(&self, expert: usize, part: usize) -> Option<Bias<'static>> {
        let (rows, count) = (self.sizes[1], self.sizes[1] / self.parts);
        let of_expert = &self.biases.as_ref()?[expert * rows..][..rows];
        Some(Bias::F32(match self.in_turn {
            true => of_expert.iter().skip(part).step_by(self.parts).copied().collect(),
            false => of_expert[part * count..][..count].to_vec().into(),
        }))
    }
}
