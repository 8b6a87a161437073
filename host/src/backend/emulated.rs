//! The kernels of `kernels-gpu` on no GPU at all: the PTX that `backend::cuda` would launch, executed by `ptx_emulator`,
//! which stops at what a kernel does wrong and counts what it does. Decides nothing about shapes.
//!
//! Every operand is an allocation of its own, so that a kernel which leaves one by a byte is found out.
//!
//! ```
//! use nvfp4::backend::{Backend, emulated::{Emulated, Options}};
//!
//! let hopper = Emulated::new("sm_90a", Options::default())?;
//! assert_eq!(hopper.device(), "sm_90a, 148 SMs, schedule fair");
//! # Ok::<_, nvfp4::Error>(())
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels_gpu::abi;
use ptx_emulator::{Arg, Buffer, Device, DeviceConfig, LaunchConfig, Module};

pub use ptx_emulator::{Fault, FaultKind, Report as Counters, Schedule};

use super::descriptors::{self, DeviceGroup, DeviceWeights, Placed};
use super::kernels::{self, KERNELS, Kernel};
use super::{Backend, Layer};
use crate::error::Error;
use crate::format::Matrix;
use crate::output::Output;
use crate::plan::{Grid, gated_simt};
use crate::problem::{OutDtype, Step, Weights};

/// The architectures that there are kernels for.
pub const ARCHES: [&str; 3] = ["sm_80", "sm_90a", DEFAULT_ARCH];

/// The architecture of B200 and B300.
pub const DEFAULT_ARCH: &str = "sm_100f";

/// How kernels are executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Which warp runs next, and when asynchronous operations complete.
    pub schedule: Schedule,
    /// Whether races, uninitialised reads and misuse are looked for; bounds and alignment always are.
    pub sanitize: bool,
}

impl Default for Options {
    /// The fair schedule, the sanitizer on.
    fn default() -> Self {
        Self { schedule: Schedule::Fair, sanitize: true }
    }
}

/// An emulated GPU. Clones share its decoded kernel.
#[derive(Clone)]
pub struct Emulated {
    arch: String,
    kernel: &'static Kernel,
    module: Arc<Module>,
    options: Options,
}

impl Emulated {
    /// A device of an architecture as PTX names it, for instance of [`ARCHES`], with the kernel that runs on the first card
    /// of that architecture.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such architecture, or no kernel runs on it.
    pub fn new(arch: &str, options: Options) -> Result<Self, Error> {
        let capability = kernels::capability(arch).ok_or_else(|| {
            Error::Invalid(format!("`{arch}` is no architecture; there are kernels for {}", ARCHES.join(", ")))
        })?;
        let kernel = kernels::choose(KERNELS, capability)
            .ok_or_else(|| Error::Invalid(format!("no kernel runs on {arch}; take one of {}", ARCHES.join(", "))))?;
        let module = parse(kernel, kernel.ptx)?;
        Ok(Self { arch: arch.to_owned(), kernel, module, options })
    }

    /// The kernel's name and the architecture that it is compiled for.
    pub fn kernel(&self) -> (&'static str, &'static str) {
        (self.kernel.name, self.kernel.arch)
    }

    /// The kernel's text.
    pub fn ptx(&self) -> &'static str {
        self.kernel.ptx
    }

    /// The same device with another text of the kernel, to see whether a mistake in it is found.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the place if that is no PTX.
    pub fn with_ptx(self, ptx: &str) -> Result<Self, Error> {
        Ok(Self { module: parse(self.kernel, ptx)?, ..self })
    }
}

fn parse(kernel: &Kernel, ptx: &str) -> Result<Arc<Module>, Error> {
    let module = Module::parse(ptx);
    let place = format_args!("kernel {} ({})", kernel.name, kernel.arch);
    Ok(Arc::new(module.map_err(|error| Error::Invalid(error.to_string()).at(place))?))
}

impl Backend for Emulated {
    fn name(&self) -> &'static str {
        "emulated"
    }

    fn device(&self) -> String {
        format!("{}, {} SMs, schedule {}", self.arch, DeviceConfig::default().sms, self.options.schedule)
    }

    fn prepare<'w>(&self, weights: &'w Weights<'w>) -> Result<Box<dyn Layer + 'w>, Error> {
        let mut device = Device::new(DeviceConfig::default());
        let weights = DeviceWeights::new(weights, |matrix| Ok(place(&mut device, matrix).0))?;
        let (module, options) = (self.module.clone(), self.options);
        Ok(Box::new(EmulatedLayer { module, options, device, weights, step: Vec::new(), counters: None }))
    }
}

/// Weights in the emulated device's memory, and the last step.
struct EmulatedLayer {
    module: Arc<Module>,
    options: Options,
    device: Device,
    weights: DeviceWeights,
    /// Activations, output and descriptors of the last step, freed when the next begins: no step finds another's.
    step: Vec<Buffer>,
    /// Of the last step that launched a kernel and ended well.
    counters: Option<Counters>,
}

/// Puts a matrix into memory: values, and scales in the blocked layout.
fn place(device: &mut Device, matrix: &Matrix<'_>) -> (Placed, [Buffer; 2]) {
    let buffers = [device.upload(matrix.values()), device.upload(matrix.blocked_scales().bytes())];
    (Placed { values: buffers[0].address, scales: buffers[1].address }, buffers)
}

impl EmulatedLayer {
    fn launch(&mut self, grid: Grid, groups: &[abi::Group], out_dtype: OutDtype) -> Result<Counters, Error> {
        let descriptors = self.device.upload(groups);
        self.step.push(descriptors);
        let config = LaunchConfig {
            shared_bytes: grid.shared_bytes,
            schedule: self.options.schedule,
            sanitize: self.options.sanitize,
            ..LaunchConfig::linear(grid.blocks, grid.threads)
        };
        let parameter = Arg::value(descriptors::parameter(descriptors.address, groups.len(), out_dtype));
        self.device.launch(&self.module, grid.entry, &config, &[parameter]).map_err(Error::Fault)
    }
}

impl Layer for EmulatedLayer {
    fn kernel(&self) -> &str {
        gated_simt::name(self.weights.op())
    }

    fn execute(&mut self, step: &Step<'_>, output: &mut Output) -> Result<Duration, Error> {
        self.weights.check_fits(step)?;
        output.check_fits(step.problem())?;
        self.counters = None;
        for buffer in self.step.drain(..) {
            self.device.free(buffer);
        }
        if output.bits().is_empty() {
            return Ok(Duration::ZERO);
        }

        let (mut groups, mut outputs) = (Vec::new(), Vec::new());
        for (index, tokens) in step.activations().iter().enumerate() {
            let (Placed { values, scales }, buffers) = place(&mut self.device, tokens);
            // As the caller left it, so that an element which the kernel forgets keeps its poison.
            let c = self.device.upload(output.group(index));
            self.step.extend(buffers.into_iter().chain([c]));
            outputs.push(c);
            let (rows, global_scale, output) = (tokens.rows(), tokens.global_scale(), c.address);
            groups.push(self.weights.describe(index, &DeviceGroup { rows, values, scales, global_scale, output })?);
        }
        let grid = gated_simt::plan(self.weights.op(), &mut groups)?;

        let start = Instant::now();
        let result = self.launch(grid, &groups, output.dtype());
        let time = start.elapsed();
        for (group, c) in output.groups_mut().zip(&outputs) {
            group.copy_from_slice(&self.device.download(*c));
        }
        self.counters = Some(result?);
        Ok(time)
    }

    fn counters(&self) -> Option<&Counters> {
        self.counters.as_ref()
    }
}
