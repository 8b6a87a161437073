//! The weights of an MoE layer as its kernels read them, and the order of K that their tokens take.
//!
//! Tokens are 16-bit numbers here, and B of `wgmma`: core matrices of 8 tokens × 8 elements, so that 16 bytes of a token are one
//! copy. Weights are A, decoded in registers. Four lanes share a row of A's fragment (PTX ISA, "Register Fragments for
//! wgmma.mma_async"), and each has two of the 8 columns of a core matrix. If K stood in its natural order, every lane would need
//! every scale of a row. So K is permuted inside of each k-block, for weights when they are packed and for tokens when they are
//! brought: a lane has as few scales as it can.
//!
//! # Order of K
//!
//! A k-block has [`K_BLOCK`] columns, the last one or two of K fewer, in any case a multiple of [`BLOCK`]. Lane L has *words* of eight
//! elements, up to four; *nibble* j of word t of lane L is at [`position`] `((4t + j%4)·4 + L)·2 + j/4` of the k-block. So the
//! nibbles i and i+4 of a word, which decode into one register, are neighboring columns, and core matrix 4t+i holds the
//! registers i of the words t of the four lanes. Positions of elements that exist come first, without gaps.
//!
//! Which element of K a nibble is, [`element`] says:
//!
//! * Of each 64 whole columns, words 2q and 2q+1 of lane L are the L-th block of 16, which has one scale.
//! * What is left takes words of 32 columns: lane L has 8 of them, half of a block.
//! * What is left of that, 16 columns, takes half a word of each lane: nibbles 0, 1, 4 and 5.
//!
//! If both were left, a pair of words would have two scales; then the last 16 columns are a k-block of their own.
//!
//! # Units
//!
//! A matrix `[N, K]` is cut into units of [`UNIT_ROWS`] rows, one k-block each: first the values, row by row, then the scales, row
//! by row. A row's values are the words of its lanes; a row's scales are [`lane_scales`] bytes for each lane. Of a whole k-block,
//! lanes are exchanged so that loads meet every bank of shared memory once ([`lane_place`]). A *slab* is the units of up to
//! [`SLAB_ROWS`] rows of one k-block; a matrix is slabs, those of the first rows along K, then those of the next rows.
//! Nothing is padded but half words and the scales of what is left of 64 columns.

use crate::format::BLOCK;

/// Columns of a whole k-block.
pub const K_BLOCK: u32 = 128;

/// Rows of a unit: those of a warp in `wgmma`'s A.
pub const UNIT_ROWS: u32 = 16;

/// Rows of a whole slab.
pub const SLAB_ROWS: u32 = 128;

/// Lanes that share a row of a fragment.
pub const ROW_LANES: u32 = 4;

/// Elements of a word.
pub const WORD_ELEMENTS: u32 = 8;

/// Words of a lane in a whole k-block.
pub const LANE_WORDS: u32 = K_BLOCK / ROW_LANES / WORD_ELEMENTS;

/// Columns that words 2q and 2q+1 of all lanes hold.
const HALF_COLUMNS: u32 = K_BLOCK / 2;

/// Columns that one word of each lane holds.
const WORD_COLUMNS: u32 = ROW_LANES * WORD_ELEMENTS;

/// K-blocks of so many columns.
#[inline(always)]
pub const fn k_blocks(k: u32) -> u32 {
    let left = k % K_BLOCK;
    k / K_BLOCK + (left > 0) as u32 + splits(left) as u32
}

/// Whether the last 16 of so many columns, less than a whole k-block, are a k-block of their own.
#[inline(always)]
const fn splits(left: u32) -> bool {
    left % HALF_COLUMNS > WORD_COLUMNS
}

/// The columns of a k-block of a matrix with so many columns.
#[inline(always)]
pub const fn block_columns(k: u32, k_block: u32) -> u32 {
    let left = k - block_start(k, k_block);
    if left >= K_BLOCK {
        K_BLOCK
    } else if splits(left) {
        left - BLOCK
    } else {
        left
    }
}

