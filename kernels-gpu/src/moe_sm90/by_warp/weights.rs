//! A warp's weights, from global memory to its stages. No other warp takes part, so that none waits for another one.
//!
//! A stage is a unit as it lies in memory: that of a strip of 16 rows, or half of gate's and behind it half of up's.

use cuda_std::{
    cp_async::{cp_async_4_or_zero, cp_async_16_or_zero},
    global::GlobalAddress,
    integer::opaque_b32,
    shared::{SharedAddress, ld_shared_b16, ld_shared_b32, ld_shared_v4_b32},
    warp::{WARP_SIZE, lane_id},
};

use super::abi::{COPY_BYTES, Instance, STRIP_ROWS};
use crate::{
    moe_sm90::abi::Launch,
    sm90::{Decode, Fragment, Rows, Tile},
    units::{
        K_BLOCK, SLAB_ROWS, UNIT_BYTES, UNIT_ROWS, block_columns, k_blocks, lane_place, lane_scales, lane_words,
        row_bytes, row_scale_bytes, scale_place, unit_offset,
    },
};

/// Bytes of a word.
const WORD: u32 = 4;

/// Where the second half's words lie in a stage, then the scales of a whole k-block, then those of the second half.
const SECOND_WORDS: u32 = UNIT_ROWS / 2 * row_bytes(K_BLOCK);
const SCALES: u32 = UNIT_ROWS * row_bytes(K_BLOCK);
const SECOND_SCALES: u32 = SCALES + UNIT_ROWS / 2 * row_scale_bytes(K_BLOCK);

/// A warp's strip on its way to its stages, as a lane knows it.
pub(super) struct Weights {
    instance: Instance,
    /// The warp's first stage.
    first_stage: SharedAddress,
    /// The first row of the strip in each matrix.
    first_row: u32,
    /// Where the next k-block's words lie that this lane copies, in the first half of a stage and in the second, and its scales, if the
    /// k-block is a whole one.
    sources: [GlobalAddress; 3],
    /// Bytes from a whole k-block to the next one.
    stride: u32,
    /// The next k-block that is not on its way.
    coming: u32,
    /// Whole k-blocks, and all of them; none where C has no such columns.
    k_blocks: [u32; 2],
    /// Where the stages of the next k-block lie that is copied, and of the next one that is read, from the first one.
    to: u32,
    from: u32,
}

impl Weights {
    /// Those of a tile, of which the first are begun: all stages but one.
    ///
    /// # Safety
    /// The contract in `moe_sm90/mod.rs`; the tile is of the launch, or has no tokens. The warp's stages lie at this address, nothing is
    /// on its way there, and no lane reads them. The whole warp calls it together.
    #[inline(always)]
    pub(super) unsafe fn of(
        instance: Instance,
        launch: &Launch,
        tile: &Tile,
        warp: u32,
        first_stage: SharedAddress,
    ) -> Self {
        let (n, k) = (launch.n, launch.k);
        let first_row = tile.first_column + warp * (STRIP_ROWS / instance.matrices);
        let mut this = Self {
            instance,
            first_stage,
            first_row,
            sources: [GlobalAddress::new(0); 3],
            stride: n.wrapping_sub(first_row / SLAB_ROWS * SLAB_ROWS).min(SLAB_ROWS) / UNIT_ROWS * UNIT_BYTES,
            coming: 0,
            k_blocks: if tile.tokens > 0 && first_row < n { [k / K_BLOCK, k_blocks(k)] } else { [0; 2] },
            to: 0,
            from: 0,
        };
        let [first, second] = [0, 1].map(|matrix| this.unit(launch, tile, matrix, first_row, 0));
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
        for _ in 1..instance.stages {
            // SAFETY: what `# Safety` above asks.
            unsafe { this.begin_next(launch, tile) };
        }
        this
    }

    /// Whether C has the strip's columns.
    #[inline(always)]
    pub(super) const fn are_there(&self) -> bool {
        self.k_blocks[1] > 0
    }

    /// Where the unit of a k-block lies in which a matrix has this row.
    #[inline(always)]
    fn unit(&self, launch: &Launch, tile: &Tile, matrix: usize, row: u32, k_block: u32) -> GlobalAddress {
        let matrix = launch.b[if self.instance.matrices == 2 { matrix } else { 0 }];
        GlobalAddress::new(matrix)
            + u64::from(tile.expert) * launch.expert_bytes
            + unit_offset(launch.n, launch.k, row / UNIT_ROWS, k_block)
    }

    /// The stage behind one.
    #[inline(always)]
    const fn next(&self, stage: u32) -> u32 {
        let next = stage + UNIT_BYTES;
        if next == self.instance.stages * UNIT_BYTES { 0 } else { next }
    }

