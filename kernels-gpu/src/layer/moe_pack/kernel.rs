//! The kernel: a warp packs the units of 16 rows, one after another.
//!
//! A lane packs one row's part for one of the four lanes of a fragment, and the same part of the row eight rows
//! further. Per 64 columns, this part is 8 bytes of values, which neighboring lanes read side by side, and one scale.

use core::hint::assert_unchecked;

use cuda_std::{
    global::{
        GlobalAddress, ld_global_nc_b16_or_zero, ld_global_nc_b32_or_zero, ld_global_nc_b64_or_zero, ld_global_nc_u8,
        red_global_min_u64, st_global_b8, st_global_b16, st_global_b32, st_global_b32_where, st_global_v4_b32,
    },
    kernel, thread,
    warp::{WARP_SIZE, lane_id},
};

use super::abi::Pack;
use crate::{
    format::{BLOCK, OUTPUT_BF16},
    units::{
        K_BLOCK, LANE_WORDS, OperandType, ROW_LANES, SLAB_ROWS, UNIT_BYTES, UNIT_ROWS, WORD_ELEMENTS, block_columns,
        block_start, element, k_blocks, lane_place, lane_scales, lane_words, scale_place, unit_offset,
    },
};

/// Columns of half a k-block. A lane has one scale and two words of them.
const HALF: u32 = K_BLOCK / 2;

const _: () = assert!(UNIT_ROWS * ROW_LANES == 2 * WARP_SIZE && LANE_WORDS == 4 && HALF == ROW_LANES * BLOCK);

/// [`OperandType::E4m3`] as a number.
const E4M3: u32 = OperandType::E4m3 as u32;

/// Largest valid scale. Greater codes are NaN or have a sign.
pub(super) const MAX_SCALE: u32 = 0x7e;

/// Packs units.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = Pack::THREADS, min_blocks = 3)]
pub unsafe fn moe_pack(pack: Pack) {
    // SAFETY: the caller guarantees the contract in this folder's `mod.rs`. All CTAs have the same operand type.
    unsafe {
        if pack.operand_type == OUTPUT_BF16 {
            run::<OUTPUT_BF16>(&pack);
        } else if pack.operand_type == E4M3 {
            run::<E4M3>(&pack);
        } else {
            run::<{ OperandType::F16 as u32 }>(&pack);
        }
    }
}

/// Packs up to [`Pack::K_BLOCKS`] k-blocks of up to 128 rows.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[inline(always)]
unsafe fn run<const TYPE: u32>(pack: &Pack) {
    let (blocks_of_rows, slabs) = (k_blocks(pack.k).div_ceil(Pack::K_BLOCKS), pack.rows.div_ceil(SLAB_ROWS));
    // SAFETY: a matrix has at least one row and one column.
    unsafe { assert_unchecked(blocks_of_rows > 0 && slabs > 0) };
    let (slab, part) = (thread::block_idx_x() / blocks_of_rows, thread::block_idx_x() % blocks_of_rows);
    let (matrix, slab) = (slab / slabs, slab % slabs);
    let unit = slab * (SLAB_ROWS / UNIT_ROWS) + thread::thread_idx_x() / WARP_SIZE;
    if unit * UNIT_ROWS >= pack.rows {
        return;
    }
    let position = lane_id() / ROW_LANES;
    let rows = [
        Row::new(pack, matrix, unit * UNIT_ROWS + position),
        Row::new(pack, matrix, unit * UNIT_ROWS + position + UNIT_ROWS / 2),
    ];
    let units = GlobalAddress::new(pack.units) + u64::from(matrix) * pack.units_stride;
    let unit_at = |k_block: u32| units + unit_offset(pack.rows, pack.k, unit, k_block);
    let mut k_block = part * Pack::K_BLOCKS;
    let end = (k_block + Pack::K_BLOCKS).min(k_blocks(pack.k));
    let mut target = unit_at(k_block);
    let units_of_slab = (SLAB_ROWS.min(pack.rows - slab * SLAB_ROWS)) / UNIT_ROWS;
    // SAFETY: only this warp packs the unit.
    unsafe {
        while k_block < end.min(pack.k / K_BLOCK) {
            pack_unit::<TYPE>(pack, rows, k_block * K_BLOCK, K_BLOCK, target);
            target = target + u64::from(units_of_slab * UNIT_BYTES);
            k_block += 1;
        }
        while k_block < end {
            let (start, columns) = (block_start(pack.k, k_block), block_columns(pack.k, k_block));
            pack_unit::<TYPE>(pack, rows, start, columns, unit_at(k_block));
            k_block += 1;
        }
    }
}

