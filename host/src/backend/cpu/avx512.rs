//! AVX-512 with VNNI: computes all rows of a panel, two vectors, at a time.

use std::arch::x86_64::*;
use std::cell::RefCell;

use super::kernel::{self, Simd, Tile};
use super::layout::{
    BIASED, Bits16, Integers, Numbers, Nvfp4, PANEL_ROWS, PackedBlock, PackedScales, Pairs, QUADS, Scratch, TokenBlock,
    Tokens, TokensBf16,
};
use crate::format::{BLOCK, e2m1};

/// Proof that this machine has AVX-512 F, BW and VNNI.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

/// Number of vectors per panel.
pub(super) const VECTORS: usize = 2;

impl Avx512 {
    /// Returns a value that proves that this machine has the features, or `None`.
    pub fn detect() -> Option<Self> {
        let present = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vnni");
        present.then_some(Self(()))
    }

    /// Decodes the 16 scales of one vector of rows.
    #[inline(always)]
    pub fn scales(self, codes: &PackedScales, vector: usize) -> __m512 {
        // SAFETY: `Avx512` exists only if AVX-512 F and BW were detected. `codes` has 32 bytes, two vectors of 16, and
        // `vector` is 0 or 1.
        unsafe {
            let codes = _mm_loadu_si128(codes.as_ptr().cast::<__m128i>().add(vector));
            // Shift the fields of E4M3 to their places in f16. The exponent bias of f16 is larger by 8.
            let f16s = _mm256_slli_epi16::<7>(_mm256_cvtepu8_epi16(codes));
            _mm512_mul_ps(_mm512_cvtph_ps(f16s), _mm512_set1_ps(256.0))
        }
    }

    /// Decodes a block of a panel to bf16.
    #[inline(always)]
    pub fn unpack_bf16<T: TokensBf16>(self, values: &PackedBlock, scales: &PackedScales, out: &mut Pairs) {
        // SAFETY: `Avx512` exists only if AVX-512 F and BW were detected. A half of a packed block is 128 bytes, two
        // vectors, with eight codes of a row in each lane. A pair of columns of bf16 of all rows is 128 bytes, two
        // vectors. `VALUES` has 16 f32.
        unsafe {
            let table = _mm512_loadu_ps(e2m1::VALUES.as_ptr());
            for vector in 0..VECTORS {
                let scales = self.scales(scales, vector);
                for (half, bytes) in values.0.iter().enumerate() {
                    let packed = _mm512_loadu_si512(bytes.as_ptr().cast::<__m512i>().add(vector));
                    // The permutation reads the lowest four bits of each lane only. A product has six significant bits,
                    // so the upper half of its f32 is the exact bf16, and the lower half is zero.
                    let numbers = |column: usize| {
                        let codes = _mm512_srlv_epi32(packed, _mm512_set1_epi32(4 * column as i32));
                        _mm512_castps_si512(_mm512_mul_ps(_mm512_permutexvar_ps(codes, table), scales))
                    };
                    for (pair, [first, second]) in T::PAIRS.into_iter().enumerate() {
                        let pairs = _mm512_or_si512(_mm512_srli_epi32::<16>(numbers(first)), numbers(second));
                        let out = out.0[half * T::PAIRS.len() + pair].as_mut_ptr();
                        _mm512_storeu_si512(out.cast::<__m512i>().add(vector), pairs);
                    }
                }
            }
        }
    }

    /// Computes a tile of bf16 tokens after converting the tokens to f32.
    pub fn compute_as_f32<T: TokensBf16>(self, tile: &Tile<'_, T>) {
        thread_local!(static TOKENS: RefCell<Vec<[f32; BLOCK]>> = const { RefCell::new(Vec::new()) });
        let (rows, blocks) = (tile.rows.len(), tile.weights.k / BLOCK);
        TOKENS.with_borrow_mut(|tokens| {
            tokens.resize(Bits16::len(rows, tile.weights.k), Bits16::ZERO);
            for (chunk, out) in tokens.chunks_mut(Bits16::CHUNK_BLOCKS * rows).enumerate() {
                let first = chunk * Bits16::CHUNK_BLOCKS;
                let count = Bits16::CHUNK_BLOCKS.min(blocks - first);
                for (row, out) in tile.rows.clone().zip(out.chunks_mut(Bits16::CHUNK_BLOCKS)) {
                    let (from, within) = (first / T::CHUNK_BLOCKS, first % T::CHUNK_BLOCKS);
                    let from = &tile.tokens[(from * tile.m + row) * T::CHUNK_BLOCKS + within..][..count];
                    let halves = from.as_flattened().as_chunks::<{ BLOCK / 4 }>().0;
                    for (pairs, out) in halves.iter().zip(out.as_flattened_mut().as_chunks_mut::<{ BLOCK / 2 }>().0) {
                        let mut columns = [0; BLOCK / 2];
                        for (&column, &bits) in T::PAIRS.as_flattened().iter().zip(pairs.as_flattened()) {
                            columns[column] = bits;
                        }
                        *out = columns.map(|bits| f32::from_bits(u32::from(bits) << 16));
                    }
                }
            }
            let tile = Tile {
                weights: tile.weights,
                panels: tile.panels.clone(),
                tokens,
                are_ordinary: true,
                m: rows,
                rows: 0..rows,
                epilogue: tile.epilogue,
                // SAFETY: `tile.rows.start` ≤ M, so the address is within the M·N elements of the output or at their
                // end.
                output: unsafe { tile.output.add(tile.rows.start * tile.weights.n) },
            };
            Bits16::with_scratch(|scratch| self.compute(&tile, scratch));
        });
    }

