//! NVIDIA GPUs: launches the kernels of `kernels-gpu` through the CUDA driver, which is found at run time.
//!
//! The compute capability selects the kernel (`kernels/builds.rs`), unless a [`Variant`] names one. Kernels are built
//! in as PTX. When the first layer is prepared, the driver compiles the PTX to machine code, unless there is a cubin
//! file. This backend makes no decisions about shapes.
//!
//! A kernel that has run only in the emulator is a default on a GPU only after a self-test has passed there
//! ([`selftest`](crate::selftest)). The test is the command `nvfp4 selftest`. The library itself runs no self-test,
//! starts no process and does not wait for one. It reads the verdicts that the command has left in the user's cache
//! ([`Verdicts`]), and [`DeviceInfo::notes`] lists the kernels that are not used, with the reasons.
//!
//! ```no_run
//! use nvfp4::backend::{Backend, cuda::Cuda};
//!
//! let gpu = Cuda::open(0)?; // Error::NoDevice, with the reason, if there is no driver
//! println!("{}", gpu.device());
//! # Ok::<_, nvfp4::Error>(())
//! ```

mod buffer;
mod config;
mod device;
mod event;
mod graph;
mod layer;
mod layout;
mod linear;
mod maps;
mod moe;
mod planned;
mod resident;
mod router;
mod standing;
mod streams;
#[cfg(test)]
mod tests;
mod verdicts;

use std::sync::Arc;

pub use cuda_driver::sys::{CUdeviceptr, CUstream};
pub use device::{DeviceInfo, Options, devices};
pub(crate) use device::{tried, verdict};
pub use gpu_arch::Capability;
pub use layer::CudaLayer;
pub use linear::{CudaLinear, LinearLauncher, LinearTensor, PackedLinear};
pub use moe::{CudaMoeLayer, MoeGraph, MoeLauncher, MoeTensor, MoeTensors, PackedMoe};
pub use resident::{Cache, ResidentStep, Timing};
pub use router::RouterLauncher;
pub use verdicts::{FailedPart, Tried, Verdict, Verdicts};

use super::{Backend, Layer, Linear, Moe};
use crate::Error;
use crate::linear::{LinearSizes, LinearWeights};
use crate::moe::{MoeSizes, MoeWeights};
use crate::plan::roofline::{GPUS, Peaks};
use crate::problem::{TokenFormat, Weights};
use crate::router::{Logits, Router, Routes};
use device::Device;
use nvfp4_kernels::builds;
pub use nvfp4_kernels::group::DeviceGroup;
pub use nvfp4_kernels::layer::router::RouterArguments;
pub use nvfp4_kernels::linear::LinearArguments;
use nvfp4_kernels::moe::MoeKernels;
pub use nvfp4_kernels::moe::{MoeArguments, weight_bytes, workspace_bytes};
use nvfp4_kernels::variant::Variant;

/// A GPU. Clones share the device, its context and its loaded kernels.
#[derive(Clone)]
pub struct Cuda {
    device: Arc<Device>,
    variant: Variant,
}

impl Cuda {
    /// Opens device `ordinal` with its primary context, which other CUDA libraries of this process share.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with the reason: there is no driver or no such device, or no kernel runs on it.
    /// [`Error::Driver`] if the driver fails.
    pub fn open(ordinal: u32) -> Result<Self, Error> {
        Self::open_with(ordinal, Options::default())
    }

    /// Opens a device like [`Cuda::open`], with options.
    ///
    /// # Errors
    /// The errors of [`Cuda::open`]. A cubin that cannot be loaded is reported by [`Cuda::prepare_layer`].
    pub fn open_with(ordinal: u32, options: Options) -> Result<Self, Error> {
        Self { device: Arc::new(Device::open(ordinal, options)?), variant: Variant::default() }
            .with_variant(Variant::default())
    }

    /// Returns the same device with another variant, in which its layers compute their steps. The variant may name a
    /// kernel that is not a default ([`DeviceInfo::notes`]). A kernel that has failed a self-test is refused when a
    /// layer is prepared.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the kernel of the variant does not run on this device.
    pub fn with_variant(self, variant: Variant) -> Result<Self, Error> {
        let variant = self.device.with_given_code(variant)?;
        if let Some(kernel) = variant.kernel {
            builds::check_runs(kernel.name(), self.info().capability)?;
        }
        Ok(Self { variant, ..self })
    }

