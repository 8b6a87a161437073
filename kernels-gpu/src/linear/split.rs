//! The exchange between the two CTAs of a cluster that sum the two parts of K of one tile.
//!
//! Each CTA writes one half of the tile's tokens to C, and sends the other CTA its sums of the other half. A CTA
//! receives them in memory of its own beside the stages, so nobody waits for the end of the other CTA's mainloop before
//! sending, and the sums' arrival is the only wait.

use cuda_std::{
    cluster::{arrive_cluster_relaxed, cluster_rank, mapa, wait_cluster},
    mbarrier::{
        Mbarrier, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity_cluster,
        st_async_shared_cluster_v4_b32,
    },
    shared::{SharedAddress, ld_shared_v2_b32, ld_shared_v4_b32},
};

use super::PIECE_BYTES;

/// The memory in which a CTA receives sums. Piece i of all threads comes before piece i + 1, so that neither stores nor
/// loads have bank conflicts.
pub(crate) struct Inbox {
    /// Address of the pieces, then the barrier; a multiple of 16.
    address: SharedAddress,
    /// Number of threads that send and receive.
    threads: u32,
    /// Pieces per thread.
    pieces: u32,
    /// Rank of this CTA, 0 or 1. The CTA writes this half of the tile's tokens.
    pub(crate) rank: u32,
}

impl Inbox {
    /// Returns this CTA's inbox: [`inbox_bytes`](super::inbox_bytes) of shared memory at `address`.
    #[inline(always)]
    pub(crate) fn new(address: SharedAddress, threads: u32, pieces: u32) -> Self {
        Self { address, threads, pieces, rank: cluster_rank() }
    }

    /// Barrier whose first phase completes when all pieces have arrived.
    #[inline(always)]
    fn barrier(&self) -> Mbarrier {
        Mbarrier::at(self.address + self.pieces * self.threads * PIECE_BYTES)
    }

    /// Address of a thread's piece.
    #[inline(always)]
    fn piece(&self, thread: u32, piece: u32) -> SharedAddress {
        self.address + (piece * self.threads + thread) * PIECE_BYTES
    }

    /// Initializes the barrier, which then expects all pieces.
    ///
    /// # Safety
    /// Nothing else uses the inbox. One thread calls this, then `fence_mbarrier_init`, then the CTA's barrier.
    #[inline(always)]
    pub(crate) unsafe fn init(&self) {
        // SAFETY: the barrier's 8 bytes are used by nothing else. The thread's own arrival follows its initialization.
        unsafe {
            mbarrier_init(self.barrier(), 1);
            mbarrier_arrive_expect_tx(self.barrier(), self.pieces * self.threads * PIECE_BYTES);
        }
    }

    /// Announces to the other CTA that this CTA has begun and its inbox is initialized.
    ///
    /// # Safety
    /// Every thread of the cluster calls this once, after a barrier of the CTA behind [`Self::init`], all lanes of a
    /// warp together.
    #[inline(always)]
    pub(crate) unsafe fn open(&self) {
        // SAFETY: the caller guarantees that every thread of the cluster arrives once, in whole warps.
        unsafe { arrive_cluster_relaxed() };
    }

    /// Waits until the other CTA's inbox is open.
    ///
    /// # Safety
    /// Every thread that sends calls this once, after [`Self::open`], all lanes of a warp together.
    #[inline(always)]
    pub(crate) unsafe fn wait_open(&self) {
        // SAFETY: the caller guarantees one wait after this thread's arrival, in whole warps.
        unsafe { wait_cluster() };
    }

    /// Sends a piece to thread `thread` of the other CTA.
    ///
    /// # Safety
    /// [`Self::wait_open`] has returned. Each thread and piece is sent once.
    #[inline(always)]
    pub(crate) unsafe fn send(&self, thread: u32, piece: u32, sums: [f32; 4]) {
        let other = self.rank ^ 1;
        let target = mapa(self.piece(thread, piece), other);
        // SAFETY: the other CTA has begun, its barrier is initialized and expects these bytes, which nobody else
        // accesses. The CTA does not end before they arrive, because its threads wait for them.
        unsafe { st_async_shared_cluster_v4_b32(target, sums.map(f32::to_bits), self.barrier().in_block(other)) };
    }

    /// Waits until all pieces have arrived.
    ///
    /// # Safety
    /// [`Self::init`] was called, and a barrier of the CTA followed it.
    #[inline(always)]
    pub(crate) unsafe fn wait_full(&self) {
        // SAFETY: the barrier is initialized, and its first phase is the only one.
        unsafe { mbarrier_wait_parity_cluster(self.barrier(), 0) };
    }

    /// Returns half of a piece: the pair of sums with index `pair` that the other CTA sent to this thread.
    ///
    /// # Safety
    /// [`Self::wait_full`] has returned.
    #[inline(always)]
    pub(crate) unsafe fn received_pair(&self, thread: u32, pair: u32) -> [f32; 2] {
        let address = self.piece(thread, pair / 2) + pair % 2 * (PIECE_BYTES / 2);
        // SAFETY: the piece has arrived, and nobody writes it any more.
        unsafe { ld_shared_v2_b32(address) }.map(f32::from_bits)
    }

    /// Returns a piece that the other CTA sent to this thread.
    ///
    /// # Safety
    /// [`Self::wait_full`] has returned.
    #[inline(always)]
    pub(crate) unsafe fn received(&self, thread: u32, piece: u32) -> [f32; 4] {
        // SAFETY: the piece has arrived, and nobody writes it any more.
        unsafe { ld_shared_v4_b32(self.piece(thread, piece)) }.map(f32::from_bits)
    }
}
