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
    /// Let `tcgen05.alloc.cta_group::2` of the two CTAs of a pair wait for each other, also without a cluster barrier
    /// before. The manual leaves it open, and a B300 has shown otherwise (NVIDIA/cutlass#3435).
    #[arg(long)]
    pub alloc_rendezvous: bool,
    /// Do not search for races between threads of a grid in global memory.
    #[arg(long)]
    pub no_global_races: bool,
}
