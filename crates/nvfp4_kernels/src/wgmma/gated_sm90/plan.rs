//! Choice of the instance, and assignment of tiles to CTAs. Functions of sizes only.
//!
//! Groups are cut into tiles. The tiles are dealt out to at most one CTA per SM, the longest first, by a model of time
//! with two measured constants.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::ops::Range;

use kernels_gpu::wgmma::gated_sm90::abi::{CORE_MATRIX_ROWS, INSTANCES, Instance, K_BLOCK};

use crate::group::Sizes;
use crate::kernel::op_of;
use crate::refused::Refused;
use nvfp4_core::Error;
use nvfp4_core::problem::Op;

/// Time to decode the weights of a k-block, as a number of additional tokens in the tile. Measured on an H200 for
/// panels of [`MEASURED_ROWS`].
const DECODE_TOKENS: u64 = 80;

/// [`DECODE_TOKENS`] for a narrow tile, in which each warpgroup has half as many rows and waits for a larger part of a
/// k-block's time.
const NARROW_DECODE_TOKENS: u64 = 95;

/// Rows of the measured panels. The times of decoding and multiplying are proportional to the rows.
const MEASURED_ROWS: u32 = 128;

/// Time of a tile outside its k-blocks, mostly to write C, as a number of additional k-blocks. Also measured on an
/// H200.
const TILE_K_BLOCKS: u64 = 2;

/// A distribution of work is even enough if the last SM exceeds the average by at most one part in this number.
const EVEN_ENOUGH: u64 = 100;

/// Returns the instances of an operation, the smallest tile first.
pub(super) fn instances(op: Op) -> impl Iterator<Item = Instance> + Clone {
    INSTANCES.iter().copied().filter(move |instance| op_of(instance.matrices) == op)
}

/// Returns the instance of an operation at an index of [`instances`].
pub(super) fn instance(op: Op, index: usize) -> Instance {
    instances(op).nth(index).expect("the index is below the number of instances")
}

/// Tiles of a step's groups, and their assignment to CTAs.
#[derive(Debug)]
pub(super) struct Plan {
    pub instance: Instance,
    /// Tiles: first the first tile of every CTA in the order of CTAs, then the second tile of every CTA, and so on.
    pub tiles: Vec<Tile>,
    pub blocks: u32,
}

/// A tile within its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    /// Index of the group.
    pub group: usize,
    pub first_column: u32,
    pub first_token: u32,
    pub tokens: u32,
    /// Index of the tile that the same CTA computes next. 0: there is none.
    pub next: u32,
}

/// Returns the plan that ends first on a device with `sms` SMs. `None`: every instance is refused.
///
/// # Errors
/// [`Error::TooLarge`] if there are too many tiles.
pub(super) fn best(op: Op, groups: &[Sizes], sms: u32, refused: &Refused) -> Result<Option<Plan>, Error> {
    choose(op, groups, sms, refused).map(|cut| cut.deal(groups, sms)).transpose()
}

/// Returns the plan of an instance with groups cut into tiles of nearly equal size.
///
/// # Errors
/// [`Error::TooLarge`] if there are too many tiles.
pub(super) fn with(instance: Instance, groups: &[Sizes], sms: u32) -> Result<Plan, Error> {
    Cut::even(instance, instance.tile_tokens, groups).deal(groups, sms)
}

/// Number of tiles by time of a tile.
type Kinds = BTreeMap<u64, u64>;

/// A division of groups into tiles.
#[derive(Clone, Debug)]
struct Cut {
    instance: Instance,
    /// Tokens per tile for each group; tiles of its last row may have fewer. 0: the group has no tokens.
    tokens: Vec<u32>,
}

impl Cut {
    /// Cuts groups into the fewest tiles of at most `most` tokens. All tiles of a group have nearly the same size.
    fn even(instance: Instance, most: u32, groups: &[Sizes]) -> Self {
        let tokens = |group: &Sizes| match group.m.div_ceil(most) {
            0 => 0,
            rows => group.m.div_ceil(rows).next_multiple_of(CORE_MATRIX_ROWS).min(most),
        };
        Self { instance, tokens: groups.iter().map(tokens).collect() }
    }

    fn deal(self, groups: &[Sizes], sms: u32) -> Result<Plan, Error> {
        let (tiles, blocks) = deal(self.tiles(groups)?, sms);
        Ok(Plan { instance: self.instance, tiles, blocks })
    }

