//! Experts whose products are launched together, with the memory of their rows.

use kernels_gpu::lists::Lists;

use super::PlacedExperts;
use super::tokens::Tokens;
use super::workspace::RowMemory;
use crate::group::Address;

/// Experts whose products are launched together: the routed experts, or the shared one.
pub(super) struct Experts<'l> {
    pub placed: &'l PlacedExperts,
    pub memory: &'l RowMemory,
    /// Operands of the products.
    pub tokens: Tokens,
    /// Whether tokens name these experts, so that the lists give each row's token. Otherwise rows are tokens.
    pub is_routed: bool,
    /// Each expert's number of rows is rounded up to a multiple of this number.
    pub row_multiple: u32,
    /// Maximum tokens of a tile.
    pub tile_tokens: u32,
    /// Maximum number of rows.
    pub rows: u64,
    /// Expected number of rows, if tokens name all experts equally often.
    pub expected_rows: u64,
}

impl Experts<'_> {
    /// Number of experts.
    pub fn count(&self) -> u32 {
        self.memory.lists.experts
    }

    /// Returns the address of a list, by its offset.
    pub fn list(&self, offset: impl Fn(&Lists) -> u64) -> Address {
        self.memory.lists.at + offset(&self.memory.lists.offsets(self.row_multiple))
    }

    /// Returns the address of the result of a product: the intermediate for 0, the rows of down for 1.
    pub fn result(&self, index: usize) -> Address {
        [self.memory.intermediate, self.memory.rows][index]
    }
}
