//! A CTA: its shared memory, its stages and its tiles.

use cuda_std::{shared::SharedAddress, thread};

use super::work::Work;
use crate::{
    format::SCALE_TILE_BYTES,
    mma_sync::gated_sm120::abi::{Instance, SLABS, STEPS, slab_value_bytes},
    ring::Ring,
};

/// A CTA with its work. A warp multiplies COLUMNS times eight tokens, as the instance requires.
#[derive(Clone, Copy)]
pub struct Sm120<W: Work, const COLUMNS: usize> {
    pub(super) work: W,
    /// Address of the CTA's shared memory.
    pub(super) shared: SharedAddress,
}

impl<W: Work, const COLUMNS: usize> Sm120<W, COLUMNS> {
    pub(super) const INSTANCE: Instance = W::INSTANCE;
    const STAGES: u32 = Self::INSTANCE.stages;

    // Offsets in shared memory. Tokens and weights lie at multiples of 1024, as their swizzle requires.
    const WEIGHTS: u32 = Self::STAGES * Self::INSTANCE.token_bytes();
    pub(super) const TOKEN_SCALES: u32 = Self::WEIGHTS + Self::STAGES * Self::INSTANCE.weight_bytes();
    const TOKEN_SCALE_BYTES: u32 = STEPS * Self::INSTANCE.step_scale_bytes();
    pub(super) const BARRIERS: u32 = Self::TOKEN_SCALES + Self::STAGES * Self::TOKEN_SCALE_BYTES;

    /// Whether the epilogue's terms are loaded before a tile is multiplied: with few sums there are registers for them.
    pub(super) const TERMS_EARLY: bool = COLUMNS <= 4;

    /// Address of the token values of a stage.
    #[inline(always)]
    pub(super) fn tokens_of(self, stage: u32) -> SharedAddress {
        self.shared + stage * Self::INSTANCE.token_bytes()
    }

    /// Address of the weights of a stage.
    #[inline(always)]
    pub(super) fn weights_of(self, stage: u32) -> SharedAddress {
        self.shared + Self::WEIGHTS + stage * Self::INSTANCE.weight_bytes()
    }

    /// Offset of a matrix's scale tiles in a stage's weights, for weights in rows.
    pub(super) const fn weight_scales(matrix: u32) -> u32 {
        SLABS * slab_value_bytes(STEPS) + matrix * STEPS * SCALE_TILE_BYTES
    }

    /// Address of the tokens' scales of a stage.
    #[inline(always)]
    pub(super) fn token_scales_of(self, stage: u32) -> SharedAddress {
        self.shared + Self::TOKEN_SCALES + stage * Self::TOKEN_SCALE_BYTES
    }

    /// The stages. A stage is full when the loading warp and its copies have arrived, and empty when all multiplying
    /// warps have arrived.
    #[inline(always)]
    pub(super) fn stages(self) -> Ring {
        Ring::new(self.shared + Self::BARRIERS, Self::STAGES)
    }

    /// The tiles of this CTA, in order.
    ///
    /// # Safety
    /// The contract of the kernel holds, and the caller has waited for earlier grids.
    #[inline(always)]
    pub(super) unsafe fn tiles(self) -> W::Tiles {
        // SAFETY: earlier grids were waited for, so tiles and groups are complete; by the kernel's contract the launch
        // has their addresses.
        unsafe { self.work.tiles(thread::block_idx_x(), thread::grid_dim_x()) }
    }
}
