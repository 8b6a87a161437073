//! The warpgroups that multiply: stages of weights × buffers of tokens → C. The main loop and the epilogue are those of
//! [`sm90`](crate::sm90); here stands how weights lie in a stage.

use core::marker::PhantomData;

use cuda_std::shared::{SharedAddress, ld_shared_b16, ld_shared_b32, ld_shared_v4_b32};

use super::{Moe, tiles::Tile};
use crate::{
    format::{OUTPUT_BF16, OUTPUT_F16},
    ring::Ring,
    sm90::{
        Consumer, Fragment, Kind, LANE_WORDS, PANELS, Parts, Shape, Target,
        decode::{BF16_UNSCALE, Bf16Scales, F16_UNSCALE, Scales, decode_weights, decode_weights_bf16},
    },
    units::{
        K_BLOCK, SLAB_BYTES, SLAB_ROWS, TokenType, UNIT_BYTES, UNIT_ROWS, block_columns, k_blocks, lane_place, lane_scales,
        lane_words, row_bytes, row_scale_bytes, scale_place, unit_bytes,
    },
};

impl<const INDEX: usize> Moe<INDEX> {
    const IS_BF16: bool = matches!(Self::INSTANCE.token_type, TokenType::Bf16);

    /// Multiplies and writes the block's tiles. One warpgroup, the `consumer`-th of those that multiply.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`. The barriers have been initialised. The whole warpgroup calls it together, and
    /// so does every other one that multiplies, with its own number.
    #[inline(always)]
    pub(super) unsafe fn multiply(&self, consumer: u32) {
        if Self::IS_BF16 {
            // SAFETY: what `# Safety` above asks.
            unsafe { self.multiply_as::<Bf16Weights, OUTPUT_BF16>(consumer) }
        } else {
            // SAFETY: as above.
            unsafe { self.multiply_as::<F16Weights, OUTPUT_F16>(consumer) }
        }
    }

    /// [`Self::multiply`] of this type.
    ///
    /// # Safety
    /// As [`Self::multiply`].
    #[inline(always)]
    unsafe fn multiply_as<D: Decode, const OUTPUT: u32>(&self, consumer: u32) {
        let k = self.launch.k;
        let kind: Units<D, INDEX> = Units::new(k, &Fragment::new(consumer));
        let (stages, buffers, mut tiles) = (self.stages(), self.buffers(), self.tiles());
        let mut consumer = Consumer::new(kind, self.shared, consumer, stages, buffers, self.turn_barriers());
        // SAFETY: the whole warpgroup is here and takes the same way. The tile is the block's.
        unsafe {
            loop {
                tiles.wait_full();
                let tokens = ld_shared_b32(self.slot(tiles) + Tile::TOKENS);
                if tokens == 0 {
                    return;
                }
                let sums = consumer.sum_tile(tokens, k_blocks(k));
                let Tile { first_column, first_row, tokens, alpha, .. } = Tile::read(self.slot(tiles));
                consumer.fragment.arrive(tiles.empty());
                tiles.advance();
                let target: Target<Units<D, INDEX>> = Target {
                    c: self.launch.c,
                    n: self.launch.n,
                    alpha: alpha.map(f32::from_bits),
                    first_column,
                    first_row,
                    tokens,
                    kind: PhantomData,
                };
                target.write::<OUTPUT>(&consumer.fragment, sums);
            }
        }
    }
}

/// How weights are decoded for a type of tokens.
trait Decode {
    /// What a decoded weight lacks of its value.
    const UNSCALE: f32;
    /// The numbers that are multiplied.
    type Number: cuda_std::wgmma::Number;
    /// The two scales that a lane has of a row.
    type Scales: Copy;

    fn scales(bytes: u16) -> Self::Scales;

    /// Decodes a word whose scale has this index.
    fn decode(word: u32, scales: Self::Scales, index: usize) -> [u32; 4];
}

/// Weights packed for f16.
struct F16Weights;

/// Weights packed for bf16.
struct Bf16Weights;

impl Decode for F16Weights {
    const UNSCALE: f32 = F16_UNSCALE;
    type Number = cuda_std::wgmma::F16;
    type Scales = Scales;

    #[inline(always)]
    fn scales(bytes: u16) -> Scales {
        Scales::new(bytes)
    }

    #[inline(always)]
    fn decode(word: u32, scales: Scales, index: usize) -> [u32; 4] {
        decode_weights(word, scales.twice(index))
    }
}

impl Decode for Bf16Weights {
    const UNSCALE: f32 = BF16_UNSCALE;
    type Number = cuda_std::wgmma::Bf16;
    type Scales = Bf16Scales;

    #[inline(always)]
    fn scales(bytes: u16) -> Bf16Scales {
        Bf16Scales::new(bytes)
    }

    #[inline(always)]
    fn decode(word: u32, scales: Bf16Scales, index: usize) -> [u32; 4] {
        decode_weights_bf16(word, scales.twice(index))
    }
}

/// A stage that holds [`units`](crate::units).
struct Units<D, const INDEX: usize> {
    k: u32,
    /// Where the words of the thread's first row lie in a panel of a whole k-block; those of its second row are 64 bytes before
    /// or behind.
    words: u32,
    /// Where the first row's scales lie, as `words`; those of the second row are 8 bytes before or behind.
    scales: u32,
    decode: PhantomData<D>,
}

