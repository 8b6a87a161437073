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
use ptx_emulator::{
    Arg, Buffer, DataType, Device, DeviceConfig, Interleave, L2Promotion, LaunchConfig, Module, OobFill, Swizzle,
    TensorMap,
};

pub use ptx_emulator::{Fault, FaultKind, Report as Counters, Schedule};

use super::descriptors::{DeviceGroup, DeviceWeights, Placed};
use super::kernels::{self, Kernel, SM90, SM100};
use super::launch::{self, Launcher, Parameter};
use super::{Backend, Layer};
use crate::error::Error;
use crate::format::Matrix;
use crate::output::Output;
use crate::plan::Grid;
use crate::plan::gated_sm90;
use crate::plan::gated_sm100::{self, MAP_BYTES, MapArguments};
use crate::problem::{Op, OutDtype, Step, Weights};

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
    /// Streaming multiprocessors.
    pub sms: u32,
}

impl Default for Options {
    /// The fair schedule, the sanitizer on, a B200's multiprocessors.
    fn default() -> Self {
        Self { schedule: Schedule::Fair, sanitize: true, sms: DeviceConfig::default().sms }
    }
}

/// An emulated GPU. Clones share its decoded kernels.
#[derive(Clone)]
pub struct Emulated {
    arch: String,
    kernel: &'static Kernel,
    module: Arc<Module>,
    /// For what `kernel` does not take: the portable one.
    portable: Arc<Module>,
    variant: Option<String>,
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
        let (Some(kernel), Some(portable)) = (launch::kernel(capability), launch::portable_kernel(capability)) else {
            return Err(Error::Invalid(format!("no kernel runs on {arch}; take one of {}", ARCHES.join(", "))));
        };
        let module = parse(kernel, kernel.ptx)?;
        let portable = if kernel == portable { module.clone() } else { parse(portable, portable.ptx)? };
        Ok(Self { arch: arch.to_owned(), kernel, module, portable, variant: None, options })
    }

    /// The same device on another schedule.
    pub fn with_schedule(mut self, schedule: Schedule) -> Self {
        self.options.schedule = schedule;
        self
    }

    /// The variants of the kernel for an operation, by name: of the Blackwell kernel `t64` for tiles of 64 tokens, and so
    /// on. None where there is nothing to choose.
    pub fn variants(&self, op: Op) -> Vec<&'static str> {
        match self.kernel.name {
            SM100 => gated_sm100::variants(op).map(|(name, _)| name).collect(),
            SM90 => gated_sm90::instances(op).map(|(name, _)| name).collect(),
            _ => Vec::new(),
        }
    }

    /// The same device with one of its [`variants`](Self::variants) for all steps, instead of the best for each. A step
    /// fails if there is none of that name, or it does not take the step.
    pub fn with_variant(self, variant: &str) -> Self {
        Self { variant: Some(variant.to_owned()), ..self }
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
        format!("{}, {} SMs, schedule {}", self.arch, self.options.sms, self.options.schedule)
    }

    fn prepare<'w>(&self, weights: &'w Weights<'w>) -> Result<Box<dyn Layer + 'w>, Error> {
        let (launcher, module) = match Launcher::new(self.kernel, weights) {
            Some(launcher) => (launcher, &self.module),
            None => (Launcher::Simt, &self.portable),
        };
        let mut device = Device::new(DeviceConfig { sms: self.options.sms });
        let weights = DeviceWeights::new(weights, |matrix| Ok(place(&mut device, matrix).0))?;
        let (module, options, variant) = (module.clone(), self.options, self.variant.clone());
        Ok(Box::new(EmulatedLayer {
            launcher,
            variant,
            module,
            options,
            device,
            weights,
            step: Vec::new(),
            counters: None,
        }))
    }
}

/// Weights in the emulated device's memory, and the last step.
struct EmulatedLayer {
    launcher: Launcher,
    variant: Option<String>,
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
    /// Plans and runs a step.
    fn run(&mut self, mut groups: Vec<abi::Group>, out_dtype: OutDtype) -> Result<Counters, Error> {
        let (op, sms) = (self.weights.op(), self.options.sms);
        let planned = self.launcher.plan(op, self.variant.as_deref(), &mut groups, sms)?;
        let mut bytes = vec![0; planned.bytes(&groups)];
        let descriptors = self.device.allocate(bytes.len() as u64);
        self.step.push(descriptors);
        let parameter = planned.write(&groups, out_dtype, descriptors.address, &mut bytes, tensor_map)?;
        self.device.write(descriptors, 0, &bytes);
        self.launch(planned.grid(), &parameter)
    }

    fn launch(&mut self, grid: Grid, parameter: &Parameter) -> Result<Counters, Error> {
        let config = LaunchConfig {
            shared_bytes: grid.shared_bytes,
            schedule: self.options.schedule,
            sanitize: self.options.sanitize,
            ..LaunchConfig::linear(grid.blocks, grid.threads)
        };
        let argument = Arg(parameter.bytes().to_vec());
        self.device.launch(&self.module, grid.entry, &config, &[argument]).map_err(Error::Fault)
    }
}

