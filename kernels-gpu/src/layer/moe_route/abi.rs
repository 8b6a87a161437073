//! What host and `moe_route` agree on: the kernels' parameters. What they write is [`lists`](crate::lists).

use bytemuck::{Pod, Zeroable};

use crate::{
    lists::{Lists, MAX_EXPERTS},
    sorted::most_rows,
    units::k_blocks,
};

/// The entry that makes lists and brings tokens into the order of K.
pub const ROUTE_ENTRY: &str = "moe_route";

/// The entries that add up a token's rows, of f16 and of bf16.
pub const COMBINE_ENTRIES: [&str; 2] = ["moe_combine_f16", "moe_combine_bf16"];

/// The one parameter of [`ROUTE_ENTRY`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Route {
    /// Address of the experts that tokens name, `[T, k]`, i32. What is negative, or not below `named_experts`, names none.
    pub ids: u64,
    /// Address of the layer's own number of each expert that can be named, `[named_experts]`, i32, negative where it is not the
    /// layer's own; 0 if experts are named by their own numbers.
    pub map: u64,
    /// Address of the tokens X, a multiple of 16: rows of `hidden` 16-bit numbers, `input_pitch` bytes apart.
    pub input: u64,
    /// A multiple of 16.
    pub input_pitch: u64,
    /// Address of a factor for each token, `[T]`, f32, by which it is multiplied and then rounded to its type; or 0.
    pub input_weights: u64,
    /// Address of where tokens go in the order of K ([`units`](crate::units)), `[T, H]` without gaps; 0 if there are to be lists
    /// alone.
    pub tokens: u64,
    /// Address of where they go besides, without their factors, for the expert that every token shares; or 0. Looked at for
    /// `input_weights`.
    pub shared_tokens: u64,
    /// Address of the [`Lists`] that it writes, of T·k choices and `experts`.
    pub lists: u64,
    /// Address of the [`Lists`] of T choices and one expert that it writes besides, for the expert that every token shares:
    /// rows are the tokens; or 0.
    pub shared_lists: u64,
    /// T; T·k is below 2³¹.
    pub token_count: u32,
    /// k, from 1 to [`MAX_TOP_K`](crate::lists::MAX_TOP_K).
    pub top_k: u32,
    /// E, from 1 to [`MAX_EXPERTS`].
    pub experts: u32,
    /// Experts that can be named: the length of `map`, or E.
    pub named_experts: u32,
    /// H, a multiple of 16.
    pub hidden: u32,
    /// Tokens of a tile, for [`Lists::tile_firsts`]; a multiple of 8.
    pub tile_tokens: u32,
    /// As `tile_tokens`, of the shared expert.
    pub shared_tile_tokens: u32,
    /// [`OUTPUT_F16`](crate::format::OUTPUT_F16) or [`OUTPUT_BF16`](crate::format::OUTPUT_BF16); looked at for `input_weights`.
    pub operand_type: u32,
    /// A power of two. Each expert has a multiple of so many rows, the last of which may be no tokens.
    pub row_multiple: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// Columns of a token that a warp copies, or adds up, at a time: 16 bytes a lane.
pub const PIECE: u32 = 256;

/// Pieces of a token; the last one may have fewer columns.
pub const fn pieces(hidden: u32) -> u32 {
    hidden.div_ceil(PIECE)
}

const _: () = assert!(Route::MAX_SHARED_BYTES <= 99 * 1024);

impl Route {
    /// Threads of a block. An expert has one.
    pub const THREADS: u32 = MAX_EXPERTS;

    /// Warps of a block.
    pub const WARPS: u32 = Self::THREADS / 32;

    /// Pieces that a warp copies, all of them on their way at once.
    pub const WARP_PIECES: u32 = 4;