/// Packs a unit: `columns` columns of the lanes' rows, from `start` on.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds. Only this warp packs the unit.
#[inline(always)]
unsafe fn pack_unit<const TYPE: u32>(pack: &Pack, rows: [Row; 2], start: u32, columns: u32, unit: GlobalAddress) {
    let (position, lane) = (lane_id() / ROW_LANES, lane_id() % ROW_LANES);
    // SAFETY: the rows have these columns, and each lane stores its own bytes of the unit. All loads come before the
    // first store.
    unsafe {
        let parts = [Part::load(rows[0], start, columns, lane), Part::load(rows[1], start, columns, lane)];
        parts[0].report(pack, rows[0]);
        parts[1].report(pack, rows[1]);
        parts[0].pack::<TYPE>().store(unit, columns, position, lane);
        parts[1].pack::<TYPE>().store(unit, columns, position + UNIT_ROWS / 2, lane);
    }
}

/// A row of a matrix.
#[derive(Clone, Copy)]
struct Row {
    values: GlobalAddress,
    scales: GlobalAddress,
    /// Index of the row's first scale among the scales of all matrices.
    first_scale: u64,
}

impl Row {
    /// Returns the row at a position.
    #[inline(always)]
    fn new(pack: &Pack, matrix: u32, position: u32) -> Self {
        let row = u64::from(if pack.ordered_rows != 0 { row_at(pack.rows, position) } else { position });
        let (matrix, row_scales) = (u64::from(matrix), u64::from(pack.k / BLOCK));
        Self {
            values: GlobalAddress::new(pack.values) + matrix * pack.values_stride + row * u64::from(pack.k / 2),
            scales: GlobalAddress::new(pack.scales) + matrix * pack.scales_stride + row * row_scales,
            first_scale: (matrix * u64::from(pack.rows) + row) * row_scales,
        }
    }
}

/// Returns the row at a position, if rows are in the order of K.
#[inline(always)]
fn row_at(rows: u32, position: u32) -> u32 {
    let start = position / K_BLOCK * K_BLOCK;
    // If the last 16 columns are a separate k-block, their words continue the preceding k-block's words as if they
    // belonged to it.
    let (columns, position) = ((rows - start).min(K_BLOCK), position - start);
    let (core, lane, high) = (position / WORD_ELEMENTS, position / 2 % ROW_LANES, position % 2);
    // Every position has an element.
    start + element(columns, lane, core / 4, core % 4 + high * 4).unwrap_or(0)
}

/// A lane's part of a row of a k-block, in two halves.
#[derive(Clone, Copy)]
struct Part([Half; 2]);

/// A lane's part of up to 64 columns of a row.
#[derive(Clone, Copy)]
struct Half {
    words: [u32; 2],
    scale: u32,
    /// Index of the scale in the row.
    block: u32,
}

impl Part {
    /// Loads the part in the layout of the matrix, from the column `start` on.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the row has these columns.
    #[inline(always)]
    unsafe fn load(row: Row, start: u32, columns: u32, lane: u32) -> Self {
        // SAFETY: the row is valid in global memory and has these columns. The second half has the columns past the
        // first half, or none.
        unsafe {
            Self([
                Half::load(row, start, columns, lane),
                Half::load(row, start + HALF, columns.saturating_sub(HALF), lane),
            ])
        }
    }

