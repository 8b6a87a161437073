//! The warpgroups that multiply: stages of weights × buffers of tokens → C. The main loop and the epilogue are those of
//! [`sm90`](crate::sm90); here stands how weights lie in a stage.

use core::marker::PhantomData;

use cuda_std::{
    integer::opaque_b32,
    shared::{SharedAddress, ld_shared_b16, ld_shared_b32, ld_shared_v4_b32},
    wgmma,
};

use super::{Built, Moe};
use crate::{
    format::{OUTPUT_BF16, OUTPUT_F16},
    moe_sm90::abi::Launch,
    ring::Ring,
    sm90::{
        Alpha, BIAS_BYTES, Consumer, Fragment, Kind, LANE_WORDS, Shape, Target, Tile,
        decode::{BF16_UNSCALE, Bf16Scales, F16_UNSCALE, Scales, decode_weights, decode_weights_bf16},
    },
    units::{
        K_BLOCK, UNIT_BYTES, UNIT_ROWS, block_columns, k_blocks, lane_place, lane_scales, lane_words, row_bytes,
        row_scale_bytes, scale_place, unit_bytes,
    },
};

impl<I: Built, const BF16: bool, const P: usize> Moe<I, BF16, P>
where
    Packed<BF16>: Decode,
{
    /// Multiplies and writes the block's tiles. One warpgroup, the `consumer`-th of those that multiply.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`. The barriers have been initialised. The whole warpgroup calls it together, and
    /// so does every other one that multiplies, with its own number.
    #[inline(always)]
    pub(super) unsafe fn multiply(&self, consumer: u32) {
        let k = self.launch.k;
        let kind: Units<I, BF16, P> = Units::new(k, &Self::rows_of(Fragment::new(consumer)));
        let (stages, buffers, mut tiles) = (self.stages(), self.buffers(), self.tiles());
        let mut consumer: Consumer<_, P> =
            Consumer::new(kind, self.shared, consumer, stages, buffers, self.turn_barriers());
        // SAFETY: the whole warpgroup is here and takes the same way. The tile is the block's.
        unsafe {
            loop {
                let tokens = tiles.wait();
                if tokens == 0 {
                    return;
                }
                let sums = consumer.sum_tile(tokens, k_blocks(k));
                let (Tile { first_column, first_row, tokens, expert, alpha }, empty) = tiles.read();
                consumer.fragment.arrive(empty);
                let Launch { c, n, bias, activation, .. } = self.launch;
                // `n` is opaque, so that no register holds a multiple of it over the main loop.
                let of_expert = u64::from(expert) * u64::from(opaque_b32(n)) * BIAS_BYTES;
                let target: Target<Units<I, BF16, P>> = Target {
                    c,
                    n,
                    alpha: Alpha::OfMatrices(alpha.map(f32::from_bits)),
                    bias: bias.map(|bias| if bias == 0 { 0 } else { bias + of_expert }),
                    activation,
                    first_column,
                    first_row,
                    tokens,
                    kind: PhantomData,
                };
                let rows = Self::rows_of(Fragment::anew());
                target.write::<P>(if BF16 { OUTPUT_BF16 } else { OUTPUT_F16 }, &rows, sums);
            }
        }
    }

    /// Which rows of panels are a thread's.
    #[inline(always)]
    fn rows_of(fragment: Fragment) -> Fragment {
        if Self::INSTANCE.narrow && Self::INSTANCE.matrices == 2 { fragment.narrow() } else { fragment }
    }
}

/// How weights are decoded for a type of tokens.
pub(crate) trait Decode {
    /// What a decoded weight lacks of its value.
    const UNSCALE: f32;
    /// The numbers that are multiplied.
    type Number: wgmma::Number;
    /// The two scales that a lane has of a row.
    type Scales: Copy;

    fn scales(bytes: u16) -> Self::Scales;

    /// Decodes a word whose scale has this index.
    fn decode(word: u32, scales: Self::Scales, index: usize) -> [u32; 4];
}

/// Weights packed for bf16, or for f16.
pub(crate) struct Packed<const BF16: bool>;

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
        decode_weights(word, scales.twice(index))
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
        decode_weights_bf16(word, scales.twice(index))
    }
}

/// A stage that holds [`units`](crate::units).
struct Units<I, const BF16: bool, const P: usize> {
    k: u32,
    /// Where the words of the thread's first row lie in a panel of a whole k-block.
    words: u32,
    /// Where the first row's scales lie, as `words`.
    scales: u32,
    instance: PhantomData<I>,
}

