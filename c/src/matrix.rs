//! Quantizing and dequantizing of f32 matrices, on the CPU.

use nvfp4::Error;
use nvfp4::format::Matrix;

use crate::pointer::{elements, elements_mut};
use crate::status::{guard, nvfp4_status};

/// Quantizes a matrix of f32 `[rows, k]`, k a multiple of 16, with the algorithm of NVIDIA's ModelOpt, on the CPU.
/// Writes `rows * k/2` bytes of values, `rows * k/16` bytes of scales, and the global scale.
///
/// # Safety
///
/// The pointers point to host memory of these sizes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_quantize(
    numbers: *const f32,
    rows: usize,
    k: usize,
    values: *mut u8,
    scales: *mut u8,
    global_scale: *mut f32,
) -> nvfp4_status {
    guard(|| {
        let len = rows.checked_mul(k).ok_or(Error::TooLarge)?;
        // SAFETY: the caller guarantees that the pointers point to host memory of these sizes.
        let (numbers, values, scales, global) = unsafe {
            (
                elements(numbers, len, "numbers")?,
                elements_mut(values, len / 2, "values")?,
                elements_mut(scales, len / 16, "scales")?,
                elements_mut(global_scale, 1, "global_scale")?,
            )
        };
        let matrix = nvfp4::quantize::quantize(numbers, rows, k)?;
        values.copy_from_slice(matrix.values());
        scales.copy_from_slice(matrix.scales());
        global[0] = matrix.global_scale();
        Ok(())
    })
}

/// Writes the numbers of a quantized matrix, `[rows, k]`, on the CPU.
///
/// # Safety
///
/// The pointers point to host memory of these sizes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_dequantize(
    values: *const u8,
    scales: *const u8,
    global_scale: f32,
    rows: usize,
    k: usize,
    numbers: *mut f32,
) -> nvfp4_status {
    guard(|| {
        let len = rows.checked_mul(k).ok_or(Error::TooLarge)?;
        // SAFETY: the caller guarantees that the pointers point to host memory of these sizes.
        let (values, scales, numbers) = unsafe {
            (
                elements(values, len / 2, "values")?,
                elements(scales, len / 16, "scales")?,
                elements_mut(numbers, len, "numbers")?,
            )
        };
        let matrix = Matrix::new(rows, k, values, scales, global_scale)?;
        numbers.chunks_exact_mut(k.max(1)).enumerate().for_each(|(row, to)| matrix.dequantize_row(row, to));
        Ok(())
    })
}
