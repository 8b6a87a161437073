//! What host and `silu_mul` agree on: segments, and sizes of a block.

use bytemuck::{Pod, Zeroable};

/// Threads of a block, in one dimension.
pub const THREADS: u32 = 256;

/// Neighboring elements that a thread computes: 8 bytes of each matrix.
pub const THREAD_ELEMENTS: u32 = 4;

/// Neighboring elements that a block computes.
pub const BLOCK_ELEMENTS: u32 = THREADS * THREAD_ELEMENTS;

/// Equally many elements of three matrices, as an array of them lies in global memory:
/// `c = silu(gate) ∘ up`, all of one 16-bit format. Addresses are multiples of 8.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Segment {
    /// Address of what silu is taken of.
    pub gate: u64,
    /// Address of what it is multiplied with.
    pub up: u64,
    /// Address of the product.
    pub c: u64,
    /// Elements; a multiple of [`THREAD_ELEMENTS`], not 0.
    pub elements: u64,
    /// Blocks of all segments before this one.
    pub first_block: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

impl Segment {
    /// Blocks of a segment: what the next one's [`first_block`](Self::first_block) is further on. The grid is their
    /// sum, which must stay below 2³¹.
    pub const fn blocks(elements: u64) -> u64 {
        elements.div_ceil(BLOCK_ELEMENTS as u64)
    }
}

/// The one parameter of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Launch {
    /// Address of the array of [`Segment`].
    pub segments: u64,
    /// Its length, not 0.
    pub segment_count: u32,
    /// The format of all matrices: [`OUTPUT_F16`](crate::format::OUTPUT_F16) or [`OUTPUT_BF16`](crate::format::OUTPUT_BF16).
    pub format: u32,
}
