//! Definitions that host and `silu_mul` share: segments, and sizes of a CTA.

use bytemuck::{Pod, Zeroable};

/// Threads per CTA, in one dimension.
pub const THREADS: u32 = 256;

/// Number of neighboring elements that a thread computes: 8 bytes of each matrix.
pub const THREAD_ELEMENTS: u32 = 4;

/// Number of neighboring elements that a CTA computes.
pub const BLOCK_ELEMENTS: u32 = THREADS * THREAD_ELEMENTS;

/// One part of `c = silu(gate) ∘ up`. The three matrices have the same 16-bit format. Addresses are multiples of 8.
/// Parts are elements of an array in global memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Segment {
    /// Address of the input of silu.
    pub gate: u64,
    /// Address of the other factor.
    pub up: u64,
    /// Address of the product.
    pub c: u64,
    /// Number of elements; a multiple of [`THREAD_ELEMENTS`], not 0.
    pub elements: u64,
    /// Number of CTAs of all preceding segments.
    pub first_block: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

impl Segment {
    /// CTAs per segment: the next segment's [`first_block`](Self::first_block) is this segment's plus this number. The
    /// grid is the sum over all segments, which must stay below 2³¹.
    pub const fn blocks(elements: u64) -> u64 {
        elements.div_ceil(BLOCK_ELEMENTS as u64)
    }
}

/// The only parameter of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Launch {
    /// Address of the array of [`Segment`].
    pub segments: u64,
    /// Number of segments, not 0.
    pub segment_count: u32,
    /// Format of all matrices: [`OUTPUT_F16`](crate::format::OUTPUT_F16) or
    /// [`OUTPUT_BF16`](crate::format::OUTPUT_BF16).
    pub format: u32,
}
