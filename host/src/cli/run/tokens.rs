//! Tokens in and outputs out for `nvfp4 run --op moe` and `--op linear`: `--activations` and `--output`.

use nvfp4::checkpoint::{Checkpoint, HiddenStates, OutputFile, check_file, refuse_input};
use nvfp4::linear::generate;
use nvfp4::problem::TokenDtype;

use super::args::Args;
use crate::cli::leftovers::note_leftovers;

/// Tokens of a checkpoint's layer: from a file, or generated from the seed.
pub struct Tokens {
    file: Option<HiddenStates>,
    /// Type of tokens and output.
    pub dtype: TokenDtype,
    /// Number of tokens.
    pub count: usize,
    /// Generator or file of the numbers.
    pub source: String,
}

impl Tokens {
    /// Opens the file of --activations, or describes what will be generated. The type is --out-dtype, or
    /// else the file's type, or else bf16.
    ///
    /// # Errors
    /// Returns an error if the file has no tokens in a known form.
    pub fn of(args: &Args, default_count: usize) -> anyhow::Result<Self> {
        let file = args.activations.as_deref().map(HiddenStates::open).transpose()?;
        let of_file = file.as_ref().and_then(HiddenStates::dtype);
        Ok(Self {
            dtype: args.out_dtype.or(of_file).unwrap_or(TokenDtype::Bf16),
            count: file.as_ref().map_or(args.tokens.unwrap_or(default_count), HiddenStates::tokens),
            source: match &file {
                Some(file) => file.path().display().to_string(),
                None => args.input.unwrap_or_default().name().into(),
            },
            file,
        })
    }

    /// Returns the ids of the tokens, for a router that chooses experts by ids below `vocabulary`. Generated tokens have the
    /// ids 0, 1, 2 and so on.
    ///
    /// # Errors
    /// Returns an error if the file has no ids.
    pub fn ids(&self, vocabulary: usize) -> anyhow::Result<Vec<i32>> {
        Ok(match &self.file {
            Some(file) => file.token_ids()?,
            None => (0..self.count).map(|token| (token % vocabulary.max(1)) as i32).collect(),
        })
    }

    /// Returns the bits of all tokens of `width` elements.
    ///
    /// # Errors
    /// Returns an error if the file's tokens have another width, or a number does not fit the type.
    pub fn bits(&self, args: &Args, width: usize) -> anyhow::Result<Vec<u16>> {
        Ok(match &self.file {
            Some(file) => file.bits(width, self.dtype)?,
            None => {
                let generator = args.input.unwrap_or_default();
                generate::inputs(generator, self.count, width, self.dtype, args.seed)?.x.into_owned()
            }
        })
    }
}

/// Creates the file of --output, before the computation.
///
/// # Errors
/// Returns an error if the path is an input or cannot be written.
pub fn output_file(
    args: &Args,
    checkpoint: Option<&Checkpoint>,
    dtype: TokenDtype,
    sizes: [usize; 2],
) -> anyhow::Result<Option<OutputFile>> {
    let Some(path) = &args.output else { return Ok(None) };
    let inputs = checkpoint.into_iter().flat_map(Checkpoint::paths).chain(args.activations.as_deref());
    refuse_input(path, inputs)?;
    check_file(path)?;
    note_leftovers(path);
    Ok(Some(OutputFile::of_rows(path, dtype, sizes)?))
}