    /// Up to so many choices, a block alone makes the lists; of more, the blocks of a small cluster, then of larger ones. Measured on
    /// an H200 (benches/lab/experiments.md).
    pub const BLOCK_CHOICES: u64 = 1024;
    /// As [`Self::BLOCK_CHOICES`].
    pub const SMALL_CLUSTER_CHOICES: u64 = 4096;
    /// As [`Self::BLOCK_CHOICES`].
    pub const PORTABLE_CLUSTER_CHOICES: u64 = 12_288;

    /// Blocks of a small cluster.
    pub const SMALL_CLUSTER: u32 = 4;

    /// The most blocks of a cluster that every card with clusters takes (CUDA programming guide, "Thread Block Clusters").
    pub const PORTABLE_CLUSTER: u32 = 8;

    /// The most blocks of a cluster, of a card that takes so many.
    pub const MAX_CLUSTER: u32 = 16;

    /// Choices of a warp that are ranked at a time, and for which a block has room to sort them.
    pub const WARP_CHOICES: u32 = 512;

    /// The most dynamic shared memory of a block: what every card from sm_80 on has. In the largest cluster there are most totals.
    pub const MAX_SHARED_BYTES: u32 = Self::shared_bytes(u64::MAX, MAX_EXPERTS, Self::MAX_CLUSTER);

    /// Blocks of a cluster, of so many choices, T·k, if a card's largest cluster has so many: 1 before sm_90. The first cluster of the
    /// grid makes the lists.
    pub const fn cluster(choices: u64, largest: u32) -> u32 {
        let wanted = if choices <= Self::BLOCK_CHOICES {
            1
        } else if choices <= Self::SMALL_CLUSTER_CHOICES {
            Self::SMALL_CLUSTER
        } else if choices <= Self::PORTABLE_CLUSTER_CHOICES {
            Self::PORTABLE_CLUSTER
        } else {
            Self::MAX_CLUSTER
        };
        if wanted < largest { wanted } else { largest }
    }

    /// Blocks of a grid, a multiple of the cluster: the first cluster, and those that copy tokens, at least one. Where there is no
    /// token, there are lists that say so.
    pub const fn blocks(token_count: u32, hidden: u32, cluster: u32) -> u64 {
        let pieces = token_count as u64 * pieces(hidden) as u64;
        let copying = pieces.div_ceil((Self::WARPS * Self::WARP_PIECES) as u64);
        let copying = if copying == 0 { 1 } else { copying };
        (cluster as u64 + copying).next_multiple_of(cluster as u64)
    }

    /// As [`Self::blocks`], of a grid that makes lists alone: behind the first cluster come those that write the shared expert's
    /// lists, a row a thread.
    pub const fn list_blocks(token_count: u32, row_multiple: u32, cluster: u32) -> u64 {
        let rows = most_rows(token_count as u64, 1, row_multiple);
        let of_shared = (rows + Lists::TICKETS as u64).div_ceil(Self::THREADS as u64);
        (cluster as u64 + of_shared).next_multiple_of(cluster as u64)
    }

    /// Dynamic shared memory of a block, of so many choices and experts: three sums of each warp; a barrier; how many rows each warp has of each
    /// expert, and where the block's lie; choices as they come; then how many rows each block of the cluster has, whose place
    /// sorted choices take.
    pub const fn shared_bytes(choices: u64, experts: u32, cluster: u32) -> u32 {
        let most = (cluster * Self::WARPS * Self::WARP_CHOICES) as u64;
        let of_cluster = if choices < most { choices } else { most };
        let of_warp = of_cluster.div_ceil((cluster * Self::WARPS) as u64).next_multiple_of(64) as u32;
        let (of_block, totals) = (Self::WARPS * of_warp, if cluster > 1 { cluster * experts } else { 0 });
        let sorted = if of_block > totals { of_block } else { totals };
        (3 * Self::WARPS + 4 + (Self::WARPS + 1) * experts + of_block + sorted) * 4
    }
}

/// The entry that expands tokens to rows.
pub const EXPAND_ENTRY: &str = "moe_expand";

