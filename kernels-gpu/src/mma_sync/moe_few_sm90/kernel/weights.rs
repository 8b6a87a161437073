//! A warp's weights on their way from global memory to its stages: strip after strip, without a gap.
//!
//! A stage holds a unit in its layout in memory, or half a unit of gate followed by half a unit of up.

use cuda_std::{
    cp_async::{
        cp_async_4_or_zero, cp_async_16_cached, cp_async_16_or_zero, cp_async_commit_group, cp_async_wait_group,
    },
    global::GlobalAddress,
    integer::opaque_b32,
    shared::{SharedAddress, ld_shared_b16, ld_shared_b32, ld_shared_v4_b32},
    warp::lane_id,
};

use super::{
    lists::Lists,
    tokens::{Elements, lane_place_of_token, word_place},
    work::Work,
};
use crate::{
    decoding::{Decode, Rows},
    mma_sync::moe_few_sm90::abi::{Matrices, STRIP_ROWS, TOKEN_BYTES, stage_bytes, stages},
    units::{
        K_BLOCK, ROW_LANES, SLAB_ROWS, UNIT_BYTES, UNIT_ROWS, block_columns, k_blocks, lane_place, lane_scales,
        lane_words, row_bytes, row_scale_bytes, row_unit_bytes, scale_place, unit_offset,
    },
};

/// Bytes per copy of words, and bytes per copy of scales.
const WORDS_COPY: u32 = 16;
const SCALES_COPY: u32 = 4;

/// Rows of half a strip, and offset of the second half's words in a stage.
const HALF_ROWS: u32 = STRIP_ROWS / 2;
const SECOND_WORDS: u32 = HALF_ROWS * row_bytes(K_BLOCK);

/// Number of copies that bring a single token's k-block.
const TOKEN_COPIES: u32 = TOKEN_BYTES / WORDS_COPY;

/// Offset of the scales in a stage.
const SCALES: u32 = STRIP_ROWS * row_bytes(K_BLOCK);

/// Offset of the second half's scales from [`SCALES`].
const SECOND_SCALES: u32 = HALF_ROWS * row_scale_bytes(K_BLOCK);

/// One lane's view of a warp's strips on their way to its stages.
pub(super) struct Weights<'l, const GATED: bool, const ONE: bool, W> {
    matrices: &'l Matrices,
    lists: Lists,
    work: &'l W,
    first_stage: SharedAddress,
    /// Bytes of [`UNIT_ROWS`] rows along the whole of K.
    row_units: u32,
    /// Index of the first piece of work whose copies have not started.
    index: u32,
    /// Number of k-blocks of the current strip whose copies have not started.
    left: u32,
    /// Addresses in the strip's next whole k-block from which this lane copies: words of both halves, and scales.
    sources: [GlobalAddress; 3],
    /// Bytes between whole k-blocks.
    stride: u32,
    /// Offsets in a stage to which this lane copies words and scales, and offsets from which it reads its own.
    targets: [u32; 2],
    places: [u32; 2],
    /// Address of this lane's part of the single token in the next k-block, and whether the token is complete yet.
    token: GlobalAddress,
    has_token: bool,
    /// Stage of the next k-block to copy, and stage of the next k-block to read.
    to: SharedAddress,
    from: SharedAddress,
}

impl<'l, const GATED: bool, const ONE: bool, W: Work> Weights<'l, GATED, ONE, W> {
    const STAGES: u32 = stages(ONE);
    const STAGE_BYTES: u32 = stage_bytes(ONE);

