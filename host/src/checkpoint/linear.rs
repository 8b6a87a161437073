//! One weight of a model as a linear layer: any projection, including attention projections, with its bias.

use super::floats::{self, Floats};
use super::model_config::ModelConfig;
use super::{Checkpoint, QuantizedWeight};
use crate::bias::Bias;
use crate::error::Error;
use crate::linear::LinearWeights;
use crate::problem::TokenDtype;

/// Suffix of a module's bias.
pub(super) const BIAS: &str = ".bias";

/// Scales of cached keys and values, which ModelOpt stores beside the projections. They do not affect the projections.
const CACHE_SCALES: [&str; 4] = [".k_scale", ".v_scale", ".output_scale", ".q_scale"];

impl Checkpoint {
    /// Loads the weight of a module such as `model.layers.0.self_attn.q_proj` for tokens of type `dtype`, with the bias
    /// and input scale if they exist. Also accepts the name of the weight tensor, which ends in `.weight`.
    ///
    /// # Errors
    /// Returns an error if the module does not exist, a part is missing or wrong, or a part is not computed.
    pub fn linear(&self, module: &str, dtype: TokenDtype) -> Result<LinearWeights<'_>, Error> {
        let module = module.strip_suffix(".weight_packed").or_else(|| module.strip_suffix(".weight")).unwrap_or(module);
        let is_part = |name: &str| name[module.len()..].starts_with('.');
        if module.is_empty() || !self.names_under(module).any(is_part) {
            let remedy = format!("run `nvfp4 inspect {}` for a list of the weights", self.path().display());
            let missing = Error::Missing { name: format!("a weight named {module:?}"), remedy };
            return Err(missing.at(self.path().display()));
        }
        let is_known = |name: &str| name == BIAS || CACHE_SCALES.contains(&name);
        if let Some(part) = self.parts_not_computed(module).iter().find(|part| !is_known(&part[module.len()..])) {
            return Err(self.not_computed(part));
        }
        if let Some(config) = ModelConfig::beside(self)? {
            config.check_transforms()?;
        }
        let QuantizedWeight { matrix, input_scale, .. } = self.quantized(module)?;
        let rows = matrix.rows();
        let at = |error: Error| error.at(self.place(module));
        let mut weights = LinearWeights::new(dtype, matrix).map_err(at)?;
        if let Some(input_scale) = input_scale {
            weights = weights.with_input_scale(input_scale).map_err(at)?;
        }
        match self.bias(&format!("{module}{BIAS}"), rows)? {
            Some(bias) => weights.with_bias(bias).map_err(at),
            None => Ok(weights),
        }
    }

    /// Returns a bias `[N]` in f32, f16 or bf16; `None` if the tensor does not exist.
    pub(super) fn bias(&self, name: &str, rows: usize) -> Result<Option<Bias<'static>>, Error> {
        if self.tensor(name).is_none() {
            return Ok(None);
        }
        Ok(Some(Bias::F32(self.numbers(name, &[rows], "[N]")?.into())))
    }

    /// Returns the numbers of a tensor of shape `shape` in f32, f16 or bf16.
    pub(super) fn numbers(&self, name: &str, shape: &[usize], shape_in_words: &str) -> Result<Vec<f32>, Error> {
        let at = |error: Error| error.at(self.place(name));
        let missing = || Error::Missing { name: "this tensor".into(), remedy: "download the model again".into() };
        let tensor = self.tensor(name).ok_or_else(|| at(missing()))?;
        if tensor.shape != shape {
            let expected = format!("{shape:?} ({shape_in_words})");
            return Err(at(Error::Shape { got: tensor.shape.to_vec(), expected }));
        }
        let remedy = "export the model again";
        let other = || Error::Dtype { got: tensor.dtype, expected: floats::DTYPES.to_vec(), remedy };
        let numbers = Floats::of(tensor).ok_or_else(|| at(other()))?;
        Ok((0..shape.iter().product()).map(|index| numbers.at(index)).collect())
    }
}