/// The first column of a k-block of a matrix with so many columns.
#[inline(always)]
pub const fn block_start(k: u32, k_block: u32) -> u32 {
    if k_block > k / K_BLOCK { k - BLOCK } else { k_block * K_BLOCK }
}

/// Words that a lane has of a row in a k-block of so many columns.
#[inline(always)]
pub const fn lane_words(columns: u32) -> u32 {
    columns.div_ceil(WORD_COLUMNS)
}

/// Scales that a lane has of a row in a k-block of so many columns: one for each two words.
#[inline(always)]
pub const fn lane_scales(columns: u32) -> u32 {
    columns.div_ceil(HALF_COLUMNS)
}

/// The element of a k-block of so many columns that is a nibble of a lane's word; none where the nibble is zero for want of
/// elements.
#[inline(always)]
pub const fn element(columns: u32, lane: u32, word: u32, nibble: u32) -> Option<u32> {
    let (half, odd) = (word / 2, word % 2);
    if columns >= (half + 1) * HALF_COLUMNS {
        return Some(half * HALF_COLUMNS + lane * BLOCK + odd * WORD_ELEMENTS + nibble);
    }
    let first = half * HALF_COLUMNS + odd * WORD_COLUMNS;
    if columns >= first + WORD_COLUMNS {
        return Some(first + lane * WORD_ELEMENTS + nibble);
    }
    if columns < first + BLOCK || nibble % 4 >= 2 {
        return None;
    }
    Some(first + lane * (WORD_ELEMENTS / 2) + nibble % 4 + nibble / 4 * 2)
}

/// Where a nibble of a lane's word stands among the k-block's columns as they are multiplied.
#[inline(always)]
pub const fn position(lane: u32, word: u32, nibble: u32) -> u32 {
    ((4 * word + nibble % 4) * ROW_LANES + lane) * 2 + nibble / 4
}

/// The lane, the word and the nibble that [`position`] puts there.
#[inline(always)]
pub const fn nibble_at(position: u32) -> (u32, u32, u32) {
    let (core, lane, high) = (position / WORD_ELEMENTS, position / 2 % ROW_LANES, position % 2);
    (lane, core / 4, core % 4 + high * 4)
}

/// The element that stands at a position of a k-block of so many columns, the position below the columns.
#[inline(always)]
pub const fn element_at(columns: u32, position: u32) -> u32 {
    let (lane, word, nibble) = nibble_at(position);
    match element(columns, lane, word, nibble) {
        Some(element) => element,
        None => panic!("a position of the k-block"),
    }
}

/// Where a nibble of a lane's word stands among the k-block's columns as e4m3 are multiplied, of which `wgmma` takes 32 at a time: a
/// word's first four nibbles are one register of A, its last four another one (PTX ISA, "Register Fragments for wgmma.mma_async",
/// A of `.m64nNk32`). Positions of elements that do not exist are left over.
#[inline(always)]
pub const fn e4m3_position(lane: u32, word: u32, nibble: u32) -> u32 {
    WORD_COLUMNS * word + nibble / 4 * (WORD_COLUMNS / 2) + lane * 4 + nibble % 4
}

/// Bytes of a row's values in a unit of so many columns.
#[inline(always)]
pub const fn row_bytes(columns: u32) -> u32 {
    ROW_LANES * lane_words(columns) * 4
}

/// Bytes of a row's scales in a unit of so many columns.
#[inline(always)]
pub const fn row_scale_bytes(columns: u32) -> u32 {
    ROW_LANES * lane_scales(columns)
}

/// Bytes of a unit of so many columns; a multiple of 64.
#[inline(always)]
pub const fn unit_bytes(columns: u32) -> u32 {
    UNIT_ROWS * (row_bytes(columns) + row_scale_bytes(columns))
}

/// Bytes of a unit of a whole k-block.
pub const UNIT_BYTES: u32 = unit_bytes(K_BLOCK);

/// Bytes of a slab of whole size.
pub const SLAB_BYTES: u32 = SLAB_ROWS / UNIT_ROWS * UNIT_BYTES;

