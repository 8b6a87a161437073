//! Plain loads and stores of all lanes at once, for the common case: one allocation of global memory, or local memory,
//! within bounds and aligned. [`Machine::load`] and [`Machine::store`] handle the other cases lane by lane, and report
//! faults.

use crate::machine::address::{LOCAL_BASE, LOCAL_WINDOW, Lane, Spot, space_at};
use crate::machine::footprint::{Kind, Object};
use crate::machine::global::Allocation;
use crate::machine::race::{Accessor, Mode};
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::{Row, SPREAD, lanes, lanes_down};
use crate::types::Space;

/// Memory that holds the bytes of all lanes.
#[derive(Clone, Copy)]
pub enum Place<'a> {
    Global(&'a Allocation),
    /// Local memory, with the address of its first byte.
    Local(u64),
}

/// Lowest address, highest address, and bitwise OR of all addresses of the lanes.
fn extent(mask: u32, addresses: &Row) -> (u64, u64, u64) {
    lanes(mask).fold((u64::MAX, 0, 0), |(low, high, bits), lane| {
        let address = addresses[lane];
        (low.min(address), high.max(address), bits | address)
    })
}

/// Whether the lanes of `mask` have the same address.
pub fn same_address(mask: u32, addresses: &Row) -> bool {
    let first = addresses[mask.trailing_zeros() as usize % 32];
    let mut differ = 0;
    for (n, byte) in mask.to_le_bytes().into_iter().enumerate() {
        let lanes = addresses[8 * n..][..8].iter().zip(&SPREAD[usize::from(byte)]);
        differ |= lanes.fold(0, |bits, (address, chosen)| bits | (address ^ first) & chosen);
    }
    differ == 0
}

/// Calls `each` with the byte ranges that the lanes access. Lanes with adjacent or equal bytes share a range.
fn ranges(mask: u32, addresses: &Row, len: u64, mut each: impl FnMut(u64, u64)) {
    let mut open: Option<(u64, u64)> = None;
    for lane in lanes(mask) {
        let address = addresses[lane];
        match &mut open {
            Some((_, end)) if address == *end => *end += len,
            Some((start, end)) if *start <= address && address + len <= *end => {}
            _ => {
                if let Some((start, end)) = open.replace((address, address + len)) {
                    each(start, end - start);
                }
            }
        }
    }
    if let Some((start, end)) = open {
        each(start, end - start);
    }
}

