//! Sums of products as Hopper's tensor cores make them, to the bit: `wgmma` of two e4m3 with f32 accumulators.
//!
//! PTX leaves these sums open. What a card does was found from results of an H200 (`crates/ptx_emulator/src/hw/fp8.rs`, with which a
//! test compares this file). [`STEP`] products are added to the accumulator at a time:
//!
//! 1. A product is exact. Its exponent is the sum of its factors', subnormal ones having that of the smallest normal numbers; zero
//!    has none. The accumulator has its own.
//! 2. All products and the accumulator are cut, toward zero, to multiples of 2⁻¹³ of the power of two with the largest exponent.
//! 3. They are added exactly, and the sum is cut, toward zero, to 13 bits behind its first.
//!
//! A cut loses less than 2⁻¹³ of that power of two, for each of 33 addends and the sum. Where products alternate in sign that is little
//! (`docs/accuracy.md`); where they all have one, small ones are lost beside a large sum.

use crate::format::{BLOCK, e4m3};

/// Products that are added at a time: those of one `wgmma`, k32.
pub const STEP: usize = 32;

/// Bits that addends and sums keep behind the first.
const KEPT_BITS: u32 = 13;

/// The bits of an f32's mantissa that a sum does not keep.
const CUT_BITS: u32 = (1 << (f32::MANTISSA_DIGITS - 1 - KEPT_BITS)) - 1;

/// Where a column of K stands among columns as they are multiplied. The [`STEP`] positions from a multiple of it on are a step.
///
/// Of each 64 whole columns, the first halves of their four blocks are one step and the last halves the next, since the lanes that
/// share a row of `wgmma`'s A have a block each. What is left stays in its order.
pub const fn position(k: usize, column: usize) -> usize {
    const QUAD: usize = 4 * BLOCK;
    const HALF: usize = BLOCK / 2;
    let (first, within) = (column / QUAD * QUAD, column % QUAD);
    if first + QUAD > k {
        return column;
    }
    first + within / HALF % 2 * STEP + within / BLOCK * HALF + within % HALF
}

/// A row of codes, ready to be multiplied: numbers at their [`position`]s, with zeros behind them up to a whole step.
#[derive(Clone, Debug, PartialEq)]
pub struct Factors {
    numbers: Vec<f32>,
    /// The power of two with each number's exponent; 0 for zero.
    powers: Vec<f32>,
    is_nan: bool,
}

impl Factors {
    /// Of e4m3 codes, columns in their natural order.
    pub fn new(codes: &[u8]) -> Self {
        let (k, len) = (codes.len(), codes.len().next_multiple_of(STEP));
        let mut factors = Self { numbers: vec![0.0; len], powers: vec![0.0; len], is_nan: false };
        for (column, &code) in codes.iter().enumerate() {
            let (position, number) = (position(k, column), e4m3::decode(code));
            factors.is_nan |= number.is_nan();
            factors.numbers[position] = number;
            factors.powers[position] = if number == 0.0 { 0.0 } else { power(number).max(SMALLEST_NORMAL) };
        }
        factors
    }
}

/// The smallest normal e4m3.
const SMALLEST_NORMAL: f32 = 1.0 / 64.0;

/// The power of two with the exponent of a normal number; 0 for zero.
#[inline(always)]
fn power(number: f32) -> f32 {
    f32::from_bits(number.to_bits() & f32::INFINITY.to_bits())
}

