//! Launches of the Hopper kernel, `kernels-gpu/src/gated_sm90.rs`: which entry, which tiles on which block, which tensor
//! maps; and the layout of its weights. Pure functions.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use kernels_gpu::abi;
use kernels_gpu::abi::sm90::{Group, INSTANCES, Instance, K_ALIGNMENT, STEP, Tile};

use super::Grid;
use super::tensor_map::{MAP_BYTES, MapArguments};
use crate::error::Error;
use crate::problem::Op;

/// A step of a tile takes as long as if it had so many tokens more: that long it takes to decode its weights, as measured on
/// an H200.
const STEP_TOKENS: u64 = 80;

/// Steps that a tile costs on top of its own: filling the pipeline and writing C.
const TILE_STEPS: u64 = 4;

/// What the kernel is called that computes an operation.
pub(crate) fn name(op: Op) -> &'static str {
    match op {
        Op::Gated => "gated_sm90",
        Op::Plain => "plain_sm90",
    }
}

/// Whether the kernel can compute a sum over K elements.
pub(crate) fn takes(k: usize) -> bool {
    k.is_multiple_of(K_ALIGNMENT as usize)
}

/// The instances of an operation's kernel, by name: `t64` for tiles of up to 64 tokens.
pub(crate) fn instances(op: Op) -> impl Iterator<Item = (&'static str, Instance)> + Clone {
    let of = move |instance: &Instance| Some((instance.entry.strip_prefix(name(op))?.strip_prefix('_')?, *instance));
    INSTANCES.iter().filter_map(of)
}

/// A step's launch.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The launch itself.
    pub grid: Grid,
    /// The tiles, block by block.
    pub tiles: Vec<Tile>,
    /// Where in the list each block's begin, and where the last one's end.
    pub starts: Vec<u32>,
    instance: Instance,
}

/// Plans a step of an operation on a device of so many multiprocessors, with the instance of the kernel that is asked for
/// by its name, such as `t64`, or else the best.
///
/// # Errors
/// [`Error::TooLarge`] if the tiles cannot be counted; [`Error::Invalid`] if there is no such instance.
pub(crate) fn plan(op: Op, named: Option<&str>, groups: &[abi::Group], sms: u32) -> Result<Plan, Error> {
    let split = match named {
        None => choose(op, groups, sms),
        Some(named) => match instances(op).find(|(name, _)| *name == named) {
            Some((_, instance)) => Split { instance, most: instance.tile_tokens },
            None => {
                let names: Vec<_> = instances(op).map(|(name, _)| name).collect();
                let (name, names) = (name(op), names.join(", "));
                return Err(Error::Invalid(format!("`{named}` is no variant of {name}; it has {names}")));
            }
        },
    };
    let (tiles, starts) = deal(split.tiles(groups)?, sms);
    let grid = Grid {
        entry: split.instance.entry,
        blocks: starts.len() as u32 - 1,
        cluster: 1,
        threads: split.instance.threads(),
        shared_bytes: split.instance.shared_bytes(),
    };
    Ok(Plan { grid, tiles, starts, instance: split.instance })
}

/// How groups are cut into tiles.
#[derive(Clone, Copy, Debug)]
struct Split {
    instance: Instance,
    /// The most tokens of a tile.
    most: u32,
}

impl Split {
    /// Rows of tiles of a group of so many tokens, and the tokens of each but the last: as many as they must be, all of
    /// nearly the same size.
    fn rows(self, m: u32) -> (u32, u32) {
        let rows = m.div_ceil(self.most);
        (rows, if rows == 0 { 0 } else { m.div_ceil(rows).next_multiple_of(8).min(self.most) })
    }

    /// Time of a tile, in tokens times steps.
    fn cost(self, tokens: u32, k: u32) -> u64 {
        let steps = u64::from(k.div_ceil(STEP)) + TILE_STEPS;
        steps * (STEP_TOKENS + u64::from(self.instance.width(tokens)))
    }

    /// Kinds of tiles: the time of one, and how many there are.
    fn costs(self, groups: &[abi::Group]) -> impl Iterator<Item = (u64, u64)> {
        groups.iter().filter(|group| group.m > 0).map(move |group| {
            let (rows, tokens) = self.rows(group.m);
            (self.cost(tokens, group.k), u64::from(rows) * u64::from(group.n.div_ceil(self.instance.columns())))
        })
    }

