//! An MoE layer's few tokens on Hopper in two launches, `kernels-gpu/src/moe_few_sm90/`.

#[cfg(all(test, feature = "cuda"))]
mod fake;

use kernels_gpu::moe_few_sm90::abi::{
    Choices, DOWN_ENTRIES, Down, GATE_UP_ENTRIES, GateUp, MAX_CHOICES, MAX_THREADS, MAX_TOKENS, MAX_WARPS, shared_bytes,
};

use super::kernel::{Entry, Kernel};
use super::launch::{Grid, Launch, entry_of};
use super::products::{expected_rows, expected_token_tiles};
use crate::moe::MoeSizes;
use crate::problem::OutDtype;

/// The most weights of the experts that are expected to be named. On an H200, mixtral's with one token are too many, and
/// DeepSeek-R1's of a rank with eight are not.
const MOST_WEIGHTS: u64 = 340_000_000;

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
        let entry = |name| Entry { name, op: None, threads: MAX_THREADS, shared_bytes: shared_bytes(MAX_WARPS) };
        [GATE_UP_ENTRIES, DOWN_ENTRIES].concat().into_iter().map(entry).collect()
    }

    #[cfg(all(test, feature = "cuda"))]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch);
    }
}

impl MoeFewSm90 {
    /// Whether so many tokens of a layer are few. Where an expert has several rows, or many weights are read, tiles of
    /// [`moe_sm90`](super::moe_sm90) share what they load of tokens, and have more warps for long sums (docs/experiments.md).
    pub fn takes(&self, sizes: &MoeSizes, tokens: usize) -> bool {
        let (choices, named) = ((tokens * sizes.top_k) as u64, sizes.named_experts as u64);
        if tokens > MAX_TOKENS as usize || choices > u64::from(MAX_CHOICES).min(named) {
            return false;
        }
        let rows = expected_rows(choices, sizes.experts as u64, named);
        let hit = expected_token_tiles(rows, sizes.experts as u64, MAX_TOKENS);
        hit * (3 * sizes.intermediate * sizes.hidden) as u64 <= MOST_WEIGHTS
    }

    /// The launch of gate and up.
    pub fn gate_up(&self, launch: GateUp, dtype: OutDtype, sms: u32) -> Launch {
        let (choices, n) = (count(&launch.choices), launch.matrices.n);
        let (blocks, warps) = (GateUp::blocks(choices, n, sms), GateUp::warps(choices, n, sms));
        self.launch(entry_of(GATE_UP_ENTRIES, dtype), blocks, warps, launch)
    }

    /// The launch of down, behind that of gate and up.
    pub fn down(&self, launch: Down, dtype: OutDtype, sms: u32) -> Launch {
        let warps = GateUp::warps(count(&launch.choices), launch.matrices.k, sms);
        self.launch(entry_of(DOWN_ENTRIES, dtype), Down::blocks(launch.matrices.n, sms), warps, launch)
    }

    fn launch(&self, entry: &'static str, blocks: u32, warps: u32, parameter: impl bytemuck::NoUninit) -> Launch {
        let grid = Grid::linear(entry, blocks, warps * 32);
        let grid = Grid { shared_bytes: shared_bytes(warps), overlaps: true, ..grid };
        Launch::of_parameter(self.name(), grid, parameter)
    }
}

/// How many choices there are.
const fn count(choices: &Choices) -> u32 {
    choices.token_count * choices.top_k
}
