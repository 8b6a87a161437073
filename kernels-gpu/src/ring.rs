//! The ring of buffers that producers and consumers of a pipeline hand to each other, with its mbarriers.

use cuda_std::{
    mbarrier::{
        MBARRIER_BYTES, Mbarrier, mbarrier_arrive, mbarrier_arrive_cluster, mbarrier_arrive_cluster_relaxed,
        mbarrier_init, mbarrier_wait_parity, mbarrier_wait_parity_cluster,
    },
    shared::SharedAddress,
    warp::{ALL_LANES, WARP_SIZE, warp_shuffle_idx},
};

/// Buffers used in turn. Each has two mbarriers: `full` completes a phase when producers have filled the buffer,
/// `empty` when consumers have read it.
///
/// Each role has its own copy of the ring and advances it alone. A producer waits for `empty`, a consumer for `full`.
/// All buffers start empty. `BLOCKS` is 2 where the two CTAs of a pair wait for each other.
///
/// # Arrivals at the other CTA
/// They are relaxed, because they report only copies that this thread has seen complete, and reads of tensor memory
/// that `tcgen05.wait::ld` has completed. The thread has written nothing that a release would publish. A release at the
/// scope of the cluster is a `MEMBAR.ALL.GPU` in machine code, and an acquire a `CCTL.IVALL`. The manual says that only
/// a release passes on that a copy is complete (PTX ISA, "Memory Consistency Model"). DeepGEMM's
/// `sm100_fp8_fp4_gemm_1d1d.cuh` reports both without a release. With [`Ring::releasing`], arrivals release as the manual
/// says.
#[derive(Clone, Copy)]
pub struct Ring<const BLOCKS: u32 = 1> {
    /// First mbarrier: `count` full barriers, then `count` empty barriers.
    barriers: Mbarrier,
    /// Number of buffers.
    count: u32,
    /// Twice the index of the current buffer, plus the parity of its full phase, so that both take one register.
    place: u32,
    /// Whether arrivals at the other CTA of a pair release and waits acquire, at the scope of the cluster.
    releases: bool,
}

/// Bytes of the mbarriers of a ring of `count` buffers.
pub const fn ring_bytes(count: u32) -> u32 {
    2 * count * MBARRIER_BYTES
}

impl<const BLOCKS: u32> Ring<BLOCKS> {
    /// Returns a ring of `count` buffers, at its first buffer. Its mbarriers lie at `barriers`, a multiple of 8.
    #[inline(always)]
    pub const fn new(barriers: SharedAddress, count: u32) -> Self {
        Self { barriers: Mbarrier::at(barriers), count, place: 0, releases: false }
    }

    /// Returns the ring with arrivals that release and waits that acquire, at the scope of the cluster, if `releases`.
    #[inline(always)]
    pub const fn releasing(self, releases: bool) -> Self {
        Self { releases, ..self }
    }

    /// Initializes the mbarriers with the number of arrivals per phase: `full_arrivals` and `empty_arrivals`.
    ///
    /// # Safety
    /// The [`ring_bytes`] at the ring's address are shared memory that nothing else uses. Other threads use the ring
    /// only after a barrier of the CTA; asynchronous copies use it only after `fence_mbarrier_init` as well.
    #[inline(always)]
    pub unsafe fn init(self, full_arrivals: u32, empty_arrivals: u32) {
        for index in 0..self.count {
            let ring = Self { place: 2 * index, ..self };
            // SAFETY: both 8-byte mbarriers lie inside the `ring_bytes` at the ring's address; the caller guarantees
            // that nothing else uses those bytes yet.
            unsafe {
                mbarrier_init(ring.full(), full_arrivals);
                mbarrier_init(ring.empty(), empty_arrivals);
            }
        }
    }

    /// Index of the current buffer.
    #[inline(always)]
    pub const fn index(self) -> u32 {
        self.place / 2
    }

    /// Returns the same ring with `place` marked warp-uniform for the compiler. Values derived from it stay in uniform
    /// registers, where MMA instructions take their descriptors.
    ///
    /// # Safety
    /// All 32 lanes of the warp call this together.
    #[inline(always)]
    pub unsafe fn uniform(self) -> Self {
        // SAFETY: the caller guarantees that all 32 lanes execute the shuffle together.
        Self { place: unsafe { warp_shuffle_idx(ALL_LANES, self.place, 0, WARP_SIZE).0 }, ..self }
    }

