//! NVIDIA GPUs: kernels of `kernels-gpu` launched through the CUDA driver, which is found at run time.
//!
//! The compute capability decides which kernel runs (`kernels/builds.rs`), unless a [`Variant`] names one. The kernel is
//! built in as PTX. The driver turns that into machine code when the first layer is prepared, unless a cubin file is there.
//! Nothing here decides about shapes.
//!
//! A kernel that has run in the emulator only computes on a card unasked once a self-test has found it right there
//! ([`selftest`](crate::selftest)). The test is `nvfp4 selftest`: a library never tries a kernel, starts no process and does not wait.
//! It reads what the command has left in the user's cache ([`Verdicts`]), and [`DeviceInfo::notes`] says what is not used and why.
//!
//! ```no_run
//! use nvfp4::backend::{Backend, cuda::Cuda};
//!
//! let gpu = Cuda::open(0)?; // Error::NoDevice, with the reason, where there is no driver
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

use super::{Backend, Layer, LinearLayer, MoeLayer};
use crate::error::Error;
use crate::kernels::builds;
pub use crate::kernels::group::DeviceGroup;
pub use crate::kernels::layer::router::RouterArguments;
pub use crate::kernels::linear::LinearArguments;
use crate::kernels::moe::MoeKernels;
pub use crate::kernels::moe::{MoeArguments, weight_bytes, workspace_bytes};
use crate::linear::{LinearSizes, LinearWeights};
use crate::moe::{MoeSizes, MoeWeights};
use crate::plan::roofline::{GPUS, Peaks};
use crate::plan::variant::Variant;
use crate::problem::{TokenFormat, Weights};
use crate::router::{Logits, Router, Routes};
use device::Device;

