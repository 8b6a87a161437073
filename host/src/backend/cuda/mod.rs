//! NVIDIA GPUs: kernels of `kernels-gpu` launched through the CUDA driver, which is found at run time.
//!
//! Which kernel runs is a function of the compute capability alone (`backend/kernels.rs`); it is compiled in as PTX, which the
//! driver turns into machine code when the first layer is prepared, unless a cubin file is there. Decides nothing about
//! shapes.
//!
//! ```no_run
//! use nvfp4::backend::{Backend, cuda::Cuda};
//!
//! let gpu = Cuda::open(0)?; // Error::NoDevice, with the reason, where there is no driver
//! println!("{}", gpu.device());
//! # Ok::<_, nvfp4::Error>(())
//! ```

mod buffer;
mod device;
mod event;
mod layer;
mod maps;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use cuda_driver::sys::{CUdeviceptr, CUstream};
pub use device::{DeviceInfo, Options, devices};
pub use event::Timer;
pub use layer::CudaLayer;

pub use super::descriptors::DeviceGroup;
pub use super::kernels::Capability;
use super::{Backend, Layer};
use crate::error::Error;
use crate::plan::roofline::{GPUS, Peaks};
use crate::problem::Weights;
use device::Device;

/// A GPU. Clones share it, its context and its loaded kernels.
#[derive(Clone)]
pub struct Cuda {
    device: Arc<Device>,
}

impl Cuda {
    /// Opens device `ordinal`: its primary context, shared with other CUDA libraries of this process.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with the reason: no driver, no such device, none of the kernels runs on it.
    /// [`Error::Driver`] if the driver fails.
    pub fn open(ordinal: u32) -> Result<Self, Error> {
        Self::open_with(ordinal, Options::default())
    }

    /// As [`Cuda::open`], with options.
    ///
    /// # Errors
    /// As [`Cuda::open`]. A cubin that does not load shows in [`Cuda::prepare_layer`].
    pub fn open_with(ordinal: u32, options: Options) -> Result<Self, Error> {
        Ok(Self { device: Arc::new(Device::open(ordinal, options)?) })
    }

    /// The device in numbers.
    pub fn info(&self) -> &DeviceInfo {
        &self.device.info
    }

    /// Brings weights to the device, their scales into the blocked layout. [`Backend::prepare`] with the type that also
    /// takes steps from device memory ([`CudaLayer::launch`]).
    ///
    /// # Errors
    /// [`Error::Driver`], for instance when the device's memory does not hold them.
    pub fn prepare_layer(&self, weights: &Weights<'_>) -> Result<CudaLayer, Error> {
        CudaLayer::new(self.device.clone(), weights)
    }

    /// A timer for [`CudaLayer::launch_timed`]; one for each launch that is under way.
    ///
    /// # Errors
    /// [`Error::Driver`] if the driver fails.
    pub fn timer(&self) -> Result<Timer, Error> {
        Timer::new(self.device.clone())
    }
}

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn device(&self) -> String {
        let DeviceInfo { name, capability: (major, minor), sms, .. } = self.info();
        format!("{name} (compute capability {major}.{minor}, {sms} SMs)")
    }

    fn peaks(&self) -> Option<Peaks> {
        let name = &self.info().name;
        let name = name.strip_prefix("NVIDIA ").unwrap_or(name);
        GPUS.iter().find(|gpu| name.starts_with(gpu.device_prefix)).map(|gpu| gpu.peaks)
    }

    fn prepare<'w>(&self, weights: &'w Weights<'w>) -> Result<Box<dyn Layer + 'w>, Error> {
        Ok(Box::new(self.prepare_layer(weights)?))
    }
}
