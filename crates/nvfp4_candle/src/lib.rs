//! NVFP4 layers for candle: [`Nvfp4Linear`] and [`Nvfp4Moe`], from a [`VarBuilder`](candle_nn::VarBuilder) over a ModelOpt checkpoint.
//!
//! Tokens are bf16 or f16, and stay so; weights keep their blocks' scales and each projection its global scale. The layers compute on
//! the CPU, by the library's CPU backend. Weights are put in order in every call there.
//!
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use nvfp4_candle::Nvfp4Linear;
//!
//! # fn main() -> candle_core::Result<()> {
//! let numbers = Tensor::randn(0f32, 1f32, (32, 64), &Device::Cpu)?;
//! let layer = Nvfp4Linear::quantize(&numbers, None, DType::BF16)?;
//! let x = Tensor::randn(0f32, 1f32, (2, 3, 64), &Device::Cpu)?.to_dtype(DType::BF16)?;
//! assert_eq!(layer.forward(&x)?.dims(), [2, 3, 32]);
//! # Ok(())
//! # }
//! ```

mod checkpoint;
mod linear;
mod moe;

pub use linear::Nvfp4Linear;
pub use moe::Nvfp4Moe;

use candle_core::{CpuStorage, DType, Layout, Result, bail};
use half::slice::HalfFloatSliceExt;
use nvfp4::problem::OutDtype;

/// The library's error as candle's.
fn error(error: nvfp4::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

/// The library's type of tokens.
fn token_type(dtype: DType) -> Result<OutDtype> {
    match dtype {
        DType::BF16 => Ok(OutDtype::Bf16),
        DType::F16 => Ok(OutDtype::F16),
        other => bail!("tokens are {other:?}; nvfp4 takes BF16 and F16"),
    }
}

/// The bits of tokens, which lie without gaps.
fn token_bits<'a>(storage: &'a CpuStorage, layout: &Layout, dtype: OutDtype) -> Result<&'a [u16]> {
    let Some((start, end)) = layout.contiguous_offsets() else { bail!("tokens have gaps; call .contiguous()") };
    match (storage, dtype) {
        (CpuStorage::BF16(numbers), OutDtype::Bf16) => Ok(numbers[start..end].reinterpret_cast()),
        (CpuStorage::F16(numbers), OutDtype::F16) => Ok(numbers[start..end].reinterpret_cast()),
        _ => bail!("tokens are not of the type that the layer was loaded for, {dtype:?}"),
    }
}

/// Tokens from their bits.
fn tokens(bits: Vec<u16>, dtype: OutDtype) -> CpuStorage {
    use half::vec::HalfBitsVecExt;

    match dtype {
        OutDtype::Bf16 => CpuStorage::BF16(bits.reinterpret_into()),
        OutDtype::F16 => CpuStorage::F16(bits.reinterpret_into()),
    }
}
