//! Copies a warp's weights from global memory to its stages. No other warp takes part, so no warp waits for another
//! one.
//!
//! A stage is a unit in its layout in memory: the unit of a strip of 16 rows, or half a unit of gate followed by half a
//! unit of up.

use cuda_std::{
    cp_async::{cp_async_4_or_zero, cp_async_16_or_zero, cp_async_commit_group},
    global::GlobalAddress,
    integer::opaque_b32,
    shared::{SharedAddress, ld_shared_b16, ld_shared_b32, ld_shared_v4_b32},
    warp::lane_id,
};

use super::abi::{COPY_BYTES, Instance, STAGES, STRIP_ROWS};
use crate::{
    decoding::{Decode, Fragment, Rows, Tile},
    moe::Launch,
    units::{
        K_BLOCK, SLAB_ROWS, UNIT_BYTES, UNIT_ROWS, block_columns, k_blocks, lane_place, lane_scales, lane_words,
        row_bytes, row_scale_bytes, scale_place, unit_offset,
    },
};

/// Bytes per word.
const WORD: u32 = 4;

/// Offset in a stage of the words of the second half of the rows.
const SECOND_WORDS: u32 = UNIT_ROWS / 2 * row_bytes(K_BLOCK);

/// Offset in a stage of the scales of a whole k-block.
const SCALES: u32 = UNIT_ROWS * row_bytes(K_BLOCK);

/// Offset in a stage of the scales of the second half of the rows.
const SECOND_SCALES: u32 = SCALES + UNIT_ROWS / 2 * row_scale_bytes(K_BLOCK);

/// A lane's state for the copies of a warp's strip to its stages.
pub(super) struct Weights {
    instance: Instance,
    /// First stage of the warp.
    first_stage: SharedAddress,
    /// First row of the strip in each matrix. If C has no columns for the strip, the first row of the last strip.
    first_row: u32,
    /// Addresses of this lane's part of the next whole k-block: the words for the first half of a stage, the words for
    /// the second half, and the scales.
    sources: [GlobalAddress; 3],
    /// Bytes from one whole k-block to the next.
    stride: u32,
}

impl Weights {
    /// This warp's weights of a tile, with the first `STAGES - 1` k-blocks in flight.
    ///
    /// # Safety
    /// The contract in `moe_sm90/mod.rs` holds. The tile belongs to the launch, or has no tokens. The warp's stages lie
    /// at `first_stage`, no copy to them is in flight, and no lane reads them. The whole warp calls this together.
    #[inline(always)]
    pub(super) unsafe fn of(
        instance: Instance,
        launch: &Launch,
        tile: &Tile,
        warp: u32,
        first_stage: SharedAddress,
    ) -> Self {
        let n = launch.n;
        let rows = STRIP_ROWS / instance.matrices;
        let first_row = (tile.first_column + warp * rows).min(n - rows);
        let mut this = Self {
            instance,
            first_stage,
            first_row,
            sources: [GlobalAddress::new(0); 3],
            stride: (n - first_row / SLAB_ROWS * SLAB_ROWS).min(SLAB_ROWS) / UNIT_ROWS * UNIT_BYTES,
        };
        let offset = Self::offset(launch, tile, first_row, 0);
        let [first, second] = launch.b.map(|matrix| GlobalAddress::new(matrix) + offset);
        let (words, scales) = (u64::from(lane_id() * COPY_BYTES), lane_id() * WORD);
        this.sources = if instance.matrices == 2 {
            let half = first_row % UNIT_ROWS;
            let half_words = words + u64::from(half * row_bytes(K_BLOCK));
            let half_scales = SCALES + half * row_scale_bytes(K_BLOCK);
            let of_lane = if scales < SECOND_SCALES - SCALES { first } else { second };
            let scales = u64::from(half_scales + scales % (SECOND_SCALES - SCALES));
            [first + half_words, second + half_words, of_lane + scales]
        } else {
            [first + words, first + (words + u64::from(SECOND_WORDS)), first + u64::from(SCALES + scales)]
        };
        if tile.tokens > 0 {
            for k_block in 0..STAGES - 1 {
                // SAFETY: nothing is in flight to the warp's stages and no lane reads them, so all of them are empty;
                // the whole warp is here.
                unsafe { this.begin(launch, tile, k_block) };
                cp_async_commit_group();
            }
        }
        this
    }

