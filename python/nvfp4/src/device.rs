//! CUDA devices: what launches on them, and PyTorch's current stream there.

use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

use nvfp4::backend::cuda::{CUstream, Cuda, LinearLauncher, MoeLauncher, RouterLauncher};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::error::{Error, exception};

/// The most devices of a machine.
const MOST_DEVICES: usize = 64;

/// What launches on a device.
pub struct Launchers {
    linear: Of<LinearLauncher>,
    moe: Of<MoeLauncher>,
    router: Of<RouterLauncher>,
}

/// What launches, or why nothing of that kind runs on the device.
type Of<T> = Result<T, String>;

impl Launchers {
    fn open(ordinal: u32) -> Result<Self, nvfp4::Error> {
        fn of<T>(launcher: Result<T, nvfp4::Error>) -> Of<T> {
            launcher.map_err(|error| error.to_string())
        }

        let gpu = Cuda::open(ordinal)?;
        Ok(Self { linear: of(gpu.linear_launcher()), moe: of(gpu.moe_launcher()), router: of(gpu.router_launcher()) })
    }

    /// # Errors
    /// [`Error`] if there is no kernel for the device, as with the others.
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

/// Opened devices stay open: their context is PyTorch's too.
static LAUNCHERS: [OnceLock<Launchers>; MOST_DEVICES] = [const { OnceLock::new() }; MOST_DEVICES];

/// What launches on a device, which is opened the first time.
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
