//! Planning: pure functions of a problem's sizes, the same with and without a GPU.

#[cfg(feature = "kernels")]
pub(crate) mod gated_simt;
#[cfg(feature = "kernels")]
pub(crate) mod gated_sm100;
#[cfg(feature = "kernels")]
pub(crate) mod gated_sm90;
#[cfg(feature = "kernels")]
pub mod module;
pub mod roofline;
#[cfg(feature = "kernels")]
pub(crate) mod silu_mul;
#[cfg(feature = "kernels")]
pub(crate) mod tensor_map;
pub mod tile;
#[cfg(feature = "kernels")]
pub mod variant;

/// A launch of a kernel that gets the step's descriptors.
#[cfg(feature = "kernels")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    /// The kernel's entry.
    pub entry: &'static str,
    /// Blocks along x; none if there is nothing to compute.
    pub blocks: u32,
    /// Blocks along x of a cluster, as the entry asks for it; 1 where it asks for none.
    pub cluster: u32,
    /// Threads of a block along x.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Whether it may begin while the grid before it on the stream still runs, and itself waits for that where it must
    /// (`griddepcontrol.wait`).
    pub overlaps: bool,
}

#[cfg(feature = "kernels")]
impl Grid {
    /// Blocks along x (CUDA programming guide, "Technical Specifications per Compute Capability").
    pub const MAX_BLOCKS: u64 = (1 << 31) - 1;
}