fn tensor_map(arguments: &MapArguments) -> Result<[u8; MAP_BYTES], Error> {
    let MapArguments { address, row_bytes, rows, box_bytes, box_rows } = *arguments;
    let map = TensorMap::tiled(
        DataType::U8,
        address,
        &[row_bytes.into(), rows.into()],
        &[row_bytes.into()],
        &[box_bytes, box_rows],
        &[1, 1],
        Interleave::None,
        if box_bytes == 64 { Swizzle::B64 } else { Swizzle::B128 },
        L2Promotion::B256,
        OobFill::Zero,
    );
    let map =
        map.map_err(|error| Error::Invalid(format!("tensor map of {rows} rows of {row_bytes} bytes: {error}")))?;
    Ok(map.to_bytes())
}

impl Layer for EmulatedLayer {
    fn kernel(&self) -> &str {
        self.launcher.name(self.weights.op())
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

        let mut groups = Vec::with_capacity(self.weights.len());
        let mut outputs = Vec::with_capacity(self.weights.len());
        for (index, tokens) in step.activations().iter().enumerate() {
            let (Placed { values, scales }, buffers) = place(&mut self.device, tokens);
            // As the caller left it, so that an element which the kernel forgets keeps its poison.
            let c = self.device.upload(output.group(index));
            self.step.extend(buffers.into_iter().chain([c]));
            outputs.push(c);
            let (rows, global_scale, output) = (tokens.rows(), tokens.global_scale(), c.address);
            groups.push(self.weights.describe(index, &DeviceGroup { rows, values, scales, global_scale, output })?);
        }

        let start = Instant::now();
        let result = self.run(groups, output.dtype());
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

#[cfg(test)]
mod tests {
    use ptx_emulator::FaultKind;

    use super::*;
    use crate::backend;
    use crate::compare::compare;
    use crate::generate::{self, Generator};
    use crate::oracle::Reference;
    use crate::problem::Group;

    fn run(gpu: &Emulated, groups: &[Group]) -> Result<Output, Error> {
        let weights = generate::weights(Generator::Gaussian, Op::Plain, groups, 1)?;
        let step = Step::new(&weights, generate::activations(Generator::Gaussian, groups, 1)?, OutDtype::F16)?;
        let mut output = Output::new(step.problem());
        backend::run(gpu.prepare(&weights)?.as_mut(), &step, &mut output)?;
        Ok(output)
    }

    /// A device whose kernel does only this.
    fn kernel(body: &str) -> Emulated {
        let ptx = format!(
            ".version 8.0\n.target sm_80\n.address_size 64\n\
             .visible .entry plain_simt_small(.param .align 8 .b8 launch[16]) {{\n.reg .f32 %f<5>;\n{body}\nret;\n}}"
        );
        Emulated::new("sm_80", Options::default()).unwrap().with_ptx(&ptx).unwrap()
    }

    const GROUPS: [Group; 2] = [Group { m: 3, n: 8, k: 48 }, Group { m: 0, n: 16, k: 16 }];

    #[test]
    fn what_a_kernel_does_not_write_stays_poisoned() {
        let output = run(&kernel(""), &GROUPS).unwrap();
        let mut poisoned = output.clone();
        poisoned.poison();
        assert_eq!(output, poisoned);
    }

    #[test]
    fn a_fault_and_what_is_not_supported_are_errors_of_different_text() {
        let error = |body| run(&kernel(body), &GROUPS).unwrap_err();
        let trap = error("trap;");
        assert_eq!(trap.fault().unwrap().kind, FaultKind::Trap);
        assert!(trap.to_string().starts_with("fault[trap]: ") && trap.to_string().contains("PTX line 6"), "{trap}");
        let texture = error("tex.1d.v4.f32.f32 {%f0, %f1, %f2, %f3}, [image, {%f4}];");
        assert!(texture.fault().unwrap().is_unsupported());
        assert!(texture.to_string().starts_with("unsupported: "), "{texture}");
    }

    #[test]
    fn a_layer_takes_steps_of_any_size_one_after_the_other() {
        let weights = generate::weights(Generator::Gaussian, Op::Plain, &GROUPS, 1).unwrap();
        for (gpu, fails) in [(Emulated::new("sm_80", Options::default()).unwrap(), false), (kernel("trap;"), true)] {
            let mut layer = gpu.prepare(&weights).unwrap();
            for m in [3, 0, 30, 1] {
                let tokens = generate::activations(Generator::Gaussian, &GROUPS.map(|group| Group { m, ..group }), 1);
                let step = Step::new(&weights, tokens.unwrap(), OutDtype::F16).unwrap();
                let mut output = Output::new(step.problem());
                let result = backend::run(layer.as_mut(), &step, &mut output);
                assert_eq!(result.is_err(), fails && m > 0);
                assert_eq!(layer.counters().is_some(), !fails && m > 0);
                assert!(fails || compare(&output, &Reference::new(&weights, &step), &step).passed());
            }
        }
    }

    #[test]
    fn an_architecture_without_a_kernel_and_text_that_is_no_ptx_are_refused() {
        let refusal = |arch| Emulated::new(arch, Options::default()).err().unwrap().to_string();
        assert_eq!(refusal("sm_70"), "no kernel runs on sm_70; take one of sm_80, sm_90a, sm_100f");
        assert_eq!(refusal("h200"), "`h200` is no architecture; there are kernels for sm_80, sm_90a, sm_100f");
        for arch in ARCHES {
            let error = Emulated::new(arch, Options::default()).unwrap().with_ptx("no PTX").err().unwrap().to_string();
            assert!(error.starts_with("kernel ") && error.contains("line 1"), "{error}");
        }
    }
}
