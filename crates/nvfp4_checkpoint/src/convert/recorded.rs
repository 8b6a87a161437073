//! Recorded activations of modules, from which GPTQ computes which errors of a weight matter.
//!
//! A file, or a folder of files, of safetensors: `M`, `M.input` or `M.weight`, f32, f16 or bf16 `[.., K]`: the tokens that
//! module M reads. M is named as in a calibration: it can have `*`, and it can be the block around projections that read the
//! same tokens.

use std::collections::BTreeMap;
use std::path::Path;

use rayon::prelude::*;

use super::calibration::Calibration;
use super::gptq::{Factor, Hessian};
use crate::floats::{DTYPES, Floats, to_f32, with};
use crate::{Checkpoint, TensorFile};
use nvfp4_core::Error;

/// Numbers that are read at once: 32 MB in f64.
const CHUNK: usize = 4 << 20;

/// Activations of modules, in mapped files.
#[derive(Debug)]
pub struct Recorded {
    checkpoint: Checkpoint,
    /// Modules and patterns, with the widths of their activations.
    modules: Calibration,
    /// Tensor of each module or pattern.
    tensors: BTreeMap<String, String>,
}

impl Recorded {
    /// Opens a safetensors file, a folder of such files, or an index.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or a tensor cannot be activations.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let checkpoint = Checkpoint::open(path)?;
        let (mut modules, mut tensors) = (Calibration::default(), BTreeMap::new());
        for (name, tensor) in checkpoint.files().iter().flat_map(TensorFile::tensors) {
            let at = |error: Error| error.at(checkpoint.place(name));
            if !DTYPES.contains(&tensor.dtype) {
                let remedy = "a file of recorded activations must contain activations alone";
                return Err(at(Error::Dtype { got: tensor.dtype, expected: DTYPES.to_vec(), remedy }));
            }
            let (Some(&k), false) = (tensor.shape.last(), tensor.shape.len() < 2 || tensor.data.is_empty()) else {
                let expected = "[tokens, K] with at least one token".into();
                return Err(at(Error::Shape { got: tensor.shape.to_vec(), expected }));
            };
            let module = modules.add_width(name.strip_suffix(".weight").unwrap_or(name), k).map_err(at)?;
            tensors.insert(module, name.to_owned());
        }
        Ok(Self { checkpoint, modules, tensors })
    }

    /// Path that was opened.
    pub(super) fn path(&self) -> &Path {
        self.checkpoint.path()
    }

    /// Returns the tensor with the activations that a module with this K reads; `None` if there is none.
    ///
    /// # Errors
    /// Returns an error if the activations given for the module have another width.
    pub(super) fn tensor_of(&self, module: &str, k: usize) -> Result<Option<&str>, Error> {
        Ok(self.modules.entry(module, k)?.map(|name| &self.tensors[name][..]))
    }

    /// Returns the names of the tensors that none of these modules reads.
    pub(super) fn unused<'m>(&self, modules: impl Iterator<Item = &'m str>) -> Vec<&str> {
        self.modules.unused(modules).into_iter().map(|name| &self.tensors[name][..]).collect()
    }

    /// Computes the factor of the activations in a tensor. Takes 8·K² bytes, and a part of the tensor.
    ///
    /// # Errors
    /// Returns an error with the place of a NaN or an infinity, or if the activations have no direction.
    pub(super) fn factor(&self, name: &str) -> Result<Factor, Error> {
        let at = |error: Error| error.at(self.checkpoint.place(name));
        let tensor = self.checkpoint.tensor(name).expect("`open` kept the tensor");
        let numbers = Floats::of(tensor).expect("`open` checked the type");
        let k = *tensor.shape.last().expect("`open` checked the shape");
        let count: usize = tensor.shape.iter().product();
        let mut hessian = Hessian::new(k);
        let step = (CHUNK / k).max(1) * k;
        let mut decoded: Vec<f64> = Vec::new();
        for first in (0..count).step_by(step) {
            with!(numbers.part(first..(first + step).min(count)), numbers => {
                numbers.par_iter().map(|&number| f64::from(to_f32(number))).collect_into_vec(&mut decoded);
            });
            if let Some(index) = decoded.iter().position(|number| !number.is_finite()) {
                return Err(at(Error::NotFinite { index: first + index, value: decoded[index] as f32 }));
            }
            hessian.add(&decoded);
        }
        let file = self.checkpoint.file_with(name);
        file.release();
        file.check_unchanged()?;
        hessian.factor().map_err(at)
    }
}
