//! Handles.

/// A handle as a program sees it: a number that is looked up, never followed.
pub type Handle = usize;

/// The first handle of an object that was created. Lower ones have a meaning of their own.
pub const FIRST_HANDLE: Handle = 0x1_0000;