    /// Adds sums to the sums in memory.
    #[inline(always)]
    pub fn add(self, sums: [__m512; VECTORS], memory: &mut [f32]) {
        let memory: &mut [f32; PANEL_ROWS] = memory.try_into().expect("one sum per row");
        for (vector, sums) in sums.into_iter().enumerate() {
            // SAFETY: `Avx512` exists only if AVX-512 F was detected. `memory` has 32 f32, two vectors, and is borrowed
            // mutably.
            unsafe {
                let memory = memory.as_mut_ptr().add(16 * vector);
                _mm512_storeu_ps(memory, _mm512_add_ps(_mm512_loadu_ps(memory), sums));
            }
        }
    }
}

impl Simd<Nvfp4> for Avx512 {
    const LANES: usize = PANEL_ROWS;
    const TOKENS: usize = 8;
    type Sums = [__m512; VECTORS];

    #[inline(always)]
    fn unpack(self, values: &PackedBlock, scales: &PackedScales, out: &mut Integers) {
        // SAFETY: `Avx512` exists only if AVX-512 F and BW were detected. A half of a packed block and a quad of an
        // unpacked block are 128 bytes each, two vectors. Scales are 32 bytes packed and 32 f32 unpacked. `BIASED` has
        // 16 bytes.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(BIASED.as_ptr().cast()));
            let nibble = _mm512_set1_epi8(0xF);
            for (half, bytes) in values.0.iter().enumerate() {
                for vector in 0..VECTORS {
                    let packed = _mm512_loadu_si512(bytes.as_ptr().cast::<__m512i>().add(vector));
                    let codes = [packed, _mm512_srli_epi16::<4>(packed)];
                    for (parity, codes) in codes.into_iter().enumerate() {
                        let weights = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, nibble));
                        let quad = out.quads[2 * half + parity].as_mut_ptr().cast::<__m512i>();
                        _mm512_storeu_si512(quad.add(vector), weights);
                    }
                }
            }
            for vector in 0..VECTORS {
                _mm512_storeu_ps(out.scales.as_mut_ptr().add(16 * vector), self.scales(scales, vector));
            }
        }
    }

    #[inline(always)]
    fn zero(self) -> Self::Sums {
        // SAFETY: `Avx512` exists only if AVX-512 F was detected.
        unsafe { [_mm512_setzero_ps(); VECTORS] }
    }

    #[inline(always)]
    fn accumulate<const N: usize>(
        self,
        sums: &mut [Self::Sums; N],
        block: &Integers,
        _lane: usize,
        tokens: [&TokenBlock; N],
    ) {
        // SAFETY: `Avx512` exists only if AVX-512 F and VNNI were detected. A quad is 128 bytes, and the scales are 32
        // f32.
        unsafe {
            let weights: [[_; VECTORS]; QUADS] = std::array::from_fn(|quad| {
                let quad = block.quads[quad].as_ptr().cast::<__m512i>();
                std::array::from_fn(|vector| _mm512_loadu_si512(quad.add(vector)))
            });
            let scales: [_; VECTORS] =
                std::array::from_fn(|vector| _mm512_loadu_ps(block.scales.as_ptr().add(16 * vector)));
            for (sums, token) in sums.iter_mut().zip(tokens) {
                let mut dots = [_mm512_set1_epi32(token.bias); VECTORS];
                for (weights, token) in weights.iter().zip(token.quads) {
                    let token = _mm512_set1_epi32(token);
                    for (dot, weights) in dots.iter_mut().zip(weights) {
                        *dot = _mm512_dpbusd_epi32(*dot, *weights, token);
                    }
                }
                let token_scale = _mm512_set1_ps(token.scale);
                for ((sum, dot), scale) in sums.iter_mut().zip(dots).zip(scales) {
                    *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(scale, token_scale), *sum);
                }
            }
        }
    }

    #[inline(always)]
    fn add_to(self, sums: Self::Sums, memory: &mut [f32]) {
        self.add(sums, memory);
    }

    fn compute(self, tile: &Tile<'_, Nvfp4>, scratch: &mut Scratch<Nvfp4>) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        fn compute(simd: Avx512, tile: &Tile<'_, Nvfp4>, scratch: &mut Scratch<Nvfp4>) {
            kernel::compute(simd, tile, scratch);
        }
        // SAFETY: `Avx512` exists only if AVX-512 F, BW and VNNI were detected.
        unsafe { compute(self, tile, scratch) }
    }
}

