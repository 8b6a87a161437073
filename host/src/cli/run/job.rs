//! A job of `nvfp4 run`: an operation with its inputs. Each operation implements [`Job`]; the runs (`runs.rs`) and the
//! report (`report.rs`) are the same for all.

use anyhow::bail;
use nvfp4::Error;
use nvfp4::backend::Operation;
use nvfp4::checkpoint::OutputFile;
use nvfp4::kernels::explain::PlannedLaunch;
use nvfp4::plan::roofline::Roofline;
use serde_json::Value;

use super::args::Args;
use crate::cli::explain::On;
use crate::cli::table;

/// Weights of a job's operation.
pub type WeightsOf<'w, J> = <<J as Job>::Op as Operation>::Weights<'w>;

/// Step of a job's operation.
pub type StepOf<'s, J> = <<J as Job>::Op as Operation>::Step<'s>;

/// Output of a job's operation.
pub type OutputOf<J> = <<J as Job>::Op as Operation>::Output;

/// Description of a job, for its report.
pub struct About {
    /// Name of the operation.
    pub op: &'static str,
    /// `true` if GPUs compute the operation in the variants that --variant names.
    pub has_variants: bool,
    /// Shape, or layer of a checkpoint.
    pub shape: String,
    /// Source of the tokens.
    pub input: String,
    /// Operation, inputs and types, for the first line of the text.
    pub title: String,
    /// Lines of text about sizes and inputs.
    pub lines: Vec<String>,
    /// JSON keys for sizes and inputs.
    pub json: Value,
    /// Number of operations of a step. A multiply-add counts as two.
    pub operations: f64,
    /// Bytes that a step must read and write.
    pub bytes: usize,
    /// Least time of a step on a device with given peaks. `None`: unknown for this operation.
    pub roofline: Option<Roofline>,
}

/// Comparison of an output with the reference.
pub struct Compared {
    /// JSON keys for the comparison.
    pub json: Value,
    /// `None`: nothing was compared.
    pub findings: Option<Findings>,
}

/// Result of a comparison.
pub struct Findings {
    /// Number of compared elements.
    pub checked: usize,
    /// Number of wrong elements.
    pub mismatches: usize,
    /// Number of elements without a bound, because a sum may overflow f32 in between.
    pub unbounded: usize,
    /// First wrong element.
    pub first: Option<String>,
    /// Lines of text about the errors.
    pub text: String,
    /// Condition that right elements fulfill.
    pub bound: String,
}

/// An operation with its inputs.
pub trait Job {
    type Op: Operation;

    /// Checked weights.
    fn weights(&self) -> &WeightsOf<'_, Self>;

    /// Checked inputs of the step.
    fn step(&self) -> &StepOf<'_, Self>;

    /// Describes the job.
    fn about(&self) -> About;

    /// Returns the launches of the step on a GPU, for --explain.
    ///
    /// # Errors
    /// If the operation's plan is not explained, or no kernel computes the step on the GPU.
    fn explain(&self, _on: On<'_>) -> Result<Vec<PlannedLaunch>, Error> {
        Err(Error::NotComputed("--explain needs --op moe or linear; the plan of groups is not explained".into()))
    }

    /// Creates the output of the first run, with all parts that will be compared.
    fn output(&self, _args: &Args) -> OutputOf<Self> {
        Self::Op::output(self.step())
    }

    /// Creates the output of the later runs, which must have the bits of the first run. `None`: later runs overwrite the
    /// first one's output.
    fn output_again(&self) -> Option<OutputOf<Self>> {
        Some(Self::Op::output(self.step()))
    }

    /// Whether a later output has the bits of the first run's output.
    fn is_same(first: &OutputOf<Self>, again: &OutputOf<Self>) -> bool;

    /// Compares an output with the reference, as --verify says.
    fn compare(&self, args: &Args, output: &OutputOf<Self>) -> Compared;

    /// Writes an output to the file of --output.
    ///
    /// # Errors
    /// If the file cannot be written.
    fn write(&self, file: OutputFile, output: &OutputOf<Self>) -> Result<(), Error>;
}

/// Refuses work that needs more memory than this machine has. `remedy` receives this machine's memory, in bytes.
pub fn check_present(needed: f64, remedy: impl FnOnce(f64) -> String) -> anyhow::Result<()> {
    let ram = sysinfo::RefreshKind::nothing().with_memory(sysinfo::MemoryRefreshKind::nothing().with_ram());
    // If the system does not report its memory, the allocator fails instead.
    let Ok(system) = sysinfo::System::new_with_specifics(ram) else { return Ok(()) };
    let present = system.total_memory() as f64;
    if needed > present {
        bail!(
            "the shape needs about {} of memory, but this machine has {}; {}",
            table::bytes(needed),
            table::bytes(present),
            remedy(present)
        );
    }
    Ok(())
}
