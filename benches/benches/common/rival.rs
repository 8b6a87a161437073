//! Code that one would write without this library: dequantize to f32, multiply with the `gemm` crate, then silu and
//! product.

use gemm_common::Parallelism;
use nvfp4::Output;
use nvfp4::format::Matrix;
use nvfp4::moe::{MoeStep, MoeWeights};
use nvfp4::problem::{Step, TokenDtype, Weights};
use rayon::prelude::*;

/// A gated problem in f32.
pub struct Rival<'a> {
    weights: &'a Weights<'a>,
    step: &'a Step<'a>,
    groups: Vec<Group>,
}

/// Numbers of a group, and buffers for its products.
struct Group {
    /// `[M, K]`.
    tokens: Vec<f32>,
    /// Gate and up, `[N, K]`.
    weights: [Vec<f32>; 2],
    /// Gate and up, `[M, N]`.
    products: [Vec<f32>; 2],
}

impl<'a> Rival<'a> {
    /// Allocates all buffers, so that no run allocates.
    pub fn new(weights: &'a Weights<'a>, step: &'a Step<'a>) -> Self {
        let room = |rows: usize, columns: usize| vec![0.0; rows * columns];
        let groups = step.problem().groups().iter().map(|sizes| Group {
            tokens: room(sizes.m, sizes.k),
            weights: [room(sizes.n, sizes.k), room(sizes.n, sizes.k)],
            products: [room(sizes.m, sizes.n), room(sizes.m, sizes.n)],
        });
        Self { weights, step, groups: groups.collect() }
    }

    /// Dequantizes all matrices to f32, with their global scales.
    pub fn dequantize(&mut self) {
        let experts = self.weights.experts().par_iter().zip(self.step.activations());
        self.groups.par_iter_mut().zip(experts).for_each(|(group, (expert, tokens))| {
            dequantize(tokens, &mut group.tokens);
            expert.projections().zip(&mut group.weights).for_each(|(matrix, numbers)| dequantize(matrix, numbers));
        });
    }

    /// Multiplies the dequantized matrices, applies the gate and rounds. Groups run in parallel, each on all threads.
    pub fn multiply(&mut self, output: &mut Output) {
        let sizes = self.step.problem().groups();
        let dtype = output.dtype();
        let outputs: Vec<_> = output.groups_mut().collect();
        self.groups.par_iter_mut().zip(sizes).zip(outputs).for_each(|((group, sizes), output)| {
            let (m, n, k) = (sizes.m, sizes.n, sizes.k);
            for (weights, products) in group.weights.iter().zip(&mut group.products) {
                multiply(m, n, k, &group.tokens, weights, products);
            }
            let [gate, up] = &group.products;
            output.par_iter_mut().zip(gate).zip(up).for_each(|((bits, gate), up)| {
                *bits = dtype.round_f32(silu(*gate) * up);
            });
        });
    }
}

fn dequantize(matrix: &Matrix<'_>, numbers: &mut [f32]) {
    numbers.par_chunks_mut(matrix.k()).enumerate().for_each(|(row, numbers)| matrix.dequantize_row(row, numbers));
}

/// Computes tokens `[M, K]` times the transpose of weights `[N, K]` into products `[M, N]`, on all threads.
fn multiply(m: usize, n: usize, k: usize, tokens: &[f32], weights: &[f32], products: &mut [f32]) {
    assert_eq!([tokens.len(), weights.len(), products.len()], [m * k, n * k, m * n], "whole matrices");
    // The function is fast for a column-major result, so it computes the transpose: [N, K] times [K, M]. Strides follow,
    // columns first.
    let [product, weight, token] = [[n as isize, 1], [1, k as isize], [k as isize, 1]];
    let multiply = gemm_f32::gemm::f32::get_gemm_fn();
    // SAFETY: by the assertion the buffers hold [M, N], [M, K] and [N, K] numbers, and they are distinct borrows.
    unsafe {
        multiply(
            n,
            m,
            k,
            products.as_mut_ptr(),
            product[0],
            product[1],
            false,
            weights.as_ptr(),
            weight[0],
            weight[1],
            tokens.as_ptr(),
            token[0],
            token[1],
            0.0,
            1.0,
            false,
            false,
            false,
            Parallelism::Rayon(0),
        );
    }
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// A whole MoE layer in f32: one expert after another, each on all threads, in reused buffers.
pub struct LayerRival<'a> {
    weights: &'a MoeWeights<'a>,
    /// A dequantized matrix.
    numbers: Vec<f32>,
    /// An expert's tokens.
    tokens: Vec<f32>,
    /// Products with gate, up and down.
    products: [Vec<f32>; 3],
    /// `[T, H]`.
    output: Vec<f32>,
}

