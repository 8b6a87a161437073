//! A device: its context, the modules loaded into the context, and the texts of its errors.

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
use super::standing::{Card, Code, KernelCode, Standing};
use super::verdicts::{Tried, Verdict, Verdicts};
use crate::Error;
use nvfp4_kernels::builds::{self, Build};
use nvfp4_kernels::kernel::{Entry as KernelEntry, Kernel};
use nvfp4_kernels::launch::Grid;
use nvfp4_kernels::variant::Variant;
use nvfp4_kernels::{GroupedKernel, Refused, Subject};

/// Properties of a device that can be read without making a context on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Number of the device as the driver counts (`CUDA_VISIBLE_DEVICES` changes it).
    pub ordinal: u32,
    /// Name, for instance `NVIDIA H200`.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: Capability,
    /// Number of SMs that launches are planned for.
    pub sms: u32,
    /// Bytes of memory.
    pub memory: usize,
    /// Driver: its CUDA version and, where the system reports it, its own version.
    pub driver: String,
    /// Default kernel and the architecture that it is compiled for. `None` if no kernel runs by default.
    pub kernel: Option<(&'static str, &'static str)>,
    /// For each kernel made for this device that is not the default, the reason; for each kernel that is used without some
    /// of its instances, these instances.
    pub notes: Vec<String>,
}

/// Lists the devices that the driver reports.
///
/// # Errors
/// [`Error::NoDevice`] with the reason, or [`Error::Driver`].
pub fn devices() -> Result<Vec<DeviceInfo>, Error> {
    (0..count()?).map(|ordinal| find(ordinal, Options::default()).map(|found| found.info)).collect()
}

/// Returns the verdict of a self-test on a device that is opened with these options, if there is one.
///
/// # Errors
/// The errors of [`devices`]. An error if the device runs no such kernels, or a file of code or of a verdict cannot be
/// read.
pub(crate) fn verdict(ordinal: u32, options: Options, subject: Subject) -> Result<Option<Verdict>, Error> {
    find(checked(ordinal)?, options)?.standing.verdict(subject)
}

/// Returns the key of a verdict on a subject for a device.
///
/// # Errors
/// The errors of [`verdict`].
pub(crate) fn tried(ordinal: u32, options: Options, subject: Subject) -> Result<Tried, Error> {
    find(checked(ordinal)?, options)?.standing.tried(subject)
}

/// Returns the number if a device has it.
fn checked(ordinal: u32) -> Result<u32, Error> {
    let count = count()?;
    let text = || format!("there is no device {ordinal}; the driver lists {count} devices");
    if ordinal < count { Ok(ordinal) } else { Err(Error::NoDevice(text())) }
}

fn count() -> Result<u32, Error> {
    cuda_driver::probe().map_err(|reason| Error::NoDevice(reason.to_string()))
}

/// A device, before a context is made on it.
struct Found {
    device: device::Device,
    info: DeviceInfo,
    standing: Standing,
    default: Option<GroupedKernel>,
    refused: Refused,
}

/// Reads the properties of device `ordinal`, which must be less than the result of [`cuda_driver::probe`].
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
    let refused = standing.refused();
    let (default, notes) = standing.default_kernel(&refused);
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
    Ok(Found { device, info, standing, default, refused })
}

/// CUDA version of the driver and, if Linux reports it, the version of the driver's kernel module: the compiler in the
/// driver changes with the module's version.
fn driver_version() -> Result<String, Error> {
    let cuda = check(CudaApiVersion::get(), || "the driver".into())?;
    let cuda = format!("{}.{}", cuda.major(), cuda.minor());
    let module = fs::read_to_string("/proc/driver/nvidia/version").ok();
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    let version = module.as_ref().and_then(|text| text.lines().next()?.split_whitespace().find(is_version));
    Ok(version.map_or(cuda.clone(), |version| format!("{cuda} ({version})")))
}

/// Converts a failure of cust to [`Error::Driver`].
fn check<T>(result: CudaResult<T>, device: impl FnOnce() -> String) -> Result<T, Error> {
    result.map_err(|error| match last_failure() {
        // cust does not know which call failed, nor the newer errors. The forwarding driver library knows both.
        Some(failure) => driver_error(failure, device()),
        None => Error::Driver { call: "cust", device: device(), source: Box::new(error) },
    })
}

