//! The emulated GPU: its architecture, kernels and launches. The layers that use it are in the files beside this one.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use gpu_arch::{Arch, CAPABILITIES, Capability};
use ptx_emulator::{
    Arg, Buffer, Card, DataType, Device, DeviceConfig, Interleave, L2Promotion, LaunchConfig, OobFill,
    Report as Counters, Schedule, Sums, Swizzle, TensorMap,
};

use super::clock::Clock;
use crate::Error;
use crate::plan::roofline::GPUS;
use crate::problem::{Op, TokenFormat};
use nvfp4_kernels::builds::{self, Build};
use nvfp4_kernels::launch::{Grid, Launch};
use nvfp4_kernels::linear::LinearKernels;
use nvfp4_kernels::moe::MoeKernels;
use nvfp4_kernels::tensor_map::{MAP_BYTES, MapArguments};
use nvfp4_kernels::variant::Variant;
use nvfp4_kernels::{GroupedKernel, KERNELS, kernel_of};

/// Architectures that have kernels, the oldest first.
pub fn arches() -> Vec<&'static str> {
    builds::arches()
}

/// The architecture of [`arches`] that fits the first GPU in [`GPUS`].
pub fn default_arch() -> &'static str {
    let for_first = |arch: &&str| arch.parse().is_ok_and(|arch: Arch| arch.capability() == GPUS[0].capability);
    builds::arches().into_iter().find(for_first).expect("the first card has kernels")
}

/// The oldest architecture of [`arches`] whose kernels compute MoE layers with tokens of every format.
pub fn moe_arch() -> &'static str {
    let computes =
        |arch: &&str| Emulated::new(arch, Options::default()).is_ok_and(|gpu| gpu.moe_kernels().fp8.is_some());
    arches().into_iter().find(computes).expect("an architecture has kernels of MoE layers with every token format")
}

/// The oldest architecture of [`arches`] whose kernels compute linear layers with FP8 tokens.
pub fn linear_arch() -> &'static str {
    let takes_fp8 = |gpu: Emulated| gpu.linear_kernels().of_format(TokenFormat::Fp8).is_some();
    let computes = |arch: &&str| Emulated::new(arch, Options::default()).is_ok_and(takes_fp8);
    arches().into_iter().find(computes).expect("an architecture has kernels of linear layers with FP8 tokens")
}

/// Name of the buffers with values and scales of weights, in faults and counters.
pub const WEIGHTS: &str = "weights";

/// Name of the buffers with activations, in faults and counters.
pub const TOKENS: &str = "tokens";

/// Name of the buffers with the output, in faults and counters.
pub const OUTPUT: &str = "output";

/// Name of the scratch in which a launch passes data to another, in faults and counters.
pub const INTERMEDIATE: &str = "intermediate";

/// Name of the buffers with a step's descriptors (groups, tiles, tensor maps), in faults and counters.
pub const DESCRIPTORS: &str = "descriptors";

/// Options of the execution of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Order in which warps run, and time at which asynchronous operations complete.
    pub schedule: Schedule,
    /// Whether to check for races, uninitialized reads and misuse. Bounds and alignment are always checked.
    pub sanitize: bool,
    /// Number of SMs. `None` uses the number of the architecture's first GPU in [`GPUS`] or, if there is no such GPU,
    /// the emulator's default.
    pub sms: Option<u32>,
}

impl Default for Options {
    /// The fair schedule, with the sanitizer on and the number of SMs of a GPU.
    fn default() -> Self {
        Self { schedule: Schedule::Fair, sanitize: true, sms: None }
    }
}

