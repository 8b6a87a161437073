//! A device: its context, the modules loaded into it, and its errors put into words.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::CString;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::{fs, ptr};

use cuda_driver::cust::CudaApiVersion;
use cuda_driver::cust::context::{Context, ContextHandle, CurrentContext};
use cuda_driver::cust::device::{self, DeviceAttribute};
use cuda_driver::cust::error::CudaResult;
use cuda_driver::cust::module::Module;
use cuda_driver::{Failure, last_failure, sys};
use gpu_arch::Capability;

use super::config::{cluster_attribute, launch_config};
use super::standing::{Card, Code, Standing};
use super::verdicts::{Tried, Verdict, Verdicts};
use crate::error::Error;
use crate::kernels::builds::{self, Build};
use crate::kernels::kernel::{Entry as KernelEntry, Kernel};
use crate::kernels::launch::Grid;
use crate::kernels::{GroupedKernel, Subject};
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
    /// Its driver: the CUDA version, and where the system tells it the driver's own.
    pub driver: String,
    /// The kernel that runs on it by default, and the architecture that it is compiled for; `None` if none does.
    pub kernel: Option<(&'static str, &'static str)>,
    /// Why a kernel that is made for it is not the default.
    pub notes: Vec<String>,
}

/// The devices that the driver shows.
///
/// # Errors
/// [`Error::NoDevice`] with the reason, or [`Error::Driver`].
pub fn devices() -> Result<Vec<DeviceInfo>, Error> {
    (0..count()?).map(|ordinal| find(ordinal, Options::default()).map(|found| found.info)).collect()
}

/// The verdict of a self-test on a device: what was tried, with the options that a device is opened with.
///
/// # Errors
/// As [`devices`]; if the device runs no such kernels; if a file of code or of a verdict cannot be read.
pub(crate) fn verdict(ordinal: u32, options: Options, subject: Subject) -> Result<Option<Verdict>, Error> {
    find(checked(ordinal)?, options)?.standing.verdict(subject)
}

/// What a verdict on a subject is about on a device.
///
/// # Errors
/// As [`verdict`].
pub(crate) fn tried(ordinal: u32, options: Options, subject: Subject) -> Result<Tried, Error> {
    find(checked(ordinal)?, options)?.standing.tried(subject)
}

/// A number that is one of a device.
fn checked(ordinal: u32) -> Result<u32, Error> {
    let count = count()?;
    let text = || format!("there is no device {ordinal}, the driver shows {count}");
    if ordinal < count { Ok(ordinal) } else { Err(Error::NoDevice(text())) }
}

fn count() -> Result<u32, Error> {
    cuda_driver::probe().map_err(|reason| Error::NoDevice(reason.to_string()))
}

/// A device that nothing has been made on.
struct Found {
    device: device::Device,
    info: DeviceInfo,
    standing: Standing,
    default: Option<GroupedKernel>,
}

/// Asks the driver about device `ordinal`, which [`cuda_driver::probe`] has counted.
fn find(ordinal: u32, options: Options) -> Result<Found, Error> {
    let label = || format!("CUDA device {ordinal}");
    let device = check(device::Device::get_device(ordinal), label)?;
    let attribute = |which| check(device.get_attribute(which), label).map(|value| value as u32);
    let capability =
        (attribute(DeviceAttribute::ComputeCapabilityMajor)?, attribute(DeviceAttribute::ComputeCapabilityMinor)?);
    let sms = attribute(DeviceAttribute::MultiprocessorCount)?;
    let (name, driver) = (check(device.name(), label)?, driver_version()?);
    let standing = Standing {
        card: Card { name: name.clone(), capability, driver: driver.clone() },
        code: Code::new(options.cubins, options.code)?,
        verdicts: options.verdicts,
    };
    let (default, notes) = standing.default_kernel();
    let info = DeviceInfo {
        ordinal,
        name,
        capability,
        sms: options.sms.map_or(sms, |most| most.clamp(1, sms)),
        memory: check(device.total_memory(), label)?,
        driver,
        kernel: default
            .and_then(|kernel| builds::find(kernel.name(), capability))
            .map(|build| (build.kernel, build.arch)),
        notes,
    };
    Ok(Found { device, info, standing, default })
}

