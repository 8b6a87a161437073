//! The reference of a layer's products, with bounds for the results of a device.
//!
//! **The reference.** The product of a token's element (up to 11 significant bits) and a weight (6) is exact in f64 for
//! any exponent. Sums are f64: K is cut into windows of [`WINDOW`] columns, the 16 sums of a window are added in pairs,
//! and windows are added in order. Each product therefore passes through at most `12 + K/128` roundings, and the error
//! of a sum is at most `(12 + K/128)·2⁻⁵³·Σ|products|`, which is below 2⁻³⁹ of `Σ|products|` for the largest K.
//! Infinities and NaN follow IEEE 754.
//!
//! **The device.** A device sums in f32, windows in order, and the columns of a window in any order. It adds up to 16
//! products to the accumulator per step. In each step, Hopper's tensor core aligns the 17 addends to the largest,
//! truncates each of them 25 bits below the exponent of the largest, and truncates the sum to f32 (Khattak and
//! Mikaitis, "Accurate Models of NVIDIA Tensor Cores", 2025). It loses at most `17·2⁻²⁵ + 2⁻²³` of the largest addend
//! or sum, and each of these is at most the accumulator before the window plus `Σ|products|` of the window.
//! [`Sum::error`] adds these losses. A device that adds sixteen f32 sums per window in pairs loses less.
//!
//! Then the device multiplies by α, adds a bias and applies the activation, all in f32: [`Sum::biased`] and
//! [`Expected::activated`].
//!
//! **NVFP4 tokens.** The numbers of tokens in NVFP4 ([`crate::fp4`]) are exact too, and the same bound holds: a tensor
//! core that adds 64 products per step aligns 65 addends and loses less than four steps of 16 products may lose. The
//! factor of a sum is the product of two global scales in f32.
//!
//! **FP8 tokens.** For tokens in FP8, sums and everything up to the activation are defined to the bit ([`crate::fp8`]).
//! Their error is 0, and only the activation has a bound.
//!
//! Rounding is monotone. An element is right if it lies between the two ends of its interval, each rounded to the type
//! of the element ([`Expected`]). No tolerance is added.

use super::activation::{Activation, Factor, Form, Gate};
use crate::format::{BLOCK, FIXED_POINT_BITS, Matrix, e2m1, e4m3};
use crate::fp4;
use crate::fp8::{self, Factors, folded_row, quantize_token};
use crate::problem::{TokenDtype, TokenFormat};

/// Columns of K per window. Every device sums whole windows in order.
pub const WINDOW: usize = 128;

/// Maximum number of products that a device adds per step.
const STEP: usize = 16;

/// Maximum loss per step, relative to the largest addend or sum of the step.
const STEP_LOSS: f64 = 17.0 / (1u64 << 25) as f64 + 1.0 / (1u64 << 23) as f64;

/// Half of the last bit of an f32, relative to the number.
const HALF_ULP: f64 = 1.0 / (1u64 << 24) as f64;

/// Smallest normal f32. Below it, a device may lose bits or flush to zero.
const SMALLEST: f64 = f32::MIN_POSITIVE as f64;

/// A dot product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sum {
    /// The sum, within the error bound of the reference.
    pub value: f64,
    /// Maximum distance of a device's sum from `value`. Infinite if the device's sum may overflow f32.
    pub error: f64,
}

impl Sum {
    /// Returns the sum times the global scale of the weights.
    ///
    /// A device multiplies in f32 by the global scale and by the factor that undoes the scaling of its decoded weights.
    fn scaled(self, global: f32) -> Self {
        /// Bound of the roundings of these multiplications, and of the rounding of `error` itself.
        const ROUNDINGS: f64 = 4.0 * HALF_ULP;
        let value = self.value * f64::from(global);
        if !value.is_finite() {
            return Self { value, error: self.error };
        }
        let error = self.error * f64::from(global) * (1.0 + ROUNDINGS) + ROUNDINGS * value.abs() + SMALLEST;
        Self { value, error }.within_f32()
    }

    /// Returns the sum plus a bias. A device adds the bias in f32, fused with its last multiplication or after it.
    pub fn biased(self, bias: f32) -> Self {
        let value = self.value + f64::from(bias);
        if !value.is_finite() {
            return Self { value, error: self.error };
        }
        // The device rounds a number that lies within `self.error` of the value.
        let error = self.error * (1.0 + 2.0 * HALF_ULP) + 2.0 * HALF_ULP * value.abs() + SMALLEST;
        Self { value, error }.within_f32()
    }

    /// Returns the sum with an infinite error if the device's number may overflow f32.
    fn within_f32(self) -> Self {
        let is_within = self.value.abs() + self.error < f64::from(f32::MAX);
        Self { error: if is_within { self.error } else { f64::INFINITY }, ..self }
    }

