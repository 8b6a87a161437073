//! Parse errors.

/// An error in PTX text, with its line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct ParseError {
    /// Line of the PTX file, from 1.
    pub line: u32,
    /// The error, and what is expected instead.
    pub message: String,
}

impl ParseError {
    pub(crate) fn new(line: u32, message: impl Into<String>) -> Self {
        ParseError { line, message: message.into() }
    }
}
