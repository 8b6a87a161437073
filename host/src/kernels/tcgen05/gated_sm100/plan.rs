//! Which instance, and which tiles in which order. Functions of sizes alone.

use kernels_gpu::nvfp4_rows::K_BLOCK;
use kernels_gpu::tcgen05::gated_sm100::abi::{
    Halves, INSTANCES, Instance, K_BLOCK_BYTES, MMAS_PER_K_BLOCK, N_STEP, Roles, Store, Tile,
};

use crate::error::Error;
use crate::kernels::group::Sizes;
use crate::kernels::kernel::op_of;
use crate::kernels::tiles;
use crate::problem::Op;

/// The most tokens of a block's own tile that is a default. From this size on the gated kernel has one accumulator, and beyond it also
/// a stage less.
const MAX_TILE_TOKENS: u32 = 128;

/// A default tile of tokens that follows another starts at a multiple of this: at every second column of scales in tensor
/// memory, as in CUTLASS.
const FIRST_TOKEN_ALIGNMENT: u32 = 64;

/// The instances of an operation.
pub(super) fn instances(op: Op) -> impl Iterator<Item = Instance> {
    INSTANCES.iter().copied().filter(move |instance| op_of(instance.matrices) == op)
}

/// The instances of an operation that may be taken unasked: blocks alone, and pairs that have a matrix each. Those that were made for a
/// comparison are none until a card has shown them faster.
pub(super) fn candidates(op: Op) -> impl Iterator<Item = Instance> {
    let plain_design = |instance: &Instance| {
        let pair_with_a_matrix_each = instance.blocks == 2 && instance.block_matrices() == 1;
        let alone = instance.blocks == 1 && instance.tile_tokens <= MAX_TILE_TOKENS;
        (instance.store, instance.roles) == (Store::Direct, Roles::Specialized) && (alone || pair_with_a_matrix_each)
    };
    instances(op).filter(plain_design)
}

/// The instance that a B200 takes least time for, by [`cycles`]. Among equals it is the one with the smallest tile, then the one
/// with the most stages.
pub(super) fn choose(op: Op, groups: &[Sizes], sms: u32) -> Instance {
    let fits = |instance: &Instance| {
        let one_tile = groups.iter().all(|group| group.m <= instance.tile_tokens);
        one_tile || instance.tile_tokens.is_multiple_of(FIRST_TOKEN_ALIGNMENT)
    };
    let preference = |instance: &Instance| {
        (cycles(*instance, groups, sms), instance.tile_tokens, std::cmp::Reverse(instance.stages))
    };
    let candidates = candidates(op).filter(|instance| instance.blocks_of_tile() <= sms.max(1));
    candidates.filter(fits).min_by_key(preference).expect("tiles of 64 tokens take any number of them")
}

/// Bytes a cycle that one multiprocessor takes in, and that L2 delivers to all of a B200: `intake` and `l2-bandwidth` of
/// docs/time-model.md.
const INTAKE: u64 = 72;
const L2: u64 = 8142;

/// Cycles of the epilogue for 8 tokens of a tile: what the time model makes of its instructions.
const fn epilogue(instance: Instance) -> u64 {
    match (instance.matrices, instance.blocks, instance.halves) {
        _ if instance.splits > 1 => 60,
        (1, 1, _) => 90,
        (1, ..) => 75,
        (.., Halves::Rows) => 185,
        (.., Halves::Matrices) => 90,
    }
}

/// Cycles of an MMA at this N: the tensor core's rate, or that at which it reads shared memory, of which each block of a pair has less
/// to read (SemiAnalysisAI/microbench-blackwell, 9a068d85).
fn mma(instance: Instance, n: u64) -> u64 {
    (n / 2).max(if instance.blocks == 1 { 32 } else { 28 } + n / 4)
}

/// Cycles of a copy of a tile of scales to tensor memory.
const SCALE_COPY: u64 = 8;

