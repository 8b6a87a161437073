//! Quantizes f32, f16 or bf16 to NVFP4 with the algorithm of NVIDIA's ModelOpt.
//!
//! - The global scale of a tensor is `amax / (6·448)`, so that the largest block scale is the largest E4M3 number.
//! - The scale of a block of 16 is `amax of the block / (6·global)`, rounded to E4M3 and at least 2⁻⁹; a block of zeros
//!   has scale 1.
//! - Values are divided by both scales and rounded to nearest, ties to even.
//!
//! All arithmetic is f32, as in ModelOpt. [`Scales`] has other rules for the scale of a block.

mod arithmetic;
mod search;

use rayon::prelude::*;

use self::arithmetic::{ROUNDS_TO_HALF, e4m3_value, nearest_value, tree};
use crate::error::Error;
use crate::format::{BLOCK, Matrix, e2m1, e4m3};

/// A number that can be quantized: f32, [`half::f16`], [`half::bf16`].
pub trait Number: Copy + Sync + Into<f32> {}
impl<T: Copy + Sync + Into<f32>> Number for T {}

/// Rule by which the scales of blocks are chosen. Files look the same for each rule; only the error differs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scales {
    /// The largest magnitude of a block becomes 6.
    #[default]
    Max,
    /// Of all positive E4M3 scales, the one with the smallest squared error of the block.
    Mse,
    /// The largest magnitude of a block becomes 6 or 4, whichever has the smaller squared error (Cook et al., "Four Over
    /// Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling"). The global scale leaves room for it.
    FourOverSix,
}

impl Scales {
    /// All rules.
    pub const ALL: [Self; 3] = [Self::Max, Self::Mse, Self::FourOverSix];

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Max => "max",
            Self::Mse => "mse",
            Self::FourOverSix => "four-over-six",
        }
    }

    /// Returns the global scale for numbers up to magnitude `amax`: `amax / (6·448)`, or `amax / (6·256)` for
    /// [`Scales::FourOverSix`]; 1 for zero, and at least the smallest normal f32.
    pub fn global_scale_for(self, amax: f32) -> f32 {
        let largest_scale = if self == Self::FourOverSix { search::FOUR_OVER_SIX_MAX } else { e4m3::MAX };
        if amax == 0.0 { 1.0 } else { (amax / (e2m1::MAX * largest_scale)).max(f32::MIN_POSITIVE) }
    }
}

/// Numbers per task of a search for the maximum.
const CHUNK: usize = 1 << 16;

/// Rows per quantization task.
const ROWS: usize = 16;

/// Quantizes a row-major matrix `[rows, k]`; the global scale comes from its largest magnitude.
///
/// ```
/// let numbers: Vec<f32> = (0..32).map(|i| i as f32 - 16.0).collect();
/// let matrix = nvfp4_core::quantize::quantize(&numbers, 2, 16)?;
/// let mut row = [0.0; 16];
/// matrix.dequantize_row(0, &mut row);
/// assert_eq!(row[0], -16.0); // the largest magnitude is kept to within f32's rounding
/// # Ok::<_, nvfp4_core::Error>(())
/// ```
///
/// # Errors
/// [`Error::NotFinite`] on NaN or infinity; [`Error::BlockAlignment`] or [`Error::Length`] on wrong sizes.
pub fn quantize<T: Number>(numbers: &[T], rows: usize, k: usize) -> Result<Matrix<'static>, Error> {
    let global = global_scale(numbers)?;
    quantize_with(numbers, rows, k, global)
}

/// Returns the global scale that ModelOpt gives to a tensor: [`global_scale_for`] of its [`amax`].
///
/// # Errors
/// [`Error::NotFinite`] on NaN or infinity.
pub fn global_scale<T: Number>(numbers: &[T]) -> Result<f32, Error> {
    amax(numbers).map(global_scale_for)
}

