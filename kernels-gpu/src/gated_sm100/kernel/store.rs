//! The epilogue: accumulators → C. Four warps, each for a quarter of the block's rows.

use cuda_std::{
    fence::{fence_proxy_async_shared, fence_proxy_tensormap_acquire},
    global::st_global_v4_b32,
    shared::{ld_shared_v4_b32, st_shared_b16},
    tcgen05::{
        tcgen05_fence_after_thread_sync, tcgen05_fence_before_thread_sync, tcgen05_ld_32x32b_x8,
        tcgen05_ld_32x32b_x8_twice, tmem_lane,
    },
    tma::{
        cp_async_bulk_commit_group, cp_async_bulk_tensor_2d_global_shared, cp_async_bulk_wait_group,
        cp_async_bulk_wait_group_read,
    },
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp},
};

use super::Sm100;
use crate::{
    epilogue::{convert, silu},
    gated_sm100::abi::{BOX_BYTES, BOX_COLUMNS, BOX_TOKENS, Group, N_STEP, Store, Tile},
    ring::Ring,
};

/// Bytes of an element of C.
const ELEMENT_BYTES: u32 = 2;

/// Bytes of a warp's columns of a token.
const TOKEN_BYTES: u32 = WARP_SIZE * ELEMENT_BYTES;

/// Bytes that a lane stores at once.
const LANE_BYTES: u32 = 16;

/// Elements of them.
const ELEMENTS_PER_LANE: u32 = LANE_BYTES / ELEMENT_BYTES;

/// Lanes that store a token's columns.
const LANES_PER_TOKEN: u32 = TOKEN_BYTES / LANE_BYTES;

const _: () = {
    assert!(WARP_SIZE / LANES_PER_TOKEN == N_STEP, "a warp stores what it has at a time");
    assert!(BOX_COLUMNS == WARP_SIZE && BOX_BYTES == TOKEN_BYTES && BOX_TOKENS.is_multiple_of(N_STEP));
};

/// A lane's sums of 8 tokens, by matrix; the plain kernel has one.
type Sums = [[f32; N_STEP as usize]; 2];

/// A warp of the epilogue.
///
/// Each lane has a column of C, in tensor memory a lane of all tokens, 8 of which it takes at a time. They pass through
/// one of two buffers of the warp in shared memory, a token's 32 columns side by side.
pub(super) struct Epilogue<const INDEX: usize, const BLOCKS: u32> {
    block: Sm100<INDEX, BLOCKS>,
    accumulators: Ring<BLOCKS>,
    /// The first of the warp's columns of C in its block's.
    first_column: u32,
    /// The warp's lanes of tensor memory.
    tmem: u32,
    /// The buffer at hand, and the other.
    buffers: [u32; 2],
    /// The group whose map of C is known to this thread's stores.
    map: u32,
}

impl<const INDEX: usize, const BLOCKS: u32> Epilogue<INDEX, BLOCKS> {
    #[inline(always)]
    pub fn new(block: Sm100<INDEX, BLOCKS>, warp: u32) -> Self {
        let bytes = Sm100::<INDEX, BLOCKS>::INSTANCE.store_bytes();
        let buffer = block.shared + Sm100::<INDEX, BLOCKS>::BUFFERS + warp * 2 * bytes;
        Self {
            block,
            accumulators: block.accumulators(),
            first_column: warp * WARP_SIZE,
            tmem: tmem_lane(block.tmem, warp * WARP_SIZE),
            buffers: [buffer, buffer + bytes],
            map: u32::MAX,
        }
    }

    /// Waits for the next tile's accumulator and stores it.
    #[inline(always)]
    pub unsafe fn store(&mut self, tile: &Tile, group: &Group) {
        // SAFETY: an accumulator is read while it is full, by this warp's lanes alone; the buffers are this warp's.
        unsafe {
            self.accumulators.wait_full();
            tcgen05_fence_after_thread_sync();
            for token in (0..tile.tokens).step_by(N_STEP as usize) {
                let sums = self.load_sums(token);
                let last = token + N_STEP >= tile.tokens;
                if last {
                    // All is read: the next tile's MMAs may overwrite it while this one is stored.
                    tcgen05_fence_before_thread_sync();
                    sync_warp(ALL_LANES);
                    if lane_id() == 0 {
                        Ring::<BLOCKS>::arrive(self.accumulators.empty());
                    }
                }
                match Sm100::<INDEX, BLOCKS>::INSTANCE.store {
                    Store::Direct => {
                        self.stage(0, &sums, group);
                        self.store_lanes(tile, group, token);
                    }
                    Store::Tma => {
                        let in_box = token % BOX_TOKENS;
                        self.stage(in_box, &sums, group);
                        if last || in_box + N_STEP == BOX_TOKENS {
                            self.store_box(tile, group, token - in_box);
                        }
                    }
                }
            }
        }
        self.accumulators.advance();
    }

