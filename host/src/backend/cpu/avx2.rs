//! AVX2, with or without AVX-VNNI: a quarter of a panel at a time.

use std::arch::x86_64::*;

use super::kernel::{self, Block, Scratch, Simd, Tile};
use super::layout::{BIASED, PackedBlock, PackedScales, QUADS, TokenBlock};

/// Proof that this machine has AVX2, FMA and F16C; with `VNNI`, AVX-VNNI too.
#[derive(Clone, Copy)]
pub(super) struct Avx2<const VNNI: bool>(());

/// 32-bit lanes of a vector.
const LANES: usize = 8;

impl<const VNNI: bool> Avx2<VNNI> {
    /// The proof, where there is one.
    pub fn detect() -> Option<Self> {
        let present = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && (!VNNI || is_x86_feature_detected!("avxvnni"));
        present.then_some(Self(()))
    }
}

impl<const VNNI: bool> Simd for Avx2<VNNI> {
    const LANES: usize = LANES;
    const TOKENS: usize = 8;
    type Weights = ([__m256i; QUADS], __m256);
    type Sums = __m256;

    #[inline(always)]
    fn unpack(self, values: &PackedBlock, scales: &PackedScales, out: &mut Block) {
        // SAFETY: `self` proves the features. Eight rows take 32 bytes, one vector, in a half of a packed block and in
        // a quad of an unpacked one. Their scales are 8 bytes packed and 8 f32 unpacked.
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
                let codes = _mm_loadl_epi64(codes.as_ptr().cast());
                // E4M3's fields are moved to where f16 has its own; f16's bias is larger by 8.
                let f16s = _mm_slli_epi16::<7>(_mm_cvtepu8_epi16(codes));
                let scales = _mm256_mul_ps(_mm256_cvtph_ps(f16s), _mm256_set1_ps(256.0));
                _mm256_storeu_ps(out.as_mut_ptr(), scales);
            }
        }
    }

    #[inline(always)]
    fn load(self, block: &Block, lane: usize) -> Self::Weights {
        let quads = block.quads.each_ref().map(|quad| &quad[lane..lane + LANES]);
        // SAFETY: `self` proves the features; eight rows of a quad are 32 bytes, their scales 8 f32.
        unsafe {
            let quads = quads.map(|quad| _mm256_loadu_si256(quad.as_ptr().cast()));
            (quads, _mm256_loadu_ps(block.scales[lane..lane + LANES].as_ptr()))
        }
    }

    #[inline(always)]
    fn zero(self) -> Self::Sums {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    fn accumulate(self, sums: Self::Sums, (quads, scales): Self::Weights, token: &TokenBlock) -> Self::Sums {
        // SAFETY: `self` proves the features, AVX-VNNI only with `VNNI`.
        unsafe {
            let tokens = token.quads.map(|quad| _mm256_set1_epi32(quad));
            let bias = _mm256_set1_epi32(token.bias);
            let dots = if VNNI {
                quads
                    .into_iter()
                    .zip(tokens)
                    .fold(bias, |dots, (weights, token)| _mm256_dpbusd_avx_epi32(dots, weights, token))
            } else {
                // A sum of a pair is at most 2·24·12 in magnitude, so four of them are far below the limit of 16 bits.
                let [a, b, c, d] = std::array::from_fn(|quad| _mm256_maddubs_epi16(quads[quad], tokens[quad]));
                let pairs = _mm256_add_epi16(_mm256_add_epi16(a, b), _mm256_add_epi16(c, d));
                _mm256_add_epi32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)), bias)
            };
            let scales = _mm256_mul_ps(scales, _mm256_set1_ps(token.scale));
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scales, sums)
        }
    }

    #[inline(always)]
    fn add_to(self, sums: Self::Sums, memory: &mut [f32]) {
        let memory: &mut [f32; LANES] = memory.try_into().expect("a sum for each row");
        // SAFETY: `self` proves the features; memory has one vector.
        unsafe { _mm256_storeu_ps(memory.as_mut_ptr(), _mm256_add_ps(_mm256_loadu_ps(memory.as_ptr()), sums)) }
    }

    fn compute(self, tile: &Tile<'_>, scratch: &mut Scratch) {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn plain(simd: Avx2<false>, tile: &Tile<'_>, scratch: &mut Scratch) {
            kernel::compute(simd, tile, scratch);
        }
        #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
        fn vnni(simd: Avx2<true>, tile: &Tile<'_>, scratch: &mut Scratch) {
            kernel::compute(simd, tile, scratch);
        }
        // SAFETY: `self` proves the features, AVX-VNNI only with `VNNI`.
        unsafe { if VNNI { vnni(Avx2(()), tile, scratch) } else { plain(Avx2(()), tile, scratch) } }
    }
}
