//! AVX-512 BF16: one instruction adds two products of bf16 to each lane. It multiplies ordinary bf16 tokens. AVX-512 in
//! f32 computes all other tokens, to the same bits.

use std::arch::x86_64::*;
use std::sync::LazyLock;

use super::avx512::{Avx512, VECTORS};
use super::kernel::{self, Simd, Tile};
use super::layout::{Bf16ByParity, PANEL_ROWS, PackedBlock, PackedScales, Pairs, Scratch, TokenPairs};
use crate::format::{e2m1, e4m3};

/// Proof that this machine has AVX-512 with BF16, and that the sums have the same bits as on all other instruction
/// sets.
#[derive(Clone, Copy)]
pub(super) struct Avx512Bf16(Avx512);

impl Avx512Bf16 {
    /// Returns a value that proves that this machine has the features and adds in the right order, or `None`.
    pub fn detect() -> Option<Self> {
        static IS_RIGHT: LazyLock<bool> = LazyLock::new(|| {
            is_x86_feature_detected!("avx512bf16")
                // SAFETY: AVX-512 BF16 was detected on the line above.
                && adds_in_order(|sums, tokens, weights| unsafe { add_products(sums, tokens, weights) })
        });
        Avx512::detect().filter(|_| *IS_RIGHT).map(Self)
    }
}

impl Simd<Bf16ByParity> for Avx512Bf16 {
    const LANES: usize = PANEL_ROWS;
    const TOKENS: usize = 4;
    /// Sums of even columns and sums of odd columns.
    type Sums = [[__m512; VECTORS]; 2];

    #[inline(always)]
    fn unpack(self, values: &PackedBlock, scales: &PackedScales, out: &mut Pairs) {
        self.0.unpack_bf16::<Bf16ByParity>(values, scales, out);
    }

    #[inline(always)]
    fn zero(self) -> Self::Sums {
        // SAFETY: `Avx512Bf16` holds an `Avx512`, which exists only if AVX-512 F was detected.
        unsafe { [[_mm512_setzero_ps(); VECTORS]; 2] }
    }

