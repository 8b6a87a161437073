//! The work of a kernel of this design: the source of its tiles, and the conversion of their sums to C.

use core::ops::Deref;

use crate::{
    mma_sync::gated_sm120::abi::{Group, Instance, SLABS, Tile},
    nvfp4_blocks::QuantizedTile,
};

/// Columns of C of a lane, by slab and row of the product. Columns from N on do not exist.
pub type Columns = [[u32; 2]; SLABS as usize];

/// A group whose rows may be a part of the rows of its tensor maps.
#[derive(Clone, Copy)]
pub struct Placed {
    /// The group. For weights in rows, `b` has the addresses of their scales.
    pub group: Group,
    /// The group's first token in the map of tokens.
    pub token_row: u32,
    /// The group's first tile of tokens in the tokens' scales.
    pub token_tile: u32,
    /// Address of the map of weights, for weights in rows. It is like the map of tokens, with a box of 64 rows.
    pub weight_map: u64,
    /// The group's first row in the map of weights, per matrix.
    pub weight_rows: [u32; 2],
}

impl Deref for Placed {
    type Target = Group;

    #[inline(always)]
    fn deref(&self) -> &Group {
        &self.group
    }
}

/// Place of an element in a lane's sums: its group of eight tokens, its row of the product (0 is g, 1 is g + 8), and 1
/// for the second of two tokens.
pub type Place = [usize; 3];

/// The work of a launch's CTAs, with one instance of the kernel.
pub trait Work: Copy {
    /// The instance.
    const INSTANCE: Instance;

    /// `true` if tensor maps lie in global memory, `false` if they lie in the parameter.
    const MAPS_IN_MEMORY: bool;

    /// A group in the form that the source of tiles has: a copy, whose fields stay in registers.
    type Group: Copy;

    /// A CTA's tiles, each with its group.
    type Tiles: Iterator<Item = (Tile, Self::Group)>;

    /// Factors and biases of a lane's elements of C in a tile.
    type Terms: Copy;

    /// Waits for earlier grids, if this grid may start before they have ended.
    fn wait();

    /// The tiles `next`, `next + stride` and so on.
    ///
    /// # Safety
    /// The contract of the kernel holds, and the caller has waited for earlier grids.
    unsafe fn tiles(self, next: u32, stride: u32) -> Self::Tiles;

    /// A group with its rows in the tensor maps.
    fn placed(group: Self::Group) -> Placed;

    /// Format of C.
    fn output(self) -> u32;

    /// Whether C is written as 16-bit numbers.
    #[inline(always)]
    fn writes_bits16(self) -> bool {
        true
    }

    /// Destination of a tile of C in NVFP4, if C is quantized. The columns of C are then a multiple of 16.
    ///
    /// # Safety
    /// The requirements of [`Work::tiles`]. `tile` is one of these tiles, and `group` its group.
    #[inline(always)]
    unsafe fn quantized(self, _tile: &Tile, _group: &Placed) -> QuantizedTile {
        QuantizedTile::NONE
    }

    /// The terms of a lane with these columns and with two tokens of each eight of the tile; `first_token` is the
    /// first.
    ///
    /// # Safety
    /// The requirements of [`Work::tiles`]. `tile` is one of these tiles.
    unsafe fn terms<const COLUMNS: usize>(
        self,
        tile: &Tile,
        group: &Placed,
        columns: Columns,
        first_token: u32,
    ) -> Self::Terms;

    /// An element of C, from the sums of gate and up.
    fn gated(self, group: &Placed, terms: &Self::Terms, place: Place, sums: [f32; SLABS as usize]) -> f32;

    /// An element of C, from the sum of a slab of the only matrix.
    fn plain(self, group: &Placed, terms: &Self::Terms, slab: usize, place: Place, sum: f32) -> f32;
}
