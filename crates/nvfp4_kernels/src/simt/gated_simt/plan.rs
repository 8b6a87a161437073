//! Choice of the tile, and numbering of tiles. Functions of sizes only.

use kernels_gpu::simt::gated_simt::abi::Tile;

use crate::group::Sizes;
use crate::launch::BlockCount;
use nvfp4_core::Error;

/// Time per row of a [`Tile::SMALL`] in rows of a [`Tile::LARGE`], estimated from the instructions per product. A
/// thread of the small tile loads an operand from shared memory per 4 columns · tokens, a thread of the large tile per
/// 8.
const SMALL_ROW_COST: u64 = 2;

/// Returns the tile with the least work, including the empty rows in a group's last tile, among the tiles that are left.
pub(super) fn choose(groups: &[Sizes], is_left: impl Fn(Tile) -> bool) -> Option<Tile> {
    let rows = |tile: Tile| -> u64 {
        let of = |sizes: &Sizes| tile.count(sizes.m, sizes.n) * u64::from(tile.tokens * tile.columns);
        groups.iter().map(|sizes| of(sizes).saturating_mul(u64::from(sizes.k))).fold(0, u64::saturating_add)
    };
    let small_first = rows(Tile::SMALL).saturating_mul(SMALL_ROW_COST) < rows(Tile::LARGE);
    let order = if small_first { [Tile::SMALL, Tile::LARGE] } else { [Tile::LARGE, Tile::SMALL] };
    order.into_iter().find(|tile| is_left(*tile))
}

/// Returns the first tile of each group and the number of tiles. A CTA computes one tile.
///
/// # Errors
/// [`Error::TooLarge`] if the grid would need too many CTAs.
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
    fn number_of_tokens_decides_the_tile() {
        let tile = |tokens: [u32; 3]| choose(&groups(tokens), |_| true).unwrap();
        assert_eq!(tile([1, 0, 3]), Tile::SMALL);
        assert_eq!(tile([16, 16, 16]), Tile::SMALL);
        assert_eq!(tile([64, 40, 128]), Tile::LARGE);
        // One long group outweighs short ones.
        assert_eq!(tile([512, 1, 1]), Tile::LARGE);
        let left = |tile| choose(&groups([1, 0, 3]), |of| of == tile);
        assert_eq!([left(Tile::SMALL), left(Tile::LARGE)], [Some(Tile::SMALL), Some(Tile::LARGE)]);
        assert_eq!(choose(&groups([1]), |_| false), None);
    }

    #[test]
    fn tiles_are_numbered_across_groups() {
        let columns = 4096 / Tile::LARGE.columns;
        let (first, blocks) = number_tiles(Tile::LARGE, &groups([65, 0, 200])).unwrap();
        assert_eq!((first, blocks), (vec![0, 2 * columns, 2 * columns], 6 * columns));
    }

    #[test]
    fn too_many_tiles_for_a_grid_are_refused() {
        let huge = Sizes { m: u32::MAX, n: 1 << 20, k: 16 };
        for groups in [vec![huge], vec![huge; 64]] {
            assert!(matches!(number_tiles(choose(&groups, |_| true).unwrap(), &groups), Err(Error::TooLarge)));
        }
    }
}
