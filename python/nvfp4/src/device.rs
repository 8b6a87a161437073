//! Launchers of CUDA devices, and PyTorch's current stream.

use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

use nvfp4::backend::cuda::{CUstream, Cuda, LinearLauncher, MoeLauncher, RouterLauncher};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::error::{Error, exception};

/// Maximum number of devices.
const MOST_DEVICES: usize = 64;

/// Launchers of a device.
pub struct Launchers {
    linear: Of<LinearLauncher>,
    moe: Of<MoeLauncher>,
    router: Of<RouterLauncher>,
}

/// A launcher, or the reason why the device cannot run this kind of layer.
type Of<T> = Result<T, String>;

impl Launchers {
    fn open(ordinal: u32) -> Result<Self, nvfp4::Error> {
        fn of<T>(launcher: Result<T, nvfp4::Error>) -> Of<T> {
            launcher.map_err(|error| error.to_string())
        }

        let gpu = Cuda::open(ordinal)?;
        Ok(Self { linear: of(gpu.linear_launcher()), moe: of(gpu.moe_launcher()), router: of(gpu.router_launcher()) })
    }

    /// Returns the launcher of linear layers.
    ///
    /// # Errors
    /// [`Error`] if there is no kernel for the device. The other getters return the same error.
    pub fn linear(&self) -> PyResult<&LinearLauncher> {
        self.linear.as_ref().map_err(|text| Error::new_err(text.clone()))
    }

    pub fn moe(&self) -> PyResult<&MoeLauncher> {
        self.moe.as_ref().map_err(|text| Error::new_err(text.clone()))
    }

    pub fn router(&self) -> PyResult<&RouterLauncher> {
        self.router.as_ref().map_err(|text| Error::new_err(text.clone()))
    }
}

/// Launchers by device. They are never closed: PyTorch uses the same context.
static LAUNCHERS: [OnceLock<Launchers>; MOST_DEVICES] = [const { OnceLock::new() }; MOST_DEVICES];

/// Returns the launchers of a device. The first call opens the device.
///
/// # Errors
/// [`Error`] if there is no such device.
pub fn launchers(ordinal: u32) -> PyResult<&'static Launchers> {
    static OPENING: Mutex<()> = Mutex::new(());

    let slot = LAUNCHERS.get(ordinal as usize).ok_or_else(|| Error::new_err(format!("no CUDA device {ordinal}")))?;
    if let Some(launchers) = slot.get() {
        return Ok(launchers);
    }
    let _opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    if slot.get().is_none() {
        let _ = slot.set(Launchers::open(ordinal).map_err(exception)?);
    }
    Ok(slot.get().expect("set above"))
}

/// Returns PyTorch's current stream of a device.
///
/// # Errors
/// PyTorch's error.
pub fn current_stream(py: Python<'_>, ordinal: u32) -> PyResult<CUstream> {
    static CURRENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

    // Triton and Inductor launch with this function. It takes a tenth of the time of `torch.cuda.current_stream`.
    let current = CURRENT.get_or_try_init(py, || {
        Ok::<_, PyErr>(py.import("torch._C")?.getattr("_cuda_getCurrentRawStream")?.unbind())
    })?;
    let stream: usize = current.call1(py, (ordinal,))?.extract(py)?;
    Ok(ptr::with_exposed_provenance_mut(stream))
}
