//! Packs weights for NVFP4 tokens: a warp packs a row, and a lane the row's part of a scale tile, four blocks of values
//! and their scales.

use core::hint::assert_unchecked;

use cuda_std::{
    global::{
        GlobalAddress, ld_global_nc_b64_or_zero, ld_global_nc_u8, red_global_min_u64, st_global_b32, st_global_b64,
    },
    kernel, thread,
    warp::{WARP_SIZE, lane_id},
};

use super::{abi::PackNvfp4, kernel::MAX_SCALE};
use crate::{
    format::{BLOCK, SCALE_TILE_COLUMNS, SCALE_TILE_ROWS, scale_word_offset},
    nvfp4_rows::{row_bytes, scale_tiles},
};

/// Bytes of a block's values.
const BLOCK_BYTES: u32 = BLOCK / 2;

/// Packs weights for NVFP4 tokens.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = PackNvfp4::THREADS, min_blocks = 4)]
pub unsafe fn moe_pack_nvfp4(pack: PackNvfp4) {
    let blocks_of_rows = pack.rows.next_multiple_of(SCALE_TILE_ROWS) / PackNvfp4::BLOCK_ROWS;
    // SAFETY: a matrix has at least one row.
    unsafe { assert_unchecked(blocks_of_rows > 0) };
    let (matrix, block) = (thread::block_idx_x() / blocks_of_rows, thread::block_idx_x() % blocks_of_rows);
    let row = block * PackNvfp4::BLOCK_ROWS + thread::thread_idx_x() / WARP_SIZE;
    // Past the last row, only zeros are stored as scales.
    let blocks = if row < pack.rows { pack.k / BLOCK } else { 0 };
    let of_matrix = |at: u64, stride: u64| GlobalAddress::new(at) + u64::from(matrix) * stride;
    let values = of_matrix(pack.values, pack.values_stride) + u64::from(row) * u64::from(pack.k / 2);
    let scales = of_matrix(pack.scales, pack.scales_stride) + u64::from(row) * u64::from(pack.k / BLOCK);
    let to_values =
        of_matrix(pack.packed_values, pack.packed_values_stride) + u64::from(row) * u64::from(row_bytes(pack.k));
    let to_scales = of_matrix(pack.packed_scales, pack.packed_scales_stride);
    let tiles = scale_tiles(pack.k);
    let mut tile = lane_id();
    while tile < tiles {
        let mut word = 0;
        for column in 0..SCALE_TILE_COLUMNS {
            let block = tile * SCALE_TILE_COLUMNS + column;
            if block >= blocks {
                break;
            }
            let place = u64::from(block * BLOCK_BYTES);
            // SAFETY: the block belongs to the row, and only this lane writes its values. Other threads change the
            // index of an invalid scale only by the same atomic operation.
            unsafe {
                st_global_b64(to_values + place, ld_global_nc_b64_or_zero(true, values + place));
                let scale = u32::from(ld_global_nc_u8(scales + u64::from(block)));
                if scale > MAX_SCALE {
                    let row = u64::from(matrix) * u64::from(pack.rows) + u64::from(row);
                    let found = row * u64::from(pack.k / BLOCK) + u64::from(block);
                    red_global_min_u64(GlobalAddress::new(pack.invalid), found);
                }
                word |= scale << (8 * column);
            }
        }
        // SAFETY: this is the row's word of a scale tile, which only this lane writes.
        unsafe { st_global_b32(to_scales + scale_word_offset(row, tile, tiles), word) };
        tile += WARP_SIZE;
    }
}
