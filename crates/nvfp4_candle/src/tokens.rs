//! Checks of tokens.

use candle_core::{DType, Device, Result, Tensor, bail};
use nvfp4::problem::TokenDtype;

/// Alignment of tokens and of their rows, in bytes: the kernels' access size.
const ALIGNMENT: usize = 16;

/// Returns the library's token type.
pub fn token_type(dtype: DType) -> Result<TokenDtype> {
    match dtype {
        DType::BF16 => Ok(TokenDtype::Bf16),
        DType::F16 => Ok(TokenDtype::F16),
        other => bail!("tokens are {other:?}; expected BF16 or F16"),
    }
}

/// Checks that an argument is on the layer's device.
pub fn expect_device(name: &str, tensor: &Tensor, device: &Device) -> Result<()> {
    if tensor.device().same_device(device) {
        return Ok(());
    }
    let (got, expected) = (tensor.device().location(), device.location());
    let other = if got == expected { " of another `Device`" } else { "" };
    bail!("{name} are on {got:?}{other}, the layer is on {expected:?}; move them with `to_device`")
}

/// Checks the type.
pub fn expect_dtype(name: &str, tensor: &Tensor, dtype: DType) -> Result<()> {
    if tensor.dtype() == dtype {
        return Ok(());
    }
    bail!("{name} are {:?}; expected {dtype:?}", tensor.dtype())
}

/// Returns the tensor as a contiguous tensor at a multiple of 16 bytes of its storage.
pub fn dense(tensor: &Tensor) -> Result<Tensor> {
    let tensor = tensor.contiguous()?;
    let place = tensor.layout().start_offset() * tensor.dtype().size_in_bytes();
    if place.is_multiple_of(ALIGNMENT) { Ok(tensor) } else { tensor.force_contiguous() }
}
