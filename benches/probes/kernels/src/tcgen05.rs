//! Probes of the tensor core of B200 and B300, and of its tensor memory.

use cuda_std::{
    clock::clock64,
    cluster::{cluster_rank, sync_cluster},
    fence::fence_mbarrier_init,
    kernel,
    mbarrier::{Mbarrier, mbarrier_init, mbarrier_wait_parity},
    shared::{SharedAddress, dynamic_shared_address, ld_shared_b32},
    tcgen05::{
        InstructionDescriptor, MatrixDescriptor, MatrixSwizzle, TMEM_COLUMNS, TmemAddress, tcgen05_alloc,
        tcgen05_commit, tcgen05_cp_32x128b_warpx4, tcgen05_dealloc, tcgen05_fence_after_thread_sync,
        tcgen05_fence_before_thread_sync, tcgen05_ld_16x256b_x8, tcgen05_ld_32x32b_x8, tcgen05_ld_32x32b_x16,
        tcgen05_ld_32x32b_x32, tcgen05_ld_32x32b_x64, tcgen05_mma_mxf4nvf4_block16, tcgen05_relinquish_alloc_permit,
        tcgen05_st_16x256b_x8, tcgen05_st_32x32b_x16, tcgen05_st_32x32b_x32, tcgen05_st_32x32b_x64,
    },
    thread,
    warp::{ALL_LANES, sync_warp},
};

use crate::{fill, write};

/// Number of 128-byte rows of a CTA's A, and maximum number for B, in the layout of the 128-byte swizzle.
const A_ROWS: u32 = 128;
const B_ROWS: u32 = 256;
const ROW: u32 = 128;

/// Bytes of the scales of 128 rows.
const SCALE_TILE: u32 = 512;

// Offsets in shared memory.
const B: u32 = A_ROWS * ROW;
const A_SCALES: u32 = B + B_ROWS * ROW;
const B_SCALES: u32 = A_SCALES + SCALE_TILE;
const BARRIER: u32 = B_SCALES + 2 * SCALE_TILE;
const ALLOCATED: u32 = BARRIER + 8;

// Columns of tensor memory: sums from column 0 on, then scales, then spare columns for copies that nothing reads.
const A_SCALE_COLUMN: u32 = 256;
const B_SCALE_COLUMN: u32 = A_SCALE_COLUMN + 4;
const SPARE_COLUMN: u32 = B_SCALE_COLUMN + 8;

/// Number of unrolled MMAs, each with a different part of the rows.
const UNROLLED: u32 = 4;

/// Allocates all of a CTA's tensor memory.
///
/// # Safety
/// All threads of all CTAs of the cluster call it, and later [`end`].
#[inline(always)]
unsafe fn begin<const GROUP: u32>() -> TmemAddress {
    let shared = dynamic_shared_address();
    // SAFETY: one warp allocates. The CTA's barrier orders the other warps' reads of the address after the allocation.
    unsafe {
        if thread::thread_idx_x() < 32 {
            tcgen05_alloc::<GROUP>(shared + ALLOCATED, TMEM_COLUMNS);
            tcgen05_relinquish_alloc_permit::<GROUP>();
        }
        tcgen05_fence_before_thread_sync();
        meet::<GROUP>();
        tcgen05_fence_after_thread_sync();
        TmemAddress::new(ld_shared_b32(shared + ALLOCATED))
    }
}

/// Frees the tensor memory.
///
/// # Safety
/// The requirements of [`begin`]. All operations on tensor memory are complete.
#[inline(always)]
unsafe fn end<const GROUP: u32>(tmem: TmemAddress) {
    // SAFETY: the allocating warp frees the memory after a barrier of all warps.
    unsafe {
        tcgen05_fence_before_thread_sync();
        meet::<GROUP>();
        tcgen05_fence_after_thread_sync();
        if thread::thread_idx_x() < 32 {
            tcgen05_dealloc::<GROUP>(tmem, TMEM_COLUMNS);
        }
    }
}

