//! The kernels of `kernels-gpu` without a GPU: `ptx_emulator` executes the PTX that `backend::cuda` would launch. It
//! stops at faults of a kernel and counts what the kernel does. This backend makes no decisions about shapes.
//!
//! Every operand is its own allocation, so an access one byte outside of an operand is found.
//!
//! ```
//! use nvfp4::backend::{Backend, emulated::{Emulated, Options}};
//!
//! let hopper = Emulated::new("sm_90a", Options::default())?;
//! assert_eq!(hopper.device(), "sm_90a, 132 SMs, schedule fair");
//! # Ok::<_, nvfp4::Error>(())
//! ```

pub(super) mod clock;
mod gpu;
mod linear;
mod moe;
mod router;

use std::borrow::Cow;
use std::time::{Duration, Instant};

use ptx_emulator::{Buffer, Device};

pub use clock::Prediction;
pub use gpu::{
    DESCRIPTORS, Emulated, INTERMEDIATE, OUTPUT, Options, TOKENS, WEIGHTS, arches, default_arch, linear_arch, moe_arch,
};
pub use moe::ROUTING;
pub use ptx_emulator::{
    Card, Constant, Fault, FaultKind, Key, Origin, Report as Counters, Schedule, Span, Sums, Time, trace,
};

use super::{Backend, Layer, Linear, Moe};
use crate::Error;
use crate::Output;
use crate::linear::LinearWeights;
use crate::moe::MoeWeights;
use crate::problem::{Step, TokenDtype, TokenFormat, Weights};
use crate::router::{Logits, Router, Routes};
use nvfp4_kernels::group::{DeviceGroup, PlacedGroup, PlacedLayer, PlacedMatrix};
use nvfp4_kernels::launch::Scratch;
use nvfp4_kernels::schedule::Launcher;

impl Backend for Emulated {
    fn name(&self) -> &'static str {
        "emulated"
    }

    fn device(&self) -> String {
        format!("{}, {} SMs, schedule {}", self.arch, self.sms, self.options.schedule)
    }

    fn gpu(&self) -> Option<((u32, u32), u32)> {
        Some((self.capability, self.sms))
    }

    fn prediction(&self) -> Option<Prediction> {
        self.clock.as_ref().map(|clock| clock.prediction())
    }

    fn prepare<'w>(&self, weights: &Weights<'w>) -> Result<Box<dyn Layer + 'w>, Error> {
        let launcher = Launcher::new(self.variant, self.default, weights)?;
        let mut device = self.memory();
        let weights =
            PlacedLayer::new(weights, |matrix| Ok(place(&mut device, launcher.kernel().pack(matrix), WEIGHTS).0))?;
        let gpu = self.clone();
        Ok(Box::new(EmulatedLayer { launcher, gpu, device, weights, step: Vec::new(), done: None }))
    }

    fn prepare_moe<'w>(&self, weights: &MoeWeights<'w>) -> Result<Box<dyn Layer<Moe> + 'w>, Error> {
        Ok(Box::new(moe::EmulatedMoeLayer::new(self.clone(), weights)?))
    }

    fn moe_token_format(&self) -> TokenFormat {
        self.moe_kernels().default_format()
    }

    fn prepare_linear<'w>(&self, weights: &LinearWeights<'w>) -> Result<Box<dyn Layer<Linear> + 'w>, Error> {
        Ok(Box::new(linear::EmulatedLinear::new(self.clone(), weights)?))
    }

    fn route_with_ids(&self, router: &Router, logits: &Logits<'_>, token_ids: &[i32]) -> Result<Routes, Error> {
        router::route(self, router, logits, token_ids)
    }
}

/// Weights in the memory of the emulated device, and the last step.
struct EmulatedLayer {
    launcher: Launcher,
    gpu: Emulated,
    device: Device,
    weights: PlacedLayer,
    /// Activations, output and descriptors of the last step. They are freed when the next step begins, so no step can
    /// read data of another step.
    step: Vec<Buffer>,
    /// Number of launches and their counters in the last step that launched a kernel and had no error.
    done: Option<(usize, Counters)>,
}

