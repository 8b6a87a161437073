//! Packed tokens → f16 as `wgmma` reads its B: once for all tiles that multiply them, by a grid before, to global memory; or,
//! where they are few, by each block that multiplies them, to its buffers.

use core::hint::assert_unchecked;

use cuda_std::{
    fence::fence_proxy_async_shared,
    global::{ld_global_nc_b32_or_zero, st_global_v4_b32},
    griddepcontrol::griddepcontrol_launch_dependents,
    integer::prmt_b32,
    kernel,
    mbarrier::mbarrier_arrive,
    shared::st_shared_v4_b32,
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp, warp_shuffle_idx, warp_vote_ballot},
};

use super::{
    Sm90, Tiles, WARPS,
    decode::{Scales, decode},
    order::{CHUNK_BYTES, CHUNK_STRIDE, LANE_WORDS, WORD_ELEMENTS, WORD_PAIRS},
};
use crate::{
    format::{SCALE_TILE_K, scale_word_offset},
    gated_sm90::abi::{
        CORE_MATRIX_ROWS, Group, K_BLOCK, K_BLOCK_BYTES, K_BLOCK_SCALE_TILES, LANE_BYTES, ROW_LANES, STRIP_BYTES, Tile,
        Tokens, TokensLaunch,
    },
};

/// Elements of a lane's words.
const LANE_ELEMENTS: u32 = LANE_WORDS * WORD_ELEMENTS;

/// Words of a lane that share a scale.
const SCALE_WORDS: u32 = 2;

const _: () = assert!(CORE_MATRIX_ROWS * LANE_WORDS == WARP_SIZE && SCALE_WORDS * 2 == LANE_WORDS);
const _: () = assert!(K_BLOCK_SCALE_TILES * 2 == ROW_LANES, "a tile of scales is of two lanes' words");

/// Decodes the tokens of every group of the array ([`Tokens`]), in one launch of as many blocks as they have
/// ([`Tokens::blocks`]), [`Tokens::WARPS`] warps each.
///
/// # Safety
/// Addresses are aligned as [`Tokens`] says; nobody writes the tokens meanwhile. Scales are finite and have no sign.
#[kernel(threads = Tokens::THREADS)]
pub unsafe fn tokens_sm90(launch: TokensLaunch) {
    griddepcontrol_launch_dependents();
    let (block, warp) = (thread::block_idx_x(), thread::thread_idx_x() / WARP_SIZE);
    // SAFETY: a group of the array; a piece that is this warp's alone.
    unsafe {
        let group = find_group(launch, block);
        let (eights, steps) = (group.m.div_ceil(CORE_MATRIX_ROWS), group.k.div_ceil(K_BLOCK));
        // K is not 0.
        assert_unchecked(steps > 0);
        let piece = (block - group.first_block) * Tokens::WARPS + warp;
        let (eight, step) = (piece / steps, piece % steps);
        if eight < eights {
            let Tokens { values, scales, decoded, m, k, .. } = group;
            let piece = u64::from(step) * u64::from(eights) + u64::from(eight);
            let target = decoded + piece * u64::from(STRIP_BYTES);
            let chunks = Packed { values, scales, m, k }.decode(eight, step);
            chunks.store(|offset, chunk| st_global_v4_b32(target + u64::from(offset), chunk));
        }
    }
}

/// The group that a block belongs to: the last whose first block is not behind it. Every lane reads a group, all of it, so
/// that the warp waits for memory once; of more groups than lanes, first those at some distance from each other.
#[inline(always)]
unsafe fn find_group(launch: TokensLaunch, block: u32) -> Tokens {
    let groups = launch.groups as *const Tokens;
    let (mut first, mut distance) = (0, 1);
    while distance * WARP_SIZE < launch.group_count {
        distance *= WARP_SIZE;
    }
    // SAFETY: indices below group_count; the whole warp goes the same way. The group at `first` has begun.
    unsafe {
        loop {
            let index = first + lane_id() * distance;
            let group = *groups.add(index.min(launch.group_count - 1) as usize);
            let has_begun = index < launch.group_count && group.first_block <= block;
            let last = warp_vote_ballot(ALL_LANES, has_begun).count_ones() - 1;
            if distance == 1 {
                return from_lane(group, last);
            }
            first += last * distance;
            distance /= WARP_SIZE;
        }
    }
}

/// A lane's group.
#[inline(always)]
unsafe fn from_lane(group: Tokens, lane: u32) -> Tokens {
    // SAFETY: the caller's promise: the whole warp is here.
    let half = |value: u32| unsafe { warp_shuffle_idx(ALL_LANES, value, lane, WARP_SIZE).0 };
    let whole = |value: u64| u64::from(half((value >> 32) as u32)) << 32 | u64::from(half(value as u32));
    Tokens {
        values: whole(group.values),
        scales: whole(group.scales),
        decoded: whole(group.decoded),
        m: half(group.m),
        k: half(group.k),
        first_block: half(group.first_block),
        unused: 0,
    }
}

