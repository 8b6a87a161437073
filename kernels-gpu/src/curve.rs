//! Curves: activations outside the formula of [`Activation`](crate::epilogue::Activation), as f32 arithmetic with IEEE
//! 754 rounding, so that CPUs and GPUs compute the same bits.
//!
//! A curve is a function of an element g of gate and an element u of up, with up to four numbers. To add one: a line in
//! `curves!`, its function here, and its word with its exact definition in the host's `moe/activation.rs`. On a GPU,
//! instances with `curves` compute them; the other instances do not have this code.

use crate::exp::{exp_of_negative, sigmoid};

/// Passes the list of curves to `$each!`, after `$more`.
macro_rules! curves {
    ($each:ident!($($more:tt)*)) => {
        $each! {
            $($more)*
            /// `β·tanh(g/β)·σ(g)·u`, or with a positive λ `β·tanh(g/β)·σ(g)·λ·tanh(u/λ)`; numbers: β, λ (Kimi-K3's
            /// SiTU; `SituAndMul` in vLLM).
            Situ = 2, situ;
            /// `min(silu(g), limit)·clamp(u, −limit, limit)`; number: limit (Step-3.5; `SwiGLU-step` in vLLM).
            SwigluStep = 3, swiglu_step;
            /// `g·Φ(g)·u` with the normal distribution's Φ: GeGLU with the exact gelu (Hendrycks and Gimpel, 2016).
            Gelu = 4, gelu;
            /// `max(g, 0)²·u` (So et al., "Primer", 2021, with a gate).
            GatedRelu2 = 5, gated_relu2;
        }
    };
}

