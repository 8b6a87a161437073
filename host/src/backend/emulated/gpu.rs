//! The emulated GPU: its architecture, its kernels and their launches. What layers do with it stands beside this file.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use gpu_arch::{Arch, Capability};
use ptx_emulator::{
    Arg, Buffer, Card, DataType, Device, DeviceConfig, Interleave, L2Promotion, LaunchConfig, OobFill,
    Report as Counters, Schedule, Swizzle, TensorMap,
};

use super::clock::Clock;
use crate::error::Error;
use crate::kernels::builds::{self, Build};
use crate::kernels::launch::{Grid, Launch};
use crate::kernels::linear::LinearKernels;
use crate::kernels::moe::MoeKernels;
use crate::kernels::tensor_map::{MAP_BYTES, MapArguments};
use crate::kernels::{self, GroupedKernel};
use crate::plan::roofline::GPUS;
use crate::plan::variant::Variant;
use crate::problem::{Op, TokenFormat};

/// The architectures that there are kernels for, the oldest first.
pub fn arches() -> Vec<&'static str> {
    builds::arches()
}

/// The one of [`arches`] that is for the first card in [`GPUS`].
pub fn default_arch() -> &'static str {
    let for_first = |arch: &&str| arch.parse().is_ok_and(|arch: Arch| arch.capability() == GPUS[0].capability);
    builds::arches().into_iter().find(for_first).expect("there are kernels for the first card")
}

/// The oldest of [`arches`] that MoE layers are computed on with tokens of every format.
pub fn moe_arch() -> &'static str {
    let computes = |arch: &&str| Emulated::new(arch, Options::default()).is_ok_and(|gpu| gpu.moe_kernels().fp8);
    arches().into_iter().find(computes).expect("there are kernels of MoE layers")
}

/// The oldest of [`arches`] that linear layers are computed on with tokens in FP8.
pub fn linear_arch() -> &'static str {
    let takes_fp8 = |gpu: Emulated| gpu.linear_kernels().of_format(TokenFormat::Fp8).is_some();
    let computes = |arch: &&str| Emulated::new(arch, Options::default()).is_ok_and(takes_fp8);
    arches().into_iter().find(computes).expect("there are kernels of linear layers")
}

/// The names, in faults and counters, of the buffers that hold values and scales of the weights.
pub const WEIGHTS: &str = "weights";

/// As [`WEIGHTS`], of the activations.
pub const TOKENS: &str = "tokens";

/// As [`WEIGHTS`], of the output.
pub const OUTPUT: &str = "output";

/// As [`WEIGHTS`], of the scratch in which one launch leaves something for another.
pub const INTERMEDIATE: &str = "intermediate";

/// As [`WEIGHTS`], of a step's descriptors: groups, tiles, tensor maps.
pub const DESCRIPTORS: &str = "descriptors";

/// How kernels are executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Which warp runs next, and when asynchronous operations complete.
    pub schedule: Schedule,
    /// Whether races, uninitialized reads and misuse are looked for; bounds and alignment always are.
    pub sanitize: bool,
    /// Streaming multiprocessors. `None` stands for those of the first card of the architecture in [`GPUS`]. If that
    /// has no such card, the emulator's default counts.
    pub sms: Option<u32>,
}

impl Default for Options {
    /// The fair schedule, the sanitizer on, a card's own multiprocessors.
    fn default() -> Self {
        Self { schedule: Schedule::Fair, sanitize: true, sms: None }
    }
}