impl<const INDEX: usize> Sm90<INDEX> {
    /// Packed tokens → buffers, by the warps of the warpgroup that loads but the first: a step each, in turn, so that what one
    /// waits for the others do not.
    #[inline(always)]
    pub(super) unsafe fn decode_tokens(mut tiles: Tiles, shared: u32, warp: u32) {
        const TOKEN_WARPS: u32 = WARPS - 1;
        let mut buffers = Self::buffers(shared);
        let mut others = warp - 1;
        // SAFETY: the group's tokens; a buffer is written while it is empty, each place by one thread.
        unsafe {
            loop {
                let tile = tiles.read();
                let eights = Self::INSTANCE.mma_n(tile.tokens) / CORE_MATRIX_ROWS;
                for step in 0..tile.group.steps() {
                    if others == 0 {
                        others = TOKEN_WARPS;
                        let buffer = Self::buffer(shared, buffers);
                        for eight in 0..eights {
                            // Read anew, since registers are few.
                            let Tile { group, first_token, .. } = tiles.read();
                            let Group { tokens: values, token_scales: scales, m, k, .. } = group;
                            let chunks =
                                Packed { values, scales, m, k }.decode(first_token / CORE_MATRIX_ROWS + eight, step);
                            buffers.wait_empty();
                            let target = buffer + eight * STRIP_BYTES;
                            chunks.store(|offset, chunk| st_shared_v4_b32(target + offset, chunk));
                        }
                        // wgmma reads B past the generic proxy.
                        fence_proxy_async_shared();
                        sync_warp(ALL_LANES);
                        if lane_id() == 0 {
                            mbarrier_arrive(buffers.full());
                        }
                    }
                    others -= 1;
                    buffers.advance();
                }
                if !tiles.advance(tile.next) {
                    return;
                }
            }
        }
    }
}

/// The packed tokens of a group.
#[derive(Clone, Copy)]
struct Packed {
    values: u64,
    scales: u64,
    m: u32,
    k: u32,
}

/// A thread's part of eight tokens' elements of a stage: of one token a word of each lane, of which it makes the word's chunks.
/// A quarter warp has eight tokens, whose chunks lie side by side.
struct Chunks([[u32; WORD_PAIRS]; ROW_LANES as usize]);

impl Packed {
    /// The elements of a stage of the `eight`-th eight tokens; past the last token, its again.
    #[inline(always)]
    unsafe fn decode(self, eight: u32, step: u32) -> Chunks {
        let Self { values, scales, m, k } = self;
        let (token, word) = (lane_id() % CORE_MATRIX_ROWS, lane_id() / CORE_MATRIX_ROWS);
        let row = (eight * CORE_MATRIX_ROWS + token).min(m - 1);
        let values = values + u64::from(row) * u64::from(k / 2) + u64::from(step * K_BLOCK_BYTES + word * 4);
        // Of a word of four scales, those of two lanes: bytes 0 and 2 for their first words, 1 and 3 for their last.
        let selector = if word < SCALE_WORDS { 0x20 } else { 0x31 };
        // SAFETY: words of the row and of its scales, where the row has them.
        unsafe {
            let codes: [u32; ROW_LANES as usize] = core::array::from_fn(|lane| {
                let lane = lane as u32;
                let there = step * K_BLOCK + lane * LANE_ELEMENTS < k;
                ld_global_nc_b32_or_zero(there, values + u64::from(lane * LANE_BYTES))
            });
            let scales: [Scales; K_BLOCK_SCALE_TILES as usize] = core::array::from_fn(|tile| {
                let (tile, tiles) = (step * K_BLOCK_SCALE_TILES + tile as u32, k.div_ceil(SCALE_TILE_K));
                let word = ld_global_nc_b32_or_zero(tile < tiles, scales + scale_word_offset(row, tile, tiles));
                Scales::new(prmt_b32(word, 0, selector) as u16)
            });
            Chunks(core::array::from_fn(|lane| decode(codes[lane], scales[lane / 2].twice(lane % 2))))
        }
    }
}

impl Chunks {
    /// Has `store` put each chunk where it belongs in the [`STRIP_BYTES`] of the eight tokens.
    #[inline(always)]
    fn store(&self, store: impl Fn(u32, [u32; ROW_LANES as usize])) {
        let (token, word) = (lane_id() % CORE_MATRIX_ROWS, lane_id() / CORE_MATRIX_ROWS);
        for pair in 0..WORD_PAIRS {
            let chunk = word * WORD_PAIRS as u32 + pair as u32;
            store(chunk * CHUNK_STRIDE + token * CHUNK_BYTES, core::array::from_fn(|lane| self.0[lane][pair]));
        }
    }
}
