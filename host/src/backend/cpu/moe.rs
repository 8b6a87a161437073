//! An MoE layer on the CPU: both products of all experts, with their tiles spread over all threads, and the weighted
//! sum.

#[cfg(test)]
mod tests;

use std::ops::Range;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::epilogue::{self, Epilogue};
use super::kernel::Kernel;
use super::layer::MoeCompute;
use super::layout::{Panels, Tokens16, columns_of_chunk, convert};
use super::products::{Pool, Product, Products, TokenBuffer};
use crate::Error;
use crate::bias::Bias;
use crate::moe::oracle::weighted_token;
use crate::moe::{ExpertTransforms, MoeExpert, MoeOutput, MoeSizes, MoeStep, MoeWeights, QuantizedStages, Stages};
use crate::problem::TokenDtype;
use crate::transform::TokenTransform;

/// Weights of a layer in panels, and the buffers of its steps.
pub(super) struct PackedMoe<T: Tokens16> {
    kernel: Kernel<T>,
    sizes: MoeSizes,
    /// The layer's experts, followed by the shared expert if there is one.
    experts: Vec<PackedExpert>,
    /// Transforms of the experts in the same order. Empty if no expert has any.
    transforms: Vec<ExpertTransforms>,
    buffers: Pool<Buffers<T>>,
}

/// Buffers of one step, reused by later steps.
struct Buffers<T: Tokens16> {
    tokens: TokenBuffer<T>,
    /// Intermediate of all rows. The shared expert's rows, one per token, come last.
    intermediate: Vec<u16>,
    /// Down projections of the same rows.
    partial: Vec<u16>,
    products: Products,
}

impl<T: Tokens16> Default for Buffers<T> {
    fn default() -> Self {
        Self {
            tokens: TokenBuffer::new(),
            intermediate: Vec::new(),
            partial: Vec::new(),
            products: Products::default(),
        }
    }
}

/// Weights of an expert, with the global scales of its matrices, and its biases. A bias is empty if the projection has
/// none.
struct PackedExpert {
    /// Gate and up, or up alone.
    gate_up: Panels,
    gate_up_globals: [f32; 2],
    gate_up_biases: [Vec<f32>; 2],
    down: Panels,
    down_global: f32,
    down_bias: Vec<f32>,
}

impl PackedExpert {
    fn new(expert: &MoeExpert<'_>, dtype: TokenDtype) -> Result<Self, Error> {
        let MoeExpert { gate, up, down, biases } = expert;
        let numbers = |bias: &Option<Bias<'_>>| bias.as_ref().map_or(Vec::new(), |bias| bias.numbers(dtype).into());
        let of_up = (up.global_scale(), numbers(&biases.up));
        let (gate_up, first, second) = match gate {
            Some(gate) => (Panels::new(&[gate, up])?, (gate.global_scale(), numbers(&biases.gate)), of_up),
            None => (Panels::new(&[up])?, of_up, (0.0, Vec::new())),
        };
        Ok(Self {
            gate_up,
            gate_up_globals: [first.0, second.0],
            gate_up_biases: [first.1, second.1],
            down: Panels::new(&[down])?,
            down_global: down.global_scale(),
            down_bias: numbers(&biases.down),
        })
    }
}

impl<T: Tokens16> PackedMoe<T> {
    pub(super) fn new(kernel: Kernel<T>, weights: &MoeWeights<'_>) -> Result<Self, Error> {
        Ok(Self {
            kernel,
            sizes: weights.sizes(),
            experts: weights
                .experts()
                .iter()
                .chain(weights.shared())
                .map(|expert| PackedExpert::new(expert, weights.sizes().dtype))
                .collect::<Result<_, _>>()?,
            transforms: (0..=weights.sizes().experts).map_while(|expert| weights.transforms(expert).cloned()).collect(),
            buffers: Pool::default(),
        })
    }

    /// Returns the tokens of all rows with the transforms of their experts; `None` if no expert has any.
    fn transformed_tokens(&self, step: &MoeStep<'_>, groups: &[Group]) -> Option<Vec<u16>> {
        let tokens_of = |group: &Group| {
            let transform = self.transforms[group.expert].gate_up.as_ref();
            tokens_of(step, group.expert, group.rows.clone(), transform)
        };
        (!self.transforms.is_empty()).then(|| groups.par_iter().flat_map_iter(tokens_of).collect())
    }

