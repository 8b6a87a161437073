//! Order that threads establish through memory by strong accesses and fences (PTX ISA, "Memory Consistency Model:
//! Release and Acquire Patterns"). Only the race detector uses this file; without a race detector, its functions do
//! nothing.

use crate::machine::address::{space_of, window};
use crate::machine::race::merge;
use crate::machine::scope::Scope;
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::lanes;
use crate::types::Space;

fn key(space: Space, address: u64) -> u64 {
    match space {
        Space::Shared | Space::SharedCluster => address + window(Space::Shared).unwrap_or(0),
        _ => address,
    }
}

fn in_global(space: Space, address: u64) -> bool {
    match space {
        Space::Generic => space_of(address) == Space::Global,
        other => other == Space::Global,
    }
}

impl Machine<'_> {
    /// Lets strong loads or read-modify-writes (`draws`) observe the last strong writes to these addresses.
    pub fn observe(&mut self, w: &Warp, mask: u32, addresses: &[u64; 32], space: Space, acquire: bool, draws: bool) {
        if in_global(space, addresses[mask.trailing_zeros() as usize]) {
            return self.observe_global(w, mask, addresses, acquire, draws);
        }
        let Some(race) = &mut self.race else { return };
        for lane in lanes(mask) {
            let Some(published) = self.sync.locations.get(&key(space, addresses[lane])) else {
                continue;
            };
            if acquire {
                race.acquire(w.index, 1 << lane, published);
            } else if let Some(published) = published {
                merge(self.sync.observed.entry(w.index).or_default(), published);
            }
        }
    }

    /// Publishes by strong stores or read-modify-writes (`adds`) of these addresses.
    pub fn publish(&mut self, w: &Warp, mask: u32, addresses: &[u64; 32], space: Space, release: bool, adds: bool) {
        if in_global(space, addresses[mask.trailing_zeros() as usize]) {
            return self.publish_global(w, mask, addresses, release, adds);
        }
        let Some(race) = &mut self.race else { return };
        for lane in lanes(mask) {
            let location = self.sync.locations.entry(key(space, addresses[lane])).or_default();
            if release {
                race.release(w.index, 1 << lane, location);
            } else if let Some(Some(fenced)) = self.sync.fenced.get(&w.index) {
                merge(location, fenced);
            }
        }
    }

    /// Executes a memory fence.
    pub fn fence(&mut self, w: &Warp, mask: u32, scope: Scope) {
        self.fence_global(w, mask, scope);
        let Some(race) = &mut self.race else { return };
        if let Some(observed) = self.sync.observed.remove(&w.index) {
            race.acquire(w.index, mask, &observed);
        }
        race.release(w.index, mask, self.sync.fenced.entry(w.index).or_default());
    }
}
