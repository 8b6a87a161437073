//! How a block finds its work.

use core::marker::PhantomData;

/// The index of the segment that `number` belongs to: the last one that begins at or before it.
///
/// There are `count` segments, not 0, in ascending order. `first` says where each begins; the first begins at 0. An empty
/// segment begins where the next one does, so that it is passed over.
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

/// A tile of a list that the host has made.
pub trait OfGroup {
    /// The index of its group.
    fn group(&self) -> u32;
}

/// A block's tiles of a list, each with its group: a copy, whose fields stay in registers. Behind a reference, every wait and every
/// copy would have them loaded again.
pub struct Tiles<T, G> {
    tiles: u64,
    tile_count: u32,
    groups: u64,
    next: u32,
    stride: u32,
    items: PhantomData<(T, G)>,
}

impl<T, G> Tiles<T, G> {
    /// The tiles from the one of index `next` on that are `stride` apart.
    ///
    /// # Safety
    /// So many tiles lie at `tiles`, and the groups that they name lie at `groups`. Neither changes while the kernel runs.
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
        // SAFETY: inside of the array, whose tiles name groups of the other one, as `new` asks.
        let item = unsafe {
            let tile = *(self.tiles as *const T).add(self.next as usize);
            (tile, *(self.groups as *const G).add(tile.group() as usize))
        };
        self.next += self.stride;
        Some(item)
    }
}
