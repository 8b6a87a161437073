//! The three parts of every instruction beyond plain arithmetic.
//!
//! - **decode** turns the parsed instruction into a struct of its operands and modifiers. It reports errors in the
//!   text.
//! - **issue** runs when a warp executes the instruction. It checks the operands' values and races, updates counters,
//!   and determines which operation starts when. Rules of the machine belong here, and so would an instruction's
//!   duration.
//! - **finish** computes. An asynchronous instruction has its own [`Effect`](crate::machine::state::Effect), which
//!   `issue` fills with resolved operands and starts. In other instructions `issue` calls `finish`, or moves the bytes
//!   itself if there is nothing to compute.
//!
//! Plain arithmetic has no `issue`. Its handler decodes the operands and returns a closure on one lane's values
//! ([`super::lane`]).

use crate::code::Flow;
use crate::config::fault::Stopped;
use crate::decode::error::Result;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::machine::state::Machine;
use crate::machine::warp::Warp;

/// A decoded instruction beyond plain arithmetic.
pub trait Instruction: Sized + Send + Sync + 'static {
    /// Decodes the operands and modifiers.
    fn decode(i: &mut Parsed<'_>) -> Result<Self>;

    /// Executes the instruction for the lanes of `mask`.
    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow>;
}

/// The handler of an [`Instruction`].
pub fn issued<I: Instruction>(i: &mut Parsed<'_>) -> Decoded {
    let instruction = I::decode(i)?;
    Ok(Box::new(move |w, m, mask| instruction.issue(w, m, mask)))
}
