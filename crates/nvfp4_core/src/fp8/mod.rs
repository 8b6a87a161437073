//! Layers with e4m3 tokens, and weights converted for FP8 tensor cores (W4A8).
//!
//! A layer whose [`TokenFormat`](crate::problem::TokenFormat) is `Fp8` multiplies 8-bit tokens by 8-bit weights, at
//! twice the 16-bit rate. Tokens, intermediate and output are 16-bit numbers in memory; only the multiplied operands
//! differ:
//!
//! * A token has a scale, its largest magnitude / 448, and e4m3 codes ([`quantize_token`]). The intermediate is rounded
//!   to the token type first, and then quantized like a token.
//! * A weight is *folded*: its e2m1 times its block's e4m3, divided by [`FOLD`], rounded once to e4m3 ([`fold`]).
//! * Products are added with 14 bits, as Hopper's tensor cores add them ([`sum`]), in the order of [`position`]. This
//!   is the definition, not an error: every device has the same sums, to the bit.
//! * A sum is multiplied by the token's scale and the weights' global scale, and the bias is added, in one rounding
//!   ([`scaled`]). Activation and later roundings are the same as with 16-bit tokens.
//!
//! `benches/lab/accuracy.md` reports the effect on accuracy.

mod sums;
mod tokens;
mod weights;

pub use sums::{Factors, STEP, position, sum};
pub use tokens::{MAGNITUDE_FLOOR, quantize_token};
pub use weights::{FOLD, fold, folded_row};

/// Scales a [`sum`] by the token's scale and the weights' global scale, and adds the bias if there is one. The factor
/// is f32, and the multiplication and addition are one f32 FMA.
#[inline]
pub fn scaled(sum: f32, token_scale: f32, global: f32, bias: Option<f32>) -> f32 {
    let factor = token_scale * (FOLD * global);
    // Adding -0 changes no number.
    factor.mul_add(sum, bias.unwrap_or(-0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn product_and_bias_are_rounded_once() {
        assert_eq!(scaled(3.0, 0.5, 0.25, None), 3.0);
        assert_eq!(scaled(3.0, 0.5, 0.25, Some(-2.5)), 0.5);
        assert_eq!(scaled(0.0, 0.5, 0.25, None).to_bits(), 0);
        // (1 + 2⁻¹²)² is not an f32, but (1 + 2⁻¹²)² - 1 is.
        let [small, near_one] = [1.0 / 4096.0, 1.0 + 1.0 / 4096.0];
        assert_eq!(scaled(near_one, near_one / 8.0, 1.0, Some(-1.0)), 2.0 * small + small * small);
    }
}
