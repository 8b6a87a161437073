//! Layers whose tokens are multiplied in FP8 or NVFP4, with the sums of [`crate::fp8`] and [`crate::fp4`], computed one
//! after the other.
//!
//! No CPU adds FP8 products in the way of Hopper's tensor cores. To give the same sums on the CPU, each sum is computed
//! step by step. This is slower than 16-bit tokens, since a step takes more instructions than a dot product. Sums of
//! NVFP4 products are exact before they are rounded. Rows of weights are decoded when they are needed.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::activation::{activated, silu_times};
use super::epilogue;
use super::layer::{LinearCompute, MoeCompute};
use super::moe::{combine, groups, split_stages, tokens_of};
use crate::format::{BLOCK, Matrix};
use crate::fp4;
use crate::fp8::{self, folded_row};
use crate::linear::{LinearOutput, LinearStep, LinearWeights};
use crate::moe::{Activation, MoeExpert, MoeOutput, MoeStep, MoeWeights, QuantizedStages};
use crate::problem::{TokenDtype, TokenFormat};
use crate::quantized::QuantizedRows;

/// A row of tokens or of weights, decoded for multiplication.
enum Factors {
    Fp8(fp8::Factors),
    Nvfp4(fp4::Factors),
}

impl Factors {
    /// Decodes a row of tokens with K columns.
    fn of_token(format: TokenFormat, tokens: &QuantizedRows, row: usize, k: usize) -> Self {
        let codes = &tokens.codes[row * k..][..k];
        match format {
            TokenFormat::Nvfp4 => {
                let blocks = k / BLOCK;
                Self::Nvfp4(fp4::Factors::new(codes, &tokens.block_scales[row * blocks..][..blocks]))
            }
            _ => Self::Fp8(fp8::Factors::new(codes)),
        }
    }

    /// Decodes a row of weights for tokens of this format. `codes` is working memory of K bytes.
    fn of_weights(format: TokenFormat, matrix: &Matrix<'_>, row: usize, codes: &mut [u8]) -> Self {
        if format == TokenFormat::Nvfp4 {
            return Self::Nvfp4(fp4::Factors::of_row(matrix, row));
        }
        folded_row(matrix, row, codes);
        Self::Fp8(fp8::Factors::new(codes))
    }

    /// Computes one element of a projection from a row of weights (`self`) and a token with this scale.
    fn projected(&self, token: &Self, scale: f32, global: f32, bias: Option<f32>) -> f32 {
        match (self, token) {
            (Self::Fp8(weights), Self::Fp8(token)) => fp8::scaled(fp8::sum(token, weights), scale, global, bias),
            (Self::Nvfp4(weights), Self::Nvfp4(token)) => fp4::scaled(fp4::sum(token, weights), scale, global, bias),
            _ => unreachable!("tokens and weights have the same format"),
        }
    }
}

/// A matrix with the numbers of its bias, if it has a bias.
type Projection<'a> = (&'a Matrix<'a>, Option<Cow<'a, [f32]>>);

/// Multiplies rows with a matrix, or with gate and up, and applies the activation if there is one. `out` is `[rows,
/// N]`.
fn multiply(
    format: TokenFormat,
    tokens: &QuantizedRows,
    projections: &[Projection<'_>],
    activation: Option<Activation>,
    dtype: TokenDtype,
    out: &mut [u16],
) {
    let (n, k, m) = (projections[0].0.rows(), projections[0].0.k(), tokens.scales.len());
    let rows: Vec<_> = (0..m).into_par_iter().map(|row| Factors::of_token(format, tokens, row, k)).collect();
    let mut columns = vec![0; n * m];
    columns.par_chunks_mut(m.max(1)).enumerate().for_each(|(column, out)| {
        let mut codes = vec![0; k];
        let weights: Vec<_> = projections
            .iter()
            .map(|(matrix, bias)| {
                let weights = Factors::of_weights(format, matrix, column, &mut codes);
                (weights, matrix.global_scale(), bias.as_ref().map(|bias| bias[column]))
            })
            .collect();
        let values = rows.iter().zip(&tokens.scales).map(|(row, &scale)| {
            let projected = |index: usize| {
                let (weights, global, bias) = &weights[index];
                weights.projected(row, scale, *global, *bias)
            };
            match activation {
                None => projected(0),
                Some(Activation::Silu) => silu_times(projected(0), projected(1)),
                Some(activation) if activation.has_gate() => activated(activation, projected(0), projected(1)),
                Some(activation) => activated(activation, 0.0, projected(0)),
            }
        });
        epilogue::round(&mut values.collect::<Vec<_>>(), dtype, out);
    });
    out.par_chunks_mut(n).enumerate().for_each(|(row, out)| {
        out.iter_mut().zip(columns.chunks_exact(m)).for_each(|(out, column)| *out = column[row]);
    });
}

/// An MoE layer.
pub(super) struct CpuQuantizedMoe<'w> {
    weights: MoeWeights<'w>,
}

