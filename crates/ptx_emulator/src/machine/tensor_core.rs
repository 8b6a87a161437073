//! The order of `tcgen05.mma`, `cp` and `shift` in the tensor core.

use super::race::Shared;

/// What the tensor core knows of the operations that one CTA pair issued to it.
#[derive(Clone, Default)]
pub struct Pipe {
    /// The last operation, by kind: `mma`, `cp` and `shift`.
    pub last: [Option<u64>; 3],
    /// What those before have done.
    pub known: [Shared; 3],
}
