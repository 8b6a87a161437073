//! The memory in which the launches of an MoE layer leave results to later launches: a function of sizes alone.

use kernels_gpu::lists::Lists;
use kernels_gpu::sorted::{ROW_MULTIPLE, bits16_bytes, most_rows};

use super::kernels::TilePlan;
use super::tokens::{Nvfp4Rows, SortedRows, Tokens};
use crate::group::Address;
use crate::launch::take;
use crate::nvfp4_products::most_token_tiles;
use crate::products::may_be_sorted;
use nvfp4_core::Error;
use nvfp4_core::moe::MoeSizes;
use nvfp4_core::problem::TokenFormat;

/// Reads bytes of the device's memory.
pub(super) type Read<'r> = dyn FnMut(Address, usize) -> Result<Vec<u8>, Error> + 'r;

/// Memory of a chunk of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workspace {
    /// Rows of the experts that tokens name.
    pub routed: RowMemory,
    /// Rows of the shared expert, if there is one.
    pub shared: Option<RowMemory>,
}

/// Memory of experts' rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowMemory {
    pub lists: PlacedLists,
    /// Operands of the products. The memory has room for 16-bit tokens in the order of K and for sorted rows; see
    /// [`RowMemory::tokens_of`].
    pub tokens: Tokens,
    /// Number of columns of the intermediate, I.
    pub width: u32,
    /// Result of gate and up, `[rows, I]`. 16-bit operands of down have their columns in the order of K, and may be sorted
    /// ([`sorted`](kernels_gpu::sorted)).
    pub intermediate: Address,
    /// Result of down, `[rows, H]`; before down, sorted 16-bit tokens.
    pub rows: Address,
    /// Number of rows that both have room for.
    pub capacity: u32,
}

/// Lists and their address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedLists {
    pub at: Address,
    choices: u64,
    /// Number of experts.
    pub experts: u32,
}

impl PlacedLists {
    /// Returns the offsets of lists in which each expert's number of rows is rounded up to a multiple of `row_multiple`.
    pub fn offsets(&self, row_multiple: u32) -> Lists {
        Lists::filled(self.choices, self.experts, row_multiple)
    }
}

/// Numbers of the rows of experts.
struct RowCounts {
    /// Number of (token, expert) pairs.
    choices: u64,
    /// Number of experts.
    experts: u32,
    /// Number of experts that tokens can name.
    named_experts: u64,
    /// Number of columns of the intermediate, I.
    width: usize,
    /// Whether a kernel may sort 16-bit rows.
    may_be_sorted: bool,
}

impl RowMemory {
    /// Returns the memory of experts' rows. `bits16_tokens` returns the address of 16-bit tokens in the order of K.
    fn new<P: FnMut(u64) -> Address>(
        sizes: &MoeSizes,
        of: &RowCounts,
        place: &mut P,
        bits16_tokens: impl FnOnce(&mut P) -> Address,
    ) -> Self {
        let &RowCounts { choices, experts, named_experts, width, may_be_sorted } = of;
        let format = sizes.token_format;
        let is_sorted = may_be_sorted && format == TokenFormat::Bits16;
        let row_multiple = if is_sorted || format == TokenFormat::Fp8 { ROW_MULTIPLE } else { 1 };
        let rows = most_rows(choices, experts, row_multiple);
        let result = |width: usize| {
            if is_sorted { bits16_bytes(rows, width as u32) } else { rows * (size_of::<u16>() * width) as u64 }
        };
        let at = place(Lists::filled(choices, experts, row_multiple).bytes);
        let bits16_tokens = if format == TokenFormat::Bits16 { bits16_tokens(place) } else { 0 };
        let (intermediate, rows_of_down) = (place(result(width)), place(result(sizes.hidden)));
        let widths = [sizes.hidden, width].map(|width| width as u32);
        let tokens = match format {
            TokenFormat::Bits16 => Tokens::Bits16 { tokens: bits16_tokens },
            TokenFormat::Fp8 => Tokens::Fp8(widths.map(|k| SortedRows::new(rows, k, place))),
            TokenFormat::Nvfp4 => {
                let tiles = most_token_tiles(choices, experts.into(), named_experts);
                Tokens::Nvfp4(widths.map(|k| Nvfp4Rows::new(rows, tiles, k, place)))
            }
        };
        Self {
            lists: PlacedLists { at, choices, experts },
            tokens,
            width: width as u32,
            intermediate,
            rows: rows_of_down,
            capacity: rows as u32,
        }
    }

