//! How tensor cores add products, to the bit.
//!
//! PTX leaves the order and the rounding of these sums unspecified (PTX ISA 9.7.14.5.14, 9.7.15.5.2). Tensor cores of
//! one family all add in this way:
//!
//! 1. A product is exact. Its exponent is the sum of its factors' exponents. A subnormal factor has the exponent of its
//!    format's smallest normal number. The accumulator has its own exponent. A zero has no exponent.
//! 2. The addends of a step are the accumulator and a number of products. Each addend is cut, toward zero, to
//!    [`Adder::kept`] bits behind the largest of their exponents, or behind -133 if that is larger.
//! 3. The addends are added exactly. An f32 result is cut toward zero to [`Adder::result_bits`] bits behind its leading
//!    bit. An f16 result is rounded to nearest even. The result is the accumulator of the next step.
//!
//! An infinity or a NaN makes the result what IEEE 754 says, with the canonical NaN. A sum that is zero is +0.
//!
//! With block scales, the scales' exponents count too. In the 4-bit kinds, an addend is the exact sum of 16 products
//! times both scales, and its exponent is the sum of the scales' exponents.

use super::descriptor::Element;

/// Bits of an f32 behind its leading bit.
const F32_BITS: i32 = 23;

/// Smallest exponent behind which addends are cut, although products of bf16 and tf32 can have smaller exponents. Found
/// on an H200: of the exponents from -140 to -123, only this one gives the bits of 266 sums of tiny products
/// (`benches/probes/sums.cu`).
const LEAST_LARGEST: i32 = -133;

/// Family of GPUs whose tensor cores add in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Compute capability 8.0 to 8.7.
    Ampere,
    /// 8.9.
    Ada,
    /// 9.0.
    Hopper,
    /// 10.x and 11.x.
    Blackwell,
    /// 12.x.
    RtxBlackwell,
}

impl Family {
    /// The family that a target such as `sm_90a` is compiled for.
    pub fn of_target(target: &str) -> Self {
        let digits: String = target.chars().filter(char::is_ascii_digit).collect();
        match digits.parse().unwrap_or(0) {
            120.. => Family::RtxBlackwell,
            100.. => Family::Blackwell,
            90.. => Family::Hopper,
            89 => Family::Ada,
            _ => Family::Ampere,
        }
    }
}

/// Instruction of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instruction {
    /// `mma.sync` and `wmma`.
    Mma,
    /// `mma.sync` with block scales.
    ScaledMma,
    /// `wgmma`.
    Wgmma,
    /// `tcgen05.mma`.
    Tcgen05,
}

/// Type of the elements, as far as sums depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// f16 and bf16.
    Half,
    /// tf32.
    Tf32,
    /// Types of 8, 6 and 4 bits that the tensor core expands to one container.
    Eight,
    /// e2m1 with a scale for every 16 or 32 elements.
    Four,
}

/// Products that are added at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// All products of the instruction.
    Whole,
    /// This number of adjacent products. An instruction with more elements along K takes several steps.
    Products(usize),
    /// Half of the products, of elements converted to f16: first the products of elements 0 and 1 of every four along
    /// K, then the others. The accumulator is added behind both, rounded to nearest.
    Pairs,
}

/// Parameters of a kind of product on a family of GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adder {
    /// Bits of an addend that are kept behind the largest exponent.
    pub kept: i32,
    /// Products that are added at once.
    pub step: Step,
    /// Bits of an f32 result behind its leading bit.
    pub result_bits: i32,
    /// Number of adjacent products that are summed exactly into one addend: 1, or more for 4-bit kinds.
    pub block: usize,
}

/// A row of the table.
type Row = (Family, Instruction, Kind, Adder);

const fn adder(kept: i32, step: Step) -> Adder {
    Adder { kept, step, result_bits: F32_BITS, block: 1 }
}

/// Adder of 8-bit products on Ada and Hopper, whose f32 results have 13 bits.
const fn short(step: Step) -> Adder {
    Adder { kept: 13, step, result_bits: 13, block: 1 }
}

