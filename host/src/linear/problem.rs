//! The weights of a linear layer, the tokens of a step and its output. Every validation of them stands here.

use std::borrow::Cow;

use crate::bias::Bias;
use crate::error::Error;
use crate::format::{BLOCK, Matrix};
use crate::fp4::check_input_scale;
use crate::moe::check_global_scale;
use crate::output::POISON;
use crate::problem::{MAX_K, TokenDtype, TokenFormat};

/// Everything about a layer that does not change from step to step, but its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinearSizes {
    /// N: output features, a multiple of 16.
    pub n: usize,
    /// K: input features, a multiple of 16 up to 2²⁰.
    pub k: usize,
    /// The type of tokens and output.
    pub dtype: TokenDtype,
    /// Whether there is a bias.
    pub bias: bool,
    /// As what tokens are multiplied.
    pub token_format: TokenFormat,
}

impl LinearSizes {
    /// The largest N.
    pub const MAX_N: usize = 1 << 24;

    /// Checks both sizes.
    ///
    /// # Errors
    /// What is out of range, with the range.
    pub fn check(&self) -> Result<(), Error> {
        for (what, size, most) in [("N", self.n, Self::MAX_N), ("K", self.k, MAX_K)] {
            if size == 0 || size > most || !size.is_multiple_of(BLOCK) {
                return Err(Error::Invalid(format!(
                    "{what} = {size} of a linear layer is not a multiple of 16 from 16 to {most}; pad the weights with zeros"
                )));
            }
        }
        Ok(())
    }
}

/// The weights of a layer.
#[derive(Clone, Debug)]
pub struct LinearWeights<'a> {
    dtype: TokenDtype,
    matrix: Matrix<'a>,
    bias: Option<Bias<'a>>,
    token_format: TokenFormat,
    input_scale: Option<f32>,
    /// Why tokens cannot be multiplied in NVFP4; `None` if they can.
    input_scale_fault: Option<String>,
}

impl<'a> LinearWeights<'a> {
    /// A layer `[N, K]` for tokens of a type.
    ///
    /// # Errors
    /// If N or K is no multiple of 16, or the global scale takes products out of f32.
    pub fn new(dtype: TokenDtype, matrix: Matrix<'a>) -> Result<Self, Error> {
        let token_format = TokenFormat::Bits16;
        let weights = Self { dtype, matrix, bias: None, token_format, input_scale: None, input_scale_fault: None };
        weights.sizes().check()?;
        check_global_scale(weights.matrix.global_scale())?;
        Ok(weights)
    }

    /// The layer with a bias, N numbers.
    ///
    /// # Errors
    /// If there are not as many, or one is not finite.
    pub fn with_bias(self, bias: Bias<'a>) -> Result<Self, Error> {
        bias.check(self.dtype, self.matrix.rows()).map_err(|error| error.at("bias"))?;
        Ok(Self { bias: Some(bias), ..self })
    }

    /// The layer with its tokens multiplied as this; as 16 bits unless told otherwise.
    pub fn with_token_format(self, token_format: TokenFormat) -> Self {
        Self { token_format, ..self }
    }

    /// The layer with a global scale for its tokens, as checkpoints carry it (`input_scale`). Without it each token has one of its own.
    /// Only [`TokenFormat::Nvfp4`] looks at it.
    ///
    /// # Errors
    /// If it is not from 2⁻¹⁰⁰ to 2¹⁰⁰.
    pub fn with_input_scale(self, input_scale: f32) -> Result<Self, Error> {
        check_input_scale(input_scale)?;
        Ok(Self { input_scale: Some(input_scale), ..self })
    }

    /// The layer with an input scale that cannot be used, for this reason. Then [`LinearStep::new`] refuses
    /// [`TokenFormat::Nvfp4`].
    pub fn without_input_scale(self, reason: String) -> Self {
        Self { input_scale: None, input_scale_fault: Some(reason), ..self }
    }

    /// The global scale of tokens; none if they have their own.
    pub fn input_scale(&self) -> Option<f32> {
        self.input_scale
    }

    /// The sizes.
    pub fn sizes(&self) -> LinearSizes {
        let &Self { dtype, ref matrix, ref bias, token_format, .. } = self;
        LinearSizes { n: matrix.rows(), k: matrix.k(), dtype, bias: bias.is_some(), token_format }
    }