/// Where a lane's words of a row lie in a unit, in bytes from its start, in a k-block of so many columns. Of a whole k-block, the
/// lanes of every two rows are exchanged in turn.
#[inline(always)]
pub const fn lane_place(columns: u32, row: u32, lane: u32) -> u32 {
    let lane = if columns == K_BLOCK { lane ^ (row / 2 % ROW_LANES) } else { lane };
    row * row_bytes(columns) + lane * lane_words(columns) * 4
}

/// Where a lane's scales of a row lie in a unit, in bytes from its start, in a k-block of so many columns.
#[inline(always)]
pub const fn scale_place(columns: u32, row: u32, lane: u32) -> u32 {
    UNIT_ROWS * row_bytes(columns) + row * row_scale_bytes(columns) + lane * lane_scales(columns)
}

/// Bytes of the units of [`UNIT_ROWS`] rows along the whole of K.
#[inline(always)]
pub const fn row_unit_bytes(k: u32) -> u64 {
    let mut bytes = (k / K_BLOCK) as u64 * UNIT_BYTES as u64;
    let mut k_block = k / K_BLOCK;
    while k_block < k_blocks(k) {
        bytes += unit_bytes(block_columns(k, k_block)) as u64;
        k_block += 1;
    }
    bytes
}

/// Bytes of a matrix `[rows, k]`, both multiples of 16.
#[inline(always)]
pub const fn matrix_bytes(rows: u32, k: u32) -> u64 {
    (rows / UNIT_ROWS) as u64 * row_unit_bytes(k)
}

/// The offset of a unit in a matrix `[rows, k]`: that of the rows from `16·unit` on, of one k-block.
#[inline(always)]
pub const fn unit_offset(rows: u32, k: u32, unit: u32, k_block: u32) -> u64 {
    const SLAB_UNITS: u32 = SLAB_ROWS / UNIT_ROWS;
    let (slab, in_slab) = (unit / SLAB_UNITS, unit % SLAB_UNITS);
    let (first, all) = (slab * SLAB_UNITS, rows / UNIT_ROWS);
    let units = if all - first < SLAB_UNITS { all - first } else { SLAB_UNITS };
    // Only one k-block can stand between the whole ones and the last.
    let whole = if k_block > k / K_BLOCK { k / K_BLOCK } else { k_block };
    let between = if k_block > whole { unit_bytes(block_columns(k, whole)) } else { 0 };
    first as u64 * row_unit_bytes(k)
        + units as u64 * (whole as u64 * UNIT_BYTES as u64 + between as u64)
        + (in_slab * unit_bytes(block_columns(k, k_block))) as u64
}

/// The type that weights are packed for: that of the tokens they are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum OperandType {
    /// IEEE half precision.
    F16 = crate::format::OUTPUT_F16,
    /// bfloat16.
    Bf16 = crate::format::OUTPUT_BF16,
    /// e4m3, with a scale for each token.
    E4m3 = 2,
}

impl OperandType {
    /// Eight e2m1 codes, nibble j in bits 4j to 4j+3, as they lie in a unit: few operations away from the 16-bit numbers that
    /// they decode to.
    ///
    /// For f16, each byte holds, from bit 7 down: the first code's sign, the second one's exponent and mantissa, the first
    /// one's exponent and mantissa, the second one's sign. For bf16, [`BF16_BITS`] says where a code's bits are, and for e4m3
    /// [`E4M3_BITS`].
    #[inline(always)]
    pub const fn pack(self, codes: u32) -> u32 {
        match self {
            Self::F16 => {
                (codes & 0x0808_0808) << 4 | codes & 0x7070_7070 | (codes & 0x0707_0707) << 1 | codes >> 7 & 0x0101_0101
            }
            Self::Bf16 => pick(codes, &BF16_BITS),
            Self::E4m3 => pick(codes, &E4M3_BITS),
        }
    }