/// An emulated GPU. Clones share its decoded kernels.
#[derive(Clone)]
pub struct Emulated {
    pub(super) arch: String,
    pub(super) capability: Capability,
    /// The kernel that is made for it.
    pub(super) default: GroupedKernel,
    pub(super) variant: Variant,
    pub(super) options: Options,
    pub(super) sms: u32,
    /// The kernel that has another text than its build's, and that text.
    given: Option<(&'static str, Arc<str>)>,
    /// The card by whose clock it runs.
    pub(super) clock: Option<Arc<Clock>>,
    /// Decoded kernels, by name.
    modules: Arc<Mutex<HashMap<&'static str, Arc<ptx_emulator::Module>>>>,
}

impl Emulated {
    /// A device of an architecture, named as in PTX (one of [`arches`], for instance). Its kernel is the one made for
    /// the first card of that architecture.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such architecture, or no kernel runs on it.
    pub fn new(arch: &str, options: Options) -> Result<Self, Error> {
        let known = || builds::arches().join(", ");
        let capability = arch
            .parse()
            .map(Arch::capability)
            .map_err(|_| Error::Invalid(format!("`{arch}` is no architecture; there are kernels for {}", known())))?;
        let default = GroupedKernel::choose(GroupedKernel::all(), capability)
            .ok_or_else(|| Error::Invalid(format!("no kernel runs on {arch}; take one of {}", known())))?;
        let card = GPUS.iter().find(|gpu| gpu.capability == capability).map(|gpu| gpu.sms as u32);
        let sms = options.sms.or(card).unwrap_or(DeviceConfig::default().sms);
        let (variant, modules) = (Variant::default(), Arc::default());
        Ok(Self {
            arch: arch.to_owned(),
            capability,
            default,
            variant,
            options,
            sms,
            given: None,
            clock: None,
            modules,
        })
    }

    /// The same device on another schedule.
    pub fn with_schedule(mut self, schedule: Schedule) -> Self {
        self.options.schedule = schedule;
        self
    }

    /// The same device by the clock of a card: a step's time is predicted ([`Backend::prediction`](crate::backend::Backend::prediction)), and no hazards are looked
    /// for. Without `values`, products and other arithmetic that no control flow depends on are left out, and outputs are
    /// meaningless. If it is to be `drawn`, the prediction has what some multiprocessors did.
    pub fn with_clock(self, card: Card, values: bool, drawn: bool) -> Self {
        let sms = self.options.sms.unwrap_or(card.sms);
        Self { clock: Some(Arc::new(Clock::new(card, values, drawn))), sms, ..self }
    }

    /// The same device with a clock that runs some multiprocessors alone, as [`ptx_emulator::Timeline::sampled`] does. Outputs are not
    /// whole then. Without a clock it changes nothing.
    #[must_use]
    pub fn with_sample(self, multiprocessors: u32) -> Self {
        let clock = self.clock.map(|clock| Arc::new(clock.sampled(multiprocessors)));
        Self { clock, ..self }
    }

    /// The instances of the kernel for an operation, by name: `t64` for tiles of 64 tokens, and so on.
    pub fn instances(&self, op: Op) -> Vec<&'static str> {
        self.default_kernel().instances(op)
    }

    /// The same device computing steps in another way. Launches of a schedule of several streams run one after the other.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the variant's kernel does not run here, or it is to be captured in a graph.
    pub fn with_variant(self, variant: Variant) -> Result<Self, Error> {
        if variant.graph {
            let why = "the emulator has no driver that could capture launches into a graph; leave `graph` out";
            return Err(Error::Invalid(why.into()));
        }
        if let Some(kernel) = variant.kernel {
            builds::check_runs(kernel.name(), self.capability)?;
        }
        Ok(Self { variant, ..self })
    }

    /// The kernel's name and the architecture that it is compiled for.
    pub fn kernel(&self) -> (&'static str, &'static str) {
        let build = self.build(self.default_kernel().name());
        (build.kernel, build.arch)
    }