impl<'a> LayerRival<'a> {
    /// Makes the rival of a layer without a shared expert.
    pub fn new(weights: &'a MoeWeights<'a>) -> Self {
        let empty = Vec::new;
        Self { weights, numbers: empty(), tokens: empty(), products: [empty(), empty(), empty()], output: empty() }
    }

    /// Returns the layer's output for a step.
    pub fn run(&mut self, step: &MoeStep<'_>) -> &[f32] {
        let (sizes, rows) = (step.sizes(), step.rows());
        let Self { weights, numbers, tokens, products: [gate, up, down], output } = self;
        output.clear();
        output.resize(step.tokens() * sizes.hidden, 0.0);
        let mut times = |matrix: &Matrix<'_>, tokens: &[f32], products: &mut Vec<f32>| {
            let (n, k) = (matrix.rows(), matrix.k());
            numbers.resize(n * k, 0.0);
            dequantize(matrix, numbers);
            products.resize(tokens.len() / k * n, 0.0);
            multiply(tokens.len() / k, n, k, tokens, numbers, products);
        };
        for (index, expert) in weights.experts().iter().enumerate() {
            let of_expert = rows.of_expert(index);
            if of_expert.is_empty() {
                continue;
            }
            tokens.clear();
            for &token in &rows.tokens()[of_expert.clone()] {
                tokens.extend(step.token(token as usize).iter().map(|&bits| number(sizes.dtype, bits)));
            }
            let gate_matrix = expert.gate.as_ref().expect("the rival supports only SwiGLU");
            times(gate_matrix, tokens, gate);
            times(&expert.up, tokens, up);
            gate.par_iter_mut().zip(&*up).for_each(|(gate, up)| *gate = silu(*gate) * up);
            times(&expert.down, gate, down);
            // The loop goes over choices, not rows, because a token may name an expert twice.
            for choice in 0..step.tokens() * sizes.top_k {
                let Some(row) = rows.place(choice).filter(|row| of_expert.contains(row)) else { continue };
                let (token, down) = (choice / sizes.top_k, &down[(row - of_expert.start) * sizes.hidden..]);
                for (sum, down) in output[token * sizes.hidden..][..sizes.hidden].iter_mut().zip(down) {
                    *sum += step.row_weight(choice) * down;
                }
            }
        }
        output
    }

    /// Compares with another output of a step.
    ///
    /// # Panics
    /// If they differ by more than the rounding to 16 bits explains, so that no bench times a wrong result.
    pub fn check(&mut self, step: &MoeStep<'_>, hidden: &[u16]) {
        let dtype = step.sizes().dtype;
        let output = self.run(step);
        let largest = output.iter().fold(0.0, |largest: f32, number| largest.max(number.abs()));
        assert_eq!(output.len(), hidden.len(), "expected outputs of the same length");
        for (&got, &bits) in output.iter().zip(hidden) {
            let want = number(dtype, bits);
            assert!((got - want).abs() <= 0.02 * largest, "gemm: expected {want}, got {got}");
        }
    }
}

fn number(dtype: TokenDtype, bits: u16) -> f32 {
    dtype.decode(bits) as f32
}
