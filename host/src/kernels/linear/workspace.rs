//! What the first launch of a call leaves to the second: a function of sizes alone.

use kernels_gpu::sorted::ROW_MULTIPLE;

use crate::kernels::group::Address;
use crate::kernels::launch::ALIGNMENT;
use crate::kernels::moe::{Nvfp4Rows, SortedRows};
use crate::kernels::nvfp4_products::most_token_tiles;
use crate::linear::LinearSizes;
use crate::problem::TokenFormat;

/// The most tokens of a call that leaves some: their rows, filled up to a multiple, are counted in 32 bits.
pub(crate) const MAX_TOKENS: usize = (u32::MAX - ROW_MULTIPLE) as usize;

/// Tokens as they are multiplied, if not as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Workspace {
    None,
    Fp8(SortedRows),
    Nvfp4(Nvfp4Rows),
}

impl Workspace {
    /// The workspace of a call with so many tokens, for whose parts `place` finds room, a multiple of [`ALIGNMENT`]. It is given the bytes
    /// of each. For more tokens than a call may have it is that of the most.
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

    /// As [`Workspace::new`], one part behind the other from an address on; with where they end.
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
    use crate::problem::TokenDtype;

    fn sizes(k: usize, token_format: TokenFormat) -> LinearSizes {
        LinearSizes { n: 32, k, dtype: TokenDtype::Bf16, bias: false, token_format }
    }

    #[test]
    fn parts_of_the_workspace_do_not_overlap_and_end_with_it() {
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

    /// A caller allocates it once for all batches up to a size.
    #[test]
    fn fewer_tokens_never_need_more() {
        for format in TokenFormat::ALL {
            let end = |tokens| Workspace::at(&sizes(464, format), tokens, 0).1;
            assert!((0..600).all(|tokens| end(tokens) <= end(tokens + 1)), "{format:?}");
            assert_eq!(end(usize::MAX), end(MAX_TOKENS));
        }
    }
}
