//! Probes for every GPU: launches, loads, barriers, and `mma.sync` of 16-bit numbers.

use cuda_std::{
    clock::{clock64, multiprocessor},
    global::{
        GlobalAddress, ld_global_b64, ld_global_cg_v4_b32, ld_relaxed_gpu_global_b64, st_global_b32, st_global_b64,
    },
    kernel,
    mma::{Sums, mma_m16n8k16},
    shared::{dynamic_shared_address, ld_shared_b32, ld_shared_v4_b32, st_shared_b32, st_shared_v4_b32},
    thread,
    wgmma::F16,
};

use crate::{chains::chains, write};

/// Does nothing.
///
/// # Safety
/// No requirements.
#[kernel]
pub unsafe fn empty() {}

/// Spins for `cycles` cycles.
///
/// # Safety
/// No requirements.
#[kernel(threads = 128)]
pub unsafe fn spin(cycles: u64) {
    let start = clock64();
    while clock64() - start < cycles {}
}

/// Like [`spin`]. Results per CTA: the SM, and its clock at the start. It writes nothing at the end, because it would
/// wait for the write.
///
/// # Safety
/// `out` has room for two numbers per CTA.
#[kernel(threads = 128)]
pub unsafe fn spin_from(cycles: u64, out: u64) {
    let start = clock64();
    if thread::thread_idx_x() == 0 {
        let first = thread::block_idx_x() * 2;
        // SAFETY: the numbers belong to this CTA, and one thread writes them.
        unsafe {
            write(out, first, multiprocessor().into());
            write(out, first + 1, start);
        }
    }
    while clock64() - start < cycles {}
}

/// Writes two chains of addresses. The first 8 bytes of each line of 128 hold the address of the line `near` lines
/// further on. The next 8 bytes hold the address of the line `far` lines further on. The first line follows the last.
///
/// # Safety
/// `memory` has `lines` lines.
#[kernel(threads = 256)]
pub unsafe fn write_chains(memory: u64, lines: u64, near: u64, far: u64) {
    let mut line = u64::from(thread::index_1d());
    while line < lines {
        let (at, of) = (GlobalAddress::new(memory + line * 128), |step: u64| memory + (line + step) % lines * 128);
        // SAFETY: the line is in the memory, and one thread writes it.
        unsafe {
            st_global_b64(at, of(near));
            st_global_b64(at + 8, of(far) + 8);
        }
        line += u64::from(thread::block_dim_x() * thread::grid_dim_x());
    }
}

/// Follows a chain of loads past L1 for `steps` steps. Results: cycles; the final address.
///
/// # Safety
/// `from` is the start of a chain that [`write_chains`] has written. `out` has room for two numbers.
#[kernel(threads = 32)]
pub unsafe fn chase_l2(from: u64, steps: u32, out: u64) {
    // SAFETY: the caller guarantees the chain, so each link is in its memory.
    unsafe { chase(from, steps, out, |at| ld_relaxed_gpu_global_b64(at)) };
}

/// Like [`chase_l2`], with loads that L1 caches.
///
/// # Safety
/// The requirements of [`chase_l2`].
#[kernel(threads = 32)]
pub unsafe fn chase_l1(from: u64, steps: u32, out: u64) {
    // SAFETY: the caller guarantees the chain, so each link is in its memory.
    unsafe {
        let mut at = from;
        for _ in 0..steps {
            at = ld_global_b64(GlobalAddress::new(at));
        }
        // The written number depends on the last load, so all lines are in L1 before the clock is read.
        write(out, 1, at);
        chase(from, steps, out, |at| ld_global_b64(at));
    }
}

/// Follows a chain with `load` for `steps` steps. Results: cycles; the final address.
///
/// # Safety
/// `load` loads a link of the chain that starts at `from`. `out` has room for two numbers.
#[inline(always)]
unsafe fn chase(from: u64, steps: u32, out: u64, load: impl Fn(GlobalAddress) -> u64) {
    let mut at = from;
    let start = clock64();
    for _ in 0..steps {
        at = load(GlobalAddress::new(at));
    }
    let cycles = clock64() - start;
    if thread::thread_idx_x() == 0 {
        // SAFETY: the caller guarantees room for two numbers, and one thread writes them.
        unsafe {
            write(out, 0, cycles);
            write(out, 1, at);
        }
    }
}

/// Follows a chain of 64 words in shared memory. Each word has the address of the seventh word further on. Results:
/// cycles; the final address, in bytes from the first word.
///
/// # Safety
/// `out` has room for two numbers. The block has 256 bytes of dynamic shared memory.
#[kernel(threads = 32)]
pub unsafe fn chase_shared(steps: u32, out: u64) {
    const WORDS: u32 = 64;
    let first = dynamic_shared_address();
    // SAFETY: the words are in the CTA's shared memory, and one thread writes and reads them.
    unsafe {
        if thread::thread_idx_x() > 0 {
            return;
        }
        for word in 0..WORDS {
            st_shared_b32(first + word * 4, (word + 7) % WORDS * 4);
        }
        let mut at = 0;
        let start = clock64();
        for _ in 0..steps {
            at = ld_shared_b32(first + at);
        }
        let cycles = clock64() - start;
        write(out, 0, cycles);
        write(out, 1, at.into());
    }
}

