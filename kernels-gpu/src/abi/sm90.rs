//! What host and `gated_sm90` agree on: tiles, sizes, and the list of its entries. Groups are [`super::Group`]s.
//!
//! Weights lie on the tensor core's M, tokens on its N.

use super::{BLOCK, SCALE_TILE_COLUMNS, SCALE_TILE_ROWS};

/// Threads of a warpgroup.
pub const WARPGROUP: u32 = 128;

/// Warpgroups that multiply; one before them fills the stages.
pub const CONSUMERS: u32 = 2;

/// Threads of a block, in one dimension.
pub const THREADS: u32 = (1 + CONSUMERS) * WARPGROUP;

/// Elements of K of a stage.
pub const STEP: u32 = 128;

/// Tiles of the blocked scale layout along a stage's K.
pub const STEP_SCALE_TILES: u32 = STEP / (BLOCK * SCALE_TILE_COLUMNS);

/// K is a multiple of this: rows are copied 16 bytes at a time. A's and B's values and scales start at multiples of 16.
pub const K_ALIGNMENT: u32 = 32;

/// Panels of weights of a tile: gate and up of the same columns of C, or neighbouring columns of a plain C.
pub const PANELS: u32 = 2;

/// Rows of a panel: those of a tile of the scale layout, half of them for each warpgroup.
pub const PANEL_ROWS: u32 = SCALE_TILE_ROWS;

/// Bytes of a panel's values in a stage.
pub const PANEL_BYTES: u32 = PANEL_ROWS * STEP / 2;

/// Bytes of a tile of the blocked scale layout.
pub const SCALE_TILE_BYTES: u32 = SCALE_TILE_ROWS * SCALE_TILE_COLUMNS;

/// Bytes of a panel's scales in a stage.
pub const PANEL_SCALE_BYTES: u32 = STEP_SCALE_TILES * SCALE_TILE_BYTES;

/// Bytes of a stage's two barriers.
pub const BARRIER_BYTES: u32 = 2 * 8;

/// What a block may have of shared memory on a card of compute capability 9.0 (CUDA programming guide, "Technical
/// Specifications per Compute Capability").
pub const SHARED_BYTES: u32 = 227 << 10;

/// More stages than these hide no more latency: these are 147 KB of weights on their way to each multiprocessor.
const MAX_STAGES: u32 = 8;

/// What one thread block computes at a time, and the entries that compute it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Name of the gated entry.
    pub gated: &'static str,
    /// Name of the plain entry.
    pub plain: &'static str,
    /// Rows of C.
    pub tokens: u32,
}

/// Every tile that there are entries for, the smallest first.
pub const TILES: [Tile; 6] = [
    Tile { gated: "gated_sm90_8", plain: "plain_sm90_8", tokens: 8 },
    Tile { gated: "gated_sm90_16", plain: "plain_sm90_16", tokens: 16 },
    Tile { gated: "gated_sm90_32", plain: "plain_sm90_32", tokens: 32 },
    Tile { gated: "gated_sm90_64", plain: "plain_sm90_64", tokens: 64 },
    Tile { gated: "gated_sm90_96", plain: "plain_sm90_96", tokens: 96 },
    Tile { gated: "gated_sm90_128", plain: "plain_sm90_128", tokens: 128 },
];

/// Columns of C of a tile; `matrices` is 2 for a gated kernel, 1 for a plain one.
pub const fn columns(matrices: u32) -> u32 {
    PANELS / matrices * PANEL_ROWS
}

impl Tile {
    /// Tiles of a group: what the next group's [`first_tile`](super::Group::first_tile) is further on. Their sum must
    /// stay below 2³¹.
    pub const fn count(self, m: u32, n: u32, matrices: u32) -> u64 {
        m.div_ceil(self.tokens) as u64 * n.div_ceil(columns(matrices)) as u64
    }

    /// Bytes of a stage: values of both panels, their scales, and tokens decoded to f16.
    pub const fn stage_bytes(self) -> u32 {
        PANELS * (PANEL_BYTES + PANEL_SCALE_BYTES) + self.tokens * STEP * 2
    }

    /// Stages: as many as fit.
    pub const fn stages(self) -> u32 {
        let fit = SHARED_BYTES / (self.stage_bytes() + BARRIER_BYTES);
        if fit < MAX_STAGES { fit } else { MAX_STAGES }
    }

    /// Dynamic shared memory of a block, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        self.stages() * (self.stage_bytes() + BARRIER_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tile_has_a_pipeline_that_fits_the_shared_memory() {
        for tile in TILES {
            assert!(tile.stages() >= 4 && tile.shared_bytes() <= SHARED_BYTES, "{tile:?}: {}", tile.shared_bytes());
        }
    }

    #[test]
    fn a_group_has_tiles_for_all_its_rows_and_columns() {
        let [small, .., large] = TILES;
        assert_eq!((small.count(0, 4096, 2), small.count(1, 8, 2)), (0, 1));
        assert_eq!((large.count(129, 136, 2), large.count(129, 136, 1)), (4, 2));
    }
}
