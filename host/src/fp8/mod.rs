//! Tokens in e4m3, and weights as an FP8 tensor core takes them: W4A8.
//!
//! A layer whose [`TokenFormat`](crate::problem::TokenFormat) is `Fp8` multiplies tokens and weights of 8 bits, at twice the rate of 16. Its
//! tokens, its intermediate and its output lie in memory as 16-bit numbers all the same; only what is multiplied differs:
//!
//! * A token has a scale, its largest magnitude / 448, and e4m3 codes ([`quantize_token`]). The intermediate is rounded to the
//!   tokens' type first, and then treated like a token.
//! * A weight is *folded*: its e2m1 times its block's e4m3, over [`FOLD`], rounded once to e4m3 ([`fold`]).
//! * Products are added as Hopper's tensor cores add them, with 14 bits ([`sum`]), in the order of [`position`]. That is the
//!   definition here, not an error: every device has the same sums, to the bit.
//! * A sum is multiplied by the token's scale and the weights' global scale, and has its bias, in one rounding ([`scaled`]). From there
//!   on, activation and roundings are as ever.
//!
//! `docs/accuracy.md` has what that costs in accuracy.

mod sums;
mod tokens;
mod weights;

pub use sums::{Factors, STEP, position, sum};
pub use tokens::{MAGNITUDE_FLOOR, QuantizedRows, quantize_token};
pub use weights::{FOLD, fold, folded_row};

/// What a projection makes of a [`sum`]: times the token's scale and the weights' global scale, plus the bias if there is one. The
/// factor is f32, and so is the fused multiplication and addition.
#[inline]
pub fn scaled(sum: f32, token_scale: f32, global: f32, bias: Option<f32>) -> f32 {
    let factor = token_scale * (FOLD * global);
    // The sum of anything and -0 is the former.
    factor.mul_add(sum, bias.unwrap_or(-0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bias_is_added_before_the_only_rounding_behind_the_factor() {
        assert_eq!(scaled(3.0, 0.5, 0.25, None), 3.0);
        assert_eq!(scaled(3.0, 0.5, 0.25, Some(-2.5)), 0.5);
        assert_eq!(scaled(0.0, 0.5, 0.25, None).to_bits(), 0);
        // (1 + 2⁻¹²)² is no f32; less 1 it is.
        let [small, near_one] = [1.0 / 4096.0, 1.0 + 1.0 / 4096.0];
        assert_eq!(scaled(near_one, near_one / 8.0, 1.0, Some(-1.0)), 2.0 * small + small * small);
    }
}