    /// This warp's weights, with the first `stages - 1` k-blocks in flight.
    ///
    /// # Safety
    /// The contract in `moe_few_sm90/mod.rs` holds, and the lists are made. The warp's stages lie at `first_stage`. The
    /// whole warp makes this call together.
    #[inline(always)]
    pub(super) unsafe fn of(matrices: &'l Matrices, lists: Lists, work: &'l W, first_stage: SharedAddress) -> Self {
        let (lane, row) = (lane_id() % ROW_LANES, lane_id() / ROW_LANES);
        let mut this = Self {
            matrices,
            lists,
            work,
            first_stage,
            row_units: opaque_b32(row_unit_bytes(matrices.k) as u32),
            index: work.first(),
            left: 0,
            sources: [GlobalAddress::new(0); 3],
            stride: 0,
            token: GlobalAddress::new(0),
            has_token: ONE && GATED,
            targets: [lane_id() * WORDS_COPY, SCALES + lane_id() * SCALES_COPY].map(opaque_b32),
            places: [lane_place(K_BLOCK, row, lane), scale_place(K_BLOCK, row, lane)].map(opaque_b32),
            to: first_stage,
            from: first_stage,
        };
        for stage in 1..Self::STAGES {
            // SAFETY: the warp has no copies in flight yet, so all its stages are empty; the lists are made, and the
            // whole warp is here.
            unsafe { this.begin_next() };
            this.to = first_stage + stage * Self::STAGE_BYTES;
        }
        this
    }

    /// Starts the copy of the next k-block, if there is one, as a group of copies.
    ///
    /// # Safety
    /// The requirements of [`Self::of`]. No lane of the warp still reads the stage.
    #[inline(always)]
    pub(super) unsafe fn begin_next(&mut self) {
        let all = k_blocks(self.matrices.k);
        // SAFETY: the piece of work lies in the matrices, which have this k-block. No lane of the warp still reads the
        // stage, which belongs to this warp.
        unsafe {
            if self.left == 0 && self.index < self.work.end() {
                self.find();
                self.index += self.work.step();
                self.left = all;
            }
            if self.left > 0 {
                let k_block = all - self.left;
                if k_block < self.matrices.k / K_BLOCK {
                    self.copy_whole();
                } else {
                    self.copy_ragged(k_block);
                }
                self.left -= 1;
            }
        }
        cp_async_commit_group();
    }

    /// Counts `k_blocks` k-blocks of the current strip as copied, and returns whether there is a strip. They must be
    /// whole; [`Self::begin_whole`] then starts their copies.
    #[inline(always)]
    pub(super) const fn begin_straight(&mut self, k_blocks: u32) -> bool {
        let is_there = self.left > 0;
        self.left = self.left.saturating_sub(k_blocks);
        is_there
    }

    /// Starts the copy of one of the k-blocks counted by [`Self::begin_straight`], without finding its place first.
    ///
    /// # Safety
    /// The requirements of [`Self::begin_next`].
    #[inline(always)]
    pub(super) unsafe fn begin_whole(&mut self, is_there: bool) {
        if is_there {
            // SAFETY: there is a whole k-block, and no lane of the warp reads the stage that it goes to.
            unsafe { self.copy_whole() };
        }
        cp_async_commit_group();
    }

    /// Starts the copy of the strip's next k-block, a whole one.
    ///
    /// # Safety
    /// The requirements of [`Self::begin_next`]. There is a whole k-block.
    #[inline(always)]
    unsafe fn copy_whole(&mut self) {
        // SAFETY: `sources` point into the strip's next whole k-block. No lane of the warp still reads the stage, which
        // belongs to this warp.
        unsafe {
            cp_async_16_or_zero(true, self.to + self.targets[0], self.sources[0]);
            cp_async_16_or_zero(true, self.to + (self.targets[0] + SECOND_WORDS), self.sources[1]);
            cp_async_4_or_zero(true, self.to + self.targets[1], self.sources[2]);
        }
        self.sources = self.sources.map(|source| source + u64::from(self.stride));
        if ONE {
            if self.has_token && lane_id() < TOKEN_COPIES {
                // SAFETY: the token is complete and has this k-block. No lane of the warp still reads the stage, which
                // belongs to this warp.
                unsafe { cp_async_16_cached(self.to + (UNIT_BYTES + lane_id() * WORDS_COPY), self.token) };
            }
            self.token = self.token + u64::from(TOKEN_BYTES);
        }
    }

    /// The matrix that holds a half of a strip, and the first row of the half in it.
    #[inline(always)]
    const fn half(&self, strip: u32, half: u32) -> (u64, u32) {
        let [first, second] = self.matrices.b;
        if GATED {
            (if half == 0 { first } else { second }, strip * HALF_ROWS)
        } else {
            (first, strip * STRIP_ROWS + half * HALF_ROWS)
        }
    }

