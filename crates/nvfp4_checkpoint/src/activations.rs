//! Reads the activations of a step from a safetensors file: `hidden` `[T, K]` and `group_sizes` `[E]`.

use std::path::Path;

use super::file::{Tensor, TensorFile};
use super::floats::{self, Floats};
use super::{Dtype, place};
use nvfp4_core::Error;
use nvfp4_core::format::{BLOCK, Matrix};
use nvfp4_core::quantize::global_scale_for;

/// Name of the tokens in the file.
pub(super) const HIDDEN: &str = "hidden";
const GROUP_SIZES: &str = "group_sizes";

const CONTENT: &str = "an activations file must contain hidden [T, K] and group_sizes [E]";

/// Unquantized tokens of all experts, sorted by expert.
#[derive(Debug)]
pub struct Activations {
    file: TensorFile,
    group_sizes: Vec<usize>,
    k: usize,
}

impl Activations {
    /// Opens a file with `hidden` `[T, K]` in f32, f16 or bf16, and `group_sizes` `[E]` in i64: the number of tokens
    /// per expert, in the order of the rows of `hidden`.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing or has the wrong type or shape, or the group sizes are negative or do
    /// not sum to T.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = TensorFile::open(path)?;
        let hidden = part(&file, HIDDEN, &floats::DTYPES, CONTENT)?;
        let (tokens, k) = match *hidden.shape {
            [tokens, k] if k > 0 && k.is_multiple_of(BLOCK) => Ok((tokens, k)),
            [_, k] => Err(Error::BlockAlignment { k }),
            _ => Err(Error::Shape { got: hidden.shape.to_vec(), expected: "[T, K]".into() }),
        }
        .map_err(|error| error.at(place(path, HIDDEN)))?;
        let sizes = part(&file, GROUP_SIZES, &[Dtype::I64], CONTENT)?;
        let group_sizes = group_sizes(sizes, tokens).map_err(|error| error.at(place(path, GROUP_SIZES)))?;
        Ok(Self { file, group_sizes, k })
    }

    /// Number of tokens per expert.
    pub fn group_sizes(&self) -> &[usize] {
        &self.group_sizes
    }

    /// Number of elements per token.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Quantizes the tokens of each expert with the input scale of the expert. Experts without an input scale use one
    /// global scale for all of `hidden`.
    ///
    /// # Errors
    /// Returns an error if the number of input scales differs from the number of groups, or `hidden` contains NaN or an
    /// infinity.
    pub fn quantize(&self, input_scales: &[Option<f32>]) -> Result<Vec<Matrix<'static>>, Error> {
        let path = self.file.path();
        let (got, expected) = (self.group_sizes.len(), input_scales.len());
        if got != expected {
            let error = Error::Mismatch { what: "number of token groups (one per expert)", got, expected };
            return Err(error.at(place(path, GROUP_SIZES)));
        }
        let hidden = self.file.tensor(HIDDEN).and_then(Floats::of).expect("`open` checked this tensor");
        let at_hidden = |error: Error| error.at(place(path, HIDDEN));
        let global = global_scale_for(hidden.amax().map_err(at_hidden)?);
        let mut end = 0;
        let groups = self.group_sizes.iter().zip(input_scales).map(|(&m, input_scale)| {
            let rows = end..end + m;
            end = rows.end;
            hidden.quantize_rows(rows, self.k, input_scale.unwrap_or(global)).map_err(at_hidden)
        });
        let groups = groups.collect::<Result<_, _>>()?;
        self.file.check_unchanged()?;
        Ok(groups)
    }
}

/// Returns a tensor of one of `dtypes`; `content` says what the file must contain.
pub(super) fn part<'a>(file: &'a TensorFile, name: &str, dtypes: &[Dtype], content: &str) -> Result<Tensor<'a>, Error> {
    let at = |error: Error| error.at(place(file.path(), name));
    let missing = || at(Error::Missing { name: "this tensor".into(), remedy: content.into() });
    let tensor = file.tensor(name).ok_or_else(missing)?;
    if !dtypes.contains(&tensor.dtype) {
        return Err(at(Error::Dtype { got: tensor.dtype, expected: dtypes.to_vec(), remedy: "convert the tensor" }));
    }
    Ok(tensor)
}

/// Returns the group sizes; they must be at least 0 and sum to `tokens`.
fn group_sizes(sizes: Tensor<'_>, tokens: usize) -> Result<Vec<usize>, Error> {
    if sizes.shape.len() != 1 {
        return Err(Error::Shape { got: sizes.shape.to_vec(), expected: "[E]".into() });
    }
    let mut sum = 0usize;
    let mut group_sizes = Vec::new();
    for (group, &size) in sizes.numbers::<i64>().iter().enumerate() {
        let invalid = || {
            Error::Invalid(format!("group {group} has {size} tokens; each size must be a number of rows of `hidden`"))
        };
        let size = usize::try_from(size).map_err(|_| invalid())?;
        sum = sum.checked_add(size).ok_or_else(invalid)?;
        group_sizes.push(size);
    }
    if sum != tokens {
        return Err(Error::Mismatch {
            what: "sum of the group sizes (must equal the rows of `hidden`)",
            got: sum,
            expected: tokens,
        });
    }
    Ok(group_sizes)
}
