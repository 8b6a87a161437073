//! One NVFP4 weight of a model, with the tensor names of ModelOpt or compressed-tensors.
//!
//! Sources: the exporters of NVIDIA's TensorRT Model Optimizer, and `nvfp4-pack-quantized` of the compressed-tensors
//! library.

use std::collections::BTreeSet;

use super::file::Tensor;
use super::{Checkpoint, Dtype};
use nvfp4_core::Error;
use nvfp4_core::format::{BLOCK, Matrix};
use nvfp4_core::fp4::check_input_scale;
use nvfp4_core::problem::check_weight_size;

/// Naming of the parts of an NVFP4 weight in a model file, and the meaning of its global scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// NVIDIA's ModelOpt: values are multiplied by the global scale.
    ModelOpt,
    /// The compressed-tensors library: values are divided by the global scale.
    CompressedTensors,
}

impl Format {
    /// Name of the format on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ModelOpt => "modelopt",
            Self::CompressedTensors => "compressed-tensors",
        }
    }

    /// Suffix of the packed values, U8 `[N, K/2]`.
    pub const fn values(self) -> &'static str {
        match self {
            Self::ModelOpt => ".weight",
            Self::CompressedTensors => ".weight_packed",
        }
    }

    /// Suffix of the block scales, F8_E4M3 `[N, K/16]`, row-major.
    pub const fn scales(self) -> &'static str {
        ".weight_scale"
    }

    /// Suffix of the global scale, F32 `[]` or `[1]`.
    pub const fn global(self) -> &'static str {
        match self {
            Self::ModelOpt => ".weight_scale_2",
            Self::CompressedTensors => ".weight_global_scale",
        }
    }

    /// Suffix of the input scale (global scale of the activations), F32 `[]` or `[1]`; not every model has it.
    pub const fn input(self) -> &'static str {
        match self {
            Self::ModelOpt => ".input_scale",
            Self::CompressedTensors => ".input_global_scale",
        }
    }

    /// Returns the factor that a stored global scale represents.
    ///
    /// # Errors
    /// [`Error::GlobalScale`] or [`Error::Divisor`] if the stored value is not a usable scale.
    pub fn factor(self, stored: f32) -> Result<f32, Error> {
        match self {
            Self::ModelOpt if stored.is_finite() && stored >= 0.0 => Ok(stored),
            Self::ModelOpt => Err(Error::GlobalScale { value: stored }),
            Self::CompressedTensors => {
                let factor = stored.recip();
                let usable = stored.is_finite() && stored > 0.0 && factor.is_finite();
                usable.then_some(factor).ok_or(Error::Divisor { value: stored })
            }
        }
    }
}

/// An NVFP4 weight of a model, in place in the mapped file.
#[derive(Clone, Debug)]
pub struct QuantizedWeight<'a> {
    /// Naming of the parts.
    pub format: Format,
    /// Matrix `[N, K]`.
    pub matrix: Matrix<'a>,
    /// Global scale that the activations were calibrated for, as a factor in both formats. `None`: the model has none.
    pub input_scale: Option<f32>,
}

/// Suffix of the input scale in files of Quark, which otherwise has ModelOpt's names: beside `input_scale`, the scales of
/// blocks, it is the global scale.
const QUARK_INPUT: &str = ".input_scale_2";

const QUANTIZE: &str = "quantize the model with `nvfp4 quantize`";
const EXPORT: &str = "export the model again";

