//! What tokens must be.

use candle_core::{DType, Device, Result, Tensor, bail};
use nvfp4::problem::TokenDtype;

/// What tokens and their rows are aligned to, in bytes: kernels read so many at once.
const ALIGNMENT: usize = 16;

/// The library's type of tokens.
pub fn token_type(dtype: DType) -> Result<TokenDtype> {
    match dtype {
        DType::BF16 => Ok(TokenDtype::Bf16),
        DType::F16 => Ok(TokenDtype::F16),
        other => bail!("tokens are {other:?}; nvfp4 takes BF16 and F16"),
    }
}

/// Asks that an argument lies where a layer does.
pub fn expect_device(name: &str, tensor: &Tensor, device: &Device) -> Result<()> {
    if tensor.device().same_device(device) {
        return Ok(());
    }
    let (got, expected) = (tensor.device().location(), device.location());
    let other = if got == expected { " of another `Device`" } else { "" };
    bail!("{name} are on {got:?}{other}, the layer is on {expected:?}; move them by `to_device`")
}

/// Asks for a type.
pub fn expect_dtype(name: &str, tensor: &Tensor, dtype: DType) -> Result<()> {
    if tensor.dtype() == dtype {
        return Ok(());
    }
    bail!("{name} are {:?}; the layer takes {dtype:?}", tensor.dtype())
}

/// A tensor without gaps, at a multiple of 16 bytes of its storage.
pub fn dense(tensor: &Tensor) -> Result<Tensor> {
    let tensor = tensor.contiguous()?;
    let place = tensor.layout().start_offset() * tensor.dtype().size_in_bytes();
    if place.is_multiple_of(ALIGNMENT) { Ok(tensor) } else { tensor.force_contiguous() }
}
