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

/// Products whose integers are added before the sum moves to f64. Such an integer is below 2^(`kept` + 2), so that sums
/// of eight fit in 32 bits.
const CHUNK: usize = 8;
const _: () = assert!(Adder::MOST_KEPT + 2 + CHUNK.ilog2() as i32 <= 30);

/// Bounds of the exponents for which the loop is exact: no product has a bit below 2^`LOWEST`, and none reaches
/// 2^`HIGHEST`. With them, no intermediate f32 is subnormal or overflows.
pub const LOWEST: i32 = -100;
pub const HIGHEST: i32 = 120;

/// `d` += row times B. `fits` says for which panels the loop is exact; the others keep their `d`.
pub fn row(a: Line, b: &Panels, adder: &Adder, format: SumFormat, fits: &[bool], d: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
            // SAFETY: both features were just detected.
            return unsafe { row_avx512(a, b, adder, format, fits, d) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the feature was just detected.
            return unsafe { row_avx2(a, b, adder, format, fits, d) };
        }
    }
    portable(a, b, adder, format, fits, d);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq")]
fn row_avx512(a: Line, b: &Panels, adder: &Adder, format: SumFormat, fits: &[bool], d: &mut [f32]) {
    portable(a, b, adder, format, fits, d);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn row_avx2(a: Line, b: &Panels, adder: &Adder, format: SumFormat, fits: &[bool], d: &mut [f32]) {
    portable(a, b, adder, format, fits, d);
}

#[inline(always)]
fn portable(a: Line, b: &Panels, adder: &Adder, format: SumFormat, fits: &[bool], d: &mut [f32]) {
    let k = a.values.len();
    let per_step = adder.step_products(k);
    let last = adder.step == Step::Pairs;
    let panels = b.values.chunks_exact(k).zip(b.powers.chunks_exact(k)).zip(fits);
    for (d, ((values, powers), _)) in d.chunks_mut(PANEL).zip(panels).filter(|(_, (_, fits))| **fits) {
        let mut c = [0.0; PANEL];
        c[..d.len()].copy_from_slice(d);
        let mut sums = if last { [0.0; PANEL] } else { c };
        for first in (0..k).step_by(per_step) {
            let range = first..k.min(first + per_step);
            let a = Line { values: &a.values[range.clone()], powers: &a.powers[range.clone()] };
            sums = step(a, &values[range.clone()], &powers[range], adder, format, sums);
        }
        if last {
            sums = std::array::from_fn(|column| format.add_nearest(c[column], sums[column]));
        }
        d.copy_from_slice(&sums[..d.len()]);
    }
}

/// The sums of one step for a panel of columns.
#[inline(always)]
fn step(
    a: Line,
    b: &[[f32; PANEL]],
    b_powers: &[[f32; PANEL]],
    adder: &Adder,
    format: SumFormat,
    mut c: [f32; PANEL],
) -> [f32; PANEL] {
    let mut largest = [0.0f32; PANEL];
    for (a, b) in a.powers.iter().zip(b_powers) {
        for column in 0..PANEL {
            let power = a * b[column];
            largest[column] = if power > largest[column] { power } else { largest[column] };
        }
    }
    let old = c;
    let lowest = power_of_two(LOWEST);
    let mut alone = [false; PANEL];
    for column in 0..PANEL {
        let power = format.power(c[column]);
        largest[column] = if power > largest[column] { power } else { largest[column] };
        // An infinity or a NaN, or a small number without any product.
        alone[column] = power == f32::INFINITY || largest[column] < lowest && c[column] != 0.0;
        c[column] = if alone[column] { 0.0 } else { c[column] };
        let within = if largest[column] > lowest { largest[column] } else { lowest };
        largest[column] = if alone[column] { power_of_two(HIGHEST) } else { within };
    }
    // 2^(`kept` - exponent), by the exponents of the bits.
    let scales = largest.map(|power| f32::from_bits(((254 + adder.kept as u32) << 23) - power.to_bits()));
    let mut totals = [0.0f64; PANEL];
    for (a, b) in a.values.chunks(CHUNK).zip(b.chunks(CHUNK)) {
        let mut integers = [0i32; PANEL];
        for (a, b) in a.iter().zip(b) {
            for column in 0..PANEL {
                // SAFETY: a product is below four times the largest power, so this is finite and below
                // 2^(`MOST_KEPT` + 2) < 2³¹.
                integers[column] += unsafe { (a * b[column] * scales[column]).to_int_unchecked::<i32>() };
            }
        }
        for column in 0..PANEL {
            totals[column] += f64::from(integers[column]);
        }
    }
    let mut sums = [0.0; PANEL];
    for column in 0..PANEL {
        // SAFETY: the accumulator is below twice the largest power.
        let of_c = unsafe { (c[column] * scales[column]).to_int_unchecked::<i32>() };
        let unit = f64::from(largest[column]) / f64::from(1u32 << adder.kept);
        sums[column] = adder.round_normal((totals[column] + f64::from(of_c)) * unit, format);
    }
    if alone.contains(&true) {
        for column in (0..PANEL).filter(|&column| alone[column]) {
            sums[column] = adder.add_step(&[], old[column].into(), format) as f32;
        }
    }
    sums
}

/// 2^`exponent` of a normal f32.
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}
