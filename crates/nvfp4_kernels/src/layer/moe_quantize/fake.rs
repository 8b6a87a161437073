//! The kernel's implementation for the fake driver.

use fake_cuda::Launch;
use kernels_gpu::layer::moe_quantize::abi::{ENTRIES, Quantize};
use kernels_gpu::sorted::LINE_BYTES;
use kernels_gpu::units::k_blocks;

use super::code_places;
use crate::fake::{slice, slice_mut};
use crate::layer::quantize_fake::Tokens;
use nvfp4_core::fp8::quantize_token;
use nvfp4_core::problem::TokenDtype;

/// Quantizes every token by the kernel's contract.
pub(super) fn launch(launch: &Launch<'_>) {
    assert_eq!(launch.block, [Quantize::THREADS, 1, 1]);
    let dtype = if launch.kernel == ENTRIES[0] { TokenDtype::F16 } else { TokenDtype::Bf16 };
    // SAFETY: tests launch this with a `Quantize` whose addresses refer to live operands of the described sizes, which
    // only this launch accesses.
    unsafe {
        let quantize: Quantize = launch.parameter(0);
        let capacity = quantize.row_capacity;
        let is_known = quantize.firsts == 0;
        let rows = if is_known {
            assert_eq!((quantize.rows, quantize.places), (0, 0), "{quantize:?}");
            quantize.token_count
        } else {
            slice::<u32>(quantize.firsts, quantize.experts as usize + 1)[quantize.experts as usize]
        };
        assert!(rows <= capacity);
        let codes: &mut [u8] = slice_mut(quantize.codes, (capacity * k_blocks(quantize.k) * LINE_BYTES) as usize);
        let scales: &mut [f32] = slice_mut(quantize.scales, capacity as usize);
        if is_known {
            codes.fill(0);
            scales.fill(0.0);
        }
        let tokens = if quantize.rows == 0 { rows } else { quantize.token_count };
        let Quantize { input, input_pitch, input_weights, places, top_k, k, .. } = quantize;
        let tokens = Tokens { dtype, count: tokens, k, input, input_pitch, input_weights, places, top_k };
        tokens.for_each(|bits, rows| {
            let mut of_token = vec![0; bits.len()];
            let scale = quantize_token(dtype, bits, &mut of_token);
            for &row in rows {
                scales[row as usize] = scale;
                code_places(capacity, row, k).for_each(|(column, place)| codes[place] = of_token[column]);
            }
        });
    }
}
