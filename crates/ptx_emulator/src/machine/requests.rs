//! When a CTA asked for copies, counted in matrix operations.

use std::collections::HashMap;

/// What a CTA's tensor cores were given, and when its mbarriers were to hear of copies.
#[derive(Debug, Default)]
pub struct Requests {
    /// Matrix operations that its tensor core was given.
    pub matrix_operations: u64,
    /// As many as it had at the last copy's request for each mbarrier, by offset, until a warp has waited for it.
    pub at: HashMap<u32, u64>,
}