impl<I: Built, const BF16: bool, const P: usize> Units<I, BF16, P> {
    /// For sums over `k` elements.
    #[inline(always)]
    fn new(k: u32, fragment: &Fragment) -> Self {
        let (unit, row) = (fragment.rows[0] / UNIT_ROWS * UNIT_BYTES, fragment.rows[0] % UNIT_ROWS);
        let words = unit + lane_place(K_BLOCK, row, fragment.lane);
        let scales = unit + scale_place(K_BLOCK, row, fragment.lane);
        Self { k, words, scales, instance: PhantomData }
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

impl<I: Built, const BF16: bool, const P: usize> Kind<P> for Units<I, BF16, P>
where
    Packed<BF16>: Decode,
{
    const SHAPE: Shape = Moe::<I, BF16, P>::INSTANCE.shape();
    const UNSCALE: f32 = Packed::<BF16>::UNSCALE;
    const COPIED_BY_THREADS: bool = true;
    const BY_WARPS: bool = Moe::<I, BF16, P>::INSTANCE.by_warps;
    const ANY_ACTIVATION: bool = true;
    type Number = <Packed<BF16> as Decode>::Number;
    type Part = Rows<Packed<BF16>>;

    #[inline(always)]
    fn stage(shared: SharedAddress, stages: Ring) -> SharedAddress {
        Moe::<I, BF16, P>::stage(shared, stages)
    }

    #[inline(always)]
    fn buffer(shared: SharedAddress, buffers: Ring) -> SharedAddress {
        Moe::<I, BF16, P>::buffer(shared, buffers)
    }

    #[inline(always)]
    unsafe fn load(&self, stage: SharedAddress, _fragment: &Fragment, k_block: u32) -> [Rows<Packed<BF16>>; P] {
        let panel = |part: usize| stage + Moe::<I, BF16, P>::panel(part as u32);
        // SAFETY: the panels of the stage, which is full. Panels lie one behind the other, so that the rows of a narrow plain tile do.
        unsafe {
            if k_block < self.k / K_BLOCK {
                core::array::from_fn(|part| self.load_whole(panel(part)))
            } else {
                let fragment = Moe::<I, BF16, P>::rows_of(Fragment::anew());
                let columns = block_columns(self.k, k_block);
                core::array::from_fn(|part| Self::load_ragged(panel(part), &fragment, columns))
            }
        }
    }

    #[inline(always)]
    fn decode(part: &Rows<Packed<BF16>>, word: usize) -> [[u32; 4]; 2] {
        let [first, second] =
            [0, 1].map(|row| Packed::<BF16>::decode(part.words[row][word], part.scales[row], word / 2));
        [[first[0], second[0], first[1], second[1]], [first[2], second[2], first[3], second[3]]]
    }
}

impl<I: Built, const BF16: bool, const P: usize> Units<I, BF16, P>
where
    Packed<BF16>: Decode,
{
    /// A thread's two rows are one row of both panels, in a narrow gated tile; else they are neighbours in one panel, which are
    /// exchanged in odd pairs.
    const ROW_OF_BOTH: bool = Moe::<I, BF16, P>::INSTANCE.narrow && Moe::<I, BF16, P>::INSTANCE.matrices == 2;

    /// Loads a thread's rows of the panel at this address, or of it and the next one. A stage holds whole k-blocks.
    ///
    /// # Safety
    /// The panels' stage is full.
    #[inline(always)]
    unsafe fn load_whole(&self, panel: SharedAddress) -> Rows<Packed<BF16>> {
        const WORDS: u32 = row_bytes(K_BLOCK);
        const SCALES: u32 = row_scale_bytes(K_BLOCK);
        // A row and its neighbour differ in one bit of their places.
        const { assert!(UNIT_BYTES.is_multiple_of(2 * WORDS) && WORDS.is_power_of_two() && SCALES.is_power_of_two()) };
        let second = |place: u32, row_bytes: u32| {
            if Self::ROW_OF_BOTH { place + Moe::<I, BF16, P>::panel(1) } else { place ^ row_bytes }
        };
        // SAFETY: inside of the panels, which are full; a unit lies at a multiple of 16.
        unsafe {
            Rows {
                words: [self.words, second(self.words, WORDS)].map(|place| ld_shared_v4_b32(panel + place)),
                scales: [self.scales, second(self.scales, SCALES)]
                    .map(|place| Packed::<BF16>::scales(ld_shared_b16(panel + place))),
            }
        }
    }

    /// As [`Self::load_whole`], of a k-block of so many columns, fewer than a whole one. Words that a lane lacks are zero.
    ///
    /// # Safety
    /// As [`Self::load_whole`].
    #[inline(always)]
    unsafe fn load_ragged(panel: SharedAddress, fragment: &Fragment, columns: u32) -> Rows<Packed<BF16>> {
        let (lane, words) = (fragment.lane, lane_words(columns));
        let piece_rows = Moe::<I, BF16, P>::INSTANCE.piece_rows();
        let unit = |index: usize| {
            let (row, panel) = (
                fragment.rows[index],
                if Self::ROW_OF_BOTH { panel + Moe::<I, BF16, P>::panel(index as u32) } else { panel },
            );
            let piece = row / piece_rows * (piece_rows / UNIT_ROWS * UNIT_BYTES);
            panel + piece + row % piece_rows / UNIT_ROWS * unit_bytes(columns)
        };
        // SAFETY: inside of the panels, as in `load_whole`.
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
                    // With one scale a lane, two lanes share the pair.
                    let shift = if lane_scales(columns) == 1 { place % 2 * 8 } else { 0 };
                    Packed::<BF16>::scales(pair >> shift)
                }),
            }
        }
    }
}