    /// Time of a tile, in tokens times k-blocks of two panels of [`MEASURED_ROWS`].
    fn cost(&self, tokens: u32, k: u32) -> u64 {
        let k_blocks = u64::from(k.div_ceil(K_BLOCK)) + TILE_K_BLOCKS;
        let rows = u64::from(self.instance.shape().panel_rows());
        let decode = if self.instance.narrow { NARROW_DECODE_TOKENS } else { DECODE_TOKENS };
        k_blocks * rows * (decode + u64::from(self.instance.mma_n(tokens))) / u64::from(MEASURED_ROWS)
    }

    /// Returns time and number of a group's tiles with `tokens` tokens per tile: of whole rows, then of the last row.
    fn group_kinds(&self, group: &Sizes, tokens: u32) -> [(u64, u64); 2] {
        if group.m == 0 {
            return [(0, 0); 2];
        }
        let whole = (group.m - 1) / tokens;
        let columns = u64::from(group.n.div_ceil(self.instance.columns()));
        [
            (self.cost(tokens, group.k), u64::from(whole).saturating_mul(columns)),
            (self.cost(group.m - whole * tokens, group.k), columns),
        ]
    }

    fn kinds(&self, groups: &[Sizes]) -> Kinds {
        let mut kinds = Kinds::new();
        for (group, &tokens) in groups.iter().zip(&self.tokens) {
            add(&mut kinds, self.group_kinds(group, tokens));
        }
        kinds
    }

    /// Returns every tile of every group with its time. Tiles that share weights are adjacent.
    fn tiles(&self, groups: &[Sizes]) -> Result<Vec<(u64, Tile)>, Error> {
        /// Maximum number of tiles. More would need an index of more than 32 bits, and 64 GiB for the list.
        const MAX_TILES: u64 = u32::MAX as u64;

        let count = self.kinds(groups).values().copied().fold(0, u64::saturating_add);
        if count > MAX_TILES {
            return Err(Error::TooLarge);
        }
        let mut tiles = Vec::with_capacity(count as usize);
        for ((index, group), &most) in groups.iter().enumerate().zip(&self.tokens).filter(|((_, group), _)| group.m > 0)
        {
            for first_column in (0..group.n).step_by(self.instance.columns() as usize) {
                for first_token in (0..group.m).step_by(most as usize) {
                    let tokens = most.min(group.m - first_token);
                    let tile = Tile { group: index, first_column, first_token, tokens, next: 0 };
                    tiles.push((self.cost(tokens, group.k), tile));
                }
            }
        }
        Ok(tiles)
    }

    /// Cuts one group after the other differently if the last SM then ends earlier.
    ///
    /// Tiles of different sizes may be dealt out evenly where tiles of one size cannot, even if they form one more row.
    fn refine(&mut self, groups: &[Sizes], sms: u32) {
        let mut kinds = self.kinds(groups);
        let mut best = finish(&kinds, sms);
        let mut changed = true;
        // Planning must not take longer than it saves.
        while changed && best > even(&kinds, sms) + even(&kinds, sms) / EVEN_ENOUGH {
            changed = false;
            for (index, group) in groups.iter().enumerate().filter(|(_, group)| group.m > 0) {
                let rows = group.m.div_ceil(self.instance.tile_tokens);
                let least = group.m.div_ceil(rows + 1).next_multiple_of(CORE_MATRIX_ROWS);
                let most = group.m.min(self.instance.tile_tokens).next_multiple_of(CORE_MATRIX_ROWS);
                for tokens in (least..=most).step_by(CORE_MATRIX_ROWS as usize) {
                    let (before, after) =
                        (self.group_kinds(group, self.tokens[index]), self.group_kinds(group, tokens));
                    let mut others = kinds.clone();
                    remove(&mut others, before);
                    add(&mut others, after);
                    let time = finish(&others, sms);
                    if time < best {
                        (best, kinds, self.tokens[index], changed) = (time, others, tokens, true);
                    }
                }
            }
        }
    }
}

fn add(kinds: &mut Kinds, more: [(u64, u64); 2]) {
    for (time, count) in more.into_iter().filter(|(_, count)| *count > 0) {
        let of = kinds.entry(time).or_default();
        *of = of.saturating_add(count);
    }
}

fn remove(kinds: &mut Kinds, fewer: [(u64, u64); 2]) {
    for (time, count) in fewer.into_iter().filter(|(_, count)| *count > 0) {
        *kinds.get_mut(&time).expect("these tiles were added before") -= count;
    }
}

