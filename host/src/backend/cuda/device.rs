//! A device: its context, the modules loaded into it, and its errors put into words.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::CString;
use std::fmt::Display;
use std::path::PathBuf;
use std::ptr;
use std::sync::{Mutex, PoisonError};

use cuda_driver::cust::context::{Context, ContextHandle, CurrentContext};
use cuda_driver::cust::device::{self, DeviceAttribute};
use cuda_driver::cust::error::CudaResult;
use cuda_driver::cust::module::Module;
use cuda_driver::{Failure, last_failure, sys};
use gpu_arch::Capability;

use crate::error::Error;
use crate::kernels::builds::{self, Build};
use crate::kernels::kernel::Entry as KernelEntry;
use crate::kernels::{self, GroupedKernel};
use crate::plan::variant::Variant;

/// What can be said of a device without making a context on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number, as the driver counts (`CUDA_VISIBLE_DEVICES` changes it).
    pub ordinal: u32,
    /// Its name, for instance `NVIDIA H200`.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: Capability,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Its memory, bytes.
    pub memory: usize,
    /// The kernel that runs on it by default, and the architecture that it is compiled for; `None` if none does.
    pub kernel: Option<(&'static str, &'static str)>,
}

/// The devices that the driver shows.
///
/// # Errors
/// [`Error::NoDevice`] with the reason, or [`Error::Driver`].
pub fn devices() -> Result<Vec<DeviceInfo>, Error> {
    (0..count()?).map(|ordinal| find(ordinal).map(|(_, info)| info)).collect()
}

fn count() -> Result<u32, Error> {
    cuda_driver::probe().map_err(|reason| Error::NoDevice(reason.to_string()))
}

/// Asks the driver about device `ordinal`, which [`cuda_driver::probe`] has counted.
fn find(ordinal: u32) -> Result<(device::Device, DeviceInfo), Error> {
    let label = || format!("CUDA device {ordinal}");
    let device = check(device::Device::get_device(ordinal), label)?;
    let attribute = |which| check(device.get_attribute(which), label).map(|value| value as u32);
    let capability =
        (attribute(DeviceAttribute::ComputeCapabilityMajor)?, attribute(DeviceAttribute::ComputeCapabilityMinor)?);
    let info = DeviceInfo {
        ordinal,
        name: check(device.name(), label)?,
        capability,
        sms: attribute(DeviceAttribute::MultiprocessorCount)?,
        memory: check(device.total_memory(), label)?,
        kernel: GroupedKernel::choose(GroupedKernel::proven(), capability)
            .and_then(|kernel| builds::find(kernel.name(), capability))
            .map(|build| (build.kernel, build.arch)),
    };
    Ok((device, info))
}

/// A driver's answer, its failure as [`Error::Driver`].
fn check<T>(result: CudaResult<T>, device: impl FnOnce() -> String) -> Result<T, Error> {
    result.map_err(|error| match last_failure() {
        // cust knows neither which call failed nor the newer errors. The forwarder knows both.
        Some(failure) => driver_error(failure, device()),
        None => Error::Driver { call: "cust", device: device(), source: Box::new(error) },
    })
}

fn driver_error(failure: Failure, device: String) -> Error {
    Error::Driver { call: failure.call, device, source: Box::new(failure) }
}

/// How a device is opened.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A folder where the kernel may lie as machine code: `<kernel>.<arch>.cubin`, for instance `gated_simt.sm_90.cubin`. It
    /// spares the driver the compilation; where there is no such file, the PTX is used.
    pub cubins: Option<PathBuf>,
    /// A file of PTX or machine code that is loaded in place of the kernel whose entries it has: to run what was just compiled.
    pub code: Option<PathBuf>,
}

/// A device with its primary context, the one that other libraries of the process use too.
pub(super) struct Device {
    pub info: DeviceInfo,
    /// The kernel that runs unless another is asked for.
    pub default: GroupedKernel,
    /// Where cubin files are looked for.
    cubins: Option<PathBuf>,
    /// The kernel that was given as a file, with its place and its text.
    code: Option<(&'static str, PathBuf, Vec<u8>)>,
    /// Loaded kernels; before `context`, so that they are unloaded first.
    modules: Mutex<HashMap<&'static str, Module>>,
    context: Context,
}

impl Device {
    /// Opens device `ordinal`, if a kernel runs on it.
    pub fn open(ordinal: u32, options: Options) -> Result<Self, Error> {
        let count = count()?;
        if ordinal >= count {
            return Err(Error::NoDevice(format!("there is no device {ordinal}, the driver shows {count}")));
        }
        let (device, info) = find(ordinal)?;
        let code = options.code.map(read_code).transpose()?;
        let default = GroupedKernel::choose(GroupedKernel::proven(), info.capability).ok_or_else(|| {
            let (major, minor) = info.capability;
            Error::NoDevice(format!("{} has compute capability {major}.{minor}, no kernel runs on that", info.name))
        })?;
        let context = check(Context::new(device), || label(&info))?;
        Ok(Self { info, default, cubins: options.cubins, code, modules: Mutex::default(), context })
    }

