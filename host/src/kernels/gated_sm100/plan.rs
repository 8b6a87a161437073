//! Which instance, and which tiles in which order. Functions of sizes alone.

use kernels_gpu::gated_sm100::abi::{INSTANCES, Instance, Roles, Store, Tile};

use crate::error::Error;
use crate::kernels::group::Sizes;
use crate::kernels::kernel::op_of;
use crate::kernels::tiles::{self, weights_read};
use crate::problem::Op;

/// The most tokens of a tile that is a default. From this size on the gated kernel has one accumulator, and beyond it also a
/// stage less.
const MAX_TILE_TOKENS: u32 = 128;

/// A default tile of tokens that follows another starts at a multiple of this: at every second column of scales in tensor
/// memory, as in CUTLASS.
const FIRST_TOKEN_ALIGNMENT: u32 = 64;

/// The instances of an operation.
pub(super) fn instances(op: Op) -> impl Iterator<Item = Instance> {
    INSTANCES.iter().copied().filter(move |instance| op_of(instance.matrices) == op)
}

/// The instances of an operation that may be taken unasked. Those that were made for a comparison are none until a card has shown
/// them faster.
pub(super) fn candidates(op: Op) -> impl Iterator<Item = Instance> {
    let plain_design = |instance: &Instance| {
        (instance.store, instance.roles, instance.blocks) == (Store::Direct, Roles::Specialised, 1)
    };
    instances(op).filter(plain_design).filter(|instance| instance.tile_tokens <= MAX_TILE_TOKENS)
}

/// The instance that reads weights least often. Among equals it is the one with the smallest tile, then the one with the most
/// stages.
pub(super) fn choose(op: Op, groups: &[Sizes]) -> Instance {
    let reads = |instance: &Instance| weights_read(groups, instance.tile_tokens);
    let fits = |instance: &Instance| {
        let one_tile = groups.iter().all(|group| group.m <= instance.tile_tokens);
        one_tile || instance.tile_tokens.is_multiple_of(FIRST_TOKEN_ALIGNMENT)
    };
    let preference = |instance: &Instance| (reads(instance), instance.tile_tokens, std::cmp::Reverse(instance.stages));
    candidates(op).filter(fits).min_by_key(preference).expect("tiles of 64 tokens take any number of them")
}

/// Blocks for so many tiles. A pair of blocks computes a tile on two multiprocessors.
pub(super) fn blocks(instance: Instance, tiles: usize, sms: u32) -> u32 {
    instance.blocks * (tiles as u32).min((sms / instance.blocks).max(1))
}