fn driver_error(failure: Failure, device: String) -> Error {
    Error::Driver { call: failure.call, device, source: Box::new(failure) }
}

/// Options of opening a device.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Folder with kernels as machine code: `<kernel>.<arch>.cubin`, for instance `gated_simt.sm_90.cubin`. Machine
    /// code saves the compilation in the driver. Without the file, the PTX is used.
    pub cubins: Option<PathBuf>,
    /// File of PTX or machine code that replaces the kernel whose entries it contains. For running newly compiled code.
    pub code: Option<PathBuf>,
    /// Maximum number of SMs that launches are planned for. The default is all SMs. With few SMs, small problems reach
    /// code paths that otherwise need large problems.
    pub sms: Option<u32>,
    /// Location of the verdicts of self-tests. A kernel without a proof on hardware is a default only if a verdict says
    /// that it passed. A kernel that failed is refused.
    pub verdicts: Verdicts,
}

/// A device with its primary context, which other libraries of the process use too.
pub(super) struct Device {
    pub info: DeviceInfo,
    /// Kernel that runs unless the variant names another.
    pub default: GroupedKernel,
    /// The kernels that may run here, and their code.
    pub standing: Standing,
    /// Instances that failed self-tests here. The plan does not choose them.
    pub refused: Refused,
    /// Loaded kernels. Declared before `context`, so that they are unloaded first.
    modules: Mutex<HashMap<&'static str, Module>>,
    context: Context,
}

impl Device {
    /// Opens device `ordinal`. Fails if no kernel runs on it.
    pub fn open(ordinal: u32, options: Options) -> Result<Self, Error> {
        let Found { device, info, standing, default, refused } = find(checked(ordinal)?, options)?;
        let default = default.ok_or_else(|| {
            let (major, minor) = info.capability;
            Error::NoDevice(match &info.notes[..] {
                [] => format!("no kernel runs on {} (compute capability {major}.{minor})", info.name),
                notes => notes.join("; "),
            })
        })?;
        let context = check(Context::new(device), || label(&info))?;
        Ok(Self { info, default, standing, refused, modules: Mutex::default(), context })
    }

    /// Returns the variant that runs the code given as a file. Without a given file, returns the variant unchanged.
    pub fn with_given_code(&self, variant: Variant) -> Result<Variant, Error> {
        match self.standing.code.given() {
            Some((kernel, path)) => variant.with_code_of(kernel).map_err(|error| error.at(path.display())),
            None => Ok(variant),
        }
    }

    /// Makes the context current on this thread, which all calls on memory, modules and streams require.
    pub fn make_current(&self) -> Result<(), Error> {
        self.check(CurrentContext::set_current(&self.context))
    }

    /// Makes the context current until the guard is dropped. Then the previous context becomes current again.
    pub fn enter(&self) -> Result<Entered, Error> {
        let mut before = ptr::null_mut();
        // SAFETY: `before` is a valid pointer for the duration of the call.
        self.check_raw(unsafe { sys::cuCtxGetCurrent(&mut before) })?;
        let other = before != self.context.get_inner();
        if other {
            self.make_current()?;
        }
        Ok(Entered { before: other.then_some(before) })
    }

    /// Converts a failure of cust to an error with this device's name.
    pub fn check<T>(&self, result: CudaResult<T>) -> Result<T, Error> {
        check(result, || label(&self.info))
    }

    /// Converts the result of a driver function.
    pub fn check_raw(&self, result: sys::CUresult) -> Result<(), Error> {
        if result == sys::CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let failure = last_failure().unwrap_or(Failure { call: "a driver call", code: result as i32 });
        Err(driver_error(failure, label(&self.info)))
    }