    /// Interval of the device's number. If the value is infinite or NaN, both ends are the value.
    fn ends(self) -> [f64; 2] {
        if self.value.is_finite() { [self.value - self.error, self.value + self.error] } else { [self.value; 2] }
    }
}

/// Range of an element of a 16-bit type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Expected {
    /// A number or an infinity. The reference is `want`; an element must lie between `low` and `high`, each rounded to
    /// the type.
    Between {
        /// The reference.
        want: f64,
        /// The lower end.
        low: f64,
        /// The upper end.
        high: f64,
    },
    /// NaN.
    Nan,
    /// Any value: a device's sums may overflow, or an infinity is multiplied with a number that may be zero.
    Anything,
}

impl Expected {
    /// All numbers within `error` of a value. An infinite value must match exactly.
    fn around(value: f64, error: f64) -> Self {
        match value {
            _ if error == f64::INFINITY => Self::Anything,
            value if value.is_nan() => Self::Nan,
            value if value.is_infinite() => Self::Between { want: value, low: value, high: value },
            value => Self::Between { want: value, low: value - error, high: value + error },
        }
    }

    /// Returns the range of an element of the intermediate, from the sums with their biases. `gate` is ignored if the
    /// activation has no gate.
    pub fn activated(activation: Activation, gate: Option<Sum>, up: Sum) -> Self {
        match (activation.form(), gate) {
            (Form::Formula(formula), Some(gate)) => Self::gated(formula, gate, up),
            (Form::Curve(..), Some(gate)) => Self::curved(activation, gate, up),
            _ => Self::relu2(up),
        }
    }

    /// Returns the interval of a [curve](kernels_gpu::curve), the product of a function of gate and a function of up. Each
    /// function's error is its slope times the sum's error, plus the errors of a device's arithmetic.
    fn curved(activation: Activation, gate: Sum, up: Sum) -> Self {
        if gate.error == f64::INFINITY || up.error == f64::INFINITY {
            return Self::Anything;
        }
        let ends = gate.ends();
        let Factor { value, slope, share } = activation.gate_factor(gate.value, ends);
        let factor = activation.up_factor(up.value).value;
        if value.is_nan() || factor.is_nan() {
            return Self::Nan;
        }
        let error = if gate.value.is_infinite() {
            // The function's limit, with the roundings of its numbers.
            if value.is_infinite() { 0.0 } else { 2.0 * HALF_ULP * share * value.abs() }
        } else {
            let moved = slope * (gate.value - ends[0]).max(ends[1] - gate.value);
            let far = ends[0].abs().max(ends[1].abs());
            moved + 2.0 * HALF_ULP * share * (value.abs() + moved) + far * 2.0 * SMALLEST
        };
        let [low, high] = up.ends().map(|up| {
            let Factor { value, share, .. } = activation.up_factor(up);
            (value, if value.is_finite() { 2.0 * HALF_ULP * share * value.abs() } else { 0.0 })
        });
        Self::product((value, error), factor, [low.0 - low.1, high.0 + high.1])
    }

    /// `x·σ(p)·(clamp(up) + offset)` with `x = min(gate, limit)` and `p = slope·x + cubic·x³`.
    ///
    /// A device computes e⁻ᵖ and a reciprocal to about the last bit of an f32 (PTX ISA, `ex2.approx.ftz.f32` and
    /// `rcp.approx.ftz.f32`: 2⁻²² and 2⁻²³). With the additions and multiplications around them, the relative error of
    /// `x·σ(p)` is 5·2⁻²³. The error of p itself is up to `r·2⁻²³·|p|`: r is 1 for two roundings, of the slope and of a
    /// product, and 3 for the six roundings with x³. The derivative of ln σ(p) is 1 − σ(p), so the error of p adds a
    /// relative error of at most r·2⁻²³·max(−p, 0.3). If 1 + e⁻ᵖ has no normal reciprocal, σ is 0.
    fn gated(formula: Gate, gate: Sum, up: Sum) -> Self {
        /// Maximum slope of x·σ(s·x), at s·x ≈ 2.4 for any s.
        const SILU_SLOPE: f64 = 1.0999;
        /// Maximum slope of gelu with tanh, at x ≈ 1.4.
        const GELU_SLOPE: f64 = 1.1291;
        let Gate { slope, cubic, limit, offset } = formula;
        if gate.error == f64::INFINITY || up.error == f64::INFINITY {
            return Self::Anything;
        }
        // Keeps NaN.
        let min = |x: f64| if x > limit { limit } else { x };
        let sigmoid_argument = |x: f64| slope * x + if cubic == 0.0 { 0.0 } else { cubic * x * x * x };
        let x = min(gate.value);
        let activated = x / (1.0 + (-sigmoid_argument(x)).exp());
        let factor = up.value.clamp(-limit, limit) + offset;
        if activated.is_nan() || factor.is_nan() {
            return Self::Nan;
        }
        let [lowest, highest] = gate.ends().map(min);
        let (roundings, steepest) = if cubic == 0.0 { (1.0, SILU_SLOPE) } else { (3.0, GELU_SLOPE) };
        let error = if activated.is_infinite() {
            0.0
        } else {
            let moved = steepest * (x - lowest).max(highest - x);
            let share = (roundings * (-sigmoid_argument(lowest)).max(0.3) + 5.0) * 2.0 * HALF_ULP;
            let far = lowest.abs().max(highest.abs());
            // If both |p| and the relative error are large, x·σ(p) is far below the smallest number.
            let share = share.min(1.0);
            moved + share * (activated.abs() + moved) + far * 2.0 * SMALLEST
        };
        let ups = up.ends().map(|up| {
            let factor = up.clamp(-limit, limit) + offset;
            // Adding an offset rounds. Without an offset nothing is rounded.
            let rounding = if offset == 0.0 { 0.0 } else { 2.0 * HALF_ULP * factor.abs() };
            (factor, if rounding.is_finite() { rounding } else { 0.0 })
        });
        Self::product((activated, error), factor, [ups[0].0 - ups[0].1, ups[1].0 + ups[1].1])
    }

