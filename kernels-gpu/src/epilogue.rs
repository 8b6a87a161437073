//! Operations on sums before they are written to C, common to all kernels: biases, activation and conversion.

use bytemuck::{Pod, Zeroable};
#[cfg(feature = "device")]
use cuda_std::{
    convert::{cvt_f32_f16, cvt_rn_bf16x2_f32, cvt_rn_f16x2_f32},
    float::{add_rn_f32x2, ex2_approx_ftz_f32, mul_rn_f32x2, rcp_approx_ftz_f32},
};

use crate::curve::Curve;
#[cfg(feature = "device")]
use crate::format::OUTPUT_BF16;

/// Plain product: sums unchanged. Gated product: `silu(gate) ∘ up`.
pub const NO_PARAMETERS: u32 = 0;

/// Gated product: the formula of [`Activation`]. Plain product: `max(x, 0)²`.
pub const PARAMETERS: u32 = 1;

/// Operation on a product's sums, after alpha and biases are applied.
///
/// For a gated product: `x/(1 + 2^(x·(exponent[0] + exponent[1]·x²)))·(clamp(up, −limit, limit) + offset)`, with `x =
/// min(gate, limit)`. Both min and clamp keep a NaN.
///
/// A gated product of an instance with curves: the [`Curve`] with the value `kind` and the
/// [`numbers`](Self::numbers).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Activation {
    /// [`NO_PARAMETERS`], [`PARAMETERS`] or the value of a curve.
    pub kind: u32,
    /// −log₂ e times the coefficients of x and of x³.
    pub exponent: [f32; 2],
    /// Positive limit; infinity for no limit.
    pub limit: f32,
    /// Number that is added to up.
    pub offset: f32,
}

impl Activation {
    /// [`NO_PARAMETERS`].
    pub const NONE: Self = Self { kind: NO_PARAMETERS, exponent: [0.0; 2], limit: 0.0, offset: 0.0 };

    /// A curve with its numbers, which take the places of the formula's numbers.
    pub const fn curve(curve: Curve, [first, second, limit, offset]: [f32; 4]) -> Self {
        Self { kind: curve as u32, exponent: [first, second], limit, offset }
    }

    /// Numbers of a curve.
    #[inline(always)]
    pub const fn numbers(&self) -> [f32; 4] {
        [self.exponent[0], self.exponent[1], self.limit, self.offset]
    }

    /// Whether this is a curve.
    pub const fn is_curve(&self) -> bool {
        self.kind > PARAMETERS
    }
}

/// Returns x/(1+e⁻ˣ). As x goes to −∞, the exponential overflows to inf, its reciprocal is 0, and the result is −0.
#[cfg(feature = "device")]
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * rcp_approx_ftz_f32(1.0 + ex2_approx_ftz_f32(-core::f32::consts::LOG2_E * x))
}

/// [`silu`] of two numbers at once, on GPUs from sm_100 on.
#[cfg(feature = "device")]
#[inline(always)]
pub fn silu_x2(x: [f32; 2]) -> [f32; 2] {
    let powers = mul_rn_f32x2(x, [-core::f32::consts::LOG2_E; 2]).map(ex2_approx_ftz_f32);
    mul_rn_f32x2(x, add_rn_f32x2(powers, [1.0; 2]).map(rcp_approx_ftz_f32))
}

#[cfg(feature = "device")]
impl Activation {
    /// Returns the gated formula of [`Activation`] for one pair of gate and up.
    #[inline(always)]
    pub fn gated(&self, gate: f32, up: f32) -> f32 {
        // Comparisons instead of `min`: the minimum of a NaN and a number would be the number.
        let x = if gate > self.limit { self.limit } else { gate };
        let up = if up > self.limit { self.limit } else { up };
        let up = if up < -self.limit { -self.limit } else { up };
        // The square stays finite, so its product with 0 is 0.
        let power = ex2_approx_ftz_f32(x * (self.exponent[0] + self.exponent[1] * (x * x).min(f32::MAX)));
        x * rcp_approx_ftz_f32(1.0 + power) * (up + self.offset)
    }
}

/// Returns max(x, 0)², and NaN for NaN.
#[cfg(feature = "device")]
#[inline(always)]
pub fn relu2(x: f32) -> f32 {
    let x = if x < 0.0 { 0.0 } else { x };
    x * x
}

/// Converts two elements of C to the format `output` ([`OUTPUT_F16`](crate::format::OUTPUT_F16) or [`OUTPUT_BF16`]),
/// with `low` in the low half of the word.
#[cfg(feature = "device")]
#[inline(always)]
pub fn convert(output: u32, low: f32, high: f32) -> u32 {
    if output == OUTPUT_BF16 { cvt_rn_bf16x2_f32(low, high) } else { cvt_rn_f16x2_f32(low, high) }
}

/// Returns the two numbers of a word in format `format`, the inverse of [`convert`].
#[cfg(feature = "device")]
#[inline(always)]
pub fn decode(format: u32, word: u32) -> [f32; 2] {
    // A bfloat16 is the upper half of an f32.
    if format == OUTPUT_BF16 {
        [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
    } else {
        [cvt_f32_f16(word as u16), cvt_f32_f16((word >> 16) as u16)]
    }
}
