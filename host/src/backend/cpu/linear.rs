//! A linear layer on the CPU: one product, with its tiles spread over all threads.

use std::time::{Duration, Instant};

use super::epilogue::Epilogue;
use super::kernel::Kernel;
use super::layer::LinearCompute;
use super::layout::{Panels, Tokens16, columns_of_chunk};
use super::products::{Pool, Product, Products, TokenBuffer};
use crate::Error;
use crate::linear::{LinearOutput, LinearSizes, LinearStep, LinearWeights};

/// Weights of a layer in panels, and the buffers of its steps.
pub(super) struct PackedLinear<T: Tokens16> {
    kernel: Kernel<T>,
    sizes: LinearSizes,
    panels: Panels,
    global: f32,
    /// Empty if the layer has no bias.
    bias: Vec<f32>,
    buffers: Pool<Buffers<T>>,
}

/// Buffers of one step, reused by later steps.
struct Buffers<T: Tokens16>(TokenBuffer<T>, Products);

impl<T: Tokens16> Default for Buffers<T> {
    fn default() -> Self {
        Self(TokenBuffer::new(), Products::default())
    }
}

impl<T: Tokens16> PackedLinear<T> {
    pub(super) fn new(kernel: Kernel<T>, weights: &LinearWeights<'_>) -> Result<Self, Error> {
        Ok(Self {
            kernel,
            sizes: weights.sizes(),
            panels: Panels::new(&[weights.matrix()])?,
            global: weights.matrix().global_scale(),
            bias: weights.bias().map_or(Vec::new(), |bias| bias.into_owned()),
            buffers: Pool::default(),
        })
    }
}

impl<T: Tokens16> LinearCompute for PackedLinear<T> {
    fn compute(&self, step: &LinearStep<'_>, output: &mut LinearOutput) -> Duration {
        self.buffers.with(|Buffers(tokens, products)| {
            let started = Instant::now();
            let (dtype, m) = (self.sizes.dtype, step.tokens());
            if m > 0 {
                tokens.fill(std::iter::once((m, self.sizes.k)), |_, row, chunk, out| {
                    T::unpack(dtype, columns_of_chunk::<T>(step.token(row), chunk), out);
                });
                let product = |_| Product {
                    weights: &self.panels,
                    tokens: tokens.of(0),
                    m,
                    epilogue: Epilogue::of_bits16([self.global, 0.0], [&self.bias, &[]], None, dtype),
                };
                products.run(&self.kernel, 1, product, &mut output.out);
            }
            started.elapsed()
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::backend::{Backend, cpu::Cpu};
    use crate::bias::Bias;
    use crate::generate::Generator;
    use crate::linear::compare::{compare, compare_sample};
    use crate::linear::{LinearOutput, LinearStep, generate};
    use crate::problem::{TokenDtype, TokenFormat};

    #[test]
    fn fp8_outputs_must_match_in_every_bit() {
        for (dtype, generator) in [(TokenDtype::F16, Generator::AllCodes), (TokenDtype::Bf16, Generator::Gaussian)] {
            for k in [16, 48, 112, 336] {
                let weights = generate::weights(generator, 32, k, dtype, 1).unwrap();
                let bias = Bias::F32((0..32).map(|i| 0.3 * i as f32).collect());
                let weights = weights.with_bias(bias).unwrap().with_token_format(TokenFormat::Fp8);
                let inputs = generate::inputs(generator, 5, k, dtype, 1).unwrap();
                let step = LinearStep::new(&weights, inputs).unwrap();
                let mut output = LinearOutput::new(&step);
                Cpu::new().prepare_linear(&weights).unwrap().execute(&step, &mut output).unwrap();
                let found = compare(&weights, &step, &output);
                assert_eq!((found.checked, found.mismatches, found.max_abs_err), (5 * 32, 0, 0.0));
                output.out[70] ^= 1;
                let found = compare(&weights, &step, &output);
                assert_eq!(found.first.map(|first| (first.row, first.column)), Some((2, 6)));
                assert_eq!((found.mismatches, compare_sample(&weights, &step, &output, 900, 3).checked), (1, 900));
            }
        }
    }
}