    /// Properties of the device.
    pub fn info(&self) -> &DeviceInfo {
        &self.device.info
    }

    /// Packs weights for the kernel and copies them to the device. Does the same as [`Backend::prepare`], and returns a
    /// type that also takes steps from device memory ([`CudaLayer::launch`], [`CudaLayer::upload`]).
    ///
    /// # Errors
    /// [`Error::Driver`] if a driver call fails, for instance because the device's memory is too small.
    /// [`Error::Invalid`] if the variant does not support these weights, or its kernel or instance has failed a
    /// self-test.
    pub fn prepare_layer(&self, weights: &Weights<'_>) -> Result<CudaLayer, Error> {
        CudaLayer::new(self.device.clone(), self.variant, weights)
    }

    /// Makes a launcher of routers with operands in device memory.
    ///
    /// # Errors
    /// [`Error::Driver`] if the kernel cannot be loaded.
    pub fn router_launcher(&self) -> Result<RouterLauncher, Error> {
        RouterLauncher::new(self.device.clone())
    }

    /// Copies the weights of an MoE layer to the device and packs them there. While it is packed, the largest
    /// projection takes twice its memory. Does the same as [`Backend::prepare_moe`], but returns a type that also takes
    /// calls from device memory ([`CudaMoeLayer::launch`], [`CudaMoeLayer::capture`]).
    ///
    /// # Errors
    /// [`Error::NotComputed`] if no kernel computes such layers on this device. [`Error::Driver`] if a driver call
    /// fails, for instance because the device's memory is too small.
    pub fn prepare_moe_layer(&self, weights: &MoeWeights<'_>) -> Result<CudaMoeLayer, Error> {
        CudaMoeLayer::prepare(self.device.clone(), weights, self.variant.graph)
    }

    /// Packs an MoE layer like [`Cuda::prepare_moe_layer`], from tensors in device memory: tensors of an engine or a
    /// checkpoint. The layer does not use the tensors afterwards.
    ///
    /// # Errors
    /// The errors of [`Cuda::prepare_moe_layer`]. [`Error::Invalid`] if a size or an alignment is wrong, or if a scale
    /// is negative or NaN, with its location.
    ///
    /// # Safety
    ///
    /// Every tensor address points to device memory that this device can read, with the number of bytes that `sizes`
    /// implies. No work that writes this memory is in flight.
    pub unsafe fn pack_moe_layer(
        &self,
        sizes: MoeSizes,
        experts: &MoeTensors<'_>,
        shared: Option<&MoeTensors<'_>>,
        expert_map: Option<&[i32]>,
    ) -> Result<CudaMoeLayer, Error> {
        let (device, graph) = (self.device.clone(), self.variant.graph);
        // SAFETY: the caller guarantees that the device can read all tensors in the sizes of `sizes` and that nothing
        // writes them.
        unsafe { CudaMoeLayer::pack(device, sizes, experts, shared, expert_map, graph) }
    }

    /// Copies the weights of a linear layer to the device and packs them there. Does the same as
    /// [`Backend::prepare_linear`], and returns a type that also takes calls from device memory
    /// ([`CudaLinear::launch`]).
    ///
    /// # Errors
    /// [`Error::NotComputed`] if no kernel computes such layers on this device. [`Error::Driver`] if a driver call
    /// fails, for instance because the device's memory is too small.
    pub fn prepare_linear_layer(&self, weights: &LinearWeights<'_>) -> Result<CudaLinear, Error> {
        CudaLinear::prepare(self.device.clone(), weights, self.variant.graph)
    }

