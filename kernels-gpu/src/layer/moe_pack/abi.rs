//! Definitions that host and `moe_pack` share: the kernels' parameters.

use bytemuck::{Pod, Zeroable};

use crate::format::SCALE_TILE_ROWS;
use crate::units::{SLAB_ROWS, UNIT_ROWS, k_blocks};

/// Name of the entry that packs units.
pub const ENTRY: &str = "moe_pack";

/// Name of the entry that packs weights for NVFP4 tokens.
pub const NVFP4_ENTRY: &str = "moe_pack_nvfp4";

/// The only parameter of [`ENTRY`]: matrices of one size, one per expert, to convert from a checkpoint's layout to
/// [`units`](crate::units).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Pack {
    /// Address of the first matrix's values, `[rows, k/2]` bytes without gaps, two codes per byte, the element of even
    /// K in the low nibble; a multiple of 16.
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
    /// Address of a `u64` that an atomic minimum sets to the index of the first scale that is NaN or has a sign, if
    /// there is one: matrix · rows · k/16 + the scale's index in the matrix. It is `u64::MAX` before the launch.
    pub invalid: u64,
    /// Number of matrices.
    pub matrices: u32,
    /// Number of rows per matrix; a multiple of 16.
    pub rows: u32,
    /// Number of columns; a multiple of 16.
    pub k: u32,
    /// 1: rows are permuted to the order of K, as for gate and up, whose products are tokens for down and are split
    /// into k-blocks like its K. Each position of a k-block then has the row [`element_at`](crate::units::element_at).
    /// 0: rows keep their order.
    pub ordered_rows: u32,
    /// [`OperandType`](crate::units::OperandType) as a number.
    pub operand_type: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// The only parameter of [`NVFP4_ENTRY`]: matrices of one size, one per expert, to convert from a checkpoint's layout
/// to the layout of [`nvfp4_rows`](crate::nvfp4_rows).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct PackNvfp4 {
    /// Same as [`Pack::values`].
    pub values: u64,
    /// Same as [`Pack::values_stride`].
    pub values_stride: u64,
    /// Same as [`Pack::scales`].
    pub scales: u64,
    /// Same as [`Pack::scales_stride`].
    pub scales_stride: u64,
    /// Address of the first matrix's packed values, a multiple of 16.
    pub packed_values: u64,
    /// Bytes from one matrix's packed values to the next one's; a multiple of 16.
    pub packed_values_stride: u64,
    /// Address of the first matrix's packed scales, a multiple of 16.
    pub packed_scales: u64,
    /// Bytes from one matrix's packed scales to the next one's; a multiple of 16.
    pub packed_scales_stride: u64,
    /// Same as [`Pack::invalid`].
    pub invalid: u64,
    /// Number of matrices.
    pub matrices: u32,
    /// Number of rows per matrix; a multiple of 16.
    pub rows: u32,
    /// Number of columns; a multiple of 16.
    pub k: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

impl PackNvfp4 {
    /// Threads per CTA. A warp packs one row.
    pub const THREADS: u32 = 256;

    /// Rows that a CTA packs.
    pub const BLOCK_ROWS: u32 = Self::THREADS / 32;

    /// CTAs per grid. Scales have whole tiles of rows.
    pub const fn blocks(matrices: u32, rows: u32) -> u64 {
        matrices as u64 * (rows.next_multiple_of(SCALE_TILE_ROWS) / Self::BLOCK_ROWS) as u64
    }
}

impl Pack {
    /// Threads per CTA. A warp packs the units of [`UNIT_ROWS`] rows.
    pub const THREADS: u32 = SLAB_ROWS / UNIT_ROWS * 32;

    /// K-blocks of a slab that a CTA packs.
    pub const K_BLOCKS: u32 = 8;

    /// CTAs per grid.
    pub const fn blocks(matrices: u32, rows: u32, k: u32) -> u64 {
        matrices as u64 * rows.div_ceil(SLAB_ROWS) as u64 * k_blocks(k).div_ceil(Self::K_BLOCKS) as u64
    }
}
