//! Inner loop of [`super::matmul`] for the sums of [`super::sums`]: one row of A times all of B.
//!
//! The loop runs on 16 columns at once, in f32 and integers, and returns the same bits as [`Adder::add`]. The caller has
//! proved that products fit ([`Line::fits`]): they are exact in f32. Their powers of two give the largest exponent.
//! Products times a power of two are then cut to integers by a conversion. The code is compiled for each instruction
//! set.

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
    panels(a, b, (adder, format), fits, d, largest, totals);
}

/// Processes the panels of a row. `largest` and `totals` are the functions of these names, for an instruction set.
#[inline(always)]
fn panels(
    a: Line,
    b: &Panels,
    (adder, format): (&Adder, SumFormat),
    fits: &[bool],
    d: &mut [f32],
    largest: impl Fn(&[f32], &[[f32; PANEL]]) -> [f32; PANEL],
    totals: impl Fn(&[f32], &[[f32; PANEL]], &[f32; PANEL]) -> [f64; PANEL],
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
            let step = first..k.min(first + per_step);
            let mut addends = Addends::new(sums, largest(&a.powers[step.clone()], &powers[step.clone()]), format);
            let scales = addends.scales(adder);
            sums = addends.add(totals(&a.values[step.clone()], &values[step], &scales), &scales, adder, format);
        }
        if last {
            sums = std::array::from_fn(|column| format.add_nearest(c[column], sums[column]));
        }
        d.copy_from_slice(&sums[..d.len()]);
    }
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
            sums[column] = adder.add_step(&[], self.old[column].into(), format) as f32;
        }
        sums
    }
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
        panels(a, b, adder, fits, d, |a, b| largest_avx512(a, b), |a, b, scales| totals_avx512(a, b, scales));
    }

    #[target_feature(enable = "avx2")]
    pub fn row_avx2(a: Line, b: &Panels, adder: (&Adder, SumFormat), fits: &[bool], d: &mut [f32]) {
        panels(a, b, adder, fits, d, largest, totals);
    }

    #[target_feature(enable = "avx512f,avx512dq")]
    #[inline]
    fn largest_avx512(a: &[f32], b: &[[f32; PANEL]]) -> [f32; PANEL] {
        let mut largest = _mm512_setzero_ps();
        for (a, b) in a.iter().zip(b) {
            // SAFETY: `b` has 16 f32.
            let b = unsafe { _mm512_loadu_ps(b.as_ptr()) };
            largest = _mm512_max_ps(largest, _mm512_mul_ps(_mm512_set1_ps(*a), b));
        }
        // SAFETY: a vector of 16 f32 has the size of an array of 16, and any bits are a valid f32.
        unsafe { std::mem::transmute::<__m512, [f32; PANEL]>(largest) }
    }

    #[target_feature(enable = "avx512f,avx512dq")]
    #[inline]
    fn totals_avx512(a: &[f32], b: &[[f32; PANEL]], scales: &[f32; PANEL]) -> [f64; PANEL] {
        // SAFETY: `scales` has 16 f32.
        let scales = unsafe { _mm512_loadu_ps(scales.as_ptr()) };
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
        // SAFETY: two vectors of 8 f64 have the size of an array of 16, and any bits are a valid f64.
        unsafe { std::mem::transmute::<[__m512d; 2], [f64; PANEL]>(totals) }
    }
}

/// 2^`exponent` of a normal f32.
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}
