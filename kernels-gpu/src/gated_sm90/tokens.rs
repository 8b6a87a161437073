//! The token warps: packed tokens of a stage → f16 in a buffer, as `wgmma` reads its B.

use cuda_std::{
    fence::fence_proxy_async_shared,
    integer::prmt_b32,
    mbarrier::mbarrier_arrive,
    shared::{ld_shared_b32, st_shared_v4_b32},
    warp::{ALL_LANES, lane_id, sync_warp},
};

use super::{
    Sm90, Tiles,
    decode::{Scales, decode},
    order::{CHUNK_BYTES, CHUNK_ROWS, LANE_WORDS, WORD_PAIRS},
};
use crate::abi::{
    SCALE_TILE_ROWS,
    sm90::{Instance, Launch, ROW_LANES, SCALE_TILE_BYTES, STEP_SCALE_TILES, Tile, lane_offset},
};

/// Words of a lane that share a scale.
const SCALE_WORDS: u32 = 2;

const _: () = assert!(STEP_SCALE_TILES * 2 == ROW_LANES, "a tile of scales is of two lanes' words");

impl<const MATRICES: u32, const TILE_TOKENS: u32> Sm90<MATRICES, TILE_TOKENS> {
    /// Bytes of a chunk of B: 8 columns of every token.
    pub(super) const CHUNK_BYTES: u32 = TILE_TOKENS * CHUNK_BYTES;

    #[inline(always)]
    pub(super) unsafe fn decode_tokens(launch: Launch, shared: u32, warp: u32) {
        let (mut stages, mut buffers) = (Self::stages(shared), Self::buffers(shared));
        // Warps take 8 tokens each in turn; where that leaves some without, another in every step.
        let mut first = warp;
        let lane = lane_id();
        // SAFETY: a stage is read while it is full, a buffer written while it is empty, each place by one thread.
        unsafe {
            let mut tiles = Tiles::new(launch);
            while tiles.more() {
                let (tile, group) = tiles.read();
                let eights = Self::INSTANCE.width(tile.tokens) / CHUNK_ROWS;
                for _ in 0..group.steps() {
                    let (stage, buffer) = (Self::stage(shared, stages), Self::buffer(shared, buffers));
                    stages.wait_full();
                    buffers.wait_empty();
                    let mut eight = first;
                    while eight < eights {
                        Self::decode_eight(&tile, stage, buffer, eight, lane);
                        eight += Self::TOKEN_WARPS;
                    }
                    first = if first == 0 { Self::TOKEN_WARPS - 1 } else { first - 1 };
                    // wgmma reads B past the generic proxy.
                    fence_proxy_async_shared();
                    sync_warp(ALL_LANES);
                    if lane == 0 {
                        mbarrier_arrive(buffers.full());
                        mbarrier_arrive(stages.empty());
                    }
                    stages.advance();
                    buffers.advance();
                }
                tiles.advance();
            }
        }
    }

    /// Decodes 8 tokens of a stage: each thread of one of them a word of each lane, of which it makes the word's chunks. A
    /// quarter warp has eight tokens, whose chunks lie side by side.
    #[inline(always)]
    unsafe fn decode_eight(tile: &Tile, stage: u32, buffer: u32, eight: u32, lane: u32) {
        let (token, word) = (eight * CHUNK_ROWS + lane % CHUNK_ROWS, lane / CHUNK_ROWS);
        // What is past the tile's end is summed too, but not written: any token will do.
        let row = if token < tile.tokens { token } else { tile.tokens - 1 };
        let scale_row = tile.first_token % SCALE_TILE_ROWS + row;
        let scale_address = stage
            + Self::TOKEN_SCALES
            + scale_row / SCALE_TILE_ROWS * Instance::SCALE_BYTES
            + scale_row % 32 * 16
            + scale_row % SCALE_TILE_ROWS / 32 * 4;
        // Of a word of four scales, those of two lanes: bytes 0 and 2 for their first words, 1 and 3 for their last.
        let selector = if word < SCALE_WORDS { 0x20 } else { 0x31 };
        // SAFETY: the caller's promise: a full stage, an empty buffer.
        unsafe {
            let scales: [Scales; STEP_SCALE_TILES as usize] = core::array::from_fn(|tile| {
                Scales::new(prmt_b32(ld_shared_b32(scale_address + tile as u32 * SCALE_TILE_BYTES), 0, selector) as u16)
            });
            let lanes: [[u32; WORD_PAIRS]; ROW_LANES as usize] = core::array::from_fn(|lane| {
                let address = stage + Self::TOKENS + lane_offset(row, lane as u32) + word * 4;
                decode(ld_shared_b32(address), scales[lane / 2].twice(lane % 2))
            });
            let address = buffer + word * WORD_PAIRS as u32 * Self::CHUNK_BYTES + token * CHUNK_BYTES;
            for pair in 0..WORD_PAIRS {
                let chunk = core::array::from_fn(|lane| lanes[lane][pair]);
                st_shared_v4_b32(address + pair as u32 * Self::CHUNK_BYTES, chunk);
            }
        }
    }
}

const _: () = assert!(CHUNK_ROWS * LANE_WORDS == cuda_std::warp::WARP_SIZE && SCALE_WORDS * 2 == LANE_WORDS);
