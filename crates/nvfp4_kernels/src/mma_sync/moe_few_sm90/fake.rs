//! The kernel's implementation for the fake driver.

use fake_cuda::Launch;
use kernels_gpu::mma_sync::moe_few_sm90::abi::{
    Blocks, Choices, DOWN_ENTRIES, Down, GATE_UP_ENTRIES, GateUp, Matrices, ONE_DOWN_ENTRIES, ONE_GATE_UP_ENTRIES,
};
use kernels_gpu::units::matrix_bytes;

use crate::fake::{dot, slice, slice_mut};
use crate::layer::moe_pack::row_order::columns_of_k;
use crate::layer::moe_pack::units::unpack;
use crate::moe::operand_type;
use crate::wgmma::moe_sm90::activated;
use nvfp4_core::problem::TokenDtype;

/// Computes the launched entry by the kernel's contract.
pub(super) fn launch(launch: &Launch<'_>) {
    assert_eq!((launch.block[1], launch.block[2]), (1, 1));
    let one = [ONE_GATE_UP_ENTRIES, ONE_DOWN_ENTRIES].concat().contains(&launch.kernel);
    assert_eq!(launch.shared_bytes, Blocks { warps: launch.block[0] / 32, one }.shared_bytes());
    let dtype = if launch.kernel.ends_with("_bf16") { TokenDtype::Bf16 } else { TokenDtype::F16 };
    // SAFETY: tests launch this with a parameter whose addresses refer to live operands of the described sizes, which
    // only this launch accesses.
    unsafe {
        if [GATE_UP_ENTRIES, ONE_GATE_UP_ENTRIES].concat().contains(&launch.kernel) {
            gate_up(&launch.parameter(0), dtype);
        } else {
            assert!([DOWN_ENTRIES, ONE_DOWN_ENTRIES].concat().contains(&launch.kernel));
            down(&launch.parameter(0), dtype);
        }
    }
}

/// Computes gate and up of every choice.
///
/// # Safety
///
/// The addresses in `launch` refer to live operands of the described sizes, which nobody else accesses.
unsafe fn gate_up(launch: &GateUp, dtype: TokenDtype) {
    let Matrices { n, k, .. } = launch.matrices;
    let columns = columns_of_k(n);
    // SAFETY: the caller guarantees that every address in `launch` refers to a live operand of the described size,
    // which nobody else accesses.
    unsafe {
        for (choice, expert) in experts(&launch.choices) {
            let token = u64::from(choice / launch.choices.top_k);
            let token = numbers(launch.tokens + token * launch.token_pitch, k, dtype);
            let matrices = [0, 1].map(|matrix| products(&launch.matrices, matrix, expert, &token, dtype));
            let row = launch.intermediate + 2 * u64::from(choice) * u64::from(n);
            let row: &mut [u16] = slice_mut(row, n as usize);
            for (place, &column) in columns.iter().enumerate() {
                row[column] = dtype.round(activated(&launch.activation, &matrices, |product| product[place]));
            }
        }
    }
}

/// Computes down of every choice, and the weighted sum of each token's rows.
///
/// # Safety
///
/// The addresses in `launch` refer to live operands of the described sizes, which nobody else accesses.
unsafe fn down(launch: &Down, dtype: TokenDtype) {
    let (Matrices { n, k, .. }, Choices { token_count, top_k, .. }) = (launch.matrices, launch.choices);
    // SAFETY: the caller guarantees that every address in `launch` refers to a live operand of the described size,
    // which nobody else accesses.
    unsafe {
        let mut sums = vec![0.0f32; (token_count * n) as usize];
        for (choice, expert) in experts(&launch.choices) {
            let token = numbers(launch.intermediate + 2 * u64::from(choice) * u64::from(k), k, dtype);
            let weight = *(launch.weights as *const f32).add(choice as usize);
            let sums = &mut sums[(choice / top_k * n) as usize..][..n as usize];
            for (column, product) in products(&launch.matrices, 0, expert, &token, dtype).into_iter().enumerate() {
                let bits = dtype.round(product);
                sums[column] = weight.mul_add(dtype.decode(bits) as f32, sums[column]);
                if launch.rows != 0 {
                    *((launch.rows + 2 * (u64::from(choice) * u64::from(n) + column as u64)) as *mut u16) = bits;
                }
            }
        }
        for (token, sums) in (0..).zip(sums.chunks(n as usize)) {
            let output: &mut [u16] = slice_mut(launch.output + token * launch.output_pitch, n as usize);
            output.iter_mut().zip(sums).for_each(|(to, &sum)| *to = dtype.round_f32(sum));
        }
    }
}

/// Returns each choice whose expert belongs to the layer, with the expert's number in the layer.
///
/// # Safety
///
/// The ids are valid for reads of `token_count · top_k` elements, and the map, if it is not 0, for `named_experts`.
/// Nobody writes either.
unsafe fn experts(of: &Choices) -> Vec<(u32, u32)> {
    // SAFETY: the caller guarantees `token_count · top_k` readable ids, `named_experts` readable elements of a map that
    // is not 0, and no writers.
    let (ids, map): (&[u32], Option<&[u32]>) = unsafe {
        let map = (of.map != 0).then(|| slice(of.map, of.named_experts as usize));
        (slice(of.ids, (of.token_count * of.top_k) as usize), map)
    };
    // Negative ids are large as `u32`.
    let named = (0..).zip(ids).filter(|(_, id)| **id < of.named_experts);
    named
        .map(|(choice, &id)| (choice, map.map_or(id, |map| map[id as usize])))
        .filter(|(_, e)| *e < of.experts)
        .collect()
}

/// Reads `count` numbers of type `dtype`.
///
/// # Safety
///
/// The address is valid for reads of `count` 16-bit numbers, which nobody writes.
unsafe fn numbers(address: u64, count: u32, dtype: TokenDtype) -> Vec<f64> {
    // SAFETY: the caller guarantees `count` readable 16-bit numbers that nobody writes.
    unsafe { slice::<u16>(address, count as usize) }.iter().map(|&bits| dtype.decode(bits)).collect()
}

/// Returns a token's products with the rows of an expert's matrix in packed order, times alpha, plus their biases.
///
/// # Safety
///
/// The addresses in `of` refer to live operands of the described sizes, which nobody writes.
unsafe fn products(of: &Matrices, matrix: usize, expert: u32, token: &[f64], dtype: TokenDtype) -> Vec<f64> {
    let &Matrices { n, k, .. } = of;
    // SAFETY: the caller guarantees that units, factors and biases of `expert` are readable and that nobody writes
    // them.
    let (units, alpha, bias) = unsafe {
        let units: &[u8] = slice(of.b[matrix] + u64::from(expert) * of.expert_bytes, matrix_bytes(n, k) as usize);
        let bias = of.bias[matrix] + 4 * u64::from(expert) * u64::from(n);
        let bias = (of.bias[matrix] != 0).then(|| slice::<f32>(bias, n as usize));
        (units, *(of.alpha[matrix] as *const f32).add(expert as usize), bias)
    };
    let weights = unpack(units, n, k, operand_type(dtype));
    let sum = |row: &[f64]| dot(row, token);
    let biased = |(row, weights): (usize, &[f64])| {
        f64::from(alpha) * sum(weights) + bias.map_or(0.0, |bias| f64::from(bias[row]))
    };
    weights.chunks(k as usize).enumerate().map(biased).collect()
}
