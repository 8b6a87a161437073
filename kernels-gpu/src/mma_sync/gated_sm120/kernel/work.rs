//! What a kernel of this design multiplies: where its tiles come from, and what becomes of their sums.

use core::ops::Deref;

use crate::{
    mma_sync::gated_sm120::abi::{Group, Instance, SLABS, Tile},
    nvfp4_blocks::QuantizedTile,
};

/// The columns of C that a lane has, by slab and row of the product; those behind the last are nobody's.
pub type Columns = [[u32; 2]; SLABS as usize];

/// A group, whose rows may be some of those that its tensor maps have.
#[derive(Clone, Copy)]
pub struct Placed {
    /// The group. Where weights lie in rows, `b` are the addresses of their scales.
    pub group: Group,
    /// Its first token in the map of tokens.
    pub token_row: u32,
    /// Its first tile of tokens in the tokens' scales.
    pub token_tile: u32,
    /// Address of the map of weights, where they lie in rows: as that of tokens, a box of 64 rows.
    pub weight_map: u64,
    /// The group's first row there, of each matrix.
    pub weight_rows: [u32; 2],
}

impl Deref for Placed {
    type Target = Group;

    #[inline(always)]
    fn deref(&self) -> &Group {
        &self.group
    }
}

/// Where an element of a lane's sums is: its column of eight tokens, its row of the product (0 is g, 1 is g + 8), and 1 for the second of
/// two tokens.
pub type Place = [usize; 3];

/// What the blocks of a launch compute, in an instance of the kernel.
pub trait Work: Copy {
    /// How the kernel is built.
    const INSTANCE: Instance;

    /// Whether tensor maps lie in global memory, and not in the parameter.
    const MAPS_IN_MEMORY: bool;

    /// A group as the tiles' source has it: a copy, whose fields stay in registers.
    type Group: Copy;

    /// A block's tiles, each with its group.
    type Tiles: Iterator<Item = (Tile, Self::Group)>;

    /// What a lane needs of a tile for its elements of C.
    type Terms: Copy;

    /// Waits for grids before this one, where it may begin before they have ended.
    fn wait();

    /// The tiles from the one of index `next` on that are `stride` apart.
    ///
    /// # Safety
    /// The contract of the kernel; grids before this one were waited for.
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

    /// The terms of a lane that has these columns, and of each eight tokens of the tile two, the first of them this one.
    ///
    /// # Safety
    /// As [`Work::tiles`]; the tile is one of them.
    unsafe fn terms<const COLUMNS: usize>(
        self,
        tile: &Tile,
        group: &Placed,
        columns: Columns,
        first_token: u32,
    ) -> Self::Terms;

    /// An element of C of the sums of gate and up.
    fn gated(self, group: &Placed, terms: &Self::Terms, place: Place, sums: [f32; SLABS as usize]) -> f32;

    /// An element of C of the sum of a slab of the only matrix.
    fn plain(self, group: &Placed, terms: &Self::Terms, slab: usize, place: Place, sum: f32) -> f32;
}
