//! Exit codes.

/// The kernel has a fault.
pub const FAULT: u8 = 1;
/// The input is bad.
pub const BAD_INPUT: u8 = 2;
/// The kernel needs a feature that the emulator does not support.
pub const UNSUPPORTED: u8 = 4;

/// Exit code for a fault.
pub fn of(fault: &ptx_emulator::Fault) -> u8 {
    match fault.kind {
        ptx_emulator::FaultKind::Unsupported => UNSUPPORTED,
        ptx_emulator::FaultKind::BadLaunch => BAD_INPUT,
        _ => FAULT,
    }
}
