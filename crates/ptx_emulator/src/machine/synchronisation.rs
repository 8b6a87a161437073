//! What threads have published through memory and fences (PTX ISA, "Memory Consistency Model: Release and Acquire
//! Patterns"). Only the race detector needs it.

use std::collections::HashMap;

use super::race::Shared;

/// What was published through memory and fences.
#[derive(Default)]
pub struct Synchronisation {
    /// By generic address.
    pub locations: HashMap<u64, Shared>,
    /// By warp: what its last fence published.
    pub fenced: HashMap<u32, Shared>,
    /// By warp: what its strong loads saw since its last fence.
    pub observed: HashMap<u32, Shared>,
}
