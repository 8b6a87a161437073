//! Inner loops of [`super::matmul`]: one row of A times all of B, for each instruction set.
//!
//! The loops know no formats. They operate on integers and f64 whose sums the caller has proved exact, so every variant
//! returns the same bits. The portable variants are the reference for the tests of the others.

use super::number::{F32_NAN, add_to_odd};

/// Columns of B that a loop processes at a time.
pub const PANEL: usize = 16;
/// Elements along K that one integer dot-product instruction processes.
pub const QUAD: usize = 4;
/// Offset of B's 4-bit elements (doubled, −12 to 12), which makes them unsigned as the dot-product instructions
/// require.
pub const B_OFFSET: i8 = 12;

/// Rows of A of the 4-bit kinds.
#[derive(Clone, Copy)]
pub struct FoursA<'a> {
    /// Doubled elements in groups of four along K, row by row.
    pub quads: &'a [[i8; QUAD]],
    /// For each row and block, −[`B_OFFSET`] times the sum of its elements, which cancels the offset.
    pub bias: &'a [i32],
    /// Scale factor for each row and block.
    pub scales: &'a [f64],
    /// Blocks per row.
    pub blocks: usize,
}

/// B of the 4-bit kinds, in panels. Each panel of columns is stored row by row along K.
pub struct FoursB {
    /// Doubled elements plus [`B_OFFSET`], in groups of four along K.
    pub quads: Vec<[[u8; QUAD]; PANEL]>,
    /// Scale factors for each block.
    pub scales: Vec<[f64; PANEL]>,
}

/// Part of a [`FoursB`] that belongs to one panel.
#[derive(Clone, Copy)]
struct FoursPanel<'a> {
    quads: &'a [[[u8; QUAD]; PANEL]],
    scales: &'a [[f64; PANEL]],
}

impl<'a> FoursA<'a> {
    fn row_quads(&self) -> usize {
        self.quads.len() * self.blocks / self.scales.len().max(1)
    }

    /// A range of rows.
    pub fn rows(&self, first: usize, count: usize) -> FoursA<'a> {
        let (quads, blocks) = (self.row_quads(), self.blocks);
        FoursA {
            quads: &self.quads[first * quads..][..count * quads],
            bias: &self.bias[first * blocks..][..count * blocks],
            scales: &self.scales[first * blocks..][..count * blocks],
            blocks,
        }
    }
}

/// `d` += A·B for a range of rows of A and `n` columns of B, rounded to the nearest f32. Each element is Σ over blocks of
/// (integer dot product · scale · scale).
pub fn fours_nearest(a: FoursA, b: &FoursB, n: usize, d: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
        return fours(a, b, n, d, |_, _, sums, d| {
            // SAFETY: both features were just detected.
            unsafe { x86::accumulate_avx512(sums, d) }
        });
    }
    fours(a, b, n, d, |_, _, sums, d| accumulate(sums, d));
}

/// Calls `finish` with every row of A, panel of B, the row's sums with the panel's columns, and its part of `d`.
pub fn fours(a: FoursA, b: &FoursB, n: usize, d: &mut [f32], finish: impl Fn(usize, usize, &[f64; PANEL], &mut [f32])) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512dq") {
            // SAFETY: both features were just detected, and each implies avx512f.
            return unsafe { x86::fours_avx512(a, b, n, d, finish) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: both features were just detected.
            return unsafe { x86::fours_avx2(a, b, n, d, finish) };
        }
    }
    fours_tiles((a, 0), b, n, d, |a, b| [fours_tile(a, b)], finish);
}

/// Processes tiles of `R` rows and one panel. The number of rows must be a multiple of `R`. `first` is the number of A's
/// first row.
#[inline(always)]
fn fours_tiles<const R: usize>(
    (a, first): (FoursA, usize),
    b: &FoursB,
    n: usize,
    d: &mut [f32],
    sums: impl Fn(FoursA, FoursPanel) -> [[f64; PANEL]; R],
    finish: impl Fn(usize, usize, &[f64; PANEL], &mut [f32]),
) {
    let (quads, blocks) = (a.row_quads(), a.blocks);
    for (tile, d) in d.chunks_exact_mut(R * n).enumerate() {
        let rows = a.rows(tile * R, R);
        for panel in 0..n.div_ceil(PANEL) {
            let b =
                FoursPanel { quads: &b.quads[panel * quads..][..quads], scales: &b.scales[panel * blocks..][..blocks] };
            let columns = panel * PANEL..n.min((panel + 1) * PANEL);
            for (row, sums) in sums(rows, b).iter().enumerate() {
                finish(first + tile * R + row, panel, sums, &mut d[row * n..][columns.clone()]);
            }
        }
    }
}

