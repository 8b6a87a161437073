//! An MoE layer's few tokens on Hopper in two launches, `kernels-gpu/src/moe_few_sm90/`.

#[cfg(all(test, feature = "cuda"))]
mod fake;

use kernels_gpu::moe_few_sm90::abi::{
    DOWN_ENTRIES, Down, GATE_UP_ENTRIES, GateUp, MAX_CHOICES, MAX_TOKENS, SHARED_BYTES, THREADS,
};

use super::kernel::{Entry, Kernel};
use super::launch::{Grid, Launch, entry_of};
use crate::problem::OutDtype;

/// The kernel.
pub(crate) struct MoeFewSm90;

impl Kernel for MoeFewSm90 {
    fn name(&self) -> &'static str {
        "moe_few_sm90"
    }

    fn proven(&self) -> bool {
        true
    }

    fn entries(&self) -> Vec<Entry> {
        let entry = |name| Entry { name, op: None, threads: THREADS, shared_bytes: SHARED_BYTES };
        [GATE_UP_ENTRIES, DOWN_ENTRIES].concat().into_iter().map(entry).collect()
    }

    #[cfg(all(test, feature = "cuda"))]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch);
    }
}

impl MoeFewSm90 {
    /// Whether so many tokens are few that name so many experts each, of so many. Where an expert has several rows, a wide tile's warps
    /// share what they load of them (docs/experiments.md).
    pub fn takes(&self, tokens: usize, top_k: usize, experts: usize) -> bool {
        let choices = tokens * top_k;
        tokens <= MAX_TOKENS as usize && choices <= (MAX_CHOICES as usize).min(experts)
    }

    /// The launch of gate and up.
    pub fn gate_up(&self, launch: GateUp, dtype: OutDtype, sms: u32) -> Launch {
        let choices = launch.choices.token_count * launch.choices.top_k;
        let blocks = GateUp::blocks(choices, launch.matrices.n, sms);
        self.launch(entry_of(GATE_UP_ENTRIES, dtype), blocks, launch)
    }

    /// The launch of down, behind that of gate and up.
    pub fn down(&self, launch: Down, dtype: OutDtype, sms: u32) -> Launch {
        let blocks = Down::blocks(launch.matrices.n, sms);
        self.launch(entry_of(DOWN_ENTRIES, dtype), blocks, launch)
    }

    fn launch(&self, entry: &'static str, blocks: u32, parameter: impl bytemuck::NoUninit) -> Launch {
        let grid = Grid { shared_bytes: SHARED_BYTES, overlaps: true, ..Grid::linear(entry, blocks, THREADS) };
        Launch::of_parameter(self.name(), grid, parameter)
    }
}
