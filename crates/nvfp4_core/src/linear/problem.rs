//! The weights of a linear layer, the tokens of a step and its output, with all their validation.

use std::borrow::Cow;

use crate::bias::Bias;
use crate::error::Error;
use crate::format::{BLOCK, Matrix};
use crate::fp4::check_input_scale;
use crate::moe::check_global_scale;
use crate::output::POISON;
use crate::problem::{MAX_K, TokenDtype, TokenFormat, no_nvfp4_tokens};

/// All properties of a layer that are the same in every step, except the numbers of its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinearSizes {
    /// N: number of output features, a multiple of 16.
    pub n: usize,
    /// K: number of input features, a multiple of 16 up to 2²⁰.
    pub k: usize,
    /// Token type: the type of tokens and output.
    pub dtype: TokenDtype,
    /// Whether the layer has a bias.
    pub bias: bool,
    /// Format in which tokens are multiplied.
    pub token_format: TokenFormat,
}

impl LinearSizes {
    /// Maximum N.
    pub const MAX_N: usize = 1 << 24;

    /// Checks both sizes.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the size that is out of range and its range.
    pub fn check(&self) -> Result<(), Error> {
        for (what, size, most) in [("N", self.n, Self::MAX_N), ("K", self.k, MAX_K)] {
            if size == 0 || size > most || !size.is_multiple_of(BLOCK) {
                return Err(Error::Invalid(format!(
                    "{what} = {size} of a linear layer is not a multiple of 16 from 16 to {most}; pad \
                     the weights with zeros"
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
    /// Makes a layer `[N, K]` for tokens of type `dtype`.
    ///
    /// # Errors
    /// If N or K is not a multiple of 16 in its range, or the global scale lets products overflow f32.
    pub fn new(dtype: TokenDtype, matrix: Matrix<'a>) -> Result<Self, Error> {
        let token_format = TokenFormat::Bits16;
        let weights = Self { dtype, matrix, bias: None, token_format, input_scale: None, input_scale_fault: None };
        weights.sizes().check()?;
        check_global_scale(weights.matrix.global_scale())?;
        Ok(weights)
    }

    /// Returns the layer with a bias of N numbers.
    ///
    /// # Errors
    /// If the bias does not have N numbers, or a number is not finite.
    pub fn with_bias(self, bias: Bias<'a>) -> Result<Self, Error> {
        bias.check(self.dtype, self.matrix.rows()).map_err(|error| error.at("bias"))?;
        Ok(Self { bias: Some(bias), ..self })
    }

    /// Sets the format in which tokens are multiplied. The default is 16-bit.
    pub fn with_token_format(self, token_format: TokenFormat) -> Self {
        Self { token_format, ..self }
    }

    /// Sets the global scale of the tokens, which checkpoints store as `input_scale`. Without it, each token has its
    /// own global scale. Only [`TokenFormat::Nvfp4`] uses it.
    ///
    /// # Errors
    /// If the scale is not from 2⁻¹⁰⁰ to 2¹⁰⁰.
    pub fn with_input_scale(self, input_scale: f32) -> Result<Self, Error> {
        check_input_scale(input_scale)?;
        Ok(Self { input_scale: Some(input_scale), ..self })
    }

    /// Records why the input scale cannot be used. [`LinearStep::new`] then refuses [`TokenFormat::Nvfp4`] with this
    /// reason.
    pub fn without_input_scale(self, reason: String) -> Self {
        Self { input_scale: None, input_scale_fault: Some(reason), ..self }
    }

    /// Global scale of the tokens. `None` if each token has its own global scale.
    pub fn input_scale(&self) -> Option<f32> {
        self.input_scale
    }

    /// Sizes of the layer.
    pub fn sizes(&self) -> LinearSizes {
        let &Self { dtype, ref matrix, ref bias, token_format, .. } = self;
        LinearSizes { n: matrix.rows(), k: matrix.k(), dtype, bias: bias.is_some(), token_format }
    }

    /// The matrix W.
    pub fn matrix(&self) -> &Matrix<'a> {
        &self.matrix
    }

    /// The bias as exact numbers, if the layer has one.
    pub fn bias(&self) -> Option<Cow<'_, [f32]>> {
        self.bias.as_ref().map(|bias| bias.numbers(self.dtype))
    }
}

/// Inputs of a forward pass, unchecked. [`LinearStep::new`] checks them.
#[derive(Clone, Debug, Default)]
pub struct LinearInputs<'a> {
    /// M: number of tokens, may be 0.
    pub tokens: usize,
    /// X: bits of the token type, one row of K elements per token.
    pub x: Cow<'a, [u16]>,
    /// Number of elements from the start of one token's row to the start of the next row, at least K.
    pub stride: usize,
}

/// Inputs of one forward pass, checked against the layer.
#[derive(Clone, Debug)]
pub struct LinearStep<'a> {
    sizes: LinearSizes,
    inputs: LinearInputs<'a>,
}

impl<'a> LinearStep<'a> {
    /// Checks the lengths of the inputs.
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

    /// Makes a step for a layer of these sizes. Does the same as [`LinearStep::new`] without access to the layer's
    /// weights.
    ///
    /// # Errors
    /// The errors of [`LinearStep::new`].
    pub fn of_sizes(sizes: LinearSizes, inputs: LinearInputs<'a>) -> Result<Self, Error> {
        let (tokens, stride) = (inputs.tokens, inputs.stride);
        if stride < sizes.k {
            return Err(Error::Invalid(format!(
                "the row stride of the tokens is {stride} elements, less than K = {}; give the number of elements from \
                 one token to the next",
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
        // Bytes of the f64 reference of tokens and output. Tiles are counted in u32.
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

    /// M: number of tokens.
    pub fn tokens(&self) -> usize {
        self.inputs.tokens
    }

    /// Number of elements from the start of one token's row to the start of the next row. K if there is only one token.
    pub fn stride(&self) -> usize {
        if self.inputs.tokens > 1 { self.inputs.stride } else { self.sizes.k }
    }

    /// The K elements of a token.
    pub fn token(&self, token: usize) -> &[u16] {
        &self.inputs.x[token * self.stride()..][..self.sizes.k]
    }

    /// Checks that this step was made for a layer of these sizes.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it was made for other sizes.
    pub fn check_fits(&self, sizes: LinearSizes) -> Result<(), Error> {
        if self.sizes == sizes {
            return Ok(());
        }
        Err(Error::Invalid("this step was made for another layer; make it from the weights that were prepared".into()))
    }
}

/// Output of a step: `[M, N]` in the token type, without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearOutput {
    dtype: TokenDtype,
    /// `[M, N]`.
    pub out: Vec<u16>,
}

impl LinearOutput {
    /// Makes an output for a step, filled with poison.
    pub fn new(step: &LinearStep<'_>) -> Self {
        Self { dtype: step.sizes.dtype, out: vec![POISON; step.tokens() * step.sizes.n] }
    }

    /// Fills the output with NaN, so that a comparison finds any element that a kernel does not write.
    pub fn poison(&mut self) {
        self.out.fill(POISON);
    }

    /// Token type of the output.
    pub fn dtype(&self) -> TokenDtype {
        self.dtype
    }

    /// Checks that the type and the length match the output of this step.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they do not match.
    pub fn check_fits(&self, step: &LinearStep<'_>) -> Result<(), Error> {
        if self.dtype == step.sizes.dtype && self.out.len() == step.tokens() * step.sizes.n {
            return Ok(());
        }
        Err(Error::Invalid("this output was made for another step; make a new one for this step".into()))
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
    fn invalid_sizes_and_scales_are_refused_with_a_remedy() {
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
    fn a_step_needs_all_elements_of_its_tokens() {
        let layer = layer();
        let step = |tokens, elements, stride| {
            LinearStep::new(&layer, LinearInputs { tokens, x: vec![0; elements].into(), stride })
                .map(|_| ())
                .map_err(|e| e.to_string())
        };
        // The last token needs no gap after it.
        assert_eq!(step(3, 2 * 50 + 48, 50), Ok(()));
        assert_eq!(step(0, 0, 48), Ok(()));
        assert_eq!(step(3, 3 * 48 - 1, 48).unwrap_err(), "elements of the tokens: got 143, expected 144");
        assert!(step(1, 48, 47).unwrap_err().contains("row stride of the tokens is 47 elements, less than K = 48"));
        assert!(step(usize::MAX, 48, 48).is_err() && step(1 << 40, 48, 48).is_err());
    }

    #[test]
    fn steps_and_outputs_of_other_layers_are_refused() {
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