    /// Begins to copy the next k-block, if there is one.
    ///
    /// # Safety
    /// As [`Self::of`], with the same tile. No lane of the warp reads the stage any more.
    #[inline(always)]
    pub(super) unsafe fn begin_next(&mut self, launch: &Launch, tile: &Tile) {
        let stage = self.first_stage + self.to;
        // SAFETY: the matrices have such rows and this k-block; the stage is the warp's.
        unsafe {
            if self.coming < self.k_blocks[0] {
                let words = stage + lane_id() * COPY_BYTES;
                cp_async_16_or_zero(true, words, self.sources[0]);
                cp_async_16_or_zero(true, words + SECOND_WORDS, self.sources[1]);
                cp_async_4_or_zero(true, stage + (SCALES + lane_id() * WORD), self.sources[2]);
                self.sources = self.sources.map(|source| source + u64::from(self.stride));
            } else if self.coming < self.k_blocks[1] {
                self.copy_ragged(launch, tile, stage);
            }
        }
        self.coming += 1;
        self.to = self.next(self.to);
    }

    /// Begins to copy a k-block that is not a whole one: words to where a stage has them, rows without gaps, and so the scales.
    ///
    /// # Safety
    /// As [`Self::begin_next`].
    #[inline(always)]
    unsafe fn copy_ragged(&self, launch: &Launch, tile: &Tile, stage: SharedAddress) {
        // Opaque, so that no register holds anything of this over the main loop.
        let (first_row, k_block) = (opaque_b32(self.first_row), opaque_b32(self.coming));
        let columns = block_columns(launch.k, k_block);
        let (rows, before) = (STRIP_ROWS / self.instance.matrices, first_row % UNIT_ROWS);
        let copy = |matrix: usize| {
            let unit = self.unit(launch, tile, matrix, first_row, k_block);
            let words = stage + matrix as u32 * SECOND_WORDS;
            let mut place = lane_id() * COPY_BYTES;
            while place < rows * row_bytes(columns) {
                // SAFETY: what `# Safety` above asks.
                unsafe {
                    cp_async_16_or_zero(true, words + place, unit + u64::from(before * row_bytes(columns) + place));
                }
                place += WARP_SIZE * COPY_BYTES;
            }
            let place = lane_id() * WORD;
            if place < rows * row_scale_bytes(columns) {
                let source =
                    unit + u64::from(UNIT_ROWS * row_bytes(columns) + before * row_scale_bytes(columns) + place);
                let scales = stage + (SCALES + matrix as u32 * (SECOND_SCALES - SCALES));
                // SAFETY: as above.
                unsafe { cp_async_4_or_zero(true, scales + place, source) };
            }
        };
        copy(0);
        if self.instance.matrices == 2 {
            copy(1);
        }
    }

    /// The lane's rows of the next k-block, which is this one.
    ///
    /// # Safety
    /// The warp's copies of it are complete.
    #[inline(always)]
    pub(super) unsafe fn take<D: Decode>(&mut self, launch: &Launch, fragment: &Fragment, k_block: u32) -> Rows<D> {
        let stage = self.first_stage + self.from;
        self.from = self.next(self.from);
        // A lane has the same row of both halves, or two of the strip's.
        let is_gated = self.instance.matrices == 2;
        let row = |index: usize| {
            if is_gated {
                fragment.rows[0] % (UNIT_ROWS / 2) + index as u32 * (UNIT_ROWS / 2)
            } else {
                fragment.rows[index] % UNIT_ROWS
            }
        };
        let lane = fragment.lane;
        // SAFETY: inside of the stage.
        unsafe {
            if k_block < self.k_blocks[0] {
                Rows::new(
                    [0, 1].map(|index| ld_shared_v4_b32(stage + lane_place(K_BLOCK, row(index), lane))),
                    [0, 1].map(|index| ld_shared_b16(stage + scale_place(K_BLOCK, row(index), lane))),
                )
            } else {
                let columns = block_columns(launch.k, opaque_b32(k_block));
                // The row in its half or in the strip, and where that begins.
                let of = |index: usize, second: u32| {
                    if is_gated { (row(index) % (UNIT_ROWS / 2), index as u32 * second) } else { (row(index), 0) }
                };
                Rows::new(
                    [0, 1].map(|index| {
                        let (row, first) = of(index, SECOND_WORDS);
                        let words = stage + (first + row * row_bytes(columns) + lane * lane_words(columns) * WORD);
                        core::array::from_fn(|word| {
                            if (word as u32) < lane_words(columns) {
                                ld_shared_b32(words + word as u32 * WORD)
                            } else {
                                0
                            }
                        })
                    }),
                    [0, 1].map(|index| {
                        let (row, first) = of(index, SECOND_SCALES - SCALES);
                        let scale = row * row_scale_bytes(columns) + lane * lane_scales(columns);
                        let pair = ld_shared_b16(stage + (SCALES + first + (scale & !1)));
                        // With one scale a lane, two lanes share the pair.
                        pair >> if lane_scales(columns) == 1 { scale % 2 * 8 } else { 0 }
                    }),
                )
            }
        }
    }
}