/// Adds sums to accumulators, rounded once. A NaN becomes the canonical NaN.
#[inline(always)]
fn accumulate(sums: &[f64; PANEL], d: &mut [f32]) {
    for (d, &sum) in d.iter_mut().zip(sums) {
        let rounded = add_to_odd(sum, (*d).into()) as f32;
        *d = if rounded.is_nan() { f32::from_bits(F32_NAN) } else { rounded };
    }
}

fn fours_tile(a: FoursA, b: FoursPanel) -> [f64; PANEL] {
    let per_block = a.quads.len() / a.blocks;
    let mut sums = [0.0; PANEL];
    for (block, a_scale) in a.scales.iter().enumerate() {
        let mut dots = [a.bias[block]; PANEL];
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

/// `d` += row times B, rounded to f32. B consists of panels with `a.len()` rows each.
pub fn floats_row(a: &[f64], b: &[[f64; PANEL]], d: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512dq") {
            // SAFETY: avx512dq was just detected, and implies avx512f.
            return unsafe { x86::floats_row_avx512(a, b, d) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: both features were just detected.
            return unsafe { x86::floats_row_avx2(a, b, d) };
        }
    }
    floats_panels(a, b, d, floats_panel, accumulate);
}

#[inline(always)]
fn floats_panels(
    a: &[f64],
    b: &[[f64; PANEL]],
    d: &mut [f32],
    sums: impl Fn(&[f64], &[[f64; PANEL]]) -> [f64; PANEL],
    accumulate: impl Fn(&[f64; PANEL], &mut [f32]),
) {
    for (d, b) in d.chunks_mut(PANEL).zip(b.chunks_exact(a.len())) {
        accumulate(&sums(a, b), d);
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
    use super::{F32_NAN, FoursA, FoursB, FoursPanel, PANEL, accumulate, floats_panels, fours_tiles};
    use std::arch::x86_64::*;

    /// Rows per tile: as many as fit in the vector registers with the other operands.
    const ROWS_AVX512: usize = 4;
    const ROWS_AVX2: usize = 2;

    /// Adds sums to accumulators. Each addition is rounded down and rounded up in f64. The result with an odd last bit
    /// is the sum rounded to odd. A second rounding, to f32, then gives the same result as a single rounding.
    #[target_feature(enable = "avx512f,avx512dq")]
    #[inline]
    pub fn accumulate_avx512(sums: &[f64; PANEL], d: &mut [f32]) {
        let Ok(d): Result<&mut [f32; PANEL], _> = d.try_into() else { return accumulate(sums, d) };
        const DOWN: i32 = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
        const UP: i32 = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
        // SAFETY: `d` has 16 f32, and `sums` has 16 f64, which two loads of 8 cover.
        let (old, sums) =
            unsafe { (_mm512_loadu_ps(d.as_ptr()), [0, 8].map(|at| _mm512_loadu_pd(sums.as_ptr().add(at)))) };
        let old = [_mm512_castps512_ps256(old), _mm512_extractf32x8_ps::<1>(old)];
        let mut new = [_mm256_setzero_ps(); 2];
        for half in 0..2 {
            let old = _mm512_cvtps_pd(old[half]);
            let down = _mm512_add_round_pd::<DOWN>(sums[half], old);
            let up = _mm512_add_round_pd::<UP>(sums[half], old);
            let odd = _mm512_test_epi64_mask(_mm512_castpd_si512(down), _mm512_set1_epi64(1));
            new[half] = _mm512_cvtpd_ps(_mm512_mask_blend_pd(odd, up, down));
        }
        let new = _mm512_insertf32x8::<1>(_mm512_castps256_ps512(new[0]), new[1]);
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(new, new);
        let new = _mm512_mask_blend_ps(nan, new, _mm512_set1_ps(f32::from_bits(F32_NAN)));
        // SAFETY: `d` has 16 f32.
        unsafe { _mm512_storeu_ps(d.as_mut_ptr(), new) };
    }

    #[target_feature(enable = "avx512f,avx512dq,avx512vnni")]
    pub fn fours_avx512(
        a: FoursA,
        b: &FoursB,
        n: usize,
        d: &mut [f32],
        finish: impl Fn(usize, usize, &[f64; PANEL], &mut [f32]),
    ) {
        let whole = d.len() / (ROWS_AVX512 * n) * ROWS_AVX512;
        let (tiles, rest) = d.split_at_mut(whole * n);
        let rows = rest.len() / n;
        fours_tiles((a.rows(0, whole), 0), b, n, tiles, |a, b| fours_tile_avx512::<ROWS_AVX512>(a, b), &finish);
        fours_tiles((a.rows(whole, rows), whole), b, n, rest, |a, b| fours_tile_avx512::<1>(a, b), &finish);
    }

    #[target_feature(enable = "avx512f,avx512dq,avx512vnni")]
    #[inline]
    fn fours_tile_avx512<const R: usize>(a: FoursA, b: FoursPanel) -> [[f64; PANEL]; R] {
        let (quads, blocks) = (a.quads.len() / R, a.blocks);
        let per_block = quads / blocks;
        let mut sums = [[_mm512_setzero_pd(); 2]; R];
        for (block, (b_quads, b_scales)) in b.quads.chunks_exact(per_block).zip(b.scales).enumerate() {
            let mut dots: [_; R] = std::array::from_fn(|row| _mm512_set1_epi32(a.bias[row * blocks + block]));
            for (quad, b) in b_quads.iter().enumerate() {
                // SAFETY: `b` has 16 quads of 4 bytes, the 64 bytes of the load.
                let b = unsafe { _mm512_loadu_si512(b.as_ptr().cast()) };
                for (row, dots) in dots.iter_mut().enumerate() {
                    let quad = a.quads[row * quads + block * per_block + quad].map(|element| element as u8);
                    *dots = _mm512_dpbusd_epi32(*dots, b, _mm512_set1_epi32(i32::from_le_bytes(quad)));
                }
            }
            // SAFETY: `b_scales` has 16 f64. The loads of 8 start at index 0 and 8.
            let b_scales = [0, 8].map(|at| unsafe { _mm512_loadu_pd(b_scales.as_ptr().add(at)) });
            for row in 0..R {
                let halves = [_mm512_castsi512_si256(dots[row]), _mm512_extracti32x8_epi32::<1>(dots[row])];
                let a_scale = _mm512_set1_pd(a.scales[row * blocks + block]);
                for half in 0..2 {
                    let scaled = _mm512_mul_pd(_mm512_cvtepi32_pd(halves[half]), b_scales[half]);
                    sums[row][half] = _mm512_fmadd_pd(scaled, a_scale, sums[row][half]);
                }
            }
        }
        // SAFETY: two vectors of 8 f64 have the size of an array of 16, and any bits are a valid f64.
        sums.map(|sums| unsafe { std::mem::transmute::<[__m512d; 2], [f64; PANEL]>(sums) })
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn fours_avx2(
        a: FoursA,
        b: &FoursB,
        n: usize,
        d: &mut [f32],
        finish: impl Fn(usize, usize, &[f64; PANEL], &mut [f32]),
    ) {
        let whole = d.len() / (ROWS_AVX2 * n) * ROWS_AVX2;
        let (tiles, rest) = d.split_at_mut(whole * n);
        let rows = rest.len() / n;
        fours_tiles((a.rows(0, whole), 0), b, n, tiles, |a, b| fours_tile_avx2::<ROWS_AVX2>(a, b), &finish);
        fours_tiles((a.rows(whole, rows), whole), b, n, rest, |a, b| fours_tile_avx2::<1>(a, b), &finish);
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    fn fours_tile_avx2<const R: usize>(a: FoursA, b: FoursPanel) -> [[f64; PANEL]; R] {
        let (quads, blocks) = (a.quads.len() / R, a.blocks);
        let per_block = quads / blocks;
        let ones = _mm256_set1_epi16(1);
        let mut sums = [[_mm256_setzero_pd(); 4]; R];
        for (block, (b_quads, b_scales)) in b.quads.chunks_exact(per_block).zip(b.scales).enumerate() {
            let mut dots: [_; R] = std::array::from_fn(|row| [_mm256_set1_epi32(a.bias[row * blocks + block]); 2]);
            for (quad, b) in b_quads.iter().enumerate() {
                // SAFETY: `b` has 16 quads of 4 bytes. The loads of 8 quads start at index 0 and 8.
                let b = [0, 8].map(|at| unsafe { _mm256_loadu_si256(b.as_ptr().add(at).cast()) });
                for (row, dots) in dots.iter_mut().enumerate() {
                    let quad = a.quads[row * quads + block * per_block + quad].map(|element| element as u8);
                    let a = _mm256_set1_epi32(i32::from_le_bytes(quad));
                    for half in 0..2 {
                        // A sum of a pair is at most 2·24·12, far below saturation.
                        let pairs = _mm256_maddubs_epi16(b[half], a);
                        dots[half] = _mm256_add_epi32(dots[half], _mm256_madd_epi16(pairs, ones));
                    }
                }
            }
            for row in 0..R {
                let a_scale = _mm256_set1_pd(a.scales[row * blocks + block]);
                for quarter in 0..4 {
                    let dots = dots[row][quarter / 2];
                    let dots = if quarter % 2 == 0 {
                        _mm256_castsi256_si128(dots)
                    } else {
                        _mm256_extracti128_si256::<1>(dots)
                    };
                    // SAFETY: `b_scales` has 16 f64. The loads of 4 start at a multiple of 4 below 16.
                    let b_scale = unsafe { _mm256_loadu_pd(b_scales.as_ptr().add(4 * quarter)) };
                    let scaled = _mm256_mul_pd(_mm256_cvtepi32_pd(dots), b_scale);
                    sums[row][quarter] = _mm256_fmadd_pd(scaled, a_scale, sums[row][quarter]);
                }
            }
        }
        // SAFETY: four vectors of 4 f64 have the size of an array of 16, and any bits are a valid f64.
        sums.map(|sums| unsafe { std::mem::transmute::<[__m256d; 4], [f64; PANEL]>(sums) })
    }

    #[target_feature(enable = "avx512f,avx512dq")]
    pub fn floats_row_avx512(a: &[f64], b: &[[f64; PANEL]], d: &mut [f32]) {
        floats_panels(
            a,
            b,
            d,
            |a, b| {
                let mut sums = [_mm512_setzero_pd(); 2];
                for (a, b) in a.iter().zip(b) {
                    let a = _mm512_set1_pd(*a);
                    for (half, sum) in sums.iter_mut().enumerate() {
                        // SAFETY: `b` has 16 f64. The loads of 8 start at index 0 and 8.
                        let b = unsafe { _mm512_loadu_pd(b.as_ptr().add(8 * half)) };
                        *sum = _mm512_fmadd_pd(a, b, *sum);
                    }
                }
                // SAFETY: two vectors of 8 f64 have the size of an array of 16, and any bits are a valid f64.
                unsafe { std::mem::transmute::<[__m512d; 2], [f64; PANEL]>(sums) }
            },
            |sums: &_, d: &mut _| accumulate_avx512(sums, d),
        );
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn floats_row_avx2(a: &[f64], b: &[[f64; PANEL]], d: &mut [f32]) {
        floats_panels(
            a,
            b,
            d,
            |a, b| {
                let mut sums = [_mm256_setzero_pd(); 4];
                for (a, b) in a.iter().zip(b) {
                    let a = _mm256_set1_pd(*a);
                    for (quarter, sum) in sums.iter_mut().enumerate() {
                        // SAFETY: `b` has 16 f64. The loads of 4 start at a multiple of 4 below 16.
                        let b = unsafe { _mm256_loadu_pd(b.as_ptr().add(4 * quarter)) };
                        *sum = _mm256_fmadd_pd(a, b, *sum);
                    }
                }
                // SAFETY: four vectors of 4 f64 have the size of an array of 16, and any bits are a valid f64.
                unsafe { std::mem::transmute::<[__m256d; 4], [f64; PANEL]>(sums) }
            },
            accumulate,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares all variants of this machine with the portable loops, with one row more than whole tiles and with a
        /// partial panel.
        #[test]
        fn vector_loops_match_the_portable_loops(
            a in prop::collection::vec(-12i8..13, 5 * 64),
            b in prop::collection::vec(0u8..25, 2 * 64 * PANEL),
            bias in prop::collection::vec(-9999..9999, 5 * 4),
            scales in prop::collection::vec(0u16..480, 5 * 4 + 2 * 4 * PANEL),
            c in prop::collection::vec(-1e9f32..1e9, 5 * (PANEL + 3)),
        ) {
            let (quads, _) = a.as_chunks::<QUAD>();
            let scales: Vec<f64> = scales.into_iter().map(f64::from).collect();
            let (a_scales, b_scales) = scales.split_at(5 * 4);
            let a = FoursA { quads, bias: &bias, scales: a_scales, blocks: 4 };
            let b = FoursB {
                quads: b.as_chunks::<QUAD>().0.as_chunks::<PANEL>().0.to_vec(),
                scales: b_scales.as_chunks::<PANEL>().0.to_vec(),
            };
            let mut expected = c.clone();
            let finish = |_: usize, _: usize, sums: &[f64; PANEL], d: &mut [f32]| accumulate(sums, d);
            fours_tiles((a, 0), &b, PANEL + 3, &mut expected, |a, b| [fours_tile(a, b)], finish);
            for run in variants() {
                let mut d = c.clone();
                run(a, &b, PANEL + 3, &mut d);
                prop_assert_eq!(&d, &expected);
            }
        }

        #[test]
        fn vector_sums_of_floats_match_the_portable_sums(
            a in prop::collection::vec(-2048i32..2048, 16),
            b in prop::collection::vec(-2048i32..2048, 2 * 16 * PANEL),
            c in prop::collection::vec(-1e9f32..1e9, 2 * PANEL - 3),
        ) {
            let a: Vec<f64> = a.into_iter().map(f64::from).collect();
            let b: Vec<f64> = b.into_iter().map(f64::from).collect();
            let (b, _) = b.as_chunks::<PANEL>();
            let mut expected = c.clone();
            floats_panels(&a, b, &mut expected, floats_panel, accumulate);
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

    type Rows = fn(FoursA, &FoursB, usize, &mut [f32]);

    /// Every variant of [`fours_nearest`] that this machine can run.
    fn variants() -> Vec<Rows> {
        let mut variants: Vec<Rows> = vec![fours_nearest];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                // SAFETY: both features were just detected.
                variants.push(|a, b, n, d| unsafe { x86::fours_avx2(a, b, n, d, |_, _, sums, d| accumulate(sums, d)) });
            }
        }
        variants
    }

    /// NaN, infinities, zeros, and sums that f64 must round, at each position of a panel.
    #[test]
    fn vector_rounding_matches_the_portable_rounding() {
        let sums = [0.0, 1.0, -1.0, 1e300, f64::INFINITY, f64::NAN, 3.0, 1.0 + f64::EPSILON, 1e-40, -1e-46, 2.5e-45];
        let olds = [0.0f32, -0.0, 1e-30, -1e-30, f32::NEG_INFINITY, f32::NAN, 16_777_216.0, -1.0, f32::MAX, 1e-45];
        for sum in sums {
            for old in olds {
                let (sums, mut d, mut expected) = ([sum; PANEL], [old; PANEL], [old; PANEL]);
                accumulate(&sums, &mut expected);
                // A product with 1 gives the sum itself.
                floats_row(&[1.0], &[sums], &mut d);
                assert_eq!(d.map(f32::to_bits), expected.map(f32::to_bits), "{sum} + {old}");
            }
        }
    }
}