/// Returns the global scale for numbers up to magnitude `amax`: `amax / (6·448)`, 1 for zero, and at least the smallest
/// normal f32.
pub fn global_scale_for(amax: f32) -> f32 {
    Scales::Max.global_scale_for(amax)
}

/// Returns the largest magnitude; 0 for an empty slice.
///
/// # Errors
/// [`Error::NotFinite`] on NaN or infinity.
pub fn amax<T: Number>(numbers: &[T]) -> Result<f32, Error> {
    let amax = f32::from_bits(numbers.par_chunks(CHUNK).map(largest_bits).max().unwrap_or(0));
    if amax.is_finite() { Ok(amax) } else { Err(first_not_finite(numbers)) }
}

/// Returns the error for numbers with a NaN or an infinity.
fn first_not_finite<T: Number>(numbers: &[T]) -> Error {
    let index =
        numbers.iter().position(|&x| !x.into().is_finite()).expect("the caller found a number that is not finite");
    Error::NotFinite { index, value: numbers[index].into() }
}

/// Returns the maximum of [`magnitude_bits`].
fn largest_bits<T: Number>(numbers: &[T]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        #[target_feature(enable = "avx2")]
        fn avx2<T: Number>(numbers: &[T]) -> u32 {
            largest_bits_portable(numbers)
        }
        // SAFETY: AVX2 was detected on the line above.
        return unsafe { avx2(numbers) };
    }
    largest_bits_portable(numbers)
}

#[inline(always)]
fn largest_bits_portable<T: Number>(numbers: &[T]) -> u32 {
    numbers.iter().fold(0, |largest, &x| largest.max(magnitude_bits(x.into())))
}

/// Quantizes with a given global scale, for example a calibrated input scale; larger numbers saturate.
///
/// # Errors
/// [`Error::NotFinite`], [`Error::BlockAlignment`], [`Error::Length`]; [`Error::GlobalScale`] unless it is positive and
/// finite.
pub fn quantize_with<T: Number>(numbers: &[T], rows: usize, k: usize, global: f32) -> Result<Matrix<'static>, Error> {
    if k == 0 || !k.is_multiple_of(BLOCK) {
        return Err(Error::BlockAlignment { k });
    }
    if rows.checked_mul(k) != Some(numbers.len()) {
        let expected = rows.saturating_mul(k);
        return Err(Error::Mismatch { what: "numbers to quantize", got: numbers.len(), expected });
    }
    if !(global.is_finite() && global > 0.0) {
        return Err(Error::GlobalScale { value: global });
    }
    let (mut values, mut scales) = (vec![0; numbers.len() / 2], vec![0; numbers.len() / BLOCK]);
    numbers
        .par_chunks(ROWS * k)
        .zip(values.par_chunks_mut(ROWS * k / 2))
        .zip(scales.par_chunks_mut(ROWS * k / BLOCK))
        .enumerate()
        .try_for_each(|(chunk, ((numbers, values), scales))| {
            quantize_blocks(numbers, global, values, scales).map_err(|error| error.further_on(chunk * ROWS * k))
        })?;
    Matrix::new(rows, k, values, scales, global)
}

/// Quantizes whole blocks to packed values (one byte per two numbers) and scales (one byte per 16 numbers).
///
/// # Errors
/// [`Error::NotFinite`] with the index of the number.
///
/// # Panics
/// Panics if the lengths do not match.
pub fn quantize_blocks<T: Number>(
    numbers: &[T],
    global: f32,
    values: &mut [u8],
    scales: &mut [u8],
) -> Result<(), Error> {
    dispatch::<T, false>(numbers, global, Scales::Max, values, scales).map(drop)
}

/// Like [`quantize_blocks`]; also returns the quantization error.
///
/// # Errors
/// [`Error::NotFinite`] with the index of the number.
///
/// # Panics
/// Panics if the lengths do not match.
pub fn quantize_blocks_measured<T: Number>(
    numbers: &[T],
    global: f32,
    values: &mut [u8],
    scales: &mut [u8],
) -> Result<Loss, Error> {
    quantize_blocks_by(Scales::Max, numbers, global, values, scales)
}

