//! Memory that a call's first launch writes and its second launch reads: a function of sizes alone.

use kernels_gpu::sorted::ROW_MULTIPLE;

use crate::group::Address;
use crate::launch::ALIGNMENT;
use crate::moe::{Nvfp4Rows, SortedRows};
use crate::nvfp4_products::most_token_tiles;
use nvfp4_core::linear::LinearSizes;
use nvfp4_core::problem::TokenFormat;

/// Maximum number of tokens of a call with FP8 or NVFP4 tokens: their number, rounded up to [`ROW_MULTIPLE`], must fit
/// 32 bits.
pub const MAX_TOKENS: usize = (u32::MAX - ROW_MULTIPLE) as usize;

/// Quantized tokens of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workspace {
    /// 16-bit tokens are multiplied unchanged.
    None,
    /// Tokens in FP8.
    Fp8(SortedRows),
    /// Tokens in NVFP4.
    Nvfp4(Nvfp4Rows),
}

impl Workspace {
    /// Creates the workspace of a call with `tokens` tokens; a larger number counts as [`MAX_TOKENS`]. `place`
    /// allocates each part: it takes the number of bytes and returns an address, a multiple of [`ALIGNMENT`].
    pub fn new(sizes: &LinearSizes, tokens: usize, mut place: impl FnMut(u64) -> Address) -> Self {
        let (tokens, k) = (tokens.min(MAX_TOKENS) as u64, sizes.k as u32);
        match sizes.token_format {
            TokenFormat::Bits16 => Self::None,
            TokenFormat::Fp8 => {
                let capacity = tokens.next_multiple_of(ROW_MULTIPLE.into());
                Self::Fp8(SortedRows::new(capacity, k, &mut place))
            }
            TokenFormat::Nvfp4 => {
                let tiles = most_token_tiles(tokens, 1, 1);
                Self::Nvfp4(Nvfp4Rows::new(tokens, tiles, k, &mut place))
            }
        }
    }

    /// Like [`Workspace::new`], with consecutive parts from an address upward. Returns the end of the last part too.
    pub fn at(sizes: &LinearSizes, tokens: usize, address: Address) -> (Self, Address) {
        let mut end = address;
        let workspace = Self::new(sizes, tokens, |bytes| {
            let at = end;
            end = (at + bytes).next_multiple_of(ALIGNMENT);
            at
        });
        (workspace, end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_core::problem::TokenDtype;

    fn sizes(k: usize, token_format: TokenFormat) -> LinearSizes {
        LinearSizes { n: 32, k, dtype: TokenDtype::Bf16, bias: false, token_format }
    }

    #[test]
    fn workspace_parts_do_not_overlap() {
        for (format, count) in TokenFormat::ALL.into_iter().zip([0, 2, 3]) {
            for (tokens, k) in [(1, 16), (9, 176), (300, 7168)] {
                let mut parts = Vec::new();
                let mut end = 0x1000;
                let placed = Workspace::new(&sizes(k, format), tokens, |bytes| {
                    parts.push((end, bytes));
                    end = (end + bytes).next_multiple_of(ALIGNMENT);
                    parts.last().unwrap().0
                });
                assert!(parts.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0) && parts.len() == count);
                assert_eq!((placed, end), Workspace::at(&sizes(k, format), tokens, 0x1000));
            }
        }
    }

    /// A caller allocates the workspace once for all batches up to a size.
    #[test]
    fn fewer_tokens_never_need_a_larger_workspace() {
        for format in TokenFormat::ALL {
            let end = |tokens| Workspace::at(&sizes(464, format), tokens, 0).1;
            assert!((0..600).all(|tokens| end(tokens) <= end(tokens + 1)), "{format:?}");
            assert_eq!(end(usize::MAX), end(MAX_TOKENS));
        }
    }
}
