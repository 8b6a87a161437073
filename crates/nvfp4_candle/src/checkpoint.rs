//! Matrices and biases of ModelOpt's checkpoints, on the device of their tensors.

use candle_core::{DType, Device, Error, Result, Tensor, bail};
use candle_nn::VarBuilder;
use candle_nn::init::ZERO;
use float8::F8E4M3;
use nvfp4::bias::Bias;
use nvfp4::format::{BLOCK, Matrix};

use crate::error;
use crate::tokens::dense;

/// An NVFP4 matrix `[rows, k]`.
pub struct Projection {
    /// Name in the checkpoint.
    name: String,
    /// `[rows, k / 2]`, U8: the even element of K in the low nibble of a byte.
    pub values: Tensor,
    /// `[rows, k / 16]`, F8E4M3.
    pub scales: Tensor,
    /// Factor of all numbers of the matrix.
    pub global_scale: f32,
}

impl Projection {
    /// Loads the matrix below `vb`: `weight`, `weight_scale` and `weight_scale_2`.
    pub fn load(vb: &VarBuilder<'_>, rows: usize, k: usize) -> Result<Self> {
        if !k.is_multiple_of(BLOCK) {
            bail!("{}: rows have {k} numbers; expected a multiple of {BLOCK}", vb.prefix());
        }
        let values = vb.get_with_hints_dtype((rows, k / 2), "weight", ZERO, DType::U8)?;
        let scales = vb.get_with_hints_dtype((rows, k / BLOCK), "weight_scale", ZERO, DType::F8E4M3)?;
        let global_scale = vb.get_with_hints_dtype((), "weight_scale_2", ZERO, DType::F32)?.to_scalar::<f32>()?;
        Ok(Self { name: vb.prefix(), values: dense(&values)?, scales: dense(&scales)?, global_scale })
    }

    /// Quantizes numbers with ModelOpt's algorithm. The result is on the device of the numbers.
    pub fn quantize(numbers: &Tensor) -> Result<Self> {
        let ((rows, k), device) = (numbers.dims2()?, numbers.device());
        let numbers = numbers.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let matrix = nvfp4::quantize::quantize(&numbers, rows, k).map_err(error)?;
        let scales = matrix.scales().iter().map(|&bits| F8E4M3::from_bits(bits)).collect::<Vec<_>>();
        Ok(Self {
            name: "numbers".into(),
            values: Tensor::from_slice(matrix.values(), (rows, k / 2), device)?,
            scales: Tensor::from_vec(scales, (rows, k / BLOCK), device)?,
            global_scale: matrix.global_scale(),
        })
    }

    /// Returns the matrix in host memory.
    pub fn matrix(&self) -> Result<Matrix<'static>> {
        let (rows, half) = self.values.dims2()?;
        let values = self.values.flatten_all()?.to_vec1::<u8>()?;
        let scales = self.scales.flatten_all()?.to_vec1::<F8E4M3>()?;
        let scales = scales.into_iter().map(|scale| scale.to_bits()).collect::<Vec<u8>>();
        Matrix::new(rows, 2 * half, values, scales, self.global_scale).map_err(|e| self.at(e))
    }

    /// Converts the library's error and adds the name of this matrix.
    pub fn at(&self, e: nvfp4::Error) -> Error {
        error(e).context(self.name.clone())
    }
}

/// Returns a bias in f32.
pub fn bias(tensor: &Tensor) -> Result<Bias<'static>> {
    Ok(Bias::F32(tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?.into()))
}
