//! Options for hazards, which `launch` and `run` share.

use clap::Args;
use ptx_emulator::Allow;

/// Options for hazards.
#[derive(Args)]
pub struct Hazards {
    /// Suppress hazards of a kind, or only hazards of that kind with an instruction at a PTX line. May be given several
    /// times, and adds to the file's list.
    #[arg(long, value_name = "KIND[:LINE]")]
    pub allow: Vec<Allow>,
    /// Continue after hazards, and list all of them, one entry per place.
    #[arg(long)]
    pub keep_going: bool,
    /// Do not search for races between threads of a grid in global memory.
    #[arg(long)]
    pub no_global_races: bool,
}