    /// Every tile of every group with its time, those that share weights side by side.
    fn tiles(self, groups: &[abi::Group]) -> Result<Vec<(u64, Tile)>, Error> {
        /// More would need an index of more than 32 bits, and 64 GiB of tiles.
        const MAX_TILES: u64 = u32::MAX as u64;

        let count = self.costs(groups).map(|(_, count)| count).fold(0, u64::saturating_add);
        if count > MAX_TILES {
            return Err(Error::TooLarge);
        }
        let mut tiles = Vec::with_capacity(count as usize);
        for (index, group) in (0..).zip(groups).filter(|(_, group)| group.m > 0) {
            let (_, most) = self.rows(group.m);
            for first_column in (0..group.n).step_by(self.instance.columns() as usize) {
                for first_token in (0..group.m).step_by(most as usize) {
                    let tokens = most.min(group.m - first_token);
                    let tile = Tile { group: index, first_column, first_token, tokens };
                    tiles.push((self.cost(most, group.k), tile));
                }
            }
        }
        Ok(tiles)
    }
}

/// The split with which the multiprocessors are done first; of several, the one of the largest tiles, which read weights
/// least often.
fn choose(op: Op, groups: &[abi::Group], sms: u32) -> Split {
    let largest = groups.iter().map(|group| group.m).max().unwrap_or(0);
    let splits = instances(op).flat_map(|(_, instance)| {
        let steps = instance.tile_tokens / 2 + instance.width_step..=instance.tile_tokens;
        steps.step_by(instance.width_step as usize).map(move |most| Split { instance, most })
    });
    // Larger tiles than all tokens need would only take shared memory from the stages.
    let enough = splits.clone().find(|split| split.most >= largest).map_or(u32::MAX, |split| split.most);
    let time = |split: &Split| (makespan(split.costs(groups).collect(), sms), Reverse(split.most));
    splits.filter(|split| split.most <= enough).min_by_key(time).expect("there are instances")
}

/// How long multiprocessors take at least for tiles of these kinds, a time and a count each.
///
/// Of the n·p + 1 tiles that take longest, a multiprocessor of p gets n + 1, the shortest of them at best.
fn makespan(mut kinds: Vec<(u64, u64)>, sms: u32) -> u64 {
    let processors = u64::from(sms);
    kinds.sort_unstable_by_key(|&(cost, _)| Reverse(cost));
    let total: u128 = kinds.iter().map(|&(cost, count)| u128::from(cost) * u128::from(count)).sum();
    let tiles: u64 = kinds.iter().fold(0, |sum, (_, count)| sum.saturating_add(*count));
    let mut least = u64::try_from(total / u128::from(processors)).unwrap_or(u64::MAX);
    // With many tiles to each, the average decides.
    for more in 0..(tiles.saturating_sub(1) / processors + 1).min(8) {
        let (first, last) = (more * processors - more * u64::from(more > 0), more * processors);
        let mut before = 0;
        let mut sum = 0;
        for &(cost, count) in &kinds {
            let (start, end) = (before, before + count);
            before = end;
            let overlap = end.min(last + 1).saturating_sub(start.max(first));
            sum += cost * overlap;
        }
        least = least.max(sum);
    }
    least
}

/// Deals tiles, each with its time, out to at most so many blocks. Returns them block by block, and where each block's begin.
fn deal(mut tiles: Vec<(u64, Tile)>, sms: u32) -> (Vec<Tile>, Vec<u32>) {
    // Stable: tiles that share weights and time stay side by side, and so run at the same time.
    tiles.sort_by_key(|&(time, _)| Reverse(time));
    let blocks = tiles.len().min(sms as usize);
    let owners = owners(&tiles, blocks);
    let mut counts = vec![0_u32; blocks];
    owners.iter().for_each(|&block| counts[block] += 1);
    let mut starts = Vec::with_capacity(blocks + 1);
    starts.push(0);
    for count in counts {
        starts.push(starts[starts.len() - 1] + count);
    }
    let mut next = starts.clone();
    let mut dealt = vec![Tile { group: 0, first_column: 0, first_token: 0, tokens: 0 }; tiles.len()];
    for (&(_, tile), block) in tiles.iter().zip(owners) {
        dealt[next[block] as usize] = tile;
        next[block] += 1;
    }
    (dealt, starts)
}