/// Cycles that the blocks of a pair take to find each other, beyond those of a block alone: what the time model has on small groups.
const PAIRING: u64 = 300;

/// Cycles beyond those that two pairs with parts of K take to find each other and to exchange sums.
const SPLITTING: u64 = 500;

/// The cycles that a B200 takes for some groups, about: those of a mean tile, times the tiles of the busiest multiprocessor, or those of
/// the longest tile; and the last epilogue. A k-block takes as long as its copies or as its products.
fn cycles(instance: Instance, groups: &[Sizes], sms: u32) -> u64 {
    let tiles_of = |group: &Sizes| {
        let rows = u64::from(group.n.div_ceil(instance.tile_rows()));
        let (full, rest) = (group.m / instance.tile_tokens, group.m % instance.tile_tokens);
        [(rows * u64::from(full), instance.tile_tokens), (rows * u64::from(rest > 0), rest)]
            .map(|tiles| (tiles, group.k))
    };
    let tiles = || groups.iter().flat_map(tiles_of).filter(|((count, _), _)| *count > 0);
    let count: u64 = tiles().map(|((count, _), _)| count).sum();
    let blocks = u64::from(instance.blocks);
    let blocks_of_tile = instance.blocks_of_tile();
    let at_once = count.min(u64::from((sms / blocks_of_tile).max(1))).max(1);
    // Where K is split a block computes one tile, and another begins only when it has ended.
    if instance.splits > 1 && count > at_once {
        return u64::MAX;
    }
    let rate = INTAKE.min(L2 / (at_once * u64::from(blocks_of_tile))).max(1);
    let matrices = u64::from(instance.block_matrices());
    let epilogue = |tokens: u32| epilogue(instance) * u64::from(tokens.div_ceil(N_STEP));
    let main_loop = |tokens: u32, k: u32| {
        let n = u64::from(instance.mma_n(tokens));
        let missing = (u64::from(instance.tile_tokens) - n) / blocks * u64::from(K_BLOCK_BYTES);
        let copies = (u64::from(instance.stage_bytes()) - missing) / rate;
        let scale_copies = SCALE_COPY * (matrices + u64::from(instance.token_scale_tiles()));
        let products = u64::from(MMAS_PER_K_BLOCK) * (matrices * mma(instance, n) + scale_copies);
        u64::from(k.div_ceil(K_BLOCK).div_ceil(instance.splits)) * copies.max(products)
    };
    let overlaps = instance.accumulators() > 1 && instance.splits == 1;
    let tile = |tokens: u32, k: u32| match overlaps {
        true => main_loop(tokens, k).max(epilogue(tokens)),
        false => main_loop(tokens, k) + epilogue(tokens),
    };
    let all =
        tiles().fold(0, |sum: u64, ((count, tokens), k)| sum.saturating_add(count.saturating_mul(tile(tokens, k))));
    let longest = tiles().map(|((_, tokens), k)| tile(tokens, k)).max().unwrap_or(0);
    let last = if overlaps { tiles().map(|((_, tokens), _)| epilogue(tokens)).max().unwrap_or(0) } else { 0 };
    let pairing = if instance.blocks > 1 { PAIRING } else { 0 };
    let splitting = if instance.splits > 1 { SPLITTING } else { 0 };
    count.div_ceil(at_once).saturating_mul(all / count.max(1)).max(longest) + last + pairing + splitting
}

/// Blocks for so many tiles. A pair of blocks computes a tile on two multiprocessors; where K is split, blocks compute no tile after
/// their first.
pub(super) fn blocks(instance: Instance, tiles: usize, sms: u32) -> u32 {
    let blocks = instance.blocks_of_tile();
    blocks * if instance.splits > 1 { tiles as u32 } else { (tiles as u32).min((sms / blocks).max(1)) }
}