    /// Returns the intermediate of all rows with the transforms of their experts; `None` if no expert has any.
    fn transformed_intermediate(&self, intermediate: &[u16], groups: &[Group]) -> Option<Vec<u16>> {
        let transformed = |group: &Group| {
            let width = self.experts[group.expert].down.k;
            let mut rows = intermediate[self.start_of(group)..][..group.rows.len() * width].to_vec();
            let transform = self.transforms[group.expert].down.iter();
            transform.for_each(|transform| rows.chunks_mut(width).for_each(|row| transform.row(self.sizes.dtype, row)));
            rows
        };
        (!self.transforms.is_empty()).then(|| groups.par_iter().flat_map_iter(transformed).collect())
    }

    /// Position of a group's first row in the intermediate. All rows before the shared expert's rows have the width of the
    /// layer's own intermediate.
    fn start_of(&self, group: &Group) -> usize {
        group.rows.start * self.sizes.intermediate
    }

    /// Computes the intermediate: gate and up of all rows, with the activation.
    fn compute_intermediate(&self, buffers: &mut Buffers<T>, step: &MoeStep<'_>, groups: &[Group]) {
        let MoeSizes { dtype, hidden, activation, .. } = self.sizes;
        let Buffers { tokens, intermediate, products, .. } = buffers;
        let transformed = self.transformed_tokens(step, groups);
        tokens.fill(groups.iter().map(|group| (group.rows.len(), hidden)), |group, row, chunk, out| {
            let Group { expert, rows } = &groups[group];
            if let Some(transformed) = &transformed {
                let bits = &transformed[(rows.start + row) * hidden..][..hidden];
                return T::unpack(dtype, columns_of_chunk::<T>(bits, chunk), out);
            }
            let is_shared = *expert == self.sizes.experts;
            let token = if is_shared { row } else { step.rows().tokens()[rows.start + row] as usize };
            let columns = columns_of_chunk::<T>(step.token(token), chunk);
            if step.inputs().weights_on_input && !is_shared {
                let weight = step.inputs().weights[token];
                let weighted = |&bits: &u16| dtype.round_f32(dtype.decode(bits) as f32 * weight);
                T::unpack(dtype, &columns.iter().map(weighted).collect::<Vec<_>>(), out);
            } else {
                T::unpack(dtype, columns, out);
            }
        });
        let product = |group: usize| {
            let expert = &self.experts[groups[group].expert];
            let biases = expert.gate_up_biases.each_ref().map(|bias| &bias[..]);
            Product {
                weights: &expert.gate_up,
                tokens: tokens.of(group),
                m: groups[group].rows.len(),
                epilogue: Epilogue::of_bits16(expert.gate_up_globals, biases, Some(activation), dtype),
            }
        };
        let elements = groups.iter().map(|group| group.rows.len() * self.experts[group.expert].gate_up.n).sum();
        intermediate.resize(elements, 0);
        products.run(&self.kernel, groups.len(), product, intermediate);
    }

    /// Computes the down projections of all rows.
    fn compute_partial(&self, buffers: &mut Buffers<T>, groups: &[Group]) {
        let Buffers { tokens, intermediate: rows_of_down, partial, products } = buffers;
        let dtype = self.sizes.dtype;
        let transformed = self.transformed_intermediate(rows_of_down, groups);
        let rows_of_down = transformed.as_ref().unwrap_or(rows_of_down);
        let width = |group: &Group| self.experts[group.expert].down.k;
        tokens.fill(groups.iter().map(|group| (group.rows.len(), width(group))), |group, row, chunk, out| {
            let group = &groups[group];
            let start = self.start_of(group) + row * width(group);
            T::unpack(dtype, columns_of_chunk::<T>(&rows_of_down[start..][..width(group)], chunk), out);
        });
        let product = |group: usize| {
            let expert = &self.experts[groups[group].expert];
            Product {
                weights: &expert.down,
                tokens: tokens.of(group),
                m: groups[group].rows.len(),
                epilogue: Epilogue::of_bits16([expert.down_global, 0.0], [&expert.down_bias, &[]], None, dtype),
            }
        };
        partial.resize(groups.iter().map(|group| group.rows.len()).sum::<usize>() * self.sizes.hidden, 0);
        products.run(&self.kernel, groups.len(), product, partial);
    }
}

