//! A warp's weights, from global memory to its stages: strip after strip, without a gap between them.
//!
//! A stage is a unit as it lies in memory, or half of gate's and behind it half of up's.

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
    products::Work,
    tokens::{Elements, lane_place_of_token, word_place},
};
use crate::{
    decoding::{Decode, Rows},
    mma_sync::moe_few_sm90::abi::{Matrices, STRIP_ROWS, TOKEN_BYTES, stage_bytes, stages},
    units::{
        K_BLOCK, ROW_LANES, SLAB_ROWS, UNIT_BYTES, UNIT_ROWS, block_columns, k_blocks, lane_place, lane_scales,
        lane_words, row_bytes, row_scale_bytes, row_unit_bytes, scale_place, unit_offset,
    },
};

/// Bytes of a copy of words, and of a copy of scales.
const WORDS_COPY: u32 = 16;
const SCALES_COPY: u32 = 4;

/// Rows of half a strip, and where the second half's words lie in a stage.
const HALF_ROWS: u32 = STRIP_ROWS / 2;
const SECOND_WORDS: u32 = HALF_ROWS * row_bytes(K_BLOCK);

/// Copies that bring a single token's k-block.
const TOKEN_COPIES: u32 = TOKEN_BYTES / WORDS_COPY;

/// Where the scales lie in a stage, and where from there on those of the second half.
const SCALES: u32 = STRIP_ROWS * row_bytes(K_BLOCK);
const SECOND_SCALES: u32 = HALF_ROWS * row_scale_bytes(K_BLOCK);

/// A warp's strips on their way to its stages, as a lane knows it.
pub(super) struct Weights<'l, const GATED: bool, const ONE: bool, W> {
    matrices: &'l Matrices,
    lists: Lists,
    work: &'l W,
    first_stage: SharedAddress,
    /// Bytes of a unit's rows along the whole of K.
    row_units: u32,
    /// The warp's next piece of work that is not on its way.
    index: u32,
    /// K-blocks of the strip on its way that are not on theirs.
    left: u32,
    /// Where the words of both halves and the scales of its next whole k-block lie that this lane copies.
    sources: [GlobalAddress; 3],
    /// Bytes from a whole k-block to the next one.
    stride: u32,
    /// Where this lane's words and scales go to in a stage, and where those lie that it takes from there.
    targets: [u32; 2],
    places: [u32; 2],
    /// Where the single token's part of it lies that this lane copies, and whether there is one yet.
    token: GlobalAddress,
    has_token: bool,
    /// The stages of the next k-block that is copied, and of the next one that is read.
    to: SharedAddress,
    from: SharedAddress,
}

impl<'l, const GATED: bool, const ONE: bool, W: Work> Weights<'l, GATED, ONE, W> {
    const STAGES: u32 = stages(ONE);
    const STAGE_BYTES: u32 = stage_bytes(ONE);

    /// Those of a warp's work, of which the first k-blocks are begun: all stages but one.
    ///
    /// # Safety
    /// The contract in `moe_few_sm90/mod.rs`; the lists are made. The warp's stages lie at this address. The whole warp calls it
    /// together.
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

    /// Begins to copy the next k-block, if there is one, as a group of copies.
    ///
    /// # Safety
    /// As [`Self::of`]. No lane of the warp reads the stage any more.
    #[inline(always)]
    pub(super) unsafe fn begin_next(&mut self) {
        let all = k_blocks(self.matrices.k);
        // SAFETY: the matrices have such rows and this k-block; the stage is the warp's.
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

    /// Says that the next k-blocks to copy, so many, are whole ones of the strip that is on its way, if there is one; and whether there is.
    #[inline(always)]
    pub(super) const fn begin_straight(&mut self, k_blocks: u32) -> bool {
        let is_there = self.left > 0;
        self.left = self.left.saturating_sub(k_blocks);
        is_there
    }

    /// As [`Self::begin_next`], one of [those](Self::begin_straight): without looking which one it is.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    pub(super) unsafe fn begin_whole(&mut self, is_there: bool) {
        if is_there {
            // SAFETY: there is a whole k-block, and no lane of the warp reads the stage that it goes to.
            unsafe { self.copy_whole() };
        }
        cp_async_commit_group();
    }

    /// Begins to copy the strip's next k-block, a whole one.
    ///
    /// # Safety
    /// As [`Self::begin_next`]; there is one.
    #[inline(always)]
    unsafe fn copy_whole(&mut self) {
        // SAFETY: the matrices have such rows and this k-block; the stage is the warp's.
        unsafe {
            cp_async_16_or_zero(true, self.to + self.targets[0], self.sources[0]);
            cp_async_16_or_zero(true, self.to + (self.targets[0] + SECOND_WORDS), self.sources[1]);
            cp_async_4_or_zero(true, self.to + self.targets[1], self.sources[2]);
        }
        self.sources = self.sources.map(|source| source + u64::from(self.stride));
        if ONE {
            if self.has_token && lane_id() < TOKEN_COPIES {
                // SAFETY: the token has this k-block; the stage is the warp's.
                unsafe { cp_async_16_cached(self.to + (UNIT_BYTES + lane_id() * WORDS_COPY), self.token) };
            }
            self.token = self.token + u64::from(TOKEN_BYTES);
        }
    }

