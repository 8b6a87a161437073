//! Quantizing and dequantizing on the CPU.

use bytemuck::Pod;
use half::{bf16, f16};
use nvfp4::format::{BLOCK, Matrix};
use nvfp4::quantize::{Number, global_scale as scale_of, quantize_with};
use pyo3::prelude::*;

use crate::error::exception;
use crate::tensor::{Dtype, Place, Tensor};

/// Quantizes `x` into `values`, `scales` and `global_scale`. If `is_given`, `global_scale` is an input.
#[pyfunction]
pub fn quantize(
    py: Python<'_>,
    x: &Bound<'_, PyAny>,
    values: &Bound<'_, PyAny>,
    scales: &Bound<'_, PyAny>,
    global_scale: &Bound<'_, PyAny>,
    is_given: bool,
) -> PyResult<()> {
    let x = Tensor::read("x", x)?;
    x.expect_dtype(&[Dtype::F32, Dtype::Bf16, Dtype::F16])?;
    x.expect_place(Place::Cpu)?;
    x.expect_contiguous()?;
    let packed = Packed::read(values, scales, global_scale)?;
    packed.expect_shape_of(x.shape())?;
    match x.dtype {
        Dtype::F32 => quantize_as::<f32>(py, &x, &packed, is_given),
        Dtype::Bf16 => quantize_as::<bf16>(py, &x, &packed, is_given),
        _ => quantize_as::<f16>(py, &x, &packed, is_given),
    }
}

fn quantize_as<T: Number + Pod>(py: Python<'_>, x: &Tensor<'_>, packed: &Packed<'_>, is_given: bool) -> PyResult<()> {
    let k = x.shape().last().copied().unwrap_or(0);
    // SAFETY: the tensors are contiguous, so the slices are all of their elements. The caller keeps them alive, and by
    // the operator's contract nothing writes them during the call.
    let (numbers, values, scales, global) = unsafe {
        (
            x.elements::<T>(x.len())?,
            packed.values.elements_mut::<u8>(packed.values.len())?,
            packed.scales.elements_mut::<u8>(packed.scales.len())?,
            packed.global_scale.elements_mut::<f32>(1)?,
        )
    };
    let quantized = py.detach(|| {
        let scale = if is_given { global[0] } else { scale_of(numbers)? };
        quantize_with(numbers, numbers.len().checked_div(k).unwrap_or(0), k, scale)
    });
    let matrix = quantized.map_err(|error| x.invalid(error))?;
    values.copy_from_slice(matrix.values());
    scales.copy_from_slice(matrix.scales());
    global[0] = matrix.global_scale();
    Ok(())
}

/// Writes the numbers of `values`, `scales` and `global_scale` to `out`, as f32.
#[pyfunction]
pub fn dequantize(
    py: Python<'_>,
    values: &Bound<'_, PyAny>,
    scales: &Bound<'_, PyAny>,
    global_scale: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let packed = Packed::read(values, scales, global_scale)?;
    let out = Tensor::read("out", out)?;
    out.expect_dtype(&[Dtype::F32])?;
    out.expect_place(Place::Cpu)?;
    out.expect_contiguous()?;
    packed.expect_shape_of(out.shape())?;
    let k = out.shape().last().copied().unwrap_or(0);
    // SAFETY: the tensors are contiguous, so the slices are all of their elements. The caller keeps them alive, and by
    // the operator's contract nothing writes them during the call.
    let (numbers, values, scales, global) = unsafe {
        (
            out.elements_mut::<f32>(out.len())?,
            packed.values.elements::<u8>(packed.values.len())?,
            packed.scales.elements::<u8>(packed.scales.len())?,
            packed.global_scale.elements::<f32>(1)?[0],
        )
    };
    py.detach(|| {
        let matrix = Matrix::new(numbers.len().checked_div(k).unwrap_or(0), k, values, scales, global)?;
        numbers.chunks_exact_mut(k.max(1)).enumerate().for_each(|(row, out)| matrix.dequantize_row(row, out));
        Ok(())
    })
    .map_err(exception)
}

/// A packed tensor.
struct Packed<'py> {
    values: Tensor<'py>,
    scales: Tensor<'py>,
    global_scale: Tensor<'py>,
}

impl<'py> Packed<'py> {
    fn read(
        values: &Bound<'py, PyAny>,
        scales: &Bound<'py, PyAny>,
        global_scale: &Bound<'py, PyAny>,
    ) -> PyResult<Self> {
        let packed = Self {
            values: Tensor::read("values", values)?,
            scales: Tensor::read("scales", scales)?,
            global_scale: Tensor::read("global_scale", global_scale)?,
        };
        packed.values.expect_dtype(&[Dtype::U8])?;
        packed.scales.expect_dtype(&[Dtype::E4m3, Dtype::U8])?;
        packed.global_scale.expect_dtype(&[Dtype::F32])?;
        for tensor in [&packed.values, &packed.scales, &packed.global_scale] {
            tensor.expect_place(Place::Cpu)?;
            tensor.expect_contiguous()?;
        }
        if packed.global_scale.len() != 1 {
            return Err(packed.global_scale.invalid("expected one number, the scale of the whole tensor"));
        }
        Ok(packed)
    }

    /// Checks that these are the packed numbers of a tensor with the shape `numbers`.
    fn expect_shape_of(&self, numbers: &[usize]) -> PyResult<()> {
        for (tensor, elements) in [(&self.values, 2), (&self.scales, BLOCK)] {
            let mut shape = numbers.to_vec();
            if let Some(columns) = shape.last_mut() {
                *columns /= elements;
            }
            tensor.expect_shape(&shape)?;
        }
        Ok(())
    }
}