    /// W.
    pub fn matrix(&self) -> &Matrix<'a> {
        &self.matrix
    }

    /// The bias as exact numbers, if there is one.
    pub fn bias(&self) -> Option<Cow<'_, [f32]>> {
        self.bias.as_ref().map(|bias| bias.numbers(self.dtype))
    }
}

/// Returns the error for NVFP4 tokens of weights whose input scales cannot be used.
pub(crate) fn no_nvfp4_tokens(fault: &str) -> Error {
    Error::Invalid(format!("tokens cannot be NVFP4: {fault}; use 16-bit tokens, or calibrate the model again"))
}

/// What comes with each forward pass, as a caller has it. [`LinearStep::new`] checks it.
#[derive(Clone, Debug, Default)]
pub struct LinearInputs<'a> {
    /// M; may be 0.
    pub tokens: usize,
    /// X: bits of the layer's type, a row of K for each token.
    pub x: Cow<'a, [u16]>,
    /// Elements from one token's row to the next one's, at least K.
    pub stride: usize,
}

/// The tokens of one forward pass, checked against the layer.
#[derive(Clone, Debug)]
pub struct LinearStep<'a> {
    sizes: LinearSizes,
    inputs: LinearInputs<'a>,
}

impl<'a> LinearStep<'a> {
    /// Checks lengths.
    ///
    /// # Errors
    /// If the stride is less than K, there are too few elements or too many tokens, or tokens are NVFP4 and the layer's
    /// input scale cannot be used.
    pub fn new(layer: &LinearWeights<'_>, inputs: LinearInputs<'a>) -> Result<Self, Error> {
        if let (TokenFormat::Nvfp4, Some(fault)) = (layer.token_format, &layer.input_scale_fault) {
            return Err(no_nvfp4_tokens(fault));
        }
        Self::of_sizes(layer.sizes(), inputs)
    }

    /// The step of a layer of these sizes: [`LinearStep::new`] where the layer's weights are gone.
    ///
    /// # Errors
    /// As [`LinearStep::new`].
    pub fn of_sizes(sizes: LinearSizes, inputs: LinearInputs<'a>) -> Result<Self, Error> {
        let (tokens, stride) = (inputs.tokens, inputs.stride);
        if stride < sizes.k {
            return Err(Error::Invalid(format!(
                "the tokens' row stride is {stride} elements, less than K = {}; give the elements from one token to the next",
                sizes.k
            )));
        }
        let elements = match tokens {
            0 => Some(0),
            _ => (tokens - 1).checked_mul(stride).and_then(|all| all.checked_add(sizes.k)),
        };
        let elements = elements.ok_or(Error::TooLarge)?;
        if inputs.x.len() < elements {
            return Err(Error::Mismatch { what: "elements of the tokens", got: inputs.x.len(), expected: elements });
        }
        // The f64 reference of tokens and output, and what tiles are counted with.
        let bytes = tokens.checked_mul(sizes.n.max(sizes.k)).and_then(|elements| elements.checked_mul(32));
        if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) || u32::try_from(tokens).is_err() {
            return Err(Error::TooLarge);
        }
        Ok(Self { sizes, inputs })
    }

    /// The layer's sizes.
    pub fn sizes(&self) -> LinearSizes {
        self.sizes
    }

    /// M.
    pub fn tokens(&self) -> usize {
        self.inputs.tokens
    }

    /// Elements from one token's row to the next one's. A single token has no next one: then it is K.
    pub fn stride(&self) -> usize {
        if self.inputs.tokens > 1 { self.inputs.stride } else { self.sizes.k }
    }

    /// The bits of a token, K of them.
    pub fn token(&self, token: usize) -> &[u16] {
        &self.inputs.x[token * self.stride()..][..self.sizes.k]
    }

    /// Checks that this step was made for a layer of these sizes.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it was not.
    pub fn check_fits(&self, sizes: LinearSizes) -> Result<(), Error> {
        if self.sizes == sizes {
            return Ok(());
        }
        Err(Error::Invalid("this step was made for another layer: build it from the prepared weights".into()))
    }
}

/// The output of a step: `[M, N]` in the tokens' type, without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearOutput {
    dtype: TokenDtype,
    /// `[M, N]`.
    pub out: Vec<u16>,
}

