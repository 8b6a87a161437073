//! Which tile, and which tiles are a group's. Functions of sizes alone.

use kernels_gpu::simt::gated_simt::abi::Tile;

use crate::error::Error;
use crate::kernels::group::Sizes;
use crate::kernels::launch::BlockCount;

/// Time for a row of a [`Tile::SMALL`] in rows of a [`Tile::LARGE`], by its instructions for a product: a thread
/// loads an operand from shared memory for every 4 columns · tokens it computes, the large tile's thread for every 8.
const SMALL_ROW_COST: u64 = 2;

/// The tile with the least work, the rows that stay empty in a group's last tile included.
pub(super) fn choose(groups: &[Sizes]) -> Tile {
    let rows = |tile: Tile| -> u64 {
        let of = |sizes: &Sizes| tile.count(sizes.m, sizes.n) * u64::from(tile.tokens * tile.columns);
        groups.iter().map(|sizes| of(sizes).saturating_mul(u64::from(sizes.k))).fold(0, u64::saturating_add)
    };
    if rows(Tile::SMALL).saturating_mul(SMALL_ROW_COST) < rows(Tile::LARGE) { Tile::SMALL } else { Tile::LARGE }
}

/// The first tile of each group, and how many there are: a block computes one.
///
/// # Errors
/// [`Error::TooLarge`] if they are more than a grid can have blocks.
pub(super) fn number_tiles(tile: Tile, groups: &[Sizes]) -> Result<(Vec<u32>, u32), Error> {
    let mut blocks = BlockCount::default();
    let first = groups.iter().map(|sizes| blocks.take(tile.count(sizes.m, sizes.n))).collect::<Result<_, _>>()?;
    Ok((first, blocks.total()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups<const G: usize>(tokens: [u32; G]) -> [Sizes; G] {
        tokens.map(|m| Sizes { m, n: 4096, k: 7168 })
    }

    #[test]
    fn a_few_tokens_a_group_go_to_the_small_tile_and_many_to_the_large() {
        let tile = |tokens: [u32; 3]| choose(&groups(tokens));
        assert_eq!(tile([1, 0, 3]), Tile::SMALL);
        assert_eq!(tile([16, 16, 16]), Tile::SMALL);
        assert_eq!(tile([64, 40, 128]), Tile::LARGE);
        // One long group outweighs short ones.
        assert_eq!(tile([512, 1, 1]), Tile::LARGE);
    }

    #[test]
    fn tiles_are_numbered_through_all_groups_and_empty_ones_have_none() {
        let columns = 4096 / Tile::LARGE.columns;
        let (first, blocks) = number_tiles(Tile::LARGE, &groups([65, 0, 200])).unwrap();
        assert_eq!((first, blocks), (vec![0, 2 * columns, 2 * columns], 6 * columns));
    }

    #[test]
    fn more_tiles_than_blocks_in_a_grid_are_refused() {
        let huge = Sizes { m: u32::MAX, n: 1 << 20, k: 16 };
        for groups in [vec![huge], vec![huge; 64]] {
            assert!(matches!(number_tiles(choose(&groups), &groups), Err(Error::TooLarge)));
        }
    }
}