/// The block of each tile; tiles come in descending order of time.
///
/// If tiles do not come out even, some blocks have one fewer than the others. The longest tiles go to those, if that makes the
/// last block done earlier than to choose for each tile the block that is done first.
fn owners(tiles: &[(u64, Tile)], blocks: usize) -> Vec<usize> {
    if blocks == 0 {
        return Vec::new();
    }
    let most = tiles.len().div_ceil(blocks);
    let with_fewer = blocks * most - tiles.len();
    let (long, short) = tiles.split_at(with_fewer * (most - 1));
    let (mut owners, long_time) = longest_first(long, 0..with_fewer);
    let (short_owners, short_time) = longest_first(short, with_fewer..blocks);
    let (plain_owners, plain_time) = longest_first(tiles, 0..blocks);
    if plain_time <= long_time.max(short_time) {
        return plain_owners;
    }
    owners.extend(short_owners);
    owners
}

/// For each tile in turn, the block that is done first; and when the last is done.
fn longest_first(tiles: &[(u64, Tile)], blocks: Range<usize>) -> (Vec<usize>, u64) {
    let mut done: BinaryHeap<_> = blocks.map(|block| Reverse((0_u64, block))).collect();
    let mut last = 0;
    let owner = |&(time, _): &(u64, Tile)| {
        let mut first = done.peek_mut().expect("there are blocks where there are tiles");
        let Reverse((until, block)) = &mut *first;
        *until += time;
        last = last.max(*until);
        *block
    };
    let owners = tiles.iter().map(owner).collect();
    (owners, last)
}

impl Plan {
    /// How many tensor maps the groups need: one of the tokens of each that has any.
    pub fn map_count(&self, groups: &[abi::Group]) -> usize {
        groups.iter().filter(|group| group.m > 0).count()
    }

    /// The arguments of the groups' maps, in the order in which they lie in memory.
    pub fn maps(&self, groups: &[abi::Group]) -> impl Iterator<Item = MapArguments> {
        let map = |group: &abi::Group| MapArguments::values(group.a, group.m, group.k, STEP, self.instance.tile_tokens);
        groups.iter().filter(|group| group.m > 0).map(map)
    }