    /// Packs a linear layer like [`Cuda::prepare_linear_layer`], from a tensor in device memory: a tensor of an engine
    /// or a checkpoint. The layer does not use the tensor afterwards.
    ///
    /// # Errors
    /// The errors of [`Cuda::prepare_linear_layer`]. [`Error::Invalid`] if a size or an alignment is wrong, or if a
    /// scale is negative or NaN, with its location.
    ///
    /// # Safety
    ///
    /// Every address of `tensor` points to device memory that this device can read, with the number of bytes that
    /// `sizes` implies. No work that writes this memory is in flight.
    pub unsafe fn pack_linear_layer(&self, sizes: LinearSizes, tensor: &LinearTensor<'_>) -> Result<CudaLinear, Error> {
        // SAFETY: the caller guarantees that the device can read the tensor in the sizes of `sizes` and that nothing
        // writes it.
        unsafe { CudaLinear::pack(self.device.clone(), sizes, tensor, self.variant.graph) }
    }

    /// Makes a launcher that packs and launches linear layers whose weights are in the caller's memory. Loads the
    /// kernels for 16-bit tokens; packing for another token format loads the kernels of that format. No kernel is
    /// therefore loaded while a stream is captured.
    ///
    /// # Errors
    /// [`Error::NotComputed`] if no kernel computes such layers on this device. [`Error::Driver`] if a kernel cannot be
    /// loaded.
    pub fn linear_launcher(&self) -> Result<LinearLauncher, Error> {
        let launcher = LinearLauncher::new(self.device.clone())?;
        launcher.load(TokenFormat::Bits16)?;
        Ok(launcher)
    }

    /// Returns the entries that multiply in a call of an MoE layer on a device with `sms` SMs, in order.
    pub(crate) fn moe_entries(&self, sizes: &MoeSizes, tokens: usize, sms: u32) -> Result<Vec<&'static str>, Error> {
        MoeLauncher::new(self.device.clone())?.multiplying_entries(sizes, tokens, sms)
    }

    /// Returns the entry that multiplies in a call of a linear layer on a device with `sms` SMs.
    pub(crate) fn linear_entry(&self, sizes: &LinearSizes, tokens: usize, sms: u32) -> Result<&'static str, Error> {
        LinearLauncher::new(self.device.clone())?.multiplying_entry(sizes, tokens, sms)
    }

    /// Makes a launcher that packs and launches MoE layers whose weights and workspace are in the caller's memory.
    /// Loads the kernels for 16-bit tokens; packing for another token format loads the kernels of that format. No
    /// kernel is therefore loaded while a stream is captured.
    ///
    /// # Errors
    /// [`Error::NotComputed`] if no kernel computes such layers on this device. [`Error::Driver`] if a kernel cannot be
    /// loaded.
    pub fn moe_launcher(&self) -> Result<MoeLauncher, Error> {
        let launcher = MoeLauncher::new(self.device.clone())?;
        launcher.load(TokenFormat::Bits16)?;
        Ok(launcher)
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

    fn gpu(&self) -> Option<((u32, u32), u32)> {
        Some((self.info().capability, self.info().sms))
    }

    fn peaks(&self) -> Option<Peaks> {
        let name = &self.info().name;
        let name = name.strip_prefix("NVIDIA ").unwrap_or(name);
        GPUS.iter().find(|gpu| name.starts_with(gpu.device_prefix)).map(|gpu| gpu.peaks)
    }

    fn prepare<'w>(&self, weights: &Weights<'w>) -> Result<Box<dyn Layer + 'w>, Error> {
        Ok(Box::new(self.prepare_layer(weights)?))
    }

    fn prepare_moe<'w>(&self, weights: &MoeWeights<'w>) -> Result<Box<dyn Layer<Moe> + 'w>, Error> {
        Ok(Box::new(self.prepare_moe_layer(weights)?))
    }

    fn moe_token_format(&self) -> TokenFormat {
        MoeKernels::of(self.device.info.capability).map_or_else(Default::default, |kernels| kernels.default_format())
    }

    fn prepare_linear<'w>(&self, weights: &LinearWeights<'w>) -> Result<Box<dyn Layer<Linear> + 'w>, Error> {
        Ok(Box::new(self.prepare_linear_layer(weights)?))
    }

    fn route_with_ids(&self, router: &Router, logits: &Logits<'_>, token_ids: &[i32]) -> Result<Routes, Error> {
        self.router_launcher()?.route(router, logits, token_ids)
    }
}
