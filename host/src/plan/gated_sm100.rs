//! Launches of the Blackwell kernel, `kernels-gpu/src/gated_sm100/`: which entry, which tiles in which order, which
//! tensor maps. Pure functions.

use kernels_gpu::gated_simt::abi;
use kernels_gpu::gated_sm100::abi::{
    BOX_BYTES, BOX_TOKENS, Group, INSTANCES, Instance, K_ALIGNMENT, K_BLOCK, Roles, Store, TILE_ROWS, Tile,
};

use super::Grid;
use super::tensor_map::{MAP_BYTES, MapArguments};
use crate::error::Error;
use crate::problem::Op;

/// The most tokens of a tile that is chosen unasked: the gated kernel has one accumulator from here on, and beyond it
/// loses a stage too.
const MAX_TILE_TOKENS: u32 = 128;

/// Where a tile of tokens may start that is chosen unasked: at every second column of scales in tensor memory, as in CUTLASS.
const FIRST_TOKEN_ALIGNMENT: u32 = 64;

/// What the kernel is called that computes an operation.
pub(crate) fn name(op: Op) -> &'static str {
    match op {
        Op::Gated => "gated_sm100",
        Op::Plain => "plain_sm100",
    }
}

/// Whether the kernel can compute a sum over K elements.
pub(crate) fn takes(k: usize) -> bool {
    k.is_multiple_of(K_ALIGNMENT as usize)
}

/// A step's launch.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The launch itself.
    pub grid: Grid,
    /// The list of tiles.
    pub tiles: Vec<Tile>,
    instance: Instance,
}

/// Plans a step of an operation on a device of so many multiprocessors, with the variant of the kernel that is asked for
/// by its name, such as `t64`, or else the best.
///
/// # Errors
/// [`Error::TooLarge`] if the tiles cannot be counted; [`Error::Invalid`] if there is no such variant, or it does not take
/// these groups.
pub(crate) fn plan(op: Op, variant: Option<&str>, groups: &[abi::Group], sms: u32) -> Result<Plan, Error> {
    let instance = match variant {
        Some(variant) => find(op, variant, groups)?,
        None => choose(op, groups),
    };
    plan_with(instance, groups, sms)
}

/// The variants of an operation, by name.
pub(crate) fn variants(op: Op) -> impl Iterator<Item = (&'static str, Instance)> {
    let of = move |instance: &Instance| {
        let variant = instance.entry.strip_prefix(name(op))?.strip_prefix('_')?;
        Some((variant, *instance))
    };
    INSTANCES.iter().filter_map(of)
}

fn find(op: Op, variant: &str, groups: &[abi::Group]) -> Result<Instance, Error> {
    let Some((_, instance)) = variants(op).find(|(name, _)| *name == variant) else {
        let names: Vec<_> = variants(op).map(|(name, _)| name).collect();
        return Err(Error::Invalid(format!("`{variant}` is no variant of {}; it has {}", name(op), names.join(", "))));
    };
    match groups.iter().position(|group| !instance.allows(group.m)) {
        None => Ok(instance),
        Some(index) => {
            let (most, m) = (instance.tile_tokens, groups[index].m);
            let text = format!("{m} tokens; variant {variant} takes {most} at most: choose one of larger tiles");
            Err(Error::Invalid(text).at(format_args!("group {index}")))
        }
    }
}

/// The entry that reads weights least often; of those that do so equally often, the one with the smallest tile, and of
/// those the one with the most stages.
///
/// The variants that were made to be compared with are nobody's default before a card has shown them faster.
fn choose(op: Op, groups: &[abi::Group]) -> Instance {
    let reads = |instance: &Instance| -> u64 {
        let of = |group: &abi::Group| {
            let weights = u64::from(group.n) * u64::from(group.k);
            weights.saturating_mul(group.m.div_ceil(instance.tile_tokens).into())
        };
        groups.iter().map(of).fold(0, u64::saturating_add)
    };
    let plain_design = |instance: &Instance| {
        (instance.store, instance.roles, instance.blocks) == (Store::Direct, Roles::Specialised, 1)
    };
    let fits = |instance: &Instance| {
        let one_tile = groups.iter().all(|group| group.m <= instance.tile_tokens);
        instance.tile_tokens <= MAX_TILE_TOKENS
            && (one_tile || instance.tile_tokens.is_multiple_of(FIRST_TOKEN_ALIGNMENT))
    };
    let preference = |instance: &Instance| (reads(instance), instance.tile_tokens, std::cmp::Reverse(instance.stages));
    let instances = variants(op).map(|(_, instance)| instance).filter(plain_design);
    instances.filter(fits).min_by_key(preference).expect("tiles of 64 tokens take any number of them")
}

