//! AVX2, with or without AVX-VNNI. NVFP4 tokens are multiplied with a quarter of a panel at a time, 16-bit tokens with
//! half of a panel.

use std::arch::x86_64::*;

use super::kernel::{self, Simd, Tile};
use super::layout::{BIASED, Bits16, Integers, Numbers, Nvfp4, PackedBlock, PackedScales, Scratch, TokenBlock};
use crate::format::{BLOCK, e2m1};

/// Proof that this machine has AVX2, FMA and F16C and, with `VNNI`, AVX-VNNI.
#[derive(Clone, Copy)]
pub(super) struct Avx2<const VNNI: bool>(());

/// Number of 32-bit lanes per vector.
const LANES: usize = 8;

impl<const VNNI: bool> Avx2<VNNI> {
    /// Returns a value that proves that this machine has the features, or `None`.
    pub fn detect() -> Option<Self> {
        let present = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && (!VNNI || is_x86_feature_detected!("avxvnni"));
        present.then_some(Self(()))
    }

    /// Decodes eight scales.
    #[inline(always)]
    fn scales(self, codes: &[u8; LANES]) -> __m256 {
        // SAFETY: `Avx2` exists only if AVX2, FMA and F16C were detected. `codes` has the 8 bytes that are loaded.
        unsafe {
            let codes = _mm_loadl_epi64(codes.as_ptr().cast());
            // Shift the fields of E4M3 to their places in f16. The exponent bias of f16 is larger by 8.
            let f16s = _mm_slli_epi16::<7>(_mm_cvtepu8_epi16(codes));
            _mm256_mul_ps(_mm256_cvtph_ps(f16s), _mm256_set1_ps(256.0))
        }
    }

    /// Adds sums to the sums in memory.
    #[inline(always)]
    fn add(self, sums: __m256, memory: &mut [f32]) {
        let memory: &mut [f32; LANES] = memory.try_into().expect("one sum per row");
        // SAFETY: `Avx2` exists only if AVX2 was detected. `memory` has 8 f32, one vector, and is borrowed mutably.
        unsafe { _mm256_storeu_ps(memory.as_mut_ptr(), _mm256_add_ps(_mm256_loadu_ps(memory.as_ptr()), sums)) }
    }
}

impl<const VNNI: bool> Simd<Nvfp4> for Avx2<VNNI> {
    const LANES: usize = LANES;
    const TOKENS: usize = 8;
    type Sums = __m256;

    #[inline(always)]
    fn unpack(self, values: &PackedBlock, scales: &PackedScales, out: &mut Integers) {
        // SAFETY: `Avx2` exists only if AVX2, FMA and F16C were detected. Eight rows take 32 bytes, one vector, in a
        // half of a packed block and in a quad of an unpacked block. Their scales are 8 bytes packed and 8 f32
        // unpacked. `BIASED` has 16 bytes.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(BIASED.as_ptr().cast()));
            let nibble = _mm256_set1_epi8(0xF);
            for (half, bytes) in values.0.iter().enumerate() {
                for (vector, rows) in bytes.as_chunks::<LANES>().0.iter().enumerate() {
                    let packed = _mm256_loadu_si256(rows.as_ptr().cast());
                    let codes = [packed, _mm256_srli_epi16::<4>(packed)];
                    for (parity, codes) in codes.into_iter().enumerate() {
                        let weights = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, nibble));
                        let rows = &mut out.quads[2 * half + parity].as_chunks_mut::<LANES>().0[vector];
                        _mm256_storeu_si256(rows.as_mut_ptr().cast(), weights);
                    }
                }
            }
            for (codes, out) in scales.as_chunks::<LANES>().0.iter().zip(out.scales.as_chunks_mut::<LANES>().0) {
                _mm256_storeu_ps(out.as_mut_ptr(), self.scales(codes));
            }
        }
    }

    #[inline(always)]
    fn zero(self) -> Self::Sums {
        // SAFETY: `Avx2` exists only if AVX2 was detected.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    fn accumulate<const N: usize>(
        self,
        sums: &mut [Self::Sums; N],
        block: &Integers,
        lane: usize,
        tokens: [&TokenBlock; N],
    ) {
        let weights = block.quads.each_ref().map(|quad| &quad[lane..lane + LANES]);
        // SAFETY: `Avx2` exists only if AVX2 and FMA were detected and, with `VNNI`, AVX-VNNI. Eight rows of a quad are
        // 32 bytes, and their scales are 8 f32.
        unsafe {
            let weights = weights.map(|quad| _mm256_loadu_si256(quad.as_ptr().cast()));
            let scales = _mm256_loadu_ps(block.scales[lane..lane + LANES].as_ptr());
            for (sums, token) in sums.iter_mut().zip(tokens) {
                let tokens = token.quads.map(|quad| _mm256_set1_epi32(quad));
                let bias = _mm256_set1_epi32(token.bias);
                let dots = if VNNI {
                    weights
                        .into_iter()
                        .zip(tokens)
                        .fold(bias, |dots, (weights, token)| _mm256_dpbusd_avx_epi32(dots, weights, token))
                } else {
                    // The sum of a pair of products is at most 2·24·12 in magnitude, so the sum of four pairs is far
                    // below the limit of 16 bits.
                    let [a, b, c, d] = std::array::from_fn(|quad| _mm256_maddubs_epi16(weights[quad], tokens[quad]));
                    let pairs = _mm256_add_epi16(_mm256_add_epi16(a, b), _mm256_add_epi16(c, d));
                    _mm256_add_epi32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)), bias)
                };
                let scales = _mm256_mul_ps(scales, _mm256_set1_ps(token.scale));
                *sums = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scales, *sums);
            }
        }
    }

    #[inline(always)]
    fn add_to(self, sums: Self::Sums, memory: &mut [f32]) {
        self.add(sums, memory);
    }

    fn compute(self, tile: &Tile<'_, Nvfp4>, scratch: &mut Scratch<Nvfp4>) {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn plain(simd: Avx2<false>, tile: &Tile<'_, Nvfp4>, scratch: &mut Scratch<Nvfp4>) {
            kernel::compute(simd, tile, scratch);
        }
        #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
        fn vnni(simd: Avx2<true>, tile: &Tile<'_, Nvfp4>, scratch: &mut Scratch<Nvfp4>) {
            kernel::compute(simd, tile, scratch);
        }
        // SAFETY: `Avx2` exists only if AVX2, FMA and F16C were detected and, with `VNNI`, AVX-VNNI.
        unsafe { if VNNI { vnni(Avx2(()), tile, scratch) } else { plain(Avx2(()), tile, scratch) } }
    }
}

