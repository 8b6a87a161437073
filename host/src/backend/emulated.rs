//! The kernels of `kernels-gpu` without a GPU: `ptx_emulator` executes the PTX that `backend::cuda` would launch. It
//! stops where a kernel does something wrong, and counts what a kernel does. Nothing here decides about shapes.
//!
//! Every operand is an allocation of its own, so that a kernel which leaves one by a byte is found.
//!
//! ```
//! use nvfp4::backend::{Backend, emulated::{Emulated, Options}};
//!
//! let hopper = Emulated::new("sm_90a", Options::default())?;
//! assert_eq!(hopper.device(), "sm_90a, 132 SMs, schedule fair");
//! # Ok::<_, nvfp4::Error>(())
//! ```

pub(super) mod clock;
mod linear;
mod moe;
mod router;

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpu_arch::{Arch, Capability};
use ptx_emulator::{
    Arg, Buffer, DataType, Device, DeviceConfig, Interleave, L2Promotion, LaunchConfig, OobFill, Swizzle, TensorMap,
};

pub use clock::Prediction;
pub use moe::ROUTING;
pub use ptx_emulator::{
    Card, Constant, Fault, FaultKind, Key, Origin, Report as Counters, Schedule, Span, Time, trace,
};

use self::clock::Clock;
use super::{Backend, Layer, LinearLayer, MoeLayer};
use crate::error::Error;
use crate::kernels::builds::{self, Build};
use crate::kernels::group::{DeviceGroup, PlacedGroup, PlacedLayer, PlacedMatrix};
use crate::kernels::kernel::Kernel as _;
use crate::kernels::launch::{Grid, Launch, Scratch};
use crate::kernels::linear_sm90::LinearSm90;
use crate::kernels::schedule::Launcher;
use crate::kernels::tensor_map::{MAP_BYTES, MapArguments};
use crate::kernels::{self, GroupedKernel};
use crate::linear::LinearWeights;
use crate::moe::MoeWeights;
use crate::output::Output;
use crate::plan::roofline::GPUS;
use crate::plan::variant::Variant;
use crate::problem::{Op, OutDtype, Step, Weights};
use crate::router::{Logits, Router, Routes};

/// The architectures that there are kernels for, the oldest first.
pub fn arches() -> Vec<&'static str> {
    builds::arches()
}

/// The newest of [`arches`].
pub fn default_arch() -> &'static str {
    builds::arches().last().expect("there are kernels")
}

/// The newest of [`arches`] that MoE layers are computed on.
pub fn moe_arch() -> &'static str {
    let computes = |arch: &&str| Emulated::new(arch, Options::default()).is_ok_and(|gpu| gpu.runs_moe());
    arches().into_iter().rev().find(computes).expect("there are kernels of MoE layers")
}