    /// The variant that runs the code which was given as a file; without such a file, the variant as it is.
    pub fn with_given_code(&self, variant: Variant) -> Result<Variant, Error> {
        match &self.code {
            Some((kernel, path, _)) => variant.with_code_of(kernel).map_err(|error| error.at(path.display())),
            None => Ok(variant),
        }
    }

    /// Makes the context current on this thread, as every call that touches memory, modules or streams needs.
    pub fn make_current(&self) -> Result<(), Error> {
        self.check(CurrentContext::set_current(&self.context))
    }

    /// Makes the context current until the guard goes; then the one before is current again.
    pub fn enter(&self) -> Result<Entered, Error> {
        let mut before = ptr::null_mut();
        // SAFETY: `before` outlives the call.
        self.check_raw(unsafe { sys::cuCtxGetCurrent(&mut before) })?;
        let other = before != self.context.get_inner();
        if other {
            self.make_current()?;
        }
        Ok(Entered { before: other.then_some(before) })
    }

    /// A result of cust's, its failure with this device's name.
    pub fn check<T>(&self, result: CudaResult<T>) -> Result<T, Error> {
        check(result, || label(&self.info))
    }

    /// A result of the driver's own functions.
    pub fn check_raw(&self, result: sys::CUresult) -> Result<(), Error> {
        if result == sys::CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let failure = last_failure().unwrap_or(Failure { call: "a driver call", code: result as i32 });
        Err(driver_error(failure, label(&self.info)))
    }

    /// An entry of a kernel, which is loaded if no layer has yet.
    ///
    /// The handle is good for as long as this `Device`, for launches with the shared memory that the entry asks for.
    pub fn function(&self, kernel: &str, entry: &KernelEntry) -> Result<sys::CUfunction, Error> {
        /// What every launch may ask for (CUDA programming guide, "Shared Memory").
        const SHARED_BYTES_UNASKED: u32 = 48 << 10;

        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let build = builds::find(kernel, self.info.capability)
            .expect("grouped kernels are checked when they are chosen, the others run everywhere");
        let module = match modules.entry(build.kernel) {
            Entry::Occupied(loaded) => loaded.into_mut(),
            Entry::Vacant(place) => place.insert(self.load(build)?),
        };
        let function = self.check(module.get_function(entry.name))?.to_raw();
        if entry.shared_bytes > SHARED_BYTES_UNASKED {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a function of a loaded module; the attribute takes a number of bytes.
            self.check_raw(unsafe { sys::cuFuncSetAttribute(function, attribute, entry.shared_bytes as i32) })?;
        }
        Ok(function)
    }

    /// Loads a kernel: from the file that was given for it, else machine code if there is a file of it, else the PTX built in.
    fn load(&self, build: &Build) -> Result<Module, Error> {
        if let Some((_, path, code)) = self.code.as_ref().filter(|(kernel, ..)| *kernel == build.kernel) {
            return if code.starts_with(ELF) {
                self.check(Module::from_cubin(code, &[])).map_err(|error| error.at(path.display()))
            } else {
                self.compile(&String::from_utf8_lossy(code), path.display())
            };
        }
        let cubin = self.cubins.as_ref().map(|folder| folder.join(builds::cubin_name(build, self.info.capability)));
        if let Some(path) = cubin.filter(|path| path.exists()) {
            let code = std::fs::read(&path).map_err(|source| Error::io(&path, source))?;
            return self.check(Module::from_cubin(code, &[])).map_err(|error| error.at(path.display()));
        }
        self.compile(build.ptx, format_args!("kernel {} ({})", build.kernel, build.arch))
    }

    /// Has the driver compile PTX (and cache it).
    fn compile(&self, ptx: &str, place: impl Display) -> Result<Module, Error> {
        self.check(Module::from_ptx(ptx, &[])).map_err(|error| {
            let log = CString::new(ptx).ok().and_then(|ptx| cuda_driver::jit_log(&ptx));
            let says = log.map(|log| format!(", of which the driver's compiler says \"{log}\"")).unwrap_or_default();
            error.at(format_args!("{place}{says}"))
        })
    }
}

/// As long as it lives, a device's context is current on this thread.
pub(super) struct Entered {
    /// The context that is to be current afterwards, if that is another one.
    before: Option<sys::CUcontext>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was current when this was made, or null. Nobody can be told of a failure here.
            unsafe { sys::cuCtxSetCurrent(before) };
        }
    }
}

/// What a file of machine code begins with.
const ELF: &[u8] = b"\x7fELF";

/// Reads a file of PTX or machine code and finds out which kernel it is of.
fn read_code(path: PathBuf) -> Result<(&'static str, PathBuf, Vec<u8>), Error> {
    let code = std::fs::read(&path).map_err(|source| Error::io(&path, source))?;
    let kernel = kernels::kernel_of(&code).map_err(|error| error.at(path.display()))?;
    Ok((kernel.name(), path, code))
}

impl Drop for Device {
    fn drop(&mut self) {
        // Unloading needs the context on this thread. Nobody can be told of a failure here.
        let _ = self.make_current();
    }
}

fn label(info: &DeviceInfo) -> String {
    format!("CUDA device {} ({})", info.ordinal, info.name)
}
