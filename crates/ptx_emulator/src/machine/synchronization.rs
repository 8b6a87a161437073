//! Knowledge that threads have published through memory and fences (PTX ISA, "Memory Consistency Model: Release and
//! Acquire Patterns"). Only the race detector uses it.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::beyond::Beyond;
use super::race::Shared;
use super::scope::Scope;

/// Knowledge published through memory and fences.
#[derive(Default)]
pub struct Synchronization {
    /// Published knowledge, by generic address in shared memory.
    pub locations: FxHashMap<u64, Shared>,
    /// Knowledge that each warp's last fence published.
    pub fenced: FxHashMap<u32, Shared>,
    /// The same for fences of at least the cluster's scope.
    pub fenced_cluster: FxHashMap<u32, Shared>,
    /// Knowledge that each warp's strong loads observed since its last fence.
    pub observed: FxHashMap<u32, Shared>,
    /// Knowledge that each warp's last fences published for strong stores to global memory, by scope.
    pub fenced_global: FxHashMap<u32, Vec<(Scope, Arc<Beyond>)>>,
    /// Knowledge that each warp's strong loads of global memory observed since its last fence.
    pub observed_global: FxHashMap<u32, Beyond>,
}