    /// Offset from the start of a matrix of the unit with row `row` and k-block `k_block`.
    #[inline(always)]
    fn offset(launch: &Launch, tile: &Tile, row: u32, k_block: u32) -> u64 {
        u64::from(tile.expert) * launch.expert_bytes + unit_offset(launch.n, launch.k, row / UNIT_ROWS, k_block)
    }

    /// Starts the copy of a k-block to its stage if the k-block exists. The copies of all preceding k-blocks have
    /// started.
    ///
    /// # Safety
    /// The requirements of [`Self::of`], except that copies to other stages may be in flight; the tile is the same. No
    /// lane of the warp reads the stage any more.
    #[inline(always)]
    pub(super) unsafe fn begin(&mut self, launch: &Launch, tile: &Tile, k_block: u32) {
        let stage = k_block % STAGES;
        // SAFETY: no lane of the warp reads the stage, and the tile's matrix has the k-block.
        unsafe {
            if k_block < launch.k / K_BLOCK {
                self.begin_whole(true, stage);
            } else if k_block < k_blocks(launch.k) {
                self.copy_ragged(launch, tile, self.first_stage + stage * UNIT_BYTES, k_block);
            }
        }
    }

    /// Starts the copy of the next whole k-block to stage `stage` if `is_there`.
    ///
    /// # Safety
    /// The requirements of [`Self::begin`].
    #[inline(always)]
    pub(super) unsafe fn begin_whole(&mut self, is_there: bool, stage: u32) {
        let stage = self.first_stage + stage * UNIT_BYTES;
        let (words, scales) = (stage + lane_id() * COPY_BYTES, stage + (SCALES + lane_id() * WORD));
        if is_there {
            // SAFETY: `is_there`, so the matrices have these rows and this k-block; the stage belongs to the warp, and
            // no lane reads it any more.
            unsafe {
                cp_async_16_or_zero(true, words, self.sources[0]);
                cp_async_16_or_zero(true, words + SECOND_WORDS, self.sources[1]);
                cp_async_4_or_zero(true, scales, self.sources[2]);
            }
        }
        self.sources = self.sources.map(|source| source + u64::from(self.stride));
    }

    /// Starts the copy of a partial k-block: words and scales go to the places that they have in a stage, with rows
    /// without gaps.
    ///
    /// # Safety
    /// The requirements of [`Self::begin`].
    #[inline(always)]
    unsafe fn copy_ragged(&self, launch: &Launch, tile: &Tile, stage: SharedAddress, k_block: u32) {
        // Opaque, so that no register holds a value of this function during the mainloop.
        let (first_row, k_block) = (opaque_b32(self.first_row), opaque_b32(k_block));
        let columns = block_columns(launch.k, k_block);
        let (rows, before) = (STRIP_ROWS / self.instance.matrices, first_row % UNIT_ROWS);
        let offset = Self::offset(launch, tile, first_row, k_block);
        // Half of a stage's words takes at most one copy per lane.
        let copy = |half: u32| {
            let (matrix, half) = if self.instance.matrices == 2 { (half, 0) } else { (0, half) };
            let unit = GlobalAddress::new(launch.b[matrix as usize]) + offset;
            let place = half * SECOND_WORDS + lane_id() * COPY_BYTES;
            if place < rows * row_bytes(columns) {
                let source = unit + u64::from(before * row_bytes(columns) + place);
                // SAFETY: the unit has these rows, and no lane of the warp reads the stage that they go to.
                unsafe { cp_async_16_or_zero(true, stage + (matrix * SECOND_WORDS + place), source) };
            }
            let place = lane_id() * WORD;
            if half == 0 && place < rows * row_scale_bytes(columns) {
                let source =
                    unit + u64::from(UNIT_ROWS * row_bytes(columns) + before * row_scale_bytes(columns) + place);
                let scales = stage + (SCALES + matrix * (SECOND_SCALES - SCALES));
                // SAFETY: the unit has the scales of these rows, and no lane of the warp reads the stage.
                unsafe { cp_async_4_or_zero(true, scales + place, source) };
            }
        };
        copy(0);
        copy(1);
    }

