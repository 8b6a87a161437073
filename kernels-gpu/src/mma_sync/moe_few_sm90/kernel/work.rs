//! A warp's work: strips of the named experts' matrices.

use cuda_std::global::GlobalAddress;

use super::lists::Lists;

/// A warp's pieces of work, by index. A piece is one strip of a named expert's matrices.
pub(super) trait Work {
    /// Index of the warp's first piece.
    fn first(&self) -> u32;
    /// Distance between the indices of a warp's pieces.
    fn step(&self) -> u32;
    /// End of the indices.
    fn end(&self) -> u32;
    /// Index of a piece's expert among the named experts, and the piece's strip.
    fn piece(&self, index: u32) -> (u32, u32);
    /// Address of the token that an expert is multiplied with, if there is a single token.
    ///
    /// # Safety
    /// The lists are made and name the expert.
    unsafe fn token(&self, lists: Lists, named: u32) -> GlobalAddress;
}
