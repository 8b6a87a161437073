//! Knowledge that threads have published through memory and fences (PTX ISA, "Memory Consistency Model: Release and
//! Acquire Patterns"). Only the race detector uses it.

use std::collections::HashMap;
use std::sync::Arc;

use super::beyond::Beyond;
use super::race::Shared;
use super::scope::Scope;

/// Knowledge published through memory and fences.
#[derive(Default)]
pub struct Synchronization {
    /// Published knowledge, by generic address in shared memory.
    pub locations: HashMap<u64, Shared>,
    /// Knowledge that each warp's last fence published.
    pub fenced: HashMap<u32, Shared>,
    /// The same for fences of at least the cluster's scope.
    pub fenced_cluster: HashMap<u32, Shared>,
    /// Knowledge that each warp's strong loads observed since its last fence.
    pub observed: HashMap<u32, Shared>,
    /// Knowledge that each warp's last fences published for strong stores to global memory, by scope.
    pub fenced_global: HashMap<u32, Vec<(Scope, Arc<Beyond>)>>,
    /// Knowledge that each warp's strong loads of global memory observed since its last fence.
    pub observed_global: HashMap<u32, Beyond>,
}
