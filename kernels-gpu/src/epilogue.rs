//! What every kernel does to its sums before it writes them to C: activation and conversion.

use cuda_std::{
    convert::{cvt_rn_bf16x2_f32, cvt_rn_f16x2_f32},
    float::{ex2_approx_ftz_f32, rcp_approx_ftz_f32},
};

use crate::format::OUTPUT_BF16;

/// x/(1+e⁻ˣ). As x goes to −∞, the exponential overflows to inf, its reciprocal is 0, and the result is −0.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * rcp_approx_ftz_f32(1.0 + ex2_approx_ftz_f32(-core::f32::consts::LOG2_E * x))
}

/// Two elements of C in the format `output` ([`OUTPUT_F16`](crate::format::OUTPUT_F16) or [`OUTPUT_BF16`]), `low` in the low
/// half.
#[inline(always)]
pub fn convert(output: u32, low: f32, high: f32) -> u32 {
    if output == OUTPUT_BF16 { cvt_rn_bf16x2_f32(low, high) } else { cvt_rn_f16x2_f32(low, high) }
}