/// Like [`quantize_blocks_measured`], with another rule for the scales of blocks. `global` comes from
/// [`Scales::global_scale_for`] with the tensor's largest magnitude.
///
/// # Errors
/// [`Error::NotFinite`] with the index of the number.
///
/// # Panics
/// Panics if the lengths do not match.
pub fn quantize_blocks_by<T: Number>(
    rule: Scales,
    numbers: &[T],
    global: f32,
    values: &mut [u8],
    scales: &mut [u8],
) -> Result<Loss, Error> {
    dispatch::<T, true>(numbers, global, rule, values, scales)
}

/// Calls the portable code, compiled for the widest vectors of this machine.
fn dispatch<T: Number, const MEASURE: bool>(
    numbers: &[T],
    global: f32,
    rule: Scales,
    values: &mut [u8],
    scales: &mut [u8],
) -> Result<Loss, Error> {
    assert!(
        numbers.len() == scales.len() * BLOCK && values.len() * 2 == numbers.len(),
        "`values` and `scales` must match whole blocks of `numbers`"
    );
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn with_avx512<T: Number, const MEASURE: bool>(
            numbers: &[T],
            global: f32,
            rule: Scales,
            values: &mut [u8],
            scales: &mut [u8],
        ) -> Result<Loss, Error> {
            portable::<T, MEASURE>(numbers, global, rule, values, scales)
        }
        #[target_feature(enable = "avx2")]
        fn with_avx2<T: Number, const MEASURE: bool>(
            numbers: &[T],
            global: f32,
            rule: Scales,
            values: &mut [u8],
            scales: &mut [u8],
        ) -> Result<Loss, Error> {
            portable::<T, MEASURE>(numbers, global, rule, values, scales)
        }
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        if avx512 {
            // SAFETY: the AVX-512 features were detected on the lines above.
            return unsafe { with_avx512::<T, MEASURE>(numbers, global, rule, values, scales) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: AVX2 was detected on the line above.
            return unsafe { with_avx2::<T, MEASURE>(numbers, global, rule, values, scales) };
        }
    }
    portable::<T, MEASURE>(numbers, global, rule, values, scales)
}

#[inline(always)]
fn portable<T: Number, const MEASURE: bool>(
    numbers: &[T],
    global: f32,
    rule: Scales,
    values: &mut [u8],
    scales: &mut [u8],
) -> Result<Loss, Error> {
    let (blocks, values) = (numbers.as_chunks::<BLOCK>().0, values.as_chunks_mut::<{ BLOCK / 2 }>().0);
    let mut sum = Loss::default();
    for ((blocks, values), scales) in blocks.chunks(TILE).zip(values.chunks_mut(TILE)).zip(scales.chunks_mut(TILE)) {
        match quantize_tile::<T, MEASURE>(blocks, global, rule, values, scales) {
            Some(loss) if MEASURE => sum = sum.join(loss),
            Some(_) => {}
            None => return Err(first_not_finite(numbers)),
        }
    }
    Ok(if MEASURE { sum.scaled(global) } else { sum })
}

/// Chooses the scale of each block by its magnitudes and its largest magnitude.
#[inline(always)]
fn search_scales<T: Number>(
    blocks: &[[T; BLOCK]],
    amax: &[u32; TILE],
    codes: &mut [u8; TILE],
    search: impl Fn(&[f32; BLOCK], f32) -> u32,
) {
    for ((block, &amax), code) in blocks.iter().zip(amax).zip(codes) {
        *code = search(&block.map(|x| x.into().abs()), f32::from_bits(amax)) as u8;
    }
}

/// Number of blocks quantized together; their scales are computed side by side.
const TILE: usize = 16;

