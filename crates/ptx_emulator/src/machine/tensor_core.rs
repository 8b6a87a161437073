//! The order of `tcgen05.mma`, `cp` and `shift` in the tensor core.

use super::race::Shared;

/// Operations that take their turns in the tensor core.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Mma,
    Cp,
    Shift,
}

impl Kind {
    /// All of them.
    pub const ALL: &[Kind] = &[Kind::Mma, Kind::Cp, Kind::Shift];
}

/// What the tensor core knows of the operations of one kind that one CTA pair issued to it.
#[derive(Clone, Default)]
pub struct Pipe {
    /// The last one.
    pub last: Option<u64>,
    /// What all before have done.
    pub known: Shared,
}

/// The operations that one CTA pair issued, by [`Kind`].
pub type Pipes = [Pipe; Kind::ALL.len()];
