//! The device code for sm_120.
//!
//! An SM multiplies NVFP4 by an instruction of one warp, `mma.sync` with block scales. It has no tensor memory, and 99
//! KB of shared memory. A and B are swapped: weights are on the tensor core's M, tokens on its N, so that few tokens
//! waste little. One warp loads by bulk copies; four or eight warps multiply and turn their sums into C. A CTA computes
//! tiles until none are left. The loading warp is ahead by up to the number of stages, in k-blocks:
//!
//! ```text
//! global ─ a warp ─▶ stages ─ warps: registers, products ─▶ C
//! ```
//!
//! A warp has the same strip of 16 rows of both slabs: gate and up of the same columns, or two strips of the only
//! matrix. The products of a token fragment with both slabs follow each other, and one lane has both sums of a gated
//! element.
//!
//! # Scales
//!
//! Scales go from shared memory directly into registers. A product reads the scales of A from half of the lanes and the
//! scales of B from a quarter of the lanes ([`mma_m16n8k64_mxf4nvf4`](cuda_std::mma::mma_m16n8k64_mxf4nvf4)). So one
//! register holds A's scales of two steps, or B's scales of four times eight tokens, and no lane loads a scale that no
//! product reads.
//!
//! Weights in rows ([`Weights::Rows`](crate::mma_sync::gated_sm120::abi::Weights::Rows)) are loaded by `ldmatrix`, like
//! tokens. Row g of a product is row 2g of the strip, or 2g + 1 if g is at least 4; row g + 8 is the other of these two
//! rows. A lane then has neighboring columns of C, and the eight rows of one load lie at eight different places of the
//! swizzle.
//!
//! A tile of tokens lies inside of a tile of the scale layout, in which tokens that are 32 apart lie side by side.

mod load;
mod multiply;
mod sm120;
mod store;
mod work;

use cuda_std::{
    fence::fence_mbarrier_init,
    shared::dynamic_shared_address,
    thread,
    warp::{ALL_LANES, WARP_SIZE, elect_sync},
};

use self::multiply::Multiplier;
pub use self::{
    sm120::Sm120,
    work::{Columns, Place, Placed, Work},
};
use crate::mma_sync::gated_sm120::abi::{Group, K_BLOCK, MMA_K, STEPS};

impl<W: Work, const COLUMNS: usize> Sm120<W, COLUMNS> {
    /// One thread's part of the kernel.
    ///
    /// # Safety
    /// The contract of the kernel holds.
    #[inline(always)]
    pub unsafe fn run(work: W) {
        const {
            assert!(COLUMNS == Self::INSTANCE.warp_columns());
            assert!(Self::TOKEN_SCALES.is_multiple_of(16) && Self::BARRIERS.is_multiple_of(8));
        }
        let warp = thread::thread_idx_x() / WARP_SIZE;
        let block = Self { work, shared: dynamic_shared_address() };
        // SAFETY: the barriers have a place of their own in shared memory, and no thread uses them before all threads
        // have passed `sync_threads`. Roles are whole warps. The last warp loads by one thread, and the other warps
        // multiply the same tiles and k-blocks in the same order.
        unsafe {
            let elected = warp == Self::INSTANCE.consumer_warps() && elect_sync(ALL_LANES);
            if elected {
                block.stages().init(1, Self::INSTANCE.consumer_warps());
                fence_mbarrier_init();
            }
            thread::sync_threads();
            W::wait();
            if warp < Self::INSTANCE.consumer_warps() {
                let mut multiplier = Multiplier::new(block, warp);
                for (tile, group) in block.tiles() {
                    let group = W::placed(group);
                    let early = if Self::TERMS_EARLY { Some(multiplier.terms(&tile, &group)) } else { None };
                    let sums = multiplier.multiply(&tile, &group);
                    let terms = early.unwrap_or_else(|| multiplier.terms(&tile, &group));
                    multiplier.store(&tile, &group, &terms, &sums);
                }
            } else {
                block.load(elected);
            }
        }
    }
}

impl Group {
    /// Number of k-blocks of a tile.
    #[inline(always)]
    const fn k_blocks(&self) -> u32 {
        self.k.div_ceil(K_BLOCK)
    }

    /// Number of steps of a k-block. The last k-block may have fewer than the others.
    #[inline(always)]
    const fn steps(&self, k_block: u32) -> u32 {
        let left = (self.k - k_block * K_BLOCK).div_ceil(MMA_K);
        if left < STEPS { left } else { STEPS }
    }
}