/// Adder of the 4-bit kinds, whose blocks of 16 products are added exactly.
const fn blocks(kept: i32) -> Adder {
    Adder { kept, step: Step::Whole, result_bits: F32_BITS, block: 16 }
}

/// Sources: \[sim\] is MMA-Sim (arXiv 2511.10909, `mmasim/simulator/nv_ptx.py` of microsoft/MMA-Sim), whose authors
/// compared it with GPUs. \[sass\] is the machine code of ptxas 13.5, which shows the steps. \[h200\] are results of an
/// H200.
#[rustfmt::skip]
const TABLE: [Row; 23] = {
    use {Family::*, Instruction::*, Kind::*, Step::*};
    [
        (Ampere,       Mma,       Half,  adder(24, Products(8))),  // [sim]
        (Ampere,       Mma,       Tf32,  adder(24, Products(4))),  // [sim]
        (Ada,          Mma,       Half,  adder(24, Products(8))),  // [sim]
        (Ada,          Mma,       Tf32,  adder(24, Products(4))),  // [sim]
        (Ada,          Mma,       Eight, short(Products(16))),     // [sim]
        (Hopper,       Mma,       Half,  adder(25, Whole)),        // [sim] [h200]
        (Hopper,       Mma,       Tf32,  adder(25, Whole)),        // [sim]
        (Hopper,       Mma,       Eight, adder(25, Pairs)),        // [sass]: two HMMA of f16, then FADD
        (Hopper,       Wgmma,     Half,  adder(25, Whole)),        // [sim]
        (Hopper,       Wgmma,     Tf32,  adder(25, Whole)),        // [sim]
        (Hopper,       Wgmma,     Eight, short(Whole)),            // [sim] [h200]
        (Blackwell,    Mma,       Half,  adder(25, Whole)),        // [sim]
        (Blackwell,    Mma,       Tf32,  adder(25, Whole)),        // [sim]
        (Blackwell,    Mma,       Eight, adder(25, Pairs)),        // [sass]: two HMMA of f16, then FADD
        (Blackwell,    Tcgen05,   Half,  adder(25, Whole)),        // [sim]
        (Blackwell,    Tcgen05,   Tf32,  adder(25, Whole)),        // [sim]
        (Blackwell,    Tcgen05,   Eight, adder(25, Whole)),        // [sim]: f8f6f4 and mxf8f6f4
        (Blackwell,    Tcgen05,   Four,  blocks(35)),              // [sim]: mxf4 and mxf4nvf4
        (RtxBlackwell, Mma,       Half,  adder(25, Whole)),        // [sim]
        (RtxBlackwell, Mma,       Tf32,  adder(25, Whole)),        // [sim]
        (RtxBlackwell, Mma,       Eight, adder(25, Whole)),        // [sim]
        (RtxBlackwell, ScaledMma, Eight, adder(25, Whole)),        // [sim]: mxf8f6f4
        (RtxBlackwell, ScaledMma, Four,  blocks(35)),              // [sim]: mxf4 and mxf4nvf4
    ]
};

impl Kind {
    /// Kind of a product whose A has elements of this type, without block scales.
    pub const fn of(a: Element) -> Self {
        match a {
            Element::F16 | Element::Bf16 => Kind::Half,
            Element::Tf32 => Kind::Tf32,
            _ => Kind::Eight,
        }
    }
}

impl Adder {
    /// Largest [`Adder::kept`] of products that are added one by one.
    pub const MOST_KEPT: i32 = 25;

    /// Parameters of a kind of product. A product that the family does not have is added as on Blackwell.
    pub fn of(family: Family, instruction: Instruction, kind: Kind) -> Self {
        let row = TABLE.iter().find(|row| (row.0, row.1, row.2) == (family, instruction, kind));
        row.map_or(adder(25, Step::Whole), |row| row.3)
    }

