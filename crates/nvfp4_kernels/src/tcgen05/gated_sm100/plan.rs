//! Choice of the instance, and the order of tiles. Functions of sizes only.

use kernels_gpu::nvfp4_rows::K_BLOCK;
use kernels_gpu::tcgen05::gated_sm100::abi::{
    Halves, INSTANCES, Instance, K_BLOCK_BYTES, MMAS_PER_K_BLOCK, N_STEP, Roles, Store, Tile,
};

use crate::group::Sizes;
use crate::kernel::op_of;
use crate::refused::Refused;
use crate::tiles;
use nvfp4_core::Error;
use nvfp4_core::problem::Op;

/// Maximum tokens of a single CTA's tile for default instances. At this size the gated kernel has only one accumulator;
/// above it, also one stage fewer.
const MAX_TILE_TOKENS: u32 = 128;

/// A default tile of tokens that follows another starts at a multiple of this: at every second column of scales in
/// tensor memory, as in CUTLASS.
const FIRST_TOKEN_ALIGNMENT: u32 = 64;

/// Returns the instances of an operation.
pub(super) fn instances(op: Op) -> impl Iterator<Item = Instance> {
    INSTANCES.iter().copied().filter(move |instance| op_of(instance.matrices) == op)
}

/// Returns the instances of an operation that may be chosen by default: single CTAs, and pairs whose CTAs have one
/// matrix each. Instances for comparisons are excluded until a measurement shows that they are faster.
pub(super) fn candidates(op: Op) -> impl Iterator<Item = Instance> {
    let plain_design = |instance: &Instance| {
        let pair_with_a_matrix_each = instance.blocks == 2 && instance.block_matrices() == 1;
        let alone = instance.blocks == 1 && instance.tile_tokens <= MAX_TILE_TOKENS;
        (instance.store, instance.roles, instance.one_set) == (Store::Direct, Roles::Specialized, false)
            && (alone || pair_with_a_matrix_each)
    };
    instances(op).filter(plain_design)
}

/// Whether every tile of tokens of an instance starts at an even column of scales, whatever the number of tokens.
pub(super) fn has_even_tiles(instance: Instance) -> bool {
    instance.tile_tokens.is_multiple_of(FIRST_TOKEN_ALIGNMENT)
}

/// Returns the instance that is fastest on a B200 according to [`cycles`], if one is not refused. Among equals, the
/// smallest tile wins, then relaxed arrivals, then the most stages.
pub(super) fn choose(op: Op, groups: &[Sizes], sms: u32, refused: &Refused) -> Option<Instance> {
    let fits = |instance: &Instance| {
        let one_tile = groups.iter().all(|group| group.m <= instance.tile_tokens);
        one_tile || has_even_tiles(*instance)
    };
    let preference = |instance: &Instance| {
        (cycles(*instance, groups, sms), instance.tile_tokens, instance.releases, std::cmp::Reverse(instance.stages))
    };
    let is_left = |instance: &Instance| instance.blocks_of_tile() <= sms.max(1) && !refused.contains(instance.entry);
    candidates(op).filter(is_left).filter(fits).min_by_key(preference)
}

/// Bytes per cycle that one SM takes in, and that L2 delivers to all SMs of a B200: `intake` and `l2-bandwidth` of
/// benches/lab/time-model.md.
const INTAKE: u64 = 72;
const L2: u64 = 8142;

/// Cycles of the epilogue per 8 tokens of a tile, according to the time model.
const fn epilogue(instance: Instance) -> u64 {
    match (instance.matrices, instance.blocks, instance.halves) {
        _ if instance.splits > 1 => 60,
        (1, 1, _) => 90,
        (1, ..) => 75,
        (.., Halves::Rows) => 185,
        (.., Halves::Matrices) => 90,
    }
}

/// Cycles of an MMA with this N: the longer of the tensor core's time and the time to read shared memory. Each CTA of a
/// pair has less to read (SemiAnalysisAI/microbench-blackwell, 9a068d85).
fn mma(instance: Instance, n: u64) -> u64 {
    (n / 2).max(if instance.blocks == 1 { 32 } else { 28 } + n / 4)
}

/// Cycles to copy a tile of scales to tensor memory.
const SCALE_COPY: u64 = 8;

