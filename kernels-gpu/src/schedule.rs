//! Which group a tile belongs to: how every kernel finds its work.

use crate::abi::{Group, Launch};

/// The group that a tile belongs to: the last whose first tile is not behind it. Groups without rows have no
/// tiles and are passed over.
///
/// # Safety
/// `launch` is as its fields say; the groups have more tiles than `tile`.
#[inline(always)]
pub unsafe fn find_group<'a>(launch: Launch, tile: u32) -> &'a Group {
    let groups = launch.groups as *const Group;
    // SAFETY: indices below group_count.
    unsafe {
        &*groups.add(last_begun(launch.group_count, tile, |index| (*groups.add(index as usize)).first_tile) as usize)
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_finds_its_group_past_empty_ones() {
        let group = |m, first_tile| Group {
            a: 0,
            a_scales: 0,
            b: [0; 2],
            b_scales: [0; 2],
            c: 0,
            alpha: [1.0; 2],
            m,
            n: 8,
            k: 16,
            first_tile,
        };
        let groups = [group(0, 0), group(100, 0), group(0, 2), group(0, 2), group(64, 2), group(1, 3), group(0, 4)];
        let launch = Launch { groups: groups.as_ptr() as u64, group_count: groups.len() as u32, output: 0 };
        // SAFETY: an array of as many groups.
        let found = [0, 1, 2, 3].map(|tile| unsafe { find_group(launch, tile) }.m);
        assert_eq!(found, [100, 100, 64, 1]);
    }
}
