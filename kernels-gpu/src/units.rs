//! Layout of an MoE layer's weights as its kernels read them, and the order of K in its tokens.
//!
//! Tokens are 16-bit numbers, and operand B of `wgmma`: core matrices of 8 tokens × 8 elements, so 16 bytes of a token
//! are one copy. Weights are operand A, decoded in registers. Four lanes share a row of A's fragment (PTX ISA,
//! "Register Fragments for wgmma.mma_async"), and each lane has two of the 8 columns of a core matrix. With K in its
//! natural order, each lane would need every scale of a row. So K is permuted within each k-block, for weights at
//! packing and for tokens at loading, such that a lane needs as few scales as possible.
//!
//! # Order of K
//!
//! A k-block has [`K_BLOCK`] columns. The last one or two k-blocks have fewer, always a multiple of [`BLOCK`]. Lane L
//! has up to four *words* of eight elements. *Nibble* j of word t of lane L is at [`position`] `((4t + j%4)·4 + L)·2 +
//! j/4` in the k-block. So nibbles i and i+4 of a word, which decode into one register, are neighboring columns, and
//! core matrix 4t+i holds register i of word t of the four lanes. Positions of existing elements come first, without
//! gaps.
//!
//! [`element`] maps a nibble to its element of K:
//!
//! * In each group of 64 whole columns, words 2q and 2q+1 of lane L are the L-th block of 16, which has one scale.
//! * Of the remaining columns, 32 form one word per lane: lane L has 8 of them, half of a block.
//! * The last 16 columns form half a word per lane: nibbles 0, 1, 4 and 5.
//!
//! If 32 and 16 columns remained together, a pair of words would have two scales. In this case the last 16 columns are
//! a separate k-block.
//!
//! # Units
//!
//! A matrix `[N, K]` is split into units of [`UNIT_ROWS`] rows × one k-block: first the values, row by row, then the
//! scales, row by row. A row's values are the words of its lanes; a row's scales are [`lane_scales`] bytes per lane. In
//! a whole k-block, lanes are permuted so that a warp's loads access every bank of shared memory once ([`lane_place`]).
//! A *slab* is the units of up to [`SLAB_ROWS`] rows of one k-block. A matrix is a sequence of slabs: first all slabs
//! of the first rows along K, then all slabs of the next rows. The only padding is in half words and in the scales of
//! the last columns below a multiple of 64.

use crate::format::BLOCK;

/// Number of columns of a whole k-block.
pub const K_BLOCK: u32 = 128;

/// Rows per unit: the rows of one warp in `wgmma`'s A.
pub const UNIT_ROWS: u32 = 16;

/// Rows of a whole slab.
pub const SLAB_ROWS: u32 = 128;

/// Number of lanes that share a row of a fragment.
pub const ROW_LANES: u32 = 4;

/// Number of elements per word.
pub const WORD_ELEMENTS: u32 = 8;

/// Words per lane in a whole k-block.
pub const LANE_WORDS: u32 = K_BLOCK / ROW_LANES / WORD_ELEMENTS;

/// Number of columns that words 2q and 2q+1 of all lanes hold.
const HALF_COLUMNS: u32 = K_BLOCK / 2;

/// Number of columns that one word of each lane holds.
const WORD_COLUMNS: u32 = ROW_LANES * WORD_ELEMENTS;

/// Number of k-blocks of `k` columns.
#[inline(always)]
pub const fn k_blocks(k: u32) -> u32 {
    let left = k % K_BLOCK;
    k / K_BLOCK + (left > 0) as u32 + splits(left) as u32
}

/// Whether the last 16 of `left` columns are a separate k-block. `left` is less than a whole k-block.
#[inline(always)]
const fn splits(left: u32) -> bool {
    left % HALF_COLUMNS > WORD_COLUMNS
}

/// Number of columns of k-block `k_block` in a matrix with `k` columns.
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

/// First column of k-block `k_block` in a matrix with `k` columns.
#[inline(always)]
pub const fn block_start(k: u32, k_block: u32) -> u32 {
    if k_block > k / K_BLOCK { k - BLOCK } else { k_block * K_BLOCK }
}

/// Words per lane and row in a k-block of `columns` columns.
#[inline(always)]
pub const fn lane_words(columns: u32) -> u32 {
    columns.div_ceil(WORD_COLUMNS)
}

