//! Chunks of a call, and the size of the workspace: a call whose workspace would be too large is computed in chunks.

use super::MoeArguments;
use super::workspace::Workspace;
use crate::launch::take;
use nvfp4_core::Error;
use nvfp4_core::moe::MoeSizes;

/// Upper bound of the workspace's size in bytes. Tokens that need more are computed in chunks. Each chunk reads all weights
/// again. With this bound, 8192 tokens of DeepSeek-R1 or Kimi-K2 under TP 8 or EP 8 are one chunk.
const MOST_BYTES: u64 = 2_048_000_000;

/// Returns the chunks of a call in order, each with its first token. There is more than one only if the workspace of all
/// tokens would be too large.
///
/// # Errors
/// If the arguments are not aligned, or weights are on the input of a layer with more than one expert per token.
pub fn chunks(
    sizes: &MoeSizes,
    arguments: &MoeArguments,
) -> Result<impl Iterator<Item = (usize, MoeArguments)>, Error> {
    arguments.check(sizes)?;
    let (sizes, arguments) = (*sizes, *arguments);
    let (all, most) = (arguments.token_count, chunk_tokens(&sizes, arguments.token_count));
    Ok((0..all).step_by(most).map(move |first| (first, arguments.part(&sizes, first, most.min(all - first)))))
}

/// Returns the bytes of the workspace of a chunk.
fn bytes(sizes: &MoeSizes, tokens: usize) -> u64 {
    let mut end = 0;
    Workspace::new(sizes, tokens, |bytes| take(&mut end, bytes));
    end
}

/// Whether the workspace of a chunk stays below [`MOST_BYTES`].
fn fits(sizes: &MoeSizes, tokens: usize) -> bool {
    (tokens as u64) < MOST_BYTES && bytes(sizes, tokens) < MOST_BYTES
}

/// Returns the maximum number of tokens whose workspace stays below [`MOST_BYTES`], at least 1.
fn most_tokens(sizes: &MoeSizes) -> usize {
    let (mut most, mut too_many) = (1, MOST_BYTES as usize);
    while too_many - most > 1 {
        let middle = usize::midpoint(most, too_many);
        *(if fits(sizes, middle) { &mut most } else { &mut too_many }) = middle;
    }
    most
}

/// Returns the number of tokens of each chunk but the last one, at least 1: as few chunks as the workspace allows, of nearly
/// equal sizes.
fn chunk_tokens(sizes: &MoeSizes, tokens: usize) -> usize {
    if fits(sizes, tokens) {
        return tokens.max(1);
    }
    tokens.div_ceil(tokens.div_ceil(most_tokens(sizes)))
}

/// Returns the bytes of the workspace for calls of a layer with up to `max_tokens` tokens, less than 2048 MB. Layers whose
/// calls follow each other on a stream can share the largest of their workspaces.
///
/// ```
/// use nvfp4_kernels::moe::workspace_bytes;
/// use nvfp4_core::moe::{Activation, MoeSizes};
/// use nvfp4_core::problem::{TokenDtype, TokenFormat};
///
/// let mixtral = MoeSizes {
///     hidden: 4096,
///     intermediate: 14336,
///     experts: 8,
///     named_experts: 8,
///     top_k: 2,
///     shared_intermediate: None,
///     dtype: TokenDtype::Bf16,
///     activation: Activation::Silu,
///     biases: false,
///     token_format: TokenFormat::Bits16,
///     input_scales: false,
/// };
/// assert_eq!(workspace_bytes(&mixtral, 1), 82_176);
/// assert!(workspace_bytes(&mixtral, 1 << 20) < 2_048_000_000);
/// ```
pub fn workspace_bytes(sizes: &MoeSizes, max_tokens: usize) -> usize {
    bytes(sizes, max_tokens.min(most_tokens(sizes))) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::workspace::tests::sizes;
    use nvfp4_core::problem::TokenFormat;

    #[test]
    fn chunks_stay_below_the_bound_and_are_as_few_as_possible() {
        let layers = [
            sizes(2048, 768, 128, 8, None),
            sizes(4096, 14336, 8, 2, None),
            sizes(7168, 2048, 32, 8, Some(2048)),
            sizes(1 << 20, 1 << 20, 512, 32, Some(1 << 20)),
            sizes(16, 16, 1, 1, None),
        ];
        let formats = |sizes| TokenFormat::ALL.map(|token_format| MoeSizes { token_format, ..sizes });
        for sizes in layers.into_iter().flat_map(formats) {
            for tokens in [0, 1, 2, 100, 8191, 8192, 65_537, 1 << 20] {
                let chunk = chunk_tokens(&sizes, tokens);
                let chunks = tokens.div_ceil(chunk);
                // Each expert's rows are rounded up to eight, so one token of the largest layer exceeds the bound.
                let alone = chunk == 1 && (sizes.token_format, sizes.hidden) == (TokenFormat::Fp8, 1 << 20);
                assert!(alone || bytes(&sizes, chunk) < MOST_BYTES, "{sizes:?} {tokens}");
                assert!(chunks * chunk >= tokens && chunks * chunk < tokens.max(1) + chunks.max(1));
                assert!(workspace_bytes(&sizes, tokens) as u64 >= bytes(&sizes, chunk.min(tokens)));
                assert!(workspace_bytes(&sizes, tokens + 1) >= workspace_bytes(&sizes, tokens));
                let one_less = tokens.div_ceil(chunks.max(2) - 1);
                assert!(chunks <= 1 || bytes(&sizes, one_less) >= MOST_BYTES, "as few as possible");
            }
        }
    }
}
