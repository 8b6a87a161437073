//! The kernel's implementation for the fake driver.

use fake_cuda::Launch;
use kernels_gpu::layer::moe_quantize_nvfp4::abi::{ENTRIES, FEW_ENTRIES, Quantize, ROUTE_ENTRIES, RouteQuantize};
use kernels_gpu::lists::{tile_size, token_tiles};
use kernels_gpu::nvfp4_rows::{row_bytes, scale_tiles, token_scale};

use crate::fake::{slice, slice_mut};
use crate::layer::quantize_fake::Tokens;
use nvfp4_core::format::BLOCK;
use nvfp4_core::fp4::quantize_token;
use nvfp4_core::moe::Rows;
use nvfp4_core::problem::TokenDtype;

/// Quantizes every token by the kernel's contract.
pub(super) fn launch(launch: &Launch<'_>) {
    let routes = ROUTE_ENTRIES.contains(&launch.kernel);
    let few = routes || FEW_ENTRIES.contains(&launch.kernel);
    assert_eq!(launch.block, [if few { Quantize::FEW_THREADS } else { Quantize::THREADS }, 1, 1]);
    let is_f16 = [ENTRIES[0], FEW_ENTRIES[0], ROUTE_ENTRIES[0]].contains(&launch.kernel);
    let dtype = if is_f16 { TokenDtype::F16 } else { TokenDtype::Bf16 };
    // SAFETY: tests launch this with a parameter whose addresses refer to live operands of the described sizes, which
    // only this launch accesses.
    unsafe {
        if routes {
            let route: RouteQuantize = launch.parameter(0);
            write_lists(&route);
            quantize(&route.quantize, dtype);
        } else {
            quantize(&launch.parameter(0), dtype);
        }
    }
}

/// Writes the places, first rows and first tiles.
///
/// # Safety
/// The addresses in `route` refer to live operands of the described sizes, which nobody else accesses.
unsafe fn write_lists(route: &RouteQuantize) {
    let Quantize { token_count, top_k, experts, places, firsts, tile_firsts, .. } = route.quantize;
    let choices = (token_count * top_k) as usize;
    // SAFETY: the caller guarantees this.
    unsafe {
        let map: Option<&[i32]> = (route.map != 0).then(|| slice(route.map, route.named_experts as usize));
        let rows = Rows::new(slice(route.ids, choices), top_k as usize, experts as usize, map);
        slice_mut(places, choices).copy_from_slice(rows.places());
        slice_mut(firsts, experts as usize + 1).copy_from_slice(rows.firsts());
        let tiles: &mut [u32] = slice_mut(tile_firsts, experts as usize + 1);
        tiles[0] = 0;
        for (expert, ends) in rows.firsts().windows(2).enumerate() {
            tiles[expert + 1] = tiles[expert] + token_tiles(ends[1] - ends[0], route.tile_tokens);
        }
    }
}

/// Quantizes every token to the rows of the lists.
///
/// # Safety
/// The addresses in `quantize` refer to live operands of the described sizes, which nobody else accesses.
unsafe fn quantize(quantize: &Quantize, dtype: TokenDtype) {
    // SAFETY: the caller guarantees this.
    unsafe {
        let experts = quantize.experts as usize;
        // Without lists, the single expert has all rows.
        let (known_rows, known_tiles) = ([0, quantize.token_count], [0, quantize.token_tiles]);
        let (firsts, tile_firsts) = if quantize.firsts == 0 {
            assert_eq!((experts, quantize.places), (1, 0));
            (&known_rows[..], &known_tiles[..])
        } else {
            (slice::<u32>(quantize.firsts, experts + 1), slice::<u32>(quantize.tile_firsts, experts + 1))
        };
        let input_scales: &[f32] = slice(quantize.input_scales, experts);
        let tokens = if quantize.places == 0 { firsts[experts] } else { quantize.token_count };
        assert!(tokens <= quantize.token_count);
        let Quantize { input, input_pitch, input_weights, places, top_k, k, .. } = *quantize;
        let tokens = Tokens { dtype, count: tokens, k, input, input_pitch, input_weights, places, top_k };
        tokens.for_each(|bits, rows| {
            for &row in rows {
                let expert = firsts.partition_point(|&first| first <= row) - 1;
                let (rows, tiles) =
                    (firsts[expert + 1] - firsts[expert], tile_firsts[expert + 1] - tile_firsts[expert]);
                let (size, in_expert) = (tile_size(rows, tiles), row - firsts[expert]);
                let tile = tile_firsts[expert] + in_expert / size;
                let input_scale = Some(input_scales[expert]).filter(|&scale| scale != 0.0);
                let global = write_row(
                    [quantize.values, quantize.scales],
                    [row, tile, in_expert % size],
                    dtype,
                    bits,
                    input_scale,
                );
                *(quantize.globals as *mut f32).add(row as usize) = global;
            }
        });
    }
}

/// Quantizes row `row`, number `in_tile` of tile `tile`, and returns its global scale.
///
/// # Safety
/// `values` is valid for writes of `row + 1` rows of values and `scales` for writes of the scales of `tile + 1` tiles,
/// in the layout of `nvfp4_rows`. Nobody else accesses row `row` or the scales of tile `tile`.
pub(crate) unsafe fn write_row(
    [values, scales]: [u64; 2],
    [row, tile, in_tile]: [u32; 3],
    dtype: TokenDtype,
    bits: &[u16],
    input_scale: Option<f32>,
) -> f32 {
    let k = bits.len() as u32;
    let (mut codes, mut of_blocks) = (vec![0; bits.len()], vec![0; bits.len() / BLOCK]);
    let global = quantize_token(dtype, bits, input_scale, &mut codes, &mut of_blocks);
    of_blocks.resize(4 * scale_tiles(k) as usize, 0);
    // SAFETY: the caller guarantees that row `row` of the values and tile `tile` of the scales are writable and that
    // nobody else accesses them.
    unsafe {
        let values: &mut [u8] = slice_mut(values + u64::from(row * row_bytes(k)), bits.len() / 2);
        values.iter_mut().zip(codes.as_chunks::<2>().0).for_each(|(value, [low, high])| *value = low | high << 4);
        for (block, scale) in (0..).zip(of_blocks) {
            *((scales + token_scale(tile, in_tile, block, k)) as *mut u8) = scale;
        }
    }
    global
}