    /// Returns the lane's rows of a whole k-block in a stage.
    ///
    /// # Safety
    /// The warp's copies to the stage are complete.
    #[inline(always)]
    pub(super) unsafe fn take<D: Decode>(&self, fragment: &Fragment, stage: u32) -> Rows<D> {
        let (stage, lane) = (self.first_stage + stage * UNIT_BYTES, fragment.lane);
        let row = |index: usize| self.row(fragment, index);
        // SAFETY: the addresses are inside the stage.
        unsafe {
            Rows::new(
                [0, 1].map(|index| ld_shared_v4_b32(stage + lane_place(K_BLOCK, row(index), lane))),
                [0, 1].map(|index| ld_shared_b16(stage + scale_place(K_BLOCK, row(index), lane))),
            )
        }
    }

    /// Same as [`Self::take`], for a k-block that may be whole or not.
    ///
    /// # Safety
    /// The warp's copies to the stage are complete.
    #[inline(always)]
    pub(super) unsafe fn take_any<D: Decode>(
        &self,
        launch: &Launch,
        fragment: &Fragment,
        stage: u32,
        k_block: u32,
    ) -> Rows<D> {
        // SAFETY: the stage's copies have arrived, and the words and scales that are read lie inside the stage.
        unsafe {
            if k_block < launch.k / K_BLOCK {
                return self.take(fragment, stage);
            }
            let (stage, lane) = (self.first_stage + stage * UNIT_BYTES, fragment.lane);
            let columns = block_columns(launch.k, opaque_b32(k_block));
            // Row within its half or within the strip, and the offset of the half or the strip.
            let of = |index: usize, second: u32| {
                let row = self.row(fragment, index);
                if self.instance.matrices == 2 { (row % (UNIT_ROWS / 2), index as u32 * second) } else { (row, 0) }
            };
            Rows::new(
                [0, 1].map(|index| {
                    let (row, first) = of(index, SECOND_WORDS);
                    let words = stage + (first + row * row_bytes(columns) + lane * lane_words(columns) * WORD);
                    core::array::from_fn(|word| {
                        if (word as u32) < lane_words(columns) { ld_shared_b32(words + word as u32 * WORD) } else { 0 }
                    })
                }),
                [0, 1].map(|index| {
                    let (row, first) = of(index, SECOND_SCALES - SCALES);
                    let scale = row * row_scale_bytes(columns) + lane * lane_scales(columns);
                    let pair = ld_shared_b16(stage + (SCALES + first + (scale & !1)));
                    // If a lane has one scale, two lanes read the same pair of scales, and each takes its own scale.
                    pair >> if lane_scales(columns) == 1 { scale % 2 * 8 } else { 0 }
                }),
            )
        }
    }

    /// Row of the lane in a stage. A lane has the same row of both halves, or two rows of the strip.
    #[inline(always)]
    const fn row(&self, fragment: &Fragment, index: usize) -> u32 {
        if self.instance.matrices == 2 {
            fragment.rows[0] % (UNIT_ROWS / 2) + index as u32 * (UNIT_ROWS / 2)
        } else {
            fragment.rows[index] % UNIT_ROWS
        }
    }
}
