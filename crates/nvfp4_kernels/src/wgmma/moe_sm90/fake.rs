//! The kernel's implementation for the fake driver.

use fake_cuda::Launch;
use kernels_gpu::curve::Curve;
use kernels_gpu::epilogue::{Activation, NO_PARAMETERS, PARAMETERS};
use kernels_gpu::moe as abi;
use kernels_gpu::sorted::{bits16_bytes, bits16_place};
use kernels_gpu::units::{OperandType, matrix_bytes};

use crate::fake::{dot, slice};
use crate::layer::moe_pack::row_order::columns_of_k;
use crate::layer::moe_pack::units::unpack;
use crate::products::ProductInstance;
use nvfp4_core::oracle::silu;
use nvfp4_core::problem::TokenDtype;

/// Computes every expert's rows by the contract of kernels with these instances.
pub(crate) fn launch(launch: &Launch<'_>, instances: &[ProductInstance]) {
    let instance = instances.iter().find(|instance| instance.entry == launch.kernel).unwrap();
    assert_eq!(launch.block, [instance.threads, 1, 1]);
    assert!(launch.shared_bytes >= instance.shared_bytes);
    let operand_type = instance.operand_type.expect("these weights are packed for a type");
    let dtype = match operand_type {
        OperandType::F16 => TokenDtype::F16,
        OperandType::Bf16 => TokenDtype::Bf16,
        OperandType::E4m3 => panic!("another kernel multiplies e4m3"),
    };
    // SAFETY: tests launch this with a parameter whose addresses refer to live operands of the described sizes, which
    // only this launch accesses.
    unsafe {
        let parameter: abi::Launch = launch.parameter(0);
        let abi::Launch { n, k, experts, row_capacity, .. } = parameter;
        assert_eq!(*(parameter.ticket as *const u32), 0, "the ticket is 0 before the launch");
        let firsts: &[u32] = slice(parameter.firsts, experts as usize + 1);
        let tile_firsts: &[u32] = slice(parameter.tile_firsts, experts as usize + 1);
        let order = columns_of_k(k);
        for expert in 0..experts as usize {
            let rows = firsts[expert]..firsts[expert + 1];
            let tiles = tile_firsts[expert + 1] - tile_firsts[expert];
            assert_eq!(tiles, rows.len().div_ceil(instance.tile_tokens as usize) as u32, "another tile size");
            if rows.is_empty() {
                continue;
            }
            let projections: Vec<_> = (0..instance.matrices as usize)
                .map(|index| {
                    let units =
                        slice(parameter.b[index] + expert as u64 * parameter.expert_bytes, matrix_bytes(n, k) as usize);
                    let alpha = *(parameter.alpha[index] as *const f32).add(expert);
                    let bias = parameter.bias[index];
                    let bias = (bias != 0).then(|| slice::<f32>(bias + 4 * expert as u64 * u64::from(n), n as usize));
                    (unpack(units, n, k, operand_type), f64::from(alpha), bias)
                })
                .collect();
            for row in rows {
                let mut natural = vec![0.0; k as usize];
                if instance.sorted {
                    let tokens: &[u16] = slice(parameter.tokens, bits16_bytes(row_capacity.into(), k) as usize / 2);
                    let place = |position| bits16_place(row_capacity, k, row, position) as usize / 2;
                    let tokens = (0..).map(|position| tokens[place(position)]);
                    order.iter().zip(tokens).for_each(|(&element, bits)| natural[element] = dtype.decode(bits));
                } else {
                    let token =
                        if parameter.rows == 0 { row } else { *(parameter.rows as *const u32).add(row as usize) };
                    let tokens: &[u16] = slice(parameter.tokens + 2 * u64::from(token) * u64::from(k), k as usize);
                    order.iter().zip(tokens).for_each(|(&element, &bits)| natural[element] = dtype.decode(bits));
                }
                let is_sorted = instance.sorted && parameter.c_is_sorted != 0;
                let place = |column: usize| {
                    if is_sorted {
                        bits16_place(row_capacity, n, row, column as u32)
                    } else {
                        2 * (u64::from(row) * u64::from(n) + column as u64)
                    }
                };
                for column in 0..n as usize {
                    let c = &mut *((parameter.c + place(column)) as *mut u16);
                    let product = |(weights, alpha, bias): &(Vec<f64>, f64, Option<&[f32]>)| {
                        let weights = &weights[column * k as usize..][..k as usize];
                        alpha * dot(&natural, weights) + bias.map_or(0.0, |bias| f64::from(bias[column]))
                    };
                    *c = dtype.round(activated(&parameter.activation, &projections, product));
                }
            }
        }
    }
}

/// Returns the curve that a launch selects.
fn curve_of(activation: &Activation) -> Option<Curve> {
    Curve::ALL.iter().copied().find(|&curve| curve as u32 == activation.kind)
}

/// Returns the result for the products of one or two projections, with the activation applied.
pub(crate) fn activated<P>(activation: &Activation, projections: &[P], product: impl Fn(&P) -> f64) -> f64 {
    match projections {
        [gate, up] => gated(activation, product(gate), product(up)),
        one if activation.kind == PARAMETERS => product(&one[0]).max(0.0).powi(2),
        one => product(&one[0]),
    }
}

/// Applies the launch's activation to gate and up.
fn gated(activation: &Activation, gate: f64, up: f64) -> f64 {
    if activation.kind == NO_PARAMETERS {
        return silu(gate) * up;
    }
    if let Some(curve) = curve_of(activation) {
        return curve.apply(activation.numbers(), gate as f32, up as f32).into();
    }
    let [slope, cubic, limit, offset] =
        [activation.exponent[0], activation.exponent[1], activation.limit, activation.offset].map(f64::from);
    let x = gate.min(limit);
    x / (1.0 + (slope * x + cubic * x.powi(3)).exp2()) * (up.clamp(-limit, limit) + offset)
}
