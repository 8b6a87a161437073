//! A linear layer on the CPU.

use std::time::{Duration, Instant};

use super::moe::products;
use crate::backend::LinearLayer;
use crate::error::Error;
use crate::linear::{LinearOutput, LinearStep, LinearWeights};

/// The layer: its weights stay as they are, and are decoded in every step.
pub(super) struct CpuLinear<'w> {
    weights: &'w LinearWeights<'w>,
}

impl<'w> CpuLinear<'w> {
    pub(super) fn new(weights: &'w LinearWeights<'w>) -> Self {
        Self { weights }
    }
}

impl LinearLayer for CpuLinear<'_> {
    fn kernel(&self) -> &str {
        "f32"
    }

    fn execute(&mut self, step: &LinearStep<'_>, output: &mut LinearOutput) -> Result<Duration, Error> {
        let sizes = self.weights.sizes();
        step.check_fits(sizes)?;
        output.check_fits(step)?;
        let started = Instant::now();
        let number = |&bits: &u16| sizes.dtype.decode(bits) as f32;
        let numbers: Vec<f32> = (0..step.tokens()).flat_map(|token| step.token(token).iter().map(number)).collect();
        let bias = self.weights.bias();
        let sums = products(&numbers, self.weights.matrix());
        for (at, (out, sum)) in output.out.iter_mut().zip(sums).enumerate() {
            *out = sizes.dtype.round_f32(bias.as_ref().map_or(sum, |bias| sum + bias[at % sizes.n]));
        }
        Ok(started.elapsed())
    }
}
