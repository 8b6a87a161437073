//! Launches of the Blackwell kernel, `kernels-gpu/src/gated_sm100.rs`: which entry, which tiles in which order, which
//! tensor maps. Pure functions.

use kernels_gpu::abi;
use kernels_gpu::abi::sm100::{Group, INSTANCES, Instance, K_ALIGNMENT, STEP_BYTES, THREADS, TILE_ROWS, Tile};

use super::Grid;
use crate::error::Error;
use crate::problem::Op;

/// The most tokens of a tile that is chosen unasked: the gated kernel has one accumulator from here on, and beyond it
/// loses a stage too.
const MAX_TILE_TOKENS: u32 = 128;

/// Bytes of a tensor map, which is also what it is aligned to here.
pub(crate) const MAP_BYTES: usize = 128;

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

/// The arguments of a tensor map over packed values: u8, 2 dimensions, rows one behind the other, the swizzle that spans a
/// row of a box, zeros outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MapArguments {
    /// Of the first value.
    pub address: u64,
    /// Bytes of a row.
    pub row_bytes: u32,
    /// Rows of the matrix.
    pub rows: u32,
    /// Bytes of a row of a box, 64 or 128.
    pub box_bytes: u32,
    /// Rows of a box.
    pub box_rows: u32,
}

impl MapArguments {
    fn new(address: u64, rows: u32, k: u32, box_rows: u32) -> Self {
        Self { address, row_bytes: k / 2, rows, box_bytes: STEP_BYTES, box_rows }
    }
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

/// The entry that reads weights least often; of those that do so equally often, the one with the smallest tile.
fn choose(op: Op, groups: &[abi::Group]) -> Instance {
    let reads = |instance: &Instance| -> u64 {
        let of = |group: &abi::Group| {
            let weights = u64::from(group.n) * u64::from(group.k);
            weights.saturating_mul(group.m.div_ceil(instance.tile_tokens).into())
        };
        groups.iter().map(of).fold(0, u64::saturating_add)
    };
    let fits = |instance: &Instance| {
        instance.tile_tokens <= MAX_TILE_TOKENS && groups.iter().all(|group| instance.allows(group.m))
    };
    let preference = |instance: &Instance| (reads(instance), instance.tile_tokens, std::cmp::Reverse(instance.stages));
    let instances = variants(op).map(|(_, instance)| instance);
    instances.filter(fits).min_by_key(preference).expect("tiles of 32 tokens take any number of them")
}

fn plan_with(instance: Instance, groups: &[abi::Group], sms: u32) -> Result<Plan, Error> {
    let tiles = tiles(instance, groups)?;
    let blocks = (tiles.len() as u32).min(sms);
    let grid = Grid { entry: instance.entry, blocks, threads: THREADS, shared_bytes: instance.shared_bytes() };
    Ok(Plan { grid, tiles, instance })
}

/// Every tile of every group. Those that share weights are neighbours: blocks that run side by side read them once from
/// memory. A block comes through the groups in order, so that it changes maps as rarely as it can.
fn tiles(instance: Instance, groups: &[abi::Group]) -> Result<Vec<Tile>, Error> {
    /// More would need an index of more than 32 bits, and 64 GiB of tiles.
    const MAX_TILES: u64 = u32::MAX as u64;

    let count =
        |group: &abi::Group| u64::from(group.m.div_ceil(instance.tile_tokens)) * u64::from(group.n.div_ceil(TILE_ROWS));
    let count = groups.iter().map(count).fold(0, u64::saturating_add);
    if count > MAX_TILES {
        return Err(Error::TooLarge);
    }
    let mut tiles = Vec::with_capacity(count as usize);
    for (index, group) in (0..).zip(groups) {
        for first_row in (0..group.n).step_by(TILE_ROWS as usize) {
            for first_token in (0..group.m).step_by(instance.tile_tokens as usize) {
                let tokens = instance.tile_tokens.min(group.m - first_token);
                tiles.push(Tile { group: index, first_row, first_token, tokens });
            }
        }
    }
    Ok(tiles)
}

impl Plan {
    /// Tensor maps of a group: of its tokens, then of each matrix of weights. A group without tokens has none.
    fn maps_of(&self, group: &abi::Group) -> usize {
        if group.m > 0 { 1 + self.instance.matrices as usize } else { 0 }
    }

    /// How many maps the groups need.
    pub fn map_count(&self, groups: &[abi::Group]) -> usize {
        groups.iter().map(|group| self.maps_of(group)).sum()
    }

    /// The arguments of the groups' maps, in the order in which they lie in memory.
    pub fn maps(&self, groups: &[abi::Group]) -> impl Iterator<Item = MapArguments> {
        groups.iter().flat_map(|group| {
            let tokens = MapArguments::new(group.a, group.m, group.k, self.instance.tile_tokens);
            let weights = group.b.map(|address| MapArguments::new(address, group.n, group.k, TILE_ROWS));
            [tokens].into_iter().chain(weights).take(self.maps_of(group))
        })
    }

    /// What the kernel is told of the groups, whose maps lie from `maps` on.
    pub fn describe(&self, groups: &[abi::Group], maps: u64) -> Vec<Group> {
        let mut next = maps;
        let describe = |group: &abi::Group| {
            let abi::Group { a_scales, b_scales, c, alpha, m, n, k, .. } = *group;
            let map = |index: u64| next + index * MAP_BYTES as u64;
            let described =
                Group { a_map: map(0), a_scales, b_maps: [map(1), map(2)], b_scales, c, alpha, m, n, k, unused: 0 };
            next = map(self.maps_of(group) as u64);
            described
        };
        groups.iter().map(describe).collect()
    }
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable;

    use super::*;
    use crate::shape;

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
            [(&[1, 0, 8], 8), (&[9], 16), (&[40, 32], 64), (&[96], 96), (&[128, 7], 128), (&[180], 96), (&[0], 8)];
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
                let mut covered = vec![0; (group.m * group.n.div_ceil(TILE_ROWS)) as usize];
                for tile in tiles.iter().filter(|tile| tile.group == index) {
                    assert!(tile.first_token.is_multiple_of(32) && (1..=instance.tile_tokens).contains(&tile.tokens));
                    for token in tile.first_token..tile.first_token + tile.tokens {
                        covered[(tile.first_row / TILE_ROWS * group.m + token) as usize] += 1;
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
        assert_eq!(maps[0], MapArguments { address: 0x1000, row_bytes: 160, rows: 7, box_bytes: 128, box_rows: 16 });
        assert_eq!(maps[2], MapArguments { address: 0x3000, row_bytes: 160, rows: 72, box_bytes: 128, box_rows: 128 });
        assert_eq!((plan.grid.blocks, plan.grid.entry), (2, "gated_sm100_t16"));
    }

    #[test]
    fn every_built_in_shape_has_a_plan_for_both_operations() {
        for shape in shape::builtin() {
            for op in [Op::Gated, Op::Plain] {
                let groups: Vec<_> = shape
                    .groups
                    .iter()
                    .map(|sizes| abi::Group { k: sizes.k as u32, ..group(sizes.m as u32, sizes.n as u32) })
                    .collect();
                let plan = plan(op, None, &groups, 148).unwrap();
                assert!(plan.grid.blocks > 0 && plan.grid.blocks as usize <= plan.tiles.len(), "{}", shape.name);
                assert_eq!(plan.map_count(&groups), (1 + op.projections()) * groups.iter().filter(|g| g.m > 0).count());
            }
        }
    }
}