/// Every tile of every group, those of the groups with the most tokens first: what is left for the end is short, and blocks end
/// together.
///
/// # Errors
/// [`Error::TooLarge`] if they cannot be counted.
pub(super) fn tiles(instance: Instance, groups: &[Sizes]) -> Result<Vec<Tile>, Error> {
    let mut order: Vec<_> = (0..groups.len()).collect();
    order.sort_by_key(|&group| std::cmp::Reverse(groups[group].m));
    let sorted: Vec<_> = order.iter().map(|&group| groups[group]).collect();
    tiles::tiles(&sorted, [instance.tile_rows(), instance.tile_tokens], |place, first_row, first_token, tokens| Tile {
        group: order[place as usize] as u32,
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

    const B200_SMS: u32 = 148;

    fn group(m: u32, n: u32) -> Sizes {
        Sizes { m, n, k: 320 }
    }

    #[test]
    fn one_multiprocessor_reads_weights_once_and_many_are_used_in_pairs() {
        let chosen = |sizes: &[u32], sms| {
            let groups: Vec<_> = sizes.iter().map(|&m| group(m, 256)).collect();
            choose(Op::Gated, &groups, sms).entry.strip_prefix("gated_sm100_").unwrap()
        };
        let sizes: [(&[u32], [&str; 2]); 6] = [
            (&[1, 0, 8], ["t8", "t64_apart"]),
            (&[9], ["t16", "t64_apart"]),
            (&[40, 32], ["t64", "t64_apart"]),
            (&[128, 7], ["t64", "t64_apart"]),
            (&[180], ["t64", "t64_apart"]),
            (&[0], ["t8", "t8"]),
        ];
        for (sizes, expected) in sizes {
            assert_eq!([1, B200_SMS].map(|sms| chosen(sizes, sms)), expected, "{sizes:?}");
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
        const DEFAULTS: [(&str, &str); 15] = [
            ("dual-1", "gated_sm100_t256_split"),
            ("dual-2", "gated_sm100_t256_apart"),
            ("dual-3", "gated_sm100_t256_split"),
            ("dual-4", "gated_sm100_t192_apart"),
            ("group-1", "plain_sm100_t192_pair"),
            ("group-2", "plain_sm100_t192_pair"),
            ("group-3", "plain_sm100_t192_split"),
            ("group-4", "plain_sm100_t128_pair"),
            ("moe-1", "gated_sm100_t192_apart"),
            ("moe-2", "gated_sm100_t192_apart"),
            ("moe-3", "gated_sm100_t192_apart"),
            ("moe-4", "gated_sm100_t128_apart"),
            ("decode-1", "gated_sm100_t8"),
            ("decode-4", "gated_sm100_t8"),
            ("decode-16", "gated_sm100_t16"),
        ];
        for (name, expected) in DEFAULTS {
            let shape = shape::find(name).unwrap();
            let instance = choose(shape.op, &groups_of(&shape), B200_SMS);
            assert_eq!(instance.entry, expected, "{name}");
            let tiles = tiles(instance, &groups_of(&shape)).unwrap();
            assert!(tiles.iter().all(|tile| tile.first_token.is_multiple_of(FIRST_TOKEN_ALIGNMENT)));
        }
    }

    #[test]
    fn what_is_issued_is_useful_on_the_shapes_with_ragged_groups() {
        for (name, least) in [("moe-1", 0.98), ("moe-2", 0.94), ("moe-3", 1.0), ("moe-4", 1.0)] {
            let groups = groups_of(&shape::find(name).unwrap());
            let instance = choose(Op::Gated, &groups, B200_SMS);
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
    fn groups_with_the_most_tokens_come_first() {
        let groups = [group(8, 128), group(0, 128), group(64, 256), group(9, 128)];
        let tiles = tiles(choose(Op::Gated, &groups, B200_SMS), &groups).unwrap();
        assert_eq!(tiles.iter().map(|tile| tile.group).collect::<Vec<_>>(), [2, 2, 3, 0]);
    }

    #[test]
    fn tiles_that_share_weights_are_neighbors_and_each_is_read_as_often_as_it_must() {
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
