//! One NVFP4 weight of a model, under the names that ModelOpt and compressed-tensors give to its parts.
//!
//! Sources: the exporters of NVIDIA's TensorRT Model Optimizer, and `nvfp4-pack-quantized` of the compressed-tensors
//! library.

use std::collections::BTreeSet;

use super::file::Tensor;
use super::{Checkpoint, Dtype};
use crate::error::Error;
use crate::format::{BLOCK, Matrix};
use crate::problem::check_weight_size;

/// How a model file names the parts of an NVFP4 weight, and what it means by a global scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// NVIDIA's ModelOpt: a global scale multiplies.
    ModelOpt,
    /// The compressed-tensors library: a global scale divides.
    CompressedTensors,
}

impl Format {
    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ModelOpt => "modelopt",
            Self::CompressedTensors => "compressed-tensors",
        }
    }

    /// What follows a module's name in the name of the packed values, U8 `[N, K/2]`.
    pub const fn values(self) -> &'static str {
        match self {
            Self::ModelOpt => ".weight",
            Self::CompressedTensors => ".weight_packed",
        }
    }

    /// The block scales, F8_E4M3 `[N, K/16]`, row-major.
    pub const fn scales(self) -> &'static str {
        ".weight_scale"
    }

    /// The global scale, F32 `[]` or `[1]`.
    pub const fn global(self) -> &'static str {
        match self {
            Self::ModelOpt => ".weight_scale_2",
            Self::CompressedTensors => ".weight_global_scale",
        }
    }

    /// The global scale for the activations, F32 `[]` or `[1]`; not every model has it.
    pub const fn input(self) -> &'static str {
        match self {
            Self::ModelOpt => ".input_scale",
            Self::CompressedTensors => ".input_global_scale",
        }
    }

    /// The factor that a stored global scale stands for.
    ///
    /// # Errors
    /// [`Error::GlobalScale`] or [`Error::Divisor`] if it stands for none.
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
    /// How the file names its parts.
    pub format: Format,
    /// `[N, K]`.
    pub matrix: Matrix<'a>,
    /// The global scale that its activations were calibrated for (a factor, whatever the format), if there is one.
    pub input_scale: Option<f32>,
}

const QUANTIZE: &str = "quantize the model with `nvfp4 quantize`";
const EXPORT: &str = "export the model again";