    /// Waits until all is stored, and nobody reads the buffers any more.
    #[inline(always)]
    pub fn finish(self) {
        if matches!(Sm100::<INDEX, BLOCKS>::INSTANCE.store, Store::Tma) {
            cp_async_bulk_wait_group::<0>();
        }
    }

    /// This lane's sums of 8 tokens.
    #[inline(always)]
    unsafe fn load_sums(&self, token: u32) -> Sums {
        let address =
            |matrix| self.tmem + Sm100::<INDEX, BLOCKS>::accumulator(self.accumulators.index(), matrix) + token;
        // SAFETY: the caller's promise: a full accumulator, all lanes together.
        let sums = unsafe {
            if Sm100::<INDEX, BLOCKS>::MATRICES == 2 {
                tcgen05_ld_32x32b_x8_twice([address(0), address(1)])
            } else {
                [tcgen05_ld_32x32b_x8(address(0)), [0; N_STEP as usize]]
            }
        };
        sums.map(|sums| sums.map(f32::from_bits))
    }

    /// Scales and activates a lane's sums of 8 tokens, and writes them to the buffer, from this token of it on.
    #[inline(always)]
    unsafe fn stage(&self, token: u32, sums: &Sums, group: &Group) {
        let value = |token: usize| {
            let gate = group.alpha[0] * sums[0][token];
            if Sm100::<INDEX, BLOCKS>::MATRICES == 2 { silu(gate) * (group.alpha[1] * sums[1][token]) } else { gate }
        };
        let address = self.buffers[0] + token * TOKEN_BYTES + lane_id() * ELEMENT_BYTES;
        for token in (0..N_STEP).step_by(2) {
            let pair = convert(self.block.launch.output, value(token as usize), value(token as usize + 1));
            let address = address + token * TOKEN_BYTES;
            // SAFETY: inside of this warp's buffer, which no lane reads now.
            unsafe {
                st_shared_b16(address, pair as u16);
                st_shared_b16(address + TOKEN_BYTES, (pair >> 16) as u16);
            }
        }
    }

    /// Stores the 8 tokens of the buffer: four lanes have a token's 32 columns, 16 bytes each.
    #[inline(always)]
    unsafe fn store_lanes(&mut self, tile: &Tile, group: &Group, token: u32) {
        let lane = lane_id();
        let token = token + lane / LANES_PER_TOKEN;
        let column = self.block.first_row(tile) + self.first_column + lane % LANES_PER_TOKEN * ELEMENTS_PER_LANE;
        // SAFETY: the buffer is written, and read by its own lanes; a store is inside of C, each element once.
        unsafe {
            sync_warp(ALL_LANES);
            let elements = ld_shared_v4_b32(self.buffers[0] + lane * LANE_BYTES);
            // N is a multiple of 8, so a lane's columns are all inside or all outside.
            if token < tile.tokens && column < group.n {
                let row = u64::from(tile.first_token + token);
                let element = row * u64::from(group.n) + u64::from(column);
                st_global_v4_b32(group.c + element * u64::from(ELEMENT_BYTES), elements);
            }
        }
        // The next 8 tokens do not wait until all lanes have read these.
        self.buffers.reverse();
    }

    /// Stores the buffer as a box that starts at this token. What of it lies outside of C is no token of the tile: only a
    /// group's last tile is not of whole boxes.
    #[inline(always)]
    unsafe fn store_box(&mut self, tile: &Tile, group: &Group, token: u32) {
        let column = self.block.first_row(tile) + self.first_column;
        // SAFETY: the group's own map; the buffer is written, and the other one read, before it is written again.
        unsafe {
            fence_proxy_async_shared();
            sync_warp(ALL_LANES);
            if lane_id() == 0 {
                if self.map != tile.group {
                    self.map = tile.group;
                    fence_proxy_tensormap_acquire(group.c_map);
                }
                if column < group.n {
                    let at = [(column * ELEMENT_BYTES) as i32, (tile.first_token + token) as i32];
                    cp_async_bulk_tensor_2d_global_shared(group.c_map, at, self.buffers[0]);
                }
                // A group each time, an empty one too: its number says which buffer it reads.
                cp_async_bulk_commit_group();
                cp_async_bulk_wait_group_read::<1>();
            }
            sync_warp(ALL_LANES);
        }
        self.buffers.reverse();
    }
}
