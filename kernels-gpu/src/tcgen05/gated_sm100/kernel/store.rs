//! Epilogue: converts accumulators to C. [`Instance::parts`] warps per quarter of the CTA's rows.
//!
//! [`Instance::parts`]: crate::tcgen05::gated_sm100::abi::Instance::parts

use cuda_std::{
    cluster::mapa,
    fence::{fence_proxy_async_shared, fence_proxy_tensormap_acquire},
    float::add_rn_f32x2,
    global::{GlobalAddress, st_global_v4_b32},
    mbarrier::{Mbarrier, mbarrier_arrive_expect_tx, st_async_shared_cluster_v4_b32},
    mma::ldmatrix_x4_trans_b16,
    shared::{SharedAddress, ld_shared_v4_b32, st_shared_b16, st_shared_v4_b32},
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

use super::{
    sm100::{FULL, LEFT, Sm100},
    work::{Placed, Sums, Work},
};
use crate::{
    epilogue::convert,
    format::BLOCK,
    nvfp4_blocks::QuantizedTile,
    ring::Ring,
    tcgen05::gated_sm100::abi::{
        BOX_BYTES, BOX_COLUMNS, BOX_TOKENS, HALF_STEP, Halves, N_STEP, QUARTERS, SLOT_BYTES, SLOTS, Store, Tile,
    },
};

/// Bytes per element of C.
const ELEMENT_BYTES: u32 = 2;

/// Bytes of a token's columns of one warp.
const TOKEN_BYTES: u32 = WARP_SIZE * ELEMENT_BYTES;

/// Bytes per store of a lane.
const LANE_BYTES: u32 = 16;

/// Elements per store of a lane.
const ELEMENTS_PER_LANE: u32 = LANE_BYTES / ELEMENT_BYTES;

/// Number of lanes that together store a token's columns.
const LANES_PER_TOKEN: u32 = TOKEN_BYTES / LANE_BYTES;

/// Two lanes share a block of a token in NVFP4. Their indices differ in this bit.
const BLOCK_LANES: u32 = 1;

const _: () = {
    assert!(WARP_SIZE / LANES_PER_TOKEN == N_STEP, "a warp must store as many tokens at once as it loads");
    assert!(BOX_COLUMNS == WARP_SIZE && BOX_BYTES == TOKEN_BYTES && BOX_TOKENS.is_multiple_of(N_STEP));
    assert!(2 * ELEMENTS_PER_LANE == BLOCK);
};

/// Bytes of a piece of a slot: 16 per lane.
const PIECE_BYTES: u32 = WARP_SIZE * LANE_BYTES;

/// Groups of [`N_STEP`] tokens per half step of a pair with one matrix per CTA, and pieces per group.
const GROUPS: usize = (HALF_STEP / N_STEP) as usize;
const PIECES: u32 = SLOT_BYTES / PIECE_BYTES / GROUPS as u32;

const _: () = assert!(SLOTS.is_power_of_two() && PIECES == 2);

const _: () =
    assert!(N_STEP * ELEMENT_BYTES == LANE_BYTES, "the `N_STEP` elements of a lane must fill one row of `ldmatrix`");

/// Offset in a buffer where a lane writes the [`N_STEP`] elements of its column, 16 bytes. Eight columns lie side by
/// side, in a different order in each group of eight, so neither writes nor `ldmatrix` have bank conflicts.
#[inline(always)]
const fn written_at(column: u32) -> u32 {
    (column ^ (column / 8 * 2)) * LANE_BYTES
}

/// Offset in a buffer of the address that a lane passes to `ldmatrix`: the column that is row `lane % 8` of matrix
/// `lane / 8`. The matrices have the columns 0 and 1, 2 and 3, 4 and 5, 6 and 7 of each group of eight, so a lane gets
/// eight columns of a token.
#[inline(always)]
const fn read_at(lane: u32) -> u32 {
    let (matrix, row) = (lane / 8, lane % 8);
    written_at(row / 2 * 8 + matrix * 2 + row % 2)
}

/// Places where a lane stores a tile: 16 bytes at its columns of each row.
#[derive(Clone, Copy)]
struct Rows {
    /// Column of C, and whether C has this column.
    column: u32,
    is_there: bool,
    /// Address of these columns in the tile's first row.
    first: GlobalAddress,
    row_bytes: u32,
}

/// A lane's sums of one matrix for half a step of a pair with one matrix per CTA.
type HalfStep = [[f32; N_STEP as usize]; GROUPS];

/// Returns the element-wise sum.
#[inline(always)]
fn added(mut a: [f32; N_STEP as usize], b: [f32; N_STEP as usize]) -> [f32; N_STEP as usize] {
    for (pair, sums) in a.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        *sums = add_rn_f32x2(*sums, [b[2 * pair], b[2 * pair + 1]]);
    }
    a
}

