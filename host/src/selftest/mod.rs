//! Self-tests of a GPU's kernels: every instance that the host may launch computes small ragged problems, and the
//! results are compared with the exact references. The verdict is stored per GPU, driver and code
//! ([`Verdicts`](crate::backend::cuda::Verdicts)).
//!
//! A wrong kernel may hang, or trap and destroy its context, so it runs in another process with a time limit
//! ([`prove`]). The caller provides this process: `nvfp4 selftest` starts itself and calls [`serve`] there; `nvfp4 run`
//! does the same on first use. The library only reads stored verdicts: it may be part of a program that must not start
//! processes or wait for seconds.
//!
//! - `problems.rs`: the test problems and their checks.
//! - `child.rs`: the two processes and their messages.

mod child;
mod problems;
#[cfg(test)]
mod tests;

pub use child::{Limits, Progress, Proof, prove, serve};

use crate::Error;
use crate::backend::cuda::{self, Options, Verdict};
use nvfp4_kernels::Subject;

/// Returns the verdict on a subject on a device; `None` if there is none.
///
/// # Errors
/// [`Error::NoDevice`] or [`Error::Driver`]; or an error if a code file cannot be read or the verdict's file is
/// invalid.
pub fn recorded(ordinal: u32, options: &Options, subject: Subject) -> Result<Option<Verdict>, Error> {
    cuda::verdict(ordinal, options.clone(), subject)
}

/// Stores the result of a self-test on a device.
///
/// # Errors
/// Returns the errors of [`recorded`]; [`Error::Io`] if the verdict cannot be written.
pub fn record(ordinal: u32, options: &Options, subject: Subject, proof: &Proof) -> Result<Verdict, Error> {
    let Proof { passed, failed } = proof.clone();
    let verdict = Verdict { tried: cuda::tried(ordinal, options.clone(), subject)?, passed, failed };
    options.verdicts.write(&verdict)?;
    Ok(verdict)
}