impl Checkpoint {
    /// Returns the NVFP4 weight of a module such as `model.layers.3.mlp.experts.0.gate_proj`.
    ///
    /// # Errors
    /// Returns the first fault, with file and tensor.
    pub fn quantized(&self, module: &str) -> Result<QuantizedWeight<'_>, Error> {
        let weight = self.weight(module)?;
        self.input_scale(module).map(|_| weight)
    }

    /// Returns the NVFP4 weight of a module for tokens of 16 bits, which need no input scale.
    pub(super) fn weight(&self, module: &str) -> Result<QuantizedWeight<'_>, Error> {
        self.survey_quantized(module).map_err(|mut errors| errors.swap_remove(0))
    }

    /// Returns gate and up of a module that stores both in one matrix `[2I, K]`: gate is the first half.
    ///
    /// # Errors
    /// Returns the first fault, with file and tensor.
    pub(super) fn halves(&self, module: &str) -> Result<[QuantizedWeight<'_>; 2], Error> {
        let QuantizedWeight { format, matrix, input_scale } = self.weight(module)?;
        let at = |error: Error| error.at(self.place(&format!("{module}{}", format.values())));
        if !matrix.rows().is_multiple_of(2) {
            let what = format!("{} rows cannot be split into gate and up; {EXPORT}", matrix.rows());
            return Err(at(Error::Invalid(what)));
        }
        let [values, scales] = [format.values(), format.scales()]
            .map(|suffix| self.tensor(&format!("{module}{suffix}")).map_or(&[][..], |tensor| tensor.data));
        let half = |half: usize| {
            let part = |data: &'_ [u8]| half * data.len() / 2..(half + 1) * data.len() / 2;
            let (values, scales) = (&values[part(values)], &scales[part(scales)]);
            let matrix = Matrix::new(matrix.rows() / 2, matrix.k(), values, scales, matrix.global_scale())?;
            Ok(QuantizedWeight { format, matrix, input_scale })
        };
        Ok([half(0).map_err(at)?, half(1).map_err(at)?])
    }

    /// Returns the NVFP4 weight of a module, or all its faults. An input scale that cannot be used is not one of them:
    /// 16-bit tokens do not need it.
    ///
    /// # Errors
    /// Returns at least one error, each with file and tensor.
    pub fn survey_quantized(&self, module: &str) -> Result<QuantizedWeight<'_>, Vec<Error>> {
        let name = |suffix: &str| format!("{module}{suffix}");
        let format = self.format_of(module);
        let mut faults = Vec::new();
        let values = keep(&mut faults, self.part(&name(format.values()), Dtype::U8, QUANTIZE));
        let sizes = values.and_then(|values| {
            let sizes = packed_sizes(values).map_err(|error| error.at(self.place(&name(format.values()))));
            keep(&mut faults, sizes)
        });
        let scales = keep(&mut faults, self.part(&name(format.scales()), Dtype::F8_E4M3, EXPORT));
        let factor = keep(&mut faults, self.factor(&name(format.global()), format));
        let input_scale = self.input_scale(module).unwrap_or_default();
        if let (Some(values), Some(scales), Some((n, k))) = (values, scales, sizes) {
            let matrix = same_shape(scales, [n, k / BLOCK])
                // Block scales are checked even if the global scale is unusable.
                .and_then(|()| Matrix::new(n, k, values.data, scales.data, factor.unwrap_or_default()))
                .map_err(|error| error.at(self.place(&name(format.scales()))));
            if let (Some(matrix), []) = (keep(&mut faults, matrix), &faults[..]) {
                return Ok(QuantizedWeight { format, matrix, input_scale });
            }
        }
        Err(faults)
    }

    /// Returns the input scale of a module as a factor; `None` if the model has none.
    ///
    /// # Errors
    /// Returns an error if the tensor is wrong, or the scale is not one that tokens can be quantized with.
    pub fn input_scale(&self, module: &str) -> Result<Option<f32>, Error> {
        let format = self.format_of(module);
        let names = [QUARK_INPUT, format.input()].map(|suffix| format!("{module}{suffix}"));
        let Some(name) = names.into_iter().find(|name| self.tensor(name).is_some()) else { return Ok(None) };
        let factor = self.factor(&name, format)?;
        check_input_scale(factor).map_err(|error| error.at(self.place(&name)))?;
        Ok(Some(factor))
    }

    /// Returns the format of a module, based on the tensors that exist.
    pub(super) fn format_of(&self, module: &str) -> Format {
        let packed = Format::CompressedTensors;
        let has = |suffix: &str| self.tensor(&format!("{module}{suffix}")).is_some();
        if has(packed.values()) || has(packed.global()) { packed } else { Format::ModelOpt }
    }

    /// Returns `true` if this part of a module's weight is computed.
    pub(super) fn is_computed(&self, module: &str, part: &str) -> bool {
        let format = self.format_of(module);
        let is_quark = format == Format::ModelOpt && part == QUARK_INPUT;
        is_quark || [format.values(), format.scales(), format.global(), format.input()].contains(&part)
    }

    /// Returns all tensors of a module.
    pub(super) fn parts_of<'a>(&'a self, module: &str) -> impl Iterator<Item = &'a str> {
        let is_part = |part: &str| part.starts_with('.') || (module.ends_with("_proj") && part.starts_with('_'));
        self.names_under(module).filter(move |name| is_part(&name[module.len()..]))
    }

    /// Returns the tensors of a module that are not computed, such as a bias.
    pub(super) fn parts_not_computed<'a>(&'a self, module: &str) -> Vec<&'a str> {
        self.parts_of(module).filter(|name| !self.is_computed(module, &name[module.len()..])).collect()
    }

    /// Returns the names of the modules with a complete or incomplete NVFP4 weight.
    pub fn quantized_modules(&self) -> BTreeSet<&str> {
        self.names().filter_map(|name| self.quantized_module_of(name)).collect()
    }

    /// Returns the module of a tensor, if only NVFP4 weights have this tensor.
    fn quantized_module_of<'n>(&self, name: &'n str) -> Option<&'n str> {
        let part = |module: &str, suffix: &str| self.tensor(&format!("{module}{suffix}"));
        if let Some(module) = name.strip_suffix(Format::CompressedTensors.values()) {
            // MXFP4 weights and packed integers of other widths use the same name for their values.
            let is_other = part(module, Format::CompressedTensors.global()).is_none()
                && (part(module, Format::CompressedTensors.values()).is_some_and(|values| values.dtype != Dtype::U8)
                    || part(module, Format::CompressedTensors.scales())
                        .is_some_and(|scales| scales.dtype != Dtype::F8_E4M3));
            return (!is_other).then_some(module);
        }
        let certain = [Format::CompressedTensors.global(), Format::ModelOpt.global()];
        certain.iter().find_map(|suffix| name.strip_suffix(suffix)).or_else(|| {
            // FP8 and MXFP4 weights also have scales, but not packed values together with E4M3 scales.
            let module = name.strip_suffix(Format::ModelOpt.scales())?;
            let values = part(module, Format::ModelOpt.values())?;
            let is_mxfp4 = self.tensor(name).is_some_and(|scales| [Dtype::U8, Dtype::F8_E8M0].contains(&scales.dtype));
            (values.dtype == Dtype::U8 && !is_mxfp4).then_some(module)
        })
    }

    /// Returns a required tensor of type `dtype`.
    fn part(&self, name: &str, dtype: Dtype, remedy: &'static str) -> Result<Tensor<'_>, Error> {
        let place = || self.place(name);
        let missing = || Error::Missing { name: "this tensor".into(), remedy: remedy.into() }.at(place());
        let tensor = self.tensor(name).ok_or_else(missing)?;
        if tensor.dtype != dtype {
            return Err(Error::Dtype { got: tensor.dtype, expected: vec![dtype], remedy }.at(place()));
        }
        Ok(tensor)
    }

    /// Returns the factor that the global scale `name` represents.
    fn factor(&self, name: &str, format: Format) -> Result<f32, Error> {
        let tensor = self.part(name, Dtype::F32, EXPORT)?;
        let stored = match tensor.shape {
            [] | [1] => Ok(tensor.numbers::<f32>()[0]),
            other => Err(Error::Shape { got: other.to_vec(), expected: "[] or [1]".into() }),
        };
        stored.and_then(|stored| format.factor(stored)).map_err(|error| error.at(self.place(name)))
    }
}

