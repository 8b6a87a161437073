//! `mma.sync` of NVFP4 on sm_120.

use cuda_std::{
    kernel,
    mma::{Sums, mma_m16n8k64_mxf4nvf4},
};

use crate::chains::chains;

/// A of ones with scales of one, B of three halves with scales of two: it adds 64 · 3.
///
/// # Safety
/// All lanes of a warp call it.
#[inline(always)]
unsafe fn multiply(sums: &mut Sums) {
    let (a, b, scale_a, scale_b) = ([0x2222_2222; 4], [0x3333_3333; 2], 0x3838_3838, 0x4040_4040);
    // SAFETY: what `# Safety` above asks.
    unsafe { mma_m16n8k64_mxf4nvf4::<0, 0>(sums, a, b, scale_a, scale_b) }
}

/// Products `m16n8k64` by each warp in one chain, 16 a turn. Cycles; a sum.
///
/// # Safety
/// `out` has two numbers. Four bytes of dynamic shared memory a thread.
#[kernel(threads = 256)]
pub unsafe fn mxf4nvf4_1_chain(turns: u32, out: u64) {
    // SAFETY: what `# Safety` above asks; warps stay together.
    unsafe { chains::<1>(turns, out, |sums| multiply(sums)) }
}

/// As [`mxf4nvf4_1_chain`], four chains that take turns.
///
/// # Safety
/// As there.
#[kernel(threads = 256)]
pub unsafe fn mxf4nvf4_4_chains(turns: u32, out: u64) {
    // SAFETY: what `# Safety` above asks; warps stay together.
    unsafe { chains::<4>(turns, out, |sums| multiply(sums)) }
}
