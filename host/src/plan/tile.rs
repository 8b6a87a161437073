//! Tilings of a problem for tensor cores, counted: tiles, waves, idle and useful shares.
//!
//! Weights lie on the tensor core's M, which is fixed, and tokens on its N, which goes in steps of 8: a group's last
//! tile of tokens takes the N it needs, so that few tokens waste little.

use crate::problem::GroupedProblem;

/// Weight rows of a tile: the M of one block-scaled MMA (PTX ISA, `tcgen05.mma`), of two warpgroups on Hopper.
pub const TILE_WEIGHT_ROWS: usize = 128;

/// The granularity of the tensor core's N (PTX ISA, `tcgen05.mma` and `wgmma`: N in steps of 8).
const TOKEN_STEP: usize = 8;

/// Sizes of a tile of tokens that are worth a look: those for which both accumulators, gate and up, fit.
pub const TOKEN_TILES: [usize; 9] = [8, 16, 32, 64, 96, 112, 128, 192, 224];

/// A problem cut into tiles of so many tokens, on a GPU of `sms` multiprocessors that compute one tile at a time each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tiling {
    /// Tokens of a full tile.
    pub tile_tokens: usize,
    /// Tiles of all groups.
    pub tiles: usize,
    /// Rounds in which the GPU works through them.
    pub waves: usize,
    /// The share of multiprocessors that have nothing to do in the last round.
    pub last_wave_idle: f64,
    /// The share of issued multiply-adds that belong to a token and to an output feature.
    pub useful: f64,
    /// How often a weight is read, on average, from memory or L2.
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
    fn tiles_waves_and_shares_are_counted_by_hand() {
        // 2 weight tiles × 3 token tiles + 1 × 1 + none.
        let tiling = Tiling::new(&problem(&[(130, 256), (4, 64), (0, 4096)]), 64, 4);
        assert_eq!((tiling.tiles, tiling.waves, tiling.last_wave_idle), (7, 2, 0.25));
        let (useful, issued) = (130.0 * 256.0 + 4.0 * 64.0, 136.0 * 256.0 + 8.0 * 128.0);
        assert_eq!(tiling.useful, useful / issued);
        assert_eq!(tiling.weight_reads, (3.0 * 256.0 + 64.0) / 320.0);
    }

    #[test]
    fn a_problem_without_tokens_has_no_tiles() {
        let tiling = Tiling::new(&problem(&[(0, 256)]), 64, 4);
        assert_eq!((tiling.tiles, tiling.waves, tiling.last_wave_idle), (0, 0, 0.0));
    }
}
