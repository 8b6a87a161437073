//! MoE layers with few tokens on Hopper, in two launches, `kernels-gpu/src/mma_sync/moe_few_sm90/`.

#[cfg(feature = "fake")]
mod fake;

use kernels_gpu::mma_sync::moe_few_sm90::abi::{
    Blocks, Choices, DOWN_ENTRIES, Down, GATE_UP_ENTRIES, GateUp, MAX_CHOICES, MAX_THREADS, MAX_TOKENS, MAX_WARPS,
    ONE_DOWN_ENTRIES, ONE_GATE_UP_ENTRIES,
};

use crate::expected::{expected_rows, expected_token_tiles};
use crate::kernel::{Entry, Kernel};
use crate::launch::{Grid, Launch, entry_of};
use crate::refused::Refused;
use nvfp4_core::moe::MoeSizes;
use nvfp4_core::problem::TokenDtype;

/// Maximum number of weights of all experts that several tokens are expected to name. Measured on an H200: one rank of
/// DeepSeek-R1 with eight tokens is below it.
const MOST_WEIGHTS: u64 = 340_000_000;

/// The kernel.
pub struct MoeFewSm90;

impl Kernel for MoeFewSm90 {
    fn name(&self) -> &'static str {
        "moe_few_sm90"
    }

    fn proven(&self) -> bool {
        true
    }

    fn entries(&self) -> Vec<Entry> {
        let of = |one: bool| {
            let names = if one { [ONE_GATE_UP_ENTRIES, ONE_DOWN_ENTRIES] } else { [GATE_UP_ENTRIES, DOWN_ENTRIES] };
            let shared_bytes = Blocks { warps: MAX_WARPS, one }.shared_bytes();
            names.concat().into_iter().map(move |name| Entry { name, op: None, threads: MAX_THREADS, shared_bytes })
        };
        of(false).chain(of(true)).collect()
    }

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch);
    }
}

impl MoeFewSm90 {
    /// Whether the kernel computes a step of `tokens` tokens. It always does for a single token. If experts have
    /// several rows, or many weights are read, [`moe_sm90`](crate::wgmma::moe_sm90) is faster: its tiles share
    /// loaded tokens, and long sums have more warps (benches/lab/experiments.md).
    pub fn takes(&self, sizes: &MoeSizes, tokens: usize) -> bool {
        let (choices, named) = ((tokens * sizes.top_k) as u64, sizes.named_experts as u64);
        if tokens > MAX_TOKENS as usize || choices > u64::from(MAX_CHOICES).min(named) {
            return false;
        }
        let rows = expected_rows(choices, sizes.experts as u64, named);
        let hit = expected_token_tiles(rows, sizes.experts as u64, MAX_TOKENS);
        tokens == 1 || hit * (3 * sizes.intermediate * sizes.hidden) as u64 <= MOST_WEIGHTS
    }

    /// Whether no entry that computes `tokens` tokens of a type is refused.
    pub fn is_left(&self, dtype: TokenDtype, tokens: usize, refused: &Refused) -> bool {
        let (of_any, of_one) = ([GATE_UP_ENTRIES, DOWN_ENTRIES], [ONE_GATE_UP_ENTRIES, ONE_DOWN_ENTRIES]);
        let entries = of_any.into_iter().chain(of_one.into_iter().filter(|_| tokens == 1));
        entries.map(|names| entry_of(names, dtype)).all(|entry| !refused.contains(entry))
    }

    /// Returns the launch of gate and up.
    pub fn gate_up(&self, launch: GateUp, dtype: TokenDtype, sms: u32) -> Launch {
        let n = launch.matrices.n;
        let blocks = blocks(&launch.choices, n, sms);
        let entries = if blocks.one { ONE_GATE_UP_ENTRIES } else { GATE_UP_ENTRIES };
        let count = GateUp::blocks(count(&launch.choices), n, sms);
        self.launch(entry_of(entries, dtype), count, blocks, launch)
    }

    /// Returns the launch of down, which follows the launch of gate and up.
    pub fn down(&self, launch: Down, dtype: TokenDtype, sms: u32) -> Launch {
        let blocks = blocks(&launch.choices, launch.matrices.k, sms);
        let entries = if blocks.one { ONE_DOWN_ENTRIES } else { DOWN_ENTRIES };
        self.launch(entry_of(entries, dtype), Down::blocks(launch.matrices.n, sms), blocks, launch)
    }

    fn launch(&self, entry: &'static str, count: u32, blocks: Blocks, parameter: impl bytemuck::NoUninit) -> Launch {
        let grid = Grid::linear(entry, count, blocks.warps * 32);
        let grid = Grid { shared_bytes: blocks.shared_bytes(), overlaps: true, ..grid };
        Launch::of_parameter(self.name(), grid, parameter)
    }
}

/// Returns the properties of the CTAs of both launches for an intermediate of `n` columns.
const fn blocks(choices: &Choices, n: u32, sms: u32) -> Blocks {
    Blocks::of(choices.token_count, count(choices), n, sms)
}

/// Number of choices.
const fn count(choices: &Choices) -> u32 {
    choices.token_count * choices.top_k
}