/// Vectors of rows that are multiplied with the same element of a token.
const VECTORS: usize = 2;

impl<const VNNI: bool> Simd<Bits16> for Avx2<VNNI> {
    const LANES: usize = VECTORS * LANES;
    const TOKENS: usize = 2;
    /// Sums of even columns and sums of odd columns.
    type Sums = [[__m256; VECTORS]; 2];

    #[inline(always)]
    fn unpack(self, values: &PackedBlock, scales: &PackedScales, out: &mut Numbers) {
        // SAFETY: `Avx2` exists only if AVX2, FMA and F16C were detected. Eight rows of a half of a packed block are 32
        // bytes, one vector, with eight codes of a row in each lane. Eight rows of a column of numbers are 8 f32, one
        // vector. `VALUES` has at least 8 f32.
        unsafe {
            // The permutation reads the lowest three bits of each lane only. Bit 3 is the sign.
            let table = _mm256_loadu_ps(e2m1::VALUES.as_ptr());
            let sign = _mm256_set1_epi32(i32::MIN);
            for (vector, scales) in scales.as_chunks::<LANES>().0.iter().enumerate() {
                let scales = self.scales(scales);
                for (half, bytes) in values.0.iter().enumerate() {
                    let packed = _mm256_loadu_si256(bytes[vector * LANES..].as_ptr().cast());
                    for column in 0..BLOCK / 2 {
                        let codes = _mm256_srlv_epi32(packed, _mm256_set1_epi32(4 * column as i32));
                        let signs = _mm256_sllv_epi32(packed, _mm256_set1_epi32(28 - 4 * column as i32));
                        let signs = _mm256_castsi256_ps(_mm256_and_si256(signs, sign));
                        let numbers = _mm256_or_ps(_mm256_permutevar8x32_ps(table, codes), signs);
                        let out = out.0[half * BLOCK / 2 + column][vector * LANES..].as_mut_ptr();
                        _mm256_storeu_ps(out, _mm256_mul_ps(numbers, scales));
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn zero(self) -> Self::Sums {
        // SAFETY: `Avx2` exists only if AVX2 was detected.
        unsafe { [[_mm256_setzero_ps(); VECTORS]; 2] }
    }

    #[inline(always)]
    fn accumulate<const N: usize>(
        self,
        sums: &mut [Self::Sums; N],
        block: &Numbers,
        lane: usize,
        tokens: [&[f32; BLOCK]; N],
    ) {
        for (pair, columns) in block.0.as_chunks::<2>().0.iter().enumerate() {
            // The sums stay in registers only if the indices of `sums` are known at compile time.
            for (parity, weights) in columns.iter().enumerate() {
                let weights = &weights[lane..lane + VECTORS * LANES];
                // SAFETY: `Avx2` exists only if AVX2 and FMA were detected. The slice has 16 f32, two vectors.
                unsafe {
                    let weights: [_; VECTORS] =
                        std::array::from_fn(|vector| _mm256_loadu_ps(weights.as_ptr().add(LANES * vector)));
                    for (sums, token) in sums.iter_mut().zip(tokens) {
                        let token = _mm256_set1_ps(token[2 * pair + parity]);
                        for (sum, weights) in sums[parity].iter_mut().zip(weights) {
                            *sum = _mm256_fmadd_ps(token, weights, *sum);
                        }
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn add_to(self, sums: Self::Sums, memory: &mut [f32]) {
        let [even, odd] = sums;
        for ((even, odd), memory) in even.into_iter().zip(odd).zip(memory.chunks_mut(LANES)) {
            // SAFETY: `Avx2` exists only if AVX2 was detected.
            self.add(unsafe { _mm256_add_ps(even, odd) }, memory);
        }
    }

    fn compute(self, tile: &Tile<'_, Bits16>, scratch: &mut Scratch<Bits16>) {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compute<const VNNI: bool>(simd: Avx2<VNNI>, tile: &Tile<'_, Bits16>, scratch: &mut Scratch<Bits16>) {
            kernel::compute(simd, tile, scratch);
        }
        // SAFETY: `Avx2` exists only if AVX2, FMA and F16C were detected.
        unsafe { compute(self, tile, scratch) }
    }
}
