//! Knowledge that threads of a grid have published at addresses of global memory (PTX ISA, "Memory Consistency Model:
//! Release and Acquire Patterns"). A strong store replaces the knowledge that a strong load of the address observes; a
//! read-modify-write adds to it. The publisher and the observer must each be in the other's scope.

use std::sync::{Arc, Mutex, PoisonError};

use rustc_hash::FxHashMap;

use super::beyond::{self, Beyond};
use super::scope::{Origin, Scope};

/// Maximum number of clusters per address that are remembered as silent publishers. Only the report uses them.
const SILENT: usize = 4;

/// Knowledge published at an address.
#[derive(Default)]
struct Location {
    /// Entries by scope and, unless the scope is the whole GPU, by publisher.
    published: Vec<(Scope, Origin, Option<Arc<Beyond>>)>,
    /// Clusters whose strong writes published nothing.
    silent: [Option<u32>; SILENT],
}

/// Result of a strong read.
#[derive(Default)]
pub struct Observed {
    /// Knowledge published for the reader.
    pub known: Option<Arc<Beyond>>,
    /// Clusters whose writes published nothing.
    pub silent: [Option<u32>; SILENT],
}

/// Addresses of a launch at which knowledge was published.
#[derive(Default)]
pub struct GridSync(Mutex<FxHashMap<u64, Location>>);

impl GridSync {
    /// Publishes knowledge by a strong write, each entry with its scope. `adds`: the write is a read-modify-write.
    pub fn publish(&self, address: u64, from: Origin, adds: bool, what: &[(Scope, Arc<Beyond>)]) {
        let mut locations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let location = locations.entry(address).or_default();
        if !adds {
            location.published.clear();
            location.silent = [None; SILENT];
        }
        let cluster = Some(from.cluster);
        if what.is_empty()
            && let Some(free) = location.silent.iter_mut().find(|silent| silent.is_none() || **silent == cluster)
        {
            *free = cluster;
        }
        for (scope, what) in what {
            let same = |other: &(Scope, Origin, _)| other.0 == *scope && (*scope == Scope::Gpu || other.1 == from);
            let what = Some(what.clone());
            match location.published.iter_mut().find(|other| same(other)) {
                Some((.., published)) => beyond::merge(published, &what),
                None => location.published.push((*scope, from, what)),
            }
        }
    }

    /// Returns the knowledge that a strong read with this scope observes.
    pub fn observe(&self, address: u64, by: Origin, scope: Scope) -> Observed {
        let locations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut observed = Observed::default();
        let Some(location) = locations.get(&address) else { return observed };
        for (published, from, what) in &location.published {
            if by.shares(*from, scope.min(*published)) {
                beyond::merge(&mut observed.known, what);
            }
        }
        observed.silent = location.silent;
        observed
    }
}
