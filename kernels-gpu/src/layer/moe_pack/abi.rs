//! What host and `moe_pack` agree on: the kernel's parameter.

use bytemuck::{Pod, Zeroable};

use crate::format::SCALE_TILE_ROWS;
use crate::units::{SLAB_ROWS, UNIT_ROWS, k_blocks};

/// The entry that packs units.
pub const ENTRY: &str = "moe_pack";

/// The entry that packs for tokens in NVFP4.
pub const NVFP4_ENTRY: &str = "moe_pack_nvfp4";

/// The one parameter of [`ENTRY`]: matrices of one size, one for each expert, from a checkpoint's layout into
/// [`units`](crate::units).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Pack {
    /// Address of the first matrix's values, `[rows, k/2]` bytes without gaps, two codes a byte, the element of even K low; a
    /// multiple of 16.
    pub values: u64,
    /// Bytes from one matrix's values to the next one's; a multiple of 16.
    pub values_stride: u64,
    /// Address of the first matrix's scales, `[rows, k/16]`, e4m3.
    pub scales: u64,
    /// Bytes from one matrix's scales to the next one's.
    pub scales_stride: u64,
    /// Address of the first matrix's units; a multiple of 16.
    pub units: u64,
    /// Bytes from one matrix's units to the next one's; a multiple of 16.
    pub units_stride: u64,
    /// Address of a `u64` that becomes the place of the first scale that is NaN or has a sign, if there is one: matrix ·
    /// rows · k/16 + its place in the matrix, by an atomic minimum. `u64::MAX` before.
    pub invalid: u64,
    /// Matrices.
    pub matrices: u32,
    /// Rows of each; a multiple of 16.
    pub rows: u32,
    /// Columns; a multiple of 16.
    pub k: u32,
    /// 1 if rows are to stand in the order that K has: those of gate and up, whose products are tokens for down, so that they are
    /// cut into k-blocks as its K is. Then row [`element_at`](crate::units::element_at) of each k-block stands at each position. 0
    /// if they keep theirs.
    pub ordered_rows: u32,
    /// [`OperandType`](crate::units::OperandType) as a number.
    pub operand_type: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// The one parameter of [`NVFP4_ENTRY`]: matrices of one size, one for each expert, from a checkpoint's layout into that of
/// [`nvfp4_rows`](crate::nvfp4_rows).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct PackNvfp4 {
    /// As [`Pack::values`].
    pub values: u64,
    /// As [`Pack::values_stride`].
    pub values_stride: u64,
    /// As [`Pack::scales`].
    pub scales: u64,
    /// As [`Pack::scales_stride`].
    pub scales_stride: u64,
    /// Address of where the first matrix's values go, a multiple of 16.
    pub packed_values: u64,
    /// Bytes from one matrix's to the next one's; a multiple of 16.
    pub packed_values_stride: u64,
    /// Address of where its scales go, a multiple of 16.
    pub packed_scales: u64,
    /// Bytes from one matrix's to the next one's; a multiple of 16.
    pub packed_scales_stride: u64,
    /// As [`Pack::invalid`].
    pub invalid: u64,
    /// Matrices.
    pub matrices: u32,
    /// Rows of each; a multiple of 16.
    pub rows: u32,
    /// Columns; a multiple of 16.
    pub k: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

impl PackNvfp4 {
    /// Threads of a block. A warp packs a row.
    pub const THREADS: u32 = 256;

    /// Rows that a block packs.
    pub const BLOCK_ROWS: u32 = Self::THREADS / 32;

    /// Blocks of a grid: scales have whole tiles of rows.
    pub const fn blocks(matrices: u32, rows: u32) -> u64 {
        matrices as u64 * (rows.next_multiple_of(SCALE_TILE_ROWS) / Self::BLOCK_ROWS) as u64
    }
}

impl Pack {
    /// Threads of a block. A warp packs the units of [`UNIT_ROWS`] rows.
    pub const THREADS: u32 = SLAB_ROWS / UNIT_ROWS * 32;

    /// K-blocks that a block packs of a slab.
    pub const K_BLOCKS: u32 = 8;

    /// Blocks of a grid.
    pub const fn blocks(matrices: u32, rows: u32, k: u32) -> u64 {
        matrices as u64 * rows.div_ceil(SLAB_ROWS) as u64 * k_blocks(k).div_ceil(Self::K_BLOCKS) as u64
    }
}