/// The one parameter of [`EXPAND_ENTRY`]: tokens of 16 bits in the order of K, each to all of its rows, as [`sorted`](crate::sorted)
/// says.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Expand {
    /// Address of the tokens X, a multiple of 16: rows of `hidden` 16-bit numbers, `input_pitch` bytes apart.
    pub input: u64,
    /// A multiple of 16.
    pub input_pitch: u64,
    /// As [`Route::input_weights`], for the rows of `routed`.
    pub input_weights: u64,
    /// Address of [`Lists::places`].
    pub places: u64,
    /// The rows of the experts that tokens name.
    pub routed: ExpandedRows,
    /// Those of the expert that every token shares: row t is token t.
    pub shared: ExpandedRows,
    /// T.
    pub token_count: u32,
    /// k, from 1 to [`MAX_TOP_K`](crate::lists::MAX_TOP_K).
    pub top_k: u32,
    /// H, a multiple of 16.
    pub hidden: u32,
    /// As [`Route::operand_type`].
    pub operand_type: u32,
}

/// Where rows lie that tokens are expanded to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ExpandedRows {
    /// Address of the rows of `hidden` columns, a multiple of 16; 0 if nothing is to be done for these experts.
    pub tokens: u64,
    /// Address of the rows of `width` columns that a product will write: those of their lines that it does not fill become zeros.
    pub intermediate: u64,
    /// Rows that there is room for.
    pub capacity: u32,
    /// I, a multiple of 16.
    pub width: u32,
}

impl Expand {
    /// Threads of a block.
    pub const THREADS: u32 = 256;

    /// Warps of a block: a piece of a token has one.
    pub const WARPS: u32 = Self::THREADS / 32;

    /// K-blocks of a piece: a lane has 16 bytes.
    pub const PIECE_K_BLOCKS: u32 = 2;

    /// Pieces of a token.
    pub const fn pieces(hidden: u32) -> u32 {
        k_blocks(hidden).div_ceil(Self::PIECE_K_BLOCKS)
    }

    /// Blocks of a grid.
    pub const fn blocks(&self) -> u64 {
        (self.token_count as u64 * Self::pieces(self.hidden) as u64).div_ceil(Self::WARPS as u64)
    }
}

impl Combine {
    /// Threads of a block.
    pub const THREADS: u32 = 256;

    /// Warps of a block.
    pub const WARPS: u32 = Self::THREADS / 32;

    /// Blocks of a grid; none where there is no token.
    pub const fn blocks(token_count: u32, hidden: u32) -> u64 {
        (token_count as u64 * pieces(hidden) as u64).div_ceil(Self::WARPS as u64)
    }
}

/// The one parameter of [`COMBINE_ENTRIES`]: `out[t] = Σⱼ weights[t, j]·row(t, j)`, and the shared expert's behind.
///
/// Rows are numbers of X's type. The sum is f32: it begins with 0, each term is added by one fused multiply-add, j ascending,
/// and the result is rounded once to X's type.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Combine {
    /// Address of the rows, `[rows, H]` without gaps, natural order of columns.
    pub rows: u64,
    /// Address of [`Lists::places`].
    pub places: u64,
    /// Address of the weights, `[T, k]`, f32; 0 if all are 1.
    pub weights: u64,
    /// Address of the shared expert's rows, `[T, H]`; or 0.
    pub shared_rows: u64,
    /// Address of the shared expert's weights, `[T]`, f32; 0 if all are 1.
    pub shared_weights: u64,
    /// Address of the output, a multiple of 16: rows of `hidden` 16-bit numbers, `output_pitch` bytes apart.
    pub output: u64,
    /// A multiple of 16.
    pub output_pitch: u64,
    /// T.
    pub token_count: u32,
    /// k.
    pub top_k: u32,
    /// H, a multiple of 16.
    pub hidden: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}
