//! The warps that gather tokens, 16 bytes a copy, to the buffers that `wgmma` reads.
//!
//! 16 bytes of a token are a row of a core matrix. In a strip, eight tokens, core matrix c has the tokens' c-th 16 bytes of the
//! k-block. A warp's copy has eight tokens and four core matrices: the lanes of a quarter warp write 128 bytes that lie
//! together, and read from each token 64 bytes that lie together.

use cuda_std::{
    cp_async::{cp_async_16_or_zero, cp_async_commit_group, cp_async_wait_group},
    fence::fence_proxy_async_shared,
    global::{GlobalAddress, ld_relaxed_gpu_global_b32},
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    mbarrier::mbarrier_arrive,
    shared::{SharedAddress, ld_shared_b32, st_shared_b32},
    warp::{ALL_LANES, lane_id, sync_warp},
};

use super::{Moe, tiles::Tile};
use crate::{
    moe_sm90::abi::{SOURCE_BYTES, STRIP_SOURCE_BYTES},
    ring::Ring,
    sm90::{CORE_MATRIX_BYTES, CORE_MATRIX_ROWS, K_BLOCK, STRIP_BYTES},
    units::{block_columns, block_start, k_blocks},
};

/// Bytes of a copy: a row of a core matrix.
const CHUNK_BYTES: u32 = 16;

/// Elements of a copy.
const CHUNK_ELEMENTS: u32 = CHUNK_BYTES / 2;

/// Core matrices that a warp's copy has rows of.
const COPY_CHUNKS: u32 = 4;

/// Copies that bring a strip.
const STRIP_COPIES: u32 = K_BLOCK / CHUNK_ELEMENTS / COPY_CHUNKS;

impl<const INDEX: usize, const BF16: bool, const P: usize> Moe<INDEX, BF16, P> {
    /// How many buffers may be on their way to a warp before it waits for the first of them.
    ///
    /// The next buffer to fill has been emptied when the one two before it has been multiplied. So the warpgroups have one more to
    /// multiply while this warp waits.
    const AHEAD: u32 = Self::INSTANCE.buffers - 2;

    /// Gathers the tokens of the block's tiles. One warp, the `warp`-th of [`Self::TOKEN_WARPS`]; each brings every third strip.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`. The barriers have been initialised. The whole warp calls it together.
    #[inline(always)]
    pub(super) unsafe fn gather_tokens(&self, warp: u32) {
        let (mut tiles, mut buffers, k) = (self.tiles(), self.buffers(), self.launch.k);
        let mut arrivals = Arrivals { buffers, pending: 0 };
        // SAFETY: tokens and lists are complete after the wait. A buffer is written while it is empty.
        unsafe {
            griddepcontrol_wait();
            griddepcontrol_launch_dependents();
            loop {
                tiles.wait_full();
                let tile = Tile::read(self.slot(tiles));
                sync_warp(ALL_LANES);
                if lane_id() == 0 {
                    mbarrier_arrive(tiles.empty());
                }
                tiles.advance();
                if tile.tokens == 0 {
                    break;
                }
                let strips = Self::INSTANCE.shape().mma_n(tile.tokens) / CORE_MATRIX_ROWS;
                self.write_sources(&tile, warp, strips);
                for k_block in 0..k_blocks(k) {
                    let (mut columns, mut first) = (K_BLOCK, k_block * (K_BLOCK / CHUNK_ELEMENTS));
                    if k_block >= k / K_BLOCK {
                        (columns, first) = (block_columns(k, k_block), block_start(k, k_block) / CHUNK_ELEMENTS);
                    }
                    buffers.wait_empty();
                    let buffer = Self::buffer(self.shared, buffers);
                    let mut strip = warp;
                    while strip < strips {
                        let source = ld_shared_b32(self.source(strip)) + first;
                        for copy in 0..STRIP_COPIES {
                            let chunk = lane_id() / CORE_MATRIX_ROWS + copy * COPY_CHUNKS;
                            let source = u64::from(source + chunk) * u64::from(CHUNK_BYTES);
                            let target = buffer + strip * STRIP_BYTES + chunk * CORE_MATRIX_BYTES;
                            cp_async_16_or_zero(
                                chunk * CHUNK_ELEMENTS < columns,
                                target + lane_id() % CORE_MATRIX_ROWS * CHUNK_BYTES,
                                GlobalAddress::new(self.launch.tokens) + source,
                            );
                        }
                        strip += Self::TOKEN_WARPS;
                    }
                    cp_async_commit_group();
                    buffers.advance();
                    arrivals.pending += 1;
                    if arrivals.pending > Self::AHEAD {
                        Self::wait_for_first();
                        arrivals.arrive();
                    }
                }
            }
            cp_async_wait_group::<0>();
            while arrivals.pending > 0 {
                arrivals.arrive();
            }
        }
    }

    /// Waits until only the newest [`Self::AHEAD`] buffers are on their way.
    #[inline(always)]
    fn wait_for_first() {
        // A constant of a type cannot be an argument of a function's.
        match const { Self::AHEAD } {
            1 => cp_async_wait_group::<1>(),
            2 => cp_async_wait_group::<2>(),
            4 => cp_async_wait_group::<4>(),
            _ => cp_async_wait_group::<0>(),
        }
    }

    /// Where this lane keeps where its token of a strip begins.
    #[inline(always)]
    fn source(&self, strip: u32) -> SharedAddress {
        self.shared + Self::SOURCES + strip * STRIP_SOURCE_BYTES + lane_id() * SOURCE_BYTES
    }

    /// Writes down where this lane's token of each of the warp's strips begins, in copies from the first token. Past the tile's last
    /// token it is the last one again: what becomes of it is not written to C.
    ///
    /// # Safety
    /// The lists are complete.
    #[inline(always)]
    unsafe fn write_sources(&self, tile: &Tile, warp: u32, strips: u32) {
        let mut strip = warp;
        while strip < strips {
            let row = (strip * CORE_MATRIX_ROWS + lane_id() % CORE_MATRIX_ROWS).min(tile.tokens - 1) + tile.first_row;
            // SAFETY: the list has a number for every row; the place is this lane's.
            unsafe {
                let token = if self.launch.rows == 0 {
                    row
                } else {
                    ld_relaxed_gpu_global_b32(GlobalAddress::new(self.launch.rows) + u64::from(row) * 4)
                };
                st_shared_b32(self.source(strip), token * (self.launch.k / CHUNK_ELEMENTS));
            }
            strip += Self::TOKEN_WARPS;
        }
    }
}

/// The buffers that are on their way to a warp.
struct Arrivals {
    /// Stands at the first of them.
    buffers: Ring,
    /// How many they are.
    pending: u32,
}

impl Arrivals {
    /// Says that the first of them has its copies.
    ///
    /// # Safety
    /// This thread has seen its copies to it complete. The whole warp calls it together.
    #[inline(always)]
    unsafe fn arrive(&mut self) {
        // wgmma reads B through the asynchronous proxy.
        fence_proxy_async_shared();
        // SAFETY: every warp that gathers arrives once for each buffer.
        unsafe {
            sync_warp(ALL_LANES);
            if lane_id() == 0 {
                mbarrier_arrive(self.buffers.full());
            }
        }
        self.buffers.advance();
        self.pending -= 1;
    }
}
