//! The order of `tcgen05.mma`, `cp` and `shift` in the tensor core.

use super::race::Shared;

/// Kinds of operations that the tensor core executes in order.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Mma,
    Cp,
    Shift,
}

impl Kind {
    /// Every kind.
    pub const ALL: &[Kind] = &[Kind::Mma, Kind::Cp, Kind::Shift];
}

/// State of the operations of one kind that one CTA pair issued.
#[derive(Clone, Default)]
pub struct Pipe {
    /// Number of the last operation.
    pub last: Option<u64>,
    /// Knowledge from all operations before the last one.
    pub known: Shared,
}

/// State of the operations that one CTA pair issued, by [`Kind`].
pub type Pipes = [Pipe; Kind::ALL.len()];
