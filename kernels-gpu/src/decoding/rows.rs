//! A thread's rows of weights: from the [`units`](crate::units) in a stage to registers, and from there to operands.

use cuda_std::{
    shared::{SharedAddress, ld_shared_b16, ld_shared_b32, ld_shared_v4_b32},
    wgmma,
};

use super::{
    Fragment, LANE_WORDS,
    decode::{BF16_UNSCALE, Bf16Scales, F16_UNSCALE, Scales, decode_weights, decode_weights_bf16},
};
use crate::units::{
    K_BLOCK, UNIT_BYTES, UNIT_ROWS, block_columns, lane_place, lane_scales, lane_words, row_bytes, row_scale_bytes,
    scale_place, unit_bytes,
};

/// Decoding of weights for a token type.
pub trait Decode {
    /// Factor that undoes the scaling of the decoded operands.
    const UNSCALE: f32;
    /// Type of the decoded operands.
    type Number: wgmma::Number;
    /// A lane's two scales of a row.
    type Scales: Copy;

    /// Reads two scales in the form that they have in a unit.
    fn scales(bytes: u16) -> Self::Scales;

    /// Decodes a word with scale number `index`.
    fn decode(word: u32, scales: Self::Scales, index: usize) -> [u32; 4];
}

/// Weights packed for bf16, or for f16.
pub struct Packed<const BF16: bool>;

impl Decode for Packed<false> {
    const UNSCALE: f32 = F16_UNSCALE;
    type Number = wgmma::F16;
    type Scales = Scales;

    #[inline(always)]
    fn scales(bytes: u16) -> Scales {
        Scales::new(bytes)
    }

    #[inline(always)]
    fn decode(word: u32, scales: Scales, index: usize) -> [u32; 4] {
        decode_weights(word, scales.half_twice(index))
    }
}

impl Decode for Packed<true> {
    const UNSCALE: f32 = BF16_UNSCALE;
    type Number = wgmma::Bf16;
    type Scales = Bf16Scales;

    #[inline(always)]
    fn scales(bytes: u16) -> Bf16Scales {
        Bf16Scales::new(bytes)
    }

    #[inline(always)]
    fn decode(word: u32, scales: Bf16Scales, index: usize) -> [u32; 4] {
        decode_weights_bf16(word, scales.half_twice(index))
    }
}

/// A thread's words of two rows of a stage's panel, and the scales of these words.
pub struct Rows<D: Decode> {
    words: [[u32; LANE_WORDS]; 2],
    scales: [D::Scales; 2],
}

impl<D: Decode> Clone for Rows<D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Decode> Copy for Rows<D> {}

impl<D: Decode> Rows<D> {
    /// The rows with these words and scales, in the form that they have in units.
    #[inline(always)]
    pub fn new(words: [[u32; LANE_WORDS]; 2], scales: [u16; 2]) -> Self {
        Self { words, scales: scales.map(D::scales) }
    }

    /// The A fragments of a word's two products.
    #[inline(always)]
    pub fn decode(&self, word: usize) -> [[u32; 4]; 2] {
        let [first, second] = [0, 1].map(|row| D::decode(self.words[row][word], self.scales[row], word / 2));
        [[first[0], second[0], first[1], second[1]], [first[2], second[2], first[3], second[3]]]
    }
}

/// Places of a thread's rows in the panels of a stage.
#[derive(Clone, Copy)]
pub struct StagedRows {
    /// Bytes from the first row's panel to the second row's; both rows have the same place in their panels. 0: the two
    /// rows are neighbors in one panel, and an odd pair of rows is swapped ([`Fragment`]).
    second_panel: u32,
    /// Rows of a panel whose units lie without gaps.
    piece_rows: u32,
    /// Offset of the first row's words in a panel of a whole k-block.
    words: u32,
    /// Offset of the first row's scales in a panel of a whole k-block.
    scales: u32,
}

impl StagedRows {
    /// The places of this fragment's rows.
    #[inline(always)]
    pub const fn new(fragment: &Fragment, second_panel: u32, piece_rows: u32) -> Self {
        let (unit, row) = (fragment.rows[0] / UNIT_ROWS * UNIT_BYTES, fragment.rows[0] % UNIT_ROWS);
        let words = unit + lane_place(K_BLOCK, row, fragment.lane);
        let scales = unit + scale_place(K_BLOCK, row, fragment.lane);
        Self { second_panel, piece_rows, words, scales }
    }

    /// Loads a thread's rows of a whole k-block from the panel at this address, or from this panel and the second one.
    ///
    /// # Safety
    /// The panels' stage is full.
    #[inline(always)]
    pub unsafe fn load<D: Decode>(&self, panel: SharedAddress) -> Rows<D> {
        const WORDS: u32 = row_bytes(K_BLOCK);
        const SCALES: u32 = row_scale_bytes(K_BLOCK);
        // The offsets of a row and of its neighbor differ in one bit.
        const { assert!(UNIT_BYTES.is_multiple_of(2 * WORDS) && WORDS.is_power_of_two() && SCALES.is_power_of_two()) };
        let second = |place: u32, row_bytes: u32| {
            if self.second_panel > 0 { place + self.second_panel } else { place ^ row_bytes }
        };
        // SAFETY: the offsets lie inside of the panels, which are full; a unit lies at a multiple of 16.
        unsafe {
            Rows {
                words: [self.words, second(self.words, WORDS)].map(|place| ld_shared_v4_b32(panel + place)),
                scales: [self.scales, second(self.scales, SCALES)].map(|place| D::scales(ld_shared_b16(panel + place))),
            }
        }
    }

    /// Loads a thread's rows of the partial k-block of a matrix with `k` columns. Words that a lane lacks are zero.
    ///
    /// # Safety
    /// The requirements of [`Self::load`]. The fragment is the fragment that was passed to [`Self::new`].
    #[inline(always)]
    pub unsafe fn load_ragged<D: Decode>(
        &self,
        panel: SharedAddress,
        fragment: &Fragment,
        k: u32,
        k_block: u32,
    ) -> Rows<D> {
        let columns = block_columns(k, k_block);
        let (lane, words) = (fragment.lane, lane_words(columns));
        let unit = |index: usize| {
            let (row, panel) = (fragment.rows[index], panel + index as u32 * self.second_panel);
            let piece = row / self.piece_rows * (self.piece_rows / UNIT_ROWS * UNIT_BYTES);
            panel + piece + row % self.piece_rows / UNIT_ROWS * unit_bytes(columns)
        };
        // SAFETY: the offsets lie inside of the panels, which are full.
        unsafe {
            Rows {
                words: [0, 1].map(|index| {
                    let place = unit(index) + lane_place(columns, fragment.rows[index] % UNIT_ROWS, lane);
                    core::array::from_fn(
                        |word| {
                            if (word as u32) < words { ld_shared_b32(place + word as u32 * 4) } else { 0 }
                        },
                    )
                }),
                scales: [0, 1].map(|index| {
                    let place = scale_place(columns, fragment.rows[index] % UNIT_ROWS, lane);
                    let pair = ld_shared_b16(unit(index) + (place & !1));
                    // With one scale per lane, two lanes share a load of two scales.
                    let shift = if lane_scales(columns) == 1 { place % 2 * 8 } else { 0 };
                    D::scales(pair >> shift)
                }),
            }
        }
    }
}
