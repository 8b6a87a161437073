//! One weight of a model as a linear layer: any projection, including attention projections, with its bias.

use super::convert::weights::PRE_QUANT_SCALE;
use super::floats::{self, Floats};
use super::input_scales::of_fp8_tokens;
use super::model_config::ModelConfig;
use super::names::BIAS;
use super::token_transform::Matrices;
use super::{Checkpoint, LayerTensors, QuantizedWeight};
use nvfp4_core::Error;
use nvfp4_core::bias::Bias;
use nvfp4_core::linear::LinearWeights;
use nvfp4_core::problem::TokenDtype;
use nvfp4_core::transform::TokenTransform;

/// Scales of cached keys and values, which ModelOpt stores beside the projections. They do not affect the projections.
const CACHE_SCALES: [&str; 4] = [".k_scale", ".v_scale", ".output_scale", ".q_scale"];

/// A weight as a linear layer, with what happens to its tokens before.
#[derive(Clone, Debug)]
pub struct ScaledLinear<'a> {
    /// The linear layer.
    pub weights: LinearWeights<'a>,
    /// Factors of the columns (`pre_quant_scale` of ModelOpt's NVFP4_AWQ) or a Hadamard transform (`transform_config` of
    /// compressed-tensors). `None`: the tokens stay as they are.
    transform: Option<TokenTransform>,
}

impl ScaledLinear<'_> {
    /// Transforms tokens `[T, K]`, and rounds them to their type as engines do.
    ///
    /// # Errors
    /// Returns an error if a result is not finite in the tokens' type.
    pub fn scale(&self, tokens: &mut [u16]) -> Result<(), Error> {
        let sizes = self.weights.sizes();
        self.transform.as_ref().map_or(Ok(()), |transform| transform.tokens(sizes.dtype, sizes.k, tokens))
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
    /// Returns an error if the module does not exist, a part is missing or wrong, or a part is not computed, such as a
    /// transform of the tokens; [`Checkpoint::scaled_linear`] returns the transform.
    pub fn linear(&self, module: &str, dtype: TokenDtype) -> Result<LinearWeights<'_>, Error> {
        let ScaledLinear { weights, transform } = self.scaled_linear(module, dtype)?;
        let name = format!("{}{PRE_QUANT_SCALE}", module_of(module));
        match transform {
            None => Ok(weights),
            Some(_) if self.tensor(&name).is_some() => Err(self.not_computed(&name)),
            Some(_) => {
                let what = "transform_config transforms the tokens of this weight; load it with `scaled_linear`";
                Err(Error::NotComputed(what.into()).at(self.place(module)))
            }
        }
    }

    /// Same as [`Checkpoint::linear`], with the transform of the tokens before the product.
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
        let transform = self.token_transform(module, weights.sizes().k, config.as_ref(), &mut Matrices::new())?;
        Ok(ScaledLinear { weights, transform })
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
        let is_known = |name: &str| {
            let part = &name[module.len()..];
            [BIAS, PRE_QUANT_SCALE].contains(&part) || CACHE_SCALES.contains(&part) || self.is_input_matrix(name)
        };
        self.parts_not_computed(module).into_iter().find(|part| !is_known(part))
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
