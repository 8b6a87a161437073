//! What every card has: launches, loads, barriers, and `mma.sync` of 16-bit numbers.

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
/// None is needed.
#[kernel]
pub unsafe fn empty() {}

/// Takes so many cycles.
///
/// # Safety
/// None is needed.
#[kernel(threads = 128)]
pub unsafe fn spin(cycles: u64) {
    let start = clock64();
    while clock64() - start < cycles {}
}

/// As [`spin`]. For each block: the multiprocessor, and its clock at the begin. Nothing is written at the end, for which it would wait.
///
/// # Safety
/// `out` has two numbers for each block.
#[kernel(threads = 128)]
pub unsafe fn spin_from(cycles: u64, out: u64) {
    let start = clock64();
    if thread::thread_idx_x() == 0 {
        let first = thread::block_idx_x() * 2;
        // SAFETY: this block's numbers, written by one thread.
        unsafe {
            write(out, first, multiprocessor().into());
            write(out, first + 1, start);
        }
    }
    while clock64() - start < cycles {}
}

/// Writes two chains of addresses: the first 8 bytes of each line of 128 name those of the line that lies `near` lines further on, the next
/// 8 those of the line that lies `far` lines further on; behind the last line comes the first.
///
/// # Safety
/// `memory` has so many lines.
#[kernel(threads = 256)]
pub unsafe fn write_chains(memory: u64, lines: u64, near: u64, far: u64) {
    let mut line = u64::from(thread::index_1d());
    while line < lines {
        let (at, of) = (GlobalAddress::new(memory + line * 128), |step: u64| memory + (line + step) % lines * 128);
        // SAFETY: a line, each written by one thread.
        unsafe {
            st_global_b64(at, of(near));
            st_global_b64(at + 8, of(far) + 8);
        }
        line += u64::from(thread::block_dim_x() * thread::grid_dim_x());
    }
}

/// Follows a chain of loads past L1 for so many steps. Cycles; where it came to.
///
/// # Safety
/// `from` is where a chain begins that [`write_chains`] has written. `out` has two numbers.
#[kernel(threads = 32)]
pub unsafe fn chase_l2(from: u64, steps: u32, out: u64) {
    // SAFETY: each link is in the chain.
    unsafe { chase(from, steps, out, |at| ld_relaxed_gpu_global_b64(at)) };
}

/// The same of loads that L1 keeps.
///
/// # Safety
/// As there.
#[kernel(threads = 32)]
pub unsafe fn chase_l1(from: u64, steps: u32, out: u64) {
    // SAFETY: each link is in the chain.
    unsafe {
        let mut at = from;
        for _ in 0..steps {
            at = ld_global_b64(GlobalAddress::new(at));
        }
        // All lines are in L1 before the clock is read, since the number depends on the last.
        write(out, 1, at);
        chase(from, steps, out, |at| ld_global_b64(at));
    }
}

/// # Safety
/// `load` loads a link of the chain that begins at `from`. `out` has two numbers.
#[inline(always)]
unsafe fn chase(from: u64, steps: u32, out: u64, load: impl Fn(GlobalAddress) -> u64) {
    let mut at = from;
    let start = clock64();
    for _ in 0..steps {
        at = load(GlobalAddress::new(at));
    }
    let cycles = clock64() - start;
    if thread::thread_idx_x() == 0 {
        // SAFETY: as above.
        unsafe {
            write(out, 0, cycles);
            write(out, 1, at);
        }
    }
}

/// Follows a chain of 64 words in shared memory, each of which has the address of the seventh further on. Cycles; where it came to, in bytes
/// from the first.
///
/// # Safety
/// `out` has two numbers. 256 bytes of dynamic shared memory.
#[kernel(threads = 32)]
pub unsafe fn chase_shared(steps: u32, out: u64) {
    const WORDS: u32 = 64;
    let first = dynamic_shared_address();
    // SAFETY: words of the block's shared memory; one thread writes and reads them.
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

/// Loads 16 bytes a thread from shared memory, eight times a turn, every warp the same, each turn so many bytes further on. Cycles; the sum
/// of what the first thread loaded.
///
/// # Safety
/// `out` has two numbers. 8 KB of dynamic shared memory. `stride` is 0: ptxas does not know it, and leaves no load out.
#[kernel(threads = 1024)]
pub unsafe fn read_shared(times: u32, stride: u32, out: u64) {
    const EACH: u32 = 8;
    let first = dynamic_shared_address() + thread::thread_idx_x() % 32 * 16;
    // SAFETY: one warp writes words before the block's barrier, all read them behind it.
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
        // The clock is read when the sums are there.
        st_shared_b32(dynamic_shared_address() + EACH * 512 + thread::thread_idx_x() * 4, sum);
        thread::sync_threads();
        let cycles = clock64() - start;
        if thread::thread_idx_x() == 0 {
            write(out, 0, cycles);
            write(out, 1, sum.into());
        }
    }
}

/// Waits at the block's barrier, again and again. Cycles.
///
/// # Safety
/// `out` has a number.
#[kernel(threads = 1024)]
pub unsafe fn barriers(times: u32, out: u64) {
    let start = clock64();
    for _ in 0..times {
        thread::sync_threads();
    }
    let cycles = clock64() - start;
    if thread::thread_idx_x() == 0 {
        // SAFETY: one thread writes it.
        unsafe { write(out, 0, cycles) };
    }
}

/// All threads read what lies at `from`, so many times, in pieces of 16 bytes, eight on their way a thread; `pieces` is a multiple of eight
/// times the threads.
///
/// # Safety
/// So many pieces lie there. `out` has a number.
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
                // SAFETY: a piece, since there is a multiple of so many.
                *value = unsafe { ld_global_cg_v4_b32(GlobalAddress::new(from + (at + i as u64 * step) * 16)) };
            }
            sum ^= values.iter().fold(0, |sum, [a, b, c, d]| sum ^ a ^ b ^ c ^ d);
            at += AHEAD * step;
        }
    }
    // So that loads have a use. What is there does not add up to this.
    if sum == 0x1234_5678 {
        // SAFETY: as above; which thread writes it says nothing.
        unsafe { st_global_b32(GlobalAddress::new(out), sum) };
    }
}

/// Adds 16 ones.
///
/// # Safety
/// All lanes of a warp call it.
#[inline(always)]
unsafe fn multiply(sums: &mut Sums) {
    // SAFETY: what `# Safety` above asks.
    unsafe { mma_m16n8k16::<F16>(sums, [0x3c00_3c00; 4], [0x3c00_3c00; 2]) }
}

/// Products `m16n8k16` of ones by each warp in one chain, 16 a turn. Cycles; a sum.
///
/// # Safety
/// `out` has two numbers. Four bytes of dynamic shared memory a thread.
#[kernel(threads = 256)]
pub unsafe fn mma_1_chain(turns: u32, out: u64) {
    // SAFETY: what `# Safety` above asks; warps stay together.
    unsafe { chains::<1>(turns, out, |sums| multiply(sums)) }
}

/// As [`mma_1_chain`], four chains that take turns.
///
/// # Safety
/// As there.
#[kernel(threads = 256)]
pub unsafe fn mma_4_chains(turns: u32, out: u64) {
    // SAFETY: what `# Safety` above asks; warps stay together.
    unsafe { chains::<4>(turns, out, |sums| multiply(sums)) }
}