fn plan_with(instance: Instance, groups: &[abi::Group], sms: u32) -> Result<Plan, Error> {
    let tiles = tiles(instance, groups)?;
    let Instance { entry, blocks: cluster, .. } = instance;
    // A pair runs on two multiprocessors.
    let blocks = cluster * (tiles.len() as u32).min((sms / cluster).max(1));
    let grid = Grid {
        entry,
        blocks,
        cluster,
        threads: instance.threads(),
        shared_bytes: instance.shared_bytes(),
        overlaps: false,
    };
    Ok(Plan { grid, tiles, instance })
}

/// Every tile of every group. Those that share weights are neighbours: blocks that run side by side read them once from
/// memory. A block comes through the groups in order, so that it changes maps as rarely as it can.
fn tiles(instance: Instance, groups: &[abi::Group]) -> Result<Vec<Tile>, Error> {
    /// More would need an index of more than 32 bits, and 64 GiB of tiles.
    const MAX_TILES: u64 = u32::MAX as u64;

    let tile_rows = instance.tile_rows();
    let count =
        |group: &abi::Group| u64::from(group.m.div_ceil(instance.tile_tokens)) * u64::from(group.n.div_ceil(tile_rows));
    let count = groups.iter().map(count).fold(0, u64::saturating_add);
    if count > MAX_TILES {
        return Err(Error::TooLarge);
    }
    let mut tiles = Vec::with_capacity(count as usize);
    for (index, group) in (0..).zip(groups) {
        for first_row in (0..group.n).step_by(tile_rows as usize) {
            for first_token in (0..group.m).step_by(instance.tile_tokens as usize) {
                let tokens = instance.tile_tokens.min(group.m - first_token);
                tiles.push(Tile { group: index, first_row, first_token, tokens });
            }
        }
    }
    Ok(tiles)
}

/// The map of a group's C, as the epilogue stores it.
fn output_map(group: &abi::Group) -> MapArguments {
    let (address, row_bytes, rows) = (group.c, 2 * group.n, group.m);
    MapArguments { address, row_bytes, rows, box_bytes: BOX_BYTES, box_rows: BOX_TOKENS, swizzled: false }
}

impl Plan {
    /// Tensor maps of a group: of its tokens, then of each matrix of weights, then of C if that is stored by one. A group
    /// without tokens has none.
    fn maps_of(&self, group: &abi::Group) -> impl Iterator<Item = MapArguments> {
        let instance = self.instance;
        let values = |address, rows, box_rows| MapArguments::values(address, rows, group.k, K_BLOCK, box_rows);
        let tokens = values(group.a, group.m, instance.block_tokens());
        let weights = group.b.map(|address| values(address, group.n, TILE_ROWS));
        let weights = weights.into_iter().take(instance.matrices as usize);
        let output = (instance.store == Store::Tma).then(|| output_map(group));
        [tokens].into_iter().chain(weights).chain(output).filter(|_| group.m > 0)
    }

    /// How many maps the groups need.
    pub fn map_count(&self, groups: &[abi::Group]) -> usize {
        self.maps(groups).count()
    }

    /// The arguments of the groups' maps, in the order in which they lie in memory.
    pub fn maps(&self, groups: &[abi::Group]) -> impl Iterator<Item = MapArguments> {
        groups.iter().flat_map(|group| self.maps_of(group))
    }