    /// The matrix of a half of a strip, and its first row there.
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
    /// As [`Self::of`]; there is one.
    #[inline(always)]
    unsafe fn find(&mut self) {
        let &Matrices { expert_bytes, n, .. } = self.matrices;
        let (named, strip) = self.work.piece(self.index);
        // SAFETY: an expert that is named.
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
            // SAFETY: an expert that is named.
            self.token = unsafe { self.token_of(named) };
        }
    }

    /// Goes on to the next k-block: what was taken last makes room for the one that comes behind all others.
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        let next = self.from + Self::STAGE_BYTES;
        let last = self.first_stage + (Self::STAGES - 1) * Self::STAGE_BYTES;
        (self.to, self.from) = (self.from, if self.from == last { self.first_stage } else { next });
    }

    /// Begins to copy this k-block, which is not a whole one: each half's words to where a stage has them, rows without gaps, and so the
    /// scales.
    ///
    /// # Safety
    /// As [`Self::begin_next`].
    #[inline(always)]
    unsafe fn copy_ragged(&self, k_block: u32) {
        let &Matrices { expert_bytes, n, k, .. } = self.matrices;
        // Opaque, so that no register holds anything of this over the main loop.
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

    /// The lane's rows of the next k-block, a whole one: the same row of both halves.
    ///
    /// # Safety
    /// The warp's copies of it are complete.
    #[inline(always)]
    pub(super) unsafe fn take<D: Decode>(&self) -> Rows<D> {
        let stage = self.from;
        let [words, scales] = self.places;
        // SAFETY: inside of the stage.
        unsafe {
            Rows::new(
                [0, SECOND_WORDS].map(|half| ld_shared_v4_b32(stage + (words + half))),
                [0, SECOND_SCALES].map(|half| ld_shared_b16(stage + (scales + half))),
            )
        }
    }

    /// Copies down's single token to the stages that [`Self::of`] has begun, and waits for them; from now on it comes with the weights.
    ///
    /// # Safety
    /// As there; the token is complete. Called once.
    #[inline(always)]
    pub(super) unsafe fn await_token(&mut self) {
        let (whole, all) = (self.matrices.k / K_BLOCK, k_blocks(self.matrices.k));
        let (mut index, mut k_block, mut token) = (self.work.first(), 0, GlobalAddress::new(0));
        for stage in 1..Self::STAGES {
            let is_there = index < self.work.end();
            // SAFETY: experts that are named, whose tokens have these k-blocks; the stages are the warp's.
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

    /// Where the part of an expert's single token begins that this lane copies of the first k-block.
    ///
    /// # Safety
    /// As [`Work::token`].
    #[inline(always)]
    unsafe fn token_of(&self, named: u32) -> GlobalAddress {
        // SAFETY: the lists are made, and name this expert.
        unsafe { self.work.token(self.lists, named) + u64::from(lane_id() * WORDS_COPY) }
    }

    /// The lane's elements of the single token's next k-block, which comes with the weights, as [`Tokens::load`](super::tokens::Tokens::load)
    /// has them.
    ///
    /// # Safety
    /// As [`Self::take`].
    #[inline(always)]
    pub(super) unsafe fn token(&self) -> Elements {
        let lane = self.from + (UNIT_BYTES + lane_place_of_token(lane_id() % ROW_LANES));
        // SAFETY: inside of the stage.
        [0, 1, 2, 3].map(|word| unsafe { ld_shared_v4_b32(lane + word_place(word)) })
    }

    /// As [`Self::take`], of this k-block, which is not a whole one. Words that a lane lacks are zero.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    pub(super) unsafe fn take_ragged<D: Decode>(&self, k_block: u32) -> Rows<D> {
        let stage = self.from;
        let (lane, row) = (lane_id() % ROW_LANES, lane_id() / ROW_LANES);
        let columns = block_columns(self.matrices.k, opaque_b32(k_block));
        let words = stage + (row * row_bytes(columns) + lane * lane_words(columns) * 4);
        let scale = row * row_scale_bytes(columns) + lane * lane_scales(columns);
        // With one scale a lane, two lanes share the pair.
        let shift = if lane_scales(columns) == 1 { scale % 2 * 8 } else { 0 };
        // SAFETY: inside of the stage.
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
