//! The kernel's parameter, and its shared memory.

use cuda_std::shared::SharedAddress;

use crate::{
    decoding::{Decode, Packed, TILE_BYTES},
    mma_sync::moe_sm80::abi::{INSTANCES, Instance, TILE_SLOTS},
    moe::Launch,
};

/// The kernel as one of [`INSTANCES`], for bf16 or f16 tokens. A thread has `P` parts of a stage.
pub(super) struct Moe<const INDEX: usize, const BF16: bool, const P: usize> {
    pub launch: Launch,
    pub shared: SharedAddress,
    /// Index of the thread's warp.
    pub warp: u32,
}

impl<const INDEX: usize, const BF16: bool, const P: usize> Moe<INDEX, BF16, P>
where
    Packed<BF16>: Decode,
{
    pub(super) const INSTANCE: Instance = INSTANCES[INDEX];

    // Layout of shared memory: stages, then tiles.
    pub(super) const TILES: u32 = Self::INSTANCE.stages * Self::INSTANCE.stage_bytes();
    pub(super) const END: u32 = Self::TILES + TILE_SLOTS * TILE_BYTES;

    /// Address of a stage.
    #[inline(always)]
    pub(super) fn stage(&self, index: u32) -> SharedAddress {
        self.shared + index * Self::INSTANCE.stage_bytes()
    }
}
