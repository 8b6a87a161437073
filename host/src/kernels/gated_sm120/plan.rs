//! Which instance, and which tiles in which order. Functions of sizes alone.

use kernels_gpu::gated_sm120::abi::{INSTANCES, Instance, Tile};

use crate::error::Error;
use crate::kernels::group::Sizes;
use crate::kernels::kernel::op_of;
use crate::problem::Op;

/// The instances of an operation.
pub(super) fn instances(op: Op) -> impl Iterator<Item = Instance> {
    INSTANCES.iter().copied().filter(move |instance| op_of(instance.matrices) == op)
}

/// The instance that reads weights least often. Among equals it is the one with the smallest tile, which has the most stages.
pub(super) fn choose(op: Op, groups: &[Sizes]) -> Instance {
    let reads = |instance: &Instance| -> u64 {
        let of = |group: &Sizes| {
            let weights = u64::from(group.n) * u64::from(group.k);
            weights.saturating_mul(group.m.div_ceil(instance.tile_tokens).into())
        };
        groups.iter().map(of).fold(0, u64::saturating_add)
    };
    instances(op).min_by_key(|instance| (reads(instance), instance.tile_tokens)).expect("an operation has instances")
}

/// Every tile of every group. Those that share weights are neighbours: blocks that run side by side read them once from
/// memory. A block comes through the groups in order, so that it changes maps as rarely as it can.
///
/// # Errors
/// [`Error::TooLarge`] if they cannot be counted.
pub(super) fn tiles(instance: Instance, groups: &[Sizes]) -> Result<Vec<Tile>, Error> {
    /// More would need an index of more than 32 bits, and 64 GiB of tiles.
    const MAX_TILES: u64 = u32::MAX as u64;

    let (columns, tokens) = (instance.tile_columns(), instance.tile_tokens);
    let count = |group: &Sizes| u64::from(group.m.div_ceil(tokens)) * u64::from(group.n.div_ceil(columns));
    let count = groups.iter().map(count).fold(0, u64::saturating_add);
    if count > MAX_TILES {
        return Err(Error::TooLarge);
    }
    let mut tiles = Vec::with_capacity(count as usize);
    for (index, group) in (0..).zip(groups) {
        for first_column in (0..group.n).step_by(columns as usize) {
            for first_token in (0..group.m).step_by(tokens as usize) {
                let tokens = tokens.min(group.m - first_token);
                tiles.push(Tile { group: index, first_column, first_token, tokens });
            }
        }
    }
    Ok(tiles)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(m: u32, n: u32) -> Sizes {
        Sizes { m, n, k: 320 }
    }

    #[test]
    fn the_tile_is_the_smallest_that_reads_weights_least_often() {
        let sizes: [(&[u32], u32); 6] =
            [(&[1, 0, 8], 8), (&[9], 16), (&[40, 32], 64), (&[96], 128), (&[180], 128), (&[0], 8)];
        for (sizes, expected) in sizes {
            let groups: Vec<_> = sizes.iter().map(|&m| group(m, 256)).collect();
            for op in [Op::Gated, Op::Plain] {
                assert_eq!(choose(op, &groups).tile_tokens, expected, "{sizes:?}");
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
