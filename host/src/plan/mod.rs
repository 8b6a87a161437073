//! Planning: pure functions of a problem's sizes, independent of a GPU; and the words that describe how a step is
//! computed.

pub mod roofline;
pub mod tile;
#[cfg(feature = "kernels")]
pub mod variant;
