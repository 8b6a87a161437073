//! Launchers for candle's GPUs, and addresses of candle's tensors.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceRepr};
use candle_core::{CudaDevice, Result, Storage, Tensor, bail};
use nvfp4::backend::cuda::{CUstream, Cuda, LinearLauncher, MoeLauncher};

use crate::error;

/// A token type in candle's memory on a GPU.
pub trait Token: CudaDType + DeviceRepr {}
impl Token for half::bf16 {}
impl Token for half::f16 {}

/// Returns the launcher that packs and runs linear layers on a GPU.
pub fn linear_launcher(device: &CudaDevice) -> Result<LinearLauncher> {
    static LAUNCHERS: Launchers<LinearLauncher> = Launchers::new(BTreeMap::new());
    launcher(&LAUNCHERS, device, Cuda::linear_launcher)
}

/// Returns the launcher that packs and runs MoE layers on a GPU.
pub fn moe_launcher(device: &CudaDevice) -> Result<MoeLauncher> {
    static LAUNCHERS: Launchers<MoeLauncher> = Launchers::new(BTreeMap::new());
    launcher(&LAUNCHERS, device, Cuda::moe_launcher)
}

/// Launchers by GPU ordinal. They are kept, because loading kernels takes long. Their context is the primary context,
/// which candle uses too.
type Launchers<L> = Mutex<BTreeMap<usize, L>>;

fn launcher<L: Clone>(
    launchers: &Launchers<L>,
    device: &CudaDevice,
    open: fn(&Cuda) -> std::result::Result<L, nvfp4::Error>,
) -> Result<L> {
    let ordinal = device.cuda_stream().context().ordinal();
    let mut launchers = launchers.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(launcher) = launchers.get(&ordinal) {
        return Ok(launcher.clone());
    }
    let launcher = Cuda::open(ordinal as u32).and_then(|gpu| open(&gpu)).map_err(error)?;
    launchers.insert(ordinal, launcher.clone());
    Ok(launcher)
}

/// Converts candle's stream to the library's type.
pub fn handle(stream: &CudaStream) -> CUstream {
    stream.cu_stream().cast()
}

/// Returns the address of a contiguous tensor. The stream waits for the work that wrote the tensor.
pub fn address<T: CudaDType>(tensor: &Tensor, stream: &CudaStream) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        bail!("expected a tensor on a GPU, got one on {:?}", tensor.device().location())
    };
    let elements = storage.as_cuda_slice::<T>()?.slice(layout.start_offset()..);
    let (address, _) = elements.device_ptr(stream);
    Ok(address)
}

/// Waits for the packing of weights and returns their first bytes.
pub fn packed_head<const BYTES: usize>(weights: &CudaSlice<u8>, device: &CudaDevice) -> Result<[u8; BYTES]> {
    let mut head = [0; BYTES];
    device.memcpy_dtoh(&weights.slice(..BYTES), &mut head)?;
    device.synchronize()?;
    Ok(head)
}