/// Scales per lane and row in a k-block of `columns` columns: one per two words.
#[inline(always)]
pub const fn lane_scales(columns: u32) -> u32 {
    columns.div_ceil(HALF_COLUMNS)
}

/// Returns the element, in a k-block of `columns` columns, that a nibble of a lane's word holds. Returns `None` for a
/// nibble of padding, which is zero.
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

/// Position of a nibble of a lane's word among the k-block's columns, in the order of multiplication.
#[inline(always)]
pub const fn position(lane: u32, word: u32, nibble: u32) -> u32 {
    ((4 * word + nibble % 4) * ROW_LANES + lane) * 2 + nibble / 4
}

/// Inverse of [`position`]: the lane, the word and the nibble at `position`.
#[inline(always)]
pub const fn nibble_at(position: u32) -> (u32, u32, u32) {
    let (core, lane, high) = (position / WORD_ELEMENTS, position / 2 % ROW_LANES, position % 2);
    (lane, core / 4, core % 4 + high * 4)
}

/// Element at `position` of a k-block of `columns` columns. `position` is less than `columns`.
#[inline(always)]
pub const fn element_at(columns: u32, position: u32) -> u32 {
    let (lane, word, nibble) = nibble_at(position);
    match element(columns, lane, word, nibble) {
        Some(element) => element,
        None => panic!("no element: the position is outside the k-block"),
    }
}

/// Position of a nibble of a lane's word among the k-block's columns for e4m3 products, where `wgmma` multiplies 32
/// columns at a time. A word's first four nibbles are one register of A, its last four another register (PTX ISA,
/// "Register Fragments for wgmma.mma_async", A of `.m64nNk32`). Positions of padding nibbles stay unused.
#[inline(always)]
pub const fn e4m3_position(lane: u32, word: u32, nibble: u32) -> u32 {
    WORD_COLUMNS * word + nibble / 4 * (WORD_COLUMNS / 2) + lane * 4 + nibble % 4
}

/// Bytes of a row's values in a unit of `columns` columns.
#[inline(always)]
pub const fn row_bytes(columns: u32) -> u32 {
    ROW_LANES * lane_words(columns) * 4
}

/// Bytes of a row's scales in a unit of `columns` columns.
#[inline(always)]
pub const fn row_scale_bytes(columns: u32) -> u32 {
    ROW_LANES * lane_scales(columns)
}

/// Bytes of a unit of `columns` columns; a multiple of 64.
#[inline(always)]
pub const fn unit_bytes(columns: u32) -> u32 {
    UNIT_ROWS * (row_bytes(columns) + row_scale_bytes(columns))
}

/// Bytes of a unit of a whole k-block.
pub const UNIT_BYTES: u32 = unit_bytes(K_BLOCK);

/// Bytes of a whole slab.
pub const SLAB_BYTES: u32 = SLAB_ROWS / UNIT_ROWS * UNIT_BYTES;

/// Offset of a lane's words of a row in a unit, in bytes, in a k-block of `columns` columns. In a whole k-block, the
/// lanes of each pair of rows have a different permutation than the lanes of the next pair.
#[inline(always)]
pub const fn lane_place(columns: u32, row: u32, lane: u32) -> u32 {
    let lane = if columns == K_BLOCK { lane ^ (row / 2 % ROW_LANES) } else { lane };
    row * row_bytes(columns) + lane * lane_words(columns) * 4
}

/// Offset of a lane's scales of a row in a unit, in bytes, in a k-block of `columns` columns.
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

/// Bytes of a matrix `[rows, k]`, where `rows` and `k` are multiples of 16.
#[inline(always)]
pub const fn matrix_bytes(rows: u32, k: u32) -> u64 {
    (rows / UNIT_ROWS) as u64 * row_unit_bytes(k)
}

/// Offset in bytes of a unit in a matrix `[rows, k]`: the rows from `16·unit` on, in k-block `k_block`.
#[inline(always)]
pub const fn unit_offset(rows: u32, k: u32, unit: u32, k_block: u32) -> u64 {
    const SLAB_UNITS: u32 = SLAB_ROWS / UNIT_ROWS;
    let (slab, in_slab) = (unit / SLAB_UNITS, unit % SLAB_UNITS);
    let (first, all) = (slab * SLAB_UNITS, rows / UNIT_ROWS);
    let units = if all - first < SLAB_UNITS { all - first } else { SLAB_UNITS };
    // At most one shorter k-block lies between the whole k-blocks and the last one.
    let whole = if k_block > k / K_BLOCK { k / K_BLOCK } else { k_block };
    let between = if k_block > whole { unit_bytes(block_columns(k, whole)) } else { 0 };
    first as u64 * row_unit_bytes(k)
        + units as u64 * (whole as u64 * UNIT_BYTES as u64 + between as u64)
        + (in_slab * unit_bytes(block_columns(k, k_block))) as u64
}

