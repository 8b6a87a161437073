//! Numbers of model files as one type: f32, f16 and bf16, little-endian, at any address.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use super::Dtype;
use super::file::Tensor;
use nvfp4_core::Error;
use nvfp4_core::format::Matrix;
use nvfp4_core::quantize::{self, Number};

/// Types of numbers that can be quantized.
pub(super) const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// An f32 at any address.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, packed)]
pub(super) struct F32(u32);

/// A half-precision number at any address.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, packed)]
pub(super) struct F16(u16);

/// A bfloat16 at any address.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, packed)]
pub(super) struct Bf16(u16);

impl From<F32> for f32 {
    #[inline(always)]
    fn from(number: F32) -> Self {
        Self::from_bits(number.0)
    }
}

impl From<Bf16> for f32 {
    #[inline(always)]
    fn from(number: Bf16) -> Self {
        Self::from_bits(u32::from(number.0) << 16)
    }
}

impl From<F16> for f32 {
    /// Branch-free and without a particular instruction set, so that the compiler vectorizes loops over it.
    #[inline(always)]
    fn from(number: F16) -> Self {
        /// 2¹¹², the difference of the exponent biases.
        const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
        const LARGEST_EXPONENT: u32 = 0x7C00 << 13;
        let bits = u32::from(number.0);
        let magnitude = (bits & 0x7FFF) << 13;
        let not_finite = if magnitude >= LARGEST_EXPONENT { f32::INFINITY.to_bits() } else { 0 };
        let number = (Self::from_bits(magnitude) * REBIAS).to_bits();
        Self::from_bits(number | not_finite | (bits & 0x8000) << 16)
    }
}

/// Returns a number of any of these types as f32.
pub(super) fn to_f32(number: impl Number) -> f32 {
    number.into()
}

/// Numbers in place in a file, or decoded.
#[derive(Clone, Copy, Debug)]
pub(super) enum Floats<'a> {
    F32(&'a [F32]),
    F16(&'a [F16]),
    Bf16(&'a [Bf16]),
    /// Numbers that were stored in another form and are now decoded.
    Decoded(&'a [f32]),
}

/// Evaluates an expression with the numbers as a slice of their own type.
macro_rules! with {
    ($floats:expr, $numbers:ident => $body:expr) => {
        match $floats {
            $crate::floats::Floats::F32($numbers) => $body,
            $crate::floats::Floats::F16($numbers) => $body,
            $crate::floats::Floats::Bf16($numbers) => $body,
            $crate::floats::Floats::Decoded($numbers) => $body,
        }
    };
}
pub(super) use with;

impl<'a> Floats<'a> {
    /// Returns the numbers of a tensor if its type is one of [`DTYPES`].
    pub(super) fn of(tensor: Tensor<'a>) -> Option<Self> {
        match tensor.dtype {
            Dtype::F32 => Some(Self::F32(bytemuck::cast_slice(tensor.data))),
            Dtype::F16 => Some(Self::F16(bytemuck::cast_slice(tensor.data))),
            Dtype::BF16 => Some(Self::Bf16(bytemuck::cast_slice(tensor.data))),
            _ => None,
        }
    }

    /// Returns the numbers of a range.
    pub(super) fn part(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(numbers) => Self::F32(&numbers[range]),
            Self::F16(numbers) => Self::F16(&numbers[range]),
            Self::Bf16(numbers) => Self::Bf16(&numbers[range]),
            Self::Decoded(numbers) => Self::Decoded(&numbers[range]),
        }
    }

    /// Returns the bytes of the numbers if they are in place.
    pub(super) fn bytes(self) -> Option<&'a [u8]> {
        match self {
            Self::F32(numbers) => Some(bytemuck::cast_slice(numbers)),
            Self::F16(numbers) => Some(bytemuck::cast_slice(numbers)),
            Self::Bf16(numbers) => Some(bytemuck::cast_slice(numbers)),
            Self::Decoded(_) => None,
        }
    }

    /// Returns one number.
    pub(super) fn at(self, index: usize) -> f32 {
        with!(self, numbers => to_f32(numbers[index]))
    }

    /// Appends the numbers as bf16, rounded to nearest, ties to even.
    pub(super) fn to_bf16(self, bytes: &mut Vec<u8>) {
        with!(self, numbers => {
            bytes.extend(numbers.iter().flat_map(|&x| half::bf16::from_f32(to_f32(x)).to_le_bytes()));
        });
    }

    /// Returns the largest magnitude, as [`quantize::amax`] does.
    pub(super) fn amax(self) -> Result<f32, Error> {
        with!(self, numbers => quantize::amax(numbers))
    }

    /// Quantizes rows of `k` numbers, as [`quantize::quantize_with`] does.
    pub(super) fn quantize_rows(self, rows: Range<usize>, k: usize, global: f32) -> Result<Matrix<'static>, Error> {
        let elements = rows.start * k..rows.end * k;
        with!(self, numbers => quantize::quantize_with(&numbers[elements], rows.len(), k, global))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_matches_the_half_crate() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f32::from(F16(bits)), half::f16::from_bits(bits).to_f32());
            assert!(
                ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
                "{bits:#x}: {ours} {theirs}"
            );
        }
    }

    #[test]
    fn numbers_at_odd_addresses_are_read() {
        let bytes: Vec<u8> = std::iter::once(0).chain([1.5f32, -2.0].into_iter().flat_map(f32::to_le_bytes)).collect();
        let numbers = Floats::of(Tensor { dtype: Dtype::F32, shape: &[2], data: &bytes[1..] }).unwrap();
        assert_eq!((numbers.at(0), numbers.at(1), numbers.amax().unwrap()), (1.5, -2.0, 2.0));
    }
}
