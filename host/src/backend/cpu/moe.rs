//! A whole MoE layer on the CPU: f32 sums of decoded weights. It goes through K as [`crate::moe::oracle`] lets a device do.

use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::epilogue::silu_times;
use crate::backend::MoeLayer;
use crate::error::Error;
use crate::format::Matrix;
use crate::moe::oracle::WINDOW;
use crate::moe::{MoeExpert, MoeOutput, MoeStep, MoeWeights, Stages};
use crate::problem::OutDtype;

/// Rows of weights that a task decodes: 16 of 7168 are 459 KB, within a core's L2 cache.
const WEIGHT_ROWS: usize = 16;

/// The layer: its weights stay as they are, and are decoded in every step.
pub(super) struct CpuMoeLayer<'w> {
    weights: &'w MoeWeights<'w>,
}

impl<'w> CpuMoeLayer<'w> {
    pub(super) fn new(weights: &'w MoeWeights<'w>) -> Self {
        Self { weights }
    }
}

impl MoeLayer for CpuMoeLayer<'_> {
    fn kernel(&self) -> &str {
        "f32"
    }

    fn execute(&mut self, step: &MoeStep<'_>, output: &mut MoeOutput) -> Result<Duration, Error> {
        step.check_fits(self.weights.sizes())?;
        output.check_fits(step)?;
        let started = Instant::now();
        let (dtype, rows) = (step.sizes().dtype, step.rows());
        let mut stages = Stages::default();
        for (expert, weights) in self.weights.experts().iter().enumerate() {
            let tokens = rows.of_expert(expert).map(|row| rows.tokens()[row] as usize).collect::<Vec<_>>();
            let [intermediate, partial] = expert_rows(step, weights, &tokens);
            stages.intermediate.extend(intermediate);
            stages.partial.extend(partial);
        }
        if let Some(weights) = self.weights.shared() {
            let tokens = (0..step.tokens()).collect::<Vec<_>>();
            [stages.shared_intermediate, stages.shared_partial] = expert_rows(step, weights, &tokens);
        }
        let hidden = step.sizes().hidden;
        output.hidden.par_chunks_mut(hidden).enumerate().for_each(|(token, out)| {
            let mut sums = vec![0f32; hidden];
            let mut add = |rows: &[u16], row: usize, weight: f32| {
                for (sum, &bits) in sums.iter_mut().zip(&rows[row * hidden..]) {
                    *sum = weight.mul_add(number(dtype, bits), *sum);
                }
            };
            let top_k = step.sizes().top_k;
            for choice in token * top_k..(token + 1) * top_k {
                if let Some(row) = rows.place(choice) {
                    add(&stages.partial, row, step.row_weight(choice));
                }
            }
            if self.weights.shared().is_some() {
                add(&stages.shared_partial, token, step.shared_weight(token));
            }
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out = dtype.round_f32(sum));
        });
        if output.stages.is_some() {
            output.stages = Some(stages);
        }
        Ok(started.elapsed())
    }
}

fn number(dtype: OutDtype, bits: u16) -> f32 {
    dtype.decode(bits) as f32
}

/// The intermediate and the down projection of an expert's tokens.
fn expert_rows(step: &MoeStep<'_>, weights: &MoeExpert<'_>, tokens: &[usize]) -> [Vec<u16>; 2] {
    let (dtype, inputs) = (step.sizes().dtype, step.inputs());
    let weighted = |token: usize, bits: u16| {
        if !inputs.weights_on_input {
            return number(dtype, bits);
        }
        number(dtype, dtype.round_f32(number(dtype, bits) * inputs.weights[token]))
    };
    let numbers: Vec<f32> =
        tokens.iter().flat_map(|&token| step.token(token).iter().map(move |&bits| weighted(token, bits))).collect();
    let [gate, up] = [&weights.gate, &weights.up].map(|matrix| products(&numbers, matrix));
    let intermediate: Vec<u16> =
        gate.par_iter().zip(&up).map(|(&gate, &up)| dtype.round_f32(silu_times(gate, up))).collect();
    let numbers: Vec<f32> = intermediate.par_iter().map(|&bits| number(dtype, bits)).collect();
    let partial = products(&numbers, &weights.down).par_iter().map(|&sum| dtype.round_f32(sum)).collect();
    [intermediate, partial]
}

/// Rows of K numbers times the matrix `[N, K]`, `[rows, N]`.
pub(super) fn products(numbers: &[f32], matrix: &Matrix<'_>) -> Vec<f32> {
    let (n, k) = (matrix.rows(), matrix.k());
    let rows = numbers.len() / k;
    // Computed as [N, rows], so that each task owns whole rows.
    let mut transposed = vec![0f32; n * rows];
    transposed.par_chunks_mut(WEIGHT_ROWS * rows.max(1)).enumerate().for_each(|(chunk, out)| {
        let mut weights = vec![0f32; k];
        for (row, out) in out.chunks_mut(rows).enumerate() {
            matrix.numbers_row(chunk * WEIGHT_ROWS + row, &mut weights);
            for (out, numbers) in out.iter_mut().zip(numbers.chunks(k)) {
                *out = dot_product(numbers, &weights) * matrix.global_scale();
            }
        }
    });
    let mut products = vec![0f32; rows * n];
    products.par_chunks_mut(n).enumerate().for_each(|(row, out)| {
        out.iter_mut().enumerate().for_each(|(column, out)| *out = transposed[column * rows + row]);
    });
    products
}

/// A dot product on the widest vectors that this machine has; the same bits on all.
fn dot_product(numbers: &[f32], weights: &[f32]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: avx512f was detected on the line above.
            return unsafe { dot_product_avx512(numbers, weights) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: avx2 was detected on the line above.
            return unsafe { dot_product_avx2(numbers, weights) };
        }
    }
    dot_product_portable(numbers, weights)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn dot_product_avx512(numbers: &[f32], weights: &[f32]) -> f32 {
    dot_product_portable(numbers, weights)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn dot_product_avx2(numbers: &[f32], weights: &[f32]) -> f32 {
    dot_product_portable(numbers, weights)
}

/// Window after window, each as 16 sums that are added in pairs. Products are exact: 11 bits times 6.
#[inline(always)]
fn dot_product_portable(numbers: &[f32], weights: &[f32]) -> f32 {
    const LANES: usize = crate::format::BLOCK;
    let windows = numbers.chunks(WINDOW).zip(weights.chunks(WINDOW));
    windows.fold(0.0, |sum, (numbers, weights)| {
        let mut lanes = [0f32; LANES];
        for (numbers, weights) in numbers.as_chunks::<LANES>().0.iter().zip(weights.as_chunks::<LANES>().0) {
            for lane in 0..LANES {
                lanes[lane] += numbers[lane] * weights[lane];
            }
        }
        for half in [8, 4, 2, 1] {
            for lane in 0..half {
                lanes[lane] += lanes[lane + half];
            }
        }
        sum + lanes[0]
    })
}