    /// Returns the operands of the products with tiles of a plan.
    pub fn tokens_of(&self, plan: TilePlan) -> Tokens {
        if plan.are_sorted { Tokens::Bits16Sorted { capacity: self.capacity } } else { self.tokens }
    }
}

impl Workspace {
    /// Returns the workspace of a chunk of `tokens` tokens. `place` returns an address for a number of bytes, a multiple of
    /// [`ALIGNMENT`](crate::launch::ALIGNMENT). The order of the parts is always the same.
    pub fn new(sizes: &MoeSizes, tokens: usize, mut place: impl FnMut(u64) -> Address) -> Self {
        let (choices, named_experts) = ((tokens * sizes.top_k) as u64, sizes.named_experts as u64);
        let tokens = tokens as u64;
        let token_bytes = tokens * (size_of::<u16>() * sizes.hidden) as u64;
        let routed = RowCounts {
            choices,
            experts: sizes.experts as u32,
            named_experts,
            width: sizes.intermediate,
            may_be_sorted: may_be_sorted(choices, named_experts),
        };
        let of_routed = RowMemory::new(sizes, &routed, &mut place, |place| place(token_bytes));
        let shared = sizes.shared_intermediate.map(|width| {
            let may_be_sorted = routed.may_be_sorted || may_be_sorted(tokens, 1);
            let shared = RowCounts { choices: tokens, experts: 1, named_experts: 1, width, may_be_sorted };
            // Weights may be on the input of the routed experts only if k = 1. Otherwise the tokens are the same.
            let own_tokens = sizes.top_k == 1;
            RowMemory::new(sizes, &shared, &mut place, |place| {
                if own_tokens { place(token_bytes) } else { of_routed.tokens.in_order() }
            })
        });
        Self { routed: of_routed, shared }
    }

    /// Returns a workspace whose parts follow each other from an address on.
    pub fn at(sizes: &MoeSizes, tokens: usize, address: Address) -> Self {
        let mut end = address;
        Self::new(sizes, tokens, |bytes| take(&mut end, bytes))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::launch::ALIGNMENT;
    use crate::moe::workspace_bytes;
    use nvfp4_core::moe::Activation;
    use nvfp4_core::problem::TokenDtype;

    pub fn sizes(hidden: usize, intermediate: usize, experts: usize, top_k: usize, shared: Option<usize>) -> MoeSizes {
        let (named_experts, shared_intermediate, dtype) = (experts, shared, TokenDtype::Bf16);
        let (activation, biases) = (Activation::Silu, false);
        let token_format = TokenFormat::Bits16;
        MoeSizes {
            hidden,
            intermediate,
            experts,
            named_experts,
            top_k,
            shared_intermediate,
            dtype,
            activation,
            biases,
            token_format,
            input_scales: false,
        }
    }

    #[test]
    fn parts_follow_each_other_up_to_the_end() {
        // Lists, tokens, intermediate and rows; FP8 has codes and scales twice, NVFP4 two kinds of scales.
        for (shared, token_format, parts_of) in [
            (None, TokenFormat::Bits16, 4),
            (Some(48), TokenFormat::Bits16, 7),
            (None, TokenFormat::Fp8, 7),
            (Some(48), TokenFormat::Fp8, 14),
            (None, TokenFormat::Nvfp4, 9),
            (Some(48), TokenFormat::Nvfp4, 18),
        ] {
            let sizes = MoeSizes { token_format, ..sizes(2880, 720, 512, 4, shared) };
            for tokens in [0, 1, 7, 1000] {
                let mut parts = Vec::new();
                let mut end = 0x1000;
                let placed = Workspace::new(&sizes, tokens, |bytes| {
                    parts.push((end, bytes));
                    take(&mut end, bytes)
                });
                assert_eq!(parts.len(), parts_of);
                assert!(parts.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
                assert!(parts.iter().all(|(at, _)| at.is_multiple_of(ALIGNMENT)));
                assert_eq!(placed, Workspace::at(&sizes, tokens, 0x1000));
                assert_eq!(end - 0x1000, workspace_bytes(&sizes, tokens) as u64);
            }
        }
    }
}
