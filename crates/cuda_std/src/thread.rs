//! Where a thread is in its block and grid, and the block's barrier.
//!
//! PTX ISA, "Special Registers": `%tid`, `%ntid`, `%ctaid`, `%nctaid`.

use crate::ptx;

macro_rules! special_registers {
    ($($(#[$doc:meta])* $name:ident = $intrinsic:ident;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name() -> u32 {
            #[cfg(target_arch = "nvptx64")]
            // SAFETY: reads a register that every thread has.
            unsafe { core::arch::nvptx::$intrinsic() }
            #[cfg(not(target_arch = "nvptx64"))]
            crate::not_on_a_gpu()
        }
    )*};
}

special_registers! {
    /// The thread's x index in its block (`%tid.x`).
    thread_idx_x = _thread_idx_x;
    /// The thread's y index in its block (`%tid.y`).
    thread_idx_y = _thread_idx_y;
    /// The thread's z index in its block (`%tid.z`).
    thread_idx_z = _thread_idx_z;
    /// The block's x index in the grid (`%ctaid.x`).
    block_idx_x = _block_idx_x;
    /// The block's y index in the grid (`%ctaid.y`).
    block_idx_y = _block_idx_y;
    /// The block's z index in the grid (`%ctaid.z`).
    block_idx_z = _block_idx_z;
    /// Threads along x in a block (`%ntid.x`).
    block_dim_x = _block_dim_x;
    /// Threads along y in a block (`%ntid.y`).
    block_dim_y = _block_dim_y;
    /// Threads along z in a block (`%ntid.z`).
    block_dim_z = _block_dim_z;
    /// Blocks along x in the grid (`%nctaid.x`).
    grid_dim_x = _grid_dim_x;
    /// Blocks along y in the grid (`%nctaid.y`).
    grid_dim_y = _grid_dim_y;
    /// Blocks along z in the grid (`%nctaid.z`).
    grid_dim_z = _grid_dim_z;
}

/// The thread's index in a grid that is one-dimensional.
#[inline(always)]
pub fn index_1d() -> u32 {
    block_idx_x() * block_dim_x() + thread_idx_x()
}

/// Tells those who wait at a barrier of the block ([`sync_barrier`]) that this warp has come so far, and lets it go on: what the warp wrote
/// to memory is visible to them (`bar.arrive`; PTX ISA, as there).
///
/// # Safety
/// The whole warp calls it together. `threads` arrive or wait at the barrier `BARRIER`, below 16, each time, a multiple of 32; this warp
/// does so again only when all others have. [`sync_threads`] takes barrier 0.
#[inline(always)]
pub unsafe fn arrive_barrier<const BARRIER: u32>(threads: u32) {
    // SAFETY: what `# Safety` above asks.
    unsafe { ptx!("bar.arrive {}, {};", const BARRIER, in(reg32) threads, options(nostack, preserves_flags)) };
}

/// Waits at a barrier of the block, and makes what others wrote to memory before they came there visible (`bar.sync`; PTX ISA, as there).
///
/// # Safety
/// As [`arrive_barrier`].
#[inline(always)]
pub unsafe fn sync_barrier<const BARRIER: u32>(threads: u32) {
    // SAFETY: what `# Safety` above asks.
    unsafe { ptx!("bar.sync {}, {};", const BARRIER, in(reg32) threads, options(nostack, preserves_flags)) };
}

/// Waits for every thread of the block, and makes what they wrote to memory visible to each other
/// (`bar.sync 0`; PTX ISA, "Parallel Synchronization and Communication Instructions: bar").
///
/// Every thread of the block must reach it, or none.
#[inline(always)]
pub fn sync_threads() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: touches no memory. If only some threads of a block arrive, they hang, which is not undefined behavior.
    unsafe {
        core::arch::nvptx::_syncthreads()
    }
    #[cfg(not(target_arch = "nvptx64"))]
    crate::not_on_a_gpu()
}