/// Returns the value, or adds the error to `faults`.
fn keep<T>(faults: &mut Vec<Error>, result: Result<T, Error>) -> Option<T> {
    result.map_err(|error| faults.push(error)).ok()
}

/// Returns N and K of packed values.
fn packed_sizes(values: Tensor<'_>) -> Result<(usize, usize), Error> {
    let [n, packed] = *values.shape else {
        return Err(Error::Shape { got: values.shape.to_vec(), expected: "[N, K/2]".into() });
    };
    let k = packed.checked_mul(2).ok_or(Error::TooLarge)?;
    check_weight_size(n, k)?;
    Ok((n, k))
}

fn same_shape(tensor: Tensor<'_>, expected: [usize; 2]) -> Result<(), Error> {
    if tensor.shape == expected {
        return Ok(());
    }
    Err(Error::Shape { got: tensor.shape.to_vec(), expected: format!("{expected:?} ([N, K/16])") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn global_scale_multiplies_or_divides_by_format() {
        assert_eq!(Format::ModelOpt.factor(0.25).unwrap(), 0.25);
        assert_eq!(Format::CompressedTensors.factor(4.0).unwrap(), 0.25);
        assert_eq!(Format::ModelOpt.factor(0.0).unwrap(), 0.0);
        for bad in [f32::NAN, f32::INFINITY, -1.0] {
            assert!(matches!(Format::ModelOpt.factor(bad), Err(Error::GlobalScale { .. })), "{bad}");
        }
        for bad in [f32::NAN, f32::INFINITY, -1.0, 0.0, -0.0, f32::from_bits(1)] {
            assert!(matches!(Format::CompressedTensors.factor(bad), Err(Error::Divisor { .. })), "{bad}");
        }
    }
}
