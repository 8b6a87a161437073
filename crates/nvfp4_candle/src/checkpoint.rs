//! Matrices and biases as ModelOpt's checkpoints have them.

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::VarBuilder;
use candle_nn::init::ZERO;
use nvfp4::bias::Bias;
use nvfp4::format::{BLOCK, Matrix};

use crate::error;

/// The matrix `[rows, k]` below `vb`: `weight`, `weight_scale` and `weight_scale_2`.
pub fn matrix(vb: &VarBuilder<'_>, rows: usize, k: usize) -> Result<Matrix<'static>> {
    if !k.is_multiple_of(BLOCK) {
        bail!("{}: a row has {k} numbers, no multiple of {BLOCK}", vb.prefix());
    }
    let values = vb.get_with_hints_dtype((rows, k / 2), "weight", ZERO, DType::U8)?;
    let scales = vb.get_with_hints_dtype((rows, k / BLOCK), "weight_scale", ZERO, DType::F8E4M3)?;
    let global = vb.get_with_hints_dtype((), "weight_scale_2", ZERO, DType::F32)?.to_scalar::<f32>()?;
    let values = values.flatten_all()?.to_vec1::<u8>()?;
    let scales = scales
        .flatten_all()?
        .to_vec1::<float8::F8E4M3>()?
        .into_iter()
        .map(|scale| scale.to_bits())
        .collect::<Vec<u8>>();
    let at = |e: nvfp4::Error| error(e).context(vb.prefix());
    Matrix::new(rows, k, values, scales, global).map_err(at)
}

/// A bias in f32.
pub fn bias(tensor: &Tensor) -> Result<Bias<'static>> {
    Ok(Bias::F32(tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?.into()))
}
