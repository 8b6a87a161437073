//! A projection that the host computes in f64, with weights in any form.

use super::Checkpoint;
use super::convert::weights;
use super::model_config::ModelConfig;
use super::names::BIAS;
use nvfp4_core::Error;

/// A matrix `[N, K]` with its bias.
#[derive(Clone, Debug)]
pub struct Projection {
    /// Module that stores the weights. If gate and up share a matrix, both have its module.
    pub module: String,
    /// Form in which the model stores the weights: `BF16`, `F16`, `F32`, `FP8`, `MXFP4` or `NVFP4`.
    pub form: String,
    /// K: number of columns.
    pub k: usize,
    /// `[N, K]`.
    pub weights: Vec<f32>,
    /// `[N]`.
    pub bias: Option<Vec<f32>>,
}

impl Projection {
    /// N: number of rows.
    pub fn rows(&self) -> usize {
        self.weights.len() / self.k.max(1)
    }

    /// Returns the product `[N]` of the matrix and a token `[K]`, plus the bias. Sums are computed in f64.
    pub(super) fn product(&self, row: &[f64]) -> Vec<f64> {
        let dot = |line: &[f32]| row.iter().zip(line).map(|(x, &w)| x * f64::from(w)).sum::<f64>();
        let bias = |line: usize| self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[line]));
        self.weights.chunks(self.k).enumerate().map(|(index, line)| dot(line) + bias(index)).collect()
    }

    /// Returns the first and the second half of the rows; `None` for an odd number of rows.
    pub(super) fn halves(self) -> Option<[Self; 2]> {
        let rows = self.rows();
        if !rows.is_multiple_of(2) {
            return None;
        }
        let Self { module, form, k, mut weights, mut bias } = self;
        let second = Self {
            module: module.clone(),
            form: form.clone(),
            k,
            weights: weights.split_off(rows / 2 * k),
            bias: bias.as_mut().map(|bias| bias.split_off(rows / 2)),
        };
        Some([Self { module, form, k, weights, bias }, second])
    }
}

impl Checkpoint {
    /// Loads the projection of a module, in whatever form it is stored.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing or wrong, a number is not finite, or the configuration transforms the tokens.
    pub(super) fn projection(&self, config: &ModelConfig, module: &str) -> Result<Projection, Error> {
        if let Some(transform) = config.input_transform(module)? {
            let what = format!("transform {} of the tokens of this projection is not computed", transform.group);
            let remedy = "quantize the projection to NVFP4, or export the model without the transform";
            return Err(Error::NotComputed(format!("{what}; {remedy}")).at(self.place(module)));
        }
        let mut stored = weights::of_module(self, module)?;
        let source = stored.weights.remove(0).source;
        let form = if source.nvfp4_global().is_some() {
            "NVFP4".into()
        } else if source.is_mxfp4() {
            "MXFP4".into()
        } else if stored.plain {
            self.tensor(stored.name).map_or_else(String::new, |tensor| tensor.dtype.to_string())
        } else {
            "FP8".into()
        };
        let [n, k] = source.sizes();
        let mut weights = Vec::new();
        source.decoded(0..n, &mut weights);
        self.check_finite(module, &weights, k)?;
        let name = format!("{module}{BIAS}");
        let bias = self.tensor(&name).map(|_| self.numbers(&name, &[n], "[rows of the weight]")).transpose()?;
        bias.iter().try_for_each(|bias| self.check_finite(&name, bias, n))?;
        Ok(Projection { module: module.to_owned(), form, k, weights, bias })
    }

    /// Returns the names of the tensors that [`Self::projection`] can read; some of them may not exist.
    ///
    /// # Errors
    /// Returns an error if the module's weights cannot be read.
    pub(super) fn projection_tensors(&self, module: &str) -> Result<Vec<String>, Error> {
        let stored = weights::of_module(self, module)?;
        Ok([stored.name.to_owned(), format!("{module}{BIAS}")].into_iter().chain(stored.scales).collect())
    }

    /// Refuses numbers that are not finite.
    pub(super) fn check_finite(&self, name: &str, numbers: &[f32], columns: usize) -> Result<(), Error> {
        let Some(index) = numbers.iter().position(|number| !number.is_finite()) else { return Ok(()) };
        let (row, column) = (index / columns.max(1), index % columns.max(1));
        let what = format!("the number in row {row}, column {column} is not finite; export the model again");
        Err(Error::Invalid(what).at(self.place(name)))
    }
}
