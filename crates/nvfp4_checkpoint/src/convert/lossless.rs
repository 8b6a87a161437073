//! Reads MXFP4 weights as NVFP4 with the same numbers, so that a layer runs without a converted model.

use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::config::Config;
use super::mxfp4::{convert_rows, global_exponent, largest_exponent};
use super::stored::{self, Found};
use crate::fused::Part;
use crate::source::Source;
use crate::{Checkpoint, Dtype};
use nvfp4_core::Error;
use nvfp4_core::bias::Bias;
use nvfp4_core::format::{BLOCK, Matrix};

/// Suffixes of packed values.
const VALUES: [&str; 3] = ["_blocks", ".weight", ".weight_packed"];

/// Suffixes of scales.
const SCALES: [&str; 3] = ["_scales", ".weight_scale", ".scale"];

/// A model's MXFP4 weights as NVFP4.
pub(crate) struct Lossless<'a> {
    checkpoint: &'a Checkpoint,
    config: Config,
    blocks: AtomicUsize,
}

impl<'a> Lossless<'a> {
    /// Reads the model's configuration, which decides the order of gate and up in one tensor.
    ///
    /// # Errors
    /// Returns an error if the configuration exists and cannot be read.
    pub(crate) fn of(checkpoint: &'a Checkpoint) -> Result<Self, Error> {
        Ok(Self { checkpoint, config: Config::beside(checkpoint)?, blocks: AtomicUsize::new(0) })
    }

    /// Number of NVFP4 blocks of all matrices so far.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Returns the matrix of a module; `None` if it is not MXFP4.
    ///
    /// # Errors
    /// Returns an error if a part is wrong, or a block cannot keep its numbers.
    pub(crate) fn matrix(&self, module: &str) -> Result<Option<Matrix<'static>>, Error> {
        Ok(self.parts(module)?.and_then(|mut parts| parts.pop()).map(|(matrix, _)| matrix))
    }

    /// Returns gate and up of a module that has both in one matrix, gate first; `None` if it is not MXFP4.
    ///
    /// # Errors
    /// The errors of [`Self::matrix`], and an error for an odd number of rows.
    pub(crate) fn halves(&self, module: &str) -> Result<Option<[Matrix<'static>; 2]>, Error> {
        let Some(matrix) = self.matrix(module)? else { return Ok(None) };
        let (rows, k) = (matrix.rows(), matrix.k());
        if !rows.is_multiple_of(2) {
            let what = format!("{rows} rows cannot be split into gate and up; export the model again");
            return Err(Error::Invalid(what).at(self.checkpoint.place(module)));
        }
        let half = |half: usize| {
            let part = |data: &[u8]| data[half * data.len() / 2..][..data.len() / 2].to_vec();
            Matrix::new(rows / 2, k, part(matrix.values()), part(matrix.scales()), matrix.global_scale())
        };
        Ok(Some([half(0)?, half(1)?]))
    }

    /// Returns the matrices of a module with their biases; `None` if it is not MXFP4. A module with all experts has one
    /// matrix per expert, or gate and up of each expert.
    ///
    /// # Errors
    /// The errors of [`Self::matrix`].
    pub(crate) fn parts(&self, module: &str) -> Result<Option<Vec<Part<'static>>>, Error> {
        let Some(name) = self.checkpoint.mxfp4_values(module) else { return Ok(None) };
        let tensor = self.checkpoint.tensor(name).expect("the tensor exists");
        let at = |error: Error| error.at(self.checkpoint.place(name));
        let stored = match stored::find(self.checkpoint, &self.config, name, tensor) {
            Some(Found::Weights(stored)) => stored,
            Some(Found::Unreadable(error)) => return Err(at(error)),
            _ => return Ok(None),
        };
        let bias_numbers = stored.biases.as_ref().map(|biases| {
            let numbers = self.checkpoint.numbers(&biases.name, biases.tensor.shape, "[E, N]")?;
            Ok::<_, Error>((numbers, &biases.parts))
        });
        let bias_numbers = bias_numbers.transpose()?;
        let bias = |index: usize| {
            let (numbers, parts) = bias_numbers.as_ref()?;
            let rows = parts[index].1;
            let of_part = numbers.iter().skip(rows.first).step_by(rows.step).take(rows.count);
            Some(Bias::F32(of_part.copied().collect()))
        };
        let part = |(index, weight): (usize, &stored::Weight<'_>)| {
            Ok::<Part<'static>, Error>((self.converted(&weight.source)?, bias(index)))
        };
        stored.weights.par_iter().enumerate().map(part).collect::<Result<_, _>>().map(Some).map_err(at)
    }

    /// Converts a matrix whose blocks all keep their numbers.
    fn converted(&self, source: &Source<'_>) -> Result<Matrix<'static>, Error> {
        let [rows, k] = source.sizes();
        let global = global_exponent(largest_exponent(source)?);
        let (mut values, mut scales) = (vec![0; rows * k / 2], vec![0; rows * k / BLOCK]);
        let (_, exact) = convert_rows(source, 0..rows, global, &mut values, &mut scales)?;
        if exact.blocks < exact.all {
            return Err(Error::NotComputed(format!(
                "{} of {} blocks of 16 cannot keep their numbers in NVFP4, because the exponents of the matrix span more \
                 than 17; round them with `nvfp4 quantize`",
                exact.all - exact.blocks,
                exact.all
            )));
        }
        self.blocks.fetch_add(exact.all, Ordering::Relaxed);
        Matrix::new(rows, k, values, scales, f32::exp2(global as f32))
    }
}

impl Checkpoint {
    /// Returns the name of the packed values of a module in MXFP4; `None` if it is not MXFP4.
    pub(crate) fn mxfp4_values(&self, module: &str) -> Option<&str> {
        let has_type =
            |name: &str, dtypes: &[Dtype]| self.tensor(name).is_some_and(|tensor| dtypes.contains(&tensor.dtype));
        let scales = [Dtype::U8, Dtype::F8_E8M0];
        SCALES.iter().find(|part| has_type(&format!("{module}{part}"), &scales))?;
        let is_values =
            |name: &&str| VALUES.contains(&&name[module.len()..]) && has_type(name, &[Dtype::U8, Dtype::I8, Dtype::F4]);
        self.names_under(module).find(is_values)
    }

    /// Whether `part` is the suffix of the values or the scales of a module in MXFP4.
    pub(crate) fn is_mxfp4_part(&self, module: &str, part: &str) -> bool {
        VALUES.iter().chain(&SCALES).any(|known| *known == part) && self.mxfp4_values(module).is_some()
    }
}
