//! Sixteen 16-bit numbers to a block of NVFP4, as [`Quantize`](crate::moe_quantize_nvfp4::abi::Quantize) defines it: by a launch of its
//! own, or in the epilogue of the product that makes them.

use cuda_std::{
    convert::{cvt_f32_f16, cvt_rn_f16x2_e4m3x2, cvt_rn_satfinite_e2m1x2_f32, cvt_rn_satfinite_e4m3x2_f32},
    global::{GlobalAddress, st_global_b8, st_global_b32},
    warp::{ALL_LANES, WARP_SIZE, warp_shuffle_xor},
};

use crate::{
    epilogue::decode,
    format::{BLOCK, SCALE_TILE_COLUMNS},
    moe_quantize_nvfp4::abi::{LARGEST_VALUE, LEAST_SCALE, NAN_SCALE},
    nvfp4_rows::{row_bytes, scale_tiles, token_scale},
};

/// Bytes of a global scale.
const GLOBAL_BYTES: u64 = size_of::<f32>() as u64;

/// The bits of an infinity: those of numbers, without a sign, are below.
const INFINITY: u32 = f32::INFINITY.to_bits();

/// The bits of the largest magnitude. As integers, magnitudes have the order of their numbers, and NaN is above infinity.
#[inline(always)]
pub fn largest_magnitude(numbers: &[[f32; 2]]) -> u32 {
    let mut largest = 0;
    for number in numbers.as_flattened() {
        largest = largest.max(number.to_bits() & !(1 << 31));
    }
    largest
}

/// What the numbers of a block have in common.
#[derive(Clone, Copy)]
pub struct BlockScale {
    /// The block's scale, e4m3.
    pub code: u8,
    /// What its numbers are multiplied by.
    inverse: f32,
    is_finite: bool,
}

impl BlockScale {
    /// Of a block whose largest magnitude has these bits, in a row with this global scale.
    #[inline(always)]
    pub fn new(largest: u32, global: f32) -> Self {
        let wanted = f32::from_bits(largest) / (LARGEST_VALUE * global);
        let code = (cvt_rn_satfinite_e4m3x2_f32(wanted, 0.0) as u8).max(LEAST_SCALE);
        let is_finite = largest < INFINITY && global.to_bits() < INFINITY;
        let inverse = 1.0 / (cvt_f32_f16(cvt_rn_f16x2_e4m3x2(u16::from(code)) as u16) * global);
        Self { code: if is_finite { code } else { NAN_SCALE }, inverse, is_finite }
    }

    /// Two neighbors as a byte of values.
    #[inline(always)]
    pub fn byte(&self, [low, high]: [f32; 2]) -> u8 {
        let byte = cvt_rn_satfinite_e2m1x2_f32(low * self.inverse, high * self.inverse);
        if self.is_finite { byte } else { 0 }
    }
}

/// Where the rows of a product's tile go in NVFP4: as rows of the next product, of which they are a tile too.
#[derive(Clone, Copy)]
pub struct QuantizedTile {
    /// Address of all rows; 0 if they do not go there.
    pub values: u64,
    /// Address of all scale tiles.
    pub scales: u64,
    /// Address of each row's global scale.
    pub globals: u64,
    /// Its number.
    pub tile: u32,
    /// Its first row.
    pub first_row: u32,
    /// Its rows.
    pub rows: u32,
    /// The global scale of all its rows.
    pub global: f32,
    /// Columns.
    pub columns: u32,
    /// The format of the numbers.
    pub format: u32,
}

impl QuantizedTile {
    /// Nowhere.
    pub const NONE: Self =
        Self { values: 0, scales: 0, globals: 0, tile: 0, first_row: 0, rows: 0, global: 0.0, columns: 0, format: 0 };

    /// Whether the rows go there.
    #[inline(always)]
    pub const fn is_there(&self) -> bool {
        self.values != 0
    }

    /// Writes a lane's part of a block of a row: so many words of two numbers each, the first in this column. The block's others are
    /// those of the lanes whose numbers differ in the bits from FIRST to LAST. Where rows or columns fill the scale tile up, its scale is
    /// 0.
    ///
    /// # Safety
    /// It is there, and the whole warp calls it together. The tile's rows are there, and nobody else accesses what lies there for this block.
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
            // SAFETY: the whole warp is here.
            largest = largest.max(unsafe { warp_shuffle_xor(ALL_LANES, largest, bit, WARP_SIZE).0 });
            bit *= 2;
        }
        let scale = BlockScale::new(largest, self.global);
        let bytes = numbers.map(|numbers| scale.byte(numbers));
        let (block, is_there) = (column / BLOCK, row < self.rows && column < self.columns);
        let of_row = u64::from(self.first_row + row);
        let values =
            GlobalAddress::new(self.values) + (of_row * u64::from(row_bytes(self.columns)) + u64::from(column / 2));
        // SAFETY: what `# Safety` above asks.
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
