//! Decoding errors.

/// Reason why an instruction cannot be decoded.
#[derive(Debug)]
pub struct DecodeError {
    pub message: String,
    /// `true` if the emulator does not support the instruction. Then only a kernel that executes it fails.
    pub unsupported: bool,
    /// `true` if the instruction faults when a GPU executes it.
    pub faults: bool,
}

impl DecodeError {
    pub fn invalid(message: impl Into<String>) -> DecodeError {
        DecodeError { message: message.into(), unsupported: false, faults: false }
    }

    /// An instruction that a GPU loads, but cannot execute.
    pub fn faults(message: impl Into<String>) -> DecodeError {
        DecodeError { message: message.into(), unsupported: false, faults: true }
    }

    pub fn unsupported(message: impl Into<String>) -> DecodeError {
        DecodeError { message: message.into(), unsupported: true, faults: false }
    }
}

pub type Result<T, E = DecodeError> = std::result::Result<T, E>;