/// An emulated GPU. All GPUs of a process share their decoded kernels.
#[derive(Clone)]
pub struct Emulated {
    pub(super) arch: String,
    pub(super) capability: Capability,
    /// Default kernel for this architecture.
    pub(super) default: GroupedKernel,
    pub(super) variant: Variant,
    pub(super) options: Options,
    pub(super) sms: u32,
    /// How tensor cores add.
    sums: Sums,
    /// Kernel whose text replaces its build, and this text.
    given: Option<(&'static str, Arc<str>)>,
    /// Clock of a GPU, if times are predicted.
    pub(super) clock: Option<Arc<Clock>>,
    /// Decoded texts that replace builds, by kernel.
    replaced: HashMap<&'static str, Arc<ptx_emulator::Module>>,
}

impl Emulated {
    /// Makes a device of an architecture, named as in PTX (for instance one of [`arches`]). Its default kernel is the
    /// kernel for the first GPU of this architecture.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the name is not an architecture, no kernel runs on it, or no GPU has its compute
    /// capability ([`CAPABILITIES`]).
    pub fn new(arch: &str, options: Options) -> Result<Self, Error> {
        let known = || builds::arches().join(", ");
        let capability = arch
            .parse()
            .map(Arch::capability)
            .map_err(|_| Error::Invalid(format!("`{arch}` is not an architecture; choose one of {}", known())))?;
        let default = GroupedKernel::choose(GroupedKernel::all(), capability)
            .ok_or_else(|| Error::Invalid(format!("no kernel runs on {arch}; choose one of {}", known())))?;
        if !CAPABILITIES.contains(&capability) {
            let known = CAPABILITIES.map(|(major, minor)| format!("sm_{major}{minor}")).join(", ");
            return Err(Error::Invalid(format!("{arch} is the architecture of no GPU; choose one of {known}")));
        }
        let card = GPUS.iter().find(|gpu| gpu.capability == capability).map(|gpu| gpu.sms as u32);
        let sms = options.sms.or(card).unwrap_or(DeviceConfig::default().sms);
        let (variant, replaced) = (Variant::default(), HashMap::new());
        Ok(Self {
            arch: arch.to_owned(),
            capability,
            default,
            variant,
            options,
            sms,
            sums: Sums::default(),
            given: None,
            clock: None,
            replaced,
        })
    }

    /// Returns the same device with another schedule.
    pub fn with_schedule(mut self, schedule: Schedule) -> Self {
        self.options.schedule = schedule;
        self
    }

    /// Returns the same device with other sums of tensor cores. With [`Sums::Exact`], instances and architectures with
    /// the same order of products give the same bits.
    #[must_use]
    pub fn with_sums(self, sums: Sums) -> Self {
        Self { sums, ..self }
    }

    /// Returns the same device with the clock of a GPU. The clock predicts the time of a step
    /// ([`Backend::prediction`](crate::backend::Backend::prediction)), and the sanitizer is off. Without `values`,
    /// products and other arithmetic that control flow does not depend on are skipped, so outputs are meaningless. If
    /// `drawn`, the prediction contains the activity of some SMs.
    pub fn with_clock(self, card: Card, values: bool, drawn: bool) -> Self {
        let sms = self.options.sms.unwrap_or(card.sms);
        Self { clock: Some(Arc::new(Clock::new(card, values, drawn))), sms, ..self }
    }

    /// Returns the same device with a clock that runs only some SMs, like [`ptx_emulator::Timeline::sampled`]. The
    /// outputs are then incomplete. Has no effect without a clock.
    #[must_use]
    pub fn with_sample(self, multiprocessors: u32) -> Self {
        let clock = self.clock.map(|clock| Arc::new(clock.sampled(multiprocessors)));
        Self { clock, ..self }
    }

    /// Names of the kernel's instances for an operation: `t64` for tiles of 64 tokens, and so on.
    pub fn instances(&self, op: Op) -> Vec<&'static str> {
        self.default_kernel().instances(op)
    }

    /// Returns the same device with another variant. In launch schedules with several streams, launches run one after
    /// the other.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the kernel of the variant does not run here, or the variant uses a graph.
    pub fn with_variant(self, variant: Variant) -> Result<Self, Error> {
        if variant.graph {
            let why = "the emulator cannot capture launches into a graph; leave out `graph`";
            return Err(Error::Invalid(why.into()));
        }
        if let Some(kernel) = variant.kernel {
            builds::check_runs(kernel.name(), self.capability)?;
        }
        Ok(Self { variant, ..self })
    }

