//! The kernels' implementation for the fake driver.

use fake_cuda::Launch;
use kernels_gpu::format::BLOCK;
use kernels_gpu::linear::{self as abi, PACK_ENTRY, Pack, matrix_bytes};
use kernels_gpu::lists::tile_size;
use kernels_gpu::units::OperandType;

use super::LinearKernel;
use super::panels::{pack, unpack};
use crate::fake::{dot, out_dtype, slice, slice_mut};
use crate::moe::operand_type;
use nvfp4_core::format::{Matrix, e4m3};

/// Multiplies or packs by the kernel's contract.
pub(crate) fn launch(launch: &Launch<'_>, kernel: &dyn LinearKernel) {
    // SAFETY: tests launch this with a parameter whose addresses refer to live operands of the described sizes, which
    // only this launch accesses.
    unsafe { if launch.kernel == PACK_ENTRY { pack_matrix(launch) } else { multiply(launch, kernel) } }
}

/// Packs a matrix into panels.
///
/// # Safety
///
/// The parameter is a [`Pack`]. Its addresses refer to live operands of the described sizes, which nobody else
/// accesses.
unsafe fn pack_matrix(launch: &Launch<'_>) {
    // SAFETY: the caller guarantees that the parameter is a `Pack` and that its addresses refer to live operands of the
    // described sizes, which nobody else accesses.
    unsafe {
        let parameter: Pack = launch.parameter(0);
        let Pack { n, k, values, .. } = parameter;
        assert_eq!(launch.block, [Pack::THREADS, 1, 1]);
        assert!(values.is_multiple_of(8) && parameter.panels.is_multiple_of(16), "{parameter:?}");
        let (rows, columns) = (n as usize, k as usize);
        let values: &[u8] = slice(values, rows * columns / 2);
        let scales: &[u8] = slice(parameter.scales, rows * columns / BLOCK as usize);
        if let Some(place) = scales.iter().position(|&scale| !e4m3::is_scale(scale)) {
            let invalid = parameter.invalid as *mut u64;
            *invalid = (*invalid).min(place as u64);
            return;
        }
        let matrix = Matrix::new(rows, columns, values, scales, 1.0).unwrap();
        let packed = pack(&matrix, operand_type(out_dtype(parameter.operand_type)));
        slice_mut(parameter.panels, matrix_bytes(n, k) as usize).copy_from_slice(&packed);
    }
}

/// Computes the product of a launch.
///
/// # Safety
///
/// The parameter is an [`abi::Launch`]. Its addresses refer to live operands of the described sizes, which nobody else
/// accesses.
unsafe fn multiply(launch: &Launch<'_>, kernel: &dyn LinearKernel) {
    let instance = kernel.instances().into_iter().find(|instance| instance.entry() == launch.kernel).unwrap();
    assert_eq!((launch.block, launch.shared_bytes), ([instance.threads(), 1, 1], instance.shared_bytes()));
    let dtype = out_dtype(instance.operand_type() as u32);
    // SAFETY: the caller guarantees that the parameter is an `abi::Launch` and that its addresses refer to live
    // operands of the described sizes, which nobody else accesses.
    unsafe {
        let parameter: abi::Launch = launch.parameter(0);
        let abi::Launch { m, n, k, tokens, token_pitch, c, .. } = parameter;
        for address in [tokens, token_pitch, parameter.panels, c] {
            assert!(address.is_multiple_of(16), "{parameter:?}");
        }
        assert!(tile_size(m, parameter.token_tiles) <= instance.tile_tokens());
        let operand_type: OperandType = instance.operand_type();
        let weights = unpack(slice(parameter.panels, matrix_bytes(n, k) as usize), n, k, operand_type);
        let alpha: &[f32] = slice(parameter.alpha, n as usize);
        let bias: &[f32] = slice(parameter.bias, if parameter.bias == 0 { 0 } else { n as usize });
        for token in 0..u64::from(m) {
            let numbers: Vec<f64> =
                slice(tokens + token * token_pitch, k as usize).iter().map(|&bits: &u16| dtype.decode(bits)).collect();
            let c: &mut [u16] = slice_mut(c + 2 * token * u64::from(n), n as usize);
            for (column, (c, row)) in c.iter_mut().zip(weights.chunks(k as usize)).enumerate() {
                let sum = dot(&numbers, row);
                let bias = bias.get(column).map_or(0.0, |&bias| f64::from(bias));
                *c = dtype.round(sum * f64::from(alpha[column]) + bias);
            }
        }
    }
}