impl LinearOutput {
    /// A poisoned output for a step.
    pub fn new(step: &LinearStep<'_>) -> Self {
        Self { dtype: step.sizes.dtype, out: vec![POISON; step.tokens() * step.sizes.n] }
    }

    /// Fills it with NaN, so that an element which a kernel fails to write is found.
    pub fn poison(&mut self) {
        self.out.fill(POISON);
    }

    /// The type of its numbers.
    pub fn dtype(&self) -> TokenDtype {
        self.dtype
    }

    /// Checks that it has the type and the elements of this step's output.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it does not.
    pub fn check_fits(&self, step: &LinearStep<'_>) -> Result<(), Error> {
        if self.dtype == step.sizes.dtype && self.out.len() == step.tokens() * step.sizes.n {
            return Ok(());
        }
        Err(Error::Invalid("the output was made for another step: make a new one".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(n: usize, k: usize, global: f32) -> Matrix<'static> {
        Matrix::new(n, k, vec![0x11; n * k / 2], vec![0x38; n * k / BLOCK], global).unwrap()
    }

    fn layer() -> LinearWeights<'static> {
        LinearWeights::new(TokenDtype::F16, matrix(32, 48, 1.0)).unwrap()
    }

    #[test]
    fn sizes_and_scales_that_no_device_takes_are_refused_with_the_remedy() {
        for (n, k, global, words) in [
            (24, 16, 1.0, "N = 24 of a linear layer is not a multiple of 16"),
            (0, 16, 1.0, "N = 0 of"),
            (16, 0, 1.0, "K = 0 of"),
            (16, 16, 1e33, "quantize the tensor again"),
        ] {
            let error = LinearWeights::new(TokenDtype::Bf16, matrix(n, k, global)).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let bias =
            |numbers: Vec<f32>| layer().with_bias(Bias::F32(numbers.into())).map(|_| ()).map_err(|e| e.to_string());
        assert_eq!(bias(vec![0.5; 32]), Ok(()));
        assert!(bias(vec![0.5; 31]).unwrap_err().starts_with("bias: biases: got 31, expected 32"));
        assert!(bias(vec![f32::NAN; 32]).unwrap_err().contains("bias 0 is NaN"));
        assert_eq!(layer().with_input_scale(0.25).unwrap().input_scale(), Some(0.25));
        let error = layer().with_input_scale(-1.0).unwrap_err().to_string();
        assert!(error.starts_with("input scale -1e0 must be from 2^-100 to 2^100"), "{error}");
    }

    #[test]
    fn a_step_has_the_elements_of_its_tokens() {
        let layer = layer();
        let step = |tokens, elements, stride| {
            LinearStep::new(&layer, LinearInputs { tokens, x: vec![0; elements].into(), stride })
                .map(|_| ())
                .map_err(|e| e.to_string())
        };
        // The last token needs no gap behind it.
        assert_eq!(step(3, 2 * 50 + 48, 50), Ok(()));
        assert_eq!(step(0, 0, 48), Ok(()));
        assert_eq!(step(3, 3 * 48 - 1, 48).unwrap_err(), "elements of the tokens: got 143, expected 144");
        assert!(step(1, 48, 47).unwrap_err().contains("row stride is 47 elements, less than K = 48"));
        assert!(step(usize::MAX, 48, 48).is_err() && step(1 << 40, 48, 48).is_err());
    }

    #[test]
    fn a_step_of_another_layer_and_its_output_are_refused() {
        let layer = layer();
        let of = |layer: &LinearWeights<'_>, tokens: usize| {
            LinearStep::new(layer, LinearInputs { tokens, x: vec![0; tokens * 48].into(), stride: 48 }).unwrap()
        };
        let other = LinearWeights::new(TokenDtype::Bf16, matrix(32, 48, 1.0)).unwrap();
        assert!(of(&other, 1).check_fits(layer.sizes()).is_err() && of(&layer, 2).check_fits(layer.sizes()).is_ok());
        assert!(LinearOutput::new(&of(&layer, 2)).check_fits(&of(&layer, 1)).is_err());
        assert!(LinearOutput::new(&of(&other, 2)).check_fits(&of(&layer, 2)).is_err());
    }
}
