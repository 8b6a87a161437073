//! Planning: pure functions of a problem's sizes, the same with and without a GPU; and the words in which a way to compute is named.

pub mod roofline;
pub mod tile;
#[cfg(feature = "kernels")]
pub mod variant;
