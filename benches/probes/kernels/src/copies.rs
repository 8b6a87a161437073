//! Probes of features since sm_90: overlapping grids, clusters, barriers in shared memory, bulk and tensor copies.

use cuda_std::{
    clock::{clock64, multiprocessor},
    cluster::{arrive_cluster, arrive_cluster_relaxed, cluster_rank, mapa, sync_cluster, wait_cluster},
    fence::{fence_mbarrier_init, fence_proxy_async_shared},
    global::GlobalAddress,
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    kernel,
    mbarrier::{
        MBARRIER_BYTES, Mbarrier, mbarrier_arrive, mbarrier_arrive_cluster, mbarrier_arrive_expect_tx, mbarrier_init,
        mbarrier_wait_parity, mbarrier_wait_parity_cluster, st_async_shared_cluster_b32,
    },
    shared::{SharedAddress, dynamic_shared_address, ld_shared_v2_b32},
    tensor_map_of_parameter, thread,
    tma::{TensorMapAddress, cp_async_bulk_shared_global, cp_async_bulk_tensor_2d_shared_global},
    warp::{ALL_LANES, lane_id, sync_warp},
};

use crate::write;

/// If `triggers`, lets the dependents start. If `waits`, waits for the previous grid. Then spins for `cycles` cycles.
///
/// # Safety
/// No requirements.
#[kernel(threads = 128)]
pub unsafe fn link(triggers: u32, waits: u32, cycles: u64) {
    if triggers != 0 {
        griddepcontrol_launch_dependents();
    }
    if waits != 0 {
        griddepcontrol_wait();
    }
    let start = clock64();
    while clock64() - start < cycles {}
}

/// Offset of the first stage in shared memory, after the barriers.
const FIRST_STAGE: u32 = 1024;

/// Runs a CTA's copies with `stages` in flight: one thread's part of [`copies`] and [`tensor_copies`]. Returns cycles.
///
/// # Safety
/// `issue(stage, barrier)` starts the next copy of `bytes` bytes to a stage. The CTA has shared memory for all stages.
#[inline(always)]
unsafe fn stream(bytes: u32, stages: u32, times: u32, mut issue: impl FnMut(SharedAddress, Mbarrier)) -> u64 {
    let shared = dynamic_shared_address();
    let barrier = |stage: u32| Mbarrier::at(shared + stage * MBARRIER_BYTES);
    // SAFETY: one thread initializes the CTA's barriers and waits for them. A stage is overwritten only after its last
    // copy is complete.
    unsafe {
        for stage in 0..stages {
            mbarrier_init(barrier(stage), 1);
        }
        fence_mbarrier_init();
        fence_proxy_async_shared();
        let mut start = |stage: u32| {
            mbarrier_arrive_expect_tx(barrier(stage), bytes);
            issue(shared + FIRST_STAGE + stage * bytes, barrier(stage));
        };
        let begin = clock64();
        let mut n = 0;
        while n < stages && n < times {
            start(n);
            n += 1;
        }
        let (mut done, mut stage, mut parity) = (0, 0, 0);
        while done < times {
            mbarrier_wait_parity(barrier(stage), parity);
            if n < times {
                start(stage);
                n += 1;
            }
            done += 1;
            stage += 1;
            if stage == stages {
                (stage, parity) = (0, parity ^ 1);
            }
        }
        clock64() - begin
    }
}

/// Returns the first 8 bytes of the stage that received copy `n`.
///
/// # Safety
/// The copy is complete, and no later copy was issued to its stage.
#[inline(always)]
unsafe fn copied(n: u32, bytes: u32, stages: u32) -> u64 {
    // SAFETY: the caller guarantees that the copy is complete and that nothing writes its stage.
    let [low, high] = unsafe { ld_shared_v2_b32(dynamic_shared_address() + FIRST_STAGE + n % stages * bytes) };
    u64::from(high) << 32 | u64::from(low)
}