/// Quantizes up to [`TILE`] blocks. `None`: a number is not finite. The loss is in units of the global scale.
///
/// Every loop over numbers runs over an array of fixed length and has no branch, so that the compiler vectorizes it.
#[inline(always)]
fn quantize_tile<T: Number, const MEASURE: bool>(
    blocks: &[[T; BLOCK]],
    global: f32,
    rule: Scales,
    values: &mut [[u8; BLOCK / 2]],
    scales: &mut [u8],
) -> Option<Loss> {
    let mut amax = [0; TILE];
    for (amax, block) in amax.iter_mut().zip(blocks) {
        let bits = block.map(|x| magnitude_bits(x.into()));
        let largest = tree(bits, u32::max);
        // This early return also keeps the compiler from vectorizing across blocks, one number of each.
        if largest >= f32::INFINITY.to_bits() {
            return None;
        }
        *amax = largest;
    }
    let (mut codes, mut factors, mut units) = ([0; TILE], [0.0; TILE], [0.0; TILE]);
    match rule {
        Scales::Max => {
            for (code, &amax) in codes.iter_mut().zip(&amax) {
                *code = search::largest_becomes_six(f32::from_bits(amax), global) as u8;
            }
        }
        Scales::Mse => {
            search_scales(blocks, &amax, &mut codes, |block, amax| search::smallest_error(block, amax, global))
        }
        Scales::FourOverSix => {
            search_scales(blocks, &amax, &mut codes, |block, amax| search::four_over_six(block, amax, global));
        }
    }
    for i in 0..TILE {
        factors[i] = e4m3_value(u32::from(codes[i]));
        units[i] = factors[i] * global;
    }
    scales.copy_from_slice(&codes[..scales.len()]);

    let (mut signal, mut noise, mut max_abs) = ([0.0; BLOCK], [0.0; BLOCK], [0.0; BLOCK]);
    let mut doubled = [[0; BLOCK]; TILE];
    for (i, (block, doubled)) in blocks.iter().zip(&mut doubled).enumerate() {
        let (factor, unit) = (factors[i], units[i]);
        for lane in 0..BLOCK {
            // The addition turns −0 into 0, as ModelOpt does.
            let x = block[lane].into() / unit + 0.0;
            let magnitude = x.abs();
            let value = nearest_value(magnitude);
            doubled[lane] = (value + ROUNDS_TO_HALF).to_bits() as u8 & 0xF | (x.to_bits() >> 24) as u8 & 0x80;
            if MEASURE {
                let (is, error) = (magnitude * factor, (magnitude - value) * factor);
                signal[lane] += is * is;
                noise[lane] += error * error;
                max_abs[lane] = if error.abs() > max_abs[lane] { error.abs() } else { max_abs[lane] };
            }
        }
    }
    let pairs = doubled.as_flattened().as_chunks::<2>().0;
    for (value, pair) in values.as_flattened_mut().iter_mut().zip(pairs) {
        let pair = u16::from_le_bytes(*pair);
        *value = (e2m1_code(pair & 0xFF) | e2m1_code(pair >> 8) << 4) as u8;
    }
    let sum = |lanes: [f32; BLOCK]| f64::from(tree(lanes, |a, b| a + b));
    let max = |lanes| f64::from(tree(lanes, |a: f32, b| if a > b { a } else { b }));
    Some(Loss { signal: sum(signal), noise: sum(noise), max_abs: max(max_abs) })
}

/// Code of a doubled value (0, 1, 2, 3, 4, 6, 8 or 12) with its sign in bit 7.
#[inline(always)]
fn e2m1_code(doubled: u16) -> u16 {
    let magnitude = doubled & 0xF;
    let (to_4, to_8) = (magnitude.min(4), magnitude.min(8));
    (to_4 + ((to_8 - to_4) >> 1) + ((magnitude - to_8) >> 2)) | (doubled >> 4 & 8)
}

