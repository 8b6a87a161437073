//! The kernel's implementation for the fake driver. Its tensor maps are the emulator's.

use fake_cuda::Launch;
use kernels_gpu::lists::tile_size;
use kernels_gpu::nvfp4_rows::{K_BLOCK_BYTES, row_bytes, token_scale, weight_scale_bytes};
use kernels_gpu::routed as abi;
use ptx_emulator::TensorMap;

use crate::fake::{out_dtype, slice, slice_mut};
use crate::layer::moe_quantize_nvfp4::fake::write_row;
use crate::products::ProductInstance;
use crate::wgmma::moe_sm90;
use nvfp4_core::format::blocked::BlockedScales;
use nvfp4_core::format::{BLOCK, Matrix};
use nvfp4_core::fp4::{Factors, scaled, sum};

/// Computes every expert's rows by the contract of kernels with these instances, and checks the launch and the maps.
pub(crate) fn launch(launch: &Launch<'_>, instances: &[ProductInstance]) {
    let instance = instances.iter().find(|instance| instance.entry == launch.kernel).unwrap();
    assert_eq!((launch.block, launch.shared_bytes), ([instance.threads, 1, 1], instance.shared_bytes));
    // SAFETY: tests launch this with a parameter whose addresses refer to live operands of the described sizes, which
    // only this launch accesses.
    unsafe {
        let parameter: abi::Launch = launch.parameter(0);
        let abi::Launch { n, k, experts, .. } = parameter;
        let (columns, dtype) = (k as usize, out_dtype(parameter.output));
        let values = |map: &abi::TensorMap, box_rows: u32| {
            let map = TensorMap::from_bytes(bytemuck::cast_ref(&map.0)).expect("the parameter holds a tensor map");
            assert_eq!((map.dims[0], map.box_dims[..2].to_vec()), (u64::from(k / 2), vec![K_BLOCK_BYTES, box_rows]));
            (map.global_address, map.dims[1])
        };
        let (tokens, most_rows) = values(&parameter.token_map, instance.tile_tokens);
        let (weights, weight_rows) = values(&parameter.weight_map, instance.weight_rows);
        assert_eq!(weight_rows, u64::from(experts * instance.matrices * n));
        let row = |at: u64, row: u32| slice::<u8>(at + u64::from(row) * u64::from(row_bytes(k)), columns / 2);
        // If the host knows the number of rows, the single expert has all rows, and alpha has one factor per column.
        let of_host = parameter.rows > 0;
        assert!(!of_host || (experts, instance.matrices) == (1, 1));
        let (known_rows, known_tiles) = ([0, parameter.rows], [0, parameter.rows.div_ceil(instance.tile_tokens)]);
        let (firsts, tile_firsts): (&[u32], &[u32]) = if of_host {
            (&known_rows, &known_tiles)
        } else {
            (slice(parameter.firsts, experts as usize + 1), slice(parameter.tile_firsts, experts as usize + 1))
        };
        for expert in 0..experts {
            let of = |list: &[u32]| (list[expert as usize], list[expert as usize + 1]);
            let ((first, next), (first_tile, next_tile)) = (of(firsts), of(tile_firsts));
            assert!(u64::from(next) <= most_rows);
            assert_eq!(next_tile - first_tile, (next - first).div_ceil(instance.tile_tokens), "another tile size");
            let projections: Vec<_> = (0..instance.matrices)
                .map(|index| {
                    let matrix = expert * instance.matrices + index;
                    let packed: Vec<u8> =
                        (0..n).flat_map(|column| row(weights, matrix * n + column)).copied().collect();
                    let at = parameter.weight_scales + u64::from(matrix) * weight_scale_bytes(n, k);
                    let blocked = slice::<u8>(at, weight_scale_bytes(n, k) as usize);
                    let scales = BlockedScales::new(n as usize, columns / BLOCK, blocked).unwrap().to_linear();
                    let matrix = Matrix::new(n as usize, columns, packed, scales, 1.0).unwrap();
                    let alphas = if of_host { n } else { experts };
                    let alpha: &[f32] = slice(parameter.alpha[index as usize], alphas as usize);
                    let bias = parameter.bias[index as usize];
                    let bias = (bias != 0).then(|| slice::<f32>(bias + 4 * u64::from(expert * n), n as usize));
                    let rows: Vec<_> = (0..n as usize).map(|row| Factors::of_row(&matrix, row)).collect();
                    (rows, alpha, bias)
                })
                .collect();
            for token in first..next {
                let size = tile_size(next - first, next_tile - first_tile);
                let (tile, in_tile) = (first_tile + (token - first) / size, (token - first) % size);
                let codes: Vec<u8> = row(tokens, token).iter().flat_map(|value| [value & 0xF, value >> 4]).collect();
                let scale = |block| *((parameter.token_scales + token_scale(tile, in_tile, block, k)) as *const u8);
                let scales: Vec<u8> = (0..k / BLOCK as u32).map(scale).collect();
                let (factors, global) =
                    (Factors::new(&codes, &scales), *(parameter.globals as *const f32).add(token as usize));
                let mut of_row = vec![0; n as usize];
                for (column, c) in of_row.iter_mut().enumerate() {
                    let product = |(weights, alpha, bias): &(Vec<Factors>, &[f32], Option<&[f32]>)| {
                        let bias = bias.map(|bias| bias[column]);
                        let alpha = alpha[if of_host { column } else { expert as usize }];
                        f64::from(scaled(sum(&factors, &weights[column]), global, alpha, bias))
                    };
                    *c = dtype.round(moe_sm90::activated(&parameter.activation, &projections, product));
                }
                if parameter.c != 0 {
                    slice_mut::<u16>(parameter.c + 2 * u64::from(token) * u64::from(n), n as usize)
                        .copy_from_slice(&of_row);
                }
                let abi::QuantizedC { input_scales, values, scales, globals } = parameter.quantized;
                if input_scales != 0 {
                    let scale = *(input_scales as *const f32).add(expert as usize);
                    let global = write_row([values, scales], [token, tile, in_tile], dtype, &of_row, Some(scale));
                    *(globals as *mut f32).add(token as usize) = global;
                }
            }
        }
    }
}
