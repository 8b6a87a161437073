//! Reads the 16-bit tokens of a whole layer from a safetensors file: `hidden` `[T, H]`, and `token_ids` `[T]` for a router
//! that chooses experts by token ids.

use std::path::Path;

use super::activations::{HIDDEN, part};
use super::file::TensorFile;
use super::floats::{self, Floats};
use super::moe::integers;
use super::{Dtype, place};
use nvfp4_core::Error;
use nvfp4_core::problem::TokenDtype;

/// Name of the ids of tokens.
const TOKEN_IDS: &str = "token_ids";

const CONTENT: &str = "the file must contain hidden [T, H], one row per token";

/// Tokens of an MoE layer or a linear layer, unquantized.
#[derive(Debug)]
pub struct HiddenStates {
    file: TensorFile,
    sizes: [usize; 2],
}

impl HiddenStates {
    /// Opens a file with `hidden` `[T, H]` in f32, f16 or bf16.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing or has another type or shape.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = TensorFile::open(path)?;
        let hidden = part(&file, HIDDEN, &floats::DTYPES, CONTENT)?;
        let sizes = <[usize; 2]>::try_from(hidden.shape).map_err(|_| {
            let error = Error::Shape { got: hidden.shape.to_vec(), expected: "[T, H]".into() };
            error.at(place(path, HIDDEN))
        })?;
        Ok(Self { file, sizes })
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.sizes[0]
    }

    /// The file's 16-bit type; `None` if the numbers are f32.
    pub fn dtype(&self) -> Option<TokenDtype> {
        match self.file.tensor(HIDDEN)?.dtype {
            Dtype::F16 => Some(TokenDtype::F16),
            Dtype::BF16 => Some(TokenDtype::Bf16),
            _ => None,
        }
    }

    /// Returns the id of each token.
    ///
    /// # Errors
    /// Returns an error if the file has no `token_ids`, or they have another type or number.
    pub fn token_ids(&self) -> Result<Vec<i32>, Error> {
        const CONTENT: &str = "the layer's router chooses experts by token ids; add token_ids [T], i32 or i64";
        let dtypes = [Dtype::I32, Dtype::I64];
        let tensor = part(&self.file, TOKEN_IDS, &dtypes, CONTENT)?;
        if tensor.shape != [self.tokens()] {
            let expected = format!("[{}], one id per token", self.tokens());
            let error = Error::Shape { got: tensor.shape.to_vec(), expected };
            return Err(error.at(place(self.file.path(), TOKEN_IDS)));
        }
        Ok(integers(tensor).expect("`part` checked the type"))
    }

    /// Returns the bits of all tokens, rounded to `dtype` to nearest even if the file has another type.
    ///
    /// # Errors
    /// Returns an error if a token has another width than `width`, a number is NaN or infinite in `dtype`, or the file
    /// changed since it was opened.
    pub fn bits(&self, width: usize, dtype: TokenDtype) -> Result<Vec<u16>, Error> {
        let at = |error: Error| error.at(place(self.file.path(), HIDDEN));
        if self.sizes[1] != width {
            let what = "elements per token (the layer's hidden size, or K of the weight)";
            return Err(at(Error::Mismatch { what, got: self.sizes[1], expected: width }));
        }
        let numbers = self.file.tensor(HIDDEN).and_then(Floats::of).expect("`open` checked this tensor");
        let count = self.sizes[0] * width;
        let bits: Vec<u16> = (0..count).map(|index| dtype.round_f32(numbers.at(index))).collect();
        if let Some(index) = bits.iter().position(|&bits| !dtype.decode(bits).is_finite()) {
            let (token, value) = (index / width, numbers.at(index));
            let what = format!("element {} of token {token} is {value}, not a finite {}", index % width, dtype.name());
            return Err(at(Error::Invalid(format!("{what}; use finite numbers, or --dtype bf16 for large ones"))));
        }
        self.file.check_unchanged()?;
        Ok(bits)
    }
}
