//! The command's exit codes other than 0. 0 says that nothing is wrong.

/// A wrong result, or a kernel that the emulator stopped.
pub const WRONG: u8 = 1;
/// Bad input or usage.
pub const BAD_INPUT: u8 = 2;
/// No device of the kind asked for.
pub const NO_DEVICE: u8 = 3;
