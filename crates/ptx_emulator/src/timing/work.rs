//! Work that an asynchronous operation requires from the GPU.

/// Bytes of global memory: start and length.
pub type Range = (u64, u32);

/// Fence that comes before an instruction in the machine code of `sm_90a` and `sm_100a` (ptxas 13.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// Before an arrival that releases to the cluster: MEMBAR.ALL.GPU. The arrival takes longer than the fence alone.
    Cluster,
    /// MEMBAR.ALL.GPU: a fence of the cluster or the GPU, or the fence before a release to the GPU.
    Gpu,
    /// MEMBAR.ALL.SYS: a fence of the system, or the fence before a release to the system.
    System,
}

/// Work that an asynchronous operation requires from the GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Work {
    /// Work without a duration.
    #[default]
    Nothing,
    /// A copy from global memory to the shared memory of CTAs of the cluster.
    Load { ranges: Vec<Range>, ctas: Vec<u32>, bulk: bool },
    /// A copy that reads the shared memory of its CTA.
    ReadShared { bytes: u64 },
    /// A copy that writes global memory.
    Store { ranges: Vec<Range> },
    /// A copy or an arrival inside the cluster.
    Transfer { bytes: u64, cta: u32 },
    /// A warp's part of `wgmma`: multiply-adds in units of f16, bytes of operands in shared memory, and registers per
    /// thread that hold its accumulators.
    Wgmma { multiply_adds: u64, shared_bytes: u64, sums: u64 },
    /// `tcgen05.mma` in the tensor cores of CTAs: for each CTA, multiply-adds in units of f16 and bytes of shared
    /// memory.
    Mma { ctas: Vec<u32>, multiply_adds: u64, shared_bytes: u64 },
    /// `tcgen05.cp`: bytes of shared memory for each CTA.
    Copy { ctas: Vec<u32>, bytes: u64 },
    /// `tcgen05.commit`: completes when the tensor core has completed all earlier operations.
    Commit { pair: bool },
    /// `tcgen05.ld` or `tcgen05.st` of a warp.
    Tmem { bytes: u64 },
}