    /// Parity of the full barrier's phase.
    #[inline(always)]
    const fn parity(self) -> u32 {
        self.place % 2
    }

    /// Mbarrier at which producers arrive.
    #[inline(always)]
    pub const fn full(self) -> Mbarrier {
        self.barriers.nth(self.index())
    }

    /// Mbarrier at which consumers arrive.
    #[inline(always)]
    pub const fn empty(self) -> Mbarrier {
        self.barriers.nth(self.count + self.index())
    }

    /// Waits until the buffer is full.
    ///
    /// # Safety
    /// The ring is initialized. Its producers are at most one round ahead.
    #[inline(always)]
    pub unsafe fn wait_full(self) {
        // SAFETY: `full()` is an initialized mbarrier of the ring. Producers are at most one round ahead, so the phase
        // with this parity is the current or the preceding phase, as `mbarrier.try_wait.parity` requires.
        unsafe { self.wait(self.full(), self.parity()) }
    }

    /// Waits until the buffer is empty.
    ///
    /// # Safety
    /// The ring is initialized. Its consumers are at most one round behind.
    #[inline(always)]
    pub unsafe fn wait_empty(self) {
        // SAFETY: `empty()` is an initialized mbarrier of the ring. Consumers are at most one round behind, so the
        // phase with this parity is the current or the preceding phase. On a fresh mbarrier the preceding phase counts
        // as complete.
        unsafe { self.wait(self.empty(), self.parity() ^ 1) }
    }

    /// Waits until the buffer, filled in this round, is empty again.
    ///
    /// # Safety
    /// The ring is initialized. Producers fill the buffer at most once more before this returns.
    #[inline(always)]
    pub unsafe fn wait_emptied(self) {
        // SAFETY: `empty()` is an initialized mbarrier of the ring. The buffer is filled at most once more before the
        // wait returns, so the phase with this parity is the current or the preceding phase.
        unsafe { self.wait(self.empty(), self.parity()) }
    }

    /// Waits until the phase with this parity completes, at any barrier where the other CTA of a pair reports to this one.
    ///
    /// # Safety
    /// `barrier` is initialized. The phase is the current or the preceding phase.
    #[inline(always)]
    pub unsafe fn wait(self, barrier: Mbarrier, parity: u32) {
        // SAFETY: the caller guarantees that `barrier` is initialized and that the phase is the current or the
        // preceding one.
        unsafe {
            if BLOCKS > 1 && self.releases {
                mbarrier_wait_parity_cluster(barrier, parity);
            } else {
                mbarrier_wait_parity(barrier, parity);
            }
        }
    }

    /// Arrives at a barrier of the ring. In a pair, arrives at the barrier of the CTA with cluster rank `leader`, the
    /// pair's first.
    ///
    /// # Safety
    /// `barrier` is an initialized barrier of the ring whose current phase still expects an arrival. The first CTA of a
    /// pair has not exited.
    #[inline(always)]
    pub unsafe fn arrive(self, barrier: Mbarrier, leader: u32) {
        // SAFETY: the caller guarantees that `barrier` is initialized, that its phase expects this arrival, and that
        // the CTA `leader`, whose shared memory the remote arrival accesses, has not exited.
        unsafe {
            match (BLOCKS > 1, self.releases) {
                (true, true) => mbarrier_arrive_cluster(barrier.in_block(leader)),
                (true, false) => mbarrier_arrive_cluster_relaxed(barrier.in_block(leader)),
                (false, _) => mbarrier_arrive(barrier),
            }
        }
    }

    /// Advances to the next buffer.
    #[inline(always)]
    pub const fn advance(&mut self) {
        self.place += 2;
        if self.index() == self.count {
            self.place = self.parity() ^ 1;
        }
    }

    /// Returns the ring advanced by one buffer.
    #[inline(always)]
    pub const fn next(mut self) -> Self {
        self.advance();
        self
    }

    /// In a pair, waits until all buffers are empty: the other CTA's thread has then made its last arrival here. A
    /// single CTA does not wait, because its own threads issued all arrivals and saw them complete.
    ///
    /// # Safety
    /// The requirements of [`Ring::wait_empty`].
    #[inline(always)]
    pub unsafe fn drain(mut self) {
        if BLOCKS == 1 {
            return;
        }
        for _ in 0..self.count {
            // SAFETY: the caller guarantees that the ring is initialized and that consumers are at most one round
            // behind.
            unsafe { self.wait_empty() };
            self.advance();
        }
    }
}
