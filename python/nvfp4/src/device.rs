//! CUDA devices: what launches on them, and PyTorch's current stream there.

use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

use nvfp4::backend::cuda::{CUstream, Cuda, MoeLauncher};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::error::{Error, exception};

/// The most devices of a machine.
const MOST_DEVICES: usize = 64;

/// Opened devices stay open: their context is PyTorch's too.
static LAUNCHERS: [OnceLock<MoeLauncher>; MOST_DEVICES] = [const { OnceLock::new() }; MOST_DEVICES];

/// What launches layers on a device, which is opened the first time.
///
/// # Errors
/// [`Error`] if there is no such device, or no kernel for it.
pub fn launcher(ordinal: u32) -> PyResult<&'static MoeLauncher> {
    static OPENING: Mutex<()> = Mutex::new(());

    let slot = LAUNCHERS.get(ordinal as usize).ok_or_else(|| Error::new_err(format!("no CUDA device {ordinal}")))?;
    if let Some(launcher) = slot.get() {
        return Ok(launcher);
    }
    let _opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    if slot.get().is_none() {
        let launcher = Cuda::open(ordinal).and_then(|gpu| gpu.moe_launcher()).map_err(exception)?;
        let _ = slot.set(launcher);
    }
    Ok(slot.get().expect("set above"))
}

/// PyTorch's current stream of a device.
///
/// # Errors
/// What PyTorch says.
pub fn current_stream(py: Python<'_>, ordinal: u32) -> PyResult<CUstream> {
    static CURRENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

    // The function that Triton and Inductor launch by: a tenth of `torch.cuda.current_stream`'s time.
    let current = CURRENT.get_or_try_init(py, || {
        Ok::<_, PyErr>(py.import("torch._C")?.getattr("_cuda_getCurrentRawStream")?.unbind())
    })?;
    let stream: usize = current.call1(py, (ordinal,))?.extract(py)?;
    Ok(ptr::with_exposed_provenance_mut(stream))
}
