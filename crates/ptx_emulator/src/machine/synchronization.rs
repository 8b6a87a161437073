//! What threads have published through memory and fences (PTX ISA, "Memory Consistency Model: Release and Acquire
//! Patterns"). Only the race detector needs it.

use std::collections::HashMap;
use std::sync::Arc;

use super::beyond::Beyond;
use super::race::Shared;
use super::scope::Scope;

/// What was published through memory and fences.
#[derive(Default)]
pub struct Synchronization {
    /// By generic address in shared memory.
    pub locations: HashMap<u64, Shared>,
    /// By warp: what its last fence published.
    pub fenced: HashMap<u32, Shared>,
    /// By warp: what its strong loads saw since its last fence.
    pub observed: HashMap<u32, Shared>,
    /// By warp: what its last fences published for strong stores to global memory, by scope.
    pub fenced_global: HashMap<u32, Vec<(Scope, Arc<Beyond>)>>,
    /// By warp: what its strong loads of global memory saw since its last fence.
    pub observed_global: HashMap<u32, Beyond>,
}