/// Every thread loads 16 bytes from shared memory eight times per iteration, the same addresses in every warp, `stride`
/// bytes further on in each iteration. Results: cycles; the sum of the first thread's loads.
///
/// # Safety
/// `out` has room for two numbers. The block has 8 KB of dynamic shared memory. `stride` is 0; ptxas does not know
/// that, and omits no load.
#[kernel(threads = 1024)]
pub unsafe fn read_shared(times: u32, stride: u32, out: u64) {
    const EACH: u32 = 8;
    let first = dynamic_shared_address() + thread::thread_idx_x() % 32 * 16;
    // SAFETY: one warp writes the words before the CTA's barrier, and all warps read them after the barrier.
    unsafe {
        if thread::thread_idx_x() < 32 {
            for i in 0..EACH {
                st_shared_v4_b32(first + i * 512, [1, 0, 0, 0]);
            }
        }
        thread::sync_threads();
        let (mut sum, mut from) = (0, first);
        let start = clock64();
        for _ in 0..times {
            for i in 0..EACH {
                let [a, b, c, d] = ld_shared_v4_b32(from + i * 512);
                sum += a ^ b ^ c ^ d;
            }
            from = from + stride;
        }
        // The store waits for the sums, so the clock is read after them.
        st_shared_b32(dynamic_shared_address() + EACH * 512 + thread::thread_idx_x() * 4, sum);
        thread::sync_threads();
        let cycles = clock64() - start;
        if thread::thread_idx_x() == 0 {
            write(out, 0, cycles);
            write(out, 1, sum.into());
        }
    }
}

/// Waits at the CTA's barrier `times` times. Result: cycles.
///
/// # Safety
/// `out` has room for one number.
#[kernel(threads = 1024)]
pub unsafe fn barriers(times: u32, out: u64) {
    let start = clock64();
    for _ in 0..times {
        thread::sync_threads();
    }
    let cycles = clock64() - start;
    if thread::thread_idx_x() == 0 {
        // SAFETY: `out` has room for the number, and one thread writes it.
        unsafe { write(out, 0, cycles) };
    }
}

/// All threads read the memory at `from` `times` times, in pieces of 16 bytes, with eight in flight per thread.
/// `pieces` is a multiple of eight times the number of threads.
///
/// # Safety
/// `from` has `pieces` pieces. `out` has room for one number.
#[kernel(threads = 256)]
pub unsafe fn read(from: u64, pieces: u64, times: u32, out: u64) {
    const AHEAD: u64 = 8;
    let step = u64::from(thread::grid_dim_x() * thread::block_dim_x());
    let mut sum = 0;
    for _ in 0..times {
        let mut at = u64::from(thread::index_1d());
        while at < pieces {
            let mut values = [[0; 4]; AHEAD as usize];
            for (i, value) in values.iter_mut().enumerate() {
                // SAFETY: the piece is in the memory, because `pieces` is a multiple of the pieces per round.
                *value = unsafe { ld_global_cg_v4_b32(GlobalAddress::new(from + (at + i as u64 * step) * 16)) };
            }
            sum ^= values.iter().fold(0, |sum, [a, b, c, d]| sum ^ a ^ b ^ c ^ d);
            at += AHEAD * step;
        }
    }
    // A use for the loads, so that they are not removed. The memory's contents do not give this sum.
    if sum == 0x1234_5678 {
        // SAFETY: `out` has room for the number. Any thread may write it.
        unsafe { st_global_b32(GlobalAddress::new(out), sum) };
    }
}

/// Multiplies ones, which adds 16.
///
/// # Safety
/// All lanes of a warp call it together.
#[inline(always)]
unsafe fn multiply(sums: &mut Sums) {
    // SAFETY: the caller guarantees that all lanes of the warp call it together.
    unsafe { mma_m16n8k16::<F16>(sums, [0x3c00_3c00; 4], [0x3c00_3c00; 2]) }
}

/// Every warp computes products `m16n8k16` of ones in one chain, 16 per iteration. Results: cycles; a sum.
///
/// # Safety
/// `out` has room for two numbers. The block has four bytes of dynamic shared memory per thread.
#[kernel(threads = 256)]
pub unsafe fn mma_1_chain(turns: u32, out: u64) {
    // SAFETY: the caller guarantees `out` and the shared memory. All threads run the same code, so warps stay
    // converged.
    unsafe { chains::<1>(turns, out, |sums| multiply(sums)) }
}

/// Like [`mma_1_chain`], with four chains in turn.
///
/// # Safety
/// The requirements of [`mma_1_chain`].
#[kernel(threads = 256)]
pub unsafe fn mma_4_chains(turns: u32, out: u64) {
    // SAFETY: the caller guarantees `out` and the shared memory. All threads run the same code, so warps stay
    // converged.
    unsafe { chains::<4>(turns, out, |sums| multiply(sums)) }
}