    /// The product of a function of gate, which lies within `error` of `activated`, with a factor of up between the ends
    /// `ups`.
    fn product((activated, error): (f64, f64), factor: f64, ups: [f64; 2]) -> Self {
        let ends = [activated - error, activated + error].map(|activated| ups.map(|up| activated * up));
        let ends = ends.as_flattened();
        let want = activated * factor;
        if want.is_nan() && ends.iter().all(|end| end.is_nan()) {
            return Self::Nan;
        }
        if want.is_nan() || ends.iter().any(|end| end.is_nan()) {
            return Self::Anything;
        }
        let (low, high) = ends.iter().fold((want, want), |(low, high), &end| (low.min(end), high.max(end)));
        if low == f64::NEG_INFINITY && high == f64::INFINITY {
            return Self::Anything;
        }
        // Roundings of two multiplications.
        let more = |end: f64| if end.is_infinite() { 0.0 } else { 4.0 * HALF_ULP * end.abs() + SMALLEST };
        Self::Between { want, low: low - more(low), high: high + more(high) }
    }

    /// `max(up, 0)²` with the rounding of one multiplication. The result is 0 if `up` is certainly negative.
    fn relu2(up: Sum) -> Self {
        if up.error == f64::INFINITY {
            return Self::Anything;
        }
        if up.value.is_nan() {
            return Self::Nan;
        }
        let square = |x: f64| x.max(0.0) * x.max(0.0);
        let [low, high] = up.ends().map(square);
        let more = |end: f64| if end == 0.0 || end.is_infinite() { 0.0 } else { 2.0 * HALF_ULP * end + SMALLEST };
        Self::Between { want: square(up.value), low: (low - more(low)).max(0.0), high: high + more(high) }
    }

    /// Returns the range of an element of a down projection.
    pub fn plain(sum: Sum) -> Self {
        Self::around(sum.value, sum.error)
    }

    /// Whether `got` is right for an element of type `dtype`.
    pub fn accepts(self, dtype: TokenDtype, got: f64) -> bool {
        let rounded = |x: f64| dtype.decode(dtype.round(x));
        match self {
            // The interval is one number, so the bits must match, including the sign of zero.
            Self::Between { low, high, .. } if low == high => got.to_bits() == rounded(low).to_bits(),
            Self::Between { low, high, .. } => rounded(low) <= got && got <= rounded(high),
            Self::Nan => got.is_nan(),
            Self::Anything => true,
        }
    }

    /// The reference. NaN if the reference is NaN or there is no bound.
    pub fn want(self) -> f64 {
        match self {
            Self::Between { want, .. } => want,
            Self::Nan | Self::Anything => f64::NAN,
        }
    }
}

/// A token or a row of weights, decoded for multiplication.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    /// Exact numbers. Weights are without their global scale.
    Bits16(Vec<f64>),
    /// Exact numbers of an NVFP4 token, and its global scale.
    Nvfp4(Vec<f64>, f32),
    /// Factors of [`fp8::sum`], and the scale of a token. The scale of weights is 1.
    Fp8(Factors, f32),
}

impl Operand {
    /// Decodes a token. In NVFP4, the token is quantized with the input scale or, without one, with its own global
    /// scale.
    pub fn token(format: TokenFormat, dtype: TokenDtype, bits: &[u16], input_scale: Option<f32>) -> Self {
        match format {
            TokenFormat::Bits16 => {
                let mut numbers = vec![0.0; bits.len()];
                decode_token(dtype, bits, &mut numbers);
                Self::Bits16(numbers)
            }
            TokenFormat::Fp8 => {
                let mut codes = vec![0; bits.len()];
                let scale = quantize_token(dtype, bits, &mut codes);
                Self::Fp8(Factors::new(&codes), scale)
            }
            TokenFormat::Nvfp4 => {
                let (mut codes, mut scales) = (vec![0; bits.len()], vec![0; bits.len() / BLOCK]);
                let global = fp4::quantize_token(dtype, bits, input_scale, &mut codes, &mut scales);
                Self::nvfp4(&codes, &scales, global)
            }
        }
    }

