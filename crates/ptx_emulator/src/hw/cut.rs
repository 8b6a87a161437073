//! Inner loop of [`super::matmul`] for the sums of [`super::sums`]: one row of A times all of B.
//!
//! The loop runs on 16 columns at once, in f32 and integers, and returns the same bits as [`Adder::add`]. The caller has
//! proved that products fit ([`Line::fits`]): they are exact in f32. Their powers of two give the largest exponent.
//! Products times a power of two are then cut to integers by a conversion. The code is compiled for each instruction
//! set.

use super::number::F32_NAN;
use super::simd::PANEL;
use super::sums::{Adder, Step, SumFormat};

/// A row of A: values, and the power of two that each value's exponent stands for. A zero has power 0.
#[derive(Clone, Copy)]
pub struct Line<'a> {
    pub values: &'a [f32],
    pub powers: &'a [f32],
}

/// B in panels of columns. Each panel is stored row by row along K.
pub struct Panels {
    pub values: Vec<[f32; PANEL]>,
    pub powers: Vec<[f32; PANEL]>,
}

/// Bounds of the exponents for which the loop is exact: no product has a bit below 2^`LOWEST`, and none reaches
/// 2^`HIGHEST`. With them, no intermediate f32 is subnormal or overflows.
pub const LOWEST: i32 = -100;
pub const HIGHEST: i32 = 120;

/// `d` += row times B. `fits` says for which panels the loop is exact; the others keep their `d`.
pub fn row(a: Line, b: &Panels, (adder, format): (&Adder, SumFormat), fits: &[bool], d: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
            // SAFETY: both features were just detected.
            return unsafe { x86::row_avx512(a, b, (adder, format), fits, d) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the feature was just detected.
            return unsafe { x86::row_avx2(a, b, (adder, format), fits, d) };
        }
    }
    panels(a, b, (adder, format), fits, d, |part, c| step(part, c, adder, format, largest, totals));
}

/// Products of a step: the row's part, and a panel's rows.
#[derive(Clone, Copy)]
struct Part<'a> {
    a: Line<'a>,
    values: &'a [[f32; PANEL]],
    powers: &'a [[f32; PANEL]],
}

