//! Layers and steps generated from a seed. The same seed gives the same bytes for any number of threads, and a token
//! the same numbers for any M.

use rayon::prelude::*;

use super::{LinearInputs, LinearSizes, LinearWeights};
use crate::error::Error;
use crate::generate::{Generator, Role, matrix};
use crate::moe::generate::token_numbers;
use crate::problem::{TokenDtype, TokenFormat};

/// Generates a layer `[N, K]` for tokens of type `dtype`.
///
/// # Errors
/// If the sizes are invalid.
pub fn weights(
    generator: Generator,
    n: usize,
    k: usize,
    dtype: TokenDtype,
    seed: u64,
) -> Result<LinearWeights<'static>, Error> {
    LinearSizes { n, k, dtype, bias: false, token_format: TokenFormat::Bits16 }.check()?;
    LinearWeights::new(dtype, matrix(generator, Role::Down, 0, n, k, seed)?)
}

/// Generates the inputs of a step with `tokens` tokens for a layer with K columns.
///
/// # Errors
/// [`Error::TooLarge`] if the number of elements exceeds the address space.
pub fn inputs(
    generator: Generator,
    tokens: usize,
    k: usize,
    dtype: TokenDtype,
    seed: u64,
) -> Result<LinearInputs<'static>, Error> {
    let elements = tokens.checked_mul(k).filter(|&all| all < isize::MAX as usize / 4).ok_or(Error::TooLarge)?;
    let mut x = vec![0u16; elements];
    x.par_chunks_mut(k.max(1)).enumerate().for_each(|(token, out)| token_numbers(generator, dtype, seed, token, out));
    Ok(LinearInputs { tokens, x: x.into(), stride: k })
}
