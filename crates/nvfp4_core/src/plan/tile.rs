//! Counts the tiles of a problem on tensor cores: tiles, waves, idle share and useful share.
//!
//! Weights are on the tensor core's M, which is fixed, and tokens on its N, a multiple of 8: the last tile of tokens of
//! a group uses the smallest sufficient N, so that few tokens waste little.

use crate::problem::GroupedProblem;

/// Weight rows per tile: the M of one block-scaled MMA (PTX ISA, `tcgen05.mma`), or of two warpgroups on Hopper.
pub const TILE_WEIGHT_ROWS: usize = 128;

/// The granularity of the tensor core's N (PTX ISA, `tcgen05.mma` and `wgmma`: N in steps of 8).
const TOKEN_STEP: usize = 8;

/// Tile sizes in tokens for which both accumulators, gate and up, fit.
pub const TOKEN_TILES: [usize; 9] = [8, 16, 32, 64, 96, 112, 128, 192, 224];

/// A problem split into tiles of `tile_tokens` tokens, on a GPU whose SMs compute one tile at a time each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tiling {
    /// Tokens per full tile.
    pub tile_tokens: usize,
    /// Number of tiles of all groups.
    pub tiles: usize,
    /// Number of rounds in which the GPU computes the tiles.
    pub waves: usize,
    /// Share of SMs that are idle in the last round.
    pub last_wave_idle: f64,
    /// Share of multiply-adds that belong to a token and an output feature.
    pub useful: f64,
    /// Average number of reads of a weight from memory or L2.
    pub weight_reads: f64,
}

impl Tiling {
    /// Counts the tiles of a problem.
    pub fn new(problem: &GroupedProblem, tile_tokens: usize, sms: usize) -> Self {
        let (mut tiles, mut useful, mut issued, mut read, mut weights) = (0, 0.0, 0.0, 0.0, 0.0);
        for group in problem.groups().iter().filter(|group| group.m > 0) {
            let weight_tiles = group.n.div_ceil(TILE_WEIGHT_ROWS);
            let token_tiles = group.m.div_ceil(tile_tokens);
            let tokens_issued = group.m.next_multiple_of(TOKEN_STEP);
            let k = group.k as f64;
            tiles += weight_tiles * token_tiles;
            useful += (group.m * group.n) as f64 * k;
            issued += (tokens_issued * weight_tiles * TILE_WEIGHT_ROWS) as f64 * k;
            weights += group.n as f64 * k;
            read += (group.n * token_tiles) as f64 * k;
        }
        let waves = tiles.div_ceil(sms);
        let share = |part: f64, whole: f64| if whole == 0.0 { 1.0 } else { part / whole };
        Self {
            tile_tokens,
            tiles,
            waves,
            last_wave_idle: if tiles == 0 { 0.0 } else { (waves * sms - tiles) as f64 / sms as f64 },
            useful: share(useful, issued),
            weight_reads: share(read, weights),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{Group, Op, TokenDtype};

    fn problem(groups: &[(usize, usize)]) -> GroupedProblem {
        let groups = groups.iter().map(|&(m, n)| Group { m, n, k: 256 }).collect();
        GroupedProblem::new(Op::Gated, TokenDtype::F16, groups).unwrap()
    }

    #[test]
    fn tiles_waves_and_shares_match_manual_counts() {
        // 2 weight tiles × 3 token tiles, plus 1 × 1, plus none.
        let tiling = Tiling::new(&problem(&[(130, 256), (4, 64), (0, 4096)]), 64, 4);
        assert_eq!((tiling.tiles, tiling.waves, tiling.last_wave_idle), (7, 2, 0.25));
        let (useful, issued) = (130.0 * 256.0 + 4.0 * 64.0, 136.0 * 256.0 + 8.0 * 128.0);
        assert_eq!(tiling.useful, useful / issued);
        assert_eq!(tiling.weight_reads, (3.0 * 256.0 + 64.0) / 320.0);
    }

    #[test]
    fn problem_without_tokens_has_no_tiles() {
        let tiling = Tiling::new(&problem(&[(0, 256)]), 64, 4);
        assert_eq!((tiling.tiles, tiling.waves, tiling.last_wave_idle), (0, 0, 0.0));
    }
}
