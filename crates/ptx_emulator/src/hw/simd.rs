//! The inner loops of [`super::matmul`]: one row of A against all of B, for each instruction set.
//!
//! Knows nothing of formats: integers and f64 whose sums the caller has proved exact, so that every variant returns the
//! same bits. The portable variants are the reference that the tests hold the others against.

use super::number::{F32_NAN, add_to_odd};

/// Columns of B that a loop works on at a time.
pub const PANEL: usize = 16;
/// Elements along K that one integer dot-product instruction takes.
pub const QUAD: usize = 4;
/// What is added to A's 4-bit elements (doubled, −12 to 12) to make them unsigned, as those instructions want.
pub const A_OFFSET: i8 = 12;

/// B of the 4-bit kinds, in panels: for each panel of columns, its rows along K.
pub struct FoursB {
    /// Doubled elements, four along K together.
    pub quads: Vec<[[i8; QUAD]; PANEL]>,
    /// For each block, −[`A_OFFSET`] times the sum of its elements: undoes the offset.
    pub bias: Vec<[i32; PANEL]>,
    /// For each block, its scale factor.
    pub scales: Vec<[f64; PANEL]>,
}

/// A row of A of the 4-bit kinds.
#[derive(Clone, Copy)]
pub struct FoursRow<'a> {
    /// Doubled elements plus [`A_OFFSET`], four along K together.
    pub quads: &'a [[u8; QUAD]],
    /// A scale factor for each block.
    pub scales: &'a [f64],
}

/// What one panel takes of a [`FoursB`].
#[derive(Clone, Copy)]
struct FoursPanel<'a> {
    quads: &'a [[[i8; QUAD]; PANEL]],
    bias: &'a [[i32; PANEL]],
    scales: &'a [[f64; PANEL]],
}

/// `d` += the row times B, rounded to f32: for each column Σ over blocks of (integer dot product · scale · scale).
pub fn fours_row(a: FoursRow, b: &FoursB, d: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512dq") {
            // SAFETY: both features were just detected, and each implies avx512f.
            return unsafe { x86::fours_row_avx512(a, b, d) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: both features were just detected.
            return unsafe { x86::fours_row_avx2(a, b, d) };
        }
    }
    fours_panels(a, b, d, fours_panel);
}

#[inline(always)]
fn fours_panels(a: FoursRow, b: &FoursB, d: &mut [f32], sums: impl Fn(FoursRow, FoursPanel) -> [f64; PANEL]) {
    let (quads, blocks) = (a.quads.len(), a.scales.len());
    for (panel, d) in d.chunks_mut(PANEL).enumerate() {
        let b = FoursPanel {
            quads: &b.quads[panel * quads..][..quads],
            bias: &b.bias[panel * blocks..][..blocks],
            scales: &b.scales[panel * blocks..][..blocks],
        };
        accumulate(sums(a, b), d);
    }
}

/// One rounding of sum + accumulator; NaN is canonical.
#[inline(always)]
fn accumulate(sums: [f64; PANEL], d: &mut [f32]) {
    for (d, sum) in d.iter_mut().zip(sums) {
        let rounded = add_to_odd(sum, (*d).into()) as f32;
        *d = if rounded.is_nan() { f32::from_bits(F32_NAN) } else { rounded };
    }
}

fn fours_panel(a: FoursRow, b: FoursPanel) -> [f64; PANEL] {
    let per_block = a.quads.len() / a.scales.len();
    let mut sums = [0.0; PANEL];
    for (block, a_scale) in a.scales.iter().enumerate() {
        let mut dots = b.bias[block];
        for quad in block * per_block..(block + 1) * per_block {
            for (dot, b) in dots.iter_mut().zip(&b.quads[quad]) {
                for (&a, &b) in a.quads[quad].iter().zip(b) {
                    *dot += i32::from(a) * i32::from(b);
                }
            }
        }
        for column in 0..PANEL {
            sums[column] += f64::from(dots[column]) * b.scales[block][column] * a_scale;
        }
    }
    sums
}

/// `d` += the row times B, rounded to f32. B comes in panels, `a.len()` rows of each.
pub fn floats_row(a: &[f64], b: &[[f64; PANEL]], d: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: avx512f was just detected.
            return unsafe { x86::floats_row_avx512(a, b, d) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: both features were just detected.
            return unsafe { x86::floats_row_avx2(a, b, d) };
        }
    }
    floats_panels(a, b, d, floats_panel);
}

#[inline(always)]
fn floats_panels(a: &[f64], b: &[[f64; PANEL]], d: &mut [f32], sums: impl Fn(&[f64], &[[f64; PANEL]]) -> [f64; PANEL]) {
    for (d, b) in d.chunks_mut(PANEL).zip(b.chunks_exact(a.len())) {
        accumulate(sums(a, b), d);
    }
}

