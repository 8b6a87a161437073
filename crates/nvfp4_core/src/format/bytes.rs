//! The bytes of a matrix: borrowed, or shared with an owner.

use std::borrow::Cow;
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Bytes that are shared by clones and never copied.
#[derive(Clone)]
pub enum Bytes<'a> {
    /// Bytes that outlive this value.
    Borrowed(&'a [u8]),
    /// A range of the bytes of an owner, such as a vector, a mapped file or another library's tensor.
    Shared(Arc<dyn AsRef<[u8]> + Send + Sync>, Range<usize>),
}

impl Bytes<'_> {
    /// Returns a range of the bytes, with the same owner.
    ///
    /// # Panics
    /// Panics if the range does not lie inside the bytes.
    pub fn slice(&self, range: Range<usize>) -> Self {
        match self {
            Self::Borrowed(bytes) => Self::Borrowed(&bytes[range]),
            Self::Shared(owner, whole) => {
                assert!(range.start <= range.end && range.end <= whole.len(), "the range must lie inside the bytes");
                Self::Shared(owner.clone(), whole.start + range.start..whole.start + range.end)
            }
        }
    }
}

impl Deref for Bytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Shared(owner, range) => &owner.as_ref().as_ref()[range.clone()],
        }
    }
}

impl fmt::Debug for Bytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl PartialEq for Bytes<'_> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<'a> From<&'a [u8]> for Bytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Borrowed(bytes)
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for Bytes<'a> {
    fn from(bytes: &'a [u8; N]) -> Self {
        Self::Borrowed(bytes)
    }
}

impl<'a> From<&'a Vec<u8>> for Bytes<'a> {
    fn from(bytes: &'a Vec<u8>) -> Self {
        Self::Borrowed(bytes)
    }
}

impl From<Vec<u8>> for Bytes<'_> {
    fn from(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self::Shared(Arc::new(bytes), range)
    }
}

impl<'a> From<Cow<'a, [u8]>> for Bytes<'a> {
    fn from(bytes: Cow<'a, [u8]>) -> Self {
        match bytes {
            Cow::Borrowed(bytes) => bytes.into(),
            Cow::Owned(bytes) => bytes.into(),
        }
    }
}