    /// Parameters for a sparse A, which stores half of the elements along K.
    pub const fn sparse(self) -> Self {
        let step = match self.step {
            Step::Products(count) => Step::Products(2 * count),
            step => step,
        };
        Adder { step, block: if self.block > 1 { 2 * self.block } else { 1 }, ..self }
    }

    /// The order in which `k` elements along K are added.
    pub fn order(&self, k: usize) -> Vec<usize> {
        match self.step {
            Step::Pairs => (0..k).filter(|k| k & 2 == 0).chain((0..k).filter(|k| k & 2 != 0)).collect(),
            _ => (0..k).collect(),
        }
    }

    /// Number of products per step for `k` elements along K.
    pub const fn step_products(&self, k: usize) -> usize {
        match self.step {
            Step::Products(count) if count < k => count,
            Step::Pairs => k / 2,
            _ => k,
        }
    }

    /// Exponent of the smallest normal number of the format in which elements are multiplied. `own` is the
    /// same exponent of the elements' own format.
    pub const fn least_exponent(&self, own: i32) -> i32 {
        match self.step {
            Step::Pairs => SumFormat::F16.least_exponent(),
            _ => own,
        }
    }

    /// Adds the products of all steps to the accumulator `c`. `products` are in the order of the steps.
    pub fn add(&self, products: &[Addend], c: f64, format: SumFormat) -> f64 {
        let per_step = self.step_products(products.len()).max(1);
        let last = self.step == Step::Pairs;
        let first = if last { 0.0 } else { c };
        let sum = products.chunks(per_step).fold(first, |sum, step| self.add_step(step, sum, format));
        if last { format.nearest(c + sum) } else { sum }
    }

    /// Adds products and an accumulator at once.
    pub fn add_step(&self, products: &[Addend], c: f64, format: SumFormat) -> f64 {
        let addends = || products.iter().copied().chain([Addend { value: c, exponent: format.exponent(c) }]);
        if addends().any(|addend| !addend.value.is_finite()) {
            return addends().map(|addend| addend.value).sum();
        }
        let exponents = addends().filter(|addend| addend.value != 0.0).map(|addend| addend.exponent);
        let Some(largest) = exponents.max() else { return 0.0 };
        // Nothing is known about tiny sums of blocks.
        let largest = if self.block == 1 { largest.max(LEAST_LARGEST) } else { largest };
        let cut = |addend: Addend| times_power(addend.value, self.kept - largest).trunc();
        // The cut addends are integers below 2⁵³ in sum.
        let sum = addends().map(cut).fold(0.0, |sum, addend| sum + addend);
        self.round(times_power(sum, largest - self.kept), format)
    }

    /// Rounds an exact sum to the result's format.
    fn round(&self, sum: f64, format: SumFormat) -> f64 {
        match format {
            SumFormat::F32 => {
                let last_bit = format.exponent(sum) - self.result_bits;
                // A negative sum that becomes zero is +0.
                0.0 + f64::from(times_power(times_power(sum, -last_bit).trunc(), last_bit) as f32)
            }
            SumFormat::F16 => format.nearest(sum),
        }
    }

    /// Same as `round` for a sum that is zero or at least the smallest normal f32, in few operations.
    #[inline(always)]
    pub fn round_normal(&self, sum: f64, format: SumFormat) -> f32 {
        match format {
            SumFormat::F32 => {
                let dropped = (1u64 << (f64::MANTISSA_DIGITS as i32 - 1 - self.result_bits)) - 1;
                f64::from_bits(sum.to_bits() & !dropped) as f32
            }
            SumFormat::F16 => SumFormat::nearest_f16(sum),
        }
    }
}

/// A product or an accumulator.
#[derive(Clone, Copy, Debug)]
pub struct Addend {
    /// Exact value.
    pub value: f64,
    /// Sum of the factors' exponents.
    pub exponent: i32,
}

/// Format of the accumulator and the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumFormat {
    /// f32.
    F32,
    /// f16.
    F16,
}

impl SumFormat {
    /// Exponent of a finite number of the format.
    fn exponent(self, value: f64) -> i32 {
        exponent(value, self.least_exponent())
    }