macro_rules! make {
    ($($(#[$doc:meta])* $curve:ident = $kind:literal, $function:ident;)*) => {
        /// A curve. Its value is the `kind` of a launch's [`Activation`](crate::epilogue::Activation).
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Curve { $($(#[$doc])* $curve = $kind),* }

        impl Curve {
            /// Every curve.
            pub const ALL: &[Self] = &[$(Self::$curve),*];

            /// Computes the curve. NaN gives NaN.
            #[inline(always)]
            pub fn apply(self, numbers: [f32; 4], gate: f32, up: f32) -> f32 {
                match self { $(Self::$curve => $function(numbers, gate, up)),* }
            }
        }
    };
}
curves!(make!());

/// Evaluates `$body` for the curve of a launch's activation: once per curve in the code, with `$curve` bound to the
/// function of gate and up. All threads take the same branch.
#[cfg(feature = "device")]
#[allow(unused_macros)] // not every kernel has instances with curves
macro_rules! with_curve {
    ($activation:expr, |$curve:ident| $body:expr) => {{
        let activation = $activation;
        let kind = cuda_std::integer::opaque_b32(activation.kind);
        $crate::curve::curves!(with_curve!(@arms kind, activation, $curve, $body;))
    }};
    (@arms $kind:ident, $activation:ident, $curve:ident, $body:expr;
        $($(#[$doc:meta])* $name:ident = $value:literal, $function:ident;)*) => {
        match $kind {
            $($value => {
                let $curve = |gate: f32, up: f32| $crate::curve::$function($activation.numbers(), gate, up);
                $body
            })*
            // SAFETY: the host launches these instances only with the kind of a curve.
            _ => unsafe { core::hint::unreachable_unchecked() },
        }
    };
}
#[cfg(feature = "device")]
#[allow(unused_imports)]
pub(crate) use {curves, with_curve};

/// [`Curve::Situ`].
#[inline(always)]
pub(crate) fn situ([beta, linear, ..]: [f32; 4], gate: f32, up: f32) -> f32 {
    let up = if linear > 0.0 { linear * tanh(up / linear) } else { up };
    beta * tanh(gate / beta) * sigmoid(gate) * up
}

/// [`Curve::SwigluStep`].
#[inline(always)]
pub(crate) fn swiglu_step([limit, ..]: [f32; 4], gate: f32, up: f32) -> f32 {
    let silu = gate * sigmoid(gate);
    // Comparisons instead of `min`: the minimum of a NaN and a number would be the number.
    let silu = if silu > limit { limit } else { silu };
    let up = if up > limit { limit } else { up };
    silu * if up < -limit { -limit } else { up }
}

/// [`Curve::Gelu`].
#[inline(always)]
pub(crate) fn gelu(_: [f32; 4], gate: f32, up: f32) -> f32 {
    gate * normal(gate) * up
}

/// [`Curve::GatedRelu2`].
#[inline(always)]
pub(crate) fn gated_relu2(_: [f32; 4], gate: f32, up: f32) -> f32 {
    let gate = if gate < 0.0 { 0.0 } else { gate };
    // In this order, a product overflows or underflows only if the result does.
    gate * up * gate
}

/// Returns the hyperbolic tangent, accurate to six units in the last place of an f32, and NaN for NaN. Small numbers
/// take the Taylor series, because 1 − e^(−2x) would lose their digits.
#[inline(always)]
fn tanh(x: f32) -> f32 {
    /// Coefficients of x⁹ to x³ (Abramowitz and Stegun, 4.5.64).
    const SERIES: [f32; 4] = [62.0 / 2835.0, -17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0];
    /// Up to this magnitude, the next term of the series is below 2⁻²⁶ of the result.
    const SMALL: f32 = 0.2;
    let magnitude = if x < 0.0 { -x } else { x };
    let power = exp_of_negative(-2.0 * magnitude);
    let large = (1.0 - power) / (1.0 + power);
    let large = if x < 0.0 { -large } else { large };
    let square = x * x;
    let sum = SERIES.into_iter().reduce(|sum, term| sum * square + term).unwrap_or_default();
    let small = x + x * square * sum;
    if magnitude > SMALL {
        large
    } else {
        // Also NaN.
        small
    }
}

/// Returns the normal distribution's Φ(x), and NaN for NaN. Its relative error is at most (12 + x²/2)·2⁻²⁴ down to the
/// smallest normal number.
///
/// Φ(−z) is e^(−z²/2) times a function that falls slowly, here t times a polynomial in t = 1/(1 + 0.3z) as in Cody,
/// "Rational Chebyshev approximations for the error function", 1969. The coefficients are a fit of least relative error
/// for z from 0 to 13.4, 1.3·10⁻⁷.
#[inline(always)]
fn normal(x: f32) -> f32 {
    const SLOPE: f32 = 0.3;
    /// Coefficients of t⁷ to 1.
    const FIT: [f32; 8] = [
        0.035_984_12,
        -0.158_495_05,
        0.208_585_74,
        -0.055_744_693,
        0.129_656_03,
        0.099_580_43,
        0.120_807_59,
        0.119_625_785,
    ];
    let magnitude = if x < 0.0 { -x } else { x };
    let t = 1.0 / (1.0 + SLOPE * magnitude);
    let fit = t * FIT.into_iter().reduce(|sum, term| sum * t + term).unwrap_or_default();
    let below = exp_of_negative(-0.5 * magnitude * magnitude) * fit;
    let normal = if x < 0.0 { below } else { 1.0 - below };
    if x.is_nan() { x } else { normal }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;

    #[test]
    fn hyperbolic_tangents_are_accurate_to_six_ulps() {
        for i in -400_000..=400_000 {
            let x = i as f32 * 5e-5;
            let (got, want) = (f64::from(tanh(x)), f64::from(x).tanh());
            assert!((got - want).abs() <= want.abs() * 6.0 * f64::from(f32::EPSILON), "{x}: {got} {want}");
        }
        assert_eq!([f32::NEG_INFINITY, 0.0, 1e-30, 20.0, f32::INFINITY].map(tanh), [-1.0, 0.0, 1e-30, 1.0, 1.0]);
        assert!(tanh(f32::NAN).is_nan());
    }

    #[test]
    fn normal_distribution_is_within_its_error() {
        // Φ(−z) for z from 0 on by Simpson's rule: the sum of the density over (z, 40).
        let density = |x: f64| (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
        let step = 1.0 / 512.0;
        let (mut tail, mut tails) = (0.0, std::vec::Vec::new());
        for i in (0..20_480).rev() {
            let z = f64::from(i) * step;
            tail += (density(z) + 4.0 * density(z + step / 2.0) + density(z + step)) * step / 6.0;
            tails.push((z, tail));
        }
        for (z, below) in tails.into_iter().filter(|(z, _)| *z <= 13.0) {
            for (x, want) in [(-z, below), (z, 1.0 - below)] {
                let got = f64::from(normal(x as f32));
                let error = (12.0 + z * z / 2.0) * 2f64.powi(-24) * want;
                assert!((got - want).abs() <= error, "{x}: {got} {want}");
            }
        }
        assert_eq!([f32::NEG_INFINITY, -20.0, 20.0, f32::INFINITY].map(normal), [0.0, 0.0, 1.0, 1.0]);
        assert!(normal(f32::NAN).is_nan());
    }

    #[test]
    fn every_curve_keeps_nan() {
        for curve in Curve::ALL {
            let numbers = [4.0, 2.0, 0.0, 0.0];
            assert!(curve.apply(numbers, f32::NAN, 1.0).is_nan() && curve.apply(numbers, 1.0, f32::NAN).is_nan());
        }
    }
}