/// Copies a matrix to the device: values and scales.
fn place(device: &mut Device, bytes: [Cow<'_, [u8]>; 2], name: &str) -> (PlacedMatrix, [Buffer; 2]) {
    let buffers = bytes.map(|bytes| device.upload::<u8>(&bytes));
    for buffer in buffers {
        device.name(buffer, name);
    }
    (PlacedMatrix { values: buffers[0].address, scales: buffers[1].address }, buffers)
}

impl EmulatedLayer {
    /// Plans and runs a step. Returns the number of launches and their counters.
    fn run(&mut self, groups: &[PlacedGroup], out_dtype: TokenDtype) -> Result<(usize, Counters), Error> {
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
        Ok((launches.len(), counters.expect("a step with tokens has at least one launch")))
    }
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

        let mut groups = Vec::with_capacity(self.weights.expert_count());
        let mut outputs = Vec::with_capacity(self.weights.expert_count());
        for (index, tokens) in step.activations().iter().enumerate() {
            let bytes = [tokens.values().into(), tokens.blocked_scales().into_bytes()];
            let (PlacedMatrix { values, scales }, buffers) = place(&mut self.device, bytes, TOKENS);
            // Copy the caller's output, so that an element that the kernel does not write keeps its poison.
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
    use crate::problem::{Group, Op};

    fn run(gpu: &Emulated, groups: &[Group]) -> Result<Output, Error> {
        let weights = generate::weights(Generator::Gaussian, Op::Plain, groups, 1)?;
        let step = Step::new(&weights, generate::activations(Generator::Gaussian, groups, 1)?, TokenDtype::F16)?;
        let mut output = Output::new(step.problem());
        backend::run(gpu.prepare(&weights)?.as_mut(), &step, &mut output)?;
        Ok(output)
    }

    /// Makes a device whose kernel has this body.
    fn kernel(body: &str) -> Emulated {
        let ptx = format!(
            ".version 8.0\n.target sm_80\n.address_size 64\n\
             .visible .entry plain_simt_small(.param .align 8 .b8 launch[16]) {{\n.reg .f32 %f<5>;\n{body}\nret;\n}}"
        );
        Emulated::new("sm_80", Options::default()).unwrap().with_ptx(&ptx).unwrap()
    }

    #[test]
    fn a_clock_changes_no_value_and_is_deterministic() {
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
    fn unwritten_elements_stay_poisoned() {
        let output = run(&kernel(""), &GROUPS).unwrap();
        let mut poisoned = output.clone();
        poisoned.poison();
        assert_eq!(output, poisoned);
    }

    #[test]
    fn faults_and_unsupported_instructions_have_different_errors() {
        let error = |body| run(&kernel(body), &GROUPS).unwrap_err();
        let trap = error("trap;");
        assert_eq!(trap.fault::<Fault>().unwrap().kind, FaultKind::Trap);
        assert!(trap.to_string().starts_with("fault[trap]: ") && trap.to_string().contains("PTX line 6"), "{trap}");
        let texture = error("tex.1d.v4.f32.f32 {%f0, %f1, %f2, %f3}, [image, {%f4}];");
        assert!(texture.fault::<Fault>().unwrap().is_unsupported());
        assert!(texture.to_string().starts_with("unsupported: "), "{texture}");
    }

    #[test]
    fn a_layer_runs_steps_of_any_size_in_turn() {
        let weights = generate::weights(Generator::Gaussian, Op::Plain, &GROUPS, 1).unwrap();
        for (gpu, fails) in [(Emulated::new("sm_80", Options::default()).unwrap(), false), (kernel("trap;"), true)] {
            let mut layer = gpu.prepare(&weights).unwrap();
            for m in [3, 0, 30, 1] {
                let tokens = generate::activations(Generator::Gaussian, &GROUPS.map(|group| Group { m, ..group }), 1);
                let step = Step::new(&weights, tokens.unwrap(), TokenDtype::F16).unwrap();
                let mut output = Output::new(step.problem());
                let result = backend::run(layer.as_mut(), &step, &mut output);
                assert_eq!(result.is_err(), fails && m > 0);
                assert_eq!(layer.counters().is_some(), !fails && m > 0);
                assert!(fails || compare(&output, &Reference::new(&weights, &step), &step).passed());
            }
        }
    }

    #[test]
    fn unknown_architectures_and_invalid_ptx_are_refused() {
        let refusal = |arch| Emulated::new(arch, Options::default()).err().unwrap().to_string();
        assert_eq!(refusal("sm_70"), "no kernel runs on sm_70; choose one of sm_80, sm_90a, sm_100f, sm_120f");
        let known = "sm_80, sm_86, sm_87, sm_88, sm_89, sm_90, sm_100, sm_103, sm_110, sm_120, sm_121";
        for arch in ["sm_999", "sm_999a", "sm_130", "sm_91"] {
            assert_eq!(refusal(arch), format!("{arch} is the architecture of no GPU; choose one of {known}"));
        }
        assert_eq!(refusal("h200"), "`h200` is not an architecture; choose one of sm_80, sm_90a, sm_100f, sm_120f");
        for arch in arches() {
            let gpu = Emulated::new(arch, Options::default()).unwrap();
            let entry = gpu.default_kernel().get().entries()[0].name;
            let error = gpu.clone().with_ptx(&format!("no PTX of {entry}")).err().unwrap().to_string();
            assert!(error.starts_with("kernel ") && error.contains("line 1"), "{error}");
            let error = gpu.with_ptx(".entry another()").err().unwrap().to_string();
            assert!(error.starts_with("the code contains no entry of any kernel (gated_sm120, "), "{error}");
        }
        let hopper = Emulated::new("sm_90a", Options::default()).unwrap();
        let error = hopper.with_ptx(".entry gated_sm100_t64()").err().unwrap().to_string();
        assert_eq!(error, "gated_sm100 is for sm_100f and does not run on compute capability 9.0");
    }
}
