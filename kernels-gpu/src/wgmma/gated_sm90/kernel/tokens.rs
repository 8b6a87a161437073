//! Decodes packed tokens to f16, in strips that `wgmma` reads as B.
//!
//! A separate grid decodes tokens to global memory, once for all tiles that multiply them. With few tokens, each CTA
//! that multiplies them decodes them to its own buffers instead.

use core::hint::assert_unchecked;

use cuda_std::{
    fence::fence_proxy_async_shared,
    global::{GlobalAddress, ld_global_nc_b32_or_zero, st_global_v4_b32},
    griddepcontrol::griddepcontrol_launch_dependents,
    integer::prmt_b32,
    kernel,
    mbarrier::mbarrier_arrive,
    shared::{SharedAddress, st_shared_v4_b32},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp, warp_shuffle_idx, warp_vote_ballot},
};

use super::{
    Sm90, Tiles,
    order::{CORE_MATRIX_BYTES, CORE_MATRIX_ROW_BYTES, LANE_WORDS, WORD_ELEMENTS, WORD_PAIRS},
};
use crate::{
    decoding::{
        WARPS,
        decode::{Scales, decode},
    },
    format::{SCALE_TILE_K, scale_word_offset},
    wgmma::gated_sm90::abi::{
        CORE_MATRIX_ROWS, Group, K_BLOCK, K_BLOCK_BYTES, K_BLOCK_SCALE_TILES, LANE_BYTES, ROW_LANES, STRIP_BYTES, Tile,
        Tokens, TokensLaunch,
    },
};

/// Elements of a lane's words.
const LANE_ELEMENTS: u32 = LANE_WORDS * WORD_ELEMENTS;

/// Number of words of a lane that share a scale.
const SCALE_WORDS: u32 = 2;

const _: () = assert!(CORE_MATRIX_ROWS * LANE_WORDS == WARP_SIZE && SCALE_WORDS * 2 == LANE_WORDS);
const _: () = assert!(
    K_BLOCK_SCALE_TILES * 2 == ROW_LANES,
    "a scale tile must have the scales of exactly two of the four lanes that share a row"
);

/// Decodes the tokens of every group of an array of [`Tokens`].
///
/// One launch has the sum of all groups' [`Tokens::blocks`] CTAs, with [`Tokens::THREADS`] threads each. The grid that
/// multiplies may start as soon as every CTA of this grid runs.
///
/// # Safety
/// `launch` and each [`Tokens`] satisfy their fields' documentation. Nobody writes values or scales while the kernel
/// runs, and nobody else accesses the decoded tokens before this grid has ended. Scales are finite and have no sign.
#[kernel(threads = Tokens::THREADS)]
pub unsafe fn tokens_sm90(launch: TokensLaunch) {
    griddepcontrol_launch_dependents();
    let (block, warp) = (thread::block_idx_x(), thread::thread_idx_x() / WARP_SIZE);
    // SAFETY: whole warps reach this point. The group is in the array, and the strip belongs to this warp alone.
    unsafe {
        let group = find_group(launch, block);
        let (rows, k_blocks) = (group.m.div_ceil(CORE_MATRIX_ROWS), group.k.div_ceil(K_BLOCK));
        // K is not 0.
        assert_unchecked(k_blocks > 0);
        let strip = (block - group.first_block) * Tokens::WARPS + warp;
        let (row, k_block) = (strip / k_blocks, strip % k_blocks);
        if row < rows {
            let Tokens { values, scales, decoded, m, k, .. } = group;
            let strip = u64::from(k_block) * u64::from(rows) + u64::from(row);
            let target = GlobalAddress::new(decoded) + strip * u64::from(STRIP_BYTES);
            let part = Packed::new(values, scales, m, k).decode(row, k_block);
            part.store(|offset, words| st_global_v4_b32(target + u64::from(offset), words));
        }
    }
}

