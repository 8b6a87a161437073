//! Work of a kernel of this design: the source of its tiles, and the operation on their sums.

use core::ops::Deref;

use crate::{
    nvfp4_blocks::QuantizedTile,
    tcgen05::gated_sm100::abi::{Group, Instance, N_STEP, Tile},
};

/// A lane's sums of 8 tokens, per matrix. The plain kernel has one matrix, and zeros in place of the other.
pub type Sums = [[f32; N_STEP as usize]; 2];

/// A group whose rows may be a part of the rows of its tensor maps.
#[derive(Clone, Copy)]
pub struct Placed {
    /// Group.
    pub group: Group,
    /// First token of the group in the tensor map of tokens.
    pub token_row: u32,
    /// First tile of tokens of the group in the tokens' scales.
    pub token_tile: u32,
    /// First row of the group in each tensor map of weights.
    pub weight_rows: [u32; 2],
}

impl Deref for Placed {
    type Target = Group;

    #[inline(always)]
    fn deref(&self) -> &Group {
        &self.group
    }
}

/// Computation of a launch's CTAs, for one instance of the kernel.
pub trait Work: Copy {
    /// Instance that is compiled.
    const INSTANCE: Instance;

    /// Whether tensor maps lie in global memory instead of the parameter.
    const MAPS_IN_MEMORY: bool;

    /// Whether [`Work::tiles`] may be called before [`Work::wait`].
    const AT_ONCE: bool;

    /// Group in the form of the tiles' source: a copy, whose fields stay in registers.
    type Group: Copy;

    /// Tiles of a CTA, each with its group.
    type Tiles: Iterator<Item = (Tile, Self::Group)>;

    /// A lane's data of its column of C.
    type Column: Copy;

    /// A lane's data of 8 tokens.
    type Tokens: Copy;

    /// Waits for earlier grids, if this grid may start before they have ended.
    fn wait();

    /// Returns every `stride`-th tile from index `next` on.
    ///
    /// # Safety
    /// The contract of the kernel holds. Earlier grids were waited for ([`wait`](Self::wait)), unless
    /// [`AT_ONCE`](Self::AT_ONCE).
    unsafe fn tiles(self, next: u32, stride: u32) -> Self::Tiles;

    /// Returns a group with its rows of the tensor maps.
    fn placed(group: Self::Group) -> Placed;

    /// Format of C.
    fn output(self) -> u32;

    /// Whether C is written in 16-bit numbers.
    #[inline(always)]
    fn writes_bits16(self) -> bool {
        true
    }

    /// Returns the destination of a tile of C in NVFP4, if it has one. The tile's columns are then a multiple of 16.
    ///
    /// # Safety
    /// The requirements of [`Work::tiles`]. The tile is one of these tiles, and `group` is its group.
    #[inline(always)]
    unsafe fn quantized(self, _tile: &Tile, _group: &Placed) -> QuantizedTile {
        QuantizedTile::NONE
    }

    /// Returns a lane's data of a column of a tile's group. The column may be past the last one.
    ///
    /// # Safety
    /// The requirements of [`Work::tiles`]. The tile is one of these tiles.
    unsafe fn column(self, tile: &Tile, column: u32) -> Self::Column;

    /// Returns a lane's data of 8 tokens of a tile, from `token` on. Some of them may be past the last one.
    ///
    /// # Safety
    /// The requirements of [`Work::column`].
    unsafe fn tokens(self, tile: &Tile, group: &Placed, token: u32) -> Self::Tokens;

    /// Returns the values of C for a lane's sums.
    fn values(
        self,
        group: &Placed,
        column: &Self::Column,
        tokens: &Self::Tokens,
        sums: &Sums,
    ) -> [f32; N_STEP as usize];
}
