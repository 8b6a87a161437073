//! Biases, which are added to a product: one number per column.

use std::borrow::Cow;

use crate::error::Error;
use crate::problem::TokenDtype;

/// The N biases of a projection `[N, K]`. They are added in f32 to the scaled product before all other operations.
#[derive(Clone, Debug, PartialEq)]
pub enum Bias<'a> {
    /// Biases in f32.
    F32(Cow<'a, [f32]>),
    /// Bits of the token type, as stored in checkpoints.
    Token(Cow<'a, [u16]>),
}

impl Bias<'_> {
    /// N: number of biases.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(numbers) => numbers.len(),
            Self::Token(bits) => bits.len(),
        }
    }

    /// Whether there are no biases.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The biases as exact numbers, for tokens of type `dtype`.
    pub fn numbers(&self, dtype: TokenDtype) -> Cow<'_, [f32]> {
        match self {
            Self::F32(numbers) => Cow::Borrowed(numbers),
            Self::Token(bits) => bits.iter().map(|&bits| dtype.decode(bits) as f32).collect(),
        }
    }

    /// Checks that there are `rows` biases, one per row of the weights, and that they are finite.
    ///
    /// # Errors
    /// [`Error::Mismatch`] with both numbers, or [`Error::Invalid`] with the first bias that is not finite.
    pub fn check(&self, dtype: TokenDtype, rows: usize) -> Result<(), Error> {
        if self.len() != rows {
            return Err(Error::Mismatch { what: "biases", got: self.len(), expected: rows });
        }
        match self.numbers(dtype).iter().position(|number| !number.is_finite()) {
            None => Ok(()),
            Some(row) => {
                let number = self.numbers(dtype)[row];
                Err(Error::Invalid(format!(
                    "bias {row} is {number}; a bias must be a finite number of the layer's type"
                )))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bit_biases_are_of_the_token_type() {
        let bias = Bias::Token(vec![0x3F80, 0xC000].into());
        assert_eq!(*bias.numbers(TokenDtype::Bf16), [1.0, -2.0]);
        assert_eq!(*bias.numbers(TokenDtype::F16), [1.875, -2.0]);
        assert_eq!(*Bias::F32(vec![0.1].into()).numbers(TokenDtype::F16), [0.1]);
    }

    #[test]
    fn wrong_lengths_and_infinities_are_refused() {
        let text = |bias: Bias<'_>, rows| bias.check(TokenDtype::F16, rows).unwrap_err().to_string();
        assert_eq!(text(Bias::F32(vec![0.0; 3].into()), 4), "biases: got 3, expected 4");
        assert!(text(Bias::F32(vec![0.0, f32::NAN].into()), 2).starts_with("bias 1 is NaN"));
        assert!(text(Bias::Token(vec![0x7C00].into()), 1).starts_with("bias 0 is inf"));
        assert!(Bias::Token(vec![0x7C00].into()).check(TokenDtype::Bf16, 1).is_ok(), "0x7C00 is a finite bf16");
    }
}