/// Error that quantization caused.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss {
    /// Sum of the squared numbers.
    signal: f64,
    /// Sum of the squared errors.
    noise: f64,
    /// Largest absolute error.
    max_abs: f64,
}

impl Loss {
    /// Returns the loss of numbers that do not change.
    pub fn none(numbers: &[f32]) -> Self {
        let signal = numbers.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        Self { signal, noise: 0.0, max_abs: 0.0 }
    }

    /// Returns the loss of numbers that were replaced by others.
    pub fn between(numbers: &[f32], replaced: &[f32]) -> Self {
        let mut loss = Self::none(numbers);
        for (&number, &by) in numbers.iter().zip(replaced) {
            let error = f64::from(number) - f64::from(by);
            loss.noise += error * error;
            loss.max_abs = loss.max_abs.max(error.abs());
        }
        loss
    }

    /// Returns the root-mean-square error relative to the root-mean-square number; 0 if all numbers are 0.
    pub fn relative_rms(self) -> f64 {
        if self.noise == 0.0 { 0.0 } else { f64::sqrt(self.noise / self.signal) }
    }

    /// Returns the largest absolute error.
    pub fn max_abs(self) -> f64 {
        self.max_abs
    }

    /// Returns the signal-to-noise ratio in decibels.
    pub fn snr_db(self) -> f64 {
        -20.0 * self.relative_rms().log10()
    }

    /// Combines the losses of two sets of numbers.
    #[must_use]
    #[inline]
    pub fn join(self, other: Self) -> Self {
        Self {
            signal: self.signal + other.signal,
            noise: self.noise + other.noise,
            max_abs: f64::max(self.max_abs, other.max_abs),
        }
    }

    /// Returns the loss of the same numbers multiplied by a factor.
    fn scaled(self, factor: f32) -> Self {
        let factor = f64::from(factor);
        Self {
            signal: self.signal * factor * factor,
            noise: self.noise * factor * factor,
            max_abs: self.max_abs * factor,
        }
    }
}

/// Bits of |x|: they have the order of the magnitudes, with infinity and NaN on top.
#[inline]
fn magnitude_bits(x: f32) -> u32 {
    x.to_bits() & 0x7FFF_FFFF
}

#[cfg(test)]
mod tests {
    use super::arithmetic::{SCALE_OF_ZEROS, SMALLEST_SCALE, e4m3_bits};
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    #[test]
    fn representable_numbers_survive_unchanged() {
        // Blocks with every value, times scales from small to the largest; the largest fixes the global scale at 1.
        let numbers: Vec<f32> = [0.25f32, 1.0, 18.0, 448.0]
            .iter()
            .flat_map(|scale| (0..16).map(move |code| e2m1::decode(code) * scale))
            .collect();
        let matrix = quantize(&numbers, 2, 32).unwrap();
        assert_eq!(matrix.global_scale(), 1.0);
        let back: Vec<f32> = (0..2)
            .flat_map(|row| {
                let mut out = vec![0.0; 32];
                matrix.dequantize_row(row, &mut out);
                out
            })
            .collect();
        assert_eq!(back, numbers);
    }

    #[test]
    fn zeros_and_tiny_numbers_quantize_to_finite_scales() {
        let zeros = quantize(&[0.0f32; 16], 1, 16).unwrap();
        assert_eq!((zeros.global_scale(), zeros.scales()), (1.0, &[SCALE_OF_ZEROS as u8][..]));
        let tiny = quantize(&[f32::from_bits(1); 16], 1, 16).unwrap();
        assert!(tiny.global_scale() > 0.0);
        assert_eq!(quantize::<f32>(&[], 0, 16).unwrap().rows(), 0);
    }