/// Returns the group of a CTA: the last group whose first CTA is at or before it.
///
/// Every lane reads a whole group, so the warp waits for memory once. If there are more groups than lanes, the lanes
/// first read groups at a distance from each other.
///
/// # Safety
/// `launch` satisfies its fields' documentation. The whole warp calls this together, and `block` is a CTA of the grid.
#[inline(always)]
unsafe fn find_group(launch: TokensLaunch, block: u32) -> Tokens {
    let groups = launch.groups as *const Tokens;
    let (mut first, mut distance) = (0, 1);
    while distance * WARP_SIZE < launch.group_count {
        distance *= WARP_SIZE;
    }
    // SAFETY: the indices are below `group_count`, and nobody writes the array while the kernel runs. The whole warp
    // follows the same path. The group at `first` begins at or before the CTA, so at least one lane votes.
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

/// Returns the group that lane `lane` of the warp holds.
///
/// # Safety
/// The whole warp calls this together, with the same `lane`.
#[inline(always)]
unsafe fn from_lane(group: Tokens, lane: u32) -> Tokens {
    // SAFETY: the caller guarantees that all 32 lanes execute the shuffles together.
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
    /// Decodes packed tokens to buffers. Runs in all warps of the loading warpgroup except the first. The warps take
    /// k-blocks in turn, so they do not wait for each other's loads.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the barriers are initialized. All these warps call this, each
    /// one with its index in the CTA.
    #[inline(always)]
    pub(super) unsafe fn decode_tokens(mut tiles: Tiles, shared: SharedAddress, warp: u32) {
        const TOKEN_WARPS: u32 = WARPS - 1;
        let mut buffers = Self::buffers(shared);
        // Number of k-blocks until this warp's next one.
        let mut others = warp - 1;
        // SAFETY: the values and scales are the group's own. A buffer is written while it is empty, and each of its
        // places by one thread.
        unsafe {
            loop {
                let tile = tiles.read();
                let strips = Self::INSTANCE.mma_n(tile.tokens) / CORE_MATRIX_ROWS;
                for k_block in 0..tile.group.k_blocks() {
                    if others == 0 {
                        others = TOKEN_WARPS;
                        let buffer = Self::buffer(shared, buffers);
                        for strip in 0..strips {
                            // Read again for each strip, to save registers.
                            let Tile { group, first_token, .. } = tiles.read();
                            let Group { tokens: values, token_scales: scales, m, k, .. } = group;
                            let row = first_token / CORE_MATRIX_ROWS + strip;
                            let part = Packed::new(values, scales, m, k).decode(row, k_block);
                            buffers.wait_empty();
                            let target = buffer + strip * STRIP_BYTES;
                            part.store(|offset, words| st_shared_v4_b32(target + offset, words));
                        }
                        // `wgmma` reads B through the asynchronous proxy.
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

/// Packed tokens of a group.
#[derive(Clone, Copy)]
struct Packed {
    values: GlobalAddress,
    scales: GlobalAddress,
    m: u32,
    k: u32,
}

/// A thread's part of a strip, for one token: one row of each core matrix that the words with this index decode to,
/// with one word from each lane of a row. The eight lanes of a quarter warp have eight tokens, whose rows lie side by
/// side.
struct StripPart([[u32; WORD_PAIRS]; ROW_LANES as usize]);

impl Packed {
    /// Returns `m` tokens of `k` elements, with values and scales at these addresses in the layout of [`Tokens`].
    #[inline(always)]
    fn new(values: u64, scales: u64, m: u32, k: u32) -> Self {
        Self { values: GlobalAddress::new(values), scales: GlobalAddress::new(scales), m, k }
    }

    /// Decodes this thread's part of a strip: one k-block of the `row`-th eight tokens. The last token is repeated in
    /// places past the last one.
    ///
    /// # Safety
    /// The tokens at the addresses are valid, and nobody writes them. The k-block begins before the end of K.
    #[inline(always)]
    unsafe fn decode(self, row: u32, k_block: u32) -> StripPart {
        let Self { values, scales, m, k } = self;
        let (token, word) = (lane_id() % CORE_MATRIX_ROWS, lane_id() / CORE_MATRIX_ROWS);
        let token = (row * CORE_MATRIX_ROWS + token).min(m - 1);
        let values = values + u64::from(token) * u64::from(k / 2) + u64::from(k_block * K_BLOCK_BYTES + word * 4);
        // A word has four scales, two per lane: bytes 0 and 2 scale the first words, bytes 1 and 3 the last words.
        let selector = if word < SCALE_WORDS { 0x20 } else { 0x31 };
        // SAFETY: the loads read words of the token and of its scales. The predicate disables them past the end of K.
        unsafe {
            let codes: [u32; ROW_LANES as usize] = core::array::from_fn(|lane| {
                let lane = lane as u32;
                let present = k_block * K_BLOCK + lane * LANE_ELEMENTS < k;
                ld_global_nc_b32_or_zero(present, values + u64::from(lane * LANE_BYTES))
            });
            let scales: [Scales; K_BLOCK_SCALE_TILES as usize] = core::array::from_fn(|tile| {
                let (tile, tiles) = (k_block * K_BLOCK_SCALE_TILES + tile as u32, k.div_ceil(SCALE_TILE_K));
                let word = ld_global_nc_b32_or_zero(tile < tiles, scales + scale_word_offset(token, tile, tiles));
                Scales::new(prmt_b32(word, 0, selector) as u16)
            });
            StripPart(core::array::from_fn(|lane| decode(codes[lane], scales[lane / 2].twice(lane % 2))))
        }
    }
}

impl StripPart {
    /// Calls `store` for each row of a core matrix, with its offset in the strip.
    #[inline(always)]
    fn store(&self, store: impl Fn(u32, [u32; ROW_LANES as usize])) {
        let (token, word) = (lane_id() % CORE_MATRIX_ROWS, lane_id() / CORE_MATRIX_ROWS);
        for pair in 0..WORD_PAIRS {
            let core_matrix = word * WORD_PAIRS as u32 + pair as u32;
            let offset = core_matrix * CORE_MATRIX_BYTES + token * CORE_MATRIX_ROW_BYTES;
            store(offset, core::array::from_fn(|lane| self.0[lane][pair]));
        }
    }
}