/// The sum of the products of two rows of the same K, from zero. NaN if either has one.
///
/// # Panics
/// If they have not the same K.
pub fn sum(a: &Factors, b: &Factors) -> f32 {
    assert_eq!(a.numbers.len(), b.numbers.len(), "factors of each other");
    if a.is_nan || b.is_nan {
        return f32::NAN;
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: avx2 was detected on the line above.
        return unsafe { sum_avx2(a, b) };
    }
    sum_of_numbers(a, b)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2(a: &Factors, b: &Factors) -> f32 {
    sum_of_numbers(a, b)
}

/// Everything here is exact but what is cut, so every instruction set has the same bits.
#[inline(always)]
fn sum_of_numbers(a: &Factors, b: &Factors) -> f32 {
    fn steps(factors: &[f32]) -> &[[f32; STEP]] {
        factors.as_chunks().0
    }
    let numbers = steps(&a.numbers).iter().zip(steps(&b.numbers));
    let powers = steps(&a.powers).iter().zip(steps(&b.powers));
    numbers.zip(powers).fold(0.0, |sum, ((a, b), (a_powers, b_powers))| {
        let (mut products, mut largest) = ([0.0; STEP], [0f32; 8]);
        for i in 0..STEP {
            products[i] = a[i] * b[i];
            let power = a_powers[i] * b_powers[i];
            largest[i % 8] = if power > largest[i % 8] { power } else { largest[i % 8] };
        }
        let largest = largest.into_iter().fold(power(sum), f32::max);
        if largest == 0.0 { 0.0 } else { add(sum, &products, largest) }
    })
}

/// A step, with the power of two of the largest exponent, which is 2⁻²⁵ at least.
#[inline(always)]
fn add(sum: f32, products: &[f32; STEP], largest: f32) -> f32 {
    let units = (1 << KEPT_BITS) as f32 / largest;
    // SAFETY: a product is less than 4 times the power of two with its exponent and the accumulator less than twice, so that no number
    // is as large as 2¹⁵.
    let cut = |number: f32| unsafe { (number * units).to_int_unchecked::<i32>() };
    let mut sums = [0; 8];
    for i in 0..STEP {
        sums[i % 8] += cut(products[i]);
    }
    // Less than 2²¹: exact as f32.
    let exact = (sums.into_iter().sum::<i32>() + cut(sum)) as f32;
    f32::from_bits(exact.to_bits() & !CUT_BITS) / units
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_of_columns_are_one_to_one_and_steps_have_the_same_half_of_four_blocks() {
        for k in (16..=512).step_by(16) {
            let mut columns = vec![None; k];
            for column in 0..k {
                assert_eq!(columns[position(k, column)].replace(column), None, "{k}");
            }
            for (step, columns) in columns.chunks(STEP).enumerate() {
                let columns: Vec<usize> = columns.iter().map(|column| column.unwrap()).collect();
                if (step + 1) * STEP > k / 64 * 64 {
                    assert_eq!(columns, (step * STEP..k.min((step + 1) * STEP)).collect::<Vec<_>>());
                } else {
                    assert!(columns.iter().all(|column| column / 64 == step / 2 && column / 8 % 2 == step % 2));
                }
            }
        }
    }

    #[test]
    fn a_step_is_a_word_of_each_lane_that_shares_a_row_of_packed_weights() {
        use kernels_gpu::units::{ROW_LANES, WORD_ELEMENTS, block_columns, block_start, element, k_blocks, lane_words};
        for k in (16..=512u32).step_by(16) {
            let mut step = 0;
            for (start, columns) in (0..k_blocks(k)).map(|block| (block_start(k, block), block_columns(k, block))) {
                for word in 0..lane_words(columns) {
                    let places = (0..ROW_LANES).flat_map(|lane| (0..WORD_ELEMENTS).map(move |nibble| (lane, nibble)));
                    let elements = places.filter_map(|(lane, nibble)| element(columns, lane, word, nibble));
                    for column in elements.map(|element| (start + element) as usize) {
                        assert_eq!(position(k as usize, column) / STEP, step, "K = {k}, column {column}");
                    }
                    step += 1;
                }
            }
            assert_eq!(step, (k as usize).div_ceil(STEP));
        }
    }

    #[test]
    fn small_integers_add_up_exactly_and_a_thousandth_of_one_is_lost() {
        const ONE: u8 = 0x38;
        const HALF: u8 = 0x30;
        const LARGEST: u8 = 0x7E;
        let of = |codes: &[u8]| Factors::new(codes);
        assert_eq!(sum(&of(&[ONE; 48]), &of(&[ONE; 48])), 48.0);
        // A first step of 2¹⁷ and more; a half is less than 2⁻¹³ of 2¹⁶.
        let mut first = [0; 64];
        first[0] = LARGEST;
        let large = sum(&of(&first), &of(&first));
        assert_eq!(large, 448.0 * 448.0);
        let mut second = first;
        (0..64).filter(|&column| position(64, column) >= STEP).for_each(|column| second[column] = HALF);
        assert_eq!(sum(&of(&second), &of(&second)), large);
    }

    #[test]
    fn a_nan_stays_and_nothing_is_zero() {
        let with = |code: u8| Factors::new(&[&[code][..], &[0x38; 15]].concat());
        assert!(sum(&with(0x7F), &with(0)).is_nan() && sum(&with(0), &with(0xFF)).is_nan());
        assert_eq!(sum(&with(0x80), &Factors::new(&[0; 16])).to_bits(), 0);
        assert_eq!(sum(&Factors::new(&[]), &Factors::new(&[])), 0.0);
    }
}