/// Every tile of every group.
///
/// # Errors
/// [`Error::TooLarge`] if they cannot be counted.
pub(super) fn tiles(instance: Instance, groups: &[Sizes]) -> Result<Vec<Tile>, Error> {
    tiles::tiles(groups, [instance.tile_rows(), instance.tile_tokens], |group, first_row, first_token, tokens| Tile {
        group,
        first_row,
        first_token,
        tokens,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::shape::{self, Shape};

    fn group(m: u32, n: u32) -> Sizes {
        Sizes { m, n, k: 320 }
    }

    #[test]
    fn the_tile_is_the_smallest_that_reads_weights_once_where_one_does() {
        let tile = |sizes: &[u32]| {
            let groups: Vec<_> = sizes.iter().map(|&m| group(m, 256)).collect();
            choose(Op::Gated, &groups).tile_tokens
        };
        let sizes: [(&[u32], u32); 7] =
            [(&[1, 0, 8], 8), (&[9], 16), (&[40, 32], 64), (&[96], 96), (&[128, 7], 128), (&[180], 128), (&[0], 8)];
        for (sizes, expected) in sizes {
            assert_eq!(tile(sizes), expected, "{sizes:?}");
        }
    }

    #[test]
    fn tiles_cover_every_group_once_and_start_where_scales_do() {
        for instance in INSTANCES {
            let groups = [group(129, 136), group(0, 8), group(8, 72)].map(|mut group| {
                group.m = if instance.allows(group.m) { group.m } else { instance.tile_tokens };
                group
            });
            let tiles = tiles(*instance, &groups).unwrap();
            for (index, group) in (0..).zip(&groups) {
                let rows = instance.tile_rows();
                let mut covered = vec![0; (group.m * group.n.div_ceil(rows)) as usize];
                for tile in tiles.iter().filter(|tile| tile.group == index) {
                    assert!(tile.first_token.is_multiple_of(32) && (1..=instance.tile_tokens).contains(&tile.tokens));
                    for token in tile.first_token..tile.first_token + tile.tokens {
                        covered[(tile.first_row / rows * group.m + token) as usize] += 1;
                    }
                }
                assert!(covered.iter().all(|&times| times == 1), "{} {group:?}", instance.entry);
            }
        }
    }

    /// The groups of a shape.
    fn groups_of(shape: &Shape) -> Vec<Sizes> {
        shape.groups.iter().map(|sizes| Sizes { m: sizes.m as u32, n: sizes.n as u32, k: sizes.k as u32 }).collect()
    }

    #[test]
    fn the_default_instance_of_the_public_shapes_is_known() {
        /// The shapes whose default has smaller tiles than 128 tokens, the most that a default has.
        const SMALLER: [(&str, &str); 4] =
            [("group-test-5", "t96"), ("decode-1", "t8"), ("decode-4", "t8"), ("decode-16", "t16")];
        const FAMILIES: [&str; 4] = ["dual-", "group-", "moe-", "decode-"];
        let public = |shape: &&Shape| FAMILIES.iter().any(|family| shape.name.starts_with(family));
        for shape in shape::builtin().iter().filter(public) {
            for op in [Op::Gated, Op::Plain] {
                let smaller = SMALLER.iter().find(|(name, _)| *name == shape.name);
                let expected = smaller.map_or("t128", |(_, instance)| instance);
                let instance = choose(op, &groups_of(shape));
                assert_eq!(instance.entry, format!("{}_sm100_{expected}", op.name()), "{}", shape.name);
                let tiles = tiles(instance, &groups_of(shape)).unwrap();
                assert!(tiles.iter().all(|tile| tile.first_token.is_multiple_of(FIRST_TOKEN_ALIGNMENT)));
            }
        }
    }

    #[test]
    fn what_is_issued_is_useful_on_the_shapes_with_ragged_groups() {
        for (name, least) in [("moe-1", 1.0), ("moe-2", 0.97), ("moe-3", 1.0), ("moe-4", 1.0)] {
            let groups = groups_of(&shape::find(name).unwrap());
            let instance = choose(Op::Gated, &groups);
            let (mut useful, mut issued) = (0, 0);
            for tile in tiles(instance, &groups).unwrap() {
                let Sizes { n, k, .. } = groups[tile.group as usize];
                let rows = (n - tile.first_row).min(instance.tile_rows());
                useful += u64::from(tile.tokens * rows) * u64::from(k);
                issued += u64::from(instance.mma_n(tile.tokens) * instance.tile_rows()) * u64::from(k);
            }
            let share = useful as f64 / issued as f64;
            assert!((least..=1.0).contains(&share), "{name}: {share}");
        }
    }

    #[test]
    fn tiles_that_share_weights_are_neighbours_and_each_is_read_as_often_as_it_must() {
        for shape in shape::builtin() {
            for instance in instances(shape.op) {
                let groups = groups_of(shape);
                if !groups.iter().all(|group| instance.allows(group.m)) {
                    continue;
                }
                let tiles = tiles(instance, &groups).unwrap();
                let weights: Vec<_> = tiles.chunk_by(|a, b| (a.group, a.first_row) == (b.group, b.first_row)).collect();
                let distinct: HashSet<_> = weights.iter().map(|tiles| (tiles[0].group, tiles[0].first_row)).collect();
                assert_eq!(distinct.len(), weights.len(), "{} {}: weights come twice", shape.name, instance.entry);
                for tiles in weights {
                    let reads = groups[tiles[0].group as usize].m.div_ceil(instance.tile_tokens);
                    assert_eq!(tiles.len(), reads as usize, "{} {}", shape.name, instance.entry);
                }
            }
        }
    }
}
