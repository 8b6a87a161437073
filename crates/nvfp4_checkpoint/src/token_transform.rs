//! What happens to the tokens of a weight before the product: factors of the columns (`pre_quant_scale` of ModelOpt's
//! NVFP4_AWQ), or a Hadamard transform of blocks of columns (`transform_config` of compressed-tensors, which MR-GPTQ
//! models have).

use rayon::prelude::*;

use super::convert::weights::PRE_QUANT_SCALE;
use super::model_config::{InputTransform, ModelConfig};
use super::{Checkpoint, Dtype};
use nvfp4_core::Error;
use nvfp4_core::problem::TokenDtype;

/// Change of the tokens `[T, K]` before a product.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenTransform(Kind);

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    /// Factor of each column.
    Factors(Vec<f32>),
    /// Sylvester's Hadamard matrix of this size, on each block of columns. It is symmetric and its own inverse.
    Sylvester(usize),
    /// Matrix `[size, size]` by which each block of columns is multiplied.
    Matrix { size: usize, matrix: Vec<f64> },
}

impl TokenTransform {
    /// Makes a transform that multiplies each column.
    pub(super) fn of_factors(factors: Vec<f32>) -> Self {
        Self(Kind::Factors(factors))
    }

    /// Transforms tokens `[T, width]` in f64, and rounds them to their type as engines do.
    ///
    /// # Errors
    /// Returns an error if a result is not finite in the tokens' type.
    pub(super) fn apply(&self, dtype: TokenDtype, width: usize, tokens: &mut [u16]) -> Result<(), Error> {
        tokens.par_chunks_mut(width).enumerate().try_for_each(|(token, row)| {
            let mut numbers: Vec<f64> = row.iter().map(|&bits| dtype.decode(bits)).collect();
            let what = match &self.0 {
                Kind::Factors(factors) => {
                    numbers.iter_mut().zip(factors).for_each(|(number, &factor)| *number *= f64::from(factor));
                    PRE_QUANT_SCALE
                }
                Kind::Sylvester(size) => {
                    numbers.chunks_exact_mut(*size).for_each(sylvester);
                    "the Hadamard matrix"
                }
                Kind::Matrix { size, matrix } => {
                    numbers.chunks_exact_mut(*size).for_each(|block| multiply(block, matrix));
                    "the transform's matrix"
                }
            };
            for (column, (bits, number)) in row.iter_mut().zip(numbers).enumerate() {
                // Rounding twice could differ from rounding once, but these are the numbers that an f32 product has.
                *bits = dtype.round_f32(number as f32);
                if !dtype.decode(*bits).is_finite() {
                    let what =
                        format!("element {column} of token {token} times {what} is not a finite {}", dtype.name());
                    return Err(Error::Invalid(format!("{what}; use smaller tokens, or --dtype bf16")));
                }
            }
            Ok(())
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

/// Element of Sylvester's Hadamard matrix.
fn sylvester_element(line: usize, column: usize) -> f32 {
    if (line & column).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 }
}

impl Checkpoint {
    /// Returns the change of the tokens of a weight with this K; `None` if its tokens stay as they are.
    ///
    /// # Errors
    /// Returns an error if the transform is not computed, or its tensor is wrong.
    pub(super) fn token_transform(
        &self,
        module: &str,
        k: usize,
        config: Option<&ModelConfig>,
    ) -> Result<Option<TokenTransform>, Error> {
        let name = format!("{module}{PRE_QUANT_SCALE}");
        let factors = self.tensor(&name).map(|_| self.numbers(&name, &[k], "[K]")).transpose()?;
        let described = config.map(|config| config.input_transform(module)).transpose()?.flatten();
        match (factors, described) {
            (None, None) => Ok(None),
            (Some(factors), None) => Ok(Some(TokenTransform::of_factors(factors))),
            (None, Some(described)) => self.hadamard(module, k, &described).map(Some),
            (Some(_), Some(described)) => {
                let what = format!("the tokens also have the transform {}, in an unknown order", described.group);
                Err(Error::NotComputed(format!("{what}; export the model with one of them")).at(self.place(&name)))
            }
        }
    }

    /// Returns a transform of the configuration with its matrix: `M.GROUP_input.weight`, entries ±1.
    fn hadamard(&self, module: &str, k: usize, transform: &InputTransform<'_>) -> Result<TokenTransform, Error> {
        let InputTransform { group, kind, block, inverse } = *transform;
        let size = block.unwrap_or(k);
        let at = |error: Error| error.at(self.place(module));
        if size == 0 || !k.is_multiple_of(size) {
            let what =
                format!("head_dim of transform {group} is {size}, which does not divide K {k}; export the model again");
            return Err(at(Error::Invalid(what)));
        }
        let part = input_part(group);
        // Modules with equal sizes share one matrix, which files hold once.
        let mut names = self.names().filter(|name| name.ends_with(&part));
        let fits = |name: &&str| self.tensor(name).is_some_and(|tensor| tensor.shape == [size, size]);
        let own = Some(format!("{module}{part}")).filter(|name| self.tensor(name).is_some());
        let Some(name) = own.or_else(|| names.find(fits).map(str::to_owned)) else {
            if kind == "hadamard" && size.is_power_of_two() {
                return Ok(TokenTransform(Kind::Sylvester(size)));
            }
            let remedy =
                format!("the matrix of a {kind} transform of size {size} cannot be computed; export the model again");
            return Err(at(Error::Missing { name: format!("a tensor *{part}"), remedy }));
        };
        let matrix = self.numbers(&name, &[size, size], "[block, block]")?;
        let at = |what: &str| Error::NotComputed(format!("{what}; export the model again")).at(self.place(&name));
        if let Some(index) = matrix.iter().position(|element| element.abs() != 1.0) {
            return Err(at(&format!("element {index} of this Hadamard matrix is {}, not 1 or -1", matrix[index])));
        }
        if kind == "hadamard" {
            let is_sylvester =
                |(index, &element): (usize, &f32)| element == sylvester_element(index / size, index % size);
            if !size.is_power_of_two() || !matrix.iter().enumerate().all(is_sylvester) {
                return Err(at(
                    "this matrix is not Sylvester's, with which engines compute a transform of type hadamard",
                ));
            }
            return Ok(TokenTransform(Kind::Sylvester(size)));
        }
        let root = (size as f64).sqrt();
        let element = |index: usize| {
            let (line, column) = (index / size, index % size);
            f64::from(if inverse { matrix[column * size + line] } else { matrix[index] }) / root
        };
        Ok(TokenTransform(Kind::Matrix { size, matrix: (0..size * size).map(element).collect() }))
    }

    /// Returns the factors by which the experts' tokens are multiplied after routing (NVFP4_AWQ); `None`: no expert has
    /// factors. `reading`: projections that read the tokens. `inside`: projections that read an expert's intermediate.
    ///
    /// # Errors
    /// Returns an error if the experts have different factors, because each token is multiplied once for all experts; or
    /// if factors of the intermediate are not 1, because the kernels compute it between two products.
    pub(super) fn factors_of_experts(
        &self,
        reading: &[String],
        inside: &[String],
        hidden: usize,
    ) -> Result<Option<TokenTransform>, Error> {
        let name = |module: &String| format!("{module}{PRE_QUANT_SCALE}");
        let has = |module: &&String| self.tensor(&name(module)).is_some();
        for module in inside.iter().filter(has) {
            let k = self.tensor(&name(module)).map_or(0, |tensor| tensor.shape.iter().product());
            if self.numbers(&name(module), &[k], "[I]")?.iter().any(|&factor| factor != 1.0) {
                return Err(self.not_computed(&name(module)));
            }
        }
        let Some(first) = reading.iter().find(has) else { return Ok(None) };
        let factors = self.numbers(&name(first), &[hidden], "[hidden size]")?;
        let bits = |factors: &[f32]| factors.iter().map(|factor| factor.to_bits()).collect::<Vec<_>>();
        for module in reading {
            if !has(&module) {
                let what =
                    format!("{} has factors of the tokens (NVFP4_AWQ), but this projection has none", name(first));
                return Err(self.different_factors(module, &what));
            }
            if bits(&self.numbers(&name(module), &[hidden], "[hidden size]")?) != bits(&factors) {
                let what = format!("these factors of the tokens (NVFP4_AWQ) differ from {}", name(first));
                return Err(self.different_factors(&name(module), &what));
            }
        }
        Ok(Some(TokenTransform::of_factors(factors)))
    }

    fn different_factors(&self, name: &str, what: &str) -> Error {
        let remedy = "all experts of a layer read the same tokens; `nvfp4 dequantize` multiplies the factors into the weights, \
                      which `nvfp4 quantize` then quantizes";
        Error::NotComputed(format!("{what}; {remedy}")).at(self.place(name))
    }
}

/// Suffix of the matrix of a transform of a module's tokens.
pub(super) fn input_part(group: &str) -> String {
    format!(".{group}_input.weight")
}

/// Whether a tensor of a module can be the matrix of a transform of its tokens.
pub(super) fn is_input_matrix(part: &str, dtype: Dtype) -> bool {
    part.ends_with("_input.weight") && super::floats::DTYPES.contains(&dtype)
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
