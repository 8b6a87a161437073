//! The three parts of an instruction that is more than arithmetic.
//!
//! - **decode** turns the instruction as parsed into a struct of its operands and modifiers. It reports what is wrong
//!   in the text.
//! - **issue** is what happens when a warp executes the instruction: checks of the operands' values, races, counters,
//!   and which operation starts when. Rules of the machine belong here, and so would the time that an instruction
//!   takes.
//! - **finish** computes. An asynchronous instruction has an [`Effect`](crate::machine::state::Effect) of its own,
//!   which `issue` fills with what it has resolved and starts. In other instructions `issue` calls `finish`, or moves
//!   the bytes itself where there is nothing to compute.
//!
//! Plain arithmetic has no `issue` of its own. Its handler decodes the operands and returns a closure for one lane
//! ([`super::lane`]).

use crate::code::Flow;
use crate::config::fault::Stopped;
use crate::decode::error::Result;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::machine::state::Machine;
use crate::machine::warp::Warp;

/// A decoded instruction that is more than arithmetic.
pub trait Instruction: Sized + Send + Sync + 'static {
    /// The first part.
    fn decode(i: &mut Parsed<'_>) -> Result<Self>;

    /// The second part, for the lanes of `mask`.
    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow>;
}

/// The handler of such an instruction.
pub fn issued<I: Instruction>(i: &mut Parsed<'_>) -> Decoded {
    let instruction = I::decode(i)?;
    Ok(Box::new(move |w, m, mask| instruction.issue(w, m, mask)))
}
