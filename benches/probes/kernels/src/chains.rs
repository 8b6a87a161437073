//! Products of a warp in chains, each of which adds to the sums of the one before.

use cuda_std::{
    clock::clock64,
    mma::Sums,
    shared::{dynamic_shared_address, st_shared_b32},
    thread,
};

use crate::write;

/// Links of a chain that are unrolled.
const LINKS: u32 = 16;

/// Has every warp multiply in so many chains, which take turns, 16 links a turn. Cycles; a sum.
///
/// # Safety
/// All threads of the block call it, with the same arguments; `multiply` is a product of a warp. `out` has two numbers. Four bytes of
/// dynamic shared memory a thread.
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
    // SAFETY: one word a thread; one thread writes the results.
    unsafe {
        // The clock is read when the sums are there.
        st_shared_b32(dynamic_shared_address() + thread::thread_idx_x() * 4, sum.to_bits());
        thread::sync_threads();
        let cycles = clock64() - start;
        if thread::thread_idx_x() == 0 {
            write(out, 0, cycles);
            write(out, 1, (sum / (4 * CHAINS) as f32) as u64);
        }
    }
}