/// The CUDA version that the driver knows, and beside it the version of the kernel's module where Linux tells it: a driver's compiler
/// changes with the latter.
fn driver_version() -> Result<String, Error> {
    let cuda = check(CudaApiVersion::get(), || "the driver".into())?;
    let cuda = format!("{}.{}", cuda.major(), cuda.minor());
    let module = fs::read_to_string("/proc/driver/nvidia/version").ok();
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    let version = module.as_ref().and_then(|text| text.lines().next()?.split_whitespace().find(is_version));
    Ok(version.map_or(cuda.clone(), |version| format!("{cuda} ({version})")))
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
    /// The multiprocessors that launches are planned for, no more than there are; all of them unless told. Few of them reach with small
    /// problems what many reach with large ones.
    pub sms: Option<u32>,
    /// Where verdicts of self-tests are. A kernel that none has been verified of runs unasked where a verdict there says that it
    /// passed; what failed is refused.
    pub verdicts: Verdicts,
}

/// A device with its primary context, the one that other libraries of the process use too.
pub(super) struct Device {
    pub info: DeviceInfo,
    /// The kernel that runs unless another is asked for.
    pub default: GroupedKernel,
    /// What may run here, and its code.
    pub standing: Standing,
    /// Loaded kernels; before `context`, so that they are unloaded first.
    modules: Mutex<HashMap<&'static str, Module>>,
    context: Context,
}

impl Device {
    /// Opens device `ordinal`, if a kernel runs on it.
    pub fn open(ordinal: u32, options: Options) -> Result<Self, Error> {
        let Found { device, info, standing, default } = find(checked(ordinal)?, options)?;
        let default = default.ok_or_else(|| {
            let (major, minor) = info.capability;
            Error::NoDevice(match &info.notes[..] {
                [] => format!("{} has compute capability {major}.{minor}, no kernel runs on that", info.name),
                notes => notes.join("; "),
            })
        })?;
        let context = check(Context::new(device), || label(&info))?;
        Ok(Self { info, default, standing, modules: Mutex::default(), context })
    }

    /// The variant that runs the code which was given as a file; without such a file, the variant as it is.
    pub fn with_given_code(&self, variant: Variant) -> Result<Variant, Error> {
        match self.standing.code.given() {
            Some((kernel, path)) => variant.with_code_of(kernel).map_err(|error| error.at(path.display())),
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

    /// The entries of kernels, by name; as [`Device::function`]. The thread's current context stays as it was.
    pub fn functions(&self, kernels: &[&dyn Kernel]) -> Result<Vec<(&'static str, sys::CUfunction)>, Error> {
        let _entered = self.enter()?;
        let entries = kernels.iter().flat_map(|kernel| kernel.entries().into_iter().map(move |entry| (kernel, entry)));
        entries.map(|(kernel, entry)| Ok((entry.name, self.function(kernel.name(), &entry)?))).collect()
    }

    /// Whether this card runs a launch whose clusters have more blocks than every card takes. If so, the function may be launched so.
    /// The context is current.
    pub fn takes_large_clusters(&self, function: sys::CUfunction, grid: &Grid) -> bool {
        let mut attributes = [cluster_attribute(grid.cluster)];
        let config = launch_config(grid, ptr::null_mut(), &mut attributes);
        let mut clusters = 0;
        // SAFETY: a function of a loaded module; the configuration and what it points to outlive the call, and so does `clusters`. A
        // driver that lacks the calls says so.
        unsafe {
            cuda_driver::allow_large_clusters(function) == sys::CUresult::CUDA_SUCCESS
                && sys::cuOccupancyMaxActiveClusters(&mut clusters, function, &config) == sys::CUresult::CUDA_SUCCESS
                && clusters > 0
        }
    }

    /// Loads a kernel.
    fn load(&self, build: &'static Build) -> Result<Module, Error> {
        let code = self.standing.code.of(build, self.info.capability)?;
        if code.is_machine_code {
            return self.check(Module::from_cubin(&code.bytes, &[])).map_err(|error| error.at(code.place));
        }
        // Has the driver compile it (and cache what comes of that).
        let ptx = String::from_utf8_lossy(&code.bytes);
        self.check(Module::from_ptx(&ptx, &[])).map_err(|error| {
            let log = CString::new(ptx.as_bytes()).ok().and_then(|ptx| cuda_driver::jit_log(&ptx));
            let says = log.map(|log| format!(", of which the driver's compiler says \"{log}\"")).unwrap_or_default();
            error.at(format_args!("{}{says}", code.place))
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

impl Drop for Device {
    fn drop(&mut self) {
        // Unloading needs the context on this thread. Nobody can be told of a failure here.
        let _ = self.make_current();
    }
}

fn label(info: &DeviceInfo) -> String {
    format!("CUDA device {} ({})", info.ordinal, info.name)
}