/// One thread of each CTA makes bulk copies of `bytes` bytes, with `stages` in flight. All CTAs go through the same
/// `wrap` bytes, a multiple of `bytes`, each from its own start. With `sharers` > 0, each group of `sharers`
/// neighboring SMs goes through its own `wrap` bytes again and again. Results per CTA: cycles; the source of its last
/// copy; the first 8 bytes of that copy.
///
/// # Safety
/// `from` has `wrap` bytes for each group of sharers. `out` has room for three numbers per CTA. Shared memory: 1024
/// bytes and `stages` stages.
#[kernel(threads = 32)]
pub unsafe fn copies(from: u64, bytes: u32, stages: u32, times: u32, wrap: u64, sharers: u32, out: u64) {
    if thread::thread_idx_x() > 0 {
        return;
    }
    let (first, from) = match multiprocessor().checked_div(sharers) {
        Some(group) => (0, from + u64::from(group) * wrap),
        None => (u64::from(thread::block_idx_x()) * u64::from(times) * u64::from(bytes), from),
    };
    let source = |n: u32| from + (first + u64::from(n) * u64::from(bytes)) % wrap;
    let (mut at, end) = (source(0), from + wrap);
    // SAFETY: the caller guarantees the memory at `from`, `out` and the shared memory.
    unsafe {
        let cycles = stream(bytes, stages, times, |stage, barrier| {
            cp_async_bulk_shared_global(stage, GlobalAddress::new(at), bytes, barrier);
            // Compared, because a division would take longer than a copy.
            at += u64::from(bytes);
            if at == end {
                at = from;
            }
        });
        let results = thread::block_idx_x() * 3;
        write(out, results, cycles);
        write(out, results + 1, source(times - 1));
        write(out, results + 2, copied(times - 1, bytes, stages));
    }
}

/// Parameter of [`tensor_copies`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tensor {
    /// Tensor map of rows of 128 bytes.
    pub map: [u64; 16],
    /// Address of the results.
    pub out: u64,
    /// Rows per box.
    pub rows: u32,
    /// Number of boxes in flight.
    pub stages: u32,
    /// Number of boxes per CTA.
    pub times: u32,
    /// Number of rows that the CTAs go through.
    pub wrap: u32,
}

/// Like [`copies`], with boxes of a tensor. Results per CTA: cycles; the first row of its last box; the first 8 bytes
/// of that box.
///
/// # Safety
/// The requirements of [`copies`].
#[kernel(threads = 32)]
pub unsafe fn tensor_copies(tensor: Tensor) {
    const ROW: u32 = 128;
    if thread::thread_idx_x() > 0 {
        return;
    }
    let Tensor { out, rows, stages, times, wrap, .. } = tensor;
    let map: TensorMapAddress = tensor_map_of_parameter!(tensor_copies);
    let first = thread::block_idx_x() * times;
    let row = |n: u32| (first + n) * rows % wrap;
    let mut at = row(0);
    // SAFETY: the caller guarantees the tensor, `out` and the shared memory.
    unsafe {
        let cycles = stream(rows * ROW, stages, times, |stage, barrier| {
            cp_async_bulk_tensor_2d_shared_global(stage, map, [0, at as i32], barrier);
            at += rows;
            if at == wrap {
                at = 0;
            }
        });
        let results = thread::block_idx_x() * 3;
        write(out, results, cycles);
        write(out, results + 1, row(times - 1).into());
        write(out, results + 2, copied(times - 1, rows * ROW, stages));
    }
}

/// Two warps wait in turn for each other's arrival at a barrier in shared memory. Result: cycles of all rounds, with
/// two arrivals each.
///
/// # Safety
/// `out` has room for one number. The block has 16 bytes of dynamic shared memory.
#[kernel(threads = 64)]
pub unsafe fn ping_pong(times: u32, out: u64) {
    let mine = thread::thread_idx_x() / 32;
    let barrier = |of: u32| Mbarrier::at(dynamic_shared_address() + of * MBARRIER_BYTES);
    // SAFETY: one thread initializes the barriers, and one thread of each warp arrives at the other warp's barrier.
    unsafe {
        if thread::thread_idx_x() == 0 {
            mbarrier_init(barrier(0), 1);
            mbarrier_init(barrier(1), 1);
        }
        thread::sync_threads();
        if lane_id() > 0 {
            return;
        }
        let start = clock64();
        for n in 0..times {
            if mine == 0 {
                mbarrier_arrive(barrier(1));
            }
            mbarrier_wait_parity(barrier(mine), n & 1);
            if mine == 1 {
                mbarrier_arrive(barrier(0));
            }
        }
        let cycles = clock64() - start;
        if mine == 0 {
            write(out, 0, cycles);
        }
    }
}

