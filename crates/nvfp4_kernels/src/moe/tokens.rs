//! Operands of the products of experts' rows, by token format, and their memory.

use kernels_gpu::nvfp4_rows::{token_scale_bytes, value_bytes};
use kernels_gpu::sorted::LINE_BYTES;
use kernels_gpu::units::k_blocks;

use crate::group::Address;

/// Operands of the two products of experts' rows: gate and up multiply the tokens, down multiplies the intermediate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// 16-bit tokens `[T, H]` in the order of K. Gate and up find a row's token by the lists, and down reads the
    /// intermediate.
    Bits16 { tokens: Address },
    /// 16-bit rows sorted by expert ([`sorted`](kernels_gpu::sorted)), with room for `capacity` rows: the intermediate, and
    /// the tokens, which lie where down writes its rows later.
    Bits16Sorted { capacity: u32 },
    /// FP8 rows of each product, quantized before it.
    Fp8([SortedRows; 2]),
    /// NVFP4 rows of each product, quantized before it or by the product before it.
    Nvfp4([Nvfp4Rows; 2]),
}

impl Tokens {
    /// Returns the address of 16-bit tokens in the order of K, or 0 if the products have other operands.
    pub fn in_order(self) -> Address {
        if let Self::Bits16 { tokens } = self { tokens } else { 0 }
    }

    /// Returns the number of rows that there is room for, if the operands are 16-bit rows sorted by expert.
    pub fn sorted_capacity(self) -> Option<u32> {
        if let Self::Bits16Sorted { capacity } = self { Some(capacity) } else { None }
    }
}

/// Rows in e4m3 ([`sorted`](kernels_gpu::sorted)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SortedRows {
    /// Address of the e4m3 codes.
    pub codes: Address,
    /// One scale per row, f32.
    pub scales: Address,
    /// Number of rows that there is room for.
    pub capacity: u32,
}

impl SortedRows {
    /// Creates room for `capacity` rows of `k` columns. `place` returns the address of a number of bytes.
    pub fn new(capacity: u64, k: u32, place: &mut impl FnMut(u64) -> Address) -> Self {
        Self {
            codes: place(capacity * u64::from(k_blocks(k) * LINE_BYTES)),
            scales: place(capacity * size_of::<f32>() as u64),
            capacity: capacity as u32,
        }
    }
}

/// Rows in NVFP4 ([`nvfp4_rows`](kernels_gpu::nvfp4_rows)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nvfp4Rows {
    /// Address of the e2m1 values.
    pub values: Address,
    /// Address of the block scales.
    pub scales: Address,
    /// One global scale per row, f32.
    pub globals: Address,
    /// Number of rows that there is room for.
    pub rows: u64,
    /// Number of tiles of tokens that there is room for.
    pub tiles: u64,
}

impl Nvfp4Rows {
    /// Creates room for `rows` rows of `k` columns in `tiles` tiles of tokens. `place` returns the address of a number of
    /// bytes.
    pub fn new(rows: u64, tiles: u64, k: u32, place: &mut impl FnMut(u64) -> Address) -> Self {
        Self {
            values: place(value_bytes(rows, k)),
            scales: place(tiles * token_scale_bytes(k)),
            globals: place(rows * size_of::<f32>() as u64),
            rows,
            tiles,
        }
    }
}