    /// Rounds to the nearest number of the format, ties to even.
    fn nearest(self, value: f64) -> f64 {
        match self {
            SumFormat::F32 => f64::from(value as f32),
            SumFormat::F16 => f64::from(Self::nearest_f16(value)),
        }
    }

    /// Nearest f16, as an f32. A zero is +0.
    #[inline(always)]
    fn nearest_f16(value: f64) -> f32 {
        const SMALLEST: f64 = 1.0 / 16384.0;
        let power = f64::from_bits(value.to_bits() & 0x7ff << 52);
        let power = if power > SMALLEST { power } else { SMALLEST };
        // Next to this number, the last bit of an f64 is the last bit of the f16.
        let beside = power * (1.5 * (1u64 << (52 - 10)) as f64);
        let rounded = ((value + beside) - beside) as f32;
        let overflow = if value > 0.0 { f32::INFINITY } else { f32::NEG_INFINITY };
        if rounded.abs() < 65536.0 {
            rounded
        } else if value.is_nan() {
            f32::NAN
        } else {
            overflow
        }
    }

    /// Sum of two numbers of the format, rounded to nearest.
    #[inline(always)]
    pub fn add_nearest(self, a: f32, b: f32) -> f32 {
        match self {
            SumFormat::F32 => a + b,
            SumFormat::F16 => Self::nearest_f16(f64::from(a) + f64::from(b)),
        }
    }

    /// The power of two that a number's exponent stands for, or 0 for a zero. An infinity or NaN has infinity.
    #[inline(always)]
    pub fn power(self, value: f32) -> f32 {
        let least = f32::from_bits(((self.least_exponent() + 127) as u32) << F32_BITS);
        let power = f32::from_bits(value.to_bits() & 0x7f80_0000);
        let power = if power > least { power } else { least };
        if value == 0.0 { 0.0 } else { power }
    }

    /// Exponent of the smallest normal number.
    const fn least_exponent(self) -> i32 {
        match self {
            SumFormat::F32 => -126,
            SumFormat::F16 => -14,
        }
    }
}

