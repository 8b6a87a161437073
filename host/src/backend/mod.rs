//! What can run a step. A backend gets checked weights and steps and returns outputs; it decides nothing about shapes.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "emulated")]
pub mod emulated;

use std::time::Duration;

use crate::error::Error;
use crate::linear::{LinearOutput, LinearStep, LinearWeights};
use crate::moe::{MoeOutput, MoeStep, MoeWeights};
use crate::output::Output;
use crate::plan::roofline::Peaks;
use crate::problem::{Step, TokenFormat, Weights};
use crate::router::{Logits, Router, Routes};

/// A device that can run steps.
pub trait Backend {
    /// Its name on the command line: `cpu`, `cuda`, `emulated`.
    fn name(&self) -> &'static str;

    /// The device, in words.
    fn device(&self) -> String;

    /// What the device can do at most, where that is known.
    fn peaks(&self) -> Option<Peaks> {
        None
    }

    /// The time on a card of the last step, where it was predicted.
    #[cfg(feature = "emulated")]
    fn prediction(&self) -> Option<emulated::clock::Prediction> {
        None
    }

    /// Brings the weights into the form and the place that the kernel reads, once for many steps. The weights may be dropped
    /// afterwards; bytes that their matrices borrow may not.
    ///
    /// # Errors
    /// If the device fails or is out of memory.
    fn prepare<'w>(&self, weights: &Weights<'w>) -> Result<Box<dyn Layer + 'w>, Error>;

    /// As [`Backend::prepare`], of a whole MoE layer.
    ///
    /// # Errors
    /// If the device fails or is out of memory, or the backend computes no such layer.
    fn prepare_moe<'w>(&self, _: &MoeWeights<'w>) -> Result<Box<dyn MoeLayer + 'w>, Error> {
        Err(Error::NotComputed(format!("{} computes no MoE layers on {}; take the CPU", self.name(), self.device())))
    }

    /// As what it multiplies the tokens of an MoE layer if nobody asks for another format: as they are, or as NVFP4 where there are tensor cores
    /// for that.
    fn moe_token_format(&self) -> TokenFormat {
        TokenFormat::Bits16
    }

    /// As [`Backend::prepare`], of a linear layer.
    ///
    /// # Errors
    /// If the device fails or is out of memory, or the backend computes no such layer.
    fn prepare_linear<'w>(&self, _: &LinearWeights<'w>) -> Result<Box<dyn LinearLayer + 'w>, Error> {
        Err(Error::NotComputed(format!("{} computes no linear layers on {}; take the CPU", self.name(), self.device())))
    }

    /// The experts of each token and their weights, from logits in host memory.
    ///
    /// # Errors
    /// If the logits are not whole rows of the router's experts, or the device fails.
    fn route(&self, router: &Router, logits: &Logits<'_>) -> Result<Routes, Error>;
}

/// Prepared weights.
pub trait Layer {
    /// The kernel that a step will use.
    fn kernel(&self) -> &str;

    /// Computes a step from host memory into `output`, all of which it writes; returns the time that the kernel took,
    /// without the transfers. Allocates nothing if an earlier step was as large. The emulator does allocate: it must
    /// find a kernel that reads what the last step left.
    ///
    /// # Errors
    /// If the step was made for other weights, or the device fails.
    fn execute(&mut self, step: &Step<'_>, output: &mut Output) -> Result<Duration, Error>;

    /// Launches of the last step, where there were any: of kernels, or of the one graph that holds them.
    fn launches(&self) -> Option<usize> {
        None
    }

    /// The time that the host took to queue the last step's launches, where it was measured.
    fn host_time(&self) -> Option<Duration> {
        None
    }

    /// What the kernel did in the last step, where it was counted. The step's time is the emulator's then, and says
    /// nothing about a device.
    #[cfg(feature = "emulated")]
    fn counters(&self) -> Option<&ptx_emulator::Report> {
        None
    }
}

/// The prepared weights of an MoE layer.
pub trait MoeLayer {
    /// The kernel that a step will use.
    fn kernel(&self) -> &str;

    /// Computes a step from host memory into `output`, all of which it writes, the stages too if it has them; returns the
    /// time that the kernels took, without the transfers.
    ///
    /// # Errors
    /// If the step was made for another layer, or the device fails.
    fn execute(&mut self, step: &MoeStep<'_>, output: &mut MoeOutput) -> Result<Duration, Error>;

    /// As [`Layer::launches`].
    fn launches(&self) -> Option<usize> {
        None
    }

    /// As [`Layer::host_time`].
    fn host_time(&self) -> Option<Duration> {
        None
    }

    /// As [`Layer::counters`], of all the step's launches.
    #[cfg(feature = "emulated")]
    fn counters(&self) -> Option<&ptx_emulator::Report> {
        None
    }
}

/// The prepared weights of a linear layer.
pub trait LinearLayer {
    /// The kernel that a step will use.
    fn kernel(&self) -> &str;

    /// Computes a step from host memory into `output`, all of which it writes; returns the time that the kernel took, without
    /// the transfers.
    ///
    /// # Errors
    /// If the step was made for another layer, or the device fails.
    fn execute(&mut self, step: &LinearStep<'_>, output: &mut LinearOutput) -> Result<Duration, Error>;

    /// As [`Layer::launches`].
    fn launches(&self) -> Option<usize> {
        None
    }

    /// As [`Layer::host_time`].
    fn host_time(&self) -> Option<Duration> {
        None
    }

    /// As [`Layer::counters`].
    #[cfg(feature = "emulated")]
    fn counters(&self) -> Option<&ptx_emulator::Report> {
        None
    }
}

/// Poisons `output`, then computes a step into it: the way to run a step whose output will be checked.
///
/// # Errors
/// As [`Layer::execute`].
pub fn run(layer: &mut dyn Layer, step: &Step<'_>, output: &mut Output) -> Result<Duration, Error> {
    output.poison();
    layer.execute(step, output)
}