/// Returns the cut with which the SMs end first. Among equals, the largest tiles win, because they read weights least
/// often.
fn choose(op: Op, groups: &[Sizes], sms: u32, refused: &Refused) -> Option<Cut> {
    let largest = groups.iter().map(|group| group.m).max().unwrap_or(0);
    let sizes = instances(op).filter(|instance| !refused.contains(instance.entry)).flat_map(|instance| {
        let most = instance.tile_tokens / 2 + CORE_MATRIX_ROWS..=instance.tile_tokens;
        most.step_by(CORE_MATRIX_ROWS as usize).map(move |most| (instance, most))
    });
    // Tiles larger than all tokens need would only take shared memory from the stages.
    let enough = sizes.clone().find(|&(_, most)| most >= largest).map_or(u32::MAX, |(_, most)| most);
    let cuts =
        sizes.filter(|&(_, most)| most <= enough).map(|(instance, most)| (most, Cut::even(instance, most, groups)));
    let time = |(most, cut): &(u32, Cut)| (finish(&cut.kinds(groups), sms), Reverse(*most));
    let (_, mut cut) = cuts.min_by_key(time)?;
    cut.refine(groups, sms);
    Some(cut)
}

/// Time per SM if the work were distributed evenly.
fn even(kinds: &Kinds, sms: u32) -> u64 {
    let total: u128 = kinds.iter().map(|(&time, &count)| u128::from(time) * u128::from(count)).sum();
    u64::try_from(total / u128::from(sms)).unwrap_or(u64::MAX)
}

/// Time when the last SM ends with tiles of these kinds, dealt out as [`owners`] does, but many at a time.
fn finish(kinds: &Kinds, sms: u32) -> u64 {
    /// With more tiles per SM than this, the average decides.
    const MANY: u64 = 32;

    let tiles = kinds.values().fold(0, |sum: u64, count| sum.saturating_add(*count));
    let blocks = tiles.min(u64::from(sms));
    if tiles == 0 || tiles > MANY * blocks {
        return even(kinds, sms);
    }
    let descending = || kinds.iter().rev().map(|(&time, &count)| (time, count));
    let with_fewer = with_fewer(tiles, blocks);
    let long_tiles = with_fewer * (tiles.div_ceil(blocks) - 1);
    let mut before = 0;
    let (long, short): (Vec<_>, Vec<_>) = descending()
        .map(|(time, count)| {
            let long = count.min(long_tiles - before);
            before += long;
            ((time, long), (time, count - long))
        })
        .unzip();
    let split = longest_first_of(long, with_fewer).max(longest_first_of(short, blocks - with_fewer));
    split.min(longest_first_of(descending(), blocks))
}

/// Time when the last of `blocks` CTAs ends if each tile in turn goes to the CTA that is free first.
fn longest_first_of(kinds: impl IntoIterator<Item = (u64, u64)>, blocks: u64) -> u64 {
    // Number of CTAs by the time at which they are free.
    let mut done = BTreeMap::from([(0, blocks)]);
    for (time, mut count) in kinds {
        while count > 0 {
            let mut first = done.first_entry().expect("there is a block for every tile");
            let (until, of) = (*first.key(), first.get_mut());
            let taken = count.min(*of);
            *of -= taken;
            if *of == 0 {
                first.remove();
            }
            *done.entry(until + time).or_default() += taken;
            count -= taken;
        }
    }
    done.last_key_value().map_or(0, |(&until, _)| until)
}

/// Number of CTAs with one tile fewer than the others if tiles are dealt out as evenly as possible.
fn with_fewer(tiles: u64, blocks: u64) -> u64 {
    blocks * tiles.div_ceil(blocks) - tiles
}

/// Deals tiles, each with its time, out to at most `sms` CTAs. Returns them in the order of [`Plan`], and the number of
/// CTAs.
fn deal(mut tiles: Vec<(u64, Tile)>, sms: u32) -> (Vec<Tile>, u32) {
    // The sort is stable: tiles that share weights and time stay adjacent, and so run at the same time.
    tiles.sort_by_key(|&(time, _)| Reverse(time));
    let blocks = tiles.len().min(sms as usize);
    let owners = owners(&tiles, blocks);
    let mut rounds = vec![0_u32; blocks];
    let place = |(&(_, tile), block): (&(u64, Tile), usize)| {
        rounds[block] += 1;
        (rounds[block], block, tile)
    };
    let mut places: Vec<_> = tiles.iter().zip(owners).map(place).collect();
    places.sort_by_key(|&(round, block, _)| (round, block));
    let mut next = vec![0; blocks];
    for (index, (_, block, tile)) in places.iter_mut().enumerate().rev() {
        tile.next = std::mem::replace(&mut next[*block], index as u32);
    }
    (places.into_iter().map(|(.., tile)| tile).collect(), blocks as u32)
}

