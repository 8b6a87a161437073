//! NVFP4 layers for candle: [`Nvfp4Linear`] and [`Nvfp4Moe`], loaded from a [`VarBuilder`](candle_nn::VarBuilder) over
//! a ModelOpt checkpoint.
//!
//! Tokens stay in bf16 or f16. Weights keep their block scales, and each projection keeps its global scale. A layer
//! computes on the device of its `VarBuilder`:
//!
//! - On the CPU it uses the library's CPU backend. Weights are prepared once.
//! - With the feature `cuda`, on a GPU, it uses the stream of candle's device. Weights are packed there once. The
//!   weights and all memory of a call are candle's. A call waits for nothing.
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

/// Converts the library's error to candle's.
fn error(error: nvfp4::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

/// Returns the error that no layer supports a device.
fn no_layers_on(device: &candle_core::Device) -> candle_core::Error {
    let with = if cfg!(feature = "cuda") {
        "the CPU and CUDA devices"
    } else {
        "the CPU, and with the feature `cuda` on GPUs"
    };
    candle_core::Error::msg(format!("nvfp4-candle computes on {with}, not on {:?}", device.location()))
}
