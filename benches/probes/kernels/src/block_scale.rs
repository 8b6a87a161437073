//! Probes of `mma.sync` of NVFP4 on sm_120.

use cuda_std::{
    kernel,
    mma::{Sums, mma_m16n8k64_mxf4nvf4},
};

use crate::chains::chains;

/// Multiplies A of ones with scales of one and B of three halves with scales of two, which adds 64 · 3.
///
/// # Safety
/// All lanes of a warp call it together.
#[inline(always)]
unsafe fn multiply(sums: &mut Sums) {
    let (a, b, scale_a, scale_b) = ([0x2222_2222; 4], [0x3333_3333; 2], 0x3838_3838, 0x4040_4040);
    // SAFETY: the caller guarantees that all lanes of the warp call it together.
    unsafe { mma_m16n8k64_mxf4nvf4::<0, 0>(sums, a, b, scale_a, scale_b) }
}

/// Every warp computes products `m16n8k64` in one chain, 16 per iteration. Results: cycles; a sum.
///
/// # Safety
/// `out` has room for two numbers. The block has four bytes of dynamic shared memory per thread.
#[kernel(threads = 256)]
pub unsafe fn mxf4nvf4_1_chain(turns: u32, out: u64) {
    // SAFETY: the caller guarantees `out` and the shared memory. All threads run the same code, so warps stay
    // converged.
    unsafe { chains::<1>(turns, out, |sums| multiply(sums)) }
}

/// Like [`mxf4nvf4_1_chain`], with four chains in turn.
///
/// # Safety
/// The requirements of [`mxf4nvf4_1_chain`].
#[kernel(threads = 256)]
pub unsafe fn mxf4nvf4_4_chains(turns: u32, out: u64) {
    // SAFETY: the caller guarantees `out` and the shared memory. All threads run the same code, so warps stay
    // converged.
    unsafe { chains::<4>(turns, out, |sums| multiply(sums)) }
}
