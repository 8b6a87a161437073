//! The three parts of an instruction that is more than arithmetic.
//!
//! - **decode**: from the instruction as parsed to a struct of its operands and choices. What the text alone can be wrong
//!   in is an error here.
//! - **issue**: what happens when a warp executes it: checks of the operands' values, races, counters, and what starts
//!   when. A rule of the machine or a time of an instruction goes here.
//! - **finish**: what it computes. Of an asynchronous instruction that is an [`Effect`](crate::machine::state::Effect),
//!   which `issue` starts with what it has resolved; of any other, a function that `issue` calls at the end.
//!
//! Plain arithmetic has no `issue` of its own: its handler decodes the operands and gives a closure on one lane
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
