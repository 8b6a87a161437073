//! What one would write without this library: dequantise to f32, multiply with the `gemm` crate, then silu and product.

use gemm::Parallelism;
use nvfp4::Output;
use nvfp4::format::Matrix;
use nvfp4::problem::{Step, Weights};
use rayon::prelude::*;

/// A gated problem in f32.
pub struct Rival<'a> {
    weights: &'a Weights<'a>,
    step: &'a Step<'a>,
    groups: Vec<Group>,
}

/// Numbers of a group, and room for its products.
struct Group {
    /// `[M, K]`.
    tokens: Vec<f32>,
    /// Gate and up, `[N, K]`.
    weights: [Vec<f32>; 2],
    /// Gate and up, `[M, N]`.
    products: [Vec<f32>; 2],
}

impl<'a> Rival<'a> {
    /// Makes room for everything, so that no run allocates.
    pub fn new(weights: &'a Weights<'a>, step: &'a Step<'a>) -> Self {
        let room = |rows: usize, columns: usize| vec![0.0; rows * columns];
        let groups = step.problem().groups().iter().map(|sizes| Group {
            tokens: room(sizes.m, sizes.k),
            weights: [room(sizes.n, sizes.k), room(sizes.n, sizes.k)],
            products: [room(sizes.m, sizes.n), room(sizes.m, sizes.n)],
        });
        Self { weights, step, groups: groups.collect() }
    }

    /// Writes all numbers as f32, global scales included.
    pub fn dequantize(&mut self) {
        let experts = self.weights.experts().par_iter().zip(self.step.activations());
        self.groups.par_iter_mut().zip(experts).for_each(|(group, (expert, tokens))| {
            dequantize(tokens, &mut group.tokens);
            expert.projections().zip(&mut group.weights).for_each(|(matrix, numbers)| dequantize(matrix, numbers));
        });
    }

    /// Multiplies what was dequantised, gates and rounds: groups beside each other, and each on all threads.
    pub fn multiply(&mut self, output: &mut Output) {
        let sizes = self.step.problem().groups();
        let dtype = output.dtype();
        let outputs: Vec<_> = output.groups_mut().collect();
        self.groups.par_iter_mut().zip(sizes).zip(outputs).for_each(|((group, sizes), output)| {
            let (m, n, k) = (sizes.m, sizes.n, sizes.k);
            for (weights, products) in group.weights.iter().zip(&mut group.products) {
                // Strides, columns first: products and tokens are row-major, weights are Bᵀ of a row-major B.
                let strides = [[1, n as isize], [1, k as isize], [k as isize, 1]];
                let [product, token, weight] = strides;
                // SAFETY: the buffers hold [M, N], [M, K] and [N, K] numbers, as `new` made them, and do not overlap.
                unsafe {
                    gemm::gemm(
                        m,
                        n,
                        k,
                        products.as_mut_ptr(),
                        product[0],
                        product[1],
                        false,
                        group.tokens.as_ptr(),
                        token[0],
                        token[1],
                        weights.as_ptr(),
                        weight[0],
                        weight[1],
                        0.0,
                        1.0,
                        false,
                        false,
                        false,
                        Parallelism::Rayon(0),
                    );
                }
            }
            let [gate, up] = &group.products;
            output.par_iter_mut().zip(gate).zip(up).for_each(|((bits, gate), up)| {
                *bits = dtype.round_f32(gate / (1.0 + (-gate).exp()) * up);
            });
        });
    }
}

fn dequantize(matrix: &Matrix<'_>, numbers: &mut [f32]) {
    numbers.par_chunks_mut(matrix.k()).enumerate().for_each(|(row, numbers)| matrix.dequantize_row(row, numbers));
}