    /// A scale, an e4m3 without sign and not NaN, as it lies in a unit. For bf16 it has five bits of exponent and three of
    /// mantissa, so that `0x7000 | code << 4` is the bf16 of the scale times 2¹¹⁹; there is no zero, so that a block whose scale
    /// is zero has codes of zero.
    #[inline(always)]
    pub const fn pack_scale(self, scale: u8) -> u8 {
        /// The exponent field of 2¹¹⁹ in bf16, less the bits that every scale has.
        const ONE: u8 = (119 + 127 - 224) as u8;
        match (self, scale) {
            (Self::F16 | Self::E4m3, _) => scale,
            (Self::Bf16, 0) => 0,
            // Subnormal: m·2⁻⁹. Its highest bit becomes the implicit one.
            (Self::Bf16, 1..8) => {
                let highest = scale.ilog2() as u8;
                (ONE - 9 + highest) << 3 | (scale << (3 - highest)) & 7
            }
            (Self::Bf16, _) => (ONE - 7 + (scale >> 3)) << 3 | scale & 7,
        }
    }

    /// log₂ of what a decoded weight lacks of its value.
    pub const fn unscale_bits(self) -> u32 {
        match self {
            Self::F16 => 14,
            Self::Bf16 => 7,
            Self::E4m3 => 3,
        }
    }
}

/// How eight codes become a word for bf16: by how much they are rotated to the left, and which of the word's bits come from there.
/// Both halves of the word are alike. They hold what decoding takes by one shift and one mask: of nibbles i and i+4 the sign and the
/// magnitude, where a bf16 has its sign and its lowest exponent bits.
pub const BF16_BITS: [(u32, u32); 6] =
    [(0, 0x8007_8007), (2, 0x6000_6000), (6, 0x0200_0200), (22, 0x1c00_1c00), (26, 0x0180_0180), (28, 0x0078_0078)];

/// How eight codes become a word for e4m3, as [`BF16_BITS`] says it. Nibble j's three low bits are the magnitude of code j, by which
/// `prmt` picks a byte of eight. The highest bits of the bytes are the signs of the first four codes; four bits below stand those of
/// the last four.
pub const E4M3_BITS: [(u32, u32); 8] = [
    (0, 0x7777_7777),
    (4, 0x0000_0080),
    (8, 0x0000_8000),
    (12, 0x0080_0000),
    (16, 0x8000_0008),
    (20, 0x0000_0800),
    (24, 0x0008_0000),
    (28, 0x0800_0000),
];