    /// Name of the kernel, and the architecture that it is compiled for.
    pub fn kernel(&self) -> (&'static str, &'static str) {
        let build = self.build(self.default_kernel().name());
        (build.kernel, build.arch)
    }

    /// PTX of the kernel.
    pub fn ptx(&self) -> &'static str {
        self.build(self.default_kernel().name()).ptx()
    }

    /// Returns the same device with another text for one of its kernels: the kernel whose entries the text contains.
    /// For running newly compiled code, and for tests that a mistake is found.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the location if the text is not valid PTX, or if it contains no entry of a kernel.
    pub fn with_ptx(self, ptx: &str) -> Result<Self, Error> {
        let kernel = kernel_of(ptx.as_bytes())?.name();
        builds::check_runs(kernel, self.capability)?;
        let variant = self.variant.with_code_of(kernel)?;
        let module = parse(kernel, &self.arch, ptx)?;
        let mut replaced = self.replaced;
        replaced.insert(kernel, module);
        Ok(Self { variant, replaced, given: Some((kernel, ptx.into())), ..self })
    }

    /// Kernel of the variant or, if it names none, the default kernel.
    pub(super) fn default_kernel(&self) -> GroupedKernel {
        self.variant.kernel.unwrap_or(self.default)
    }

    /// Kernels of an MoE layer.
    pub(super) fn moe_kernels(&self) -> MoeKernels {
        let kernels =
            MoeKernels::of(self.capability).expect("they run on every architecture that has a kernel of groups");
        match &self.given {
            Some((given, _)) => kernels.with_code_of(given),
            None => kernels,
        }
    }

    /// Kernels of a linear layer.
    pub(super) fn linear_kernels(&self) -> LinearKernels {
        let kernels =
            LinearKernels::of(self.capability).expect("they run on every architecture that has a kernel of groups");
        match &self.given {
            Some((given, _)) => kernels.with_code_of(given),
            None => kernels,
        }
    }

    /// Build of a kernel for this device.
    fn build(&self, kernel: &str) -> &'static Build {
        builds::find(kernel, self.capability)
            .expect("grouped kernels are checked when they are chosen, and other kernels have a build for every device")
    }

    /// Returns a decoded kernel. All devices of the process share a build, which is decoded at its first use.
    fn load(&self, kernel: &'static str) -> Result<Arc<ptx_emulator::Module>, Error> {
        static DECODED: Mutex<BTreeMap<(&str, &str), Arc<ptx_emulator::Module>>> = Mutex::new(BTreeMap::new());
        if let Some(module) = self.replaced.get(kernel) {
            return Ok(module.clone());
        }
        let build = self.build(kernel);
        let decoded = || DECODED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = decoded().get(&(build.kernel, build.arch)) {
            return Ok(module.clone());
        }
        // Without the lock, other threads can decode other kernels meanwhile.
        let module = parse(kernel, build.arch, build.ptx())?;
        decoded().insert((build.kernel, build.arch), module.clone());
        Ok(module)
    }

    /// Makes the empty memory of this device.
    pub(crate) fn memory(&self) -> Device {
        Device::new(DeviceConfig { sms: self.sms })
    }

    /// Runs a launch. Its descriptors become a separate allocation, which is added to `keep`.
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
            sums: self.sums,
            // Follow the limits of the manual, not the larger limits of real hardware.
            strict: KERNELS.iter().all(|kernel| kernel.name() != launch.kernel || kernel.follows_manual(entry)),
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
        done.map_err(|fault| Error::Fault(Box::new(fault)))
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

/// Copies an array to the device.
pub(super) fn upload<T: bytemuck::NoUninit>(device: &mut Device, array: &[T], name: &str) -> Buffer {
    let buffer = device.upload(array);
    device.name(buffer, name);
    buffer
}