    /// What the kernel is told of the groups, whose maps lie from `maps` on.
    pub fn describe(&self, groups: &[abi::Group], maps: u64) -> Vec<Group> {
        let matrices = u64::from(self.instance.matrices);
        let mut next = maps;
        let describe = |group: &abi::Group| {
            let abi::Group { a_scales, b_scales, c, alpha, m, n, k, .. } = *group;
            let map = |index: u64| next + index * MAP_BYTES as u64;
            let (b_maps, c_map) = ([map(1), map(2)], map(1 + matrices));
            let described =
                Group { a_map: map(0), a_scales, b_maps, b_scales, c, c_map, alpha, m, n, k, unused: [0; 3] };
            next = map(self.maps_of(group).count() as u64);
            described
        };
        groups.iter().map(describe).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use bytemuck::Zeroable;

    use super::*;
    use crate::problem;
    use crate::shape::{self, Shape};

    fn group(m: u32, n: u32) -> abi::Group {
        abi::Group { a: 0x1000, b: [0x2000, 0x3000], m, n, k: 320, ..abi::Group::zeroed() }
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

    #[test]
    fn each_group_with_tokens_gets_its_own_maps() {
        let groups = [group(7, 72), group(0, 8), group(9, 8)];
        let plan = plan(Op::Gated, None, &groups, 148).unwrap();
        let described = plan.describe(&groups, 0x10000);
        let map = |index: u64| 0x10000 + index * MAP_BYTES as u64;
        assert_eq!((described[0].a_map, described[0].b_maps), (map(0), [map(1), map(2)]));
        assert_eq!((described[2].a_map, described[2].b_maps), (map(3), [map(4), map(5)]));
        let maps: Vec<_> = plan.maps(&groups).collect();
        assert_eq!((maps.len(), plan.map_count(&groups)), (6, 6));
        assert_eq!(maps[0], MapArguments::values(0x1000, 7, 320, 256, 16));
        assert_eq!(maps[2], MapArguments::values(0x3000, 72, 320, 256, 128));
        assert_eq!((plan.grid.blocks, plan.grid.entry), (2, "gated_sm100_t16"));
    }

    /// The groups of a shape, somewhere in memory.
    fn groups_of(shape: &Shape) -> Vec<abi::Group> {
        let of = |sizes: &problem::Group| abi::Group { k: sizes.k as u32, ..group(sizes.m as u32, sizes.n as u32) };
        shape.groups.iter().map(of).collect()
    }

    #[test]
    fn every_built_in_shape_has_a_plan_for_both_operations() {
        for shape in shape::builtin() {
            for op in [Op::Gated, Op::Plain] {
                let groups = groups_of(shape);
                let plan = plan(op, None, &groups, 148).unwrap();
                assert!(plan.grid.blocks > 0 && plan.grid.blocks as usize <= plan.tiles.len(), "{}", shape.name);
                assert_eq!(plan.map_count(&groups), (1 + op.projections()) * groups.iter().filter(|g| g.m > 0).count());
            }
        }
    }

    #[test]
    fn the_default_instance_of_every_built_in_shape_is_known() {
        /// The shapes that do not take the one of 128 tokens, the most that is chosen unasked.
        const SMALLER: [(&str, &str); 4] =
            [("group-test-5", "t96"), ("decode-1", "t8"), ("decode-4", "t8"), ("decode-16", "t16")];
        for shape in shape::builtin() {
            for op in [Op::Gated, Op::Plain] {
                let smaller = SMALLER.iter().find(|(name, _)| *name == shape.name);
                let expected = smaller.map_or("t128", |(_, instance)| instance);
                let plan = plan(op, None, &groups_of(shape), 148).unwrap();
                assert_eq!(plan.grid.entry, format!("{}_{expected}", name(op)), "{}", shape.name);
                assert!(plan.tiles.iter().all(|tile| tile.first_token.is_multiple_of(FIRST_TOKEN_ALIGNMENT)));
            }
        }
    }

    #[test]
    fn what_is_issued_is_useful_on_the_shapes_with_ragged_groups() {
        for (name, least) in [("moe-1", 1.0), ("moe-2", 0.97), ("moe-3", 1.0), ("moe-4", 1.0)] {
            let groups = groups_of(&shape::find(name).unwrap());
            let plan = plan(Op::Gated, None, &groups, 148).unwrap();
            let (mut useful, mut issued) = (0, 0);
            for tile in &plan.tiles {
                let Group { n, k, .. } = plan.describe(&groups, 0)[tile.group as usize];
                let rows = (n - tile.first_row).min(plan.instance.tile_rows());
                useful += u64::from(tile.tokens * rows) * u64::from(k);
                issued += u64::from(plan.instance.mma_n(tile.tokens) * plan.instance.tile_rows()) * u64::from(k);
            }
            let share = useful as f64 / issued as f64;
            assert!((least..=1.0).contains(&share), "{name}: {share}");
        }
    }

    #[test]
    fn tiles_that_share_weights_are_neighbours_and_each_is_read_as_often_as_it_must() {
        for shape in shape::builtin() {
            for (name, instance) in variants(shape.op) {
                let groups = groups_of(shape);
                if !groups.iter().all(|group| instance.allows(group.m)) {
                    continue;
                }
                let tiles = tiles(instance, &groups).unwrap();
                let weights: Vec<_> = tiles.chunk_by(|a, b| (a.group, a.first_row) == (b.group, b.first_row)).collect();
                let distinct: HashSet<_> = weights.iter().map(|tiles| (tiles[0].group, tiles[0].first_row)).collect();
                assert_eq!(distinct.len(), weights.len(), "{} {name}: weights come twice", shape.name);
                for tiles in weights {
                    let reads = groups[tiles[0].group as usize].m.div_ceil(instance.tile_tokens);
                    assert_eq!(tiles.len(), reads as usize, "{} {name}", shape.name);
                }
            }
        }
    }

    #[test]
    fn pairs_take_two_multiprocessors_and_stores_by_tensor_map_a_map_of_c() {
        let groups = [group(7, 72), group(9, 300)];
        let plan_of = |variant| plan(Op::Gated, Some(variant), &groups, 5).unwrap();
        let (pair, tma) = (plan_of("t64_pair"), plan_of("t64_tma"));
        assert_eq!((pair.tiles.len(), pair.grid.blocks, pair.grid.cluster), (3, 4, 2));
        assert_eq!((tma.tiles.len(), tma.grid.blocks, tma.grid.cluster), (4, 4, 1));
        let (maps, described) = (tma.maps(&groups).collect::<Vec<_>>(), tma.describe(&groups, 0x10000));
        assert_eq!((maps.len(), pair.map_count(&groups)), (8, 6));
        assert_eq!(maps[7], output_map(&groups[1]));
        assert_eq!(described[1].c_map, 0x10000 + 7 * MAP_BYTES as u64);
    }
}