    /// Finds the strip of the next piece of work.
    ///
    /// # Safety
    /// The requirements of [`Self::of`]. There is a next piece.
    #[inline(always)]
    unsafe fn find(&mut self) {
        let &Matrices { expert_bytes, n, .. } = self.matrices;
        let (named, strip) = self.work.piece(self.index);
        // SAFETY: the lists are made and name this expert; the whole warp executes the shuffle together.
        let expert = unsafe { self.lists.named(named) }.expert;
        let (_, row) = self.half(strip, 0);
        let slab = row / SLAB_ROWS * SLAB_ROWS;
        self.stride = (n - slab).min(SLAB_ROWS) / UNIT_ROWS * UNIT_BYTES;
        let unit = u64::from(expert) * expert_bytes
            + u64::from(slab / UNIT_ROWS) * u64::from(self.row_units)
            + u64::from((row - slab) / UNIT_ROWS * UNIT_BYTES);
        let at = |half: u32, of_rows: u32, row_bytes: u32, place: u32| {
            let (matrix, row) = self.half(strip, half);
            GlobalAddress::new(matrix) + (unit + u64::from(of_rows + row % UNIT_ROWS * row_bytes + place))
        };
        let words = |half: u32| at(half, 0, row_bytes(K_BLOCK), lane_id() * WORDS_COPY);
        let scale = lane_id() * SCALES_COPY;
        let scales = at(scale / SECOND_SCALES, SCALES, row_scale_bytes(K_BLOCK), scale % SECOND_SCALES);
        self.sources = [words(0), words(1), scales];
        if ONE {
            // SAFETY: the lists are made and name this expert.
            self.token = unsafe { self.token_of(named) };
        }
    }