    /// Reports invalid scales.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds.
    #[inline(always)]
    unsafe fn report(self, pack: &Pack, row: Row) {
        let report = |half: Half| {
            if half.scale > MAX_SCALE {
                // SAFETY: `invalid` is the address of a u64 in global memory that other threads change only by the same
                // atomic operation.
                unsafe {
                    red_global_min_u64(GlobalAddress::new(pack.invalid), row.first_scale + u64::from(half.block));
                }
            }
        };
        report(self.0[0]);
        report(self.0[1]);
    }

    /// Returns the part in the layout of a unit.
    #[inline(always)]
    fn pack<const TYPE: u32>(self) -> Self {
        Self([self.0[0].pack::<TYPE>(), self.0[1].pack::<TYPE>()])
    }

    /// Stores the packed part in a unit.
    ///
    /// # Safety
    /// The unit has the row and these columns, and only this warp stores to it.
    #[inline(always)]
    unsafe fn store(self, unit: GlobalAddress, columns: u32, row: u32, lane: u32) {
        let values = unit + u64::from(lane_place(columns, row, lane));
        let scales = unit + u64::from(scale_place(columns, row, lane));
        let [Half { words: [a, b], scale: low, .. }, Half { words: [c, d], scale: high, .. }] = self.0;
        let words = lane_words(columns);
        // SAFETY: the addresses are inside the unit, and no other lane stores these bytes.
        unsafe {
            if columns == K_BLOCK {
                st_global_v4_b32(values, [a, b, c, d]);
                st_global_b16(scales, (low | high << 8) as u16);
                return;
            }
            st_global_b32(values, a);
            st_global_b32_where(words > 1, values + 4, b);
            st_global_b32_where(words > 2, values + 8, c);
            st_global_b8(scales, low as u8);
            if lane_scales(columns) > 1 {
                st_global_b8(scales + 1, high as u8);
            }
        }
    }
}

impl Half {
    /// Loads a lane's part of these columns of a row, from `first` on; zeros where there are none.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the row has these columns. All lanes of the warp have the same
    /// columns.
    #[inline(always)]
    unsafe fn load(row: Row, first: u32, columns: u32, lane: u32) -> Self {
        if columns == 0 {
            return Self { words: [0; 2], scale: 0, block: 0 };
        }
        let values = row.values + u64::from(first / 2);
        // SAFETY: the addresses are inside the row's values and scales.
        unsafe {
            // The lane's words and its first column, as in `element`.
            let (words, of_lane) = if columns >= HALF {
                let two = ld_global_nc_b64_or_zero(true, values + u64::from(lane * BLOCK / 2));
                ([two as u32, (two >> 32) as u32], lane * BLOCK)
            } else if columns > BLOCK {
                let one = ld_global_nc_b32_or_zero(true, values + u64::from(lane * WORD_ELEMENTS / 2));
                ([one, 0], lane * WORD_ELEMENTS)
            } else {
                // Half a word: nibbles 0, 1, 4 and 5.
                let codes = u32::from(ld_global_nc_b16_or_zero(true, values + u64::from(lane * WORD_ELEMENTS / 4)));
                ([codes & 0xff | (codes & 0xff00) << 8, 0], lane * WORD_ELEMENTS / 2)
            };
            let block = (first + of_lane) / BLOCK;
            Self { words, scale: u32::from(ld_global_nc_u8(row.scales + u64::from(block))), block }
        }
    }

    /// Returns the half in the layout of a unit.
    #[inline(always)]
    fn pack<const TYPE: u32>(self) -> Self {
        let operand_type = match TYPE {
            OUTPUT_BF16 => OperandType::Bf16,
            E4M3 => OperandType::E4m3,
            _ => OperandType::F16,
        };
        // The scales of bf16 have no zero.
        let is_zero = TYPE == OUTPUT_BF16 && self.scale == 0;
        let [a, b] = if is_zero { [0; 2] } else { self.words };
        let scale = u32::from(operand_type.pack_scale(self.scale as u8));
        Self { words: [operand_type.pack(a), operand_type.pack(b)], scale, ..self }
    }
}