/// Like [`ping_pong`], with two CTAs of a cluster.
///
/// # Safety
/// The requirements of [`ping_pong`], in clusters of two CTAs. `send` completes a phase of another CTA's barrier.
/// `wait` waits for the phase of a parity of the CTA's own barrier.
#[inline(always)]
unsafe fn ping_pong_in_cluster(times: u32, out: u64, send: impl Fn(u32), wait: impl Fn(Mbarrier, u32)) {
    let mine = cluster_rank();
    let barrier = Mbarrier::at(dynamic_shared_address());
    // SAFETY: each barrier is initialized before another CTA completes a phase of it, and no CTA ends before the other.
    unsafe {
        if thread::thread_idx_x() == 0 {
            mbarrier_init(barrier, 1);
            fence_mbarrier_init();
        }
        sync_cluster();
        if thread::thread_idx_x() == 0 {
            let start = clock64();
            for n in 0..times {
                if mine == 0 {
                    send(1 - mine);
                }
                wait(barrier, n & 1);
                if mine == 1 {
                    send(1 - mine);
                }
            }
            let cycles = clock64() - start;
            if mine == 0 {
                write(out, 0, cycles);
            }
        }
        // The other lanes wait here: the fence of the cluster's barrier would delay the measured rounds.
        sync_warp(ALL_LANES);
        sync_cluster();
    }
}

/// Two CTAs of a cluster wait in turn for each other's word, which is stored asynchronously and completes a phase.
/// Result: cycles of all rounds, with two words each.
///
/// # Safety
/// `out` has room for one number; clusters of two. The block has 16 bytes of dynamic shared memory.
#[kernel(threads = 32, cluster = 2)]
pub unsafe fn cluster_stores(times: u32, out: u64) {
    let (barrier, word) = (Mbarrier::at(dynamic_shared_address()), dynamic_shared_address() + MBARRIER_BYTES);
    // SAFETY: the caller guarantees `out` and the cluster. A phase has one arrival, by the waiting thread, and one
    // word, which may come first.
    unsafe {
        ping_pong_in_cluster(
            times,
            out,
            |rank| st_async_shared_cluster_b32(mapa(word, rank), 1, barrier.in_block(rank)),
            |barrier, parity| {
                mbarrier_arrive_expect_tx(barrier, 4);
                mbarrier_wait_parity(barrier, parity);
            },
        );
    }
}

/// Like [`cluster_stores`], with arrivals that release earlier writes, and waits that acquire them.
///
/// # Safety
/// The requirements of [`cluster_stores`].
#[kernel(threads = 32, cluster = 2)]
pub unsafe fn cluster_arrivals(times: u32, out: u64) {
    let barrier = Mbarrier::at(dynamic_shared_address());
    // SAFETY: the caller guarantees `out`, the cluster and the shared memory.
    unsafe {
        ping_pong_in_cluster(
            times,
            out,
            |rank| mbarrier_arrive_cluster(barrier.in_block(rank)),
            |barrier, parity| mbarrier_wait_parity_cluster(barrier, parity),
        );
    }
}

/// One warp of each of two CTAs of a cluster waits at the cluster's barrier `times` times. If `releases`, arrivals
/// release earlier writes. Result: cycles.
///
/// # Safety
/// `out` has room for one number; clusters of two.
#[kernel(threads = 32, cluster = 2)]
pub unsafe fn cluster_barriers(times: u32, releases: u32, out: u64) {
    // SAFETY: all threads of the cluster run the same number of rounds.
    unsafe {
        sync_cluster();
        let start = clock64();
        for _ in 0..times {
            if releases != 0 {
                arrive_cluster();
            } else {
                arrive_cluster_relaxed();
            }
            wait_cluster();
        }
        let cycles = clock64() - start;
        if thread::thread_idx_x() == 0 && cluster_rank() == 0 {
            write(out, 0, cycles);
        }
    }
}
