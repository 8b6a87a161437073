//! How a CTA finds its work.

use core::marker::PhantomData;

use cuda_std::warp::{ALL_LANES, WARP_SIZE, lane_id, warp_vote_ballot};

/// Returns the index of the segment that contains `number`: the last segment that begins at or before it.
///
/// There are `count` segments, at least 1, in ascending order. `first` returns the start of a segment; the first one
/// starts at 0. An empty segment starts where the next one does, so it is skipped.
#[inline(always)]
pub fn last_begun(count: u32, number: u32, first: impl Fn(u32) -> u32) -> u32 {
    let (mut low, mut high) = (0, count);
    while high - low > 1 {
        let middle = low.midpoint(high);
        if first(middle) <= number {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

/// Same as [`last_begun`], by a whole warp. The lanes first read segments at a regular distance, then neighboring
/// segments, so the warp waits for memory at most twice. There are at most 1024 segments.
///
/// # Safety
/// The whole warp calls this together, with the same arguments. `first` can be called with indices up to `count`.
#[inline(always)]
pub unsafe fn last_begun_by_warp(count: u32, number: u32, first: impl Fn(u32) -> u32) -> u32 {
    let distance = count.div_ceil(WARP_SIZE);
    let begun = |index: u32| {
        let begins = first(index.min(count));
        // SAFETY: the caller guarantees that the whole warp is here.
        unsafe { warp_vote_ballot(ALL_LANES, index < count && begins <= number) }.count_ones()
    };
    let start = (begun(lane_id() * distance) - 1) * distance;
    if distance == 1 {
        return start;
    }
    start + begun(if lane_id() < distance { start + lane_id() } else { count }) - 1
}

/// A tile in a list made by the host.
pub trait OfGroup {
    /// Index of the tile's group.
    fn group(&self) -> u32;
}

/// Tiles of one CTA from a list, each with a copy of its group. The fields of a copy stay in registers; a reference
/// would be reloaded after every wait and every copy.
pub struct Tiles<T, G> {
    tiles: u64,
    tile_count: u32,
    groups: u64,
    next: u32,
    stride: u32,
    items: PhantomData<(T, G)>,
}

impl<T, G> Tiles<T, G> {
    /// Returns every `stride`-th tile from index `next` on.
    ///
    /// # Safety
    /// `tile_count` tiles lie at `tiles`, and the groups that they name lie at `groups`. Nobody writes either array
    /// while the kernel runs.
    #[inline(always)]
    pub const unsafe fn new(tiles: u64, tile_count: u32, groups: u64, next: u32, stride: u32) -> Self {
        Self { tiles, tile_count, groups, next, stride, items: PhantomData }
    }
}

impl<T: OfGroup + Copy, G: Copy> Iterator for Tiles<T, G> {
    type Item = (T, G);

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        if self.next >= self.tile_count {
            return None;
        }
        // SAFETY: `next < tile_count`, so the tile is inside its array; the caller of `new` guarantees that the tile
        // names a group at `groups` and that nobody writes either array.
        let item = unsafe {
            let tile = *(self.tiles as *const T).add(self.next as usize);
            (tile, *(self.groups as *const G).add(tile.group() as usize))
        };
        self.next += self.stride;
        Some(item)
    }
}
