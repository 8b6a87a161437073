//! Chains of a warp's products: each product adds to the sums of the product before.

use cuda_std::{
    clock::clock64,
    mma::Sums,
    shared::{dynamic_shared_address, st_shared_b32},
    thread,
};

use crate::write;

/// Number of unrolled links of a chain.
const LINKS: u32 = 16;

/// Every warp multiplies in `CHAINS` chains in turn, 16 links per iteration. Results: cycles; a sum.
///
/// # Safety
/// - All threads of the CTA call it together, with the same arguments. `multiply` is a product of a warp.
/// - `out` has room for two numbers. The block has four bytes of dynamic shared memory per thread.
#[inline(always)]
pub unsafe fn chains<const CHAINS: usize>(turns: u32, out: u64, multiply: impl Fn(&mut Sums)) {
    let mut sums: [Sums; CHAINS] = [[0.0; 4]; CHAINS];
    thread::sync_threads();
    let start = clock64();
    for _ in 0..turns {
        for _ in 0..LINKS {
            for sums in &mut sums {
                multiply(sums);
            }
        }
    }
    let sum = sums.iter().flatten().fold(0.0, |sum, one| sum + one);
    // SAFETY: each thread writes its own word of shared memory, and one thread writes the results.
    unsafe {
        // The store waits for the sums, so the clock is read after them.
        st_shared_b32(dynamic_shared_address() + thread::thread_idx_x() * 4, sum.to_bits());
        thread::sync_threads();
        let cycles = clock64() - start;
        if thread::thread_idx_x() == 0 {
            write(out, 0, cycles);
            write(out, 1, (sum / (4 * CHAINS) as f32) as u64);
        }
    }
}
