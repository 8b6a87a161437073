//! What is wrong with PTX text.

/// Text that is not PTX, with its place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct ParseError {
    /// Line of the PTX file, from 1.
    pub line: u32,
    /// What was wrong, and what would be right.
    pub message: String,
}

impl ParseError {
    pub(crate) fn new(line: u32, message: impl Into<String>) -> Self {
        ParseError { line, message: message.into() }
    }
}
