//! Table for decoding weights: for each scale, the products of the scale with all magnitudes of an e2m1, as e4m3.
//!
//! An entry has an eighth of the product, because the largest one, 6 · 448 / 8, is below the largest e4m3.

use cuda_std::{
    convert::{cvt_f32_f16, cvt_rn_f16x2_e4m3x2, cvt_rn_satfinite_e4m3x2_f32},
    integer::{dp4a_u32_u32, prmt_b32},
    shared::{SharedAddress, ld_shared_v2_b32, st_shared_v4_b32},
    thread,
    warp::lane_id,
};

use crate::wgmma::moe_fp8_sm90::abi::{MAGNITUDES, TABLE_COPIES, TABLE_ENTRIES};

/// Bytes of all copies of an entry.
const ENTRY_BYTES: u32 = TABLE_COPIES * MAGNITUDES;
const _: () = assert!(ENTRY_BYTES == 128 && MAGNITUDES == 8);

/// Magnitudes of e2m1, divided by 8.
const EIGHTHS: [f32; MAGNITUDES as usize] = [0.0, 0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.75];

/// Makes the table. Each thread makes one entry.
///
/// # Safety
/// All threads of the CTA call this. The table's bytes at `table`, a multiple of 16, are shared memory that nobody else
/// uses, and nobody reads them before a barrier.
#[inline(always)]
pub(super) unsafe fn make(table: SharedAddress) {
    let scale = thread::thread_idx_x();
    if scale >= TABLE_ENTRIES {
        return;
    }
    let value = cvt_f32_f16(cvt_rn_f16x2_e4m3x2(scale as u16) as u16);
    let four = |first: usize| {
        let two =
            |first: usize| u32::from(cvt_rn_satfinite_e4m3x2_f32(value * EIGHTHS[first], value * EIGHTHS[first + 1]));
        two(first) | two(first + 2) << 16
    };
    let (low, high) = (four(0), four(4));
    for two in 0..TABLE_COPIES / 2 {
        // SAFETY: the copies of this entry are inside the table, and no other thread writes them.
        unsafe { st_shared_v4_b32(table + scale * ENTRY_BYTES + two * 16, [low, high, low, high]) };
    }
}

/// Returns the lane's copy of the table at `table`.
#[inline(always)]
pub(super) fn of_lane(table: SharedAddress) -> SharedAddress {
    table + lane_id() % TABLE_COPIES * MAGNITUDES
}

/// Returns the entry, in a lane's copy, of the scale in byte `index` of `scales`.
///
/// # Safety
/// The table is complete; the byte has no sign.
#[inline(always)]
pub(super) unsafe fn entry(of_lane: SharedAddress, scales: u32, index: usize) -> [u32; 2] {
    let offset = dp4a_u32_u32(scales, ENTRY_BYTES << (8 * index), 0);
    // SAFETY: the scale has no sign, so its entry is inside the table.
    unsafe { ld_shared_v2_b32(of_lane + offset) }
}

/// Decodes a word ([`E4M3_BITS`](crate::units::E4M3_BITS)) to two registers of A, with its scale's entry.
#[inline(always)]
pub(super) fn decode(word: u32, [low, high]: [u32; 2]) -> [u32; 2] {
    const SIGNS: u32 = 0x8080_8080;
    let magnitudes = word & !0x8888_8888;
    [prmt_b32(low, high, magnitudes) | word & SIGNS, prmt_b32(low, high, magnitudes >> 16) | word << 4 & SIGNS]
}