/// A GPU. Clones share it, its context and its loaded kernels.
#[derive(Clone)]
pub struct Cuda {
    device: Arc<Device>,
    variant: Variant,
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
        Self { device: Arc::new(Device::open(ordinal, options)?), variant: Variant::default() }
            .with_variant(Variant::default())
    }

    /// The same device, whose layers compute their steps in another variant. A kernel that is not used unasked
    /// ([`DeviceInfo::notes`]) may be named; one that has failed a self-test is refused when a layer is prepared.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the variant's kernel does not run on this device.
    pub fn with_variant(self, variant: Variant) -> Result<Self, Error> {
        let variant = self.device.with_given_code(variant)?;
        if let Some(kernel) = variant.kernel {
            builds::check_runs(kernel.name(), self.info().capability)?;
        }
        Ok(Self { variant, ..self })
    }

    /// The device in numbers.
    pub fn info(&self) -> &DeviceInfo {
        &self.device.info
    }

    /// Brings weights to the device, packed as its kernel reads them. This is [`Backend::prepare`] with a type that also
    /// takes steps from device memory ([`CudaLayer::launch`], [`CudaLayer::upload`]).
    ///
    /// # Errors
    /// [`Error::Driver`], for instance when the device's memory does not hold them; [`Error::Invalid`] if the variant is not
    /// for these weights, or what it names has failed its self-test.
    pub fn prepare_layer(&self, weights: &Weights<'_>) -> Result<CudaLayer, Error> {
        CudaLayer::new(self.device.clone(), self.variant, weights)
    }

    /// What launches routers whose operands lie on the device.
    ///
    /// # Errors
    /// [`Error::Driver`] if the kernel cannot be loaded.
    pub fn router_launcher(&self) -> Result<RouterLauncher, Error> {
        RouterLauncher::new(self.device.clone())
    }

    /// Brings the weights of an MoE layer to the device and packs them there. While that lasts, the largest projection takes
    /// its memory twice. This is [`Backend::prepare_moe`] with a type that also takes calls from device memory
    /// ([`CudaMoeLayer::launch`], [`CudaMoeLayer::capture`]).
    ///
    /// # Errors
    /// [`Error::NotComputed`] if no kernel computes such layers on this device; [`Error::Driver`], for instance when the
    /// device's memory does not hold them.
    pub fn prepare_moe_layer(&self, weights: &MoeWeights<'_>) -> Result<CudaMoeLayer, Error> {
        CudaMoeLayer::prepare(self.device.clone(), weights, self.variant.graph)
    }

    /// As [`Cuda::prepare_moe_layer`], of tensors that lie on the device: an engine's, or a checkpoint's. They are not needed
    /// any more afterwards.
    ///
    /// # Errors
    /// As [`Cuda::prepare_moe_layer`]; [`Error::Invalid`] if sizes or alignments are wrong, or a scale is negative or NaN, with its
    /// place.
    ///
    /// # Safety
    ///
    /// Tensors of these sizes lie where they say, the device can read them, and nothing that writes them is under way.
    pub unsafe fn pack_moe_layer(
        &self,
        sizes: MoeSizes,
        experts: &MoeTensors<'_>,
        shared: Option<&MoeTensors<'_>>,
        expert_map: Option<&[i32]>,
    ) -> Result<CudaMoeLayer, Error> {
        let (device, graph) = (self.device.clone(), self.variant.graph);
        // SAFETY: `# Safety` above.
        unsafe { CudaMoeLayer::pack(device, sizes, experts, shared, expert_map, graph) }
    }

    /// Brings the weights of a linear layer to the device and packs them there. This is [`Backend::prepare_linear`] with a type
    /// that also takes calls from device memory ([`CudaLinear::launch`]).
    ///
    /// # Errors
    /// [`Error::NotComputed`] if no kernel computes such layers on this device; [`Error::Driver`], for instance when the
    /// device's memory does not hold them.
    pub fn prepare_linear_layer(&self, weights: &LinearWeights<'_>) -> Result<CudaLinear, Error> {
        CudaLinear::prepare(self.device.clone(), weights, self.variant.graph)
    }

    /// As [`Cuda::prepare_linear_layer`], of a tensor that lies on the device: an engine's, or a checkpoint's. It is not needed
    /// any more afterwards.
    ///
    /// # Errors
    /// As [`Cuda::prepare_linear_layer`]; [`Error::Invalid`] if sizes or alignments are wrong, or a scale is negative or NaN, with
    /// its place.
    ///
    /// # Safety
    ///
    /// A tensor of these sizes lies where it says, the device can read it, and nothing that writes it is under way.
    pub unsafe fn pack_linear_layer(&self, sizes: LinearSizes, tensor: &LinearTensor<'_>) -> Result<CudaLinear, Error> {
        // SAFETY: `# Safety` above.
        unsafe { CudaLinear::pack(self.device.clone(), sizes, tensor, self.variant.graph) }
    }

    /// What packs and launches linear layers whose weights lie in the caller's memory. It loads the kernels for tokens of 16 bits, and packing
    /// those for others, so that none is loaded while a stream is captured.
    ///
    /// # Errors
    /// [`Error::NotComputed`] if no kernel computes such layers on this device; [`Error::Driver`] if one cannot be loaded.
    pub fn linear_launcher(&self) -> Result<LinearLauncher, Error> {
        let launcher = LinearLauncher::new(self.device.clone())?;
        launcher.load(TokenFormat::Bits16)?;
        Ok(launcher)
    }

    /// What packs and launches MoE layers whose weights and workspace lie in the caller's memory. It loads the kernels for tokens of 16 bits,
    /// and packing those for others, so that none is loaded while a stream is captured.
    ///
    /// # Errors
    /// [`Error::NotComputed`] if no kernel computes such layers on this device; [`Error::Driver`] if one cannot be loaded.
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

    fn peaks(&self) -> Option<Peaks> {
        let name = &self.info().name;
        let name = name.strip_prefix("NVIDIA ").unwrap_or(name);
        GPUS.iter().find(|gpu| name.starts_with(gpu.device_prefix)).map(|gpu| gpu.peaks)
    }

    fn prepare<'w>(&self, weights: &Weights<'w>) -> Result<Box<dyn Layer + 'w>, Error> {
        Ok(Box::new(self.prepare_layer(weights)?))
    }

    fn prepare_moe<'w>(&self, weights: &MoeWeights<'w>) -> Result<Box<dyn MoeLayer + 'w>, Error> {
        Ok(Box::new(self.prepare_moe_layer(weights)?))
    }

    fn moe_token_format(&self) -> TokenFormat {
        MoeKernels::of(self.device.info.capability).map_or_else(Default::default, MoeKernels::default_format)
    }

    fn prepare_linear<'w>(&self, weights: &LinearWeights<'w>) -> Result<Box<dyn LinearLayer + 'w>, Error> {
        Ok(Box::new(self.prepare_linear_layer(weights)?))
    }

    fn route(&self, router: &Router, logits: &Logits<'_>) -> Result<Routes, Error> {
        self.router_launcher()?.route(router, logits)
    }
}