/// The bits of a word that each rotation brings to their places.
#[inline(always)]
const fn pick(codes: u32, places: &[(u32, u32)]) -> u32 {
    let (mut word, mut part) = (0, 0);
    while part < places.len() {
        let (rotation, bits) = places[part];
        word |= codes.rotate_left(rotation) & bits;
        part += 1;
    }
    word
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;
    use std::{collections::BTreeSet, vec::Vec};

    /// What a k-block can have.
    const COLUMNS: [u32; 6] = [16, 32, 64, 80, 96, 128];

    #[test]
    fn positions_and_elements_of_a_k_block_are_one_to_one() {
        for columns in COLUMNS {
            let mut found = BTreeSet::new();
            for lane in 0..ROW_LANES {
                for word in 0..lane_words(columns) {
                    for nibble in 0..WORD_ELEMENTS {
                        if let Some(element) = element(columns, lane, word, nibble) {
                            let position = position(lane, word, nibble);
                            assert!(element < columns && position < columns, "{columns}: {element} at {position}");
                            assert_eq!(element_at(columns, position), element);
                            assert!(found.insert(element), "{columns}: {element} twice");
                        }
                    }
                }
            }
            assert_eq!(found.len() as u32, columns);
        }
    }

    #[test]
    fn the_elements_of_a_word_share_the_scale_that_the_word_is_said_to_have() {
        for columns in COLUMNS {
            for lane in 0..ROW_LANES {
                let mut blocks = std::collections::BTreeMap::new();
                for word in 0..lane_words(columns) {
                    let of_word: BTreeSet<_> =
                        (0..8).filter_map(|nibble| element(columns, lane, word, nibble)).map(|e| e / BLOCK).collect();
                    assert_eq!(of_word.len(), 1, "{columns} columns, lane {lane}, word {word}");
                    let scale = word / 2;
                    assert!(scale < lane_scales(columns));
                    assert_eq!(*blocks.entry(scale).or_insert_with(|| of_word.clone()), of_word);
                }
                assert_eq!(blocks.len() as u32, lane_scales(columns));
            }
        }
    }

    #[test]
    fn k_blocks_follow_one_another_and_a_pair_of_words_has_one_scale() {
        for k in (16..=1024).step_by(16) {
            let end = (0..k_blocks(k)).fold(0, |start, k_block| {
                assert_eq!(block_start(k, k_block), start, "{k}");
                assert!(COLUMNS.contains(&block_columns(k, k_block)), "{k}");
                start + block_columns(k, k_block)
            });
            assert_eq!(end, k);
        }
    }

    #[test]
    fn places_in_a_unit_do_not_overlap_and_fill_it() {
        for columns in COLUMNS {
            let mut used = BTreeSet::new();
            for (row, lane) in (0..UNIT_ROWS).flat_map(|row| (0..ROW_LANES).map(move |lane| (row, lane))) {
                let values = lane_place(columns, row, lane)..;
                used.extend(values.take(4 * lane_words(columns) as usize));
                used.extend((scale_place(columns, row, lane)..).take(lane_scales(columns) as usize));
            }
            assert_eq!(used.into_iter().collect::<Vec<_>>(), (0..unit_bytes(columns)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn units_lie_one_behind_the_other() {
        for (rows, k) in
            [(16, 16), (128, 128), (720, 2880), (2880, 720), (96, 352), (272, 96), (48, 176), (64, 240), (16, 48)]
        {
            let mut units: Vec<_> = (0..rows / UNIT_ROWS)
                .flat_map(|unit| (0..k_blocks(k)).map(move |k_block| (unit, k_block)))
                .map(|(unit, k_block)| (unit_offset(rows, k, unit, k_block), unit_bytes(block_columns(k, k_block))))
                .collect();
            units.sort_unstable();
            let end = units.iter().fold(0, |end, &(offset, bytes)| {
                assert_eq!(offset, end);
                end + u64::from(bytes)
            });
            assert_eq!(end, matrix_bytes(rows, k));
        }
    }

    /// What a kernel makes of a packed word: register i of the bf16, as 2⁻¹²⁶ times the values.
    fn bf16_register(w: u32, register: usize) -> u32 {
        const MASK: u32 = 0x81c0_81c0;
        match register {
            0 => w << 6 & MASK,
            1 => w.rotate_left(12) & MASK,
            2 => w << 2 & MASK,
            _ => w & 0x8180_8180 | w >> 8 & 0x0040_0040,
        }
    }

    #[test]
    fn a_word_for_bf16_decodes_to_its_codes() {
        for code in 0..16u32 {
            for nibble in 0..8 {
                let word = OperandType::Bf16.pack(code << (4 * nibble));
                for register in 0..4 {
                    let expected = if nibble % 4 == register {
                        ((code & 8) << 12 | (code & 7) << 6) << (nibble / 4 * 16)
                    } else {
                        0
                    };
                    assert_eq!(bf16_register(word, register as usize), expected, "code {code} in nibble {nibble}");
                }
            }
        }
    }

    #[test]
    fn a_scale_for_bf16_is_the_scale_times_a_power_of_two() {
        for scale in 1..=126u8 {
            let value = if scale < 8 {
                f64::from(scale) * (-9f64).exp2()
            } else {
                (1.0 + f64::from(scale & 7) / 8.0) * f64::from(i32::from(scale >> 3) - 7).exp2()
            };
            let bits = 0x7000 | u32::from(OperandType::Bf16.pack_scale(scale)) << 4;
            assert_eq!(f64::from(f32::from_bits(bits << 16)), value * 119f64.exp2(), "{scale:#x}");
        }
    }

    #[test]
    fn padding_is_below_three_per_cent_of_a_layer() {
        for intermediate in [96, 192, 352, 720, 2880] {
            let hidden = 2880;
            let packed = 2 * matrix_bytes(intermediate, hidden) + matrix_bytes(hidden, intermediate);
            let bytes = 3.0 * f64::from(hidden) * f64::from(intermediate) * 0.5625;
            assert!((packed as f64) < 1.03 * bytes, "{intermediate}: {}", packed as f64 / bytes);
        }
    }
}