    /// Makes an NVFP4 token from e2m1 codes (one per byte), block scales and a global scale.
    pub fn nvfp4(codes: &[u8], scales: &[u8], global: f32) -> Self {
        let blocks = codes.as_chunks::<BLOCK>().0.iter().zip(scales);
        let number = |scale: u8| move |&code: &u8| f64::from(e2m1::decode(code)) * f64::from(e4m3::decode(scale));
        Self::Nvfp4(blocks.flat_map(|(codes, &scale)| codes.iter().map(number(scale))).collect(), global)
    }

    /// Decodes a row of weights.
    pub fn weights(format: TokenFormat, matrix: &Matrix<'_>, row: usize) -> Self {
        match format {
            TokenFormat::Bits16 | TokenFormat::Nvfp4 => {
                let mut numbers = vec![0.0; matrix.k()];
                decode_weights(matrix, row, &mut Vec::new(), &mut numbers);
                Self::Bits16(numbers)
            }
            TokenFormat::Fp8 => {
                let mut codes = vec![0; matrix.k()];
                folded_row(matrix, row, &mut codes);
                Self::Fp8(Factors::new(&codes), 1.0)
            }
        }
    }
}

/// Returns one element of a projection: the dot product of a token with a row of weights, times the global scale of the
/// weights, plus the bias.
///
/// # Panics
/// If the token and the weights have different formats.
pub fn projected(token: &Operand, weights: &Operand, global: f32, bias: Option<f32>) -> Sum {
    match (token, weights) {
        (Operand::Bits16(token), Operand::Bits16(weights)) => {
            let sum = product(token, weights, global);
            bias.map_or(sum, |bias| sum.biased(bias))
        }
        (Operand::Nvfp4(token, scale), Operand::Bits16(weights)) => {
            let factor = scale * global;
            if scale.is_finite() && factor.is_infinite() {
                return Sum { value: f64::INFINITY, error: f64::INFINITY };
            }
            let sum = product(token, weights, factor);
            bias.map_or(sum, |bias| sum.biased(bias))
        }
        (Operand::Fp8(token, scale), Operand::Fp8(weights, _)) => {
            Sum { value: fp8::scaled(fp8::sum(token, weights), *scale, global, bias).into(), error: 0.0 }
        }
        _ => panic!("the token and the weights have different formats"),
    }
}

/// Decodes the numbers of a token, exactly.
pub fn decode_token(dtype: TokenDtype, bits: &[u16], out: &mut [f64]) {
    assert_eq!(bits.len(), out.len(), "one number per element");
    out.iter_mut().zip(bits).for_each(|(out, &bits)| *out = dtype.decode(bits));
}

/// Returns a token times a weight of the router. The product is rounded to f32, then to the token type.
pub fn weighted_token(dtype: TokenDtype, bits: &[u16], weight: f32) -> Vec<u16> {
    bits.iter().map(|&bits| dtype.round_f32(dtype.decode(bits) as f32 * weight)).collect()
}

/// Decodes the numbers of a row of weights without the global scale, exactly.
pub fn decode_weights(matrix: &Matrix<'_>, row: usize, scratch: &mut Vec<i32>, out: &mut [f64]) {
    const UNIT: f64 = 1.0 / (1u64 << FIXED_POINT_BITS) as f64;
    scratch.resize(out.len(), 0);
    matrix.fixed_point_row(row, scratch);
    out.iter_mut().zip(scratch).for_each(|(out, &mut number)| *out = f64::from(number) * UNIT);
}

