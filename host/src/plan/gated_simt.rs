//! Launches of the portable kernel, `kernels-gpu/src/gated_simt/`: which entry, how many blocks. Pure functions.

use kernels_gpu::gated_simt::abi::{self, Group, Instance, Tile};

use super::Grid;
use crate::error::Error;
use crate::problem::Op;

/// The instances of the kernel, by the name of their tile.
pub(crate) const INSTANCES: [(&str, Tile); 2] = [("small", Tile::SMALL), ("large", Tile::LARGE)];

/// Time for a row of a [`Tile::SMALL`] in rows of a [`Tile::LARGE`], by its instructions for a product: a thread
/// loads an operand from shared memory for every 4 columns · tokens it computes, the large tile's thread for every 8.
const SMALL_ROW_COST: u64 = 2;

/// What the kernel is called that computes an operation.
pub(crate) fn name(op: Op) -> &'static str {
    instance(Tile::LARGE, op).entry
}

/// The entries of an operation, one for each tile, with their dynamic shared memory: what a driver loads before the first
/// step.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn entries(op: Op) -> [(&'static str, u32); 2] {
    INSTANCES.map(|(_, tile)| instance(tile, op)).map(|instance| (instance.entry, instance.shared_bytes()))
}

fn instance(tile: Tile, op: Op) -> Instance {
    let is = |instance: &&Instance| instance.tile == tile && instance.matrices == op.projections() as u32;
    *abi::INSTANCES.iter().find(is).expect("every tile has both operations")
}

/// Takes the instance of this name, one of [`INSTANCES`], or else the best for a step's groups, numbers their tiles, and
/// returns the launch that computes them all.
///
/// # Errors
/// [`Error::TooLarge`] if the tiles are more than a grid can have blocks.
pub(crate) fn plan(op: Op, instance: Option<&str>, groups: &mut [Group]) -> Result<Grid, Error> {
    let named = INSTANCES.into_iter().find(|(name, _)| instance == Some(*name));
    let tile = named.map_or_else(|| choose(groups), |(_, tile)| tile);
    let mut blocks = 0;
    for group in groups {
        group.first_tile = u32::try_from(blocks).map_err(|_| Error::TooLarge)?;
        blocks += tile.count(group.m, group.n);
        if blocks > Grid::MAX_BLOCKS {
            return Err(Error::TooLarge);
        }
    }
    let instance = self::instance(tile, op);
    Ok(Grid {
        entry: instance.entry,
        blocks: blocks as u32,
        cluster: 1,
        threads: Instance::THREADS,
        shared_bytes: instance.shared_bytes(),
        overlaps: false,
    })
}

/// The tile with the least work, the rows that stay empty in a group's last tile included.
fn choose(groups: &[Group]) -> Tile {
    let rows = |tile: Tile| -> u64 {
        let of = |group: &Group| tile.count(group.m, group.n) * u64::from(tile.tokens * tile.columns);
        groups.iter().map(|group| of(group).saturating_mul(u64::from(group.k))).fold(0, u64::saturating_add)
    };
    if rows(Tile::SMALL).saturating_mul(SMALL_ROW_COST) < rows(Tile::LARGE) { Tile::SMALL } else { Tile::LARGE }
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable;

    use super::*;

    fn groups<const G: usize>(sizes: [u32; G]) -> [Group; G] {
        sizes.map(|m| Group { m, n: 4096, k: 7168, ..Group::zeroed() })
    }

    #[test]
    fn a_few_tokens_a_group_go_to_the_small_tile_and_many_to_the_large() {
        let tile = |sizes: [u32; 3]| choose(&groups(sizes));
        assert_eq!(tile([1, 0, 3]), Tile::SMALL);
        assert_eq!(tile([16, 16, 16]), Tile::SMALL);
        assert_eq!(tile([64, 40, 128]), Tile::LARGE);
        // One long group outweighs short ones.
        assert_eq!(tile([512, 1, 1]), Tile::LARGE);
    }

    #[test]
    fn a_named_instance_is_taken_whatever_the_sizes() {
        for (name, tile) in INSTANCES {
            for sizes in [[1; 2], [500; 2]] {
                assert_eq!(
                    plan(Op::Gated, Some(name), &mut groups(sizes)).unwrap().entry,
                    instance(tile, Op::Gated).entry
                );
            }
        }
    }

    #[test]
    fn tiles_are_numbered_through_all_groups_and_empty_ones_have_none() {
        let mut groups = groups([65, 0, 200]);
        let grid = plan(Op::Gated, None, &mut groups).unwrap();
        let columns = 4096 / Tile::LARGE.columns;
        assert_eq!(groups.map(|group| group.first_tile), [0, 2 * columns, 2 * columns]);
        assert_eq!((grid.entry, grid.blocks), ("gated_simt", 6 * columns));
        assert_eq!(plan(Op::Plain, None, &mut groups).unwrap().entry, "plain_simt");
    }

    #[test]
    fn more_tiles_than_blocks_in_a_grid_are_refused() {
        let huge = Group { m: u32::MAX, n: 1 << 20, k: 16, ..Group::zeroed() };
        assert!(matches!(plan(Op::Gated, None, &mut [huge]), Err(Error::TooLarge)));
        assert!(matches!(plan(Op::Gated, None, &mut [huge; 64]), Err(Error::TooLarge)));
    }

    #[test]
    fn both_tiles_of_an_operation_have_their_entry() {
        for op in [Op::Gated, Op::Plain] {
            for sizes in [[1; 2], [500; 2]] {
                let grid = plan(op, None, &mut groups(sizes)).unwrap();
                assert!(entries(op).contains(&(grid.entry, grid.shared_bytes)));
            }
        }
    }
}
