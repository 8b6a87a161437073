//! The error of decoding.

/// Why an instruction cannot be decoded.
#[derive(Debug)]
pub struct DecodeError {
    pub message: String,
    /// The emulator does not support it. Then only a kernel that executes the instruction fails.
    pub unsupported: bool,
}

impl DecodeError {
    pub fn invalid(message: impl Into<String>) -> DecodeError {
        DecodeError { message: message.into(), unsupported: false }
    }

    pub fn unsupported(message: impl Into<String>) -> DecodeError {
        DecodeError { message: message.into(), unsupported: true }
    }
}

pub type Result<T, E = DecodeError> = std::result::Result<T, E>;