/// The newest of [`arches`] that linear layers are computed on.
pub fn linear_arch() -> &'static str {
    let computes = |arch: &&str| Emulated::new(arch, Options::default()).is_ok_and(|gpu| gpu.runs_linear());
    arches().into_iter().rev().find(computes).expect("there is a kernel of linear layers")
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
    /// Whether races, uninitialised reads and misuse are looked for; bounds and alignment always are.
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
    arch: String,
    capability: Capability,
    /// The kernel that is made for it.
    default: GroupedKernel,
    variant: Variant,
    options: Options,
    sms: u32,
    /// The card by whose clock it runs.
    clock: Option<Arc<Clock>>,
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
        Ok(Self { arch: arch.to_owned(), capability, default, variant, options, sms, clock: None, modules })
    }

    /// The same device on another schedule.
    pub fn with_schedule(mut self, schedule: Schedule) -> Self {
        self.options.schedule = schedule;
        self
    }

    /// The same device by the clock of a card: a step's time is predicted ([`Backend::prediction`]), and no hazards are looked
    /// for. Without `values`, products and other arithmetic that no control flow depends on are left out, and outputs are
    /// meaningless. If it is to be `drawn`, the prediction has what some multiprocessors did.
    pub fn with_clock(self, card: Card, values: bool, drawn: bool) -> Self {
        let sms = self.options.sms.unwrap_or(card.sms);
        Self { clock: Some(Arc::new(Clock::new(card, values, drawn))), sms, ..self }
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
        self.build(self.default_kernel().name()).ptx
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
        Ok(Self { variant, modules: Arc::new(Mutex::new(modules)), ..self })
    }

    /// The variant's kernel, or else the device's own.
    fn default_kernel(&self) -> GroupedKernel {
        self.variant.kernel.unwrap_or(self.default)
    }

    /// Whether a kernel runs on this device.
    fn runs(&self, kernel: &str) -> bool {
        builds::find(kernel, self.capability).is_some()
    }

    /// Whether every kernel of an MoE layer does.
    fn runs_moe(&self) -> bool {
        kernels::moe::KERNELS.iter().all(|kernel| self.runs(kernel.name()))
    }

    /// Whether the kernel of a linear layer does.
    fn runs_linear(&self) -> bool {
        self.runs(LinearSm90.name())
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
        let module = parse(kernel, build.arch, build.ptx)?;
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
            Some(clock) => clock.launch(device, self.build(launch.kernel), (&module, entry), &config, &arguments),
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

impl Backend for Emulated {
    fn name(&self) -> &'static str {
        "emulated"
    }

    fn device(&self) -> String {
        format!("{}, {} SMs, schedule {}", self.arch, self.sms, self.options.schedule)
    }

    fn prediction(&self) -> Option<Prediction> {
        self.clock.as_ref().map(|clock| clock.prediction())
    }

    fn prepare<'w>(&self, weights: &'w Weights<'w>) -> Result<Box<dyn Layer + 'w>, Error> {
        let launcher = Launcher::new(self.variant, self.default, weights)?;
        let mut device = self.memory();
        let weights =
            PlacedLayer::new(weights, |matrix| Ok(place(&mut device, launcher.kernel().pack(matrix), WEIGHTS).0))?;
        let gpu = self.clone();
        Ok(Box::new(EmulatedLayer { launcher, gpu, device, weights, step: Vec::new(), done: None }))
    }

    fn prepare_moe<'w>(&self, weights: &'w MoeWeights<'w>) -> Result<Box<dyn MoeLayer + 'w>, Error> {
        Ok(Box::new(moe::EmulatedMoeLayer::new(self.clone(), weights)?))
    }

    fn prepare_linear<'w>(&self, weights: &'w LinearWeights<'w>) -> Result<Box<dyn LinearLayer + 'w>, Error> {
        Ok(Box::new(linear::EmulatedLinear::new(self.clone(), weights)?))
    }

    fn route(&self, router: &Router, logits: &Logits<'_>) -> Result<Routes, Error> {
        router::route(self, router, logits)
    }
}

/// Brings an array to the device.
fn upload<T: bytemuck::NoUninit>(device: &mut Device, array: &[T], name: &str) -> Buffer {
    let buffer = device.upload(array);
    device.name(buffer, name);
    buffer
}

/// Weights in the emulated device's memory, and the last step.
struct EmulatedLayer {
    launcher: Launcher,
    gpu: Emulated,
    device: Device,
    weights: PlacedLayer,
    /// Activations, output and descriptors of the last step. They are freed when the next begins, so no step finds
    /// another's.
    step: Vec<Buffer>,
    /// How many launches there were, and what they did, in the last step that launched a kernel and ended well.
    done: Option<(usize, Counters)>,
}