/// A warp of the epilogue.
///
/// Each lane has one column of C, which is a lane of tensor memory with all tokens. It takes 8 tokens at a time. They
/// pass through one of the warp's two buffers in shared memory, where a token's 32 columns lie side by side. The warps
/// of a quarter take turns; in each turn a warp fills a buffer and stores it.
pub(super) struct Epilogue<W: Work, const BLOCKS: u32> {
    block: Sm100<W, BLOCKS>,
    accumulators: Ring<BLOCKS>,
    /// Index of the warp among its quarter's warps, from 0.
    part: u32,
    /// First column of C of the warp, relative to the first column of its CTA.
    first_column: u32,
    /// The warp's lanes of tensor memory.
    tmem: TmemAddress,
    /// Current buffer, and the other buffer.
    buffers: [SharedAddress; 2],
    /// Offsets in a buffer where this lane writes and reads.
    written: u32,
    read: u32,
    /// Group whose tensor map of C is visible to this thread's stores.
    map: u32,
    /// For a pair with one matrix per CTA: the warp's first slot, its barrier, and the number of steps sent and
    /// received.
    slots: SharedAddress,
    slot_barriers: Mbarrier,
    sent: u32,
    received: u32,
    /// The warp's inbox for sums of the last tile from other CTAs, and its barrier.
    inbox: SharedAddress,
    inbox_barrier: Mbarrier,
}

