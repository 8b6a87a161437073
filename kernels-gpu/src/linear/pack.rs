//! Packs weights from a checkpoint's layout into panels. A thread packs a row of a k-block: 64 bytes of values, eight
//! scales.

use core::hint::assert_unchecked;

use cuda_std::{
    global::{
        GlobalAddress, ld_global_nc_b64_or_zero, ld_global_nc_u8, red_global_min_u64, st_global_b16, st_global_b32,
    },
    kernel, thread,
};

use crate::{
    decoding::{K_BLOCK, LANE_WORDS},
    format::{BLOCK, OUTPUT_BF16},
    linear::{LANE_BYTES, PANEL_ROWS, PANEL_SCALES, Pack, ROW_BYTES, ROW_LANES, ROW_SCALES, k_blocks, panel_offset},
    units::OperandType,
};

/// The largest scale. Larger codes are NaN or have a sign.
const MAX_SCALE: u32 = 0x7e;

/// The kernel.
///
/// # Safety
/// The contract in `linear_sm90/mod.rs`.
#[kernel(threads = Pack::THREADS, min_blocks = 3)]
pub unsafe fn linear_pack(pack: Pack) {
    // SAFETY: the caller fulfills the contract in `linear_sm90/mod.rs`. All threads take the same branch, because
    // `operand_type` is the same for all.
    unsafe {
        if pack.operand_type == OUTPUT_BF16 {
            run::<OUTPUT_BF16>(&pack);
        } else {
            run::<{ OperandType::F16 as u32 }>(&pack);
        }
    }
}

/// Packs this thread's row of a k-block. A row that the matrix lacks becomes zeros.
///
/// # Safety
/// The contract in `linear_sm90/mod.rs` holds.
#[inline(always)]
unsafe fn run<const TYPE: u32>(pack: &Pack) {
    let blocks = k_blocks(pack.k);
    // SAFETY: `k` is not 0, so there is at least one k-block.
    unsafe { assert_unchecked(blocks > 0) };
    let index = thread::block_idx_x() * Pack::THREADS + thread::thread_idx_x();
    let (row, k_block) = (index / blocks, index % blocks);
    if row >= pack.n.next_multiple_of(PANEL_ROWS) {
        return;
    }
    let scale_columns = pack.k / BLOCK;
    let is_there = |scale: u32| row < pack.n && k_block * ROW_SCALES + scale < scale_columns;
    let first_scale = u64::from(row) * u64::from(scale_columns) + u64::from(k_block * ROW_SCALES);
    let values = GlobalAddress::new(pack.values) + first_scale * u64::from(BLOCK / 2);
    let panel = GlobalAddress::new(pack.panels) + panel_offset(row / PANEL_ROWS, k_block, pack.k);
    let operand_type = if TYPE == OUTPUT_BF16 { OperandType::Bf16 } else { OperandType::F16 };
    let place = row % PANEL_ROWS;
    // SAFETY: the loads read values and scales that the row has; the stores write bytes of the panel that belong to
    // this thread alone.
    unsafe {
        for word in 0..LANE_WORDS as u32 {
            let [first, last] = [0, 1].map(|half| {
                let block = 2 * word + half;
                let place_of_scale = first_scale + u64::from(block);
                let mut scale = 0;
                if is_there(block) {
                    scale = u32::from(ld_global_nc_u8(GlobalAddress::new(pack.scales) + place_of_scale));
                    if scale > MAX_SCALE {
                        red_global_min_u64(GlobalAddress::new(pack.invalid), place_of_scale);
                    }
                }
                // A packed bf16 scale cannot be zero, so the codes become zeros.
                let has_codes = is_there(block) && (TYPE != OUTPUT_BF16 || scale != 0);
                let codes = ld_global_nc_b64_or_zero(has_codes, values + u64::from(block * (BLOCK / 2)));
                (codes, u16::from(operand_type.pack_scale(scale as u8)))
            });
            for lane in 0..ROW_LANES {
                // Byte `lane` of each four bytes has the lane's two columns of a core matrix: the even column goes to a
                // low nibble.
                let columns = |codes: u64, core: u32| {
                    let byte = (codes >> (core % 2 * 32 + 8 * lane)) as u32 & 0xff;
                    (byte & 0xf) << (4 * core) | (byte >> 4) << (16 + 4 * core)
                };
                let codes = columns(first.0, 0) | columns(first.0, 1) | columns(last.0, 2) | columns(last.0, 3);
                let target = panel + u64::from(place * ROW_BYTES + lane * LANE_BYTES + 4 * word);
                st_global_b32(target, operand_type.pack(codes));
            }
            let target = panel + u64::from(PANEL_SCALES + place * ROW_SCALES + 2 * word);
            st_global_b16(target, first.1 | last.1 << 8);
        }
    }
}

const _: () = assert!(K_BLOCK == ROW_SCALES * BLOCK);