fn floats_panel(a: &[f64], b: &[[f64; PANEL]]) -> [f64; PANEL] {
    let mut sums = [0.0; PANEL];
    for (a, b) in a.iter().zip(b) {
        for column in 0..PANEL {
            sums[column] += a * b[column];
        }
    }
    sums
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{FoursB, FoursPanel, FoursRow, PANEL, floats_panels, fours_panels};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f,avx512dq,avx512vnni")]
    pub fn fours_row_avx512(a: FoursRow, b: &FoursB, d: &mut [f32]) {
        fours_panels(a, b, d, |a, b| fours_panel_avx512(a, b));
    }

    #[target_feature(enable = "avx512f,avx512dq,avx512vnni")]
    #[inline]
    fn fours_panel_avx512(a: FoursRow, b: FoursPanel) -> [f64; PANEL] {
        let per_block = a.quads.len() / a.scales.len();
        let mut sums = [_mm512_setzero_pd(); 2];
        let blocks = a.quads.chunks_exact(per_block).zip(b.quads.chunks_exact(per_block));
        for (block, (a_quads, b_quads)) in blocks.enumerate() {
            // SAFETY: sixteen i32.
            let mut dots = unsafe { _mm512_loadu_si512(b.bias[block].as_ptr().cast()) };
            for (a, b) in a_quads.iter().zip(b_quads) {
                let a = _mm512_set1_epi32(i32::from_le_bytes(*a));
                // SAFETY: sixteen quads of four bytes.
                let b = unsafe { _mm512_loadu_si512(b.as_ptr().cast()) };
                dots = _mm512_dpbusd_epi32(dots, a, b);
            }
            let halves = [_mm512_castsi512_si256(dots), _mm512_extracti32x8_epi32::<1>(dots)];
            let a_scale = _mm512_set1_pd(a.scales[block]);
            for half in 0..2 {
                // SAFETY: eight f64 at an offset of zero or eight in sixteen.
                let b_scale = unsafe { _mm512_loadu_pd(b.scales[block].as_ptr().add(8 * half)) };
                let scaled = _mm512_mul_pd(_mm512_cvtepi32_pd(halves[half]), b_scale);
                sums[half] = _mm512_fmadd_pd(scaled, a_scale, sums[half]);
            }
        }
        // SAFETY: two vectors of eight f64 are an array of sixteen; any bits are an f64.
        unsafe { std::mem::transmute::<[__m512d; 2], [f64; PANEL]>(sums) }
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn fours_row_avx2(a: FoursRow, b: &FoursB, d: &mut [f32]) {
        fours_panels(a, b, d, |a, b| fours_panel_avx2(a, b));
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    fn fours_panel_avx2(a: FoursRow, b: FoursPanel) -> [f64; PANEL] {
        let per_block = a.quads.len() / a.scales.len();
        let ones = _mm256_set1_epi16(1);
        let mut sums = [_mm256_setzero_pd(); 4];
        let blocks = a.quads.chunks_exact(per_block).zip(b.quads.chunks_exact(per_block));
        for (block, (a_quads, b_quads)) in blocks.enumerate() {
            let bias = b.bias[block].as_ptr();
            // SAFETY: eight i32 at an offset of zero or eight in sixteen.
            let mut dots = [0, 8].map(|at| unsafe { _mm256_loadu_si256(bias.add(at).cast()) });
            for (a, b) in a_quads.iter().zip(b_quads) {
                let a = _mm256_set1_epi32(i32::from_le_bytes(*a));
                for (half, dots) in dots.iter_mut().enumerate() {
                    // SAFETY: eight quads of four bytes at an offset of zero or eight in sixteen.
                    let b = unsafe { _mm256_loadu_si256(b.as_ptr().add(8 * half).cast()) };
                    // Pairs are at most 2·24·12: far from saturating.
                    let pairs = _mm256_maddubs_epi16(a, b);
                    *dots = _mm256_add_epi32(*dots, _mm256_madd_epi16(pairs, ones));
                }
            }
            let a_scale = _mm256_set1_pd(a.scales[block]);
            for quarter in 0..4 {
                let dots = dots[quarter / 2];
                let dots =
                    if quarter % 2 == 0 { _mm256_castsi256_si128(dots) } else { _mm256_extracti128_si256::<1>(dots) };
                // SAFETY: four f64 at a multiple of four below sixteen.
                let b_scale = unsafe { _mm256_loadu_pd(b.scales[block].as_ptr().add(4 * quarter)) };
                let scaled = _mm256_mul_pd(_mm256_cvtepi32_pd(dots), b_scale);
                sums[quarter] = _mm256_fmadd_pd(scaled, a_scale, sums[quarter]);
            }
        }
        // SAFETY: four vectors of four f64 are an array of sixteen; any bits are an f64.
        unsafe { std::mem::transmute::<[__m256d; 4], [f64; PANEL]>(sums) }
    }

    #[target_feature(enable = "avx512f")]
    pub fn floats_row_avx512(a: &[f64], b: &[[f64; PANEL]], d: &mut [f32]) {
        floats_panels(a, b, d, |a, b| {
            let mut sums = [_mm512_setzero_pd(); 2];
            for (a, b) in a.iter().zip(b) {
                let a = _mm512_set1_pd(*a);
                for (half, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: eight f64 at an offset of zero or eight in sixteen.
                    let b = unsafe { _mm512_loadu_pd(b.as_ptr().add(8 * half)) };
                    *sum = _mm512_fmadd_pd(a, b, *sum);
                }
            }
            // SAFETY: two vectors of eight f64 are an array of sixteen; any bits are an f64.
            unsafe { std::mem::transmute::<[__m512d; 2], [f64; PANEL]>(sums) }
        });
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn floats_row_avx2(a: &[f64], b: &[[f64; PANEL]], d: &mut [f32]) {
        floats_panels(a, b, d, |a, b| {
            let mut sums = [_mm256_setzero_pd(); 4];
            for (a, b) in a.iter().zip(b) {
                let a = _mm256_set1_pd(*a);
                for (quarter, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: four f64 at a multiple of four below sixteen.
                    let b = unsafe { _mm256_loadu_pd(b.as_ptr().add(4 * quarter)) };
                    *sum = _mm256_fmadd_pd(a, b, *sum);
                }
            }
            // SAFETY: four vectors of four f64 are an array of sixteen; any bits are an f64.
            unsafe { std::mem::transmute::<[__m256d; 4], [f64; PANEL]>(sums) }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever this machine has, against the portable loops.
        #[test]
        fn vector_loops_equal_the_portable_ones(
            a in prop::collection::vec(0u8..25, 64),
            b in prop::collection::vec(-12i8..13, 64 * PANEL),
            scales in prop::collection::vec(0u16..480, 4 + 4 * PANEL),
            c in prop::collection::vec(-1e9f32..1e9, PANEL),
        ) {
            let (a_quads, _) = a.as_chunks::<QUAD>();
            let scales: Vec<f64> = scales.into_iter().map(f64::from).collect();
            let row = FoursRow { quads: a_quads, scales: &scales[..4] };
            let b = FoursB {
                quads: b.as_chunks::<QUAD>().0.as_chunks::<PANEL>().0.to_vec(),
                bias: vec![[7; PANEL]; 4],
                scales: scales[4..].as_chunks::<PANEL>().0.to_vec(),
            };
            let mut expected = c.clone();
            fours_panels(row, &b, &mut expected, fours_panel);
            for run in variants() {
                let mut d = c.clone();
                run(row, &b, &mut d);
                prop_assert_eq!(&d, &expected);
            }
        }

        #[test]
        fn vector_sums_of_floats_equal_the_portable_ones(
            a in prop::collection::vec(-2048i32..2048, 16),
            b in prop::collection::vec(-2048i32..2048, 2 * 16 * PANEL),
            c in prop::collection::vec(-1e9f32..1e9, 2 * PANEL - 3),
        ) {
            let a: Vec<f64> = a.into_iter().map(f64::from).collect();
            let b: Vec<f64> = b.into_iter().map(f64::from).collect();
            let (b, _) = b.as_chunks::<PANEL>();
            let mut expected = c.clone();
            floats_panels(&a, b, &mut expected, floats_panel);
            for run in float_variants() {
                let mut d = c.clone();
                run(&a, b, &mut d);
                prop_assert_eq!(&d, &expected);
            }
        }
    }

    type FloatRow = fn(&[f64], &[[f64; PANEL]], &mut [f32]);

    /// Every variant of [`floats_row`] that this machine can run.
    fn float_variants() -> Vec<FloatRow> {
        let mut variants: Vec<FloatRow> = vec![floats_row];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                // SAFETY: both features were just detected.
                variants.push(|a, b, d| unsafe { x86::floats_row_avx2(a, b, d) });
            }
        }
        variants
    }

    type Row = fn(FoursRow, &FoursB, &mut [f32]);

    /// Every variant of [`fours_row`] that this machine can run.
    fn variants() -> Vec<Row> {
        let mut variants: Vec<Row> = vec![fours_row];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                // SAFETY: both features were just detected.
                variants.push(|a, b, d| unsafe { x86::fours_row_avx2(a, b, d) });
            }
        }
        variants
    }
}