impl<'w> CpuQuantizedMoe<'w> {
    pub(super) fn new(weights: &MoeWeights<'w>) -> Self {
        Self { weights: weights.clone() }
    }
}

/// Returns an expert's gate and up, or its down.
fn projections<'a>(expert: &'a MoeExpert<'_>, is_down: bool, dtype: TokenDtype) -> Vec<Projection<'a>> {
    let chosen = expert.projections().filter(|(name, ..)| (*name == "down") == is_down);
    chosen.map(|(_, matrix, bias)| (matrix, bias.map(|bias| bias.numbers(dtype)))).collect()
}

impl MoeCompute for CpuQuantizedMoe<'_> {
    fn compute(&self, step: &MoeStep<'_>, output: &mut MoeOutput) -> Duration {
        let sizes = self.weights.sizes();
        let started = Instant::now();
        let (dtype, format, mut stages) = (sizes.dtype, sizes.token_format, QuantizedStages::default());
        let (mut intermediate, mut partial) = (Vec::new(), Vec::new());
        // In the order of rows, so that each group's rows are appended.
        for (expert, rows) in groups(step) {
            let is_shared = expert == sizes.experts;
            let weights = self
                .weights
                .experts()
                .get(expert)
                .or(self.weights.shared())
                .expect("the group's expert belongs to the layer");
            let input_scales = self.weights.input_scales(expert);
            let transforms = self.weights.transforms(expert);
            let transform = transforms.and_then(|transforms| transforms.gate_up.as_ref());
            let bits = tokens_of(step, expert, rows.clone(), transform);
            let tokens =
                QuantizedRows::of(format, dtype, &bits, sizes.hidden, input_scales.map(|scales| scales.gate_up));
            let (first, width) = (intermediate.len(), weights.up.rows());
            intermediate.resize(first + rows.len() * width, 0);
            let of_group = &mut intermediate[first..];
            multiply(format, &tokens, &projections(weights, false, dtype), Some(sizes.activation), dtype, of_group);
            let transform = transforms.and_then(|transforms| transforms.down.as_ref());
            let mut changed = transform.map(|_| of_group.to_vec());
            for (transform, rows) in transform.iter().zip(&mut changed) {
                rows.par_chunks_mut(width).for_each(|row| transform.row(dtype, row));
            }
            let of_group = changed.as_deref().unwrap_or(of_group);
            let activated = QuantizedRows::of(format, dtype, of_group, width, input_scales.map(|scales| scales.down));
            let first = partial.len();
            partial.resize(first + rows.len() * sizes.hidden, 0);
            multiply(format, &activated, &projections(weights, true, dtype), None, dtype, &mut partial[first..]);
            if output.stages.is_some() {
                let QuantizedStages { tokens: own, intermediate, shared_tokens, shared_intermediate } = &mut stages;
                let [to_tokens, to_intermediate] =
                    if is_shared { [shared_tokens, shared_intermediate] } else { [own, intermediate] };
                to_tokens.append(tokens);
                to_intermediate.append(activated);
            }
        }
        combine(step, &partial, &mut output.hidden);
        let elapsed = started.elapsed();
        if output.stages.is_some() {
            output.stages = Some(split_stages(step, &intermediate, &partial, Some(stages)));
        }
        elapsed
    }
}

/// A linear layer.
pub(super) struct CpuQuantizedLinear<'w> {
    weights: LinearWeights<'w>,
}

impl<'w> CpuQuantizedLinear<'w> {
    pub(super) fn new(weights: &LinearWeights<'w>) -> Self {
        Self { weights: weights.clone() }
    }
}

impl LinearCompute for CpuQuantizedLinear<'_> {
    fn compute(&self, step: &LinearStep<'_>, output: &mut LinearOutput) -> Duration {
        let sizes = self.weights.sizes();
        let started = Instant::now();
        let bits: Vec<u16> = (0..step.tokens()).flat_map(|token| step.token(token)).copied().collect();
        let tokens = QuantizedRows::of(sizes.token_format, sizes.dtype, &bits, sizes.k, self.weights.input_scale());
        multiply(
            sizes.token_format,
            &tokens,
            &[(self.weights.matrix(), self.weights.bias())],
            None,
            sizes.dtype,
            &mut output.out,
        );
        started.elapsed()
    }
}
