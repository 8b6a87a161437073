//! How a block finds its work: which of several things that follow each other it belongs to.

/// Of `count` things that begin at ascending numbers, the first at 0, the last that has begun at `number`.
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
