//! Exit codes of the command other than 0, which means success.

/// A wrong result, or a kernel that the emulator stopped.
pub const WRONG: u8 = 1;
/// Bad input or usage.
pub const BAD_INPUT: u8 = 2;
/// The requested kind of device does not exist.
pub const NO_DEVICE: u8 = 3;
