//! Searches the scale of a block that gives the smallest squared error.

use super::arithmetic::{SCALE_OF_ZEROS, SMALLEST_SCALE, e4m3_bits, e4m3_value, nearest_value, tree};
use crate::format::{BLOCK, e2m1, e4m3};

/// Code of the largest scale, 448.
const LARGEST_SCALE: u32 = e4m3::MAX_CODE as u32;

/// Number of E4M3 codes from one number to its double.
const CODES_PER_DOUBLING: u32 = 8;

/// Half of each scale from this code on is an E4M3 number too. Below it, half of the scale of an odd code is not.
const FIRST_WITH_HALF: u32 = 2 * CODES_PER_DOUBLING;

/// Scale that `Scales::FourOverSix` gives to the block with the tensor's largest magnitude, if that magnitude becomes 6.
/// If it becomes 4, the scale is 384.
pub(super) const FOUR_OVER_SIX_MAX: f32 = 256.0;

/// Returns the code of the scale with the smallest squared error among all positive E4M3 scales; among equal errors the
/// smallest scale, as ModelOpt's sweep of 126 scales.
///
/// Few scales must be tried. Let `s` be the smallest scale that clips nothing. The values for `2s` are a subset of the
/// values for `s`, and both errors are rounded in the same way, so no scale from `2s` on is better. Below `s`, the largest
/// magnitude is clipped, and the search ends when this error alone exceeds the smallest error so far.
#[inline(always)]
pub(super) fn smallest_error(magnitudes: &[f32; BLOCK], largest: f32, global: f32) -> u32 {
    let clips = |code: u32| e4m3_value(code) * global * e2m1::MAX < largest;
    let mut first = e4m3_bits(largest / (e2m1::MAX * global)).max(SMALLEST_SCALE);
    while first < LARGEST_SCALE && clips(first) {
        first += 1;
    }
    while first > SMALLEST_SCALE && !clips(first - 1) {
        first -= 1;
    }
    let (mut best, mut chosen) = (f32::INFINITY, first);
    let end = (first + CODES_PER_DOUBLING).clamp(FIRST_WITH_HALF, LARGEST_SCALE + 1);
    for code in first..end {
        let error = squared_error(magnitudes, code, global);
        if error < best {
            (best, chosen) = (error, code);
        }
    }
    for code in (SMALLEST_SCALE..first).rev() {
        let factor = e4m3_value(code);
        let clipped = (largest / (factor * global) - e2m1::MAX) * factor;
        if clipped * clipped > best {
            break;
        }
        let error = squared_error(magnitudes, code, global);
        if error <= best {
            (best, chosen) = (error, code);
        }
    }
    chosen
}

/// Returns the code of the better of two scales: the largest magnitude becomes 6, or it becomes 4 (Cook et al., "Four Over
/// Six"). The arithmetic is ModelOpt's, also for a block of zeros.
#[inline(always)]
pub(super) fn four_over_six(magnitudes: &[f32; BLOCK], largest: f32, global: f32) -> u32 {
    let code = |largest: f32| {
        let scale = if largest == 0.0 { 1.0 } else { largest / e2m1::MAX };
        e4m3_bits(scale * FOUR_OVER_SIX_MAX / (global * FOUR_OVER_SIX_MAX)).max(SMALLEST_SCALE)
    };
    let (six, four) = (code(largest), code(largest * 1.5));
    if squared_error(magnitudes, four, global) < squared_error(magnitudes, six, global) { four } else { six }
}

/// Returns the code of the scale with which the largest magnitude becomes 6.
#[inline(always)]
pub(super) fn largest_becomes_six(largest: f32, global: f32) -> u32 {
    let wanted = largest / (e2m1::MAX * global);
    let code = e4m3_bits(wanted).max(SMALLEST_SCALE);
    if wanted == 0.0 { SCALE_OF_ZEROS } else { code }
}

/// Returns the squared error of a block with this scale, in units of the squared global scale.
#[inline(always)]
fn squared_error(magnitudes: &[f32; BLOCK], code: u32, global: f32) -> f32 {
    let factor = e4m3_value(code);
    let unit = factor * global;
    let squares = magnitudes.map(|magnitude| {
        let magnitude = magnitude / unit;
        let error = (magnitude - nearest_value(magnitude)) * factor;
        error * error
    });
    tree(squares, |a, b| a + b)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Tries all scales, without a bound.
    fn by_trying_all(magnitudes: &[f32; BLOCK], global: f32) -> u32 {
        let errors = (SMALLEST_SCALE..=LARGEST_SCALE).map(|code| (squared_error(magnitudes, code, global), code));
        errors.reduce(|best, next| if next.0 < best.0 { next } else { best }).unwrap().1
    }

    proptest! {
        #[test]
        fn bounded_search_finds_the_best_of_all_scales(
            numbers in prop::array::uniform16(0f32..1.0),
            powers in prop::array::uniform16(-12i32..1),
            global in prop::sample::select(vec![1.0f32, 1e-3, 3e-4, 2e-2, 1e-6]),
        ) {
            let magnitudes: [f32; BLOCK] = std::array::from_fn(|lane| numbers[lane] * 2f32.powi(powers[lane]));
            let largest = magnitudes.iter().copied().fold(0.0, f32::max);
            prop_assert_eq!(smallest_error(&magnitudes, largest, global), by_trying_all(&magnitudes, global));
        }
    }

    #[test]
    fn blocks_of_zeros_get_a_positive_scale() {
        let zeros = [0.0; BLOCK];
        assert_eq!(smallest_error(&zeros, 0.0, 1.0), SMALLEST_SCALE);
        assert_eq!(four_over_six(&zeros, 0.0, 0.0125), e4m3_bits(80.0));
        assert_eq!(largest_becomes_six(0.0, 1.0), SCALE_OF_ZEROS);
    }

    #[test]
    fn four_over_six_prefers_the_smaller_error() {
        // 5 lies between 4 and 6; with the larger scale the numbers are 4 and 3.33.
        let mut magnitudes = [0.0; BLOCK];
        (magnitudes[0], magnitudes[1]) = (6.0, 4.5);
        assert_eq!(four_over_six(&magnitudes, 6.0, 1.0), e4m3_bits(1.5), "4.5 is 3 in units of 1.5");
        magnitudes[1] = 3.0;
        assert_eq!(four_over_six(&magnitudes, 6.0, 1.0), e4m3_bits(1.0));
    }
}