/// Processes the panels of a row. `step` adds the products of a step to accumulators.
#[inline(always)]
fn panels(
    a: Line,
    b: &Panels,
    (adder, format): (&Adder, SumFormat),
    fits: &[bool],
    d: &mut [f32],
    step: impl Fn(Part<'_>, [f32; PANEL]) -> [f32; PANEL],
) {
    let k = a.values.len();
    let per_step = adder.step_products(k);
    let last = adder.step == Step::Pairs;
    let panels = b.values.chunks_exact(k).zip(b.powers.chunks_exact(k)).zip(fits);
    for (d, ((values, powers), _)) in d.chunks_mut(PANEL).zip(panels).filter(|(_, (_, fits))| **fits) {
        let mut c = [0.0; PANEL];
        c[..d.len()].copy_from_slice(d);
        let mut sums = if last { [0.0; PANEL] } else { c };
        for first in (0..k).step_by(per_step) {
            let part = first..k.min(first + per_step);
            let a = Line { values: &a.values[part.clone()], powers: &a.powers[part.clone()] };
            sums = step(Part { a, values: &values[part.clone()], powers: &powers[part] }, sums);
        }
        if last {
            sums = std::array::from_fn(|column| format.add_nearest(c[column], sums[column]));
        }
        d.copy_from_slice(&sums[..d.len()]);
    }
}

/// Adds the products of a step to accumulators. `largest` and `totals` are the functions of these names, for an
/// instruction set.
#[inline(always)]
fn step(
    Part { a, values, powers }: Part<'_>,
    c: [f32; PANEL],
    adder: &Adder,
    format: SumFormat,
    largest: impl Fn(&[f32], &[[f32; PANEL]]) -> [f32; PANEL],
    totals: impl Fn(&[f32], &[[f32; PANEL]], &[f32; PANEL]) -> [f64; PANEL],
) -> [f32; PANEL] {
    let mut addends = Addends::new(c, largest(a.powers, powers), format);
    let scales = addends.scales(adder);
    addends.add(totals(a.values, values, &scales), &scales, adder, format)
}

/// The largest power of two among the products of each column.
#[inline(always)]
fn largest(a: &[f32], b: &[[f32; PANEL]]) -> [f32; PANEL] {
    let mut largest = [0.0f32; PANEL];
    for (a, b) in a.iter().zip(b) {
        for (largest, b) in largest.iter_mut().zip(b) {
            *largest = largest.max(a * b);
        }
    }
    largest
}

/// Sums of the products of each column, as integers in units of 1 / `scales`. A product times its scale is below
/// 2^([`Adder::MOST_KEPT`] + 2).
#[inline(always)]
fn totals(a: &[f32], b: &[[f32; PANEL]], scales: &[f32; PANEL]) -> [f64; PANEL] {
    let mut totals = [0.0f64; PANEL];
    for (a, b) in a.iter().zip(b) {
        for column in 0..PANEL {
            totals[column] += f64::from((a * b[column] * scales[column]) as i32);
        }
    }
    totals
}

/// The accumulators of a step for a panel of columns, and the largest exponents.
struct Addends {
    accumulators: [f32; PANEL],
    /// The power of two of the largest exponent.
    largest: [f32; PANEL],
    /// Whether the accumulator is the result's only addend, or is infinite or NaN. It then counts as zero here.
    alone: [bool; PANEL],
    old: [f32; PANEL],
}

impl Addends {
    #[inline(always)]
    fn new(old: [f32; PANEL], products: [f32; PANEL], format: SumFormat) -> Self {
        let (lowest, highest) = (power_of_two(LOWEST), power_of_two(HIGHEST));
        let (mut accumulators, mut largest, mut alone) = (old, products, [false; PANEL]);
        for column in 0..PANEL {
            let power = format.power(old[column]);
            let most = if power > products[column] { power } else { products[column] };
            // A small accumulator is without products: every product has a power of 2^`LOWEST` or more.
            alone[column] = (power == f32::INFINITY) | ((most < lowest) & (old[column] != 0.0));
            accumulators[column] = if alone[column] { 0.0 } else { old[column] };
            let within = if most > lowest { most } else { lowest };
            largest[column] = if alone[column] { highest } else { within };
        }
        Addends { accumulators, largest, alone, old }
    }

    /// 2^(`kept` - exponent), by the exponents of the bits.
    #[inline(always)]
    fn scales(&self, adder: &Adder) -> [f32; PANEL] {
        self.largest.map(|power| f32::from_bits(((254 + adder.kept as u32) << 23) - power.to_bits()))
    }

    /// Adds the products' sums to the accumulators, and rounds.
    #[inline(always)]
    fn add(&mut self, totals: [f64; PANEL], scales: &[f32; PANEL], adder: &Adder, format: SumFormat) -> [f32; PANEL] {
        let smallest = 1.0 / f64::from(1u32 << adder.kept);
        let mut sums = [0.0; PANEL];
        for column in 0..PANEL {
            let cut = (self.accumulators[column] * scales[column]).trunc();
            let unit = f64::from(self.largest[column]) * smallest;
            sums[column] = adder.round_normal((totals[column] + f64::from(cut)) * unit, format);
        }
        for column in (0..PANEL).filter(|&column| self.alone[column]) {
            sums[column] = alone_sum(self.old[column], adder, format);
        }
        sums
    }
}

/// The sum of an accumulator without products. A NaN becomes the canonical NaN.
#[cold]
fn alone_sum(accumulator: f32, adder: &Adder, format: SumFormat) -> f32 {
    let sum = adder.add_step(&[], accumulator.into(), format) as f32;
    if sum.is_nan() { f32::from_bits(F32_NAN) } else { sum }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use std::arch::x86_64::*;

    /// Products whose integers are added before the sums move to f64. Sums of eight fit in 32 bits.
    const CHUNK: usize = 8;
    const _: () = assert!(Adder::MOST_KEPT + 2 + CHUNK.ilog2() as i32 <= 30);

    #[target_feature(enable = "avx512f,avx512dq")]
    pub fn row_avx512(a: Line, b: &Panels, adder: (&Adder, SumFormat), fits: &[bool], d: &mut [f32]) {
        let (how, format) = adder;
        panels(a, b, adder, fits, d, |part, c| match format {
            SumFormat::F32 => step_avx512(part, &c, how),
            SumFormat::F16 => {
                let largest = |a: &[f32], b: &[[f32; PANEL]]| array(largest_avx512(a, b));
                let totals = |a: &[f32], b: &[[f32; PANEL]], scales: &[f32; PANEL]| {
                    // SAFETY: `scales` has 16 f32.
                    let scales = unsafe { _mm512_loadu_ps(scales.as_ptr()) };
                    let [low, high] = totals_avx512(a, b, scales).map(half_array);
                    std::array::from_fn(|column| if column < 8 { low[column] } else { high[column - 8] })
                };
                step(part, c, how, format, largest, totals)
            }
        });
    }

    /// [`step`] for f32, with the operations of [`Addends`] and of [`Adder::round_normal`].
    #[target_feature(enable = "avx512f,avx512dq")]
    #[inline]
    fn step_avx512(Part { a, values, powers }: Part<'_>, c: &[f32; PANEL], adder: &Adder) -> [f32; PANEL] {
        let set = |bits: u32| _mm512_set1_ps(f32::from_bits(bits));
        // SAFETY: `c` has 16 f32.
        let old = unsafe { _mm512_loadu_ps(c.as_ptr()) };
        let power = _mm512_max_ps(_mm512_and_ps(old, set(0x7f80_0000)), _mm512_set1_ps(f32::MIN_POSITIVE));
        let nonzero = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(old, _mm512_setzero_ps());
        let power = _mm512_maskz_mov_ps(nonzero, power);
        let most = _mm512_max_ps(power, largest_avx512(a.powers, powers));
        let lowest = _mm512_set1_ps(power_of_two(LOWEST));
        let endless = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(power, set(0x7f80_0000));
        let alone = endless | _mm512_cmp_ps_mask::<_CMP_LT_OQ>(most, lowest) & nonzero;
        let accumulators = _mm512_maskz_mov_ps(!alone, old);
        let largest = _mm512_max_ps(most, lowest);
        let largest = _mm512_mask_mov_ps(largest, alone, _mm512_set1_ps(power_of_two(HIGHEST)));
        let top = _mm512_set1_epi32((254 + adder.kept) << 23);
        let scales = _mm512_castsi512_ps(_mm512_sub_epi32(top, _mm512_castps_si512(largest)));
        let totals = totals_avx512(a.values, values, scales);
        // Toward zero, as a conversion to an integer: an accumulator times its scale is below 2^(`kept` + 1).
        let cut = _mm512_cvttps_epi32(_mm512_mul_ps(accumulators, scales));
        let halves = |x: __m512i| [_mm512_castsi512_si256(x), _mm512_extracti32x8_epi32::<1>(x)];
        let (cut, largest) = (halves(cut), halves(_mm512_castps_si512(largest)));
        let smallest = _mm512_set1_pd(1.0 / f64::from(1u32 << adder.kept));
        let kept = _mm512_set1_epi64(!((1i64 << (f64::MANTISSA_DIGITS as i32 - 1 - adder.result_bits)) - 1));
        let mut rounded = [_mm256_setzero_ps(); 2];
        for half in 0..2 {
            let unit = _mm512_mul_pd(_mm512_cvtps_pd(_mm256_castsi256_ps(largest[half])), smallest);
            let sum = _mm512_mul_pd(_mm512_add_pd(totals[half], _mm512_cvtepi32_pd(cut[half])), unit);
            let sum = _mm512_castsi512_pd(_mm512_and_si512(_mm512_castpd_si512(sum), kept));
            rounded[half] = _mm512_cvtpd_ps(sum);
        }
        let mut sums = array(_mm512_insertf32x8::<1>(_mm512_castps256_ps512(rounded[0]), rounded[1]));
        if alone != 0 {
            for column in (0..PANEL).filter(|column| alone >> column & 1 == 1) {
                sums[column] = alone_sum(c[column], adder, SumFormat::F32);
            }
        }
        sums
    }

    fn array(vector: __m512) -> [f32; PANEL] {
        // SAFETY: a vector of 16 f32 has the size of an array of 16, and any bits are a valid f32.
        unsafe { std::mem::transmute::<__m512, [f32; PANEL]>(vector) }
    }

    fn half_array(vector: __m512d) -> [f64; PANEL / 2] {
        // SAFETY: a vector of 8 f64 has the size of an array of 8, and any bits are a valid f64.
        unsafe { std::mem::transmute::<__m512d, [f64; PANEL / 2]>(vector) }
    }

    #[target_feature(enable = "avx2")]
    pub fn row_avx2(a: Line, b: &Panels, adder: (&Adder, SumFormat), fits: &[bool], d: &mut [f32]) {
        let (how, format) = adder;
        panels(a, b, adder, fits, d, |part, c| step(part, c, how, format, largest, totals));
    }

    #[target_feature(enable = "avx512f,avx512dq")]
    #[inline]
    fn largest_avx512(a: &[f32], b: &[[f32; PANEL]]) -> __m512 {
        let mut largest = _mm512_setzero_ps();
        for (a, b) in a.iter().zip(b) {
            // SAFETY: `b` has 16 f32.
            let b = unsafe { _mm512_loadu_ps(b.as_ptr()) };
            largest = _mm512_max_ps(largest, _mm512_mul_ps(_mm512_set1_ps(*a), b));
        }
        largest
    }

    #[target_feature(enable = "avx512f,avx512dq")]
    #[inline]
    fn totals_avx512(a: &[f32], b: &[[f32; PANEL]], scales: __m512) -> [__m512d; 2] {
        let mut totals = [_mm512_setzero_pd(); 2];
        for (a, b) in a.chunks(CHUNK).zip(b.chunks(CHUNK)) {
            let mut integers = _mm512_setzero_si512();
            for (a, b) in a.iter().zip(b) {
                // SAFETY: `b` has 16 f32.
                let b = unsafe { _mm512_loadu_ps(b.as_ptr()) };
                let scaled = _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(*a), b), scales);
                integers = _mm512_add_epi32(integers, _mm512_cvttps_epi32(scaled));
            }
            let halves = [_mm512_castsi512_si256(integers), _mm512_extracti32x8_epi32::<1>(integers)];
            for (total, half) in totals.iter_mut().zip(halves) {
                *total = _mm512_add_pd(*total, _mm512_cvtepi32_pd(half));
            }
        }
        totals
    }
}

/// 2^`exponent` of a normal f32.
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}
