//! Indices of a thread in its CTA and grid, and the barriers of a CTA.
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
    /// x index of the thread in its CTA (`%tid.x`).
    thread_idx_x = _thread_idx_x;
    /// y index of the thread in its CTA (`%tid.y`).
    thread_idx_y = _thread_idx_y;
    /// z index of the thread in its CTA (`%tid.z`).
    thread_idx_z = _thread_idx_z;
    /// x index of the CTA in the grid (`%ctaid.x`).
    block_idx_x = _block_idx_x;
    /// y index of the CTA in the grid (`%ctaid.y`).
    block_idx_y = _block_idx_y;
    /// z index of the CTA in the grid (`%ctaid.z`).
    block_idx_z = _block_idx_z;
    /// Number of threads of a CTA along x (`%ntid.x`).
    block_dim_x = _block_dim_x;
    /// Number of threads of a CTA along y (`%ntid.y`).
    block_dim_y = _block_dim_y;
    /// Number of threads of a CTA along z (`%ntid.z`).
    block_dim_z = _block_dim_z;
    /// Number of CTAs of the grid along x (`%nctaid.x`).
    grid_dim_x = _grid_dim_x;
    /// Number of CTAs of the grid along y (`%nctaid.y`).
    grid_dim_y = _grid_dim_y;
    /// Number of CTAs of the grid along z (`%nctaid.z`).
    grid_dim_z = _grid_dim_z;
}

/// Index of the thread in a one-dimensional grid.
#[inline(always)]
pub fn index_1d() -> u32 {
    block_idx_x() * block_dim_x() + thread_idx_x()
}

/// Arrives at a barrier of the CTA without waiting. Warps that wait there ([`sync_barrier`]) see what this warp wrote
/// to memory before (`bar.arrive`; PTX ISA, as for [`sync_threads`]).
///
/// # Safety
/// The whole warp calls it together. `BARRIER` is below 16; [`sync_threads`] uses barrier 0. At each use of the
/// barrier, exactly `threads` threads (a multiple of 32) arrive or wait; this warp comes again only after all of them
/// have.
#[inline(always)]
pub unsafe fn arrive_barrier<const BARRIER: u32>(threads: u32) {
    // SAFETY: the caller guarantees that the whole warp executes this, and that `threads` threads come to the barrier
    // each time.
    unsafe { ptx!("bar.arrive {}, {};", const BARRIER, in(reg32) threads, options(nostack, preserves_flags)) };
}

/// Waits at a barrier of the CTA and makes visible what other warps wrote to memory before they arrived (`bar.sync`;
/// PTX ISA, as for [`sync_threads`]).
///
/// # Safety
/// The whole warp calls it together. `BARRIER` is below 16; [`sync_threads`] uses barrier 0. At each use of the
/// barrier, exactly `threads` threads (a multiple of 32) arrive or wait; this warp comes again only after all of them
/// have.
#[inline(always)]
pub unsafe fn sync_barrier<const BARRIER: u32>(threads: u32) {
    // SAFETY: the caller guarantees that the whole warp executes this, and that `threads` threads come to the barrier
    // each time.
    unsafe { ptx!("bar.sync {}, {};", const BARRIER, in(reg32) threads, options(nostack, preserves_flags)) };
}

/// Waits for every thread of the CTA and makes their writes to memory visible to each other (`bar.sync 0`; PTX ISA,
/// "Parallel Synchronization and Communication Instructions: bar").
///
/// Either every thread of the CTA calls it, or none.
#[inline(always)]
pub fn sync_threads() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: accesses no memory. If only some threads of a CTA arrive, they hang, which is not undefined behavior.
    unsafe {
        core::arch::nvptx::_syncthreads()
    }
    #[cfg(not(target_arch = "nvptx64"))]
    crate::not_on_a_gpu()
}
