//! Choice of the instance, and the order of tiles. Functions of sizes only.

use kernels_gpu::mma_sync::gated_sm120::abi::{INSTANCES, Instance, Tile};

use crate::group::Sizes;
use crate::kernel::op_of;
use crate::refused::Refused;
use crate::tiles::{self, weights_read};
use nvfp4_core::Error;
use nvfp4_core::problem::Op;

/// Returns the instances of an operation.
pub(super) fn instances(op: Op) -> impl Iterator<Item = Instance> {
    INSTANCES.iter().copied().filter(move |instance| op_of(instance.matrices) == op)
}

/// Returns the instance that reads weights least often, if one is not refused. Among equals, the smallest tile wins,
/// because it has the most stages.
pub(super) fn choose(op: Op, groups: &[Sizes], refused: &Refused) -> Option<Instance> {
    let reads = |instance: &Instance| weights_read(groups, instance.tile_tokens);
    let left = instances(op).filter(|instance| !refused.contains(instance.entry));
    left.min_by_key(|instance| (reads(instance), instance.tile_tokens))
}

/// Returns every tile of every group.
///
/// # Errors
/// [`Error::TooLarge`] if there are too many tiles.
pub(super) fn tiles(instance: Instance, groups: &[Sizes]) -> Result<Vec<Tile>, Error> {
    tiles::tiles(groups, [instance.tile_columns(), instance.tile_tokens], |group, first_column, first_token, tokens| {
        Tile { group, first_column, first_token, tokens }
    })
}

/// Returns the smallest number of CTAs whose busiest CTA has no more tiles than with one CTA per SM. Then few CTAs have
/// one tile fewer than the others, and no CTA runs alone at the end.
pub(super) fn blocks(tiles: u32, sms: u32) -> u32 {
    tiles.div_ceil(tiles.div_ceil(sms).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_spread_evenly() {
        let counted = [(0, 170), (3, 170), (170, 170), (171, 170), (512, 170), (512, 188), (512, 70)];
        assert_eq!(counted.map(|(tiles, sms)| blocks(tiles, sms)), [0, 3, 170, 86, 128, 171, 64]);
    }

    fn group(m: u32, n: u32) -> Sizes {
        Sizes { m, n, k: 320 }
    }

    #[test]
    fn smallest_tile_with_the_fewest_reads_is_chosen() {
        let sizes: [(&[u32], u32); 6] =
            [(&[1, 0, 8], 8), (&[9], 16), (&[40, 32], 64), (&[96], 128), (&[180], 128), (&[0], 8)];
        for (sizes, expected) in sizes {
            let groups: Vec<_> = sizes.iter().map(|&m| group(m, 256)).collect();
            for op in [Op::Gated, Op::Plain] {
                assert_eq!(choose(op, &groups, &Refused::default()).unwrap().tile_tokens, expected, "{sizes:?}");
            }
        }
    }

    #[test]
    fn tiles_cover_every_group_once() {
        for instance in INSTANCES {
            let groups = [group(129, 136), group(0, 8), group(8, 72)];
            let tiles = tiles(*instance, &groups).unwrap();
            for (index, group) in (0..).zip(&groups) {
                let columns = instance.tile_columns();
                let mut covered = vec![0; (group.m * group.n.div_ceil(columns)) as usize];
                for tile in tiles.iter().filter(|tile| tile.group == index) {
                    assert!((1..=instance.tile_tokens).contains(&tile.tokens));
                    assert!(tile.first_token.is_multiple_of(instance.tile_tokens));
                    for token in tile.first_token..tile.first_token + tile.tokens {
                        covered[(tile.first_column / columns * group.m + token) as usize] += 1;
                    }
                }
                assert!(covered.iter().all(|&times| times == 1), "{} {group:?}", instance.entry);
            }
        }
    }
}