/// Returns the CTA of each tile. Tiles come in descending order of time.
///
/// If the number of tiles is not a multiple of the number of CTAs, some CTAs have one tile fewer. The longest tiles go
/// to those CTAs if the last CTA then ends earlier. Otherwise each tile in turn goes to the CTA that is free first.
fn owners(tiles: &[(u64, Tile)], blocks: usize) -> Vec<usize> {
    if blocks == 0 {
        return Vec::new();
    }
    let with_fewer = with_fewer(tiles.len() as u64, blocks as u64) as usize;
    let (long, short) = tiles.split_at(with_fewer * (tiles.len().div_ceil(blocks) - 1));
    let (mut owners, long_time) = longest_first(long, 0..with_fewer);
    let (short_owners, short_time) = longest_first(short, with_fewer..blocks);
    let (plain_owners, plain_time) = longest_first(tiles, 0..blocks);
    if plain_time <= long_time.max(short_time) {
        return plain_owners;
    }
    owners.extend(short_owners);
    owners
}

/// Assigns each tile in turn to the CTA that is free first. Also returns the time when the last CTA ends.
fn longest_first(tiles: &[(u64, Tile)], blocks: Range<usize>) -> (Vec<usize>, u64) {
    let mut done: BinaryHeap<_> = blocks.map(|block| Reverse((0_u64, block))).collect();
    let mut last = 0;
    let owner = |&(time, _): &(u64, Tile)| {
        let mut first = done.peek_mut().expect("there is a block for every tile");
        let Reverse((until, block)) = &mut *first;
        *until += time;
        last = last.max(*until);
        *block
    };
    let owners = tiles.iter().map(owner).collect();
    (owners, last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_core::shape;

    const SMS: u32 = 132;

    fn group(m: u32, n: u32, k: u32) -> Sizes {
        Sizes { m, n, k }
    }

    fn chosen(op: Op, groups: &[Sizes]) -> Cut {
        choose(op, groups, SMS, &Refused::default()).unwrap()
    }

    /// Returns the gated instance with tiles of 128 tokens.
    fn t128() -> Instance {
        *INSTANCES.iter().find(|instance| instance.entry == "gated_sm90_t128").unwrap()
    }

    #[test]
    fn tiles_fit_the_tokens_of_a_group() {
        let most = |sizes: [u32; 8]| chosen(Op::Gated, &sizes.map(|m| group(m, 4096, 7168))).instance.tile_tokens;
        assert_eq!([1, 16, 64, 128].map(|m| most([m; 8])), [16, 16, 64, 128]);
        assert_eq!(most([80, 176, 128, 72, 64, 248, 96, 160]), 128);
    }

    #[test]
    fn group_of_few_tiles_gets_narrow_tiles() {
        let narrow = |m, n| chosen(Op::Gated, &[group(m, n, 7168)]).instance.narrow;
        // 128 narrow tiles; 128 wide tiles; 96 narrow tiles; 120 wide tiles of 104 tokens.
        assert_eq!(
            [narrow(256, 4096), narrow(512, 4096), narrow(256, 3072), narrow(512, 3072)],
            [true, false, true, false]
        );
    }

    #[test]
    fn even_tiles_cover_every_group_once() {
        for op in [Op::Gated, Op::Plain] {
            for instance in instances(op) {
                let groups = [group(129, 136, 64), group(0, 8, 64), group(7, 520, 64)];
                let cut = Cut::even(instance, instance.tile_tokens, &groups);
                let tiles = cut.tiles(&groups).unwrap();
                for (index, group) in groups.iter().enumerate() {
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
        let sizes = [0, 1, 128, 129, 248, 300].map(|m| group(m, 8, 64));
        assert_eq!(Cut::even(t128(), 128, &sizes).tokens, [0, 8, 128, 72, 128, 104]);
    }

    #[test]
    fn every_tile_is_dealt_out_once_and_evenly() {
        let deal_out = |costs: &[u64], sms| -> Vec<Vec<u64>> {
            let tile = |group| Tile { group, first_column: 0, first_token: 0, tokens: 1, next: 0 };
            let (dealt, blocks) = deal(costs.iter().copied().zip((0..).map(tile)).collect(), sms);
            let mut groups: Vec<_> = dealt.iter().map(|tile| tile.group).collect();
            groups.sort_unstable();
            assert_eq!(groups, (0..costs.len()).collect::<Vec<_>>());
            let next = |tile: &&Tile| (tile.next > 0).then(|| &dealt[tile.next as usize]);
            let of_block = |block: u32| std::iter::successors(Some(&dealt[block as usize]), next);
            (0..blocks).map(|block| of_block(block).map(|tile| costs[tile.group]).collect()).collect()
        };
        let blocks = deal_out(&[5, 1, 4, 1, 1, 3, 3], 3);
        assert_eq!(blocks.iter().map(|costs| costs.iter().sum::<u64>()).collect::<Vec<_>>(), [6, 6, 6]);
        assert!(deal_out(&[], 3).is_empty());
        // Two of the longest, or three of the others.
        let blocks = deal_out(&[vec![9; 4], vec![6; 6]].concat(), 4);
        assert_eq!(blocks, [vec![9; 2], vec![9; 2], vec![6; 3], vec![6; 3]]);
    }

    #[test]
    fn estimated_time_matches_the_dealt_tiles() {
        let time = |kinds: &[(u64, u64)], sms| finish(&kinds.iter().copied().collect(), sms);
        assert_eq!(time(&[(10, 4)], 4), 10);
        assert_eq!(time(&[(10, 5)], 4), 20);
        assert_eq!(time(&[(10, 4), (3, 1)], 4), 13);
        assert_eq!(time(&[(1, 4000)], 4), 1000);
        assert_eq!(time(&[], 4), 0);
        let tile = Tile { group: 0, first_column: 0, first_token: 0, tokens: 1, next: 0 };
        for (kinds, sms) in
            [(vec![(9, 4), (6, 6)], 4), (vec![(12, 7), (11, 30), (7, 19), (2, 5)], 13), (vec![(5, 3)], 8)]
        {
            let mut tiles: Vec<_> =
                kinds.iter().flat_map(|&(time, count)| vec![(time, tile); count as usize]).collect();
            tiles.sort_by_key(|&(time, _)| Reverse(time));
            let blocks = tiles.len().min(sms as usize);
            let mut until = vec![0; blocks];
            for ((time, _), block) in tiles.iter().zip(owners(&tiles, blocks)) {
                until[block] += time;
            }
            assert_eq!(time(&kinds, sms), until.into_iter().max().unwrap(), "{kinds:?}");
        }
    }

    #[test]
    fn groups_are_cut_unevenly_if_that_saves_time() {
        for name in ["moe-1", "moe-2"] {
            let shape = shape::builtin().iter().find(|shape| shape.name == name).unwrap();
            let groups: Vec<_> =
                shape.groups.iter().map(|sizes| group(sizes.m as u32, sizes.n as u32, sizes.k as u32)).collect();
            let time = |cut: &Cut| finish(&cut.kinds(&groups), SMS);
            let even = Cut::even(t128(), 128, &groups);
            let chosen = chosen(Op::Gated, &groups);
            assert!(time(&chosen) < time(&even), "{name}");
        }
    }

    #[test]
    fn every_built_in_shape_has_a_plan_for_both_operations() {
        for shape in shape::builtin() {
            for op in [Op::Gated, Op::Plain] {
                let groups: Vec<_> =
                    shape.groups.iter().map(|sizes| group(sizes.m as u32, sizes.n as u32, sizes.k as u32)).collect();
                let plan = best(op, &groups, SMS, &Refused::default()).unwrap().unwrap();
                assert!(plan.blocks > 0 && plan.blocks <= SMS, "{}", shape.name);
                assert!(plan.blocks as usize <= plan.tiles.len());
            }
        }
    }

    #[test]
    fn too_many_tiles_are_refused() {
        let huge = group(u32::MAX, 1 << 20, 32);
        assert!(matches!(best(Op::Gated, &[huge], SMS, &Refused::default()), Err(Error::TooLarge)));
        assert!(matches!(best(Op::Gated, &[huge; 64], SMS, &Refused::default()), Err(Error::TooLarge)));
    }
}
