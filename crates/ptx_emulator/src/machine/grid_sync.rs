//! What threads of a grid have published at addresses of global memory (PTX ISA, "Memory Consistency Model: Release and
//! Acquire Patterns"). A strong store begins anew what a strong load of the address observes; a read-modify-write adds to
//! it. Publisher and observer must be in each other's scope.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::beyond::{self, Beyond};
use super::scope::{Origin, Scope};

/// The most clusters that are remembered for an address to have published nothing. That is for the report alone.
const SILENT: usize = 4;

/// What was published at an address.
#[derive(Default)]
struct Location {
    /// By scope, and by publisher unless the scope is the whole GPU.
    published: Vec<(Scope, Origin, Option<Arc<Beyond>>)>,
    /// The clusters whose strong writes published nothing.
    silent: [Option<u32>; SILENT],
}

/// What a strong read observes.
#[derive(Default)]
pub struct Observed {
    /// What was published for the reader.
    pub known: Option<Arc<Beyond>>,
    /// The clusters whose writes published nothing.
    pub silent: [Option<u32>; SILENT],
}

/// The addresses of a launch at which something was published.
#[derive(Default)]
pub struct GridSync(Mutex<HashMap<u64, Location>>);

impl GridSync {
    /// A strong write publishes this, each with its scope. `adds`: it is a read-modify-write.
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

    /// What a strong read with a scope observes.
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
