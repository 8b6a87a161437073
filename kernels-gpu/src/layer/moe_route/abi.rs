//! Definitions that host and `moe_route` share: the kernels' parameters. [`lists`](crate::lists) defines the lists that
//! they write.

use bytemuck::{Pod, Zeroable};

use crate::{
    lists::{Lists, MAX_EXPERTS, SMALL_EXPERTS},
    sorted::most_rows,
    units::k_blocks,
};

/// Names of the entries that make lists and permute tokens to the order of K: for up to [`SMALL_EXPERTS`] experts, and
/// for more.
pub const ROUTE_ENTRIES: [&str; 2] = ["moe_route", "moe_route_large"];

/// Names of the entries that add up a token's rows, for f16 and for bf16.
pub const COMBINE_ENTRIES: [&str; 2] = ["moe_combine_f16", "moe_combine_bf16"];

/// The only parameter of [`ROUTE_ENTRIES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Route {
    /// Address of the experts that tokens name, `[T, k]`, i32. An id that is negative, or not below `named_experts`,
    /// names no expert.
    pub ids: u64,
    /// Address of the local index of each expert that can be named, `[named_experts]`, i32, negative for an expert that
    /// is not local; 0 if ids are local indices.
    pub map: u64,
    /// Address of the tokens X, a multiple of 16: rows of `hidden` 16-bit numbers, `input_pitch` bytes apart.
    pub input: u64,
    /// Bytes from one token to the next; a multiple of 16.
    pub input_pitch: u64,
    /// Address of one f32 factor per token, `[T]`, by which the token is multiplied before it is rounded to its type; 0
    /// for no factors.
    pub input_weights: u64,
    /// Address of the output tokens in the order of K ([`units`](crate::units)), `[T, H]` without gaps; 0 to make only
    /// lists.
    pub tokens: u64,
    /// Address of a second output of tokens without their factors, for the shared expert; 0 for none. Used only with
    /// `input_weights`.
    pub shared_tokens: u64,
    /// Address of the [`Lists`] that the kernel writes, for T·k choices and `experts`.
    pub lists: u64,
    /// Address of further [`Lists`] that the kernel writes, for T choices and the shared expert, whose rows are the
    /// tokens; 0 for none.
    pub shared_lists: u64,
    /// T; T·k is less than 2³¹.
    pub token_count: u32,
    /// k, from 1 to [`MAX_TOP_K`](crate::lists::MAX_TOP_K).
    pub top_k: u32,
    /// E, from 1 to [`MAX_EXPERTS`].
    pub experts: u32,
    /// Number of experts that can be named: the length of `map`, or E.
    pub named_experts: u32,
    /// H, a multiple of 16.
    pub hidden: u32,
    /// Maximum number of tokens per tile, for [`Lists::tile_firsts`]; a multiple of 8.
    pub tile_tokens: u32,
    /// Same as `tile_tokens`, for the shared expert.
    pub shared_tile_tokens: u32,
    /// [`OUTPUT_F16`](crate::format::OUTPUT_F16) or [`OUTPUT_BF16`](crate::format::OUTPUT_BF16); used only with
    /// `input_weights`.
    pub operand_type: u32,
    /// A power of two. Each expert's number of rows is padded to a multiple of it.
    pub row_multiple: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// Columns of a token that a warp copies or adds up at a time: 16 bytes per lane.
pub const PIECE: u32 = 256;

/// Number of pieces per token; the last one may have fewer columns.
pub const fn pieces(hidden: u32) -> u32 {
    hidden.div_ceil(PIECE)
}

const _: () = assert!(Route::MAX_SHARED_BYTES[0] <= 99 * 1024 && Route::MAX_SHARED_BYTES[1] <= 99 * 1024);

impl Route {
    /// Threads per CTA: one per expert, or with more experts one per pair of experts.
    pub const THREADS: u32 = SMALL_EXPERTS;

    /// Warps per CTA.
    pub const WARPS: u32 = Self::THREADS / 32;

    /// Number of pieces that a warp copies, all in flight at once.
    pub const WARP_PIECES: u32 = 4;

