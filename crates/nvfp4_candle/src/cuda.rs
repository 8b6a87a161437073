//! candle's GPUs: what launches on them, and where their tensors lie.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceRepr};
use candle_core::{CudaDevice, Result, Storage, Tensor, bail};
use nvfp4::backend::cuda::{CUstream, Cuda, LinearLauncher, MoeLauncher};

use crate::error;

/// A type of tokens, in candle's memory on a GPU.
pub trait Token: CudaDType + DeviceRepr {}
impl Token for half::bf16 {}
impl Token for half::f16 {}

/// What packs and launches linear layers on a GPU.
pub fn linear_launcher(device: &CudaDevice) -> Result<LinearLauncher> {
    static LAUNCHERS: Launchers<LinearLauncher> = Launchers::new(BTreeMap::new());
    launcher(&LAUNCHERS, device, Cuda::linear_launcher)
}

/// What packs and launches MoE layers on a GPU.
pub fn moe_launcher(device: &CudaDevice) -> Result<MoeLauncher> {
    static LAUNCHERS: Launchers<MoeLauncher> = Launchers::new(BTreeMap::new());
    launcher(&LAUNCHERS, device, Cuda::moe_launcher)
}

/// What launches on the GPU of each number. Once made it stays, since loading kernels takes long; its context is the primary one, candle's
/// too.
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

/// candle's stream, as the library takes it.
pub fn handle(stream: &CudaStream) -> CUstream {
    stream.cu_stream().cast()
}

/// Where a tensor without gaps lies. The stream has come past what wrote it.
pub fn address<T: CudaDType>(tensor: &Tensor, stream: &CudaStream) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { bail!("a tensor is on {:?}", tensor.device().location()) };
    let elements = storage.as_cuda_slice::<T>()?.slice(layout.start_offset()..);
    let (address, _) = elements.device_ptr(stream);
    Ok(address)
}

/// Waits for the packing of weights; what they begin with.
pub fn packed_head<const BYTES: usize>(weights: &CudaSlice<u8>, device: &CudaDevice) -> Result<[u8; BYTES]> {
    let mut head = [0; BYTES];
    device.memcpy_dtoh(&weights.slice(..BYTES), &mut head)?;
    device.synchronize()?;
    Ok(head)
}
