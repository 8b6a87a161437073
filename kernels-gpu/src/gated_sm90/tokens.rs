//! The grid before: packed tokens → f16 in global memory, as `wgmma` reads its B, once for all tiles that multiply them.

use cuda_std::{
    global::{ld_global_nc_b32_or_zero, st_global_v4_b32},
    griddepcontrol::griddepcontrol_launch_dependents,
    integer::prmt_b32,
    kernel, thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_shuffle_idx, warp_vote_ballot},
};

use super::{
    decode::{Scales, decode},
    order::{CHUNK_BYTES, CHUNK_STRIDE, LANE_WORDS, WORD_ELEMENTS, WORD_PAIRS},
};
use crate::abi::{
    scale_word_offset,
    sm90::{
        EIGHT, EIGHT_BYTES, LANE_BYTES, ROW_LANES, SCALE_TILE_K, STEP, STEP_BYTES, STEP_SCALE_TILES, Tokens,
        TokensLaunch,
    },
};

/// Elements of a lane's words.
const LANE_ELEMENTS: u32 = LANE_WORDS * WORD_ELEMENTS;

/// Words of a lane that share a scale.
const SCALE_WORDS: u32 = 2;

const _: () = assert!(EIGHT * LANE_WORDS == WARP_SIZE && SCALE_WORDS * 2 == LANE_WORDS);
const _: () = assert!(STEP_SCALE_TILES * 2 == ROW_LANES, "a tile of scales is of two lanes' words");

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
        let (eights, steps) = (group.m.div_ceil(EIGHT), group.k.div_ceil(STEP));
        let piece = (block - group.first_block) * Tokens::WARPS + warp;
        let (eight, step) = (piece / steps, piece % steps);
        if eight < eights {
            decode_piece(&group, eight, step);
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

/// Decodes eight tokens' elements of a stage: each thread of one of them a word of each lane, of which it makes the word's
/// chunks. A quarter warp has eight tokens, whose chunks lie side by side.
#[inline(always)]
unsafe fn decode_piece(group: &Tokens, eight: u32, step: u32) {
    let Tokens { values, scales, decoded, m, k, .. } = *group;
    let (token, word) = (lane_id() % EIGHT, lane_id() / EIGHT);
    let row = (eight * EIGHT + token).min(m - 1);
    let values = values + u64::from(row) * u64::from(k / 2) + u64::from(step * STEP_BYTES + word * 4);
    // Of a word of four scales, those of two lanes: bytes 0 and 2 for their first words, 1 and 3 for their last.
    let selector = if word < SCALE_WORDS { 0x20 } else { 0x31 };
    // SAFETY: words of the row and of its scales, where the row has them; a piece is as large as all that is stored.
    unsafe {
        let codes: [u32; ROW_LANES as usize] = core::array::from_fn(|lane| {
            let lane = lane as u32;
            let there = step * STEP + lane * LANE_ELEMENTS < k;
            ld_global_nc_b32_or_zero(there, values + u64::from(lane * LANE_BYTES))
        });
        let scales: [Scales; STEP_SCALE_TILES as usize] = core::array::from_fn(|tile| {
            let (tile, tiles) = (step * STEP_SCALE_TILES + tile as u32, k.div_ceil(SCALE_TILE_K));
            let word = ld_global_nc_b32_or_zero(tile < tiles, scales + scale_word_offset(row, tile, tiles));
            Scales::new(prmt_b32(word, 0, selector) as u16)
        });
        let lanes: [[u32; WORD_PAIRS]; ROW_LANES as usize] =
            core::array::from_fn(|lane| decode(codes[lane], scales[lane / 2].twice(lane % 2)));
        let piece = u64::from(step) * u64::from(m.div_ceil(EIGHT)) + u64::from(eight);
        let target = decoded
            + piece * u64::from(EIGHT_BYTES)
            + u64::from(word * WORD_PAIRS as u32 * CHUNK_STRIDE + token * CHUNK_BYTES);
        for pair in 0..WORD_PAIRS {
            let chunk = core::array::from_fn(|lane| lanes[lane][pair]);
            st_global_v4_b32(target + u64::from(pair as u32 * CHUNK_STRIDE), chunk);
        }
    }
}
