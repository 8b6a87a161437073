//! How a block finds its work.

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
