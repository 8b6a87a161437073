//! When a CTA asked for copies, counted in matrix operations.

use rustc_hash::FxHashMap;

/// Matrix operations of a CTA, and when it requested the copies that signal its mbarriers.
#[derive(Debug, Default)]
pub struct Requests {
    /// Matrix operations that its tensor core was given.
    pub matrix_operations: u64,
    /// For each mbarrier, by offset: the count above when the last copy for it was requested. A warp that waits takes
    /// it out.
    pub at: FxHashMap<u32, u64>,
}
