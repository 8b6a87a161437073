//! One weight of a model as a linear layer: any projection, including attention projections, with its bias.

use super::convert::weights::PRE_QUANT_SCALE;
use super::floats::{self, Floats};
use super::input_scales::of_fp8_tokens;
use super::model_config::ModelConfig;
use super::names::BIAS;
use super::{Checkpoint, LayerTensors, QuantizedWeight};
use nvfp4_core::Error;
use nvfp4_core::bias::Bias;
use nvfp4_core::linear::LinearWeights;
use nvfp4_core::problem::TokenDtype;

/// Scales of cached keys and values, which ModelOpt stores beside the projections. They do not affect the projections.
const CACHE_SCALES: [&str; 4] = [".k_scale", ".v_scale", ".output_scale", ".q_scale"];

/// A weight as a linear layer, with what happens to its tokens before.
#[derive(Clone, Debug)]
pub struct ScaledLinear<'a> {
    /// The linear layer.
    pub weights: LinearWeights<'a>,
    /// Factor of each column of the tokens, `[K]`: `pre_quant_scale` of ModelOpt's NVFP4_AWQ. `None`: the model has none.
    factors: Option<Vec<f32>>,
}

impl ScaledLinear<'_> {
    /// Multiplies tokens `[T, K]` by the factors, and rounds them to their type as engines do.
    ///
    /// # Errors
    /// Returns an error if a product is not finite in the tokens' type.
    pub fn scale(&self, tokens: &mut [u16]) -> Result<(), Error> {
        let Some(factors) = &self.factors else { return Ok(()) };
        let dtype = self.weights.sizes().dtype;
        for (index, bits) in tokens.iter_mut().enumerate() {
            let factor = factors[index % factors.len()];
            *bits = dtype.round_f32(dtype.decode(*bits) as f32 * factor);
            if !dtype.decode(*bits).is_finite() {
                let (token, column) = (index / factors.len(), index % factors.len());
                let what = format!("element {column} of token {token} times its {PRE_QUANT_SCALE} {factor:e}");
                let what = format!("{what} is not a finite {}; use smaller tokens, or --dtype bf16", dtype.name());
                return Err(Error::Invalid(what));
            }
        }
        Ok(())
    }
}

/// Returns the module of a weight that was given by the name of the module or of its tensor.
fn module_of(name: &str) -> &str {
    name.strip_suffix(".weight_packed").or_else(|| name.strip_suffix(".weight")).unwrap_or(name)
}

impl Checkpoint {
    /// Loads the weight of a module such as `model.layers.0.self_attn.q_proj` for tokens of type `dtype`, with the bias
    /// and input scale if they exist. Also accepts the name of the weight tensor, which ends in `.weight`.
    ///
    /// # Errors
    /// Returns an error if the module does not exist, a part is missing or wrong, or a part is not computed. Factors of the
    /// tokens are such a part; [`Checkpoint::scaled_linear`] returns them.
    pub fn linear(&self, module: &str, dtype: TokenDtype) -> Result<LinearWeights<'_>, Error> {
        let ScaledLinear { weights, factors } = self.scaled_linear(module, dtype)?;
        match factors {
            None => Ok(weights),
            Some(_) => Err(self.not_computed(&format!("{}{PRE_QUANT_SCALE}", module_of(module)))),
        }
    }

    /// Same as [`Checkpoint::linear`], with the factors by which the tokens are multiplied first.
    ///
    /// # Errors
    /// Returns an error if the module does not exist, a part is missing or wrong, or a part is not computed.
    pub fn scaled_linear(&self, module: &str, dtype: TokenDtype) -> Result<ScaledLinear<'_>, Error> {
        let module = module_of(module);
        let is_part = |name: &str| name[module.len()..].starts_with('.');
        if module.is_empty() || !self.names_under(module).any(is_part) {
            let remedy = format!("run `nvfp4 inspect {}` for a list of the weights", self.path().display());
            let missing = Error::Missing { name: format!("a weight named {module:?}"), remedy };
            return Err(missing.at(self.path().display()));
        }
        if let Some(part) = self.linear_refusal(module) {
            return Err(self.not_computed(part));
        }
        let config = ModelConfig::beside(self)?;
        config.as_ref().map_or(Ok(()), ModelConfig::check_transforms)?;
        let fp8_tokens = config.as_ref().and_then(ModelConfig::fp8_tokens);
        let QuantizedWeight { matrix, .. } = self.weight(module)?;
        let rows = matrix.rows();
        let at = |error: Error| error.at(self.place(module));
        let mut weights = LinearWeights::new(dtype, matrix).map_err(at)?;
        match (self.input_scale(module), fp8_tokens) {
            (Ok(None), _) => {}
            (Ok(Some(_)), Some(algorithm)) => weights = weights.without_input_scale(of_fp8_tokens(algorithm)),
            (Ok(Some(input_scale)), None) => weights = weights.with_input_scale(input_scale).map_err(at)?,
            // Only NVFP4 tokens need it.
            (Err(fault), _) => weights = weights.without_input_scale(fault.to_string()),
        }
        if let Some(bias) = self.bias(&format!("{module}{BIAS}"), rows)? {
            weights = weights.with_bias(bias).map_err(at)?;
        }
        let name = format!("{module}{PRE_QUANT_SCALE}");
        let k = weights.sizes().k;
        let factors = self.tensor(&name).map(|_| self.numbers(&name, &[k], "[K]")).transpose()?;
        Ok(ScaledLinear { weights, factors })
    }

    /// Returns the tensors of a module that [`Checkpoint::linear`] uses and leaves.
    pub fn linear_tensors(&self, module: &str) -> LayerTensors {
        let module = module_of(module);
        let is_used = |name: &&str| !CACHE_SCALES.contains(&&name[module.len()..]);
        let (used, left): (Vec<_>, Vec<_>) = self.parts_of(module).partition(is_used);
        let owned = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect();
        LayerTensors { used: owned(used), left: owned(left) }
    }

    /// Returns the first tensor of a module that changes the result of [`Checkpoint::scaled_linear`] and is not computed.
    pub(super) fn linear_refusal(&self, module: &str) -> Option<&str> {
        let is_known = |name: &str| [BIAS, PRE_QUANT_SCALE].contains(&name) || CACHE_SCALES.contains(&name);
        self.parts_not_computed(module).into_iter().find(|part| !is_known(&part[module.len()..]))
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
