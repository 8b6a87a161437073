//! What happens to the tokens of a weight before the product: factors of the columns (NVFP4_AWQ), or a Hadamard transform
//! of blocks of columns (MR-GPTQ). The results are rounded to the token type, as engines round them.

use std::sync::Arc;

use rayon::prelude::*;

use crate::Error;
use crate::problem::TokenDtype;

/// Change of the tokens `[T, K]` before a product.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenTransform(Kind);

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    /// Factor of each column.
    Factors(Arc<[f32]>),
    /// Sylvester's Hadamard matrix of this size, on each block of columns. It is symmetric and its own inverse.
    Sylvester(usize),
    /// Matrix `[size, size]` by which each block of columns is multiplied.
    Matrix { size: usize, matrix: Arc<[f64]> },
}

impl TokenTransform {
    /// Makes a transform that multiplies each column by a factor.
    pub fn of_factors(factors: &[f32]) -> Self {
        Self(Kind::Factors(factors.into()))
    }

    /// Makes a transform that multiplies each block of `size` columns by Sylvester's Hadamard matrix over the root of its
    /// size.
    ///
    /// # Panics
    /// If the size is not a power of two.
    pub fn sylvester(size: usize) -> Self {
        assert!(size.is_power_of_two(), "Sylvester's matrices have sizes that are powers of two");
        Self(Kind::Sylvester(size))
    }

    /// Makes a transform that multiplies each block of `size` columns, as a row, by a matrix `[size, size]`.
    ///
    /// # Panics
    /// If the matrix has another number of elements.
    pub fn of_matrix(size: usize, matrix: Vec<f64>) -> Self {
        assert_eq!(matrix.len(), size * size, "the matrix is square");
        Self(Kind::Matrix { size, matrix: matrix.into() })
    }

    /// Whether the transform changes nothing: all factors are 1.
    pub fn is_identity(&self) -> bool {
        matches!(&self.0, Kind::Factors(factors) if factors.iter().all(|&factor| factor == 1.0))
    }

    /// Factors of the columns; `None` if the transform is another one.
    pub fn factors(&self) -> Option<&[f32]> {
        match &self.0 {
            Kind::Factors(factors) => Some(factors),
            _ => None,
        }
    }

    /// Words for a message.
    fn name(&self) -> &'static str {
        match self.0 {
            Kind::Factors(_) => "pre_quant_scale",
            Kind::Sylvester(_) => "the Hadamard matrix",
            Kind::Matrix { .. } => "the transform's matrix",
        }
    }

    /// Checks that rows of K elements can be transformed.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the number of factors is not K, or the size of blocks does not divide K.
    pub fn check(&self, k: usize) -> Result<(), Error> {
        match self.0 {
            Kind::Factors(ref factors) if factors.len() != k => {
                Err(Error::Mismatch { what: "factors of the tokens", got: factors.len(), expected: k })
            }
            Kind::Sylvester(size) | Kind::Matrix { size, .. } if size == 0 || !k.is_multiple_of(size) => {
                Err(Error::Mismatch { what: "columns of blocks of the transform", got: size, expected: k })
            }
            _ => Ok(()),
        }
    }

    /// Transforms a row of K elements in f64, and rounds it to the token type.
    pub fn row(&self, dtype: TokenDtype, row: &mut [u16]) {
        let mut numbers: Vec<f64> = row.iter().map(|&bits| dtype.decode(bits)).collect();
        match &self.0 {
            Kind::Factors(factors) => {
                numbers.iter_mut().zip(&factors[..]).for_each(|(number, &factor)| *number *= f64::from(factor));
            }
            Kind::Sylvester(size) => numbers.chunks_exact_mut(*size).for_each(sylvester),
            Kind::Matrix { size, matrix } => {
                numbers.chunks_exact_mut(*size).for_each(|block| multiply(block, matrix));
            }
        }
        // Rounding twice could differ from rounding once, but these are the numbers that an f32 product has.
        row.iter_mut().zip(numbers).for_each(|(bits, number)| *bits = dtype.round_f32(number as f32));
    }

    /// Transforms tokens `[T, width]`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a result is not finite in the token type.
    pub fn tokens(&self, dtype: TokenDtype, width: usize, tokens: &mut [u16]) -> Result<(), Error> {
        tokens.par_chunks_mut(width).enumerate().try_for_each(|(token, row)| {
            self.row(dtype, row);
            match row.iter().position(|&bits| !dtype.decode(bits).is_finite()) {
                None => Ok(()),
                Some(column) => {
                    let what = format!("element {column} of token {token} times {} is not a finite", self.name());
                    Err(Error::Invalid(format!("{what} {}; use smaller tokens, or --dtype bf16", dtype.name())))
                }
            }
        })
    }
}

/// Multiplies a block by Sylvester's Hadamard matrix over the root of its size: the fast Walsh-Hadamard transform.
fn sylvester(block: &mut [f64]) {
    let size = block.len();
    let mut half = 1;
    while half < size {
        for pair in block.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (low, high) in low.iter_mut().zip(high) {
                (*low, *high) = (*low + *high, *low - *high);
            }
        }
        half *= 2;
    }
    let root = (size as f64).sqrt();
    block.iter_mut().for_each(|number| *number /= root);
}

/// Replaces a row by its product with a square matrix.
fn multiply(row: &mut [f64], matrix: &[f64]) {
    let size = row.len();
    let mut product = vec![0.0; size];
    for (&number, line) in row.iter().zip(matrix.chunks_exact(size)) {
        product.iter_mut().zip(line).for_each(|(sum, &element)| *sum += number * element);
    }
    row.copy_from_slice(&product);
}

/// Element of Sylvester's Hadamard matrix, 1 or -1.
pub fn sylvester_element(line: usize, column: usize) -> f32 {
    if (line & column).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fast_transform_is_the_product_with_the_matrix() {
        for size in [1usize, 2, 16, 64] {
            let numbers: Vec<f64> = (0..size).map(|index| ((index * 37 + 11) % 23) as f64 - 9.5).collect();
            let matrix: Vec<f64> = (0..size * size)
                .map(|index| f64::from(sylvester_element(index / size, index % size)) / (size as f64).sqrt())
                .collect();
            let (mut fast, mut product) = (numbers.clone(), numbers);
            sylvester(&mut fast);
            multiply(&mut product, &matrix);
            let difference = fast.iter().zip(&product).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(difference < 1e-12, "{size}: {difference}");
        }
    }
}
