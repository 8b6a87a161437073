//! Quantizes 16 numbers of 16 bits to an NVFP4 block, as [`Quantize`](crate::layer::moe_quantize_nvfp4::abi::Quantize) defines
//! it: in a separate launch, or in the epilogue of the GEMM that computes the numbers.

use cuda_std::{
    convert::{cvt_f32_f16, cvt_rn_f16x2_e4m3x2, cvt_rn_satfinite_e2m1x2_f32, cvt_rn_satfinite_e4m3x2_f32},
    global::{GlobalAddress, st_global_b8, st_global_b32},
    warp::{ALL_LANES, WARP_SIZE, warp_shuffle_xor},
};

use crate::{
    epilogue::decode,
    format::{BLOCK, LARGEST_VALUE, LEAST_SCALE, NAN_SCALE, SCALE_TILE_COLUMNS},
    nvfp4_rows::{row_bytes, scale_tiles, token_scale},
};

/// Bytes of a global scale.
const GLOBAL_BYTES: u64 = size_of::<f32>() as u64;

/// Bits of +∞. The bits of every finite magnitude are smaller.
const INFINITY: u32 = f32::INFINITY.to_bits();

/// Returns the bits of the largest magnitude. Compared as integers, magnitudes are ordered like their values, and NaN
/// is above infinity.
#[inline(always)]
pub fn largest_magnitude(numbers: &[[f32; 2]]) -> u32 {
    let mut largest = 0;
    for number in numbers.as_flattened() {
        largest = largest.max(number.to_bits() & !(1 << 31));
    }
    largest
}

/// Scale that the numbers of a block share.
#[derive(Clone, Copy)]
pub struct BlockScale {
    /// Block scale, e4m3.
    pub code: u8,
    /// Factor that each number is multiplied by before its conversion to e2m1.
    inverse: f32,
    is_finite: bool,
}

impl BlockScale {
    /// Returns the scale of a block whose largest magnitude has the bits `largest`, in a row with the global scale
    /// `global`.
    #[inline(always)]
    pub fn new(largest: u32, global: f32) -> Self {
        let wanted = f32::from_bits(largest) / (LARGEST_VALUE * global);
        let code = (cvt_rn_satfinite_e4m3x2_f32(wanted, 0.0) as u8).max(LEAST_SCALE);
        let is_finite = largest < INFINITY && global.to_bits() < INFINITY;
        let inverse = 1.0 / (cvt_f32_f16(cvt_rn_f16x2_e4m3x2(u16::from(code)) as u16) * global);
        Self { code: if is_finite { code } else { NAN_SCALE }, inverse, is_finite }
    }

    /// Converts two neighboring numbers to a byte of two e2m1 codes.
    #[inline(always)]
    pub fn byte(&self, [low, high]: [f32; 2]) -> u8 {
        let byte = cvt_rn_satfinite_e2m1x2_f32(low * self.inverse, high * self.inverse);
        if self.is_finite { byte } else { 0 }
    }
}

/// Destination of a GEMM tile's rows in NVFP4. The same rows form a tile of tokens of the next GEMM.
#[derive(Clone, Copy)]
pub struct QuantizedTile {
    /// Address of the values of all rows; 0: no NVFP4 output.
    pub values: u64,
    /// Address of all scale tiles.
    pub scales: u64,
    /// Address of the global scales, one f32 per row.
    pub globals: u64,
    /// Index of the tile of tokens.
    pub tile: u32,
    /// First row of the tile.
    pub first_row: u32,
    /// Number of rows in the tile.
    pub rows: u32,
    /// Global scale that all rows of the tile share.
    pub global: f32,
    /// Number of columns.
    pub columns: u32,
    /// 16-bit format of the numbers.
    pub format: u32,
}

impl QuantizedTile {
    /// No NVFP4 output.
    pub const NONE: Self =
        Self { values: 0, scales: 0, globals: 0, tile: 0, first_row: 0, rows: 0, global: 0.0, columns: 0, format: 0 };

    /// Whether the tile is written in NVFP4.
    #[inline(always)]
    pub const fn is_there(&self) -> bool {
        self.values != 0
    }

    /// Quantizes and writes a lane's part of a block: `WORDS` words of two numbers, the first at `column`. The block's
    /// other numbers are in the lanes whose lane index differs in the bits `FIRST` to `LAST`. Scales of padding rows
    /// and columns of the scale tile are 0.
    ///
    /// # Safety
    /// [`is_there`](Self::is_there) holds, and all 32 lanes call this together. The addresses are valid for the tile's
    /// rows, and nobody else accesses this block's bytes.
    #[inline(always)]
    pub unsafe fn store<const FIRST: u32, const LAST: u32, const WORDS: usize>(
        &self,
        words: [u32; WORDS],
        row: u32,
        column: u32,
    ) {
        const { assert!(WORDS == 1 || WORDS == 4, "a lane stores a byte or a word") };
        let numbers = words.map(|word| decode(self.format, word));
        let mut largest = largest_magnitude(&numbers);
        let mut bit = FIRST;
        while bit <= LAST {
            // SAFETY: the caller guarantees that all 32 lanes execute the shuffle together.
            largest = largest.max(unsafe { warp_shuffle_xor(ALL_LANES, largest, bit, WARP_SIZE).0 });
            bit *= 2;
        }
        let scale = BlockScale::new(largest, self.global);
        let bytes = numbers.map(|numbers| scale.byte(numbers));
        let (block, is_there) = (column / BLOCK, row < self.rows && column < self.columns);
        let of_row = u64::from(self.first_row + row);
        let values =
            GlobalAddress::new(self.values) + (of_row * u64::from(row_bytes(self.columns)) + u64::from(column / 2));
        // SAFETY: the stores to `values` and `globals` are predicated on a row and a column inside the tile, and the
        // scale on a column inside the scale tiles. The caller guarantees that the addresses are valid for these and
        // that nobody else accesses the block's bytes.
        unsafe {
            if is_there && WORDS == 1 {
                st_global_b8(values, bytes[0]);
            } else if is_there {
                st_global_b32(values, u32::from_le_bytes([0, 1, 2, 3].map(|index| bytes[index % WORDS])));
            }
            if column.is_multiple_of(BLOCK) && block < scale_tiles(self.columns) * SCALE_TILE_COLUMNS {
                let of_block = token_scale(self.tile, row, block, self.columns);
                st_global_b8(GlobalAddress::new(self.scales) + of_block, if is_there { scale.code } else { 0 });
                if is_there && block == 0 {
                    st_global_b32(GlobalAddress::new(self.globals) + of_row * GLOBAL_BYTES, self.global.to_bits());
                }
            }
        }
    }
}
