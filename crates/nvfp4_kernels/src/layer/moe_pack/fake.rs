//! The kernel's implementation for the fake driver.

use fake_cuda::Launch;
use kernels_gpu::format::BLOCK;
use kernels_gpu::layer::moe_pack::abi::{NVFP4_ENTRY, Pack, PackNvfp4};
use kernels_gpu::nvfp4_rows::{row_bytes, value_bytes, weight_scale_bytes};
use kernels_gpu::units::{OperandType, matrix_bytes};

use super::nvfp4::pack_nvfp4;
use super::row_order::RowOrder;
use super::units::pack;
use crate::fake::{slice, slice_mut};
use nvfp4_core::format::{Matrix, e4m3};

/// Packs every matrix on the host.
pub(super) fn launch(launch: &Launch<'_>) {
    if launch.kernel == NVFP4_ENTRY {
        return launch_nvfp4(launch);
    }
    // SAFETY: tests launch this with a `Pack` whose addresses refer to live operands of the described sizes, which only
    // this launch accesses.
    unsafe {
        let parameter: Pack = launch.parameter(0);
        assert_eq!(launch.block, [Pack::THREADS, 1, 1]);
        let types = [OperandType::F16, OperandType::Bf16, OperandType::E4m3];
        let operand_type = types.into_iter().find(|of| *of as u32 == parameter.operand_type).expect("a valid code");
        let order = if parameter.ordered_rows == 1 { RowOrder::OfK } else { RowOrder::Kept };
        let (rows, k) = (parameter.rows as usize, parameter.k as usize);
        for address in [parameter.values, parameter.values_stride, parameter.units, parameter.units_stride] {
            assert!(address.is_multiple_of(16), "{address:#x}");
        }
        for index in 0..u64::from(parameter.matrices) {
            let values: &[u8] = slice(parameter.values + index * parameter.values_stride, rows * k / 2);
            let scales: &[u8] = slice(parameter.scales + index * parameter.scales_stride, rows * k / BLOCK as usize);
            if let Some(place) = scales.iter().position(|&scale| !e4m3::is_scale(scale)) {
                let invalid = parameter.invalid as *mut u64;
                *invalid = (*invalid).min(index * scales.len() as u64 + place as u64);
                continue;
            }
            let units = pack(&Matrix::new(rows, k, values, scales, 1.0).unwrap(), order, operand_type);
            assert_eq!(units.len() as u64, matrix_bytes(parameter.rows, parameter.k));
            let to = (parameter.units + index * parameter.units_stride) as *mut u8;
            std::ptr::copy_nonoverlapping(units.as_ptr(), to, units.len());
        }
    }
}

/// Packs every matrix for NVFP4 tokens. Leaves the padding of each row of values as it was.
fn launch_nvfp4(launch: &Launch<'_>) {
    // SAFETY: tests launch this with a `PackNvfp4` whose addresses refer to live operands of the described sizes, which
    // only this launch accesses.
    unsafe {
        let parameter: PackNvfp4 = launch.parameter(0);
        assert_eq!(launch.block, [PackNvfp4::THREADS, 1, 1]);
        let (rows, k) = (parameter.rows as usize, parameter.k as usize);
        let PackNvfp4 { values, values_stride, scales, scales_stride, packed_values, packed_scales, .. } = parameter;
        for address in [values, values_stride, packed_values, parameter.packed_values_stride, packed_scales] {
            assert!(address.is_multiple_of(16), "{address:#x}");
        }
        for index in 0..u64::from(parameter.matrices) {
            let values: &[u8] = slice(values + index * values_stride, rows * k / 2);
            let scales: &[u8] = slice(scales + index * scales_stride, rows * k / BLOCK as usize);
            if let Some(place) = scales.iter().position(|&scale| !e4m3::is_scale(scale)) {
                let invalid = parameter.invalid as *mut u64;
                *invalid = (*invalid).min(index * scales.len() as u64 + place as u64);
                continue;
            }
            let packed = pack_nvfp4([&Matrix::new(rows, k, values, scales, 1.0).unwrap()].into_iter());
            let (values, scales) = packed.split_at(value_bytes(rows as u64, parameter.k) as usize);
            assert_eq!(scales.len() as u64, weight_scale_bytes(parameter.rows, parameter.k));
            let pitch = row_bytes(parameter.k) as usize;
            let at = packed_values + index * parameter.packed_values_stride;
            for (row, values) in (0..).zip(values.chunks(pitch)) {
                slice_mut(at + row * pitch as u64, k / 2).copy_from_slice(&values[..k / 2]);
            }
            slice_mut(packed_scales + index * parameter.packed_scales_stride, scales.len()).copy_from_slice(scales);
        }
    }
}
