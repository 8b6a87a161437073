//! Tensors of f32, f16 or bf16 as one type, to be quantised.

use std::borrow::Cow;
use std::ops::Range;

use half::{bf16, f16};
use rayon::prelude::*;

use super::Dtype;
use super::file::Tensor;
use crate::error::Error;
use crate::format::Matrix;
use crate::quantize::{self, Number};

/// The types of numbers that can be quantised.
pub(super) const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// The numbers of a tensor.
pub(super) enum Floats<'a> {
    F32(Cow<'a, [f32]>),
    F16(Cow<'a, [f16]>),
    Bf16(Cow<'a, [bf16]>),
}

/// Evaluates an expression with the numbers, whatever their type.
macro_rules! with {
    ($floats:expr, $numbers:ident => $body:expr) => {
        match $floats {
            Floats::F32($numbers) => $body,
            Floats::F16($numbers) => $body,
            Floats::Bf16($numbers) => $body,
        }
    };
}

impl<'a> Floats<'a> {
    /// The numbers of a tensor, if its type is one of [`DTYPES`].
    pub(super) fn of(tensor: Tensor<'a>) -> Option<Self> {
        match tensor.dtype {
            Dtype::F32 => Some(Self::F32(tensor.numbers())),
            Dtype::F16 => Some(Self::F16(tensor.numbers())),
            Dtype::BF16 => Some(Self::Bf16(tensor.numbers())),
            _ => None,
        }
    }

    /// As [`quantize::amax`].
    pub(super) fn amax(&self) -> Result<f32, Error> {
        with!(self, numbers => quantize::amax(numbers))
    }

    /// Quantises some rows of `k` numbers, as [`quantize::quantize_with`].
    pub(super) fn quantize_rows(&self, rows: Range<usize>, k: usize, global: f32) -> Result<Matrix<'static>, Error> {
        let elements = rows.start * k..rows.end * k;
        with!(self, numbers => quantize::quantize_with(&numbers[elements], rows.len(), k, global))
    }

    /// How far all these numbers are from what they were quantised to.
    pub(super) fn loss(&self, matrix: &Matrix<'_>) -> Loss {
        with!(self, numbers => loss(numbers, matrix))
    }
}

/// How far a quantised tensor is from what it was.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loss {
    /// Root of the mean squared error, relative to that of the numbers; 0 for all zeros.
    pub relative_rms: f64,
    /// The largest error.
    pub max_abs: f64,
}

impl Loss {
    /// Signal to noise in decibels.
    pub fn snr_db(self) -> f64 {
        -20.0 * self.relative_rms.log10()
    }
}

fn loss<T: Number>(numbers: &[T], matrix: &Matrix<'_>) -> Loss {
    let k = matrix.k();
    let rows = numbers.par_chunks(k).enumerate().map_init(
        || vec![0.0; k],
        |quantised, (row, numbers)| {
            matrix.dequantize_row(row, quantised);
            let pairs = numbers.iter().zip(quantised).map(|(&number, &mut quantised)| {
                let number = f64::from(number.into());
                (number * number, (f64::from(quantised) - number).abs())
            });
            pairs.fold((0.0, 0.0, 0.0), |(signal, noise, max), (square, error)| {
                (signal + square, noise + error * error, f64::max(max, error))
            })
        },
    );
    // Collected first: summed in order, the figures do not depend on the number of threads.
    let rows: Vec<_> = rows.collect();
    let (signal, noise, max_abs) =
        rows.iter().fold((0.0, 0.0, 0.0), |sum, row| (sum.0 + row.0, sum.1 + row.1, f64::max(sum.2, row.2)));
    let relative_rms = if noise == 0.0 { 0.0 } else { f64::sqrt(noise / signal) };
    Loss { relative_rms, max_abs }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loss_is_that_of_the_numbers() {
        let numbers: Vec<f32> = (0..16).map(|i| if i < 2 { [3.0, 4.0][i] } else { 0.0 }).collect();
        let exact = Matrix::new(1, 16, [[0x65].as_slice(), &[0; 7]].concat(), vec![0x38], 1.0).unwrap();
        assert_eq!(loss(&numbers, &exact), Loss { relative_rms: 0.0, max_abs: 0.0 });
        assert_eq!(loss(&numbers, &exact).snr_db(), f64::INFINITY);
        // 4 became 3: an error of 1 against a signal of 5.
        let wrong = Matrix::new(1, 16, [[0x55].as_slice(), &[0; 7]].concat(), vec![0x38], 1.0).unwrap();
        assert_eq!(loss(&numbers, &wrong), Loss { relative_rms: 0.2, max_abs: 1.0 });
    }
}
