//! Layers whose tokens are multiplied as FP8: the sums of [`crate::fp8`], one after the other.
//!
//! No CPU adds up as Hopper's tensor cores do. So that a layer has their sums on the CPU too, each is computed step by step; it is as
//! many times slower than 16-bit tokens as steps take more instructions than dot products. Rows of weights are folded as they are needed.

use std::borrow::Cow;
use std::ops::Range;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::activation::{activated, silu_times};
use super::epilogue;
use super::moe::{combine, groups, split_stages};
use crate::backend::{LinearLayer, MoeLayer};
use crate::error::Error;
use crate::format::Matrix;
use crate::fp8::{self, Factors, Quantised, folded_row};
use crate::linear::{LinearOutput, LinearStep, LinearWeights};
use crate::moe::oracle::weighted_token;
use crate::moe::{Activation, MoeExpert, MoeOutput, MoeStep, MoeWeights, QuantisedStages};
use crate::problem::OutDtype;

/// What the backend says of such layers.
const NAME: &str = "fp8";

/// A matrix with the numbers of its bias, if it has one.
type Projection<'a> = (&'a Matrix<'a>, Option<Cow<'a, [f32]>>);

/// The products of rows with a matrix, or with gate and up, activated: `[rows, N]`.
fn multiply(
    tokens: &Quantised,
    projections: &[Projection<'_>],
    activation: Option<Activation>,
    dtype: OutDtype,
    out: &mut [u16],
) {
    let (n, k, m) = (projections[0].0.rows(), projections[0].0.k(), tokens.scales.len());
    let rows: Vec<Factors> = tokens.codes.par_chunks(k).map(Factors::new).collect();
    let mut columns = vec![0; n * m];
    columns.par_chunks_mut(m.max(1)).enumerate().for_each(|(column, out)| {
        let mut codes = vec![0; k];
        let weights: Vec<_> = projections
            .iter()
            .map(|(matrix, bias)| {
                folded_row(matrix, column, &mut codes);
                (Factors::new(&codes), matrix.global_scale(), bias.as_ref().map(|bias| bias[column]))
            })
            .collect();
        let values = rows.iter().zip(&tokens.scales).map(|(row, &scale)| {
            let projected = |index: usize| {
                let (weights, global, bias) = &weights[index];
                fp8::scaled(fp8::sum(row, weights), scale, *global, *bias)
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
pub(super) struct CpuFp8MoeLayer<'w> {
    weights: &'w MoeWeights<'w>,
}

impl<'w> CpuFp8MoeLayer<'w> {
    pub(super) fn new(weights: &'w MoeWeights<'w>) -> Self {
        Self { weights }
    }

    /// The bits that an expert multiplies, of some of its rows.
    fn tokens(&self, step: &MoeStep<'_>, expert: usize, rows: Range<usize>) -> Vec<u16> {
        let (inputs, is_shared) = (step.inputs(), expert == self.weights.sizes().experts);
        let token = |row: usize| if is_shared { row - step.rows().count() } else { step.rows().tokens()[row] as usize };
        let bits = |token: usize| -> Cow<'_, [u16]> {
            if inputs.weights_on_input && !is_shared {
                weighted_token(step.sizes().dtype, step.token(token), inputs.weights[token]).into()
            } else {
                step.token(token).into()
            }
        };
        rows.flat_map(|row| bits(token(row)).into_owned()).collect()
    }
}

/// An expert's gate and up, or its down.
fn projections<'a>(expert: &'a MoeExpert<'_>, is_down: bool, dtype: OutDtype) -> Vec<Projection<'a>> {
    let chosen = expert.projections().filter(|(name, ..)| (*name == "down") == is_down);
    chosen.map(|(_, matrix, bias)| (matrix, bias.map(|bias| bias.numbers(dtype)))).collect()
}

impl MoeLayer for CpuFp8MoeLayer<'_> {
    fn kernel(&self) -> &str {
        NAME
    }

    fn execute(&mut self, step: &MoeStep<'_>, output: &mut MoeOutput) -> Result<Duration, Error> {
        let sizes = self.weights.sizes();
        step.check_fits(sizes)?;
        output.check_fits(step)?;
        let started = Instant::now();
        let (dtype, mut quantised) = (sizes.dtype, QuantisedStages::default());
        let (mut intermediate, mut partial) = (Vec::new(), Vec::new());
        // In the order of rows, so that each group's are appended.
        for (expert, rows) in groups(step) {
            let is_shared = expert == sizes.experts;
            let weights = self.weights.experts().get(expert).or(self.weights.shared()).expect("an expert of the layer");
            let tokens = Quantised::of(dtype, &self.tokens(step, expert, rows.clone()), sizes.hidden);
            let (first, width) = (intermediate.len(), weights.up.rows());
            intermediate.resize(first + rows.len() * width, 0);
            let of_group = &mut intermediate[first..];
            multiply(&tokens, &projections(weights, false, dtype), Some(sizes.activation), dtype, of_group);
            let activated = Quantised::of(dtype, of_group, width);
            let first = partial.len();
            partial.resize(first + rows.len() * sizes.hidden, 0);
            multiply(&activated, &projections(weights, true, dtype), None, dtype, &mut partial[first..]);
            if output.stages.is_some() {
                let QuantisedStages { tokens: own, intermediate, shared_tokens, shared_intermediate } = &mut quantised;
                let [to_tokens, to_intermediate] =
                    if is_shared { [shared_tokens, shared_intermediate] } else { [own, intermediate] };
                to_tokens.append(tokens);
                to_intermediate.append(activated);
            }
        }
        combine(step, &partial, &mut output.hidden);
        let elapsed = started.elapsed();
        if output.stages.is_some() {
            output.stages = Some(split_stages(step, &intermediate, &partial, Some(quantised)));
        }
        Ok(elapsed)
    }
}

/// A linear layer.
pub(super) struct CpuFp8Linear<'w> {
    weights: &'w LinearWeights<'w>,
}

impl<'w> CpuFp8Linear<'w> {
    pub(super) fn new(weights: &'w LinearWeights<'w>) -> Self {
        Self { weights }
    }
}

impl LinearLayer for CpuFp8Linear<'_> {
    fn kernel(&self) -> &str {
        NAME
    }

    fn execute(&mut self, step: &LinearStep<'_>, output: &mut LinearOutput) -> Result<Duration, Error> {
        let sizes = self.weights.sizes();
        step.check_fits(sizes)?;
        output.check_fits(step)?;
        let started = Instant::now();
        let bits: Vec<u16> = (0..step.tokens()).flat_map(|token| step.token(token)).copied().collect();
        let tokens = Quantised::of(sizes.dtype, &bits, sizes.k);
        multiply(&tokens, &[(self.weights.matrix(), self.weights.bias())], None, sizes.dtype, &mut output.out);
        Ok(started.elapsed())
    }
}