/// Puts a matrix into memory: values and scales.
fn place(device: &mut Device, bytes: [Cow<'_, [u8]>; 2], name: &str) -> (PlacedMatrix, [Buffer; 2]) {
    let buffers = bytes.map(|bytes| device.upload::<u8>(&bytes));
    for buffer in buffers {
        device.name(buffer, name);
    }
    (PlacedMatrix { values: buffers[0].address, scales: buffers[1].address }, buffers)
}

impl EmulatedLayer {
    /// Plans and runs a step.
    fn run(&mut self, groups: &[PlacedGroup], out_dtype: OutDtype) -> Result<(usize, Counters), Error> {
        let scratch = self.device.allocate(self.launcher.scratch_bytes(groups)?);
        self.device.name(scratch, INTERMEDIATE);
        self.step.push(scratch);
        let chains = self.launcher.plan(groups, out_dtype, self.gpu.sms, Scratch::new(scratch.address))?;
        let launches: Vec<_> = chains.into_iter().flatten().collect();
        let mut counters: Option<Counters> = None;
        self.gpu.clock.iter().for_each(|clock| clock.begin());
        for launch in &launches {
            let done = self.gpu.launch(&mut self.device, launch, &mut self.step)?;
            match &mut counters {
                None => counters = Some(done),
                Some(before) => before.add(&done),
            }
        }
        Ok((launches.len(), counters.expect("a step with tokens launches something")))
    }
}

fn tensor_map(arguments: &MapArguments) -> Result<[u8; MAP_BYTES], Error> {
    let MapArguments { address, row_bytes, rows, box_bytes, box_rows, swizzled } = *arguments;
    let map = TensorMap::tiled(
        DataType::U8,
        address,
        &[row_bytes.into(), rows.into()],
        &[row_bytes.into()],
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

impl Layer for EmulatedLayer {
    fn kernel(&self) -> &str {
        self.launcher.title()
    }

    fn execute(&mut self, step: &Step<'_>, output: &mut Output) -> Result<Duration, Error> {
        self.weights.check_fits(step)?;
        output.check_fits(step.problem())?;
        self.done = None;
        for buffer in self.step.drain(..) {
            self.device.free(buffer);
        }
        if output.bits().is_empty() {
            return Ok(Duration::ZERO);
        }

        let mut groups = Vec::with_capacity(self.weights.len());
        let mut outputs = Vec::with_capacity(self.weights.len());
        for (index, tokens) in step.activations().iter().enumerate() {
            let bytes = [tokens.values().into(), tokens.blocked_scales().into_bytes()];
            let (PlacedMatrix { values, scales }, buffers) = place(&mut self.device, bytes, TOKENS);
            // The output as the caller left it, so that an element which the kernel forgets keeps its poison.
            let c = self.device.upload(output.group(index));
            self.device.name(c, OUTPUT);
            self.step.extend(buffers.into_iter().chain([c]));
            outputs.push(c);
            let (rows, global_scale, output) = (tokens.rows(), tokens.global_scale(), c.address);
            groups.push(self.weights.group(index, &DeviceGroup { rows, values, scales, global_scale, output })?);
        }

        let start = Instant::now();
        let result = self.run(&groups, output.dtype());
        let time = start.elapsed();
        for (group, c) in output.groups_mut().zip(&outputs) {
            group.copy_from_slice(&self.device.download(*c));
        }
        self.done = Some(result?);
        Ok(time)
    }

    fn counters(&self) -> Option<&Counters> {
        self.done.as_ref().map(|(_, counters)| counters)
    }

    fn launches(&self) -> Option<usize> {
        self.done.as_ref().map(|(launches, _)| *launches)
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

    #[test]
    fn a_card_s_clock_changes_no_value_and_shows_the_same_time_again() {
        let gpu = Emulated::new("sm_90a", Options::default()).unwrap();
        let groups = [Group { m: 5, n: 16, k: 64 }, Group { m: 1, n: 8, k: 128 }];
        let untimed = run(&gpu, &groups).unwrap();
        assert!(gpu.prediction().is_none());
        let times = [(); 2].map(|()| {
            let timed = gpu.clone().with_clock(Card::named("h200").unwrap(), true, false);
            assert_eq!(run(&timed, &groups).unwrap().bits(), untimed.bits());
            timed.prediction().unwrap().microseconds
        });
        assert!(times[0] > 1.0 && times[0] == times[1], "{times:?}");
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
        for arch in arches() {
            let gpu = Emulated::new(arch, Options::default()).unwrap();
            let entry = gpu.default_kernel().get().entries()[0].name;
            let error = gpu.clone().with_ptx(&format!("no PTX of {entry}")).err().unwrap().to_string();
            assert!(error.starts_with("kernel ") && error.contains("line 1"), "{error}");
            let error = gpu.with_ptx(".entry another()").err().unwrap().to_string();
            assert!(error.starts_with("it has no entry of any kernel (gated_sm100, "), "{error}");
        }
        let hopper = Emulated::new("sm_90a", Options::default()).unwrap();
        let error = hopper.with_ptx(".entry gated_sm100_t64()").err().unwrap().to_string();
        assert_eq!(error, "gated_sm100 is for sm_100f and does not run on compute capability 9.0");
    }
}
