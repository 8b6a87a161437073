//! A card's kernels prove themselves there: every instance that the host may launch computes small ragged problems, which are compared
//! with the exact references, and the verdict is kept by card, driver and code ([`Verdicts`](crate::backend::cuda::Verdicts)).
//!
//! A kernel that is wrong may hang, or trap and take its context with it, so it is tried in another process with a time limit
//! ([`prove`]). That process is the caller's to name: `nvfp4 selftest` starts itself, and calls [`serve`] there. `nvfp4 run` does so on
//! first use. The library never does by itself: it may be part of a program that must not start processes or wait for seconds, so it
//! only reads what the command has found.
//!
//! - `problems.rs`: what is computed, and whether it is right.
//! - `child.rs`: the two processes, and what they say to each other.

mod child;
mod problems;
#[cfg(test)]
mod tests;

pub use child::{Limits, Progress, Proof, prove, serve};

use crate::backend::cuda::{self, Options, Verdict};
use crate::error::Error;
use crate::kernels::Subject;

/// The verdict on a subject on a device, if there is one.
///
/// # Errors
/// [`Error::NoDevice`] or [`Error::Driver`]; if a file of code cannot be read, or the verdict's file is none.
pub fn recorded(ordinal: u32, options: &Options, subject: Subject) -> Result<Option<Verdict>, Error> {
    cuda::verdict(ordinal, options.clone(), subject)
}

/// Keeps what a self-test has found on a device.
///
/// # Errors
/// As [`recorded`]; [`Error::Io`] if it cannot be written.
pub fn record(ordinal: u32, options: &Options, subject: Subject, proof: &Proof) -> Result<Verdict, Error> {
    let Proof { passed, failed } = proof.clone();
    let verdict = Verdict { tried: cuda::tried(ordinal, options.clone(), subject)?, passed, failed };
    options.verdicts.write(&verdict)?;
    Ok(verdict)
}
