//! The epilogue: accumulators → C. Eight warps, two for each quarter of the block's rows.

use cuda_std::{
    fence::{fence_proxy_async_shared, fence_proxy_tensormap_acquire},
    global::{GlobalAddress, st_global_v4_b32},
    shared::{SharedAddress, ld_shared_v4_b32, st_shared_b16},
    tcgen05::{
        TmemAddress, tcgen05_fence_after_thread_sync, tcgen05_fence_before_thread_sync, tcgen05_ld_32x32b_x8,
        tcgen05_ld_32x32b_x8_twice,
    },
    tma::{
        TensorMapAddress, cp_async_bulk_commit_group, cp_async_bulk_tensor_2d_global_shared, cp_async_bulk_wait_group,
        cp_async_bulk_wait_group_read,
    },
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp},
};

use super::{Placed, Sm100, Sums, Work};
use crate::{
    epilogue::convert,
    format::BLOCK,
    gated_sm100::abi::{BOX_BYTES, BOX_COLUMNS, BOX_TOKENS, EPILOGUE_WARPS, N_STEP, QUARTERS, Store, Tile},
    nvfp4_blocks::QuantisedTile,
    ring::Ring,
};

/// Bytes of an element of C.
const ELEMENT_BYTES: u32 = 2;

/// Bytes of a token's columns that are a warp's.
const TOKEN_BYTES: u32 = WARP_SIZE * ELEMENT_BYTES;

/// Bytes that a lane stores at once.
const LANE_BYTES: u32 = 16;

/// Elements that a lane stores at once.
const ELEMENTS_PER_LANE: u32 = LANE_BYTES / ELEMENT_BYTES;

/// Lanes that together store a token's columns.
const LANES_PER_TOKEN: u32 = TOKEN_BYTES / LANE_BYTES;

/// The bit in which the numbers of the two lanes differ that have a block of a token in NVFP4.
const BLOCK_LANES: u32 = 1;

const _: () = {
    assert!(WARP_SIZE / LANES_PER_TOKEN == N_STEP, "a warp stores as many tokens at once as it loads");
    assert!(BOX_COLUMNS == WARP_SIZE && BOX_BYTES == TOKEN_BYTES && BOX_TOKENS.is_multiple_of(N_STEP));
    assert!(2 * ELEMENTS_PER_LANE == BLOCK);
};

/// Warps of a quarter.
const PARTS: u32 = EPILOGUE_WARPS / QUARTERS;

/// A warp of the epilogue.
///
/// Each lane has a column of C, which is a lane of tensor memory with all tokens. It takes 8 tokens at a time. They pass
/// through one of the warp's two buffers in shared memory, where a token's 32 columns lie side by side. The warps of a quarter
/// fill and store their buffers in turns, each as many tokens as a buffer holds.
pub(super) struct Epilogue<W: Work, const BLOCKS: u32> {
    block: Sm100<W, BLOCKS>,
    accumulators: Ring<BLOCKS>,
    /// Which of its quarter's warps it is, from 0.
    part: u32,
    /// The warp's first column of C, counted from its block's first.
    first_column: u32,
    /// The warp's lanes of tensor memory.
    tmem: TmemAddress,
    /// The current buffer, and the other.
    buffers: [SharedAddress; 2],
    /// The group whose map of C is known to this thread's stores.
    map: u32,
}

impl<W: Work, const BLOCKS: u32> Epilogue<W, BLOCKS> {
    #[inline(always)]
    pub fn new(block: Sm100<W, BLOCKS>, warp: u32) -> Self {
        let bytes = Sm100::<W, BLOCKS>::INSTANCE.store_bytes();
        let buffer = block.shared + Sm100::<W, BLOCKS>::BUFFERS + warp * 2 * bytes;
        Self {
            block,
            accumulators: block.accumulators(),
            part: warp / QUARTERS,
            first_column: warp % QUARTERS * WARP_SIZE,
            tmem: block.tmem.lane(warp % QUARTERS * WARP_SIZE),
            buffers: [buffer, buffer + bytes],
            map: u32::MAX,
        }
    }

    /// Waits for the next tile's accumulator and stores it.
    ///
    /// # Safety
    /// `group` is the tile's, and the contract holds of it. The whole warp calls it together, for each tile in order; the
    /// warp is the one that [`Self::new`] was told.
    #[inline(always)]
    pub unsafe fn store(&mut self, tile: &Tile, group: &Placed) {
        let buffer_tokens = Sm100::<W, BLOCKS>::INSTANCE.store_tokens();
        let mut token = self.part * buffer_tokens;
        // SAFETY: the accumulator is read while it is full; its lanes are this quarter's, and the buffers this warp's alone.
        unsafe {
            let column = self.block.work.column(tile, self.block.first_row(tile) + self.first_column + lane_id());
            let quantised = self.block.work.quantised(tile, group);
            self.accumulators.wait_full();
            tcgen05_fence_after_thread_sync();
            if token >= tile.tokens {
                self.release();
            }
            while token < tile.tokens {
                let tokens = self.block.work.tokens(tile, group, token);
                let sums = self.load_sums(token);
                let in_buffer = token % buffer_tokens;
                let fills = in_buffer + N_STEP == buffer_tokens;
                let next = token + N_STEP + if fills { (PARTS - 1) * buffer_tokens } else { 0 };
                let last = next >= tile.tokens;
                if last {
                    self.release();
                }
                self.stage(in_buffer, self.block.work.values(group, &column, &tokens, &sums));
                match Sm100::<W, BLOCKS>::INSTANCE.store {
                    Store::Direct => self.store_lanes(tile, group, quantised, token),
                    Store::Tma if last || fills => self.store_box(tile, group, token - in_buffer),
                    Store::Tma => {}
                }
                token = next;
            }
        }
        self.accumulators.advance();
    }