    /// Up to this many choices, a single CTA makes the lists. For more choices, a small cluster makes them, and then
    /// larger clusters. Measured on an H200 (benches/lab/experiments.md).
    pub const BLOCK_CHOICES: u64 = 1024;
    /// Up to this many choices, a small cluster makes the lists.
    pub const SMALL_CLUSTER_CHOICES: u64 = 4096;
    /// Up to this many choices, a cluster of [`Self::PORTABLE_CLUSTER`] CTAs makes the lists.
    pub const PORTABLE_CLUSTER_CHOICES: u64 = 12_288;

    /// CTAs of a small cluster.
    pub const SMALL_CLUSTER: u32 = 4;

    /// Maximum cluster size in CTAs that every GPU with clusters supports (CUDA programming guide, "Thread Block
    /// Clusters").
    pub const PORTABLE_CLUSTER: u32 = 8;

    /// Maximum cluster size in CTAs, on a GPU that supports it.
    pub const MAX_CLUSTER: u32 = 16;

    /// Number of choices of a warp that are ranked at a time, and that a CTA has room to sort.
    pub const WARP_CHOICES: u32 = 512;

    /// [`Self::WARP_CHOICES`] for threads with two experts each: their counts take twice the memory.
    pub const LARGE_WARP_CHOICES: u32 = 192;

    /// Maximum dynamic shared memory of a CTA of each entry, in bytes, which every GPU from sm_80 on has. The largest
    /// cluster has the most totals.
    pub const MAX_SHARED_BYTES: [u32; 2] = [
        Self::shared_bytes(u64::MAX, SMALL_EXPERTS, Self::MAX_CLUSTER),
        Self::shared_bytes(u64::MAX, MAX_EXPERTS, Self::SMALL_CLUSTER),
    ];

    /// Number of experts of a thread, for `experts` experts.
    pub const fn thread_experts(experts: u32) -> u32 {
        if experts > SMALL_EXPERTS { MAX_EXPERTS / SMALL_EXPERTS } else { 1 }
    }

    /// Number of choices of a warp that are ranked at a time if a thread has this number of experts.
    pub const fn warp_choices(thread_experts: u32) -> u32 {
        if thread_experts > 1 { Self::LARGE_WARP_CHOICES } else { Self::WARP_CHOICES }
    }