impl<D, const INDEX: usize> Units<D, INDEX> {
    /// For sums over `k` elements.
    #[inline(always)]
    fn new(k: u32, fragment: &Fragment) -> Self {
        // Whole units lie one behind the other, in whichever slab.
        const { assert!(SLAB_BYTES == SLAB_ROWS / UNIT_ROWS * UNIT_BYTES) };
        let (unit, row) = (fragment.rows[0] / UNIT_ROWS * UNIT_BYTES, fragment.rows[0] % UNIT_ROWS);
        let words = unit + lane_place(K_BLOCK, row, fragment.lane);
        Self { k, words, scales: unit + scale_place(K_BLOCK, row, fragment.lane), decode: PhantomData }
    }
}

/// A thread's words of two rows of a stage's panel, and the scales of these words.
struct Rows<D: Decode> {
    words: [[u32; LANE_WORDS]; 2],
    scales: [D::Scales; 2],
}

impl<D: Decode> Clone for Rows<D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Decode> Copy for Rows<D> {}

impl<D: Decode, const INDEX: usize> Kind for Units<D, INDEX> {
    const SHAPE: Shape = Moe::<INDEX>::INSTANCE.shape();
    const UNSCALE: f32 = D::UNSCALE;
    type Number = D::Number;
    type Part = Rows<D>;

    #[inline(always)]
    fn stage(shared: SharedAddress, stages: Ring) -> SharedAddress {
        Moe::<INDEX>::stage(shared, stages)
    }

    #[inline(always)]
    fn buffer(shared: SharedAddress, buffers: Ring) -> SharedAddress {
        Moe::<INDEX>::buffer(shared, buffers)
    }

    #[inline(always)]
    unsafe fn load(&self, stage: SharedAddress, _fragment: &Fragment, k_block: u32) -> Parts<Self> {
        let panel = |panel: usize| stage + Moe::<INDEX>::panel(panel as u32);
        let panels: [SharedAddress; PANELS] = [panel(0), panel(1)];
        // SAFETY: the panels of the stage, which is full.
        unsafe {
            if k_block < self.k / K_BLOCK {
                panels.map(|panel| Rows::load(panel, self.words, self.scales))
            } else {
                let (fragment, columns) = (Fragment::anew(), block_columns(self.k, k_block));
                panels.map(|panel| Rows::load_ragged(panel, &fragment, columns))
            }
        }
    }

    #[inline(always)]
    fn decode(part: &Rows<D>, word: usize) -> [[u32; 4]; 2] {
        let [first, second] = [0, 1].map(|row| D::decode(part.words[row][word], part.scales[row], word / 2));
        [[first[0], second[0], first[1], second[1]], [first[2], second[2], first[3], second[3]]]
    }
}

impl<D: Decode> Rows<D> {
    /// Loads them of the panel at this address, which holds a whole k-block. The first row's words and scales lie so far from its
    /// start.
    ///
    /// # Safety
    /// The panel's stage is full of it.
    #[inline(always)]
    unsafe fn load(panel: SharedAddress, words: u32, scales: u32) -> Self {
        const WORDS: u32 = row_bytes(K_BLOCK);
        const SCALES: u32 = row_scale_bytes(K_BLOCK);
        // A row and the one that it is exchanged with differ in one bit of their places.
        const { assert!(UNIT_BYTES.is_multiple_of(2 * WORDS) && WORDS.is_power_of_two() && SCALES.is_power_of_two()) };
        // SAFETY: inside of the panel, which is full; a unit lies at a multiple of 16.
        unsafe {
            Self {
                words: [words, words ^ WORDS].map(|place| ld_shared_v4_b32(panel + place)),
                scales: [scales, scales ^ SCALES].map(|place| D::scales(ld_shared_b16(panel + place))),
            }
        }
    }

    /// As [`Self::load`], of a k-block of so many columns, fewer than a whole one. Words that a lane lacks are zero.
    ///
    /// # Safety
    /// As [`Self::load`].
    #[inline(always)]
    unsafe fn load_ragged(panel: SharedAddress, fragment: &Fragment, columns: u32) -> Self {
        let (lane, words) = (fragment.lane, lane_words(columns));
        let unit = |row: u32| panel + row / SLAB_ROWS * SLAB_BYTES + row % SLAB_ROWS / UNIT_ROWS * unit_bytes(columns);
        // SAFETY: inside of the panel, as in `load`.
        unsafe {
            Self {
                words: fragment.rows.map(|row| {
                    let place = unit(row) + lane_place(columns, row % UNIT_ROWS, lane);
                    core::array::from_fn(|word| {
                        if (word as u32) < words { ld_shared_b32(place + word as u32 * 4) } else { 0 }
                    })
                }),
                scales: fragment.rows.map(|row| {
                    let place = scale_place(columns, row % UNIT_ROWS, lane);
                    let pair = ld_shared_b16(unit(row) + (place & !1));
                    // With one scale a lane, two lanes share the pair.
                    let shift = if lane_scales(columns) == 1 { place % 2 * 8 } else { 0 };
                    D::scales(pair >> shift)
                }),
            }
        }
    }
}