    /// What the kernel is told of the groups, whose maps lie from `maps` on.
    pub fn describe(&self, groups: &[abi::Group], maps: u64) -> Vec<Group> {
        let mut a_map = maps;
        let describe = |group: &abi::Group| {
            let abi::Group { a_scales, b, c, alpha, n, k, .. } = *group;
            let described = Group { a_map, a_scales, b, c, alpha, n, k };
            a_map += if group.m > 0 { MAP_BYTES as u64 } else { 0 };
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

    const SMS: u32 = 132;

    fn group(m: u32, n: u32, k: u32) -> abi::Group {
        abi::Group { a: 0x1000, b: [0x2000, 0x3000], m, n, k, ..abi::Group::zeroed() }
    }

    #[test]
    fn tiles_have_room_for_a_groups_tokens_but_not_for_many_more() {
        let most = |sizes: [u32; 8]| {
            let split = choose(Op::Gated, &sizes.map(|m| group(m, 4096, 7168)), SMS);
            (split.instance.tile_tokens, split.most)
        };
        assert_eq!(most([1; 8]), (16, 16));
        assert_eq!(most([16; 8]).0, 16);
        assert_eq!(most([64; 8]).0, 64);
        assert_eq!(most([80, 176, 128, 72, 64, 248, 96, 160]), (128, 128));
    }

    #[test]
    fn tiles_cover_every_group_once_with_even_tiles() {
        for op in [Op::Gated, Op::Plain] {
            for (_, instance) in instances(op) {
                let split = Split { instance, most: instance.tile_tokens };
                let groups = [group(129, 136, 64), group(0, 8, 64), group(7, 520, 64)];
                let tiles = split.tiles(&groups).unwrap();
                for (index, group) in (0..).zip(&groups) {
                    let columns = instance.columns();
                    let mut covered = vec![0; (group.m * group.n.div_ceil(columns)) as usize];
                    for (_, tile) in tiles.iter().filter(|(_, tile)| tile.group == index) {
                        assert!((1..=instance.tile_tokens).contains(&tile.tokens));
                        for token in tile.first_token..tile.first_token + tile.tokens {
                            covered[(tile.first_column / columns * group.m + token) as usize] += 1;
                        }
                    }
                    assert!(covered.iter().all(|&times| times == 1), "{} {group:?}", instance.entry);
                }
            }
        }
        let split = Split { instance: Instance::of(2, 128), most: 128 };
        assert_eq!(
            [0, 1, 128, 129, 248, 300].map(|m| split.rows(m)),
            [(0, 0), (1, 8), (1, 128), (2, 72), (2, 128), (3, 104)]
        );
    }

    #[test]
    fn tiles_are_dealt_out_evenly_and_each_once() {
        let tile = |group| Tile { group, first_column: 0, first_token: 0, tokens: 1 };
        let costs = [5, 1, 4, 1, 1, 3, 3];
        let (dealt, starts) = deal(costs.into_iter().zip((0..).map(tile)).collect(), 3);
        let blocks: Vec<u64> = starts
            .windows(2)
            .map(|ends| dealt[ends[0] as usize..ends[1] as usize].iter().map(|tile| costs[tile.group as usize]).sum())
            .collect();
        assert_eq!(blocks, [6, 6, 6]);
        let mut groups: Vec<_> = dealt.iter().map(|tile| tile.group).collect();
        groups.sort_unstable();
        assert_eq!(groups, [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(deal(Vec::new(), 3).1, [0]);
        // Two of the longest, or three others.
        let times = [vec![9; 4], vec![6; 6]].concat();
        let (_, starts) = deal(times.into_iter().zip((0..).map(tile)).collect(), 4);
        assert_eq!(starts, [0, 2, 4, 7, 10]);
    }

    #[test]
    fn the_bound_of_the_time_counts_whole_tiles() {
        assert_eq!(makespan(vec![(10, 4)], 4), 10);
        assert_eq!(makespan(vec![(10, 5)], 4), 20);
        assert_eq!(makespan(vec![(10, 4), (3, 1)], 4), 13);
        assert_eq!(makespan(vec![(1, 4000)], 4), 1000);
        assert_eq!(makespan(vec![], 4), 0);
    }

    #[test]
    fn each_group_with_tokens_gets_a_map_of_its_own() {
        let groups = [group(7, 72, 320), group(0, 8, 320), group(9, 8, 320)];
        let plan = plan(Op::Gated, None, &groups, SMS).unwrap();
        let described = plan.describe(&groups, 0x10000);
        assert_eq!((described[0].a_map, described[2].a_map), (0x10000, 0x10000 + MAP_BYTES as u64));
        assert_eq!(described[0].b, groups[0].b);
        let maps: Vec<_> = plan.maps(&groups).collect();
        assert_eq!((maps.len(), plan.map_count(&groups)), (2, 2));
        let map = maps[0];
        let expected = (0x1000, 160, 7, 64, 16);
        assert_eq!((map.address, map.row_bytes, map.rows, map.box_bytes, map.box_rows), expected);
    }

    #[test]
    fn every_built_in_shape_has_a_plan_for_both_operations() {
        for shape in shape::builtin() {
            for op in [Op::Gated, Op::Plain] {
                let groups: Vec<_> =
                    shape.groups.iter().map(|sizes| group(sizes.m as u32, sizes.n as u32, sizes.k as u32)).collect();
                let plan = plan(op, None, &groups, SMS).unwrap();
                assert!(plan.grid.blocks > 0 && plan.grid.blocks <= SMS, "{}", shape.name);
                assert_eq!(*plan.starts.last().unwrap() as usize, plan.tiles.len());
            }
        }
    }

    #[test]
    fn more_tiles_than_can_be_numbered_are_refused() {
        let huge = group(u32::MAX, 1 << 20, 32);
        assert!(matches!(plan(Op::Gated, None, &[huge], SMS), Err(Error::TooLarge)));
        assert!(matches!(plan(Op::Gated, None, &[huge; 64], SMS), Err(Error::TooLarge)));
    }
}