/// Exponent of a number's leading bit, or `least` if that is larger.
pub fn exponent(value: f64, least: i32) -> i32 {
    // No format has numbers that are subnormal in f64.
    ((value.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(least)
}

/// `value`·2^`power`, which must be a normal number or zero.
pub fn times_power(value: f64, power: i32) -> f64 {
    // Two factors, because 2^`power` may be beyond the range of f64 where the result is not.
    let factor = |power: i32| f64::from_bits(((power + 1023) as u64) << 52);
    value * factor(power / 2) * factor(power - power / 2)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::hw::descriptor::ScaleType;
    use crate::hw::matmul::{Floats, Fours, Packing, Scales, multiply_f16, multiply_f32, multiply_fours};
    use crate::hw::number::{self, BF16, E2M1, E4M3, E5M2, F16, F32, Format, Specials, TF32};

    /// A second implementation, on integers. It is independent of the floating-point code above.
    mod by_integers {
        use super::*;

        /// ±`significand`·2^`last`. `exponent` is the exponent of the leading bit of a normal number.
        #[derive(Clone, Copy)]
        pub struct Number {
            pub negative: bool,
            pub significand: u128,
            pub last: i32,
            pub exponent: i32,
        }

        #[derive(Clone, Copy)]
        pub enum Value {
            Number(Number),
            Infinity { negative: bool },
            Nan,
        }

        pub fn decode(format: &Format, bits: u64) -> Value {
            let m = format.mantissa_bits;
            let (negative, field) =
                (bits & format.sign_bit() != 0, (bits >> m) as i32 & ((1 << format.exponent_bits) - 1));
            let mantissa = bits & ((1 << m) - 1);
            if format.is_nan(bits) {
                return Value::Nan;
            }
            if format.specials == Specials::Ieee && field == (1 << format.exponent_bits) - 1 {
                return Value::Infinity { negative };
            }
            let exponent = field.max(1) - format.bias();
            let significand = u128::from(if field > 0 { mantissa | 1 << m } else { mantissa });
            Value::Number(Number { negative, significand, last: exponent - m as i32, exponent })
        }

        pub fn times(a: Value, b: Value) -> Value {
            let is_zero = |x| matches!(x, Value::Number(Number { significand: 0, .. }));
            match (a, b) {
                (Value::Nan, _) | (_, Value::Nan) => Value::Nan,
                (Value::Number(x), Value::Number(y)) => Value::Number(Number {
                    negative: x.negative != y.negative,
                    significand: x.significand * y.significand,
                    last: x.last + y.last,
                    exponent: x.exponent + y.exponent,
                }),
                (a, b) if is_zero(a) || is_zero(b) => Value::Nan,
                (a, b) => Value::Infinity { negative: is_negative(a) != is_negative(b) },
            }
        }

        fn is_negative(x: Value) -> bool {
            matches!(x, Value::Number(Number { negative: true, .. }) | Value::Infinity { negative: true })
        }

        /// Sum of addends, in bits of an f32 with `result_bits` or of an f16.
        pub fn add(addends: &[Value], adder: &Adder, format: SumFormat) -> u32 {
            let (nan, infinity) = match format {
                SumFormat::F32 => (0x7fff_ffff, 0x7f80_0000),
                SumFormat::F16 => (0x7fff, 0x7c00),
            };
            let signed =
                |negative: bool, bits: u32| if negative { bits | (infinity & !(infinity >> 1)) << 1 } else { bits };
            let infinities =
                |negative| addends.iter().any(|x| matches!(x, Value::Infinity { negative: n } if *n == negative));
            if addends.iter().any(|x| matches!(x, Value::Nan)) || infinities(false) && infinities(true) {
                return nan;
            }
            if infinities(false) || infinities(true) {
                return signed(infinities(true), infinity);
            }
            let numbers = addends.iter().filter_map(|x| match x {
                Value::Number(x) if x.significand != 0 => Some(*x),
                _ => None,
            });
            let Some(largest) = numbers.clone().map(|x| x.exponent).max() else { return 0 };
            let largest = if adder.block == 1 { largest.max(LEAST_LARGEST) } else { largest };
            let unit = largest - adder.kept;
            let cut = |x: Number| {
                let shift = x.last - unit;
                let size = if shift >= 0 { x.significand << shift } else { x.significand >> (-shift).min(127) } as i128;
                if x.negative { -size } else { size }
            };
            let sum: i128 = numbers.map(cut).sum();
            if sum == 0 {
                return 0;
            }
            let size = sum.unsigned_abs();
            let leading = unit + size.ilog2() as i32;
            let (mantissa_bits, least) = if format == SumFormat::F32 { (23, -126) } else { (10, -14) };
            // Integer multiple of the last bit that the result keeps.
            let keep = if format == SumFormat::F32 { adder.result_bits } else { 10 };
            let last = leading.max(least) - keep;
            // A sum is smaller than 2¹²⁶, so a shift by 127 leaves no bit of it.
            let shift = (last - unit).min(127);
            let mut kept = if shift > 0 { size >> shift } else { size << -shift };
            if format == SumFormat::F16 && shift > 0 {
                let (rest, half) = (size & ((1 << shift) - 1), 1u128 << (shift - 1));
                kept += u128::from(rest > half || rest == half && kept & 1 == 1);
            }
            if kept == 0 {
                return 0;
            }
            let significand = (kept << (mantissa_bits - keep)) as u32;
            let field = (leading.max(least) - least) as u32;
            // The leading bit of a normal significand counts one up in the exponent field.
            let bits = (field << mantissa_bits) + significand;
            signed(sum < 0, bits.min(infinity))
        }
    }

    use by_integers::{Value, decode, times};

    fn format(element: Element) -> Format {
        match element {
            Element::F16 => F16,
            Element::Bf16 => BF16,
            Element::Tf32 => TF32,
            Element::E4m3 => E4M3,
            Element::E5m2 => E5M2,
            _ => E2M1,
        }
    }

    /// A row of codes, as bytes.
    fn bytes(element: Element, codes: &[u64]) -> Vec<u8> {
        let word = |code: &u64| if element == Element::Tf32 { code << 13 } else { *code };
        codes.iter().flat_map(|code| word(code).to_le_bytes()[..element.bits().div_ceil(8) as usize].to_vec()).collect()
    }

    /// The steps of a sum by integers.
    fn by_steps(adder: &Adder, products: &[Value], c: u64, sum: SumFormat) -> u32 {
        let of = if sum == SumFormat::F32 { F32 } else { F16 };
        let last = adder.step == Step::Pairs;
        let per_step = match adder.step {
            Step::Whole => products.len(),
            Step::Products(count) => count.min(products.len()),
            Step::Pairs => products.len() / 2,
        };
        let mut d = if last { 0 } else { c as u32 };
        for step in adder.order(products.len()).chunks(per_step) {
            let addends: Vec<Value> = step.iter().map(|&k| products[k]).chain([decode(&of, d.into())]).collect();
            d = by_integers::add(&addends, adder, sum);
        }
        if last {
            let sum_of = match sum {
                SumFormat::F32 => {
                    let sum = f32::from_bits(d) + f32::from_bits(c as u32);
                    if sum.is_nan() { number::F32_NAN } else { sum.to_bits() }
                }
                SumFormat::F16 => number::round_f16(number::decode_f16(d as u16) + number::decode_f16(c as u16)).into(),
            };
            // A zero is +0.
            return if matches!((sum, sum_of), (SumFormat::F16, 0x8000)) { 0 } else { sum_of };
        }
        d
    }

    /// Codes of a format that make hard sums: some alike, some far apart, zeros, subnormals, infinities and NaNs.
    fn code(format: Format, style: u32, random: u64) -> u64 {
        let (m, e) = (format.mantissa_bits, format.exponent_bits);
        let (sign, mantissa, r) = (random & 1, random >> 1 & ((1 << m) - 1), random >> 32);
        let bias = format.bias() as u64;
        let field = match style % 6 {
            0 => bias - 1 + r % 3,
            1 => (bias + 10).saturating_sub(r % 21),
            2 => r % (1 << e),
            3 => r % 3,
            4 if r % 8 == 0 => return sign << (m + e),
            4 if r % 8 == 1 => (1 << e) - 1,
            4 => bias + r % 2,
            _ => (1 << e) - 2 - r % 3,
        };
        sign << (m + e) | field.min((1 << e) - 1) << m | mantissa
    }

    const PRODUCTS: [(Family, Instruction, Element, Element, usize); 16] = {
        use {Element as E, Family::*, Instruction::*};
        [
            (Ampere, Mma, E::F16, E::F16, 16),
            (Ampere, Mma, E::Bf16, E::Bf16, 8),
            (Ampere, Mma, E::Tf32, E::Tf32, 8),
            (Ada, Mma, E::E4m3, E::E5m2, 32),
            (Ada, Mma, E::E5m2, E::E5m2, 16),
            (Hopper, Mma, E::F16, E::F16, 16),
            (Hopper, Mma, E::Bf16, E::Bf16, 16),
            (Hopper, Mma, E::Tf32, E::Tf32, 4),
            (Hopper, Mma, E::E4m3, E::E5m2, 32),
            (Hopper, Wgmma, E::Bf16, E::Bf16, 16),
            (Hopper, Wgmma, E::Tf32, E::Tf32, 8),
            (Hopper, Wgmma, E::E4m3, E::E5m2, 32),
            (Blackwell, Tcgen05, E::F16, E::F16, 16),
            (Blackwell, Tcgen05, E::E5m2, E::E4m3, 32),
            (RtxBlackwell, Mma, E::E4m3, E::E4m3, 32),
            (RtxBlackwell, Mma, E::F16, E::F16, 32),
        ]
    };

    /// Compares [`multiply_f32`] and [`multiply_f16`] with sums by integers, for one row of A and some columns of B.
    fn check(product: usize, styles: [u32; 3], seed: u64, columns: usize) -> Result<(), TestCaseError> {
        let (family, instruction, a_type, b_type, k) = PRODUCTS[product];
        let adder = Adder::of(family, instruction, Kind::of(a_type));
        let mut state = seed;
        let mut random = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let x = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^ x >> 31
        };
        let mut codes = |element: Element, count: usize, style: u32| -> Vec<u64> {
            (0..count).map(|_| code(format(element), style, random())).collect()
        };
        let (mut a, mut b) = (codes(a_type, k, styles[0]), codes(b_type, columns * k, styles[1]));
        if styles[0] % 12 >= 6 {
            // Products that cancel in pairs.
            for k in (1..k).step_by(2) {
                a[k] = a[k - 1] ^ format(a_type).sign_bit();
            }
            b.chunks_mut(2).for_each(|pair| pair[1] = pair[0]);
        }
        let floats =
            |element, rows, codes: &[u64]| Floats::decode(element, Packing::Dense, rows, k, &bytes(element, codes));
        let (of_a, of_b) = (floats(a_type, 1, &a), floats(b_type, columns, &b));
        let value = |element: Element, code: u64| match decode(&format(element), code) {
            // The exponent of the same number as an f16.
            Value::Number(x) if adder.step == Step::Pairs && x.significand != 0 => {
                let leading = x.last + x.significand.ilog2() as i32;
                Value::Number(by_integers::Number { exponent: leading.max(-14), ..x })
            }
            value => value,
        };
        let products = |column: usize| -> Vec<Value> {
            (0..k).map(|at| times(value(a_type, a[at]), value(b_type, b[column * k + at]))).collect()
        };
        let c: Vec<u64> = (0..columns).map(|_| code(F32, styles[2], random())).collect();
        let mut d: Vec<f32> = c.iter().map(|&c| f32::from_bits(c as u32)).collect();
        multiply_f32(&of_a, &of_b, Some(&adder), &mut d);
        for (column, d) in d.iter().enumerate() {
            let expected = by_steps(&adder, &products(column), c[column], SumFormat::F32);
            prop_assert_eq!(d.to_bits(), expected, "{:?} column {}: c {:x}", PRODUCTS[product], column, c[column]);
        }
        let c: Vec<u64> = (0..columns).map(|_| code(F16, styles[2], random())).collect();
        let mut d: Vec<u16> = c.iter().map(|&c| c as u16).collect();
        multiply_f16(&of_a, &of_b, Some(&adder), &mut d);
        for (column, &d) in d.iter().enumerate() {
            let expected = by_steps(&adder, &products(column), c[column], SumFormat::F16);
            prop_assert_eq!(u32::from(d), expected, "{:?} f16 column {}: c {:x}", PRODUCTS[product], column, c[column]);
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn sums_match_sums_by_integers(
            product in 0..PRODUCTS.len(),
            styles: [u32; 3],
            seed: u64,
            columns in 1usize..20,
        ) {
            check(product, styles, seed, columns)?;
        }

        #[test]
        fn sums_of_four_bit_blocks_match_sums_by_integers(
            a in prop::collection::vec(any::<u8>(), 32),
            b in prop::collection::vec(any::<u8>(), 20 * 32),
            scales in prop::collection::vec(0u8..0x80, 4 + 20 * 4),
            exponents in prop::collection::vec(100u8..150, 4 + 20 * 4),
            ue8m0: bool,
            near: bool,
            c in prop::collection::vec((0u32..6, any::<u64>()), 20),
        ) {
            let adder = Adder::of(Family::Blackwell, Instruction::Tcgen05, Kind::Four);
            // Scales that are alike, as real numbers' scales are, or any scales.
            let scales: Vec<u8> = scales.iter().map(|&code| if near { 0x30 + code % 16 } else { code }).collect();
            let (kind, codes) = if ue8m0 { (ScaleType::Ue8m0, exponents) } else { (ScaleType::Ue4m3, scales) };
            let (codes_a, codes_b) = codes.split_at(4);
            let decoded = |rows, codes: &[u8]| Scales::decode(kind, rows, 4, codes).unwrap();
            let c: Vec<u32> = c.into_iter().map(|(style, random)| code(F32, style, random) as u32).collect();
            let mut d: Vec<f32> = c.iter().map(|&c| f32::from_bits(c)).collect();
            multiply_fours(
                (&Fours::decode(1, 64, &a), &decoded(1, codes_a)),
                (&Fours::decode(20, 64, &b), &decoded(20, codes_b)),
                Some(&adder),
                &mut d,
            );
            let scale = |code: u8| match kind {
                ScaleType::Ue4m3 => decode(&E4M3, code.into()),
                ScaleType::Ue8m0 => {
                    let last = i32::from(code) - 127;
                    Value::Number(by_integers::Number { negative: false, significand: 1, last, exponent: last })
                }
            };
            let nibble = |bytes: &[u8], k: usize| u64::from(bytes[k / 2] >> (k % 2 * 4) & 15);
            for (column, d) in d.iter().enumerate() {
                let mut addends = vec![decode(&F32, c[column].into())];
                for block in 0..4 {
                    let product = |k: usize| times(decode(&E2M1, nibble(&a, k)), decode(&E2M1, nibble(&b[column * 32..], k)));
                    let quarters: i128 = (block * 16..block * 16 + 16)
                        .map(|k| match product(k) {
                            // Products are multiples of 1/4.
                            Value::Number(x) => (x.significand << (x.last + 2)) as i128 * if x.negative { -1 } else { 1 },
                            _ => unreachable!("e2m1 is finite"),
                        })
                        .sum();
                    let sum = Value::Number(by_integers::Number {
                        negative: quarters < 0,
                        significand: quarters.unsigned_abs(),
                        last: -2,
                        exponent: 0,
                    });
                    addends.push(times(times(sum, scale(codes_a[block])), scale(codes_b[column * 4 + block])));
                }
                let expected = by_integers::add(&addends, &adder, SumFormat::F32);
                prop_assert_eq!(d.to_bits(), expected, "column {}: c {:x}", column, c[column]);
            }
        }
    }

    /// Results of an H200. Each line holds the types of A and B, 32 codes of each, and the accumulator's bits before
    /// and after.
    #[test]
    fn wgmma_sums_of_eight_bits_match_an_h200() {
        let hex = |text: &str| -> Vec<u8> {
            let digits = text.as_bytes().chunks(2);
            digits.map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
        };
        let element = |name: &str| if name == "e4m3" { Element::E4m3 } else { Element::E5m2 };
        let adder = Adder::of(Family::Hopper, Instruction::Wgmma, Kind::Eight);
        let mut lines = 0;
        for line in include_str!("testdata/fp8_h200.txt").lines() {
            let [a_type, b_type, a, b, c, d] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
            let bits = |hex| u32::from_str_radix(hex, 16).unwrap();
            let row = |name, codes| Floats::decode(element(name), Packing::Dense, 1, 32, &hex(codes));
            let mut sum = [f32::from_bits(bits(c))];
            multiply_f32(&row(a_type, a), &row(b_type, b), Some(&adder), &mut sum);
            assert_eq!(sum[0].to_bits(), bits(d), "{line}");
            lines += 1;
        }
        assert!(lines >= 100, "{lines} lines");
    }

    #[test]
    fn families_follow_from_targets() {
        let families = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100f", "sm_103a", "sm_110", "sm_120f", "sm_121a"];
        use Family::*;
        let expected = [Ampere, Ampere, Ada, Hopper, Blackwell, Blackwell, Blackwell, RtxBlackwell, RtxBlackwell];
        assert_eq!(families.map(Family::of_target), expected);
    }
}