/// Returns the bits of the tokens that an expert multiplies in these rows, with its transform of them.
pub(super) fn tokens_of(
    step: &MoeStep<'_>,
    expert: usize,
    rows: Range<usize>,
    transform: Option<&TokenTransform>,
) -> Vec<u16> {
    let (sizes, inputs) = (step.sizes(), step.inputs());
    let (is_shared, count) = (expert == sizes.experts, step.rows().count());
    let tokens = rows.flat_map(|row| {
        let token = if is_shared { row - count } else { step.rows().tokens()[row] as usize };
        let mut bits = match inputs.weights_on_input && !is_shared {
            true => weighted_token(sizes.dtype, step.token(token), inputs.weights[token]),
            false => step.token(token).to_vec(),
        };
        transform.into_iter().for_each(|transform| transform.row(sizes.dtype, &mut bits));
        bits
    });
    tokens.collect()
}

/// Computes each token's weighted sum of its rows in `partial`. The shared expert's rows come after all others.
pub(super) fn combine(step: &MoeStep<'_>, partial: &[u16], out: &mut [u16]) {
    let MoeSizes { hidden, top_k, dtype, shared_intermediate, .. } = step.sizes();
    let rows = step.rows();
    let room = || (vec![0f32; hidden], vec![0f32; hidden]);
    out.par_chunks_mut(hidden).enumerate().for_each_init(room, |(sums, numbers), (token, out)| {
        let mut add = |row: usize, weight: f32| {
            convert(dtype, &partial[row * hidden..][..hidden], numbers);
            add_weighted(sums, numbers, weight);
        };
        for choice in token * top_k..(token + 1) * top_k {
            if let Some(row) = rows.place(choice) {
                add(row, step.row_weight(choice));
            }
        }
        if shared_intermediate.is_some() {
            add(rows.count() + token, step.shared_weight(token));
        }
        epilogue::round(sums, dtype, out);
        sums.fill(0.0);
    });
}

/// Copies the stages, and separates the layer's own rows from the shared expert's rows.
pub(super) fn split_stages(
    step: &MoeStep<'_>,
    intermediate: &[u16],
    partial: &[u16],
    quantized: Option<QuantizedStages>,
) -> Stages {
    let (sizes, rows) = (step.sizes(), step.rows().count());
    let (intermediate, shared_intermediate) = intermediate.split_at(rows * sizes.intermediate);
    let (partial, shared_partial) = partial.split_at(rows * sizes.hidden);
    Stages {
        intermediate: intermediate.into(),
        partial: partial.into(),
        shared_intermediate: shared_intermediate.into(),
        shared_partial: shared_partial.into(),
        quantized,
    }
}

/// Returns the experts that have rows, with the range of their rows. The layer's own experts come first, numbered as in
/// [`crate::moe::Rows`], then the shared expert with number E.
pub(super) fn groups(step: &MoeStep<'_>) -> impl Iterator<Item = (usize, Range<usize>)> {
    let (sizes, rows) = (step.sizes(), step.rows());
    let own = (0..sizes.experts).map(|expert| (expert, rows.of_expert(expert)));
    let shared = sizes.shared_intermediate.map(|_| (sizes.experts, rows.count()..rows.count() + step.tokens()));
    own.chain(shared).filter(|(_, rows)| !rows.is_empty())
}

/// One item of [`groups`].
struct Group {
    expert: usize,
    rows: Range<usize>,
}

impl<T: Tokens16> MoeCompute for PackedMoe<T> {
    fn compute(&self, step: &MoeStep<'_>, output: &mut MoeOutput) -> Duration {
        self.buffers.with(|buffers| {
            let started = Instant::now();
            let groups: Vec<_> = groups(step).map(|(expert, rows)| Group { expert, rows }).collect();
            self.compute_intermediate(buffers, step, &groups);
            self.compute_partial(buffers, &groups);
            combine(step, &buffers.partial, &mut output.hidden);
            let elapsed = started.elapsed();
            if output.stages.is_some() {
                output.stages = Some(split_stages(step, &buffers.intermediate, &buffers.partial, None));
            }
            elapsed
        })
    }
}

/// Computes `sums + weight · numbers` with fused multiply-adds, in AVX2 and FMA instructions if this machine has them.
fn add_weighted(sums: &mut [f32], numbers: &[f32], weight: f32) {
    #[inline(always)]
    fn add(sums: &mut [f32], numbers: &[f32], weight: f32) {
        sums.iter_mut().zip(numbers).for_each(|(sum, &number)| *sum = weight.mul_add(number, *sum));
    }
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn add_avx2(sums: &mut [f32], numbers: &[f32], weight: f32) {
            add(sums, numbers, weight);
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: AVX2 and FMA were detected on the line above.
            return unsafe { add_avx2(sums, numbers, weight) };
        }
    }
    add(sums, numbers, weight);
}