impl Simd<Bits16> for Avx512 {
    const LANES: usize = PANEL_ROWS;
    const TOKENS: usize = 4;
    /// Sums of even columns and sums of odd columns.
    type Sums = [[__m512; VECTORS]; 2];

    #[inline(always)]
    fn unpack(self, values: &PackedBlock, scales: &PackedScales, out: &mut Numbers) {
        // SAFETY: `Avx512` exists only if AVX-512 F and BW were detected. A half of a packed block is 128 bytes, two
        // vectors, with eight codes of a row in each lane. A column of numbers is 32 f32, two vectors. `VALUES` has 16
        // f32.
        unsafe {
            let table = _mm512_loadu_ps(e2m1::VALUES.as_ptr());
            for vector in 0..VECTORS {
                let scales = self.scales(scales, vector);
                for (half, bytes) in values.0.iter().enumerate() {
                    let packed = _mm512_loadu_si512(bytes.as_ptr().cast::<__m512i>().add(vector));
                    for column in 0..BLOCK / 2 {
                        // The permutation reads the lowest four bits of each lane only.
                        let codes = _mm512_srlv_epi32(packed, _mm512_set1_epi32(4 * column as i32));
                        let numbers = _mm512_mul_ps(_mm512_permutexvar_ps(codes, table), scales);
                        let out = out.0[half * BLOCK / 2 + column].as_mut_ptr();
                        _mm512_storeu_ps(out.add(16 * vector), numbers);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn zero(self) -> Self::Sums {
        // SAFETY: `Avx512` exists only if AVX-512 F was detected.
        unsafe { [[_mm512_setzero_ps(); VECTORS]; 2] }
    }

    #[inline(always)]
    fn accumulate<const N: usize>(
        self,
        sums: &mut [Self::Sums; N],
        block: &Numbers,
        _lane: usize,
        tokens: [&[f32; BLOCK]; N],
    ) {
        for (pair, columns) in block.0.as_chunks::<2>().0.iter().enumerate() {
            // The sums stay in registers only if the indices of `sums` are known at compile time.
            for (parity, weights) in columns.iter().enumerate() {
                // SAFETY: `Avx512` exists only if AVX-512 F was detected. A column of numbers is 32 f32, two vectors.
                unsafe {
                    let weights: [_; VECTORS] =
                        std::array::from_fn(|vector| _mm512_loadu_ps(weights.as_ptr().add(16 * vector)));
                    for (sums, token) in sums.iter_mut().zip(tokens) {
                        let token = _mm512_set1_ps(token[2 * pair + parity]);
                        for (sum, weights) in sums[parity].iter_mut().zip(weights) {
                            *sum = _mm512_fmadd_ps(token, weights, *sum);
                        }
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn add_to(self, sums: Self::Sums, memory: &mut [f32]) {
        let [even, odd] = sums;
        // SAFETY: `Avx512` exists only if AVX-512 F was detected.
        self.add(std::array::from_fn(|vector| unsafe { _mm512_add_ps(even[vector], odd[vector]) }), memory);
    }

    fn compute(self, tile: &Tile<'_, Bits16>, scratch: &mut Scratch<Bits16>) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        fn compute(simd: Avx512, tile: &Tile<'_, Bits16>, scratch: &mut Scratch<Bits16>) {
            kernel::compute(simd, tile, scratch);
        }
        // SAFETY: `Avx512` exists only if AVX-512 F, BW and VNNI were detected.
        unsafe { compute(self, tile, scratch) }
    }
}
