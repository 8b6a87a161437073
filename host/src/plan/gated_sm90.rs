//! Launches of the Hopper kernel, `kernels-gpu/src/gated_sm90.rs`: which entry, how many blocks. Pure functions.

use kernels_gpu::abi::Group;
use kernels_gpu::abi::sm90::{K_ALIGNMENT, THREADS, TILES, Tile};

use super::Grid;
use crate::error::Error;
use crate::problem::Op;

/// A step of a tile takes as long as one of so many tokens at least, however few it has: that long it takes a
/// multiprocessor to read 18 KB of weights at its share of the second-level cache's bandwidth, some 24 bytes a cycle, where
/// a token keeps its tensor cores busy for 16 cycles. Estimated from data sheets.
const LEAST_TOKENS: u64 = 48;

/// What the kernel is called that computes an operation.
pub(crate) fn name(op: Op) -> &'static str {
    match op {
        Op::Gated => "gated_sm90",
        Op::Plain => "plain_sm90",
    }
}

/// Whether the kernel can compute a sum over K elements.
pub(crate) fn takes(k: usize) -> bool {
    k.is_multiple_of(K_ALIGNMENT as usize)
}

/// The entries of an operation, one for each tile, with the shared memory that they are launched with: what a driver loads
/// before the first step.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn entries(op: Op) -> [(&'static str, u32); TILES.len()] {
    TILES.map(|tile| (entry(tile, op), tile.shared_bytes()))
}

fn entry(tile: Tile, op: Op) -> &'static str {
    match op {
        Op::Gated => tile.gated,
        Op::Plain => tile.plain,
    }
}

/// The instances of an operation's kernel, by name: `64` for tiles of 64 tokens.
pub(crate) fn instances(op: Op) -> impl Iterator<Item = (&'static str, Tile)> {
    TILES.into_iter().filter_map(move |tile| Some((entry(tile, op).strip_prefix(name(op))?.strip_prefix('_')?, tile)))
}

/// Takes the instance of this name, one of [`instances`], or else the best for a step's groups, numbers their tiles, and
/// returns the launch that computes them all on a device of so many multiprocessors.
///
/// # Errors
/// [`Error::TooLarge`] if there are 2³¹ tiles or more.
pub(crate) fn plan(op: Op, instance: Option<&str>, groups: &mut [Group], sms: u32) -> Result<Grid, Error> {
    const MAX_TILES: u64 = (1 << 31) - 1;

    let matrices = op.projections() as u32;
    let named = instances(op).find(|(name, _)| instance == Some(*name));
    let tile = named.map_or_else(|| choose(matrices, groups, sms), |(_, tile)| tile);
    let mut tiles = 0;
    for group in groups {
        group.first_tile = u32::try_from(tiles).map_err(|_| Error::TooLarge)?;
        tiles += tile.count(group.m, group.n, matrices);
        if tiles > MAX_TILES {
            return Err(Error::TooLarge);
        }
    }
    Ok(Grid {
        entry: entry(tile, op),
        // A block takes one tile after the other.
        blocks: tiles.min(sms.into()) as u32,
        cluster: 1,
        threads: THREADS,
        shared_bytes: tile.shared_bytes(),
    })
}

/// The tile with which the multiprocessors are done first; of several, the one that reads weights least often.
fn choose(matrices: u32, groups: &[Group], sms: u32) -> Tile {
    let key = |tile: &Tile| {
        let (mut tiles, mut steps) = (0_u64, 0_u64);
        for group in groups {
            let count = tile.count(group.m, group.n, matrices);
            tiles = tiles.saturating_add(count);
            steps = steps.saturating_add(count.saturating_mul(group.k.into()));
        }
        // The last wave takes as long with one tile as with all.
        let waves = u128::from(tiles.div_ceil(sms.into()));
        let work = u128::from(steps).saturating_mul(LEAST_TOKENS.max(tile.tokens.into()).into());
        (waves.saturating_mul(work) / u128::from(tiles.max(1)), tiles, tile.tokens)
    };
    *TILES.iter().min_by_key(|tile| key(tile)).expect("there are tiles")
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable;
    use kernels_gpu::abi::sm90::columns;

    use super::*;

    const SMS: u32 = 132;

    fn groups<const G: usize>(sizes: [u32; G]) -> [Group; G] {
        sizes.map(|m| Group { m, n: 4096, k: 7168, ..Group::zeroed() })
    }

    #[test]
    fn tiles_have_room_for_a_groups_tokens_but_not_for_many_more() {
        let tokens = |sizes: [u32; 8]| choose(2, &groups(sizes), SMS).tokens;
        assert_eq!(tokens([1; 8]), 8);
        assert_eq!(tokens([16; 8]), 16);
        assert_eq!(tokens([64; 8]), 64);
        assert_eq!(tokens([96; 8]), 96);
        assert_eq!(tokens([512; 8]), 128);
    }

    #[test]
    fn tiles_are_numbered_through_all_groups_and_a_block_has_a_multiprocessor_to_itself() {
        let mut groups = groups([128, 0, 100]);
        let grid = plan(Op::Gated, None, &mut groups, 16).unwrap();
        let tile = TILES.into_iter().find(|tile| tile.gated == grid.entry).unwrap();
        let per_row = 4096 / columns(2);
        let expected = [0, 128_u32.div_ceil(tile.tokens) * per_row, 128_u32.div_ceil(tile.tokens) * per_row];
        assert_eq!(groups.map(|group| group.first_tile), expected);
        assert_eq!((grid.blocks, grid.threads, grid.shared_bytes), (16, THREADS, tile.shared_bytes()));
        assert_eq!(plan(Op::Plain, None, &mut [groups[1]], SMS).unwrap().blocks, 0);
        assert!(plan(Op::Plain, None, &mut groups, SMS).unwrap().entry.starts_with("plain_sm90_"));
    }

    #[test]
    fn more_tiles_than_can_be_numbered_are_refused() {
        let huge = Group { m: u32::MAX, n: 1 << 20, k: 32, ..Group::zeroed() };
        assert!(matches!(plan(Op::Gated, None, &mut [huge], SMS), Err(Error::TooLarge)));
        assert!(matches!(plan(Op::Gated, None, &mut [huge; 64], SMS), Err(Error::TooLarge)));
    }

    #[test]
    fn every_entry_that_is_planned_can_be_loaded() {
        for op in [Op::Gated, Op::Plain] {
            for m in [1, 12, 30, 60, 90, 500] {
                let grid = plan(op, None, &mut groups([m; 2]), SMS).unwrap();
                assert!(entries(op).contains(&(grid.entry, grid.shared_bytes)));
            }
        }
    }
}
