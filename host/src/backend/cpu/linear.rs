//! A linear layer on the CPU: one product, as tiles over all threads.

use std::time::{Duration, Instant};

use super::epilogue::Epilogue;
use super::kernel::Kernel;
use super::layout::{Panels, Tokens16, columns_of_chunk};
use super::products::{Product, Products, TokenBuffer};
use crate::backend::LinearLayer;
use crate::error::Error;
use crate::linear::{LinearOutput, LinearSizes, LinearStep, LinearWeights};

/// The layer: weights in panels, and the buffers of a step, kept for the next.
pub(super) struct CpuLinear<T: Tokens16> {
    name: &'static str,
    kernel: Kernel<T>,
    sizes: LinearSizes,
    panels: Panels,
    global: f32,
    /// Empty if there is none.
    bias: Vec<f32>,
    tokens: TokenBuffer<T>,
    products: Products,
}

impl<T: Tokens16> CpuLinear<T> {
    pub(super) fn new(name: &'static str, kernel: Kernel<T>, weights: &LinearWeights<'_>) -> Result<Self, Error> {
        Ok(Self {
            name,
            kernel,
            sizes: weights.sizes(),
            panels: Panels::new(&[weights.matrix()])?,
            global: weights.matrix().global_scale(),
            bias: weights.bias().map_or(Vec::new(), |bias| bias.into_owned()),
            tokens: TokenBuffer::new(),
            products: Products::default(),
        })
    }
}

impl<T: Tokens16> LinearLayer for CpuLinear<T> {
    fn kernel(&self) -> &str {
        self.name
    }

    fn execute(&mut self, step: &LinearStep<'_>, output: &mut LinearOutput) -> Result<Duration, Error> {
        step.check_fits(self.sizes)?;
        output.check_fits(step)?;
        let started = Instant::now();
        let (dtype, m) = (self.sizes.dtype, step.tokens());
        if m > 0 {
            self.tokens.fill(std::iter::once((m, self.sizes.k)), |_, row, chunk, out| {
                T::unpack(dtype, columns_of_chunk::<T>(step.token(row), chunk), out);
            });
            let product = |_| Product {
                weights: &self.panels,
                tokens: self.tokens.of(0),
                m,
                epilogue: Epilogue::of_bits16([self.global, 0.0], [&self.bias, &[]], None, dtype),
            };
            self.products.run(&self.kernel, 1, product, &mut output.out);
        }
        Ok(started.elapsed())
    }
}
