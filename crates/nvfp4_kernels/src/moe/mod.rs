//! Launches of an MoE layer: a function of sizes and addresses, without a device.
//!
//! A call of a layer is a chain of launches (`chain.rs`):
//!
//! 1. `moe_route` makes the lists of each expert's rows. Where experts have many rows, `moe_expand` sorts the rows of
//!    tokens by expert.
//! 2. A kernel of `kernels.rs` multiplies: gate and up, then down. The same two products follow for the shared expert.
//!    The format of the tokens (`Tokens`) decides how: `bits16.rs`, `fp8.rs` or `nvfp4.rs`.
//! 3. `moe_combine` adds up each token's rows.
//!
//! With few tokens, Hopper has a chain of two launches (`few.rs`). Each launch may start while the previous one still
//! runs.
//!
//! Grids, instances and memory depend on sizes alone. Kernels read the number of rows per expert from the lists, so a
//! captured chain is correct for any later routing.
//!
//! A token's numbers do not depend on the rest of the batch, on its order or on the instance: every product sums K in
//! the same order, and a token's rows are added in the order of its choices.

mod arguments;
mod bits16;
mod chain;
mod chunks;
mod experts;
mod explain;
mod few;
mod fp8;
mod kernels;
mod nvfp4;
mod projection;
mod quantize;
mod quantized_parts;
mod route;
mod stages;
mod tokens;
mod weights;
mod workspace;

use kernels_gpu::lists;

use super::group::Address;
use nvfp4_core::moe::{MoeSizes, NO_ROW};
use nvfp4_core::problem::{MAX_EXPERTS, MAX_TOP_K};

pub use arguments::MoeArguments;
pub use chain::launches;
pub use chunks::chunks;
pub use chunks::workspace_bytes;
pub(crate) use explain::each_size_of_tiles;
pub use explain::{check_left, explain, multiplying_entries};
pub use kernels::{FP8_KERNELS, FormatKernels, MoeKernels, products_named};
pub use stages::StageParts;
pub use tokens::{Nvfp4Rows, SortedRows};
pub use weights::{ExpertPart, expert_parts, weight_bytes};
pub use weights::{PROJECTIONS, PackedWeights, Packing, operand_type, packing};
pub use workspace::Workspace;

const _: () = {
    assert!(MAX_EXPERTS <= lists::MAX_EXPERTS as usize, "the lists must have room for all experts of a layer");
    assert!(MAX_TOP_K <= lists::MAX_TOP_K as usize, "the kernels must have room for all experts of a token");
    assert!(NO_ROW == lists::NO_ROW, "host and device must mark a choice without a row by the same number");
};

/// Experts of equal sizes in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedExperts {
    /// Packed gate and up of each expert, or up alone without a gate. For NVFP4 tokens: the values of all experts, then the
    /// scales of all ([`nvfp4_rows`](kernels_gpu::nvfp4_rows)).
    pub gate_up: Address,
    /// Packed down of each expert.
    pub down: Address,
    /// Global scales of gate, up and down: three arrays of f32, one scale per expert.
    pub alpha: [Address; 3],
    /// Biases of gate, up and down. 0: none.
    pub bias: [Address; 3],
    /// For NVFP4 tokens: input scales of gate and up, and of down, one f32 per expert. An input scale of 0 gives each token
    /// its own global scale. For other formats 0.
    pub input_scales: [Address; 2],
}

/// A layer in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedMoe {
    /// H, I, E and the formats of the layer.
    pub sizes: MoeSizes,
    /// The routed experts.
    pub experts: PlacedExperts,
    /// Shared expert, if there is one.
    pub shared: Option<PlacedExperts>,
    /// Address of the layer's number of each expert that tokens can name. 0: tokens name experts by the layer's numbers.
    pub map: Address,
    /// Whether the chain also writes stages that no later launch reads, for a comparison: the 16-bit intermediate, and the
    /// rows of a chain of two launches.
    pub keeps_stages: bool,
}

#[cfg(test)]
mod tests;