impl<W: Work, const BLOCKS: u32> Epilogue<W, BLOCKS> {
    /// Number of warps per quarter.
    const PARTS: u32 = Sm100::<W, BLOCKS>::INSTANCE.parts();
    /// Number of CTAs that finish a part of a tile each, and bytes that one of them receives per step from the others.
    const FINISHERS: u32 = Sm100::<W, BLOCKS>::INSTANCE.finishers();
    const INBOX_STEP: u32 = (Self::FINISHERS - 1) * SLOT_BYTES;
    /// Whether a step is 16 tokens: if the products' N is a multiple of 16 and a lane has one sum per element.
    const IS_WIDE: bool = {
        let instance = Sm100::<W, BLOCKS>::INSTANCE;
        BLOCKS > 1 && instance.matrices == 1 && instance.splits == 1 && matches!(instance.store, Store::Direct)
    };

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
            written: written_at(lane_id()),
            read: read_at(lane_id()),
            map: u32::MAX,
            slots: block.shared + Sm100::<W, BLOCKS>::SLOTS + warp * SLOTS * SLOT_BYTES,
            slot_barriers: Mbarrier::at(block.shared + Sm100::<W, BLOCKS>::SLOT_BARRIERS).nth(warp * SLOTS),
            sent: 0,
            received: 0,
            inbox: block.shared + warp * Sm100::<W, BLOCKS>::INSTANCE.inbox_bytes(),
            inbox_barrier: Mbarrier::at(block.shared + Sm100::<W, BLOCKS>::INBOX_BARRIERS).nth(warp),
        }
    }

    /// Waits for the next tile's accumulator and stores the part of the tile that this CTA finishes. If the tile is the
    /// last one, the warp arrives at [`LEFT`] as soon as it has read the accumulator, so the owner of the tensor memory
    /// need not wait for the stores.
    ///
    /// # Safety
    /// The requirements of [`Self::store_all`] and [`Self::store_half`].
    #[inline(always)]
    pub unsafe fn store(&mut self, tile: &Tile, group: &Placed, is_last: bool) {
        // SAFETY: the instance decides which function stores, and the caller guarantees what each of them requires.
        unsafe {
            match Sm100::<W, BLOCKS>::INSTANCE.halves {
                Halves::Rows if Self::IS_WIDE => self.store_wide(tile, group, is_last),
                Halves::Rows if Self::FINISHERS == 1 => self.store_all(tile, group, is_last),
                // If K is split, the last tile is the only one.
                Halves::Rows => self.store_last::<0>(tile, group),
                // A separate call per rank, so that the matrix of this CTA is a compile-time constant.
                Halves::Matrices if is_last && self.block.rank == 0 => self.store_last::<0>(tile, group),
                Halves::Matrices if is_last => self.store_last::<1>(tile, group),
                Halves::Matrices if Sm100::<W, BLOCKS>::INSTANCE.splits > 1 => {}
                Halves::Matrices if self.block.rank == 0 => self.store_half::<0>(tile, group),
                Halves::Matrices => self.store_half::<1>(tile, group),
            }
        }
    }

    /// Returns the destinations of a tile: the lane's column, the quantized tile, and the rows.
    ///
    /// # Safety
    /// The requirements of [`Self::store_all`].
    #[inline(always)]
    unsafe fn targets(&self, tile: &Tile, group: &Placed) -> (W::Column, QuantizedTile, Rows) {
        // SAFETY: the tile is one of the work's, `group` is its group, and the row is one of the tile's.
        unsafe {
            let column = self.block.work.column(tile, self.block.first_row(tile) + self.first_column + lane_id());
            (column, self.block.work.quantized(tile, group), self.rows(tile, group))
        }
    }

    /// Waits until the accumulator is full, and returns the [destinations](Self::targets). If `first_token` is past the
    /// tile's tokens, releases the accumulator at once.
    ///
    /// # Safety
    /// The requirements of [`Self::store_all`].
    #[inline(always)]
    unsafe fn begin(
        &mut self,
        tile: &Tile,
        group: &Placed,
        first_token: u32,
        is_last: bool,
    ) -> (W::Column, QuantizedTile, Rows) {
        // SAFETY: the whole warp is here; the accumulator is full after the wait, and is released once.
        unsafe {
            let targets = self.targets(tile, group);
            self.accumulators.wait_full();
            tcgen05_fence_after_thread_sync();
            if first_token >= tile.tokens {
                self.release(is_last);
            }
            targets
        }
    }

    /// Waits for the next tile's accumulator and stores it.
    ///
    /// # Safety
    /// `group` is the tile's group, and satisfies the contract of the kernel. The whole warp calls this together, for
    /// each tile in order. The warp has the index that was passed to [`Self::new`].
    #[inline(always)]
    unsafe fn store_all(&mut self, tile: &Tile, group: &Placed, is_last: bool) {
        let buffer_tokens = Sm100::<W, BLOCKS>::INSTANCE.store_tokens();
        let mut token = self.part * buffer_tokens;
        // SAFETY: the accumulator is read while it is full. Its lanes belong to this quarter, and the buffers to this
        // warp alone.
        unsafe {
            let (column, quantized, rows) = self.begin(tile, group, token, is_last);
            while token < tile.tokens {
                let tokens = self.block.work.tokens(tile, group, token);
                let sums = self.load_sums(token);
                let in_buffer = if buffer_tokens == N_STEP { 0 } else { token % buffer_tokens };
                let fills = in_buffer + N_STEP == buffer_tokens;
                let next = token + N_STEP + if fills { (Self::PARTS - 1) * buffer_tokens } else { 0 };
                let last = next >= tile.tokens;
                if last {
                    self.release(is_last);
                }
                let values = self.block.work.values(group, &column, &tokens, &sums);
                match Sm100::<W, BLOCKS>::INSTANCE.store {
                    Store::Direct => self.store_lanes(tile, &rows, quantized, token, values),
                    Store::Tma => {
                        self.stage(in_buffer, values);
                        if last || fills {
                            self.store_box(tile, group, token - in_buffer);
                        }
                    }
                }
                token = next;
            }
        }
        self.accumulators.advance();
    }

    /// Same as [`Self::store_all`], with 16 tokens per step: fewer instructions in total, and twice the number in
    /// parallel.
    ///
    /// # Safety
    /// The requirements of [`Self::store_all`].
    #[inline(always)]
    unsafe fn store_wide(&mut self, tile: &Tile, group: &Placed, is_last: bool) {
        let mut token = self.part * 2 * N_STEP;
        // SAFETY: the accumulator is read while it is full, up to the N of its products, which is a multiple of a step.
        // Its lanes belong to this quarter, and the buffers to this warp alone.
        unsafe {
            let (column, quantized, rows) = self.begin(tile, group, token, is_last);
            let accumulator = self.tmem.column(Sm100::<W, BLOCKS>::accumulator(self.accumulators.index(), 0));
            while token < tile.tokens {
                let [first, second] =
                    tcgen05_ld_32x32b_x8_twice([0, N_STEP].map(|more| accumulator.column(token + more)));
                let next = token + Self::PARTS * 2 * N_STEP;
                if next >= tile.tokens {
                    self.release(is_last);
                }
                let values = |token: u32, sums: [u32; N_STEP as usize]| {
                    let tokens = self.block.work.tokens(tile, group, token);
                    self.block.work.values(group, &column, &tokens, &[sums.map(f32::from_bits), [0.0; N_STEP as usize]])
                };
                let (first, second) = (values(token, first), values(token + N_STEP, second));
                self.store_lanes(tile, &rows, quantized, token, first);
                self.store_lanes(tile, &rows, quantized, token + N_STEP, second);
                token = next;
            }
        }
        self.accumulators.advance();
    }

    /// Waits for the next tile's accumulator, in which this CTA has one matrix and the other CTA of the pair has the
    /// other one. In each step, the first CTA finishes the first [`HALF_STEP`] tokens and the second CTA the next ones.
    /// Each CTA sends its sums of the other tokens to the other CTA.
    ///
    /// # Safety
    /// The requirements of [`Self::store_all`]. The same warp of the other CTA calls this for the same tile.
    #[inline(always)]
    unsafe fn store_half<const RANK: u32>(&mut self, tile: &Tile, group: &Placed) {
        let mut token = self.part * 2 * HALF_STEP;
        // SAFETY: the accumulator is read while it is full, up to the N of its products, which is a multiple of a step.
        // Its lanes belong to this quarter, the buffers to this warp alone, and the slots to this warp and the same
        // warp of the other CTA.
        unsafe {
            let (column, quantized, rows) = self.begin(tile, group, token, false);
            while token < tile.tokens {
                let finished = token + RANK * HALF_STEP;
                let own = self.send::<RANK>(token);
                token += Self::PARTS * 2 * HALF_STEP;
                if token >= tile.tokens {
                    self.release(false);
                }
                let others = self.receive();
                for index in 0..GROUPS {
                    let first = finished + index as u32 * N_STEP;
                    let tokens = self.block.work.tokens(tile, group, first);
                    let sums = if RANK == 0 { [own[index], others[index]] } else { [others[index], own[index]] };
                    let values = self.block.work.values(group, &column, &tokens, &sums);
                    self.store_lanes(tile, &rows, quantized, first, values);
                }
            }
        }
        self.accumulators.advance();
    }

    /// Waits for the accumulator of the CTA's last tile. Other CTAs have sums of this tile too. Stores the part that
    /// this CTA finishes: every [`FINISHERS`](Self::FINISHERS)-th 8 tokens. The warp sends the sums that others finish
    /// before it waits for theirs: the stages are free at this point, and have room for all sums.
    ///
    /// # Safety
    /// The requirements of [`Self::store_all`]. The same warp of each CTA of the cluster calls this for the same tile,
    /// and no tile follows.
    #[inline(always)]
    unsafe fn store_last<const RANK: u32>(&mut self, tile: &Tile, group: &Placed) {
        let splits = Sm100::<W, BLOCKS>::INSTANCE.splits;
        let (first, step) = (self.part * Self::FINISHERS * N_STEP, Self::PARTS * Self::FINISHERS * N_STEP);
        let steps = tile.tokens.saturating_sub(first).div_ceil(step);
        let finisher = match Sm100::<W, BLOCKS>::INSTANCE.halves {
            Halves::Rows => self.block.split,
            Halves::Matrices => self.block.leader() + RANK,
        };
        let accumulator = self.tmem.column(Sm100::<W, BLOCKS>::accumulator(self.accumulators.index(), 0)).column(first);
        let inbox = self.inbox + lane_id() * LANE_BYTES;
        // SAFETY: the accumulator is read while it is full, up to the N of its products, which is a multiple of a step.
        // Its lanes belong to this quarter, the buffers to this warp alone, and each slot of an inbox has one sender.
        // Nobody reads or writes stages any more: the products of both CTAs of the pair are complete, and after
        // `sync::<FULL>` the products of the other pair.
        unsafe {
            let (column, quantized, rows) = self.targets(tile, group);
            if lane_id() == 0 && steps > 0 {
                mbarrier_arrive_expect_tx(self.inbox_barrier, steps * Self::INBOX_STEP);
            }
            self.accumulators.wait_full();
            tcgen05_fence_after_thread_sync();
            if splits > 1 {
                Sm100::<W, BLOCKS>::sync::<FULL>();
            }
            for index in 0..steps {
                for other in 1..Self::FINISHERS {
                    let sums = tcgen05_ld_32x32b_x8(accumulator.column(index * step + (finisher ^ other) * N_STEP));
                    self.send_to(other, inbox + index * Self::INBOX_STEP, sums);
                }
            }
            if steps == 0 {
                self.release(true);
                return;
            }
            self.accumulators.wait(self.inbox_barrier, 0);
            for index in 0..steps {
                let own =
                    tcgen05_ld_32x32b_x8(accumulator.column(index * step + finisher * N_STEP)).map(f32::from_bits);
                if index + 1 == steps {
                    self.release(true);
                }
                let sent = |other: u32| Self::received(inbox + index * Self::INBOX_STEP + (other - 1) * SLOT_BYTES);
                // A sum of two numbers does not depend on their order.
                let [this, other] = match (Sm100::<W, BLOCKS>::INSTANCE.halves, splits) {
                    (Halves::Rows, _) => [added(own, sent(1)), [0.0; N_STEP as usize]],
                    (Halves::Matrices, 1) => [own, sent(1)],
                    (Halves::Matrices, _) => [added(own, sent(2)), added(sent(1), sent(3))],
                };
                let sums = match Sm100::<W, BLOCKS>::INSTANCE.halves {
                    Halves::Matrices if RANK > 0 => [other, this],
                    _ => [this, other],
                };
                let token = first + index * step + finisher * N_STEP;
                let tokens = self.block.work.tokens(tile, group, token);
                let values = self.block.work.values(group, &column, &tokens, &sums);
                self.store_lanes(tile, &rows, quantized, token, values);
            }
        }
    }

    /// Sends this lane's sums of 8 tokens to the CTA whose index among the finishers differs in the bits of `other`.
    ///
    /// # Safety
    /// The requirements of [`Self::store_last`], which calls this for each step with the step's part of the inbox.
    #[inline(always)]
    unsafe fn send_to(&self, other: u32, inbox: SharedAddress, [a, b, c, d, e, f, g, h]: [u32; N_STEP as usize]) {
        let block = (self.block.leader() + self.block.rank)
            ^ match Sm100::<W, BLOCKS>::INSTANCE.halves {
                Halves::Rows => other * BLOCKS,
                Halves::Matrices => other,
            };
        let (slot, barrier) = (inbox + (other - 1) * SLOT_BYTES, self.inbox_barrier.in_block(block));
        // SAFETY: the slot of the other CTA has room for these sums; its barrier expects their bytes; the other CTA has
        // begun and does not end before they arrive.
        unsafe {
            st_async_shared_cluster_v4_b32(mapa(slot, block), [a, b, c, d], barrier);
            st_async_shared_cluster_v4_b32(mapa(slot + PIECE_BYTES, block), [e, f, g, h], barrier);
        }
    }

    /// Returns this lane's sums of 8 tokens in a slot.
    ///
    /// # Safety
    /// The slot is filled, and this lane's bytes begin at `slot`.
    #[inline(always)]
    unsafe fn received(slot: SharedAddress) -> [f32; N_STEP as usize] {
        // SAFETY: the slot was filled, and this lane's 32 bytes begin at `slot`, a multiple of 16.
        let [[a, b, c, d], [e, f, g, h]] = unsafe { [ld_shared_v4_b32(slot), ld_shared_v4_b32(slot + PIECE_BYTES)] };
        [a, b, c, d, e, f, g, h].map(f32::from_bits)
    }

    /// Sends this lane's sums of the tokens of a step that the other CTA finishes, and returns its sums of the tokens
    /// that this CTA finishes.
    ///
    /// # Safety
    /// The requirements of [`Self::store_half`], which calls this for each step.
    #[inline(always)]
    unsafe fn send<const RANK: u32>(&mut self, token: u32) -> HalfStep {
        let accumulator = self.tmem.column(Sm100::<W, BLOCKS>::accumulator(self.accumulators.index(), 0)).column(token);
        let slot = self.sent % SLOTS;
        let barrier = self.slot_barriers.nth(slot).in_block(RANK ^ 1);
        let lane_of_slot = mapa(self.slots + slot * SLOT_BYTES + lane_id() * LANE_BYTES, RANK ^ 1);
        self.sent += 1;
        let mut own = HalfStep::default();
        for (index, own) in (0..).zip(&mut own) {
            let columns = [RANK, RANK ^ 1].map(|block| accumulator.column(block * HALF_STEP + index * N_STEP));
            let piece = |n: u32| lane_of_slot + (index * PIECES + n) * PIECE_BYTES;
            // SAFETY: the accumulator is full. The other warp has emptied the slot: this warp has received a step that
            // the other warp sent after it had finished the slot's previous content. The other CTA exits only together
            // with this CTA.
            let sums = unsafe {
                let [sums, [a, b, c, d, e, f, g, h]] = tcgen05_ld_32x32b_x8_twice(columns);
                st_async_shared_cluster_v4_b32(piece(0), [a, b, c, d], barrier);
                st_async_shared_cluster_v4_b32(piece(1), [e, f, g, h], barrier);
                sums
            };
            *own = sums.map(f32::from_bits);
        }
        own
    }

    /// Waits for the other CTA's sums of the next step, and returns this lane's sums.
    ///
    /// # Safety
    /// The requirements of [`Self::store_half`], which calls this for each step after [`Self::send`].
    #[inline(always)]
    unsafe fn receive(&mut self) -> HalfStep {
        let (slot, parity) = (self.received % SLOTS, self.received / SLOTS % 2);
        let lane_of_slot = self.slots + slot * SLOT_BYTES + lane_id() * LANE_BYTES;
        self.received += 1;
        // SAFETY: the slot's barrier is initialized. Its phase is the current or the preceding one, since this warp
        // waits for each phase.
        unsafe {
            if lane_id() == 0 {
                mbarrier_arrive_expect_tx(self.slot_barriers.nth(slot), SLOT_BYTES);
            }
            self.accumulators.wait(self.slot_barriers.nth(slot), parity);
        }
        core::array::from_fn(|index| {
            let piece = |n: u32| lane_of_slot + (index as u32 * PIECES + n) * PIECE_BYTES;
            // SAFETY: the slot is full after the wait, and this lane's pieces are inside of it.
            let [[a, b, c, d], [e, f, g, h]] = unsafe { [ld_shared_v4_b32(piece(0)), ld_shared_v4_b32(piece(1))] };
            [a, b, c, d, e, f, g, h].map(f32::from_bits)
        })
    }

    /// Signals that this warp has read all that it needs of the accumulator. The next tile's MMAs may overwrite the
    /// accumulator while this tile is stored. After the last tile, the warp leaves.
    ///
    /// # Safety
    /// The whole warp calls this together, once per tile.
    #[inline(always)]
    unsafe fn release(&self, is_last: bool) {
        // SAFETY: the whole warp is here, and the current phase of the barrier still expects this warp's arrival.
        unsafe {
            tcgen05_fence_before_thread_sync();
            if is_last {
                Sm100::<W, BLOCKS>::arrive::<LEFT>();
                return;
            }
            sync_warp(ALL_LANES);
            if lane_id() == 0 {
                self.accumulators.arrive(self.accumulators.empty(), self.block.leader());
            }
        }
    }

    /// Waits until all stores by tensor map are complete.
    #[inline(always)]
    pub fn finish(self) {
        if matches!(Sm100::<W, BLOCKS>::INSTANCE.store, Store::Tma) {
            cp_async_bulk_wait_group::<0>();
        }
    }

    /// Returns this lane's sums of 8 tokens of the tile, from `token` on.
    ///
    /// # Safety
    /// The accumulator is full. The whole warp calls this together.
    #[inline(always)]
    unsafe fn load_sums(&self, token: u32) -> Sums {
        let accumulator = |matrix| self.tmem.column(Sm100::<W, BLOCKS>::accumulator(self.accumulators.index(), matrix));
        let address = |matrix| accumulator(matrix).column(token);
        // SAFETY: the accumulator is full, the whole warp is here, and the lanes are those that this warp may access.
        let sums = unsafe {
            if Sm100::<W, BLOCKS>::MATRICES == 2 {
                tcgen05_ld_32x32b_x8_twice([address(0), address(1)])
            } else {
                [tcgen05_ld_32x32b_x8(address(0)), [0; N_STEP as usize]]
            }
        };
        sums.map(|sums| sums.map(f32::from_bits))
    }

    /// Converts a lane's values of 8 tokens to 16-bit numbers, two per word. All values are computed before the first
    /// store, because the compiler moves nothing across a store: they are long chains of instructions that run at the
    /// same time.
    #[inline(always)]
    fn converted(&self, values: [f32; N_STEP as usize]) -> [u32; N_STEP as usize / 2] {
        core::array::from_fn(|pair| convert(self.block.work.output(), values[2 * pair], values[2 * pair + 1]))
    }

    /// Writes a lane's values of 8 tokens to the buffer, as its tokens from `token` on, in the layout of C.
    ///
    /// # Safety
    /// The buffer has room for the tokens, and no lane or copy reads it now.
    #[inline(always)]
    unsafe fn stage(&self, token: u32, values: [f32; N_STEP as usize]) {
        let pairs = self.converted(values);
        for pair in 0..N_STEP / 2 {
            let address = self.buffers[0] + (token + 2 * pair) * TOKEN_BYTES + lane_id() * ELEMENT_BYTES;
            // SAFETY: the addresses are inside of the buffer, in this lane's own column.
            unsafe {
                st_shared_b16(address, pairs[pair as usize] as u16);
                st_shared_b16(address + TOKEN_BYTES, (pairs[pair as usize] >> 16) as u16);
            }
        }
    }

    /// Returns the places where this lane stores a tile.
    #[inline(always)]
    fn rows(&self, tile: &Tile, group: &Placed) -> Rows {
        let column = self.block.first_row(tile) + self.first_column + lane_id() % LANES_PER_TOKEN * ELEMENTS_PER_LANE;
        let element = u64::from(tile.first_token) * u64::from(group.n) + u64::from(column);
        Rows {
            column,
            // N is a multiple of 8, so a lane's columns are all inside or all outside.
            is_there: column < group.n,
            first: GlobalAddress::new(group.c) + element * u64::from(ELEMENT_BYTES),
            row_bytes: group.n * ELEMENT_BYTES,
        }
    }

    /// Stores a lane's values of the tile's 8 tokens from `token` on. Each lane has one column of them. They pass
    /// through the buffer, and four lanes store a token's 32 columns, 16 bytes each.
    ///
    /// # Safety
    /// No lane reads the buffer now. The whole warp calls this together. `rows` and `quantized` belong to the tile, and
    /// their addresses satisfy the contract of the kernel.
    #[inline(always)]
    unsafe fn store_lanes(
        &mut self,
        tile: &Tile,
        rows: &Rows,
        quantized: QuantizedTile,
        token: u32,
        values: [f32; N_STEP as usize],
    ) {
        let token = token + lane_id() / LANES_PER_TOKEN;
        // SAFETY: the lanes synchronize between writing and reading the buffer. The stored elements are inside of C,
        // and no other lane writes them.
        unsafe {
            st_shared_v4_b32(self.buffers[0] + self.written, self.converted(values));
            sync_warp(ALL_LANES);
            let elements = ldmatrix_x4_trans_b16(self.buffers[0] + self.read);
            if self.block.work.writes_bits16() && token < tile.tokens && rows.is_there {
                st_global_v4_b32(rows.first + u64::from(token) * u64::from(rows.row_bytes), elements);
            }
            if quantized.is_there() {
                quantized.store::<BLOCK_LANES, BLOCK_LANES, 4>(elements, token, rows.column);
            }
        }
        // The next 8 tokens use the other buffer, so they need not wait until all lanes have read this one.
        self.buffers.reverse();
    }

    /// Stores the buffer as a box that starts at this token of the tile. Tokens of the box past the tile are outside of
    /// C, because all tiles of a group except the last one are multiples of the box.
    ///
    /// # Safety
    /// The whole warp calls this together, and has written the buffer. `group` is the tile's group, and its tensor map
    /// of C satisfies the contract of the kernel.
    #[inline(always)]
    unsafe fn store_box(&mut self, tile: &Tile, group: &Placed, token: u32) {
        let column = self.block.first_row(tile) + self.first_column;
        // SAFETY: the copy uses the group's own tensor map. All lanes have written the buffer before one of them copies
        // it. The warp continues when the other buffer, which is written next, has been read.
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
                // One group per call, even an empty one: then all groups but the newest are those that read the other
                // buffer.
                cp_async_bulk_commit_group();
                cp_async_bulk_wait_group_read::<1>();
            }
            sync_warp(ALL_LANES);
        }
        self.buffers.reverse();
    }
}