/// Returns the dot product of a token with a row of weights, times the global scale of the weights.
pub fn product(token: &[f64], weights: &[f64], global: f32) -> Sum {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: AVX-512 F was detected on the line above.
            return unsafe { sum_avx512(token, weights) }.scaled(global);
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: AVX2 was detected on the line above.
            return unsafe { sum_avx2(token, weights) }.scaled(global);
        }
    }
    sum(token, weights).scaled(global)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn sum_avx512(token: &[f64], weights: &[f64]) -> Sum {
    sum(token, weights)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2(token: &[f64], weights: &[f64]) -> Sum {
    sum(token, weights)
}

/// Returns the dot product without the global scale. The bits are the same on every instruction set, since no
/// operations are fused.
#[inline(always)]
fn sum(token: &[f64], weights: &[f64]) -> Sum {
    /// If the sum of magnitudes is below this, a device's f32 sums stay finite. Weights are without their global scale.
    const MOST: f64 = f32::MAX as f64 / 2.0;
    let (mut value, mut magnitude, mut error) = (0.0f64, 0.0, 0.0);
    for (token, weights) in token.chunks(WINDOW).zip(weights.chunks(WINDOW)) {
        let [window, absolute] = window(token, weights);
        error += (token.len() / STEP) as f64 * (value.abs() + absolute);
        value += window;
        magnitude += absolute;
    }
    if !value.is_finite() {
        // The infinity or NaN comes from the token. A device has it too, unless finite products overflow.
        let magnitude = finite_magnitude(token, weights);
        return Sum { value, error: if magnitude < MOST { 0.0 } else { f64::INFINITY } };
    }
    if magnitude >= MOST {
        return Sum { value, error: f64::INFINITY };
    }
    let steps = token.len().div_ceil(STEP) as f64;
    // The errors of the accumulator and of the reference are far below a hundredth of this.
    Sum { value, error: 1.01 * STEP_LOSS * error + steps * 32.0 * SMALLEST }
}

/// Returns the sum of a window's products, and the sum of their magnitudes.
#[inline(always)]
fn window(token: &[f64], weights: &[f64]) -> [f64; 2] {
    const LANES: usize = STEP;
    let (token, weights) = (token.as_chunks::<LANES>().0, weights.as_chunks::<LANES>().0);
    let (mut sums, mut magnitudes) = ([0.0; LANES], [0.0; LANES]);
    for (token, weights) in token.iter().zip(weights) {
        for lane in 0..LANES {
            let product = token[lane] * weights[lane];
            sums[lane] += product;
            magnitudes[lane] += product.abs();
        }
    }
    [sums, magnitudes].map(|mut lanes| {
        for half in [8, 4, 2, 1] {
            for lane in 0..half {
                lanes[lane] += lanes[lane + half];
            }
        }
        lanes[0]
    })
}

/// Sum of the magnitudes of all finite products.
#[cold]
fn finite_magnitude(token: &[f64], weights: &[f64]) -> f64 {
    token.iter().zip(weights).map(|(x, w)| (x * w).abs()).filter(|product| product.is_finite()).sum()
}

#[cfg(test)]
mod tests {
    use num_bigint::BigInt;
    use proptest::prelude::*;

    use super::*;
    use crate::format::e4m3;

    /// Returns x in units of 2⁻²⁰⁰. This is an integer for the elements of 16-bit tokens, for weights and for products
    /// of both.
    fn integer(x: f64) -> BigInt {
        let bits = x.to_bits();
        let (exponent, fraction) = ((bits >> 52 & 0x7FF) as i32, bits & ((1 << 52) - 1));
        let (significand, exponent) =
            if exponent == 0 { (fraction, -1074) } else { (fraction | 1 << 52, exponent - 1075) };
        let magnitude = if significand == 0 {
            BigInt::ZERO
        } else {
            let zeros = significand.trailing_zeros();
            let shift = exponent + zeros as i32 + 200;
            BigInt::from(significand >> zeros) << usize::try_from(shift).expect("a multiple of 2⁻²⁰⁰")
        };
        if x < 0.0 { -magnitude } else { magnitude }
    }

    /// Returns a strategy for the bits of `k` finite numbers. Exponents are from the whole range or from its middle.
    fn tokens(dtype: TokenDtype, k: usize) -> impl Strategy<Value = Vec<u16>> {
        let (exponent, bias) = match dtype {
            TokenDtype::F16 => (0x7C00, 0x3000),
            TokenDtype::Bf16 => (0x7F80, 0x3800),
        };
        (any::<bool>(), prop::collection::vec(any::<u16>(), k)).prop_map(move |(all, bits)| {
            bits.into_iter()
                .map(|bits| if all { bits } else { bits & 0x87FF | bias })
                .map(|bits| if bits & exponent == exponent { bits ^ 0x4000 } else { bits })
                .collect()
        })
    }

    fn weights(k: usize) -> impl Strategy<Value = Matrix<'static>> {
        let scales = prop::collection::vec(0..=e4m3::MAX_CODE, k / BLOCK);
        (prop::collection::vec(any::<u8>(), k / 2), scales)
            .prop_map(move |(values, scales)| Matrix::new(1, k, values, scales, 1.0).unwrap())
    }

    fn cases() -> impl Strategy<Value = (TokenDtype, Vec<u16>, Matrix<'static>)> {
        (prop_oneof![Just(TokenDtype::F16), Just(TokenDtype::Bf16)], 1usize..40)
            .prop_flat_map(|(dtype, blocks)| (Just(dtype), tokens(dtype, blocks * BLOCK), weights(blocks * BLOCK)))
    }

    fn decoded(dtype: TokenDtype, bits: &[u16], matrix: &Matrix<'_>) -> (Vec<f64>, Vec<f64>) {
        let (mut token, mut weights) = (vec![0.0; bits.len()], vec![0.0; bits.len()]);
        decode_token(dtype, bits, &mut token);
        decode_weights(matrix, 0, &mut Vec::new(), &mut weights);
        (token, weights)
    }

    /// One step of Hopper's tensor core: addends are aligned to the largest and truncated, and their sum is truncated.
    fn hopper_step(sum: f32, products: &[f64]) -> f32 {
        let addends = || products.iter().copied().chain([f64::from(sum)]);
        let largest = addends().fold(0.0, |largest: f64, addend| largest.max(addend.abs()));
        if largest == 0.0 {
            return 0.0;
        }
        let unit = (largest.log2().floor() - 25.0).exp2();
        let exact: f64 = addends().map(|addend| (addend / unit).trunc()).sum::<f64>() * unit;
        let nearest = exact as f32;
        if f64::from(nearest).abs() > exact.abs() { f32::from_bits(nearest.to_bits() - 1) } else { nearest }
    }

    /// Sum of a tensor core that adds the columns of each window in another order.
    fn hopper_sum(token: &[f64], weights: &[f64], stride: usize) -> f64 {
        let windows = token.chunks(WINDOW).zip(weights.chunks(WINDOW));
        f64::from(windows.fold(0.0, |sum, (token, weights)| {
            let order = (0..stride).flat_map(|first| (first..token.len()).step_by(stride));
            let products: Vec<f64> = order.map(|at| token[at] * weights[at]).collect();
            products.chunks(STEP).fold(sum, hopper_step)
        }))
    }

    /// Sum of a device that adds sixteen f32 sums per window.
    fn sum_of_lanes(token: &[f64], weights: &[f64]) -> f64 {
        let windows = token.chunks(WINDOW).zip(weights.chunks(WINDOW));
        f64::from(windows.fold(0f32, |sum, (token, weights)| {
            let mut lanes = [0f32; 16];
            for (at, (x, w)) in token.iter().zip(weights).enumerate() {
                lanes[at % 16] += (x * w) as f32;
            }
            sum + lanes.iter().sum::<f32>()
        }))
    }

    proptest! {
        #[test]
        fn sums_are_within_the_bound_of_big_integers((dtype, bits, matrix) in cases()) {
            let (token, weights) = decoded(dtype, &bits, &matrix);
            let products = token.iter().zip(&weights).map(|(&x, &w)| integer(x) * integer(w));
            let (exact, magnitude) = products.fold((BigInt::ZERO, BigInt::ZERO), |(sum, magnitude), product| {
                (sum + &product, magnitude + BigInt::from(product.magnitude().clone()))
            });
            let Sum { value, .. } = sum(&token, &weights);
            let off = (integer(value) << 200usize) - exact;
            let roundings = 12 + token.len().div_ceil(WINDOW);
            prop_assert!(BigInt::from(off.magnitude().clone()) << 53usize <= magnitude * roundings);
        }

        #[test]
        fn sums_of_devices_are_within_the_error((dtype, bits, matrix) in cases(), stride in 1usize..64) {
            let (token, weights) = decoded(dtype, &bits, &matrix);
            let sum = sum(&token, &weights);
            for got in [hopper_sum(&token, &weights, stride), sum_of_lanes(&token, &weights)] {
                let is_bounded = sum.error.is_finite();
                prop_assert!(!is_bounded || (got - sum.value).abs() <= sum.error, "{got} {sum:?}");
            }
        }

        #[test]
        fn instruction_sets_give_the_same_bits((dtype, bits, matrix) in cases()) {
            let (token, weights) = decoded(dtype, &bits, &matrix);
            prop_assert_eq!(product(&token, &weights, 1.0), sum(&token, &weights).scaled(1.0));
        }

        #[test]
        fn an_f32_epilogue_is_within_the_interval(
            gate in -100f64..100.0, up in -1e4f64..1e4, off in prop::array::uniform2(-1f64..1.0), bias in -9f32..9.0,
            bf16 in any::<bool>(), activation in prop::sample::select(&ACTIVATIONS[..]), small in any::<bool>(),
        ) {
            let dtype = if bf16 { TokenDtype::Bf16 } else { TokenDtype::F16 };
            // Half of the cases are near the limits.
            let (gate, up) = if small { (gate / 10.0, up / 1e3) } else { (gate, up) };
            let [gate, up] = [gate, up].map(|value| Sum { value, error: 1e-5 * value.abs() });
            let [x, u] = [(gate, off[0]), (up, off[1])].map(|(sum, off)| (sum.value + off * sum.error) as f32 + bias);
            let expected = Expected::activated(activation, Some(gate.biased(bias)), up.biased(bias));
            let got = dtype.round_f32(in_f32(activation, x, u));
            prop_assert!(expected.accepts(dtype, dtype.decode(got)), "{activation} {expected:?} {x} {u}");
        }

        #[test]
        fn the_reference_matches_the_definition(
            gate in -30f64..30.0, up in -30f64..30.0, activation in prop::sample::select(&ACTIVATIONS[..]),
        ) {
            let exact = |value: f64| Sum { value, error: 0.0 };
            let got = Expected::activated(activation, Some(exact(gate)), exact(up)).want();
            let want = activation.apply(gate, up);
            prop_assert!((got - want).abs() <= 1e-13 * (want.abs() + gate.abs() * up.abs()),
                "{activation} {got} {want}"
                );
        }

        #[test]
        fn intervals_are_narrow_and_exclude_other_activations(
            gate in -6f64..6.0, up in -6f64..6.0, one in 0..ACTIVATIONS.len(), other in 0..ACTIVATIONS.len(),
        ) {
            let exact = |value: f64| Sum { value, error: 0.0 };
            let expected = |index: usize| Expected::activated(ACTIVATIONS[index], Some(exact(gate)), exact(up));
            let got = ACTIVATIONS[other].apply(gate, up);
            let want = ACTIVATIONS[one].apply(gate, up);
            let Expected::Between { low, high, .. } = expected(one) else { panic!("finite numbers") };
            prop_assert!(high - low <= 3e-5 * want.abs() + 1e-12 * gate.abs() + 1e-30, "{low} {high}");
            let is_far = (got - want).abs() > 1e-4 * (1.0 + want.abs());
            prop_assert!(!is_far || !(low..=high).contains(&got));
        }
    }

    /// All activations, and some with other limits and slopes.
    const ACTIVATIONS: [Activation; 14] = [
        Activation::SwigluOai { alpha: 1.702, limit: 7.0, offset: 0.5 },
        Activation::SwigluStep { limit: 2.5 },
        Activation::SwigluStep { limit: 7.0 },
        Activation::Gelu,
        Activation::Situ { beta: 2.5, linear: None },
        Activation::Situ { beta: 2.5, linear: Some(3.5) },
        Activation::GatedRelu2,
        Activation::Silu,
        Activation::SiluLimit { limit: 2.5 },
        Activation::GeluTanh,
        Activation::GPT_OSS,
        Activation::GptOss { alpha: 1.7, limit: 7.0 },
        Activation::GptOss { alpha: 1.702, limit: 6.5 },
        Activation::Relu2,
    ];

    /// Computes an activation like the f32 instructions of a device.
    fn in_f32(activation: Activation, gate: f32, up: f32) -> f32 {
        let Gate { slope, cubic, limit, offset } = match activation.form() {
            Form::Formula(gate) => gate,
            Form::Curve(curve, numbers) => return curve.apply(numbers, gate, up),
            Form::Square => return up.max(0.0) * up.max(0.0),
        };
        let exponent = [slope, cubic].map(|factor| (-std::f64::consts::LOG2_E * factor) as f32);
        let (x, u) = (gate.min(limit as f32), up.clamp(-limit as f32, limit as f32));
        let exponent = x * exponent[1].mul_add((x * x).min(f32::MAX), exponent[0]);
        x * (1.0 / (1.0 + exponent.exp2())) * (u + offset as f32)
    }

    #[test]
    fn the_slope_bounds_hold_and_are_tight() {
        for (activation, steepest) in [
            (Activation::Silu, 1.0999),
            (Activation::GptOss { alpha: 3.0, limit: 1e6 }, 1.0999),
            (Activation::GeluTanh, 1.1291),
            (Activation::Gelu, 1.1291),
            (Activation::Situ { beta: 1e6, linear: None }, 1.0999),
        ] {
            let up = if matches!(activation, Activation::GptOss { .. }) { 0.0 } else { 1.0 };
            let at = |x: f64| activation.apply(x, up);
            let slopes = (-80_000..80_000).map(|i| f64::from(i) * 1e-4).map(|x| (at(x + 1e-4) - at(x)) / 1e-4);
            let most = slopes.fold(0.0, |most: f64, slope| most.max(slope.abs()));
            assert!(most <= steepest && most > steepest - 1e-3, "{activation}: {most}");
        }
    }

    fn one(x: f64, k: usize) -> Vec<f64> {
        let mut token = vec![0.0; k];
        token[k - 1] = x;
        token
    }

    #[test]
    fn infinities_and_nan_follow_ieee() {
        let product = |token: &[f64], weight: f64| product(token, &vec![weight; token.len()], 1.0);
        assert_eq!(product(&one(f64::INFINITY, 160), 2.0), Sum { value: f64::INFINITY, error: 0.0 });
        assert_eq!(product(&one(f64::INFINITY, 160), -2.0).value, f64::NEG_INFINITY);
        assert!(product(&one(f64::INFINITY, 160), 0.0).value.is_nan());
        let mut both = one(f64::INFINITY, 160);
        both[0] = f64::NEG_INFINITY;
        assert!(product(&both, 1.0).value.is_nan());
        assert!(product(&one(f64::NAN, 16), 1.0).value.is_nan());
        // The products are finite, but their sum overflows f32.
        assert_eq!(product(&one(3e38, 16), 2.0).error, f64::INFINITY);
        both[0] = 3e38;
        assert_eq!(product(&both, 2.0).error, f64::INFINITY);
    }

    #[test]
    fn infinities_and_nan_have_their_expected_results() {
        let sum = |value: f64| Sum { value, error: if value.is_finite() { 0.5 } else { 0.0 } };
        let gated = |gate: f64, up: f64| Expected::activated(Activation::Silu, Some(sum(gate)), sum(up));
        let infinite = |want: f64| Expected::Between { want, low: want, high: want };
        assert_eq!(gated(f64::INFINITY, 3.0), infinite(f64::INFINITY));
        assert_eq!(gated(f64::INFINITY, -3.0), infinite(f64::NEG_INFINITY));
        assert_eq!(gated(2.0, f64::NEG_INFINITY), infinite(f64::NEG_INFINITY));
        // The sign of the factor is unknown.
        assert_eq!(gated(f64::INFINITY, 0.1), Expected::Anything);
        assert_eq!(gated(f64::NEG_INFINITY, 3.0), Expected::Nan);
        assert_eq!(gated(f64::NAN, 3.0), Expected::Nan);
        // Limits clamp infinities, but keep NaN.
        let gpt_oss = |gate: f64, up: f64| Expected::activated(Activation::GPT_OSS, Some(sum(gate)), sum(up));
        assert_eq!(gpt_oss(f64::INFINITY, f64::NEG_INFINITY), gpt_oss(1e6, -1e6));
        assert!((gpt_oss(f64::INFINITY, f64::INFINITY).want() - 56.0).abs() < 1e-3);
        assert_eq!(
            [gpt_oss(f64::NAN, 1.0), gpt_oss(1.0, f64::NAN), gpt_oss(f64::NEG_INFINITY, 1.0)],
            [Expected::Nan; 3]
        );
        let relu2 = |up: f64| Expected::activated(Activation::Relu2, None, sum(up));
        assert_eq!([relu2(f64::NEG_INFINITY), relu2(-3.0)], [infinite(0.0); 2]);
        assert_eq!([relu2(f64::INFINITY), relu2(f64::NAN)], [infinite(f64::INFINITY), Expected::Nan]);
        // A bias is added to a finite number. An infinity stays infinite.
        assert_eq!(sum(f64::INFINITY).biased(-1e30), sum(f64::INFINITY));
        assert_eq!(sum(f64::from(f32::MAX)).biased(1e32).error, f64::INFINITY);
        assert_eq!(Expected::plain(sum(f64::NAN)), Expected::Nan);
        assert_eq!(Expected::plain(Sum { value: 1.0, error: f64::INFINITY }), Expected::Anything);
        assert_eq!(Expected::plain(sum(f64::INFINITY)), infinite(f64::INFINITY));
    }

    #[test]
    fn numbers_between_the_rounded_ends_are_accepted() {
        let expected = Expected::plain(Sum { value: 1.0, error: 0.001 });
        let accepts = |got: f64| expected.accepts(TokenDtype::Bf16, got);
        // The next bf16 below 1 is 2⁻⁸ away, the next above is 2⁻⁷ away. Both 0.999 and 1.001 round to 1.
        assert!(accepts(1.0) && !accepts(1.0 + 1.0 / 128.0) && !accepts(1.0 - 1.0 / 256.0) && !accepts(f64::NAN));
        let edge = Expected::plain(Sum { value: 65519.0, error: 2.0 });
        assert!(edge.accepts(TokenDtype::F16, 65504.0) && edge.accepts(TokenDtype::F16, f64::INFINITY));
        assert!(!edge.accepts(TokenDtype::F16, 65472.0) && !edge.accepts(TokenDtype::F16, f64::NEG_INFINITY));
        assert!(!Expected::Nan.accepts(TokenDtype::F16, 1.0) && Expected::Nan.accepts(TokenDtype::F16, f64::NAN));
    }

    #[test]
    fn missing_product_exceeds_the_error_bound() {
        const K: usize = 7168;
        // The signs of products alternate, so the accumulator stays small.
        let token: Vec<f64> = (0..K).map(|k| if k % 2 == 0 { 1.0 } else { -1.0 }).collect();
        let Sum { error, .. } = product(&token, &[1.5; K], 1.0);
        assert!(error < 1.5 / 5.0, "{error}");
    }

    #[test]
    fn weighted_tokens_round_to_f32_then_to_their_type() {
        let out = weighted_token(TokenDtype::Bf16, &[0x3F81, 0x4000], 1.005);
        // 1.0078125 · 1.005 = 1.0128515625 lies between 1.0078125 and 1.015625, closer to 1.015625.
        assert_eq!(out, [1.015625, 2.015625].map(|number| TokenDtype::Bf16.round(number)));
    }
}
