//! Sums of products with the bits of Hopper's tensor cores: `wgmma` of two e4m3 operands with f32 accumulators.
//!
//! PTX does not define these sums. The rules come from results of an H200 (`crates/ptx_emulator/src/hw/sums.rs`; a test
//! compares that file with this one). [`STEP`] products are added to the accumulator at a time:
//!
//! 1. Each product is exact. Its exponent is the sum of the exponents of its factors; a subnormal factor has the
//!    exponent of the smallest normal number, and zero has none. The accumulator has its own exponent.
//! 2. All products and the accumulator are truncated toward zero to multiples of 2⁻¹³ · 2^(largest exponent).
//! 3. They are added exactly, and the sum is truncated toward zero to 13 bits after its first bit.
//!
//! A truncation loses less than 2⁻¹³ · 2^(largest exponent), for each of 33 addends and for the sum. With alternating
//! signs the total loss is small (`benches/lab/accuracy.md`); with equal signs, small products vanish beside a large sum.

use crate::format::{BLOCK, e4m3};

/// Number of products added at a time: the K of one `wgmma`, k32.
pub const STEP: usize = 32;

/// Number of bits that addends and sums keep after the first bit.
const KEPT_BITS: u32 = 13;

/// Bits of an f32's mantissa that a sum drops.
const CUT_BITS: u32 = (1 << (f32::MANTISSA_DIGITS - 1 - KEPT_BITS)) - 1;

/// Returns the position of a column of K in the order of multiplication. [`STEP`] positions from a multiple of [`STEP`]
/// on form a step.
///
/// For each 64 whole columns, the first halves of the four blocks form one step and the last halves the next, because
/// each lane that shares a row of `wgmma`'s A holds one block. The remaining columns keep their order.
pub const fn position(k: usize, column: usize) -> usize {
    const QUAD: usize = 4 * BLOCK;
    const HALF: usize = BLOCK / 2;
    let (first, within) = (column / QUAD * QUAD, column % QUAD);
    if first + QUAD > k {
        return column;
    }
    first + within / HALF % 2 * STEP + within / BLOCK * HALF + within % HALF
}

/// A row of codes prepared for multiplication: numbers at their [`position`]s, padded with zeros to a whole step.
#[derive(Clone, Debug, PartialEq)]
pub struct Factors {
    numbers: Vec<f32>,
    /// Power of two with the exponent of each number; 0 for zero.
    powers: Vec<f32>,
    is_nan: bool,
}

impl Factors {
    /// Takes e4m3 codes with columns in their natural order.
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

/// Smallest normal e4m3.
const SMALLEST_NORMAL: f32 = 1.0 / 64.0;

/// Returns the power of two with the exponent of a normal number; 0 for zero.
#[inline(always)]
fn power(number: f32) -> f32 {
    f32::from_bits(number.to_bits() & f32::INFINITY.to_bits())
}

/// Returns the sum of the products of two rows with the same K, starting at zero. NaN if a row contains NaN.
///
/// # Panics
/// Panics if the rows differ in K.
pub fn sum(a: &Factors, b: &Factors) -> f32 {
    assert_eq!(a.numbers.len(), b.numbers.len(), "both rows must have the same K");
    if a.is_nan || b.is_nan {
        return f32::NAN;
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 was detected on the line above.
        return unsafe { sum_avx2(a, b) };
    }
    sum_of_numbers(a, b)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2(a: &Factors, b: &Factors) -> f32 {
    sum_of_numbers(a, b)
}

/// All operations except truncation are exact, so every instruction set gives the same bits.
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

/// Adds one step; `largest` is the power of two with the largest exponent, at least 2⁻²⁵.
#[inline(always)]
fn add(sum: f32, products: &[f32; STEP], largest: f32) -> f32 {
    let units = (1 << KEPT_BITS) as f32 / largest;
    // SAFETY: a product is less than 4 times the power of two of its exponent, and the accumulator less than twice, so
    // every number is below 2¹⁵ and fits an `i32`.
    let cut = |number: f32| unsafe { (number * units).to_int_unchecked::<i32>() };
    let mut sums = [0; 8];
    for i in 0..STEP {
        sums[i % 8] += cut(products[i]);
    }
    // The sum is below 2²¹, so it is exact as f32.
    let exact = (sums.into_iter().sum::<i32>() + cut(sum)) as f32;
    f32::from_bits(exact.to_bits() & !CUT_BITS) / units
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_has_the_same_half_of_four_blocks() {
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
    fn step_is_one_word_of_each_lane_sharing_a_row() {
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
    fn small_integers_add_exactly_and_tiny_products_vanish() {
        const ONE: u8 = 0x38;
        const HALF: u8 = 0x30;
        const LARGEST: u8 = 0x7E;
        let of = |codes: &[u8]| Factors::new(codes);
        assert_eq!(sum(&of(&[ONE; 48]), &of(&[ONE; 48])), 48.0);
        // The first step sums to at least 2¹⁷; a half is less than 2⁻¹³ of 2¹⁶.
        let mut first = [0; 64];
        first[0] = LARGEST;
        let large = sum(&of(&first), &of(&first));
        assert_eq!(large, 448.0 * 448.0);
        let mut second = first;
        (0..64).filter(|&column| position(64, column) >= STEP).for_each(|column| second[column] = HALF);
        assert_eq!(sum(&of(&second), &of(&second)), large);
    }

    #[test]
    fn nan_persists_and_an_empty_sum_is_zero() {
        let with = |code: u8| Factors::new(&[&[code][..], &[0x38; 15]].concat());
        assert!(sum(&with(0x7F), &with(0)).is_nan() && sum(&with(0), &with(0xFF)).is_nan());
        assert_eq!(sum(&with(0x80), &Factors::new(&[0; 16])).to_bits(), 0);
        assert_eq!(sum(&Factors::new(&[]), &Factors::new(&[])), 0.0);
    }
}
