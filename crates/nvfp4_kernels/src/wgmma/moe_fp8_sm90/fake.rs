//! The kernel's implementation for the fake driver.

use fake_cuda::Launch;
use kernels_gpu::sorted::LINE_BYTES;
use kernels_gpu::units::{OperandType, k_blocks, matrix_bytes};
use kernels_gpu::wgmma::moe_fp8_sm90::abi::{self, INSTANCES};

use crate::fake::{out_dtype, slice, slice_mut};
use crate::layer::moe_pack::units::unpack;
use crate::layer::moe_quantize::code_places;
use crate::wgmma::moe_sm90;
use nvfp4_core::format::e4m3;
use nvfp4_core::fp8::{FOLD, Factors, sum};

/// Computes every expert's rows by the kernel's contract.
pub(super) fn launch(launch: &Launch<'_>) {
    let instance = INSTANCES.iter().find(|instance| instance.entry == launch.kernel).unwrap();
    assert_eq!((launch.block, launch.shared_bytes), ([instance.threads(), 1, 1], instance.shared_bytes()));
    // SAFETY: tests launch this with a parameter whose addresses refer to live operands of the described sizes, which
    // only this launch accesses.
    unsafe {
        let parameter: abi::Launch = launch.parameter(0);
        let abi::Launch { n, k, experts, row_capacity, .. } = parameter;
        let dtype = out_dtype(parameter.output);
        let known = [0, parameter.rows];
        let (firsts, tile_firsts) = if parameter.rows > 0 {
            assert!((instance.matrices, experts) == (1, 1) && parameter.rows <= row_capacity, "{parameter:?}");
            (&known[..], None)
        } else {
            assert_eq!(*(parameter.ticket as *const u32), 0, "the ticket is 0 before the launch");
            let list = |address| slice::<u32>(address, experts as usize + 1);
            (list(parameter.firsts), Some(list(parameter.tile_firsts)))
        };
        let codes: &[u8] = slice(parameter.tokens, (row_capacity * k_blocks(k) * LINE_BYTES) as usize);
        let scales: &[f32] = slice(parameter.scales, row_capacity as usize);
        for expert in 0..experts as usize {
            let rows = firsts[expert]..firsts[expert + 1];
            if let Some(tile_firsts) = tile_firsts {
                let tiles = tile_firsts[expert + 1] - tile_firsts[expert];
                assert_eq!(tiles, rows.len().div_ceil(instance.tile_tokens as usize) as u32, "another tile size");
            }
            let projections: Vec<_> = (0..instance.matrices as usize)
                .map(|index| {
                    let units =
                        slice(parameter.b[index] + expert as u64 * parameter.expert_bytes, matrix_bytes(n, k) as usize);
                    // If the host knows the number of rows, alpha has one factor per column.
                    let factors = if parameter.rows > 0 { n as usize } else { 1 };
                    let alpha: Vec<f32> = slice(parameter.alpha[index] + 4 * expert as u64, factors).to_vec();
                    let bias = parameter.bias[index];
                    let bias = (bias != 0).then(|| slice::<f32>(bias + 4 * expert as u64 * u64::from(n), n as usize));
                    let folded = |number: &f64| e4m3::encode_signed(*number as f32 / FOLD);
                    let weights: Vec<u8> = unpack(units, n, k, OperandType::E4m3).iter().map(folded).collect();
                    (weights.chunks(k as usize).map(Factors::new).collect::<Vec<_>>(), alpha, bias)
                })
                .collect();
            for row in rows {
                let mut natural = vec![0; k as usize];
                code_places(row_capacity, row, k).for_each(|(column, place)| natural[column] = codes[place]);
                let token = Factors::new(&natural);
                let c: &mut [u16] = slice_mut(parameter.c + 2 * u64::from(row) * u64::from(n), n as usize);
                for (column, c) in c.iter_mut().enumerate() {
                    let product = |(weights, alpha, bias): &(Vec<Factors>, Vec<f32>, Option<&[f32]>)| {
                        let factor = scales[row as usize] * (FOLD * alpha[column % alpha.len()]);
                        f64::from(factor.mul_add(sum(&weights[column], &token), bias.map_or(-0.0, |bias| bias[column])))
                    };
                    *c = dtype.round(moe_sm90::activated(&parameter.activation, &projections, product));
                }
            }
        }
    }
}