    /// Number of CTAs per cluster for `choices` = T·k choices of `experts` experts, at most `largest`, the GPU's largest
    /// cluster: 1 before sm_90. The first cluster of the grid makes the lists. More than [`SMALL_EXPERTS`] experts have a
    /// small cluster at most, because there is no memory for the totals of more CTAs.
    pub const fn cluster(choices: u64, experts: u32, largest: u32) -> u32 {
        let largest =
            if experts > SMALL_EXPERTS && largest > Self::SMALL_CLUSTER { Self::SMALL_CLUSTER } else { largest };
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

    /// CTAs per grid, a multiple of the cluster: the first cluster, and at least one CTA that copies tokens. Without
    /// tokens, the kernel still writes (empty) lists.
    pub const fn blocks(token_count: u32, hidden: u32, cluster: u32) -> u64 {
        let pieces = token_count as u64 * pieces(hidden) as u64;
        let copying = pieces.div_ceil((Self::WARPS * Self::WARP_PIECES) as u64);
        let copying = if copying == 0 { 1 } else { copying };
        (cluster as u64 + copying).next_multiple_of(cluster as u64)
    }

    /// Same as [`Self::blocks`], for a grid that only makes lists: after the first cluster come CTAs that write the
    /// shared expert's lists, with one row per thread.
    pub const fn list_blocks(token_count: u32, row_multiple: u32, cluster: u32) -> u64 {
        let rows = most_rows(token_count as u64, 1, row_multiple);
        let of_shared = (rows + Lists::TICKETS as u64).div_ceil(Self::THREADS as u64);
        (cluster as u64 + of_shared).next_multiple_of(cluster as u64)
    }

    /// Dynamic shared memory of a CTA for `choices` choices and `experts` experts, in bytes: three sums per warp; a
    /// barrier; the number of rows of each warp and expert, and the place of the CTA's rows; the choices in their
    /// order; then the number of rows of each CTA of the cluster, whose place is reused by the sorted choices.
    pub const fn shared_bytes(choices: u64, experts: u32, cluster: u32) -> u32 {
        let most = (cluster * Self::WARPS * Self::warp_choices(Self::thread_experts(experts))) as u64;
        let of_cluster = if choices < most { choices } else { most };
        let of_warp = of_cluster.div_ceil((cluster * Self::WARPS) as u64).next_multiple_of(64) as u32;
        let (of_block, totals) = (Self::WARPS * of_warp, if cluster > 1 { cluster * experts } else { 0 });
        let sorted = if of_block > totals { of_block } else { totals };
        (3 * Self::WARPS + 4 + (Self::WARPS + 1) * experts + of_block + sorted) * 4
    }
}

/// Name of the entry that expands tokens to rows.
pub const EXPAND_ENTRY: &str = "moe_expand";

/// The only parameter of [`EXPAND_ENTRY`]: 16-bit tokens, to write in the order of K to all of their rows, in the
/// layout of [`sorted`](crate::sorted).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Expand {
    /// Address of the tokens X, a multiple of 16: rows of `hidden` 16-bit numbers, `input_pitch` bytes apart.
    pub input: u64,
    /// Bytes from one token to the next; a multiple of 16.
    pub input_pitch: u64,
    /// Same as [`Route::input_weights`], for the rows of `routed`.
    pub input_weights: u64,
    /// Address of [`Lists::places`].
    pub places: u64,
    /// Rows of the experts that tokens name.
    pub routed: ExpandedRows,
    /// Rows of the shared expert: row t is token t.
    pub shared: ExpandedRows,
    /// T.
    pub token_count: u32,
    /// k, from 1 to [`MAX_TOP_K`](crate::lists::MAX_TOP_K).
    pub top_k: u32,
    /// H, a multiple of 16.
    pub hidden: u32,
    /// Same as [`Route::operand_type`].
    pub operand_type: u32,
}

/// Destination of rows that tokens are expanded to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ExpandedRows {
    /// Address of the rows of `hidden` columns, a multiple of 16; 0 to skip these experts.
    pub tokens: u64,
    /// Address of the rows of `width` columns that a product will write. The kernel writes zeros to the lines that the
    /// product does not fill.
    pub intermediate: u64,
    /// Capacity in rows.
    pub capacity: u32,
    /// I, a multiple of 16.
    pub width: u32,
}

impl Expand {
    /// Threads per CTA.
    pub const THREADS: u32 = 256;

    /// Warps per CTA. There is one warp per piece of a token.
    pub const WARPS: u32 = Self::THREADS / 32;

    /// K-blocks per piece: a lane has 16 bytes.
    pub const PIECE_K_BLOCKS: u32 = 2;

    /// Number of pieces per token.
    pub const fn pieces(hidden: u32) -> u32 {
        k_blocks(hidden).div_ceil(Self::PIECE_K_BLOCKS)
    }

    /// CTAs per grid.
    pub const fn blocks(&self) -> u64 {
        (self.token_count as u64 * Self::pieces(self.hidden) as u64).div_ceil(Self::WARPS as u64)
    }
}

impl Combine {
    /// Threads per CTA.
    pub const THREADS: u32 = 256;

    /// Warps per CTA.
    pub const WARPS: u32 = Self::THREADS / 32;

    /// CTAs per grid; 0 if there are no tokens.
    pub const fn blocks(token_count: u32, hidden: u32) -> u64 {
        (token_count as u64 * pieces(hidden) as u64).div_ceil(Self::WARPS as u64)
    }
}

/// The only parameter of [`COMBINE_ENTRIES`]: `out[t] = Σⱼ weights[t, j]·row(t, j)`, with the shared expert's term
/// last.
///
/// Rows are numbers of X's type. The sum is f32: it begins with 0, each term is added by one fused multiply-add, j
/// ascending, and the result is rounded once to X's type.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Combine {
    /// Address of the rows, `[rows, H]` without gaps, with columns in natural order.
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
    /// Bytes from one row of the output to the next; a multiple of 16.
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