/// Synchronizes all threads of the CTA, or of both CTAs of a pair.
///
/// # Safety
/// All of these threads call it.
#[inline(always)]
unsafe fn meet<const GROUP: u32>() {
    if GROUP > 1 {
        // SAFETY: the caller guarantees that all threads of the cluster call it.
        unsafe { sync_cluster() };
    } else {
        thread::sync_threads();
    }
}

/// Returns the descriptor of a scale tile in shared memory: 32 rows of 16 bytes.
#[inline(always)]
fn scales(at: SharedAddress) -> MatrixDescriptor {
    MatrixDescriptor::new(at, 8 * 16, MatrixSwizzle::None)
}

/// Commits and waits until everything is complete. `parity` is the parity of the barrier's phase.
///
/// # Safety
/// The issuing thread calls it, and the barrier is initialized for one arrival.
#[inline(always)]
unsafe fn complete<const GROUP: u32>(barrier: Mbarrier, parity: &mut u32) {
    // SAFETY: the caller guarantees the thread and the barrier.
    unsafe {
        tcgen05_commit::<GROUP>(barrier);
        mbarrier_wait_parity(barrier, *parity);
    }
    *parity ^= 1;
}

/// Body of [`mma`] and its variants.
///
/// # Safety
/// The requirements of [`mma`].
#[inline(always)]
unsafe fn multiply<const GROUP: u32, const COPIES: u32>(n: u32, count: u32, alone: u32, out: u64) {
    let shared = dynamic_shared_address();
    let barrier = Mbarrier::at(shared + BARRIER);
    // SAFETY: matrices and scales are written before the barrier in `begin`. One thread issues everything, and waits
    // for it before any thread reads sums.
    unsafe {
        // A of ones with scales of one, B of three halves with scales of two: an MMA adds 64 · 3.
        fill(shared, B, 0x2222_2222);
        fill(shared + B, B_ROWS * ROW, 0x3333_3333);
        fill(shared + A_SCALES, SCALE_TILE, 0x3838_3838);
        fill(shared + B_SCALES, 2 * SCALE_TILE, 0x4040_4040);
        if thread::thread_idx_x() == 0 {
            mbarrier_init(barrier, 1);
            fence_mbarrier_init();
        }
        let tmem = begin::<GROUP>();
        let mut cycles = 0;
        if thread::thread_idx_x() == 0 && (GROUP == 1 || cluster_rank() == 0) {
            let matrix = |at: u32| MatrixDescriptor::new(shared + at, 8 * ROW, MatrixSwizzle::B128);
            let (a, b) = (matrix(0), matrix(B));
            let descriptor = InstructionDescriptor::mxf4nvf4(A_ROWS * GROUP, n);
            let spare = scales(shared + A_SCALES);
            let one = |k: u32, accumulate: bool| {
                for copy in 0..COPIES {
                    tcgen05_cp_32x128b_warpx4::<GROUP>(tmem.column(SPARE_COLUMN + 4 * copy), spare);
                }
                tcgen05_mma_mxf4nvf4_block16::<GROUP>(
                    tmem,
                    a.at(k * 32),
                    b.at(k * 32),
                    descriptor,
                    tmem.column(A_SCALE_COLUMN),
                    tmem.column(B_SCALE_COLUMN),
                    accumulate,
                );
            };
            let mut parity = 0;
            tcgen05_cp_32x128b_warpx4::<GROUP>(tmem.column(A_SCALE_COLUMN), scales(shared + A_SCALES));
            for tile in 0..2 {
                let from = scales(shared + B_SCALES + tile * SCALE_TILE);
                tcgen05_cp_32x128b_warpx4::<GROUP>(tmem.column(B_SCALE_COLUMN + 4 * tile), from);
            }
            one(0, false);
            complete::<GROUP>(barrier, &mut parity);
            let start = clock64();
            if alone != 0 {
                for _ in 0..count {
                    one(0, true);
                    complete::<GROUP>(barrier, &mut parity);
                }
            } else {
                for _ in 0..count / UNROLLED {
                    for k in 0..UNROLLED {
                        one(k, true);
                    }
                }
                complete::<GROUP>(barrier, &mut parity);
            }
            cycles = clock64() - start;
        }
        meet::<GROUP>();
        tcgen05_fence_after_thread_sync();
        if thread::thread_idx_x() < 32 {
            let first = f32::from_bits(tcgen05_ld_32x32b_x8(tmem)[0]);
            let last = f32::from_bits(tcgen05_ld_32x32b_x8(tmem.column(n - 8))[7]);
            if thread::thread_idx_x() == 0 && (GROUP == 1 || cluster_rank() == 0) {
                write(out, 0, cycles);
                write(out, 1, first as u64);
                write(out, 2, last as u64);
            }
        }
        end::<GROUP>(tmem);
    }
}