    #[test]
    fn number_that_cannot_be_quantized_is_refused_with_its_index() {
        let mut numbers = vec![1.0f32; 64 * 48];
        assert!(matches!(quantize(&numbers, 128, 24), Err(Error::BlockAlignment { k: 24 })));
        assert!(matches!(quantize(&numbers, 63, 48), Err(Error::Mismatch { .. })));
        for bad in [f32::NAN, f32::NEG_INFINITY] {
            numbers[2000] = bad;
            assert!(matches!(quantize(&numbers, 64, 48), Err(Error::NotFinite { index: 2000, .. })));
            assert!(matches!(quantize_with(&numbers, 64, 48, 1.0), Err(Error::NotFinite { index: 2000, .. })));
        }
        assert!(matches!(quantize_with(&[1.0f32; 16], 1, 16, 0.0), Err(Error::GlobalScale { .. })));
    }

    #[test]
    fn loss_matches_the_changed_numbers() {
        let measured = |numbers: &[f32], global| {
            let (mut values, mut scales) = (vec![0; numbers.len() / 2], vec![0; numbers.len() / 16]);
            quantize_blocks_measured(numbers, global, &mut values, &mut scales).unwrap()
        };
        let mut numbers = [0.0f32; 16];
        numbers[..2].copy_from_slice(&[3.0, 6.0]);
        let exact = measured(&numbers, 1.0);
        assert_eq!((exact.relative_rms(), exact.max_abs(), exact.snr_db()), (0.0, 0.0, f64::INFINITY));
        // 5 is a tie and becomes 4: the error is 1, and the signal is √(5² + 6² + 2²).
        numbers[..3].copy_from_slice(&[5.0, 6.0, 2.0]);
        let lost = measured(&numbers, 1.0);
        assert_eq!((lost.relative_rms(), lost.max_abs()), (f64::sqrt(1.0 / 65.0), 1.0));
        let both = lost.join(exact);
        assert_eq!((both.relative_rms(), both.max_abs()), (f64::sqrt(1.0 / 110.0), 1.0));
        assert_eq!(measured(&[0.0; 32], 1.0).relative_rms(), 0.0);
    }