    /// Tells that this warp has read all that it reads of the accumulator. The next tile's MMAs may overwrite it while this one is
    /// stored.
    ///
    /// # Safety
    /// The whole warp calls it together, once for each tile.
    #[inline(always)]
    unsafe fn release(&self) {
        // SAFETY: what `# Safety` above asks; the barrier's phase lacks this warp's arrival.
        unsafe {
            tcgen05_fence_before_thread_sync();
            sync_warp(ALL_LANES);
            if lane_id() == 0 {
                Ring::<BLOCKS>::arrive(self.accumulators.empty());
            }
        }
    }

    /// Waits until all is stored and no copy reads the buffers any more.
    #[inline(always)]
    pub fn finish(self) {
        if matches!(Sm100::<W, BLOCKS>::INSTANCE.store, Store::Tma) {
            cp_async_bulk_wait_group::<0>();
        }
    }

    /// This lane's sums of 8 tokens of the tile, from `token` on.
    ///
    /// # Safety
    /// The accumulator is full. The whole warp calls it together.
    #[inline(always)]
    unsafe fn load_sums(&self, token: u32) -> Sums {
        let accumulator = |matrix| self.tmem.column(Sm100::<W, BLOCKS>::accumulator(self.accumulators.index(), matrix));
        let address = |matrix| accumulator(matrix).column(token);
        // SAFETY: what `# Safety` above asks; the lanes are those that this warp may access.
        let sums = unsafe {
            if Sm100::<W, BLOCKS>::MATRICES == 2 {
                tcgen05_ld_32x32b_x8_twice([address(0), address(1)])
            } else {
                [tcgen05_ld_32x32b_x8(address(0)), [0; N_STEP as usize]]
            }
        };
        sums.map(|sums| sums.map(f32::from_bits))
    }

    /// Writes a lane's values of 8 tokens to the buffer, where they are the tokens from `token` on.
    ///
    /// # Safety
    /// The buffer has room for them, and no lane or copy reads it now.
    #[inline(always)]
    unsafe fn stage(&self, token: u32, values: [f32; N_STEP as usize]) {
        let address = self.buffers[0] + token * TOKEN_BYTES + lane_id() * ELEMENT_BYTES;
        // All values come before the first store, which the compiler moves nothing across: they are long chains, and run beside
        // each other.
        for token in (0..N_STEP).step_by(2) {
            let pair = convert(self.block.work.output(), values[token as usize], values[token as usize + 1]);
            let address = address + token * TOKEN_BYTES;
            // SAFETY: inside of the buffer, in this lane's own column.
            unsafe {
                st_shared_b16(address, pair as u16);
                st_shared_b16(address + TOKEN_BYTES, (pair >> 16) as u16);
            }
        }
    }

    /// Stores the 8 tokens of the buffer, which are the tile's from `token` on. Four lanes store a token's 32 columns, 16
    /// bytes each.
    ///
    /// # Safety
    /// Every lane has written its part of the buffer. The whole warp calls it together; the contract holds of `group`, and `quantised` is
    /// the tile's.
    #[inline(always)]
    unsafe fn store_lanes(&mut self, tile: &Tile, group: &Placed, quantised: QuantisedTile, token: u32) {
        let lane = lane_id();
        let token = token + lane / LANES_PER_TOKEN;
        let column = self.block.first_row(tile) + self.first_column + lane % LANES_PER_TOKEN * ELEMENTS_PER_LANE;
        // SAFETY: the lanes meet between writing and reading the buffer. What is stored lies inside of C and is this lane's.
        unsafe {
            sync_warp(ALL_LANES);
            let elements = ld_shared_v4_b32(self.buffers[0] + lane * LANE_BYTES);
            // N is a multiple of 8, so that a lane's columns are all inside or all outside.
            if self.block.work.writes_bits16() && token < tile.tokens && column < group.n {
                let row = u64::from(tile.first_token + token);
                let element = row * u64::from(group.n) + u64::from(column);
                st_global_v4_b32(GlobalAddress::new(group.c) + element * u64::from(ELEMENT_BYTES), elements);
            }
            if quantised.is_there() {
                quantised.store::<BLOCK_LANES, BLOCK_LANES, 4>(elements, token, column);
            }
        }
        // The next 8 tokens go to the other buffer, and need not wait until all lanes have read this one.
        self.buffers.reverse();
    }

    /// Stores the buffer as a box that starts at this token of the tile. Where the box has more tokens than the tile, they lie
    /// outside of C, since only a group's last tile is not whole boxes.
    ///
    /// # Safety
    /// As [`Self::store_lanes`].
    #[inline(always)]
    unsafe fn store_box(&mut self, tile: &Tile, group: &Placed, token: u32) {
        let column = self.block.first_row(tile) + self.first_column;
        // SAFETY: the group's own map. All lanes have written the buffer before one of them copies it. The warp goes on when
        // the other buffer, which is written next, has been read.
        unsafe {
            fence_proxy_async_shared();
            sync_warp(ALL_LANES);
            if lane_id() == 0 {
                if self.map != tile.group {
                    self.map = tile.group;
                    fence_proxy_tensormap_acquire(TensorMapAddress::new(group.c_map));
                }
                if column < group.n {
                    let at = [(column * ELEMENT_BYTES) as i32, (tile.first_token + token) as i32];
                    let map = TensorMapAddress::new(group.c_map);
                    cp_async_bulk_tensor_2d_global_shared(map, at, self.buffers[0]);
                }
                // A group each time, even an empty one: then all but the newest group are those that read the other buffer.
                cp_async_bulk_commit_group();
                cp_async_bulk_wait_group_read::<1>();
            }
            sync_warp(ALL_LANES);
        }
        self.buffers.reverse();
    }
}