/// Cycles that the CTAs of a pair need to find each other, compared with a single CTA: from the time model of small
/// groups.
const PAIRING: u64 = 300;

/// Additional cycles that two pairs with parts of K need to find each other and to exchange sums.
const SPLITTING: u64 = 500;

/// Estimates the cycles of a B200 for some groups. The estimate is the mean tile times the number of tiles of the
/// busiest SM, or the longest tile if that is more, plus the last epilogue. A k-block takes the longer of its copies
/// and its products.
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
    // If K is split, a CTA computes one tile, and another CTA begins only when it has ended.
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

/// Returns the number of CTAs for `tiles` tiles. A pair of CTAs computes a tile on two SMs. If K is split, CTAs compute
/// only one tile.
pub(super) fn blocks(instance: Instance, tiles: usize, sms: u32) -> u32 {
    let blocks = instance.blocks_of_tile();
    blocks * if instance.splits > 1 { tiles as u32 } else { (tiles as u32).min((sms / blocks).max(1)) }
}

/// Returns every tile of every group, groups with more tokens first. So the last tiles are short, and CTAs end
/// together.
///
/// # Errors
/// [`Error::TooLarge`] if there are too many tiles.
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
    use nvfp4_core::shape::{self, Shape};

    const B200_SMS: u32 = 148;

    fn group(m: u32, n: u32) -> Sizes {
        Sizes { m, n, k: 320 }
    }

    fn chosen(op: Op, groups: &[Sizes], sms: u32) -> Instance {
        choose(op, groups, sms, &Refused::default()).unwrap()
    }

    #[test]
    fn one_sm_reads_weights_once_and_many_work_in_pairs() {
        let chosen = |sizes: &[u32], sms| {
            let groups: Vec<_> = sizes.iter().map(|&m| group(m, 256)).collect();
            chosen(Op::Gated, &groups, sms).entry.strip_prefix("gated_sm100_").unwrap()
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
    fn tiles_cover_each_group_once_from_multiples_of_32_tokens() {
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

    /// Returns the groups of a shape.
    fn groups_of(shape: &Shape) -> Vec<Sizes> {
        shape.groups.iter().map(|sizes| Sizes { m: sizes.m as u32, n: sizes.n as u32, k: sizes.k as u32 }).collect()
    }

    #[test]
    fn public_shapes_have_known_default_instances() {
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
            let instance = chosen(shape.op, &groups_of(&shape), B200_SMS);
            assert_eq!(instance.entry, expected, "{name}");
            let tiles = tiles(instance, &groups_of(&shape)).unwrap();
            assert!(tiles.iter().all(|tile| tile.first_token.is_multiple_of(FIRST_TOKEN_ALIGNMENT)));
        }
    }

    #[test]
    fn most_products_of_ragged_groups_are_useful() {
        for (name, least) in [("moe-1", 0.98), ("moe-2", 0.94), ("moe-3", 1.0), ("moe-4", 1.0)] {
            let groups = groups_of(&shape::find(name).unwrap());
            let instance = chosen(Op::Gated, &groups, B200_SMS);
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
        let tiles = tiles(chosen(Op::Gated, &groups, B200_SMS), &groups).unwrap();
        assert_eq!(tiles.iter().map(|tile| tile.group).collect::<Vec<_>>(), [2, 2, 3, 0]);
    }

    #[test]
    fn tiles_sharing_weights_are_adjacent() {
        for shape in shape::builtin() {
            for instance in instances(shape.op) {
                let groups = groups_of(shape);
                if !groups.iter().all(|group| instance.allows(group.m)) {
                    continue;
                }
                let tiles = tiles(instance, &groups).unwrap();
                let weights: Vec<_> = tiles.chunk_by(|a, b| (a.group, a.first_row) == (b.group, b.first_row)).collect();
                let distinct: HashSet<_> = weights.iter().map(|tiles| (tiles[0].group, tiles[0].first_row)).collect();
                assert_eq!(
                    distinct.len(),
                    weights.len(),
                    "{} {}: tiles with the same weights are not adjacent",
                    shape.name,
                    instance.entry
                );
                for tiles in weights {
                    let reads = groups[tiles[0].group as usize].m.div_ceil(instance.tile_tokens);
                    assert_eq!(tiles.len(), reads as usize, "{} {}", shape.name, instance.entry);
                }
            }
        }
    }
}