/// Type that weights are packed for: the type of the tokens that they are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum OperandType {
    /// IEEE half precision.
    F16 = crate::format::OUTPUT_F16,
    /// bfloat16.
    Bf16 = crate::format::OUTPUT_BF16,
    /// e4m3, with one scale per token.
    E4m3 = 2,
}

impl OperandType {
    /// Packs eight e2m1 codes, nibble j in bits 4j to 4j+3, to a word of a unit, from which decoding takes few
    /// operations.
    ///
    /// For f16, each byte holds from bit 7 down: the first code's sign, the second code's exponent and mantissa, the
    /// first code's exponent and mantissa, the second code's sign. [`BF16_BITS`] defines the places of the bits for
    /// bf16, [`E4M3_BITS`] for e4m3.
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

    /// Packs a scale, an e4m3 without sign and not NaN, to a byte of a unit. For bf16, the byte has five exponent bits
    /// and three mantissa bits: `0x7000 | code << 4` is the bf16 of the scale times 2¹¹⁹. This form has no zero, so a
    /// block with scale zero has codes of zero.
    #[inline(always)]
    pub const fn pack_scale(self, scale: u8) -> u8 {
        /// Exponent field of 2¹¹⁹ in bf16, minus the bits that all scales have.
        const ONE: u8 = (119 + 127 - 224) as u8;
        match (self, scale) {
            (Self::F16 | Self::E4m3, _) => scale,
            (Self::Bf16, 0) => 0,
            // Subnormal: m·2⁻⁹. The highest bit of m becomes the implicit one.
            (Self::Bf16, 1..8) => {
                let highest = scale.ilog2() as u8;
                (ONE - 9 + highest) << 3 | (scale << (3 - highest)) & 7
            }
            (Self::Bf16, _) => (ONE - 7 + (scale >> 3)) << 3 | scale & 7,
        }
    }

    /// log₂ of the factor that undoes the scaling of decoded weights.
    pub const fn unscale_bits(self) -> u32 {
        match self {
            Self::F16 => 14,
            Self::Bf16 => 7,
            Self::E4m3 => 3,
        }
    }
}

/// How eight codes become a word for bf16: pairs of a rotation to the left and the bits of the word that come from the
/// rotated codes. Both halves of the word have the same form. Decoding takes, by one shift and one mask, the sign and
/// the magnitude of nibbles i and i+4, at the sign and the lowest exponent bits of a bf16.
pub const BF16_BITS: [(u32, u32); 6] =
    [(0, 0x8007_8007), (2, 0x6000_6000), (6, 0x0200_0200), (22, 0x1c00_1c00), (26, 0x0180_0180), (28, 0x0078_0078)];

/// How eight codes become a word for e4m3, in the form of [`BF16_BITS`]. The three low bits of nibble j are the
/// magnitude of code j, with which `prmt` selects one of eight bytes. The highest bits of the bytes are the signs of
/// the first four codes. The signs of the last four codes lie four bits lower.
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

/// Collects the bits of a word: each rotation of `codes` contributes its bits.
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

    /// Possible numbers of columns of a k-block.
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
    fn elements_of_a_word_share_its_scale() {
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
    fn k_blocks_cover_k_without_gaps() {
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
    fn places_fill_a_unit_without_overlap() {
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
    fn units_lie_in_sequence_without_gaps() {
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

    /// Decodes a packed word like a kernel: returns register i of the bf16, as 2⁻¹²⁶ times the values.
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
    fn bf16_scales_are_multiplied_by_a_power_of_two() {
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
    fn padding_is_below_three_percent_of_a_layer() {
        for intermediate in [96, 192, 352, 720, 2880] {
            let hidden = 2880;
            let packed = 2 * matrix_bytes(intermediate, hidden) + matrix_bytes(hidden, intermediate);
            let bytes = 3.0 * f64::from(hidden) * f64::from(intermediate) * 0.5625;
            assert!((packed as f64) < 1.03 * bytes, "{intermediate}: {}", packed as f64 / bytes);
        }
    }
}