    /// Moves on to the next k-block. The stage that was read last is filled next.
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        let next = self.from + Self::STAGE_BYTES;
        let last = self.first_stage + (Self::STAGES - 1) * Self::STAGE_BYTES;
        (self.to, self.from) = (self.from, if self.from == last { self.first_stage } else { next });
    }

    /// Starts the copy of a partial k-block. Each half's words go to that half's place in the stage, with its rows
    /// without gaps. The scales are copied in the same way.
    ///
    /// # Safety
    /// The requirements of [`Self::begin_next`].
    #[inline(always)]
    unsafe fn copy_ragged(&self, k_block: u32) {
        let &Matrices { expert_bytes, n, k, .. } = self.matrices;
        // Opaque, so that no register holds values for this over the mainloop.
        let k_block = opaque_b32(k_block);
        let (named, strip) = self.work.piece(opaque_b32(self.index) - self.work.step());
        // SAFETY: the strip in flight is of an expert that the lists name; the whole warp is here.
        let expert = unsafe { self.lists.named(named) }.expert;
        let columns = block_columns(k, k_block);
        let (row_bytes, row_scale_bytes) = (row_bytes(columns), row_scale_bytes(columns));
        let (word, scale) = (lane_id() * WORDS_COPY, lane_id() * SCALES_COPY);
        for half in 0..2 {
            let (matrix, row) = self.half(strip, half);
            let unit = u64::from(expert) * expert_bytes + unit_offset(n, k, row / UNIT_ROWS, k_block);
            let at = |place: u32| GlobalAddress::new(matrix) + (unit + u64::from(place));
            let row = row % UNIT_ROWS;
            // SAFETY: the unit has these rows and scales, and no lane of the warp reads the stage that they go to.
            unsafe {
                if word < HALF_ROWS * row_bytes {
                    cp_async_16_or_zero(true, self.to + (half * SECOND_WORDS + word), at(row * row_bytes + word));
                }
                if scale < HALF_ROWS * row_scale_bytes {
                    let source = at(UNIT_ROWS * row_bytes + row * row_scale_bytes + scale);
                    cp_async_4_or_zero(true, self.to + (SCALES + half * SECOND_SCALES + scale), source);
                }
            }
        }
    }

    /// Reads the lane's rows of the next k-block, a whole one: the same row of both halves.
    ///
    /// # Safety
    /// The warp's copies of this k-block are complete.
    #[inline(always)]
    pub(super) unsafe fn take<D: Decode>(&self) -> Rows<D> {
        let stage = self.from;
        let [words, scales] = self.places;
        // SAFETY: the offsets lie inside of the stage, and the copies to it are complete.
        unsafe {
            Rows::new(
                [0, SECOND_WORDS].map(|half| ld_shared_v4_b32(stage + (words + half))),
                [0, SECOND_SCALES].map(|half| ld_shared_b16(stage + (scales + half))),
            )
        }
    }

    /// Copies down's single token to the stages whose copies [`Self::of`] has started, and waits for them. Later
    /// k-blocks of the token come with the weights.
    ///
    /// # Safety
    /// The requirements of [`Self::of`]; the token is complete. Called once.
    #[inline(always)]
    pub(super) unsafe fn await_token(&mut self) {
        let (whole, all) = (self.matrices.k / K_BLOCK, k_blocks(self.matrices.k));
        let (mut index, mut k_block, mut token) = (self.work.first(), 0, GlobalAddress::new(0));
        for stage in 1..Self::STAGES {
            let is_there = index < self.work.end();
            // SAFETY: the lists name the experts of these pieces, and their tokens are complete and have these
            // k-blocks. The stages belong to this warp.
            unsafe {
                if k_block == 0 && is_there {
                    token = self.token_of(self.work.piece(index).0);
                }
                if is_there && k_block < whole && lane_id() < TOKEN_COPIES {
                    let to = self.first_stage + ((stage - 1) * Self::STAGE_BYTES + UNIT_BYTES + lane_id() * WORDS_COPY);
                    cp_async_16_cached(to, token + u64::from(k_block * TOKEN_BYTES));
                }
            }
            k_block += 1;
            if k_block == all {
                (index, k_block) = (index + self.work.step(), 0);
            }
        }
        cp_async_commit_group();
        cp_async_wait_group::<0>();
        self.has_token = true;
    }

    /// Address from which this lane copies its part of the first k-block of an expert's single token.
    ///
    /// # Safety
    /// The requirements of [`Work::token`].
    #[inline(always)]
    unsafe fn token_of(&self, named: u32) -> GlobalAddress {
        // SAFETY: the lists are made, and name this expert.
        unsafe { self.work.token(self.lists, named) + u64::from(lane_id() * WORDS_COPY) }
    }

    /// Reads the lane's elements of the single token's next k-block, which comes with the weights, in the order of
    /// [`Tokens::load`](super::tokens::Tokens::load).
    ///
    /// # Safety
    /// The requirements of [`Self::take`].
    #[inline(always)]
    pub(super) unsafe fn token(&self) -> Elements {
        let lane = self.from + (UNIT_BYTES + lane_place_of_token(lane_id() % ROW_LANES));
        // SAFETY: the offsets lie inside of the stage, and the copies to it are complete.
        [0, 1, 2, 3].map(|word| unsafe { ld_shared_v4_b32(lane + word_place(word)) })
    }

    /// Reads the lane's rows of the partial k-block `k_block`. Words that the lane lacks are zero.
    ///
    /// # Safety
    /// The requirements of [`Self::take`].
    #[inline(always)]
    pub(super) unsafe fn take_ragged<D: Decode>(&self, k_block: u32) -> Rows<D> {
        let stage = self.from;
        let (lane, row) = (lane_id() % ROW_LANES, lane_id() / ROW_LANES);
        let columns = block_columns(self.matrices.k, opaque_b32(k_block));
        let words = stage + (row * row_bytes(columns) + lane * lane_words(columns) * 4);
        let scale = row * row_scale_bytes(columns) + lane * lane_scales(columns);
        // With one scale per lane, two lanes share a load of two scales.
        let shift = if lane_scales(columns) == 1 { scale % 2 * 8 } else { 0 };
        // SAFETY: the offsets lie inside of the stage, and the copies to it are complete.
        unsafe {
            Rows::new(
                [0, SECOND_WORDS].map(|half| {
                    core::array::from_fn(|word| {
                        let place = words + (half + word as u32 * 4);
                        if (word as u32) < lane_words(columns) { ld_shared_b32(place) } else { 0 }
                    })
                }),
                [0, SECOND_SCALES].map(|half| ld_shared_b16(stage + (SCALES + half + (scale & !1))) >> shift),
            )
        }
    }
}