    /// Returns the function of a kernel's entry. Loads the kernel if no layer has loaded it.
    ///
    /// The handle is valid while this `Device` lives. Launches may use the entry's dynamic shared memory.
    pub fn function(&self, kernel: &str, entry: &KernelEntry) -> Result<sys::CUfunction, Error> {
        /// Dynamic shared memory that every launch may use without an attribute (CUDA programming guide, "Shared
        /// Memory").
        const SHARED_BYTES_UNASKED: u32 = 48 << 10;

        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let build = builds::find(kernel, self.info.capability).expect(
            "grouped kernels are checked when they are chosen, and other kernels have a build for every device",
        );
        let module = match modules.entry(build.kernel) {
            Entry::Occupied(loaded) => loaded.into_mut(),
            Entry::Vacant(place) => place.insert(self.load(build)?),
        };
        let function = self.check(module.get_function(entry.name))?.to_raw();
        if entry.shared_bytes > SHARED_BYTES_UNASKED {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: `function` belongs to a loaded module, and the attribute takes a number of bytes.
            self.check_raw(unsafe { sys::cuFuncSetAttribute(function, attribute, entry.shared_bytes as i32) })?;
        }
        Ok(function)
    }

    /// Returns the functions of all entries of the kernels, by name, like [`Device::function`]. The thread's current
    /// context does not change.
    pub fn functions(&self, kernels: &[&dyn Kernel]) -> Result<Vec<(&'static str, sys::CUfunction)>, Error> {
        let _entered = self.enter()?;
        let entries = kernels.iter().flat_map(|kernel| kernel.entries().into_iter().map(move |entry| (kernel, entry)));
        entries.map(|(kernel, entry)| Ok((entry.name, self.function(kernel.name(), &entry)?))).collect()
    }

    /// Whether this GPU can launch a grid with clusters of more CTAs than every GPU supports. If so, the function is
    /// permitted to launch with them. The context must be current.
    pub fn takes_large_clusters(&self, function: sys::CUfunction, grid: &Grid) -> bool {
        let mut attributes = [cluster_attribute(grid.cluster)];
        let config = launch_config(grid, ptr::null_mut(), &mut attributes);
        let mut clusters = 0;
        // SAFETY: `function` belongs to a loaded module. `config`, its attributes and `clusters` live until the calls
        // return. A driver without these calls returns an error.
        unsafe {
            cuda_driver::allow_large_clusters(function) == sys::CUresult::CUDA_SUCCESS
                && sys::cuOccupancyMaxActiveClusters(&mut clusters, function, &config) == sys::CUresult::CUDA_SUCCESS
                && clusters > 0
        }
    }

    /// Loads the module of a kernel. If the driver refuses built-in machine code, for example because the driver is older than the
    /// machine code, it compiles the PTX.
    pub(super) fn load(&self, build: &'static Build) -> Result<Module, Error> {
        let code = self.standing.code.of(build, self.info.capability)?;
        if !code.is_machine_code {
            return self.compile(code);
        }
        let loaded = self.check(Module::from_cubin(&code.bytes, &[]));
        if loaded.is_err() && code.is_built_in {
            return self.compile(Code::ptx(build));
        }
        loaded.map_err(|error| error.at(code.place))
    }

    /// Loads PTX. The driver compiles it and caches the result.
    fn compile(&self, code: KernelCode<'_>) -> Result<Module, Error> {
        let ptx = String::from_utf8_lossy(&code.bytes);
        self.check(Module::from_ptx(&ptx, &[])).map_err(|error| {
            let log = CString::new(ptx.as_bytes()).ok().and_then(|ptx| cuda_driver::jit_log(&ptx));
            let says = log.map(|log| format!(": compiler log of the driver: \"{log}\"")).unwrap_or_default();
            error.at(format_args!("{}{says}", code.place))
        })
    }
}

/// Guard: while it lives, the device's context is current on this thread.
pub(super) struct Entered {
    /// Context to restore, if another context was current before.
    before: Option<sys::CUcontext>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: `before` was the current context when the guard was made, or null. A failure cannot be reported
            // here.
            unsafe { sys::cuCtxSetCurrent(before) };
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Unloading modules requires the context on this thread. A failure cannot be reported here.
        let _ = self.make_current();
    }
}

fn label(info: &DeviceInfo) -> String {
    format!("CUDA device {} ({})", info.ordinal, info.name)
}
