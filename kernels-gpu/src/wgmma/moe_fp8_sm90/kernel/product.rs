//! The kernel's parameter, and its shared memory.

use cuda_std::{
    mbarrier::{MBARRIER_BYTES, Mbarrier},
    shared::SharedAddress,
};

use crate::{
    decoding::{TILE_BYTES, TILE_SLOTS, TURN_BARRIERS, WARPS},
    ring::{Ring, ring_bytes},
    wgmma::{
        Tiles,
        moe_fp8_sm90::abi::{INSTANCES, Instance, Launch, SCALE_SLOTS, TABLE_BYTES},
    },
};

/// Kernel of the instance `INSTANCES[INDEX]`, where a thread that multiplies has `R` sums.
pub(super) struct Product<const INDEX: usize, const R: usize> {
    pub launch: Launch,
    pub shared: SharedAddress,
}

impl<const INDEX: usize, const R: usize> Product<INDEX, R> {
    pub(super) const INSTANCE: Instance = INSTANCES[INDEX];
    pub(super) const CHECK: () = assert!(Self::END == Self::INSTANCE.shared_bytes());

    // Warps of the first warpgroup that load weights and tokens.
    pub(super) const WEIGHT_WARP: u32 = 0;
    pub(super) const TOKEN_WARP: u32 = 1;
    pub(super) const CONSUMER_WARPS: u32 = Self::INSTANCE.consumers * WARPS;

    // Shared memory: buffers, stages, the table, scales, tiles, barriers. These are offsets from its start.
    pub(super) const STAGES: u32 = Self::INSTANCE.buffers * Self::INSTANCE.buffer_bytes();
    pub(super) const TABLE: u32 = Self::STAGES + Self::INSTANCE.stages * Self::INSTANCE.stage_bytes();
    const SCALES: u32 = Self::TABLE + TABLE_BYTES;
    const TILES: u32 = Self::SCALES + SCALE_SLOTS * Self::INSTANCE.scale_bytes();
    const STAGE_BARRIERS: u32 = Self::TILES + TILE_SLOTS * TILE_BYTES;
    const BUFFER_BARRIERS: u32 = Self::STAGE_BARRIERS + ring_bytes(Self::INSTANCE.stages);
    const TILE_BARRIERS: u32 = Self::BUFFER_BARRIERS + ring_bytes(Self::INSTANCE.buffers);
    const SCALE_BARRIERS: u32 = Self::TILE_BARRIERS + ring_bytes(TILE_SLOTS);
    const TURN_BARRIERS: u32 = Self::SCALE_BARRIERS + ring_bytes(SCALE_SLOTS);
    const END: u32 = Self::TURN_BARRIERS + if Self::INSTANCE.ping_pong() { TURN_BARRIERS * MBARRIER_BYTES } else { 0 };

    /// Stages of weights. A stage is full after the loading warp and its copies have arrived, and empty after every
    /// warp that multiplies has arrived.
    pub(super) fn stages(&self) -> Ring {
        Ring::new(self.shared + Self::STAGE_BARRIERS, Self::INSTANCE.stages)
    }

    /// Buffers of tokens, full and empty like stages.
    pub(super) fn buffers(&self) -> Ring {
        Ring::new(self.shared + Self::BUFFER_BARRIERS, Self::INSTANCE.buffers)
    }

    /// Scales of tiles, full and empty like stages.
    pub(super) fn scales(&self) -> Ring {
        Ring::new(self.shared + Self::SCALE_BARRIERS, SCALE_SLOTS)
    }

    /// Tiles that the first warp writes for the others.
    pub(super) fn tiles(&self) -> Tiles {
        Tiles::new(self.shared + Self::TILE_BARRIERS, self.shared + Self::TILES)
    }

    /// Barriers of turns.
    pub(super) fn turn_barriers(&self) -> Mbarrier {
        Mbarrier::at(self.shared + Self::TURN_BARRIERS)
    }

    /// Address of the current stage.
    pub(super) fn stage(&self, stages: Ring) -> SharedAddress {
        self.shared + Self::STAGES + stages.index() * Self::INSTANCE.stage_bytes()
    }

    /// Address of the current buffer of tokens, a multiple of 1024.
    pub(super) fn buffer(&self, buffers: Ring) -> SharedAddress {
        self.shared + buffers.index() * Self::INSTANCE.buffer_bytes()
    }

    /// Address of the current tile's scales.
    pub(super) fn tile_scales(&self, scales: Ring) -> SharedAddress {
        self.shared + Self::SCALES + scales.index() * Self::INSTANCE.scale_bytes()
    }

    /// Number of rows of C if the host knows it, or 0. The rows of a gated product are in lists.
    pub(super) fn known_rows(&self) -> u32 {
        if Self::INSTANCE.matrices == 2 { 0 } else { self.launch.rows }
    }
}