    /// The definition, one number at a time.
    fn quantize_plainly(numbers: &[f32], global: f32) -> (Vec<u8>, Vec<u8>) {
        let (mut values, mut scales) = (Vec::new(), Vec::new());
        for block in numbers.as_chunks::<BLOCK>().0 {
            let amax = block.iter().fold(0.0, |amax: f32, x| amax.max(x.abs()));
            let scale = match amax / (e2m1::MAX * global) {
                0.0 => SCALE_OF_ZEROS as u8,
                wanted => e4m3::encode(wanted).max(SMALLEST_SCALE as u8),
            };
            let codes = block.map(|x| e2m1::encode(x / (e4m3::decode(scale) * global) + 0.0));
            values.extend(codes.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4));
            scales.push(scale);
        }
        (values, scales)
    }

    #[test]
    fn e4m3_bits_match_the_format_near_every_scale() {
        for code in 0..=e4m3::MAX_CODE {
            let value = e4m3::decode(code);
            assert_eq!(e4m3_value(code.into()).to_bits(), value.to_bits());
            let midpoint = (value + e4m3::decode((code + 1).min(e4m3::MAX_CODE))) / 2.0;
            for x in [value, midpoint].into_iter().flat_map(|x| [x.next_down().max(0.0), x, x.next_up()]) {
                assert_eq!(e4m3_bits(x), u32::from(e4m3::encode(x)), "{x}");
            }
        }
        assert_eq!(e4m3_bits(1e9), u32::from(e4m3::MAX_CODE));
    }

    #[test]
    fn better_rules_have_smaller_errors_on_gaussian_numbers() {
        use rand::SeedableRng;
        use rand_distr::{Distribution, StandardNormal};
        let mut random = rand_xoshiro::Xoshiro256PlusPlus::seed_from_u64(3);
        let numbers: Vec<f32> = (0..1 << 18).map(|_| StandardNormal.sample(&mut random)).collect();
        let error = |rule: Scales| {
            let global = rule.global_scale_for(amax(&numbers).unwrap());
            let (mut values, mut scales) = (vec![0; numbers.len() / 2], vec![0; numbers.len() / BLOCK]);
            let loss = quantize_blocks_by(rule, &numbers, global, &mut values, &mut scales).unwrap();
            let matrix = Matrix::new(1 << 8, 1 << 10, values, scales, global).unwrap();
            let mut row = vec![0.0; 1 << 10];
            let noise: f64 = (0..1 << 8)
                .map(|index| {
                    matrix.dequantize_row(index, &mut row);
                    let pairs = row.iter().zip(&numbers[index << 10..]);
                    pairs.map(|(is, was)| f64::from(is - was) * f64::from(is - was)).sum::<f64>()
                })
                .sum();
            let signal: f64 = numbers.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            let error = (noise / signal).sqrt();
            assert!((loss.relative_rms() / error - 1.0).abs() < 1e-4, "{rule:?}: {} {error}", loss.relative_rms());
            error
        };
        let [max, mse, four_over_six] = Scales::ALL.map(error);
        assert!((0.094..0.097).contains(&max), "{max}");
        assert!((0.085..0.088).contains(&four_over_six), "{four_over_six}");
        assert!(mse < four_over_six, "{mse} {four_over_six}");
    }

    proptest! {
        #[test]
        fn vector_code_matches_the_definition(
            numbers in prop::collection::vec((-40i32..8, -2f32..2.0).prop_map(|(e, x)| x * 2f32.powi(e / 4)), 1..40 * 16),
            global in prop::sample::select(vec![1.0f32, 3e-4, 1e-38, 1e-44, 1e30, 0.1]),
        ) {
            let numbers = &numbers[..numbers.len() / BLOCK * BLOCK];
            let (mut values, mut scales) = (vec![0; numbers.len() / 2], vec![0; numbers.len() / BLOCK]);
            quantize_blocks(numbers, global, &mut values, &mut scales).unwrap();
            prop_assert_eq!((&values, &scales), (&quantize_plainly(numbers, global).0, &quantize_plainly(numbers, global).1));
            let (mut measured, mut measured_scales) = (values.clone(), scales.clone());
            quantize_blocks_measured(numbers, global, &mut measured, &mut measured_scales).unwrap();
            prop_assert_eq!((measured, measured_scales), (values.clone(), scales.clone()));
            portable::<_, false>(numbers, global, Scales::Max, &mut values, &mut scales).unwrap();
            prop_assert_eq!((values, scales), quantize_plainly(numbers, global));
        }

        #[test]
        fn error_is_at_most_half_a_step_of_the_block(numbers in prop::collection::vec(-1e4f32..1e4, 64)) {
            let matrix = quantize(&numbers, 1, 64).unwrap();
            let mut back = vec![0.0; 64];
            matrix.dequantize_row(0, &mut back);
            for (block, scale) in matrix.scales().iter().enumerate() {
                // The largest values, 4 and 6, are a step of 2 apart; a scale rounded down by 1/16 clips 6.375 to 6.
                let unit = e4m3::decode(*scale) * matrix.global_scale();
                for i in block * 16..(block + 1) * 16 {
                    prop_assert!((back[i] - numbers[i]).abs() <= unit * 1.000001, "{} became {}", numbers[i], back[i]);
                }
            }
        }

        #[test]
        fn result_is_independent_of_the_number_type(numbers in prop::collection::vec(-100f32..100.0, 32)) {
            let narrow: Vec<bf16> = numbers.iter().map(|&x| bf16::from_f32(x)).collect();
            let widened: Vec<f32> = narrow.iter().map(|x| x.to_f32()).collect();
            prop_assert_eq!(quantize(&narrow, 2, 16).unwrap(), quantize(&widened, 2, 16).unwrap());
        }
    }
}