    /// The kernel's text.
    pub fn ptx(&self) -> &'static str {
        self.build(self.default_kernel().name()).ptx()
    }

    /// The same device with another text for one of its kernels: the kernel whose entries the text has. This runs what
    /// was just compiled, or shows whether a mistake is found.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the place if that is no PTX, or no kernel has its entries.
    pub fn with_ptx(self, ptx: &str) -> Result<Self, Error> {
        let kernel = kernels::kernel_of(ptx.as_bytes())?.name();
        builds::check_runs(kernel, self.capability)?;
        let variant = self.variant.with_code_of(kernel)?;
        let module = parse(kernel, &self.arch, ptx)?;
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner).clone();
        modules.insert(kernel, module);
        Ok(Self { variant, modules: Arc::new(Mutex::new(modules)), given: Some((kernel, ptx.into())), ..self })
    }

    /// The variant's kernel, or else the device's own.
    pub(super) fn default_kernel(&self) -> GroupedKernel {
        self.variant.kernel.unwrap_or(self.default)
    }

    /// The kernels of an MoE layer.
    pub(super) fn moe_kernels(&self) -> MoeKernels {
        let kernels = MoeKernels::of(self.capability).expect("they run wherever a kernel of groups does");
        self.given.as_ref().map_or(kernels, |(given, _)| kernels.with_code_of(given))
    }

    /// The kernels of a linear layer.
    pub(super) fn linear_kernels(&self) -> LinearKernels {
        let kernels = LinearKernels::of(self.capability).expect("they run wherever a kernel of groups does");
        self.given.as_ref().map_or(kernels, |(given, _)| kernels.with_code_of(given))
    }

    /// A kernel's build for this device.
    fn build(&self, kernel: &str) -> &'static Build {
        builds::find(kernel, self.capability)
            .expect("grouped kernels are checked when they are chosen, the others run everywhere")
    }

    /// A kernel, decoded if it has not been yet.
    fn load(&self, kernel: &'static str) -> Result<Arc<ptx_emulator::Module>, Error> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(kernel) {
            return Ok(module.clone());
        }
        let build = self.build(kernel);
        let module = parse(kernel, build.arch, build.ptx())?;
        modules.insert(kernel, module.clone());
        Ok(module)
    }

    /// The memory of such a device, empty.
    pub(crate) fn memory(&self) -> Device {
        Device::new(DeviceConfig { sms: self.sms })
    }

    /// Runs a launch. Its descriptors become an allocation of their own, which is given to `keep`.
    pub(crate) fn launch(
        &self,
        device: &mut Device,
        launch: &Launch,
        keep: &mut Vec<Buffer>,
    ) -> Result<Counters, Error> {
        let mut bytes = vec![0; launch.bytes()];
        let parameter = if bytes.is_empty() {
            launch.write(0, &mut bytes, &mut tensor_map)?
        } else {
            let descriptors = device.allocate(bytes.len() as u64);
            device.name(descriptors, DESCRIPTORS);
            keep.push(descriptors);
            let parameter = launch.write(descriptors.address, &mut bytes, &mut tensor_map)?;
            device.write(descriptors, 0, &bytes);
            parameter
        };
        let module = self.load(launch.kernel)?;
        let Options { schedule, sanitize, .. } = self.options;
        let Grid { entry, blocks, cluster, threads, shared_bytes, overlaps } = launch.grid;
        let config = LaunchConfig {
            cluster: [cluster, 1, 1],
            shared_bytes,
            schedule,
            sanitize,
            // The manual counts, not what hardware may allow beyond it.
            strict: true,
            overlaps,
            ..LaunchConfig::linear(blocks, threads)
        };
        let arguments = [Arg(parameter.bytes().to_vec())];
        let done = match &self.clock {
            Some(clock) => {
                let build = self.build(launch.kernel);
                let given = self.given.as_ref().filter(|(kernel, _)| *kernel == launch.kernel);
                let ptx = given.map_or(build.ptx(), |(_, ptx)| ptx);
                clock.launch(device, (build, ptx), (&module, entry), &config, &arguments)
            }
            None => device.launch(&module, entry, &config, &arguments),
        };
        done.map_err(Error::Fault)
    }
}

fn parse(kernel: &str, arch: &str, ptx: &str) -> Result<Arc<ptx_emulator::Module>, Error> {
    let module = ptx_emulator::Module::parse(ptx);
    let place = format_args!("kernel {kernel} ({arch})");
    Ok(Arc::new(module.map_err(|error| Error::Invalid(error.to_string()).at(place))?))
}

fn tensor_map(arguments: &MapArguments) -> Result<[u8; MAP_BYTES], Error> {
    let MapArguments { address, row_bytes, row_pitch, rows, box_bytes, box_rows, swizzled } = *arguments;
    let map = TensorMap::tiled(
        DataType::U8,
        address,
        &[row_bytes.into(), rows.into()],
        &[row_pitch],
        &[box_bytes, box_rows],
        &[1, 1],
        Interleave::None,
        if swizzled { Swizzle::B128 } else { Swizzle::None },
        L2Promotion::B256,
        OobFill::Zero,
    );
    let map =
        map.map_err(|error| Error::Invalid(format!("tensor map of {rows} rows of {row_bytes} bytes: {error}")))?;
    Ok(map.to_bytes())
}

/// Brings an array to the device.
pub(super) fn upload<T: bytemuck::NoUninit>(device: &mut Device, array: &[T], name: &str) -> Buffer {
    let buffer = device.upload(array);
    device.name(buffer, name);
    buffer
}