impl<'a> Machine<'a> {
    /// Memory of plain accesses of `len` bytes, if all of them can be made at once.
    pub fn place_of_row(&self, w: &Warp, mask: u32, addresses: &Row, space: Space, len: u64) -> Option<Place<'a>> {
        let first = addresses[mask.trailing_zeros() as usize % 32];
        let (low, high, bits) = extent(mask, addresses);
        let inside = |begin: u64, end: u64| low >= begin && high <= end.saturating_sub(len);
        if !bits.is_multiple_of(len) {
            return None;
        }
        match space_at(space, first) {
            Space::Global | Space::Const => {
                // Races with grids that may still run are checked lane by lane.
                let (allocation, _) = self.global.locate(first, len).filter(|_| self.global.earlier.is_empty())?;
                let end = allocation.base() + allocation.len();
                inside(allocation.base(), end).then_some(Place::Global(allocation))
            }
            Space::Local if !self.sanitize || w.local_undefined.is_empty() => {
                let base = if space == Space::Generic { LOCAL_WINDOW } else { 0 };
                let end = base + w.local_size() as u64;
                inside(base + u64::from(LOCAL_BASE), end).then_some(Place::Local(base))
            }
            _ => None,
        }
    }

    /// Whether each lane's load from local memory includes a defined byte.
    pub fn row_is_defined(&self, w: &Warp, mask: u32, addresses: &Row, base: u64, len: usize) -> bool {
        !self.sanitize
            || lanes(mask).all(|lane| {
                let at = w.local_at(lane, addresses[lane] - base);
                w.local_defined[at..at + len].iter().any(|defined| *defined)
            })
    }

    /// Records plain loads from shared memory with the race detector, grouping lanes that load the same bytes. Returns
    /// the lanes that were recorded. The other lanes are handled one by one.
    pub fn track_shared_loads(&mut self, w: &Warp, mask: u32, addresses: &Row, space: Space, len: u32) -> u32 {
        let first = mask.trailing_zeros() as usize % 32;
        if self.race.is_none() || !matches!(space_at(space, addresses[first]), Space::Shared | Space::SharedCluster) {
            return 0;
        }
        let at = |lane: usize| Lane { lane: lane as u32, address: addresses[lane], space };
        let Ok(Spot::Shared { cta, offset }) = self.resolve(w, at(first), len) else { return 0 };
        let size = self.ctas[cta as usize].shared.data.len() as u64;
        // Finds most lanes that load the same bytes by comparing with the slot's last address.
        let (mut groups, mut count, mut slots) = ([(0, 0); 32], 0, [0; 32]);
        for lane in lanes(mask) {
            let at = u64::from(offset).wrapping_add(addresses[lane].wrapping_sub(addresses[first]));
            if !addresses[lane].is_multiple_of(len.into()) || at > size - u64::from(len) {
                continue;
            }
            let slot = &mut slots[(at as u32 / len) as usize % 32];
            if *slot < count && groups[*slot].0 == at as u32 {
                groups[*slot].1 |= 1 << lane;
            } else {
                *slot = count;
                groups[count] = (at as u32, 1 << lane);
                count += 1;
            }
        }
        let (base, pc) = (w.index * 32, w.pc());
        let tracked = self.race.as_mut().map_or(0, |race| race.read_groups(cta, base, &groups[..count], len, pc));
        self.reach_by_threads(cta, Accessor { base, mask: tracked }, pc);
        tracked
    }

    /// Counts loads that the lanes `mask` made at once, and records them with the race detector. Only the lanes
    /// `loading` contribute distinct bytes.
    pub fn row_loaded(&mut self, w: &Warp, mask: u32, loading: u32, addresses: &Row, len: u32, place: Place<'a>) {
        let bytes = u64::from(len) * u64::from(mask.count_ones());
        let role = &mut self.roles[w.role as usize].bytes;
        let Place::Global(allocation) = place else {
            role.local_load += bytes;
            return;
        };
        role.global_load += bytes;
        self.buffers[allocation.index].loaded += bytes;
        let base = allocation.base();
        ranges(loading, addresses, len.into(), |start, bytes| {
            allocation.note_read(start - base, bytes);
            self.record(Object::Global, start..start + bytes, Kind::Read);
        });
        if !allocation.constant {
            self.touch_row(loading, addresses, len, Mode::Read, |_, _| {});
        }
    }

    /// Stores values of several lanes at once. `value` fills in a lane's bytes.
    pub fn store_row(
        &mut self,
        w: &mut Warp,
        mask: u32,
        addresses: &Row,
        place: Place<'a>,
        len: usize,
        value: impl Fn(&Warp, usize, &mut [u8]),
    ) {
        let (mut buffer, mut before) = ([0; 64], [0; 64]);
        let data = &mut buffer[..len];
        let bytes = (len * mask.count_ones() as usize) as u64;
        self.progress += 1;
        let mut changed = false;
        match place {
            Place::Global(allocation) => {
                // If several lanes store to the same address, the lowest lane's value remains, as on an H200.
                for lane in lanes_down(mask) {
                    value(w, lane, data);
                    let at = addresses[lane] - allocation.base();
                    if !changed {
                        let before = &mut before[..len];
                        allocation.copy_out(at, before);
                        changed = before != data;
                    }
                    allocation.copy_in(at, data);
                }
                let base = allocation.base();
                let kind = if changed { Kind::Write } else { Kind::Rewrite };
                ranges(mask, addresses, len as u64, |start, bytes| {
                    allocation.note_written(start - base, bytes);
                    self.record(Object::Global, start..start + bytes, kind);
                });
                self.touch_row(mask, addresses, len as u32, Mode::Write, |lane, data| value(w, lane, data));
                self.buffers[allocation.index].stored += bytes;
                self.roles[w.role as usize].bytes.global_store += bytes;
            }
            Place::Local(base) => {
                for lane in lanes(mask) {
                    value(w, lane, data);
                    let at = w.local_at(lane, addresses[lane] - base);
                    changed |= w.local[at..at + len] != *data;
                    w.local[at..at + len].copy_from_slice(data);
                    w.local_defined[at..at + len].fill(true);
                }
                self.roles[w.role as usize].bytes.local_store += bytes;
            }
        }
        self.repeats += u64::from(!changed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_lanes_form_one_range() {
        let row: Row = std::array::from_fn(|lane| if lane < 8 { 64 + 4 * lane as u64 } else { 16 });
        let mut found = Vec::new();
        ranges(0x3ff, &row, 4, |start, bytes| found.push((start, bytes)));
        assert_eq!(found, [(64, 32), (16, 4)]);
        assert_eq!(extent(0x181, &row), (16, 92, 64 | 92 | 16));
        assert!(same_address(0x8000_0300, &row) && !same_address(0x180, &row));
    }
}