impl Checkpoint {
    /// The NVFP4 weight of a module, such as `model.layers.3.mlp.experts.0.gate_proj`.
    ///
    /// # Errors
    /// The first thing that is wrong, with file and tensor.
    pub fn quantized(&self, module: &str) -> Result<QuantizedWeight<'_>, Error> {
        self.survey_quantized(module).map_err(|mut errors| errors.swap_remove(0))
    }

    /// The NVFP4 weight of a module, or everything that is wrong with it.
    ///
    /// # Errors
    /// At least one error, each with file and tensor.
    pub fn survey_quantized(&self, module: &str) -> Result<QuantizedWeight<'_>, Vec<Error>> {
        let name = |suffix: &str| format!("{module}{suffix}");
        let has = |suffix: &str| self.tensor(&name(suffix)).is_some();
        let format = self.format_of(module);
        let mut faults = Vec::new();
        let values = keep(&mut faults, self.part(&name(format.values()), Dtype::U8, QUANTIZE));
        let sizes = values.and_then(|values| {
            let sizes = packed_sizes(values).map_err(|error| error.at(self.place(&name(format.values()))));
            keep(&mut faults, sizes)
        });
        let scales = keep(&mut faults, self.part(&name(format.scales()), Dtype::F8_E4M3, EXPORT));
        let factor = keep(&mut faults, self.factor(&name(format.global()), format));
        let input_scale = if has(format.input()) {
            let place = || self.place(&name(format.input()));
            let positive =
                |factor| if factor > 0.0 { Ok(factor) } else { Err(Error::Divisor { value: factor }.at(place())) };
            keep(&mut faults, self.factor(&name(format.input()), format).and_then(positive))
        } else {
            None
        };
        if let (Some(values), Some(scales), Some((n, k))) = (values, scales, sizes) {
            let matrix = same_shape(scales, [n, k / BLOCK])
                // Without a usable factor the block scales are checked all the same.
                .and_then(|()| Matrix::new(n, k, values.data, scales.data, factor.unwrap_or_default()))
                .map_err(|error| error.at(self.place(&name(format.scales()))));
            if let (Some(matrix), []) = (keep(&mut faults, matrix), &faults[..]) {
                return Ok(QuantizedWeight { format, matrix, input_scale });
            }
        }
        Err(faults)
    }

    /// How the parts of a module's weight are named, told from those that are there.
    fn format_of(&self, module: &str) -> Format {
        let packed = Format::CompressedTensors;
        let has = |suffix: &str| self.tensor(&format!("{module}{suffix}")).is_some();
        if has(packed.values()) || has(packed.global()) { packed } else { Format::ModelOpt }
    }

    /// Whether a part of a module's weight is one of those that are computed with.
    pub(super) fn is_computed(&self, module: &str, part: &str) -> bool {
        let format = self.format_of(module);
        [format.values(), format.scales(), format.global(), format.input()].contains(&part)
    }

    /// The tensors of a module that are not computed with, such as a bias.
    pub(super) fn parts_not_computed<'a>(&'a self, module: &str) -> Vec<&'a str> {
        let is_part = |part: &str| part.starts_with('.') || (module.ends_with("_proj") && part.starts_with('_'));
        let names = self.names_under(module);
        names
            .filter(|name| is_part(&name[module.len()..]) && !self.is_computed(module, &name[module.len()..]))
            .collect()
    }

    /// The names of the modules that have, or by some of their tensors should have, an NVFP4 weight.
    pub fn quantized_modules(&self) -> BTreeSet<&str> {
        self.names().filter_map(|name| self.quantized_module_of(name)).collect()
    }

    /// The module of a tensor that only NVFP4 weights have.
    fn quantized_module_of<'n>(&self, name: &'n str) -> Option<&'n str> {
        let part = |module: &str, suffix: &str| self.tensor(&format!("{module}{suffix}"));
        if let Some(module) = name.strip_suffix(Format::CompressedTensors.values()) {
            // MXFP4 has the same name for its values, and integers of other widths too.
            let is_other = part(module, Format::CompressedTensors.global()).is_none()
                && (part(module, Format::CompressedTensors.values()).is_some_and(|values| values.dtype != Dtype::U8)
                    || part(module, Format::CompressedTensors.scales())
                        .is_some_and(|scales| scales.dtype != Dtype::F8_E4M3));
            return (!is_other).then_some(module);
        }
        let certain = [Format::CompressedTensors.global(), Format::ModelOpt.global()];
        certain.iter().find_map(|suffix| name.strip_suffix(suffix)).or_else(|| {
            // FP8 and MXFP4 weights have scales too, but not both packed values and scales in E4M3.
            let module = name.strip_suffix(Format::ModelOpt.scales())?;
            let values = part(module, Format::ModelOpt.values())?;
            let is_mxfp4 = self.tensor(name).is_some_and(|scales| [Dtype::U8, Dtype::F8_E8M0].contains(&scales.dtype));
            (values.dtype == Dtype::U8 && !is_mxfp4).then_some(module)
        })
    }

    /// A tensor that must be there, of one type.
    fn part(&self, name: &str, dtype: Dtype, remedy: &'static str) -> Result<Tensor<'_>, Error> {
        let place = || self.place(name);
        let missing = || Error::Missing { name: "this tensor".into(), remedy: remedy.into() }.at(place());
        let tensor = self.tensor(name).ok_or_else(missing)?;
        if tensor.dtype != dtype {
            return Err(Error::Dtype { got: tensor.dtype, expected: vec![dtype], remedy }.at(place()));
        }
        Ok(tensor)
    }

    /// The factor that a global scale stands for.
    fn factor(&self, name: &str, format: Format) -> Result<f32, Error> {
        let tensor = self.part(name, Dtype::F32, EXPORT)?;
        let stored = match tensor.shape {
            [] | [1] => Ok(tensor.numbers::<f32>()[0]),
            other => Err(Error::Shape { got: other.to_vec(), expected: "[] or [1]".into() }),
        };
        stored.and_then(|stored| format.factor(stored)).map_err(|error| error.at(self.place(name)))
    }
}

/// The value, or its error among the others.
fn keep<T>(faults: &mut Vec<Error>, result: Result<T, Error>) -> Option<T> {
    result.map_err(|error| faults.push(error)).ok()
}

/// N and K of packed values.
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
    fn a_global_scale_multiplies_in_one_format_and_divides_in_the_other() {
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
