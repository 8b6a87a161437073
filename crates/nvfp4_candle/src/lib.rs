//! NVFP4 layers for candle: [`Nvfp4Linear`] and [`Nvfp4Moe`], from a [`VarBuilder`](candle_nn::VarBuilder) over a ModelOpt checkpoint.
//!
//! Tokens are bf16 or f16, and stay so; weights keep their blocks' scales and each projection its global scale. A layer computes on the
//! device of its `VarBuilder`:
//!
//! - on the CPU by the library's CPU backend, which puts weights in order in every call;
//! - with the feature `cuda` on a GPU, on the stream of candle's device. Weights are packed there once, and lie, as all that a call needs,
//!   in memory of candle's. A call waits for nothing.
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
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod linear;
mod moe;
mod tokens;

pub use linear::Nvfp4Linear;
pub use moe::Nvfp4Moe;

/// The library's error as candle's.
fn error(error: nvfp4::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

/// That no layer is made for a device.
fn no_layers_on(device: &candle_core::Device) -> candle_core::Error {
    let with = if cfg!(feature = "cuda") {
        "the CPU and CUDA devices"
    } else {
        "the CPU, and with the feature `cuda` on GPUs"
    };
    candle_core::Error::msg(format!("nvfp4-candle computes on {with}, not on {:?}", device.location()))
}