/// Runs MMAs of 128 rows, `n` columns and 64 elements of K: `count`, a multiple of four, with one commit, or each
/// `alone` with a commit that is waited for. Results: cycles; the first and the last sum of a row. One earlier MMA also
/// adds to the sums.
///
/// # Safety
/// The CTA has 128 threads and 52 KB of shared memory. `out` has room for three numbers.
#[kernel(threads = 128)]
pub unsafe fn mma(n: u32, count: u32, alone: u32, out: u64) {
    // SAFETY: the caller guarantees the CTA, its shared memory and `out`.
    unsafe { multiply::<1, 0>(n, count, alone, out) }
}

/// Like [`mma`], with two copies of unused scales before each MMA.
///
/// # Safety
/// The requirements of [`mma`].
#[kernel(threads = 128)]
pub unsafe fn mma_between_copies(n: u32, count: u32, alone: u32, out: u64) {
    // SAFETY: the caller guarantees the CTA, its shared memory and `out`.
    unsafe { multiply::<1, 2>(n, count, alone, out) }
}

/// Like [`mma`], by a pair of CTAs, with 256 rows.
///
/// # Safety
/// The requirements of [`mma`], in clusters of two.
#[kernel(threads = 128, cluster = 2)]
pub unsafe fn mma_pair(n: u32, count: u32, alone: u32, out: u64) {
    // SAFETY: the caller guarantees the CTAs, their shared memory and `out`.
    unsafe { multiply::<2, 0>(n, count, alone, out) }
}

/// Like [`mma_between_copies`], by a pair of CTAs.
///
/// # Safety
/// The requirements of [`mma`], in clusters of two.
#[kernel(threads = 128, cluster = 2)]
pub unsafe fn mma_pair_between_copies(n: u32, count: u32, alone: u32, out: u64) {
    // SAFETY: the caller guarantees the CTAs, their shared memory and `out`.
    unsafe { multiply::<2, 2>(n, count, alone, out) }
}

/// Copies a scale tile to tensor memory `count` times, a multiple of four, with one commit. Results: cycles; a word of
/// the tile.
///
/// # Safety
/// The requirements of [`mma`]. `out` has room for two numbers.
#[kernel(threads = 128)]
pub unsafe fn cp(count: u32, out: u64) {
    let shared = dynamic_shared_address();
    let barrier = Mbarrier::at(shared + BARRIER);
    // SAFETY: the scales are written before the barrier in `begin`. One thread issues everything, and waits for it
    // before any thread reads.
    unsafe {
        fill(shared + A_SCALES, SCALE_TILE, 0x3838_3838);
        if thread::thread_idx_x() == 0 {
            mbarrier_init(barrier, 1);
            fence_mbarrier_init();
        }
        let tmem = begin::<1>();
        let mut cycles = 0;
        if thread::thread_idx_x() == 0 {
            let start = clock64();
            for _ in 0..count / UNROLLED {
                for copy in 0..UNROLLED {
                    tcgen05_cp_32x128b_warpx4::<1>(tmem.column(SPARE_COLUMN + 4 * copy), scales(shared + A_SCALES));
                }
            }
            complete::<1>(barrier, &mut 0);
            cycles = clock64() - start;
        }
        meet::<1>();
        tcgen05_fence_after_thread_sync();
        if thread::thread_idx_x() < 32 {
            let word = tcgen05_ld_32x32b_x8(tmem.column(SPARE_COLUMN))[0];
            if thread::thread_idx_x() == 0 {
                write(out, 0, cycles);
                write(out, 1, word.into());
            }
        }
        end::<1>(tmem);
    }
}

