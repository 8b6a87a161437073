//! What a kernel of this design multiplies: where its tiles come from, and what becomes of their sums.

use core::ops::Deref;

use crate::{
    nvfp4_blocks::QuantizedTile,
    tcgen05::gated_sm100::abi::{Group, Instance, N_STEP, Tile},
};

/// A lane's sums of 8 tokens, by matrix. The plain kernel has one matrix, and zeros in place of the other.
pub type Sums = [[f32; N_STEP as usize]; 2];

/// A group, whose rows may be some of those that its tensor maps have.
#[derive(Clone, Copy)]
pub struct Placed {
    /// The group.
    pub group: Group,
    /// Its first token in the map of tokens.
    pub token_row: u32,
    /// Its first tile of tokens in the tokens' scales.
    pub token_tile: u32,
    /// Its first row in each map of weights.
    pub weight_rows: [u32; 2],
}

impl Deref for Placed {
    type Target = Group;

    #[inline(always)]
    fn deref(&self) -> &Group {
        &self.group
    }
}

/// What the blocks of a launch compute, in an instance of the kernel.
pub trait Work: Copy {
    /// How the kernel is built.
    const INSTANCE: Instance;

    /// Whether tensor maps lie in global memory, and not in the parameter.
    const MAPS_IN_MEMORY: bool;

    /// Whether tiles may be asked for before [`Work::wait`].
    const AT_ONCE: bool;

    /// A group as the tiles' source has it: a copy, whose fields stay in registers.
    type Group: Copy;

    /// A block's tiles, each with its group.
    type Tiles: Iterator<Item = (Tile, Self::Group)>;

    /// What a lane knows of its column of C.
    type Column: Copy;

    /// What it knows of 8 tokens.
    type Tokens: Copy;

    /// Waits for grids before this one, where it may begin before they have ended.
    fn wait();

    /// The tiles from the one of index `next` on that are `stride` apart.
    ///
    /// # Safety
    /// The contract of the kernel; grids before this one were waited for, unless tiles may be asked for [`AT_ONCE`](Self::AT_ONCE).
    unsafe fn tiles(self, next: u32, stride: u32) -> Self::Tiles;

    /// A group with its rows of the tensor maps.
    fn placed(group: Self::Group) -> Placed;

    /// The format of C.
    fn output(self) -> u32;

    /// Whether C is written as 16-bit numbers.
    #[inline(always)]
    fn writes_bits16(self) -> bool {
        true
    }

    /// Where a tile of C goes in NVFP4, if it does. Then its columns are a multiple of 16.
    ///
    /// # Safety
    /// As [`Work::tiles`]; the tile is one of them, and this its group.
    #[inline(always)]
    unsafe fn quantized(self, _tile: &Tile, _group: &Placed) -> QuantizedTile {
        QuantizedTile::NONE
    }

    /// What a lane needs of a column of a tile's group, which may lie behind the last.
    ///
    /// # Safety
    /// As [`Work::tiles`]; the tile is one of them.
    unsafe fn column(self, tile: &Tile, column: u32) -> Self::Column;

    /// What it needs of the 8 tokens of a tile from this one on, of which some may lie behind the last.
    ///
    /// # Safety
    /// As [`Work::column`].
    unsafe fn tokens(self, tile: &Tile, group: &Placed, token: u32) -> Self::Tokens;

    /// What C has of a lane's sums.
    fn values(
        self,
        group: &Placed,
        column: &Self::Column,
        tokens: &Self::Tokens,
        sums: &Sums,
    ) -> [f32; N_STEP as usize];
}
