//! Why an instruction cannot be decoded.

/// Why an instruction cannot be decoded.
#[derive(Debug)]
pub struct DecodeError {
    pub message: String,
    /// The emulator falls short: executing the instruction is the error, not its being there.
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
