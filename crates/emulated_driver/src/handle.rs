//! Handles.

/// A handle as a program sees it: a number that is looked up and never dereferenced.
pub type Handle = usize;

/// Lower bound of the handles of created objects. Lower handles have special meanings.
pub const FIRST_HANDLE: Handle = 0x1_0000;