macro_rules! accesses {
    ($($load:ident, $store:ident, $count:literal: $ld:ident, $st:ident;)*) => {$(
        /// Each warp loads registers from tensor memory and waits for them, `times` times. Results: cycles; the sum
        /// over all loads of the first and the last register, which are ones.
        ///
        /// # Safety
        /// The requirements of [`mma`]. `out` has room for two numbers.
        #[kernel(threads = 128)]
        pub unsafe fn $load(times: u32, out: u64) {
            // SAFETY: each warp reads only its own lanes, which it has written.
            unsafe {
                let tmem = begin::<1>();
                let lanes = tmem.lane(thread::thread_idx_x() / 32 * 32);
                $st(lanes, [1; $count]);
                let mut sum = 0;
                let start = clock64();
                for _ in 0..times {
                    let values = $ld(lanes);
                    sum += values[0] + values[$count - 1];
                }
                let cycles = clock64() - start;
                if thread::thread_idx_x() == 0 {
                    write(out, 0, cycles);
                    write(out, 1, sum.into());
                }
                end::<1>(tmem);
            }
        }

        /// Like the load, with stores.
        ///
        /// # Safety
        /// The requirements of the load.
        #[kernel(threads = 128)]
        pub unsafe fn $store(times: u32, out: u64) {
            // SAFETY: each warp accesses only its own lanes.
            unsafe {
                let tmem = begin::<1>();
                let lanes = tmem.lane(thread::thread_idx_x() / 32 * 32);
                let start = clock64();
                for n in 0..times {
                    $st(lanes, [n + 1; $count]);
                }
                let cycles = clock64() - start;
                let values = $ld(lanes);
                let sum = values[0] + values[$count - 1];
                if thread::thread_idx_x() == 0 {
                    write(out, 0, cycles);
                    write(out, 1, sum.into());
                }
                end::<1>(tmem);
            }
        }
    )*};
}

accesses! {
    ld_32x32b_x16, st_32x32b_x16, 16: tcgen05_ld_32x32b_x16, tcgen05_st_32x32b_x16;
    ld_32x32b_x32, st_32x32b_x32, 32: tcgen05_ld_32x32b_x32, tcgen05_st_32x32b_x32;
    ld_32x32b_x64, st_32x32b_x64, 64: tcgen05_ld_32x32b_x64, tcgen05_st_32x32b_x64;
    ld_16x256b_x8, st_16x256b_x8, 32: tcgen05_ld_16x256b_x8, tcgen05_st_16x256b_x8;
}

/// A warp allocates 32 columns and frees them, `times` times. Result: cycles.
///
/// # Safety
/// The requirements of [`mma`]. `out` has room for one number.
#[kernel(threads = 32)]
pub unsafe fn alloc(times: u32, out: u64) {
    let shared = dynamic_shared_address();
    // SAFETY: one warp allocates columns and frees the same columns.
    unsafe {
        let start = clock64();
        for _ in 0..times {
            tcgen05_alloc::<1>(shared + ALLOCATED, 32);
            sync_warp(ALL_LANES);
            tcgen05_dealloc::<1>(TmemAddress::new(ld_shared_b32(shared + ALLOCATED)), 32);
            sync_warp(ALL_LANES);
        }
        let cycles = clock64() - start;
        tcgen05_relinquish_alloc_permit::<1>();
        if thread::thread_idx_x() == 0 {
            write(out, 0, cycles);
        }
    }
}