    #[inline(always)]
    fn accumulate<const N: usize>(
        self,
        sums: &mut [Self::Sums; N],
        block: &Pairs,
        _lane: usize,
        tokens: [&TokenPairs; N],
    ) {
        for (four, pairs) in block.0.as_chunks::<2>().0.iter().enumerate() {
            // The sums stay in registers only if the indices of `sums` are known at compile time.
            for (parity, weights) in pairs.iter().enumerate() {
                // SAFETY: `Avx512Bf16` exists only if AVX-512 F and BF16 were detected. A pair of columns is 128 bytes,
                // two vectors.
                unsafe {
                    let weights: [_; VECTORS] = std::array::from_fn(|vector| {
                        bf16(_mm512_loadu_si512(weights.as_ptr().cast::<__m512i>().add(vector)))
                    });
                    for (sums, token) in sums.iter_mut().zip(tokens) {
                        let token = bf16(_mm512_set1_epi32(bytemuck::cast(token[2 * four + parity])));
                        for (sum, weights) in sums[parity].iter_mut().zip(weights) {
                            *sum = _mm512_dpbf16_ps(*sum, token, weights);
                        }
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn add_to(self, sums: Self::Sums, memory: &mut [f32]) {
        let [even, odd] = sums;
        // SAFETY: `Avx512Bf16` holds an `Avx512`, which exists only if AVX-512 F was detected.
        self.0.add(std::array::from_fn(|vector| unsafe { _mm512_add_ps(even[vector], odd[vector]) }), memory);
    }

    fn compute(self, tile: &Tile<'_, Bf16ByParity>, scratch: &mut Scratch<Bf16ByParity>) {
        #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
        fn compute(simd: Avx512Bf16, tile: &Tile<'_, Bf16ByParity>, scratch: &mut Scratch<Bf16ByParity>) {
            kernel::compute(simd, tile, scratch);
        }
        if !tile.are_ordinary {
            return self.0.compute_as_f32(tile);
        }
        // SAFETY: `Avx512Bf16` exists only if AVX-512 F, BW and BF16 were detected.
        unsafe { compute(self, tile, scratch) }
    }
}

/// Reinterprets a vector as 16 pairs of bf16, the operand type of the instruction.
#[inline(always)]
fn bf16(bits: __m512i) -> __m512bh {
    // SAFETY: both types are 64 bytes, and all bit patterns are valid.
    unsafe { std::mem::transmute(bits) }
}

/// f32 lanes per vector.
const LANES: usize = 16;

/// An operand: one pair of bf16 per lane.
type Operand = [[u16; 2]; LANES];

/// Runs the instruction `vdpbf16ps` once.
#[target_feature(enable = "avx512f,avx512bf16")]
fn add_products(mut sums: [f32; LANES], tokens: &Operand, weights: &Operand) -> [f32; LANES] {
    // SAFETY: the function's target features include AVX-512 F and BF16. Both operands and `sums` are 64 bytes, one
    // vector.
    unsafe {
        let [tokens, weights] = [tokens, weights].map(|pairs| bf16(_mm512_loadu_si512(pairs.as_ptr().cast())));
        let added = _mm512_dpbf16_ps(_mm512_loadu_ps(sums.as_ptr()), tokens, weights);
        _mm512_storeu_ps(sums.as_mut_ptr(), added);
    }
    sums
}

/// Whether `add_products` adds the products of a pair one after the other, the second product first, and rounds each
/// sum once, to nearest. Zen 4 does. The test detects other orders on processors that nobody has tried: with random
/// ordinary tokens and weights, each other order changes many of the sums below.
fn adds_in_order(add_products: impl Fn([f32; LANES], &Operand, &Operand) -> [f32; LANES]) -> bool {
    const CHAIN: usize = 8;
    let mut state = 1u64;
    let mut random = move || {
        // Constants of Knuth's MMIX generator.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as u16
    };
    // From the smallest exponent of ordinary tokens to exponents whose sums overflow.
    (18..=252).step_by(6).all(|exponent| {
        let (mut sums, mut expected) = ([0f32; LANES], [0f32; LANES]);
        for _ in 0..CHAIN {
            let (mut tokens, mut weights) = ([[0; 2]; LANES], [[0; 2]; LANES]);
            for (token, weight) in tokens.as_flattened_mut().iter_mut().zip(weights.as_flattened_mut()) {
                let bits = random();
                *token = bits & 0x807F | (exponent + (bits >> 7) % 3) << 7;
                let [code, scale] = random().to_le_bytes();
                let number = e2m1::decode(code) * e4m3::VALUES[usize::from(scale % (e4m3::MAX_CODE + 1))];
                *weight = (number.to_bits() >> 16) as u16;
            }
            sums = add_products(sums, &tokens, &weights);
            for ((sum, token), weight) in expected.iter_mut().zip(tokens).zip(weights) {
                let [first, second] = [0, 1].map(|element| [token, weight].map(|pair| number(pair[element])));
                *sum = first[0].mul_add(first[1], second[0].mul_add(second[1], *sum));
            }
        }
        let same =
            |(sum, expected): (&f32, &f32)| sum.to_bits() == expected.to_bits() || sum.is_nan() && expected.is_nan();
        sums.iter().zip(&expected).all(same)
    })
}

/// Decodes a bf16.
fn number(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes the next sum from a sum, a pair of tokens and a pair of weights.
    type Add = fn(f32, [f32; 2], [f32; 2]) -> f32;

    /// Returns an `add_products` that applies `add` to each lane.
    fn adding(add: Add) -> impl Fn([f32; LANES], &Operand, &Operand) -> [f32; LANES] {
        move |sums, tokens, weights| {
            std::array::from_fn(|lane| add(sums[lane], tokens[lane].map(number), weights[lane].map(number)))
        }
    }

    #[test]
    fn only_one_order_of_additions_is_accepted() {
        assert!(adds_in_order(adding(|sum, a, b| a[0].mul_add(b[0], a[1].mul_add(b[1], sum)))));
        let others: [(&str, Add); 5] = [
            ("the first product first", |sum, a, b| a[1].mul_add(b[1], a[0].mul_add(b[0], sum))),
            ("products first", |sum, a, b| sum + a[0].mul_add(b[0], a[1] * b[1])),
            ("one rounding", |sum, a, b| {
                (f64::from(a[0]) * f64::from(b[0]) + f64::from(a[1]) * f64::from(b[1]) + f64::from(sum)) as f32
            }),
            ("toward zero", |sum, a, b| {
                let add = |sum: f32, a: f32, b: f32| {
                    let (rounded, exact) = (a.mul_add(b, sum), f64::from(a) * f64::from(b) + f64::from(sum));
                    if f64::from(rounded).abs() > exact.abs() {
                        rounded.abs().next_down().copysign(rounded)
                    } else {
                        rounded
                    }
                };
                add(add(sum, a[1], b[1]), a[0], b[0])
            }),
            ("products that overflow", |sum, a, b| sum + a[1] * b[1] + a[0] * b[0]),
        ];
        for (order, add) in others {
            assert!(!adds_in_order(adding(add)), "{order}");
        }
    }
}
